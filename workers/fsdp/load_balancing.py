"""Auxiliary losses of a mixture of experts, for models of transformers; see `workers.algorithms.expert_losses`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
import torch.nn.functional as F

from workers.algorithms.expert_losses import expert_losses
from workers.data.micro_batches import MicroBatch
from workers.hf_routing import Routers


class LoadBalancing:
    """Computes the losses of a model.

    Args:
        routers: of the model.
        coefficient: of the load-balancing loss.
        z_coefficient: of the z-loss.
        by_row: whether the tokens of a row are a batch, or those of a micro-batch.
    """

    def __init__(self, routers: Routers, coefficient: float, z_coefficient: float, *, by_row: bool) -> None:
        self._routers, self._coefficients, self._by_row = routers, (coefficient, z_coefficient), by_row
        self._total = 1.0
        self._sums = torch.zeros(2, dtype=torch.float64)
        self._logits: list[torch.Tensor] = []

    def begin_step(self, tokens: int, device: torch.device) -> None:
        """Begin a step. All ranks call it.

        Args:
            tokens: number of real tokens of this rank's rows.
            device: of this rank.
        """
        total = torch.tensor(tokens, device=device)
        dist.all_reduce(total)
        self._total = max(float(total), 1.0)
        self._sums = torch.zeros(2, dtype=torch.float64, device=device)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Within it runs a forward pass whose loss is wanted. The passes that recompute activations run outside."""
        self._routers.logits = self._logits = []
        try:
            yield
        finally:
            self._routers.logits = None

    def loss(self, part: MicroBatch) -> torch.Tensor:
        """Return this micro-batch's share of the step's losses, multiplied by the coefficients.

        Args:
            part: what the forward pass in `watching` has computed.
        """
        of_layers, self._logits = self._logits, []
        real = part.attention_mask * (not part.is_filler)
        places = None if part.packed is None else part.packed.every_place()
        total = torch.zeros([], device=real.device)
        for logits in of_layers:
            of_rows = _of_rows(logits.float(), places, real.shape)
            losses = torch.stack(expert_losses(of_rows, self._routers.shape.k, real, by_row=self._by_row))
            total = total + (losses * losses.new_tensor(self._coefficients)).sum() / self._total
            self._sums += losses.detach() / len(of_layers)
        return total

    def end_step(self) -> dict[str, float]:
        """End a step. All ranks call it. Returns the losses as means over layers, the same on every rank."""
        dist.all_reduce(self._sums)
        balance, z = (self._sums / self._total).tolist()
        return {"moe/load_balancing_loss": balance, "moe/z_loss": z}


def _of_rows(of_tokens: torch.Tensor, places: torch.Tensor | None, shape: torch.Size) -> torch.Tensor:
    """Return (b, s, ...) from what a router has made of the tokens, (N, ...); exact mode appends rows of padding."""
    if places is None:
        return of_tokens[: shape.numel()].unflatten(0, tuple(shape))
    return F.pad(of_tokens, (0, 0, 0, 1))[places]
