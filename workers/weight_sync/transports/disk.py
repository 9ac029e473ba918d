"""Weights through files: one folder per version, for anyone who sees the same disk.

``<folder>/version-7`` has safetensors files and an index as Hugging Face writes them (`WeightFiles`); each train rank
writes its own shards. The folder has another name until it is complete, so a folder named version-7 is complete. The
last two versions are kept.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from workers.extras import require
from workers.weight_files import INDEX, WeightFiles
from workers.weight_sync.buckets import BUCKET_BYTES
from workers.weight_sync.pieces import Header, Payload, PieceSpec, pieces_of
from workers.weight_sync.sync_protocol import Message, WeightSyncError
from workers.weight_sync.transports.weight_transport import Transport, Update, call_all

if TYPE_CHECKING:
    import torch

KEPT = 2
"""Versions that are kept on disk."""

_FINISHED = re.compile(r"version-(\d+)")
_UNFINISHED = ".unfinished-"


class DiskTransport(Transport):
    """See the module's docstring.

    Args:
        folder: a folder that all train and rollout workers see, used only by this job. It is created if needed.
    """

    _files: WeightFiles
    """Of the update that has begun."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self._folder = Path(folder).absolute()
        self._sent: dict[int, list[PieceSpec]] = {}
        """On rank 0: the pieces of all train ranks in the update's files, by class."""

    def prepare(self, update: Update) -> str:
        """Create the folder and the files to write to, and remove what earlier updates left unfinished."""
        self._folder.mkdir(parents=True, exist_ok=True)
        self._remove_unfinished()
        new = self._folder / f"{_UNFINISHED}{update.version}-{update.key}"
        new.mkdir()
        update.shared = str(new)  # for `failed`, should what follows fail
        WeightFiles(update.tensors).create(new)
        return str(new)

    def begin(self, update: Update) -> None:
        if not Path(update.shared).is_dir():
            raise WeightSyncError(
                f"train rank {update.rank} does not see {update.shared}, which train rank 0 created; all train and "
                "rollout workers must mount the same file system there"
            )
        self._files, self._sent = WeightFiles(update.tensors), {}

    def transfer(
        self, update: Update, number: int, payloads: dict[int, Payload], headers: list[dict[int, Header]]
    ) -> None:
        """Write the pieces to their places."""
        # Only rank 0 calls the receivers, so only rank 0 needs to know the contents of the files.
        if not update.rank:
            for of_rank in headers:
                for index, header in of_rank.items():
                    self._sent.setdefault(index, []).extend(header.pieces)
        pieces = (piece for payload in payloads.values() for piece in pieces_of(payload))
        self._files.write(Path(update.shared), ((spec.name, spec.box, tensor) for spec, (tensor,) in pieces))

    def finish(self, update: Update) -> None:
        """Write the index, rename the folder, have it loaded, and remove old versions."""
        self._files.write_index(Path(update.shared), version=update.version)
        final = self._folder / f"version-{update.version}"
        if final.exists():  # this version was sent before; a rename does not replace a folder that has files
            final.rename(self._folder / f"{_UNFINISHED}old-{update.key}")
        Path(update.shared).rename(final)  # atomic: a reader finds no folder or a complete one
        update.shared = str(final)  # for `failed`
        classes = {
            update.infos[member].id: number for number, one in enumerate(update.classes) for member in one.members
        }
        call_all(update, "receive_weights", update.key, WeightFolder(str(final), self._sent, classes))
        others = [path for path in self._folder.iterdir() if _FINISHED.fullmatch(path.name) and path != final]
        # By age, not by number: a resumed run counts from its checkpoint's version again.
        for old in sorted(others, key=lambda path: path.stat().st_mtime)[: len(others) - KEPT + 1]:
            shutil.rmtree(old, ignore_errors=True)
        self._remove_unfinished()
        update.shared = None  # it stays, also if a receiver then refuses it: others may have taken it

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
        """Read the pieces in buckets, on the CPU."""
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

            def read(spec: PieceSpec) -> torch.Tensor:
                file = file_of[spec.name]
                if file not in opened:
                    opened[file] = stack.enter_context(safe_open(str(folder / file), "pt"))
                index = tuple(slice(*dim) for dim in spec.box)
                found: torch.Tensor = (
                    opened[file].get_slice(spec.name)[index] if index else opened[file].get_tensor(spec.name)
                )
                return found

            payload = Payload([], [])
            filled = 0
            for spec in self.pieces[self.classes[receiver.receiver_id]]:
                payload.pieces.append(spec)
                payload.tensors.append(read(spec))
                filled += payload.tensors[-1].nbytes
                if filled >= BUCKET_BYTES:
                    receiver.take(key, payload)
                    payload, filled = Payload([], []), 0
            receiver.take(key, payload)
