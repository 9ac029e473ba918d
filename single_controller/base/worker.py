"""Worker: the base class of what runs on a rank."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Self

from dispatch.modes import Dispatch, Execute
from dispatch.register import register
from single_controller.base.device_mesh import DeviceMesh, place_on

RANK_ENVIRONMENT = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "NODE_RANK")


@dataclass(frozen=True)
class Place:
    """Where one worker stands in its group.

    Attributes:
        rank: 0 .. world_size - 1.
        world_size: number of workers in the group.
        local_rank: rank among the workers of its entry of the pool (its node).
        local_world_size: number of workers of that entry.
        master_addr: address of rank 0's node.
        master_port: a port on it, held for this group.
        node_rank: number of its node, from 0, in order of the nodes' first ranks.
        device_ids: ids of the devices that the engine gave it; () without.
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    master_addr: str
    master_port: int
    node_rank: int = 0
    device_ids: tuple[str, ...] = ()

    def environment(self) -> dict[str, str]:
        """The variables that ``torch.distributed.init_process_group()`` reads."""
        values = (
            self.rank,
            self.world_size,
            self.local_rank,
            self.local_world_size,
            self.master_addr,
            self.master_port,
            self.node_rank,
        )
        return dict(zip(RANK_ENVIRONMENT, map(str, values), strict=True))

    @classmethod
    def from_environment(cls) -> Place:
        """The place that the environment names; rank 0 of 1 where it names none."""
        get = os.environ.get
        return cls(
            int(get("RANK", "0")),
            int(get("WORLD_SIZE", "1")),
            int(get("LOCAL_RANK", "0")),
            int(get("LOCAL_WORLD_SIZE", "1")),
            get("MASTER_ADDR", "127.0.0.1"),
            int(get("MASTER_PORT", "0")),
            int(get("NODE_RANK", "0")),
        )


@dataclass
class Standing:
    """What a worker has said about its coordinates.

    Attributes:
        axes: axis -> coordinate.
        sizes: axis -> number of coordinates, where the worker said that too.
        meshes: mesh name -> (dp rank, whether its answer is collected).
        version: grows with every statement, so that a group notices a new one.
    """

    axes: dict[str, int] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)
    meshes: dict[str, tuple[int, bool]] = field(default_factory=dict)
    version: int = 0


class Neighbours(dict[str, "Worker"]):
    """role -> worker, of one process. A worker that is pickled or copied leaves its neighbours behind."""

    def __reduce__(self) -> tuple[Any, ...]:
        return Neighbours, ()


_assigned = threading.local()


@contextmanager
def assign(place: Place, neighbours: Neighbours) -> Iterator[None]:
    """Workers made in this thread, inside the context, stand at ``place``, beside ``neighbours``."""
    before = dict(vars(_assigned))  # a constructor may make a group in this process, and with it other workers
    _assigned.place, _assigned.neighbours = place, neighbours
    try:
        yield
    finally:
        vars(_assigned).clear()
        vars(_assigned).update(before)


class Worker:
    """Subclass this; put `@register` on the methods that the driver calls.

    In the constructor already the rank and the rest are known, and the environment has RANK, WORLD_SIZE,
    LOCAL_RANK, LOCAL_WORLD_SIZE, NODE_RANK, MASTER_ADDR and MASTER_PORT; not so in a `LocalWorkerGroup`, whose
    ranks share one environment. A worker that nobody placed takes its place from the environment, or is rank 0 of 1.
    """

    _place: Place
    _standing: Standing
    _neighbours: Neighbours

    def __new__(cls, *args: object, **kwargs: object) -> Self:
        self = super().__new__(cls)
        place = getattr(_assigned, "place", None) or Place.from_environment()
        object.__setattr__(self, "_place", place)
        object.__setattr__(self, "_standing", Standing())
        object.__setattr__(self, "_neighbours", getattr(_assigned, "neighbours", Neighbours()))
        return self

    def __init__(self) -> None:
        super().__init__()

    @property
    def rank(self) -> int:
        """Rank in the group, from 0."""
        return self._place.rank

    @property
    def world_size(self) -> int:
        """Number of workers in the group."""
        return self._place.world_size

    @property
    def local_rank(self) -> int:
        """Rank among the workers of the same entry of the pool, from 0."""
        return self._place.local_rank

    @property
    def local_world_size(self) -> int:
        """Number of workers of the same entry of the pool."""
        return self._place.local_world_size

    @property
    def node_rank(self) -> int:
        """Number of the node, from 0: the node of rank 0 is 0, the next one that has a rank is 1."""
        return self._place.node_rank

    @property
    def device_ids(self) -> tuple[str, ...]:
        """Ids of the devices that Ray gave this worker, ``("3",)``; () without. They are the node's numbers, whether
        or not Ray hides the other devices from the process; `workers.device.device` finds torch's index from them."""
        return self._place.device_ids

    @property
    def master_addr(self) -> str:
        """Address of rank 0's node."""
        return self._place.master_addr

    @property
    def master_port(self) -> int:
        """Port on rank 0's node that this group holds for its rendezvous."""
        return self._place.master_port

    def neighbour(self, role: str) -> Worker:
        """The worker of another role in this process, of a group made of ``colocate({...})``.

        Workers of one process are made in the order of that dict: in a constructor only earlier ones can be reached.

        Raises:
            LookupError: there is none, or it has not been made yet.
        """
        found = self._neighbours.get(role)
        if found is None:
            here = ", ".join(self._neighbours)
            what = f"made here so far: {here}" if here else "make the group of colocate({...}), and ask in a method"
            raise LookupError(f"{type(self).__name__} has no neighbour {role!r}; {what}")
        return found

    def get_fused_worker_by_name(self, worker_name: str) -> Worker:
        """`neighbour` under the name that verl gives it."""
        return self.neighbour(worker_name)

    def register_layout(self, sizes: Mapping[str, int] | None = None, /, **axes: int) -> None:
        """Say where this rank stands, for the MEGATRON modes: ``register_layout(dp=1, tp=0, pp=0)``.

        Every rank of the group says so, on the same axes, in ``__init__`` or in a method that runs before the
        first call which needs it. Saying it again replaces what was said.

        Args:
            sizes: axis -> number of its coordinates. Not needed; where it is given, a rank that is missing is noticed.
            axes: axis -> coordinate, from 0: dp, tp, pp, cp, and any other name for the record. An axis that
                is not named has size 1.

        Raises:
            ValueError: no axis, a coordinate that is not an integer from 0, or one that is not below its size.
        """
        sizes = dict(sizes or {})
        if not axes:
            raise ValueError("register_layout() takes at least one axis, for example dp=0")
        for axis, coordinate in axes.items():
            _check_coordinate(f"register_layout({axis}=...)", coordinate)
            if axis in sizes and coordinate >= sizes[axis]:
                raise ValueError(f"register_layout({axis}={coordinate}): the size given for {axis} is {sizes[axis]}")
        self._standing.axes = dict(axes)
        self._standing.sizes = sizes
        self._standing.version += 1

    def forget_layout(self) -> None:
        """Take back what `register_layout` said, after the parallel groups that it spoke of were destroyed."""
        if self._standing.axes:
            self._standing.axes, self._standing.sizes = {}, {}
            self._standing.version += 1

    def register_mesh(self, mesh_name: str, dp_rank: int, is_collect: bool = True) -> None:
        """Say where this rank stands on a named mesh, for ``Dispatch.mesh(mesh_name)``.

        Args:
            mesh_name: the name.
            dp_rank: this rank's data-parallel rank on that mesh; ranks that agree get the same shard.
            is_collect: whether this rank answers for its dp rank; one rank of each dp rank does.

        Raises:
            ValueError: an empty name, or a dp rank that is not an integer from 0.
        """
        if not isinstance(mesh_name, str) or not mesh_name:
            raise ValueError(f"register_mesh() takes a non-empty name, got {mesh_name!r}")
        _check_coordinate(f"register_mesh({mesh_name!r}, dp_rank=...)", dp_rank)
        self._standing.meshes[mesh_name] = (dp_rank, bool(is_collect))
        self._standing.version += 1

    def register_device_mesh(
        self, mesh_name: str, device_mesh: DeviceMesh, data_axes: str | Sequence[str] = "dp"
    ) -> None:
        """`register_mesh` with what torch's ``DeviceMesh`` says of this rank.

        The axes that carry data make up the dp rank, the first one slowest. Of the ranks that share it, the one answers
        that stands at 0 on every other axis, and at the end of an axis called ``pp``: the last stage has the output.

        Args:
            mesh_name: the name, for ``Dispatch.mesh(mesh_name)``.
            device_mesh: of any number of axes, as ``torch.distributed.device_mesh.init_device_mesh`` makes it.
            data_axes: names of the mesh's axes that carry data; ``("dp_replicate", "dp_shard")`` for HSDP. The one
                axis of a mesh without names carries data.

        Raises:
            ValueError: a name that the mesh does not have, or this rank is not in the mesh.
        """
        self.register_mesh(mesh_name, *place_on(device_mesh, data_axes))

    @register(Dispatch.DP_COMPUTE_PROTO_WITH_FUNC)
    def execute_with_func_generator(self, func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a function of the driver on every rank, with the worker before the other arguments.

        ``group.execute_with_func_generator(func, batch)`` cuts the batch and joins the answers, as
        DP_COMPUTE_PROTO does. Without a batch it gives a list of every rank's answer.

        Args:
            func: ``func(worker, *args, **kwargs)``; it is pickled, a lambda too.
            args: batches, and values that go whole.
            kwargs: likewise.
        """
        return func(self, *args, **kwargs)

    @register(Dispatch.ALL_TO_ALL, execute_mode=Execute.RANK_ZERO)
    def execute_func_rank_zero(self, func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a function of the driver on rank 0 alone, without the worker, as verl's method of this name does.

        Args:
            func: ``func(*args, **kwargs)``.
            args: its arguments, as they are.
            kwargs: likewise.

        Returns:
            The function's value.
        """
        return func(*args, **kwargs)

    def _prepare_thread(self) -> None:
        """Called on the thread that is about to make this worker's next call; for what torch keeps for each thread."""

    def _leave_process(self) -> None:
        """Called where the process outlives the worker, when its group ends: for what it has set up in the process."""

    def _report(self) -> Standing:
        """What this worker says of its coordinates, asked after each call; a subclass may look them up first."""
        return self._standing

    def _register_dispatch_collect_info(self, mesh_name: str, dp_rank: int, is_collect: bool) -> None:
        """`register_mesh` under the name that verl gives it."""
        self.register_mesh(mesh_name, dp_rank, is_collect)


def _check_coordinate(what: str, coordinate: object) -> None:
    if not isinstance(coordinate, int) or isinstance(coordinate, bool) or coordinate < 0:
        raise ValueError(f"{what} is an integer from 0, got {coordinate!r}")
