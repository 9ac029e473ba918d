"""Weights through files: one folder per version, for anyone who sees the same disk.

``<folder>/version-7`` has safetensors files and an index as Hugging Face writes them. Train rank 0 creates the files,
with their final sizes; each rank then writes its own shards to their places in them. The folder has another name until
it is complete, so a folder named version-7 is complete. The last two versions are kept.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
import re
import shutil
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from workers.extras import require
from workers.weight_sync.pieces import Header, Payload, PieceSpec, pieces_of
from workers.weight_sync.sync_protocol import Message, WeightSyncError
from workers.weight_sync.transports.weight_transport import Transport, Update
from workers.weight_sync.weight_plan import Box

KEPT = 2
"""Versions that are kept on disk."""

INDEX = "model.safetensors.index.json"
_FINISHED = re.compile(r"version-(\d+)")
_UNFINISHED = ".unfinished-"

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

Place = tuple[str, int]
"""Where a tensor is: name of the file, and its first byte in it."""


class DiskTransport(Transport):
    """See the module's docstring.

    Args:
        folder: a folder that all train and rollout workers see, used only by this job. It is created if needed.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self._folder = Path(folder).absolute()
        self._places: dict[str, Place] = {}
        self._sent: dict[int, list[PieceSpec]] = {}
        """On rank 0: the pieces of all train ranks in the update's files, by class."""

    def prepare(self, update: Update) -> str:
        """Create the folder and the files to write to, and remove what earlier updates left unfinished."""
        self._folder.mkdir(parents=True, exist_ok=True)
        self._remove_unfinished()
        new = self._folder / f"{_UNFINISHED}{update.version}-{update.key}"
        new.mkdir()
        update.shared = str(new)  # for `failed`, should what follows fail
        for file in _files(update.tensors):
            with open(new / file.name, "wb") as opened:
                opened.write(file.header)
                opened.truncate(file.nbytes)
        return str(new)

    def begin(self, update: Update) -> None:
        if not Path(update.shared).is_dir():
            raise WeightSyncError(
                f"train rank {update.rank} does not see {update.shared}, which train rank 0 created; all train and "
                "rollout workers must mount the same file system there"
            )
        self._places = {name: (file.name, at) for file in _files(update.tensors) for name, at in file.places.items()}
        self._sent = {}

    def transfer(
        self, update: Update, number: int, payloads: dict[int, Payload], headers: list[dict[int, Header]]
    ) -> None:
        """Write the pieces to their places."""
        if not update.rank:
            for of_rank in headers:
                for index, header in of_rank.items():
                    self._sent.setdefault(index, []).extend(header.pieces)
        with contextlib.ExitStack() as stack:
            opened: dict[str, Any] = {}
            for payload in payloads.values():
                for spec, (tensor,) in pieces_of(payload):
                    file, begin = self._places[spec.name]
                    if file not in opened:
                        opened[file] = stack.enter_context(open(Path(update.shared, file), "r+b", buffering=0))
                    _write(opened[file].fileno(), begin, update.tensors[spec.name][0], spec.box, tensor)

    def finish(self, update: Update) -> None:
        """Write the index, rename the folder, have it loaded, and remove old versions."""
        size = sum(math.prod(shape) * dtype.itemsize for shape, dtype in update.tensors.values())
        index = {
            "metadata": {"total_size": size, "version": update.version},
            "weight_map": {name: file for name, (file, _) in self._places.items()},
        }
        Path(update.shared, INDEX).write_text(json.dumps(index, indent=1))
        final = self._folder / f"version-{update.version}"
        if final.exists():  # this version was sent before; a rename does not replace a folder that has files
            final.rename(self._folder / f"{_UNFINISHED}old-{update.key}")
        Path(update.shared).rename(final)  # atomic: a reader finds no folder or a complete one
        classes = {
            update.infos[member].id: number for number, one in enumerate(update.classes) for member in one.members
        }
        update.receivers.call("receive_weights", update.key, WeightFolder(str(final), self._sent, classes))
        others = [path for path in self._folder.iterdir() if _FINISHED.fullmatch(path.name) and path != final]
        # By age, not by number: a resumed run counts from its checkpoint's version again.
        for old in sorted(others, key=lambda path: path.stat().st_mtime)[: len(others) - KEPT + 1]:
            shutil.rmtree(old, ignore_errors=True)
        self._remove_unfinished()

    def failed(self, update: Update) -> None:
        if update.rank == 0 and update.shared is not None:
            shutil.rmtree(update.shared, ignore_errors=True)

    def _remove_unfinished(self) -> None:
        for old in self._folder.glob(f"{_UNFINISHED}*"):
            shutil.rmtree(old, ignore_errors=True)


@dataclass(frozen=True)
class WeightFolder(Message):
    """Load the folder of a version.

    Attributes:
        path: of the folder.
        pieces: what is in it, by class of receivers.
        classes: of the receivers, by id.
    """

    path: str
    pieces: dict[int, list[PieceSpec]]
    classes: dict[str, int]

    def receive(self, receiver: Any, key: str) -> None:
        """See `Message.receive`. The pieces are read one by one, on the CPU."""
        receiver.check_update(key)
        folder = Path(self.path)
        if not (folder / INDEX).is_file():
            raise WeightSyncError(
                f"rollout rank {receiver.rank} finds no weights in {folder}: train and rollout workers must mount the "
                "same disk under the same path"
            )
        file_of = json.loads((folder / INDEX).read_text())["weight_map"]
        safe_open = require("safetensors", "hf").safe_open
        with contextlib.ExitStack() as stack:
            opened: dict[str, Any] = {}
            for spec in self.pieces[self.classes[receiver.receiver_id]]:
                file = file_of[spec.name]
                if file not in opened:
                    opened[file] = stack.enter_context(safe_open(str(folder / file), "pt"))
                index = tuple(slice(*dim) for dim in spec.box)
                read = opened[file].get_slice(spec.name)[index] if index else opened[file].get_tensor(spec.name)
                receiver.take(key, Payload([spec], [read]))


def latest(folder: str | os.PathLike[str]) -> Path | None:
    """Return the folder of the version that was written last; None if there is none."""
    found = [path for path in Path(folder).glob("version-*") if _FINISHED.fullmatch(path.name)]
    return max(found, key=lambda path: path.stat().st_mtime, default=None)


class _File(NamedTuple):
    name: str
    header: bytes
    places: dict[str, int]
    """First byte of each tensor."""
    nbytes: int


def _files(tensors: Mapping[str, tuple[tuple[int, ...], torch.dtype]]) -> list[_File]:
    """Divide tensors into safetensors files."""
    groups: list[list[str]] = []
    filled = 0
    # The largest elements first: then all are aligned.
    for name, (shape, dtype) in sorted(tensors.items(), key=lambda one: -one[1][1].itemsize):
        nbytes = math.prod(shape) * dtype.itemsize
        if not groups or filled + nbytes > FILE_BYTES:
            groups.append([])
            filled = 0
        groups[-1].append(name)
        filled += nbytes
    files = []
    for number, names in enumerate(groups, 1):
        about: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        begins, end = {}, 0
        for name in names:
            shape, dtype = tensors[name]
            if dtype not in _DTYPES:
                raise WeightSyncError(f"{name!r} has dtype {dtype}, which safetensors files do not have")
            begins[name], begin, end = end, end, end + math.prod(shape) * dtype.itemsize
            about[name] = {"dtype": _DTYPES[dtype], "shape": list(shape), "data_offsets": [begin, end]}
        text = json.dumps(about).encode()
        text += b" " * (-len(text) % 8)
        header = struct.pack("<Q", len(text)) + text
        places = {name: len(header) + begin for name, begin in begins.items()}
        files.append(_File(f"model-{number:05d}-of-{len(groups):05d}.safetensors", header, places, len(header) + end))
    return files


def _write(file: int, begin: int, shape: tuple[int, ...], box: Box, tensor: torch.Tensor) -> None:
    """Write a box of a tensor that begins at a byte of a file. `os.pwrite` writes exactly these bytes, so ranks may
    write side by side."""
    host = tensor.cpu().contiguous()
    if not host.numel():
        return
    # Rows of the box that follow one another in the file are written at once: those dims at the end that are whole.
    split = len(shape)
    while split and box[split - 1] == (0, shape[split - 1]):
        split -= 1
    split = max(split - 1, 0)  # a range of this dim is contiguous, too
    flat: Any = host.view(-1).view(torch.uint8).numpy()  # memory that `os.pwrite` takes
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
