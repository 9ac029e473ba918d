"""Calls that type checkers accept, with the types that they infer. test_typed_calls.py also runs this file."""

from typing import Any, assert_type

from scorer import Batch, Loader, Quieter, Scorer

from single_controller import (
    Broadcast,
    ClassWithInitArgs,
    LocalWorkerGroup,
    RayClassWithInitArgs,
    RayWorkerGroup,
    WorkerFuture,
    WorkerGroup,
)
from single_controller.call.worker.worker_class import colocate
from workers import HFEngine, RayTrainGroup, RolloutManager, RolloutWorker, SamplingParams, TrainArgs, read_args


def calls(group: WorkerGroup, batch: Batch) -> None:
    assert_type(group.on(Scorer.add)(1), list[float])
    assert_type(group.on(Scorer.add)(x=1, y="z"), list[float])
    assert_type(group.on(Scorer.load)(), list[None])
    assert_type(group.on(Scorer.score)(batch, scale=0.5), Batch)
    assert_type(group.on(Scorer.offset)(batch, Broadcast([1]).as_argument()), Batch)
    assert_type(group.on(Scorer.loss)(batch), list[float])
    assert_type(group.on(Scorer.item)([1, 2]), list[str])  # a list of one int per rank: arguments are not checked
    assert_type(group.on(Scorer.world)(), int)
    assert_type(group.on(Scorer.first)(1), int)
    assert_type(group.on(Scorer.ping)(1), list[str])
    assert_type(group.add(1), Any)
    assert_type(list(group.map(group.on(Scorer.score), [batch], in_flight=3, retries=1)), list[Batch])
    assert_type(list(group.map("score", [batch], ordered=False)), list[Any])


def by_mesh(group: WorkerGroup, batch: Batch) -> None:
    assert_type(group.on(Scorer.by_mesh)(batch), Batch)


def futures(group: WorkerGroup, batch: Batch) -> None:
    future = group.on(Scorer.add).remote(1)
    assert_type(future, WorkerFuture[list[float]])
    assert_type(future.result(), list[float])
    assert_type(future.get(timeout=10), list[float])
    assert_type(group.on(Scorer.first_later)(1).result(), int)
    scored = group.on(Scorer.generate)(batch)
    assert_type(scored, WorkerFuture[Batch])
    assert_type(group.on(Scorer.score)(scored.as_argument()), Batch)


async def of_training(train: RayTrainGroup, manager: RolloutManager) -> None:
    assert_type(train.async_init().result(), list[int])
    assert_type(await train.async_train(0, manager.generate_async([[1]])), list[dict[str, float]])


async def awaited(group: WorkerGroup, batch: Batch) -> None:
    assert_type(await group.on(Scorer.add).remote(1), list[float])
    assert_type(await group.on(Scorer.generate)(batch), Batch)


def options(group: WorkerGroup, batch: Batch) -> None:
    add = group.on(Scorer.add)
    assert_type(add.options(timeout=60)(1), list[float])
    assert_type(add.options(timeout=60).remote(1).result(), list[float])
    assert_type(add.options(blocking=False)(1), WorkerFuture[list[float]])
    assert_type(group.on(Scorer.generate).options(blocking=True, uneven="pad")(batch), Batch)
    assert_type(group.on(Scorer.generate).options(uneven="pad")(batch).result(), Batch)


def modes_that_are_not_known(group: WorkerGroup) -> None:
    assert_type(group.on(Scorer.by_name)(1), Any)
    assert_type(group.on(Scorer.custom)(1), Any)


def methods_on_a_worker(worker: Scorer, batch: Batch) -> None:
    assert_type(worker.add(1), float)
    assert_type(worker.add(x=1, y="z"), float)
    assert_type(worker.item(1), str)
    assert_type(worker.generate(batch), Batch)
    assert_type(worker.by_name(1), float)
    assert_type(worker.custom(1), float)


async def coroutine_on_a_worker(worker: Scorer) -> None:
    assert_type(await worker.ping(1), str)


def subclass(group: WorkerGroup, batch: Batch) -> None:
    assert_type(Quieter().add(1), float)
    assert_type(group.on(Scorer.add)(1), list[float])  # Quieter.add is an override without @register
    assert_type(group.on(Quieter.score)(batch), Batch)
    assert_type(group.on(Quieter.loss)(batch), list[float])


def roles(group: WorkerGroup) -> None:
    role: WorkerGroup = group.scorer
    assert_type(role.on(Scorer.add)(1), list[float])
    assert_type(group.spawn()["scorer"].on(Scorer.add)(1), list[float])


def on_ray(group: RayWorkerGroup) -> None:
    assert_type(group.on(Scorer.add)(1), list[float])


def constructors(given: Any, other: type[Scorer]) -> None:
    RayClassWithInitArgs(Loader, "folder", steps=3)
    RayClassWithInitArgs(Loader)  # without arguments, it says of which class running workers are
    RayClassWithInitArgs(Loader, "folder", python=".venv/bin/python")
    RayClassWithInitArgs(RolloutWorker, HFEngine, "folder", seed=1)
    RayClassWithInitArgs(other)
    RayClassWithInitArgs(given)


def settings() -> None:
    args = read_args({"lr": 0.5})
    assert_type(args, TrainArgs)
    assert_type(args.lr, float)
    assert_type(args.save, str | None)
    assert_type(SamplingParams.from_args(args), SamplingParams)
    assert_type(SamplingParams().temperature, float)


def main() -> None:
    import asyncio

    settings()
    constructors(Scorer, Scorer)
    batch = {"x": [1, 2, 3, 4]}
    with LocalWorkerGroup(2, ClassWithInitArgs(Scorer)) as group:
        calls(group, batch)
        futures(group, batch)
        asyncio.run(awaited(group, batch))
        options(group, batch)
        modes_that_are_not_known(group)
    with LocalWorkerGroup(2, ClassWithInitArgs(Quieter)) as group:
        assert group.on(Scorer.add)(4) == group.add(4) == [2.0, 2.0]
        subclass(group, batch)
    with LocalWorkerGroup(2, colocate({"scorer": ClassWithInitArgs(Scorer)})) as group:
        roles(group)


if __name__ == "__main__":
    main()
