"""Shards of weights: what one rank holds of a Hugging Face model's tensors, as boxes. Pure arithmetic."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from workers.weight_sync.weight_plan import Box

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Shard:
    """A rank's part of a weight: a box of the whole tensor.

    Attributes:
        name: as in the Hugging Face model's ``state_dict()``.
        shape: of the whole tensor.
        begin: index of the box's first element, by dim.
        size: of the box, by dim; a rank has no shard of a tensor of which it has no element.
        dtype: of `read`'s result.
        read: returns the box as it is now, a tensor of shape ``size`` on its device. It may be a view of live memory,
            so it is valid until the weights change.
    """

    name: str
    shape: tuple[int, ...]
    begin: tuple[int, ...]
    size: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[], torch.Tensor]

    @property
    def box(self) -> Box:
        """Where it is in the whole tensor."""
        return tuple((begin, begin + size) for begin, size in zip(self.begin, self.size, strict=True))

    @classmethod
    def whole(cls, name: str, tensor: torch.Tensor) -> Shard:
        """Return the shard of a rank that has the whole tensor."""
        shape = tuple(tensor.shape)
        return cls(name, shape, (0,) * len(shape), shape, tensor.dtype, tensor.detach)
