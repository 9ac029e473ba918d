"""What torch.distributed may do in a worker of this process: nothing between ranks, everything in a group of one.

Ranks that share a process and run one after the other can't wait for each other: a rendezvous would hang. So while a
worker's code runs, ``init_process_group`` raises at once. In a group of one rank it works, without RANK and the like in
the environment. Only a torch that was imported before the call can be looked after so.
"""

from __future__ import annotations

import functools
import logging
import sys
import threading
from collections.abc import Callable, Iterator
from contextvars import ContextVar, Token
from types import ModuleType, TracebackType
from typing import Any

from single_controller.base.errors import LocalEngineError
from single_controller.local.place import ONE_PROCESS, LocalPlace

logger = logging.getLogger(__name__)

_TORCH = "torch.distributed"
_C10D = "torch.distributed.distributed_c10d"
_GUARDED = (
    (_TORCH, "init_process_group"),
    (_C10D, "init_process_group"),
    (_C10D, "rendezvous"),
    ("torch.distributed.device_mesh", "init_process_group"),
)
"""Module and name; `rendezvous` is what init_process_group calls, however the user's module came by it."""

_here: ContextVar[LocalPlace | None] = ContextVar("_here", default=None)
"""Whose code runs; a context's, not a thread's, so that it holds for coroutines too."""

_lock = threading.RLock()
_inside = 0
_replaced: list[tuple[ModuleType, str, Any]] = []
_made_by: LocalPlace | None = None


class WorkerCode:
    """A context in which a worker's code runs.

    Args:
        place: where the worker stands.
    """

    __slots__ = ("_place", "_token")

    def __init__(self, place: LocalPlace) -> None:
        self._place = place
        self._token: Token[LocalPlace | None] | None = None

    def __enter__(self) -> None:
        global _inside
        self._token = _here.set(self._place)
        with _lock:
            _inside += 1
            if not _replaced:
                _replace()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        global _inside
        with _lock:
            _inside -= 1
            if not _inside:
                _restore()
        if self._token is not None:
            _here.reset(self._token)


def end_process_group(place: LocalPlace) -> None:
    """Destroy the process groups that a worker has made: its process, which would take them along, goes on."""
    global _made_by
    with _lock:
        if _made_by is not place:
            return
        _made_by = None
        torch = sys.modules.get(_TORCH)
        if torch is not None and torch.is_initialized():
            try:
                torch.destroy_process_group()
            except Exception:  # whatever state the worker left it in
                logger.warning("the process group of a closed LocalWorkerGroup could not be destroyed", exc_info=True)


def _replace() -> None:
    if _C10D not in sys.modules:
        return
    for module_name, name in _GUARDED:
        module = sys.modules.get(module_name)
        original = getattr(module, name, None)
        if module is not None and original is not None:
            guarded = _rendezvous if name == "rendezvous" else _init_process_group
            _replaced.append((module, name, original))
            setattr(module, name, guarded(original))


def _restore() -> None:
    while _replaced:
        module, name, original = _replaced.pop()
        setattr(module, name, original)


def _init_process_group(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def init_process_group(*args: Any, **kwargs: Any) -> Any:
        _claim("torch.distributed.init_process_group()")
        return original(*args, **kwargs)

    return init_process_group


def _rendezvous(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def rendezvous(url: str, *args: Any, **kwargs: Any) -> Iterator[Any]:
        place = _claim("torch.distributed.init_process_group()")
        if place is None or not url.startswith("env://"):
            found: Iterator[Any] = original(url, *args, **kwargs)
            return found
        return iter([(sys.modules[_TORCH].HashStore(), place.rank, place.world_size)])

    return rendezvous


def _claim(what: str) -> LocalPlace | None:
    """The worker whose code runs, if one's does; it owns what it makes now.

    Raises:
        LocalEngineError: it is one of several.
    """
    global _made_by
    place = _here.get()
    if place is not None:
        if place.world_size > 1:
            raise LocalEngineError(f"{what} on rank {place.rank} of {place.world_size}: {ONE_PROCESS}")
        if not sys.modules[_TORCH].is_initialized():
            _made_by = place
    return place
