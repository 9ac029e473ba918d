"""Worker: the base class of what runs on a rank."""

from __future__ import annotations

import inspect
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from dispatch.checks import check_count
from dispatch.layout import DeviceMesh, LayoutReport, mesh_coordinates
from single_controller.call.errors import LocalGroupError
from single_controller.verl import VerlWorker

RANK_ENVIRONMENT = {
    "RANK": "rank",
    "WORLD_SIZE": "world_size",
    "LOCAL_RANK": "local_rank",
    "LOCAL_WORLD_SIZE": "local_world_size",
    "MASTER_ADDR": "master_addr",
    "MASTER_PORT": "master_port",
    "NODE_RANK": "node_rank",
    "RAY_LOCAL_WORLD_SIZE": "local_world_size",  # for workers written for verl
}
"""What a group sets in the environment of each rank: variable -> field of `RankInfo`."""


@dataclass(frozen=True)
class RankInfo:
    """What a worker knows about its rank."""

    rank: int  # 0 .. world_size - 1
    world_size: int  # number of workers in the group
    local_rank: int  # rank among the workers of the same entry of the pool (of the same node)
    local_world_size: int  # number of workers of that entry
    master_addr: str  # address of rank 0's node
    master_port: int  # a port on that node, held for this group
    node_rank: int = 0  # number of the rank's node, from 0, in the order of the nodes' first ranks
    device_ids: tuple[str, ...] = ()  # ids of the accelerators that the transport assigned; () if none
    # Whether all ranks of a group of several share one process, where collectives are impossible
    one_process: bool = False
    generation: int = 0  # how often the group was restarted or had ranks replaced before
    replacement: bool = False  # whether the worker replaces another one, and does not take part in collectives yet
    members: bytes | None = None  # a hash of the actors that are the group's ranks; None if these use no collectives

    def environment(self) -> dict[str, str]:
        """`RANK_ENVIRONMENT`: the variables that ``torch.distributed.init_process_group()`` reads, and verl's. Without
        the rendezvous for a `replacement`: initializing torch.distributed there raises, instead of waiting for ranks
        that do not come."""
        environment = {variable: str(getattr(self, name)) for variable, name in RANK_ENVIRONMENT.items()}
        if self.replacement:
            del environment["MASTER_ADDR"], environment["MASTER_PORT"]
        return environment

    @classmethod
    def from_environment(cls) -> RankInfo:
        """From the variables that torchrun sets; rank 0 of 1 without them."""
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


class RoleWorkers(dict[str, "Worker"]):
    """role -> worker, of one process. A pickled or copied worker does not take the others along."""

    def __reduce__(self) -> tuple[Any, ...]:
        return RoleWorkers, ()


_assigned = threading.local()


@contextmanager
def assign(info: RankInfo, role_workers: RoleWorkers, made: list[Worker] | None = None) -> Iterator[None]:
    """Inside, workers created in this thread get this rank and these role workers, and are added to ``made``."""
    before = dict(vars(_assigned))  # a constructor may create a LocalWorkerGroup, and with it other workers
    _assigned.info, _assigned.role_workers, _assigned.made = info, role_workers, made
    try:
        yield
    finally:
        vars(_assigned).clear()
        vars(_assigned).update(before)


class Worker(VerlWorker):
    """Base class of workers. Decorate the methods that the driver calls with `register`.

    The rank and the other properties are available in the constructor. The environment has RANK, WORLD_SIZE,
    LOCAL_RANK, LOCAL_WORLD_SIZE, NODE_RANK, MASTER_ADDR and MASTER_PORT, except in a `LocalWorkerGroup`, whose ranks
    share one environment. A worker that you create yourself takes its rank from the environment, or is rank 0 of 1.

    If a second base class has a constructor without required arguments, it is called too. Call any other constructor in
    your own.

    Args:
        cuda_visible_devices: accepted for constructors written for verl, and must be None. The pool decides on devices.

    Raises:
        TypeError: ``cuda_visible_devices`` is not None.
    """

    _rank_info: RankInfo
    _layout_report: LayoutReport
    _role_workers: RoleWorkers
    _cleanups: list[Callable[[], object]]
    _leaving = False
    """Whether the group is having a rank replaced, and the method that runs should end. Set by another thread."""

    if not TYPE_CHECKING:  # a type checker would compare its signature with that of each subclass's __init__

        def __new__(cls, *args, **kwargs):
            # Set here, not in __init__: subclasses may read self.rank before they call super().__init__(), or never
            # call it.
            self = super().__new__(cls)
            self._take_rank(getattr(_assigned, "info", None) or RankInfo.from_environment())
            object.__setattr__(self, "_layout_report", LayoutReport())
            object.__setattr__(self, "_role_workers", getattr(_assigned, "role_workers", RoleWorkers()))
            object.__setattr__(self, "_cleanups", [])  # called after _leave_process()
            made = getattr(_assigned, "made", None)
            if made is not None:
                made.append(self)
            return self

    def _take_rank(self, info: RankInfo) -> None:
        object.__setattr__(self, "_rank_info", info)
        # Read by workers written for verl. No properties: such a worker may also set them.
        object.__setattr__(self, "_rank", info.rank)
        object.__setattr__(self, "_world_size", info.world_size)

    def __init__(self, cuda_visible_devices: str | None = None) -> None:
        if cuda_visible_devices is not None:
            raise TypeError(
                f"{type(self).__name__}: cuda_visible_devices={cuda_visible_devices!r}, but the pool decides which "
                "devices a worker sees. Leave it out; self.device_ids has them"
            )
        construct = super().__init__
        if _needs_no_arguments(construct):
            construct()

    @property
    def rank(self) -> int:
        """Rank in the group, from 0."""
        return self._rank_info.rank

    @property
    def world_size(self) -> int:
        """Number of workers in the group."""
        return self._rank_info.world_size

    @property
    def local_rank(self) -> int:
        """Rank among the workers of the same entry of the pool (of the same node), from 0."""
        return self._rank_info.local_rank

    @property
    def local_world_size(self) -> int:
        """Number of workers of the same entry of the pool."""
        return self._rank_info.local_world_size

    @property
    def node_rank(self) -> int:
        """Number of this rank's node, from 0, in the order of the nodes' first ranks."""
        return self._rank_info.node_rank

    @property
    def generation(self) -> int:
        """How often the group had been restarted, or had its ranks changed, when this worker joined it last."""
        return self._rank_info.generation

    @property
    def is_replacement(self) -> bool:
        """Whether this worker replaces one that has died, or was added, and `on_membership_change` has not run yet. Its
        constructor and the methods with ``replay=True`` run without the other ranks: they must not use collectives, and
        there is no `master_port` yet."""
        return self._rank_info.replacement

    @property
    def dp_replica(self) -> tuple[int, int]:
        """The index of the data-parallel replica that this rank belongs to, and the number of replicas, for
        ``group.shrink()``, which drops whole replicas. By default, these are the coordinate on the axis dp of
        `register_layout`, and the size of that axis; without a layout, each rank is a replica of its own. It is read by
        another thread, possibly while a method runs.

        Raises:
            ValueError: `register_layout` was not told the size of dp.
        """
        axes, sizes = self._layout_report.axes, self._layout_report.sizes
        if not axes:
            return self.rank, self.world_size
        if "dp" in axes and "dp" not in sizes:
            raise ValueError(
                "shrink() needs the number of data-parallel replicas: pass it to register_layout(), for example "
                "register_layout({'dp': 2}, dp=0, tp=1)"
            )
        return axes.get("dp", 0), sizes.get("dp", 1)

    @property
    def device_ids(self) -> tuple[str, ...]:
        """Ids of the accelerators that Ray assigned to this worker, such as ``("3",)``; () if none. They are the node's
        ids, whether or not Ray hides other devices from the process. `workers.device.device` maps them to torch."""
        return self._rank_info.device_ids

    @property
    def master_addr(self) -> str:
        """Address of rank 0's node.

        Raises:
            LocalGroupError: in a `LocalWorkerGroup` of several ranks, which have no rendezvous.
        """
        self._check_collectives("worker.master_addr")
        return self._rank_info.master_addr

    @property
    def master_port(self) -> int:
        """Port on rank 0's node that is held for this group's rendezvous.

        Raises:
            LocalGroupError: in a `LocalWorkerGroup` of several ranks, which have no rendezvous.
        """
        self._check_collectives("worker.master_port")
        return self._rank_info.master_port

    def role_worker(self, role: str) -> Worker:
        """The worker of another role in this process, in a group made of ``colocate({...})``.

        The workers of a process are created in the order of that dict: a constructor can reach only earlier ones.

        Raises:
            LookupError: the process has no such worker, or it was not created yet.
        """
        found = self._role_workers.get(role)
        if found is None:
            known = ", ".join(self._role_workers)
            hint = f"created so far: {known}" if known else "make the group of colocate({...}), and ask in a method"
            raise LookupError(f"{type(self).__name__}: this process has no worker of the role {role!r}; {hint}")
        return found

    def register_layout(self, sizes: Mapping[str, int] | None = None, /, **axes: int) -> None:
        """Report this rank's coordinates, for the MEGATRON modes: ``register_layout(dp=1, tp=0, pp=0)``.

        Every rank of the group must report, on the same axes, in ``__init__`` or in a method that runs before the first
        call that needs the layout. A second report replaces the first.

        Args:
            sizes: axis -> number of coordinates. Optional; it allows the group to detect missing ranks.
            axes: axis -> coordinate, from 0: dp, tp, pp, cp, sp, and any other name for your own use. An axis that is
                not given has size 1.

        Raises:
            ValueError: no axis is given, a size is not an integer >= 1, or a coordinate is not an integer >= 0 and
                below its size.
        """
        sizes = {axis: check_count(f"register_layout(): size of {axis}", size) for axis, size in (sizes or {}).items()}
        if not axes:
            raise ValueError("register_layout() takes at least one axis, for example dp=0")
        for axis, coordinate in axes.items():
            check_count(f"register_layout(): {axis}", coordinate, 0)
            if axis in sizes and coordinate >= sizes[axis]:
                raise ValueError(f"register_layout({axis}={coordinate}): the size given for {axis} is {sizes[axis]}")
        self._layout_report.axes = dict(axes)
        self._layout_report.sizes = sizes
        self._layout_report.version += 1

    def forget_layout(self) -> None:
        """Withdraw `register_layout`, after the process groups that it described were destroyed."""
        if self._layout_report.axes:
            self._layout_report.axes, self._layout_report.sizes = {}, {}
            self._layout_report.version += 1

    def register_mesh(self, mesh_name: str, dp_rank: int, is_collect: bool = True) -> None:
        """Report this rank's coordinate on a named mesh, for ``Dispatch.mesh(mesh_name)``.

        Args:
            mesh_name: the name.
            dp_rank: this rank's data-parallel rank on the mesh. Ranks with equal dp ranks get the same shard.
            is_collect: whether this rank collects. Exactly one rank per dp rank must.

        Raises:
            ValueError: the name is empty, or the dp rank is not an integer >= 0.
        """
        if not isinstance(mesh_name, str) or not mesh_name:
            raise ValueError(f"register_mesh() takes a non-empty name, got {mesh_name!r}")
        check_count(f"register_mesh({mesh_name!r}): dp_rank", dp_rank, 0)
        self._layout_report.meshes[mesh_name] = (dp_rank, bool(is_collect))
        self._layout_report.version += 1

    def register_device_mesh(
        self, mesh_name: str, device_mesh: DeviceMesh, data_axes: str | Sequence[str] = "dp"
    ) -> None:
        """`register_mesh` with the coordinates of a torch ``DeviceMesh``.

        The data axes make up the dp rank, the first one slowest. Of the ranks that share a dp rank, the one at
        coordinate 0 of every other axis collects; on an axis named ``pp`` the last one, which has the output.

        Args:
            mesh_name: the name, for ``Dispatch.mesh(mesh_name)``.
            device_mesh: a mesh as ``torch.distributed.device_mesh.init_device_mesh`` makes it.
            data_axes: names of its data axes, such as ``("dp_replicate", "dp_shard")`` for HSDP. The only axis of a
                mesh without names is one.

        Raises:
            ValueError: the mesh has no such axis, or does not contain this rank.
        """
        self.register_mesh(mesh_name, *mesh_coordinates(device_mesh, data_axes))

    @classmethod
    def prepare_standby(cls) -> None:
        """Called in the process of a standby, which has no rank yet. Override it to import what the worker imports
        later, so that a rank is replaced sooner. The default does nothing."""

    def on_membership_change(self, generation: int) -> None:
        """Called on every rank after ``group.replace()``, ``shrink()`` or ``grow()`` has changed which processes are
        the group's ranks. Override it to create the process groups, and everything that depends on them, again, and to
        register the layout again if the number of ranks may have changed. The default does nothing.

        On ranks that have kept their process, all process groups of torch.distributed have been destroyed, and the
        properties and the environment describe the new rendezvous. On the other ranks, the constructor and the calls
        with ``replay=True`` have run without collectives: see `is_replacement`.

        Args:
            generation: how often the group was restarted or had its ranks changed, this time included.
        """

    def _change_membership(self, generation: int) -> None:
        self._take_rank(replace(self._rank_info, replacement=False))
        os.environ.update(self._rank_info.environment())
        self.on_membership_change(generation)

    def _check_collectives(self, what: str) -> None:
        """Raise if the ranks of this group cannot run collectives, which ``what`` needs."""
        if self._rank_info.replacement:
            raise RuntimeError(
                f"{what} on rank {self.rank}, which replaces a rank that has died: the other ranks do not take part in "
                "its constructor, nor in methods with replay=True. Leave collectives out there if self.is_replacement, "
                "and initialize them in on_membership_change(), which runs on all ranks"
            )
        if self._rank_info.one_process:
            raise LocalGroupError(
                f"{what} on rank {self.rank} of {self.world_size}: the ranks of a LocalWorkerGroup are in one process, "
                "so they cannot use collectives. Use a RayWorkerGroup, or world_size=1"
            )

    def _prepare_thread(self) -> None:
        """Called on the thread that is about to run a method; for state that torch keeps per thread."""

    def _leave_process(self) -> None:
        """Called when the group ends but the process does not; removes what the worker set up in the process."""

    def _report(self) -> LayoutReport:
        """The worker's coordinates. Called after each call; a subclass may update them first."""
        return self._layout_report


def _needs_no_arguments(constructor: Callable[..., Any]) -> bool:
    try:
        inspect.signature(constructor).bind()
    except TypeError:
        return False
    except ValueError:
        return True  # a constructor in C that does not tell
    return True
