"""Weights through Ray's object store: a bucket is stored once, and every rollout worker copies from the store.

The receiving half is `WeightReceiver.receive_bucket`: tensors travel as a plain argument, which workers read in place.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from single_controller.base.future import WorkerFuture
from workers.weight_sync.protocol import FlatBuffer, Pair, Transport, Update, copy_into, tensor_specs, wait_all

IN_FLIGHT = 2
"""Maximum number of buckets that a sender has in the store at once."""


class ObjectStoreTransport(Transport):
    """See the module's docstring. Tensors of a CUDA device go through pinned host memory."""

    def __init__(self) -> None:
        self._in_flight: deque[list[WorkerFuture]] = deque()
        self._pinned = FlatBuffer(pinned=True)

    def send(self, update: Update, bucket: Sequence[Pair]) -> None:
        """See `Transport.send`."""
        # A bucket is in the store until its call has ended: without a limit, the whole model would be there at once.
        while len(self._in_flight) >= IN_FLIGHT:
            wait_all(self._in_flight.popleft())
        if any(tensor.is_cuda for _, tensor in bucket):
            # The pinned buffer is free again as soon as the call has copied it into the store.
            specs, nbytes = tensor_specs(bucket)
            bucket = copy_into(self._pinned.take(nbytes), specs, bucket)
        self._in_flight.append(update.receivers.start("receive_bucket", update.key, dict(bucket)))

    def flush(self, update: Update) -> None:
        """See `Transport.flush`."""
        while self._in_flight:
            wait_all(self._in_flight.popleft())

    def failed(self, update: Update) -> None:
        """See `Transport.failed`."""
        # Nobody waits for these calls: once the next update has begun, receivers reject their key.
        self._in_flight.clear()

    def close(self) -> None:
        """See `Transport.close`."""
        self._pinned.free()
