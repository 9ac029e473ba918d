"""Finding workers that another driver started, by name or by handle."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError

from single_controller.call.errors import CallTimeoutError, WorkerDiedError
from single_controller.ray.compat import all_actors
from single_controller.ray.group_records import read
from single_controller.ray.placement.reservation import remove_placement_groups, remove_pools_of
from single_controller.ray.rank.actor import TAKE, Identity
from single_controller.ray.results import one_line
from single_controller.ray.runtime import ensure_ray
from single_controller.ray.transport import Rank

logger = logging.getLogger(__name__)

IDENTITY_SECONDS = 30.0
"""How long workers may take to identify themselves, which they do while they are busy."""


def find_workers(
    name_prefix: str | None,
    worker_names: Sequence[str] | None,
    worker_handles: Sequence[Any] | None,
    class_name: str | None = None,
    namespace: str | None = None,
) -> tuple[Identity, list[Rank]]:
    """Ask running workers who they are. Takes exactly one of the first three arguments; the class narrows a prefix.
    Returns rank 0, and all ranks in order. Raises as `RayWorkerGroup.from_detached` does."""
    given = [value for value in (name_prefix, worker_names, worker_handles) if value is not None]
    if len(given) != 1:
        raise ValueError("from_detached() takes exactly one of name_prefix, worker_names and worker_handles")
    ensure_ray()
    if worker_handles is None:
        if worker_names is None:
            worker_names, namespace = _names_with(str(name_prefix), class_name, namespace)
        elif namespace is None:
            namespace = _namespace_of(worker_names)
        worker_handles = [ray.get_actor(name, namespace) for name in worker_names]
    other = [handle for handle in worker_handles if not hasattr(handle, "_sc_identity")]
    if other:
        raise ValueError(f"cannot attach: {other[0]!r} is not a worker of a group")
    # Not behind the calls through their handles, and what a standby prepares
    asked = [handle._sc_identity.options(concurrency_group=TAKE).remote() for handle in worker_handles]
    try:
        identities = ray.get(asked, timeout=IDENTITY_SECONDS)
    except GetTimeoutError:
        raise CallTimeoutError(
            f"cannot attach: the workers have not identified themselves within {IDENTITY_SECONDS:g} s: they are "
            "stopped, or C code holds the GIL. Try again, or end them with end_detached(name)"
        ) from None
    except RayError as error:
        raise WorkerDiedError(f"cannot attach: a worker does not respond: {one_line(error)}") from error
    pairs = zip(identities, worker_handles, strict=True)
    found = sorted(((who, handle) for who, handle in pairs if who is not None), key=lambda pair: pair[0].info.rank)
    if not found:
        raise ValueError("cannot attach: none of these workers was started")
    first = found[0][0]
    if name_prefix is not None:  # all are of one group, to which `grow` may be about to add some
        found = [pair for pair in found if pair[0].info.world_size == first.info.world_size]
    numbers = [identity.info.rank for identity, _ in found]
    if numbers != list(range(first.info.world_size)):
        raise ValueError(
            f"cannot attach: all {first.info.world_size} ranks of one group are needed, once each; got ranks {numbers}"
        )
    return first, [Rank(handle, identity.name, identity.location) for identity, handle in found]


def placement_groups(ranks: Sequence[Rank]) -> tuple[str, ...]:
    """Ray's ids, in hex, of the placement groups in which workers and their standbys are."""
    actors = all_actors()
    names = {actors[rank.actor._actor_id.hex()].group for rank in ranks}
    found = {one.placement_group for one in actors.values() if one.alive and one.group in names}
    return tuple(sorted(found - {""}))


def _namespace_of(names: Sequence[str]) -> str:
    """The namespace of actors with these names: the driver's own, or the only other one."""
    here: str = ray.get_runtime_context().namespace
    known = ray.util.list_named_actors(all_namespaces=True)
    found: set[str] = {one["namespace"] for one in known if one["name"] in names}
    return found.pop() if here not in found and len(found) == 1 else here


def _names_with(prefix: str, class_name: str | None, namespace: str | None) -> tuple[list[str], str]:
    """The actors of the only group that was started with a prefix, and their namespace. Their names are
    <prefix><class>_<number>. The driver's namespace is preferred to all others."""
    groups: dict[tuple[str, str], list[str]] = {}
    for actor in ray.util.list_named_actors(all_namespaces=True):
        stem, _, number = actor["name"].rpartition("_")
        if stem.startswith(prefix) and number.isdigit():
            groups.setdefault((actor["namespace"], stem), []).append(actor["name"])
    if class_name is not None:
        groups = {key: names for key, names in groups.items() if key[1] == f"{prefix}{class_name}"}
    here = ray.get_runtime_context().namespace if namespace is None else namespace
    nearest = {key: names for key, names in groups.items() if key[0] == here}
    if namespace is not None or nearest:
        groups = nearest
    exact = {key: names for key, names in groups.items() if key[1] == prefix}
    groups = exact or groups
    if len(groups) > 1:
        found = ", ".join(f"{stem} (namespace {space})" for space, stem in sorted(groups))
        raise ValueError(
            f"cannot attach: several groups have names that begin with {prefix!r}: {found}. "
            "Give the full name, the namespace, or worker_names"
        )
    if not groups:
        where = "in any namespace" if namespace is None else f"in the namespace {namespace!r}"
        raise ValueError(
            f"cannot attach: no actor's name begins with {prefix!r} {where}. If the group runs in another Ray "
            "cluster, connect to it with ray.init(address=...)"
        )
    (space, _), names = next(iter(groups.items()))
    return names, space


def end_detached(name: str, namespace: str | None = None) -> int:
    """End detached workers without asking them, and remove their placement groups, with everything else in those: for a
    group to which you cannot attach, because workers have died, hang in a collective, or were never started.

    Args:
        name: name of the group: its ``name_prefix`` with the name of its class.
        namespace: Ray's namespace of the name; any by default.

    Returns:
        The number of workers that were ended.

    Raises:
        ValueError: no worker has such a name, or workers in several namespaces have it.
    """
    ensure_ray()
    records = read()
    found = {
        number: one
        for number, one in records.actors.items()
        if one.detached and one.group[1] == name and namespace in (None, one.namespace)
    }
    living = [one for one in found.values() if one.alive]
    spaces = sorted({one.namespace for one in living or found.values()})
    if len(spaces) != 1:
        where = f"in the namespaces {', '.join(spaces)}: say which" if spaces else "nowhere in this Ray"
        raise ValueError(f"end_detached(): workers called {name}_<rank> are {where}")
    ended = []
    for one in living:
        try:
            ended.append(ray.get_actor(one.name, one.namespace))
            ray.kill(ended[-1], no_restart=True)
        except ValueError:
            logger.debug("%s has ended by itself", one.name)
    remove_pools_of(ended)
    # Not where others have died: workers of former groups, and those that were replaced.
    ranks = {rank.actor for record in records.groups.values() for rank in record.ranks}
    there = [one for number, one in found.items() if one.alive or (number in ranks and one.namespace in spaces)]
    places = {one.placement_group for one in there or found.values()} - {""}
    remove_placement_groups(sorted(places))
    return len(living)
