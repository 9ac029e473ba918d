"""The worker classes of the training backends."""

from __future__ import annotations

import importlib
import inspect
from typing import Any

from workers.train.train_worker import TrainWorker

BACKENDS = {
    "fsdp": ("workers.fsdp.fsdp_worker", "FSDPTrainWorker"),
    "megatron": ("workers.megatron.megatron_train_worker", "MegatronTrainWorker"),
}
"""``args.train_backend`` -> module and worker class. Imported only when used: their libraries are heavy."""


def worker_class(backend: str, actor_cls: Any = None) -> type[TrainWorker]:
    """Return the worker class of a backend, or the user's own.

    Raises:
        TypeError: ``actor_cls`` is not a `TrainWorker`, or lacks one of its methods.
    """
    if actor_cls is None:
        module, name = BACKENDS[backend]
        actor_cls = getattr(importlib.import_module(module), name)
    if not isinstance(actor_cls, type) or not issubclass(actor_cls, TrainWorker):
        raise TypeError(f"actor_cls must be a subclass of TrainWorker, got {actor_cls!r}")
    if inspect.isabstract(actor_cls):
        missing = ", ".join(sorted(actor_cls.__abstractmethods__))
        raise TypeError(f"actor_cls {actor_cls.__name__} does not implement {missing}, which TrainWorker requires")
    return actor_cls


def takes_version(cls: type[TrainWorker]) -> bool:
    """Whether ``update_weights`` of a class takes the version."""
    try:
        inspect.signature(cls.update_weights).bind(None, 1)
    except TypeError:
        return False
    return True
