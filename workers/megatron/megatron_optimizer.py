"""Megatron's optimizer, and the data-parallel wrapper that it needs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch

from workers.megatron.config import check_names
from workers.train.checkpoints import own_settings


@dataclass(frozen=True)
class AdamOptions:
    """Options of Megatron's Adam with decoupled weight decay.

    Attributes:
        lr: learning rate.
        betas: decay rates of the two moments.
        eps: added to the denominator.
        weight_decay: decoupled; not applied to biases and norms.
        clip_grad: maximum norm of the whole model's gradient; 0 for no clipping.
        distributed: whether the optimizer's state is sharded over the dp ranks.

    Raises:
        ValueError: a value is out of range.
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
                raise ValueError(f"optimizer: {name}={getattr(self, name)!r} must be at least 0")
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"optimizer: betas={self.betas!r} must be two numbers, at least 0 and below 1")

    @classmethod
    def of(cls, given: AdamOptions | Mapping[str, Any] | None) -> AdamOptions:
        """Make options from a mapping of the attributes.

        Raises:
            ValueError: an unknown attribute, or a value out of range.
        """
        if isinstance(given, AdamOptions):
            return given
        options = dict(given or {})
        check_names("optimizer", options, [field.name for field in fields(cls)])
        if "betas" in options:
            options["betas"] = tuple(options["betas"])
        return cls(**options)


def data_parallel(config: Any, chunks: Sequence[Any], distributed: bool) -> list[Any]:
    """Wrap a rank's chunks in Megatron's DistributedDataParallel.

    Gradients are accumulated in float32 buffers and summed over the dp ranks; the loss function normalizes them.
    """
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    ddp = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True, use_distributed_optimizer=distributed, overlap_grad_reduce=False
    )
    # As in Megatron's own training, only the first chunk is divided into buckets.
    wrapped = [
        DistributedDataParallel(config, ddp, chunk, disable_bucketing=number > 0) for number, chunk in enumerate(chunks)
    ]
    # The dp ranks must begin with equal weights, even if their random initial weights differ.
    for chunk in wrapped:
        chunk.broadcast_params()
    return wrapped


def make_optimizer(options: AdamOptions, config: Any, chunks: Sequence[Any]) -> Any:
    """Make Megatron's optimizer and register it in the config, where the schedules find it.

    Args:
        options: see `AdamOptions`.
        config: the chunks' ``TransformerConfig``.
        chunks: this rank's, wrapped by `data_parallel`.
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
        initial_loss_scale=2.0**16,  # for fp16: with megatron's default of 2^32 the first dozen steps overflow
    )
    optimizer = get_megatron_optimizer(adam, list(chunks))
    for group in optimizer.param_groups:  # only Megatron's own scheduler, which is not used here, multiplies these
        group["weight_decay"] = options.weight_decay * group.get("wd_mult", 1.0)
    config.finalize_model_grads_func = finalize_model_grads
    config.grad_scale_func = optimizer.scale_loss
    no_sync = [chunk.no_sync for chunk in chunks]
    config.no_sync_func = no_sync[0] if len(no_sync) == 1 else no_sync
    return optimizer


def finite_step(optimizer: Any) -> float:
    """Take an optimizer step unless the gradient is not finite. Megatron itself skips such steps for float16 only.

    Returns:
        The norm of the whole model's gradient before clipping, on every rank. If it is not finite, no step was taken.
    """
    from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32

    before = [scaler.state_dict() for scaler in scalers(optimizer)]
    if optimizer.prepare_grads():  # float16 overflowed
        # Experts have an optimizer and a scaler of their own, but the loss has one scale: all must remain the same.
        for scaler, state in zip(scalers(optimizer), before, strict=True):
            scaler.load_state_dict(state)
            scaler.update(True)
        return math.nan
    norm = float(optimizer.get_grad_norm())
    # The norm covers the gradients of all ranks, so either all ranks skip the step or none does.
    if not math.isfinite(norm):
        return norm
    for inner in getattr(optimizer, "chained_optimizers", [optimizer]):
        parameters = inner.get_parameters()
        if inner.config.clip_grad and parameters:
            clip_grad_by_total_norm_fp32(parameters, max_norm=inner.config.clip_grad, total_norm=norm)
    optimizer.step_with_ready_grads()
    return norm


def inner_optimizers(optimizer: Any) -> list[Any]:
    """The torch optimizers inside one of Megatron's."""
    chained = getattr(optimizer, "chained_optimizers", [optimizer])
    return [inner.optimizer for inner in chained if inner.optimizer is not None]


def scalers(optimizer: Any) -> list[Any]:
    """Megatron's scalers of the loss, for fp16."""
    chained = getattr(optimizer, "chained_optimizers", [optimizer])
    return [inner.grad_scaler for inner in chained if getattr(inner, "grad_scaler", None) is not None]


def allocate_state(optimizer: Any) -> None:
    """Give every parameter without Adam state the initial one. Megatron's distributed optimizer can only load into
    existing state."""
    for inner in inner_optimizers(optimizer):
        for parameter in (parameter for group in inner.param_groups for parameter in group["params"]):
            if not inner.state[parameter]:
                moments = {name: torch.zeros_like(parameter.data) for name in ("exp_avg", "exp_avg_sq")}
                inner.state[parameter] = {"step": torch.tensor(0.0), **moments}


def share_steps(optimizer: Any) -> None:
    """Give the optimizer of experts the other one's number of steps where a stage has no experts. With torch's Adam
    inside, megatron's distributed optimizer asserts that it has one, and that of rank 0 is stored for all ranks."""
    dense, *others = inner_optimizers(optimizer)
    # A rank may have none of the dense weights either, but padding.
    step = next((state.get("step") for state in dense.state.values()), None)
    for inner in others:
        if step is not None and not any(group["params"] for group in inner.param_groups):
            inner.state[None] = {"step": step}


def load_state(optimizer: Any, state: Mapping[str, Any]) -> None:
    """Load the state that megatron has read from a checkpoint.

    With torch's Adam inside, megatron's distributed optimizer loads one step count for all parameters, which torch
    would then increment once per parameter, and fails on the counts when it loads the moments. So each parameter gets
    a count of its own, and the counts are set aside while the moments load.
    """
    chained = getattr(optimizer, "chained_optimizers", [optimizer])
    # Experts have an optimizer of their own, with states by number.
    rests = [dict(state)] if len(chained) == 1 else [dict(state[number]) for number in range(len(chained))]  # type: ignore[index]
    by_parameter = [rest.pop("param_state", None) for rest in rests]
    # What ranks have in common is that of rank 0, which knows no steps of experts if its stage has none. All optimizers
    # step together, and every stage has dense weights.
    states: list[dict[Any, Any]] = [rest.get("optimizer", rest).get("state", {}) for rest in rests]
    for state in states if "common_step" in states[0] else ():
        state.setdefault("common_step", states[0]["common_step"])
    with own_settings(*inner_optimizers(optimizer)):
        optimizer.load_state_dict(rests[0] if len(chained) == 1 else dict(enumerate(rests)))
    steps = []
    for entry in (entry for inner in inner_optimizers(optimizer) for entry in inner.state.values()):
        if isinstance(entry.get("step"), torch.Tensor):
            steps.append((entry, entry.pop("step").clone()))
    for inner, moments in zip(chained, by_parameter, strict=True):
        if moments is not None:
            inner.load_parameter_state_from_fully_reshardable(moments)
    for entry, step in steps:
        entry["step"] = step
