"""Beginning anew: the workers of a group, and then the calls that brought them into their state."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dispatch.plan import CallPlan
from dispatch.register import MethodSpec
from single_controller.base.method import CallOptions
from single_controller.base.monitor import monitor

if TYPE_CHECKING:
    from single_controller.base.group import WorkerGroup


@dataclass(frozen=True)
class Replay:
    """One call of a method that was registered with ``replay=True``.

    Attributes:
        spec: the method.
        number: the call's number among the calls that its group sent.
        plan: plans it again, with the same arguments, for the group that it is given.
        options: what held for that call.
    """

    spec: MethodSpec
    number: int
    plan: Callable[[WorkerGroup], CallPlan]
    options: CallOptions

    @property
    def key(self) -> tuple[str | None, str]:
        """Of calls with the same key only the latest counts."""
        return self.spec.role, self.spec.name


def checked_ranks(group: WorkerGroup, ranks: Sequence[int]) -> tuple[int, ...]:
    """Some ranks that are to be restarted alone.

    Raises:
        ValueError: they are not distinct ranks of the group, or ranks may need each other.
    """
    chosen = tuple(ranks) if isinstance(ranks, Iterable) else ()
    if not chosen or len(set(chosen)) != len(chosen) or not set(chosen) <= set(range(group.world_size)):
        raise ValueError(
            f"restart(ranks={ranks!r}): a list of distinct ranks of the group, 0 to {group.world_size - 1}, at least "
            "one"
        )
    if group._collectives:
        raise ValueError(
            f"restart(ranks={list(chosen)}): the ranks of {group.name} may need each other in collectives, and a new "
            "one is not in their process groups. Restart all of them, or make the group with collectives=False"
        )
    dead = sorted(set(group._engine.deaths()) - set(chosen))
    if dead:
        raise ValueError(
            f"restart(ranks={list(chosen)}): {dead} died too and would stay dead; "
            f"restart(ranks={sorted({*chosen, *dead})})"
        )
    return chosen


def restart(group: WorkerGroup, ranks: Sequence[int] | None) -> None:
    """See `WorkerGroup.restart`."""
    state = group._state
    before, was_broken = state.restarts, state.broken is not None
    with group._sending:
        if state.closed:
            state.check()
        chosen = group._restartable(ranks)
        if was_broken and state.broken is None and state.restarts > before:
            return  # another thread has mended what this one was to mend
        state.restarting = True
        state.break_("it is being restarted")
        try:
            group._start_again(chosen)
            with state.lock:
                closed = state.closed
                if not closed:
                    state.reopen()
            if closed:  # by somebody else, in the meantime
                group._engine.kill()
                state.check()
            for learned in group._learned.values():
                learned.layout = None
            for replay in sorted(state.replays.values(), key=lambda replay: replay.number):
                _replay(group, replay, chosen)
            state.restarts += 1
        except BaseException as error:
            first_line = str(error).partition("\n")[0]
            state.break_again(f"its restart failed with {type(error).__name__}: {first_line}")
            raise
        finally:
            state.restarting = False


def _replay(group: WorkerGroup, replay: Replay, ranks: Collection[int] | None) -> None:
    """Make a call again; on some ranks alone, where they are given. Its result is not wanted."""
    spec = replay.spec
    called = group if spec.role is None else group._role_group(spec.role)
    plan = replay.plan(called)
    if ranks is not None:
        plan = plan.only(ranks)
    if plan.ranks:
        call = called._send(spec, plan, future=False, options=replay.options)
        monitor.wait(call)
        if call.error is not None:
            raise call.error
