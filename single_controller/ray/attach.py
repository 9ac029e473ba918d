"""Finding workers that somebody else started, by name or by handle."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayError

from single_controller.base.errors import WorkerDiedError
from single_controller.base.worker import Worker
from single_controller.ray.answers import one_line
from single_controller.ray.engine import Rank, RayEngine
from single_controller.ray.runtime import ensure_ray


@dataclass(frozen=True)
class Found:
    """Workers that run already.

    Attributes:
        engine: carries calls to them.
        cls: their class.
        master: address and port of their rendezvous.
    """

    engine: RayEngine
    cls: type[Worker]
    master: tuple[str, int]


def find_workers(
    name_prefix: str | None,
    worker_names: Sequence[str] | None,
    worker_handles: Sequence[Any] | None,
    cls: type[Worker] | None,
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
        names = worker_names if worker_names is not None else _names_with(str(name_prefix), cls)
        worker_handles = [ray.get_actor(name) for name in names]
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
    return Found(RayEngine(ranks), first.cls.open(), (first.place.master_addr, first.place.master_port))


def _names_with(prefix: str, cls: type[Worker] | None) -> list[str]:
    """The actors of the one group that was started with a prefix: their names are <prefix><class>_<number>."""
    groups: dict[str, list[str]] = {}
    for name in ray.util.list_named_actors():
        stem, _, number = name.rpartition("_")
        if stem.startswith(prefix) and number.isdigit():
            groups.setdefault(stem, []).append(name)
    if cls is not None:
        groups = {stem: names for stem, names in groups.items() if stem == f"{prefix}{cls.__name__}"}
    if len(groups) > 1:
        raise ValueError(
            f"from_detached(): several groups have names that begin with {prefix!r}: {', '.join(sorted(groups))}. "
            "Give ray_cls_with_init, or worker_names"
        )
    if not groups:
        raise ValueError(
            f"from_detached(): no actor's name begins with {prefix!r} in the namespace "
            f"{ray.get_runtime_context().namespace!r}; join the namespace of the group's driver: "
            "ray.init(address=..., namespace=...)"
        )
    return next(iter(groups.values()))
