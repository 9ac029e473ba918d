"""Rows of jagged tensors: nested tensors with ``layout=torch.jagged``, whose rows differ in one dim, the ragged one.

Torch keeps all rows in one tensor, ``values()``, one after the other along the ragged dim; ``offsets()`` says where
each row starts. Torch itself neither cuts nor concatenates these tensors along dim 0.

Torch computes with two jagged tensors (``a + b``) only if both were made from the same ``offsets`` object: that is how
it knows that their rows have equal lengths. So if tensors with one such object are cut or joined one by one, the
results must have one object, too. Each function takes a dict, ``made``, in which it looks up and keeps the offsets that
it made. A caller passes the same dict for all tensors of one batch, and for nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dispatch.buffer_pool import cat_tensors
from dispatch.errors import BatchError

Made = dict[tuple[Any, ...], Any]
"""What was done to which ragged dims -> the offsets that it gave."""


def split(value: Any, ranges: Sequence[tuple[int, int]], made: Made) -> list[Any]:
    """Return the rows ``start:stop`` of each range, as views."""
    value = compact(value, made)
    values, dim = _values(value), value._ragged_idx - 1
    key = ("split", _ragged_size(value), *ranges)
    if key not in made:
        offsets = value.offsets()
        starts = offsets.tolist()  # on a device, one transfer for all ranges
        made[key] = [(offsets[a : b + 1] - starts[a], starts[a], starts[b] - starts[a]) for a, b in ranges]
    return [_build(values.narrow(dim, start, size), offsets, dim) for offsets, start, size in made[key]]


def join(tensors: Sequence[Any], made: Made) -> Any:
    """Return the rows of all tensors in order, in new memory.

    Raises:
        BatchError: the tensors have different ragged dims.
        RuntimeError: torch cannot concatenate their values.
    """
    import torch

    tensors = [compact(tensor, made) for tensor in tensors]
    dim = tensors[0]._ragged_idx - 1
    if any(tensor._ragged_idx - 1 != dim for tensor in tensors):
        dims = ", ".join(str(tensor._ragged_idx) for tensor in tensors[:8])
        raise BatchError(f"jagged tensors whose ragged dims differ ({dims}) cannot be joined")
    key = ("join", *map(_ragged_size, tensors))
    if key not in made:
        made[key] = _offsets(torch.cat([tensor.offsets().diff() for tensor in tensors]))
    return _build(cat_tensors([_values(tensor) for tensor in tensors], dim), made[key], dim)


def compact(value: Any, made: Made) -> Any:
    """Return the tensor without the values that belong to no row: between rows, as ``torch.nested.narrow`` leaves them,
    before the first or behind the last. Return the tensor itself if there are none."""
    import torch

    values, offsets, lengths, dim = _values(value), value.offsets(), value.lengths(), value._ragged_idx - 1
    key, span = ("compact", _ragged_size(value)), ("span", _ragged_size(value))
    if lengths is None:
        if span not in made:
            made[span] = offsets[[0, -1]].tolist()  # on a device, one transfer
        start, stop = made[span]
        if start == 0 and stop == values.shape[dim]:
            return value
        if key not in made:
            made[key] = offsets - start if start else offsets
        return _build(values.narrow(dim, start, stop - start), made[key], dim)
    if key not in made:
        made[key] = _offsets(lengths)
    starts, total = made[key], int(made[key][-1])
    shift = torch.repeat_interleave(offsets[: len(lengths)] - starts[:-1], lengths, output_size=total)
    return _build(values.index_select(dim, torch.arange(total, device=values.device) + shift), starts, dim)


def to_send(value: Any, made: Made) -> Any:
    """Return the tensor to be pickled instead of a tensor: a compact one, with the same ``offsets`` object as others of
    its ragged size. Tensors that were moved to another device still have one size, but each an object of its own."""
    value = compact(value, made)
    offsets = made.setdefault(("send", _ragged_size(value)), value.offsets())
    if offsets is value.offsets() or offsets.device != value.device:
        return value
    return _build(_values(value), offsets, value._ragged_idx - 1)


def _ragged_size(value: Any) -> Any:
    """The size of the ragged dim: a symbol, equal for tensors whose rows are known to have equal lengths."""
    return value._size[value._ragged_idx]


def _values(value: Any) -> Any:
    return value.values() if value.requires_grad else value._values  # values() takes 100 microseconds


def _offsets(lengths: Any) -> Any:
    import torch

    return torch.nn.functional.pad(lengths.cumsum(0, dtype=lengths.dtype), (1, 0))


def _build(values: Any, offsets: Any, dim: int) -> Any:
    # Not the public nested_tensor_from_jagged(), which logs a warning about tracing in each process.
    from torch.nested._internal.nested_tensor import NestedTensor, nested_view_from_values_offsets

    if values.requires_grad:
        return nested_view_from_values_offsets(values, offsets, ragged_idx=dim + 1)
    return NestedTensor(values, offsets, _ragged_idx=dim + 1)
