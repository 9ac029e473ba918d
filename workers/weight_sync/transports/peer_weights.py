"""Weights from one rollout worker to another of its group, for a worker that was started in the place of one that died.

Neither the trainer nor the driver's memory takes part. The worker that needs weights listens, and says so in its report
(`WeightRequest`). The stream's router passes that on to a worker that has the version, which sends what its engine has
made of the weights (`RolloutEngine.raw_weights`) in buckets, one after the other (`workers.blocks`). The first bucket
begins an update of the receiving worker, and the last one finishes it: until then it has no weight version. A copy that
is cut off is begun again with another sender.

Threads: each copy has one on the sending side, "weights-send", which ends when the copy is complete, refused or
stopped. On the receiving side the `StreamListener` has one for each bucket, which ends with it. Both take the worker's
``weights_lock`` for a bucket at a time, and never while they wait for the network.
"""

from __future__ import annotations

import hashlib
import logging
import threading
import time
import uuid
from typing import TYPE_CHECKING, Any, NamedTuple

from workers.device import has_accelerator, host_memory
from workers.distributed import node_address
from workers.weight_sync.buckets import (
    BUCKET_BYTES,
    FlatBuffer,
    TensorSpec,
    copy_into,
    iter_buckets,
    tensor_specs,
    views,
)
from workers.weight_sync.sync_protocol import WeightSyncError

if TYPE_CHECKING:
    import torch

    from single_controller.wire.handshake import WireAddress
    from single_controller.wire.stream import StreamListener
    from workers.blocks import Block
    from workers.rollout.engines.rollout_engine import RolloutEngine

logger = logging.getLogger(__name__)

BUCKET_SECONDS = 60.0
"""How long one bucket may be on its way."""


class WeightRequest(NamedTuple):
    """What a worker needs.

    Attributes:
        id: unique; the same until it has the weights or does not need them any more.
        rank: of the worker.
        version: of the weights.
        address: where it listens.
    """

    id: str
    rank: int
    version: int
    address: WireAddress


class PeerWeights:
    """Both sides, for one worker, a `WeightReceiver`. Methods are called in the thread of the worker's methods."""

    def __init__(self, receiver: Any) -> None:
        self._receiver = receiver
        self._sending: set[str] = set()
        """Ids of the requests that are being served. A set's operations are atomic; no lock."""
        # The rest is of the receiving side, and protected by the receiver's `weights_lock`.
        self._server: StreamListener | None = None
        self._request: WeightRequest | None = None
        self._buckets: list[list[TensorSpec]] = []
        self._layout = ""
        self._key, self._next = "", 0
        """The copy that is arriving, and its next bucket."""
        self._given_up: int | None = None
        """A version that could not be loaded."""

    @property
    def sending(self) -> list[str]:
        """The ids of the requests that this worker is serving."""
        return list(self._sending)

    def stop(self) -> None:
        """End all copies from and to this worker. What has arrived of an incomplete one is not used."""
        receiver = self._receiver
        with receiver.weights_lock:
            receiver.changes += 1  # ends the threads that send
            receiver.give_up_copy()
            self._close()

    def _close(self) -> None:
        server, self._server, self._request, self._key = self._server, None, None, ""
        # close() must not wait for the listener's threads: this may be one of them, and others may wait for the lock.
        if server is not None:
            server.close()

    # --- receiving ----------------------------------------------------------------------------------------------------

    def want(self, version: int | None) -> WeightRequest | None:
        """Listen for the weights of a version, and return the request; None if the worker has them, or its engine
        cannot take weights of another one."""
        from workers.blocks import receive_blocks

        receiver, request = self._receiver, self._request
        has_it = receiver.weight_version == version
        if has_it if request is None else request.version == version and not has_it:
            return request  # without the lock: a bucket may just be read or loaded, and the driver waits for this call
        with receiver.weights_lock:
            if version is None or receiver.updating or version in (receiver.weight_version, self._given_up):
                self._close()
            elif self._request is None or self._request.version != version:
                self._close()
                self._buckets, self._layout = _plan(receiver.engine)
                if self._buckets:
                    self._server = receive_blocks(node_address(), self._allocate, self._keep, "bucket of weights")
                    self._request = WeightRequest(uuid.uuid4().hex, receiver.rank, version, self._server.address)
            return self._request

    def _allocate(self, header: dict[str, Any]) -> torch.Tensor | None:
        """In a thread of the server."""
        with self._receiver.weights_lock:
            return host_memory(header["nbytes"], pinned=False) if self._expects(header) else None

    def _expects(self, header: dict[str, Any]) -> bool:
        request, index = self._request, header["index"]
        if request is None or header["id"] != request.id or header["layout"] != self._layout:
            return False
        # The beginning of a copy ends the one before, whose sender has died, or is too slow.
        return index == 0 or (header["key"], index) == (self._key, self._next)

    def _keep(self, block: Block) -> None:
        """In a thread of the server: load a bucket."""
        import torch

        from workers.weight_sync.pieces import WHOLE, PieceSpec

        receiver, header = self._receiver, block.header
        # torch keeps the current device per thread, and each bucket has a separate thread.
        receiver._prepare_thread()
        with receiver.weights_lock:
            request = self._request
            # Again: the lock was free while the bucket was arriving, so an update or another copy may have begun.
            if request is None or not self._expects(header):
                raise ConnectionAbortedError("nobody needs it any more")
            try:
                if not header["index"]:
                    self._key, self._next = header["key"], 0
                    receiver.begin_copy(self._key, request.version)
                receiver.load_raw(self._key, views(block.memory, self._buckets[self._next]))
                self._next += 1
                if self._next == len(self._buckets):
                    pieces = [
                        PieceSpec(name, tuple(map(tuple, box)), WHOLE, getattr(torch, dtype), tuple(digests))
                        for name, box, dtype, digests in header["pieces"]
                    ]
                    receiver.finish_copy(self._key, header["fingerprint"], pieces)
                    self._close()
            except Exception as error:  # of the engine: another copy would fail in the same way
                receiver.give_up_copy()
                self._given_up = request.version
                self._close()
                raise ConnectionAbortedError(f"it could not be loaded: {error}") from error

    # --- sending ------------------------------------------------------------------------------------------------------

    def send(self, request: WeightRequest) -> None:
        """Begin to send, unless that has begun before."""
        receiver = self._receiver
        if request.id in self._sending or receiver.weight_version != request.version:
            return
        # Add the id before the thread starts, because the thread removes it.
        self._sending.add(request.id)
        # The count as of now, in the thread that also ends copies: the new thread may begin only after an update has.
        arguments = request, receiver.changes
        try:
            threading.Thread(target=self._send, args=arguments, name="weights-send", daemon=True).start()
        except RuntimeError as error:  # there are too many threads; the router asks again
            self._sending.discard(request.id)
            logger.warning("rollout rank %d cannot send its weights to rank %d: %s", receiver.rank, request.rank, error)

    def _send(self, request: WeightRequest, changes: int) -> None:
        from workers.blocks import send_block

        receiver, begun = self._receiver, time.monotonic()
        buffer, sent = FlatBuffer(pinned=has_accelerator()), 0
        key = uuid.uuid4().hex
        try:
            receiver._prepare_thread()
            with receiver.weights_lock:
                _check(receiver, changes)
                # The receiver computes its own plan, and compares it by means of `layout`.
                buckets, layout = _plan(receiver.engine)
                fingerprint, pieces = receiver.proof
            for index, specs in enumerate(buckets):
                nbytes = specs[-1].begin + specs[-1].nbytes
                # The receiver has acknowledged the last bucket, so the buffer can be reused.
                memory = buffer.take(nbytes)
                with receiver.weights_lock:
                    _check(receiver, changes)
                    copy_into(memory, specs, receiver.engine.read_raw([spec.name for spec in specs]))
                header = {"id": request.id, "key": key, "index": index, "layout": layout, "nbytes": nbytes}
                if index == len(buckets) - 1:
                    header["fingerprint"] = fingerprint
                    header["pieces"] = [
                        (one.name, one.box, str(one.dtype).removeprefix("torch."), one.digests) for one in pieces
                    ]
                # Do not hold the lock here: an update must not wait for the network of another worker.
                send_block(request.address, header, memory, time.monotonic() + BUCKET_SECONDS)
                sent += nbytes
        except Exception as error:  # the router asks again
            logger.warning(
                "rollout rank %d did not send its weights to rank %d: %s: %s",
                receiver.rank,
                request.rank,
                type(error).__name__,
                error,
            )
        else:
            seconds = time.monotonic() - begun
            logger.info(
                "rank %d has sent %.3g GB to rank %d in %.3g s", receiver.rank, sent / 1e9, request.rank, seconds
            )
        finally:
            self._sending.discard(request.id)


def _check(receiver: Any, changes: int) -> None:
    if receiver.changes != changes:
        raise WeightSyncError("its own weights have changed, or are about to")


def _plan(engine: RolloutEngine) -> tuple[list[list[TensorSpec]], str]:
    """Divide an engine's raw weights into buckets. Returns their tensors, and a hash of all of them and of the parts
    of the model that they are, which must be the same for sender and receiver."""
    import torch

    weights = engine.raw_weights().items()
    pairs = ((name, torch.empty(shape, dtype=dtype, device="meta")) for name, (shape, dtype) in weights)
    buckets = [tensor_specs(bucket)[0] for bucket in iter_buckets(pairs, BUCKET_BYTES)]
    return buckets, hashlib.sha256(repr((buckets, engine.weight_slices())).encode()).hexdigest()
