"""FSDPTrainWorker: a rank of FSDP2 training of a Hugging Face model."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist

from workers.data.routed_experts import RoutingShape
from workers.device import dtype_of, every_backend, take_device
from workers.distributed import initialize_distributed, new_rows
from workers.fsdp.fsdp_model import FSDPOptions, FSDPTrainModel
from workers.fsdp.sequence_parallel import check_sliceable
from workers.hf_files import known_config
from workers.lora import LoraSettings
from workers.seeds import mixed_seed
from workers.train.args import TrainArgsError
from workers.train.policy_worker import PolicyTrainWorker


class FSDPTrainWorker(PolicyTrainWorker):
    """One rank of FSDP2 training. ``args.sequence_parallel_size`` consecutive ranks are a data-parallel rank. The model
    is sharded over all ranks, or over groups of ``args.fsdp_shard_size`` ranks with one replica each (HSDP)."""

    @classmethod
    def check_args(cls, args: Any, ranks: int, with_ref: bool) -> None:
        super().check_args(args, ranks, with_ref)
        if ranks % (args.fsdp_shard_size or ranks):
            raise TrainArgsError(f"fsdp_shard_size={args.fsdp_shard_size} does not divide the group's {ranks} ranks")
        size = args.sequence_parallel_size
        if ranks % size:
            raise TrainArgsError(f"sequence_parallel_size={size} does not divide the group's {ranks} ranks")
        balanced = [name for name in ("moe_aux_loss_coeff", "moe_z_loss_coeff") if args[name]]
        if balanced and size > 1:
            raise TrainArgsError(
                f"args.{balanced[0]}={args[balanced[0]]} is not possible with sequence_parallel_size={size}, whose "
                "ranks do not see whole rows; leave one of them out"
            )
        if args.debug_rollout_only or not (balanced or size > 1) or (config := known_config(args)) is None:
            return
        try:
            check_sliceable(config, size)
        except ValueError as error:
            raise TrainArgsError(str(error)) from None
        if balanced and RoutingShape.of(config) is None:
            raise TrainArgsError(
                f"args.{balanced[0]}={args[balanced[0]]} needs a mixture of experts, and the model is a "
                f"{config.model_type!r}; leave it out"
            )

    def begin(self) -> None:
        self.device = take_device(self.local_rank, self.device_ids)
        initialize_distributed(self, every_backend(), self.args.distributed_timeout_minutes)
        size = self.args.sequence_parallel_size
        self._dp_group = dist.group.WORLD
        if size > 1:
            self._dp_group = new_rows(torch.arange(self.world_size).view(-1, size).t().tolist())
        self.register_layout({"dp": self.world_size // size, "sp": size}, dp=self.rank // size, sp=self.rank % size)

    def seed(self, number: int) -> None:
        """As in `ModelWorker`. Ranks of one sequence drop out differently, because they have different tokens."""
        place = self.rank % self.args.sequence_parallel_size
        super().seed(mixed_seed(number, place) if place else number)

    def make_model(self, hf_config: Any, *, empty: bool = False) -> FSDPTrainModel:
        args = self.args
        options = FSDPOptions(
            param_dtype=dtype_of(args.param_dtype),
            reduce_dtype=torch.float64 if args.fsdp_reduce_dtype == "fp64" else dtype_of(args.fsdp_reduce_dtype),
            shard_size=args.fsdp_shard_size,
            sequence_parallel_size=args.sequence_parallel_size,
            cpu_offload=args.fsdp_cpu_offload,
            gradient_checkpointing=args.gradient_checkpointing,
            max_tokens_per_micro_batch=args.max_tokens_per_micro_batch,
            sequence_packing=args.sequence_packing,
            betas=(args.adam_beta1, args.adam_beta2),
            eps=args.adam_eps,
            weight_decay=args.weight_decay,
            clip_grad=args.clip_grad,
            seed=args.seed,
            trust_remote_code=args.trust_remote_code,
            lora=LoraSettings.from_args(args),
            fp32_lm_head=args.fp32_lm_head,
            exact=args.exact,
            moe_aux_loss_coeff=args.moe_aux_loss_coeff,
            moe_z_loss_coeff=args.moe_z_loss_coeff,
            moe_balance_rows=args.moe_router_load_balancing_type == "seq_aux_loss",
            routing_replay=args.routing_replay is not None and self.role == "actor",
        )
        return FSDPTrainModel(hf_config, self.role, self.device, options, args.hf_checkpoint, empty=empty)

    def make_empty_model(self, hf_config: Any) -> FSDPTrainModel:
        """As in `ModelWorker`. The base of an adapter is in no snapshot, and is read again."""
        return self.make_model(hf_config, empty=not self.args.lora_rank)

    @property
    def reshards(self) -> bool:
        return True

    @property
    def shards(self) -> int:
        return self.args.fsdp_shard_size or self.world_size

    @property
    def shard(self) -> int:
        return self.rank % self.shards  # with HSDP, ranks of different replicas have the same one

    @property
    def dp_replica(self) -> tuple[int, int]:
        # Without HSDP and sequence parallelism each rank can leave alone.
        size = 1
        # A group may shrink before `init` has set `args`.
        if "args" in vars(self):
            size = math.lcm(self.args.fsdp_shard_size or 1, self.args.sequence_parallel_size)
        return self.rank // size, self.world_size // size

    @property
    def dp_group(self) -> Any:
        return self._dp_group

    def get_parallel_config(self) -> dict[str, int]:
        return {
            **super().get_parallel_config(),
            "sp_size": self.args.sequence_parallel_size,
            "shard_size": self.shards,
            "replicas": self.world_size // self.shards,
        }
