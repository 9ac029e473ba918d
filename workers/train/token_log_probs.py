"""Log-probability and entropy of tokens, from logits that are cut over the tensor-parallel ranks by vocabulary."""

from __future__ import annotations

from typing import Any

import torch


def token_log_probs(
    logits: torch.Tensor, tokens: torch.Tensor, vocab_size: int, temperature: float, entropy: bool = False
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """What the distributions of logits say of tokens. Every tensor-parallel rank calls this, and gets the same.

    Args:
        logits: (..., part), this rank's part of the vocabulary. At its end there may be entries that only fill up: to
            them falls nothing.
        tokens: (...), int64, from 0 to below ``vocab_size``.
        vocab_size: without what fills up.
        temperature: the logits are divided by it, unless it is 0.
        entropy: whether it is asked for.

    Returns:
        Log-probabilities of the tokens and entropies of the distributions (or None), both (...), float32, in nats.
    """
    from megatron.core import parallel_state

    part = logits.shape[-1]
    first = part * parallel_state.get_tensor_model_parallel_rank()
    logits = logits.float() / (temperature or 1.0)
    if vocab_size - first < part:
        padding = torch.arange(first, first + part, device=logits.device) >= vocab_size
        logits = logits.masked_fill(padding, float("-inf"))
    log_probs, entropies = _OfTokens.apply(logits, tokens, first, entropy)
    return log_probs, entropies if entropy else None


class _OfTokens(torch.autograd.Function):
    """The loss is computed on every tensor-parallel rank alike, and so each has the whole gradient of the outputs: what
    falls on its own logits needs no communication. The softmax is all that is kept for it."""

    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, tokens: torch.Tensor, first: int, entropy: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        greatest = _reduce(logits.amax(-1), torch.distributed.ReduceOp.MAX)
        shifted = logits - greatest[..., None]
        at = tokens - first
        own = (at >= 0) & (at < logits.shape[-1])
        at = at.clamp(0, logits.shape[-1] - 1)
        picked = shifted.gather(-1, at[..., None])[..., 0].masked_fill(~own, 0.0)
        softmax = shifted.exp_()
        total, picked = _reduce(torch.stack([softmax.sum(-1), picked]))
        softmax.div_(total[..., None])
        entropies = _reduce(torch.special.entr(softmax).sum(-1)) if entropy else torch.empty_like(total)
        ctx.save_for_backward(softmax, at, own, entropies)
        ctx.entropy = entropy
        if not entropy:
            ctx.mark_non_differentiable(entropies)
        return picked - total.log(), entropies

    @staticmethod
    def backward(ctx: Any, of_log_probs: torch.Tensor, of_entropies: torch.Tensor) -> Any:
        softmax, at, own, entropies = ctx.saved_tensors
        # d log p(token) / d logit = [it is the token's] - p;   d H / d logit = -p (log p + H)
        gradient = softmax * -of_log_probs[..., None]
        gradient.scatter_add_(-1, at[..., None], (of_log_probs * own)[..., None])
        if ctx.entropy:
            gradient += (torch.special.entr(softmax) - softmax * entropies[..., None]) * of_entropies[..., None]
        return gradient, None, None, None


def _reduce(tensor: torch.Tensor, how: Any = torch.distributed.ReduceOp.SUM) -> torch.Tensor:
    from megatron.core import parallel_state

    if parallel_state.get_tensor_model_parallel_world_size() > 1:
        torch.distributed.all_reduce(tensor, op=how, group=parallel_state.get_tensor_model_parallel_group())
    return tensor
