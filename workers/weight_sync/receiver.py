"""WeightReceiver: the rollout side of weight sync. `workers.weight_sync.protocol` says how an update proceeds.

Lock: ``weights_lock`` protects the version, the update in progress and the engine's weights. The threads of
`workers.weight_sync.peer` hold it while they read or load a bucket, so an update that begins waits for one bucket at
most. The engine's own lock is taken inside it, never the other way round.
"""

from __future__ import annotations

import logging
import threading
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

from dispatch.modes import Dispatch
from dispatch.register import register
from single_controller.base.worker import Worker
from workers.weight_sync.peer import PeerWeights
from workers.weight_sync.protocol import Message, Pair, ReceiverInfo, WeightSyncError

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)


class Engine(Protocol):
    """What a receiver needs of its engine; `RolloutEngine` has it."""

    def load_weights(self, weights: Iterable[Pair]) -> None: ...

    def weight_shapes(self) -> dict[str, tuple[int, ...]]: ...

    def begin_update(self) -> None: ...

    def finish_update(self, version: int) -> None: ...

    def abandon_update(self) -> None: ...

    def raw_weights(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]: ...

    def read_raw(self, names: Sequence[str]) -> list[torch.Tensor]: ...

    def load_raw(self, weights: Sequence[Pair]) -> None: ...


@dataclass
class _Progress:
    """An update on the receiving side."""

    key: str
    version: int
    missing: dict[str, tuple[int, ...]]
    arrived: set[str] = field(default_factory=set)
    failed: str = ""
    copy: bool = False
    """Whether it comes from another rollout worker."""


class WeightReceiver(Worker):
    """A worker whose ``engine`` takes weights. A subclass calls ``super().__init__()`` and sets ``engine``.

    An update begins, brings buckets in any order and from any number of senders, and is finished. The worker has the
    version of the last finished update. During an update, and after a failed one, it has none. The engine is told of
    the beginning and of the end: ``finish_update``, or ``abandon_update`` when the update fails or another one begins.

    Attributes:
        receiver_id: `ReceiverInfo.id`.
        channels: by sender rank, what the process-group transport keeps between updates.
        peer: gives this worker's weights to others of its group, and takes theirs.
        changes: counts what ends the copies that were begun before.
    """

    engine: Engine

    def __init__(self) -> None:
        super().__init__()
        self.receiver_id = uuid.uuid4().hex
        self.channels: dict[int, Any] = {}
        self._version: int | None = None
        self._update: _Progress | None = None
        self._sender = ""
        self.weights_lock = threading.RLock()
        self.changes = 0
        self.peer = PeerWeights(self)
        self._cleanups.append(self.peer.stop)

    @property
    def weight_version(self) -> int | None:
        """Version of the weights; None during an update, after a failed one, and before the first."""
        return self._version

    @weight_version.setter
    def weight_version(self, version: int | None) -> None:
        with self.weights_lock:
            self.peer.stop()
            self._give_up()
            if version is not None:  # complete weights that did not come as an update
                self.engine.begin_update()
                self.engine.finish_update(version)
            self._version = version

    @register(Dispatch.ONE_TO_ALL)
    def set_weight_version(self, version: int | None) -> None:
        """Set the version of weights that the engine got in another way, from a checkpoint for example. With None, the
        worker does not generate with them."""
        self.weight_version = version

    @register(Dispatch.ONE_TO_ALL)
    def current_weight_version(self) -> int | None:
        """Return `weight_version`; on the driver, a list by rank."""
        return self._version

    @register(Dispatch.ONE_TO_ALL)
    def begin_weights(self, key: str, version: int, sender: str) -> ReceiverInfo:
        """Begin an update. An unfinished one is given up. If the sender is another one than before, this worker leaves
        the old sender's process groups.

        Args:
            key: of the update; calls with another key are rejected from now on.
            version: of the weights.
            sender: id of the sender, the same in all its updates.
        """
        from workers.weight_sync.device import device_name

        with self.weights_lock:
            self.peer.stop()
            self._begin(key, version)
        if sender != self._sender:
            # Also a new id, so that no sender takes this worker for a member of a group that it has left.
            self._sender, self.receiver_id = sender, uuid.uuid4().hex
            while self.channels:
                self.channels.popitem()[1].leave()
        return ReceiverInfo(self.rank, self.receiver_id, device_name(self.local_rank, self.device_ids))

    @register(Dispatch.ONE_TO_ALL, inputs="view")
    def receive_bucket(self, key: str, bucket: dict[str, torch.Tensor]) -> None:
        """Load a bucket from the object store, in place: ``inputs="view"`` saves a copy.

        Raises:
            WeightSyncError: see `load_bucket`.
        """
        self.load_bucket(key, list(bucket.items()))

    @register(Dispatch.ONE_TO_ALL)
    def receive_weights(self, key: str, message: Message) -> None:
        """Handle a transport's message.

        Raises:
            WeightSyncError: see `load_bucket`, and the message's ``receive``.
        """
        message.receive(self, key)

    @register(Dispatch.ONE_TO_ALL)
    def finish_weights(self, key: str) -> None:
        """Finish an update and take its version.

        Raises:
            WeightSyncError: tensors are missing.
        """
        update = self.check_update(key)
        if update.missing:
            self.fail_update(
                key,
                f"rollout rank {self.rank} did not get {len(update.missing)} of "
                f"{len(update.missing) + len(update.arrived)} tensors of version {update.version}: "
                f"{_some(update.missing)}",
            )
        try:
            self.engine.finish_update(update.version)
        except Exception as error:
            self.fail_update(
                key,
                f"rollout rank {self.rank}: {type(self.engine).__name__} could not finish the update to version "
                f"{update.version}: {type(error).__name__}: {error}",
                error,
            )
        self._version, self._update = update.version, None
        for channel in self.channels.values():
            channel.release_memory()

    def load_bucket(self, key: str, bucket: Sequence[Pair], *, raw: bool = False) -> None:
        """Pass tensors to the engine, which copies them.

        Args:
            key: of the update.
            bucket: names and whole tensors.
            raw: whether they are another engine's raw weights.

        Raises:
            WeightSyncError: the bucket is of another update, the engine has no such tensor or has another shape, a
                tensor came a second time, or the engine failed. The update has failed then.
        """
        update = self.check_update(key)
        for name, tensor in bucket:
            why = _fault(update, name, tensor)
            if why is not None:
                self.fail_update(key, f"rollout rank {self.rank}, version {update.version}: {why}")
            del update.missing[name]
            update.arrived.add(name)
        try:
            (self.engine.load_raw if raw else self.engine.load_weights)(bucket)
        except Exception as error:
            self.fail_update(
                key,
                f"rollout rank {self.rank}: {type(self.engine).__name__} could not load weights of version "
                f"{update.version} ({_some(name for name, _ in bucket)}): {type(error).__name__}: {error}",
                error,
            )

    def begin_copy(self, key: str, version: int) -> None:
        """Begin an update from another rollout worker. The caller holds ``weights_lock``, as for what follows."""
        self._begin(key, version, copy=True)

    def give_up_copy(self) -> None:
        """End an update from another rollout worker, if there is one. The caller holds ``weights_lock``."""
        if self._update is not None and self._update.copy:
            self._give_up()

    @property
    def updating(self) -> bool:
        """Whether an update is in progress that does not come from another rollout worker."""
        return self._update is not None and not self._update.copy and not self._update.failed

    def _begin(self, key: str, version: int, *, copy: bool = False) -> None:
        self._version = None  # first: whatever fails from here on, the worker must not generate with mixed weights
        self._give_up()
        if copy:
            shapes = {name: shape for name, (shape, _) in self.engine.raw_weights().items()}
        else:
            shapes = dict(self.engine.weight_shapes())
        self.engine.begin_update()
        self._update = _Progress(key, version, shapes, copy=copy)

    def fail_update(self, key: str, why: str, cause: Exception | None = None) -> NoReturn:
        """Mark the update as failed, have the engine abandon it, and raise a `WeightSyncError`."""
        if self._update is not None and self._update.key == key and not self._update.failed:
            self._update.failed = why
            self._abandon()
        raise WeightSyncError(why) from cause

    def _give_up(self) -> None:
        """End an update that was not finished."""
        update, self._update = self._update, None
        if update is not None and not update.failed:
            self._abandon()

    def _abandon(self) -> None:
        try:
            self.engine.abandon_update()
        except Exception:  # the reason why it is abandoned matters more
            logger.warning("%s.abandon_update() failed", type(self.engine).__name__, exc_info=True)

    def check_update(self, key: str) -> _Progress:
        """Return the update in progress; raise a `WeightSyncError` if it is another one or has failed."""
        if self._update is None or self._update.key != key:
            now = "no update is in progress" if self._update is None else "a later update has begun"
            raise WeightSyncError(
                f"rollout rank {self.rank} received a message of an update that is not in progress there: {now}. The "
                "worker was restarted, or its weight version was set, during the update. Call update_weights() again"
            )
        if self._update.failed:  # every sender must learn the cause, not only the one that met it
            raise WeightSyncError(self._update.failed)
        return self._update


def _fault(update: _Progress, name: str, tensor: torch.Tensor) -> str | None:
    import torch

    if name in update.arrived:
        return f"{name!r} was received twice; exactly one rank must send each tensor, once"
    shape = update.missing.get(name)
    if shape is None:
        return f"the engine has no weight {name!r}; not yet received of its weight_shapes(): {_some(update.missing)}"
    if tuple(tensor.shape) != tuple(shape):
        return f"{name!r} has shape {tuple(tensor.shape)}; the engine expects {tuple(shape)}"
    if not torch.can_cast(tensor.dtype, torch.float32):
        return f"{name!r} has dtype {tensor.dtype}; expected real numbers"
    return None


def _some(names: Iterable[str]) -> str:
    listed = list(names)
    return ", ".join(listed[:5]) + (f" and {len(listed) - 5} more" if len(listed) > 5 else "") or "nothing"
