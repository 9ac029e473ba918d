"""Corrections for tokens that another policy generated than the one in training: an older version of the weights, or
the same weights in another engine.

The importance ratio of a token is p_old / p_rollout: its probability under the trainer's weights before the step
(``old_log_probs``) over its probability when it was sampled (``rollout_log_probs``). The policy loss then multiplies
each token's loss by a weight made from these ratios, as in decoupled PPO (Hilton et al. 2022, arXiv 2110.00641), or
leaves out completions whose ratio is too far from 1. `PRESETS` names the combinations; `Correction` describes one.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch

from workers.algorithms.policy_losses import bounded, row_means

Level = Literal["token", "sequence", "geometric"]
RejectionLevel = Literal["token", "sequence", "geometric", "error"]


@dataclass(frozen=True)
class Correction:
    """How ratios become weights, and which completions are rejected. The default only reports metrics.

    Attributes:
        weight: level of the ratio that each token's loss is multiplied by; None for no weights.
        outside: what becomes of a weight outside of [low, high]: "truncate" moves it to the bound, "mask" sets it to 0.
        low, high: bounds of the weights.
        reject: level of the ratio that completions are rejected by; None to keep all. A completion is rejected if the
            ratio of any of its tokens is outside of [reject_low, reject_high]. "error" takes `probability_errors`
            instead of ratios.
        reject_low, reject_high: bounds of the ratios of the completions to keep.
        zero_rejected: rejected completions get the weight 0 and stay in the mean's denominator. Otherwise they are left
            out, as if their loss_mask were 0.
        normalize: divide the weights by their mean over the rollout, on all ranks, so that the mean becomes 1
            (self-normalized importance sampling; Hesterberg 1995).

    Raises:
        ValueError: a bound excludes the ratio 1, at which nothing must be corrected, or is negative.
    """

    weight: Level | None = None
    outside: Literal["truncate", "mask"] = "truncate"
    low: float = 0.0
    high: float = math.inf
    reject: RejectionLevel | None = None
    reject_low: float = 0.0
    reject_high: float = math.inf
    zero_rejected: bool = False
    normalize: bool = False

    def __post_init__(self) -> None:
        for low, high in (("low", "high"), ("reject_low", "reject_high")):
            if not 0 <= getattr(self, low) <= 1 <= getattr(self, high):
                raise ValueError(
                    f"{low}={getattr(self, low)} and {high}={getattr(self, high)}: expected 0 <= {low} <= 1 <= {high}"
                )


PRESETS: dict[str, Correction] = {
    "report": Correction(),
    "token_tis": Correction("token", "truncate", 0.0, 2.0),
    "seq_tis": Correction("sequence", "truncate", 0.0, 2.0),
    "geo_tis": Correction("geometric", "truncate", 0.0, 2.0),
    "token_mis": Correction("token", "mask", 0.0, 2.0),
    "seq_mis": Correction("sequence", "mask", 0.0, 2.0),
    "geo_mis": Correction("geometric", "mask", 0.0, 2.0),
    "icepop": Correction("token", "mask", 0.5, 5.0),
    "token_rs": Correction(reject="token", reject_low=1e-4, reject_high=100.0),
    "seq_rs": Correction(reject="sequence", reject_low=0.5, reject_high=2.0),
    "geo_rs": Correction(reject="geometric", reject_low=0.99, reject_high=1.01),
    "error_rs": Correction(reject="error", reject_high=2.0),
    "seq_mask_tis": Correction("token", reject="geometric", reject_low=0.999, reject_high=1.002, zero_rejected=True),
}
"""tis: truncated importance sampling (Ionides 2008; V-trace, arXiv 1802.01561). mis: masked importance sampling (Liu et
al. 2025, "When Speed Kills Stability"). icepop: arXiv 2510.18855. rs: rejection. error_rs: NeMo-RL's
``seq_logprob_error_threshold``. seq_mask_tis: NeMo-RL's ``seq-mask-tis`` (the same article): the tokens' own weights,
without a bound, in completions whose geometric mean is within the bounds, and 0 in the others."""


def find_correction(
    name: str,
    *,
    low: float | None = None,
    high: float | None = None,
    reject_low: float | None = None,
    reject_high: float | None = None,
    normalize: bool = False,
) -> Correction:
    """Return the correction of a name.

    Args:
        name: of `PRESETS`; or a rejection and a weighting, joined by "+": "geo_rs+token_tis".
        low, high, reject_low, reject_high: replace the preset's bounds; None keeps them.
        normalize: see `Correction`.

    Raises:
        ValueError: there is no such preset, the two presets cannot be combined, a bound is invalid, or is given for a
            correction without it, or there are no weights to normalize.
    """
    parts = name.split("+")
    for part in parts:
        if part not in PRESETS:
            raise ValueError(
                f"{part!r} is no correction; expected one of {', '.join(PRESETS)}, or two joined by '+': a *_rs and a "
                "weighting"
            )
    made = PRESETS[parts[0]]
    if len(parts) > 1:
        rejecting = [PRESETS[part] for part in parts if PRESETS[part].reject and not PRESETS[part].weight]
        weighting = [PRESETS[part] for part in parts if PRESETS[part].weight and not PRESETS[part].reject]
        if len(parts) > 2 or len(rejecting) != 1 or len(weighting) != 1:
            raise ValueError(f"{name!r}: only one *_rs and one weighting can be joined, such as 'geo_rs+token_tis'")
        of = rejecting[0]
        made = dataclasses.replace(weighting[0], reject=of.reject, reject_low=of.reject_low, reject_high=of.reject_high)
    given = {"low": low, "high": high, "reject_low": reject_low, "reject_high": reject_high}
    bounds: dict[str, Any] = {bound: value for bound, value in given.items() if value is not None}
    for bound in bounds:
        if (made.reject if bound.startswith("reject") else made.weight) is None:
            raise ValueError(f"{name!r} has no bound {bound!r}")
    if made.reject == "error" and reject_low is not None:
        raise ValueError(f"{name!r} has no bound 'reject_low': an error is at least 1")
    if normalize and made.weight is None:
        raise ValueError(f"{name!r} has no weights to normalize")
    return dataclasses.replace(made, **bounds, normalize=normalize)


def correction_of(args: Any) -> Correction | None:
    """Return the correction that the configuration names, or None.

    Raises:
        ValueError: see `find_correction`.
    """
    if args.rollout_correction is None:
        return None
    return find_correction(
        args.rollout_correction,
        low=args.rollout_correction_low,
        high=args.rollout_correction_high,
        reject_low=args.rollout_rejection_low,
        reject_high=args.rollout_rejection_high,
        normalize=args.rollout_correction_normalize,
    )


def rejects(args: Any) -> bool:
    """Return whether the correction that the configuration names leaves completions out."""
    correction = correction_of(args)
    return correction is not None and correction.reject is not None and not correction.zero_rejected


def importance_ratios(
    old_log_probs: torch.Tensor, rollout_log_probs: torch.Tensor, loss_mask: torch.Tensor, level: Level = "token"
) -> torch.Tensor:
    """Return p_old / p_rollout of each token, or of its completion.

    Args:
        old_log_probs: (B, T), under the trainer's weights before the step.
        rollout_log_probs: (B, T), when the tokens were sampled.
        loss_mask: (B, T), not 0 for tokens that count.
        level: "token": of the token. "sequence": of the completion, the product over its tokens that count.
            "geometric": the geometric mean over them.

    Returns:
        (B, T) float64, from e**-20 to e**20. Exactly 1 where the log-probabilities are equal, and, at the level
        "token", at tokens that do not count.

    Raises:
        ValueError: unknown level.
    """
    if level not in get_args(Level):
        raise ValueError(f"importance_ratios: level={level!r}; expected one of {', '.join(get_args(Level))}")
    counts = loss_mask != 0
    # Sums over long completions are in float64, so that their ratios are as exact as those of tokens.
    logs = torch.where(counts, old_log_probs.double() - rollout_log_probs.double(), 0.0)
    if level != "token":
        of_rows = row_means(logs, counts) if level == "geometric" else logs.sum(1, keepdim=True)
        logs = of_rows.expand(counts.shape)
    return bounded(logs).exp()


def probability_errors(
    old_log_probs: torch.Tensor, rollout_log_probs: torch.Tensor, loss_mask: torch.Tensor
) -> torch.Tensor:
    """Return the mean of exp(abs(log p_old - log p_rollout)) over each completion's tokens: by which factor the two
    probabilities differ, in either direction. Unlike in a mean of ratios, errors of opposite signs do not cancel.

    Args:
        old_log_probs, rollout_log_probs, loss_mask: as in `importance_ratios`.

    Returns:
        (B, T) float64, the same for all tokens of a completion, from 1 to e**20. Exactly 1 where the log-probabilities
        are equal.
    """
    counts = loss_mask != 0
    apart = (old_log_probs.double() - rollout_log_probs.double()).abs()
    means = row_means(bounded(apart).exp(), counts)
    return torch.where(counts.any(1, keepdim=True), means, 1.0).expand(counts.shape)


def off_policy_sequences(
    log_probs: torch.Tensor,
    rollout_log_probs: torch.Tensor,
    advantages: torch.Tensor,
    loss_mask: torch.Tensor,
    delta: float,
) -> torch.Tensor:
    """Return which tokens DeepSeek-V3.2's off-policy sequence masking leaves out (2025, arXiv 2512.02556, section 3.1;
    slime's ``--use-opsm``): those of negative advantage in completions that the policy in training has become too
    unlikely to generate.

    Args:
        log_probs: (B, T), under the policy in training.
        rollout_log_probs: (B, T), when the tokens were sampled, so that both staleness and differences between engine
            and trainer count.
        advantages: (B, T).
        loss_mask: (B, T), not 0 for tokens that count.
        delta: the largest mean of log(p_rollout / p) over a completion's tokens, in nats.

    Returns:
        (B, T) bool.
    """
    counts = loss_mask != 0
    means = row_means(rollout_log_probs.double() - log_probs.double(), counts)
    return counts & (advantages < 0) & (means > delta)


@dataclass(frozen=True)
class Corrected:
    """What a correction does to this rank's rows.

    Attributes:
        weights: (B, T) float32, a factor of each token's loss; with `Correction.normalize`, still to be divided by
            `mean_weight`.
        rejected: (B,) bool, completions to leave out, as if their loss_mask were 0.
        sums: (names,) float64, to be summed over the ranks for `correction_metrics`.
        largest: the largest ratio, as a float64 scalar.
    """

    weights: torch.Tensor
    rejected: torch.Tensor
    sums: torch.Tensor
    largest: torch.Tensor


def correct(
    old_log_probs: torch.Tensor,
    rollout_log_probs: torch.Tensor,
    loss_mask: torch.Tensor,
    correction: Correction,
) -> Corrected:
    """Apply a correction.

    Where ``old_log_probs`` equal ``rollout_log_probs``, every weight is exactly 1 and nothing is rejected, so the
    corrected loss is the uncorrected one, bit for bit.

    Args:
        old_log_probs: (B, T), under the trainer's weights before the step.
        rollout_log_probs: (B, T), when the tokens were sampled.
        loss_mask: (B, T), not 0 for tokens that count. Other values at tokens that do not count are ignored.
        correction: what to do.
    """
    counts = loss_mask != 0
    level: Level = correction.weight or "token"
    if correction.weight is None and correction.reject is not None and correction.reject != "error":
        level = correction.reject
    ratios = importance_ratios(old_log_probs, rollout_log_probs, counts, level)
    outside = counts & ((ratios < correction.low) | (ratios > correction.high))
    weights = torch.ones_like(ratios)
    if correction.weight is not None:
        weights = ratios.clamp(correction.low, correction.high)
        if correction.outside == "mask":
            weights = torch.where(weights == ratios, ratios, 0.0)
    rejected = torch.zeros(len(counts), dtype=torch.bool, device=counts.device)
    if correction.reject is not None:
        if correction.reject == "error":
            of_rows = probability_errors(old_log_probs, rollout_log_probs, counts)
        else:
            of_rows = importance_ratios(old_log_probs, rollout_log_probs, counts, correction.reject)
        rejected = (counts & ((of_rows < correction.reject_low) | (of_rows > correction.reject_high))).any(1)
    # What has one ratio: a token, or a completion, whose first token that counts stands for all.
    units = counts if level == "token" else counts & (counts.cumsum(1) == 1)
    weights_used = torch.where(rejected[:, None], 0.0, weights)
    used = weights_used[units]
    left_out = torch.zeros_like(rejected) if correction.zero_rejected else rejected
    outside &= ~rejected[:, None]
    rows = counts.any(1)
    logs = torch.where(counts, old_log_probs.double() - rollout_log_probs.double(), 0.0)
    means = [row_means(x.double(), counts)[:, 0] for x in (old_log_probs, rollout_log_probs)]
    old_ppl, rollout_ppl = (bounded(-x).exp() for x in means)
    sums = {
        "units": units.sum(),
        "ratio": ratios[units].sum(),
        "used": used.sum(),
        "used_squares": used.square().sum(),
        "kept": (units & ~left_out[:, None]).sum(),
        "outside": outside[units].sum(),
        "rows": rows.sum(),
        "rejected": rejected.sum(),
        "tokens": counts.sum(),
        "k1": -logs.sum(),
        "k3": torch.where(counts, torch.expm1(bounded(logs)) - bounded(logs), 0.0).sum(),
        "perplexity": torch.where(rows, old_ppl - rollout_ppl, 0.0).sum(),
        "log_perplexity": torch.where(rows, means[1] - means[0], 0.0).abs().sum(),
    }
    largest = ratios[units].amax() if bool(rows.any()) else ratios.new_zeros(())
    if correction.zero_rejected:
        weights = weights_used
    return Corrected(weights.float(), left_out, torch.stack([value.double() for value in sums.values()]), largest)


def mean_weight(sums: torch.Tensor) -> float:
    """Return the mean of the weights, over tokens, or over completions at their levels, that are not left out. Masked
    weights count as 0. It is 1 if there is no weight above 0.

    Args:
        sums: as in `correction_metrics`.
    """
    _, _, used, _, kept, *_ = sums.tolist()
    return used / kept if used > 0 else 1.0


def correction_metrics(sums: torch.Tensor, largest: Sequence[float]) -> dict[str, float]:
    """Return the metrics of a correction over all ranks.

    Args:
        sums: `Corrected.sums`, summed over the ranks.
        largest: `Corrected.largest` of each rank.

    Returns:
        - ``mismatch_k1``, ``mismatch_k3``: estimates of KL(rollout || trainer) per token, in nats.
        - ``mismatch_perplexity_gap``: perplexity under the trainer minus that under the engine, mean over completions.
        - ``mismatch_log_perplexity_gap``: mean of the absolute difference of their logarithms, in nats.
        - ``correction_ratio``, ``correction_ratio_max``: the ratio before bounds, mean and maximum over tokens, or over
          completions at their levels.
        - ``correction_weight``: `mean_weight` before `Correction.normalize`; 0 if all weights are masked.
        - ``correction_ess``: effective sample size of the weights as used, as a share: (sum w)^2 / (n sum w^2).
        - ``correction_outside``: share of the weights that were truncated or masked.
        - ``correction_rejected``: share of the completions that were rejected.
    """
    units, ratio, used, squares, kept, outside, rows, rejected, tokens, k1, k3, gap, log_gap = sums.tolist()
    units, rows, tokens = max(units, 1.0), max(rows, 1.0), max(tokens, 1.0)
    return {
        "mismatch_k1": k1 / tokens,
        "mismatch_k3": k3 / tokens,
        "mismatch_perplexity_gap": gap / rows,
        "mismatch_log_perplexity_gap": log_gap / rows,
        "correction_ratio": ratio / units,
        "correction_ratio_max": max(largest),
        "correction_weight": used / kept if kept else 1.0,
        "correction_ess": used * used / (units * squares) if squares else 0.0,
        "correction_outside": outside / units,
        "correction_rejected": rejected / rows,
    }
