"""Lossless differences of tensors: where elements changed, and their new values."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    import torch

SAME = "same"
GAPS8 = "gaps8"
GAPS16 = "gaps16"
BITMAP = "bitmap"

_GAP_TYPES: dict[str, np.dtype[Any]] = {GAPS8: np.dtype(np.uint8), GAPS16: np.dtype(np.uint16)}
_CHUNK = 1 << 18
"""Elements handled at a time, so that temporaries stay in the cache. A multiple of 8: bitmaps are cut at bytes."""


class Patch(NamedTuple):
    """The elements of a tensor that differ from those of a base, in row-major order. Both tensors are 1-d.

    Attributes:
        kind: the format of ``positions``.

            - ``"same"``: no element changed. Both tensors are empty.
            - ``"gaps8"``: uint8. A code below 255 is a changed element, and the number of unchanged elements between
              the changed one before (or the tensor's begin) and this one. A code of 255 skips 255 unchanged elements,
              and adds to the next code.
            - ``"gaps16"``: uint16 in native byte order, the same with 65535 in place of 255.
            - ``"bitmap"``: uint8, ``ceil(numel / 8)`` bytes. Bit ``i % 8`` (0 is the lowest) of byte ``i // 8`` is set
              if element ``i`` changed. The bits that are left over in the last byte are 0.
        positions: where elements changed.
        values: the new values of these elements, in the dtype of the tensor, without gaps between them.
    """

    kind: str
    positions: torch.Tensor
    values: torch.Tensor


def encode(new: torch.Tensor, base: torch.Tensor) -> Patch | None:
    """Return the smallest patch that makes ``base`` equal to ``new``, bit for bit.

    Bits are compared, not values: -0.0 differs from 0.0, and a NaN from a NaN with another payload. Needs memory for
    the patch, one bit per element, and host copies of tensors that are not contiguous or not in host memory.

    Args:
        new: the tensor as it is now.
        base: the tensor as it was, of the same shape and dtype.

    Returns:
        The patch, in new host memory, or None if it would not be smaller than the tensor.

    Raises:
        ValueError: shapes or dtypes differ.
    """
    import torch

    if new.shape != base.shape or new.dtype != base.dtype:
        raise ValueError(
            f"encode: new is {new.dtype} {tuple(new.shape)}, base is {base.dtype} {tuple(base.shape)}: "
            "shapes and dtypes must be equal"
        )
    dtype = _words_dtype(new.dtype)
    if dtype is None:
        return None
    words, old = _host_words(new, dtype), _host_words(base, dtype)
    numel, itemsize = words.size, words.itemsize
    bitmap = np.empty(-(-numel // 8), np.uint8)
    changed = 0
    for begin in range(0, numel, _CHUNK):
        differs = words[begin : begin + _CHUNK] != old[begin : begin + _CHUNK]
        bitmap[begin // 8 : (begin + _CHUNK) // 8] = np.packbits(differs, bitorder="little")
        changed += int(np.count_nonzero(differs))
        # Positions take a bitmap, or less if changes are fewer than its bytes: such a patch is always small enough.
        if changed * itemsize + min(changed, bitmap.size) >= words.nbytes:
            return None
    if changed == 0:
        return Patch(SAME, torch.empty(0, dtype=torch.uint8), torch.empty(0, dtype=new.dtype))

    values = np.empty(changed, words.dtype)
    codes: dict[str, list[np.ndarray[Any, Any]]] = {
        kind: [] for kind, code in _GAP_TYPES.items() if changed * code.itemsize < bitmap.size
    }
    filled, last = 0, -1
    for index in _bitmap_positions(bitmap):
        np.take(words, index, out=values[filled : filled + index.size], mode="clip")  # "raise" would buffer the output
        filled += index.size
        if codes:
            gaps = np.diff(index, prepend=last) - 1
            last = int(index[-1])
            for kind, parts in codes.items():
                parts.append(_gap_codes(gaps, _GAP_TYPES[kind]))
    sizes = {kind: sum(part.nbytes for part in parts) for kind, parts in codes.items()} | {BITMAP: bitmap.size}
    kind = min(sizes, key=sizes.__getitem__)
    positions = bitmap if kind == BITMAP else np.concatenate(codes[kind])
    return Patch(kind, torch.from_numpy(positions), torch.from_numpy(values).view(new.dtype))


def apply(patch: Patch, into: torch.Tensor) -> None:
    """Write a patch's values into a tensor.

    Args:
        patch: the difference. Its tensors may be on any device; positions are decoded in host memory.
        into: the base, of the shape that was encoded, contiguous or not, on any device. Its dtype may be another one:
            values are converted as ``copy_`` converts them.

    Raises:
        ValueError: the patch is damaged, or for a tensor of another size. The contents of ``into`` are then undefined.
    """
    import torch

    into = into.detach()
    shape, contiguous = into.shape, into.is_contiguous()
    values = patch.values.detach().to(device=into.device, dtype=into.dtype)
    words = _words_dtype(into.dtype)
    if words is not None:  # not all dtypes can be written to by index
        into, values = into.view(words), values.view(words)
    if contiguous:
        into = into.view(-1)
    # Where it can be used, numpy writes by index twice as fast as torch.
    fast = None
    if contiguous and words is not None and into.device.type == "cpu":
        fast = np.from_dlpack(into), np.from_dlpack(values)  # see `_host_words`
    done = 0
    for index in _positions(patch, into.numel()):
        end = done + index.size
        if int(index[-1]) >= into.numel() or end > values.numel():
            raise _damaged(patch, into.numel())
        if fast is not None:
            fast[0][index] = fast[1][done:end]
        else:
            at = torch.from_numpy(index).to(into.device)
            into[at if contiguous else torch.unravel_index(at, shape)] = values[done:end]
        done = end
    if done != values.numel():
        raise _damaged(patch, into.numel())


def _positions(patch: Patch, numel: int) -> Iterator[np.ndarray[Any, Any]]:
    """Yield the indices (int64) of the changed elements, ascending, in arrays that are not empty."""
    positions = patch.positions.detach().cpu().numpy()
    if patch.kind == BITMAP and positions.dtype == np.uint8 and positions.size == -(-numel // 8):
        yield from _bitmap_positions(positions)
    elif patch.kind in _GAP_TYPES and positions.dtype == _GAP_TYPES[patch.kind]:
        escape = np.iinfo(positions.dtype).max
        last = -1
        for begin in range(0, positions.size, _CHUNK):
            codes = positions[begin : begin + _CHUNK]
            changed = codes != escape
            index = np.cumsum(codes, dtype=np.int64)
            index += np.cumsum(changed, dtype=np.int64)
            index += last
            last = int(index[-1])
            index = index[changed]
            if index.size:
                yield index
    elif patch.kind != SAME or positions.size:
        raise _damaged(patch, numel)


def _bitmap_positions(bitmap: np.ndarray[Any, Any]) -> Iterator[np.ndarray[Any, Any]]:
    for begin in range(0, bitmap.size, _CHUNK // 8):
        part = bitmap[begin : begin + _CHUNK // 8]
        used = np.flatnonzero(part != 0)
        sparse = used.size < part.size // 2  # below one change in about ten elements it pays to leave out empty bytes
        bits = np.unpackbits(part[used] if sparse else part, bitorder="little")
        index = np.flatnonzero(bits.view(np.bool_))
        if sparse:
            index = (used << 3)[index >> 3] + (index & 7)
        if index.size:
            index += begin * 8
            yield index


def _gap_codes(gaps: np.ndarray[Any, Any], dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    escape = np.iinfo(dtype).max
    long = np.flatnonzero(gaps >= escape)
    codes = gaps.astype(dtype)
    if not long.size:
        return codes
    escapes, codes[long] = np.divmod(gaps[long], escape)
    return np.insert(codes, np.repeat(long, escapes), escape)


def _words_dtype(dtype: torch.dtype) -> torch.dtype | None:
    """Return the integers that hold the bits of a dtype's elements, or None if there are none of that width."""
    import torch

    return {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}.get(dtype.itemsize)


def _host_words(tensor: torch.Tensor, dtype: torch.dtype) -> np.ndarray[Any, Any]:
    """Return a tensor's bits as integers: a view of it if it is contiguous and in host memory, else of a copy."""
    # Not `Tensor.numpy`, after which torch resizes the storage no more, as offloading on the CPU does.
    words: np.ndarray[Any, Any] = np.from_dlpack(tensor.detach().cpu().contiguous().view(-1).view(dtype))
    return words


def _damaged(patch: Patch, numel: int) -> ValueError:
    return ValueError(
        f"this {patch.kind!r} patch of {patch.values.numel()} values and {patch.positions.nbytes} bytes of positions "
        f"does not fit a tensor of {numel} elements: it is damaged, or for another tensor"
    )
