"""Layout: the coordinates of every rank on named axes, and the routing that follows from them.

This file alone decides which ranks receive the same shard and which ranks' results are returned.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol

from dispatch.checks import is_count
from dispatch.errors import DispatchError
from dispatch.tables import aligned

AXES = ("dp", "cp", "tp", "pp", "sp")
"""The axes that the MEGATRON modes know. Ranks that differ in sp alone (Ulysses) get the same rows."""
COLLECTS_LAST = "pp"
"""The mesh axis on which the last rank collects, because the last pipeline stage has the output."""


@dataclass(frozen=True, slots=True)
class Routing:
    """Which rank gets which shard, and which ranks' results are returned."""

    shards: int  # number of distinct shards
    shard_of: tuple[int | None, ...]  # the shard number of each rank; None for a rank that is not called
    collecting: tuple[int, ...]  # the collecting ranks, in the order in which the driver gets their results
    unit: str = "world_size"  # what the number of shards means, for error messages ("dp_size")

    @classmethod
    def only(cls, ranks: Sequence[int], world_size: int) -> Routing:
        """One shard for the given ranks alone. They collect in the given order."""
        called = frozenset(ranks)
        return cls(1, tuple(0 if rank in called else None for rank in range(world_size)), tuple(ranks))


@dataclass(frozen=True)
class Mesh:
    """A named mesh: the data-parallel rank of each rank on it, and whether the rank collects.

    Raises:
        ValueError: the two differ in length, or a dp rank is not an integer >= 0.
        DispatchError: on `routing`, unless the dp ranks are 0..n-1 with one collecting rank each.
    """

    name: str
    dp_rank: tuple[int, ...]
    collects: tuple[bool, ...]

    def __post_init__(self) -> None:
        if len(self.dp_rank) != len(self.collects):
            raise ValueError(f"Mesh {self.name!r}: {len(self.dp_rank)} dp ranks, but {len(self.collects)} collects")
        _check_coordinates(f"Mesh {self.name!r}: dp_rank", self.dp_rank)

    @cached_property
    def routing(self) -> Routing:
        """Each rank gets the shard of its dp rank. Results are in the order of dp ranks."""
        return _route(self.dp_rank, self.collects, max(self.dp_rank) + 1, unit=f"dp_size of mesh {self.name!r}")


@dataclass(frozen=True)
class Layout:
    """The coordinates of a group's ranks on named axes, and its named meshes.

    Args:
        axes: axis -> coordinate of each rank, for example ``{"dp": [0, 0, 1, 1], "tp": [0, 1, 0, 1]}``. An axis
            that is not given has size 1. The workers report their coordinates; they are never computed from ranks.
        meshes: name -> `Mesh`.
        sizes: axis -> number of coordinates, where the workers reported it. An axis that appears only here
            (Megatron's ``vpp``: a rank holds several virtual stages) has a size and no coordinates.
        world_size: number of ranks. Needed only for a layout without axes and meshes.

    Raises:
        ValueError: the axes differ in length, a coordinate is not an integer >= 0, or is not below its axis's size.
    """

    axes: Mapping[str, Sequence[int]]
    meshes: Mapping[str, Mesh] = field(default_factory=dict)
    sizes: Mapping[str, int] = field(default_factory=dict)
    world_size: int = 0

    def __post_init__(self) -> None:
        if not isinstance(self.axes, Mapping):
            raise ValueError(f"Layout: axes={self.axes!r:.80}; pass a dict of coordinates, such as {{'dp': [0, 1]}}")
        for name, given in self.axes.items():
            if not isinstance(name, str) or not isinstance(given, Iterable):
                raise ValueError(
                    f"Layout: axis {name!r} is {given!r:.80}; pass the name of an axis and the coordinate of each "
                    "rank, such as {'dp': [0, 1]}"
                )
        axes = {name: tuple(coordinates) for name, coordinates in self.axes.items()}
        lengths = {name: len(coordinates) for name, coordinates in axes.items()}
        lengths |= {f"mesh {name}": len(mesh.dp_rank) for name, mesh in self.meshes.items()}
        if self.world_size:
            lengths["world_size"] = self.world_size
        if len(set(lengths.values())) > 1:
            raise ValueError(f"Layout: every axis has one coordinate per rank, but the lengths are {lengths}")
        for name, coordinates in axes.items():
            _check_coordinates(f"Layout: axis {name!r}", coordinates)
            size = self.sizes.get(name)
            if size is not None and coordinates and max(coordinates) >= size:
                raise ValueError(f"Layout: axis {name!r} has size {size}, but a rank has coordinate {max(coordinates)}")
        object.__setattr__(self, "axes", axes)
        object.__setattr__(self, "world_size", next(iter(lengths.values()), 0))

    @classmethod
    def flat(cls, world_size: int) -> Layout:
        """Every rank is a dp rank of its own."""
        return cls({"dp": range(world_size)})

    def size(self, axis: str) -> int:
        """Number of coordinates on an axis; 1 for an axis that nobody reported."""
        return self._sizes.get(axis, 1)

    def coordinate(self, axis: str, rank: int) -> int:
        """The coordinate of a rank on an axis; 0 on an axis that nobody reported."""
        coordinates = self.axes.get(axis)
        return coordinates[rank] if coordinates is not None else 0

    @property
    def known(self) -> bool:
        """Whether the workers have reported coordinates."""
        return bool(self.axes)

    @cached_property
    def by_rank(self) -> Routing:
        """Rank k gets shard k; all ranks collect."""
        every_rank = tuple(range(self.world_size))
        return Routing(self.world_size, every_rank, every_rank)

    @cached_property
    def one_shard(self) -> Routing:
        """One shard for all ranks; all ranks collect."""
        return Routing.only(range(self.world_size), self.world_size)

    @cached_property
    def rank_zero(self) -> Routing:
        """One shard for rank 0 alone."""
        return Routing.only((0,), self.world_size)

    @cached_property
    def by_dp(self) -> Routing:
        """Megatron's data parallelism: a rank's shard is its dp rank; tp 0, last pp, cp 0, sp 0 collects."""
        dp, cp, tp, pp, sp = self._known_axes
        last = self.size("pp") - 1
        collects = [t == s == c == 0 and p == last for c, t, p, s in zip(cp, tp, pp, sp, strict=True)]
        return _route(dp, collects, self.size("dp"), unit="dp_size")

    @cached_property
    def by_dp_cp_pp(self) -> Routing:
        """pp and cp count as data too: dp-major, then cp, then pp; tp 0, sp 0 of each collects."""
        dp, cp, tp, pp, sp = self._known_axes
        cp_size, pp_size = self.size("cp"), self.size("pp")
        shard = [(d * cp_size + c) * pp_size + p for d, c, p in zip(dp, cp, pp, strict=True)]
        shards = self.size("dp") * cp_size * pp_size
        return _route(
            shard, [t == s == 0 for t, s in zip(tp, sp, strict=True)], shards, unit="dp_size * cp_size * pp_size"
        )

    def mesh(self, name: str) -> Mesh:
        """A named mesh. Raises a `DispatchError` if no worker registered it."""
        found = self.meshes.get(name)
        if found is None:
            known = ", ".join(sorted(self.meshes)) or "none"
            raise DispatchError(
                f"the workers registered no mesh {name!r} (registered: {known}); call self.register_mesh({name!r}, "
                "dp_rank=..., is_collect=...) on every rank"
            )
        return found

    def check_known(self) -> None:
        """Raise a `DispatchError` unless the workers have reported coordinates."""
        if not self.known:
            raise DispatchError(
                "no layout is registered. Call self.register_layout(dp=, tp=, pp=, cp=) on every rank, in __init__ or "
                "in a method that you call first; a MegatronWorker does this when it initializes Megatron"
            )

    @cached_property
    def _sizes(self) -> dict[str, int]:
        seen = {name: max(coordinates) + 1 for name, coordinates in self.axes.items() if coordinates}
        return {**seen, **self.sizes}

    @cached_property
    def _known_axes(self) -> tuple[Sequence[int], ...]:
        self.check_known()
        zeros = (0,) * self.world_size
        return tuple(self.axes.get(axis, zeros) for axis in AXES)

    def __str__(self) -> str:
        """One line per rank: its coordinates, its shards, and ``*`` where it collects for a shard."""
        columns = [["rank", *map(str, range(self.world_size))]]
        columns += [[axis, *map(str, coordinates)] for axis, coordinates in self.axes.items()]
        legend = []
        for mesh in (None, *self.meshes.values()):
            try:
                routing = self.by_dp if mesh is None else mesh.routing
            except DispatchError:  # nothing was registered, or the coordinates have a gap, which this table then shows
                continue
            collecting = frozenset(routing.collecting)
            shards = (f"{shard} {'*' if rank in collecting else ' '}" for rank, shard in enumerate(routing.shard_of))
            columns.append([f"{'shard' if mesh is None else f'mesh {mesh.name}'}  ", *shards])
            legend = ["* collecting rank of its shard"]
        return "\n".join([*aligned(list(zip(*columns, strict=True)), right=True), *legend])


def _check_coordinates(what: str, coordinates: Sequence[object]) -> None:
    for rank, coordinate in enumerate(coordinates):
        if not is_count(coordinate, 0):
            raise ValueError(f"{what} of rank {rank} is {coordinate!r}; coordinates are integers >= 0")


def _route(shard_of: Sequence[int], collects: Sequence[bool], shards: int, unit: str) -> Routing:
    """Build a routing; every shard needs exactly one collecting rank."""
    collecting: list[int | None] = [None] * shards
    for rank, (shard, is_collecting) in enumerate(zip(shard_of, collects, strict=True)):
        if not is_collecting:
            continue
        if collecting[shard] is not None:
            raise DispatchError(
                f"ranks {collecting[shard]} and {rank} both collect for shard {shard} ({unit} = {shards}): two workers "
                "registered the same coordinates. Check register_layout() or register_mesh() in the worker"
            )
        collecting[shard] = rank
    if None in collecting:
        raise DispatchError(
            f"no rank collects for shard {collecting.index(None)} ({unit} = {shards}): the coordinates that the "
            "workers registered have a gap. Check register_layout() or register_mesh() in the worker"
        )
    return Routing(shards, tuple(shard_of), tuple(rank for rank in collecting if rank is not None), unit)


@dataclass
class LayoutReport:
    """What one worker reported."""

    axes: dict[str, int] = field(default_factory=dict)  # axis -> coordinate
    sizes: dict[str, int] = field(default_factory=dict)  # axis -> number of coordinates, where the worker reported it
    # Mesh name -> (dp rank, whether the rank collects)
    meshes: dict[str, tuple[int, bool]] = field(default_factory=dict)
    version: int = 0  # increases with every change, so that a group notices one


class DeviceMesh(Protocol):
    """The part of ``torch.distributed.device_mesh.DeviceMesh`` that is used; torch itself is not imported here."""

    @property
    def mesh_dim_names(self) -> tuple[str, ...] | None: ...

    @property
    def shape(self) -> tuple[int, ...]: ...

    def get_coordinate(self) -> Sequence[int] | None: ...


def layout_from(reports: Sequence[LayoutReport]) -> Layout:
    """The layout that the workers, in order of rank, have reported; a `DispatchError` if only some ranks reported an
    axis or a mesh, or the reported sizes differ."""
    _check_complete("register_layout", "axis", [set(report.axes) for report in reports])
    _check_complete("register_mesh", "mesh", [set(report.meshes) for report in reports])
    first = reports[0]
    for rank, report in enumerate(reports):
        if report.sizes != first.sizes:
            raise DispatchError(
                f"rank {rank} reported the axis sizes {report.sizes}, but rank 0 reported {first.sizes}; "
                "all ranks of a group share the same axes"
            )
    axes = {axis: tuple(report.axes[axis] for report in reports) for axis in first.axes}
    meshes = {}
    for name in first.meshes:
        coordinates = [report.meshes[name] for report in reports]
        meshes[name] = Mesh(name, tuple(dp for dp, _ in coordinates), tuple(collects for _, collects in coordinates))
    return Layout(axes, meshes, dict(first.sizes), len(reports))


def _check_complete(function: str, what: str, reported: list[set[str]]) -> None:
    for name in sorted(set().union(*reported)):
        missing = [rank for rank, names in enumerate(reported) if name not in names]
        if missing:
            raise DispatchError(
                f"ranks {missing} have not called {function}() for the {what} {name!r}, but the other ranks have; "
                "every rank of the group must call it"
            )


def mesh_coordinates(device_mesh: DeviceMesh, data_axes: str | Sequence[str]) -> tuple[int, bool]:
    """(dp rank, whether it collects) of this process on a device mesh; see `Worker.register_device_mesh`. A
    `ValueError` if the mesh has no such axis, or does not contain this rank."""
    shape = tuple(device_mesh.shape)
    wanted = (data_axes,) if isinstance(data_axes, str) else tuple(data_axes)
    names = device_mesh.mesh_dim_names
    if names is None:
        if len(shape) != 1:
            raise ValueError(f"a device mesh of shape {shape} needs names: give init_device_mesh() mesh_dim_names=")
        names = wanted = (*wanted[:1],)
    missing = [axis for axis in wanted if axis not in names]
    if len(set(wanted)) < len(wanted):
        raise ValueError(f"data_axes={data_axes!r} names an axis twice")
    if missing or not wanted:
        raise ValueError(f"data_axes={data_axes!r}: the device mesh has the axes {', '.join(names)}")
    coordinates = device_mesh.get_coordinate()
    if coordinates is None:
        raise ValueError("this rank is not in the device mesh; every rank of a group must be in its meshes")
    coordinate = dict(zip(names, coordinates, strict=True))
    size = dict(zip(names, shape, strict=True))
    dp_rank = 0
    for axis in wanted:
        dp_rank = dp_rank * size[axis] + coordinate[axis]
    collects = all(coordinate[a] == (size[a] - 1 if a == COLLECTS_LAST else 0) for a in names if a not in wanted)
    return dp_rank, collects
