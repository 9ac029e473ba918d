"""What senders and receivers of weights agree on: the steps of an update, messages, time and errors.

An update has these steps. docs/internals/weight-sync.md has the states of a receiver, and what happens at a failure.

1. *Begin.* Train rank 0 calls ``begin_weights`` on all receivers, which answer with what they hold. The train ranks
   tell rank 0 what they have. Rank 0 makes the plan (`workers.weight_sync.weight_plan`), or finds that the last one
   fits.
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
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from single_controller import SingleControllerError
from workers.weight_sync.weight_plan import Box

if TYPE_CHECKING:
    import torch


Verify = Literal["fingerprint", "full", "none"]
"""What rollout workers prove before they take new weights."""

UPDATE_SECONDS = 300.0
"""Default time for an update: half of the default timeout of the train ranks' collectives."""


class WeightSyncError(SingleControllerError):
    """An update of rollout workers' weights failed. Each of the workers has the complete weights of the version before,
    or of this one if it had just finished, or has no version and refuses to generate until an update succeeds."""


class TimeUpError(WeightSyncError):
    """No time is left. The error of the update names its time limit."""


class Budget:
    """The time, in seconds, that all phases of an update share. It begins when the object is created."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._end = time.monotonic() + seconds

    @property
    def remaining(self) -> float:
        """Seconds that are left, 0 if none are."""
        return max(self._end - time.monotonic(), 0.0)

    def left(self) -> float:
        """Return the seconds that are left, rounded up: what waits that long ends when no time is left. If none are,
        raise a `WeightSyncError`."""
        left = self.remaining
        if not left:
            raise TimeUpError("the time limit of the update has passed")
        return math.ceil(left * 1000) / 1000


# --- messages -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ReceiverInfo:
    """A receiver, as it introduces itself when an update begins.

    Attributes:
        rank: in its group.
        id: unique; changes with each restart, and when another sender takes over. A receiver with a new id is in no
            process group.
        device: device on which it can open other processes' memory: ``<type>:<uuid>``, or ``cpu:<host> <namespace>``.
        shapes: of the whole tensors that its engine needs, by name.
        slices: the parts that it needs of some of them; it needs the others whole.
        dtypes: in which the engine holds them, by name; None if the engine does not tell.
        base: key of the update whose bytes it has in host memory; None if it has none.
        exact: `RolloutEngine.exact_digest` of its engine.
    """

    rank: int
    id: str
    device: str
    shapes: dict[str, tuple[int, ...]]
    slices: dict[str, Box]
    dtypes: dict[str, torch.dtype] | None
    base: str | None
    exact: str | None = None


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
        """Have a `WeightReceiver` take the message of an update; a `WeightSyncError` if the weights were not loaded."""
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


def sync_error(what: str, error: BaseException) -> WeightSyncError:
    """Wrap any failure in a `WeightSyncError` that names its cause."""
    cause = error.__cause__ if isinstance(error.__cause__, WeightSyncError) else error
    kind = "" if isinstance(cause, SingleControllerError) else f"{type(cause).__name__}: "
    wrapped = WeightSyncError(f"{what}: {kind}{str(cause).partition(chr(10))[0]}")
    wrapped.__cause__ = error
    return wrapped


def some(names: Iterable[str]) -> str:
    """List the first of some names, for an error."""
    listed = list(names)
    return ", ".join(listed[:5]) + (f" and {len(listed) - 5} more" if len(listed) > 5 else "") or "nothing"
