"""MegatronTrainWorker: one rank of training on megatron-core, over tp, pp and dp."""

from __future__ import annotations

import math
from typing import Any

import torch

from workers.device import every_backend
from workers.hf_files import known_config
from workers.megatron.config import check_model, experts_of
from workers.megatron.megatron_model import MegatronTrainModel, of_last_stage
from workers.megatron.megatron_worker import MegatronWorker
from workers.train.args import TrainArgsError
from workers.train.policy_worker import PolicyTrainWorker

BALANCING = ("moe_aux_loss_coeff", "moe_z_loss_coeff", "moe_router_load_balancing_type")
"""Arguments that are fields of megatron's ``TransformerConfig`` too."""


class MegatronTrainWorker(PolicyTrainWorker, MegatronWorker):
    """One rank of training on megatron-core. ``args.tensor_model_parallel_size`` and
    ``args.pipeline_model_parallel_size`` set tp and pp; the remaining factor of the number of ranks is dp.
    ``args.expert_model_parallel_size`` consecutive groups of ``args.expert_tensor_parallel_size`` ranks of a pipeline
    stage share its experts."""

    @classmethod
    def check_args(cls, args: Any, ranks: int, with_ref: bool) -> None:
        super().check_args(args, ranks, with_ref)
        tp, pp = args.tensor_model_parallel_size, args.pipeline_model_parallel_size
        if ranks % (tp * pp):
            raise TrainArgsError(
                f"tensor_model_parallel_size={tp} times pipeline_model_parallel_size={pp} does not divide the group's "
                f"{ranks} ranks; make actor_num_nodes * actor_num_gpus_per_node (for a critic: critic_num_nodes * "
                "critic_num_gpus_per_node) a multiple of it"
            )
        ep, etp = args.expert_model_parallel_size, _expert_tensor_parallel(args)
        if ranks % (ep * etp * pp):
            raise TrainArgsError(
                f"expert_model_parallel_size={ep} times expert_tensor_parallel_size={etp} (by default "
                f"tensor_model_parallel_size) times pipeline_model_parallel_size={pp} does not divide the group's "
                f"{ranks} ranks; make actor_num_nodes * actor_num_gpus_per_node a multiple of it"
            )
        if not args.debug_rollout_only and (config := known_config(args)) is not None:
            sizes = {
                "tensor_model_parallel_size": tp,
                "pipeline_model_parallel_size": pp,
                "expert_model_parallel_size": ep,
                "expert_tensor_parallel_size": etp,
            }
            try:
                check_model(config, sizes)
            except ValueError as error:
                raise TrainArgsError(f"train_backend='megatron': {error}") from None
            balanced = [name for name in ("moe_aux_loss_coeff", "moe_z_loss_coeff") if args[name]]
            if balanced and experts_of(config) is None:
                name = balanced[0]
                raise TrainArgsError(
                    f"args.{name}={args[name]}, but a {config.model_type!r} has no experts; leave it out"
                )

    def begin(self) -> None:
        from megatron.core import parallel_state

        args = self.args
        tp, pp = args.tensor_model_parallel_size, args.pipeline_model_parallel_size
        if parallel_state.is_initialized():  # init() was called before
            parallel_state.destroy_model_parallel()
        self.device = self.initialize_model_parallel(
            tp,
            pp,
            seed=args.seed,
            backend=every_backend(),
            expert_model_parallel_size=args.expert_model_parallel_size,
            expert_tensor_parallel_size=_expert_tensor_parallel(args),
            distributed_timeout_minutes=args.distributed_timeout_minutes,
        )

    def seed(self, number: int) -> None:
        from megatron.core import parallel_state, tensor_parallel

        number += 100 * parallel_state.get_pipeline_model_parallel_rank()  # megatron's own rule
        super().seed(number)
        tensor_parallel.model_parallel_cuda_manual_seed(number, force_reset_rng=True)

    def make_model(self, hf_config: Any, *, empty: bool = False) -> MegatronTrainModel:
        from omegaconf import OmegaConf

        args = self.args
        # With plain lists: megatron asks whether a value is a list, and appends to some.
        overrides: Any = OmegaConf.to_container(args.megatron_overrides, resolve=True)
        if experts_of(hf_config) is not None:
            overrides = {**{name: args[name] for name in BALANCING}, **overrides}
        if args.gradient_checkpointing and overrides.get("recompute_granularity", "full") == "full":
            overrides = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1,
                         **overrides}  # fmt: skip
        if empty:
            # Not perform_initialization=False: Megatron would then not mark tp shards as such, and count only those of
            # tp rank 0 in the gradient norm.
            overrides |= dict.fromkeys(("init_method", "output_layer_init_method", "embedding_init_method"), _leave)
        model = MegatronTrainModel(
            hf_config,
            role=self.role,
            param_dtype=args.param_dtype,
            optimizer={
                "betas": (args.adam_beta1, args.adam_beta2),
                "eps": args.adam_eps,
                "weight_decay": args.weight_decay,
                "clip_grad": args.clip_grad,
                "distributed": args.use_distributed_optimizer,
            },
            max_tokens_per_micro_batch=args.max_tokens_per_micro_batch,
            overrides=overrides,
            fp32_lm_head=args.fp32_lm_head,
        )
        if args.hf_checkpoint is not None and not empty:
            model.load_hf(args.hf_checkpoint)
        return model

    def make_empty_model(self, hf_config: Any) -> MegatronTrainModel:
        return self.make_model(hf_config, empty=True)

    # The ranks of a stage are ordered by tp, then dp, and its experts' shards by etp, then ep; the stages come last.
    # Computed here, because the state is needed while megatron is not initialized.

    @property
    def _period(self) -> int:
        """After so many ranks of a stage comes one with the same parameters."""
        experts: int = self.args.expert_model_parallel_size * _expert_tensor_parallel(self.args)
        return math.lcm(self.args.tensor_model_parallel_size, experts)

    @property
    def shards(self) -> int:
        """As in `ModelWorker`. The dp ranks have the same state, unless they share experts or the state of the
        optimizer."""
        model_parallel: int = self._period * self.args.pipeline_model_parallel_size
        return self.world_size if self.args.use_distributed_optimizer else model_parallel

    @property
    def reshards(self) -> bool:
        return not self.args.use_distributed_optimizer

    @property
    def shard(self) -> int:
        if self.args.use_distributed_optimizer:
            return self.rank
        stage = self.world_size // self.args.pipeline_model_parallel_size
        return int(self.rank % self._period + self._period * (self.rank // stage))

    @property
    def dp_replica(self) -> tuple[int, int]:
        # A group may shrink before `init` has set `args`.
        if "args" not in vars(self):
            return super().dp_replica
        stage = self.world_size // self.args.pipeline_model_parallel_size
        return self.rank % stage // self._period, stage // self._period

    @property
    def dp_group(self) -> Any:
        from megatron.core import parallel_state

        return parallel_state.get_data_parallel_group()

    def of_last_stage(self, value: Any) -> Any:
        return of_last_stage(value)

    def get_parallel_config(self) -> dict[str, int]:
        from megatron.core import parallel_state

        ep = parallel_state.get_expert_model_parallel_world_size()
        etp = parallel_state.get_expert_tensor_parallel_world_size()
        return {
            **super().get_parallel_config(),
            "tp_size": parallel_state.get_tensor_model_parallel_world_size(),
            "pp_size": parallel_state.get_pipeline_model_parallel_world_size(),
            "cp_size": parallel_state.get_context_parallel_world_size(),
            **({"ep_size": ep, "etp_size": etp} if ep > 1 else {}),
        }


def _expert_tensor_parallel(args: Any) -> int:
    """The expert-tensor-parallel size: by default, as in megatron, the tensor-parallel size."""
    return int(args.expert_tensor_parallel_size or args.tensor_model_parallel_size)


def _leave(weight: torch.Tensor) -> None:
    """Initialize nothing."""
