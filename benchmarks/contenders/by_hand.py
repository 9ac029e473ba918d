"""What is written by hand on a framework that has no batches: tensors in the form in which they travel, cut and joined.

"tensors" passes tensors as they are; a view is cloned first, because it would be pickled with the whole storage behind
it. "numpy" converts to arrays on either side, which are pickled without a further copy.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from benchmarks.protocol import Call


def own(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor in a storage that holds nothing else."""
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()


def array(tensor: torch.Tensor) -> np.ndarray:
    """The tensor's memory as an array."""
    return tensor.numpy()


def tensor(x: Any) -> torch.Tensor:
    """Back from either form."""
    return x if isinstance(x, torch.Tensor) else torch.from_numpy(x)


def joined(pieces: Sequence[Any]) -> torch.Tensor:
    """Pieces of either form in one tensor; a single one as it is."""
    if len(pieces) == 1:
        return tensor(pieces[0])
    return torch.cat(list(pieces)) if isinstance(pieces[0], torch.Tensor) else torch.from_numpy(np.concatenate(pieces))


def forms(
    run: Callable[[Any], Any], finish: Callable[[Any], None], prove: Callable[[Any], None] | None = None
) -> dict[str, Call]:
    """A case in both forms: ``run`` and ``prove`` take the function that makes a tensor travel."""
    return {
        name: Call(functools.partial(run, form), finish, functools.partial(prove, form) if prove is not None else None)
        for name, form in (("tensors", own), ("numpy", array))
    }
