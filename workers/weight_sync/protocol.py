"""What senders and receivers of weights agree on: the steps of an update, messages, time and errors.

An update has these steps. ``docs/weight-sync.md`` has them as a state machine, with what happens at a failure.

1. *Begin.* Train rank 0 calls ``begin_weights`` on all receivers, which answer with what they hold. The train ranks
   tell rank 0 what they have. Rank 0 makes the plan (`workers.weight_sync.plan`), or finds that the last one fits.
2. *Rounds.* Each train rank packs its pieces of a round. When all have packed, they transfer them to the receivers, by
   a `Transport`. A receiver assembles tensors from pieces.
3. *Finish.* When all rounds have arrived, rank 0 calls ``finish_weights``. The receivers load what they have assembled
   into their engines, compare digests, and take the new version.

The train ranks talk to each other in `Update.agree`, once per round: then nobody is ahead by more than a round, and all
ranks raise the error of the first one that fails. Packing and transferring involve no collectives of the training's own
process groups (except in the device transport), so an update can be given up anywhere.

Every update has a unique key. Receivers reject whatever carries the key of another update.

Time: an update has one `Budget`, which all phases share: calls to the receivers, rendezvous, transfers, and waiting for
the other ranks. It must be below the timeout of the train ranks' collectives, because a rank that waits for a receiver
keeps the others waiting in the next one.

Threads: an update runs in the thread that calls `WeightSender.send`, and in each receiver in the thread that runs its
methods; there are no locks. A receiver runs the calls of one train rank in order, but those of different train ranks in
any order.
"""

from __future__ import annotations

import math
import pickle
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from single_controller import SingleControllerError
from workers.weight_sync.plan import Box, Round

if TYPE_CHECKING:
    import torch

    from workers.weight_sync.pieces import Header, Payload
    from workers.weight_sync.receivers import Receivers

Verify = Literal["fingerprint", "full", "none"]
"""What rollout workers prove before they take new weights."""

UPDATE_SECONDS = 300.0
"""Default time for an update: half of the default timeout of the train ranks' collectives."""

TOLD_SECONDS = 0.25
"""How often whoever waits looks whether another train rank has given the update up."""

_VERDICT_SECONDS = 5.0
"""How much longer than rank 0 the other ranks wait at most, for its verdict on ranks that are late."""

_FIRST_POLL_SECONDS = 0.0002


class WeightSyncError(SingleControllerError):
    """An update of rollout workers' weights failed. Each of the workers has the complete weights of the version before,
    or of this one if it had just finished, or has no version and refuses to generate until an update succeeds."""


class Budget:
    """The time that all phases of an update share. It begins when the object is created.

    Args:
        seconds: of the whole update.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._end = time.monotonic() + seconds

    @property
    def used_up(self) -> bool:
        """Whether no time is left."""
        return not self.remaining

    @property
    def remaining(self) -> float:
        """Seconds that are left, 0 if none are."""
        return max(self._end - time.monotonic(), 0.0)

    def left(self) -> float:
        """Return the seconds that are left, rounded up: what waits that long ends when no time is left.

        Raises:
            WeightSyncError: none are left.
        """
        left = self.remaining
        if not left:
            raise WeightSyncError("the time limit of the update has passed")
        return math.ceil(left * 1000) / 1000


# --- messages -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ReceiverInfo:
    """A receiver, as it introduces itself when an update begins.

    Attributes:
        rank: in its group.
        id: unique; changes with each restart, and when another sender takes over. A receiver with a new id is in no
            process group.
        device: device on which it can open other processes' memory: ``cuda:<uuid>``, or ``cpu:<host> <namespace>``.
        shapes: of the whole tensors that its engine needs, by name.
        slices: the parts that it needs of some of them; it needs the others whole.
        dtypes: in which the engine holds them, by name; None if the engine does not tell.
        base: key of the update whose bytes it has in host memory; None if it has none.
        buffered: whether it keeps the version before until the update is complete.
    """

    rank: int
    id: str
    device: str
    shapes: dict[str, tuple[int, ...]]
    slices: dict[str, Box]
    dtypes: dict[str, torch.dtype] | None
    base: str | None
    buffered: bool


class Finished(NamedTuple):
    """What a receiver says when an update has ended.

    Attributes:
        pause: seconds in which its engine generated nothing.
        proved: what was compared with the trainer's digests: "engine", the bytes that the engine holds; "received",
            those that arrived, because the engine does not tell what it holds; None, nothing.
    """

    pause: float
    proved: str | None


@dataclass(frozen=True)
class SyncReport:
    """What an update took.

    Attributes:
        version: of the weights.
        seconds: duration of the update.
        nbytes: bytes that this rank sent; each byte counts once, however many workers received it.
        buckets: rounds of the update.
        receivers: rollout workers that have the version now.
        patched: of these, how many got the differences to the version before. The others got whole tensors.
        pause_seconds: the longest time in which a worker generated nothing.
        fingerprint: of the weights, as the first worker's engine holds them; None if nothing was compared.
        proved: what was compared with the trainer's digests on all workers: "engine", the bytes that their engines
            hold; "received", those that arrived, because an engine does not tell what it holds; None: nothing.
    """

    version: int
    seconds: float
    nbytes: int
    buckets: int
    receivers: int
    patched: int = 0
    pause_seconds: float = 0.0
    fingerprint: int | None = None
    proved: str | None = None


class Message:
    """What a transport sends to all receivers. A subclass has the transport's receiving half."""

    def receive(self, receiver: Any, key: str) -> None:
        """Handle the message.

        Args:
            receiver: the `WeightReceiver`.
            key: of the update.

        Raises:
            WeightSyncError: the weights were not loaded.
        """
        raise NotImplementedError


# --- the sending side -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class ReceiverClass:
    """Receivers that get the same bytes.

    Attributes:
        members: their numbers, in order of group and rank.
        slices, dtypes: see `ReceiverInfo`.
        patched: whether all of them have the bytes of the sender's last update, so that differences are enough.
    """

    members: tuple[int, ...]
    slices: dict[str, Box]
    dtypes: dict[str, torch.dtype] | None
    patched: bool


@dataclass
class Update:
    """An update on the sending side. One object per train rank.

    Attributes:
        version: of the weights.
        rank: this rank among the train ranks.
        ranks: number of train ranks.
        receivers: calls the receivers.
        budget: the time for it.
        key: unique name of the update, the same on all ranks.
        infos: the receivers, in order of group and rank.
        classes: of the receivers.
        tensors: shape and dtype of the whole tensors, by name.
        rounds: the plan.
        shared: what `Transport.prepare` returned on rank 0.
        process_group: of the train ranks; the default group if None.
        verify: what the receivers are to prove: "fingerprint", "full", or None.
        begun: whether this rank has called ``begin_weights``.
    """

    version: int
    rank: int
    ranks: int
    receivers: Receivers
    budget: Budget
    key: str
    infos: list[ReceiverInfo] = field(default_factory=list)
    classes: list[ReceiverClass] = field(default_factory=list)
    tensors: dict[str, tuple[tuple[int, ...], torch.dtype]] = field(default_factory=dict)
    rounds: list[Round] = field(default_factory=list)
    shared: Any = None
    process_group: Any = None
    verify: str | None = None
    begun: bool = False
    _agreed: int = 0
    _looked: float = 0.0

    def agree(
        self,
        step: str,
        value: Any = None,
        error: WeightSyncError | None = None,
        decide: Callable[[list[Any]], Any] | None = None,
    ) -> Any:
        """Have rank 0 collect a value from every rank, decide, and tell every rank. All ranks call it together.

        It uses the store in which the default process group made its rendezvous, and no collective: a collective
        cannot be given up, so a rank that is late or has failed would end the process by the collective's timeout.
        An error is told at once: the others do not have to reach this step.

        Args:
            step: what the value is about, for the errors.
            value: of this rank.
            error: what went wrong on this rank.
            decide: called on rank 0 with the values, by rank. Its result is for all ranks.

        Returns:
            What ``decide`` returned; None without it.

        Raises:
            WeightSyncError: on all ranks: the error of the first rank that failed, or that of ``decide``, or ranks were
                late.
        """
        if self.ranks == 1:
            if error is not None:
                raise error
            return None if decide is None else decide([value])
        store = self._store
        if error is not None:
            raise self.give_up(error)
        self._agreed += 1
        name = f"{self._name}/{self._agreed}"
        seconds = self.budget.remaining
        if self.rank:
            store.set(f"{name}/{self.rank}", pickle.dumps(value))
            # Longer than rank 0, which finds out at the end of its wait which rank is late, and then says so.
            if not self._arrived([name], seconds + min(_VERDICT_SECONDS, 0.1 * self.budget.seconds)):
                raise self._late("0", step)
            return pickle.loads(store.get(name))
        keys = [f"{name}/{rank}" for rank in range(1, self.ranks)]
        try:
            if not self._arrived(keys, seconds):
                late = [rank for rank, key in enumerate(keys, 1) if not store.check([key])]
                raise self._late(", ".join(map(str, late)), step)
            values = [value, *(pickle.loads(one) for one in store.multi_get(keys))]
            for key in keys:
                store.delete_key(key)
            if self._agreed > 1:  # everyone is here, so everyone has read the verdict before
                store.delete_key(f"{self._name}/{self._agreed - 1}")
            verdict = None if decide is None else decide(values)
        except Exception as failed:
            wrapped = failed if isinstance(failed, WeightSyncError) else sync_error(f"step {step!r} failed", failed)
            raise self.give_up(wrapped) from wrapped.__cause__
        store.set(name, pickle.dumps(verdict))
        return verdict

    def give_up(self, error: WeightSyncError) -> WeightSyncError:
        """Tell all train ranks that the update has failed.

        Returns:
            The error of the first rank that has given it up.
        """
        if self.ranks > 1:
            self._own_error = self._own_error or error
            # One operation: a rank that died between two would leave the others without an error to raise.
            first = self._store.compare_set(self._failed, "", pickle.dumps(self._own_error))
            return self._first_error(first)
        return error

    _own_error: WeightSyncError | None = None

    def check(self) -> None:
        """Raise the error of the train rank that was the first to give the update up, if one has.

        Raises:
            WeightSyncError: it has.
        """
        if self.ranks > 1 and self._store.check([self._failed]):
            raise self._first_error(self._store.get(self._failed))

    def _first_error(self, pickled: bytes) -> WeightSyncError:
        told: WeightSyncError = pickle.loads(pickled)
        own = self._own_error  # has its cause, which pickling drops
        return own if own is not None and str(own) == str(told) else told

    def check_now_and_then(self) -> None:
        """`check`, at most every `TOLD_SECONDS`: for loops that wait for something else.

        Raises:
            WeightSyncError: another rank has given the update up, or no time is left.
        """
        now = time.monotonic()
        if now >= self._looked + TOLD_SECONDS:
            self._looked = now
            self.budget.left()
            self.check()

    def forget(self) -> None:
        """Delete what is left of the update in the store. All ranks have ended it."""
        if self.ranks > 1 and self.rank == 0:
            for name in (f"{self._name}/{self._agreed}", self._failed):
                self._store.delete_key(name)

    @property
    def _store(self) -> Any:  # torch's stubs say that values are str
        from torch.distributed.distributed_c10d import _get_default_store

        return _get_default_store()

    @property
    def _name(self) -> str:
        return f"weights/{self.key}"

    @property
    def _failed(self) -> str:
        return f"{self._name}/failed"

    def _late(self, ranks: str, step: str) -> WeightSyncError:
        return WeightSyncError(
            f"the update to weight version {self.version} failed: step {step!r} was not reached within "
            f"{self.budget.seconds:.3g} s, the time limit of an update, by these train ranks: {ranks}. The errors of "
            "the other ranks, or the logs of these, say why"
        )

    def _arrived(self, keys: list[str], seconds: float) -> bool:
        """Wait for keys. Polls, because `Store.wait` would occupy the client that torch's own threads use.

        Raises:
            WeightSyncError: another rank has given the update up.
        """
        begun = looked = time.monotonic()
        longest = max(0.02, 2e-4 * self.ranks)  # the store serves all ranks from one thread
        while not self._store.check(keys):
            now = time.monotonic()
            if now - looked > 0.05:
                looked = now
                self.check()
            if now - begun > seconds:
                return False
            time.sleep(min(max(_FIRST_POLL_SECONDS, (now - begun) / 10), longest))
        return True


class Transport:
    """The sending half of a transport. One object per train rank, for all updates. Every rank calls every method, in
    the same order."""

    def prepare(self, update: Update) -> Any:
        """On rank 0, before anything is sent: return what all ranks must know of this update."""
        return None

    def begin(self, update: Update) -> None:
        """On every rank, after `prepare`, with the plan."""

    def transfer(
        self, update: Update, number: int, payloads: dict[int, Payload], headers: list[dict[int, Header]]
    ) -> None:
        """Transfer a round. The tensors of the payloads may be in use until the next call of `transfer` or `flush`.

        Args:
            update: the update.
            number: of the round.
            payloads: what this rank sends, by class.
            headers: of all payloads of the round, by train rank and class.

        Raises:
            Exception: it did not arrive, or an earlier round did not.
        """
        raise NotImplementedError

    def flush(self, update: Update) -> None:
        """Wait until everything has arrived that this rank transferred."""

    def finish(self, update: Update) -> None:
        """On rank 0, after all ranks have flushed and before ``finish_weights``."""

    def failed(self, update: Update) -> None:
        """On every rank: the update failed; drop what is unfinished."""

    def close(self) -> None:
        """Free what is kept between updates."""


def sync_error(what: str, error: BaseException) -> WeightSyncError:
    """Wrap any failure in a `WeightSyncError` that names its cause."""
    cause = error.__cause__ if isinstance(error.__cause__, WeightSyncError) else error
    kind = "" if isinstance(cause, SingleControllerError) else f"{type(cause).__name__}: "
    wrapped = WeightSyncError(f"{what}: {kind}{str(cause).partition(chr(10))[0]}")
    wrapped.__cause__ = error
    return wrapped
