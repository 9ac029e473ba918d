"""Workers that people use as they are, or subclass: Megatron, FSDP, training and rollout.

The top floor of the house: it may import ``single_controller`` and ``dispatch``, and neither of them
may import it. Heavy libraries (torch, megatron, transformers) are imported when they are used, not before.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dispatch.exports import lazy_exports

if TYPE_CHECKING:
    from workers.fsdp.worker import FSDPTrainWorker
    from workers.megatron.config import init_model_parallel_config, transformer_config
    from workers.megatron.lm import MegatronLMWorker
    from workers.megatron.mlp import ParallelLlamaMLP
    from workers.megatron.train_worker import MegatronTrainWorker
    from workers.megatron.worker import MegatronWorker
    from workers.rollout.engine import Answer, RolloutEngine, Sampling
    from workers.rollout.hf_engine import HFEngine
    from workers.rollout.manager import RolloutManager
    from workers.rollout.worker import RolloutWorker
    from workers.train.args import TrainArgs
    from workers.train.group import RayTrainGroup
    from workers.train.placement import Placement, place
    from workers.train.read_args import read_args
    from workers.train.tracking import RunLog
    from workers.train.worker import TrainWorker

__all__ = [
    "Answer",
    "FSDPTrainWorker",
    "HFEngine",
    "MegatronLMWorker",
    "MegatronTrainWorker",
    "MegatronWorker",
    "ParallelLlamaMLP",
    "Placement",
    "RayTrainGroup",
    "RolloutEngine",
    "RolloutManager",
    "RolloutWorker",
    "RunLog",
    "Sampling",
    "TrainArgs",
    "TrainWorker",
    "init_model_parallel_config",
    "place",
    "read_args",
    "transformer_config",
]

_HOMES = {
    "Answer": "workers.rollout.engine",
    "FSDPTrainWorker": "workers.fsdp.worker",
    "HFEngine": "workers.rollout.hf_engine",
    "MegatronLMWorker": "workers.megatron.lm",
    "MegatronTrainWorker": "workers.megatron.train_worker",
    "MegatronWorker": "workers.megatron.worker",
    "ParallelLlamaMLP": "workers.megatron.mlp",
    "Placement": "workers.train.placement",
    "RayTrainGroup": "workers.train.group",
    "RolloutEngine": "workers.rollout.engine",
    "RolloutManager": "workers.rollout.manager",
    "RolloutWorker": "workers.rollout.worker",
    "RunLog": "workers.train.tracking",
    "Sampling": "workers.rollout.engine",
    "TrainArgs": "workers.train.args",
    "TrainWorker": "workers.train.worker",
    "init_model_parallel_config": "workers.megatron.config",
    "place": "workers.train.placement",
    "read_args": "workers.train.read_args",
    "transformer_config": "workers.megatron.config",
}

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_exports(__name__, _HOMES)
