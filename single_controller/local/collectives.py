"""What torch.distributed may do in a worker of this process: nothing between ranks, everything in a group of one.

Ranks that share a process and run one after the other can't wait for each other: a rendezvous would hang. So while a
worker's code runs, ``init_process_group`` raises at once. In a group of one rank it works, without RANK and the like in
the environment.
"""

from __future__ import annotations

import functools
import logging
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar, Token
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
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
_originals: dict[Any, Any] = {}
"""guard -> torch's function, while a worker's code runs."""

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
            if not _originals:
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
    """Put guards in the place of torch's functions, now or as soon as a worker imports torch."""
    if _C10D not in sys.modules:
        if _at_import not in sys.meta_path:
            sys.meta_path.insert(0, _at_import)
        return
    for module_name, name in _GUARDED:
        module = sys.modules.get(module_name)
        found = getattr(module, name, None)
        if module is not None and found is not None and found not in _originals:
            guard = (_rendezvous if name == "rendezvous" else _init_process_group)(found)
            _originals[guard] = found
            setattr(module, name, guard)


def _restore() -> None:
    if _at_import in sys.meta_path:
        sys.meta_path.remove(_at_import)
    for module_name, name in _GUARDED:
        module = sys.modules.get(module_name)
        original = _originals.get(getattr(module, name, None))
        if module is not None and original is not None:  # else somebody has wrapped the guard, which lets others pass
            setattr(module, name, original)
    _originals.clear()


class _AtImport(MetaPathFinder):
    """Guards torch.distributed when a worker's code imports it."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != _C10D:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def and_guard(module: ModuleType) -> None:
                execute(module)
                with _lock:
                    if _inside:
                        _replace()

            spec.loader.exec_module = and_guard  # type: ignore[method-assign]
        return spec


_at_import = _AtImport()


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
