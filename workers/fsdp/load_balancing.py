"""Auxiliary losses of a mixture of experts, for models of transformers.

With E experts, of which a token goes to k, a layer's load-balancing loss of a batch of n tokens is

    E / (k * n) * sum over experts of (tokens that chose the expert) * (mean score of the expert)

(Fedus et al., 2021, arXiv:2101.03961). It is k times smaller than that of transformers, and is 1 if the load is even. A
batch is a row, or all rows of a micro-batch on a rank. Batches are weighted by their tokens, so the loss of a step is a
mean over its tokens, and with rows as batches it does not depend on micro-batches, packing or ranks. The z-loss is the
mean of the squared logsumexp of the router's logits (Zoph et al., 2022, arXiv:2202.08906). Both are sums over layers.
The losses are of the router's own choice, also where other routes are taken.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
import torch.nn.functional as F

from workers.data.micro_batches import MicroBatch
from workers.data.packing import PackedRows
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
        self._sums: torch.Tensor | None = None
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
        places = None if part.packed is None else _places(part.packed).to(real.device)
        total = torch.zeros([], device=real.device)
        for logits in of_layers:
            losses = torch.stack(self._losses(_of_rows(logits.float(), places, real.shape), real))
            total = total + (losses * losses.new_tensor(self._coefficients)).sum() / self._total
            if self._sums is not None:
                self._sums += losses.detach() / len(of_layers)
        return total

    def _losses(self, logits: torch.Tensor, real: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Sums over the tokens of both losses of a layer. ``logits``: (b, s, E)."""
        experts, k, weights = logits.shape[-1], self._routers.shape.k, real[..., None].float()
        scores = (logits.softmax(-1) * weights).sum(1)
        with torch.no_grad():
            chosen = torch.zeros_like(logits).scatter_(-1, logits.topk(k, dim=-1).indices, 1.0)
            counts, tokens = (chosen * weights).sum(1), real.sum(1).float()
        if not self._by_row:
            scores, counts, tokens = scores.sum(0, True), counts.sum(0, True), tokens.sum(0, True)
        balance = ((counts * scores).sum(-1) * experts / (k * tokens.clamp(min=1.0))).sum()
        return balance, (logits.logsumexp(-1).square() * real).sum()

    def end_step(self) -> dict[str, float]:
        """End a step. All ranks call it. Returns the losses as means over layers, the same on every rank."""
        sums, self._sums = self._sums, None
        if sums is None:
            return {}
        dist.all_reduce(sums)
        balance, z = (sums / self._total).tolist()
        return {"moe/load_balancing_loss": balance, "moe/z_loss": z}


def _places(rows: PackedRows) -> torch.Tensor:
    """Return the token at each place of packed rows, (b, s), N for padding. `PackedRows.places` leaves out the first
    token of each row, which nothing predicts."""
    places, width = rows.places.clone(), rows.places.shape[1]
    firsts = {owner // width: index for index, owner in enumerate(rows.owners.tolist()) if not owner % width}
    first = 0
    for row in range(len(places)):
        first = firsts.get(row, first)  # otherwise it is the row's before, with which it shares its beginning
        places[row, 0] = first
    return places


def _of_rows(of_tokens: torch.Tensor, places: torch.Tensor | None, shape: torch.Size) -> torch.Tensor:
    """Return (b, s, ...) from what a router has made of the tokens, (N, ...); exact mode appends rows of padding."""
    if places is None:
        return of_tokens[: shape.numel()].unflatten(0, tuple(shape))
    return F.pad(of_tokens, (0, 0, 0, 1))[places]
