"""Workers that people use as they are, or subclass: Megatron, FSDP, training and rollout.

The top floor of the house: it may import ``single_controller`` and ``dispatch``, and neither of them
may import it. Heavy libraries (torch, megatron, transformers) are imported when they are used, not before.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from workers.megatron.config import init_model_parallel_config, transformer_config
    from workers.megatron.lm import MegatronLMWorker
    from workers.megatron.mlp import ParallelLlamaMLP
    from workers.megatron.worker import MegatronWorker

__all__ = [
    "MegatronLMWorker",
    "MegatronWorker",
    "ParallelLlamaMLP",
    "init_model_parallel_config",
    "transformer_config",
]

_HOMES = {
    "MegatronLMWorker": "workers.megatron.lm",
    "MegatronWorker": "workers.megatron.worker",
    "ParallelLlamaMLP": "workers.megatron.mlp",
    "init_model_parallel_config": "workers.megatron.config",
    "transformer_config": "workers.megatron.config",
}


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(home), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
