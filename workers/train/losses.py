"""Per-token losses, and the loss functions built from them that a `TrainModel` calls on each micro-batch.

Each token's loss is multiplied by its weight. The weights of all tokens of a step, over all ranks, sum to 1, so the sum
over micro-batches and ranks is the requested mean, however the rows are split.
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
    """Return the weight of each token's loss, and the normalizer, to be summed over all ranks.

    Args:
        loss_mask: (B, T), 1 for tokens that count; a float mask may have fractions.
        aggregation: "token" for the mean over all tokens; "sequence" for the mean over rows of each row's mean. Rows
            without a counted token do not count.

    Returns:
        (B, T) float32 weights, and their sum as a float64 scalar. Sum it over the ranks and divide the weights by it:
        that is the entry ``loss_weights`` of the losses.

    Raises:
        ValueError: unknown aggregation.
    """
    if aggregation not in get_args(Aggregation):
        raise ValueError(
            f"token_weights: aggregation={aggregation!r}; expected one of {', '.join(get_args(Aggregation))}"
        )
    weights = loss_mask.float()
    if aggregation == "token":
        return weights, weights.double().sum()
    sums = weights.sum(1, keepdim=True)
    return torch.where(sums > 0, weights / sums.clamp(min=1e-30), 0.0), (sums > 0).double().sum()


def kl_estimate(log_probs: torch.Tensor, ref_log_probs: torch.Tensor, estimator: KLEstimator = "k3") -> torch.Tensor:
    """Estimate KL(policy || reference) from tokens that the policy sampled (Schulman 2020,
    http://joschu.net/blog/kl-approx.html).

    Args:
        log_probs: of the tokens under the policy.
        ref_log_probs: under the reference.
        estimator: "k1" is unbiased and may be negative. Its gradient has mean 0, so use it as a penalty on rewards, not
            as a loss. "k2" is half the squared difference; it is biased, but has the gradient of the KL divergence.
            "k3" is unbiased and never negative.

    Returns:
        The estimate per token, in nats.

    Raises:
        ValueError: unknown estimator.
    """
    difference = _bounded(log_probs - ref_log_probs)
    if estimator == "k1":
        return difference
    if estimator == "k2":
        return difference.square() / 2
    if estimator == "k3":
        return torch.expm1(-difference) + difference
    raise ValueError(f"kl_estimate: estimator={estimator!r}; expected one of {', '.join(get_args(KLEstimator))}")


def ppo_clip(
    log_probs: torch.Tensor,
    old_log_probs: torch.Tensor,
    advantages: torch.Tensor,
    *,
    eps_clip: float = 0.2,
    eps_clip_high: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """PPO's clipped loss per token (Schulman et al. 2017, arXiv 1707.06347).

    Args:
        log_probs: of the tokens under the policy in training.
        old_log_probs: under the old policy, the denominator of the ratio.
        advantages: of the tokens.
        eps_clip: the ratio is clipped below 1 - eps_clip.
        eps_clip_high: and above 1 + eps_clip_high; None means eps_clip.

    Returns:
        The loss, the ratio, and whether the clip was active (the token has no gradient then).
    """
    high = eps_clip if eps_clip_high is None else eps_clip_high
    ratio = _bounded(log_probs - old_log_probs).exp()
    free = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - eps_clip, 1 + high)
    return torch.maximum(free, clipped), ratio, clipped > free


def clipped_value_loss(
    values: torch.Tensor, old_values: torch.Tensor, returns: torch.Tensor, *, eps_clip: float | None = 0.2
) -> tuple[torch.Tensor, torch.Tensor]:
    """Half the squared error of each token's value, clipped pessimistically at changes of more than ``eps_clip``.

    Args:
        values: of the critic in training.
        old_values: before this batch's steps.
        returns: targets of the values.
        eps_clip: in units of value; None disables clipping.

    Returns:
        The loss, and whether the clip was active.
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
    """The policy loss: PPO-clip + kl_coef * KL to the reference - entropy_coef * entropy.

    It reads these entries of ``MicroBatch.others``, all (b, s):

    - ``loss_weights`` and ``advantages`` (required);
    - ``old_log_probs``: without them the ratio is 1, which is right for one step per batch;
    - ``ref_log_probs``: required if kl_coef is not 0; if given, the KL divergence is reported;
    - ``rollout_log_probs``: if given, their difference from the policy's log-probabilities is reported.

    Values at tokens of weight 0 are ignored, NaN included.

    Args:
        eps_clip: see `ppo_clip`.
        eps_clip_high: see `ppo_clip`.
        kl_coef: penalty per nat of KL divergence, in units of advantage.
        kl_estimator: see `kl_estimate`.
        entropy_coef: bonus per nat of entropy; if not 0, `TrainModel.train_step` needs ``entropy=True``.

    Returns:
        A `TokenLoss` that reports ``policy_loss``, ``ratio``, ``clip_fraction``, and ``kl``, ``entropy`` and
        ``rollout_log_prob_diff`` if they are known. Each is a weighted sum over tokens, so the sum over a step is a
        mean. It raises a ValueError if a required entry is missing.

    Raises:
        ValueError: a number is negative, or the estimator is unknown.
    """
    for name, value in (("eps_clip", eps_clip), ("eps_clip_high", eps_clip_high), ("kl_coef", kl_coef)):
        if value is not None and not value >= 0:
            raise ValueError(f"policy_loss: {name}={value!r}; expected at least 0")
    if kl_estimator not in get_args(KLEstimator):
        raise ValueError(
            f"policy_loss: kl_estimator={kl_estimator!r}; expected one of {', '.join(get_args(KLEstimator))}"
        )

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
    """The critic's loss.

    It reads these entries of ``MicroBatch.others``, all (b, s): ``loss_weights``, ``returns``, and, unless ``eps_clip``
    is None, ``values`` from before this batch's steps. Values at tokens of weight 0 are ignored.

    Args:
        eps_clip: see `clipped_value_loss`.

    Returns:
        A `TokenLoss` that reports ``value_loss``, ``value_clip_fraction``, ``value`` and ``return`` as weighted sums.

    Raises:
        ValueError: ``eps_clip`` is negative.
    """
    if eps_clip is not None and not eps_clip >= 0:
        raise ValueError(f"value_loss: eps_clip={eps_clip!r}; expected at least 0, or None")

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
    """Replace values of weight 0 by 0, since 0 * NaN is NaN. The result is float32 and stays in the autograd graph."""
    return torch.where(weights != 0, value.float(), 0.0)


def _entries(name: str, micro_batch: MicroBatch) -> tuple[torch.Tensor, Callable[[str], torch.Tensor]]:
    """Return the weights, and a function that returns another (b, s) entry."""
    shape = micro_batch.input_ids.shape

    def checked(key: str) -> torch.Tensor:
        if key not in micro_batch.others:
            raise ValueError(
                f"{name}: the micro-batch has no {key!r}, only {', '.join(sorted(micro_batch.others)) or 'tokens'}"
            )
        value = micro_batch.others[key]
        if value.shape != shape:
            raise ValueError(
                f"{name}: {key} has shape {tuple(value.shape)}; expected one number per token, {tuple(shape)}"
            )
        return value

    weights = checked("loss_weights").float()
    return weights, lambda key: _where(weights, checked(key))


def _output(name: str, key: str, value: torch.Tensor | None) -> torch.Tensor:
    if value is None:
        raise ValueError(
            f"{name}: the model returned no {key}; check that its role fits this loss, and that {key} was requested"
        )
    return value
