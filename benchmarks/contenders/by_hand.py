"""Sharding and joining by hand, for frameworks without a batch type, in the form in which tensors are sent.

"tensors" sends tensors. A view is cloned first, because it would be pickled with its whole storage. "numpy" converts to
arrays on both sides, which are pickled without another copy.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from benchmarks.protocol import Call


def own(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor in a storage of its own; clones a view."""
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()


def array(tensor: torch.Tensor) -> np.ndarray:
    """Return the tensor's memory as an array."""
    return tensor.numpy()


def tensor(x: Any) -> torch.Tensor:
    """Convert either form back to a tensor."""
    return x if isinstance(x, torch.Tensor) else torch.from_numpy(x)


def joined(shards: Sequence[Any]) -> torch.Tensor:
    """Join shards of either form in one tensor; a single shard is not copied."""
    if len(shards) == 1:
        return tensor(shards[0])
    return torch.cat(list(shards)) if isinstance(shards[0], torch.Tensor) else torch.from_numpy(np.concatenate(shards))


def forms(
    run: Callable[[Any], Any], finish: Callable[[Any], None], prove: Callable[[Any], None] | None = None
) -> dict[str, Call]:
    """Return a case in both forms. ``run`` and ``prove`` take the function that converts a tensor for sending."""
    return {
        name: Call(functools.partial(run, form), finish, functools.partial(prove, form) if prove is not None else None)
        for name, form in (("tensors", own), ("numpy", array))
    }
