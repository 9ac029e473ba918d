"""SeededSampler: draws one token for each row and step, from random numbers that belong to the row alone."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from workers.rollout.engine import Sampling


class SeededSampler:
    """A logits processor for ``generate(do_sample=False)``: the argmax of what it returns is a sample.

    Each row has a generator of its own. Adding noise of Gumbel's distribution to log-probabilities and taking the
    largest draws from that distribution, and small differences in the logits (another batch, another padding) change
    what is drawn as rarely as they can; what is drawn never depends on the other rows' random numbers.

    Args:
        sampling: how to sample.
        seeds: one for each row.
        device: where the logits are. Random numbers are made there, and differ between CPU and CUDA.
    """

    def __init__(self, sampling: Sampling, seeds: Sequence[int], device: torch.device) -> None:
        self._sampling = sampling
        self._generators = [torch.Generator(device).manual_seed(seed) for seed in seeds]
        self._tokens: list[torch.Tensor] = []
        self._log_probs: list[torch.Tensor] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Draw the next token of each row.

        Args:
            input_ids: (rows, tokens), not looked at.
            scores: (rows, vocabulary), the model's logits.

        Returns:
            (rows, vocabulary) float32, largest at the token that was drawn.
        """
        how = self._sampling
        log_probs = torch.log_softmax(scores.float() / (how.temperature or 1.0), dim=-1)
        noisy = log_probs if how.temperature == 0 else self._with_noise(likeliest(log_probs, how.top_k, how.top_p))
        chosen = noisy.argmax(dim=-1)
        self._tokens.append(chosen)
        self._log_probs.append(log_probs.gather(1, chosen[:, None])[:, 0])
        return noisy

    def drawn(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens (int64) and their log-probabilities (float32), each (rows, steps) on the CPU. What stands behind a
        row's end means nothing."""
        return torch.stack(self._tokens, 1).cpu(), torch.stack(self._log_probs, 1).cpu()

    def _with_noise(self, log_probs: torch.Tensor) -> torch.Tensor:
        noise = torch.empty_like(log_probs)
        for row, generator in zip(noise, self._generators, strict=True):
            row.exponential_(generator=generator)
        smallest = torch.finfo(noise.dtype).tiny  # the logarithm of 0 would win whatever the token's probability
        return log_probs - noise.clamp_(min=smallest).log_()


def likeliest(log_probs: torch.Tensor, top_k: int, top_p: float) -> torch.Tensor:
    """Log-probabilities with -inf for what is not drawn from: first all but the ``top_k`` likeliest, then, of what is
    left and makes 1 together, all behind the likeliest that reach ``top_p``. The likeliest token always stays.

    Args:
        log_probs: (rows, vocabulary).
        top_k: tokens that stay; 0 for all.
        top_p: probability that stays; 1 for all.

    Returns:
        (rows, vocabulary), not made to sum to 1 again.
    """
    vocabulary = log_probs.shape[-1]
    kept = min(top_k or vocabulary, vocabulary)
    if kept == vocabulary and top_p >= 1:
        return log_probs
    best, tokens = log_probs.topk(kept, dim=-1)
    if top_p < 1:
        probs = best.softmax(-1)
        best = best.masked_fill(probs.cumsum(-1) - probs >= top_p, -torch.inf)
        best[:, 0] = log_probs.amax(-1)  # rounding must not take the last one
    return torch.full_like(log_probs, -torch.inf).scatter_(1, tokens, best)
