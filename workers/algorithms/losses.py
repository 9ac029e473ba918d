"""Per-token losses, and the loss functions built from them that a `TrainModel` calls on each micro-batch.

Each token's loss is multiplied by its weight. The weights of all tokens of a step, over all ranks, sum to 1, so the sum
over micro-batches and ranks is the requested mean, however the rows are split.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch

from workers.algorithms.corrections import off_policy_sequences
from workers.data.micro_batches import MicroBatch
from workers.train.train_model import TokenLoss, TokenOutputs

Aggregation = Literal["token", "sequence", "constant"]
KLEstimator = Literal["k1", "k2", "k3"]

_LARGEST_LOG_RATIO = 20.0  # e**20 is far outside any trust region, and still far from overflow


def token_weights(
    loss_mask: torch.Tensor, aggregation: Aggregation = "token", length: int = 1
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the weight of each token's loss, and the normalizer, to be summed over all ranks.

    Args:
        loss_mask: (B, T), 1 for tokens that count; a float mask may have fractions.
        aggregation: "token" for the mean over all tokens; "sequence" for the mean over rows of each row's mean;
            "constant" for the mean over rows of each row's sum over ``length``, as in Dr. GRPO (Liu et al. 2025, arXiv
            2503.20783). Rows without a counted token do not count.
        length: for "constant": the same for all rows, such as the maximum number of tokens of a completion.

    Returns:
        (B, T) float32 weights, and the normalizer as a float64 scalar. Sum it over the ranks and divide the weights by
        it: that is the entry ``loss_weights`` of the losses.

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
    if aggregation == "constant":
        return weights / length, (sums > 0).double().sum()
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
    eps_clip_dual: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """PPO's clipped loss per token (Schulman et al. 2017, arXiv 1707.06347).

    Args:
        log_probs: of the tokens under the policy in training.
        old_log_probs: under the old policy, the denominator of the ratio.
        advantages: of the tokens.
        eps_clip: the ratio is clipped below 1 - eps_clip.
        eps_clip_high: and above 1 + eps_clip_high; None means eps_clip. DAPO's clip-higher (arXiv 2503.14476).
        eps_clip_dual: at negative advantages, the ratio is also clipped above this number (Ye et al. 2020, arXiv
            1912.09729); above 1, None disables it.

    Returns:
        The loss, the ratio, and whether the clip was active (the token has no gradient then).
    """
    high = eps_clip if eps_clip_high is None else eps_clip_high
    ratio = _bounded(log_probs - old_log_probs).exp()
    free = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - eps_clip, 1 + high)
    loss, active = torch.maximum(free, clipped), clipped > free
    if eps_clip_dual is not None:
        most = -advantages * eps_clip_dual
        dual = (advantages < 0) & (most < loss)
        loss, active = torch.where(dual, most, loss), active | dual
    return loss, ratio, active


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


@dataclass(frozen=True)
class PolicyTokens:
    """What a policy loss is computed from: whole sequences, each (b, s). Values at tokens that do not count are 0.

    Attributes:
        log_probs: under the policy in training, with gradients.
        old_log_probs: under the old policy; equal to ``log_probs`` in the first step of a rollout.
        advantages: of the tokens.
        mask: bool, the tokens that count.
        others: further entries of the rollout data, in the micro-batch's rows and tokens.
        candidates: (b, s, k), log-probabilities of the tokens of the entry ``candidate_ids``, with gradients; None
            without it, and on Megatron.
    """

    log_probs: torch.Tensor
    old_log_probs: torch.Tensor
    advantages: torch.Tensor
    mask: torch.Tensor
    others: Mapping[str, torch.Tensor]
    candidates: torch.Tensor | None = None


PolicyLoss = Callable[[PolicyTokens], tuple[torch.Tensor, dict[str, torch.Tensor]]]
"""tokens -> (each token's loss, metrics), (b, s) each. Called once per micro-batch, fillers included, and must report
the same metrics each time."""


def ppo_clip_loss(tokens: PolicyTokens, args: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """`ppo_clip`, with ``args.eps_clip``, ``eps_clip_high`` and ``eps_clip_dual``."""
    loss, ratio, clipped = ppo_clip(
        tokens.log_probs,
        tokens.old_log_probs,
        tokens.advantages,
        eps_clip=args.eps_clip,
        eps_clip_high=args.eps_clip_high,
        eps_clip_dual=args.eps_clip_dual,
    )
    return loss, {"ratio": ratio, "clip_fraction": clipped}


def gspo_loss(tokens: PolicyTokens, args: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """GSPO (Zheng et al. 2025, arXiv 2507.18071), in its form for advantages per token (equation 14): the ratio of a
    token, and so the clip, is that of its whole sequence: the geometric mean of the ratios of the tokens that count.
    With one advantage per sequence this is GSPO itself. ``args.eps_clip`` and ``eps_clip_high`` are as for PPO, but
    much smaller: 3e-4 and 4e-4 in the paper."""
    logs = torch.where(tokens.mask, tokens.log_probs - tokens.old_log_probs, 0.0)
    of_sequence = logs.sum(1, keepdim=True) / tokens.mask.sum(1, keepdim=True).clamp(min=1)
    # The value is the sequence's, the gradient is the token's.
    own = of_sequence.detach() + (tokens.log_probs - tokens.log_probs.detach())
    loss, ratio, clipped = ppo_clip(
        own, torch.zeros_like(own), tokens.advantages, eps_clip=args.eps_clip, eps_clip_high=args.eps_clip_high
    )
    return loss, {"ratio": ratio, "clip_fraction": clipped}


def cispo_loss(tokens: PolicyTokens, args: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """CISPO (MiniMax 2025, arXiv 2506.13585): REINFORCE with the clipped ratio as a constant factor, so that no token
    loses its gradient. The bounds are 1 - ``args.eps_clip``, where 1 means no bound, as in the paper, and 1 +
    ``eps_clip_high``."""
    high = args.eps_clip if args.eps_clip_high is None else args.eps_clip_high
    ratio = _bounded(tokens.log_probs - tokens.old_log_probs).exp().detach()
    clipped = ratio.clamp(1 - args.eps_clip, 1 + high)
    return -clipped * tokens.advantages * tokens.log_probs, {"ratio": ratio, "clip_fraction": clipped != ratio}


def policy_loss(
    of_tokens: PolicyLoss,
    *,
    kl_coef: float = 0.0,
    kl_estimator: KLEstimator = "k3",
    entropy_coef: float = 0.0,
    opsm_delta: float | None = None,
) -> TokenLoss:
    """The policy loss + kl_coef * KL to the reference - entropy_coef * entropy.

    It reads these entries of ``MicroBatch.others``, all (b, s):

    - ``loss_weights`` and ``advantages`` (required);
    - ``old_log_probs``: without them the ratio is 1, which is right for one step per batch;
    - ``correction_weights``: if given, factors of each token's policy loss, see `workers.algorithms.corrections`;
    - ``ref_log_probs``: required if kl_coef is not 0; if given, the KL divergence is reported;
    - ``rollout_log_probs``: if given, their difference from the policy's log-probabilities is reported.

    Values at tokens of weight 0 are ignored, NaN included.

    Args:
        of_tokens: each token's loss.
        kl_coef: penalty per nat of KL divergence, in units of advantage.
        kl_estimator: see `kl_estimate`.
        entropy_coef: bonus per nat of entropy; if not 0, `TrainModel.train_step` needs ``entropy=True``.
        opsm_delta: the policy loss of tokens that `off_policy_sequences` finds is 0; they stay in the mean's
            denominator. ``rollout_log_probs`` are then required. None masks nothing.

    Returns:
        A `TokenLoss` that reports ``policy_loss``, the metrics of ``of_tokens``, and ``kl``, ``entropy``,
        ``rollout_log_prob_diff`` and ``opsm_fraction`` (the share of masked tokens) if they are known. Each is a
        weighted sum over tokens, so the sum over a step is a mean. It raises a ValueError if a required entry is
        missing, or ``of_tokens`` returns another shape.

    Raises:
        ValueError: a number is negative, or the estimator is unknown.
    """
    if not kl_coef >= 0:
        raise ValueError(f"policy_loss: kl_coef={kl_coef!r}; expected at least 0")
    if kl_estimator not in get_args(KLEstimator):
        raise ValueError(
            f"policy_loss: kl_estimator={kl_estimator!r}; expected one of {', '.join(get_args(KLEstimator))}"
        )

    def loss(outputs: TokenOutputs, micro_batch: MicroBatch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        weights, entry = _entries("policy_loss", micro_batch)
        log_probs = _where(weights, _output("policy_loss", "log_probs", outputs.log_probs))
        old = entry("old_log_probs") if "old_log_probs" in micro_batch.others else log_probs.detach()
        tokens = PolicyTokens(log_probs, old, entry("advantages"), weights != 0, micro_batch.others, outputs.candidates)
        surrogate, metrics = of_tokens(tokens)
        for name, value in {"loss": surrogate, **metrics}.items():
            if value.shape != weights.shape:
                raise ValueError(
                    f"policy_loss: the {name} has shape {tuple(value.shape)}; expected one number per token, "
                    f"{tuple(weights.shape)}"
                )
        if opsm_delta is not None:
            behaviour = entry("rollout_log_probs")
            out = off_policy_sequences(log_probs.detach(), behaviour, tokens.advantages, tokens.mask, opsm_delta)
            surrogate, metrics = torch.where(out, 0.0, surrogate), {**metrics, "opsm_fraction": out}
        factors = weights * entry("correction_weights") if "correction_weights" in micro_batch.others else weights
        total = (factors * surrogate).sum()
        sums = {"policy_loss": total, **{name: (weights * value).sum() for name, value in metrics.items()}}
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
