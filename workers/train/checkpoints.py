"""Checkpoints of a training run: their folders, which one is the latest, and what is stored beside the model.

`RolloutCheckpoints` is the workers' side, `LastCheckpoint` what the driver remembers of it.

Threads: with ``background``, `RolloutCheckpoints.save` starts one thread per checkpoint on each rank. `wait`, which the
next `save` calls first, waits for its end and raises its error, so there is never more than one. It is a daemon: a
worker that ends leaves an incomplete checkpoint, which is never loaded, because `latest.json` names complete ones only.
The thread runs no collectives in the default group, where the main thread runs training's meanwhile; `wait` has the
ranks agree on errors after its end.

Rank 0 deletes old checkpoints in another daemon thread, because that may take longer than the timeout of the collective
in which the other ranks would wait for it. Each such thread first joins the one before. No thread with collectives
ahead joins it: `wait_for_deletion` is called last. There is no lock: before the thread starts, the folders get names
under which nothing is written. If the process ends first, the rest is deleted before the next checkpoint is written.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import shutil
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from pathlib import Path

import torch.distributed as dist
from torch import optim
from torch.distributed.checkpoint.api import CheckpointException

from single_controller import (
    CallTimeoutError,
    GroupBrokenError,
    RayWorkerGroup,
    SingleControllerError,
    WorkerDiedError,
)
from workers.background import in_thread
from workers.distributed import all_or_none
from workers.train.train_model import TrainModel

logger = logging.getLogger(__name__)

LATEST = "latest.json"
POSITION = "position.json"
"""The same content as in `LATEST`, in the folder of each complete checkpoint."""

DRIVER_STATE = "driver_state.pkl"
"""What the driver stored with a checkpoint, in its folder."""

UNWRITTEN = "a checkpoint could not be written"


DELETED = "_deleted"
"""End of the name of a folder that is being deleted."""

_FOLDER = re.compile(rf"rollout_(\d{{7,}})(_again)?({DELETED})?")
"""The names that are made here. Other folders in ``save`` are the user's."""


def folder_of(step: int, again: bool = False) -> str:
    """Return the name of a checkpoint's folder. ``again``: a complete checkpoint of the same step exists beside it."""
    return f"rollout_{step:07d}" + ("_again" if again else "")


def _unfinished(folder: Path) -> Path:
    """Return the file beside a folder that exists while a checkpoint is written into the folder. Without it, a folder
    that is no complete checkpoint may be the user's."""
    return folder.with_name(f"{folder.name}.unfinished")


def _note_of(load: Path, step: int) -> Path:
    """The note of the newest checkpoint of a step; a `ValueError` if there is none."""
    names = folder_of(step), folder_of(step, again=True)
    if notes := [note for name in names if (note := load / name / POSITION).exists()]:
        # Two, if the older one could not be deleted.
        return max(notes, key=lambda note: note.stat().st_mtime)
    existing = ", ".join(sorted(note.parent.name for note in load.glob(f"*/{POSITION}"))) or "none"
    raise ValueError(f"there is no complete checkpoint of ckpt_step={step}; found: {existing}")


def complete_checkpoints(folder: str | None, since: float = 0.0) -> dict[int, Path]:
    """Return the complete checkpoints of a folder that were completed after a time: the last rollout that each was
    trained on -> its own folder."""
    if folder is None:
        return {}
    ages = sorted((note.stat().st_mtime, note) for note in Path(folder).glob(f"*/{POSITION}"))  # the newest counts
    notes = [note for age, note in ages if age >= since and _FOLDER.fullmatch(note.parent.name)]
    return {json.loads(note.read_text())["rollout_id"]: note.parent for note in notes}


def noted(folder: str | Path | None) -> str | None:
    """Return the name of the checkpoint that `LATEST` in a folder names; None if there is none."""
    try:
        return None if folder is None else str(json.loads((Path(folder) / LATEST).read_text())["folder"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


class CheckpointError(SingleControllerError, RuntimeError):
    """A checkpoint could not be written or read."""


@dataclass(frozen=True)
class Position:
    """The position in a run at which a checkpoint was written.

    Attributes:
        folder: the checkpoint.
        rollout_id: the last rollout that the model was trained on.
        optimizer_step: number of optimizer steps so far.
        weight_version: of the weights that the rollout workers had, or of a later update that has failed.
        kl_coef: of the next rollout; None unless it is adaptive.
    """

    folder: Path
    rollout_id: int
    optimizer_step: int
    weight_version: int
    kl_coef: float | None = None


class RolloutCheckpoints:
    """Checkpoints of one role: ``<folder>/rollout_0000019`` after rollout 19, and ``<folder>/latest.json``, which names
    the last complete one. That file is replaced only when a checkpoint is on disk as a whole, so an interrupted one is
    never loaded.

    Args:
        load: folder to read from, or None.
        save: folder to write into, or None.
        rank: of this process; rank 0 writes the JSON files.
        step: rollout id of the checkpoint to read; None for the latest.
        keep: number of the latest checkpoints to keep in ``save``, 1 at least; None keeps all.
        keep_every: also keep each checkpoint after a multiple of this many rollouts.
    """

    def __init__(
        self,
        load: str | None,
        save: str | None,
        rank: int,
        step: int | None = None,
        *,
        keep: int | None = None,
        keep_every: int | None = None,
    ) -> None:
        self._load = None if load is None else Path(load)
        self._save = None if save is None else Path(save)
        self._rank = rank
        self._step = step
        self._keep, self._keep_every = keep, keep_every
        self._writing: Future[None] | None = None
        self._deleting: threading.Thread | None = None
        self._found: Position | None = None

    def find(self) -> Position | None:
        """Find the latest complete checkpoint in ``load``, or that of ``step``. All ranks get the same result.

        Returns:
            The checkpoint; None if there is none at all.

        Raises:
            CheckpointError: the JSON file cannot be read, or there is no checkpoint of that step.
        """
        found: list[Position | str | None] = [None]
        if self._load is not None and not self._rank:
            try:
                found = [self._read(self._load)]
            except (OSError, ValueError) as error:
                found = [str(error)]
            except (KeyError, TypeError) as error:
                found = [f"its note of the position is damaged: {type(error).__name__}: {error}"]
        # Rank 0 decides for all ranks, because another host may see an older state of the folder.
        dist.broadcast_object_list(found, src=0)
        if found[0] is None:
            if self._load is not None and not self._rank:
                logger.warning("load=%s has no complete checkpoint; the run starts with rollout 0", self._load)
            elif self._save is not None and not self._rank and (self._save / LATEST).exists():
                logger.warning(
                    "save=%s has checkpoints of another run, up to %s. This run overwrites%s them one by one. To "
                    "continue from them, set load; to keep them, choose another folder",
                    self._save,
                    noted(self._save),
                    "" if self._keep is None else " or deletes",
                )
            return None
        if isinstance(found[0], str):
            raise CheckpointError(
                f"cannot determine which checkpoint to load from load={str(self._load)!r}: {found[0]}"
            )
        self._found = found[0]
        return self._found

    def driver_state(self) -> bytes | None:
        """Return the ``driver_state`` of the checkpoint that `find` has found; None if there is none.

        Raises:
            CheckpointError: it cannot be read, or the checkpoint was deleted after it was loaded.
        """
        if self._found is None:
            return None
        folder = self._found.folder
        try:
            return (folder / DRIVER_STATE).read_bytes()
        except FileNotFoundError:
            if folder.exists():
                return None
            raise CheckpointError(
                f"{str(folder)!r} was deleted after it was loaded, including its driver_state. Call "
                "load_driver_state() before save_model(), or increase save_keep"
            ) from None
        except OSError as error:
            raise CheckpointError(f"the state of the driver cannot be read: {error}") from error

    def _read(self, load: Path) -> Position | None:
        note = load / LATEST if self._step is None else _note_of(load, self._step)
        if not note.exists():
            return None
        about = json.loads(note.read_text())
        return Position(**{**about, "folder": load / about["folder"]})

    def save(
        self,
        model: TrainModel,
        step: int,
        *,
        optimizer_step: int,
        weight_version: int,
        kl_coef: float | None = None,
        background: bool,
        driver_state: bytes | None = None,
    ) -> str | None:
        """Write a checkpoint; all ranks call it.

        Args:
            model: the model to save.
            step: see `Position.rollout_id`.
            optimizer_step, weight_version, kl_coef: see `Position`.
            background: return as soon as the state is copied, and write it in a thread.
            driver_state: what to store beside the model; only rank 0's counts.

        Returns:
            The folder; None without a ``save`` folder.

        Raises:
            CheckpointError: on all ranks: this checkpoint or the one before it could not be written.
        """
        self.wait()
        if self._save is None:
            return None
        folder = self._save / self._name(step)
        with all_or_none(CheckpointError, UNWRITTEN):
            if not self._rank:
                self._save.mkdir(parents=True, exist_ok=True)
                if self._keep is not None:  # before saving, because the new checkpoint may need their disk space
                    with _logged_errors(self._save, "could not be searched for old checkpoints"):
                        self._begin_deletion(self._save, _interrupted(self._save, folder))
                # Write the mark before the folder, to distinguish an interrupted save from a folder of the user.
                _unfinished(folder).touch()
                folder.mkdir(exist_ok=True)
                # The folder may contain an old checkpoint of this step, or parts of one, possibly of more ranks.
                for old in (folder / POSITION, folder / DRIVER_STATE, *folder.glob("*.distcp")):
                    old.unlink(missing_ok=True)
                if driver_state is not None:
                    (folder / DRIVER_STATE).write_bytes(driver_state)
        with all_or_none(CheckpointError, UNWRITTEN):
            self._save.mkdir(parents=True, exist_ok=True)  # NFS may have cached here that there is none
            # torch would create the folder there, and the checkpoint would count as complete without this rank's part.
            if not (mark := _unfinished(folder).absolute()).exists():
                raise FileNotFoundError(f"there is no {mark}, which rank 0 has written: save= is not on a shared disk")
        try:
            model.save(folder, background=background)
        except (Exception, CheckpointException) as error:  # not an Exception subclass; torch raises it on all ranks
            raise CheckpointError(f"{UNWRITTEN}: {type(error).__name__}: {error}") from error
        at = Position(folder, step, optimizer_step, weight_version, kl_coef)
        if background:
            self._writing = in_thread("checkpoint", lambda: self._finish(model, at))
        else:
            with all_or_none(CheckpointError, UNWRITTEN):  # rank 0 alone writes here, so it alone may fail
                self._note(at)
        return str(folder)

    def _name(self, step: int) -> str:
        """Return the folder's name. The latest complete checkpoint is never overwritten, even if it is of this step."""
        name = [folder_of(step)]
        if not self._rank and noted(self._save) == name[0]:
            name = [folder_of(step, again=True)]
        # Rank 0 decides for all here too.
        dist.broadcast_object_list(name, src=0)
        return name[0]

    def wait(self) -> None:
        """Wait for the checkpoint that is being written in the background. All ranks call it.

        Raises:
            CheckpointError: on all ranks: it could not be written.
        """
        writing, self._writing = self._writing, None
        if writing is None:
            return
        error = writing.exception()
        with all_or_none(CheckpointError, UNWRITTEN):
            if error is not None:
                raise error

    def wait_for_deletion(self) -> None:
        """Wait until old checkpoints are deleted. Each rank calls it after its last collective, without the others."""
        if self._deleting is not None:
            self._deleting.join()

    def _finish(self, model: TrainModel, at: Position) -> None:
        try:
            model.wait_for_save()  # on rank 0, it returns only after every rank has written its files
            self._note(at)
        except CheckpointException as error:  # not an Exception subclass
            raise RuntimeError(str(error)) from error

    def _note(self, at: Position) -> None:
        if self._rank or self._save is None:
            return
        for file in at.folder.iterdir():
            if file.suffix != ".distcp":  # torch has synchronized these files, on each rank
                _sync(file)
        # Each step leaves a complete checkpoint that `LATEST` names: the old one is removed last.
        before = noted(self._save)
        note = {name: value for name, value in asdict(at).items() if value is not None} | {"folder": at.folder.name}
        # Keep this order: the folder that `LATEST` names must already contain a note.
        for file in (at.folder / POSITION, self._save / LATEST):
            fresh = file.with_name(f"{file.name}.new")
            fresh.write_text(json.dumps(note) + "\n")
            _sync(fresh)
            os.replace(fresh, file)  # atomic: a reader sees no file, the old one or the new one
        with _logged_errors(at.folder, "is complete, but its mark was not removed"):
            _unfinished(at.folder).unlink(missing_ok=True)
        of_this_step = {folder_of(at.rollout_id), folder_of(at.rollout_id, again=True)}
        old = [self._save / before] if before in of_this_step - {at.folder.name} else []
        if self._keep is not None:
            with _logged_errors(self._save, "could not be searched for old checkpoints"):
                old += self._to_delete(self._save, {at.folder, *old}, self._keep)
        if old:
            self._begin_deletion(self._save, old)

    def _begin_deletion(self, save: Path, folders: Iterable[Path]) -> None:
        """Delete these folders in a thread, and folders whose deletion was interrupted by the end of a process."""
        for folder in folders:
            with _logged_errors(folder, "could not be deleted"):
                # First, and at once: from here on it is no checkpoint, however much of it is deleted.
                deleted = folder.rename(folder.with_name(folder.name + DELETED))
                (deleted / POSITION).unlink(missing_ok=True)
                _unfinished(folder).unlink(missing_ok=True)
        self._deleting = threading.Thread(
            target=_delete, args=(save, self._deleting), name="checkpoint-deletion", daemon=True
        )
        self._deleting.start()

    def _to_delete(self, save: Path, others: set[Path], keep: int) -> list[Path]:
        """Return the complete checkpoints to delete. ``others``, which include the latest one, are left out."""
        complete: list[tuple[float, Path, int]] = []
        for folder in save.iterdir():
            name = _FOLDER.fullmatch(folder.name)
            if folder not in others and name is not None and not name[3] and (folder / POSITION).exists():
                complete.append(((folder / POSITION).stat().st_mtime, folder, int(name[1])))
        # By age, not by number: a run that continued from an earlier checkpoint counts from there again.
        older = sorted(complete)[: max(len(complete) - keep + 1, 0)]
        every = self._keep_every
        return [folder for _, folder, step in older if every is None or (step + 1) % every]


def _sync(file: Path) -> None:
    """Flush a file to the disk, so that it survives a power failure of the host."""
    opened = os.open(file, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


def _interrupted(save: Path, new: Path) -> list[Path]:
    """Return the folders that interrupted saves have left, except the folder that is written next."""
    marked = (save / mark.stem for mark in save.glob("*.unfinished") if _FOLDER.fullmatch(mark.stem))
    return [folder for folder in marked if folder != new and folder.is_dir() and not (folder / POSITION).exists()]


@contextlib.contextmanager
def _logged_errors(path: Path, what: str) -> Iterator[None]:
    """Only log errors. They leave old checkpoints behind, which the next checkpoint tries to delete again."""
    try:
        yield
    except OSError as error:
        logger.warning("%s %s: %s: %s", path, what, type(error).__name__, error)


def _delete(save: Path, before: threading.Thread | None) -> None:
    """Delete all folders of ``save`` that have the name for it, after the thread ``before`` has ended."""
    if before is not None:
        before.join()
    with _logged_errors(save, "could not be searched for old checkpoints"):
        for folder in list(save.iterdir()):
            if (name := _FOLDER.fullmatch(folder.name)) and name[3]:
                with _logged_errors(folder, "could not be deleted"):
                    shutil.rmtree(folder)


class LastCheckpoint:
    """What a train group on the driver remembers of its workers' checkpoints: whether they have completed one since
    they were initialized, so that new workers can continue from it.

    Attributes:
        writing: whether one is being written in the background, as far as the driver knows.
    """

    def __init__(self) -> None:
        self.writing = False
        self._complete = False
        # One item, once they have begun to write: the name in `LATEST` before. Each checkpoint gets another name than
        # the one before it.
        self._before: tuple[str | None] | None = None
        # Whether one may be being written in the background of a call that has failed, or was left.
        self._unknown = False

    def begin(self, workers: RayWorkerGroup, folder: str | None) -> None:
        """`save_model` is about to be called, with this ``args.save``."""
        if not self._complete:
            self._look(workers, folder)
        # Until `failing` sees its end, if ever: it may be interrupted, or another driver may take the workers over.
        self._unknown = folder is not None

    def _look(self, workers: RayWorkerGroup, folder: str | None) -> None:
        """Find out whether `LATEST` names a checkpoint of these workers."""
        latest = workers.execute_with_func_generator(lambda _, where: noted(where), folder)[0]
        if self._before is None:
            self._before = (latest,)
        self._complete = latest not in (None, *self._before)

    def begun(self, *, background: bool) -> None:
        """`save_model` has returned. The checkpoint before it is complete, because `save_model` waits for it."""
        self._complete = self._complete or self.writing or not background
        self.writing = background

    def interrupted(self, role: str) -> None:
        """Workers have died. `exists` looks what has become of a checkpoint that was being written."""
        if self.writing:
            logger.warning("the %s's checkpoint that was being written may not be complete; save it again", role)
        self.writing = self._unknown = False

    def ended(self) -> None:
        """The checkpoint that was being written is complete."""
        self._complete, self.writing = self._complete or self.writing, False

    @contextlib.contextmanager
    def failing(self, *, background: bool = False) -> Iterator[None]:
        """Inside, an error means that the checkpoint that was being written is incomplete, or may be. ``background``:
        whether one may be being written all the same."""
        try:
            yield
        except SingleControllerError:
            self.writing, self._unknown = False, background
            raise
        self._unknown = False

    def wait(self, workers: RayWorkerGroup, seconds: float, role: str) -> None:
        """Wait for the checkpoint that workers are writing, before they are ended.

        Raises:
            SingleControllerError: it could not be written. If workers died or are late, this is only logged.
        """
        if not (self.writing or self._unknown) or workers.closed or workers.broken:
            return
        try:
            with self.failing():
                workers.wait_for_save.options(timeout=seconds)()
        except (WorkerDiedError, GroupBrokenError, CallTimeoutError) as error:
            logger.warning("the %s's last checkpoint may not be complete: %s", role, error)
        else:
            self.ended()

    def exists(self, workers: RayWorkerGroup, folder: str) -> bool:
        """Whether there is a checkpoint to continue from. Workers that died, or failed after one was complete, could
        not report that it was, so the new workers look in the folder. A checkpoint of another run in the same folder
        does not count."""
        self.writing = self._unknown = False
        if not self._complete and self._before is not None:
            self._look(workers, folder)
        return self._complete


_OPTIMIZER_SETTINGS = ("lr", "betas", "eps", "weight_decay")


@contextlib.contextmanager
def own_settings(*optimizers: optim.Optimizer) -> Iterator[None]:
    """Inside, states of optimizers are loaded; afterwards their groups have the settings that they had before, whatever
    the checkpoint was written with."""
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    before = [{name: group[name] for name in _OPTIMIZER_SETTINGS if name in group} for group in groups]
    yield
    after = [group for optimizer in optimizers for group in optimizer.param_groups]
    for group, own in zip(after, before, strict=True):
        group.update(own)
