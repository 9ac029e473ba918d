"""RolloutCheckpoints: where checkpoints lie, which one is the latest, and what is noted beside the model."""

from __future__ import annotations

import json
import logging
import os
import shutil
import threading
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from single_controller import SingleControllerError
from workers.distributed import all_or_none
from workers.train.model import TrainModel

logger = logging.getLogger(__name__)

LATEST = "latest.json"
POSITION = "position.json"
"""The same note, in the folder of each checkpoint that is complete."""

UNWRITTEN = "a checkpoint could not be written"


def folder_of(step: int, again: bool = False) -> str:
    """The name of a checkpoint's folder; of one that is written beside a complete one of the same step."""
    return f"rollout_{step:07d}" + ("_again" if again else "")


class CheckpointError(SingleControllerError, RuntimeError):
    """A checkpoint could not be written, or what is there cannot be read."""


@dataclass(frozen=True)
class Position:
    """Where in a run a checkpoint was written.

    Attributes:
        folder: the checkpoint.
        rollout_id: the last rollout that the model has learnt from.
        optimizer_step: steps of the optimizer so far.
        weight_version: of the weights that the rollout workers had.
    """

    folder: Path
    rollout_id: int
    optimizer_step: int
    weight_version: int


class RolloutCheckpoints:
    """Checkpoints of one role: ``<folder>/rollout_0000019`` after rollout 19, and ``<folder>/latest.json``, which names
    the last one that is complete. It is replaced when all of a checkpoint is on disk: one that was interrupted is never
    gone on from.

    Args:
        load: folder to read from, or None.
        save: folder to write into, or None.
        rank: of this process; rank 0 writes the notes.
        step: rollout id of the checkpoint to read; None for the latest.
    """

    def __init__(self, load: str | None, save: str | None, rank: int, step: int | None = None) -> None:
        self._load = None if load is None else Path(load)
        self._save = None if save is None else Path(save)
        self._rank = rank
        self._step = step
        self._writing: threading.Thread | None = None
        self._error: Exception | None = None

    def find(self) -> Position | None:
        """The latest complete checkpoint in ``load``, or that of the step; None if there is none at all. All ranks find
        the same one.

        Raises:
            CheckpointError: its note cannot be read, or there is none of that step.
        """
        found: list[Any] = [None]
        if self._load is not None and not self._rank:
            try:
                found = [self._read(self._load)]
            except (OSError, ValueError) as error:
                found = [str(error)]
        dist.broadcast_object_list(found, src=0)
        if found[0] is None or self._load is None:
            if self._load is not None and not self._rank:
                logger.warning("load=%s has no complete checkpoint: the run begins with rollout 0", self._load)
            elif self._save is not None and not self._rank and (self._save / LATEST).exists():
                logger.warning(
                    "save=%s has checkpoints of another run, up to %s, which are written over one by one: set load to "
                    "go on from them, or save elsewhere",
                    self._save,
                    self._noted(),
                )
            return None
        if isinstance(found[0], str):
            raise CheckpointError(f"the checkpoint to go on from in {str(self._load)!r} is not known: {found[0]}")
        return Position(**{**found[0], "folder": self._load / found[0]["folder"]})

    def _read(self, load: Path) -> Any:
        if self._step is None:
            return json.loads((load / LATEST).read_text()) if (load / LATEST).exists() else None
        for name in (folder_of(self._step), folder_of(self._step, again=True)):
            if (load / name / POSITION).exists():
                return json.loads((load / name / POSITION).read_text())
        having = ", ".join(sorted(note.parent.name for note in load.glob(f"*/{POSITION}"))) or "none"
        raise ValueError(f"there is no complete one of ckpt_step={self._step}; there are {having}")

    def save(
        self, model: TrainModel, step: int, *, optimizer_step: int, weight_version: int, background: bool
    ) -> str | None:
        """Write a checkpoint; all ranks call it.

        Args:
            model: what is saved.
            step: the rollout after which it is.
            optimizer_step: see `Position`.
            weight_version: see `Position`.
            background: return when the state is copied.

        Returns:
            The folder; None where there is none to write into.

        Raises:
            CheckpointError: on all ranks: this one could not be written, or the one before it.
        """
        self.wait()
        if self._save is None:
            return None
        folder = self._save / self._name(step)
        with all_or_none(CheckpointError, UNWRITTEN):
            if not self._rank:
                folder.mkdir(parents=True, exist_ok=True)
                (folder / POSITION).unlink(missing_ok=True)  # of one of this step that is written over
        try:
            model.save(folder, background=background)
        except (Exception, CheckpointException) as error:  # the latter is no Exception, and all ranks raise it
            raise CheckpointError(f"{UNWRITTEN}: {type(error).__name__}: {error}") from error
        at = Position(folder, step, optimizer_step, weight_version)
        if background:
            self._writing = threading.Thread(target=self._finish, args=(model, at), name="checkpoint", daemon=True)
            self._writing.start()
        else:
            with all_or_none(CheckpointError, UNWRITTEN):
                self._note(at)
        return str(folder)

    def _name(self, step: int) -> str:
        """The folder's name: another one than that of the latest complete checkpoint, also if that is of this step."""
        name = [folder_of(step)]
        if not self._rank and self._noted() == name[0]:
            name = [folder_of(step, again=True)]
        dist.broadcast_object_list(name, src=0)
        return name[0]

    def _noted(self) -> str | None:
        """The folder that the note names."""
        try:
            return None if self._save is None else str(json.loads((self._save / LATEST).read_text())["folder"])
        except (OSError, ValueError, KeyError):
            return None

    def wait(self) -> None:
        """Wait until what is written in the background is on disk; all ranks call it.

        Raises:
            CheckpointError: on all ranks: it could not be written.
        """
        writing, self._writing = self._writing, None
        if writing is None:
            return
        writing.join()
        error, self._error = self._error, None
        with all_or_none(CheckpointError, UNWRITTEN):
            if error is not None:
                raise error

    def _finish(self, model: TrainModel, at: Position) -> None:
        try:
            model.wait_for_save()
            self._note(at)
        except CheckpointException as error:
            self._error = RuntimeError(str(error))
        except Exception as error:
            self._error = error

    def _note(self, at: Position) -> None:
        if self._rank or self._save is None:
            return
        before = self._noted()
        note = {**asdict(at), "folder": at.folder.name}
        (at.folder / POSITION).write_text(json.dumps(note) + "\n")
        fresh = self._save / f"{LATEST}.new"
        fresh.write_text(json.dumps(note) + "\n")
        os.replace(fresh, self._save / LATEST)
        of_this_step = {folder_of(at.rollout_id), folder_of(at.rollout_id, again=True)}
        if before in of_this_step - {at.folder.name}:
            shutil.rmtree(self._save / before, ignore_errors=True)
