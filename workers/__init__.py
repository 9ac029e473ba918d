"""Workers that people use as they are, or subclass: Megatron, FSDP, training and rollout.

The top floor of the house: it may import ``single_controller`` and ``dispatch``, and neither of them
may import it. Heavy libraries (torch, megatron, transformers) are imported when they are used, not before.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dispatch.exports import lazy_exports

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

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_exports(__name__, _HOMES)
