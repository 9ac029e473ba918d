"""Workers that people use as they are, or subclass: Megatron, FSDP, training and rollout.

The top floor of the house: it may import ``single_controller`` and ``dispatch``, and neither of them
may import it. Heavy libraries (torch, megatron, transformers) are imported when they are used, not before.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dispatch.exports import lazy_exports

if TYPE_CHECKING:
    from workers.fsdp.train_model import FSDPTrainModel
    from workers.fsdp.worker import FSDPTrainWorker
    from workers.megatron.config import init_model_parallel_config, transformer_config
    from workers.megatron.lm import MegatronLMWorker
    from workers.megatron.mlp import ParallelLlamaMLP
    from workers.megatron.train_model import MegatronTrainModel
    from workers.megatron.train_worker import MegatronTrainWorker
    from workers.megatron.worker import MegatronWorker
    from workers.rollout.engine import Answer, RolloutEngine, Sampling
    from workers.rollout.errors import PromptError, RewardError, RolloutError, WeightVersionError
    from workers.rollout.hf_engine import HFEngine
    from workers.rollout.manager import RolloutManager
    from workers.rollout.weight_receiver import WeightReceiver
    from workers.rollout.worker import RolloutWorker
    from workers.train.args import TrainArgs
    from workers.train.checkpoints import CheckpointError
    from workers.train.group import RayTrainGroup
    from workers.train.hf_export import export_hf
    from workers.train.hf_files import ModelFilesError
    from workers.train.model import TrainModel
    from workers.train.placement import Placement, place
    from workers.train.read_args import TrainArgsError, read_args
    from workers.train.rollout_data import RolloutDataError
    from workers.train.tracking import RunLog
    from workers.train.weight_backup import BackupError, WeightBackup
    from workers.train.weight_buckets import WeightSyncError
    from workers.train.weight_sync import WeightSender
    from workers.train.worker import TrainWorker, own_rows

__all__ = [
    "Answer",
    "BackupError",
    "CheckpointError",
    "FSDPTrainModel",
    "FSDPTrainWorker",
    "HFEngine",
    "MegatronLMWorker",
    "MegatronTrainModel",
    "MegatronTrainWorker",
    "MegatronWorker",
    "ModelFilesError",
    "ParallelLlamaMLP",
    "Placement",
    "PromptError",
    "RayTrainGroup",
    "RewardError",
    "RolloutDataError",
    "RolloutEngine",
    "RolloutError",
    "RolloutManager",
    "RolloutWorker",
    "RunLog",
    "Sampling",
    "TrainArgs",
    "TrainArgsError",
    "TrainModel",
    "TrainWorker",
    "WeightBackup",
    "WeightReceiver",
    "WeightSender",
    "WeightSyncError",
    "WeightVersionError",
    "export_hf",
    "init_model_parallel_config",
    "own_rows",
    "place",
    "read_args",
    "transformer_config",
]

_HOMES = {
    "Answer": "workers.rollout.engine",
    "BackupError": "workers.train.weight_backup",
    "CheckpointError": "workers.train.checkpoints",
    "FSDPTrainModel": "workers.fsdp.train_model",
    "FSDPTrainWorker": "workers.fsdp.worker",
    "HFEngine": "workers.rollout.hf_engine",
    "MegatronLMWorker": "workers.megatron.lm",
    "MegatronTrainModel": "workers.megatron.train_model",
    "MegatronTrainWorker": "workers.megatron.train_worker",
    "MegatronWorker": "workers.megatron.worker",
    "ModelFilesError": "workers.train.hf_files",
    "ParallelLlamaMLP": "workers.megatron.mlp",
    "Placement": "workers.train.placement",
    "PromptError": "workers.rollout.errors",
    "RayTrainGroup": "workers.train.group",
    "RewardError": "workers.rollout.errors",
    "RolloutDataError": "workers.train.rollout_data",
    "RolloutEngine": "workers.rollout.engine",
    "RolloutError": "workers.rollout.errors",
    "RolloutManager": "workers.rollout.manager",
    "RolloutWorker": "workers.rollout.worker",
    "RunLog": "workers.train.tracking",
    "Sampling": "workers.rollout.engine",
    "TrainArgs": "workers.train.args",
    "TrainArgsError": "workers.train.read_args",
    "TrainModel": "workers.train.model",
    "TrainWorker": "workers.train.worker",
    "WeightBackup": "workers.train.weight_backup",
    "WeightReceiver": "workers.rollout.weight_receiver",
    "WeightSender": "workers.train.weight_sync",
    "WeightSyncError": "workers.train.weight_buckets",
    "WeightVersionError": "workers.rollout.errors",
    "export_hf": "workers.train.hf_export",
    "init_model_parallel_config": "workers.megatron.config",
    "own_rows": "workers.train.worker",
    "place": "workers.train.placement",
    "read_args": "workers.train.read_args",
    "transformer_config": "workers.megatron.config",
}

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_exports(__name__, _HOMES)
