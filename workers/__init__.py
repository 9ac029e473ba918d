"""Workers to use or to subclass: Megatron, FSDP, training and rollout.

This package may import ``single_controller`` and ``dispatch``; neither of them may import it. Heavy libraries (torch,
megatron, transformers) are imported on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dispatch.exports import lazy_exports

if TYPE_CHECKING:
    from workers.fsdp.train_model import FSDPTrainModel
    from workers.fsdp.worker import FSDPTrainWorker
    from workers.lora import LoraSettings
    from workers.megatron.config import init_model_parallel_config, transformer_config
    from workers.megatron.lm import MegatronLMWorker
    from workers.megatron.mlp import ParallelLlamaMLP
    from workers.megatron.train_model import MegatronTrainModel
    from workers.megatron.train_worker import MegatronTrainWorker
    from workers.megatron.worker import MegatronWorker
    from workers.rollout.engine import Completion, EngineLoad, RolloutEngine, SamplingParams
    from workers.rollout.errors import PromptError, RewardError, RolloutError, WeightVersionError
    from workers.rollout.evaluation import evaluate
    from workers.rollout.hf_engine import HFEngine
    from workers.rollout.http_engine import HTTPEngine
    from workers.rollout.manager import RolloutManager
    from workers.rollout.requests import RequestEngine
    from workers.rollout.reward_calls import Sample
    from workers.rollout.rewards import RewardRunner
    from workers.rollout.sample_buffer import SampleBuffer
    from workers.rollout.stream import RolloutStream
    from workers.rollout.vllm_engine import VLLMEngine
    from workers.rollout.worker import RolloutWorker
    from workers.train.args import TrainArgs, TrainArgsError, read_args
    from workers.train.checkpoints import CheckpointError
    from workers.train.group import RayTrainGroup
    from workers.train.hf_export import export_hf
    from workers.train.hf_files import ModelFilesError
    from workers.train.model import TrainModel
    from workers.train.placement import RolePlacement, place
    from workers.train.registry import register_advantage, register_policy_loss
    from workers.train.rollout_data import RolloutDataError
    from workers.train.tracking import RunLog
    from workers.train.weight_backup import BackupError, WeightBackup
    from workers.train.worker import TrainWorker, own_rows
    from workers.weight_sync.protocol import WeightSyncError
    from workers.weight_sync.receiver import WeightReceiver
    from workers.weight_sync.sender import WeightSender

__all__ = [
    "BackupError",
    "CheckpointError",
    "Completion",
    "EngineLoad",
    "FSDPTrainModel",
    "FSDPTrainWorker",
    "HFEngine",
    "HTTPEngine",
    "LoraSettings",
    "MegatronLMWorker",
    "MegatronTrainModel",
    "MegatronTrainWorker",
    "MegatronWorker",
    "ModelFilesError",
    "ParallelLlamaMLP",
    "PromptError",
    "RayTrainGroup",
    "RequestEngine",
    "RewardError",
    "RewardRunner",
    "RolePlacement",
    "RolloutDataError",
    "RolloutEngine",
    "RolloutError",
    "RolloutManager",
    "RolloutStream",
    "RolloutWorker",
    "RunLog",
    "Sample",
    "SampleBuffer",
    "SamplingParams",
    "TrainArgs",
    "TrainArgsError",
    "TrainModel",
    "TrainWorker",
    "VLLMEngine",
    "WeightBackup",
    "WeightReceiver",
    "WeightSender",
    "WeightSyncError",
    "WeightVersionError",
    "evaluate",
    "export_hf",
    "init_model_parallel_config",
    "own_rows",
    "place",
    "read_args",
    "register_advantage",
    "register_policy_loss",
    "transformer_config",
]

_HOMES = {
    "Completion": "workers.rollout.engine",
    "BackupError": "workers.train.weight_backup",
    "CheckpointError": "workers.train.checkpoints",
    "EngineLoad": "workers.rollout.engine",
    "FSDPTrainModel": "workers.fsdp.train_model",
    "FSDPTrainWorker": "workers.fsdp.worker",
    "HFEngine": "workers.rollout.hf_engine",
    "HTTPEngine": "workers.rollout.http_engine",
    "LoraSettings": "workers.lora",
    "MegatronLMWorker": "workers.megatron.lm",
    "MegatronTrainModel": "workers.megatron.train_model",
    "MegatronTrainWorker": "workers.megatron.train_worker",
    "MegatronWorker": "workers.megatron.worker",
    "ModelFilesError": "workers.train.hf_files",
    "ParallelLlamaMLP": "workers.megatron.mlp",
    "PromptError": "workers.rollout.errors",
    "RayTrainGroup": "workers.train.group",
    "RequestEngine": "workers.rollout.requests",
    "RewardError": "workers.rollout.errors",
    "RewardRunner": "workers.rollout.rewards",
    "RolePlacement": "workers.train.placement",
    "RolloutDataError": "workers.train.rollout_data",
    "RolloutEngine": "workers.rollout.engine",
    "RolloutError": "workers.rollout.errors",
    "RolloutManager": "workers.rollout.manager",
    "RolloutStream": "workers.rollout.stream",
    "RolloutWorker": "workers.rollout.worker",
    "RunLog": "workers.train.tracking",
    "SampleBuffer": "workers.rollout.sample_buffer",
    "Sample": "workers.rollout.reward_calls",
    "SamplingParams": "workers.rollout.engine",
    "TrainArgs": "workers.train.args",
    "TrainArgsError": "workers.train.args",
    "TrainModel": "workers.train.model",
    "TrainWorker": "workers.train.worker",
    "VLLMEngine": "workers.rollout.vllm_engine",
    "WeightBackup": "workers.train.weight_backup",
    "WeightReceiver": "workers.weight_sync.receiver",
    "WeightSender": "workers.weight_sync.sender",
    "WeightSyncError": "workers.weight_sync.protocol",
    "WeightVersionError": "workers.rollout.errors",
    "evaluate": "workers.rollout.evaluation",
    "export_hf": "workers.train.hf_export",
    "init_model_parallel_config": "workers.megatron.config",
    "own_rows": "workers.train.worker",
    "place": "workers.train.placement",
    "read_args": "workers.train.args",
    "register_advantage": "workers.train.registry",
    "register_policy_loss": "workers.train.registry",
    "transformer_config": "workers.megatron.config",
}

_DEPRECATED = {"Answer": "Completion", "Placement": "RolePlacement", "Sampling": "SamplingParams"}

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_exports(__name__, _HOMES, _DEPRECATED)
