"""Workers to use or to subclass: Megatron, FSDP, training and rollout.

This package may import ``single_controller`` and ``dispatch``; neither of them may import it. Heavy libraries (torch,
megatron, transformers) are imported on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import single_controller  # noqa: F401  (reports a module that shadows `dispatch`, which the next import would find)
from dispatch.exports import lazy_exports

if TYPE_CHECKING:  # the table of what this package exports, which `lazy_exports` reads too
    from workers.algorithms.registry import register_advantage as register_advantage
    from workers.algorithms.registry import register_policy_loss as register_policy_loss
    from workers.data.collate import collate as collate
    from workers.data.prompt_data import PromptData as PromptData
    from workers.data.rollout_data import RolloutDataError as RolloutDataError
    from workers.data.rollout_data import group_numbers as group_numbers
    from workers.data.row_files import DataError as DataError
    from workers.data.row_reader import RowReader as RowReader
    from workers.data.row_reader import open_rows as open_rows
    from workers.data.sft_data import SFTData as SFTData
    from workers.exact import ExactError as ExactError
    from workers.fsdp.fsdp_model import FSDPTrainModel as FSDPTrainModel
    from workers.fsdp.fsdp_worker import FSDPTrainWorker as FSDPTrainWorker
    from workers.hf_export import export_hf as export_hf
    from workers.hf_files import ModelFilesError as ModelFilesError
    from workers.lora import LoraSettings as LoraSettings
    from workers.megatron.config import init_model_parallel_config as init_model_parallel_config
    from workers.megatron.config import transformer_config as transformer_config
    from workers.megatron.lm_worker import MegatronLMWorker as MegatronLMWorker
    from workers.megatron.megatron_model import MegatronTrainModel as MegatronTrainModel
    from workers.megatron.megatron_train_worker import MegatronTrainWorker as MegatronTrainWorker
    from workers.megatron.megatron_worker import MegatronWorker as MegatronWorker
    from workers.megatron.mlp import ParallelLlamaMLP as ParallelLlamaMLP
    from workers.recovery.weight_backup import BackupError as BackupError
    from workers.recovery.weight_backup import WeightBackup as WeightBackup
    from workers.rollout.agents.agent_engine import AgentEngine as AgentEngine
    from workers.rollout.agents.environment import Action as Action
    from workers.rollout.agents.environment import Environment as Environment
    from workers.rollout.agents.environment import SessionLimits as SessionLimits
    from workers.rollout.agents.environment import Step as Step
    from workers.rollout.agents.environment import ToolEnvironment as ToolEnvironment
    from workers.rollout.agents.environment import session_reward as session_reward
    from workers.rollout.agents.rendering import TokenRenderer as TokenRenderer
    from workers.rollout.agents.rendering import load_renderer as load_renderer
    from workers.rollout.agents.rendering import render_prompt as render_prompt
    from workers.rollout.agents.tools import Tool as Tool
    from workers.rollout.engines.hf_engine import HFEngine as HFEngine
    from workers.rollout.engines.http_engine import HTTPEngine as HTTPEngine
    from workers.rollout.engines.request_engine import RequestEngine as RequestEngine
    from workers.rollout.engines.rollout_engine import Completion as Completion
    from workers.rollout.engines.rollout_engine import EngineLoad as EngineLoad
    from workers.rollout.engines.rollout_engine import RolloutEngine as RolloutEngine
    from workers.rollout.engines.rollout_engine import Row as Row
    from workers.rollout.engines.rollout_engine import SamplingMask as SamplingMask
    from workers.rollout.engines.rollout_engine import SamplingParams as SamplingParams
    from workers.rollout.engines.vllm_engine import VLLMEngine as VLLMEngine
    from workers.rollout.evaluation import evaluate as evaluate
    from workers.rollout.rewards.answers import exact_match as exact_match
    from workers.rollout.rewards.answers import math_match as math_match
    from workers.rollout.rewards.answers import number_match as number_match
    from workers.rollout.rewards.answers import soft_overlong as soft_overlong
    from workers.rollout.rewards.code_process import CodeLimits as CodeLimits
    from workers.rollout.rewards.code_process import run_python as run_python
    from workers.rollout.rewards.code_reward import code_tests as code_tests
    from workers.rollout.rewards.reward_calls import Sample as Sample
    from workers.rollout.rewards.reward_runner import RewardRunner as RewardRunner
    from workers.rollout.rewards.text_reward import reward_of as reward_of
    from workers.rollout.rewards.text_reward import text_reward as text_reward
    from workers.rollout.rollout_errors import PromptError as PromptError
    from workers.rollout.rollout_errors import RewardError as RewardError
    from workers.rollout.rollout_errors import RolloutError as RolloutError
    from workers.rollout.rollout_errors import WeightVersionError as WeightVersionError
    from workers.rollout.rollout_manager import RolloutManager as RolloutManager
    from workers.rollout.rollout_worker import RolloutWorker as RolloutWorker
    from workers.rollout.stream.rollout_stream import RolloutStream as RolloutStream
    from workers.rollout.stream.sample_buffer import SampleBuffer as SampleBuffer
    from workers.tracking.run_log import RunLog as RunLog
    from workers.train.args import TrainArgs as TrainArgs
    from workers.train.args import TrainArgsError as TrainArgsError
    from workers.train.args import read_args as read_args
    from workers.train.checkpoints import CheckpointError as CheckpointError
    from workers.train.train_group import RayTrainGroup as RayTrainGroup
    from workers.train.train_model import TrainModel as TrainModel
    from workers.train.train_placement import RolePlacement as RolePlacement
    from workers.train.train_placement import place as place
    from workers.train.train_worker import TrainWorker as TrainWorker
    from workers.train.train_worker import own_rows as own_rows
    from workers.weight_sync.sync_protocol import WeightSyncError as WeightSyncError
    from workers.weight_sync.weight_receiver import WeightReceiver as WeightReceiver
    from workers.weight_sync.weight_sender import WeightSender as WeightSender
else:
    __all__, __getattr__, __dir__ = lazy_exports(__name__, __file__)
