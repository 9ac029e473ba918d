"""Advantages: how much better a completion, or one of its tokens, was than expected."""

from __future__ import annotations

import torch


def group_advantages(
    rewards: torch.Tensor, group_ids: torch.Tensor, *, divide_by_std: bool = True, eps: float = 1e-6
) -> torch.Tensor:
    """GRPO: a completion's reward relative to the other completions of the same prompt (Shao et al. 2024, arXiv
    2402.03300). A group must be complete: if its rows are on several ranks, gather rewards and ids first.

    Args:
        rewards: (B,), of whole completions.
        group_ids: (B,) integers, in any order.
        divide_by_std: divide by the group's standard deviation (of a sample: n - 1) plus ``eps``; otherwise only
            subtract the group's mean (for the reason see Liu et al. 2025, arXiv 2503.20783).
        eps: avoids a division by 0 in groups of equal rewards; in units of reward.

    Returns:
        (B,) float32; 0 in groups of one and in groups of equal rewards.

    Raises:
        ValueError: the shapes are not (B,) both.
    """
    advantages, sizes, of_row = _above_mean("group_advantages", rewards, group_ids)
    if divide_by_std:
        variances = torch.zeros_like(sizes).index_add(0, of_row, advantages.square()) / (sizes - 1).clamp(min=1)
        advantages = advantages / (variances.sqrt() + eps)[of_row]
    return advantages.float()


def leave_one_out_advantages(rewards: torch.Tensor, group_ids: torch.Tensor) -> torch.Tensor:
    """RLOO: a completion's reward minus the mean reward of the other completions of the same prompt (Ahmadian et al.
    2024, arXiv 2402.14740). A group must be complete, as in `group_advantages`.

    Args:
        rewards: (B,), of whole completions.
        group_ids: (B,) integers, in any order.

    Returns:
        (B,) float32; 0 in groups of one.

    Raises:
        ValueError: the shapes are not (B,) both.
    """
    advantages, sizes, of_row = _above_mean("leave_one_out_advantages", rewards, group_ids)
    return (advantages * (sizes / (sizes - 1).clamp(min=1))[of_row]).float()


def _above_mean(
    name: str, rewards: torch.Tensor, group_ids: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return rewards minus their group's mean, (B,) float64; the size of each group; and the group of each row."""
    if rewards.dim() != 1 or group_ids.shape != rewards.shape:
        raise ValueError(
            f"{name}: rewards is {tuple(rewards.shape)} and group_ids {tuple(group_ids.shape)}; expected (rows,) for "
            "both"
        )
    # In float64, rounding errors in groups of equal rewards stay negligible even after the division.
    rewards = rewards.double()
    groups, of_row = group_ids.unique(return_inverse=True)
    zeros = rewards.new_zeros(len(groups))
    sizes = zeros.index_add(0, of_row, torch.ones_like(rewards))
    return rewards - (zeros.index_add(0, of_row, rewards) / sizes)[of_row], sizes, of_row


def overlong_penalty(lengths: torch.Tensor, max_length: int, buffer: int) -> torch.Tensor:
    """DAPO's soft overlong punishment (Yu et al. 2025, arXiv 2503.14476, equation 13), to be added to the rewards.

    Args:
        lengths: (B,), of the completions, in tokens.
        max_length: of a completion.
        buffer: the last tokens before ``max_length``, over which the penalty grows from 0 to -1; at least 1.

    Returns:
        (B,) float32, from -1 to 0.
    """
    return ((max_length - buffer - lengths.float()) / buffer).clamp(-1.0, 0.0)


def token_rewards(
    rewards: torch.Tensor, loss_mask: torch.Tensor, *, kl: torch.Tensor | None = None, kl_coef: float = 0.0
) -> torch.Tensor:
    """Per-token rewards: the completion's reward at its last counted token, minus the KL penalty at each token.

    Args:
        rewards: (B,), of whole completions.
        loss_mask: (B, T), not 0 for tokens that count.
        kl: (B, T), an estimate of the KL divergence from the reference at each token, see `losses.kl_estimate`.
        kl_coef: penalty per nat, in units of reward.

    Returns:
        (B, T) float32, 0 at tokens that do not count. A row without such tokens has no reward.
    """
    counts = loss_mask != 0
    last = counts & (counts.flip(1).cumsum(1).flip(1) == 1)
    whole = torch.where(last, rewards[:, None].float(), 0.0)
    if kl is None:
        return whole
    return whole - kl_coef * torch.where(counts, kl.float(), 0.0)


def gae(
    rewards: torch.Tensor, values: torch.Tensor, loss_mask: torch.Tensor, *, gamma: float = 1.0, lam: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Generalized advantage estimation (Schulman et al. 2016, arXiv 1506.02438) over the tokens that count.

    The value at t is the expected return before token t was chosen. The successor of a token is the next counted token;
    the value after the last one is 0. Tokens in between that do not count (a tool's output) are skipped.

    Args:
        rewards: (B, T), per token; see `token_rewards`.
        values: (B, T).
        loss_mask: (B, T), not 0 for tokens that count.
        gamma: discount per token.
        lam: 1 relies on rewards, 0 on values.

    Returns:
        Advantages and returns (targets of the values), both (B, T) float32, 0 at tokens that do not count.
    """
    counts = loss_mask != 0
    # Move counted tokens to the front, so that each one's successor is adjacent.
    order = counts.int().argsort(dim=1, descending=True, stable=True)
    inside = counts.gather(1, order)
    reward = torch.where(inside, rewards.float().gather(1, order), 0.0)
    value = torch.where(inside, values.float().gather(1, order), 0.0)
    after = torch.cat([value[:, 1:], torch.zeros_like(value[:, :1])], 1)
    advantages = discounted_sums(torch.where(inside, reward + gamma * after - value, 0.0), gamma * lam)
    returns = torch.where(inside, advantages + value, 0.0)
    zeros = torch.zeros_like(value)
    return zeros.scatter(1, order, advantages), zeros.scatter(1, order, returns)


def discounted_sums(x: torch.Tensor, discount: float) -> torch.Tensor:
    """Discounted suffix sums along dim 1, in log2(T) additions of whole tensors.

    Args:
        x: (B, T).
        discount: factor per step.
    """
    reach = 1
    while reach < x.shape[1]:
        # x[t] is the sum of `reach` entries from t on. Adding the sum of the next `reach` entries doubles the reach.
        x = torch.cat([x[:, :-reach] + discount**reach * x[:, reach:], x[:, -reach:]], 1)
        reach *= 2
    return x


def moments(x: torch.Tensor, loss_mask: torch.Tensor) -> torch.Tensor:
    """Return (3,) float64: number of entries that count, their sum, and the sum of their squares. Sum it over the ranks
    for `whiten`."""
    counted = x[loss_mask != 0].double()
    return torch.stack([counted.new_tensor(float(len(counted))), counted.sum(), counted.square().sum()])


def whiten(
    x: torch.Tensor, loss_mask: torch.Tensor, sums: torch.Tensor, *, keep_mean: bool = False, eps: float = 1e-8
) -> torch.Tensor:
    """Normalize the entries that count to mean 0 and variance 1.

    Args:
        x: this rank's entries.
        loss_mask: of the same shape, not 0 for entries that count.
        sums: `moments`, summed over all ranks.
        keep_mean: normalize only the variance.
        eps: added to the variance (of the population: n).

    Returns:
        float32, 0 at entries that do not count.
    """
    count, total, squares = sums.double().unbind()
    count = count.clamp(min=1)
    mean = total / count
    variance = (squares / count - mean.square()).clamp(min=0)
    white = (x.double() - mean) / (variance + eps).sqrt()
    if keep_mean:
        white = white + mean
    return torch.where(loss_mask != 0, white, 0.0).float()
