"""The layers of a mixture of experts, on megatron-core's dispatchers and experts, with a router of our own.

Megatron's router weighs the auxiliary losses of tensor-parallel ranks by their own tokens only, knows no padding behind
the first pipeline stage, and keeps replayed routes in a registry of all models of the process. `MoERouter` gets what it
needs to know of a micro-batch from the `ExpertRouting` of its model.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler, topk_routing_with_score_function
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from torch import nn

from workers.algorithms.expert_losses import expert_losses
from workers.data.routed_experts import NATIVE, RoutingMeter, RoutingShape


def layers_of_stage(config: TransformerConfig, stage: int | None) -> TransformerBlockSubmodules:
    """Return the layers of one pipeline stage of this rank: with experts where ``config.moe_layer_freq`` has a 1.

    With ``config.moe_grouped_gemm`` the experts are Transformer Engine's, otherwise megatron's ``SequentialMLP``.

    Args:
        config: of a model with experts; ``moe_layer_freq`` is a list.
        stage: the virtual pipeline stage, if there are several on a rank.
    """
    specs = [_layer(config, None), _layer(config, config.num_moe_experts)]
    begin = get_transformer_layer_offset(config, vp_stage=stage)
    end = begin + get_num_layers_to_build(config, vp_stage=stage)
    return TransformerBlockSubmodules(
        layer_specs=[specs[with_experts] for with_experts in list(config.moe_layer_freq)[begin:end]],
        layer_norm=Norm,
    )


def _layer(config: TransformerConfig, experts: int | None) -> ModuleSpec:
    layer = get_gpt_layer_local_spec(
        num_experts=experts, qk_layernorm=config.qk_layernorm, normalization=config.normalization
    )
    layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = Norm
    if config.qk_layernorm:
        attention = layer.submodules.self_attention.submodules
        attention.q_layernorm = attention.k_layernorm = Norm
    if experts is not None:
        if config.moe_grouped_gemm:
            layer.submodules.mlp.submodules.experts = get_moe_module_spec(
                use_te=True, num_experts=experts, moe_grouped_gemm=True
            ).submodules.experts
        layer.submodules.mlp.submodules.router = MoERouter
    return layer


class Norm(nn.RMSNorm):
    """RMSNorm of a slice of the sequence. Without Apex and Transformer Engine, megatron has no norm for sequence
    parallelism, which a mixture of experts needs with tensor parallelism."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps)
        # Megatron sums the gradients of such parameters over the tensor-parallel ranks.
        vars(self.weight)["sequence_parallel"] = config.sequence_parallel


@dataclass(frozen=True)
class RoutedTokens:
    """What the routers need to know of a micro-batch of b rows of s tokens.

    Attributes:
        number: of the micro-batch.
        real: (s, b) bool, false for padding.
        routes: (s, b, layers, k) int16, the experts that the tokens go to, `NATIVE` for the router's own choice; None
            for its own choice everywhere.
    """

    number: int
    real: torch.Tensor
    routes: torch.Tensor | None = None

    def slice_of(self, rank: int, ranks: int) -> RoutedTokens:
        """Return a tensor-parallel rank's slice of the sequence."""
        size = len(self.real) // ranks
        span = slice(rank * size, (rank + 1) * size)
        return replace(self, real=self.real[span], routes=None if self.routes is None else self.routes[span])


class ExpertRouting:
    """What the routers of one model share: the tokens that they route, and what they report.

    The auxiliary losses of a step are those of `workers.algorithms.expert_losses`, as means over the real tokens of all
    dp ranks.

    Args:
        models: this rank's GPTModels.
        config: theirs.
        shape: of the whole model.

    Attributes:
        coefficients: of the load-balancing loss and of the z-loss.
        tokens: of the micro-batch whose forward pass runs; None outside.
        total: number of real tokens of the step, on all dp ranks.
        recorded: by number of the micro-batch, (s, b, layers, k) int16, the experts that its tokens went to, `NATIVE`
            in the layers of other ranks; None if they are not recorded.
    """

    def __init__(self, models: Sequence[nn.Module], config: TransformerConfig, shape: RoutingShape) -> None:
        self.config, self.shape = config, shape
        coefficients: Any = (config.moe_aux_loss_coeff, config.moe_z_loss_coeff)
        self.coefficients = tuple(float(coefficient or 0.0) for coefficient in coefficients)
        self.routers = [module for model in models for module in model.modules() if isinstance(module, MoERouter)]
        for router in self.routers:
            router.shared = self
        self.tokens: RoutedTokens | None = None
        self.total = 1.0
        self.recorded: dict[int, torch.Tensor] | None = None
        self._meter: RoutingMeter | None = None
        self._losses = torch.zeros(2)

    def begin_step(self, total: float, device: torch.device) -> None:
        """Begin a training step with so many real tokens on all dp ranks."""
        self.total = max(total, 1.0)
        self._meter = RoutingMeter(self.shape, device)
        self._losses = torch.zeros(2, dtype=torch.float64, device=device)

    def end_step(self) -> dict[str, float]:
        """End a training step, before `forget`. All ranks call it. Return metrics, the same on every rank: those of
        `RoutingMeter`, and the auxiliary losses as means over layers, unless their coefficients are 0."""
        if self._meter is None:
            return {}
        sums = torch.cat([self._meter.sums(), self._losses])
        dist.all_reduce(sums)  # each rank has tokens and layers of its own
        sums = sums.cpu()
        found = RoutingMeter.metrics(sums[:-2], self.shape)
        if any(self.coefficients):
            balance, z = (sums[-2:] / self.total / len(self.shape.sparse)).tolist()
            found |= {"moe/load_balancing_loss": balance, "moe/z_loss": z}
        return found

    def forget(self) -> None:
        """Keep nothing of a step that has ended or failed: a later one would take its routes, and count on."""
        for router in self.routers:
            router.waiting.clear()
        self._meter = self.recorded = None

    @contextmanager
    def forward(self, tokens: RoutedTokens) -> Iterator[None]:
        """Within it the models' forward pass of a micro-batch runs. Its recomputation runs outside."""
        if self.config.sequence_parallel:
            group = parallel_state.get_tensor_model_parallel_group()
            tokens = tokens.slice_of(group.rank(), group.size())
        if self.recorded is not None and tokens.number not in self.recorded:  # this stage may have no router
            shape = (*tokens.real.shape, self.shape.layers, self.shape.k)
            self.recorded[tokens.number] = torch.full(shape, NATIVE, dtype=torch.int16, device=tokens.real.device)
        self.tokens = tokens
        try:
            yield
        finally:
            self.tokens = None

    def count(self, layer: int, chosen: torch.Tensor, native: torch.Tensor, tokens: RoutedTokens) -> None:
        """Add what a router has chosen.

        Args:
            layer: its number, from 0.
            chosen: (s * b, k) int64, experts.
            native: those of its own choice.
            tokens: what it was given.
        """
        if self.recorded is not None:
            self.recorded[tokens.number][:, :, layer] = chosen.view(*tokens.real.shape, -1).short()
        if self._meter is not None:
            self._meter.real = tokens.real.flatten()
            replayed = None if tokens.routes is None else tokens.routes.flatten(0, 1)
            self._meter.add(layer, chosen, native, replayed)

    def add_losses(self, balance: torch.Tensor, z: torch.Tensor) -> None:
        """Add sums over tokens of the auxiliary losses of a router."""
        self._losses += torch.stack([balance, z]).detach().double()


class MoERouter(TopKRouter):
    """Softmax over the experts and the best k, or given ones; see `ExpertRouting`.

    Attributes:
        shared: the `ExpertRouting` of its model.
        waiting: the tokens of the micro-batches whose backward pass has not begun, in the order of their forward
            passes. Every schedule runs the backward passes of a chunk in that order, so a recomputation is that of the
            first one.
    """

    shared: ExpertRouting

    def __init__(self, config: TransformerConfig, pg_collection: Any = None) -> None:
        super().__init__(config=config, pg_collection=pg_collection)
        self.waiting: deque[RoutedTokens] = deque()

    def gating(self, input: torch.Tensor) -> torch.Tensor:
        """Logits, (s, b, experts). Megatron-core 0.16's own raises NameError without Transformer Engine."""
        kinds = {"fp32": torch.float32, "fp64": torch.float64}
        dtype = kinds.get(self.config.moe_router_dtype or "", input.dtype)
        return F.linear(input.to(dtype), self.weight.to(dtype))

    def forward(self, input: torch.Tensor, padding_mask: Any = None) -> tuple[torch.Tensor, torch.Tensor]:
        """(s, b, hidden) -> score and whether it is chosen, of each expert for each token, both (s * b, experts)."""
        recomputed = self.shared.tokens is None  # its choices were counted already
        tokens = self.waiting.popleft() if self.shared.tokens is None else self.shared.tokens
        if not recomputed and self.training:
            self.waiting.append(tokens)
        logits = self.gating(input).flatten(0, 1)
        layer = int(self.layer_number) - 1
        choice = _Choice(None if tokens.routes is None else tokens.routes[:, :, layer].flatten(0, 1).long())
        probs, chosen = topk_routing_with_score_function(
            logits, self.topk, use_pre_softmax=self.config.moe_router_pre_softmax, router_replay=choice
        )
        if not recomputed:
            self.shared.count(layer, choice.chosen, choice.native, tokens)
        if self.training and any(self.shared.coefficients):
            # Recomputations need this too, because the backward pass uses their graph instead of the first one.
            balance, z = self._losses(logits, tokens)
            if not recomputed:
                self.shared.add_losses(balance, z)
            if torch.is_grad_enabled():
                of_balance, of_z = self.shared.coefficients
                loss = (of_balance * balance + of_z * z) / self.shared.total
                probs = MoEAuxLossAutoScaler.apply(probs, loss)
        return probs, chosen

    def _losses(self, logits: torch.Tensor, tokens: RoutedTokens) -> tuple[torch.Tensor, torch.Tensor]:
        """The auxiliary losses, as sums over this rank's tokens."""
        sliced = self.config.sequence_parallel
        return expert_losses(
            logits.unflatten(0, tokens.real.shape).transpose(0, 1),
            self.topk,
            tokens.real.t(),
            by_row=self.config.moe_router_load_balancing_type == "seq_aux_loss",
            # If each of these ranks has a slice of every row, balance over the whole rows.
            group=parallel_state.get_tensor_model_parallel_group() if sliced else None,
        )


class _Choice:
    """Chooses experts in megatron's function for scores, which calls `get_replay_topk`."""

    chosen: torch.Tensor
    native: torch.Tensor

    def __init__(self, routes: torch.Tensor | None) -> None:
        self._routes = routes

    def get_replay_topk(
        self, scores: torch.Tensor, topk: int, num_groups: Any, group_topk: Any, default: Callable[..., Any]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Scores and numbers of the experts of each token, (tokens, k)."""
        values, self.native = default(scores, topk, num_groups, group_topk)
        self.chosen = self.native
        if self._routes is None:
            return values, self.native
        given = (self._routes != NATIVE).all(1, keepdim=True)
        self.chosen = torch.where(given, self._routes, self.native)
        return scores.gather(1, self.chosen), self.chosen


def reduce_apart(model: nn.Module) -> None:
    """Let megatron sum the gradients of experts over the ranks that have the same ones, and give them an optimizer of
    their own, also with ep 1. Otherwise it would sum over the ranks with the same dense weights, which are others if
    etp is not tp, and a checkpoint with ep 1 would have another layout than one with more."""
    for layer in (module for module in model.modules() if isinstance(module, MoELayer)):
        for parameter in layer.experts.parameters():
            vars(parameter)["allreduce"] = False


def expert_linears(layer: MoELayer) -> Iterator[tuple[nn.Parameter, nn.Parameter]]:
    """Yield the weights of both linear layers of each expert that this rank has, in order."""
    experts: Any = layer.experts
    if hasattr(experts, "local_experts"):
        yield from ((expert.linear_fc1.weight, expert.linear_fc2.weight) for expert in experts.local_experts)
        return
    for number in range(layer.num_local_experts):  # of Transformer Engine's grouped experts
        yield getattr(experts.linear_fc1, f"weight{number}"), getattr(experts.linear_fc2, f"weight{number}")
