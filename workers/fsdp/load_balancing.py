"""Auxiliary losses of a mixture of experts, and how evenly its experts are loaded, for models of transformers.

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
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from workers.data.micro_batches import MicroBatch
from workers.data.packing import PackedRows


def why_no_losses(hf_config: Any) -> str | None:
    """Return why a model has no auxiliary losses, None if it has: transformers defines one for its type."""
    if getattr(hf_config.get_text_config(), "router_aux_loss_coef", None) is None:
        return f"transformers has no load-balancing loss for a {hf_config.model_type!r}"
    return None


class LoadBalancing:
    """Watches the routers of a model.

    Args:
        model: of transformers, before it is sharded; it gets hooks.
        coefficient: of the load-balancing loss.
        z_coefficient: of the z-loss.
        by_row: whether the tokens of a row are a batch, or those of a micro-batch.
    """

    def __init__(self, model: Any, coefficient: float, z_coefficient: float, *, by_row: bool) -> None:
        self._coefficients = coefficient, z_coefficient
        self._by_row = by_row
        self._total = 1.0
        self._seen: list[tuple[torch.Tensor, torch.Tensor]] | None = None
        """Logits and choices of the forward pass that is running, by layer; None if they are not needed."""
        self._sums: torch.Tensor | None = None
        self.layers = 0
        for router in _routers(model):
            router.register_forward_hook(self._see)
            self.layers += 1

    def _see(self, router: Any, given: Any, output: Any) -> None:
        if self._seen is not None:
            self._seen.append((output[0], output[2]))

    def begin_step(self, tokens: int, device: torch.device, group: dist.ProcessGroup | None) -> None:
        """Begin a step. All ranks call it.

        Args:
            tokens: number of real tokens of this rank's rows.
            device: of this rank.
            group: the ranks that have different rows.
        """
        total = torch.tensor(tokens, device=device)
        dist.all_reduce(total, group=group)
        self._total, self._sums, self._group = max(float(total), 1.0), None, group

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Within it runs a forward pass whose loss is wanted. The passes that recompute activations run outside."""
        self._seen = []
        try:
            yield
        except BaseException:
            self._seen = None
            raise

    def loss(self, part: MicroBatch) -> torch.Tensor:
        """Return this micro-batch's share of the step's losses, multiplied by the coefficients.

        Args:
            part: what the forward pass in `watching` has computed.
        """
        seen, self._seen = self._seen or [], None
        real = part.attention_mask * (not part.is_filler)
        places = None if part.packed is None else _places(part.packed).to(real.device)
        total = torch.zeros([], device=real.device)
        sums = []
        for of_tokens in seen:
            logits, chosen = (_of_rows(one, places, real.shape) for one in of_tokens)
            with torch.set_grad_enabled(any(self._coefficients)):
                balance, z = self._losses(logits.float(), chosen.shape[-1], real)
                total = total + (self._coefficients[0] * balance + self._coefficients[1] * z) / self._total
            load = torch.zeros(logits.shape[-1], device=real.device)
            load.scatter_add_(0, chosen.flatten(), real[..., None].expand_as(chosen).flatten().float())
            sums.append(torch.cat([load, torch.stack([balance, z]).detach()]))
        if sums:
            stacked = torch.stack(sums).double()
            self._sums = stacked if self._sums is None else self._sums + stacked
        return total

    def _losses(self, logits: torch.Tensor, k: int, real: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Sums over the tokens of both losses of a layer. ``logits``: (b, s, E)."""
        experts, weights = logits.shape[-1], real[..., None].float()
        scores = (logits.softmax(-1) * weights).sum(1)
        with torch.no_grad():
            chosen = torch.zeros_like(logits).scatter_(-1, logits.topk(k, dim=-1).indices, 1.0)
            counts, tokens = (chosen * weights).sum(1), real.sum(1).float()
        if not self._by_row:
            scores, counts, tokens = scores.sum(0, True), counts.sum(0, True), tokens.sum(0, True)
        balance = ((counts * scores).sum(-1) * experts / (k * tokens.clamp(min=1.0))).sum()
        return balance, (logits.logsumexp(-1).square() * real).sum()

    def end_step(self) -> dict[str, float]:
        """End a step. All ranks call it. Returns metrics, the same on every rank: the losses as means over layers, and
        the load of the least and of the most loaded expert of a layer, 1.0 if the load is even."""
        sums, self._sums = self._sums, None
        if sums is None:
            return {}
        dist.all_reduce(sums, group=self._group)
        load, (balance, z) = sums[:, :-2].cpu(), sums[:, -2:].mean(0).tolist()
        load = load / load.mean(1, keepdim=True).clamp(min=1e-9)
        return {
            "moe/load_min": float(load.min()),
            "moe/load_max": float(load.max()),
            "moe/load_balancing_loss": balance / self._total,
            "moe/z_loss": z / self._total,
        }


def _routers(model: Any) -> list[Any]:
    """Return the modules whose outputs transformers records as the routers' logits, with their choice behind them."""
    found = []
    for owner in model.modules():
        recorder = (getattr(owner, "_can_record_outputs", None) or {}).get("router_logits")
        kind = getattr(recorder, "target_class", None)
        if kind is not None and not recorder.index:
            found += [module for module in owner.modules() if isinstance(module, kind)]
    return list(dict.fromkeys(found))


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
