"""Starting a group's workers: create actors in the slots, assign ranks by where they run, then run the constructors.
Changing the ranks of a group: `fill` some with standbys or new actors, `keep` some, or `enlist` further ones; then have
all ranks `join` a new rendezvous.

No step handles one rank after the other: all actors are created at once, asked for their location at once, and sent
their start messages at once. Rank 0's address travels along as a reference.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayError

from dispatch.plan import CallPlan
from single_controller.call.call import Call
from single_controller.call.errors import PlacementError, WorkerDiedError
from single_controller.call.transport import Sent
from single_controller.call.worker.worker import RANK_ENVIRONMENT, RankInfo
from single_controller.ray import python_env
from single_controller.ray.class_with_args import ProcessSpec, check_one_python
from single_controller.ray.compat import death_of
from single_controller.ray.placement.pool import RayResourcePool, local_ranks
from single_controller.ray.placement.reservation import known_locations, node_locations, remove_pools_of, wait_started
from single_controller.ray.placement.slots import Slot
from single_controller.ray.rank.actor import Location, actor_class
from single_controller.ray.rank.devices import before_start
from single_controller.ray.results import one_line
from single_controller.ray.runtime import nodes, session
from single_controller.ray.transport import Rank, RayTransport, Standby, members_of

logger = logging.getLogger(__name__)

NAME_FREE_SECONDS = 10.0
"""How long a restart waits until Ray has freed the names of the workers that it ended."""

STANDBY_SECONDS = 5.0
"""How long ranks that are replaced wait for a standby that is not ready. Starting a new process takes about as long,
and the standby may never be: its slot may have been on a host that is gone."""


@dataclass(frozen=True)
class StartPlan:
    """What a group starts, the first time and at each restart."""

    pool: RayResourcePool  # the pool that the workers run in
    process: ProcessSpec  # what runs in each process
    bin_pack: bool  # whether each entry of the pool must be on one node
    prefix: str  # prefix of the actors' names
    detached: bool  # whether the actors outlive the driver. Their names then have no random part.
    master: tuple[str | None, int | None]  # address and port of the rendezvous; None for what rank 0 chooses
    environment: dict[str, str]  # ``worker_env``, and two variables for workers written for verl
    use_gpu: bool  # whether each worker takes its share of a GPU
    name: str  # the group's name, for messages
    namespace: str | None = None  # Ray's namespace of the actors' names; None for the driver's
    standby: int = 0  # how many of the pool's slots, the last ones, have a standby instead of a rank
    collectives: bool = True  # whether ranks use collectives, in which new processes must not be before all have joined
    start_timeout: float | None = None  # seconds that the constructors may take
    error_grace: float = 0.0  # of `RayWorkerGroup`, as the next
    on_death: str = "error"
    home: str | None = None  # id of the node where rank 0 ran first, which has the address in ``master``; None before


WaitForConstructors = Callable[[RayTransport, CallPlan, Callable[[Call], Sent]], None]
"""Waits until the constructors have returned, and raises the error of one that failed."""


def start(
    plan: StartPlan, wait: WaitForConstructors, again: bool = False, generation: int = 0
) -> tuple[RayTransport, tuple[str, int]]:
    """Start the workers of a group, and wait for their constructors. If it raises, all actors were ended. ``again``:
    whether workers of the same names were just ended, so that their names may still be taken. Returns the transport,
    and the address and port of the rendezvous."""
    encoded = plan.process.encode()  # first: what cannot be pickled must not cost a start
    plan.pool.wait(assign_ranks=plan.detached)  # the name of a detached actor ends in its rank
    slots = plan.pool.slots()
    with _created(plan, slots, _names(plan, range(len(slots))), again=again) as made:
        # Reorders the pool's slots if this is its first group, so what is read from the pool below is by rank.
        order = plan.pool.assign_ranks(slots, [one.location for one in made])
        ranks = [replace(made[index], slot=slot) for index, slot in zip(order, plan.pool.slots(), strict=True)]
        count = len(ranks) - plan.standby
        transport = _transport(plan, ranks[:count], generation)
        transport.standbys = [
            standby_of(plan, one.actor, one.name, one.slot, encoded) for one in ranks[count:] if one.slot is not None
        ]
        master = given_address(plan, transport), plan.master[1]
        return transport, join(plan, transport, range(count), encoded, wait, master)


def fill(plan: StartPlan, before: RayTransport, chosen: Sequence[int], encoded: Any, generation: int) -> RayTransport:
    """End some ranks, dead or alive, and fill them with standbys or, where there is none, with new actors in their
    slots. No user code runs on them before `join`. If it raises, the new actors were ended. Returns the transport that
    follows the group's present one, for a group of this generation."""
    _end(before, chosen)
    ranks, standbys = list(before.ranks), living_standbys(before)
    missing, taken = [], []
    lost: list[Slot] = []
    end = time.monotonic() + STANDBY_SECONDS  # for all ranks together
    for number in chosen:
        standby = _ready(standbys, end)
        if standby is None:
            missing.append(number)
        else:
            taken.append(standby)
            slot = ranks[number].slot
            lost += [] if slot is None else [slot]
            ranks[number] = _recruited(standby)
    lost += [one.slot for one in before.standbys if one not in standbys and one not in taken]
    slots = [slot for number in missing if (slot := ranks[number].slot) is not None]
    # A detached actor keeps its name, because others find it by that name.
    names = [ranks[number].name for number in missing] if plan.detached else _names(plan, missing)
    with _created(plan, slots, names, again=True) as made:
        for number, rank in zip(missing, made, strict=True):
            ranks[number] = rank
        filled = _transport(plan, ranks, generation, before, before.fresh | frozenset(chosen))
        # The slots that became free get standbys in turn. Nobody waits for them: the host may be gone.
        filled.standbys = standbys
        filled.standbys += recruit(plan, filled, lost, encoded)
        return filled


def keep(plan: StartPlan, before: RayTransport, kept: Sequence[int], generation: int) -> RayTransport:
    """End all ranks but some, which get the numbers 0, 1, ... when they join. Returns what `fill` does."""
    _end(before, sorted(set(range(before.world_size)) - set(kept)))
    fresh = frozenset(number for number, rank in enumerate(kept) if rank in before.fresh)
    left = _transport(plan, [before.ranks[rank] for rank in kept], generation, before, fresh)
    left.standbys = living_standbys(before)
    return left


def enlist(plan: StartPlan, before: RayTransport, recruits: Sequence[Standby], generation: int) -> RayTransport:
    """Make recruits that are ready the last ranks. Returns what `fill` does."""
    ranks = [*before.ranks, *map(_recruited, recruits)]
    fresh = before.fresh | frozenset(range(before.world_size, len(ranks)))
    larger = _transport(plan, ranks, generation, before, fresh)
    larger.standbys = list(before.standbys)
    larger.recruits = [one for one in before.recruits if one not in recruits]
    return larger


def recruit(plan: StartPlan, transport: RayTransport, slots: Sequence[Slot], encoded: Any) -> list[Standby]:
    """Start processes in slots, without waiting for them: the transport's standbys or recruits to be. Closing or
    restarting the group then ends them too."""
    if not slots:
        return []
    taken = {one.name for one in transport.everyone}
    names = [name for name in _names(plan, range(len(taken) + len(slots))) if name not in taken][-len(slots) :]
    with _actors(plan, slots, names, again=True) as actors:
        parts = zip(actors, names, slots, strict=True)
        return [standby_of(plan, actor, name, slot, encoded) for actor, name, slot in parts]


def vacant_slots(plan: StartPlan, transport: RayTransport) -> list[Slot]:
    """Return the slots on living nodes in which the group has no process, or a standby that has died."""
    processes: list[Rank | Standby] = [*transport.ranks, *living_standbys(transport), *transport.recruits]
    used = {(one.slot.placement_group, one.slot.bundle) for one in processes if one.slot is not None}
    alive = {node.node_id for node in nodes()}
    free = [slot for slot in plan.pool.slots() if (slot.placement_group, slot.bundle) not in used]
    return [
        slot for slot, at in zip(free, known_locations(free), strict=True) if at is not None and at.node_id in alive
    ]


def living_standbys(transport: RayTransport) -> list[Standby]:
    """Return the standbys that have not died."""
    return [one for one in transport.standbys if death_of(one.actor) is None]


def given_address(plan: StartPlan, transport: RayTransport) -> str | None:
    """``master_addr``; None without one, or if rank 0 is not on the node of that address any more."""
    return plan.master[0] if plan.home in (None, transport.ranks[0].location.node_id) else None


def join(
    plan: StartPlan,
    transport: RayTransport,
    chosen: Sequence[int],
    encoded: Any,
    wait: WaitForConstructors,
    master: tuple[str | None, int | None],
    *,
    leave: bool = True,
) -> tuple[str, int]:
    """Have ranks join a rendezvous: on a new process the constructors run, and one that has workers keeps them.

    Args:
        encoded: the constructors.
        master: address and port of the rendezvous; rank 0 chooses what is None.
        leave: whether processes that have workers leave their process groups.

    Returns:
        Address and port of the rendezvous.
    """
    # A reference: Ray delivers its value to a rank before it runs _sc_join there. So no rank joins before rank 0 has
    # chosen the port, and the driver does not wait in between.
    rendezvous: Any = transport.ranks[0].actor._sc_rendezvous.remote(*master) if None in master else ray.put(master)
    transport.check_reachable(chosen)
    send = partial(transport.send_join, chosen, encoded, rendezvous, leave=leave)
    wait(transport, CallPlan.empty(transport.world_size).only(chosen), send)
    transport.note_started(chosen)
    try:
        found: tuple[str, int] = ray.get(rendezvous)
    except RayError as error:
        raise WorkerDiedError(f"{plan.name}: rank 0 died after its start: {one_line(error)}", rank=0) from error
    return found


def standby_of(plan: StartPlan, actor: ActorHandle, name: str, slot: Slot, encoded: Any) -> Standby:
    """Have an actor without a rank import the worker's class."""
    return Standby(actor, name, slot, actor._sc_prepare.remote(_worker_environment(plan), encoded))


def _recruited(standby: Standby) -> Rank:
    """The actor of a standby as a rank. Waits until it is ready."""
    where = standby.location()
    return Rank(standby.actor, standby.name, where, replace(standby.slot, location=where))


def _ready(standbys: list[Standby], end: float) -> Standby | None:
    """Take a living standby out of the list: one that is ready, or else one that becomes ready before ``end``, by the
    monotonic clock. Those that cannot be used are ended."""
    while standbys:
        ready, _ = ray.wait([one.prepared for one in standbys], timeout=max(0.0, end - time.monotonic()))
        if not ready:
            return None
        standby = next(one for one in standbys if one.prepared == ready[0])
        standbys.remove(standby)
        try:
            standby.location()
            return standby
        except RayError as error:
            logger.warning("%s: a standby cannot be used: %s", standby.name, one_line(error))
            standby.end()
    return None


def _end(transport: RayTransport, numbers: Sequence[int]) -> None:
    """End the processes of some ranks."""
    transport.restarted |= frozenset(numbers)  # before the kill, so that no watcher reports these deaths
    actors = [transport.ranks[number].actor for number in numbers]
    for actor in actors:
        ray.kill(actor, no_restart=True)
    remove_pools_of(actors)


def _names(plan: StartPlan, numbers: Iterable[int]) -> list[str]:
    unique = "" if plan.detached else f"_{uuid.uuid4().hex[:8]}"
    return [f"{plan.prefix}{plan.process.name}{unique}_{number}" for number in numbers]


@contextmanager
def _actors(
    plan: StartPlan, slots: Sequence[Slot], names: Sequence[str], *, again: bool
) -> Iterator[list[ActorHandle]]:
    """Create an actor in each slot, all at once, without waiting for them. They are ended if that raises, or the body
    of the ``with`` statement."""
    # Ray ends an actor that is not detached when its last handle is gone, so the handles are kept here.
    actors: list[ActorHandle] = []
    # The name of an actor that may exist although its handle was not returned yet: an exception such as
    # KeyboardInterrupt can arrive after Ray has registered the actor.
    creating: str | None = None
    try:
        make = _actor_maker(plan)
        end = time.monotonic() + (NAME_FREE_SECONDS if again else 0.0)
        for slot, name in zip(slots, names, strict=True):
            if plan.detached:  # the other names have a random part
                _wait_until_free(plan, name, end)
            creating = name
            try:
                actors.append(make(slot, name))
            except ValueError:
                creating = None  # another driver was faster; do not end its actor
                if plan.detached:
                    _wait_until_free(plan, name, 0.0)  # says so
                raise
            creating = None
        yield actors
    except BaseException:
        if plan.detached and creating is not None:  # other actors end with their handles
            try:
                actors.append(ray.get_actor(creating, plan.namespace))
            except Exception:
                logger.debug("%s had not been created", creating, exc_info=True)
        for actor in actors:
            try:
                ray.kill(actor, no_restart=True)
            except Exception:  # Ray was shut down, for example; the error that is being handled says more
                logger.debug("%r could not be ended", actor, exc_info=True)
        if session() is not None:
            remove_pools_of(actors)
        raise


def _wait_until_free(plan: StartPlan, name: str, end: float) -> None:
    """Wait until no actor has a name; a `ValueError` if one still has it at ``end``, by the monotonic clock."""
    while True:
        try:
            ray.get_actor(name, plan.namespace)
        except ValueError:
            return
        if time.monotonic() > end:
            raise ValueError(
                f"{plan.name}: a worker called {name!r} is already running. Attach to its group with "
                f"RayWorkerGroup.attach({name.rpartition('_')[0]!r}), or choose another name_prefix"
            )
        time.sleep(0.02)


@contextmanager
def _created(plan: StartPlan, slots: Sequence[Slot], names: Sequence[str], *, again: bool) -> Iterator[list[Rank]]:
    """Create actors as `_actors` does, and wait until they have reported where they run."""
    if not slots:
        yield []
        return
    if plan.process.python is not None:
        plan.pool.wait()  # Ray may be about to move a slot of a host that is gone
    check_python(plan, slots)
    with _actors(plan, slots, names, again=again) as actors:
        located = [actor._sc_locate.remote() for actor in actors]
        wait_started(located, plan.pool.placement_timeout, plan.name)
        try:
            locations: list[Location] = ray.get(located)
        except RayError as error:
            raise WorkerDiedError(f"{plan.name}: a worker died before it was started: {one_line(error)}") from error
        yield [
            Rank(actor, name, where, replace(slot, location=where))
            for actor, name, where, slot in zip(actors, names, locations, slots, strict=True)
        ]


def check_python(plan: StartPlan, slots: Sequence[Slot]) -> None:
    """Raise a `StartError` if the workers' own Python, should they have one, does not run where these slots are."""
    if plan.process.python is not None:
        # The workers get those of the job too, which this process need not have.
        of_job = dict(ray.get_runtime_context().runtime_env).get("env_vars") or {}
        env_vars = {**of_job, **_runtime_env(plan).get("env_vars", {})}
        python_env.check(plan.process.python, env_vars, node_locations(slots, plan.name), plan.name)


def _actor_maker(plan: StartPlan) -> Callable[[Slot, str], ActorHandle]:
    """Return a function that creates an actor in a slot. Its constructor does nothing: the rank is not known yet."""
    process = plan.process
    share = plan.pool.options.share(plan.use_gpu)
    options: dict[str, Any] = {
        **share,
        "max_restarts": 0,
        "lifetime": "detached" if plan.detached else None,
        "namespace": plan.namespace,
        **process.options,
    }
    own = process.options.get("resources") or {}
    options["resources"] = {**share["resources"], **process.additional_resource, **own} or None
    wanted = {"CPU": options["num_cpus"], "GPU": options["num_gpus"], "memory": options["memory"]}
    wanted |= options["resources"] or {}
    slot = dict(plan.pool.reservations[0].request.bundle)
    beyond = {name: amount for name, amount in wanted.items() if (amount or 0) > slot.get(name, 0)}
    if beyond:
        raise PlacementError(
            f"{plan.name}: each worker asks for {beyond}, more than a slot of {plan.pool!r} has: {slot}. Change "
            "the options given to update_options(), or create a pool with larger slots"
        )
    runtime_env = _runtime_env(plan)
    if runtime_env:
        options["runtime_env"] = runtime_env
    ray_class = actor_class(process.name, process.methods)

    def make(slot: Slot, name: str) -> ActorHandle:
        where = slot.scheduling_strategy()
        actor: ActorHandle = ray_class.options(name=name, scheduling_strategy=where, **options).remote()
        return actor

    return make


def _runtime_env(plan: StartPlan) -> dict[str, Any]:
    runtime_env = dict(plan.process.options.get("runtime_env") or {})
    early = {key: value for key, value in plan.environment.items() if before_start(key, value)}
    if early:
        runtime_env["env_vars"] = {**runtime_env.get("env_vars", {}), **early}
    if plan.process.python is not None:
        of_job = dict(ray.get_runtime_context().runtime_env)
        of_job.pop("py_executable", None)  # this one the actor's own replaces
        check_one_python(f"{plan.name}: ray.init()", plan.process.python, of_job)
        runtime_env["py_executable"] = python_env.command(plan.process.python)
    return runtime_env


def _transport(
    plan: StartPlan,
    ranks: Sequence[Rank],
    generation: int,
    before: RayTransport | None = None,
    fresh: frozenset[int] = frozenset(),
) -> RayTransport:
    """Return a transport to these ranks, each with what it is told when it joins, for a group of this generation. Links
    of the transport ``before`` to ranks that are left are used again. ``fresh``: ranks with new processes, on which
    calls are to be repeated."""
    nodes = [rank.location.node_id for rank in ranks]
    node_ranks = {node: number for number, node in enumerate(dict.fromkeys(nodes))}
    slots = [rank.slot for rank in ranks if rank.slot is not None]  # all of them: the group has started its workers
    homes = [slot.home for slot in slots]
    plan.pool.note_locations(slots, [rank.location for rank in ranks])  # Ray may have moved one to another node
    environment, members = _worker_environment(plan), members_of(ranks) if plan.collectives else None
    told = []
    for number, (rank, local) in enumerate(zip(ranks, local_ranks(homes), strict=True)):
        replacement = plan.collectives and number in fresh
        node_rank = node_ranks[nodes[number]]
        info = RankInfo(
            *(number, len(ranks), *local, "", 0, node_rank),
            generation=generation,
            replacement=replacement,
            members=members,
        )
        told.append(replace(rank, message=(info, environment)))
    transport = RayTransport(told, plan.pool, {} if before is None else before.links)
    transport.fresh = fresh
    transport.recruits = [] if before is None else list(before.recruits)
    return transport


def _worker_environment(plan: StartPlan) -> dict[str, str]:
    # The others were set when the process started: Ray has put values in place of ${NAME} in them, and PYTHONPATH has
    # more in it by now, which the worker's own children need too.
    return {key: value for key, value in plan.environment.items() if not before_start(key, value)}


def checked_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return ``worker_env``; a `TypeError` or `ValueError` if it is invalid."""
    if not isinstance(environment, Mapping):
        raise TypeError(f"worker_env is a dict of strings, got {environment!r}")
    for key, value in environment.items():
        if key in RANK_ENVIRONMENT:
            raise ValueError(f"worker_env cannot set {key}: the group sets it for each rank")
        if not isinstance(key, str) or not isinstance(value, str):
            raise TypeError(f"worker_env maps strings to strings, got {key!r}: {value!r}")
        if not key or "=" in key or "\0" in key + value:
            raise ValueError(f"worker_env: {key!r}: {value!r} is not a valid environment variable")
    return dict(environment)


def checked_master(address: str | None, port: int | str | None) -> tuple[str | None, int | None]:
    """Return ``master_addr``, and ``master_port`` as a number; a `ValueError` if one of them is invalid."""
    if address is not None and (not isinstance(address, str) or not address):
        raise ValueError(f"master_addr is a host name or address, got {address!r}")
    if port is None:
        return address, None
    try:
        number = int(port)
    except (TypeError, ValueError):
        number = -1
    if not 0 < number < 65536:
        raise ValueError(f"master_port is a port number from 1 to 65535, got {port!r}")
    return address, number
