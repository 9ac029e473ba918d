"""Buckets: tensors that travel together in one flat buffer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from workers.device import synchronize

if TYPE_CHECKING:
    import torch

Pair = tuple[str, "torch.Tensor"]
"""A tensor and its name."""

BUCKET_BYTES = 64 << 20
_ALIGNMENT = 64


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
    views_of_flat = []
    for spec in specs:
        chunk = flat[spec.begin : spec.begin + spec.nbytes]
        # An empty slice cannot be viewed as another dtype.
        tensor = (
            chunk.view(spec.dtype).view(spec.shape) if spec.nbytes else flat.new_empty(spec.shape, dtype=spec.dtype)
        )
        views_of_flat.append((spec.name, tensor))
    return views_of_flat


def copy_into(flat: torch.Tensor, specs: Sequence[TensorSpec], tensors: Sequence[torch.Tensor]) -> None:
    """Copy tensors to their places in a flat buffer, and wait for the copies."""
    import torch

    with torch.no_grad():
        for (_, copy), tensor in zip(views(flat, specs), tensors, strict=True):
            # Queue all copies, and wait for them once below.
            copy.copy_(tensor, non_blocking=True)
    # The buffer's device too: pinned sources may change as soon as this returns.
    synchronize([flat.device, *(tensor.device for tensor in tensors)])


class FlatBuffer:
    """A flat buffer that is reused from bucket to bucket, and grows if a bucket needs more.

    Args:
        device: of the buffer.
        pinned: whether it is pinned host memory, which an accelerator copies to and from directly.
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
