"""Advantages: how much better a completion, or one of its tokens, was than expected."""

from __future__ import annotations

import math

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


def optimal_baseline_advantages(rewards: torch.Tensor, lengths: torch.Tensor, group_ids: torch.Tensor) -> torch.Tensor:
    """OPO: a completion's reward minus its group's mean weighted by length, sum(l R) / sum(l). This baseline has the
    least variance if the gradients of tokens are orthogonal and equally long (Hao et al. 2025, arXiv 2505.23585). A
    group must be complete, as in `group_advantages`.

    Args:
        rewards: (B,), of whole completions.
        lengths: (B,), of the completions, in tokens.
        group_ids: (B,) integers, in any order.

    Returns:
        (B,) float32; 0 in groups of one.

    Raises:
        ValueError: the shapes are not (B,) both.
    """
    return _above_mean("optimal_baseline_advantages", rewards, group_ids, lengths)[0].float()


def mean_normalized_advantages(rewards: torch.Tensor, group_ids: torch.Tensor, *, eps: float = 1e-6) -> torch.Tensor:
    """MaxRL: (R - mean) / mean of the group (Tajwar et al. 2026, arXiv 2602.02710). With rewards of 0 and 1, the mean
    over n completions has the gradient of log(probability of success) up to the term of order n, where that of R - mean
    has the gradient of the probability itself. A group must be complete, as in `group_advantages`.

    Args:
        rewards: (B,), of whole completions; at least 0.
        group_ids: (B,) integers, in any order.
        eps: avoids a division by 0 in groups without success; in units of reward.

    Returns:
        (B,) float32; 0 in groups of one.

    Raises:
        ValueError: the shapes are not (B,) both, or a reward is negative.
    """
    if bool((rewards < 0).any()):
        raise ValueError(
            f"mean_normalized_advantages: the rewards go down to {float(rewards.min()):g}; MaxRL divides by their "
            "mean, so they must be at least 0, such as 0 and 1"
        )
    advantages, _, _ = _above_mean("mean_normalized_advantages", rewards, group_ids)
    return (advantages / (rewards.double() - advantages + eps)).float()


def pass_at_k_advantages(
    rewards: torch.Tensor,
    group_ids: torch.Tensor,
    k: int | None = None,
    *,
    divide_by_std: bool = True,
    eps: float = 1e-6,
) -> torch.Tensor:
    """Pass@k: by how much a completion raises the greatest reward of k completions, on average over all choices of
    k - 1 others of its group. If k is the size of the group, only the best completion has an advantage: its reward
    minus the second (Tang et al. 2025, arXiv 2503.19595). For smaller k see Walder and Karkhanis 2025 (arXiv
    2505.15201). The gradient of the expected greatest reward has a factor k more, which is left out here, as in verl.

    A group must be complete, as in `group_advantages`.

    Args:
        rewards: (B,), of whole completions.
        group_ids: (B,) integers, in any order.
        k: at least 2; smaller groups use their size. None: the size of each group.
        divide_by_std: divide by the standard deviation of the group's rewards (of a sample: n - 1) plus ``eps``.
        eps: in units of reward.

    Returns:
        (B,) float32, at least 0; 0 in groups of one.

    Raises:
        ValueError: the shapes are not (B,) both, or k is less than 2.
    """
    above, sizes, of_row = _above_mean("pass_at_k_advantages", rewards, group_ids)
    if k is not None and k < 2:
        raise ValueError(f"pass_at_k_advantages: k={k}; expected at least 2, because the other k - 1 are the baseline")
    advantages = torch.zeros_like(above)
    for group, size in enumerate(sizes.long().tolist()):
        if size < 2:
            continue
        rows = (of_row == group).nonzero()[:, 0]
        chosen = min(k or size, size)
        # In ascending order, j is the best of k - 1 others if the k - 2 further ones are chosen from the j before it.
        best = above.new_tensor(
            [math.comb(j, chosen - 2) / math.comb(size - 1, chosen - 1) if j < size - 1 else 0.0 for j in range(size)]
        )
        ordered, order = above[rows].sort()
        below, expected = best.cumsum(0) - best, (best * ordered).cumsum(0) - best * ordered
        gains = ordered * below - expected
        if divide_by_std:
            gains = gains / (ordered.std() + eps)
        advantages[rows[order]] = gains
    return advantages.clamp(min=0).float()


def _above_mean(
    name: str, rewards: torch.Tensor, group_ids: torch.Tensor, weights: torch.Tensor | None = None
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
    if weights is None:
        return rewards - (zeros.index_add(0, of_row, rewards) / sizes)[of_row], sizes, of_row
    total = zeros.index_add(0, of_row, weights.double())
    means = zeros.index_add(0, of_row, weights.double() * rewards) / torch.where(total > 0, total, 1.0)
    return rewards - means[of_row], sizes, of_row


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
    rewards: torch.Tensor,
    values: torch.Tensor,
    loss_mask: torch.Tensor,
    *,
    gamma: float = 1.0,
    lam: float | torch.Tensor = 1.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Generalized advantage estimation (Schulman et al. 2016, arXiv 1506.02438) over the tokens that count.

    The value at t is the expected return before token t was chosen. The successor of a token is the next counted token;
    the value after the last one is 0. Tokens in between that do not count (a tool's output) are skipped.

    Args:
        rewards: (B, T), per token; see `token_rewards`.
        values: (B, T).
        loss_mask: (B, T), not 0 for tokens that count.
        gamma: discount per token.
        lam: 1 relies on rewards, 0 on values. One number, or (B,), one per row; see `length_adaptive_lambda`.

    Returns:
        Advantages and returns (targets of the values), both (B, T) float32, 0 at tokens that do not count.
    """
    counts = loss_mask != 0
    order, inside = counted_first(counts)  # so that each token's successor is adjacent
    reward = torch.where(inside, rewards.float().gather(1, order), 0.0)
    value = torch.where(inside, values.float().gather(1, order), 0.0)
    after = torch.cat([value[:, 1:], torch.zeros_like(value[:, :1])], 1)
    discount = gamma * (lam.double()[:, None] if isinstance(lam, torch.Tensor) else lam)
    advantages = discounted_sums(torch.where(inside, reward + gamma * after - value, 0.0), discount)
    returns = torch.where(inside, advantages + value, 0.0)
    zeros = torch.zeros_like(value)
    return zeros.scatter(1, order, advantages), zeros.scatter(1, order, returns)


def length_adaptive_lambda(loss_mask: torch.Tensor, alpha: float) -> torch.Tensor:
    """VAPO's lambda for the policy: 1 - 1 / (alpha l), where l is the completion's length in tokens that count, so that
    the sum of lambda's powers, alpha l, grows with it (Yue et al. 2025, arXiv 2504.05118).

    Args:
        loss_mask: (B, T), not 0 for tokens that count.
        alpha: above 0; 0.05 in the paper.

    Returns:
        (B,) float64, from 0 to below 1; 0 up to l = 1 / alpha.
    """
    return 1 - 1 / (alpha * (loss_mask != 0).sum(1).double()).clamp(min=1)


def baseline_sums(
    returns: torch.Tensor, energies: torch.Tensor, loss_mask: torch.Tensor, shares: torch.Tensor | None = None
) -> torch.Tensor:
    """What `token_baselines` is made of: sums over completions of one group.

    Args:
        returns: (n, T), the rewards from each token on.
        energies: (n, T), of each token; they are added up along the completion here.
        loss_mask: (n, T), not 0 for tokens that count.
        shares: (n,), factors of the first two sums: 1 / k for completions of k rows. None for 1.

    Returns:
        (3, T) float64: sums of return times energy, of energy, and of 1, over the completions that have a t-th token
        that counts. Add up those of ranks that share the group.
    """
    order, inside = counted_first(loss_mask != 0)
    energy = torch.where(inside, energies.double().gather(1, order), 0.0).cumsum(1) * inside
    if shares is not None:
        energy = energy * shares[:, None]
    return torch.stack(
        [(torch.where(inside, returns.double().gather(1, order), 0.0) * energy).sum(0), energy.sum(0), inside.sum(0)]
    )


def token_baselines(sums: torch.Tensor, loss_mask: torch.Tensor, *, eps: float = 1e-8) -> torch.Tensor:
    """The optimal token baseline (Li et al. 2026, arXiv 2602.07078): for the t-th token, sum(G W) / sum(W) over the
    completions of a group that have one, with the return G from there on and the energy W until there: the sum of
    1 - 2 p + (sum of the squares of all tokens' probabilities), the squared norms of the gradients of log p with
    respect to the logits. Where only one completion goes on, the baseline is 0, as in verl, because it would be its own
    return.

    Args:
        sums: (3, T) of the whole group, see `baseline_sums`.
        loss_mask: (n, T), of some of the group's completions.
        eps: added to the sum of the energies.

    Returns:
        (n, T) float32, 0 at tokens that do not count.
    """
    order, inside = counted_first(loss_mask != 0)
    weighted, energy, count = sums[:, : order.shape[1]]
    of_group = torch.where(count > 1, weighted / (energy + eps), 0.0)
    return torch.zeros(order.shape).scatter(1, order, torch.where(inside, of_group, 0.0).float())


def counted_first(counts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the positions of each row's tokens, (B, T), those that count first; and which of the positions count."""
    order = counts.int().argsort(dim=1, descending=True, stable=True)
    return order, counts.gather(1, order)


def discounted_sums(x: torch.Tensor, discount: float | torch.Tensor) -> torch.Tensor:
    """Discounted suffix sums along dim 1, in log2(T) additions of whole tensors.

    Args:
        x: (B, T).
        discount: factor per step; one number, or (B, 1), one per row.
    """
    reach = 1
    while reach < x.shape[1]:
        # x[t] is the sum of `reach` entries from t on. Adding the sum of the next `reach` entries doubles the reach.
        factor = discount**reach
        factor = factor.to(x.dtype) if isinstance(factor, torch.Tensor) else factor  # the power is taken in float64
        x = torch.cat([x[:, :-reach] + factor * x[:, reach:], x[:, -reach:]], 1)
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
