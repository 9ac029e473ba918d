"""Warm memory: large buffers that are used again once nobody refers to them.

The first touch of fresh memory costs a page fault for every page, which takes longer than the copy into it. A buffer
from here goes back when the last tensor or array on it is dropped, and the next one of its size gets it, pages and all.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy

SMALLEST = 1 << 20
"""Bytes; below, the allocator's own memory is warm anyway."""

MOST_IDLE = 1 << 30
"""Bytes that a process keeps for later, at the most."""

IDLE_SECONDS = 60.0
"""How long a buffer is kept; looked at when one is asked for."""


class WarmMemory:
    """Buffers that come back. `warm` is the process's one instance; several threads may use it."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._idle: dict[int, deque[tuple[float, numpy.ndarray]]] = {}
        self._idle_bytes = 0
        self._returned: deque[tuple[float, numpy.ndarray]] = deque()
        self._returned_bytes = 0

    def take(self, nbytes: int) -> numpy.ndarray:
        """Memory of that many bytes, its contents anything: a writable array of uint8, and whoever refers to it or to
        a view of it keeps it."""
        import numpy

        if nbytes < SMALLEST:
            return numpy.empty(nbytes, numpy.uint8)
        size = _size_class(nbytes)
        with self._lock:
            self._put_away()
            idle = self._idle.get(size)
            if idle:
                _, memory = idle.pop()
                self._idle_bytes -= size
            else:
                memory = numpy.empty(size, numpy.uint8)
        return numpy.asarray(_Lease(memory, self))[:nbytes]

    def give_back(self, memory: numpy.ndarray) -> None:
        """Take a buffer back. This may happen in the midst of anything, even of `take`, so it is only put down."""
        if self._idle_bytes + self._returned_bytes + memory.nbytes <= MOST_IDLE:
            self._returned_bytes += memory.nbytes
            self._returned.append((time.monotonic(), memory))

    def clear(self) -> None:
        """Let go of all that is idle."""
        with self._lock:
            self._returned.clear()
            self._idle.clear()
            self._idle_bytes = 0

    @property
    def idle_bytes(self) -> int:
        """Bytes that are kept for later."""
        with self._lock:
            self._put_away()
            return self._idle_bytes

    def _put_away(self) -> None:
        oldest = time.monotonic() - IDLE_SECONDS
        for size, idle in list(self._idle.items()):
            while idle and idle[0][0] < oldest:
                idle.popleft()
                self._idle_bytes -= size
            if not idle:
                del self._idle[size]
        self._returned_bytes = 0
        while self._returned:
            when, memory = self._returned.popleft()
            if when >= oldest:
                self._idle.setdefault(memory.nbytes, deque()).append((when, memory))
                self._idle_bytes += memory.nbytes


class _Lease:
    """The base of every array and tensor on a buffer; when it goes, nobody refers to the buffer any more."""

    def __init__(self, memory: numpy.ndarray, owner: WarmMemory) -> None:
        self._memory = memory
        self._owner = owner
        self.__array_interface__ = memory.__array_interface__

    def __del__(self) -> None:
        self._owner.give_back(self._memory)


def _size_class(nbytes: int) -> int:
    """The next size of which there are eight between a power of two and the next."""
    step = 1 << max((nbytes - 1).bit_length() - 4, 0)
    return -(-nbytes // step) * step


def cat_tensors(tensors: list[Any]) -> Any:
    """``torch.cat`` along dim 0, into warm memory where that is possible."""
    import torch

    first = tensors[0]
    plain = all(
        type(tensor) is torch.Tensor
        and tensor.layout is torch.strided
        and tensor.device.type == "cpu"
        and tensor.dtype is first.dtype
        and tensor.ndim > 0
        and tensor.shape[1:] == first.shape[1:]
        and not tensor.requires_grad
        and not tensor.is_quantized
        for tensor in tensors
    )
    rows = sum(len(tensor) for tensor in tensors) if plain else 0
    nbytes = rows * first[:1].numel() * first.element_size() if rows else 0
    if nbytes < SMALLEST:
        return torch.cat(tensors, dim=0)
    out = torch.from_numpy(warm.take(nbytes)).view(first.dtype).reshape(rows, *first.shape[1:])
    return torch.cat(tensors, dim=0, out=out)


warm = WarmMemory()
