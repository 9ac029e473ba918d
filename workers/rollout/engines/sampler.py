"""Sampling: draw one token per row and step, with a random generator per row."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from workers.rollout.engines.rollout_engine import SamplingParams


def seeded_generator(seed: int, drawn: int, vocabulary: int, device: torch.device) -> torch.Generator:
    """Return the generator of a row of which some tokens have been drawn, by this process or by another one.

    Args:
        seed: of the row.
        drawn: number of tokens that were drawn.
        vocabulary: number of logits per token.
        device: of the logits. The random numbers are drawn there, and differ between CPU and CUDA.
    """
    generator = torch.Generator(device).manual_seed(seed)
    noise = torch.empty(vocabulary, device=device)
    for _ in range(drawn):  # not in one call: on CUDA that would be other numbers
        noise.exponential_(generator=generator)
    return generator


def sample(
    logits: torch.Tensor, sampling_params: Sequence[SamplingParams], generators: Sequence[torch.Generator]
) -> tuple[list[int], list[float]]:
    """Draw the next token of each row.

    Adding Gumbel noise to log-probabilities and taking the argmax samples from the distribution. The draw does not
    depend on other rows' random numbers, and small differences in the logits (another batch, other padding) rarely
    change it.

    Args:
        logits: (rows, vocabulary).
        sampling_params: of each row.
        generators: of each row.

    Returns:
        The tokens and their log-probabilities; see `Completion`.
    """
    alike: dict[tuple[float, int, float], list[int]] = {}
    for row, how in enumerate(sampling_params):
        alike.setdefault((how.temperature, how.top_k, how.top_p), []).append(row)
    tokens = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
    log_probs = torch.empty(len(logits), device=logits.device)
    for (temperature, top_k, top_p), rows in alike.items():
        where: torch.Tensor | slice = slice(None) if len(alike) == 1 else torch.tensor(rows, device=logits.device)
        of_model = torch.log_softmax(logits[where].float() / (temperature or 1.0), dim=-1)
        noisy = of_model
        if temperature:
            noisy = _with_noise(truncated(of_model, top_k, top_p), [generators[row] for row in rows])
        chosen = noisy.argmax(dim=-1)
        tokens[where] = chosen
        log_probs[where] = of_model.gather(1, chosen[:, None])[:, 0]
    return tokens.tolist(), log_probs.tolist()


def _with_noise(log_probs: torch.Tensor, generators: Sequence[torch.Generator]) -> torch.Tensor:
    noise = torch.empty_like(log_probs)
    for row, generator in zip(noise, generators, strict=True):
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
