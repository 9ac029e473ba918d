"""Update: an update on the sending side, and what a transport does in it."""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

from single_controller import CallTimeoutError, WorkerError
from single_controller.call.future import WorkerFuture
from workers.weight_sync.pieces import Header, Payload
from workers.weight_sync.receiver_calls import Receivers
from workers.weight_sync.sync_protocol import (
    Budget,
    ReceiverClass,
    ReceiverInfo,
    TimeUpError,
    WeightSyncError,
    sync_error,
)
from workers.weight_sync.weight_plan import Round

if TYPE_CHECKING:
    import torch

TOLD_SECONDS = 0.25
"""How often whoever waits looks whether another train rank has given the update up."""

_GRACE_SECONDS = 1.0
"""How long rank 0 waits, after the time is up, for a rank that may know why; the others wait twice as long for what
rank 0 says of it."""

_FIRST_POLL_SECONDS = 0.0002

_PART_BYTES = 4 << 20
"""torch's store closes the connection of a client that sends it a value of more than 8 MiB."""


@dataclass
class Update:
    """An update on the sending side. One object per train rank.

    Attributes:
        version: of the weights.
        transport: its name.
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
    transport: str
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
    # Name in the store -> number of further parts, of what this rank has written there that nobody has deleted
    _written: dict[str, int] = field(default_factory=dict)
    _looked: float = 0.0

    @contextmanager
    def attempt(self, what: str | None = None) -> Iterator[None]:
        """Inside, this rank does its part of a step. If that fails, the update is given up at once: the others do not
        have to reach the end of the step. The error is that of the first rank that has given it up, and says ``what``,
        by default that the version was not sent."""
        try:
            yield
        except Exception as failed:
            error = self.give_up(self.error(failed) if what is None else sync_error(what, failed))
            raise error from error.__cause__

    def agree(self, step: str, value: Any = None, decide: Callable[[list[Any]], Any] | None = None) -> Any:
        """Have rank 0 collect a value from every rank, decide, and tell every rank. All ranks call it together.

        It uses the store in which the default process group made its rendezvous, and no collective: a collective
        cannot be given up, so a rank that is late or has failed would end the process by the collective's timeout.

        Args:
            step: what the value is about, for the errors.
            value: of this rank.
            decide: called on rank 0 with the values, by rank. Its result is for all ranks.

        Returns:
            What ``decide`` returned; None without it.

        Raises:
            WeightSyncError: on all ranks: the error of the first rank that failed, or that of ``decide``, or ranks were
                late.
        """
        # All ranks call this the same number of times, so their names are equal without an exchange.
        self._agreed += 1
        name = f"{self._name}/{self._agreed}"
        if self.rank:
            self._delete_written()  # of the step before, which rank 0 has read, and need not delete for all ranks
            self._write(f"{name}/{self.rank}", value)
            if not self._arrived([name], self.budget.remaining + 2 * _GRACE_SECONDS):
                raise self._late("0", step)
            return self._read([name])[0]
        keys = [f"{name}/{rank}" for rank in range(1, self.ranks)]
        try:
            if keys and not self._arrived(keys, self.budget.remaining + _GRACE_SECONDS):
                late = [rank for rank, key in enumerate(keys, 1) if not self._store.check([key])]
                raise self._late(", ".join(map(str, late)), step)
            values = [value, *(self._read(keys) if keys else ())]
            self._delete_written()  # everyone is here, so everyone has read the verdict before
            verdict = None if decide is None else decide(values)
        except Exception as failed:
            # That of a receiver's call is a WorkerError too, as which the driver would get it.
            named = isinstance(failed, WeightSyncError) and not isinstance(failed, (TimeUpError, WorkerError))
            error = cast(WeightSyncError, failed) if named else self.error(failed)
            raise self.give_up(error) from error.__cause__
        if self.ranks > 1:
            self._write(name, verdict)
        return verdict

    def give_each(self, values: Sequence[Any]) -> None:
        """On rank 0, in ``decide``: leave a value for each other rank, which `take_own` returns there afterwards."""
        for rank, value in enumerate(values[1:], 1):
            self._write(f"{self._name}/own/{rank}", value)

    def take_own(self) -> Any:
        """Return what `give_each` has left for this rank. Rank 0 deletes it when all ranks come to the next step."""
        return self._read([f"{self._name}/own/{self.rank}"])[0]

    def _write(self, name: str, value: Any) -> None:
        """Write a value into the store, for `_read`."""
        data = pickle.dumps(value, protocol=5)
        first, *others = (data[begin : begin + _PART_BYTES] for begin in range(0, len(data), _PART_BYTES))
        self._written[name] = len(others)
        for number, part in enumerate(others):
            self._store.set(_part(name, number), part)
        self._store.set(name, len(others).to_bytes(4, "big") + first)  # last: who finds it finds all

    def _read(self, names: list[str]) -> list[Any]:
        """Read values that have arrived."""
        values, store = [], self._store
        # Send one request for all keys, because the store answers requests one at a time.
        for name, data in zip(names, store.multi_get(names), strict=True):
            parts = [_part(name, number) for number in range(int.from_bytes(data[:4], "big"))]
            values.append(pickle.loads(b"".join([data[4:], *map(store.get, parts)])))
        return values

    def _delete_written(self) -> None:
        while self._written:
            name, others = self._written.popitem()
            for one in (name, *(_part(name, number) for number in range(others))):
                self._store.delete_key(one)

    def error(self, failed: BaseException) -> WeightSyncError:
        """Wrap what failed in a `WeightSyncError` that says of which update."""
        what = f"weight version {self.version} was not sent by transport {self.transport!r}"
        if not self.budget.remaining:
            what += (
                f" within {self.budget.seconds:g} s, the time limit of an update "
                "(update_weights_timeout_minutes, or timeout= of WeightSender)"
            )
        return sync_error(what, failed)

    def give_up(self, error: WeightSyncError) -> WeightSyncError:
        """Tell all train ranks that the update has failed.

        Returns:
            The error of the first rank that has given it up.
        """
        if self.ranks == 1:
            return error
        self._own_error = self._own_error or error
        # One operation: a rank that died between two would leave the others without an error to raise.
        return self._first_error(self._store.compare_set(self._failed, "", pickle.dumps(self._own_error)))

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
        """Delete what this rank has left of the update in the store. All ranks have ended it."""
        self._delete_written()
        if self.ranks > 1 and self.rank == 0:
            self._store.delete_key(self._failed)

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


def _part(name: str, number: int) -> str:
    """The name of a further part of a value in the store."""
    return f"{name}/part {number}"


class Transport:
    """The sending half of a transport. One object per train rank, for all updates. Every rank calls every method, in
    the same order.

    Attributes:
        needs_all_headers: whether `transfer` needs the headers of all ranks on each rank, and not on rank 0 alone.
        every_rank_calls: whether each rank calls the receivers, and not rank 0 alone.
    """

    needs_all_headers = every_rank_calls = False

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
            headers: of all payloads of the round, by train rank and class; {} for other ranks where nobody needs them.

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


def wait_all(futures: Sequence[WorkerFuture], update: Update) -> None:
    """Wait for calls, of several groups at the same time.

    Raises:
        SingleControllerError: the first error of a call.
        WeightSyncError: another train rank has given the update up.
    """
    # No sleep is needed, because `_ended` waits for `TOLD_SECONDS`.
    for future in futures:
        while not _ended(future):
            raise_failed(futures)  # this one may wait for a receiver of another group, which has died
            update.check()


def call_all(update: Update, method: str, *arguments: Any) -> list[Any]:
    """As `Receivers.call`, but a receiver that fails is not noticed only when the groups before its own have ended.

    Raises:
        SingleControllerError: see `wait_all`.
    """
    if update.receivers.neighbour is not None:
        return update.receivers.call(method, *arguments)
    futures = update.receivers.start(method, *arguments)
    wait_all(futures, update)
    return [result for future in futures for result in future.result()]


def raise_failed(futures: Sequence[WorkerFuture]) -> None:
    """Raise the error of a call that has already failed, without waiting."""
    for future in futures:
        error = future.exception() if future.done() else None
        if error is not None:
            raise error


def _ended(future: WorkerFuture) -> bool:
    try:
        future.result(timeout=TOLD_SECONDS)
    except CallTimeoutError as error:
        # This wait has timed out, not the call itself, which is still running.
        if not error.call_goes_on:
            raise
        return False
    return True
