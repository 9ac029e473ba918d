"""Supervision: noticing the death of workers while no call is running, and starting new ones.

Both work on a group's `GroupState`. `restart` also gets the three steps that depend on the group, as functions.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from dispatch.checks import check_seconds
from dispatch.plan import CallPlan
from dispatch.register import MethodSpec
from single_controller.call.call import Call, GroupState
from single_controller.call.closing import Closing
from single_controller.call.errors import WorkerDiedError, hosts_text, ranks_text
from single_controller.call.methods import CallOptions
from single_controller.call.transport import Outcome, Transport

logger = logging.getLogger(__name__)

OnDeath = Callable[[WorkerDiedError], object]


@dataclass(frozen=True)
class Replay:
    """One call of a method that was registered with ``replay=True``."""

    spec: MethodSpec
    number: int  # the call's number among the calls of its group
    plan: Callable[[Any], CallPlan]  # plans the call again, with the same arguments, for the group that is passed to it
    options: CallOptions


class ReplayLog:
    """The latest successful call of each method that was registered with ``replay=True``. The lock of the group's state
    protects it."""

    def __init__(self, state: GroupState) -> None:
        self._state = state
        self._replays: dict[tuple[str | None, str], Replay] = {}

    def add_when_done(self, call: Call, replay: Replay) -> None:
        """Remember a call if it succeeds. Calls settle in any order; their numbers tell which one is the latest."""

        def remember(outcome: Outcome) -> None:  # must not refer to the call, whose outcome keeps this function
            key = replay.spec.role, replay.spec.name
            with self._state.lock:
                known = self._replays.get(key)
                if (
                    outcome.result() is None
                    and not self._state.closed
                    and (known is None or known.number < replay.number)
                ):
                    self._replays[key] = replay

        call.outcome.add_done_callback(remember)  # under the lock

    def clear(self) -> None:
        """Forget all calls, and with them their arguments."""
        with self._state.lock:
            self._replays.clear()

    def in_order(self) -> list[Replay]:
        """The calls in the order in which they were made."""
        with self._state.lock:
            return sorted(self._replays.values(), key=lambda replay: replay.number)


def check_ranks(method: str, ranks: Sequence[int], world_size: int) -> tuple[int, ...]:
    """Return the ranks that a method of a group was given.

    Raises:
        ValueError: they are not distinct ranks of the group.
    """
    chosen = tuple(ranks) if isinstance(ranks, Iterable) else ()
    if not chosen or len(set(chosen)) != len(chosen) or not set(chosen) <= set(range(world_size)):
        raise ValueError(
            f"{method}(ranks={ranks!r}): expected a non-empty list of distinct ranks from 0 to {world_size - 1}"
        )
    return chosen


def check_alone(chosen: Sequence[int], name: str, *, collectives: bool, dead: Collection[int]) -> None:
    """Check that some ranks of a group can be restarted without the others.

    Raises:
        ValueError: other ranks have died too, or the ranks use collectives.
    """
    if collectives:
        raise ValueError(
            f"restart(ranks={list(chosen)}): the ranks of {name} may use collectives, and a new process is not in "
            f"their process groups. Call replace(ranks={list(chosen)}), which creates them anew, restart all ranks, or "
            "create the group with collectives=False"
        )
    others = sorted(set(dead) - set(chosen))
    if others:
        raise ValueError(
            f"restart(ranks={list(chosen)}): {others} died too and would stay dead; "
            f"call restart(ranks={sorted({*chosen, *others})})"
        )


def restart(
    state: GroupState,
    *,
    choose: Callable[[], tuple[int, ...] | None],
    start: Callable[[tuple[int, ...] | None], None],
    replay: Callable[[tuple[int, ...] | None], None],
) -> None:
    """Start new workers and bring them to the state of the old ones. Other threads' calls wait until this returns.

    Args:
        state: the state of the group.
        choose: checks and returns the ranks to restart; None for all.
        start: ends those ranks and starts new ones.
        replay: repeats calls on them.

    Raises:
        GroupClosedError: the group was closed.
        ForkedProcessError: another process made the group.
        Exception: whatever a step raises. The group then stays broken.
    """
    state.check_process()
    before, was_broken = state.restarts, state.broken is not None
    with state.sending:  # nobody else sends to a group in transition
        if state.closed:
            state.check()
        chosen = choose()
        if was_broken and state.broken is None and state.restarts > before:
            return  # while this thread waited for the lock, another one repaired the same damage
        state.restarting = True
        state.break_("it is being restarted")
        try:
            start(chosen)
            if not state.reopen():  # another thread closed the group meanwhile
                if state.transport is not None:
                    state.transport.kill()
                state.check()
            replay(chosen)
            state.restarts += 1
            state.on_change()
        except BaseException as error:
            first_line = str(error).partition("\n")[0]
            state.break_again(f"its restart failed with {type(error).__name__}: {first_line}")
            raise
        finally:
            state.restarting = False


class Watcher(Closing):
    """What ``group.watch()`` returns.

    Thread: each watcher has a daemon thread named "worker-watcher". It ends when the watcher or the group is closed, or
    when the group is garbage collected. It holds no lock while it calls ``on_death``.

    Args:
        state: the group's state. The watcher keeps only a weak reference to it: the state has the transport, and the
            transport has the handles of the workers, which end when the last reference to them is gone.
        on_death: called in the watcher's thread for each death.
        interval: seconds between two looks.

    Raises:
        ValueError: the interval is not a positive number.
        ForkedProcessError: another process made the group.
    """

    def __init__(self, state: GroupState, on_death: OnDeath | None, interval: float) -> None:
        state.check_process()
        self._state = weakref.ref(state)
        self._on_death = on_death
        self._interval = check_seconds("interval", interval)
        self._ended = threading.Event()
        self._reported: set[tuple[int, int]] = set()  # (number of restarts before, rank)
        self._deaths_seen = len(state.deaths)
        self._thread = threading.Thread(target=self._run, name="worker-watcher", daemon=True)
        self._thread.start()

    @property
    def watching(self) -> bool:
        """Whether the thread is still running."""
        return self._thread.is_alive() and not self._ended.is_set()

    def close(self) -> None:
        """Stop watching. A callback that is running is not interrupted."""
        self._ended.set()
        if threading.current_thread() is not self._thread:  # on_death may close its own watcher
            self._thread.join(timeout=self._interval)

    def _run(self) -> None:
        while not self._ended.wait(self._interval):
            state = self._state()
            if state is None or state.closed:
                return
            try:
                for error in self._new_deaths(state):
                    if self._on_death is not None:
                        self._on_death(error)
            except Exception:
                logger.exception("watching %s: a check, or on_death, raised", state.name)
            del state  # this thread must not keep it while it waits

    def _new_deaths(self, state: GroupState) -> list[WorkerDiedError]:
        """Deaths that were not reported yet: those that calls ran into, even if the group was restarted since, and
        those that only the transport knows, which break the group now."""
        found = state.deaths[self._deaths_seen :]
        self._deaths_seen += len(found)
        news = []
        for restarts, error in found:
            if not self._reported.issuperset((restarts, rank) for rank in error.ranks):
                news.append(error)
            self._reported.update((restarts, rank) for rank in error.ranks)
        transport = state.transport
        if transport is not None and transport.connected:
            dead = self._ask(state, transport, state.restarts)
            if dead is not None:
                news.append(dead)
        return news

    def _ask(self, state: GroupState, transport: Transport, restarts: int) -> WorkerDiedError | None:
        deaths = transport.deaths()
        dead = sorted(r for r in deaths if (restarts, r) not in self._reported and r not in transport.restarted)
        # A restart or close() ends workers on purpose. It may have begun after deaths() was asked.
        if not dead or transport.ended or state.restarting or state.closed or state.transport is not transport:
            return None
        self._reported.update((restarts, rank) for rank in dead)
        hosts = hosts_text([transport.host(rank) for rank in dead])
        message = f"{ranks_text(dead)} died ({hosts}): {deaths[dead[0]]}"
        state.break_(message, dead, deaths[dead[0]])
        return WorkerDiedError(message, rank=dead[0], host=transport.host(dead[0]), ranks=dead)

    def __repr__(self) -> str:
        return f"<Watcher, {'running' if self.watching else 'ended'}>"
