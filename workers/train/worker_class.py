"""Which worker trains: the class of a backend, or a user's own."""

from __future__ import annotations

import importlib
import inspect
from typing import Any

from workers.train.worker import TrainWorker

BACKENDS = {
    "fsdp": ("workers.fsdp.worker", "FSDPTrainWorker"),
    "megatron": ("workers.megatron.train_worker", "MegatronTrainWorker"),
}


def checked_class(cls: Any) -> type[TrainWorker]:
    """A user's worker class.

    Raises:
        TypeError: it is no `TrainWorker`, or lacks one of its methods.
    """
    if not isinstance(cls, type) or not issubclass(cls, TrainWorker):
        raise TypeError(f"actor_cls is a subclass of TrainWorker, got {cls!r}")
    if inspect.isabstract(cls):
        raise TypeError(f"actor_cls {cls.__name__} lacks {', '.join(sorted(cls.__abstractmethods__))}")
    return cls


def backend_class(name: str) -> type[TrainWorker]:
    """The worker class of ``args.train_backend``; imported now, for its libraries are heavy."""
    module, cls = BACKENDS[name]
    return checked_class(getattr(importlib.import_module(module), cls))
