"""Starting a group's workers: create actors in the slots, assign ranks by where they run, then run the constructors.
Changing the ranks of a group: fill some with standbys or new actors, drop some, or add some; then have all ranks join a
new rendezvous.

No step handles one rank after the other: all actors are created at once, asked for their location at once, and sent
their start messages at once. Rank 0's address travels along as a reference.
"""

from __future__ import annotations

import functools
import logging
import time
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayError

from dispatch.plan import CallPlan
from single_controller.call.call import Call
from single_controller.call.errors import PlacementError, WorkerDiedError
from single_controller.call.pool import local_ranks
from single_controller.call.transport import Sent
from single_controller.call.worker import RANK_ENVIRONMENT
from single_controller.ray import python_env
from single_controller.ray.class_with_args import ProcessSpec, check_one_python
from single_controller.ray.compat import death_of
from single_controller.ray.placement.pool import RayResourcePool
from single_controller.ray.placement.reservation import node_locations, remove_pools_of, wait_started
from single_controller.ray.placement.slots import Slot, SlotLocation
from single_controller.ray.rank.actor import Location, StartMessage, actor_class
from single_controller.ray.rank.worker_env import before_start
from single_controller.ray.results import one_line
from single_controller.ray.runtime import nodes, session
from single_controller.ray.transport import Rank, RayTransport, Standby

logger = logging.getLogger(__name__)

NAME_FREE_SECONDS = 10.0
"""How long a restart waits until Ray has freed the names of the workers that it ended."""


STANDBY_SECONDS = 5.0
"""How long a rank that is replaced waits for a standby that is not ready. Starting a new process takes about as long,
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


SendJoin = Callable[[Call], Sent]
WaitForConstructors = Callable[[RayTransport, CallPlan, SendJoin], None]
"""Waits until the constructors have returned, and raises the error of one that failed."""


def start(
    plan: StartPlan, wait: WaitForConstructors, again: bool = False, generation: int = 0
) -> tuple[RayTransport, tuple[str, int]]:
    """Start the workers.

    Args:
        plan: what to start.
        wait: waits until the constructors have returned, and raises the error of one that failed.
        again: whether workers of the same names were just ended, so that their names may still be taken.
        generation: how often the group was restarted or had ranks replaced before.

    Returns:
        The transport, and the address and port of the rendezvous.

    Raises:
        PlacementError, StartError, WorkerDiedError, CallTimeoutError, DispatchError: see `RayWorkerGroup`. All actors
            were ended.
    """
    encoded = plan.process.encode()  # first: what cannot be pickled must not cost a start
    plan.pool.wait(assign_ranks=plan.detached)  # the name of a detached actor ends in its rank
    slots = plan.pool.slots()
    names = _names(plan, range(len(slots)))
    with _ended_on_error(plan) as actors:
        locations = _make(plan, slots, names, actors, again=again)
        # Reorders the pool's slots if this is its first group, so what is read from the pool below is by rank.
        order = plan.pool.assign_ranks(slots, [slot_location(where) for where in locations])
        made = [
            Rank(actors[index], names[index], locations[index], slot)
            for index, slot in zip(order, plan.pool.slots(), strict=True)
        ]
        count = len(made) - plan.standby
        transport = RayTransport(_with_messages(plan, made[:count], generation), plan.pool)
        transport.standbys = [
            standby_of(plan, one.actor, one.name, one.slot, encoded) for one in made[count:] if one.slot is not None
        ]
        return transport, join(plan, transport, range(count), encoded, wait, plan.master)


def fill(
    plan: StartPlan, transport: RayTransport, chosen: Sequence[int], encoded: Any, generation: int, *, collectives: bool
) -> RayTransport:
    """End some ranks, and fill them with standbys or, where there is none, with new actors in their slots. No user code
    runs on them before `join`.

    Args:
        plan: what was started.
        transport: the group's present transport.
        chosen: the ranks, dead or alive.
        encoded: the constructors.
        generation: of the group when these ranks have joined.
        collectives: whether the ranks use collectives.

    Raises:
        PlacementError, WorkerDiedError: see `RayWorkerGroup`. The new actors were ended.
    """
    _end(transport, chosen)
    ranks, standbys = list(transport.ranks), living_standbys(transport)
    lost = [one.slot for one in transport.standbys if one not in standbys]
    missing = []
    for number in chosen:
        standby = _ready(standbys)
        if standby is None:
            missing.append(number)
        else:
            slot = ranks[number].slot
            lost += [] if slot is None else [slot]
            ranks[number] = Rank(standby.actor, standby.name, standby.location(), standby.slot)
    slots = [slot for number in missing if (slot := ranks[number].slot) is not None]
    # A detached actor keeps its name, because others find it by that name.
    names = [ranks[number].name for number in missing] if plan.detached else _names(plan, missing)
    with _ended_on_error(plan) as actors:
        locations = _make(plan, slots, names, actors, again=True) if missing else []
    for number, actor, name, where, slot in zip(missing, actors, names, locations, slots, strict=True):
        ranks[number] = Rank(actor, name, where, replace(slot, location=slot_location(where)))
    fresh = transport.fresh | frozenset(chosen)
    filled = RayTransport(
        _with_messages(plan, ranks, generation, fresh if collectives else ()), plan.pool, transport.links
    )
    filled.standbys, filled.fresh = standbys, fresh
    # The slots that became free get standbys in turn. Nobody waits for them: the host may be gone.
    recruit(plan, filled, lost, encoded)
    return filled


def keep(plan: StartPlan, transport: RayTransport, kept: Sequence[int], generation: int) -> RayTransport:
    """End all ranks but some, which get the numbers 0, 1, ... when they join. Arguments as for `fill`."""
    _end(transport, sorted(set(range(transport.world_size)) - set(kept)))
    left = RayTransport(
        _with_messages(plan, [transport.ranks[rank] for rank in kept], generation), plan.pool, transport.links
    )
    left.standbys = living_standbys(transport)
    return left


def recruit(plan: StartPlan, transport: RayTransport, slots: Sequence[Slot], encoded: Any) -> list[Standby]:
    """Start standbys in slots, without waiting for them. Closing or restarting the group ends them too."""
    if not slots:
        return []
    make = _actor_maker(plan, again=True)
    present = len(transport.ranks) + len(transport.standbys)
    taken = {rank.name for rank in transport.ranks} | {one.name for one in transport.standbys}
    names = [name for name in _names(plan, range(present + len(slots))) if name not in taken]
    made = [
        standby_of(plan, make(slot, name), name, slot, encoded)
        for slot, name in zip(slots, names[-len(slots) :], strict=True)
    ]
    transport.standbys += made
    return made


def enlist(
    plan: StartPlan, transport: RayTransport, recruits: Sequence[Standby], generation: int, *, collectives: bool
) -> RayTransport:
    """Make standbys that are ready the last ranks. Other arguments as for `fill`."""
    added = []
    for one in recruits:
        where = one.location()
        added.append(Rank(one.actor, one.name, where, replace(one.slot, location=slot_location(where))))
    fresh = frozenset(range(transport.world_size, transport.world_size + len(added)))
    ranks = _with_messages(plan, [*transport.ranks, *added], generation, fresh if collectives else ())
    larger = RayTransport(ranks, plan.pool, transport.links)
    larger.standbys = [one for one in transport.standbys if one not in recruits]
    larger.fresh = transport.fresh | fresh
    return larger


def vacant_slots(plan: StartPlan, transport: RayTransport) -> list[Slot]:
    """Return the slots on living nodes in which the group has no process."""
    taken = [rank.slot for rank in transport.ranks] + [one.slot for one in transport.standbys]
    used = {(slot.placement_group, slot.bundle) for slot in taken if slot is not None}
    alive = {node.node_id for node in nodes()}
    vacant = []
    for slot in plan.pool.slots():
        if (slot.placement_group, slot.bundle) not in used:
            with suppress(PlacementError):  # Ray has found no node for it since its node died
                if node_locations([slot], plan.name)[0].node_id in alive:
                    vacant.append(slot)
    return vacant


def living_standbys(transport: RayTransport) -> list[Standby]:
    """Return the standbys that have not died."""
    return [one for one in transport.standbys if death_of(one.actor) is None]


def _end(transport: RayTransport, numbers: Sequence[int]) -> None:
    """End the processes of some ranks."""
    transport.restarted |= frozenset(numbers)  # before the kill, so that no watcher reports these deaths
    actors = [transport.ranks[number].actor for number in numbers]
    for actor in actors:
        ray.kill(actor, no_restart=True)
    remove_pools_of(actors)


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
        plan: what was started.
        transport: the transport.
        chosen: the ranks.
        encoded: the constructors.
        wait: waits until the ranks have joined, and raises the error of one that failed.
        master: address and port of the rendezvous; rank 0 chooses what is None.
        leave: whether processes that have workers leave their process groups.

    Returns:
        Address and port of the rendezvous.

    Raises:
        StartError, WorkerDiedError, CallTimeoutError: see `RayWorkerGroup`.
    """
    # A reference: Ray delivers its value to a rank before it runs _sc_join there. So no rank joins before rank 0 has
    # chosen the port, and the driver does not wait in between.
    rendezvous: Any = transport.ranks[0].actor._sc_rendezvous.remote(*master) if None in master else ray.put(master)
    transport.check_reachable(chosen)
    send = functools.partial(transport.send_join, chosen, encoded, rendezvous, leave=leave)
    wait(transport, CallPlan.empty(transport.world_size).only(chosen), send)
    try:
        found: tuple[str, int] = ray.get(rendezvous)
    except RayError as error:
        raise WorkerDiedError(f"{plan.name}: rank 0 died after its start: {one_line(error)}", rank=0) from error
    return found


def standby_of(plan: StartPlan, actor: ActorHandle, name: str, slot: Slot, encoded: Any) -> Standby:
    """Have an actor without a rank import the worker's class."""
    return Standby(actor, name, slot, actor._sc_prepare.remote(_worker_environment(plan), encoded))


def _ready(standbys: list[Standby]) -> Standby | None:
    """Take a living standby out of the list: one that is ready, or else the one that will be soon."""
    while standbys:
        ready, _ = ray.wait([one.prepared for one in standbys], timeout=STANDBY_SECONDS)
        if not ready:
            return None
        standby = next(one for one in standbys if one.prepared == ready[0])
        standbys.remove(standby)
        try:
            standby.location()
            return standby
        except RayError as error:
            logger.warning("%s: a standby cannot be used: %s", standby.name, one_line(error))
    return None


def _names(plan: StartPlan, numbers: Iterable[int]) -> list[str]:
    unique = "" if plan.detached else f"_{uuid.uuid4().hex[:8]}"
    return [f"{plan.prefix}{plan.process.name}{unique}_{number}" for number in numbers]


class _Actors(list[ActorHandle]):
    """Actors that are being created. The list keeps their handles: Ray ends an actor that is not detached when the last
    handle of it is gone.

    Attributes:
        creating: name of an actor that may exist although its handle was not returned yet: an exception such as
            KeyboardInterrupt can arrive after Ray has registered the actor.
    """

    creating: str | None = None


@contextmanager
def _ended_on_error(plan: StartPlan) -> Iterator[_Actors]:
    actors = _Actors()
    try:
        yield actors
    except BaseException:
        if plan.detached and actors.creating is not None:  # other actors end with their handles
            try:
                actors.append(ray.get_actor(actors.creating, plan.namespace))
            except Exception:
                logger.debug("%s had not been created", actors.creating, exc_info=True)
        for actor in actors:
            try:
                ray.kill(actor, no_restart=True)
            except Exception:  # Ray was shut down, for example; the error that is being handled says more
                logger.debug("%r could not be ended", actor, exc_info=True)
        if session() is not None:
            remove_pools_of(actors)
        raise


def _make(
    plan: StartPlan, slots: Sequence[Slot], names: Sequence[str], actors: _Actors, *, again: bool
) -> list[Location]:
    """Create all actors at once, and wait until they have reported where they run."""
    make = _actor_maker(plan, again=again)
    if plan.process.python is not None:
        env_vars = _runtime_env(plan).get("env_vars", {})
        plan.pool.wait()  # Ray may be about to move a slot of a host that is gone
        python_env.check(plan.process.python, env_vars, node_locations(slots, plan.name), plan.name)
    for slot, name in zip(slots, names, strict=True):
        actors.creating = name
        try:
            actors.append(make(slot, name))
        except ValueError:
            actors.creating = None  # another actor has the name; do not end it
            raise
    actors.creating = None
    located = [actor._sc_locate.remote() for actor in actors]
    wait_started(located, plan.pool.placement_timeout, plan.name)
    return _locations(located, plan.name)


def _actor_maker(plan: StartPlan, *, again: bool) -> Callable[[Slot, str], ActorHandle]:
    """Return a function that creates an actor in a slot. Its constructor does nothing: the rank is not known yet."""
    process = plan.process
    share = plan.pool.options.share(plan.use_gpu)
    options: dict[str, Any] = {
        **share,
        "resources": {**share["resources"], **process.additional_resource} or None,
        "max_restarts": 0,
        "lifetime": "detached" if plan.detached else None,
        "namespace": plan.namespace,
        **process.options,
    }
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
    end = time.monotonic() + (NAME_FREE_SECONDS if again else 0.0)

    def make(slot: Slot, name: str) -> ActorHandle:
        where = slot.scheduling_strategy()
        while True:
            try:
                actor: ActorHandle = ray_class.options(name=name, scheduling_strategy=where, **options).remote()
                return actor
            except ValueError as error:
                if "already taken" not in str(error):
                    raise
                if time.monotonic() > end:
                    raise ValueError(
                        f"{plan.name}: a worker called {name!r} is already running. Attach to its group with "
                        f"RayWorkerGroup.attach({name.rpartition('_')[0]!r}), or choose another name_prefix"
                    ) from error
            time.sleep(0.02)

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


def slot_location(where: Location) -> SlotLocation:
    """Return the location of the slot in which an actor found itself."""
    return SlotLocation(where.address, where.hostname, where.node_id, where.devices)


def _locations(refs: Sequence[Any], name: str) -> list[Location]:
    try:
        locations: list[Location] = ray.get(list(refs))
        return locations
    except RayError as error:
        raise WorkerDiedError(f"{name}: a worker died before it was started: {one_line(error)}") from error


def _with_messages(
    plan: StartPlan, ranks: Sequence[Rank], generation: int, replacements: Collection[int] = ()
) -> list[Rank]:
    """The ranks, each with what it is told when it joins."""
    nodes = [rank.location.node_id for rank in ranks]
    node_ranks = {node: number for number, node in enumerate(dict.fromkeys(nodes))}
    homes = [rank.slot.home for rank in ranks if rank.slot is not None]
    environment = _worker_environment(plan)
    return [
        replace(
            rank,
            message=StartMessage(
                number, len(ranks), *local, environment, node_ranks[nodes[number]], generation, number in replacements
            ),
        )
        for number, (rank, local) in enumerate(zip(ranks, local_ranks(homes), strict=True))
    ]


def _worker_environment(plan: StartPlan) -> dict[str, str]:
    # PYTHONPATH was set when the process started, and has more in it by now, which the worker's own children need too.
    return {key: value for key, value in plan.environment.items() if key != "PYTHONPATH"}


def checked_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return ``worker_env``.

    Raises:
        TypeError, ValueError: it is invalid.
    """
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


def checked_address(address: str | None) -> str | None:
    """Return ``master_addr``.

    Raises:
        ValueError: it is invalid.
    """
    if address is not None and (not isinstance(address, str) or not address):
        raise ValueError(f"master_addr is a host name or address, got {address!r}")
    return address


def checked_port(port: int | str | None) -> int | None:
    """Return ``master_port`` as a number.

    Raises:
        ValueError: it is invalid.
    """
    if port is None:
        return None
    try:
        number = int(port)
    except (TypeError, ValueError):
        number = -1
    if not 0 < number < 65536:
        raise ValueError(f"master_port is a port number from 1 to 65535, got {port!r}")
    return number
