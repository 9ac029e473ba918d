"""Auxiliary losses of the routers of a mixture of experts.

With E experts, of which a token goes to k, a layer's load-balancing loss of a batch of n tokens is

    E / (k * n) * sum over experts of (tokens that chose the expert) * (mean score of the expert)

(Fedus et al., 2021, arXiv:2101.03961). It is k times smaller than that of transformers, and is 1 if the load is even. A
batch is a row, or all rows of a micro-batch on a rank. Batches are weighted by their tokens, so the loss of a step is a
mean over its tokens, and with rows as batches it does not depend on micro-batches, packing or ranks. The z-loss is the
mean of the squared logsumexp of the router's logits (Zoph et al., 2022, arXiv:2202.08906). Both are sums over layers.
The losses are of the router's own choice, also where other routes are taken.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist


def expert_losses(
    logits: torch.Tensor, k: int, real: torch.Tensor, *, by_row: bool, group: Any = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return both losses of a layer, each as a sum over tokens.

    Args:
        logits: (b, s, E), of the router.
        k: number of experts of a token.
        real: (b, s) bool, false for padding.
        by_row: whether the tokens of a row are a batch, or those of all rows.
        group: of the ranks that have slices of the same rows; None if this one has them whole. All of them call this,
            and each gets the share of its slice, with the gradient by its own logits.
    """
    logits, weights = logits.float(), real[..., None].float()
    experts = logits.shape[-1]
    scores = (logits.softmax(-1) * weights).sum(1)
    with torch.no_grad():
        chosen = torch.zeros_like(logits).scatter_(-1, logits.topk(k, dim=-1).indices, 1.0)
        counts = torch.cat([(chosen * weights).sum(1), weights.sum(1)], -1)  # the last one is that of tokens
        if group is not None:
            dist.all_reduce(counts, group=group)
    if not by_row:
        scores, counts = scores.sum(0, True), counts.sum(0, True)
    of_batches = (counts[:, :-1] * scores).sum(-1) * experts / (k * counts[:, -1].clamp(min=1.0))
    return of_batches.sum(), (logits.logsumexp(-1).square() * real).sum()
