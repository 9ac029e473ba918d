"""Log-probability and entropy of tokens, from logits that may be sharded over ranks by vocabulary.

With a sampling mask, both are those of the distribution that the sampler drew from: ``top_p``, ``top_k`` or ``min_p``
left it a set S of tokens, so it drew token a with probability pi(a) / sum of pi(v) over v in S. The log-probability is
log pi(a) - log of that sum ("keep sampling mask", DeepSeek-AI 2025, arXiv 2512.02556, section 3.1).

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

from workers.device import to_device

CHUNK = 2**24
"""Maximum number of logits that are copied at once, as float32; 64 MiB."""

SamplingSets = tuple[torch.Tensor, torch.Tensor]
"""The tokens that could be drawn at each position: their ids (M,), integers, position after position in any order; and
how many of them each position has, (...) integers. 0 is the whole vocabulary. Lengths on the CPU are best: those on a
device are read from it, which waits for all work before."""


def token_log_probs(
    logits: torch.Tensor,
    tokens: torch.Tensor,
    *,
    temperature: float = 1.0,
    entropy: bool = False,
    vocab_size: int | None = None,
    group: Any = None,
    sampling_mask: SamplingSets | None = None,
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
        sampling_mask: the sets of tokens to normalize over, see `SamplingSets`, with ids of the whole vocabulary on
            every rank. Logits outside a set get no gradient, unless the token itself is outside. None: all tokens.

    Returns:
        Log-probabilities of the tokens and entropies of the distributions (or None), both (...), float32, in nats.
    """
    if group is not None and group.size() == 1:
        group = None
    part = logits.shape[-1]
    first = 0 if group is None else part * group.rank()
    real = part if vocab_size is None else min(max(vocab_size - first, 0), part)
    kept = None if sampling_mask is None else (sampling_mask[0], sampling_mask[1].reshape(-1), first)
    log_probs, entropies = _OfTokens.apply(logits, tokens - first, temperature or 1.0, real, entropy, group, kept)
    return log_probs, entropies if entropy else None


def next_token_log_probs(
    logits: torch.Tensor, input_ids: torch.Tensor, *, sampling_mask: SamplingSets | None = None, **options: Any
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """`token_log_probs` of a language model's own input: the logits at position t are about the token at t + 1.

    The logits of the last position are about no token. They are passed on with the others and get no gradient, because
    the gradient of a slice of the logits would be copied into a tensor of the size of all of them.

    Args:
        logits: (b, s, V).
        input_ids: (b, s), on the same device.
        sampling_mask: sets of the tokens at each position, with lengths (b, s); those at position 0 must be 0.
        options: see `token_log_probs`.

    Returns:
        As `token_log_probs`, (b, s): at position t for the token at t, and 0 at position 0.
    """
    if sampling_mask is not None:
        options["sampling_mask"] = sampling_mask[0], F.pad(sampling_mask[1][:, 1:], (0, 1))
    log_probs, entropies = token_log_probs(logits, F.pad(input_ids[:, 1:], (0, 1)), **options)
    return F.pad(log_probs[:, :-1], (1, 0)), None if entropies is None else F.pad(entropies[:, :-1], (1, 0))


def candidate_log_probs(
    logits: torch.Tensor,
    tokens: torch.Tensor,
    log_probs: torch.Tensor,
    candidates: torch.Tensor,
    temperature: float,
    group: Any = None,
) -> torch.Tensor:
    """Compute the log-probabilities of other tokens, from those of the tokens themselves.

    Args:
        logits: (..., V); if sharded, (..., V / ranks), this rank's shard of the vocabulary.
        tokens: (...) int64.
        log_probs: (...), as `token_log_probs` returns them without a sampling mask.
        candidates: (..., k) token ids, in the place of each token.
        temperature: divides the logits, unless it is 0.
        group: process group that the logits are sharded over, see `token_log_probs`.

    Returns:
        (..., k) float32, in nats.
    """
    part, at = logits.shape[-1], torch.cat([tokens[..., None], candidates.long()], dim=-1)
    if group is not None:
        at = at - part * group.rank()
    own = (at >= 0) & (at < part)
    picked = logits.gather(-1, at.clamp(0, part - 1)).float().masked_fill(~own, 0.0)
    picked = _SumOverRanks.apply(picked, group)
    # Two tokens' log-probabilities differ by their logits.
    return (picked[..., 1:] - picked[..., :1]) / (temperature or 1.0) + log_probs[..., None]


def next_candidate_log_probs(
    logits: torch.Tensor, input_ids: torch.Tensor, log_probs: torch.Tensor, candidates: torch.Tensor, *of: Any
) -> torch.Tensor:
    """`candidate_log_probs` of a language model's own input, as `next_token_log_probs`.

    Args:
        logits: (b, s, V).
        input_ids: (b, s).
        log_probs: (b, s), as `next_token_log_probs` returns them without a sampling mask.
        candidates: (b, s, k): at position t, tokens in the place of the token at t.
        of: temperature and group.

    Returns:
        (b, s, k); 0 at position 0.
    """
    found = candidate_log_probs(logits[:, :-1], input_ids[:, 1:], log_probs[:, 1:], candidates[:, 1:], *of)
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
        ctx: Any,
        logits: torch.Tensor,
        at: torch.Tensor,
        temperature: float,
        real: int,
        entropy: bool,
        group: Any,
        kept: tuple[torch.Tensor, torch.Tensor, int] | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        shape = at.shape
        flat, at = logits.reshape(-1, logits.shape[-1]), at.reshape(-1)
        own = (at >= 0) & (at < real)
        at = at.clamp(0, max(real - 1, 0))
        sets = None if kept is None or not real else _Sets(*kept, real)
        if real:
            greatest = flat[:, :real].amax(-1).float()
            if sets is not None:  # the greatest of all may be so much larger that exp() of the set's is 0
                for rows in _chunks(flat, real):
                    greatest[rows] = sets.greatest(flat[rows, :real], rows, greatest[rows])
            greatest.div_(temperature)
        else:  # this rank's shard is nothing but padding
            greatest = torch.full_like(at, float("-inf"), dtype=torch.float32)
        _reduce(greatest, group, dist.ReduceOp.MAX)
        # Rows: sum of exp(x), where x is the logit minus the greatest; x of the token; and -sum of exp(x) * x.
        sums = torch.zeros(3 if entropy else 2, len(flat), dtype=torch.float32, device=flat.device)
        for rows in _chunks(flat, real):
            x = _shifted(flat[rows, :real], temperature, greatest[rows])
            sums[1, rows] = x.gather(-1, at[rows, None])[:, 0].masked_fill_(~own[rows], 0.0)
            if sets is not None:
                sets.hide(x, rows)
            x.exp_()
            sums[0, rows] = x.sum(-1)
            if entropy:
                sums[2, rows] = torch.special.entr(x).sum(-1)
        _reduce(sums, group)
        total, picked = sums[0], sums[1]
        entropies = total.log() + sums[2] / total if entropy else torch.empty_like(total)
        ctx.save_for_backward(logits, at, own, greatest, total, entropies)
        ctx.temperature, ctx.real, ctx.sets = temperature, real, sets
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
            p = _shifted(flat[rows, :real], ctx.temperature, greatest[rows])
            if ctx.sets is not None:
                ctx.sets.hide(p, rows)
            p.exp_().div_(total[rows, None])
            more = None
            if spread is not None:
                more = torch.special.entr(p).addcmul_(p, entropies.view(-1, 1)[rows], value=-1).mul_(spread[rows])
            if along is not None:
                p.mul_(-along[rows]).scatter_add_(-1, at[rows, None], along[rows] * own[rows, None])
                more = p if more is None else p.add_(more)
            gradient[rows, :real] = 0 if more is None else more.div_(ctx.temperature)
        return gradient.view(logits.shape), None, None, None, None, None, None


class _Sets:
    """The sets of a sampling mask, in this rank's shard of the vocabulary.

    Args:
        token_ids: (M,) of the whole vocabulary, on the logits' device.
        lengths: (rows,), see `SamplingSets`.
        first: the shard's first token.
        real: number of the shard's real tokens, at least 1.
    """

    def __init__(self, token_ids: torch.Tensor, lengths: torch.Tensor, first: int, real: int) -> None:
        self._token_ids, self._first, self._real = token_ids, first, real
        self._lengths = to_device(lengths, token_ids.device)
        self._step = _rows_at_once(real)
        ends = F.pad(lengths.cpu().cumsum(0), (1, 0))
        self._bounds = [*ends[:: self._step].tolist(), int(ends[-1])]  # of each chunk

    def hide(self, x: torch.Tensor, rows: slice) -> None:
        """Set what is outside the sets to -inf.

        Args:
            x: (rows of the chunk, real).
            rows: the chunk.
        """
        row, column = self._places(rows)
        # One more column, for the tokens of other ranks' shards.
        outside = torch.ones(len(x), self._real + 1, dtype=torch.bool, device=x.device)
        # In an assignment, torch would copy False to the device and wait.
        outside.view(-1).index_fill_(0, row * outside.shape[1] + column, False)
        outside[self._lengths[rows] == 0] = False
        x.masked_fill_(outside[:, :-1], float("-inf"))

    def greatest(self, logits: torch.Tensor, rows: slice, of_all: torch.Tensor) -> torch.Tensor:
        """Return the greatest logit of each set, (rows of the chunk,) float32: -inf if all its tokens are in other
        shards, and ``of_all`` for the whole vocabulary."""
        row, column = self._places(rows)
        values = logits[row, column.clamp(max=self._real - 1)].float().masked_fill_(column == self._real, float("-inf"))
        found = torch.full_like(of_all, float("-inf")).scatter_reduce_(0, row, values, "amax")
        return torch.where(self._lengths[rows] == 0, of_all, found)

    def _places(self, rows: slice) -> tuple[torch.Tensor, torch.Tensor]:
        """Row and column of each token of the sets of a chunk; the column ``real`` for those of other shards."""
        chunk = rows.start // self._step
        begin, end = self._bounds[chunk], self._bounds[chunk + 1]
        lengths = self._lengths[rows]
        row = torch.arange(len(lengths), device=lengths.device).repeat_interleave(lengths, output_size=end - begin)
        column = self._token_ids[begin:end].long() - self._first
        return row, column.masked_fill((column < 0) | (column >= self._real), self._real)


def _rows_at_once(real: int) -> int:
    return max(1, CHUNK // real)


def _chunks(flat: torch.Tensor, real: int) -> Iterator[slice]:
    """Yield slices of rows with at most `CHUNK` logits each, or of one row."""
    if not real:
        return
    step = _rows_at_once(real)
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
