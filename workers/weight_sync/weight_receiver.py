"""WeightReceiver: the rollout side of weight sync. `workers.weight_sync.sync_protocol` says how an update proceeds.

Lock: ``weights_lock`` protects the version, the update in progress and the engine's weights. The threads of
`workers.weight_sync.transports.peer_weights` hold it while they read or load a bucket, so an update that begins waits
for one bucket at most. The engine's own lock is taken inside it, never the other way round.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

from dispatch.modes import Dispatch
from dispatch.register import register
from single_controller.call.worker.worker import Worker
from workers.device import device_name, free_host_memory
from workers.weight_sync.buckets import BUCKET_BYTES, Pair, iter_buckets
from workers.weight_sync.sync_protocol import Finished, Message, ReceiverInfo, WeightSyncError, some
from workers.weight_sync.transports.peer_weights import PeerWeights
from workers.weight_sync.weight_plan import Box, volume, whole

if TYPE_CHECKING:
    import torch

    from workers.rollout.engines.rollout_engine import RolloutEngine
    from workers.weight_sync.pieces import Payload, PieceSpec

logger = logging.getLogger(__name__)


FINGERPRINTS = 64
"""Of how many versions a worker knows the fingerprints."""


@dataclass
class _Progress:
    """An update on the receiving side."""

    key: str
    version: int
    buffered: bool = False
    """Whether the engine learns of it only when it is complete."""
    failed: str = ""
    missing: dict[str, tuple[int, ...]] | None = None
    """Of a copy from another rollout worker: the tensors that have not come."""
    held: bool = False
    """Whether the engine knows of it, and generates nothing."""
    began: float = 0.0
    """When it was told; `time.monotonic`."""

    @property
    def copy(self) -> bool:
        """Whether it comes from another rollout worker."""
        return self.missing is not None


class WeightReceiver(Worker):
    """A worker whose ``engine`` receives weights. A subclass calls ``super().__init__()`` and sets ``engine``.

    An update begins, transfers pieces of tensors in any order and from any number of senders, and is finished. The
    worker has the version of the last finished update. With a double buffer, the engine continues with that version
    until the update has arrived, and then loads all of it at once; an update that fails before that changes nothing.
    Without a double buffer, and while the engine loads, the worker has no version until the update is finished.

    The worker calls the engine's ``begin_update`` at the beginning of an update, and ``finish_update`` at its end, or
    ``abandon_update`` when the update fails or another one begins.

    Attributes:
        receiver_id: `ReceiverInfo.id`.
        channels: process groups of the process-group transport, by name; it keeps them between updates.
        fingerprints: of the weights of the last `FINGERPRINTS` versions, by version, as far as the trainer has told.
        peer: gives this worker's weights to others of its group, and takes theirs.
        changes: counts what ends the copies that were begun before.
    """

    engine: RolloutEngine

    def __init__(self) -> None:
        super().__init__()
        self.receiver_id = uuid.uuid4().hex
        self.channels: dict[str, Any] = {}
        self.fingerprints: dict[int, int] = {}
        self._version: int | None = None
        from workers.weight_sync.arrivals import Arrivals  # imports torch, which a driver does without

        self._arrivals: Arrivals = Arrivals()
        self._base: str | None = None
        """Key of the update whose bytes `_arrivals` has."""
        self._update: _Progress | None = None
        self._sender = ""
        self.weights_lock = threading.RLock()
        self.changes = 0
        self.peer = PeerWeights(self)
        self._cleanups.append(self.peer.stop)

    @property
    def weight_version(self) -> int | None:
        """Version of the weights; None while the engine's weights change, after that has failed, and before the first
        update."""
        return self._version

    @weight_version.setter
    def weight_version(self, version: int | None) -> None:
        with self.weights_lock:
            self.peer.stop()
            self._give_up()
            # The engine's weights now have another source, so a delta against the buffered bytes would not fit.
            self._base = None
            update = _Progress("", version or 0)
            try:
                # Without a version, the engine was told before. By now it may sleep, and take no update.
                if version is not None or self.current_weight_version() is not None:
                    self._hold(update)
                if version is not None:  # complete weights that did not come as an update
                    self.engine.finish_update(version)
                    update.held = False
            finally:  # without weights, the engine's other requests, such as a gateway's, have to wait too
                self._abandon(update)
            if version is not None:
                self._remember(version, None)
            self._version = version

    @register(Dispatch.ONE_TO_ALL)
    def set_weight_version(self, version: int | None) -> None:
        """Set the version of weights that the engine got in another way, from a checkpoint for example. With None, the
        worker does not generate with them."""
        self.weight_version = version

    @register(Dispatch.ONE_TO_ALL)
    def current_weight_version(self) -> int | None:
        """Return `weight_version`, or None if the engine has lost its weights; on the driver, a list by rank."""
        return None if getattr(self.engine, "weight_version", 0) is None else self._version

    @register(Dispatch.ONE_TO_ALL)
    def begin_weights(self, key: str, version: int, sender: str, double_buffer: bool | None = None) -> ReceiverInfo:
        """Begin an update. An unfinished one is given up. If the sender is another one than before, this worker leaves
        the old sender's process groups.

        Args:
            key: of the update; calls with another key are rejected from now on.
            version: of the weights.
            sender: id of the sender, the same in all its updates.
            double_buffer: whether to keep the weights in force until the update is complete; None: if there is enough
                host memory.
        """
        with self.weights_lock:
            self.peer.stop()
            self._give_up()
            shapes, slices = dict(self.engine.weight_shapes()), self.engine.weight_slices()
            dtypes = self.engine.weight_dtypes()
            buffered = self._has_room(shapes, slices, dtypes) if double_buffer is None else double_buffer
            self._update = _Progress(key, version, buffered)
            self._arrivals.begin(shapes, slices, keep=buffered)
            # A delta contains only changes: the engine must have the rest, and the buffer the previous version.
            base = self._base if buffered and self.current_weight_version() is not None else None
            # From the first piece until the end of the update, the buffer holds a mixture of two versions.
            self._base = None
            if not buffered:
                self._hold(self._update)
        # Do not hold the lock here: only the worker's own methods use the channels, and leaving them may take time.
        if sender != self._sender:
            # Also a new id, so that no sender takes this worker for a member of a group that it has left.
            self._sender, self.receiver_id = sender, uuid.uuid4().hex
            while self.channels:
                self.channels.popitem()[1].leave()
        here = device_name(self.local_rank, self.device_ids)
        exact = getattr(self.engine, "exact_digest", None)
        return ReceiverInfo(self.rank, self.receiver_id, here, shapes, slices, dtypes, base, exact)

    @register(Dispatch.ONE_TO_ALL, inputs="view")
    def receive_payload(self, key: str, payload: Payload) -> None:
        """Take pieces from the object store: ``inputs="view"`` saves a copy.

        Raises:
            WeightSyncError: see `take`.
        """
        self.take(key, payload)

    @register(Dispatch.ALL_TO_ALL, inputs="view")
    def receive_payload_each(self, key: str, payload: Payload | None) -> None:
        """As `receive_payload`; on the driver with a list of payloads, by rank."""
        if payload is not None:
            self.take(key, payload)

    @register(Dispatch.ONE_TO_ALL)
    def receive_weights(self, key: str, message: Message) -> None:
        """Handle a transport's message.

        Raises:
            WeightSyncError: see `take`, and the message's ``receive``.
        """
        message.receive(self, key)

    @register(Dispatch.ONE_TO_ALL)
    def finish_weights(self, key: str, verify: str | None = None, fingerprint: int | None = None) -> Finished:
        """Load what has arrived, compare it with the digests that came with it, and take the version.

        Args:
            key: of the update.
            verify: "fingerprint" to compare what has changed, "full" to compare everything, None to compare nothing.
            fingerprint: of the weights.

        Raises:
            WeightSyncError: elements are missing, or the engine failed, or holds other bytes than were sent.
        """
        update = self.check_update(key)
        # As in `take`, do not acquire the lock here; callers of `finish_copy` hold it.
        missing = (update.missing if update.missing is not None else self._arrivals.missing).keys()
        if missing:
            self.fail_update(
                key, f"rollout rank {self.rank} did not get all of version {update.version}: {some(missing)}"
            )
        with self.weights_lock:
            self.changes += 1  # which ends copies of these weights
            if update.buffered:
                self._hold(update)
                self._load(update, self._arrivals.take(every=not self.engine.partial_updates), self.engine.load_weights)
            proved = None if verify is None else self._prove(update, every=verify == "full")
            # First: a completion that ends right after the update needs it.
            self._remember(update.version, fingerprint)
            with self._engine_does(update, "finish the update to"):
                self.engine.finish_update(update.version)
            # Set the version only now: if the engine has failed, the worker must have no version.
            self._version, self._update = update.version, None
            self._base = key if update.buffered else None
        for channel in self.channels.values():
            channel.release_memory()
        return Finished(time.monotonic() - update.began, proved)

    @register(Dispatch.ONE_TO_ALL)
    def abandon_weights(self, key: str, why: str) -> None:
        """The sender has given an update up.

        Args:
            key: of the update; another one goes on.
            why: for the error of whoever still sends something of it.
        """
        if self._update is not None and self._update.key == key:
            with contextlib.suppress(WeightSyncError):
                self.fail_update(key, why)

    def take(self, key: str, payload: Payload) -> None:
        """Take pieces of an update. Their memory belongs to the caller.

        Raises:
            WeightSyncError: they are of another update, are not expected, did not arrive as they were sent, or the
                engine failed. The update has failed then.
        """
        update = self.check_update(key)
        # Without `weights_lock`: only the worker's own methods come here, one at a time, and when the update began it
        # has ended all copies to and from other workers.
        try:
            self._arrivals.add(payload)
        except Exception as error:
            why = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
            self.fail_update(key, f"rollout rank {self.rank}, version {update.version}: {why}", error)
        if not update.buffered:
            self._load(update, self._arrivals.take(every=not self.engine.partial_updates), self.engine.load_weights)

    def load_raw(self, key: str, bucket: Sequence[Pair]) -> None:
        """Load another engine's raw weights, of a copy that `begin_copy` has begun.

        Raises:
            WeightSyncError: they are of another copy, or the engine failed. The copy has failed then.
        """
        update = self.check_update(key)
        for name, _ in bucket:
            if update.missing is None or update.missing.pop(name, None) is None:
                self.fail_update(key, f"rollout rank {self.rank}: {name!r} was not expected, or was received twice")
        self._load(update, bucket, self.engine.load_raw)

    def _load(self, update: _Progress, tensors: Iterable[Pair], load: Callable[[list[Pair]], None]) -> None:
        """Pass complete tensors to the engine, in buckets."""
        for bucket in iter_buckets(tensors, BUCKET_BYTES):
            with self._engine_does(update, "load weights of", f" ({some(name for name, _ in bucket)})"):
                load(bucket)

    @contextlib.contextmanager
    def _engine_does(self, update: _Progress, what: str, which: str = "", hint: str = "") -> Iterator[None]:
        """Inside, the engine is called. If it raises, the update fails."""
        try:
            yield
        except Exception as error:
            why = f"could not {what} version {update.version}{which}: {type(error).__name__}: {error}{hint}"
            self.fail_update(update.key, f"rollout rank {self.rank}: {type(self.engine).__name__} {why}", error)

    def _prove(self, update: _Progress, *, every: bool) -> str:
        """Compare what the engine holds with what was sent."""
        if self.engine.weight_dtypes() is None:
            return "received"  # compared when they arrived
        with self._engine_does(update, "read back weights of", hint=". verify='none' updates without proof"):
            differing = self._arrivals.differing(self.engine.read_weights, every=every)
        if differing:
            self.fail_update(
                update.key,
                f"rollout rank {self.rank}: {type(self.engine).__name__} does not hold what was sent as version "
                f"{update.version}: {len(differing)} tensors differ: {some(differing)}",
            )
        return "engine"

    def _remember(self, version: int, fingerprint: int | None) -> None:
        self.fingerprints.pop(version, None)
        if fingerprint is not None:
            self.fingerprints[version] = fingerprint
            while len(self.fingerprints) > FINGERPRINTS:
                del self.fingerprints[next(iter(self.fingerprints))]

    @property
    def proof(self) -> tuple[int | None, list[PieceSpec]]:
        """Fingerprint and digests of the weights in force, for a worker that copies them; nothing without ``verify``.
        The caller holds ``weights_lock``."""
        version = self._version if self._update is None else None  # or the pieces are those of another version
        fingerprint = None if version is None else self.fingerprints.get(version)
        return fingerprint, [] if fingerprint is None else self._arrivals.pieces

    def finish_copy(self, key: str, fingerprint: int | None, pieces: list[PieceSpec]) -> None:
        """Finish a copy: compare it with the `proof` of the worker that it comes from, and take the version.

        Raises:
            WeightSyncError: see `finish_weights`.
        """
        self._arrivals.pieces = pieces
        self.finish_weights(key, "full" if pieces else None, fingerprint)

    def _hold(self, update: _Progress) -> None:
        """The engine's weights are about to change."""
        self._version = None  # first: whatever fails from here on must not leave mixed weights
        update.began, update.held = time.monotonic(), True
        self.engine.begin_update()

    def _has_room(
        self, shapes: dict[str, tuple[int, ...]], slices: dict[str, Box], dtypes: dict[str, torch.dtype] | None
    ) -> bool:
        """Whether there is host memory for another copy of the weights, as far as they are sent to this worker."""
        counts = {name: volume(slices.get(name) or whole(shape)) for name, shape in shapes.items()}
        needed = sum(count * (dtypes[name].itemsize if dtypes else 4) for name, count in counts.items())
        # Other workers of this host ask at the same time.
        return needed - self._arrivals.nbytes < free_host_memory() / max(2, self.local_world_size)

    def begin_copy(self, key: str, version: int) -> None:
        """Begin an update from another rollout worker. The caller holds ``weights_lock``, as for what follows."""
        self._give_up()
        self._arrivals.begin(self.engine.weight_shapes(), self.engine.weight_slices(), keep=False)
        missing = {name: shape for name, (shape, _) in self.engine.raw_weights().items()}
        self._update = _Progress(key, version, missing=missing)
        self._base = None
        self._hold(self._update)

    def give_up_copy(self) -> None:
        """End an update from another rollout worker, if there is one. The caller holds ``weights_lock``."""
        if self._update is not None and self._update.copy:
            self._give_up()

    @property
    def updating(self) -> bool:
        """Whether an update is in progress that does not come from another rollout worker."""
        return self._update is not None and not self._update.copy and not self._update.failed

    def fail_update(self, key: str, why: str, cause: Exception | None = None) -> NoReturn:
        """Mark the update as failed, have the engine abandon it, and raise a `WeightSyncError`."""
        update = self._update
        if update is not None and update.key == key and not update.failed:
            update.failed = why
            self._abandon(update)
        raise WeightSyncError(why) from cause

    def _give_up(self) -> None:
        """End an update that was not finished."""
        update, self._update = self._update, None
        if update is not None and not update.failed:
            self._abandon(update)

    def _abandon(self, update: _Progress) -> None:
        if not update.held:
            return
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
