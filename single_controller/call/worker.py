"""Worker: the base class of what runs on a rank. What a group is made of: a class with arguments, or several."""

from __future__ import annotations

import inspect
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Self

from dispatch.batch import described
from dispatch.checks import check_count, suggestion
from dispatch.errors import DispatchError
from dispatch.layout import DeviceMesh, LayoutReport, mesh_coordinates
from dispatch.register import MethodSpec, check_arguments, method_spec, plain_signature, registered_methods
from single_controller.call.codec import can_encode, cannot_send
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
def assign(info: RankInfo, role_workers: RoleWorkers) -> Iterator[None]:
    """Inside, workers created in this thread get this rank and these role workers."""
    before = dict(vars(_assigned))  # a constructor may create a LocalWorkerGroup, and with it other workers
    _assigned.info, _assigned.role_workers = info, role_workers
    try:
        yield
    finally:
        vars(_assigned).clear()
        vars(_assigned).update(before)


class Worker(VerlWorker):
    """Base class of what runs on a rank. Put `register` on the methods that the driver calls.

    The rank and the other properties are available in the constructor. The environment has RANK, WORLD_SIZE,
    LOCAL_RANK, LOCAL_WORLD_SIZE, NODE_RANK, MASTER_ADDR and MASTER_PORT, except in a `LocalWorkerGroup`, whose ranks
    share one environment. A worker that you create yourself takes its rank from the environment, or is rank 0 of 1.

    A second base class whose constructor needs no arguments is constructed too. Call another one's constructor in your
    own.

    Args:
        cuda_visible_devices: for constructors written for verl, which pass it on; None. The pool decides on devices.

    Raises:
        TypeError: ``cuda_visible_devices`` is not None.
    """

    _rank_info: RankInfo
    _layout_report: LayoutReport
    _role_workers: RoleWorkers
    _cleanups: list[Callable[[], object]]
    _leaving = False
    """Whether the group is having a rank replaced, and the method that runs should end. Set by another thread."""

    def __new__(cls, *args: object, **kwargs: object) -> Self:
        # Set here, not in __init__: subclasses may read self.rank before they call super().__init__(), or never call
        # it.
        self = super().__new__(cls)
        self._take_rank(getattr(_assigned, "info", None) or RankInfo.from_environment())
        object.__setattr__(self, "_layout_report", LayoutReport())
        object.__setattr__(self, "_role_workers", getattr(_assigned, "role_workers", RoleWorkers()))
        object.__setattr__(self, "_cleanups", [])  # called after _leave_process()
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
        """How often the group was restarted or had ranks replaced before this worker joined it as it is now."""
        return self._rank_info.generation

    @property
    def is_replacement(self) -> bool:
        """Whether this worker replaces one that has died, or was added, and `on_membership_change` has not run yet. Its
        constructor and the methods with ``replay=True`` run without the other ranks: they must not use collectives, and
        there is no `master_port` yet."""
        return self._rank_info.replacement

    @property
    def dp_replica(self) -> tuple[int, int]:
        """Number of the data-parallel replica that this rank belongs to, and how many there are. ``group.shrink()``
        drops whole replicas. By default the coordinate on the axis dp of `register_layout`, and its size; without a
        layout each rank is a replica of its own. Another thread may ask, while a method runs.

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
            sizes: axis -> number of coordinates. Optional; with it, a missing rank is noticed.
            axes: axis -> coordinate, from 0: dp, tp, pp, cp, and any other name for your own use. An axis that is not
                given has size 1.

        Raises:
            ValueError: no axis is given, or a coordinate is not an integer >= 0 and below its size.
        """
        sizes = dict(sizes or {})
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
            data_axes: names of the mesh's data axes, such as ``("dp_replicate", "dp_shard")`` for HSDP. The only axis
                of a mesh without names is a data axis.

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
        the group's ranks. Override it to create process groups, and what depends on them, anew, and to register the
        layout again if the number of ranks may have changed. The default does nothing.

        On ranks that have kept their process, all process groups of torch.distributed were destroyed before, and the
        rank's properties and environment describe the new rendezvous. On the others, the constructor has run, and the
        calls of methods with ``replay=True`` were repeated, all without collectives: see `is_replacement`.

        Args:
            generation: how often the group was restarted or had its ranks changed, this time included.
        """

    def _change_membership(self, generation: int) -> None:
        self._take_rank(replace(self._rank_info, replacement=False))
        os.environ.update(self._rank_info.environment())
        self.on_membership_change(generation)

    def _check_collectives(self, what: str) -> None:
        """Raise if the ranks of this group cannot run collectives.

        Args:
            what: what needs them, for the message.

        Raises:
            LocalGroupError: the ranks share one process.
            RuntimeError: the worker is a replacement, and alone.
        """
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


class ClassWithInitArgs:
    """A worker class and the arguments of its constructor, which runs on every rank.

    Args:
        cls: a subclass of `Worker`.
        args: positional arguments of its constructor.
        kwargs: keyword arguments of its constructor. Without any arguments, the object may also say of which class
            running workers are; whether the constructor needs some is then checked when a group starts workers.

    Raises:
        TypeError: ``cls`` is not a subclass of `Worker`, or the arguments do not fit its constructor.
    """

    def __init__(self, cls: type[Worker], *args: Any, **kwargs: Any) -> None:
        if not (isinstance(cls, type) and issubclass(cls, Worker)):
            raise TypeError(f"a group's class is a subclass of single_controller.Worker, got {cls!r}")
        self.cls: type[Worker] = cls
        self.args = args
        self.kwargs = kwargs
        if args or kwargs:
            self.check_arguments()

    def __call__(self) -> Worker:
        """Construct the worker in this process, for a unit test of it."""
        return self.cls(*self.args, **self.kwargs)

    def check_arguments(self) -> None:
        """Check that the arguments fit the constructor.

        Raises:
            TypeError: they do not.
        """
        constructor = self.cls.__init__
        # Worker's own parameter is for constructors that pass it on, see there.
        own = constructor is not Worker.__init__
        signature = plain_signature(constructor, skip_first=True) if own else inspect.Signature()
        check_arguments(self.cls.__name__, signature, self.args, self.kwargs)

    def check_encodable(self, error: Exception) -> None:
        """Name what cannot be pickled, if it is the class or one of the arguments.

        Raises:
            DispatchError: one of them cannot.
        """
        given = {**{f"argument {k}": value for k, value in enumerate(self.args)}, **self.kwargs}
        name = next((name for name, value in given.items() if not can_encode(value)), None)
        if name is not None or not can_encode(self.cls):
            what = "the class itself" if name is None else f"{name!r}, {described(given[name])},"
            raise cannot_send(f"{self.cls.__name__}(): {what}", error, "__init__", name) from error

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.cls.__name__})"


class Colocated:
    """What `colocate` returns. A group takes it in place of one class."""

    def __init__(self, roles: Mapping[str, ClassWithInitArgs]) -> None:
        if not isinstance(roles, Mapping) or not all(isinstance(made, ClassWithInitArgs) for made in roles.values()):
            raise TypeError(f"colocate() takes a dict {{'actor': RayClassWithInitArgs(Actor), ...}}, got {roles!r}")
        if not roles:
            raise ValueError("colocate() takes at least one role")
        for role in roles:
            if not isinstance(role, str) or not role.isidentifier() or role.startswith("_"):
                raise ValueError(f"a role is reached as group.<role>, so its name must be an identifier; got {role!r}")
        self.roles: dict[str, ClassWithInitArgs] = dict(roles)

    @property
    def name(self) -> str:
        """The roles' names, for the names of actors and groups."""
        return "_".join(self.roles)

    def __repr__(self) -> str:
        return f"colocate({{{', '.join(f'{role!r}: {made.cls.__name__}' for role, made in self.roles.items())}}})"


def colocate(roles: Mapping[str, ClassWithInitArgs]) -> Colocated:
    """Put several worker classes into one process per rank, so that they share its device and memory.

    The group has a group for each role: ``group.actor.m(x)``, ``group.critic.m(x)``. A worker reaches the others of its
    process with ``self.role_worker("critic")``. A process runs one call at a time, in the order in which the driver
    sent them, whichever role they are for.

    Args:
        roles: role -> its class with the constructor's arguments: ``{"actor": RayClassWithInitArgs(Actor, config)}``.
            The workers of a process are created in this order.

    Raises:
        TypeError: it is not such a dict.
        ValueError: it is empty, or the name of a role cannot be an attribute.
    """
    return Colocated(roles)


def create_colocated_worker_cls(class_dict: Mapping[str, ClassWithInitArgs]) -> Colocated:
    """`colocate` under the name that verl uses; ``group.spawn(...)`` returns the roles' groups. Verl's other name is
    create_colocated_worker_cls_fused; ``group.fuse(...)``, then ``group.<role>``."""
    return colocate(class_dict)


create_colocated_worker_cls_fused = create_colocated_worker_cls


def create_colocated_worker_raw_cls(class_dict: Mapping[str, ClassWithInitArgs]) -> type[Worker]:
    """Return a base class for a worker beside colocated ones, under the name that verl uses.

    A group of a subclass has the subclass's own methods and ``group.<role>``. In the worker, ``self.<role>`` is the
    role's worker, which is created first.

    Args:
        class_dict: as for `colocate`.

    Raises:
        TypeError, ValueError: as for `colocate`, or a worker uses the name of a role itself.
    """
    inner = colocate(class_dict)
    taken = [role for role in inner.roles if hasattr(Worker, role)]
    if taken:
        raise ValueError(f"self.{taken[0]} is an attribute of every worker: rename the role")
    members: dict[str, Any] = {role: property(partial(Worker.role_worker, role=role)) for role in inner.roles}
    return type(f"Fused_{inner.name}", (Worker,), {**members, _INNER: inner, "__module__": __name__})


_INNER = "_colocated"
"""Where a class made by `create_colocated_worker_raw_cls` has its roles."""


def constructors(made: ClassWithInitArgs | Colocated) -> dict[str | None, ClassWithInitArgs]:
    """role -> class with arguments, in the order of creation. The role of the group's own class is None."""
    colocated: Colocated | None = made if isinstance(made, Colocated) else getattr(made.cls, _INNER, None)
    roles: dict[str | None, ClassWithInitArgs] = dict(() if colocated is None else colocated.roles.items())
    if not isinstance(made, Colocated):
        roles[None] = made
    return roles


class MethodTable:
    """The methods of one worker class.

    Args:
        cls: the class.
        role: its role, if several classes share a process.
    """

    def __init__(self, cls: type[Worker], role: str | None = None) -> None:
        self.cls = cls
        self.role = role
        # Name -> method, of those under @register
        self.registered = {name: replace(spec, role=role) for name, spec in registered_methods(cls).items()}

    def check_names(self, reserved: Iterable[str]) -> None:
        """Check that no registered method has a reserved name.

        Raises:
            DispatchError: one has.
        """
        clashes = sorted(self.registered.keys() & set(reserved))
        if clashes:
            raise DispatchError(
                f"{self.cls.__name__} registers {', '.join(f'{name}()' for name in clashes)}, but the worker "
                "group uses this name itself; rename the method",
                method=clashes[0],
            )

    def any(self, name: str) -> MethodSpec:
        """A method, registered or not.

        Raises:
            AttributeError: the class has no such method.
        """
        spec = self.registered.get(name) or method_spec(self.cls, name)
        if spec is None:
            raise AttributeError(f"{self.cls.__name__} has no method {name!r}{suggestion(name, dir(self.cls))}")
        return replace(spec, role=self.role)

    def name_of(self, method: object) -> str:
        """The name of a method that was given as a function, ``Scorer.score``.

        Functions are compared by module and qualified name: a class that was sent to another process comes back as a
        copy.

        Raises:
            TypeError: it is not a function of a class.
            DispatchError: the class does not have it.
        """
        if not inspect.isfunction(method):
            raise TypeError(
                f"group.on() takes a method of the worker class, as in group.on(Scorer.score); got {method!r}"
            )
        name, wanted = method.__name__, (method.__module__, method.__qualname__)
        for base in self.cls.__mro__:
            found = vars(base).get(name)
            function = getattr(found, "__func__", found)
            if inspect.isfunction(function) and (function.__module__, function.__qualname__) == wanted:
                return name
        raise DispatchError(
            f"{method.__qualname__}() is not a method of the group's worker class {self.cls.__name__}, which registers "
            f"{', '.join(self.registered) or 'no methods'}",
            method=name,
        )

    def missing(self, name: str, others: Iterable[str]) -> AttributeError:
        """The error for a name that is not a registered method. ``others`` are the group's names."""
        owner = self.cls.__name__
        if method_spec(self.cls, name) is not None:
            return AttributeError(
                f"{owner}.{name}() is not registered: put @register(...) on it, or call "
                f"group.execute_all_sync({name!r}, ...)"
            )
        return AttributeError(f"the group has no method {name!r}, and neither has {owner}{suggestion(name, others)}")
