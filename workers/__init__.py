"""Workers to use or to subclass: Megatron, FSDP, training and rollout.

This package may import ``single_controller`` and ``dispatch``; neither of them may import it. Heavy libraries (torch,
megatron, transformers) are imported on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dispatch.exports import lazy_exports

if TYPE_CHECKING:
    from workers.algorithms.registry import register_advantage, register_policy_loss
    from workers.data.rollout_data import RolloutDataError
    from workers.fsdp.fsdp_model import FSDPTrainModel
    from workers.fsdp.fsdp_worker import FSDPTrainWorker
    from workers.hf_files import ModelFilesError
    from workers.lora import LoraSettings
    from workers.megatron.config import init_model_parallel_config, transformer_config
    from workers.megatron.lm_worker import MegatronLMWorker
    from workers.megatron.megatron_model import MegatronTrainModel
    from workers.megatron.megatron_train_worker import MegatronTrainWorker
    from workers.megatron.megatron_worker import MegatronWorker
    from workers.megatron.mlp import ParallelLlamaMLP
    from workers.recovery.weight_backup import BackupError, WeightBackup
    from workers.rollout.engines.hf_engine import HFEngine
    from workers.rollout.engines.http_engine import HTTPEngine
    from workers.rollout.engines.request_engine import RequestEngine
    from workers.rollout.engines.rollout_engine import Completion, EngineLoad, RolloutEngine, SamplingParams
    from workers.rollout.engines.vllm_engine import VLLMEngine
    from workers.rollout.evaluation import evaluate
    from workers.rollout.rewards.reward_calls import Sample
    from workers.rollout.rewards.reward_runner import RewardRunner
    from workers.rollout.rollout_errors import PromptError, RewardError, RolloutError, WeightVersionError
    from workers.rollout.rollout_manager import RolloutManager
    from workers.rollout.rollout_worker import RolloutWorker
    from workers.rollout.stream.rollout_stream import RolloutStream
    from workers.rollout.stream.sample_buffer import SampleBuffer
    from workers.train.args import TrainArgs, TrainArgsError, read_args
    from workers.train.checkpoints import CheckpointError
    from workers.train.hf_export import export_hf
    from workers.train.tracking import RunLog
    from workers.train.train_group import RayTrainGroup
    from workers.train.train_model import TrainModel
    from workers.train.train_placement import RolePlacement, place
    from workers.train.train_worker import TrainWorker, own_rows
    from workers.weight_sync.sync_protocol import WeightSyncError
    from workers.weight_sync.weight_receiver import WeightReceiver
    from workers.weight_sync.weight_sender import WeightSender

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
    "Completion": "workers.rollout.engines.rollout_engine",
    "BackupError": "workers.recovery.weight_backup",
    "CheckpointError": "workers.train.checkpoints",
    "EngineLoad": "workers.rollout.engines.rollout_engine",
    "FSDPTrainModel": "workers.fsdp.fsdp_model",
    "FSDPTrainWorker": "workers.fsdp.fsdp_worker",
    "HFEngine": "workers.rollout.engines.hf_engine",
    "HTTPEngine": "workers.rollout.engines.http_engine",
    "LoraSettings": "workers.lora",
    "MegatronLMWorker": "workers.megatron.lm_worker",
    "MegatronTrainModel": "workers.megatron.megatron_model",
    "MegatronTrainWorker": "workers.megatron.megatron_train_worker",
    "MegatronWorker": "workers.megatron.megatron_worker",
    "ModelFilesError": "workers.hf_files",
    "ParallelLlamaMLP": "workers.megatron.mlp",
    "PromptError": "workers.rollout.rollout_errors",
    "RayTrainGroup": "workers.train.train_group",
    "RequestEngine": "workers.rollout.engines.request_engine",
    "RewardError": "workers.rollout.rollout_errors",
    "RewardRunner": "workers.rollout.rewards.reward_runner",
    "RolePlacement": "workers.train.train_placement",
    "RolloutDataError": "workers.data.rollout_data",
    "RolloutEngine": "workers.rollout.engines.rollout_engine",
    "RolloutError": "workers.rollout.rollout_errors",
    "RolloutManager": "workers.rollout.rollout_manager",
    "RolloutStream": "workers.rollout.stream.rollout_stream",
    "RolloutWorker": "workers.rollout.rollout_worker",
    "RunLog": "workers.train.tracking",
    "SampleBuffer": "workers.rollout.stream.sample_buffer",
    "Sample": "workers.rollout.rewards.reward_calls",
    "SamplingParams": "workers.rollout.engines.rollout_engine",
    "TrainArgs": "workers.train.args",
    "TrainArgsError": "workers.train.args",
    "TrainModel": "workers.train.train_model",
    "TrainWorker": "workers.train.train_worker",
    "VLLMEngine": "workers.rollout.engines.vllm_engine",
    "WeightBackup": "workers.recovery.weight_backup",
    "WeightReceiver": "workers.weight_sync.weight_receiver",
    "WeightSender": "workers.weight_sync.weight_sender",
    "WeightSyncError": "workers.weight_sync.sync_protocol",
    "WeightVersionError": "workers.rollout.rollout_errors",
    "evaluate": "workers.rollout.evaluation",
    "export_hf": "workers.train.hf_export",
    "init_model_parallel_config": "workers.megatron.config",
    "own_rows": "workers.train.train_worker",
    "place": "workers.train.train_placement",
    "read_args": "workers.train.args",
    "register_advantage": "workers.algorithms.registry",
    "register_policy_loss": "workers.algorithms.registry",
    "transformer_config": "workers.megatron.config",
}

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_exports(__name__, _HOMES)
