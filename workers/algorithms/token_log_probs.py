"""Log-probability and entropy of tokens, from logits that may be sharded over ranks by vocabulary.

The logits are the largest tensor of a step: 8,192 tokens times 152,000 are 5 GB in float32. They are read in chunks of
tokens, so that no second copy of their size is made in the forward pass, and one in the backward pass: their gradient.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

CHUNK = 2**24
"""Maximum number of logits that are copied at once, as float32; 64 MiB."""


def token_log_probs(
    logits: torch.Tensor,
    tokens: torch.Tensor,
    *,
    temperature: float = 1.0,
    entropy: bool = False,
    vocab_size: int | None = None,
    group: Any = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Compute the log-probabilities of tokens and the entropies of their distributions, in float32.

    The backward pass computes the softmax again from the logits, which are kept as they are, in their own dtype. Do not
    change them in place. Pass contiguous logits; others are copied.

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
    real = part if vocab_size is None else min(max(vocab_size - first, 0), part)
    log_probs, entropies = _OfTokens.apply(logits, tokens - first, temperature or 1.0, real, entropy, group)
    return log_probs, entropies if entropy else None


def next_token_log_probs(
    logits: torch.Tensor, input_ids: torch.Tensor, **options: Any
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """`token_log_probs` of a language model's own input: the logits at position t are about the token at t + 1.

    The logits of the last position are about no token. They are passed on with the others and get no gradient, because
    the gradient of a slice of the logits would be copied into a tensor of the size of all of them.

    Args:
        logits: (b, s, V).
        input_ids: (b, s), on the same device.
        options: see `token_log_probs`.

    Returns:
        As `token_log_probs`, (b, s): at position t for the token at t, and 0 at position 0.
    """
    log_probs, entropies = token_log_probs(logits, F.pad(input_ids[:, 1:], (0, 1)), **options)
    return F.pad(log_probs[:, :-1], (1, 0)), None if entropies is None else F.pad(entropies[:, :-1], (1, 0))


def candidate_log_probs(
    logits: torch.Tensor,
    input_ids: torch.Tensor,
    log_probs: torch.Tensor,
    candidates: torch.Tensor,
    temperature: float,
    group: Any = None,
) -> torch.Tensor:
    """Compute the log-probabilities of other tokens, from those of the model's own input.

    Args:
        logits: (b, s, V); if sharded, (b, s, V / ranks), this rank's shard of the vocabulary.
        input_ids: (b, s).
        log_probs: (b, s), as `next_token_log_probs` returns them.
        candidates: (b, s, k) token ids: at position t, tokens in the place of the token at t.
        temperature: divides the logits, unless it is 0.
        group: process group that the logits are sharded over, see `token_log_probs`.

    Returns:
        (b, s, k) float32, in nats; 0 at position 0.
    """
    part, tokens = logits.shape[-1], torch.cat([input_ids[:, 1:, None], candidates[:, 1:].long()], dim=-1)
    at = tokens if group is None else tokens - part * group.rank()
    own = (at >= 0) & (at < part)
    picked = logits[:, :-1].gather(-1, at.clamp(0, part - 1)).float().masked_fill(~own, 0.0)
    picked = _SumOverRanks.apply(picked, group)
    # Two tokens' log-probabilities differ by their logits.
    found = (picked[..., 1:] - picked[..., :1]) / (temperature or 1.0) + log_probs[:, 1:, None]
    return F.pad(found, (0, 0, 1, 0))


class _SumOverRanks(torch.autograd.Function):
    """The sum over a group. As in `_OfTokens`, each rank has the whole gradient of the sum."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: Any) -> torch.Tensor:
        total = tensor.clone()
        _reduce(total, group)
        return total

    @staticmethod
    def backward(ctx: Any, of_total: torch.Tensor) -> Any:
        return of_total, None


class _OfTokens(torch.autograd.Function):
    """Every rank of the group computes the same loss, so each one has the whole gradient of the outputs, and the
    backward pass needs no communication."""

    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, at: torch.Tensor, temperature: float, real: int, entropy: bool, group: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        shape = at.shape
        flat, at = logits.reshape(-1, logits.shape[-1]), at.reshape(-1)
        own = (at >= 0) & (at < real)
        at = at.clamp(0, max(real - 1, 0))
        if real:
            greatest = flat[:, :real].amax(-1).float().div_(temperature)
        else:  # this rank's shard is nothing but padding
            greatest = torch.full_like(at, float("-inf"), dtype=torch.float32)
        _reduce(greatest, group, dist.ReduceOp.MAX)
        # Rows: sum of exp(x), where x is the logit minus the greatest; x of the token; and -sum of exp(x) * x.
        sums = torch.zeros(3 if entropy else 2, len(flat), dtype=torch.float32, device=flat.device)
        for rows in _chunks(flat, real):
            x = _shifted(flat[rows, :real], temperature, greatest[rows])
            sums[1, rows] = x.gather(-1, at[rows, None])[:, 0].masked_fill_(~own[rows], 0.0)
            x.exp_()
            sums[0, rows] = x.sum(-1)
            if entropy:
                sums[2, rows] = torch.special.entr(x).sum(-1)
        _reduce(sums, group)
        total, picked = sums[0], sums[1]
        entropies = total.log() + sums[2] / total if entropy else torch.empty_like(total)
        ctx.save_for_backward(logits, at, own, greatest, total, entropies)
        ctx.temperature, ctx.real = temperature, real
        ctx.set_materialize_grads(False)
        entropies = entropies.view(shape)
        if not entropy:
            ctx.mark_non_differentiable(entropies)
        return (picked - total.log()).view(shape), entropies

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_log_probs: torch.Tensor | None, of_entropies: torch.Tensor | None) -> Any:
        logits, at, own, greatest, total, entropies = ctx.saved_tensors
        real = ctx.real
        flat = logits.reshape(-1, logits.shape[-1])
        gradient = flat.new_empty(flat.shape)
        gradient[:, real:] = 0
        along, spread = (None if of is None else of.reshape(-1, 1) for of in (of_log_probs, of_entropies))
        # d log p(token) / d logit = 1[logit of the token] - p;   d H / d logit = -p (log p + H);   and over temperature
        for rows in _chunks(flat, real):
            p = _shifted(flat[rows, :real], ctx.temperature, greatest[rows]).exp_().div_(total[rows, None])
            more = None
            if spread is not None:
                more = torch.special.entr(p).addcmul_(p, entropies.view(-1, 1)[rows], value=-1).mul_(spread[rows])
            if along is not None:
                p.mul_(-along[rows]).scatter_add_(-1, at[rows, None], along[rows] * own[rows, None])
                more = p if more is None else p.add_(more)
            gradient[rows, :real] = 0 if more is None else more.div_(ctx.temperature)
        return gradient.view(logits.shape), None, None, None, None, None


def _chunks(flat: torch.Tensor, real: int) -> Iterator[slice]:
    """Yield slices of rows with at most `CHUNK` logits each, or of one row."""
    if not real:
        return
    step = max(1, CHUNK // real)
    for begin in range(0, len(flat), step):
        yield slice(begin, begin + step)


def _shifted(logits: torch.Tensor, temperature: float, greatest: torch.Tensor) -> torch.Tensor:
    """A float32 copy of logits over temperature, minus the greatest of each row."""
    x = logits.to(torch.float32, copy=True)
    if temperature != 1:
        x.div_(temperature)
    return x.sub_(greatest[:, None])


def _reduce(tensor: torch.Tensor, group: Any, how: Any = dist.ReduceOp.SUM) -> None:
    if group is not None:
        dist.all_reduce(tensor, op=how, group=group)
