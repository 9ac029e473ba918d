"""FSDPTrainWorker: a rank of FSDP2 training of a Hugging Face model."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from workers.device import dtype_of, every_backend, take_device
from workers.distributed import initialize_distributed
from workers.fsdp.fsdp_model import FSDPOptions, FSDPTrainModel
from workers.lora import LoraSettings
from workers.train.args import TrainArgsError
from workers.train.policy_worker import PolicyTrainWorker


class FSDPTrainWorker(PolicyTrainWorker):
    """One rank of FSDP2 training. Every rank is a data-parallel rank. The model is sharded over all of them, or over
    groups of ``args.fsdp_shard_size`` ranks with one replica each (HSDP)."""

    @classmethod
    def check_args(cls, args: Any, ranks: int, with_ref: bool) -> None:
        super().check_args(args, ranks, with_ref)
        if ranks % (args.fsdp_shard_size or ranks):
            raise TrainArgsError(f"fsdp_shard_size={args.fsdp_shard_size} does not divide the group's {ranks} ranks")

    def begin(self) -> None:
        self.device = take_device(self.local_rank, self.device_ids)
        initialize_distributed(self, every_backend(), self.args.distributed_timeout_minutes)
        self.register_layout({"dp": self.world_size}, dp=self.rank)

    def make_model(self, hf_config: Any, *, empty: bool = False) -> FSDPTrainModel:
        args = self.args
        options = FSDPOptions(
            param_dtype=dtype_of(args.param_dtype),
            reduce_dtype=torch.float64 if args.fsdp_reduce_dtype == "fp64" else dtype_of(args.fsdp_reduce_dtype),
            shard_size=args.fsdp_shard_size,
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
        )
        return FSDPTrainModel(hf_config, self.role, self.device, options, args.hf_checkpoint, empty=empty)

    def make_empty_model(self, hf_config: Any) -> FSDPTrainModel:
        """As in `ModelWorker`. The base of an adapter is in no snapshot, and is read again."""
        return self.make_model(hf_config, empty=not self.args.lora_rank)

    reshards = True

    @property
    def shards(self) -> int:
        return self.args.fsdp_shard_size or self.world_size

    @property
    def shard(self) -> int:
        return self.rank % self.shards  # with HSDP, ranks of different replicas have the same one

    @property
    def dp_replica(self) -> tuple[int, int]:
        # Without HSDP each rank can leave alone.
        size = (self.args.fsdp_shard_size if "args" in vars(self) else None) or 1
        return self.rank // size, self.world_size // size

    @property
    def dp_group(self) -> Any:
        return dist.group.WORLD

    def get_parallel_config(self) -> dict[str, int]:
        return {
            **super().get_parallel_config(),
            "shard_size": self.shards,
            "replicas": self.world_size // self.shards,
        }
