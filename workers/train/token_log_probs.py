"""Log-probability and entropy of tokens, from logits that may be sharded over ranks by vocabulary."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist


def token_log_probs(
    logits: torch.Tensor,
    tokens: torch.Tensor,
    *,
    temperature: float = 1.0,
    entropy: bool = False,
    vocab_size: int | None = None,
    group: Any = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Compute the log-probabilities of tokens and the entropies of their distributions. Only the softmax is saved for
    the backward pass, with or without the entropy.

    Args:
        logits: (..., V); if sharded, (..., V / ranks), this rank's shard of the vocabulary.
        tokens: (...), int64, from 0 to below ``vocab_size``.
        temperature: divides the logits, unless it is 0.
        entropy: whether to compute the entropies.
        vocab_size: number of real tokens. Logits beyond it are padding and get probability 0. None: no padding.
        group: process group that the logits are sharded over. Every rank of it must call this, and all get the same
            result. None: the logits are not sharded.

    Returns:
        Log-probabilities of the tokens and entropies of the distributions (or None), both (...), float32, in nats.
    """
    if group is not None and group.size() == 1:
        group = None
    part = logits.shape[-1]
    first = 0 if group is None else part * group.rank()
    logits = logits.float()
    if temperature not in (0, 1):
        logits = logits / temperature
    if vocab_size is not None and vocab_size - first < part:
        padding = torch.arange(first, first + part, device=logits.device) >= vocab_size
        logits = logits.masked_fill(padding, float("-inf"))
    log_probs, entropies = _OfTokens.apply(logits, tokens, first, entropy, group)
    return log_probs, entropies if entropy else None


class _OfTokens(torch.autograd.Function):
    """Every rank of the group computes the same loss, so each one has the whole gradient of the outputs, and the
    backward pass needs no communication."""

    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, tokens: torch.Tensor, first: int, entropy: bool, group: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        greatest = _reduce(logits.amax(-1), group, dist.ReduceOp.MAX)
        shifted = logits - greatest[..., None]
        at = tokens - first
        own = (at >= 0) & (at < logits.shape[-1])
        at = at.clamp(0, logits.shape[-1] - 1)
        picked = shifted.gather(-1, at[..., None])[..., 0].masked_fill(~own, 0.0)
        softmax = shifted.exp_()
        total, picked = _reduce(torch.stack([softmax.sum(-1), picked]), group)
        softmax.div_(total[..., None])
        entropies = _reduce(torch.special.entr(softmax).sum(-1), group) if entropy else torch.empty_like(total)
        ctx.save_for_backward(softmax, at, own, entropies)
        ctx.set_materialize_grads(False)
        if not entropy:
            ctx.mark_non_differentiable(entropies)
        return picked - total.log(), entropies

    @staticmethod
    def backward(ctx: Any, of_log_probs: torch.Tensor | None, of_entropies: torch.Tensor | None) -> Any:
        softmax, at, own, entropies = ctx.saved_tensors
        # d log p(token) / d logit = 1[logit of the token] - p;   d H / d logit = -p (log p + H)
        gradient = None
        if of_log_probs is not None:
            gradient = softmax * -of_log_probs[..., None]
            gradient.scatter_add_(-1, at[..., None], (of_log_probs * own)[..., None])
        if of_entropies is not None:
            spread = (torch.special.entr(softmax) - softmax * entropies[..., None]) * of_entropies[..., None]
            gradient = spread if gradient is None else gradient.add_(spread)
        return gradient, None, None, None, None


def _reduce(tensor: torch.Tensor, group: Any, how: Any = dist.ReduceOp.SUM) -> torch.Tensor:
    if group is not None:
        dist.all_reduce(tensor, op=how, group=group)
    return tensor
