"""Weights through Ray's object store: a bucket is stored once, and every rollout worker copies from where it lies."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from single_controller.base.future import WorkerFuture
from workers.train.weight_buckets import FlatMemory, Pair, fill, side_by_side
from workers.train.weight_receivers import all_results
from workers.train.weight_transport import Transport, Update

IN_FLIGHT = 2
"""Buckets of one sender that may lie in the store at once."""


class StoreTransport(Transport):
    """See this file's docstring. Tensors of a CUDA device are brought to pinned memory first."""

    def __init__(self) -> None:
        self._under_way: deque[list[WorkerFuture]] = deque()
        self._pinned = FlatMemory(pinned=True)

    def send(self, update: Update, bucket: Sequence[Pair]) -> None:
        """See `Transport.send`."""
        while len(self._under_way) >= IN_FLIGHT:
            all_results(self._under_way.popleft())
        if any(tensor.is_cuda for _, tensor in bucket):
            lies, nbytes = side_by_side(bucket)
            bucket = fill(self._pinned.take(nbytes), lies, bucket)
        self._under_way.append(update.receivers.start("take_weights", update.key, dict(bucket)))

    def flush(self, update: Update) -> None:
        """See `Transport.flush`."""
        while self._under_way:
            all_results(self._under_way.popleft())

    def failed(self, update: Update) -> None:
        """See `Transport.failed`."""
        self._under_way.clear()

    def close(self) -> None:
        """See `Transport.close`."""
        self._pinned = FlatMemory(pinned=True)
