"""WorkerGroup: the driver's proxy of many workers, whatever engine runs them."""

from __future__ import annotations

import difflib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from dispatch.errors import DispatchError, UnknownLayoutError
from dispatch.layout import Layout
from dispatch.plan import CallPlan, plan_call, plan_execute, plan_rank_zero
from dispatch.register import MethodSpec, method_spec, registered_methods
from single_controller.base.call import ENGINE_GONE, Call, GroupState
from single_controller.base.checks import check_seconds
from single_controller.base.closing import Closing
from single_controller.base.engine import Engine
from single_controller.base.future import WorkerFuture
from single_controller.base.method import CallOptions, RemoteMethod
from single_controller.base.monitor import monitor
from single_controller.base.standing import layout_of
from single_controller.base.stats import Accounts, Stats, write_trace
from single_controller.base.worker import Worker

T = TypeVar("T")
PlanOf = Callable[[MethodSpec, Any, tuple[Any, ...], dict[str, Any]], CallPlan]

ERROR_GRACE_SECONDS = 5.0

_AS_DECLARED = CallOptions()

RESERVED = frozenset({"alive", "resource_pool", "spawn"})
"""Names that a group needs, beside the attributes of its class."""


class Methods:
    """The registered methods of a group: ``group.methods.<name>``, also for names the group has for itself."""

    def __init__(self, group: WorkerGroup) -> None:
        self._group = group

    def __getattr__(self, name: str) -> RemoteMethod:
        return self._group._method(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._group._specs)

    def __dir__(self) -> list[str]:
        return list(self._group._specs)


class WorkerGroup(Closing):
    """Workers of one class, one per rank. Their registered methods are the group's.

    ``group.m(x)`` cuts the arguments as the method declares, runs it on the ranks and gathers the answers. Several
    threads may call at once; each rank runs its calls in the order in which they were sent. A group is a context
    manager that closes itself.

    Args:
        worker_class: the class; its registered methods become the group's.
        name: the group's name, for messages.
        error_grace: seconds that the other ranks have to end a call after one raised in it.

    Raises:
        DispatchError: a registered method has a name that the group needs for itself.
    """

    def __init__(self, worker_class: type[Worker], name: str, error_grace: float = ERROR_GRACE_SECONDS) -> None:
        self._worker_class = worker_class
        self._specs = registered_methods(worker_class)
        taken = sorted(n for n in self._specs if n in RESERVED or hasattr(type(self), n))
        if taken:
            raise DispatchError(
                f"{worker_class.__name__} registers {', '.join(f'{n}()' for n in taken)}, a name that a group needs "
                "for itself: rename the method",
                method=taken[0],
            )
        self._state = GroupState(name, check_seconds("error_grace", error_grace))
        self._sending = threading.RLock()
        self._accounts = Accounts()
        self._layout: tuple[dict[int, int], Layout] | None = None
        self._running: Engine | None = None

    # --- what a group is --------------------------------------------------------------------------------

    @property
    def name(self) -> str:
        """The group's name."""
        return self._state.name

    @property
    def closed(self) -> bool:
        """Whether the group was closed."""
        return self._state.closed

    @property
    def broken(self) -> str | None:
        """Why the group takes no more calls until it is restarted, or None."""
        return self._state.broken

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self._engine.world_size

    @property
    def layout(self) -> Layout:
        """Where the ranks stand, as the workers reported it. Asked of them when first needed, and again when a
        worker has said something new.

        Raises:
            DispatchError: some ranks reported and others did not.
        """
        known = self._layout
        if known is None or any(version > known[0].get(rank, 0) for rank, version in self._state.standings.items()):
            known = self._layout = self._ask_layout()
        return known[1]

    @property
    def tp_size(self) -> int:
        """Size of the tensor-parallel axis, as the workers reported it; 1 for one that they did not name.

        Raises:
            DispatchError: the workers have not said where they stand yet. So for all of these sizes.
        """
        return self._axis_size("tp")

    @property
    def pp_size(self) -> int:
        """Size of the pipeline-parallel axis."""
        return self._axis_size("pp")

    @property
    def dp_size(self) -> int:
        """Size of the data-parallel axis, context parallelism not counted."""
        return self._axis_size("dp")

    @property
    def cp_size(self) -> int:
        """Size of the context-parallel axis."""
        return self._axis_size("cp")

    @property
    def ep_size(self) -> int:
        """Size of the expert-parallel axis; its ranks are data-parallel ranks too."""
        return self._axis_size("ep")

    @property
    def vpp_size(self) -> int:
        """Virtual pipeline stages that each rank holds; 1 without an interleaved pipeline."""
        return self._axis_size("vpp")

    def stats(self) -> Stats:
        """What the group's calls cost: bytes and seconds by method, and by call and rank. Prints as a table."""
        return self._accounts.stats()

    def trace(self, path: str | Path) -> None:
        """Write the last calls as a Chrome trace, which Perfetto opens: a row for the driver and one for each rank.

        Args:
            path: the file, JSON.
        """
        write_trace(path, self.name, self._accounts.stats().calls)

    @property
    def methods(self) -> Methods:
        """The registered methods, by name."""
        return Methods(self)

    # --- calls ------------------------------------------------------------------------------------------

    def execute_all(self, method_name: str, *args: Any, **kwargs: Any) -> list[Any]:
        """`execute_all_async`."""
        return self.execute_all_async(method_name, *args, **kwargs)

    def execute_all_async(self, method_name: str, *args: Any, **kwargs: Any) -> list[Any]:
        """Call any method, registered or not, on all ranks, without waiting.

        Args:
            method_name: its name.
            args: when every argument is a list of world_size, rank i gets item i of each. When none is a
                list, every rank gets them as they are. ``Broadcast(x)`` always goes whole.
            kwargs: likewise.

        Returns:
            The engine's references, one per rank (ObjectRefs, on Ray).

        Raises:
            AttributeError: the worker has no such method.
            DispatchError: some arguments are lists and others are not, or a list has another length.
        """
        return WorkerFuture(self._execute(plan_execute, method_name, args, kwargs, future=True)).refs

    def execute_all_sync(self, method_name: str, *args: Any, **kwargs: Any) -> list[Any]:
        """`execute_all_async`, waited for: the answers by rank.

        Raises:
            SingleControllerError: a rank raised or died, besides what `execute_all_async` raises.
        """
        result: list[Any] = self._wait(self._execute(plan_execute, method_name, args, kwargs, future=False))
        return result

    def execute_rank_zero(self, method_name: str, *args: Any, **kwargs: Any) -> Any:
        """`execute_rank_zero_async`."""
        return self.execute_rank_zero_async(method_name, *args, **kwargs)

    def execute_rank_zero_async(self, method_name: str, *args: Any, **kwargs: Any) -> Any:
        """Call any method on rank 0 alone, with the arguments as they are, without waiting.

        Returns:
            The engine's reference to the answer (one ObjectRef, on Ray).

        Raises:
            AttributeError: the worker has no such method.
        """
        return WorkerFuture(self._execute(plan_rank_zero, method_name, args, kwargs, future=True)).refs[0]

    def execute_rank_zero_sync(self, method_name: str, *args: Any, **kwargs: Any) -> Any:
        """`execute_rank_zero_async`, waited for: the bare value.

        Raises:
            SingleControllerError: the rank raised or died, besides what `execute_rank_zero_async` raises.
        """
        return self._wait(self._execute(plan_rank_zero, method_name, args, kwargs, future=False))

    # --- life -------------------------------------------------------------------------------------------

    def close(self) -> None:
        """End the workers. Calls under way raise `GroupClosedError`; a second close does nothing."""
        monitor.forget(self._state.close())
        if self._running is not None:
            self._running.kill()

    def restart(self) -> None:
        """End the workers and begin anew, in the same place with the same constructor arguments."""
        raise NotImplementedError(f"{type(self).__name__} does not restart")

    # --- the inside -------------------------------------------------------------------------------------

    @property
    def _engine(self) -> Engine:
        if self._running is None:
            raise RuntimeError(f"{self.name} has no workers yet")
        return self._running

    def _check(self) -> None:
        if not self._state.closed and not self._engine.connected:
            self._state.break_(ENGINE_GONE)
        self._state.check()

    def _invoke(self, spec: MethodSpec, args: tuple[Any, ...], kwargs: dict[str, Any], options: CallOptions) -> Any:
        begun = time.time()
        self._check()
        blocking = spec.registration.blocking if options.blocking is None else options.blocking
        plan = self._plan(spec, args, kwargs, options)
        call = self._send(spec, plan, future=not blocking, options=options, begun=begun)
        return self._wait(call) if blocking else WorkerFuture(call)

    def _execute(self, plan: PlanOf, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], *, future: bool) -> Call:
        begun = time.time()
        self._check()
        spec = self._any_method(name)
        return self._send(spec, plan(spec, self, args, kwargs), future=future, begun=begun)

    def _plan(self, spec: MethodSpec, args: tuple[Any, ...], kwargs: dict[str, Any], options: CallOptions) -> CallPlan:
        return self._knowing(lambda: plan_call(spec, self, args, kwargs, options.uneven), spec.name)

    def _axis_size(self, axis: str) -> int:
        self._check()
        return self._knowing(lambda: self.layout.checked_size(axis), f"{axis}_size")

    def _knowing(self, ask: Callable[[], T], what: str) -> T:
        """What ``ask`` finds out from the layout. Coordinates that were asked for earlier are asked for once more if
        they do not do: a call that was under way then may have said them since."""
        while True:
            asked_before = self._layout is not None
            try:
                return ask()
            except UnknownLayoutError as error:
                if not asked_before:
                    raise DispatchError(str(error), method=what) from None
                self._layout = None

    def _send(
        self,
        spec: MethodSpec,
        plan: CallPlan,
        *,
        future: bool,
        options: CallOptions = _AS_DECLARED,
        begun: float | None = None,
    ) -> Call:
        with self._sending:
            self._state.check()  # once more: it may have been closed while this waited
            sent = self._engine.send(spec, plan, future=future)
            call = Call(
                self._state,
                self._engine,
                spec.name,
                plan,
                sent,
                options.timeout,
                accounts=self._accounts,
                begun=begun,
                device=options.device,
            )
        if future:
            monitor.watch(call)
        return call

    def _wait(self, call: Call) -> Any:
        monitor.wait(call, just_sent=True)
        return call.result()

    def _ask_layout(self) -> tuple[dict[int, int], Layout]:
        with self._sending:
            self._check()
            sent = self._engine.ask_standings()
            everyone = tuple(range(self.world_size))
            call = Call(self._state, self._engine, "layout", CallPlan.empty(self.world_size), sent)
        monitor.wait(call)
        if call.error is not None:
            raise call.error
        receipts = call.receipts()
        versions = {rank: receipts[rank].standing for rank in everyone}
        return versions, layout_of([receipts[rank].value for rank in everyone])

    def _any_method(self, name: str) -> MethodSpec:
        if not isinstance(name, str):
            raise TypeError(f"execute_* takes a method's name, a string like 'add'; got {name!r}")
        spec = self._specs.get(name) or method_spec(self._worker_class, name)
        if spec is None:
            names = [n for n in dir(self._worker_class) if not n.startswith("_")]
            raise AttributeError(f"{self._worker_class.__name__} has no method {name!r}{_closest(name, names)}")
        return spec

    def _method(self, name: str) -> RemoteMethod:
        spec = self._specs.get(name)
        if spec is not None:
            return RemoteMethod(spec, self._invoke)
        owner = self._worker_class.__name__
        if method_spec(self._worker_class, name) is not None:
            raise AttributeError(
                f"{owner}.{name}() is not registered: put @register(...) on it, or call "
                f"group.execute_all_sync({name!r}, ...)"
            )
        raise AttributeError(f"the group has no method {name!r}, nor has {owner}{_closest(name, dir(self))}")

    def __getattr__(self, name: str) -> RemoteMethod:
        # Only for names that are not found otherwise. Made at each access: no cycle keeps a dropped group alive.
        if name.startswith("_"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return self._method(name)

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *self._specs]

    def __reduce__(self) -> Any:
        raise TypeError(
            "a group stays in its driver; send what you need of it, group.workers for example (their "
            "methods are called with .remote())"
        )

    def __repr__(self) -> str:
        size = f" of {self._running.world_size}" if self._running is not None else ""
        state = " (closed)" if self._state.closed else " (broken)" if self._state.broken else ""
        return f"<{type(self).__name__}{size} {self._worker_class.__name__}{state}>"


def _closest(name: str, names: Sequence[str]) -> str:
    public = [known for known in names if not known.startswith("_")]
    found = difflib.get_close_matches(name, public, n=1)
    return f"; did you mean {found[0]!r}?" if found else f"; it has {', '.join(public)}"
