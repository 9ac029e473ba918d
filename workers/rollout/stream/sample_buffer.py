"""SampleBuffer: what is generated, waits and is trained in an asynchronous run, and how old it may be.

Pure Python: no Ray, no torch. The policies and what they guarantee are in docs/async-rl.md, the state machine in
docs/internals/sample-buffer.md.

Threads: the buffer starts none. In a `RolloutStream`, the router's thread calls `SampleBuffer.begin`, `give_back` and
`expired`; the threads that compute rewards call `put`, and `fail`; the trainer's calls `take`, `set_version` and
`rewind`. One lock makes each of these calls a single step, so what `begin` admits by the version in force is a group of
that version, and `take` chooses among groups that do not change meanwhile.
"""

from __future__ import annotations

import copy
import math
import threading
import time
from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Any, Literal, NamedTuple, get_args

from dispatch.checks import check_count
from workers.rollout.rollout_errors import RolloutError
from workers.rollout.stream.flat_filter import FlatFilter


class Begun(NamedTuple):
    """A group to generate: its number, and the partial completions to continue; None begins with the prompt alone."""

    number: int
    partial: Any


class Taken(NamedTuple):
    """A group to train on: its number, and what `SampleBuffer.put` got."""

    number: int
    payload: Any


@dataclass(slots=True)
class Group:
    """A group that has begun, and is neither taken nor filtered.

    Attributes:
        state: "pending" waits to begin again.
        update: number of the update whose weights generated its oldest trained token, or, in flight, that was in force
            when it began; None while it has no tokens.
        data: the payload of a ready group, the partial completions of a pending one.
        tokens: generated tokens in ``data``.
        journal: of a group in flight, the partial completions that are known of it and the number of their tokens; None
            if there are none.
    """

    state: Literal["pending", "in flight", "ready"] = "pending"
    update: int | None = None
    data: Any = None
    tokens: int = 0
    journal: tuple[Any, int] | None = None

    def saved(self) -> Group:
        """A copy for a checkpoint, of which nothing is in flight."""
        if self.state != "in flight":
            return copy.copy(self)
        return Group() if self.journal is None else Group("pending", self.update, *self.journal)


@dataclass(slots=True)
class Batch:
    """A batch that was taken.

    Attributes:
        numbers: of its groups.
        groups: by number; empty if they are not kept.
        update: number of the update that was in force.
    """

    numbers: list[int]
    groups: dict[int, Group]
    update: int


class Updates:
    """Numbers the updates with new weights from 1. Versions only grow; the number goes back with the trainer.

    Args:
        state: of `state_dict`.
        count: see below.

    Attributes:
        count: number of the update whose weights the trainer has sent last, or had when `rewind` was called.
        rewound: whether the next versions are those weights, sent again.
    """

    def __init__(self, state: Sequence[tuple[int, int]] = (), count: int = 0) -> None:
        self._versions = [version for version, _ in state]
        self._numbers = [number for _, number in state]
        self.count = count
        self.rewound = self.behind

    @property
    def behind(self) -> bool:
        """Whether the last version has newer weights than the trainer."""
        return bool(self._numbers) and self.count < self._numbers[-1]

    def add(self, version: int, *, same_weights: bool = False) -> bool:
        """Note that the workers have a version, higher than all before. Returns whether its weights are new."""
        new = not self.count or not (same_weights or self.rewound)
        self.count += new
        self._versions.append(version)
        self._numbers.append(self.count)
        return new

    def of(self, version: int) -> int:
        """Return the number of the update whose weights a version has; 0 for those before the first update."""
        known = bisect_right(self._versions, version)
        return self._numbers[known - 1] if known else 0

    def rewind(self, count: int) -> None:
        """Note that the trainer has the weights of an earlier update again."""
        self.count, self.rewound = count, True

    def state_dict(self) -> list[tuple[int, int]]:
        """Return (version, number) of all versions."""
        return list(zip(self._versions, self._numbers, strict=True))


OnStale = Literal["wait", "drop", "train"]
Order = Literal["fifo", "window"]
_Convert = Callable[[Any], Any]

KNOWN_BATCHES = 256
"""How many batches `SampleBuffer.rewind` can go back."""

COUNTS = ["arrived", "taken", "filtered", "dropped", "given_back", "interrupted"]
COUNTS += ["arrived_tokens", "taken_tokens", "dropped_tokens", "wait_seconds"]


class SampleBuffer:
    """The store between generation and training. Methods may be called from any thread; one thread calls `take`.

    A *group* is all samples of one prompt. Its *number* is the position of its prompt in the run, from 0. Batch b is
    what the b-th `take` returns, from 0. The trainer's weights are sent before batch 0, and again before every batch
    whose number is a multiple of ``update_interval``. The *staleness* of a group, in versions, is the number of updates
    since the one that sent the weights which generated its oldest trained token.

    A payload may be any object, usually a reference to the object store. The buffer keeps at most
    ``groups_per_batch * update_interval * (max_staleness + 1)`` groups and those of the last ``keep_batches`` batches,
    and drops its reference when a group is filtered or dropped.

    Args:
        groups_per_batch: groups that `take` returns.
        max_staleness: maximum staleness of a group when it is taken. A group is begun only if it will not be older when
            groups are taken in order of number: see `begin`. With 0, a group is generated with the weights that are
            then trained on it.
        on_stale: which groups may be overtaken by faster ones. "wait": none that would become too old. "drop": any; a
            group that becomes too old is dropped, and its prompt begins again. "train": any; groups are trained however
            old they become. With ``order="fifo"``, no group is overtaken, so these options have the same effect.
        order: "fifo" takes groups in order of number. "window" lets ready groups overtake.
        window: a group that is not ready may be overtaken only by the next ``window`` numbers; by default two batches.
        update_interval: batches from one update to the next.
        num_batches: number of batches of the run; a group that would be in a later batch does not begin. None for no
            limit.
        max_filtered: how many flat groups (see `put`) may be filtered for each ``groups_per_batch`` groups that are
            kept, in order of number; further ones are kept. None for no limit.
        keep_batches: how many batches that were taken are kept, so that `rewind` need not generate them again. Twice
            ``peer_snapshot_interval`` if the trainer takes snapshots.

    Attributes:
        version: the current weight version; None before the first `set_version`. Read-only, like ``batches``.
        keep_batches: see above; may be raised at any time.
        batches: number of batches that were taken, which is also the number of the next batch.

    Raises:
        ValueError: an argument is out of range.
    """

    def __init__(
        self,
        groups_per_batch: int,
        *,
        max_staleness: int = 0,
        on_stale: OnStale = "wait",
        order: Order = "fifo",
        window: int | None = None,
        update_interval: int = 1,
        num_batches: int | None = None,
        max_filtered: int | None = None,
        keep_batches: int = 0,
    ) -> None:
        needed = [("groups_per_batch", groups_per_batch, 1), ("max_staleness", max_staleness, 0)]
        needed += [("update_interval", update_interval, 1), ("keep_batches", keep_batches, 0)]
        optional = [("window", window, 1), ("num_batches", num_batches, 0), ("max_filtered", max_filtered, 0)]
        for name, value, least in (*needed, *(one for one in optional if one[1] is not None)):
            check_count(f"SampleBuffer: {name}", value, least)
        for name, word, known in (("on_stale", on_stale, get_args(OnStale)), ("order", order, get_args(Order))):
            if word not in known:
                raise ValueError(f"SampleBuffer: {name}={word!r}; expected one of {', '.join(known)}")
        if order == "fifo" and window is not None:
            raise ValueError(f"SampleBuffer: window={window} needs order='window'")
        self.groups_per_batch = groups_per_batch
        self.max_staleness = max_staleness
        self.on_stale = on_stale
        self.window = 0 if order == "fifo" else window or 2 * groups_per_batch
        self.update_interval = update_interval
        self.num_batches = math.inf if num_batches is None else num_batches
        self.keep_batches = keep_batches
        self.version: int | None = None
        self.batches = 0

        self._changed = threading.Condition()
        """Its lock protects all attributes below, `version` and `batches`; methods whose names begin with _ are called
        with it held. No other lock is taken and no function of the caller is called under it, so it may be acquired
        under any lock. Notified when `take`, the only one that waits for it, may have become possible or has to
        raise: when a group arrives or becomes younger, and with a version, a rewind, a state or an error."""
        self._groups: dict[int, Group] = {}
        """In order of number: numbers enter in order, and a group that begins again keeps its place."""
        self._pending: list[int] = []
        """A heap of the numbers of the pending groups. `begin` takes the lowest, and none leaves it otherwise."""
        self._cursor = 0
        """The lowest number that has never begun."""
        self._taken: deque[Batch] = deque(maxlen=KNOWN_BATCHES)
        """The batches that were taken, the last one at the end."""
        self._interval = 0
        """``batches // update_interval`` at the last update."""
        self._sent = 0
        """``batches`` at the last update with new weights, or at a rewind since."""
        self._updates = Updates()
        self._filter = FlatFilter(groups_per_batch, max_filtered)
        self._error: BaseException | None = None
        self._counts: dict[str, float] = dict.fromkeys(COUNTS, 0)

    # --- for the side that generates --------------------------------------------------------------------------------

    def begin(self) -> Begun | None:
        """Return a group to generate now, with the version in force: the lowest number that was given back or dropped,
        else the next prompt.

        Taken in order of number, it will be in batch b, after all lower numbers that were not filtered. It begins only
        if at most ``max_staleness`` updates come before batch b.

        Returns:
            None if no group may begin at the moment; ask again after `take`, `set_version` or `put`.
        """
        with self._changed:
            if self.version is None or self._error is not None:
                return None
            if self._pending:
                number = self._pending[0]
                before = next(place for place, other in enumerate(self._groups) if other == number)
            else:
                number, before = self._cursor, len(self._groups)
            batch = self.batches + before // self.groups_per_batch
            if self._updates_before(batch) > self.max_staleness or batch >= self.num_batches:
                return None
            if number == self._cursor:
                self._cursor += 1
                self._groups[number] = Group()  # at the end: numbers enter in order
            else:
                heappop(self._pending)
            group = self._groups[number]
            if self._too_old(group, self._updates_before(batch)):
                self._drop(number)  # a partial completion that cannot be trained in time
            if group.update is None:
                # That of the version in force, though an update may begin before a worker has the group: `put` is told
                # the versions of the tokens, and until then it must not count as younger than it may turn out to be.
                group.update = self._updates.count
            partial, group.data, group.state = group.data, None, "in flight"
            group.journal = None if partial is None else (partial, group.tokens)
            return Begun(number, partial)

    def put(
        self, number: int, payload: Any, *, versions: tuple[int, int] | None, flat: bool = False, tokens: int = 0
    ) -> None:
        """Add a group that is complete.

        Args:
            number: of a group in flight. The buffer knows no attempts: after `give_back`, a late result of the earlier
                attempt must not be put.
            payload: what `take` returns; not looked at.
            versions: lowest and highest weight version of its tokens, as the workers report them; None if it has no
                tokens.
            flat: its rewards have no variance (dynamic sampling): the group is filtered, and a further prompt takes its
                place, unless ``max_filtered`` were filtered already. Which ones are filtered depends on the numbers of
                the flat groups and not on when they arrive.
            tokens: number of generated tokens, for `metrics`.

        Raises:
            ValueError: the group is not in flight, or the versions are not versions.
        """
        if versions is not None and not 0 <= versions[0] <= versions[1]:
            raise ValueError(f"group {number}: versions={versions!r}; expected (lowest, highest), both at least 0")
        with self._changed:
            # In flight, so `begin` was called and nobody else has this number: whatever happened to other groups since,
            # the prompt is neither lost nor in the buffer twice.
            group = self._in_flight(number)
            group.state, group.data, group.tokens, group.journal = "ready", payload, tokens, None
            group.update = self._updates.count if versions is None else self._updates.of(versions[0])
            self._count("arrived", tokens)
            for other in self._filter.arrive(number, flat):  # it may decide for groups that arrived before, too
                del self._groups[other]
                self._counts["filtered"] += 1
            if number in self._groups and self._too_old(group):
                self._drop(number)
            self._changed.notify_all()

    def give_back(self, number: int, partial: Any = None, *, tokens: int = 0) -> None:
        """Make a group in flight pending: its worker died, or it was interrupted or aborted.

        Args:
            number: of a group in flight.
            partial: completions to continue, or None if there are no tokens. They count as generated with the weights
                with which the group began.
            tokens: number of generated tokens so far, for `metrics`.

        Raises:
            ValueError: the group is not in flight.
        """
        with self._changed:
            group = self._in_flight(number)
            group.data, group.tokens, group.journal = partial, tokens, None
            if self._too_old(group):
                self._drop(number)
                return
            group.state = "pending"
            heappush(self._pending, number)
            self._counts["given_back" if partial is None else "interrupted"] += 1
            if partial is None:
                group.update, group.tokens = None, 0
                self._changed.notify_all()  # it begins anew, with newer weights, so others may overtake it now

    def expired(self) -> list[int]:
        """Numbers of the groups in flight that are too old to be trained. Abort them, then `give_back` each."""
        # They stay in flight until then: a worker still generates them, and only it knows when it has stopped.
        with self._changed:
            return [n for n, group in self._groups.items() if group.state == "in flight" and self._too_old(group)]

    def fail(self, error: BaseException) -> None:
        """End generation: `take` raises a copy of the first error, now and later, and no group begins. A `RolloutError`
        stands for an error that cannot be copied, and for a `TimeoutError`, which would mean that `take` can be called
        again; its cause is that error."""
        try:
            copy.copy(error)
            can_be_raised = not isinstance(error, TimeoutError)
        except Exception:
            can_be_raised = False
        if not can_be_raised:
            named = RolloutError(f"generation has ended: {type(error).__name__}: {error}")
            named.__cause__ = error
            error = named
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()

    def journal(self, number: int, partial: Any, *, tokens: int = 0) -> None:
        """Note how far a group in flight has come, for checkpoints: `state_dict` saves it as after `give_back` with
        these arguments."""
        with self._changed:
            self._in_flight(number).journal = None if partial is None else (partial, tokens)

    # --- for the side that trains -----------------------------------------------------------------------------------

    def take(self, timeout: float | None = None) -> list[Taken]:
        """Return the next batch, in order of number.

        Taking a batch says that the one before it is trained, and that this one will be trained with the version in
        force: train, then update if it is time, then take.

        Args:
            timeout: seconds to wait for the batch. None: no limit. After a timeout, call it again.

        Raises:
            TimeoutError: the batch is not complete.
            ValueError: all batches were taken, or there are no weights yet.
        """
        began = time.monotonic()
        with self._changed:
            if self.batches >= self.num_batches:
                raise ValueError(f"all {self.num_batches} batches were taken")
            if self.version is None:
                raise ValueError("take() before the first set_version(): no group can begin")
            # An update that is overdue will not come: the thread that would send it is this one.
            self._interval = max(self._interval, self.batches // self.update_interval)
            try:
                while (chosen := self._choose()) is None:
                    left = None if timeout is None else began + timeout - time.monotonic()
                    if left is not None and left <= 0:
                        states = ", ".join(f"{count} {state}" for state, count in self._states().items())
                        raise TimeoutError(f"batch {self.batches} is not complete; groups: {states}")
                    # Releases the lock. Afterwards everything may be different, so the choice is made anew.
                    self._changed.wait(left)
            finally:
                self._counts["wait_seconds"] += time.monotonic() - began
            groups = {number: self._groups.pop(number) for number in chosen}
            # From here on nobody else changes these groups: `put` and `give_back` find none of their numbers in flight.
            self._taken.append(Batch(chosen, groups, self._updates.count))
            if len(self._taken) > self.keep_batches:
                self._taken[-1 - self.keep_batches].groups = {}
            self._updates.rewound = False
            self.batches += 1
            for group in groups.values():
                self._count("taken", group.tokens)
            return [Taken(number, group.data) for number, group in groups.items()]

    def set_version(self, version: int, *, same_weights: bool = False) -> None:
        """Say that the workers have weights of this version. No group begins before the first call.

        Args:
            version: the version. The one that is in force already changes nothing.
            same_weights: these are the weights of the version before, sent again because a worker was restarted. No
                group becomes older.

        Raises:
            ValueError: the version is lower than the one in force.
        """
        with self._changed:
            if self.version is not None and version <= self.version:
                if version < self.version:
                    raise ValueError(f"set_version({version}): version {self.version} is in force")
                return
            if self._updates.add(version, same_weights=same_weights):
                self._interval = max(self._interval, self.batches // self.update_interval)
                self._sent = self.batches
            self.version = version
            self._drop_stale()
            self._changed.notify_all()

    def staleness(self, version: int) -> int:
        """How many updates with new weights came after a version. Weights that were sent again do not count. 0 for
        weights that the trainer will have again after a `rewind`."""
        with self._changed:
            return max(0, self._updates.count - self._updates.of(version))

    def rewind(self, batch: int) -> None:
        """Take batches again, because what was trained on them is lost: the trainer has returned to an earlier rollout.

        The groups of these batches are ready again, as they were, if they are among the last ``keep_batches``; else
        they are generated again. All other groups stay. Until the next `take`, versions are those of the weights with
        which this batch was trained, sent again. What newer weights have generated is trained when the trainer has had
        as many updates again; until then its staleness is 0.

        Args:
            batch: number of the batch that `take` shall return next.

        Raises:
            ValueError: the batch was not taken yet, or more than `KNOWN_BATCHES` batches ago.
        """
        with self._changed:
            back = self.batches - batch
            if not 0 <= back <= len(self._taken):
                known = f"{self.batches - len(self._taken)} to {self.batches}"
                raise ValueError(f"rewind({batch}): the batches that can be taken next are {known}")
            if not back:
                return
            # Under one lock, so that `begin` sees either all of these groups or none: their numbers are lower than
            # those that are in the buffer, and it goes by the lowest.
            for _ in range(back):
                again = self._taken.pop()
                self._groups |= {number: again.groups.get(number) or Group() for number in again.numbers}
            self._replace_groups(dict(sorted(self._groups.items())))
            self.batches, self._sent, self._interval = batch, batch, batch // self.update_interval
            self._updates.rewind(again.update)
            self._changed.notify_all()

    # --- for checkpoints and logs -----------------------------------------------------------------------------------

    def state_dict(self, materialize: _Convert | None = None, *, trained: int | None = None) -> dict[str, Any]:
        """Return the state for a checkpoint. Groups in flight are saved as pending, without what they have generated
        since the last call of `journal`.

        Args:
            materialize: makes of a payload or partial completions what is saved, such as `ray.get`. It is called
                without the lock, while generation goes on.
            trained: number of batches on which the saved weights have been trained. None: all that were taken. One
                less: the batch taken last is saved as pending.

        Returns:
            A dict of numbers, lists, dicts and what ``materialize`` returns.

        Raises:
            ValueError: ``trained`` is another number.
        """
        with self._changed:
            trained = self.batches if trained is None else trained
            if not self.batches - min(1, len(self._taken)) <= trained <= self.batches:
                raise ValueError(f"state_dict(trained={trained}): {self.batches} batches were taken")
            # Copies, because the groups themselves change as soon as the lock is released.
            groups = {} if trained == self.batches else dict.fromkeys(self._taken[-1].numbers, Group())
            groups |= {n: one.saved() for n, one in self._groups.items()}
            state: dict[str, Any] = {"groups_per_batch": self.groups_per_batch, "batches": trained}
            state |= {"cursor": self._cursor, "filter": self._filter.state_dict()}
            updates = self._updates
            state |= {"version": self.version, "updates": updates.state_dict(), "update": updates.count}
            due = not updates.count or updates.behind or trained // self.update_interval > self._interval
            state |= {"update_due": due, "sent": self._sent}
        for group in groups.values():
            if materialize is not None and group.data is not None:
                group.data = materialize(group.data)
        saved = {n: (one.state, one.update, one.data, one.tokens) for n, one in sorted(groups.items())}
        return {**state, "groups": saved}

    def load_state_dict(self, state: dict[str, Any], *, restore: _Convert | None = None) -> None:
        """Continue from a state of `state_dict`. Arguments other than ``groups_per_batch`` may differ from those then.
        ``version`` is then the saved one, or the one after it if an update was due: send the weights of the checkpoint
        with it or with a later one. Versions that are set before the next `take` count as the same weights, sent again,
        unless no update was due and the trainer had trained since the last update.

        Args:
            state: the state.
            restore: makes a payload or partial completions of what ``materialize`` returned, such as `ray.put`.

        Raises:
            ValueError: the state is of batches of another size, or groups are in flight.
        """
        if state["groups_per_batch"] != self.groups_per_batch:
            sizes = f"{state['groups_per_batch']} groups per batch, and the buffer {self.groups_per_batch}"
            raise ValueError(f"the state has {sizes}: the numbers of prompts would change")
        groups = {number: Group(*saved) for number, saved in state["groups"].items()}
        for group in groups.values():
            if restore is not None and group.data is not None:
                group.data = restore(group.data)
        with self._changed:
            if flying := self._states()["in flight"]:
                raise ValueError(f"load_state_dict(): {flying} groups are in flight; give them back first")
            self._replace_groups(groups)
            self._cursor, self.batches = state["cursor"], state["batches"]
            self._taken.clear()
            self._filter.load_state_dict(state["filter"])
            self._interval = self.batches // self.update_interval
            due = int(state["update_due"])
            self.version = int(state["version"] or 0) + due
            self._updates = Updates(state["updates"], state["update"])
            if due:
                self._updates.add(self.version)
            self._sent = self.batches if due else state.get("sent", -1)  # older states lack it
            # True if the trainer has not trained since. An update that was due may have failed before.
            self._updates.rewound = self._sent >= self.batches
            self._drop_stale()  # of a run with another max_staleness
            self._changed.notify_all()

    def metrics(self) -> dict[str, float]:
        """Return counts since the last call, and how many groups there are now.

        All names begin with ``buffer/``. Counts of groups: ``arrived`` (all that were put), ``taken``, ``filtered``,
        ``dropped``, ``given_back`` (without tokens), ``interrupted`` (with tokens). Their generated tokens:
        ``arrived_tokens``, ``taken_tokens``, ``dropped_tokens``; ``taken_tokens / taken`` below ``arrived_tokens /
        arrived`` means that short completions are favoured. ``wait_seconds``: time in `take`. Groups now: ``pending``,
        ``in_flight``, ``ready``.
        """
        with self._changed:
            counts, self._counts = self._counts, dict.fromkeys(COUNTS, 0)
            now = {state.replace(" ", "_"): count for state, count in self._states().items()}
        return {f"buffer/{name}": float(count) for name, count in (counts | now).items()}

    # --- with the lock held -----------------------------------------------------------------------------------------

    def _in_flight(self, number: int) -> Group:
        group = self._groups.get(number)
        if group is None or group.state != "in flight":
            raise ValueError(f"group {number} is not in flight" + (f": it is {group.state}" if group else ""))
        return group

    def _replace_groups(self, groups: dict[int, Group]) -> None:
        self._groups = groups
        self._pending = [number for number, group in groups.items() if group.state == "pending"]  # sorted, so a heap

    def _count(self, what: str, tokens: int) -> None:
        self._counts[what] += 1
        self._counts[f"{what}_tokens"] += tokens

    def _states(self) -> dict[str, int]:
        counts = Counter(group.state for group in self._groups.values())
        return {state: counts[state] for state in ("pending", "in flight", "ready")}

    def _updates_before(self, batch: int) -> int:
        """How many updates will come before a batch is trained."""
        return batch // self.update_interval - self._interval

    def _too_old(self, group: Group, updates: int = 0) -> bool:
        """Whether a group would be too old after some more updates."""
        if self.on_stale == "train" or group.update is None:
            return False
        return self._updates.count - group.update + updates > self.max_staleness

    def _drop(self, number: int) -> None:
        group = self._groups[number]
        self._count("dropped", group.tokens)
        if group.state != "pending":
            heappush(self._pending, number)
        group.state, group.update, group.data, group.tokens = "pending", None, None, 0
        self._filter.drop(number)
        self._changed.notify_all()  # it begins anew, as after `give_back`

    def _drop_stale(self) -> None:
        """Drop the groups that are too old, except those in flight: see `expired`.

        With "wait" there are none as long as updates come every ``update_interval`` batches.
        """
        for number, group in self._groups.items():
            if group.state != "in flight" and self._too_old(group):
                self._drop(number)

    def _choose(self) -> list[int] | None:
        """Numbers of the next batch: the lowest that are ready, within the window. None: wait."""
        if self._error is not None:
            error = copy.copy(self._error)  # whose traceback grows, and refers to whoever has called `take`
            raise error.with_traceback(self._error.__traceback__) from self._error.__cause__
        chosen: list[int] = []
        end = math.inf
        for number, group in self._groups.items():
            if number >= end or len(chosen) == self.groups_per_batch:
                break
            if group.state == "ready" and number not in self._filter.undecided:
                chosen.append(number)
            else:
                end = min(end, number + self.window)
        if len(chosen) < self.groups_per_batch:
            return None
        # The lowest numbers are never refused, so that take() can only wait for a group in flight.
        if self.on_stale == "wait" and end < math.inf and not self._in_time_without(set(chosen)):
            return None
        return chosen

    def _in_time_without(self, chosen: set[int]) -> bool:
        """Whether all other groups can be trained in time if they are taken in order of number from then on.

        No other choice of ready groups leaves more time: each group waits for the lower numbers that are left.
        """
        left = (group for number, group in self._groups.items() if number not in chosen)
        return not any(
            self._too_old(group, self._updates_before(self.batches + 1 + place // self.groups_per_batch))
            for place, group in enumerate(left)
        )
