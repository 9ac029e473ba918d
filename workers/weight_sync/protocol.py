"""What senders and receivers of weights agree on: versions, buckets, messages and errors.

An update has three steps:

1. *Begin.* Train rank 0 calls ``begin_weights`` on all receivers. From then on they have no weight version.
2. *Send.* Each train rank iterates over its (name, whole tensor) pairs and sends them in buckets. A `Transport` decides
   how. It calls ``receive_weights(key, message)`` on all receivers, and `Message.receive` loads the bucket there.
3. *Finish.* When all train ranks report that their buckets have arrived, rank 0 calls ``finish_weights``. A receiver
   that has every tensor of its engine takes the new version; otherwise the update fails.

The train ranks talk to each other in `Update.agree`. They have to agree, because producing the pairs involves
collectives: a rank whose receiver died must still iterate to its last pair, and then all ranks raise the same error.

Every update has a unique key. Receivers reject whatever carries the key of another update.

Time: an update has one `Budget`, which all phases share: calls to the receivers, waiting for a turn, rendezvous,
broadcasts, and waiting for the other ranks. It must be well below the timeout of the train ranks' collectives: a rank
that waits for a receiver makes the others wait in the collectives that produce the pairs.

Threads: an update runs in the thread that calls `WeightSender.send`, and in each receiver in the thread that runs its
methods; there are no locks. A receiver runs the calls of one train rank in order, but those of different train ranks in
any order.
"""

from __future__ import annotations

import contextlib
import math
import pickle
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import ray
import ray.actor
import ray.cloudpickle
import ray.exceptions

from single_controller import SingleControllerError
from single_controller.base.future import WorkerFuture
from single_controller.base.group import WorkerGroup

if TYPE_CHECKING:
    import torch

Pair = tuple[str, "torch.Tensor"]
"""A tensor's name as in the Hugging Face model's ``state_dict()``, and the whole tensor."""

BUCKET_BYTES = 64 << 20
_ALIGNMENT = 64

UPDATE_SECONDS = 300.0
"""Default time for an update: half of the default timeout of the train ranks' collectives."""

ALONE_SECONDS = 5.0
"""How long a rank that cannot produce its pairs waits for the other ranks to learn of it. They may be in a collective
that this rank will not join, and do not learn of it at all."""

_VERDICT_SECONDS = 5.0
"""How much longer than rank 0 the other ranks wait at most, for its verdict on ranks that are late."""

_FIRST_POLL_SECONDS = 0.0002


class WeightSyncError(SingleControllerError):
    """An update of rollout workers' weights failed. The workers have no weight version, and refuse to generate, until
    the next update succeeds."""


class OutOfStepError(WeightSyncError):
    """The train ranks are at different steps, or one of them cannot produce its pairs. A rank must not iterate over the
    rest of its own then: it would wait for the others in a collective."""


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
        return time.monotonic() >= self._end

    def left(self) -> float:
        """Return the seconds that are left.

        Raises:
            WeightSyncError: none are left.
        """
        left = self._end - time.monotonic()
        if left <= 0:
            raise WeightSyncError("the time limit of the update has passed")
        return math.ceil(left * 1000) / 1000  # up: what waits that long ends when no time is left

    def left_for_ranks(self) -> float:
        """Return the seconds to wait for other train ranks: half of the whole time more than `left`. Ranks whose time
        is up still iterate over the rest of their pairs, for the sake of the collectives in them."""
        return max(self._end - time.monotonic(), 0.0) + self.seconds / 2


# --- buckets --------------------------------------------------------------------------------------------


class TensorSpec(NamedTuple):
    """A tensor in a flat buffer.

    Attributes:
        name, dtype, shape: of the tensor.
        begin: its first byte.
        nbytes: its length in bytes.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    nbytes: int


def iter_buckets(pairs: Iterable[Pair], bucket_bytes: int) -> Iterator[list[Pair]]:
    """Group tensors, in order, into buckets of at most ``bucket_bytes``. A larger tensor gets a bucket of its own.

    A bucket is yielded as soon as it is full, so that few tensors are held at once. A tensor must not change until the
    bucket after its own is requested.
    """
    bucket: list[Pair] = []
    filled = 0
    for name, tensor in pairs:
        if bucket and filled + tensor.nbytes > bucket_bytes:
            yield bucket
            bucket, filled = [], 0
        bucket.append((name, tensor.detach()))
        filled += tensor.nbytes
    if bucket:
        yield bucket


def tensor_specs(bucket: Sequence[Pair]) -> tuple[list[TensorSpec], int]:
    """Lay out a bucket in a flat buffer. Returns the specs, aligned to 64 bytes, and the length of the buffer."""
    specs = []
    end = 0
    for name, tensor in bucket:
        specs.append(TensorSpec(name, tensor.dtype, tuple(tensor.shape), end, tensor.nbytes))
        end += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
    return specs, end


def views(flat: torch.Tensor, specs: Iterable[TensorSpec]) -> list[Pair]:
    """Return the tensors of a flat buffer (uint8, 1-d, on any device) as views."""
    found = []
    for spec in specs:
        chunk = flat[spec.begin : spec.begin + spec.nbytes]
        # An empty slice cannot be viewed as another dtype.
        tensor = (
            chunk.view(spec.dtype).view(spec.shape) if spec.nbytes else flat.new_empty(spec.shape, dtype=spec.dtype)
        )
        found.append((spec.name, tensor))
    return found


def copy_into(flat: torch.Tensor, specs: Sequence[TensorSpec], bucket: Sequence[Pair]) -> list[Pair]:
    """Copy a bucket into a flat buffer and wait for the copies. Returns the copies as views of the buffer."""
    import torch

    copies = views(flat, specs)
    with torch.no_grad():
        for (_, copy), (_, tensor) in zip(copies, bucket, strict=True):
            copy.copy_(tensor, non_blocking=True)
    for device in {tensor.device for _, tensor in bucket if tensor.is_cuda}:
        torch.cuda.synchronize(device)
    return copies


class FlatBuffer:
    """A flat buffer that is reused from bucket to bucket, and grows if a bucket needs more.

    Args:
        device: of the buffer.
        pinned: whether it is pinned host memory, which a CUDA device copies to and from directly.
    """

    def __init__(self, device: torch.device | str = "cpu", *, pinned: bool = False) -> None:
        self._device, self._pinned = device, pinned
        self._memory: torch.Tensor | None = None

    def take(self, nbytes: int) -> torch.Tensor:
        """Return that many bytes (uint8), valid until the next call."""
        import torch

        if self._memory is None or self._memory.numel() < nbytes:
            self._memory = None  # free the old buffer before the new one is allocated
            self._memory = torch.empty(nbytes, dtype=torch.uint8, device=self._device, pin_memory=self._pinned)
        return self._memory[:nbytes]

    def free(self) -> None:
        """Free the memory until the next `take`."""
        self._memory = None


# --- messages -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ReceiverInfo:
    """A receiver, as it introduces itself when an update begins.

    Attributes:
        rank: in its group.
        id: unique; changes with each restart, and when another sender takes over. A receiver with a new id is in no
            process group.
        device: device on which it can open other processes' memory: ``cuda:<uuid>``, or ``cpu:<host> <namespace>``.
    """

    rank: int
    id: str
    device: str


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
        shared: what `Transport.prepare` returned on rank 0.
    """

    version: int
    rank: int
    ranks: int
    receivers: Receivers
    budget: Budget
    key: str
    infos: list[ReceiverInfo] = field(default_factory=list)
    shared: Any = None
    _agreed: int = 0

    def agree(
        self,
        step: str,
        value: Any = None,
        error: WeightSyncError | None = None,
        decide: Callable[[list[Any]], Any] | None = None,
        *,
        seconds: float | None = None,
    ) -> Any:
        """Have rank 0 collect a value from every rank, decide, and tell every rank. All ranks call it together.

        It uses the store in which the default process group made its rendezvous, and no collective: a collective
        cannot be given up, so a rank that is late or has failed would end the process by the collective's timeout, and
        one that is in another collective would confuse the two.

        Args:
            step: what the value is about; all ranks must pass the same string.
            value: of this rank.
            error: what went wrong on this rank.
            decide: called on rank 0 with the values, by rank, if no rank has an error. Its result is for all ranks.
            seconds: how long to wait for the other ranks; by default, what the budget allows.

        Returns:
            What ``decide`` returned; None without it.

        Raises:
            WeightSyncError: on all ranks: the first rank's error, or that of ``decide``, or ranks were late.
            OutOfStepError: another rank is at another step.
        """
        if self.ranks == 1:
            if error is not None:
                raise error
            return None if decide is None else decide([value])
        from torch.distributed.distributed_c10d import _get_default_store

        store: Any = _get_default_store()  # its stubs say that values are str
        seconds = self.budget.left_for_ranks() if seconds is None else seconds
        self._agreed += 1
        name, own = self._verdict, (step, error, value)
        if self.rank == 0:
            verdict = self._decide(store, name, own, decide, seconds)
            store.set(name, pickle.dumps(verdict))
        else:
            store.set(f"{name}/{self.rank}", pickle.dumps(own))
            # Longer than rank 0, which finds out at the end of its wait which rank is late, and then says so here.
            if not self._arrived(store, [name], seconds + min(_VERDICT_SECONDS, 0.1 * seconds)):
                # The value stays in the store: a rank 0 that is only late finds this rank's error there.
                raise error or self._late("0", step, seconds)
            verdict = pickle.loads(store.get(name))
            store.delete_key(f"{name}/{self.rank}")
        failed, result = verdict
        if failed is not None:  # this rank's own error has its cause, which pickling drops
            raise error if error is not None and str(error) == str(failed) else failed
        return result

    def forget(self) -> None:
        """Delete what is left of the update in the store. All ranks have ended it."""
        if self.ranks > 1 and self.rank == 0 and self._agreed:
            from torch.distributed.distributed_c10d import _get_default_store

            _get_default_store().delete_key(self._verdict)

    @property
    def _verdict(self) -> str:
        return f"weights/{self.key}/{self._agreed}"

    def _decide(
        self, store: Any, name: str, own: Any, decide: Callable[[list[Any]], Any] | None, seconds: float
    ) -> tuple[WeightSyncError | None, Any]:
        """On rank 0: collect, and return what goes wrong and what was decided."""
        step, error, _ = own
        keys = [f"{name}/{rank}" for rank in range(1, self.ranks)]
        if not self._arrived(store, keys, seconds):
            late = [rank for rank, key in enumerate(keys, 1) if not store.check([key])]
            return error or self._late(", ".join(map(str, late)), step, seconds), None
        gathered = [own, *(pickle.loads(value) for value in store.multi_get(keys))]
        if self._agreed > 1:  # everyone is here, so everyone has read the verdict before
            store.delete_key(f"weights/{self.key}/{self._agreed - 1}")
        steps = [other for other, _, _ in gathered]
        errors = [one for _, one, _ in gathered if one is not None]
        if errors:
            return errors[0], None
        if len(set(steps)) > 1:
            return OutOfStepError(
                f"the train ranks are at different steps of the weight update, by rank: {', '.join(steps)}. Call "
                "send() on all ranks. If sender.everywhere is True, pass all weights on each rank, in the same order"
            ), None
        try:
            return None, None if decide is None else decide([value for _, _, value in gathered])
        except WeightSyncError as failed:
            return failed, None
        except Exception as failed:  # the other ranks must learn of this one, too
            return sync_error(f"train rank 0 failed in the step {step!r}", failed), None

    def _late(self, ranks: str, step: str, seconds: float) -> WeightSyncError:
        return WeightSyncError(
            f"the update to weight version {self.version} failed: step {step!r} was not reached within "
            f"{seconds:.3g} s by these train ranks: {ranks}. The errors of the other ranks, or the "
            "logs of these, say why"
        )

    def _arrived(self, store: Any, keys: list[str], seconds: float) -> bool:
        """Wait for keys. Polls, because `Store.wait` would occupy the client that torch's own threads use."""
        begun = time.monotonic()
        longest = max(0.02, 2e-4 * self.ranks)  # the store serves all ranks from one thread
        while not store.check(keys):
            waited = time.monotonic() - begun
            if waited > seconds:
                return False
            time.sleep(min(max(_FIRST_POLL_SECONDS, waited / 10), longest))
        return True


class Transport:
    """The sending half of a transport. One object per train rank, for all updates.

    Attributes:
        everywhere: whether every rank needs every pair.
    """

    everywhere = False

    def prepare(self, update: Update) -> Any:
        """On rank 0, before anything is sent: return what all ranks must know of this update."""
        return None

    def begin(self, update: Update) -> None:
        """On every rank, after `prepare`."""

    def send(self, update: Update, bucket: Sequence[Pair]) -> None:
        """Send a bucket. It may still be in flight on return, but its tensors are no longer needed.

        Raises:
            Exception: it did not arrive, or an earlier bucket did not.
        """
        raise NotImplementedError

    def flush(self, update: Update) -> Any:
        """Wait until everything that this rank sent has arrived. Returns what `finish` needs from this rank."""
        return None

    def finish(self, update: Update, flushed: list[Any]) -> None:
        """On rank 0, after all ranks have flushed and before ``finish_weights``.

        Args:
            update: the update.
            flushed: return values of `flush`, by rank.
        """

    def failed(self, update: Update) -> None:
        """On every rank: the update failed; drop what is unfinished."""

    def close(self) -> None:
        """Free what is kept between updates."""


Rollout = Any
"""A group of `WeightReceiver`, a list of groups, or an object that knows them: see `receiver_groups`."""


class Receivers:
    """Calls all rollout workers.

    Args:
        rollout: see `receiver_groups`; looked up again for each update.
        neighbour: the `WeightReceiver` in this process, instead of groups. It is called directly: this process is busy
            with the caller's method, so a call through Ray would deadlock.
    """

    def __init__(self, rollout: Rollout, neighbour: Any = None) -> None:
        self._rollout = rollout
        self._budget = Budget(UPDATE_SECONDS)
        self.neighbour = neighbour
        self._groups: list[WorkerGroup] = []
        self._copies: dict[int, tuple[WorkerGroup, WorkerGroup]] = {}

    def look_up(self, budget: Budget) -> None:
        """Find the current groups.

        Args:
            budget: the time for this and for all calls until it is called again.

        Raises:
            TypeError: ``rollout`` cannot receive weights.
            WeightSyncError: there is no receiver, or the manager did not respond.
        """
        self._budget = budget
        if self.neighbour is not None:
            return
        self._groups = [self._usable(group) for group in receiver_groups(self._rollout, budget.left())]
        if not self._groups:
            raise WeightSyncError("there is no rollout worker to send weights to")

    def start(self, method: str, *arguments: Any) -> list[WorkerFuture]:
        """Call a method on all receivers without waiting. Returns one future per group.

        Raises:
            WeightSyncError: there is no time left.
        """
        left = self._budget.left()
        return [getattr(group.methods, method).options(timeout=left).remote(*arguments) for group in self._groups]

    def call(self, method: str, *arguments: Any) -> list[Any]:
        """Call a method on all receivers and wait. Returns the results in order of group and rank.

        Raises:
            SingleControllerError: as a group's methods raise.
        """
        if self.neighbour is not None:
            return [getattr(self.neighbour, method)(*arguments)]
        return [result for future in self.start(method, *arguments) for result in future.result()]

    def _usable(self, group: WorkerGroup) -> WorkerGroup:
        """Replace a broken attached group by a fresh copy. "Broken" is this process's state of the group; the process
        that started the group may have restarted its workers since."""
        original, current = self._copies.get(id(group), (group, group))
        if original is not group:
            current = group
        if current.broken is not None and getattr(current, "resource_pool", None) is None:
            with contextlib.suppress(TypeError):  # an in-process group does not pickle, and stays as it is
                current = pickle.loads(ray.cloudpickle.dumps(current))
            self._copies[id(group)] = (group, current)  # the group itself is kept, so that its id stays taken
        return current


def receiver_groups(rollout: Rollout, timeout: float) -> list[WorkerGroup]:
    """Resolve ``rollout`` to worker groups.

    Args:
        rollout: a group; a list of groups; a function that returns one of these; or a manager: an object with
            ``group``, or a Ray actor with ``weight_receivers()``.
        timeout: seconds that all such actors together have to respond.

    Raises:
        TypeError: it is none of these.
        WeightSyncError: see `call_manager`.
    """
    return _receiver_groups(rollout, Budget(timeout))


def _receiver_groups(rollout: Rollout, budget: Budget) -> list[WorkerGroup]:
    if isinstance(rollout, WorkerGroup):
        return [rollout]
    if isinstance(rollout, (list, tuple)):
        return [group for one in rollout for group in _receiver_groups(one, budget)]
    if isinstance(rollout, ray.actor.ActorHandle):
        return _receiver_groups(call_manager(rollout, "weight_receivers", timeout=budget.left()), budget)
    if isinstance(getattr(rollout, "group", None), WorkerGroup):
        return [rollout.group]
    if callable(rollout):
        return _receiver_groups(rollout(), budget)
    raise TypeError(
        "rollout must be a group of rollout workers, a list of groups, a function that returns them, or a manager with "
        f"a `group`; got {rollout!r}"
    )


def call_manager(manager: ray.actor.ActorHandle, method: str, *arguments: Any, timeout: float) -> Any:
    """Call a method of a manager that is a Ray actor, and return its result.

    Raises:
        WeightSyncError: it did not respond within ``timeout`` seconds, or has died.
        Exception: what its method raised.
    """
    try:
        return ray.get(getattr(manager, method).remote(*arguments), timeout=timeout)
    except ray.exceptions.GetTimeoutError as error:
        raise WeightSyncError(
            f"the rollout manager {manager!r} did not answer {method}() within {timeout:g} s. It is probably busy in "
            "generate(), in its constructor, or in the method that called update_weights(). Call update_weights() "
            "outside the manager, after generate() has returned"
        ) from error
    except ray.exceptions.RayActorError as error:
        raise WeightSyncError(
            f"{method}() of the rollout manager {manager!r} failed: {str(error).partition(chr(10))[0]} If the "
            "manager has died, create a new one and pass it to set_rollout_manager()"
        ) from error


def wait_all(futures: Sequence[WorkerFuture]) -> None:
    """Wait for calls without results.

    Raises:
        SingleControllerError: the first error.
    """
    for future in futures:
        future.result()


def sync_error(what: str, error: BaseException, cls: type[WeightSyncError] = WeightSyncError) -> WeightSyncError:
    """Wrap any failure in a `WeightSyncError`, or a subclass, that names its cause."""
    cause = error.__cause__ if isinstance(error.__cause__, WeightSyncError) else error
    kind = "" if isinstance(cause, SingleControllerError) else f"{type(cause).__name__}: "
    wrapped = cls(f"{what}: {kind}{str(cause).partition(chr(10))[0]}")
    wrapped.__cause__ = error
    return wrapped
