"""Finding workers that somebody else started, by name or by handle."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray import PlacementGroupID
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup, remove_placement_group

from single_controller.base.errors import WorkerDiedError
from single_controller.base.later import unpacked
from single_controller.base.worker import Worker
from single_controller.ray.answers import one_line
from single_controller.ray.engine import Rank, RayEngine
from single_controller.ray.runtime import ensure_ray
from single_controller.ray.transport import Packet


@dataclass(frozen=True)
class Found:
    """Workers that run already.

    Attributes:
        engine: carries calls to them.
        packed: role -> class, packed.
        master: address and port of their rendezvous.
        placement_groups: Ray's ids of the placement groups in which they are, in hex.
    """

    engine: RayEngine
    packed: Packet
    master: tuple[str, int]
    placement_groups: tuple[str, ...]

    def classes(self) -> dict[str | None, type[Worker]]:
        """Their classes, by role.

        Raises:
            ResultError: one of them cannot be loaded here.
        """
        classes: dict[str | None, type[Worker]] = unpacked("from_detached", 0, self.packed.open)
        return classes


def find_workers(
    name_prefix: str | None,
    worker_names: Sequence[str] | None,
    worker_handles: Sequence[Any] | None,
    class_name: str | None = None,
    namespace: str | None = None,
) -> Found:
    """Ask running workers who they are. Exactly one of the first three says which; the class narrows a prefix down.

    Raises:
        ValueError: none or several of the three are given, no worker has such a name, or some ranks are missing.
        WorkerDiedError: one of them does not live.
    """
    given = [value for value in (name_prefix, worker_names, worker_handles) if value is not None]
    if len(given) != 1:
        raise ValueError("from_detached() takes exactly one of name_prefix, worker_names and worker_handles")
    ensure_ray()
    if worker_handles is None:
        if worker_names is None:
            worker_names, namespace = _names_with(str(name_prefix), class_name, namespace)
        worker_handles = [ray.get_actor(name, namespace) for name in worker_names]
    try:
        identities = ray.get([handle._sc_identity.remote() for handle in worker_handles])
    except RayError as error:
        raise WorkerDiedError(f"from_detached(): a worker does not answer: {one_line(error)}") from error
    found = sorted(zip(identities, worker_handles, strict=True), key=lambda pair: pair[0].place.rank)
    first = found[0][0]
    numbers = [identity.place.rank for identity, _ in found]
    if numbers != list(range(first.place.world_size)):
        raise ValueError(
            f"from_detached() needs all {first.place.world_size} ranks of one group, once each; got ranks {numbers}"
        )
    ranks = [Rank(handle, identity.name, identity.location) for identity, handle in found]
    groups = sorted({identity.placement_group for identity, _ in found if identity.placement_group is not None})
    master = (first.place.master_addr, first.place.master_port)
    return Found(RayEngine(ranks), first.classes, master, tuple(groups))


def _names_with(prefix: str, class_name: str | None, namespace: str | None) -> tuple[list[str], str]:
    """The actors of the one group that was started with a prefix, and their namespace. Their names are
    <prefix><class>_<number>; the driver's namespace comes before all others."""
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
            f"from_detached(): several groups have names that begin with {prefix!r}: {found}. "
            "Give the whole name, namespace, or worker_names"
        )
    if not groups:
        where = "in any namespace" if namespace is None else f"in the namespace {namespace!r}"
        raise ValueError(
            f"from_detached(): no actor's name begins with {prefix!r} {where}; is this the Ray of the group's driver? "
            "ray.init(address=...) joins it"
        )
    (space, _), names = next(iter(groups.items()))
    return names, space


def remove_placement_groups(ids: Sequence[str]) -> None:
    """Remove placement groups by their ids in hex; whatever lives in them ends."""
    for number in ids:
        remove_placement_group(PlacementGroup(PlacementGroupID(bytes.fromhex(number))))
