"""LastCheckpoint: what a train group remembers of the checkpoints that its workers have begun to write."""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from single_controller import (
    Broadcast,
    CallTimeoutError,
    GroupBrokenError,
    RayWorkerGroup,
    SingleControllerError,
    WorkerDiedError,
)
from workers.train.checkpoints import LATEST

logger = logging.getLogger(__name__)


class LastCheckpoint:
    """Whether workers have written a checkpoint since they were initialised, so that others can go on from it.

    Attributes:
        writing: one is being written in the background, as far as this process knows.
    """

    def __init__(self) -> None:
        self.writing = False
        self._complete = False
        self._background: set[str] = set()  # names of folders

    def begun(self, folder: str, *, background: bool) -> None:
        """`save_model` has returned, for which the one before had to be complete."""
        self._complete = self._complete or self.writing or not background
        self.writing = background
        if background:
            self._background.add(Path(folder).name)

    def ended(self) -> None:
        """What was being written is complete."""
        self._complete, self.writing = self._complete or self.writing, False

    @contextlib.contextmanager
    def failing(self) -> Iterator[None]:
        """Inside, an error says that what was being written is not complete, or that nobody knows."""
        try:
            yield
        except SingleControllerError:
            self.writing = False
            raise

    def wait(self, workers: RayWorkerGroup, seconds: float, role: str) -> None:
        """Before workers are ended, wait for what they write.

        Raises:
            SingleControllerError: what went wrong with it, unless it is that workers were lost.
        """
        if not self.writing or workers.closed or workers.broken:
            return
        try:
            with self.failing():
                workers.wait_for_save.options(timeout=seconds)()
        except (WorkerDiedError, GroupBrokenError, CallTimeoutError) as error:
            logger.warning("the %s's last checkpoint may not be complete: %s", role, error)
        else:
            self.ended()

    def exists(self, workers: RayWorkerGroup, folder: str) -> bool:
        """Whether there is one to go on from. Workers that were lost could not say whether the last one was complete:
        those that follow them look, and are not misled by another run's in the same folder."""
        self.writing = False
        if not self._complete and self._background:
            names = Broadcast(self._background)
            self._complete = bool(workers.execute_with_func_generator(_latest_is_of, folder, names)[0])
        return self._complete


def _latest_is_of(worker: Any, folder: str, names: set[str]) -> bool:
    note = Path(folder) / LATEST
    return note.exists() and json.loads(note.read_text())["folder"] in names
