"""Weights through files: one folder per version, for anyone who sees the same disk.

``<folder>/version-7`` has safetensors files and an index as Hugging Face writes them. It is written under another name
and then renamed, so a folder named version-7 is complete. The last two versions are kept.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from workers.extras import require
from workers.weight_sync.protocol import Message, Pair, Transport, Update, WeightSyncError

KEPT = 2
"""Versions that are kept on disk."""

INDEX = "model.safetensors.index.json"
_FINISHED = re.compile(r"version-(\d+)")
_UNFINISHED = ".unfinished-"


class DiskTransport(Transport):
    """See the module's docstring.

    Args:
        folder: a folder that all train and rollout workers see, used only by this job. It is created if needed.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self._folder = Path(folder).absolute()
        self._file_of: dict[str, str] = {}  # tensor name -> file, of this rank
        self._bytes = 0

    def prepare(self, update: Update) -> str:
        """Create the folder to write to, and remove what earlier updates left unfinished."""
        self._folder.mkdir(parents=True, exist_ok=True)
        self._remove_unfinished()
        new = self._folder / f"{_UNFINISHED}{update.version}-{update.key}"
        new.mkdir()
        return str(new)

    def begin(self, update: Update) -> None:
        """See `Transport.begin`."""
        self._file_of, self._bytes = {}, 0

    def send(self, update: Update, bucket: Sequence[Pair]) -> None:
        """Write a file."""
        name = f"part-{update.rank:05d}-{len(set(self._file_of.values())):05d}.safetensors"
        seen: set[int] = set()
        tensors: dict[str, torch.Tensor] = {}
        for key, tensor in bucket:
            host = tensor.cpu().contiguous()
            address = host.untyped_storage().data_ptr()
            tensors[key] = host.clone() if address in seen else host  # safetensors refuses tensors that share memory
            seen.add(address)
        if not Path(update.shared).is_dir():
            raise WeightSyncError(
                f"train rank {update.rank} does not see {update.shared}, which train rank 0 created; all train and "
                "rollout workers must mount the same file system there"
            )
        require("safetensors.torch", "hf").save_file(tensors, os.path.join(update.shared, name), {"format": "pt"})
        self._file_of |= dict.fromkeys(tensors, name)
        self._bytes += sum(tensor.nbytes for tensor in tensors.values())

    def flush(self, update: Update) -> tuple[dict[str, str], int]:
        """See `Transport.flush`."""
        return self._file_of, self._bytes

    def finish(self, update: Update, flushed: list[Any]) -> None:
        """Write the index, rename the folder, have it loaded, and remove old versions."""
        index = {
            "metadata": {"total_size": sum(size for _, size in flushed), "version": update.version},
            "weight_map": {name: file for file_of, _ in flushed for name, file in file_of.items()},
        }
        Path(update.shared, INDEX).write_text(json.dumps(index, indent=1))
        final = self._folder / f"version-{update.version}"
        if final.exists():  # this version was sent before; a rename does not replace a folder that has files
            final.rename(self._folder / f"{_UNFINISHED}old-{update.key}")
        Path(update.shared).rename(final)  # atomic: a reader finds no folder or a complete one
        update.receivers.call("receive_weights", update.key, WeightFolder(str(final)))
        others = [path for path in self._folder.iterdir() if _FINISHED.fullmatch(path.name) and path != final]
        # By age, not by number: a resumed run counts from its checkpoint's version again.
        for old in sorted(others, key=lambda path: path.stat().st_mtime)[: len(others) - KEPT + 1]:
            shutil.rmtree(old, ignore_errors=True)
        self._remove_unfinished()

    def failed(self, update: Update) -> None:
        """See `Transport.failed`."""
        if update.rank == 0 and update.shared is not None:
            shutil.rmtree(update.shared, ignore_errors=True)

    def _remove_unfinished(self) -> None:
        for old in self._folder.glob(f"{_UNFINISHED}*"):
            shutil.rmtree(old, ignore_errors=True)


@dataclass(frozen=True)
class WeightFolder(Message):
    """Load the folder of a version."""

    path: str

    def receive(self, receiver: Any, key: str) -> None:
        """See `Message.receive`. Tensors are read file by file, on the CPU."""
        receiver.check_update(key)
        folder = Path(self.path)
        if not (folder / INDEX).is_file():
            raise WeightSyncError(
                f"rollout rank {receiver.rank} finds no weights in {folder}: train and rollout workers must mount the "
                "same disk under the same path"
            )
        index = json.loads((folder / INDEX).read_text())
        for file in sorted(set(index["weight_map"].values())):
            with require("safetensors", "hf").safe_open(str(folder / file), "pt") as opened:
                names = opened.keys()
                receiver.load_bucket(key, [(name, opened.get_tensor(name)) for name in names])


def latest(folder: str | os.PathLike[str]) -> Path | None:
    """Return the folder of the version that was written last; None if there is none."""
    found = [path for path in Path(folder).glob("version-*") if _FINISHED.fullmatch(path.name)]
    return max(found, key=lambda path: path.stat().st_mtime, default=None)
