"""Policy losses: the loss of each token, from its log-probabilities and its advantage.

`workers.algorithms.registry` has their names. `workers.algorithms.losses.policy_loss` adds the mean over tokens,
corrections, and the KL and entropy terms.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from workers.algorithms.advantages import moments

_LARGEST_LOG_RATIO = 20.0  # e**20 is far outside any trust region, and still far from overflow


def bounded(log_ratio: torch.Tensor) -> torch.Tensor:
    """Return a difference of log-probabilities, bounded so that its exponential does not overflow."""
    return log_ratio.clamp(-_LARGEST_LOG_RATIO, _LARGEST_LOG_RATIO)


def row_means(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return the mean over each row's entries that ``mask``, bool, counts: (B, T) -> (B, 1). It is 0 without any."""
    return torch.where(mask, x, 0.0).sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp(min=1)


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
            without it.
    """

    log_probs: torch.Tensor
    old_log_probs: torch.Tensor
    advantages: torch.Tensor
    mask: torch.Tensor
    others: Mapping[str, torch.Tensor]
    candidates: torch.Tensor | None = None


PolicyLoss = Callable[[PolicyTokens], tuple[torch.Tensor, dict[str, torch.Tensor]]]
"""tokens -> (each token's loss, metrics), (b, s) each. Called once per micro-batch, fillers included, and must report
the same metrics each time, under names that the trainer does not report itself, such as ``loss`` or ``kl``."""


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
    ratio = bounded(log_probs - old_log_probs).exp()
    free = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - eps_clip, 1 + high)
    loss, active = torch.maximum(free, clipped), clipped > free
    if eps_clip_dual is not None:
        most = -advantages * eps_clip_dual
        dual = (advantages < 0) & (most < loss)
        loss, active = torch.where(dual, most, loss), active | dual
    return loss, ratio, active


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
    of_sequence = row_means(tokens.log_probs - tokens.old_log_probs, tokens.mask)
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
    ratio = bounded(tokens.log_probs - tokens.old_log_probs).exp().detach()
    clipped = ratio.clamp(1 - args.eps_clip, 1 + high)
    return -clipped * tokens.advantages * tokens.log_probs, {"ratio": ratio, "clip_fraction": clipped != ratio}


def sapo_loss(tokens: PolicyTokens, args: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """SAPO (Gao et al. 2025, arXiv 2511.20347): a smooth gate instead of the clip, -A (4 / tau) sigmoid(tau (r - 1)).
    Its slope at the ratio r = 1 is 1, as without a gate. tau is ``args.tau_pos`` where A > 0, otherwise ``tau_neg``."""
    ratio = bounded(tokens.log_probs - tokens.old_log_probs).exp()
    tau = torch.where(tokens.advantages > 0, args.tau_pos, args.tau_neg)
    return -tokens.advantages * torch.sigmoid(tau * (ratio - 1)) * (4 / tau), {"ratio": ratio}


def gpg_loss(tokens: PolicyTokens, args: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """GPG (Chu et al. 2025, arXiv 2504.02546): -A log p, the plain policy gradient, without a ratio and a clip."""
    ratio = bounded(tokens.log_probs - tokens.old_log_probs).exp()
    return -tokens.advantages * tokens.log_probs, {"ratio": ratio}


def geo_mean_loss(tokens: PolicyTokens, args: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """GMPO (Zhao et al. 2025, arXiv 2507.20673): -A exp(mean of the clipped log r), over the completion's tokens that
    count. A is the completion's mean advantage. log r is clipped above ``args.eps_clip_high`` where A > 0, where A < 0
    below -``eps_clip``: bounds of log r, not of r. Each token has its completion's loss, so with ``loss_aggregation`` =
    "sequence" the step's loss is the mean over completions."""
    high = args.eps_clip if args.eps_clip_high is None else args.eps_clip_high
    log_ratio = bounded(tokens.log_probs - tokens.old_log_probs)
    sign = tokens.advantages.sign()
    clipped = sign * torch.minimum(sign * log_ratio, sign * log_ratio.clamp(-args.eps_clip, high))
    ratio = row_means(clipped, tokens.mask).exp()
    metrics = {"ratio": ratio.expand_as(clipped), "clip_fraction": (clipped != log_ratio) & (sign != 0)}
    return (-row_means(tokens.advantages, tokens.mask) * ratio).expand_as(clipped), metrics


def dro_loss(tokens: PolicyTokens, args: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """DRO (Richemond et al. 2024, arXiv 2405.19107) in its form for tokens: -A log p + ``args.dro_beta`` / 2 (log r)^2.
    The square keeps the policy near the old one, without a ratio and a clip."""
    log_ratio = bounded(tokens.log_probs - tokens.old_log_probs)
    loss = args.dro_beta / 2 * log_ratio.square() - tokens.advantages * tokens.log_probs
    return loss, {"ratio": log_ratio.exp()}


def dppo_tv_loss(tokens: PolicyTokens, args: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """DPPO with the binary total variation (Qi et al. 2026, arXiv 2602.04879, equation 13), |p - p_old|: see `_dppo`.
    prime-rl's default is this with ``args.eps_clip`` = 0.2, ``dppo_kl_tau`` = 1e-3 and ``use_rollout_logprobs``."""
    return _dppo(tokens, args, (tokens.log_probs.exp() - tokens.old_log_probs.exp()).abs())


def dppo_kl_loss(tokens: PolicyTokens, args: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """DPPO with the binary KL divergence (arXiv 2602.04879, equation 14): p_old log(p_old / p) + (1 - p_old) log((1 -
    p_old) / (1 - p)), that of "this token or another one". See `_dppo`."""
    old, new = tokens.old_log_probs.exp(), tokens.log_probs.exp()
    others = (1 - old) * ((1 - old + 1e-8) / (1 - new + 1e-8)).log()  # finite also where the probability rounds to 1
    return _dppo(tokens, args, old * (tokens.old_log_probs - tokens.log_probs) + others)


def _dppo(tokens: PolicyTokens, args: Any, divergence: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """-A min(r, ``args.eps_clip_dual``) log p, without a gradient of the ratio r; 0 at masked tokens. A token is masked
    if its probability has moved the way that its advantage pushes it, and the divergence is above ``eps_clip_high``, or
    above ``eps_clip`` if A <= 0. ``dppo_kl_tau`` (log r)^2 is added for all tokens, masked ones too."""
    high = args.eps_clip if args.eps_clip_high is None else args.eps_clip_high
    rises, moved = tokens.advantages > 0, divergence.detach()
    log_ratio = bounded(tokens.log_probs - tokens.old_log_probs)
    masked = torch.where(rises, (log_ratio > 0) & (moved > high), (log_ratio < 0) & (moved > args.eps_clip))
    ratio = log_ratio.exp().detach()
    pushes = -tokens.advantages * ratio.clamp(max=args.eps_clip_dual) * tokens.log_probs
    loss = torch.where(masked, 0.0, pushes) + args.dppo_kl_tau * log_ratio.square()
    return loss, {"ratio": ratio, "clip_fraction": masked}


def clip_cov_loss(tokens: PolicyTokens, args: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Clip-Cov (Cui et al. 2025, arXiv 2505.22617): `ppo_clip`, but 0 at the tokens that `clip_cov_tokens` has chosen,
    which are the entry ``selected_tokens``."""
    loss, ratio, clipped = ppo_clip(
        tokens.log_probs,
        tokens.old_log_probs,
        tokens.advantages,
        eps_clip=args.eps_clip,
        eps_clip_high=args.eps_clip_high,
    )
    chosen = _selected(tokens)
    return torch.where(chosen, 0.0, loss), {"ratio": ratio, "clip_fraction": clipped, "cov_fraction": chosen}


def kl_cov_loss(tokens: PolicyTokens, args: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """KL-Cov (Cui et al. 2025, arXiv 2505.22617): -A r, and + ``args.ppo_kl_coef`` |log r| at the tokens that
    `kl_cov_tokens` has chosen, which are the entry ``selected_tokens``."""
    log_ratio = bounded(tokens.log_probs - tokens.old_log_probs)
    ratio, chosen = log_ratio.exp(), _selected(tokens)
    loss = -tokens.advantages * ratio + torch.where(chosen, args.ppo_kl_coef * log_ratio.abs(), 0.0)
    return loss, {"ratio": ratio, "cov_fraction": chosen}


def _selected(tokens: PolicyTokens) -> torch.Tensor:
    if "selected_tokens" not in tokens.others:
        raise ValueError(
            "the micro-batch has no 'selected_tokens'; choose them for the whole step first, see SELECTIONS"
        )
    return (tokens.others["selected_tokens"] != 0) & tokens.mask


@dataclass(frozen=True)
class StepTokens:
    """The tokens of a step on this dp rank, from which a loss chooses some before the step; each (B, T).

    Attributes:
        log_probs: under the policy before the step.
        old_log_probs: under the old policy.
        advantages: of the tokens.
        counts: bool, the tokens that count.
        gather: returns what every dp rank passes to it, by dp rank.
        seed: for random choices, the same on all ranks, and another one in each step.
    """

    log_probs: torch.Tensor
    old_log_probs: torch.Tensor
    advantages: torch.Tensor
    counts: torch.Tensor
    gather: Callable[[Any], list[Any]]
    seed: int

    def covariances(self) -> torch.Tensor:
        """Each token's part of the covariance of log-probability and advantage, over the tokens of all dp ranks that
        count: (log p - mean log p) (A - mean A), (B, T) float64, 0 at tokens that do not. Where it is large, the step
        lowers the entropy most."""
        both = torch.stack([self.log_probs, self.advantages]).double()
        sums = torch.stack(self.gather(torch.stack([moments(values, self.counts) for values in both]))).sum(0)
        means = sums[:, 1] / sums[:, 0].clamp(min=1)
        return torch.where(self.counts, both - means[:, None, None], 0.0).prod(0)


def clip_cov_tokens(step: StepTokens, args: Any) -> torch.Tensor:
    """Choose the tokens whose loss Clip-Cov drops: a random ``args.clip_cov_ratio`` of all tokens, at least one, among
    those that the clip leaves and whose covariance is between ``clip_cov_lb`` and ``clip_cov_ub``.

    Returns:
        (B, T) bool. All tokens of equal covariance are chosen together.
    """
    options = {"eps_clip": args.eps_clip, "eps_clip_high": args.eps_clip_high}
    _, _, clipped = ppo_clip(step.log_probs, step.old_log_probs, step.advantages, **options)
    covariances = step.covariances()
    within = step.counts & ~clipped & (covariances > args.clip_cov_lb) & (covariances < args.clip_cov_ub)
    # Sorted, so that the choice does not depend on which rank has which row.
    everywhere = torch.cat(step.gather(covariances[within])).sort().values
    count = max(int(args.clip_cov_ratio * sum(step.gather(int(step.counts.sum())))), 1)
    order = torch.randperm(len(everywhere), generator=torch.Generator().manual_seed(step.seed))
    return within & torch.isin(covariances, everywhere[order[:count]])


def kl_cov_tokens(step: StepTokens, args: Any) -> torch.Tensor:
    """Choose the tokens that KL-Cov penalizes: the ``args.kl_cov_ratio`` of all tokens, at least one, that have the
    largest covariances.

    Returns:
        (B, T) bool. All tokens that equal the last one are chosen too, but none of covariance 0: in a step whose
        advantages are all 0, it would be all tokens.
    """
    covariances = step.covariances()
    own = covariances[step.counts]
    total = sum(step.gather(len(own)))
    count = min(max(int(args.kl_cov_ratio * total), 1), total)
    largest = torch.cat(step.gather(own.topk(min(count, len(own))).values))
    if not count:
        return step.counts
    return step.counts & (covariances != 0) & (covariances >= largest.topk(count).values[-1])


SELECTIONS: Mapping[Callable[..., Any], Callable[[StepTokens, Any], torch.Tensor]] = {
    clip_cov_loss: clip_cov_tokens,
    kl_cov_loss: kl_cov_tokens,
}
"""Losses that choose tokens among those of the whole step, over all micro-batches and dp ranks, and the functions that
do. What they return is the entry ``selected_tokens`` of the micro-batches."""
