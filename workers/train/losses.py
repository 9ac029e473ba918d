"""Losses of single tokens, and the functions made of them that a `TrainModel` calls on each micro-batch.

What a token adds to the loss is multiplied by its weight, and the weights of all tokens of a step, over all ranks, sum
to 1: so the sum over micro-batches and ranks is the mean that was asked for, however the rows were cut.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, get_args

import torch

from workers.train.micro_batches import MicroBatch
from workers.train.model import TokenLoss, TokenOutputs

Aggregation = Literal["token", "sequence"]
KLEstimator = Literal["k1", "k2", "k3"]

_LARGEST_LOG_RATIO = 20.0  # e**20 is far outside any trust region, and still far from overflow


def token_weights(loss_mask: torch.Tensor, aggregation: Aggregation = "token") -> tuple[torch.Tensor, torch.Tensor]:
    """What each token's loss is multiplied by, and what the sum over all rows of all ranks is divided by.

    Args:
        loss_mask: (B, T), 1 for tokens that count; of a float mask fractions are kept.
        aggregation: "token" for the mean of all tokens; "sequence" for the mean over rows of each row's mean, whatever
            its length. Rows without a token that counts do not count.

    Returns:
        (B, T) float32 weights, and their sum as float64 (): sum it over the ranks, and divide the weights by it to get
        the entry ``loss_weights`` that the losses look for.

    Raises:
        ValueError: there is no such aggregation.
    """
    if aggregation not in get_args(Aggregation):
        raise ValueError(f"token_weights: aggregation={aggregation!r}; it is one of {', '.join(get_args(Aggregation))}")
    weights = loss_mask.float()
    if aggregation == "token":
        return weights, weights.double().sum()
    sums = weights.sum(1, keepdim=True)
    return torch.where(sums > 0, weights / sums.clamp(min=1e-30), 0.0), (sums > 0).double().sum()


def kl_estimate(log_probs: torch.Tensor, ref_log_probs: torch.Tensor, estimator: KLEstimator = "k3") -> torch.Tensor:
    """An estimate of KL(policy || reference) from tokens that the policy drew (Schulman 2020,
    http://joschu.net/blog/kl-approx.html).

    Args:
        log_probs: of the tokens under the policy.
        ref_log_probs: under the reference.
        estimator: "k1" is unbiased and may be below 0. Its gradient has mean 0: it is a penalty on rewards, not a
            loss. "k2" is half the squared difference; biased, but its gradient is that of the KL divergence. "k3" is
            unbiased and never below 0.

    Returns:
        Of the same shape, in nats.

    Raises:
        ValueError: there is no such estimator.
    """
    difference = _bounded(log_probs - ref_log_probs)
    if estimator == "k1":
        return difference
    if estimator == "k2":
        return difference.square() / 2
    if estimator == "k3":
        return torch.expm1(-difference) + difference
    raise ValueError(f"kl_estimate: estimator={estimator!r}; it is one of {', '.join(get_args(KLEstimator))}")


def ppo_clip(
    log_probs: torch.Tensor,
    old_log_probs: torch.Tensor,
    advantages: torch.Tensor,
    *,
    eps_clip: float = 0.2,
    eps_clip_high: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """PPO's clipped loss of each token (Schulman et al. 2017, arXiv 1707.06347).

    Args:
        log_probs: of the tokens under the policy that learns.
        old_log_probs: under the policy that the ratio is to.
        advantages: of the tokens.
        eps_clip: the ratio counts down to 1 - eps_clip.
        eps_clip_high: and up to 1 + this; as eps_clip where None.

    Returns:
        The loss, the ratio, and whether the clipped ratio was what counted (so that the token has no gradient).
    """
    high = eps_clip if eps_clip_high is None else eps_clip_high
    ratio = _bounded(log_probs - old_log_probs).exp()
    free = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - eps_clip, 1 + high)
    return torch.maximum(free, clipped), ratio, clipped > free


def clipped_value_loss(
    values: torch.Tensor, old_values: torch.Tensor, returns: torch.Tensor, *, eps_clip: float | None = 0.2
) -> tuple[torch.Tensor, torch.Tensor]:
    """Half the squared error of each token's value, pessimistic about steps of more than ``eps_clip``.

    Args:
        values: of the critic that learns.
        old_values: before this batch's steps.
        returns: what the values should have been.
        eps_clip: in units of value; None does not clip.

    Returns:
        The loss, and whether the clipped value was what counted.
    """
    free = (values - returns).square()
    if eps_clip is None:
        return free / 2, torch.zeros_like(free, dtype=torch.bool)
    clipped = (old_values + (values - old_values).clamp(-eps_clip, eps_clip) - returns).square()
    return torch.maximum(free, clipped) / 2, clipped > free


def policy_loss(
    *,
    eps_clip: float = 0.2,
    eps_clip_high: float | None = None,
    kl_coef: float = 0.0,
    kl_estimator: KLEstimator = "k3",
    entropy_coef: float = 0.0,
) -> TokenLoss:
    """The loss of a policy: PPO-clip + kl_coef * KL to the reference - entropy_coef * entropy.

    It looks for these in ``MicroBatch.others``, all (b, s):

    - ``loss_weights`` and ``advantages``, which must be there;
    - ``old_log_probs``: without them, the ratio is to the policy itself, and is 1: right for one step per batch;
    - ``ref_log_probs``: needed if kl_coef is not 0; where they are given, the KL divergence is reported anyway;
    - ``rollout_log_probs``: how far the policy is from what the rollout has reported of its tokens is reported.

    What stands at tokens of weight 0 may be anything, NaN included.

    Args:
        eps_clip: see `ppo_clip`.
        eps_clip_high: see `ppo_clip`.
        kl_coef: what a nat of divergence costs, in the unit of the advantages.
        kl_estimator: see `kl_estimate`.
        entropy_coef: what a nat of entropy is worth; if not 0, the step must be asked for the entropy.

    Returns:
        A `TokenLoss` that reports ``policy_loss``, ``ratio``, ``clip_fraction``, and ``kl``, ``entropy`` and
        ``rollout_log_prob_diff`` where they are known: sums of what each token has times its weight, so that the sum
        over a step is a mean. It raises a ValueError where something is missing.

    Raises:
        ValueError: a number is below 0, or there is no such estimator.
    """
    for name, value in (("eps_clip", eps_clip), ("eps_clip_high", eps_clip_high), ("kl_coef", kl_coef)):
        if value is not None and not value >= 0:
            raise ValueError(f"policy_loss: {name}={value!r}; it is from 0")
    if kl_estimator not in get_args(KLEstimator):
        raise ValueError(f"policy_loss: kl_estimator={kl_estimator!r}; one of {', '.join(get_args(KLEstimator))}")

    def loss(outputs: TokenOutputs, micro_batch: MicroBatch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        weights, entry = _entries("policy_loss", micro_batch)
        log_probs = _where(weights, _output("policy_loss", "log_probs", outputs.log_probs))
        old = entry("old_log_probs") if "old_log_probs" in micro_batch.others else log_probs.detach()
        surrogate, ratio, clipped = ppo_clip(
            log_probs, old, entry("advantages"), eps_clip=eps_clip, eps_clip_high=eps_clip_high
        )
        total = (weights * surrogate).sum()
        sums = {"policy_loss": total, "ratio": (weights * ratio).sum(), "clip_fraction": (weights * clipped).sum()}
        if kl_coef or "ref_log_probs" in micro_batch.others:
            sums["kl"] = (weights * kl_estimate(log_probs, entry("ref_log_probs"), kl_estimator)).sum()
            if kl_coef:
                total = total + kl_coef * sums["kl"]
        if "rollout_log_probs" in micro_batch.others:
            off = (log_probs.detach() - entry("rollout_log_probs")).abs()
            sums["rollout_log_prob_diff"] = (weights * off).sum()
        if entropy_coef or outputs.entropy is not None:
            sums["entropy"] = (weights * _where(weights, _output("policy_loss", "entropy", outputs.entropy))).sum()
            if entropy_coef:
                total = total - entropy_coef * sums["entropy"]
        return total, {name: value.detach() for name, value in sums.items()}

    return loss


def value_loss(*, eps_clip: float | None = 0.2) -> TokenLoss:
    """The loss of a critic.

    It looks for these in ``MicroBatch.others``, all (b, s): ``loss_weights``, ``returns``, and, unless ``eps_clip`` is
    None, ``values``: those before this batch's steps. What stands at tokens of weight 0 may be anything.

    Args:
        eps_clip: see `clipped_value_loss`.

    Returns:
        A `TokenLoss` that reports ``value_loss``, ``value_clip_fraction``, ``value`` and ``return``, as `policy_loss`
        does.

    Raises:
        ValueError: ``eps_clip`` is below 0.
    """
    if eps_clip is not None and not eps_clip >= 0:
        raise ValueError(f"value_loss: eps_clip={eps_clip!r}; it is from 0, or None")

    def loss(outputs: TokenOutputs, micro_batch: MicroBatch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        weights, entry = _entries("value_loss", micro_batch)
        values = _where(weights, _output("value_loss", "values", outputs.values))
        old = values if eps_clip is None else entry("values")
        returns = entry("returns")
        error, clipped = clipped_value_loss(values, old, returns, eps_clip=eps_clip)
        total = (weights * error).sum()
        sums = {
            "value_loss": total,
            "value_clip_fraction": (weights * clipped).sum(),
            "value": (weights * values).sum(),
            "return": (weights * returns).sum(),
        }
        return total, {name: value.detach() for name, value in sums.items()}

    return loss


def _bounded(log_ratio: torch.Tensor) -> torch.Tensor:
    return log_ratio.clamp(-_LARGEST_LOG_RATIO, _LARGEST_LOG_RATIO)


def _where(weights: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """0 where the weight is 0: 0 times NaN would be NaN. In float32, and still in the graph where nothing counts."""
    return torch.where(weights != 0, value.float(), 0.0)


def _entries(name: str, micro_batch: MicroBatch) -> tuple[torch.Tensor, Callable[[str], torch.Tensor]]:
    """The weights, and what gets another (b, s) entry."""
    shape = micro_batch.input_ids.shape

    def checked(key: str) -> torch.Tensor:
        if key not in micro_batch.others:
            raise ValueError(
                f"{name}: the micro-batch has no {key!r}, only {', '.join(sorted(micro_batch.others)) or 'tokens'}"
            )
        value = micro_batch.others[key]
        if value.shape != shape:
            raise ValueError(f"{name}: {key} is {tuple(value.shape)}; it is one number for each token: {tuple(shape)}")
        return value

    weights = checked("loss_weights").float()
    return weights, lambda key: _where(weights, checked(key))


def _output(name: str, key: str, value: torch.Tensor | None) -> torch.Tensor:
    if value is None:
        raise ValueError(f"{name}: the model gave no {key}: it is of another role, or was not asked for them")
    return value
