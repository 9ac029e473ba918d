"""WeightFiles: a model's weights as safetensors files with an index, written by all ranks side by side.

One process creates the files with their final sizes. Then each rank writes its own shards to their places in them, so
no tensor is gathered, and a rank needs host memory for one shard at a time.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import struct
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from workers.weight_sync.weight_plan import Box

INDEX = "model.safetensors.index.json"

FILE_BYTES = 4 << 30
"""Size of a file, unless a single tensor is larger."""

_DTYPES = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.int16: "I16",
    torch.int32: "I32",
    torch.int64: "I64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float64: "F64",
}
"""Safetensors' names of dtypes."""


class _File(NamedTuple):
    header: bytes
    begins: dict[str, int]
    """First byte of each tensor, counted from the end of the header."""
    nbytes: int
    """Of the tensors."""


class WeightFiles:
    """The files of a model's weights. All ranks make one, of the same tensors in the same order.

    Args:
        tensors: name -> shape and dtype.
        max_file_bytes: size of a file; a larger tensor gets a file of its own.

    Raises:
        ValueError: a tensor has a dtype that safetensors files do not have.
    """

    def __init__(
        self, tensors: Mapping[str, tuple[tuple[int, ...], torch.dtype]], max_file_bytes: int = FILE_BYTES
    ) -> None:
        self._tensors = tensors
        groups: list[list[str]] = []
        filled = 0
        # The order of the safetensors library. The largest elements come first: then all are aligned.
        for tensor in sorted(tensors, key=lambda tensor: (-tensors[tensor][1].itemsize, tensor)):
            if not groups or filled + self._nbytes(tensor) > max_file_bytes:
                groups.append([])
                filled = 0
            groups[-1].append(tensor)
            filled += self._nbytes(tensor)
        count = len(groups)
        named = (
            ("model.safetensors",)
            if count == 1
            else (f"model-{k:05d}-of-{count:05d}.safetensors" for k in range(1, count + 1))
        )
        self._files = {file: self._lay_out(group) for file, group in zip(named, groups, strict=True)}
        self._file_of = {tensor: file for file, laid_out in self._files.items() for tensor in laid_out.begins}

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the files."""
        return tuple(self._files)

    def create(self, folder: Path) -> None:
        """Create the files, which have zeros for the tensors. One process calls it, before any rank writes."""
        for name, file in self._files.items():
            with open(folder / name, "wb") as opened:
                opened.write(file.header)
                opened.truncate(len(file.header) + file.nbytes)

    def write(self, folder: Path, parts: Iterable[tuple[str, Box, torch.Tensor]]) -> None:
        """Write parts of tensors to their places.

        Args:
            folder: of the files.
            parts: (name of the tensor, box in it, values of the box).
        """
        with ExitStack() as stack:
            opened: dict[str, Any] = {}
            for tensor, box, values in parts:
                name = self._file_of[tensor]
                if name not in opened:
                    opened[name] = stack.enter_context(open(folder / name, "r+b", buffering=0))
                file = self._files[name]
                begin = len(file.header) + file.begins[tensor]
                _write_box(opened[name].fileno(), begin, self._tensors[tensor][0], box, values)

    def write_index(self, folder: Path, **metadata: Any) -> None:
        """Write the index, which says in which file each tensor is. One process calls it."""
        size = sum(file.nbytes for file in self._files.values())
        index = {"metadata": {"total_size": size, **metadata}, "weight_map": dict(sorted(self._file_of.items()))}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")

    def _nbytes(self, tensor: str) -> int:
        shape, dtype = self._tensors[tensor]
        return math.prod(shape) * dtype.itemsize

    def _lay_out(self, names: Iterable[str]) -> _File:
        about: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        begins, end = {}, 0
        for tensor in names:
            shape, dtype = self._tensors[tensor]
            if dtype not in _DTYPES:
                raise ValueError(f"{tensor!r} has dtype {dtype}, which safetensors files do not have")
            begins[tensor], end = end, end + self._nbytes(tensor)
            about[tensor] = {"dtype": _DTYPES[dtype], "shape": list(shape), "data_offsets": [begins[tensor], end]}
        text = json.dumps(about).encode()
        text += b" " * (-len(text) % 8)
        return _File(struct.pack("<Q", len(text)) + text, begins, end)


def _write_box(file: int, begin: int, shape: tuple[int, ...], box: Box, values: torch.Tensor) -> None:
    """Write a box of a tensor that begins at a byte of a file. `os.pwrite` writes exactly these bytes, so ranks may
    write side by side."""
    host = values.cpu().contiguous()
    if not host.numel():
        return
    # Rows of the box that follow one another in the file are written at once: those dims at the end that are whole.
    split = len(shape)
    while split and box[split - 1] == (0, shape[split - 1]):
        split -= 1
    split = max(split - 1, 0)  # a range of this dim is contiguous, too
    # Memory that `os.pwrite` takes. Not `Tensor.numpy`, after which torch resizes the storage no more.
    flat: Any = np.from_dlpack(host.view(-1).view(torch.uint8))
    strides = [math.prod(shape[dim + 1 :]) * host.itemsize for dim in range(len(shape))]
    nbytes = math.prod(end - first for first, end in box[split:]) * host.itemsize
    offset = begin + sum(box[dim][0] * strides[dim] for dim in range(split, len(shape)))
    done = 0
    for index in itertools.product(*(range(*dim) for dim in box[:split])):
        at = offset + sum(one * stride for one, stride in zip(index, strides, strict=False))
        left = flat[done : done + nbytes]
        while len(left):
            written = os.pwrite(file, left, at)
            left, at = left[written:], at + written
        done += nbytes
