"""The routers of transformers' mixtures of experts: recording which experts they choose, and choosing recorded ones."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from single_controller import SingleControllerError
from workers.data.routed_experts import NATIVE, RoutingMeter, RoutingShape
from workers.hf_files import RANDOM

_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")

Scores = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""(logits of all experts (n, E), chosen experts (n, k)) -> their scores (n, k) in float32 or the logits' dtype."""


class RoutingError(SingleControllerError, ValueError):
    """The experts of a model cannot be recorded or replayed."""


def _softmax(logits: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    return torch.softmax(logits, dim=-1, dtype=torch.float32).gather(1, chosen)


def _normalized(logits: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    scores = _softmax(logits, chosen)
    return scores / scores.sum(dim=-1, keepdim=True)


def _softmax_of_chosen(logits: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    return torch.softmax(logits.gather(1, chosen), dim=-1)


class Routers:
    """The routers of a model: modules that return (logits, scores, chosen experts), as those of Qwen3-MoE, Mixtral and
    OLMoE do. They get hooks; the model is otherwise as it was.

    A replayed token has the scores that the model's own router gives the recorded experts, computed from all its logits
    in the model's own way, so that the gradient reaches the router.

    Args:
        model: a model of transformers.

    Attributes:
        shape: what it chooses experts from.
        replayed: (n, layers, k) int16, the experts of the tokens of the passes that follow, in the order of the model's
            input; `NATIVE` where the router chooses, as for more tokens than n. None for the router's choice at all.
            It must stay until the backward pass has ended: activations that are recomputed are routed again.
        meter: counts the experts of the passes that follow; None to count nothing.
        logits: the logits of the passes that follow are appended to it, (n or more, E) of each layer; None for none.

    Raises:
        RoutingError: the model has no routers of this kind.
    """

    def __init__(self, model: Any) -> None:
        config = model.config.get_text_config()
        kind, shape = model.config.model_type, RoutingShape.of(config)
        if shape is None:
            raise RoutingError(f"a {kind!r} of this config has no experts, so there is nothing to record or replay")
        routers: dict[int, Any] = {}
        for name, module in model.named_modules():
            if type(module).__name__.endswith("Router") and (found := _LAYER.search(f"{name}.")):
                routers[int(found[1])] = module
        if tuple(sorted(routers)) != shape.sparse:
            raise RoutingError(
                f"the experts of {kind!r} cannot be recorded or replayed: its config has experts in the layers "
                f"{list(shape.sparse)}, and its model routers in {sorted(routers)}"
            )
        self.shape = shape
        self.replayed: torch.Tensor | None = None
        self.meter: RoutingMeter | None = None
        self.logits: list[torch.Tensor] | None = None
        self._recorded: dict[int, torch.Tensor] | None = None
        self._scores = _scores_of(type(routers[shape.sparse[0]]), config)
        for layer, router in routers.items():
            router.register_forward_hook(partial(self._route, layer))

    def record(self) -> None:
        """Keep the experts of the passes that follow, until `recorded`; of several passes, those of the last."""
        self._recorded = {}

    def recorded(self) -> torch.Tensor:
        """Return the experts of the last pass since `record`, (tokens, layers, k) int16 on the model's device, in the
        order of its input; `NATIVE` in layers without experts. Recording ends.

        Raises:
            RuntimeError: there was no pass.
        """
        found, self._recorded = self._recorded, None
        if not found:
            raise RuntimeError("nothing was recorded: there was no pass since record()")
        first = found[self.shape.sparse[0]]
        made = first.new_full((len(first), self.shape.layers, self.shape.k), NATIVE, dtype=torch.int16)
        for layer, chosen in found.items():
            made[:, layer] = chosen
        return made

    def forget(self) -> None:
        """Keep nothing of passes that have ended or failed: later ones would take the experts, or be recorded."""
        self.replayed = self.meter = self.logits = self._recorded = None

    def _route(self, layer: int, router: Any, given: Any, made: tuple[torch.Tensor, ...]) -> Any:
        logits, scores, native = made
        chosen = native
        if self.replayed is not None:
            wanted = self.replayed[:, layer].to(native.dtype)
            if more := len(native) - len(wanted):  # rows that exact mode has added
                wanted = torch.cat([wanted, wanted.new_full((more, wanted.shape[1]), NATIVE)])
            chosen = torch.where(wanted == NATIVE, native, wanted)
            scores = self._scores(logits, chosen).to(scores.dtype)
        if self.logits is not None:
            self.logits.append(logits)
        if self._recorded is not None:
            self._recorded[layer] = chosen.detach()
        if self.meter is not None:
            self.meter.add(layer, chosen.detach(), native.detach(), self.replayed)
        return logits, scores, chosen


def _scores_of(router: Any, config: Any) -> Scores:
    """Find how routers of a class compute scores: by trying a small one, bit for bit."""
    with RANDOM, torch.device("cpu"), torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        try:
            one = router(config).float()
            for tensor in [*one.parameters(), *one.buffers()]:
                tensor.normal_()
            logits, scores, chosen = one(torch.randn(8, config.hidden_size))
            for rule in (_softmax, _normalized, _softmax_of_chosen):
                found = rule(logits, chosen)
                if found.shape == scores.shape and torch.equal(found, scores):
                    return rule
            why = "its scores are not a softmax over all experts, nor over the chosen ones"
        except (AttributeError, IndexError, RuntimeError, TypeError, ValueError) as error:
            why = f"{type(error).__name__}: {error}"
    raise RoutingError(f"the experts of {config.model_type!r} cannot be recorded or replayed: {router.__name__}: {why}")
