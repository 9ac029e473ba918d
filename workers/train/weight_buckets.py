"""Buckets: the pieces in which weights travel, and how tensors lie in one flat piece of memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch

from single_controller import SingleControllerError

Pair = tuple[str, torch.Tensor]
"""A tensor's name as the Hugging Face model's ``state_dict()`` has it, and the whole tensor."""

BUCKET_BYTES = 64 << 20
_ALIGNMENT = 64


class WeightSyncError(SingleControllerError):
    """An update of rollout workers' weights did not come to its end: they have no version, and refuse to generate,
    until the next update has."""


class Lies(NamedTuple):
    """Where a tensor lies in flat memory.

    Attributes:
        name: the tensor's.
        dtype: its.
        shape: its.
        begin: its first byte.
        nbytes: its length.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    nbytes: int


def cut_buckets(pairs: Iterable[Pair], bucket_bytes: int) -> Iterator[list[Pair]]:
    """Group tensors, in their order, into buckets of at most ``bucket_bytes``; a larger one is a bucket alone.

    A bucket comes as soon as it is known to be full, so that little is held at once. The tensors must stay what they
    are until the bucket after theirs is asked for.
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


def side_by_side(bucket: Sequence[Pair]) -> tuple[list[Lies], int]:
    """Where the tensors of a bucket lie in flat memory, each at a multiple of 64 bytes; and how long that is."""
    lies = []
    end = 0
    for name, tensor in bucket:
        lies.append(Lies(name, tensor.dtype, tuple(tensor.shape), end, tensor.nbytes))
        end += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
    return lies, end


def views(flat: torch.Tensor, lies: Iterable[Lies]) -> list[Pair]:
    """The tensors that lie in flat memory, as views of it.

    Args:
        flat: uint8, one dim, on any device.
        lies: where they lie.
    """
    found = []
    for one in lies:
        part = flat[one.begin : one.begin + one.nbytes]
        tensor = part.view(one.dtype).view(one.shape) if one.nbytes else flat.new_empty(one.shape, dtype=one.dtype)
        found.append((one.name, tensor))
    return found


@torch.no_grad()
def fill(flat: torch.Tensor, lies: Sequence[Lies], bucket: Sequence[Pair]) -> list[Pair]:
    """Copy a bucket into flat memory, and wait until it is there.

    Returns:
        The same tensors, as views of that memory.
    """
    copies = views(flat, lies)
    for (_, copy), (_, tensor) in zip(copies, bucket, strict=True):
        copy.copy_(tensor, non_blocking=True)
    for device in {tensor.device for _, tensor in bucket if tensor.is_cuda}:
        torch.cuda.synchronize(device)
    return copies


class FlatMemory:
    """Flat memory that is used for one bucket after the other, and grows when a bucket needs more.

    Args:
        device: where.
        pinned: whether it is host memory that a CUDA device copies to and from directly.
    """

    def __init__(self, device: torch.device | str = "cpu", *, pinned: bool = False) -> None:
        self._device = torch.device(device)
        self._pinned = pinned
        self._memory = torch.empty(0, dtype=torch.uint8)

    def take(self, nbytes: int) -> torch.Tensor:
        """That many bytes, uint8; until the next call."""
        if self._memory.numel() < nbytes:
            self._memory = torch.empty(0, dtype=torch.uint8)  # the old piece goes before the new one comes
            self._memory = torch.empty(nbytes, dtype=torch.uint8, device=self._device, pin_memory=self._pinned)
        return self._memory[:nbytes]
