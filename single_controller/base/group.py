"""WorkerGroup: the driver's proxy of many workers, whatever engine runs them."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from dispatch.errors import DispatchError, UnknownLayoutError
from dispatch.layout import Layout
from dispatch.plan import CallPlan, plan_call
from dispatch.register import MethodSpec, method_spec
from single_controller.base.axis_sizes import AxisSizes
from single_controller.base.by_name import CallsByName, PlanOf
from single_controller.base.call import ENGINE_GONE, Call, GroupState
from single_controller.base.checks import check_seconds
from single_controller.base.closing import Closing
from single_controller.base.engine import Engine
from single_controller.base.future import WorkerFuture
from single_controller.base.method import CallOptions, RemoteMethod
from single_controller.base.method_table import MethodTable, closest
from single_controller.base.monitor import monitor
from single_controller.base.restart import Replay, checked_ranks, restart
from single_controller.base.standing import layout_of
from single_controller.base.stats import Accounts, Stats, write_trace
from single_controller.base.watcher import OnDeath, Watcher
from single_controller.base.worker import Worker

if TYPE_CHECKING:
    from single_controller.base.role_group import RoleGroup

T = TypeVar("T")

ERROR_GRACE_SECONDS = 5.0

_AS_DECLARED = CallOptions()

RESERVED = frozenset({"resource_pool"})
"""Names that a group needs, beside the attributes of its class."""


@dataclass
class Learned:
    """What a group has found out about the workers of one role, or of its only class.

    Attributes:
        accounts: what their calls cost.
        layout: where they stand, with the version of what each of them had said; None until somebody asks.
    """

    accounts: Accounts = field(default_factory=Accounts)
    layout: tuple[dict[int, int], Layout] | None = None


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


class WorkerGroup(AxisSizes, CallsByName, Closing):
    """Workers of one class, one per rank. Their registered methods are the group's.

    ``group.m(x)`` cuts the arguments as the method declares, runs it on the ranks and gathers the answers. Several
    threads may call at once; each rank runs its calls in the order in which they were sent. A group is a context
    manager that closes itself.

    Args:
        classes: role -> class. One class has the role None, and its registered methods become the group's. Several, as
            `colocate` puts them into one process, have a `RoleGroup` each.
        name: the group's name, for messages.
        error_grace: seconds that the other ranks have to end a call after one raised in it.

    Raises:
        DispatchError: a registered method, or a role, has a name that the group needs for itself.
    """

    def __init__(
        self, classes: Mapping[str | None, type[Worker]], name: str, error_grace: float = ERROR_GRACE_SECONDS
    ) -> None:
        self._role: str | None = None
        self._tables = {role: MethodTable(cls, role) for role, cls in classes.items()}
        reserved = RESERVED.union(dir(type(self)))
        for role, table in self._tables.items():
            table.refuse(reserved)
            if role in reserved:
                raise DispatchError(f"{role!r} is a name that a group needs for itself: call the role another name")
        self._state = GroupState(name, check_seconds("error_grace", error_grace))
        self._sending = threading.RLock()
        self._learned: dict[str | None, Learned] = {role: Learned() for role in (None, *classes)}
        self._running: Engine | None = None
        self._collectives = True

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

    def advise(self, way_on: str) -> None:
        """Have `GroupBrokenError` say what to do about it; for those who stand in front of a group, and whose users go
        on in another way than by `restart`."""
        self._state.way_on = way_on

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self._engine.world_size

    @property
    def layout(self) -> Layout:
        """Where the ranks stand, as the workers reported it. Asked of them when first needed, and again when a
        worker has said something new.

        Raises:
            DispatchError: some ranks reported and others did not; or this group has roles, which have layouts each.
        """
        if self._table is None:
            ways = ", ".join(f"group.{role}" for role in self.roles)
            raise DispatchError(f"every role of {self.name} has a layout of its own: ask {ways}", method="layout")
        with self._state.lock:
            referred = list(self._state.referred)
        for call in referred:  # one may have ended, and said something new, unnoticed by this process
            monitor.poll(call)
        here = self._learned[self._role]
        known = here.layout
        said = self._state.standings.get(self._role, {})
        if known is None or any(version > known[0].get(rank, 0) for rank, version in said.items()):
            known = here.layout = self._ask_layout()
        return known[1]

    def stats(self) -> Stats:
        """What the group's calls cost: bytes and seconds by method, and by call and rank. Prints as a table. Of a group
        with roles: all of theirs, by ``<role>.<method>``."""
        if self._table is None:
            return Stats.together({role: self._learned[role].accounts.stats() for role in self.roles})
        return self._learned[self._role].accounts.stats()

    def trace(self, path: str | Path) -> None:
        """Write the last calls as a Chrome trace, which Perfetto opens: a row for the driver and one for each rank.

        Args:
            path: the file, JSON.
        """
        write_trace(path, self.name, self.stats().calls)

    @property
    def methods(self) -> Methods:
        """The registered methods, by name."""
        return Methods(self)

    # --- roles ------------------------------------------------------------------------------------------

    @property
    def roles(self) -> tuple[str, ...]:
        """The roles of a colocated group, in the order in which their workers are made; none of any other group."""
        return tuple(role for role in self._tables if role is not None and self._role is None)

    def spawn(self, prefix_set: Iterable[str] | None = None) -> dict[str, RoleGroup]:
        """The groups of a colocated group's roles, by name: the same as ``group.<role>``.

        Args:
            prefix_set: which of them; all by default.

        Raises:
            DispatchError: the group has no such role.
        """
        return {role: self._role_group(role) for role in (self.roles if prefix_set is None else prefix_set)}

    def fuse(self, prefix_set: Iterable[str]) -> None:
        """For drivers written for verl: checks that the group has these roles. ``group.<role>`` is there anyway.

        Raises:
            DispatchError: the group has no such role.
        """
        self.spawn(prefix_set)

    # --- life -------------------------------------------------------------------------------------------

    def close(self) -> None:
        """End the workers. Calls under way raise `GroupClosedError`; a second close does nothing."""
        monitor.forget(self._state.close())
        if self._running is not None:
            self._running.kill()

    def alive(self) -> list[bool]:
        """By rank, whether its process lives. Asks the engine, not the workers: it answers while they are at work."""
        if self._state.closed or not self._engine.connected:
            return [False] * self.world_size
        dead = self._engine.deaths()
        return [rank not in dead for rank in range(self.world_size)]

    def watch(self, on_death: OnDeath | None = None, interval: float = 0.5) -> Watcher:
        """Have a thread look whether the workers live, so that a death is noticed while no call is under way.

        A death breaks the group. The thread ends with the group, or when its `Watcher` is closed; it goes on after a
        restart. It never ends the driver.

        Args:
            on_death: called in that thread, once for each death that it sees, with the `WorkerDiedError`; it may call
                ``group.restart()``. What it raises is logged.
            interval: seconds between two looks.

        Raises:
            ValueError: an interval that is no positive number.
        """
        return Watcher(self, on_death, interval)

    def restart(self, ranks: Sequence[int] | None = None) -> None:
        """End the workers and begin anew: in the same place, with the same constructor arguments.

        Then the latest successful call of each method that is registered with ``replay=True`` is made again, in the
        order of those calls. Calls under way raise; other threads' calls wait until the restart is over.

        Args:
            ranks: only these ranks, where the group was made with ``collectives=False``; the others keep their state.
                The calls are replayed on these ranks alone.

        Raises:
            GroupClosedError: the group was closed.
            GroupBrokenError: another driver started these workers, so they cannot be restarted here.
            ValueError: ranks that the group does not have, or of a group whose ranks need each other.
            SingleControllerError: as when the group was made, or what a replayed call raised; it stays broken then.
        """
        restart(self, ranks)

    # --- the inside -------------------------------------------------------------------------------------

    @property
    def _engine(self) -> Engine:
        if self._running is None:
            raise RuntimeError(f"{self.name} has no workers yet")
        return self._running

    def _check(self) -> None:
        if self._state.restarting:
            with self._sending:  # until the restart is over; the thread that restarts goes through
                pass
        if not self._state.closed and not self._engine.connected:
            self._state.break_(ENGINE_GONE)
        self._state.check()

    def _invoke(self, spec: MethodSpec, args: tuple[Any, ...], kwargs: dict[str, Any], options: CallOptions) -> Any:
        begun = time.time()
        self._check()
        blocking = spec.registration.blocking if options.blocking is None else options.blocking
        plan = self._plan(spec, args, kwargs, options)
        call = self._send(spec, plan, future=not blocking, options=options, begun=begun)
        self._note_replay(call, spec, options, lambda group: group._plan(spec, args, kwargs, options))
        return self._wait(call) if blocking else WorkerFuture(call)

    def _restartable(self, ranks: Sequence[int] | None) -> tuple[int, ...] | None:
        """The ranks to restart, checked; None for all."""
        return None if ranks is None else checked_ranks(self, ranks)

    def _start_again(self, ranks: tuple[int, ...] | None) -> None:
        """End the workers of some ranks, or all, and start them anew."""
        raise NotImplementedError(f"{type(self).__name__} does not restart")

    def _execute(self, plan: PlanOf, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], *, future: bool) -> Call:
        begun = time.time()
        self._check()
        spec = self._any_method(name)
        call = self._send(spec, plan(spec, self, args, kwargs), future=future, begun=begun)
        self._note_replay(call, spec, _AS_DECLARED, lambda group: plan(spec, group, args, kwargs))
        return call

    def _note_replay(
        self, call: Call, spec: MethodSpec, options: CallOptions, plan: Callable[[WorkerGroup], CallPlan]
    ) -> None:
        if spec.registration.replay:
            replay = Replay(spec, call.number, plan, options)
            call.when_settled(functools.partial(self._state.remember, call, replay))

    def _plan(self, spec: MethodSpec, args: tuple[Any, ...], kwargs: dict[str, Any], options: CallOptions) -> CallPlan:
        return self._knowing(lambda: plan_call(spec, self, args, kwargs, options.uneven), spec.name)

    def _axis_size(self, axis: str) -> int:
        self._check()
        return self._knowing(lambda: self.layout.checked_size(axis), f"{axis}_size")

    def _knowing(self, ask: Callable[[], T], what: str) -> T:
        """What ``ask`` finds out from the layout. Coordinates that were asked for earlier are asked for once more if
        they do not do: a call that was under way then may have said them since."""
        while True:
            asked_before = self._learned[self._role].layout is not None
            try:
                return ask()
            except UnknownLayoutError as error:
                if not asked_before:
                    raise DispatchError(str(error), method=what) from None
                self._learned[self._role].layout = None

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
            try:
                sent = self._engine.send(spec, plan, future=future)
            except BaseException as error:
                if not isinstance(error, Exception) and not self._engine.in_turn:
                    # Some ranks may have the call and others not: the next collective would hang.
                    self._state.break_(f"{type(error).__name__} while {spec.label}() was being sent")
                raise
            call = Call(
                self._state,
                self._engine,
                spec.name,
                plan,
                sent,
                options.timeout,
                accounts=self._learned[self._role].accounts,
                begun=begun,
                device=options.device,
                role=self._role,
            )
            self._state.sent += 1
            call.number = self._state.sent
        if future and self._engine.in_turn:
            monitor.poll(call)  # it has ended
        elif future:
            monitor.watch(call)
        return call

    def _wait(self, call: Call) -> Any:
        monitor.wait(call, just_sent=True)
        return call.result()

    def _ask_layout(self) -> tuple[dict[int, int], Layout]:
        with self._sending:
            self._check()
            sent = self._engine.ask_standings(self._role)
            everyone = tuple(range(self.world_size))
            call = Call(self._state, self._engine, "layout", CallPlan.empty(self.world_size), sent, role=self._role)
        monitor.wait(call)
        if call.error is not None:
            raise call.error
        receipts = call.receipts()
        versions = {rank: receipts[rank].standing for rank in everyone}
        return versions, layout_of([receipts[rank].value for rank in everyone])

    @property
    def _table(self) -> MethodTable | None:
        """The methods of the group's class; None for a group that has only roles."""
        return self._tables.get(self._role)

    @property
    def _specs(self) -> dict[str, MethodSpec]:
        return {} if self._table is None else self._table.registered

    def _any_method(self, name: str) -> MethodSpec:
        if not isinstance(name, str):
            raise TypeError(f"execute_* takes a method's name, a string like 'add'; got {name!r}")
        if self._table is None:
            raise self._no_role_named(name, "execute_*")
        return self._table.any(name)

    def _method(self, name: str) -> RemoteMethod:
        if self._table is None:
            raise self._no_role_named(name)
        spec = self._table.registered.get(name)
        if spec is None:
            raise self._table.missing(name, dir(self))
        return RemoteMethod(spec, self._invoke)

    def _role_group(self, role: str) -> RoleGroup:
        if role not in self.roles:
            raise DispatchError(
                f"{self.name} has no role {role!r}{closest(str(role), self.roles)}"
                if self.roles
                else f"{self.name} has no roles; make it of colocate({{{role!r}: RayClassWithInitArgs(...), ...}})"
            )
        from single_controller.base.role_group import RoleGroup  # a role's group is a group itself

        return RoleGroup(self, role)

    def _no_role_named(self, name: str, call: str = "") -> AttributeError:
        having = [role for role, table in self._tables.items() if method_spec(table.cls, name) is not None]
        if having:
            ways = " or ".join(f"group.{role}.{call or name}" for role in having)
            return AttributeError(f"{self.name} has several workers in a process: call {ways}")
        known = [*self.roles, *dir(type(self))]
        return AttributeError(f"the group has no method and no role {name!r}{closest(name, known)}")

    def __getattr__(self, name: str) -> Any:
        # Only for names that are not found otherwise. Made at each access: no cycle keeps a dropped group alive.
        if name.startswith("_"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return self._role_group(name) if self._role is None and name in self._tables else self._method(name)

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *self._specs, *self.roles]

    def __reduce__(self) -> Any:
        raise TypeError(
            "a group stays in its driver; send what you need of it, group.workers for example (their "
            "methods are called with .remote())"
        )

    def __repr__(self) -> str:
        size = f" of {self._running.world_size}" if self._running is not None else ""
        state = " (closed)" if self._state.closed else " (broken)" if self._state.broken else ""
        what = ", ".join(self.roles) if self._table is None else self._table.cls.__name__
        return f"<{type(self).__name__}{size} {what}{state}>"
