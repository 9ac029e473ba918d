"""Megatron's optimizer, and the wrapping of a model that it needs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch

from workers.megatron.checks import check_names
from workers.train.optimizer_settings import own_settings


@dataclass(frozen=True)
class AdamOptions:
    """Adam with decoupled weight decay, as Megatron's optimizer runs it.

    Attributes:
        lr: learning rate.
        betas: decay of the two moments.
        eps: added to the denominator.
        weight_decay: decoupled; Megatron leaves biases and norms out of it.
        clip_grad: largest norm of the gradient of the whole model; 0 for no clipping.
        distributed: whether optimizer states are cut over the dp ranks.

    Raises:
        ValueError: a number that makes no sense.
    """

    lr: float = 1e-5
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    clip_grad: float = 1.0
    distributed: bool = False

    def __post_init__(self) -> None:
        for name in ("lr", "eps", "weight_decay", "clip_grad"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"optimizer: {name}={getattr(self, name)!r} is not a number from 0")
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"optimizer: betas={self.betas!r} are not two numbers from 0 to below 1")

    @classmethod
    def of(cls, given: AdamOptions | Mapping[str, Any] | None) -> AdamOptions:
        """From a mapping of the attributes.

        Raises:
            ValueError: one that does not exist.
        """
        if isinstance(given, AdamOptions):
            return given
        options = dict(given or {})
        check_names("optimizer", options, [field.name for field in fields(cls)])
        if "betas" in options:
            options["betas"] = tuple(options["betas"])
        return cls(**options)


def reduced(config: Any, chunks: Sequence[Any], distributed: bool) -> list[Any]:
    """The chunks of a rank in Megatron's DistributedDataParallel. Gradients are kept in float32 in buffers, and are
    summed over the dp ranks; what divides them is up to `finalize_model_grads`."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    reducing = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True, use_distributed_optimizer=distributed, overlap_grad_reduce=False
    )
    wrapped = [
        DistributedDataParallel(config, reducing, chunk, disable_bucketing=number > 0)
        for number, chunk in enumerate(chunks)
    ]
    for chunk in wrapped:
        chunk.broadcast_params()
    return wrapped


def make_optimizer(options: AdamOptions, config: Any, chunks: Sequence[Any]) -> Any:
    """Megatron's optimizer of chunks that are `reduced`. It is made known to the config, for the schedules.

    Args:
        options: see there.
        config: the chunks' ``TransformerConfig``.
        chunks: of this rank.
    """
    from megatron.core.distributed import finalize_model_grads
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    adam = OptimizerConfig(
        optimizer="adam",
        lr=options.lr,
        adam_beta1=options.betas[0],
        adam_beta2=options.betas[1],
        adam_eps=options.eps,
        weight_decay=options.weight_decay,
        clip_grad=options.clip_grad,
        use_distributed_optimizer=options.distributed,
        bf16=config.bf16,
        fp16=config.fp16,
        params_dtype=config.params_dtype,
        initial_loss_scale=2.0**16,  # of fp16; from megatron's own 2^32 the first dozen steps overflow
    )
    optimizer = get_megatron_optimizer(adam, list(chunks))
    config.finalize_model_grads_func = finalize_model_grads
    config.grad_scale_func = optimizer.scale_loss
    no_sync = [chunk.no_sync for chunk in chunks]
    config.no_sync_func = no_sync[0] if len(no_sync) == 1 else no_sync
    return optimizer


def finite_step(optimizer: Any) -> float:
    """One step of Megatron's optimizer, unless the gradient is not finite: Megatron itself leaves it out for float16
    alone.

    Returns:
        The norm of the gradient of the whole model before clipping, on every rank; where it is not finite, no step was
        made.
    """
    from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32

    if optimizer.prepare_grads():  # float16 overflowed
        return math.nan
    norm = float(optimizer.get_grad_norm())
    if not math.isfinite(norm):
        return norm
    for one in getattr(optimizer, "chained_optimizers", [optimizer]):
        parameters = one.get_parameters()
        if one.config.clip_grad and parameters:
            clip_grad_by_total_norm_fp32(parameters, max_norm=one.config.clip_grad, total_norm=norm)
    optimizer.step_with_ready_grads()
    return norm


def inner_optimizers(optimizer: Any) -> list[Any]:
    """The torch optimizers inside one of Megatron's."""
    chained = getattr(optimizer, "chained_optimizers", [optimizer])
    return [one.optimizer for one in chained if one.optimizer is not None]


def allocate_state(optimizer: Any) -> None:
    """Give every parameter the state that torch's Adam begins with, where it has none: megatron's distributed optimizer
    can be loaded only if there is some."""
    for one in inner_optimizers(optimizer):
        for parameter in (parameter for group in one.param_groups for parameter in group["params"]):
            if not one.state[parameter]:
                moments = {name: torch.zeros_like(parameter.data) for name in ("exp_avg", "exp_avg_sq")}
                one.state[parameter] = {"step": torch.tensor(0.0), **moments}


def load_state(optimizer: Any, state: Mapping[str, Any]) -> None:
    """Take the state that megatron has read from a checkpoint.

    Where torch's Adam is inside, megatron's distributed optimizer loads one count of steps for all parameters, which
    torch then counts up once for each, and stumbles over the counts when it loads the moments: both are put right.
    """
    rest = dict(state)
    by_parameter = rest.pop("param_state", None)
    with own_settings(*inner_optimizers(optimizer)):
        optimizer.load_state_dict(rest)
    steps = []
    for of_one in (of_one for one in inner_optimizers(optimizer) for of_one in one.state.values()):
        if isinstance(of_one.get("step"), torch.Tensor):
            steps.append((of_one, of_one.pop("step").clone()))
    if by_parameter is not None:
        (distributed,) = getattr(optimizer, "chained_optimizers", [optimizer])
        distributed.load_parameter_state_from_fully_reshardable(by_parameter)
    for of_one, step in steps:
        of_one["step"] = step
