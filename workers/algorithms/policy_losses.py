"""Policy losses: the loss of each token, from its log-probabilities and its advantage.

`workers.algorithms.registry` has their names. `workers.algorithms.losses.policy_loss` adds the mean over tokens,
corrections, and the KL and entropy terms.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

_LARGEST_LOG_RATIO = 20.0  # e**20 is far outside any trust region, and still far from overflow


def bounded(log_ratio: torch.Tensor) -> torch.Tensor:
    """Return a difference of log-probabilities, bounded so that its exponential does not overflow."""
    return log_ratio.clamp(-_LARGEST_LOG_RATIO, _LARGEST_LOG_RATIO)


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
    ratio = bounded(tokens.log_probs - tokens.old_log_probs).exp().detach()
    clipped = ratio.clamp(1 - args.eps_clip, 1 + high)
    return -clipped * tokens.advantages * tokens.log_probs, {"ratio": ratio, "clip_fraction": clipped != ratio}
