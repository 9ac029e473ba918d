"""RayTrainGroup as a user sees it: worker class, placement, environment, lifecycle, and failures.

The workers of `plain_train_workers` have no model. Expected values come from what Ray reports in the worker's process,
and from Ray's table of placement groups.
"""

import argparse
import asyncio
import os
import pickle
import subprocess
import sys
import textwrap
import time
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
import ray
import torch
from devices import ON_DEVICE, need
from plain_train_workers import (
    Choosy,
    Counting,
    DiskFull,
    ExportFails,
    FailingUpdate,
    Incomplete,
    Manager,
    Meeting,
    Minimal,
    Plain,
)
from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group
from waits import wait_until

from single_controller import (
    DispatchError,
    GroupBrokenError,
    GroupClosedError,
    PlacementError,
    RayResourcePool,
    Worker,
    WorkerDiedError,
    WorkerError,
    WorkerFuture,
)
from single_controller.call.future import ComputedFuture
from single_controller.ray.rank.devices import before_start
from workers.train.args import TrainArgsError, read_args
from workers.train.checkpoints import CheckpointError
from workers.train.group_links import RolloutLink, SharedRollout
from workers.train.train_group import RayTrainGroup
from workers.train.train_placement import NOSET, place, train_environment
from workers.train.train_worker import worker_class
from workers.weight_sync import WeightSyncError

ROWS = {"x": np.arange(5)}


def group_of(args=None, ranks=2, pg=None, share=0.1, **options):
    return RayTrainGroup(args or {}, 1, ranks, pg, share, **{"actor_cls": Plain, **options})


@contextmanager
def begun(*args, manager=None, **options):
    """A group of initialized workers, with this rollout manager."""
    with group_of(*args, **options) as group:
        ray.get(group.async_init())
        if manager is not None:
            group.set_rollout_manager(manager)
        yield group


def kill(group, rank):
    """Kill a rank. Ray tells its process some time after ``ray.kill`` has returned: until then it answers."""
    ray.kill(group.worker_group.workers[rank])
    wait_until(lambda: not group.worker_group.alive()[rank])


@pytest.fixture(scope="module")
def slots(ray_cluster):
    need(3)
    with RayResourcePool([3], use_gpu=ON_DEVICE) as pool:
        yield pool


@pytest.fixture(scope="module")
def actor(slots):
    with begun(pg=slots[:2]) as group:
        yield group


@pytest.fixture
def bundles(ray_cluster):
    pg = placement_group([{"CPU": 0.5}] * 4)
    assert pg.wait(30)
    yield pg
    remove_placement_group(pg)


# --- worker class ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cls", "message"),
    [
        (
            Incomplete,
            "does not implement clear_memory, get_parallel_config, save_model, sleep, update_weights, wake_up",
        ),
        (Worker, "actor_cls must be a subclass of TrainWorker"),
        (Plain.init, "actor_cls must be a subclass of TrainWorker"),
    ],
)
def test_class_must_be_a_train_worker(ray_cluster, cls, message):
    with pytest.raises(TypeError, match=message):
        group_of(actor_cls=cls)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: group_of({"clip_gradd": 1}), TrainArgsError, "did you mean 'clip_grad'"),
        (lambda: group_of(ranks=0), ValueError, "num_gpus_per_node=0: expected an integer of at least 1"),
        (
            lambda: RayTrainGroup({}, 1.5, 1, actor_cls=Plain),
            ValueError,
            "num_nodes=1.5: expected an integer of at least 1",
        ),
        (lambda: group_of(share=1.5), ValueError, "num_gpus_per_actor=1.5: expected a share"),
        (lambda: group_of(role="judge"), ValueError, "role='judge': expected one of 'actor', 'critic'"),
        (lambda: group_of(ranks=40), PlacementError, r"missing: 24 CPU \(asked 40, there are 16\)"),
        (lambda: group_of(resources={"barge": 1}), PlacementError, "barge"),
    ],
)
def test_invalid_arguments_are_rejected(ray_cluster, make, error, message):
    with pytest.raises(error, match=message):
        make()


def test_backend_selects_the_worker_class():
    assert [worker_class(name).__name__ for name in ("fsdp", "megatron")] == ["FSDPTrainWorker", "MegatronTrainWorker"]


# --- placement ---------------------------------------------------------------------------------------------------


def where(group):
    return group.worker_group.where()


def test_own_placement_group_is_created_and_removed(ray_cluster):
    group = group_of(share=0.5, resources={"crate": 1}, num_resources_per_node=3)
    found = where(group)
    (table,) = [t for t in placement_group_table().values() if t["placement_group_id"] == found[0]["group"]]
    assert list(table["bundles"].values()) == [{"CPU": 1.0, "crate": 1.5}] * 2
    assert [w["assigned"] for w in found] == [{"CPU": 0.5, "crate": 1.0}] * 2
    group.close()
    assert placement_group_table()[found[0]["group"]]["state"] == "REMOVED"
    with pytest.raises(GroupClosedError, match="create a new group"):
        group.async_init()
    with pytest.raises(GroupClosedError, match="create a new group"):
        group.create()


def test_pool_provides_its_first_slots_and_stays_open(slots):
    with group_of(pg=slots, share=0.4) as one, group_of(pg=slots, share=0.4, role="critic") as two:
        assert one.world_size == 2
        assert [w["bundle"] for w in where(one)] == [w["bundle"] for w in where(two)]
        assert [w["assigned"]["CPU"] for w in where(one) + where(two)] == [0.4] * 4
    with group_of(pg=slots, ranks=3) as group:
        assert [s["rank"] for s in group.worker_group.said()] == [0, 1, 2]
        with pytest.raises(TrainArgsError, match="has 3 slots for 4 ranks"):
            group_of(pg=slots, ranks=4)


def test_rank_i_is_in_the_ith_bundle(bundles):
    order = [2, 0, 3, 1]
    with group_of(pg=(bundles, order), share=1) as group:
        assert [w["bundle"] for w in where(group)] == [2, 0]
        assert {w["group"] for w in where(group)} == {bundles.id.hex()}
        assert [w["assigned"]["CPU"] for w in where(group)] == [0.5, 0.5], "each rank gets its share of a slot"
    with group_of(pg=(bundles, order, [7, 5, 3, 1]), ranks=4) as group:
        assert [w["bundle"] for w in where(group)] == order
    with group_of(pg=bundles) as group:
        assert len(where(group)) == 2
    with pytest.raises(TrainArgsError, match="3 bundle indices for 4 ranks"):
        group_of(pg=(bundles, order[:3]), ranks=4)
    with pytest.raises(TrainArgsError, match="4 slots for 5 ranks"):
        group_of(pg=bundles, ranks=5)
    assert placement_group_table(bundles)["state"] == "CREATED", "an external placement group must not be removed"


def test_fractional_shares_that_do_not_add_up_exactly_fit(bundles):
    groups = [group_of(ranks=1, pg=(bundles, [0]), share=1 / 3) for _ in range(3)]
    assert [where(group)[0]["assigned"]["CPU"] for group in groups] == [0.1666] * 3
    for group in groups:
        group.close()


def test_place_with_separate_and_colocated_roles(ray_cluster):
    args = {"actor_num_gpus_per_node": 2, "rollout_num_workers": 3}
    with place(args) as side:
        assert (side.whole.world_size, side.critic, side.share) == (5, None, 1.0)
        with group_of(pg=side.actor, share=side.share) as actor, group_of(ranks=3, pg=side.rollout) as rollout:
            assert [w["bundle"] for w in where(actor) + where(rollout)] == [s.bundle for s in side.whole.slots()]
    with place({**args, "advantage_estimator": "gae", "critic_num_nodes": 2, "critic_num_gpus_per_node": 1}) as side:
        assert [side.actor.world_size, side.critic.world_size, side.rollout.world_size] == [2, 2, 3]
        assert side.whole.world_size == 7
    with pytest.raises(GroupClosedError, match="closed"):
        group_of(pg=side.actor)
    with place({**args, "advantage_estimator": "gae", "colocate": True}) as shared:
        assert (shared.whole.world_size, shared.share) == (3, 1 / 3)
        pools = (shared.actor, shared.critic, shared.rollout)
        groups = [group_of(ranks=pool.world_size, pg=pool, share=shared.share) for pool in pools]
        found = [[w["bundle"] for w in where(group)] for group in groups]
        assert found[0] == found[1] == found[2][:2]
    for group in groups:
        with pytest.raises(GroupClosedError):
            where(group)
    with (
        pytest.raises(PlacementError, match=r"(?s)node.*missing: 44 CPU \(asked 60, there are 16\)"),
        place({"actor_num_gpus_per_node": 59}) as side,
    ):
        group_of(ranks=59, pg=side.actor)


# --- environment and arguments -----------------------------------------------------------------------------------


def test_worker_environment(slots, monkeypatch):
    monkeypatch.delenv("NCCL_CUMEM_ENABLE", raising=False)
    args = {"train_env_vars": {"MINE": "1", "NVTE_FP8_BLOCK_SCALING_FP32_SCALES": "0"}}
    names = (
        "NCCL_CUMEM_ENABLE",
        "NVTE_FP8_BLOCK_SCALING_FP32_SCALES",
        "MINE",
        "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES",
    )
    with group_of(args, 1, slots) as group:
        found = group.worker_group.variables(*names)[0]
        assert [found[name][0] for name in names] == ["0", "0", "1", "1"]


def test_environment_by_role_and_machine(monkeypatch, tmp_path):
    monkeypatch.setenv("NCCL_CUMEM_ENABLE", "1")
    plain = train_environment(read_args({"offload_train": True, "train_backend": "megatron"}), use_gpu=False)
    assert plain["NCCL_CUMEM_ENABLE"] == plain["NVTE_FP8_BLOCK_SCALING_FP32_SCALES"] == "1"
    assert {name for name in plain if "NOSET" in name} == set(NOSET)
    assert not any(before_start(*variable) for variable in plain.items())

    package = tmp_path / "torch_memory_saver"
    package.mkdir()
    (package / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    megatron = {"offload_train": True, "train_backend": "megatron"}
    with pytest.raises(TrainArgsError, match="without its preload library"):
        train_environment(read_args(megatron), use_gpu=True)
    monkeypatch.setattr("torch.version.cuda", "13.0")
    (tmp_path / "torch_memory_saver_hook_mode_preload_cu12.abi3.so").touch()
    with pytest.raises(TrainArgsError, match="preload library for CUDA 13"):
        train_environment(read_args(megatron), use_gpu=True)
    library = tmp_path / "torch_memory_saver_hook_mode_preload.abi3.so"
    library.touch()
    assert train_environment(read_args(megatron), use_gpu=True)["LD_PRELOAD"] == str(library)
    library = tmp_path / "torch_memory_saver_hook_mode_preload_cu13.abi3.so"
    library.touch()
    found = train_environment(read_args(megatron), use_gpu=True)
    early = {"LD_PRELOAD": str(library), "TMS_INIT_ENABLE": "1", "TMS_INIT_ENABLE_CPU_BACKUP": "1"}
    assert {name: value for name, value in found.items() if before_start(name, value)} == early
    for args in (
        {"offload_train": True},
        {"train_backend": "megatron"},
        {**megatron, "update_weights_transport": "device"},  # another process cannot open such memory
    ):
        assert "LD_PRELOAD" not in train_environment(read_args(args), use_gpu=True)
    given = train_environment(read_args({**megatron, "train_env_vars": {"LD_PRELOAD": "m"}}), use_gpu=True)
    assert given["LD_PRELOAD"] == "m"


@pytest.mark.full("train groups on logical GPUs, in their own Ray cluster")
def test_logical_gpus_shares_and_initial_environment():
    """In a separate Ray cluster started with logical GPUs."""
    code = """
        import ray
        from plain_train_workers import Plain
        from workers.train.train_group import RayTrainGroup
        from workers.train.train_placement import place
        ray.init("local", num_cpus=8, num_gpus=4, include_dashboard=False, log_to_driver=False)
        args = {"train_env_vars": {"LD_PRELOAD": "libm.so.6", "LATER": "1"}}
        with RayTrainGroup(args, 1, 2, None, 0.4, actor_cls=Plain) as one:
            with RayTrainGroup({}, 1, 2, one.pool, 0.4, actor_cls=Plain, role="critic") as two:
                for group in (one, two):
                    found = group.worker_group.where()
                    print(">", [w["gpus"] for w in found], [list(w["devices"]) for w in found],
                          [w["assigned"]["GPU"] for w in found])
            noset = "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"
            print(">", one.worker_group.variables("LD_PRELOAD", noset, "LATER", "CUDA_VISIBLE_DEVICES")[1])
        with place({"rollout_num_workers": 2}) as side:
            print(">", side.whole.use_gpu, side.whole.bundle)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=100,
        env={**os.environ, "RAY_ADDRESS": "local"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert [line for line in done.stdout.splitlines() if line.startswith("> ")] == [
        "> [['0'], ['1']] [['0'], ['1']] [0.4, 0.4]",
        "> [['0'], ['1']] [['0'], ['1']] [0.4, 0.4]",
        "> {'LD_PRELOAD': ('libm.so.6', True), 'RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES': ('1', False), "
        "'LATER': ('1', False), 'CUDA_VISIBLE_DEVICES': (None, False)}",
        "> True {'CPU': 1.0, 'GPU': 1.0}",
    ]


def test_extra_namespace_keys_reach_the_workers(actor):
    with pytest.warns(UserWarning, match="my_thing") as warned:
        args = read_args(argparse.Namespace(lr=1e-3, my_thing={"deep": (1, 2)}, user={"a": 1}))
    ray.get(actor.async_init(args))
    found = actor.worker_group.execute_with_func_generator(
        lambda worker: (worker.args.lr, worker.args.my_thing, worker.args.user.a)
    )
    ray.get(actor.async_init({}))
    assert found == [(1e-3, {"deep": (1, 2)}, 1)] * 2
    assert len(warned) == 1


# --- methods -----------------------------------------------------------------------------------------------------


def test_async_methods_return_one_reference_per_rank(actor):
    refs = actor.async_init(with_ref=True)
    assert all(isinstance(ref, ray.ObjectRef) for ref in refs) and ray.get(refs) == [0, 0]
    assert type(actor.async_train(np.int64(3), ROWS).result()[0]["rollout_id"]) is int
    said = actor.worker_group.said()
    assert [(s["rank"], s["role"], s["with_ref"]) for s in said] == [(0, "actor", True), (1, "actor", True)]
    with pytest.raises(TrainArgsError, match="3 references for 2 dp ranks"):
        actor.async_train(3, [ray.put(1)] * 3)


def test_async_methods_return_futures_of_this_library(actor):
    expected = [{"rollout_id": 3, "rows": [0, 1, 2], "computed": []}, {"rollout_id": 3, "rows": [3, 4], "computed": []}]
    future = actor.async_train(3, ROWS)
    assert isinstance(future, WorkerFuture) and future.result() == ray.get(future) == expected
    assert ray.get(future[1]) == expected[1] and ray.get([*future]) == expected and len(future) == 2
    with pytest.raises(TypeError, match=r"train\(\) has returned a future, not its value; use .result\(\)"):
        _ = future["loss"]
    assert ray.get(future + actor.async_init()) == [*expected, 0, 0]
    references = [ray.put(1)]
    references += actor.async_init()
    assert ray.get(references) == [1, 0, 0] and ray.get([ray.put(2)] + actor.async_init()) == [2, 0, 0]  # noqa: RUF005
    joined, longer = actor.async_train(3, ROWS), actor.async_init()
    joined += actor.async_init()
    longer.extend(actor.async_train(3, ROWS))
    assert ray.get(joined) == [*expected, 0, 0] and ray.get(longer) == [0, 0, *expected] and longer.result() == [0, 0]
    copied = actor.async_train(3, ROWS)
    assert ray.get(copied.copy()) == expected and copied[1] in copied and copied.index(copied[1]) == 1
    rest = actor.async_init()
    del rest[0]
    assert ray.get(rest) == [0]
    ready, _ = ray.wait(actor.async_train(3, ROWS), num_returns=2, timeout=20)
    assert ray.get(ready) == expected and "WorkerFuture of train(), done" in repr(future)

    async def main():
        return await asyncio.gather(actor.async_train(3, ROWS), actor.async_init())

    assert asyncio.run(main()) == [expected, [0, 0]]
    assert actor.worker_group.execute_rank_zero_sync("echo", actor.async_train(3, ROWS)) == expected
    copied = pickle.loads(pickle.dumps(actor.async_train(3, ROWS)))
    assert type(copied) is WorkerFuture and copied.result() == expected


def test_values_of_rollout_data_may_be_futures(actor):
    x = actor.worker_group.double.remote(ROWS["x"])
    assert [one["rows"] for one in actor.async_train(0, {"x": x}).result()] == [[0, 2, 4], [6, 8]]
    actor.args.balance_data = True
    with pytest.raises(TrainArgsError, match="balance_data=True moves rows, but not those of the future at 'x'"):
        actor.async_train(0, {"x": x})
    actor.args.balance_data = False


def test_computed_rows_are_balanced_and_keep_their_order(actor):
    lengths = np.random.default_rng(0).lognormal(4, 1, 33).clip(1, 512).astype(int)
    mask = (torch.arange(512) < torch.from_numpy(lengths)[:, None]).long()
    rows = {"input_ids": torch.arange(33)[:, None] * mask, "attention_mask": mask, "loss_mask": 0 * mask}

    def spread(balance, computed=actor.compute_log_prob):
        actor.args.balance_data = balance
        try:
            found = computed(rows)
        finally:
            actor.args.balance_data = False
        assert found[:, 0].tolist() == list(range(33))
        return max((found[:, 1] - found[:, 0]).tolist()) / (lengths.sum() / 2)

    assert spread(False) > 1.05
    assert spread(True) < 1.001
    # The future's rows go to other groups as they are.
    assert spread(True, lambda rows: actor.async_compute_log_prob(rows).result()) == spread(False)


def test_other_methods_block(actor):
    assert actor.offload() == 201 and actor.onload() == 21
    assert actor.get_parallel_config() == {"dp_size": 2}
    actor.clear_memory()
    assert [s["calls"] for s in actor.worker_group.said()] == [["clear_memory"]] * 2
    assert actor.save_model(0) is None
    address, port = actor.worker_group.get_master_addr_and_port()[1]
    assert (address, port) == (actor.worker_group.master_address, actor.worker_group.master_port)
    assert actor.worker_group.get_master_addr_and_port()[0] == (address, port) and port > 0
    assert "RayTrainGroup of 2: actor, Plain" in repr(actor)


def test_calls_before_async_init_are_rejected_and_change_nothing(slots):
    with group_of({"lr": 1.0}, 1, slots) as group:
        with pytest.raises(ValueError, match="this group has the role 'actor'"):
            group.async_init({"lr": 2.0}, role="critic")
        assert group.args.lr == 1.0
        for name, args in {"async_train": (0, ROWS), "save_model": (0,), "update_weights": (), "onload": (),
                           "offload": (), "clear_memory": (), "set_rollout_manager": (None,)}.items():  # fmt: skip
            with pytest.raises(RuntimeError, match=rf"{name}\(\): the actor's workers have no model yet; call async_"):
                getattr(group, name)(*args)


def test_weight_versions_are_counted_and_sent_to_the_manager(slots):
    with begun(pg=slots) as group:
        assert (group.weight_version, group.update_weights(), group.update_weights()) == (0, 1, 2)
        manager = Manager()
        sent = []
        group.set_rollout_manager(manager)
        assert group.worker_group.said()[1]["manager"].name == "manager"
        assert group.update_weights() == manager.weight_version == group.weight_version == 3
        assert manager.refresh() == 4, "the manager calls it for restarted workers"
        assert [s["version"] for s in group.worker_group.said()] == [4, 4]
        ray.get(group.async_init())  # a new init clears the workers' rollout manager
        group.worker_group.execute_with_func_generator(lambda worker: setattr(worker, "rollout_manager", None))
        assert group.update_weights() == 5 and group.worker_group.said()[0]["manager"] is not None
        group.offload()
        assert manager.refresh() == 6 and group.worker_group.said()[0]["asleep"], "the group must stay offloaded"
        group.onload()
        other = Manager(refresh=sent.append)
        group.set_rollout_manager(other)
        assert other.refresh == sent.append


def test_error_of_a_reference_that_nobody_fetches_is_not_logged(slots, monkeypatch):
    """Ray logs it as unhandled; the other rank's error was handled."""
    logged = []
    monkeypatch.setattr(ray._private.worker, "_unhandled_error_handler", logged.append)
    with begun({"user": {"fail_at": 0}}, pg=slots) as group:
        assert ray.get(group.async_train(0, ROWS)[1])["rows"] == [3, 4]
        group.async_train(1, ROWS)
        time.sleep(1.5)
    assert logged == []


def test_save_model_without_a_folder_warns(actor, caplog):
    ray.get(actor.async_init())
    with caplog.at_level("WARNING", "workers.train.train_group"):
        assert actor.save_model(np.int64(3)) is None
    assert "save_model(3) has written nothing: set args.save" in caplog.text


def test_driver_state_that_cannot_be_stored_is_an_error_of_the_checkpoint(actor, monkeypatch):
    def full(value):
        raise ray.exceptions.ObjectStoreFullError("no room")

    monkeypatch.setattr(ray, "put", full)
    with pytest.raises(CheckpointError, match=r"its driver_state cannot be stored .*\(ObjectStoreFullError: no room"):
        actor.save_model(0, driver_state={})


def test_driver_state_that_is_damaged_is_an_error_of_the_checkpoint(actor, monkeypatch):
    cut = SimpleNamespace(load_driver_state=lambda: [(pickle.dumps({"data": [1, 2]})[:-4], 0)])
    monkeypatch.setattr(actor, "ready_workers", lambda method: cut)
    with pytest.raises(CheckpointError, match="the driver_state is damaged"):
        actor.load_driver_state()


def test_rank_killed_in_a_collective_is_reported_and_the_group_can_restart(slots):
    with begun({"user": {"die": 1}}, pg=slots, actor_cls=Meeting) as group:
        refs = group.async_train(0, ROWS)
        begin = time.monotonic()
        with pytest.raises(ray.exceptions.RayError, match=r"(?s)died|gloo|[Cc]onnection"):
            ray.get(refs)
        with pytest.raises(ray.exceptions.ActorDiedError):
            ray.get(refs[1])
        assert time.monotonic() - begin < 30
        with pytest.raises(GroupBrokenError, match=r"rank 1 died.*Call RayTrainGroup\.restart\(\)"):
            group.async_train(1, ROWS)
        group.args = read_args({})
        assert group.restart() == [0, 0]
        assert ray.get(group.async_train(0, ROWS)) == [{"sum": 2.0}] * 2


def test_number_of_a_failed_update_is_not_used_again(slots):
    """Rollout workers may have generated tokens with it."""
    manager = Manager()
    with begun(pg=slots, actor_cls=FailingUpdate, manager=manager) as group:
        assert group.update_weights() == 1
        for _ in range(2):
            group.worker_group.execute_with_func_generator(lambda worker: setattr(worker, "fails", True))
            with pytest.raises(WorkerError, match="not sent"):
                group.update_weights()
            assert (group.weight_version, manager.weight_version) == (1, 1)
        assert (group.update_weights(), group.update_weights(), manager.weight_version) == (4, 5, 5)
        group.set_rollout_manager(None)
        group.worker_group.execute_with_func_generator(lambda worker: setattr(worker, "fails", True))
        with pytest.raises(WorkerError, match="not sent"):
            group.update_weights()
        group.restart()
        assert [said["version"] for said in group.worker_group.said()] == [group.weight_version] * 2 == [6, 6]


def test_worker_that_counts_its_versions_agrees_with_the_group(slots):
    manager = Manager()
    with begun(ranks=1, pg=slots, actor_cls=Counting, manager=manager) as group:
        group.update_weights()
        group.worker_group.execute_with_func_generator(lambda worker: setattr(worker, "fails", True))
        with pytest.raises(WorkerError, match="not sent"):
            group.update_weights()
        assert group.update_weights() == manager.weight_version == group.worker_group.said()[0]["version"] == 2
        assert group.update_weights(verify="full") == manager.weight_version == 3
        assert group.worker_group.execute_with_func_generator(lambda worker: worker.verify) == ["full"]


def test_worker_with_slimes_interface(slots):
    """Its methods accept no version and return nothing."""
    manager = Manager()
    with begun(ranks=1, pg=slots, actor_cls=Minimal, manager=manager) as group:
        assert (group.update_weights(), group.offload(), group.onload()) == (1, 0, 0)
        with pytest.raises(TypeError, match="verify"):
            group.update_weights(verify="full")
        assert manager.weight_version == 1, "nothing was sent"


# --- release and create ------------------------------------------------------------------------------------------


def test_released_workers_are_created_again_in_the_same_bundles(slots, tmp_path):
    group = group_of({"save": str(tmp_path)}, pg=slots)
    assert group.release() is None and group.create() is None, "release() or create() did something before async_init()"
    ray.get(group.async_init(with_ref=True))
    group.update_weights()
    manager = Manager()
    group.set_rollout_manager(manager)
    before = where(group), group.worker_group.said()
    with pytest.raises(RuntimeError, match=r"already has workers; call release\(\) first"):
        group.create()
    group.release()
    group.release()
    assert "released" in repr(group)
    for call in (lambda: group.async_train(0, ROWS), group.async_init, group.update_weights, group.onload,
                 group.get_parallel_config, lambda: group.save_model(1), lambda: group.worker_group):  # fmt: skip
        with pytest.raises(GroupClosedError, match=r"were released; call create\(\) to start"):
            call()
    assert group.create() == [0, 0], "no checkpoint was saved, so training starts from the beginning"
    assert where(group) == before[0]
    for old, new in zip(before[1], group.worker_group.said(), strict=True):
        assert old["pid"] != new["pid"]
        same = {"pid": 0, "manager": None, "version": 0}
        assert {**old, **same} == {**new, **same}
        # The rollout workers may have lost weights, and got these.
        assert (new["version"], new["manager"].name, new["with_ref"]) == (2, "manager", True)
    assert manager.weight_version == 2
    assert group.save_model(4) == str(tmp_path)
    group.release()
    assert group.create() == [5, 5]
    assert group.update_weights() == 4
    assert ray.get(group.async_init({"save": None})) == [0, 0]
    group.release()
    assert group.create() == [0, 0], "the checkpoint of another configuration was resumed"
    group.close()


def test_restart_whose_update_fails_can_be_continued(slots, tmp_path):
    offline = tmp_path / "offline"
    args = {"save": str(tmp_path), "user": {"offline": str(offline)}}
    manager = Manager()
    with begun(args, 1, slots, actor_cls=FailingUpdate, manager=manager) as group:
        group.update_weights()
        group.save_model(4)
        offline.touch()
        with pytest.raises(WorkerError, match="not sent"):
            group.restart()
        assert group.next_rollout_id == 5 and manager.weight_version == 2, "tokens of lost weights would be accepted"
        with pytest.raises(WorkerError, match="not sent"):
            group.update_weights()
        assert manager.weight_version == 3, "as they would be after another failure"
        offline.unlink()
        assert group.update_weights() == manager.weight_version == 4


def test_workers_restarted_behind_the_groups_back_are_not_used(slots, tmp_path):
    with begun({"save": str(tmp_path)}, 1, slots) as group:
        group.save_model(4)
        group.worker_group.restart()
        with pytest.raises(RuntimeError, match=r"were restarted by worker_group.restart\(\).*call restart\(\)"):
            group.update_weights()
        assert group.restart() == [5]
        assert group.update_weights() == 1


def test_critic_resumes_from_its_own_checkpoint(slots, tmp_path):
    args = {"save": str(tmp_path / "none"), "critic_save": str(tmp_path)}
    with begun(args, 1, slots, role="critic") as group:
        group.save_model(7)
        group.release()
        assert group.create() == [8]


def test_failed_checkpoint_is_an_error_and_not_resumed(slots, tmp_path):
    (tmp_path / "latest.json").write_text('{"folder": "rollout_0000009", "rollout_id": 9}')  # written by another run
    args = {"save": str(tmp_path), "load": str(tmp_path / "mine"), "async_save": True}
    with begun(args, 1, slots, actor_cls=DiskFull) as group:
        for unsuccessful in (group.wait_for_save, group.grow, group.release):
            group.save_model(2)
            with pytest.raises(WorkerError, match="disk full"):
                unsuccessful()
        group.create()
        group.save_model(3)
        kill(group, 0)
        group.release()
        group.create()
        assert {s["load"] for s in group.worker_group.said()} == {args["load"]}
        group.save_model(4)
        with pytest.raises(WorkerError, match="disk full"):
            group.close()


@pytest.mark.parametrize("death", [False, True])
def test_checkpoint_of_a_save_that_failed_after_it_is_resumed(slots, tmp_path, death):
    """Beside one of another run, of the same step."""
    (tmp_path / "latest.json").write_text('{"folder": "rollout_0000004", "rollout_id": 4}')
    args = {"save": str(tmp_path), "user": {"death": death}}
    with begun(args, 1, slots, actor_cls=ExportFails) as group:
        assert group.restart() == [0], "no checkpoint is of this run"
        for _ in range(1 if death else 3):  # its name is that of the other run's again
            with pytest.raises(WorkerDiedError if death else WorkerError):
                group.save_model(4)
        assert group.restart() == [5]


def test_background_save_of_a_call_that_failed_is_finished(slots, tmp_path):
    args = {"save": str(tmp_path), "user": {"death": False}, "async_save": True}
    with begun(args, 1, slots, actor_cls=ExportFails) as group:
        with pytest.raises(WorkerError):
            group.save_model(4)
        assert group.restart() == [5]
        assert (tmp_path / "waited").exists()


def test_manager_without_weight_versions(slots):
    """A user's own Ray actor, for the user's own workers; then no manager."""
    with begun(ranks=1, pg=slots) as group:
        group.set_rollout_manager(ray.remote(num_cpus=0)(WithoutVersions).remote())
        assert group.update_weights() == 1
        group.set_rollout_manager(None)
        assert group.update_weights() == 2


class WithoutVersions:
    pass


def test_weights_after_lost_training_are_sent_once(slots):
    """With fewer ranks, and then, as none is left, with a new process."""
    with begun({}, 2, slots, manager=Manager(), on_death="shrink") as group:
        ray.get(group.async_train(0, ROWS))
        assert group.update_weights() == 1
        kill(group, 1)
        assert group.replace() == [0] and group.weight_version == 2
        assert group.replace() is None and group.weight_version == 2
        kill(group, 0)
        assert group.replace() == [0] and group.weight_version == 3


def test_ranks_continue_although_the_manager_does_not_answer(slots, monkeypatch):
    def busy(link):
        raise WeightSyncError("the manager did not answer")

    manager = Manager()
    with begun({}, 2, slots, manager=manager) as group:
        ray.get(group.async_train(0, ROWS))
        group.update_weights()
        kill(group, 1)
        for continues in (group.replace, group.restart):
            with monkeypatch.context() as patch, pytest.raises(WeightSyncError, match="did not answer"):
                patch.setattr(RolloutLink, "_actors", busy)
                continues()
            assert (group.next_rollout_id, manager.weight_version) == (0, group.weight_version + 1)
            assert group.update_weights() == manager.weight_version
            assert [said["manager"].name for said in group.worker_group.said()] == ["manager"] * 2


def test_replace_that_failed_can_be_repeated(slots):
    """No rank has died since, but the ranks have not continued."""
    with begun({}, 2, slots) as group:
        good, group.args = group.args, read_args({"user": {"fail_in_init": 0}})
        kill(group, 1)
        with pytest.raises(WorkerError, match="no disk"):
            group.replace()
        with pytest.raises(GroupBrokenError, match=r"because replace\(\) has failed; call it again"):
            group.async_train(0, ROWS)
        group.args = good
        assert group.replace() == [0, 0] and group.replace() is None
        ray.get(group.async_train(0, ROWS))


class Stream:
    buffer = SimpleNamespace(rewind=lambda rollout_id: None, version=None)
    recovers = False

    def __init__(self):
        self.told = []

    def updating(self, timeout, *, same_weights):
        self.timeout = timeout
        self.told.append(same_weights)
        return nullcontext()

    def __reduce__(self):
        return Stream, ()


class Group:
    workers = ()

    def alive(self):
        return []


def test_stream_is_told_whether_weights_are_sent_again(slots):
    with begun({}, 1, slots, actor_cls=FailingUpdate) as group:
        manager = Manager()
        manager.stream, manager.group = Stream(), Group()
        group.set_rollout_manager(manager)
        group.update_weights()
        group.update_weights()
        group.worker_group.execute_with_func_generator(lambda worker: setattr(worker, "fails", True))
        with pytest.raises(WorkerError, match="not sent"):
            group.update_weights()
        group.update_weights()
        with pytest.raises(DispatchError, match="values differ in length"):
            group.async_train(0, {**ROWS, "y": np.arange(4)})
        group.update_weights()
        ray.get(group.async_train(0, ROWS))
        group.update_weights()
        group.update_weights()
        ray.get(group.async_train(0, ROWS))
        group.update_weights()
        group.set_rollout_manager(manager)
        group.update_weights()
        assert manager.stream.told == [False, True, True, True, True, False, True, False, False]
        ray.get(group.async_init({"update_weights_timeout_minutes": 2.0}))
        group.update_weights()
        assert manager.stream.timeout == 120
        manager.stream.buffer = SimpleNamespace(version=20)  # another group has sent its weights
        assert group.update_weights() == manager.weight_version == 21


def test_stream_is_told_whether_a_restart_has_lost_weights(slots, tmp_path):
    with begun({"save": str(tmp_path)}, 1, slots) as group:
        manager = Manager()
        manager.stream, manager.group = Stream(), Group()
        group.set_rollout_manager(manager)
        group.update_weights()
        assert group.restart() == [0]
        assert manager.stream.told == [False, True], "from the weights that the group began with"
        ray.get(group.async_train(0, ROWS))
        group.update_weights()
        group.save_model(0)
        assert group.restart() == [1]
        assert manager.stream.told[2:] == [False, True]
        ray.get(group.async_train(1, ROWS))
        group.save_model(1)
        assert group.restart() == [2]
        assert manager.stream.told[4:] == [False], "they were not sent before"


def test_failed_create_can_be_retried(slots):
    with begun({}, 1, slots) as group:
        group.release()
        good = group.args
        group.args = read_args({"user": {"fail_in_init": 0}})
        with pytest.raises(WorkerError, match="no disk"):
            group.create()
        group.args = good
        assert group.create() == [0]


# --- the critic --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def critic(slots):
    with group_of(pg=slots[:2], role="critic") as group:
        yield group


def test_actor_rank_i_reaches_critic_rank_i(actor, critic):
    actor.connect(critic)
    kill(actor, 1)
    assert actor.replace() == [0, 0], "the critic has no model yet"
    kill(critic, 0)
    assert critic.replace() is None
    assert [s["pid"] for s in actor.worker_group.critic_said()] == [s["pid"] for s in critic.worker_group.said()]
    assert critic.restart() is None
    ray.get(critic.async_init())

    def reached():
        said = actor.worker_group.critic_said()
        assert [(s["rank"], s["role"]) for s in said] == [(0, "critic"), (1, "critic")]
        assert [s["pid"] for s in said] == [s["pid"] for s in critic.worker_group.said()]

    reached()
    actor.release()
    actor.create()
    reached()
    actor.release()
    critic.release()
    actor.create()
    critic.create()
    reached()


def test_actor_and_critic_that_continue_at_different_rollouts_are_told_of(slots, tmp_path, caplog):
    args = {"advantage_estimator": "gae", "save": str(tmp_path), "num_critic_only_steps": 1}
    with group_of(args, 1, slots) as actor, group_of(args, 1, slots, role="critic") as critic:
        ray.get([*actor.async_init(), *critic.async_init()])
        ray.get(critic.async_train(0, ROWS))  # alone, as num_critic_only_steps says
        actor.connect(critic)
        ray.get([*actor.async_train(1, ROWS), *critic.async_train(1, ROWS)])
        actor.save_model(1)
        ray.get([*actor.async_train(2, ROWS), *critic.async_train(2, ROWS)])
        assert "different rollouts" not in caplog.text
        assert actor.restart() == [2]
        assert "different rollouts (actor: 2, critic: 3). If one of them was restarted, call restart()" in caplog.text
        ray.get(actor.async_train(2, ROWS))
        caplog.clear()
        actor.connect(critic)
        assert not caplog.text


def test_critic_is_restarted_before_the_actor_that_has_died_too(slots):
    with group_of({}, 1, slots) as actor, group_of({}, 1, slots, role="critic") as critic:
        ray.get([*actor.async_init(), *critic.async_init()])
        actor.connect(critic)
        for group in (actor, critic):
            kill(group, 0)
        assert [critic.restart(), actor.restart()] == [[0], [0]]
        assert actor.worker_group.critic_said()[0]["pid"] == critic.worker_group.said()[0]["pid"]


def test_groups_that_cannot_be_connected(slots, actor, critic):
    with group_of(ranks=1, pg=slots, role="critic") as lone:
        with pytest.raises(ValueError, match="actor group has 2 ranks, the critic group 1;"):
            actor.connect(lone)
        lone.release()
    with pytest.raises(ValueError, match="got 'actor' and 'actor'"):
        actor.connect(actor)
    with pytest.raises(ValueError, match="got 'critic' and 'critic'"):
        critic.connect(critic)


def test_custom_workers_need_not_compute_values(slots):
    args = {"advantage_estimator": "gae"}
    with group_of(args, 1, slots) as one, group_of(args, 1, slots, role="critic") as two:
        one.connect(two)
        ray.get([*one.async_init(), *two.async_init()])
        assert [m["computed"] for m in ray.get(one.async_train(0, ROWS))] == [[]]


def test_two_objects_for_one_rollout_are_told_of(caplog):
    """The values for the actor would be those of a critic that has trained on the rollout."""
    workers = SimpleNamespace(methods={"compute_values"})
    given = {"args": read_args({"advantage_estimator": "gae"}), "ready_workers": lambda method: workers}
    shared = SharedRollout(*(SimpleNamespace(role=role, **given) for role in ("actor", "critic")))
    for role in ("critic", "actor"):
        shared.take(0, ROWS, role)
    shared.take(0, {**ROWS}, "critic")  # trained on once more
    assert not caplog.text
    shared.take(0, {**ROWS}, "actor")
    assert "actor and critic were given two objects as data of rollout 0" in caplog.text


def test_estimator_of_ones_own_gets_what_connected_groups_compute():
    workers = SimpleNamespace(methods={"compute_values", "compute_old_log_prob", "compute_ref_log_prob"})
    args = read_args({"advantage_estimator": "own_algorithms.less_values", "kl_coef": 0.1})
    actor, critic = (
        SimpleNamespace(role=role, args=args, ready_workers=lambda method: workers) for role in ("actor", "critic")
    )
    wanted = [(name, group.role) for name, _, group in SharedRollout(actor, critic).to_compute(ROWS)]
    assert wanted == [("values", "critic"), ("old_log_probs", "actor"), ("ref_log_probs", "actor")]
    assert SharedRollout(actor).to_compute(ROWS) == []


def test_event_loop_waits_neither_for_a_rollout_nor_for_a_layout(actor):
    rollout = ComputedFuture("generate")

    async def main():
        with pytest.raises(RuntimeError, match="pass `await rollout` instead"):
            actor.async_train(3, rollout)
        with pytest.raises(RuntimeError, match="pass `await rollout` instead"):
            actor.async_compute_log_prob(rollout)
        rollout.set_result(ROWS)
        actor.worker_group._forget_layouts()
        trained = actor.async_train(3, await rollout)
        assert trained._sending is not None  # by a thread, which asks for the layout
        return await trained

    assert len(asyncio.run(main())) == 2


def test_manager_is_refreshed_by_the_group_that_got_it_last(slots):
    manager = Manager()
    with group_of(pg=slots, name_prefix="one_") as one:
        ray.get(one.async_init())
        one.set_rollout_manager(manager)
        assert one.update_weights() == 1
        with group_of(pg=slots, name_prefix="two_") as two:
            ray.get(two.async_init())
            two.set_rollout_manager(manager)
            assert (manager.refresh(), two.weight_version, one.weight_version) == (1, 1, 1)
            two.set_rollout_manager(None)
            assert manager.refresh is None
            two.set_rollout_manager(manager)
        assert manager.refresh is None


def test_manager_is_refreshed_by_the_actor_and_not_by_its_critic(actor, critic):
    ray.get(critic.async_init())
    manager, version = Manager(), actor.weight_version
    for group in (critic, actor, critic):
        group.set_rollout_manager(manager)
    assert manager.refresh() == actor.weight_version == version + 1 and critic.weight_version == 0
    for group in (actor, critic):
        group.set_rollout_manager(None)


def test_manager_that_is_refused_changes_nothing(slots):
    manager, other = Manager(), Manager("other")
    with begun(ranks=1, pg=slots, actor_cls=Choosy) as group:
        with pytest.raises(WorkerError, match="not for these workers"):
            group.set_rollout_manager(other)
        assert group.worker_group.said()[0]["manager"] is None
        group.set_rollout_manager(manager)
        with pytest.raises(WorkerError, match="not for these workers"):
            group.set_rollout_manager(other)
        assert other.refresh is None and manager.refresh is not None
        assert group.update_weights() == manager.weight_version == 1
        assert group.worker_group.said()[0]["manager"].name == "manager"


def test_backend_of_a_group_cannot_change(slots):
    with RayTrainGroup({}, 1, 1, slots, 0.1) as group:
        with pytest.raises(TrainArgsError, match="train_backend='megatron', but this group's workers are those of"):
            group.async_init({"train_backend": "megatron", "vocab_size": 8})


def test_timeout_of_a_process_group_cannot_change(actor):
    with pytest.raises(TrainArgsError, match=r"minutes=5\.0, but the process group of these workers was created with"):
        actor.async_init({"distributed_timeout_minutes": 5})
