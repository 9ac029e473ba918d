"""GroupRecovery: keeps a group of rollout workers going, and at its size, when workers die.

Threads: "rollout-grow" starts workers in the place of those that died, while the others generate. Each one makes one
attempt and ends with it, also if the stream is closed meanwhile: the group belongs to the user, who gets it back whole.
Everything else is called in the router's thread. No locks.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Hashable
from concurrent.futures import Future
from typing import Any

from single_controller import GroupBrokenError, GroupClosedError, PlacementError, SingleControllerError
from workers.background import in_thread

logger = logging.getLogger(__name__)

RETRY_SECONDS = (1.0, 60.0)
"""How long after a failed attempt the next one begins: at first, and at most."""


class GroupRecovery:
    """See the module's docstring.

    Args:
        group: of the rollout workers.

    Attributes:
        deaths: how often workers have died, so far. Those that died together count once.
    """

    def __init__(self, group: Any) -> None:
        self.deaths = 0
        self._group = group
        self._local: list[Hashable] = []
        self._refused: int | None = None
        """The group's generation when it last refused a call."""
        self._size = 0
        """How many ranks the group had before it lost those that are to be started again."""
        self._growing: Future[int] | None = None
        self._tries = 0
        self._next_try = 0.0

    def members(self) -> list[Hashable]:
        """Return what identifies the process of each rank. A rank has another one after it was restarted."""
        actors = getattr(self._group, "workers", None)  # a local group has none
        if actors is not None:
            return list(actors)
        self._local += [object() for _ in range(self._group.world_size - len(self._local))]
        return list(self._local)

    @property
    def _missing(self) -> int:
        """How many ranks are to be started. A restart of the whole group, by whomever, brings all of them back."""
        now: int = self._group.world_size
        return max(0, self._size - now)

    @property
    def due(self) -> bool:
        """Whether `grow` has something to do."""
        if self._growing is not None:
            return self._growing.done()
        return self._missing > 0 and time.monotonic() >= self._next_try

    def recover(self, error: SingleControllerError, *, elastic: bool) -> None:
        """Go on without the workers that died, if others are left and do not depend on them; otherwise restart them.

        Args:
            error: of the call that has failed.
            elastic: whether workers may have other ranks afterwards.

        Raises:
            SingleControllerError: they cannot be restarted.
        """
        group = self._group
        if group.broken is None:
            return  # somebody else has repaired it
        if isinstance(error, GroupBrokenError) and self._refused != group.generation:
            # Somebody else may be repairing it just now: the next call waits for that.
            self._refused = group.generation
            return
        lost = sorted({*getattr(error, "ranks", ()), *(rank for rank, alive in enumerate(group.alive()) if not alive)})
        cause = str(error).partition("\n")[0]
        self.deaths += 1
        elastic = elastic and not group.collectives and hasattr(group, "shrink")
        # A standby takes the rank of a worker that has died, and may be the only process on a host that is left.
        if elastic and len(group.standbys()) < max(1, len(lost)):
            try:
                size, dropped = group.world_size, group.shrink(lost or None)
            except SingleControllerError as failed:
                logger.debug("the group cannot go on without %s: %s", lost, failed)
            else:
                self._size = max(self._size, size)
                logger.warning("the rollout workers %s are replaced; the others go on: %s", [*dropped], cause)
                return
        logger.warning("restarting the rollout workers %s: %s", lost or "", cause)
        try:
            group.restart(ranks=lost or None)
        except ValueError:  # the ranks use collectives
            group.restart()
            lost = []
        lost = lost or list(range(group.world_size))
        for rank in lost[: len(self._local)]:
            self._local[rank] = object()

    def grow(self) -> None:
        """Begin to start workers in the place of those that died, or look whether that has ended."""
        if self._growing is None and not self._missing:
            self._size = self._tries = 0  # whoever drops ranks from now on does not want them back
        if not self.due:
            return
        # Clear the attempt before its error is raised, so that the next call starts another one.
        attempt, self._growing = self._growing, None
        if attempt is None:
            # One at a time if there is not room for all, as after the loss of a host.
            count = 1 if self._tries % 2 else max(1, self._missing)  # another thread may have restarted the group
            self._growing = in_thread("rollout-grow", lambda: len(self._group.grow(count)))
            return
        error = attempt.exception()
        if error is None:
            self._tries = 0
        elif isinstance(error, GroupClosedError) or not isinstance(error, SingleControllerError):
            raise error
        elif self._missing:
            wait = min(RETRY_SECONDS[0] * 2 ** min(self._tries, 10), RETRY_SECONDS[1])
            # Retry at once: the next attempt asks for one worker, for which there may be room.
            wait = 0.0 if isinstance(error, PlacementError) and not self._tries and self._missing > 1 else wait
            self._tries += 1
            self._next_try = time.monotonic() + wait
            what = "%d rollout workers are missing and could not be started; the next attempt is in %.0f s: %s"
            logger.warning(what, self._missing, wait, error)
