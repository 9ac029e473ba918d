"""Layout: where every rank stands on the named axes, and what follows from it for a call.

This is the one place that decides which ranks receive the same shard and which ranks answer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache

from dispatch.drawing import picture, table
from dispatch.errors import DispatchError, UnknownLayoutError

DATA_AXIS = "dp"
MEGATRON_AXES = ("dp", "cp", "tp", "pp")


@dataclass(frozen=True, slots=True)
class Routing:
    """Who gets which shard, and who answers.

    Attributes:
        shards: number of distinct shards.
        shard_of: per rank the number of the shard that it gets, or None when it is not called.
        answers: collecting ranks, in the order in which the driver gets their answers.
        unit: what the number of shards is, in words for an error message ("dp_size").
    """

    shards: int
    shard_of: tuple[int | None, ...]
    answers: tuple[int, ...]
    unit: str = "world_size"

    @classmethod
    @lru_cache
    def flat(cls, world_size: int) -> Routing:
        """Rank k gets shard k; all answer."""
        everyone = tuple(range(world_size))
        return cls(world_size, everyone, everyone)

    @classmethod
    @lru_cache
    def only(cls, ranks: range | tuple[int, ...], world_size: int) -> Routing:
        """One shard, for the given ranks alone; they answer in the order given."""
        called = frozenset(ranks)
        return cls(1, tuple(0 if rank in called else None for rank in range(world_size)), tuple(ranks))


@dataclass(frozen=True)
class Mesh:
    """A named mesh: per rank its data-parallel rank on this mesh, and whether its answer is collected.

    Raises:
        ValueError: the two differ in length, or a dp rank is not an integer from 0.
        DispatchError: on `routing`, when the dp ranks are not 0..n-1 with one collecting rank each.
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
        """Each rank gets the shard of its dp rank; the collecting ranks answer, in the order of dp ranks."""
        return _route(self.dp_rank, self.collects, max(self.dp_rank) + 1, unit=f"dp_size of mesh {self.name!r}")


@dataclass(frozen=True)
class Layout:
    """One coordinate per rank on each named axis, and any number of named meshes over the same ranks.

    Args:
        axes: axis -> coordinates by rank, for example ``{"dp": [0, 0, 1, 1], "tp": [0, 1, 0, 1]}``. An axis
            that is not given has size 1. Coordinates are reported by the workers, never computed from ranks.
        meshes: name -> `Mesh`.
        sizes: axis -> number of its coordinates, where the workers reported that too. An axis that is only here
            (Megatron's ``vpp``: a rank holds several virtual stages) has a size and no coordinates.

    Raises:
        ValueError: the axes differ in length, a coordinate is negative or not an integer, or none below its size.
    """

    axes: Mapping[str, Sequence[int]]
    meshes: Mapping[str, Mesh] = field(default_factory=dict)
    sizes: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        axes = {name: tuple(coordinates) for name, coordinates in self.axes.items()}
        lengths = {name: len(coordinates) for name, coordinates in axes.items()}
        lengths |= {f"mesh {name}": len(mesh.dp_rank) for name, mesh in self.meshes.items()}
        if len(set(lengths.values())) > 1:
            raise ValueError(f"Layout: every axis has one coordinate per rank, but their lengths are {lengths}")
        for name, coordinates in axes.items():
            _check_coordinates(f"Layout: axis {name!r}", coordinates)
            size = self.sizes.get(name)
            if size is not None and coordinates and max(coordinates) >= size:
                raise ValueError(f"Layout: axis {name!r} has size {size}, but a rank stands at {max(coordinates)}")
        object.__setattr__(self, "axes", axes)

    @classmethod
    def flat(cls, world_size: int) -> Layout:
        """Every rank its own dp rank."""
        return cls({DATA_AXIS: range(world_size)})

    @property
    def world_size(self) -> int:
        """Number of ranks; 0 for a layout without axes and meshes."""
        for coordinates in self.axes.values():
            return len(coordinates)
        for mesh in self.meshes.values():
            return len(mesh.dp_rank)
        return 0

    def size(self, axis: str) -> int:
        """Number of coordinates on an axis: 1 for one that nobody reported."""
        return self._sizes.get(axis, 1)

    def checked_size(self, axis: str) -> int:
        """`size`, once the workers have said where they stand.

        Raises:
            UnknownLayoutError: they have not.
        """
        self._check_known()
        return self.size(axis)

    def coordinate(self, axis: str, rank: int) -> int:
        """Where a rank stands on an axis, from 0; 0 on one that nobody reported."""
        coordinates = self.axes.get(axis)
        return coordinates[rank] if coordinates is not None else 0

    @property
    def known(self) -> bool:
        """Whether the workers have said where they stand on the axes."""
        return bool(self.axes)

    @cached_property
    def by_dp(self) -> Routing:
        """Megatron's data parallelism: the shard of a rank is its dp rank; tp 0 / last pp / cp 0 answers."""
        dp, cp, tp, pp = self._megatron
        last = self.size("pp") - 1
        collects = [t == 0 and p == last and c == 0 for c, t, p in zip(cp, tp, pp, strict=True)]
        return _route(dp, collects, self.size("dp"), unit="dp_size")

    @cached_property
    def by_dp_cp_pp(self) -> Routing:
        """pp and cp count as data too: dp-major, then cp, then pp; tp 0 of each answers."""
        dp, cp, tp, pp = self._megatron
        cp_size, pp_size = self.size("cp"), self.size("pp")
        shard = [(d * cp_size + c) * pp_size + p for d, c, p in zip(dp, cp, pp, strict=True)]
        shards = self.size("dp") * cp_size * pp_size
        return _route(shard, [t == 0 for t in tp], shards, unit="dp_size * cp_size * pp_size")

    def mesh(self, name: str) -> Mesh:
        """A named mesh.

        Raises:
            UnknownLayoutError: no worker registered a mesh of that name.
        """
        found = self.meshes.get(name)
        if found is None:
            known = ", ".join(sorted(self.meshes)) or "none"
            raise UnknownLayoutError(
                f"no mesh {name!r} was registered by the workers (known: {known}); "
                f"call self.register_mesh({name!r}, dp_rank=..., is_collect=...) on every rank"
            )
        return found

    @cached_property
    def _sizes(self) -> dict[str, int]:
        seen = {name: max(coordinates) + 1 for name, coordinates in self.axes.items() if coordinates}
        return {**seen, **self.sizes}

    @cached_property
    def _megatron(self) -> tuple[Sequence[int], ...]:
        self._check_known()
        nowhere = (0,) * self.world_size
        return tuple(self.axes.get(axis, nowhere) for axis in MEGATRON_AXES)

    def _check_known(self) -> None:
        if not self.known:
            raise UnknownLayoutError(
                "the workers have not said where they stand; a MegatronWorker does as soon as it has initialised "
                "megatron, any other worker calls self.register_layout(dp=, tp=, pp=, cp=) on every rank, in "
                "__init__ or in a method that runs first"
            )

    def __str__(self) -> str:
        return table(self)

    def _repr_svg_(self) -> str | None:
        """What a notebook shows."""
        return picture(self)


def _check_coordinates(what: str, coordinates: Sequence[object]) -> None:
    for rank, coordinate in enumerate(coordinates):
        if not isinstance(coordinate, int) or isinstance(coordinate, bool) or coordinate < 0:
            raise ValueError(f"{what} of rank {rank} is {coordinate!r}; coordinates are integers from 0")


def _route(shard_of: Sequence[int], collects: Sequence[bool], shards: int, unit: str) -> Routing:
    """Routing from each rank's shard and whether it answers; one answer for every shard, or an error."""
    answer: list[int | None] = [None] * shards
    for rank, (shard, collecting) in enumerate(zip(shard_of, collects, strict=True)):
        if not collecting:
            continue
        if answer[shard] is not None:
            raise DispatchError(
                f"ranks {answer[shard]} and {rank} both answer for shard {shard} ({unit} = {shards}): "
                "the coordinates that the workers registered are not one rank per place"
            )
        answer[shard] = rank
    silent = [shard for shard, rank in enumerate(answer) if rank is None]
    if silent:
        raise DispatchError(
            f"no rank answers for shard {silent[0]} ({unit} = {shards}): "
            "the coordinates that the workers registered leave a gap"
        )
    return Routing(shards, tuple(shard_of), tuple(rank for rank in answer if rank is not None), unit)
