"""SeededSampler: draws one token per row and step, with a random generator per row."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from workers.rollout.engine import SamplingParams


class SeededSampler:
    """A logits processor for ``generate(do_sample=False)``: the argmax of what it returns is a sample.

    Each row has its own generator. Adding Gumbel noise to log-probabilities and taking the argmax samples from the
    distribution. The draw does not depend on other rows' random numbers, and small differences in the logits (another
    batch, other padding) rarely change it.

    Args:
        sampling_params: how to sample.
        seeds: one per row.
        device: device of the logits. The random numbers are drawn there, and differ between CPU and CUDA.
    """

    def __init__(self, sampling_params: SamplingParams, seeds: Sequence[int], device: torch.device) -> None:
        self._params = sampling_params
        self._generators = [torch.Generator(device).manual_seed(seed) for seed in seeds]
        self._tokens: list[torch.Tensor] = []
        self._log_probs: list[torch.Tensor] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Draw the next token of each row.

        Args:
            input_ids: (rows, tokens), ignored.
            scores: (rows, vocabulary), the model's logits.

        Returns:
            (rows, vocabulary) float32, with its maximum at the drawn token.
        """
        params = self._params
        log_probs = torch.log_softmax(scores.float() / (params.temperature or 1.0), dim=-1)
        noisy = (
            log_probs if params.temperature == 0 else self._with_noise(truncated(log_probs, params.top_k, params.top_p))
        )
        chosen = noisy.argmax(dim=-1)
        self._tokens.append(chosen)
        self._log_probs.append(log_probs.gather(1, chosen[:, None])[:, 0])
        return noisy

    def drawn(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return tokens (int64) and their log-probabilities (float32), each (rows, steps) on the CPU. Ignore the values
        after a row's end."""
        return torch.stack(self._tokens, 1).cpu(), torch.stack(self._log_probs, 1).cpu()

    def _with_noise(self, log_probs: torch.Tensor) -> torch.Tensor:
        noise = torch.empty_like(log_probs)
        for row, generator in zip(noise, self._generators, strict=True):
            row.exponential_(generator=generator)
        smallest = torch.finfo(noise.dtype).tiny  # log(0) would win, whatever the token's probability
        return log_probs - noise.clamp_(min=smallest).log_()


def truncated(log_probs: torch.Tensor, top_k: int, top_p: float) -> torch.Tensor:
    """Set log-probabilities to -inf outside ``top_k``, then outside ``top_p`` of the renormalized rest. The most likely
    token always stays.

    Args:
        log_probs: (rows, vocabulary).
        top_k: number of tokens to keep; 0 for all.
        top_p: probability to keep; 1 for all.

    Returns:
        (rows, vocabulary), not renormalized.
    """
    vocabulary = log_probs.shape[-1]
    kept = min(top_k or vocabulary, vocabulary)
    if kept == vocabulary and top_p >= 1:
        return log_probs
    best, tokens = log_probs.topk(kept, dim=-1)
    if top_p < 1:
        probs = best.softmax(-1)
        best = best.masked_fill(probs.cumsum(-1) - probs >= top_p, -torch.inf)
        best[:, 0] = log_probs.amax(-1)  # rounding must not remove the last token
    return torch.full_like(log_probs, -torch.inf).scatter_(1, tokens, best)
