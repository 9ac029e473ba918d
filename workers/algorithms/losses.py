"""Per-token losses, and the loss functions built from them that a `TrainModel` calls on each micro-batch.

Each token's loss is multiplied by its weight. The weights of all tokens of a step, over all ranks, sum to 1, so the sum
over micro-batches and ranks is the requested mean, however the rows are split.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, cast, get_args

import torch

from dispatch.batch import described
from workers.algorithms.corrections import off_policy_sequences
from workers.algorithms.policy_losses import PolicyLoss, PolicyTokens, bounded
from workers.data.micro_batches import MicroBatch
from workers.train.train_model import TokenLoss, TokenOutputs

Aggregation = Literal["token", "sequence", "constant"]
KLEstimator = Literal["k1", "k2", "k3", "low_var_kl", "k1+", "k3+", "low_var_kl+"]

_LARGEST_K3 = 10.0
"""In nats. Reached where a token is 13.6 times as probable under the reference; its gradient there is -12.6."""


def token_weights(
    loss_mask: torch.Tensor,
    aggregation: Aggregation = "token",
    length: int = 1,
    totals: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the weight of each token's loss, and the normalizer, to be summed over all ranks.

    Args:
        loss_mask: (B, T), 1 for tokens that count; a float mask may have fractions.
        aggregation: "token" for the mean over all tokens; "sequence" for the mean over rows of each row's mean;
            "constant" for the mean over rows of each row's sum over ``length``, as in Dr. GRPO (Liu et al. 2025, arXiv
            2503.20783). Rows without a counted token do not count.
        length: for "constant": the same for all rows, such as the maximum number of tokens of a completion.
        totals: (B,), the sum of the loss mask over all rows of each row's rollout, on all ranks, if some rollouts are
            several rows. A rollout then counts as one row: its mean or sum is over all its rows.

    Returns:
        (B, T) float32 weights, and the normalizer as a float64 scalar. Sum it over the ranks and divide the weights by
        it: that is the entry ``loss_weights`` of the losses.
    """
    weights = loss_mask.float()
    if aggregation == "token":
        return weights, weights.double().sum()
    sums = weights.sum(1, keepdim=True)
    if totals is not None:
        shares = (sums[:, 0].double() / totals.double().clamp(min=1e-30)).sum()  # of each rollout, they sum to 1
        means = torch.where(sums > 0, weights / totals[:, None].clamp(min=1e-30), 0.0).float()
        return (weights / length if aggregation == "constant" else means), shares
    if aggregation == "constant":
        return weights / length, (sums > 0).double().sum()
    return torch.where(sums > 0, weights / sums.clamp(min=1e-30), 0.0), (sums > 0).double().sum()


def kl_estimate(log_probs: torch.Tensor, ref_log_probs: torch.Tensor, estimator: KLEstimator = "k3") -> torch.Tensor:
    """Estimate KL(policy || reference) from tokens that the policy sampled (Schulman 2020,
    http://joschu.net/blog/kl-approx.html).

    k3 grows like p_ref / p: without a bound it would be 5e8 at one stale token with a log-ratio of -20, and so would
    its gradient, which then takes the whole clipped step. So it is bounded at 10, as in verl, NeMo-RL, SkyRL and
    OpenRLHF. Beyond the bound it has no gradient.

    The gradient of an unbiased estimate is not an unbiased estimate of the gradient, because the policy also chooses
    the tokens (Tang and Munos 2025, arXiv 2506.09477). The gradient of k1 has mean 0, and that of k3 has the mean of
    the gradient of KL(reference || policy). A "+" behind the name replaces the gradient by the score term,
    log(p / p_ref) grad log p. For tokens that the policy in training sampled, its mean is the gradient of
    KL(policy || reference) at this token. How the token changes the distributions of later ones is not in it; a penalty
    on rewards accounts for that.

    Args:
        log_probs: of the tokens under the policy.
        ref_log_probs: under the reference.
        estimator: "k1", log(p / p_ref), is unbiased and may be negative. Use it as a penalty on rewards, not as a loss.
            "k2" is half its square; it is biased, but has the unbiased gradient. "k3", p_ref / p - 1 - log(p_ref / p),
            is never negative, and unbiased below its bound; "low_var_kl" is another name for it. "k1+", "k3+" and
            "low_var_kl+", as in verl: the same values with the unbiased gradient.

    Returns:
        The estimate per token, in nats.

    Raises:
        ValueError: unknown estimator.
    """
    if estimator not in get_args(KLEstimator):
        raise ValueError(f"kl_estimate: estimator={estimator!r}; expected one of {', '.join(get_args(KLEstimator))}")
    difference = bounded(log_probs - ref_log_probs)
    half_square = difference.square() / 2  # its gradient is the score term
    if estimator == "k2":
        return half_square
    if estimator.startswith("k1"):
        value = difference
    else:
        value = (torch.expm1(-difference) + difference).clamp(max=_LARGEST_K3)
    # The difference is exactly 0, so the value is the same bit for bit.
    return value.detach() + (half_square - half_square.detach()) if estimator.endswith("+") else value


def policy_loss(
    of_tokens: PolicyLoss,
    *,
    kl_coef: float = 0.0,
    kl_estimator: KLEstimator = "k3",
    unbiased_kl: bool = False,
    entropy_coef: float = 0.0,
    opsm_delta: float | None = None,
) -> TokenLoss:
    """The policy loss + kl_coef * KL to the reference - entropy_coef * entropy.

    It reads these entries of ``MicroBatch.others``, all (b, s):

    - ``loss_weights`` and ``advantages`` (required);
    - ``old_log_probs``: without them the ratio is 1, which is right for one step per batch;
    - ``correction_weights``: if given, factors of each token's policy loss, see `workers.algorithms.corrections`;
    - ``ref_log_probs``: required if kl_coef is not 0; if given, the KL divergence is reported;
    - ``rollout_log_probs``: if given, their difference from the policy's log-probabilities is reported;
    - ``metric_weights``: the weights of all metrics but ``policy_loss``, if they are not ``loss_weights``.

    Values at tokens of weight 0 are ignored, NaN included, and so are those that ``of_tokens`` returns for them.

    Args:
        of_tokens: each token's loss.
        kl_coef: penalty per nat of KL divergence, in units of advantage.
        kl_estimator: see `kl_estimate`.
        unbiased_kl: use the estimator's "+", and multiply the KL term of each token by p / p_old, without a gradient of
            this ratio. The gradient is then unbiased also for tokens that the old policy sampled (DeepSeek-V3.2, arXiv
            2512.02556). The ratio has no bound. The metric ``kl`` is not multiplied.
        entropy_coef: bonus per nat of entropy; if not 0, `TrainModel.train_step` needs ``entropy=True``.
        opsm_delta: the policy loss of tokens that `off_policy_sequences` finds is 0; they stay in the mean's
            denominator. ``rollout_log_probs`` are then required. None masks nothing.

    Returns:
        A `TokenLoss` that reports ``policy_loss``, the metrics of ``of_tokens``, ``ppo_kl`` (the mean of log p_old -
        log p), and ``kl``, ``entropy``, ``rollout_log_prob_diff`` and ``opsm_fraction`` (the share of masked tokens) if
        they are known. Each is a weighted sum over tokens: a mean over a step if the weights sum to 1. It raises a
        ValueError if a required entry is missing, or ``of_tokens`` returns another shape, or a metric under a name that
        is reported already.
    """
    if unbiased_kl and kl_estimator in ("k1", "k3", "low_var_kl"):
        kl_estimator = cast(KLEstimator, f"{kl_estimator}+")

    def loss(outputs: TokenOutputs, micro_batch: MicroBatch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        weights, of_metrics, entry = _entries("policy_loss", micro_batch)
        log_probs = _where(weights, _output("policy_loss", "log_probs", outputs.log_probs))
        old = entry("old_log_probs") if "old_log_probs" in micro_batch.others else log_probs.detach()
        tokens = PolicyTokens(log_probs, old, entry("advantages"), weights != 0, micro_batch.others, outputs.candidates)
        made: Any = of_tokens(tokens)
        # A tensor of two rows can be unpacked too.
        if not (isinstance(made, tuple) and len(made) == 2 and isinstance(made[1], dict)):
            raise ValueError(
                f"policy_loss: the policy loss returned {described(made)}; expected the loss of each token and a "
                "dict of metrics, as a tuple"
            )
        surrogate, metrics = made
        for name, value in [("loss", surrogate), *metrics.items()]:
            shape = tuple(getattr(value, "shape", ()))  # a number has none
            if shape != tuple(weights.shape):
                raise ValueError(
                    f"policy_loss: the {name} has shape {shape}; expected one number per token, {tuple(weights.shape)}"
                )
        # A loss may divide by the number of a row's tokens, which is 0 in fillers: the whole step would be NaN.
        surrogate = _where(weights, surrogate)
        own = {name: (of_metrics * _where(weights, value)).sum() for name, value in metrics.items()}
        sums = {"ppo_kl": (of_metrics * bounded(old - log_probs.detach())).sum()}
        if opsm_delta is not None:
            behaviour = entry("rollout_log_probs")
            out = off_policy_sequences(log_probs.detach(), behaviour, tokens.advantages, tokens.mask, opsm_delta)
            surrogate = torch.where(out, 0.0, surrogate)
            sums["opsm_fraction"] = (of_metrics * out).sum()
        factors = weights * entry("correction_weights") if "correction_weights" in micro_batch.others else weights
        total = sums["policy_loss"] = (factors * surrogate).sum()
        if kl_coef or "ref_log_probs" in micro_batch.others:
            of_tokens_kl = kl_estimate(log_probs, entry("ref_log_probs"), kl_estimator)
            sums["kl"] = (of_metrics * of_tokens_kl).sum()
            if kl_coef:
                drawn = weights * bounded(log_probs.detach() - old).exp() if unbiased_kl else weights
                total = total + kl_coef * (drawn * of_tokens_kl).sum()
        if "rollout_log_probs" in micro_batch.others:
            off = (log_probs.detach() - entry("rollout_log_probs")).abs()
            sums["rollout_log_prob_diff"] = (of_metrics * off).sum()
        if entropy_coef or outputs.entropy is not None:
            entropy = _where(weights, _output("policy_loss", "entropy", outputs.entropy))
            sums["entropy"] = (of_metrics * entropy).sum()
            if entropy_coef:
                total = total - entropy_coef * (weights * entropy).sum()
        # "loss" is the whole loss. The trainer adds the last two. Of two metrics of one name, one would be lost.
        if taken := sorted(own.keys() & {*sums, "loss", "grad_norm", "lr"}):
            raise ValueError(f"policy_loss: the policy loss returns a metric named {taken[0]!r}; give it another name")
        return total, {name: value.detach() for name, value in {**sums, **own}.items()}

    return loss


def value_loss(*, eps_clip: float | None = 0.2) -> TokenLoss:
    """The critic's loss: half the squared error of each token's value, clipped pessimistically at changes of more than
    ``eps_clip``.

    It reads these entries of ``MicroBatch.others``, all (b, s): ``loss_weights``, ``returns``, and, unless ``eps_clip``
    is None, ``values`` from before this batch's steps; ``metric_weights`` as in `policy_loss`. Values at tokens of
    weight 0 are ignored.

    Args:
        eps_clip: in units of value; None disables clipping.

    Returns:
        A `TokenLoss` that reports ``value_loss``, ``value_clip_fraction``, ``value`` and ``return`` as weighted sums.
    """

    def loss(outputs: TokenOutputs, micro_batch: MicroBatch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        weights, of_metrics, entry = _entries("value_loss", micro_batch)
        values = _where(weights, _output("value_loss", "values", outputs.values))
        returns = entry("returns")
        free = clipped = (values - returns).square()
        if eps_clip is not None:
            old = entry("values")
            clipped = (old + (values - old).clamp(-eps_clip, eps_clip) - returns).square()
        total = (weights * torch.maximum(free, clipped) / 2).sum()
        sums = {
            "value_loss": total,
            "value_clip_fraction": (of_metrics * (clipped > free)).sum(),
            "value": (of_metrics * values).sum(),
            "return": (of_metrics * returns).sum(),
        }
        return total, {name: value.detach() for name, value in sums.items()}

    return loss


def _where(weights: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Replace values of weight 0 by 0, since 0 * NaN is NaN. The result is float32 and stays in the autograd graph."""
    return torch.where(weights != 0, value.float(), 0.0)


def _entries(name: str, micro_batch: MicroBatch) -> tuple[torch.Tensor, torch.Tensor, Callable[[str], torch.Tensor]]:
    """Return the weights of the loss and of the metrics, and a function that returns another (b, s) entry."""
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
    of_metrics = checked("metric_weights").float() if "metric_weights" in micro_batch.others else weights
    return weights, of_metrics, lambda key: _where(weights, checked(key))


def _output(name: str, key: str, value: torch.Tensor | None) -> torch.Tensor:
    if value is None:
        raise ValueError(
            f"{name}: the model returned no {key}; check that its role fits this loss, and that {key} was requested"
        )
    return value
