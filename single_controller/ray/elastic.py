"""ElasticGroup: changes which processes are a group's ranks: replaces dead ranks, goes on without them, adds ranks.

All three end in the same way. The processes that stay leave the collectives in which they wait, and their process
groups; new processes run their constructors; and all join a new rendezvous. Then the calls with ``replay=True`` are
repeated on the new ranks, and `Worker.on_membership_change` runs on all. In a group without collectives, the processes
that stay notice nothing but their new numbers.
"""

from __future__ import annotations

import json
import logging
import math
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError

from dispatch.checks import check_seconds
from dispatch.plan import CallPlan
from single_controller.call.call import DEATH_SHOWS_SECONDS, MAX_PROBED, GroupState
from single_controller.call.errors import (
    CallTimeoutError,
    GroupBrokenError,
    PlacementError,
    StartError,
    WorkerDiedError,
    ranks_text,
)
from single_controller.call.group import WorkerGroup, wait_and_check
from single_controller.call.methods import CallOptions
from single_controller.call.supervision import check_ranks, restart
from single_controller.call.transport import MAX_STACK_SECONDS
from single_controller.ray.placement.reservation import wait_started
from single_controller.ray.results import one_line
from single_controller.ray.start import (
    SendJoin,
    StartPlan,
    WaitForConstructors,
    enlist,
    fill,
    join,
    keep,
    living_standbys,
    recruit,
    vacant_slots,
)
from single_controller.ray.transport import RayTransport, Standby

CHANGE_SECONDS = 300.0
TRIES = 3
"""How often ranks are replaced or dropped again because further ones have died meanwhile, and how often a standby is
started again that dies before it is ready."""

logger = logging.getLogger(__name__)


class ElasticGroup(WorkerGroup):
    """The part of `RayWorkerGroup` that changes which processes are its ranks."""

    _start_plan: StartPlan | None
    _rendezvous: tuple[str, int]
    _on_death: str

    def replace(self, ranks: Sequence[int] | None = None, timeout: float = CHANGE_SECONDS) -> tuple[int, ...]:
        """Replace the ranks that have died. The others keep their processes and their workers.

        The dead ranks are filled with standbys, or with new processes in their slots. Collectives in which other ranks
        wait are aborted, and their process groups destroyed. All ranks then have a new rendezvous: ``master_port`` and
        the environment change, and local ranks too if a standby is elsewhere. The latest successful call of each method
        that is registered with ``replay=True`` is repeated on the new ranks alone, so such a method must not run
        collectives. Finally `Worker.on_membership_change` runs on all ranks.

        In a group that was created with ``collectives=False`` nothing happens on the other ranks, as with
        ``restart(ranks)``.

        Args:
            ranks: living ranks to end and replace too, such as one that hangs.
            timeout: seconds that the ranks may take to leave the calls that they are in, and to start.

        Returns:
            The ranks that were replaced.

        Raises:
            GroupClosedError: the group was closed.
            GroupBrokenError: another driver started these workers.
            ValueError: the group has no such ranks.
            CallTimeoutError: a rank takes longer than ``timeout``, because it computes, or waits for something else
                than a collective. The message shows where it is. Include it in ``ranks``, or call `restart`.
            SingleControllerError: what starting workers, a repeated call or `Worker.on_membership_change` raises. The
                group then stays broken.
        """
        replaced: set[int] = set()

        def prepare(dead: tuple[int, ...]) -> Callable[[float], None]:
            replaced.update(dead)
            return lambda seconds: self._fill(dead, seconds)

        self._without_dead("replace", ranks, timeout, prepare)
        return tuple(sorted(replaced))

    def shrink(self, ranks: Sequence[int] | None = None, timeout: float = CHANGE_SECONDS) -> tuple[int, ...]:
        """Go on without the ranks that have died. The others keep their processes and their workers, and get the
        numbers 0, 1, ... in the same order.

        Whole data-parallel replicas are dropped (`Worker.dp_replica`): living ranks of a replica that has lost a rank
        end too. What happens on the ranks that are left is described at `replace`. Workers that have registered a
        layout must register it again in `Worker.on_membership_change`. `grow` and `restart` take ranks back.

        Args:
            ranks: living ranks to drop too.
            timeout: seconds that the ranks may take to leave the calls that they are in.

        Returns:
            The ranks that were dropped, by the numbers that they had.

        Raises:
            GroupClosedError: the group was closed.
            GroupBrokenError: no complete replica would be left, so the group stays as it is, and broken if ranks have
                died; or another driver started these workers.
            ValueError: the group has no such ranks.
            CallTimeoutError, SingleControllerError: as `replace`.
        """
        numbers, dropped = list(range(self.world_size)), list[int]()  # numbers: by rank, the one that it had
        end = time.monotonic() + check_seconds("timeout", timeout)

        def prepare(dead: tuple[int, ...]) -> Callable[[float], None]:
            kept = self._in_complete_replicas(set(range(self.world_size)) - set(dead) - self._find_dead(end), end)

            def drop(seconds: float) -> None:
                dropped.extend(set(numbers) - {numbers[rank] for rank in kept})
                numbers[:] = [numbers[rank] for rank in kept]
                self._drop(kept, seconds)

            return drop

        self._without_dead("shrink", ranks, timeout, prepare)
        return tuple(sorted(dropped))

    def grow(self, count: int | None = None, timeout: float = CHANGE_SECONDS) -> tuple[int, ...]:
        """Add ranks in the pool's slots that have none, such as those that `shrink` has dropped. They come after the
        others.

        Processes are started, and their constructors run, while the group goes on. Then it waits until the running
        calls have ended, and all ranks join a new rendezvous, as `replace` describes. In a group that was created with
        ``collectives=False``, running calls go on.

        Args:
            count: how many ranks; by default as many as there is room for. Whole data-parallel replicas are added
                (`Worker.dp_replica`).
            timeout: seconds that the ranks may take to end the calls that they are in, and to start.

        Returns:
            The new ranks; () if there is no room.

        Raises:
            GroupClosedError, GroupBrokenError: the group takes no calls, or another driver started these workers.
            ValueError: ``count`` is not a positive multiple of a replica's size.
            PlacementError: there is no room for ``count`` ranks, or a process has not started within ``timeout``.
            SingleControllerError: what starting workers, a repeated call or `Worker.on_membership_change` raises. If
                that is before the ranks have joined, the group is as before, and otherwise broken.
        """
        end = time.monotonic() + check_seconds("timeout", timeout)
        self._check()
        plan = self._owned_plan()
        encoded = plan.process.encode()

        def left() -> float:
            return max(0.1, end - time.monotonic())

        with self._state.sending:  # no other thread may choose the same slots
            self._check()
            transport = self._ray
            slots = vacant_slots(plan, transport)
            recruits = recruit(plan, transport, slots[: self._number_to_add(count, len(slots), end)], encoded)
        if not recruits:
            return ()
        try:
            wait_started([one.prepared for one in recruits], left(), self.name)
            larger = enlist(plan, transport, recruits, self.generation + 1, collectives=self._collectives)
            # With a state of their own: a constructor that raises does not break the group.
            apart = GroupState(f"{self.name}, its new ranks", self._state.error_grace)
            waiting = self._waits_for_constructors(left(), apart)
            join(plan, larger, sorted(larger.fresh - transport.fresh), encoded, waiting, self._rendezvous)
            with self._state.sending:
                self._check()
                return self._add(recruits, encoded, left)
        except RayError as error:
            raise StartError(
                f"{self.name}: a process for a new rank could not be started: {one_line(error)}"
            ) from error
        finally:
            for one in recruits:
                if one in self._ray.standbys and self._ray.connected:  # it was not added
                    self._ray.standbys.remove(one)
                    one.end()

    def replace_or_shrink(self) -> None:
        """What ``on_death="shrink"`` does: `replace` if there are enough standbys for the ranks that have died, and
        otherwise `shrink`."""
        with self._state.sending:
            dead = {*self._state.dead, *self._transport.deaths(), *self._find_dead()}
            if len(living_standbys(self._ray)) >= len(dead):
                self.replace()
            else:
                self.shrink()

    # --- the inside ---------------------------------------------------------------------------------------------------

    @property
    def _ray(self) -> RayTransport:
        transport = self._transport
        if not isinstance(transport, RayTransport):
            raise TypeError(f"{self.name} does not run on Ray")
        return transport

    def _owned_plan(self) -> StartPlan:
        raise NotImplementedError

    def _recover(self) -> None:
        """See `WorkerGroup._recover`."""
        if self._on_death == "shrink":
            self.replace_or_shrink()
        else:
            self.replace()

    def _without_dead(
        self,
        method: str,
        ranks: Sequence[int] | None,
        timeout: float,
        prepare: Callable[[tuple[int, ...]], Callable[[float], None]],
    ) -> None:
        """Replace or drop the dead ranks, again if further ones die meanwhile.

        Args:
            method: the caller, for messages.
            ranks: living ranks that count as dead.
            timeout: seconds.
            prepare: gets the dead ranks, checks whether the group can do without them, and returns a function that
                replaces or drops them within some seconds. If it raises, the group stays as it is.
        """
        end = time.monotonic() + check_seconds("timeout", timeout)
        self._state.check_process()

        def left() -> float:
            return max(0.1, end - time.monotonic())

        with self._state.sending:  # from the first try to the last, so that no other thread sends in between
            self._owned_plan()
            more: Collection[int] = () if ranks is None else check_ranks(method, ranks, self.world_size)
            for tries in reversed(range(TRIES)):
                dead = {*more, *self._state.dead, *self._transport.deaths()}
                if not dead and self.broken is None:
                    dead |= self._find_dead(end)
                if not dead and self.broken is None:
                    return
                change = prepare(tuple(sorted(dead)))
                try:
                    self._change(lambda change=change: change(left()), left)  # type: ignore[misc]
                    return
                except WorkerDiedError as error:
                    if not tries:
                        raise
                    more = error.ranks
                    logger.warning("%s: another rank died in %s(): %s", self.name, method, error)

    def _change(self, change: Callable[[], None], left: Callable[[], float]) -> None:
        restart(
            self._state,
            choose=lambda: (),
            start=lambda _: change(),
            replay=lambda _: self._repeat_and_tell(left()),
        )

    def _keep_standbys(self, tries: int = TRIES) -> None:
        """Start standbys again that die before they are ready: Ray may have put one on a host that is gone, of which it
        does not know yet. A thread "standby-again" does that, once Ray has told the death in a thread of its own."""
        group = weakref.ref(self)  # standbys end with the group, not the other way round

        def when_prepared(standby: Standby, done: Future[Any]) -> None:
            if isinstance(done.exception(), RayActorError):
                threading.Thread(target=again, args=(standby,), name="standby-again", daemon=True).start()

        def again(standby: Standby) -> None:
            this = group()
            if this is None or not this._ray.connected:
                return
            with this._state.sending:
                transport = this._ray
                if this.closed or standby not in transport.standbys:
                    return
                transport.standbys.remove(standby)
                plan = this._owned_plan()
                recruit(plan, transport, [standby.slot], plan.process.encode())
            logger.warning("%s: a standby died before it was ready, and is started again", this.name)
            if tries > 1:
                this._keep_standbys(tries - 1)

        for one in self._ray.standbys:
            if not ray.wait([one.prepared], timeout=0)[0]:
                one.prepared.future().add_done_callback(partial(when_prepared, one))

    def _find_dead(self, until: float = math.inf) -> set[int]:
        """The ranks that have died, also those of which Ray does not know yet: an error on another rank, which a death
        has caused, may arrive earlier than the news of the death. Ranks of which nothing is known ``until`` then, by
        the monotonic clock, are not among them."""
        transport, dead = self._transport, set[int]()
        unknown = set(range(self.world_size))
        end = min(until, time.monotonic() + max(DEATH_SHOWS_SECONDS, transport.death_seconds))
        while unknown and time.monotonic() < end:
            known = {**transport.probe(sorted(unknown)[:MAX_PROBED]), **transport.deaths()}
            dead |= {rank for rank, reason in known.items() if reason is not None}
            unknown -= known.keys()
            time.sleep(0.01 if unknown else 0.0)
        return dead

    def _replicas(self, ranks: Collection[int], end: float) -> dict[int, list[tuple[int, int]]]:
        """`Worker.dp_replica` of each rank, by role; empty for a process whose constructors have not run. Ranks that
        have died meanwhile are missing. A rank that does not answer is asked again until ``end``, by the monotonic
        clock: its host may be busy, and to take it for dead would end it."""
        found: dict[int, list[tuple[int, int]]] = {}
        while unknown := sorted(set(ranks) - found.keys() - self._transport.deaths().keys()):
            text = "there was no time to ask it"
            for rank, answer in self._ray.ask("replicas", unknown, MAX_STACK_SECONDS).items():
                if answer.ok:
                    found[rank] = [(number, count) for number, count in json.loads(answer.text)]
                elif answer.told:
                    raise GroupBrokenError(f"{self.name} cannot change its size: rank {rank}: {answer.text}")
                else:
                    text = answer.text
            late = [rank for rank in unknown if rank not in found]
            if late and time.monotonic() >= end:
                raise CallTimeoutError(
                    f"{self.name} cannot change its size: {ranks_text(late)} did not say to which data-parallel "
                    f"replica they belong: {text}. Pass a longer timeout, or these ranks as the ones to drop",
                    ranks=late,
                )
        return found

    def _in_complete_replicas(self, living: Collection[int], end: float) -> list[int]:
        kept = complete_replicas(self._replicas(living, end), self.world_size)
        if not kept:
            raise GroupBrokenError(
                f"{self.name} cannot go on without the ranks that have died: each of its data-parallel replicas has "
                "lost a rank. Call replace() or restart()"
            )
        return kept

    def _number_to_add(self, count: int | None, vacant: int, end: float) -> int:
        first = self._replicas([0], end).get(0)
        if first is None:
            raise GroupBrokenError(f"{self.name} cannot grow: rank 0 has died. {self._state.advice}")
        size = self.world_size // min(replicas for _, replicas in first)
        if count is None:
            return vacant - vacant % size
        if not isinstance(count, int) or count < 1 or count % size:
            raise ValueError(f"grow(count={count!r}): expected a positive multiple of {size}, the size of a replica")
        if count > vacant:
            raise PlacementError(f"{self.name} has room for {vacant} ranks in {self._owned_plan().pool!r}, not {count}")
        return count

    def _fill(self, chosen: Sequence[int], timeout: float | None) -> None:
        """Put new processes at ranks, and have all join a new rendezvous, or the new ones the old one."""
        plan, before = self._owned_plan(), self._ray
        encoded = plan.process.encode()
        generation, collectives = self.generation + 1, self._collectives
        if collectives:  # now, because those that stay must not run the calls that they have while processes start
            before.ask("leave", sorted(set(range(self.world_size)) - set(chosen)), MAX_STACK_SECONDS)
        # Set at once, here and below: whatever fails from here on, the group has these actors.
        self._state.transport = fill(plan, before, chosen, encoded, generation, collectives=collectives)
        self._keep_standbys()
        self._join(before, encoded, timeout, chosen=None if collectives else chosen)

    def _drop(self, kept: Sequence[int], timeout: float) -> None:
        """End all ranks but some, and have these join a new rendezvous."""
        plan, before = self._owned_plan(), self._ray
        self._state.transport = keep(plan, before, kept, self.generation + 1)
        self._state.renumber(kept)
        self._join(before, plan.process.encode(), timeout)

    def _add(self, recruits: Sequence[Standby], encoded: Any, left: Callable[[], float]) -> tuple[int, ...]:
        """Make standbys ranks. The caller holds ``sending``."""
        before, collectives = self._ray, self._collectives
        present = [one for one in recruits if one in before.standbys]  # others have replaced a rank meanwhile
        new = tuple(range(before.world_size, before.world_size + len(present)))

        def add() -> None:
            self._state.transport = enlist(
                self._owned_plan(), before, present, self.generation + 1, collectives=collectives
            )
            self._join(before, encoded, left())

        if not collectives:
            add()
            self._replay(new)
            with self._state.lock:
                self._state.restarts += 1
                self._state.on_change()
            return new
        self._wait_for_running_calls(left())
        self._change(add, left)
        return new

    def _wait_for_running_calls(self, timeout: float) -> None:
        """Have all ranks run a call that does nothing, after those that they have."""
        for role in self._tables:
            group = self if role is None else self._role_group(role)
            spec = group._any_method("_report")
            options = CallOptions(timeout=timeout)
            wait_and_check(group._send(spec, CallPlan.empty(self.world_size), options, recorded=False))

    def _join(
        self, before: RayTransport, encoded: Any, timeout: float | None, chosen: Sequence[int] | None = None
    ) -> None:
        """Have ranks join, by default all, with a new rendezvous if they use collectives."""
        plan, transport, wait = self._owned_plan(), self._ray, self._waits_for_constructors(timeout, self._state)
        everyone = range(self.world_size) if chosen is None else chosen
        if not self._collectives:
            self._rendezvous = join(plan, transport, everyone, encoded, wait, self._rendezvous, leave=False)
            return
        moved = transport.ranks[0].location.node_id != before.ranks[0].location.node_id
        address = None if moved else plan.master[0]
        with transport.leaving([rank for rank in everyone if rank not in transport.fresh]):
            self._rendezvous = join(plan, transport, everyone, encoded, wait, (address, None))

    def _waits_for_constructors(self, timeout: float | None, state: GroupState) -> WaitForConstructors:
        def wait(transport: RayTransport, plan: CallPlan, send: SendJoin) -> None:
            self._wait_for_constructors(transport, plan, send, timeout, state)

        return wait

    def _repeat_and_tell(self, timeout: float) -> None:
        """Repeat the logged calls on the new ranks, and tell all ranks."""
        self._replay(self._ray.fresh)
        for role in self._tables if self._collectives else ():
            group = self if role is None else self._role_group(role)
            spec, options = group._any_method("_change_membership"), CallOptions(timeout=timeout)
            plan = group._plan(spec, (self.generation + 1,), {}, options)
            wait_and_check(group._send(spec, plan, options, recorded=False))


def complete_replicas(replicas: Mapping[int, Sequence[tuple[int, int]]], world_size: int) -> list[int]:
    """Return the ranks whose data-parallel replicas have lost no rank, in any role.

    Args:
        replicas: rank -> by role, number of its replica and how many there are. Without the ranks that are lost.
        world_size: number of ranks before.
    """
    kept = {rank: of for rank, of in replicas.items() if of}
    while True:
        members = Counter((role, number) for of in kept.values() for role, (number, _) in enumerate(of))
        complete = {
            rank: of
            for rank, of in kept.items()
            if all(members[role, number] * count == world_size for role, (number, count) in enumerate(of))
        }
        if len(complete) == len(kept):
            return sorted(kept)
        kept = complete
