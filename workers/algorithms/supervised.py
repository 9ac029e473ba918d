"""Supervised fine-tuning and DPO, which need no rollout workers: their data is given.

Both are a policy loss, chosen by ``policy_loss_type``, with the advantages that belong to it. So all that training a
policy has is theirs too: packing, adapters, recomputation, checkpoints, recovery.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F

from workers.algorithms.estimators import AdvantageRows
from workers.algorithms.policy_losses import PolicyTokens
from workers.data.rollout_data import RolloutDataError

_LARGEST_SHARE = 1 - 1e-6
"""Bounds the reported loss of a pair at 13.8 nats. Its gradient has no bound."""


def sft_advantages(rows: AdvantageRows, args: Any) -> torch.Tensor:
    """Return 1 for each row. Give ``advantages`` in the data instead to weight rows or tokens."""
    return torch.ones(len(rows["input_ids"]))


def sft_loss(tokens: PolicyTokens, args: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Supervised fine-tuning: the cross-entropy of each token, -log p, times its advantage, in nats."""
    return -tokens.advantages * tokens.log_probs, {}


def dpo_advantages(rows: AdvantageRows, args: Any) -> torch.Tensor:
    """Direct preference optimization (Rafailov et al. 2023, arXiv 2305.18290).

    With x the sum over a completion's tokens of log(p / p_ref), and c and r the chosen and the rejected one of a pair,
    the loss is -log s(m) with the margin m = beta (x_c - x_r) and the logistic function s. Its derivatives by the
    log-probabilities of all tokens of c and r are -beta s(-m) and beta s(-m). So in the first optimizer step, in which
    ``old_log_probs`` are the policy's own, it is the plain policy gradient with the advantages beta s(-m) and
    -beta s(-m). They are doubled because the loss is the mean over rows, of which a pair has two. With dropout they are
    computed without it, as all of ``old_log_probs`` is: s(-m) is that of the model without dropout, and the derivatives
    of the log-probabilities are of the model with it.

    Pairs have the same number in ``group_ids``; of the two, the one with the higher reward is the chosen one.

    Returns:
        (B,), of this rank's rows. The rows of a pair may be on different ranks.

    Raises:
        RolloutDataError: see `pairs`.
    """
    _refuse_several_rows(rows.data)
    log_ratios = rows["old_log_probs"].double() - rows["ref_log_probs"].double()
    sums = torch.where(rows["loss_mask"] != 0, log_ratios, 0.0).sum(1)  # other entries may be NaN
    margins = args.dpo_beta * rows.everywhere(sums)
    counted = rows.everywhere((rows["loss_mask"] != 0).any(1).float())
    chosen, rejected = pairs(rows.everywhere("group_ids"), rows.everywhere("rewards"), counted != 0)
    slopes = 2 * args.dpo_beta * torch.sigmoid(margins[rejected] - margins[chosen])
    advantages = torch.zeros(len(margins), dtype=torch.double)
    advantages[chosen], advantages[rejected] = slopes, -slopes
    return rows.own(advantages.float())


def dpo_loss(tokens: PolicyTokens, args: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """DPO: see `dpo_advantages`. The loss of a pair stands at the first token of both its rows, so the mean over rows
    is the mean over pairs. Metrics: ``dpo_accuracy``, the share of pairs whose margin is positive, and ``dpo_margin``,
    its mean, in nats."""
    share = (tokens.advantages.abs() / (2 * args.dpo_beta)).clamp(min=1e-30, max=_LARGEST_SHARE)  # s(-m)
    first = tokens.mask & (tokens.mask.cumsum(1) == 1)
    margin = torch.log1p(-share) - share.log()
    # The value is the pair's loss, the gradient is the policy gradient.
    loss = torch.where(first, F.softplus(-margin), 0.0)
    loss = loss - tokens.advantages * (tokens.log_probs - tokens.log_probs.detach())
    return loss, {"dpo_accuracy": first & (margin > 0), "dpo_margin": torch.where(first, margin, 0.0)}


def check_pairs(rows: Mapping[str, torch.Tensor]) -> None:
    """Check the rows of DPO, as `pairs` does, and that each completion is one row."""
    _refuse_several_rows(rows)
    pairs(rows["group_ids"], rows["rewards"], (rows["loss_mask"] != 0).any(1))


def _refuse_several_rows(rows: Mapping[str, torch.Tensor]) -> None:
    if "rollout_ids" in rows.keys():  # noqa: SIM118  (a TensorDict has no `in`)
        raise RolloutDataError(
            "rollout data has 'rollout_ids': some rollouts are several rows, but policy_loss_type='dpo' compares the "
            "log-probabilities of whole completions; keep one row of each rollout, and leave rollout_ids out"
        )


def pairs(group_ids: torch.Tensor, rewards: torch.Tensor, counted: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the rows of the chosen completions and those of the rejected ones, (pairs,) int64 each.

    Args:
        group_ids: (N,), the same number for the two rows of a pair.
        rewards: (N,).
        counted: (N,), whether a row has a counted token. The mean over rows leaves out one without, so the loss of its
            pair would count half.

    Raises:
        RolloutDataError: a group has another number of rows than two, or equal rewards, or a row without such a token.
    """
    ids, sizes = group_ids.unique(return_counts=True)
    if bool((sizes != 2).any()):
        which = int((sizes != 2).nonzero()[0])
        raise RolloutDataError(
            f"rollout data: {int(sizes[which])} rows have the group id {int(ids[which])}; policy_loss_type='dpo' needs "
            "pairs: two rows, of which the chosen one has the higher reward"
        )
    rows = group_ids.argsort(stable=True).view(len(ids), 2)
    of_pairs = rewards[rows].double()  # argmax does not take bool
    if bool((of_pairs[:, 0] == of_pairs[:, 1]).any()):
        row = int(rows[of_pairs[:, 0] == of_pairs[:, 1]][0, 0])
        raise RolloutDataError(
            f"rollout data: the two rows of group {int(group_ids[row])} have the same reward, so neither is preferred; "
            "policy_loss_type='dpo' trains towards the one with the higher reward"
        )
    if not bool(counted.all()):
        raise RolloutDataError(
            f"rollout data: a row of group {int(group_ids[~counted][0])} has no token that loss_mask counts; leave out "
            "both rows of the pair, or count a token of each, such as the one that ends a completion"
        )
    best = of_pairs.argmax(1, keepdim=True)
    return rows.gather(1, best)[:, 0], rows.gather(1, 1 - best)[:, 0]
