"""Weights through files: a folder for each version, which anybody may load who sees the same disk.

``<folder>/version-7`` has safetensors files and an index as Hugging Face writes them. It is written under another
name and then renamed, so what is called version-7 is whole. The last two versions stay.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from workers.extras import require
from workers.train.weight_buckets import Pair, WeightSyncError
from workers.train.weight_transport import Transport, Update

KEPT = 2
"""Versions that stay on disk."""

INDEX = "model.safetensors.index.json"
_FINISHED = re.compile(r"version-(\d+)")
_UNFINISHED = ".unfinished-"


class DiskTransport(Transport):
    """See this file's docstring.

    Args:
        folder: that train and rollout workers all see; it is made, and is this job's own.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self._folder = Path(folder).absolute()
        self._written: dict[str, str] = {}
        self._bytes = 0

    def prepare(self, update: Update) -> str:
        """Make the folder that is written to; what earlier updates left unfinished goes."""
        self._folder.mkdir(parents=True, exist_ok=True)
        for old in self._folder.glob(f"{_UNFINISHED}*"):
            shutil.rmtree(old, ignore_errors=True)
        new = self._folder / f"{_UNFINISHED}{update.version}-{update.key}"
        new.mkdir()
        return str(new)

    def begin(self, update: Update) -> None:
        """See `Transport.begin`."""
        self._written, self._bytes = {}, 0

    def send(self, update: Update, bucket: Sequence[Pair]) -> None:
        """Write a file."""
        files = len(set(self._written.values()))
        name = f"part-{update.ranks.rank:05d}-{files:05d}.safetensors"
        seen: set[int] = set()
        tensors: dict[str, torch.Tensor] = {}
        for key, tensor in bucket:
            host = tensor.cpu().contiguous()
            place = host.untyped_storage().data_ptr()
            tensors[key] = host.clone() if place in seen else host  # a file does not take two tensors of one memory
            seen.add(place)
        if not Path(update.shared).is_dir():
            raise WeightSyncError(f"rank {update.ranks.rank} does not see {update.shared}, which rank 0 made")
        require("safetensors.torch", "hf").save_file(tensors, os.path.join(update.shared, name), {"format": "pt"})
        self._written |= dict.fromkeys(tensors, name)
        self._bytes += sum(tensor.nbytes for tensor in tensors.values())

    def flush(self, update: Update) -> tuple[dict[str, str], int]:
        """See `Transport.flush`."""
        return self._written, self._bytes

    def finish(self, update: Update, flushed: list[Any]) -> None:
        """Write the index, give the folder its name, and have it read."""
        index = {
            "metadata": {"total_size": sum(size for _, size in flushed), "version": update.version},
            "weight_map": {name: file for written, _ in flushed for name, file in written.items()},
        }
        Path(update.shared, INDEX).write_text(json.dumps(index, indent=1))
        final = self._folder / f"version-{update.version}"
        if final.exists():  # the same version once more: a rename takes no folder's place
            final.rename(self._folder / f"{_UNFINISHED}old-{update.key}")
        Path(update.shared).rename(final)
        update.receivers.call("load_weight_folder", update.key, str(final))

    def settle(self, update: Update) -> None:
        """Remove what is older than the last two."""
        here = {path: int(match[1]) for path in self._folder.iterdir() if (match := _FINISHED.fullmatch(path.name))}
        others = [path for path in here if here[path] != update.version]
        by_age = sorted(others, key=lambda path: path.stat().st_mtime)  # after a resume, numbers begin anew
        for old in (*by_age[: len(others) - KEPT + 1], *self._folder.glob(f"{_UNFINISHED}*")):
            shutil.rmtree(old, ignore_errors=True)

    def failed(self, update: Update) -> None:
        """See `Transport.failed`."""
        if update.ranks.rank == 0 and update.shared is not None:
            shutil.rmtree(update.shared, ignore_errors=True)


def latest(folder: str | os.PathLike[str]) -> Path | None:
    """The folder of the version that was written last; None if there is none."""
    found = [path for path in Path(folder).glob("version-*") if _FINISHED.fullmatch(path.name)]
    return max(found, key=lambda path: path.stat().st_mtime, default=None)


def read_folder(folder: Path) -> Iterator[list[Pair]]:
    """The tensors of a version, file by file, on the CPU.

    Raises:
        WeightSyncError: there is no such folder.
    """
    if not (folder / INDEX).is_file():
        raise WeightSyncError(
            f"there are no weights in {folder} here: train and rollout workers must see the same disk under the same "
            "name"
        )
    index = json.loads((folder / INDEX).read_text())
    for file in sorted(set(index["weight_map"].values())):
        with require("safetensors", "hf").safe_open(str(folder / file), "pt") as opened:
            yield [(name, opened.get_tensor(name)) for name in opened.keys()]  # noqa: SIM118  (it is no dict)
