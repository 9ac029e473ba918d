"""Starting a group's workers: actors into bundles, ranks by where they landed, then the constructors.

Nothing here waits for one rank after the other: all actors are made at once, asked at once where they are, and
sent their start messages at once; rank 0's address goes along as a reference.
"""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayError

from dispatch.plan import CallPlan
from dispatch.register import method_spec, registered_methods
from single_controller.base.engine import Sent
from single_controller.base.errors import PlacementError, WorkerDiedError
from single_controller.ray.actor import Location, StartOrder, actor_class
from single_controller.ray.answers import one_line
from single_controller.ray.class_with_args import RayClassWithInitArgs, pack_class
from single_controller.ray.engine import Rank, RayEngine
from single_controller.ray.order import Slot
from single_controller.ray.placement import wait_placed
from single_controller.ray.pool import RayResourcePool

_BEFORE_START = ("LD_", "PYTHON", "MALLOC_", "GLIBC_", "RAY_")
"""Variables that count only if they exist before the process starts: those need a runtime_env."""


@dataclass(frozen=True)
class StartPlan:
    """What a group starts, each time it starts.

    Attributes:
        pool: where.
        made: the class and its arguments.
        bin_pack: whether each entry of the pool lies on one node.
        prefix: first part of the actors' names.
        detached: whether the actors outlive the driver; their names are exact then.
        master: address and port of the rendezvous; None for what rank 0 is to find.
        environment: ``worker_env``.
        use_gpu: whether each worker takes its share of a GPU.
        name: the group's name, for messages.
    """

    pool: RayResourcePool
    made: RayClassWithInitArgs
    bin_pack: bool
    prefix: str
    detached: bool
    master: tuple[str | None, int | None]
    environment: dict[str, str]
    use_gpu: bool
    name: str


def start(plan: StartPlan, run: Callable[[RayEngine, CallPlan, Sent], None]) -> tuple[RayEngine, tuple[str, int]]:
    """Start the workers.

    Args:
        plan: what to start.
        run: waits for the constructors and raises what went wrong in them.

    Returns:
        The engine, and the address and port of the rendezvous.

    Raises:
        PlacementError, StartError, WorkerDiedError, CallTimeoutError, DispatchError: see `RayWorkerGroup`. All
            actors are ended then.
    """
    packed = pack_class(plan.made)
    plan.pool.place(plan.bin_pack, plan.made.additional_resource)
    slots = plan.pool.slots()
    unique = "" if plan.detached else f"_{uuid.uuid4().hex[:8]}"
    names = [f"{plan.prefix}{plan.made.cls.__name__}{unique}_{number}" for number in range(len(slots))]
    actors: list[ActorHandle] = []
    try:
        make = _actor_maker(plan)
        for slot, name in zip(slots, names, strict=True):
            actors.append(make(slot, name))
        located = [actor._sc_locate.remote() for actor in actors]
        wait_placed(located, plan.pool.placements(), plan.pool.placement_timeout, plan.name)
        order = plan.pool.rank_order(slots, _locations(located, plan.name))
        engine = RayEngine([Rank(actors[place], names[place], location) for place, location in order])
        master = _run_constructors(plan, engine, [seat.slot.entry for seat in plan.pool.seats()], packed, run)
    except BaseException:
        for actor in actors:
            ray.kill(actor, no_restart=True)
        raise
    return engine, master


def _actor_maker(plan: StartPlan) -> Callable[[Slot, str], ActorHandle]:
    """Makes one actor in one bundle. Its constructor does nothing: the rank is not known yet."""
    cls, made = plan.made.cls, plan.made
    share = plan.pool.options.share(plan.use_gpu)
    options: dict[str, Any] = {
        **share,
        "resources": {**share["resources"], **made.additional_resource} or None,
        "max_restarts": 0,
        "lifetime": "detached" if plan.detached else None,
        **made.options,
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
    names = [name for name in dir(cls) if not name.startswith("_") and method_spec(cls, name) is not None]
    concurrent = any(spec.registration.concurrent for spec in registered_methods(cls).values())
    ray_class = actor_class(cls.__name__, tuple(names), concurrent)

    def make(slot: Slot, name: str) -> ActorHandle:
        actor: ActorHandle = ray_class.options(name=name, scheduling_strategy=slot.strategy(), **options).remote()
        return actor

    return make


def _locations(refs: Sequence[Any], name: str) -> list[Location]:
    try:
        locations: list[Location] = ray.get(list(refs))
        return locations
    except RayError as error:
        raise WorkerDiedError(f"{name}: a worker died before it was started: {one_line(error)}") from error


def _run_constructors(
    plan: StartPlan,
    engine: RayEngine,
    entries: Sequence[int],
    packed: Any,
    run: Callable[[RayEngine, CallPlan, Sent], None],
) -> tuple[str, int]:
    world_size = engine.world_size
    master = engine.ranks[0].actor._sc_rendezvous.remote(*plan.master)
    nodes = [rank.location.node_id for rank in engine.ranks]
    node_ranks = {node: number for number, node in enumerate(dict.fromkeys(nodes))}
    homes = list(zip(entries, nodes, strict=True))  # an entry may lie on several nodes: local is who shares both
    sizes = Counter(homes)
    placed: Counter[tuple[int, str]] = Counter()
    receipts = {}
    for number, (rank, home) in enumerate(zip(engine.ranks, homes, strict=True)):
        node_rank = node_ranks[nodes[number]]
        order = StartOrder(number, world_size, placed[home], sizes[home], plan.environment, node_rank)
        placed[home] += 1
        receipts[rank.actor._sc_start.remote(order, packed, master)] = number
    run(engine, CallPlan.empty(world_size), Sent(receipts))
    address, port = ray.get(master)
    return address, port
