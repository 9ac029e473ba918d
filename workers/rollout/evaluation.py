"""Evaluate the policy on prompts, with the rollout workers: mean@k and pass@k with confidence intervals."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from statistics import NormalDist, fmean, stdev
from typing import TYPE_CHECKING, Any

from dispatch.checks import check_count, naming_keywords
from workers.data.rollout_data import of_rollouts
from workers.rollout.rewards.reward_calls import RewardFunction
from workers.rollout.rewards.reward_runner import RewardRunner
from workers.rollout.rollout_manager import RolloutManager, check_sampling_params
from workers.seeds import mixed_seed

if TYPE_CHECKING:
    from workers.rollout.engines.rollout_engine import SamplingParams


@naming_keywords
def evaluate(
    manager: RolloutManager,
    prompts: Sequence[Sequence[int]],
    *,
    extras: Mapping[str, Sequence[Any]] | None = None,
    reward_function: RewardFunction | RewardRunner | None = None,
    sampling_params: SamplingParams | None = None,
    samples_per_prompt: int = 1,
    ks: Sequence[int] | None = None,
    threshold: float = 1.0,
    seed: int = 0,
    confidence: float = 0.95,
) -> dict[str, float]:
    """Generate completions for prompts that are not trained on, and return statistics of their rewards.

    The workers generate with the weights that they have. Rollouts are not affected: the evaluation has seeds of its
    own, and its completions are not trained on. Each evaluation uses the same random numbers, so that two evaluations
    differ only by the weights.

    The intervals are Student's t intervals over prompts, which are assumed to be independent: the mean over prompts of
    each prompt's estimate, plus or minus t times their standard deviation / sqrt(number of prompts). For pass@k, they
    are clipped to [0, 1]. If all prompts have pass@k = 0, the upper end is 1 - (alpha / 2)^(1 / prompts), as that of
    Clopper and Pearson (1934) for a proportion; the lower end is analogous if all have 1. The intervals do not account
    for the choice of the prompts, and are too narrow if only one or two prompts differ from the rest.

    Args:
        manager: the manager whose workers generate. With its reward function, timeouts count in its `reward_metrics`.
        prompts: token ids of each prompt; at least one prompt.
        extras: name -> one value per prompt, for the reward function.
        reward_function: replaces the manager's: a function, or a `RewardRunner` if it needs processes or a timeout.
        sampling_params: replaces the manager's. `SamplingParams.for_eval` reads them from a configuration.
        samples_per_prompt: completions per prompt; 1 if the temperature is 0.
        ks: the k of pass@k, each from 1 to ``samples_per_prompt``; by default the powers of two up to that.
        threshold: a completion with at least this reward is a success.
        seed: for other random numbers.
        confidence: probability that an interval contains the expected value.

    Returns:
        ``eval/mean@<n>``, the mean reward of the n completions of each prompt; ``eval/pass@<k>``, the probability that
        one of k completions is a success, see `pass_at_k`; with two or more prompts, the interval of each as
        ``.../low`` and ``.../high``. ``eval/completion_length``, the mean over rows, in tokens; ``eval/truncated``, the
        share of completions without a stop token.

    Raises:
        ValueError: a number is out of range, there are no prompts, or there is no reward function.
        RolloutError, SingleControllerError: as `RolloutManager.generate`.
    """
    if not hasattr(manager, "sampling_params"):
        raise TypeError(f"evaluate(): manager is {manager!r:.80}; pass a RolloutManager of this process")
    check_sampling_params(sampling_params)
    how = sampling_params or manager.sampling_params
    check_count("evaluate(): samples_per_prompt", samples_per_prompt)
    ks = [2**power for power in range(samples_per_prompt.bit_length())] if ks is None else ks
    rewards = manager.rewards if reward_function is None else reward_function
    if rewards is None:
        raise ValueError("evaluate(): the manager has no reward function; pass reward_function")
    if not len(prompts):
        raise ValueError("evaluate(): there are no prompts; pass at least one")
    if wrong := [k for k in ks if not (hasattr(k, "__index__") and 1 <= k <= samples_per_prompt)]:
        raise ValueError(f"evaluate(): ks has {wrong[0]}; expected 1 to samples_per_prompt={samples_per_prompt}")
    if how.temperature == 0 and samples_per_prompt > 1:
        raise ValueError(
            f"evaluate(): samples_per_prompt={samples_per_prompt}, but at temperature 0 all completions of a prompt "
            "are the same; use 1"
        )
    if not 0 < confidence < 1:
        raise ValueError(f"evaluate(): confidence={confidence!r}; expected a number between 0 and 1")
    own = copy.copy(manager)  # another manager of the same workers: nothing of the given one changes
    own.greedy_baselines = False
    own.seed = mixed_seed(manager.seed, -1, seed)  # -1: rollouts mix in a rollout id
    if (refresh := manager.refresh) is not None:

        def refresh_both() -> None:
            refresh()
            own.weight_version = manager.weight_version

        own.refresh = refresh_both
    with nullcontext(rewards) if isinstance(rewards, RewardRunner) else RewardRunner(rewards) as own.rewards:
        data = own.generate(prompts, extras=extras, sampling_params=how, samples_per_prompt=samples_per_prompt)
    by_prompt = of_rollouts(data, "rewards").view(len(prompts), samples_per_prompt)
    successes = (by_prompt >= threshold).sum(1).tolist()
    metrics = _with_interval(f"eval/mean@{samples_per_prompt}", by_prompt.double().mean(1).tolist(), confidence)
    for k in ks:
        passed = [pass_at_k(samples_per_prompt, count, k) for count in successes]
        metrics |= _with_interval(f"eval/pass@{k}", passed, confidence, share=True)
    metrics["eval/completion_length"] = data["completion_lengths"].double().mean().item()
    metrics["eval/truncated"] = of_rollouts(data, "truncated").double().mean().item()
    return metrics


def pass_at_k(samples: int, successes: int, k: int) -> float:
    """Estimate the probability that at least one of ``k`` completions is a success, without bias: the share of the
    choices of ``k`` of the samples that have one (Chen et al. 2021, Evaluating Large Language Models Trained on Code,
    equation 1).

    Args:
        samples: number of completions of the prompt, at least ``k``.
        successes: how many of them are successes.
        k: see above.
    """
    return 1 - math.comb(samples - successes, k) / math.comb(samples, k)


def mean_interval(values: Sequence[float], confidence: float = 0.95, *, share: bool = False) -> tuple[float, float]:
    """Return the confidence interval of the mean of independent values; see `evaluate`.

    Args:
        values: two or more.
        confidence: probability that the interval contains the expected value.
        share: the values lie between 0 and 1.
    """
    count, mean, tail = len(values), fmean(values), (1 - confidence) / 2
    half = _t_quantile(1 - tail, count - 1) * stdev(values) / math.sqrt(count)
    if not share:
        return mean - half, mean + half
    # A value above 0 has at most the probability 1 - tail^(1 / count), if none was seen: its mean is not larger.
    unseen = 1 - tail ** (1 / count)
    low = 1 - unseen if mean == 1 else max(0.0, mean - half)
    return low, unseen if mean == 0 else min(1.0, mean + half)


def _with_interval(name: str, values: Sequence[float], confidence: float, share: bool = False) -> dict[str, float]:
    metrics = {name: fmean(values)}
    if len(values) > 1:
        metrics[f"{name}/low"], metrics[f"{name}/high"] = mean_interval(values, confidence, share=share)
    return metrics


def _t_quantile(probability: float, freedom: int) -> float:
    """Quantile of Student's t distribution: exact for 1 and 2 degrees of freedom; for more by its expansion around the
    normal one (Abramowitz and Stegun 26.7.5), within 0.5 % at 97.5 %."""
    if freedom == 1:
        return math.tan(math.pi * (probability - 0.5))
    if freedom == 2:
        return (2 * probability - 1) / math.sqrt(2 * probability * (1 - probability))
    z = NormalDist().inv_cdf(probability)
    terms = (
        z,
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return sum(term / freedom**power for power, term in enumerate(terms))
