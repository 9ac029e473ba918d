"""Rows of jagged tensors: nested tensors with ``layout=torch.jagged``, whose rows differ in one dim, the ragged one.

Torch keeps all rows in one tensor, ``values()``, one after the other along the ragged dim; ``offsets()`` says where
each row starts. Torch itself neither cuts nor concatenates these tensors along dim 0.

Torch computes with two jagged tensors (``a + b``) only if both were made from the same ``offsets`` object: that is how
it knows that their rows have equal lengths. So if tensors with one such object are cut or joined one by one, the
results must have one object, too. Each function takes a dict, ``made``, in which it looks up and keeps the offsets that
it made. A caller passes the same dict for all tensors of one batch, and for nothing else.
"""

from __future__ import annotations

import functools
import itertools
import sys
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from dispatch.errors import BatchError

Made = dict[tuple[Any, ...], Any]
"""What was done to which ragged dims -> the offsets that it gave."""

Extremes = tuple[int, int] | None
"""Length of the shortest and of the longest row, if torch knows them. It then pads rows to the longest; otherwise, to
the sum of all lengths."""

F = TypeVar("F", bound=Callable[..., Any])


def without_torch_function(function: F) -> F:
    """Have attributes of jagged tensors read directly. Otherwise each access takes 5 to 10 microseconds in the tensors'
    ``__torch_function__``, which has nothing to do for those that are read here."""

    @functools.wraps(function)
    def wrapper(*args: Any) -> Any:
        with sys.modules["torch"]._C.DisableTorchFunctionSubclass():
            return function(*args)

    return wrapper  # type: ignore[return-value]


def is_jagged(value: Any) -> bool:
    """Whether a tensor is a jagged one. Its own attributes would say so, too, but slowly."""
    from torch.nested._internal.nested_tensor import NestedTensor

    return isinstance(value, NestedTensor)


def length(value: Any) -> int:
    """Number of rows."""
    return int(value._size[0])


@without_torch_function
def split(value: Any, ranges: Sequence[tuple[int, int]], made: Made) -> list[Any]:
    """Return the rows ``start:stop`` of each range, as views."""
    value = compact(value, made)
    values, dim = _values(value), value._ragged_idx - 1
    cuts, lengths = ("split", ragged_size(value), *ranges), ("extremes", ragged_size(value), *ranges)
    if cuts not in made:
        offsets = value.offsets()
        starts = offsets.tolist()  # on a device, one transfer for all ranges
        made[cuts] = [(offsets[a : b + 1] - starts[a], starts[a], starts[b] - starts[a]) for a, b in ranges]
        made[lengths] = [_extremes_in(starts[a : b + 1]) for a, b in ranges]
    known = made[lengths] if extremes_of(value) else [None] * len(ranges)
    return [
        build(values.narrow(dim, start, size), offsets, dim, extremes)
        for (offsets, start, size), extremes in zip(made[cuts], known, strict=True)
    ]


@without_torch_function
def join(tensors: Sequence[Any], made: Made, concatenate: Callable[..., Any]) -> Any:
    """Return the rows of all tensors in order, in new memory, which ``concatenate(tensors, dim)`` makes. A `BatchError`
    if they have different ragged dims, a RuntimeError if torch cannot concatenate their values."""
    import torch

    tensors = [compact(tensor, made) for tensor in tensors]
    dim = tensors[0]._ragged_idx - 1
    if any(tensor._ragged_idx - 1 != dim for tensor in tensors):
        dims = ", ".join(str(tensor._ragged_idx) for tensor in tensors[:8])
        raise BatchError(f"jagged tensors whose ragged dims differ ({dims}) cannot be joined")
    key = ("join", *map(ragged_size, tensors))
    if key not in made:
        made[key] = _offsets(torch.cat([tensor.offsets().diff() for tensor in tensors]))
    extremes = [extremes_of(tensor) for tensor in tensors if len(tensor.offsets()) > 1]
    shortest, longest = zip(*extremes, strict=True) if extremes and None not in extremes else ((), ())
    parts = [_values(tensor) for tensor in tensors]
    # A rank without values makes its empty result of any dtype, which has no say.
    values = concatenate([part for part in parts if part.shape[dim]] or parts, dim)
    return build(values, made[key], dim, (min(shortest), max(longest)) if shortest else None)


@without_torch_function
def compact(value: Any, made: Made) -> Any:
    """Return the tensor without the values that belong to no row: between rows, as ``torch.nested.narrow`` leaves them,
    before the first or behind the last. Return the tensor itself if there are none."""
    import torch

    values, offsets, lengths, dim = _values(value), value.offsets(), value.lengths(), value._ragged_idx - 1
    key, span = ("compact", ragged_size(value)), ("span", ragged_size(value))
    if lengths is None:
        if span not in made:
            made[span] = offsets[:: max(len(offsets) - 1, 1)].tolist()  # the ends; on a device, one transfer
        start, stop = made[span][0], made[span][-1]
        if start == 0 and stop == values.shape[dim]:
            return value
        if key not in made:
            made[key] = offsets - start if start else offsets
        return build(values.narrow(dim, start, stop - start), made[key], dim, extremes_of(value))
    if key not in made:
        made[key] = _offsets(lengths)
    starts, total = made[key], int(made[key][-1])
    shift = torch.repeat_interleave(offsets[: len(lengths)] - starts[:-1], lengths, output_size=total)
    return build(
        values.index_select(dim, torch.arange(total, device=values.device) + shift), starts, dim, extremes_of(value)
    )


def ragged_size(value: Any) -> Any:
    """The size of the ragged dim: a symbol, equal for tensors whose rows are known to have equal lengths."""
    return value._size[value._ragged_idx]


def _values(value: Any) -> Any:
    return value.values() if value.requires_grad else value._values  # values() takes 100 microseconds


def _offsets(lengths: Any) -> Any:
    import torch

    return torch.nn.functional.pad(lengths.cumsum(0, dtype=lengths.dtype), (1, 0))


def extremes_of(value: Any) -> Extremes:
    shortest, longest = value._maybe_min_seqlen, value._maybe_max_seqlen
    return None if shortest is None or longest is None else (shortest, longest)


def _extremes_in(offsets: list[int]) -> Extremes:
    lengths = [end - start for start, end in itertools.pairwise(offsets)]
    return (min(lengths), max(lengths)) if lengths else None


def build(values: Any, offsets: Any, dim: int, extremes: Extremes = None) -> Any:
    # Not the public nested_tensor_from_jagged(), which logs a warning about tracing in each process.
    import torch
    from torch.nested._internal.nested_tensor import NestedTensor, nested_view_from_values_offsets

    if values.requires_grad:
        shortest, longest = extremes or (None, None)
        return nested_view_from_values_offsets(
            values, offsets, ragged_idx=dim + 1, min_seqlen=shortest, max_seqlen=longest
        )
    made = NestedTensor(values, offsets, _ragged_idx=dim + 1)
    if extremes is not None:
        # The constructor would import torch._dynamo, which takes a second, to mark these sizes as dynamic.
        made._metadata_cache = {
            "min_seqlen": torch.zeros(extremes[0], 0),
            "max_seqlen": torch.zeros(extremes[1], 0),
        }
    return made
