"""Watcher: notices the death of a worker while no call is under way."""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING

from single_controller.base.checks import check_seconds
from single_controller.base.closing import Closing
from single_controller.base.errors import WorkerDiedError

if TYPE_CHECKING:
    from single_controller.base.engine import Engine
    from single_controller.base.group import WorkerGroup

logger = logging.getLogger(__name__)

OnDeath = Callable[[WorkerDiedError], object]


class Watcher(Closing):
    """What ``group.watch()`` returns. Closing it ends the watch; so does closing or dropping the group.

    Args:
        group: to look after; the watcher does not keep it.
        on_death: called for each death, in the watcher's thread.
        interval: seconds between two looks.
    """

    def __init__(self, group: WorkerGroup, on_death: OnDeath | None, interval: float) -> None:
        self._group = weakref.ref(group)
        self._on_death = on_death
        self._interval = check_seconds("interval", interval)
        self._ended = threading.Event()
        self._told: set[tuple[int, int]] = set()  # (restarts until then, rank)
        self._heard = len(group._state.deaths)
        self._thread = threading.Thread(target=self._run, name="worker-watcher", daemon=True)
        self._thread.start()

    @property
    def watching(self) -> bool:
        """Whether it still looks."""
        return self._thread.is_alive() and not self._ended.is_set()

    def close(self) -> None:
        """Look no more. A callback that runs is not interrupted."""
        self._ended.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout=self._interval)

    def _run(self) -> None:
        while not self._ended.wait(self._interval):
            group = self._group()
            if group is None or group.closed:
                return
            try:
                for error in self._look(group):
                    if self._on_death is not None:
                        self._on_death(error)
            except Exception:
                logger.exception("watching %s: a look, or on_death, raised", group.name)
            del group  # or it would live as long as this thread

    def _look(self, group: WorkerGroup) -> list[WorkerDiedError]:
        """The deaths that nobody was told of: those that calls ran into, though the group may be restarted already, and
        those that the engine knows of, which break it now."""
        state, engine = group._state, group._engine
        known = state.deaths[self._heard :]
        self._heard += len(known)
        news = []
        for restarts, error in known:
            if not self._told.issuperset((restarts, rank) for rank in error.ranks):
                news.append(error)
            self._told.update((restarts, rank) for rank in error.ranks)
        found = self._found(group, engine, state.restarts) if engine.connected else None
        return news if found is None else [*news, found]

    def _found(self, group: WorkerGroup, engine: Engine, restarts: int) -> WorkerDiedError | None:
        state = group._state
        deaths = engine.deaths()
        new = {rank: why for rank, why in deaths.items() if (restarts, rank) not in self._told}
        new = {rank: why for rank, why in new.items() if rank not in engine.given_up}
        if not new or engine.ended or state.restarting or group.closed or group._engine is not engine:
            return None
        dead = sorted(new)
        self._told.update((restarts, rank) for rank in dead)
        hosts = "; ".join(dict.fromkeys(engine.host(rank) for rank in dead))
        which = f"rank {dead[0]}" if len(dead) == 1 else f"ranks {', '.join(map(str, dead))}"
        message = f"{which} died ({hosts}): {new[dead[0]]}"
        state.break_(message, dead)
        return WorkerDiedError(message, rank=dead[0], host=engine.host(dead[0]), ranks=dead)

    def __repr__(self) -> str:
        return f"<Watcher, {'at work' if self.watching else 'ended'}>"
