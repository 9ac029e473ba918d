"""WorkerGroup: the driver's proxy of many workers, whatever transport runs them."""

from __future__ import annotations

import functools
import operator
import os
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any, Generic, Literal, NamedTuple, ParamSpec, Self, TypedDict, TypeVar, Unpack, cast, overload

from dispatch.batch import Uneven
from dispatch.checks import check_count, check_seconds, suggestion
from dispatch.errors import DispatchError, SingleControllerError
from dispatch.layout import Layout, layout_from
from dispatch.modes import CustomMode, Mode, has_axes
from dispatch.plan import CallPlan, deferred_in, find_futures, futures_in, plan_call
from dispatch.register import MethodSpec, method_spec, naming_keywords
from dispatch.typed import RegisteredMethod
from single_controller.call.call import DECLARED, Call, CallOptions
from single_controller.call.codec import FutureInside, future_inside
from single_controller.call.errors import GroupBrokenError, ranks_text
from single_controller.call.future import ComputedFuture, WorkerFuture, in_event_loop, off_loop
from single_controller.call.joining import Inputs
from single_controller.call.map_batches import BatchMap, report
from single_controller.call.state import TRANSPORT_GONE, Closing, GroupState, GroupStatus, OnDeath, Watcher, monitor
from single_controller.call.stats import RECORDED_CALLS, CallStats, Stats, write_trace
from single_controller.call.transport import MAX_STACK_SECONDS, Outcome, PartlySentError, Resized, Sent, Transport
from single_controller.call.worker.worker import Worker
from single_controller.call.worker.worker_class import WorkerClass
from single_controller.verl import MegatronInfo, VerlGroup

P = ParamSpec("P")
T = TypeVar("T")
Called = TypeVar("Called")

Invoke = Callable[[MethodSpec, tuple[Any, ...], dict[str, Any], CallOptions], Any]

ERROR_GRACE_SECONDS = 5.0

Planner = Callable[[MethodSpec, Layout, tuple[Any, ...], dict[str, Any]], CallPlan]


class _Replay(NamedTuple):
    """The latest successful call of a method that was registered with ``replay=True``."""

    number: int  # its number among the calls of the group
    spec: MethodSpec
    options: CallOptions
    # Plans it again, with the same arguments, for the group that is passed to it, or as if that had so many ranks
    plan: Callable[[Any, int | None], CallPlan]


class OtherOptions(TypedDict, total=False):
    """The options of `RemoteMethod.options` that do not change what a call returns, for type checkers."""

    timeout: float | None
    uneven: Uneven | None
    device: str | None


class MapOptions(TypedDict, total=False):
    """The options of `WorkerGroup.map`, for type checkers."""

    in_flight: int
    retries: int
    ordered: bool
    progress: bool | Callable[[int], object]


class RemoteMethod(Generic[P, T, Called]):
    """A registered method of a group's workers, with the worker method's name, signature and docstring.

    ``group.m(x)`` calls it, ``group.m.remote(x)`` returns a future, ``group.m.options(timeout=60)(x)`` sets options for
    one call. Type parameters: the parameters, the call's value, and what calling returns: the value or a future of it.
    """

    def __init__(self, spec: MethodSpec, invoke: Invoke, options: CallOptions = DECLARED) -> None:
        self._spec = spec
        self._invoke = invoke
        self._options = options
        self.__name__ = spec.name
        self.__qualname__ = f"{spec.owner}.{spec.name}"
        self.__module__ = spec.function.__module__
        self.__doc__ = spec.function.__doc__

    @property
    def __signature__(self) -> Any:
        return self._spec.signature

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> Called:
        """Call the method on the group's workers."""
        return cast(Called, self._invoke(self._spec, args, kwargs, self._options))

    def remote(self, *args: P.args, **kwargs: P.kwargs) -> WorkerFuture[T]:
        """Call the method and return a future at once."""
        future: WorkerFuture[T] = self._invoke(self._spec, args, kwargs, replace(self._options, blocking=False))
        return future

    @overload
    def options(self, *, blocking: None = ..., **others: Unpack[OtherOptions]) -> Self: ...

    @overload
    def options(self, *, blocking: Literal[True], **others: Unpack[OtherOptions]) -> RemoteMethod[P, T, T]: ...

    @overload
    def options(
        self, *, blocking: Literal[False], **others: Unpack[OtherOptions]
    ) -> RemoteMethod[P, T, WorkerFuture[T]]: ...

    @overload
    def options(self, *, blocking: bool | None, **others: Unpack[OtherOptions]) -> RemoteMethod[P, T, Any]: ...

    @naming_keywords
    def options(
        self,
        *,
        timeout: float | None = None,
        blocking: bool | None = None,
        uneven: Uneven | None = None,
        device: str | None = None,
    ) -> Any:
        """Return the same method with options for the calls made through it.

        Args:
            timeout: seconds until the call is late: `CallTimeoutError`, and the group is broken.
            blocking: whether the call waits for its result or returns a future.
            uneven: ``"error"``, ``"pad"`` or ``"ragged"``, as in `register`.
            device: where to put the result's tensors, such as ``"cuda"``. By default they come back as CPU tensors,
                wherever the method had them.

        Raises:
            ValueError: an option has an invalid value.
        """
        given = {"timeout": timeout, "blocking": blocking, "uneven": uneven, "device": device}
        changes: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
        return RemoteMethod(self._spec, self._invoke, replace(self._options, **changes))

    def __get__(self, instance: object, owner: type | None = None) -> Self:
        # Makes inspect.isroutine() true, so that help(group.m) shows the method's own page.
        return self

    def __repr__(self) -> str:
        return f"<remote method {self.__qualname__}{self._spec.signature}, {self._spec.registration.mode!r}>"


class Methods:
    """The registered methods of a group: ``group.methods.<name>``. Iterating gives the names: those of the user's
    classes first, then those of the library's."""

    def __init__(self, group: WorkerGroup) -> None:
        self._group = group

    def __getattr__(self, name: str) -> RemoteMethod[..., Any, Any]:
        return self._group._method(name)

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._group._specs, key=lambda name: self._group._specs[name].of_library))

    def __dir__(self) -> list[str]:
        return list(self)

    def __contains__(self, name: object) -> bool:
        return name in self._group._specs

    def __reduce__(self) -> Any:
        return Methods, (self._group,)

    def __repr__(self) -> str:
        return f"<methods: {', '.join(self)}>"


def _axis_size(axis: str, meaning: str) -> property:
    return property(
        lambda group: group._axis_size(axis),
        doc=f"Size of the {meaning}, as the workers registered it; 1 if they did not name the axis.",
    )


class WorkerGroup(VerlGroup, Closing):
    """Workers of one class, one per rank. Their registered methods are methods of the group.

    ``group.m(x)`` shards the arguments as the method declares, runs it on the ranks and joins the results. Several
    threads may call at once. Each rank runs its calls in the order in which they were sent. A group is a context
    manager that closes itself.

    Args:
        classes: role -> class. A single class has the role None, and its registered methods become the group's.
            Several classes, colocated in one process, get a `RoleGroup` each.
        name: the group's name, for messages.
        error_grace: seconds that the other ranks have to end a call after one raised, before the group is broken. With
            ``collectives=False`` it is not.

    Raises:
        DispatchError: a registered method or a role has a name that the group uses itself.
    """

    def __init__(
        self, classes: Mapping[str | None, type[Worker]], name: str, error_grace: float = ERROR_GRACE_SECONDS
    ) -> None:
        self._role: str | None = None
        self._worker_classes = {role: WorkerClass(cls, role) for role, cls in classes.items()}
        reserved = frozenset(dir(type(self)))
        for role, worker_class in self._worker_classes.items():
            worker_class.check_names(reserved)
            if role in reserved:
                raise DispatchError(f"{role!r} is a name that a worker group uses itself: rename the role")
        monitor.start()
        self._state = GroupState(name, check_seconds("error_grace", error_grace))
        # By role and method; their arguments are kept. Protected by the lock of the state.
        self._replays: dict[tuple[str | None, str], _Replay] = {}

    # --- what a group knows -------------------------------------------------------------------------------------------

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
        """Why the group takes no calls until it is restarted; None if it does."""
        return self._state.broken

    @property
    def collectives(self) -> bool:
        """Whether ranks may wait for each other in collectives, so that none can be replaced without the others."""
        return not self._state.independent

    def advise(self, advice: str) -> None:
        """Set what `GroupBrokenError` recommends, for wrappers that recover in another way than `restart`."""
        self._state.advice = advice

    @property
    def generation(self) -> int:
        """How often the group was restarted or had ranks replaced."""
        return self._state.restarts

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self._transport.world_size

    @property
    def layout(self) -> Layout:
        """The coordinates that the workers have registered. The group asks them when the layout is first needed, and
        again after a worker has registered something new.

        Raises:
            DispatchError: only some ranks have registered; or the group has roles, each with a layout of its own.
        """
        self._state.check_process()
        return self._layout_with(lambda layout: True)

    tp_size = _axis_size("tp", "tensor-parallel axis")
    pp_size = _axis_size("pp", "pipeline-parallel axis")
    dp_size = _axis_size("dp", "data-parallel axis, without context parallelism")
    cp_size = _axis_size("cp", "context-parallel axis")
    sp_size = _axis_size("sp", "sequence-parallel axis, whose ranks get the same rows")
    ep_size = _axis_size("ep", "expert-parallel axis, whose ranks are data-parallel ranks too")
    vpp_size = _axis_size("vpp", "virtual pipeline: the stages that each rank holds")

    def stats(self) -> Stats:
        """What the group's calls cost: bytes and seconds by method, and by call for the latest ones. Prints as a table.
        With roles, also all roles' methods, as ``<role>.<method>``. See `record_ranks` for each rank's part."""
        parts = {role: stats.stats() for role, stats in self._stats_by_role().items()}
        return Stats.together(parts) if self.roles else parts[None]

    def _stats_by_role(self) -> dict[str | None, CallStats]:
        """The records of each role; of a group without roles, under None."""
        if self.roles:
            return {role: one.stats for role, one in self._worker_classes.items()}
        return {None: self._worker_classes[self._role].stats}

    def record_ranks(self, calls: int = RECORDED_CALLS, *, at_least: bool = False) -> None:
        """Keep what each rank did in the latest calls, from the next call on, for `stats` and `trace`; with roles, in
        all roles' calls, or those of one: ``group.<role>.record_ranks()``. Off by default: each rank takes about 400
        bytes of each call.

        Args:
            calls: how many of the latest calls keep their ranks; 0 ends it and drops what was kept.
            at_least: if more calls keep them already, change nothing.

        Raises:
            ValueError: ``calls`` is not a non-negative integer.
        """
        for stats in self._stats_by_role().values():
            stats.record_ranks(calls, at_least)

    def trace(self, path: str | Path) -> None:
        """Write the latest calls as a Chrome trace for Perfetto: a row for the driver, and one for each rank in calls
        that were made after `record_ranks`.

        Args:
            path: the JSON file to write.

        Warns:
            UserWarning: no call has its ranks, so the trace has the driver's row alone.
        """
        calls = self.stats().calls
        if calls and not any(call.ranks for call in calls):
            warnings.warn(
                f"the trace of {self.name} has no rows for the ranks, because their records are off by default: call "
                "group.record_ranks() before the calls that you want to trace",
                stacklevel=2,
            )
        write_trace(path, self.name, calls)

    @property
    def methods(self) -> Methods:
        """The registered methods by name: ``group.methods.add`` is ``group.add``."""
        return Methods(self)

    @overload
    def on(self, method: RegisteredMethod[..., Any, P, T, Literal[True]]) -> RemoteMethod[P, T, T]: ...

    @overload
    def on(self, method: RegisteredMethod[..., Any, P, T, Literal[False]]) -> RemoteMethod[P, T, WorkerFuture[T]]: ...

    def on(self, method: Any) -> Any:
        """The typed spelling of ``group.m``: ``group.on(Scorer.score)`` is ``group.score``, and type checkers know its
        arguments and its result.

        Args:
            method: a registered method of the group's worker class or of one of its bases.

        Raises:
            TypeError: ``method`` is not a method of a class.
            DispatchError: the group's worker class does not have that method; the message lists its registered methods.
        """
        if self._class is None:
            ways = " or ".join(f"group.{role}.on(...)" for role in self.roles)
            raise DispatchError(f"{self.name} has several workers per process: call {ways}", method="on")
        return self._method(self._class.name_of(method))

    # --- roles --------------------------------------------------------------------------------------------------------

    @property
    def roles(self) -> tuple[str, ...]:
        """The roles of a colocated group, in the order in which their workers are created; empty for other groups."""
        return tuple(role for role in self._worker_classes if role is not None and self._role is None)

    def spawn(self, prefix_set: Iterable[str] | None = None) -> dict[str, RoleGroup]:
        """The groups of a colocated group's roles by name; the same as ``group.<role>``.

        Args:
            prefix_set: the roles; all by default.

        Raises:
            DispatchError: the group has no such role.
        """
        return {role: self._role_group(role) for role in (self.roles if prefix_set is None else prefix_set)}

    # --- life cycle ---------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """End the workers. Running calls raise `GroupClosedError`. A second close does nothing, and neither does one
        in a fork of the process that made the group."""
        if os.getpid() != self._state.pid:
            return  # the workers belong to the process that this one was forked from
        with self._state.lock:
            self._state.close()
            self._replays.clear()
        if self._state.transport is not None:
            self._state.transport.kill()

    def alive(self) -> list[bool]:
        """Whether each rank's process is alive. Returns also while they are busy."""
        self._state.check_process()
        transport = self._transport
        if self._state.closed or not transport.connected:
            return [False] * transport.world_size
        dead = self._state.find_deaths(transport)
        return [rank not in dead for rank in range(transport.world_size)]

    def status(self, timeout: float = MAX_STACK_SECONDS) -> GroupStatus:
        """Each rank's process, what it runs now and since when, and why it died. Prints as a table. The ranks answer
        while they are busy.

        Args:
            timeout: seconds that the ranks may take to answer. One that does not is shown as such.

        Raises:
            ValueError: the timeout is not a positive number.
        """
        self._state.check_process()
        return self._state.status(check_seconds("timeout", timeout))

    def watch(self, on_death: OnDeath | None = None, interval: float = 0.5) -> Watcher:
        """Start a thread that notices deaths while no call is running. A death breaks the group.

        The thread ends when the group or its `Watcher` is closed, continues after a restart, and never keeps the driver
        alive.

        Args:
            on_death: called in that thread, once per death, with the `WorkerDiedError`. It may call
                ``group.restart()``. Exceptions that it raises are logged.
            interval: seconds between two checks.

        Raises:
            TypeError: ``on_death`` is not callable.
            ValueError: the interval is not a positive number.
            StartError: the process has as many threads as it may have.
        """
        return Watcher(self._state, on_death, interval)

    def restart(self, ranks: Sequence[int] | None = None) -> None:
        """End the workers and start new ones, in the same slots and with the same constructor arguments. Then repeat
        the latest successful call of each method with ``replay=True``, in the order of those calls.

        Running calls raise. Other threads' calls wait until the restart is done.

        Args:
            ranks: restart only these ranks, and others that have died, in a group that was created with
                ``collectives=False``. The others keep their state; calls are repeated on the restarted ranks alone.

        Raises:
            GroupClosedError: the group was closed.
            GroupBrokenError: another driver started these workers, so they cannot be restarted here.
            ValueError: the group has no such ranks, or uses collectives.
            SingleControllerError: what starting a group or a repeated call raises. The group then stays broken.
        """
        state = self._state
        state.check_process()
        before, was_broken = state.restarts, state.broken is not None
        with state.sending:  # nobody else sends to a group in transition
            state.check_closed()
            chosen = self._check_restart(ranks)
            if was_broken and state.broken is None and state.restarts > before:
                return  # while this thread waited for the lock, another one repaired the same damage
            with state.restart():
                self._start_workers(chosen)
                state.reopen()
                self._replay(chosen)
                if chosen is not None:
                    self._forget_layouts()

    async def arestart(self, ranks: Sequence[int] | None = None) -> None:
        """`restart` for event loops, which it does not block."""
        await off_loop(lambda: self.restart(ranks))

    # --- calls --------------------------------------------------------------------------------------------------------

    @overload
    def map(
        self, method: RemoteMethod[P, T, Called], batches: Iterable[Any], **options: Unpack[MapOptions]
    ) -> Iterator[T]: ...

    @overload
    def map(self, method: str, batches: Iterable[Any], **options: Unpack[MapOptions]) -> Iterator[Any]: ...

    def map(
        self,
        method: RemoteMethod[..., Any, Any] | str,
        batches: Iterable[Any],
        *,
        in_flight: int = 2,
        retries: int = 0,
        ordered: bool = True,
        progress: bool | Callable[[int], object] = False,
    ) -> Iterator[Any]:
        """Call a method with one batch after another, a few in flight, and yield the results.

        With ``collectives=False``, each rank gets its shard in a call of its own, and only the shards of ranks that
        died are sent again; if the group has shrunk, their whole batches. Otherwise, and for methods with
        ``replay=True``, all batches in flight are sent again. No batch is sent while the caller processes a result.

        Args:
            method: its name, or the method itself, for options: ``group.score.options(timeout=60)``. Its only argument
                is the batch.
            batches: any iterable; an item is taken when there is room for it.
            in_flight: the maximum number of batches in flight, so that the ranks need not wait for the driver.
            retries: how often a batch is sent again that may have caused the death of a rank, which is the oldest one
                in flight. Before that, the dead ranks are replaced, as ``on_death`` says, or otherwise restarted: only
                these ranks with ``collectives=False``, otherwise all.
            ordered: yield the results in the order of the batches; otherwise in the order in which they arrive.
            progress: called with the number of batches that are done. True shows a bar, if tqdm is installed.

        Raises:
            TypeError: the method is not one of a group, or the batches cannot be iterated.
            ValueError: a number is out of range.
            WorkerDiedError, GroupBrokenError: a rank has died, and the retries are used up.
            SingleControllerError: as any call.
        """
        if not isinstance(method, (str, RemoteMethod)):
            raise TypeError(f"map(): method is {method!r:.80}; pass a method of the group, group.score, or its name")
        if not isinstance(batches, Iterable):
            raise TypeError(f"map(): batches is {batches!r:.80}; pass a list or generator of batches")
        if isinstance(method, RemoteMethod):
            owner: Any = getattr(method._invoke, "__self__", self)  # the group that it was taken from
            if (owner._state, owner._role) != (self._state, self._role):
                raise TypeError(
                    f"map(): {method.__name__}() is a method of {owner.name}, not of {self.name}; use its map()"
                )
        name, options = (method, DECLARED) if isinstance(method, str) else (method.__name__, method._options)
        mapped = BatchMap(
            self,
            self._method(name)._spec,
            options,
            batches,
            in_flight=check_count("map(in_flight)", in_flight),
            retries=check_count("map(retries)", retries, 0),
            ordered=ordered,
            progress=report(progress, name, batches),
        )
        return mapped.results()

    def _invoke(
        self,
        spec: MethodSpec,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        options: CallOptions,
        *,
        as_call: bool = False,
    ) -> Any:
        """Plan a call, send it, and wait for it or return its future. ``as_call``: return the `Call` itself, and
        wait for nothing in the thread of an event loop."""
        begun = time.time()
        blocking = spec.registration.blocking if options.blocking is None else options.blocking
        if not (blocking or as_call) and self._in_loop():
            return self._invoke_in_loop(spec, args, kwargs, options)
        # Not ``as_call``: the thread "send-later" must not wait for itself. Nor must an event loop that has found no
        # call waiting: it holds ``sending``, for which a call waits that another loop has left to the thread since.
        if self._state.unsent and not as_call:
            self._wait_for_unsent()
        must_not_wait = as_call and in_event_loop()

        def again(group: WorkerGroup, world_size: int | None) -> CallPlan:
            return group._plan(spec, args, kwargs, options, world_size)

        while True:
            self._check()
            restarts = self._state.restarts
            plan = self._plan(spec, args, kwargs, options)
            try:
                call = self._send(
                    spec, plan, options, again, begun=begun, restarts=restarts, must_not_wait=must_not_wait
                )
                break
            except Resized:
                continue
        return call if as_call else call.value() if blocking else WorkerFuture(call)

    def _invoke_in_loop(
        self, spec: MethodSpec, args: tuple[Any, ...], kwargs: dict[str, Any], options: CallOptions
    ) -> WorkerFuture[Any]:
        """`_invoke` in the thread of an event loop, which must not wait: not for a thread that repairs the group or
        sends a call, and not for the ranks. What has to wait is sent by a thread."""
        self._state.check_process()
        invoke = functools.partial(self._invoke, spec, args, kwargs, options, as_call=True)
        sending = self._state.sending
        if sending.acquire(blocking=False):
            try:
                if not self._must_wait(spec, dict(enumerate(args)) | kwargs):
                    return WorkerFuture(invoke())
            except FutureInside:  # whose value or call may have to be waited for
                pass
            finally:
                sending.release()
        return self._send_later(spec, invoke)

    def _must_wait(self, spec: MethodSpec, arguments: dict[Any, Any]) -> bool:
        """Whether a call may have to wait before it can be sent: for ranks to be replaced, for the layout, or for a
        call whose future is an argument."""
        state, mode = self._state, spec.registration.mode.mode
        if state.unsent:
            return True
        if state.transport is None or state.transport.synchronous or state.closed:
            return False
        # The call of a handed-out reference may have ended by a death that the group does not know of.
        if state.recovers and (state.dead or state.referred):
            return True
        # The call takes the values of the futures of this process, and a dispatch_fn those of all.
        custom = isinstance(mode, CustomMode)
        takes, values = WorkerFuture if custom else ComputedFuture, arguments.values()
        found = (*deferred_in(arguments), *(one for value in values for one in futures_in(value, everywhere=custom)))
        futures = [one for one in found if isinstance(one, WorkerFuture)]
        if any(one.unsent or (isinstance(one, takes) and not one.done()) for one in futures):
            return True
        needed = mode.in_layout if isinstance(mode, Mode) and not spec.registration.execute.rank_zero else None
        return needed is not None and self._known_layout(needed) is None

    def _wait_for_unsent(self) -> None:
        """In the thread of an event loop, wait until the calls that it has left to a thread are sent. They come
        first."""
        if self._state.unsent and self._in_loop():
            reached: Future[None] = Future()
            with self._state.lock:
                if not self._state.unsent:
                    return
                self._state.unsent.append(lambda: reached.set_result(None))
            reached.result()

    def _in_loop(self) -> bool:
        """Whether this thread runs an event loop, whose calls another thread sends if they have to wait. Not while this
        one holds ``sending``, for which the other would wait: in a restart, and in a dispatch_fn."""
        return in_event_loop() and not self._state.sending._is_owned()  # type: ignore[attr-defined]

    def _send_later(self, spec: MethodSpec, invoke: Callable[[], Call]) -> WorkerFuture[Any]:
        """Have a thread send a call, after those that it has to send already."""
        state = self._state
        sent: Future[Call | BaseException] = Future()
        sent.set_running_or_notify_cancel()  # cancelling the task that waits must not cancel it for others

        def send() -> None:
            try:
                sent.set_result(invoke())
            except BaseException as error:
                sent.set_result(error.with_traceback(None))

        with state.lock:
            if not state.unsent:
                # Before anything is queued: a thread that cannot start must leave nothing behind.
                about = state, weakref.ref(send)  # the thread may outlive the call, and must not keep its arguments
                thread = threading.Thread(target=_send_all, args=about, name="send-later", daemon=True)
                try:
                    thread.start()
                except RuntimeError as error:  # the process has as many threads as it may have
                    raise DispatchError(
                        f"{spec.label}() was not sent: in an event loop it would have to wait in a thread, and none "
                        f"could be started: {error}",
                        method=spec.name,
                    ) from error
            state.unsent.append(send)
        return WorkerFuture(None, sending=(spec.label, sent))

    def _execute(self, plan: Planner, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], *, wait: bool) -> Any:
        """Call a method, registered or not; return its value, or, without ``wait``, the references to its results."""
        begun = time.time()
        state = self._state
        state.check_process()
        if not wait and state.recovers and state.referred and in_event_loop():
            state.look()
        if not wait and state.recovers and state.dead and in_event_loop():
            raise GroupBrokenError(
                f"{self.name}: ranks have died, and an event loop must not wait until they are replaced; call "
                "`await group.areplace()` first, or a registered method, whose .remote() waits in a thread"
            )
        self._wait_for_unsent()
        spec = self._any_method(name)

        def planned(group: WorkerGroup, world_size: int | None) -> CallPlan:
            return plan(spec, _without_coordinates(world_size or group.world_size), args, kwargs)

        while True:
            self._check()
            try:
                call = self._send(spec, planned(self, None), DECLARED, planned, begun=begun)
                break
            except Resized:
                continue
        return call.value() if wait else call.refs()

    def _check(self) -> None:
        """Raise the error of a group that takes no calls. During a restart, wait for its end first. If ranks have died
        before, do what ``on_death`` says."""
        state = self._state
        if os.getpid() != state.pid:
            state.check_process()
        if state.restarting:
            with state.sending:  # reentrant: the thread that restarts passes
                pass
        if not state.closed:
            if state.transport is not None and not state.transport.connected:
                state.break_(TRANSPORT_GONE)
            if state.referred:
                state.look()
            if state.recovers and state.dead:
                self._recover()
        if (state.closed or state.broken is not None) and (refusal := state.refusal()) is not None:
            raise refusal

    def _plan(
        self,
        spec: MethodSpec,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        options: CallOptions,
        world_size: int | None = None,
    ) -> CallPlan:
        registration, transport = spec.registration, self._state.transport
        mode = registration.mode.mode
        layout = _without_coordinates(world_size or (0 if transport is None else transport.world_size))
        if isinstance(mode, Mode) and mode.in_layout is not None and not registration.execute.rank_zero:
            try:
                layout = self._layout_with(mode.in_layout)
            except DispatchError as error:
                raise DispatchError(f"{spec.label}() needs a layout: {error}", method=spec.name) from None
        return plan_call(spec, layout, args, kwargs, options.uneven, self)

    def _send(
        self,
        spec: MethodSpec,
        plan: CallPlan,
        options: CallOptions = DECLARED,
        again: Callable[[Any, int | None], CallPlan] | None = None,
        *,
        begun: float | None = None,
        recorded: bool = True,
        restarts: int | None = None,
        must_not_wait: bool = False,
        searched: bool = False,
    ) -> Call:
        """Send a call. ``again``: plans it again if it is to be repeated; ``restarts``: how often the group had been
        restarted before it was planned.

        Raises:
            FutureInside: a future inside an argument may have to be waited for, and ``must_not_wait`` is set.
            Resized: the plan is for other ranks.
        """
        state = self._state
        for future in plan.deferred:  # before the lock, which the thread that sends or computes the future may need
            if isinstance(future, WorkerFuture):
                try:
                    future._sent()
                except SingleControllerError as error:  # without its frames, which refer to the plan
                    raise error.of_consumer(spec.label) from error.with_traceback(None)
            if future.computed_here:
                future.result()
            elif self._transport.synchronous:
                future.wait()
        try:
            with state.sending:
                transport = state.transport
                # Again: another thread may have closed the group while this one waited.
                if transport is None or state.closed or state.broken is not None:
                    raise state.refusal() or RuntimeError(f"{self.name} has no workers yet")
                if len(plan.shard_of) != transport.world_size or restarts not in (None, state.restarts):
                    raise Resized
                stats = self._worker_classes[self._role].stats if recorded else None
                call = Call(state, spec, plan, transport, options, stats=stats, begun=begun)
                inputs = Inputs(spec, plan) if plan.deferred else None
                try:
                    filled = plan
                    if inputs is not None:
                        filled = inputs.fill(plan, ended=transport.synchronous, in_process=transport.in_process)
                    sent = transport.send(spec, filled, call)
                    state.sent += 1
                    call.number = state.sent
                    call.inputs = inputs
                    call.sent(sent)
                    if inputs is not None and sent.give is not None:
                        inputs.follow(sent.give)
                        # Since `Call.sent`, it may have been abandoned: it then waits for no rank.
                        if (state.closed or state.broken is not None) and not call.late:
                            inputs.withdraw()
                    if again is not None and spec.registration.replay:  # now, before a restart looks for it
                        self._log_replay(call, spec, options, again)
                except PartlySentError as error:
                    # The ranks that have the call would wait for the others in its first collective.
                    cause, reached = error.__cause__, ranks_text(error.reached)
                    state.break_(
                        f"{spec.label}() was sent to {reached}, but not to rank {error.failed}: "
                        f"{type(cause).__name__}: {cause}"
                    )
                    raise (state.refusal() or error) from cause
                except BaseException as error:
                    if not isinstance(error, Exception) and not transport.synchronous:
                        # Ctrl-C in the middle: only some ranks may have the call. The next collective would hang.
                        state.break_(f"{type(error).__name__} while {spec.label}() was being sent")
                    raise
        except FutureInside:
            if must_not_wait:
                raise
            found = None if searched else find_futures(spec, plan)
            if found is None:
                raise future_inside(spec, plan) from None
            return self._send(
                spec, found, options, again, begun=begun, recorded=recorded, restarts=restarts, searched=True
            )
        return call

    # --- the layout ---------------------------------------------------------------------------------------------------

    def _layout_with(self, sufficient: Callable[[Layout], bool]) -> Layout:
        """The layout. If the known one is outdated or not sufficient, the workers are asked: a call that is still
        running may have registered coordinates since."""
        if self._class is None:
            names = ", ".join(f"group.{role}.layout" for role in self.roles)
            raise DispatchError(f"every role of {self.name} has its own layout: use {names}", method="layout")
        layout = self._known_layout(sufficient)
        while layout is None:
            try:
                call = self._send(self._any_method("_report"), CallPlan.empty(self.world_size), recorded=False)
            except Resized:
                continue
            layout = layout_from(call.value())
            with self._state.lock:  # otherwise a restart has ended these workers, and has forgotten their layout
                if call.transport is self._state.transport:
                    versions = {rank: one.layout_version for rank, one in call.rank_results.items()}
                    self._class.layout = versions, layout
        return layout

    def _known_layout(self, sufficient: Callable[[Layout], bool]) -> Layout | None:
        """The layout that is known, if it is up to date and sufficient."""
        known = None if self._class is None else self._class.layout
        with self._state.lock:  # the thread that tells results adds ranks
            latest = dict(self._state.layout_versions.get(self._role, {}))
        if known is None or known[1].world_size != self.world_size:  # of before another thread has changed the ranks
            return None
        if any(version > known[0].get(rank, 0) for rank, version in latest.items()):
            return None
        return known[1] if sufficient(known[1]) else None

    def _axis_size(self, axis: str) -> int:
        self._check()
        layout = self._layout_with(has_axes)
        layout.check_known()
        return layout.size(axis)

    # --- starting and restarting --------------------------------------------------------------------------------------

    @property
    def _transport(self) -> Transport:
        if self._state.transport is None:
            raise RuntimeError(f"{self.name} has no workers yet")
        return self._state.transport

    def _recover(self) -> None:
        """Do what ``on_death`` says."""
        raise NotImplementedError(f"{type(self).__name__} does not recover")

    def _start_workers(self, ranks: tuple[int, ...] | None) -> None:
        """End the workers of these ranks, or of all, if there are any, and start new ones."""
        raise NotImplementedError(f"{type(self).__name__} does not restart")

    def _wait_for_constructors(
        self,
        transport: Transport,
        plan: CallPlan,
        send: Callable[[Call], Sent],
        timeout: float | None,
        state: GroupState | None = None,
    ) -> None:
        """Have the ranks of a plan run their constructors, by a call that ``send`` sends and that belongs to ``state``,
        the group's by default; and raise its error."""
        spec = cast(MethodSpec, method_spec(Worker, "__init__"))
        options = CallOptions(timeout=timeout)
        call = Call(state or self._state, spec, plan, transport, options, starting=True)
        call.sent(send(call))
        call.check()

    def _check_restart(self, ranks: Sequence[int] | None) -> tuple[int, ...] | None:
        """The ranks to restart: these and the dead ones, or None for all. Raises as `restart` does."""
        if ranks is None:
            return None
        chosen = check_ranks("restart", ranks, self.world_size)
        if self.collectives:
            on_ray = hasattr(self, "replace")
            way = f"Call replace(ranks={list(chosen)}), which creates new ones, restart" if on_ray else "Restart"
            raise ValueError(
                f"restart(ranks={list(chosen)}): the ranks of {self.name} may use collectives, and a new process is "
                f"not in their process groups. {way} all ranks, or create the group with "
                "collectives=False"
            )
        return tuple(sorted({*chosen, *self._transport.deaths()}))

    def _replay(self, ranks: Collection[int] | None) -> None:
        """Repeat the logged calls on new workers. Those on some ranks are planned with the former layouts, as a new
        rank may have none until `Worker.on_membership_change` runs. The caller then forgets these layouts."""
        if ranks is None:
            self._forget_layouts()
        elif not ranks:
            return  # a call may not fit the ranks that are left, which need not repeat it
        with self._state.lock:
            replays = sorted(self._replays.values(), key=lambda replay: replay.number)
        for replay in replays:
            group = self if replay.spec.role is None else self._role_group(replay.spec.role)
            plan = replay.plan(group, None)
            if ranks is not None:
                plan = plan.only(ranks)
            if not plan.ranks:
                continue
            try:
                group._send(replay.spec, plan, replay.options).check()
            except SingleControllerError as error:
                if plan.deferred:
                    error.add_note(
                        f"{replay.spec.label}() was repeated (replay=True) with a future, whose result is lost if the "
                        "ranks that computed it ended. If so, create a new group, and pass future.result() instead"
                    )
                raise

    def _check_replays(self, added: int) -> None:
        """Raise the `DispatchError` of a logged call that does not fit the group with more ranks, for `grow`. What a
        layout or a dispatch_fn decides is not checked: new ranks may have no layout before they join."""
        world_size = self.world_size + added
        with self._state.lock:
            replays = list(self._replays.values()) if added else []
        for replay in replays:
            mode = replay.spec.registration.mode.mode
            if isinstance(mode, Mode) and mode.in_layout is None:
                group = self if replay.spec.role is None else self._role_group(replay.spec.role)
                try:
                    replay.plan(group, world_size)
                except DispatchError as error:
                    error.add_note(f"grow() could not repeat this call on {world_size} ranks; the group is as before")
                    raise

    def _forget_layouts(self) -> None:
        with self._state.lock:  # as in `_layout_with`
            for worker_class in self._worker_classes.values():
                worker_class.layout = None

    def _log_replay(
        self, call: Call, spec: MethodSpec, options: CallOptions, plan: Callable[[Any, int | None], CallPlan]
    ) -> None:
        """Remember a call if it succeeds. Calls settle in any order; their numbers tell which one is the latest."""
        state, replays, replay = self._state, self._replays, _Replay(call.number, spec, options, plan)

        # Must refer neither to the call, whose outcome keeps this function, nor to the group.
        def remember(outcome: Outcome) -> None:
            with state.lock:
                known = replays.get((spec.role, spec.name))
                newer = known is None or known.number < replay.number
                if outcome.result() is None and newer and not state.closed:
                    replays[spec.role, spec.name] = replay

        call.outcome.add_done_callback(remember)  # which runs under the lock

    # --- names --------------------------------------------------------------------------------------------------------

    @property
    def _class(self) -> WorkerClass | None:
        """The group's class; None for a group that has only roles."""
        return self._worker_classes.get(self._role)

    @property
    def _specs(self) -> dict[str, MethodSpec]:
        return {} if self._class is None else self._class.registered

    def _any_method(self, name: str) -> MethodSpec:
        if not isinstance(name, str):
            raise TypeError(f"execute_* takes the name of a method, such as 'add'; got {name!r}")
        if self._class is None:
            raise self._needs_role(name, "execute_*")
        return self._class.any(name)

    def _method(self, name: str) -> RemoteMethod[..., Any, Any]:
        if self._class is None:
            raise self._needs_role(name)
        spec = self._class.registered.get(name)
        if spec is None:
            raise self._class.missing(name, dir(self))
        return RemoteMethod(spec, self._invoke)

    def _role_group(self, role: str) -> RoleGroup:
        if role not in self.roles:
            raise DispatchError(
                f"{self.name} has no role {role!r}{suggestion(str(role), self.roles)}"
                if self.roles
                else f"{self.name} has no roles; create the group with "
                f"colocate({{{role!r}: RayClassWithInitArgs(...), ...}})"
            )
        return RoleGroup(self, role)

    def _needs_role(self, name: str, call: str = "") -> AttributeError:
        having = [role for role, one in self._worker_classes.items() if method_spec(one.cls, name) is not None]
        if having:
            ways = " or ".join(f"group.{role}.{call or name}" for role in having)
            return AttributeError(f"{self.name} has several workers per process: call {ways}")
        known = [*self.roles, *dir(type(self))]
        return AttributeError(f"the group has no method and no role {name!r}{suggestion(name, known)}")

    def __getattr__(self, name: str) -> Any:
        # Only for names that are not found otherwise. The RemoteMethod is not stored: a cycle would keep a dropped
        # group.
        # Via `vars`: unpickling and copying look names up before a group has any field.
        worker_class = vars(self).get("_worker_classes", {}).get(vars(self).get("_role"))
        spec = None if worker_class is None else worker_class.registered.get(name)
        if spec is not None:
            return RemoteMethod(spec, self._invoke)
        if name.startswith("_"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return self._role_group(name) if self._role is None and name in self._worker_classes else self._method(name)

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *self._specs, *self.roles]

    def __reduce__(self) -> Any:
        raise TypeError(
            "this worker group cannot be sent to another process. Send what you need of it, such as group.workers "
            "(whose methods are called with .remote())"
        )

    def __repr__(self) -> str:
        size = f" of {self._state.transport.world_size}" if self._state.transport is not None else ""
        state = " (closed)" if self._state.closed else " (broken)" if self._state.broken else ""
        what = ", ".join(self.roles) if self._class is None else self._class.cls.__name__
        return f"<{type(self).__name__}{size} {what}{state}>"


def check_ranks(method: str, ranks: Sequence[int], world_size: int) -> tuple[int, ...]:
    """Return the ranks that a method of a group was given. Raises a `ValueError` unless they are distinct ranks of the
    group."""
    try:
        chosen = tuple(-1 if isinstance(rank, bool) else operator.index(rank) for rank in ranks)
    except TypeError:  # not iterable, or of something that is no integer
        chosen = ()
    if not chosen or len(set(chosen)) != len(chosen) or not set(chosen) <= set(range(world_size)):
        raise ValueError(
            f"{method}(ranks={ranks!r}): expected a non-empty list of distinct ranks from 0 to {world_size - 1}"
        )
    return chosen


@functools.lru_cache(maxsize=64)
def _without_coordinates(world_size: int) -> Layout:
    """What modes that need no coordinates are planned with."""
    return Layout({}, world_size=world_size)


class RoleGroup(WorkerGroup):
    """One role of a colocated group: ``group.actor``. Its methods are the registered methods of the role's class.

    Layout, meshes and stats belong to the role. The processes, and with them `alive` and ``workers``, are shared:
    closing or restarting one role does so for all.
    """

    def __init__(self, whole: WorkerGroup, role: str) -> None:
        self._whole = whole
        self._role = role
        self._worker_classes = whole._worker_classes
        self._state = whole._state
        self._replays = whole._replays

    @property
    def name(self) -> str:
        """The name of the group and the role."""
        return f"{self._whole.name}.{self._role}"

    @property
    def takeover_data(self) -> Any:
        """`RayWorkerGroup.takeover_data` of the whole group."""
        return self._whole.takeover_data

    @takeover_data.setter
    def takeover_data(self, value: Any) -> None:
        cast(Any, self._whole).takeover_data = value

    def close(self) -> None:
        self._whole.close()

    def restart(self, ranks: Sequence[int] | None = None) -> None:
        self._whole.restart(ranks)

    def _recover(self) -> None:
        self._whole._recover()

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("_") and (hasattr(type(self._whole), name) or name in vars(self._whole)):
            if name in vars(MegatronInfo):  # reads the layout of this role; the whole group has no layout
                return getattr(MegatronInfo, name).__get__(self)
            return getattr(self._whole, name)
        return super().__getattr__(name)

    def __reduce__(self) -> Any:
        return RoleGroup, (self._whole, self._role)

    def __repr__(self) -> str:
        return f"<{self._role} of {self._whole!r}>"


def _send_all(state: GroupState, first: weakref.ref[Callable[[], None]]) -> None:
    """The thread "send-later": send the calls that event loops have left to it, in their order, from ``first`` on. It
    ends when none is left."""
    with state.lock:
        if not state.unsent or state.unsent[0] is not first():
            return  # Ctrl-C came before it was queued, and another thread may send what was queued since
    while True:
        with state.lock:
            send = state.unsent[0]
        send()
        with state.lock:
            state.unsent.popleft()
            if not state.unsent:
                return
