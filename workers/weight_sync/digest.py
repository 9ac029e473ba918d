"""Digests of tensors, and the fingerprint of a policy."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import xxhash

if TYPE_CHECKING:
    import torch


def digest(tensor: torch.Tensor) -> int:
    """Return the XXH3 hash of a tensor's bytes in row-major order.

    Shape and dtype are not part of it: tensors with the same bytes have the same digest. A contiguous tensor in host
    memory is hashed in place, any other one is copied there first.

    Args:
        tensor: of any shape, dtype and device.

    Returns:
        An unsigned 64-bit integer.
    """
    import numpy as np
    import torch

    flat = tensor.detach().cpu().contiguous().view(-1)
    flat = flat.as_strided(flat.shape, (1,))  # a single element may have any stride, and could not be viewed as bytes
    # Not `Tensor.numpy`, after which torch resizes the storage no more, as offloading on the CPU does.
    return xxhash.xxh3_64_intdigest(np.from_dlpack(flat.view(torch.uint8)).data)


def digests(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return the `digest` of each expert of a tensor that has several, see `stacked`; otherwise that of the tensor."""
    if not stacked(tuple(tensor.shape)):
        return (digest(tensor),)
    return tuple(digest(of_expert) for of_expert in tensor.detach().cpu())


def stacked(shape: tuple[int, ...]) -> bool:
    """Whether a tensor, or a part of one, has matrices of several experts: those of transformers' models have the dims
    (experts, rows, columns). Kernels of convolutions over time, (channels, 1, width), are no such matrices."""
    return len(shape) == 3 and 1 not in shape[1:]


def combine(digests: Iterable[tuple[str, tuple[int, ...], int]]) -> int:
    """Return the fingerprint of a policy.

    It does not depend on the order of the digests. It does depend on how the tensors were cut, and a box that is given
    twice counts twice.

    Args:
        digests: of all boxes of all tensors: the tensor's name, the index of the box's first element by dim, and the
            box's `digest`.

    Returns:
        An integer in [0, 2**63), so it fits ``torch.int64``, and -1 is free to mean "unknown".
    """
    parts = sorted((name, tuple(int(index) for index in begin), int(value)) for name, begin, value in digests)
    return xxhash.xxh3_64_intdigest(repr(parts).encode()) >> 1
