"""Starting a group's workers: actors into bundles, ranks by where they landed, then the constructors.

Nothing here waits for one rank after the other: all actors are made at once, asked at once where they are, and
sent their start messages at once; rank 0's address goes along as a reference.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayError

from dispatch.plan import CallPlan
from single_controller.base.engine import Sent
from single_controller.base.errors import PlacementError, WorkerDiedError
from single_controller.ray.actor import Location, StartOrder, actor_class
from single_controller.ray.answers import one_line
from single_controller.ray.engine import Rank, RayEngine
from single_controller.ray.order import Slot
from single_controller.ray.placement import wait_placed
from single_controller.ray.pool import RayResourcePool
from single_controller.ray.recipe import Recipe

logger = logging.getLogger(__name__)

_BEFORE_START = ("LD_", "PYTHON", "MALLOC_", "GLIBC_", "RAY_")
"""Variables that count only if they exist before the process starts: those need a runtime_env."""


NAME_FREE_SECONDS = 10.0
"""How long a restart waits until the names of the workers that it ended are free again."""


@dataclass(frozen=True)
class StartPlan:
    """What a group starts, each time it starts.

    Attributes:
        pool: where.
        recipe: what each process is made of.
        bin_pack: whether each entry of the pool lies on one node.
        prefix: first part of the actors' names.
        detached: whether the actors outlive the driver; their names are exact then.
        master: address and port of the rendezvous; None for what rank 0 is to find.
        environment: ``worker_env``.
        use_gpu: whether each worker takes its share of a GPU.
        name: the group's name, for messages.
        namespace: Ray's namespace of the actors' names; None for the driver's.
    """

    pool: RayResourcePool
    recipe: Recipe
    bin_pack: bool
    prefix: str
    detached: bool
    master: tuple[str | None, int | None]
    environment: dict[str, str]
    use_gpu: bool
    name: str
    namespace: str | None = None


Run = Callable[[RayEngine, CallPlan, Sent], None]
"""Waits for constructors, and raises what went wrong in them."""


def start(plan: StartPlan, run: Run, again: bool = False) -> tuple[RayEngine, tuple[str, int]]:
    """Start the workers.

    Args:
        plan: what to start.
        run: waits for the constructors and raises what went wrong in them.
        again: workers of the same names were ended a moment ago; those names are waited for.

    Returns:
        The engine, and the address and port of the rendezvous.

    Raises:
        PlacementError, StartError, WorkerDiedError, CallTimeoutError, DispatchError: see `RayWorkerGroup`. All
            actors are ended then.
    """
    packed = plan.recipe.pack()
    plan.pool.place(plan.bin_pack, plan.recipe.additional_resource)
    if plan.detached:
        plan.pool.settle()  # their names are to end in their ranks
    slots = plan.pool.slots()
    names = _names(plan, range(len(slots)))
    with _ended_on_error(plan) as actors:
        locations = _make(plan, slots, names, actors, again=again)
        order = plan.pool.rank_order(slots, locations)
        ranks = [
            Rank(actors[place], names[place], location, seat.slot)
            for (place, location), seat in zip(order, plan.pool.seats(), strict=True)
        ]
        return _run_constructors(plan, ranks, packed, run)


def start_ranks(
    plan: StartPlan, engine: RayEngine, chosen: Sequence[int], master: tuple[str, int], run: Run
) -> RayEngine:
    """End some ranks and start them anew in their slots; the others are left as they are.

    Args:
        plan: what was started.
        engine: the group's engine so far.
        chosen: the ranks.
        master: address and port of the group's rendezvous.
        run: waits for the constructors and raises what went wrong in them.

    Raises:
        PlacementError, StartError, WorkerDiedError, CallTimeoutError, DispatchError: see `RayWorkerGroup`. The new
            actors are ended then.
    """
    packed = plan.recipe.pack()
    before = [engine.ranks[rank] for rank in chosen]
    slots = [rank.slot for rank in before if rank.slot is not None]
    orders = [rank.order for rank in before if rank.order is not None]
    engine.given_up |= frozenset(chosen)
    for rank in before:
        ray.kill(rank.actor, no_restart=True)
    # A detached actor keeps its name, which is how it is found.
    names = [rank.name for rank in before] if plan.detached else _names(plan, chosen)
    with _ended_on_error(plan) as actors:
        locations = _make(plan, slots, names, actors, again=True)
        ranks = list(engine.ranks)
        for place, (number, order) in enumerate(zip(chosen, orders, strict=True)):
            ranks[number] = Rank(actors[place], names[place], locations[place], slots[place], order)
        anew = RayEngine(ranks, plan.pool)
        receipts = {ranks[k].actor._sc_start.remote(ranks[k].order, packed, master): k for k in chosen}
        run(anew, CallPlan.empty(anew.world_size).only(chosen), Sent(receipts))
    return anew


def _names(plan: StartPlan, numbers: Iterable[int]) -> list[str]:
    unique = "" if plan.detached else f"_{uuid.uuid4().hex[:8]}"
    return [f"{plan.prefix}{plan.recipe.name}{unique}_{number}" for number in numbers]


class _Actors(list[ActorHandle]):
    """Actors that are being made.

    Attributes:
        making: the name of one that may exist although nobody has its handle yet.
    """

    making: str | None = None


@contextmanager
def _ended_on_error(plan: StartPlan) -> Iterator[_Actors]:
    actors = _Actors()
    try:
        yield actors
    except BaseException:
        for actor in actors:
            ray.kill(actor, no_restart=True)
        if plan.detached and actors.making is not None:  # an actor that is not detached ends with its handle
            try:
                ray.kill(ray.get_actor(actors.making, plan.namespace), no_restart=True)
            except ValueError:
                logger.debug("%s had not been made", actors.making)
        raise


def _make(
    plan: StartPlan, slots: Sequence[Slot], names: Sequence[str], actors: _Actors, *, again: bool
) -> list[Location]:
    """Make the actors, all at once, and wait until they have said where they are."""
    make = _actor_maker(plan, again=again)
    for slot, name in zip(slots, names, strict=True):
        actors.making = name
        try:
            actors.append(make(slot, name))
        except ValueError:
            actors.making = None  # the name is somebody else's
            raise
    actors.making = None
    located = [actor._sc_locate.remote() for actor in actors]
    wait_placed(located, plan.pool.placements(), plan.pool.placement_timeout, plan.name)
    return _locations(located, plan.name)


def _actor_maker(plan: StartPlan, *, again: bool) -> Callable[[Slot, str], ActorHandle]:
    """Makes one actor in one bundle. Its constructor does nothing: the rank is not known yet."""
    recipe = plan.recipe
    share = plan.pool.options.share(plan.use_gpu)
    options: dict[str, Any] = {
        **share,
        "resources": {**share["resources"], **recipe.additional_resource} or None,
        "max_restarts": 0,
        "lifetime": "detached" if plan.detached else None,
        "namespace": plan.namespace,
        **recipe.options,
    }
    wanted = {"CPU": options["num_cpus"], "GPU": options["num_gpus"], "memory": options["memory"]}
    wanted |= options["resources"] or {}
    slot = plan.pool.placements()[0].bundle
    beyond = {name: amount for name, amount in wanted.items() if (amount or 0) > slot.get(name, 0)}
    if beyond:
        raise PlacementError(
            f"{plan.name}: each worker asks for {beyond}, more than a slot of {plan.pool!r} has: {slot}. Change "
            "what update_options() was given, or make the pool with such slots"
        )
    early = {key: value for key, value in plan.environment.items() if key.startswith(_BEFORE_START)}
    if early:
        runtime = dict(options.get("runtime_env") or {})
        options["runtime_env"] = {**runtime, "env_vars": {**runtime.get("env_vars", {}), **early}}
    ray_class = actor_class(recipe.name, recipe.methods, recipe.concurrent)
    end = time.monotonic() + (NAME_FREE_SECONDS if again else 0.0)

    def make(slot: Slot, name: str) -> ActorHandle:
        where = slot.strategy()
        while True:
            try:
                actor: ActorHandle = ray_class.options(name=name, scheduling_strategy=where, **options).remote()
                return actor
            except ValueError as error:
                if "already taken" not in str(error):
                    raise
                if time.monotonic() > end:
                    raise ValueError(
                        f"{plan.name}: a worker called {name!r} runs already. Attach to its group, "
                        f"RayWorkerGroup.attach({name.rpartition('_')[0]!r}), or choose another name_prefix"
                    ) from error
            time.sleep(0.02)

    return make


def _locations(refs: Sequence[Any], name: str) -> list[Location]:
    try:
        locations: list[Location] = ray.get(list(refs))
        return locations
    except RayError as error:
        raise WorkerDiedError(f"{name}: a worker died before it was started: {one_line(error)}") from error


def _run_constructors(
    plan: StartPlan, ranks: Sequence[Rank], packed: Any, run: Run
) -> tuple[RayEngine, tuple[str, int]]:
    world_size = len(ranks)
    master = ranks[0].actor._sc_rendezvous.remote(*plan.master)
    entries = [rank.slot.entry if rank.slot is not None else 0 for rank in ranks]
    nodes = [rank.location.node_id for rank in ranks]
    node_ranks = {node: number for number, node in enumerate(dict.fromkeys(nodes))}
    homes = list(zip(entries, nodes, strict=True))  # an entry may lie on several nodes: local is who shares both
    sizes = Counter(homes)
    placed: Counter[tuple[int, str]] = Counter()
    started = []
    for number, (rank, home) in enumerate(zip(ranks, homes, strict=True)):
        node_rank = node_ranks[nodes[number]]
        order = StartOrder(number, world_size, placed[home], sizes[home], plan.environment, node_rank)
        placed[home] += 1
        started.append(replace(rank, order=order))
    engine = RayEngine(started, plan.pool)
    receipts = {rank.actor._sc_start.remote(rank.order, packed, master): k for k, rank in enumerate(started)}
    run(engine, CallPlan.empty(world_size), Sent(receipts))
    address, port = ray.get(master)
    return engine, (address, port)
