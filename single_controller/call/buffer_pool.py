"""BufferPool: large buffers kept for reuse.

The first touch of fresh memory costs a page fault per page, which takes longer than the copy into it. A buffer of the
pool returns to it when the last tensor or array that uses it is dropped. The next request of its size gets the buffer
with its pages already mapped.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Any

from dispatch.batch import concatenate_tensors_with

if TYPE_CHECKING:
    import numpy

MIN_BYTES = 1 << 20
"""Smaller requests go to the allocator, which reuses its own pages."""

MAX_IDLE_BYTES = 1 << 30
"""Most bytes that a process keeps idle."""

IDLE_SECONDS = 60.0
"""How long an idle buffer is kept. Checked at each request."""


class BufferPool:
    """Reusable buffers. `buffer_pool` is the instance of the process; any thread may use it.

    Lock: ``_lock`` protects ``_idle``, ``_idle_bytes`` and ``mapped_bytes``. It is a leaf: nothing else is acquired
    while it is held. It is reentrant because the garbage collector may run while it is held, and with it, in the same
    thread, somebody's finalizer that requests a buffer.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._idle: dict[int, deque[tuple[float, numpy.ndarray]]] = {}
        self._idle_bytes = 0
        self.mapped_bytes = 0  # of the store's memory, used in place of buffers: it can neither move nor drop them
        # Finalizers only append here. deque.append is atomic, so a finalizer needs no lock and can interrupt take().
        self._returned: deque[tuple[float, numpy.ndarray]] = deque()
        # Changed without the lock, so two finalizers at once may lose an update. It only decides whether to keep a
        # buffer, and starts from 0 again with every request.
        self._returned_bytes = 0

    def take(self, nbytes: int) -> numpy.ndarray:
        """Return a writable uint8 array of ``nbytes`` bytes with arbitrary contents.

        The buffer returns to the pool when the array and all views of it are gone.
        """
        import numpy

        if nbytes < MIN_BYTES:
            return numpy.empty(nbytes, numpy.uint8)
        size = _size_class(nbytes)
        with self._lock:
            self._sort_returned()
            idle = self._idle.get(size)
            if idle:
                _, memory = idle.pop()
                self._idle_bytes -= size
            else:
                memory = numpy.empty(size, numpy.uint8)
        # numpy keeps the lease as the base of the array and of all views, and so does a tensor made of one of them.
        return numpy.asarray(_Lease(memory, self))[:nbytes]

    def give_back(self, memory: numpy.ndarray) -> None:
        """Return a buffer. Finalizers call this at arbitrary points, even inside `take`, so it takes no lock."""
        if self._idle_bytes + self._returned_bytes + memory.nbytes <= MAX_IDLE_BYTES:
            self._returned_bytes += memory.nbytes
            self._returned.append((time.monotonic(), memory))

    def count_mapped(self, nbytes: int) -> None:
        """Add to `mapped_bytes`, or subtract. Finalizers call this, too."""
        with self._lock:
            self.mapped_bytes += nbytes

    def unlock(self) -> None:
        """Forget who holds the lock: in a fork, it may be a thread of the parent, which does not exist here."""
        self._lock = threading.RLock()

    def clear(self) -> None:
        """Free all idle buffers."""
        with self._lock:
            self._returned.clear()
            self._returned_bytes = 0
            self._idle.clear()
            self._idle_bytes = 0

    @property
    def idle_bytes(self) -> int:
        """Bytes of the idle buffers."""
        with self._lock:
            self._sort_returned()
            return self._idle_bytes

    def _sort_returned(self) -> None:
        """Drop expired buffers and file the returned ones by size. The caller holds the lock."""
        # A finalizer may run this method again in the middle of it. So sizes are never removed, and each step asks
        # anew whether a deque has something left.
        oldest = time.monotonic() - IDLE_SECONDS
        for size in list(self._idle):
            idle = self._idle[size]
            with contextlib.suppress(IndexError):  # the deque is empty
                while idle[0][0] < oldest:
                    idle.popleft()
                    self._idle_bytes -= size
        self._returned_bytes = 0
        with contextlib.suppress(IndexError):
            while True:
                when, memory = self._returned.popleft()
                if when >= oldest:
                    self._idle.setdefault(memory.nbytes, deque()).append((when, memory))
                    self._idle_bytes += memory.nbytes


class _Lease:
    """Base object of every array on a buffer. Its finalizer runs when nothing refers to the buffer any more."""

    def __init__(self, memory: numpy.ndarray, owner: BufferPool) -> None:
        self._memory = memory
        self._owner = owner
        self.__array_interface__ = memory.__array_interface__

    def __del__(self) -> None:
        self._owner.give_back(self._memory)


def _size_class(nbytes: int) -> int:
    """Round up to one of eight sizes between consecutive powers of two."""
    step = 1 << max((nbytes - 1).bit_length() - 4, 0)
    return -(-nbytes // step) * step


def cat_tensors(tensors: list[Any], dim: int = 0) -> Any:
    """``torch.cat``, into a pooled buffer where possible."""
    import torch

    first = tensors[0]
    plain = all(
        type(tensor) is torch.Tensor
        and tensor.layout is torch.strided
        and tensor.device.type == "cpu"
        and tensor.dtype is first.dtype
        and tensor.ndim > dim
        and tensor.shape[:dim] == first.shape[:dim]
        and tensor.shape[dim + 1 :] == first.shape[dim + 1 :]
        and not tensor.requires_grad
        and not tensor.is_quantized
        for tensor in tensors
    )
    nbytes = sum(tensor.numel() for tensor in tensors) * first.element_size() if plain else 0
    if nbytes < MIN_BYTES:
        return torch.cat(tensors, dim=dim)
    shape = list(first.shape)
    shape[dim] = sum(tensor.shape[dim] for tensor in tensors)
    out = torch.from_numpy(buffer_pool.take(nbytes)).view(first.dtype).reshape(shape)
    return torch.cat(tensors, dim=dim, out=out)


buffer_pool = BufferPool()
os.register_at_fork(after_in_child=buffer_pool.unlock)

concatenate_tensors_with(cat_tensors, MIN_BYTES)
