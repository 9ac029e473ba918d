"""Advantage estimators by name: from a dp rank's rows to their advantages. The formulas are in
`workers.algorithms.advantages`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from workers.algorithms.advantages import (
    gae,
    group_advantages,
    leave_one_out_advantages,
    moments,
    token_rewards,
    whiten,
)
from workers.algorithms.losses import kl_estimate
from workers.data.rollout_data import RolloutDataError

_HINTS = {
    "values": "call connect() with the critic's group, or add them",
    "old_log_probs": "call connect() with the critic's group, or add them",
    "ref_log_probs": "call init(with_ref=True), for a critic connect() with its group, or add them",
}


NEEDS = {
    "grpo": ("rewards", "group_ids"),
    "rloo": ("rewards", "group_ids"),
    "reinforce_plus_plus": ("rewards",),
    "reinforce_plus_plus_baseline": ("rewards", "group_ids"),
    "gae": ("rewards", "values"),
}
"""The entries of the rollout data that each estimator needs; with ``kl_coef`` log-probabilities too."""


def missing(name: str, estimator: str) -> RolloutDataError:
    """The error for an entry that an estimator needs."""
    hint = _HINTS.get(name, "add it, or the advantages themselves")
    return RolloutDataError(f"rollout data has no {name!r}, which advantage_estimator={estimator!r} needs; {hint}")


@dataclass(frozen=True)
class AdvantageRows:
    """The rows of a dp rank, and access to those of the other dp ranks. ``rows["rewards"]`` is an entry of the rollout
    data. All ranks call the same methods in the same order.

    Attributes:
        data: this rank's entries, with B rows.
        rank: the dp rank.
        gather: returns what every dp rank passes to it, by dp rank.
        estimator: name of the estimator, for messages.
    """

    data: Mapping[str, torch.Tensor]
    rank: int = 0
    gather: Callable[[Any], list[Any]] = lambda value: [value]
    estimator: str = ""

    def __getitem__(self, name: str) -> torch.Tensor:
        """Return an entry of this rank's rows.

        Raises:
            RolloutDataError: there is no such entry.
        """
        if name not in self.data:
            raise missing(name, self.estimator)
        return self.data[name]

    @property
    def counts(self) -> torch.Tensor:
        """(B, T) bool, true for tokens that count."""
        return self["loss_mask"] != 0

    def everywhere(self, name: str) -> torch.Tensor:
        """Return an entry of the rows of all dp ranks, (N, ...), in the order of the ranks."""
        return torch.cat(self.gather(self[name]))

    def own(self, values: torch.Tensor) -> torch.Tensor:
        """Return the B values of this rank's rows.

        Args:
            values: (N, ...), for the rows of all dp ranks.
        """
        lengths = self.gather(len(self["input_ids"]))
        begin = sum(lengths[: self.rank])
        return values[begin : begin + lengths[self.rank]]

    def whitened(self, advantages: torch.Tensor) -> torch.Tensor:
        """Normalize (B, T) advantages over the tokens of all dp ranks that count, to mean 0 and variance 1."""
        sums = torch.stack(self.gather(moments(advantages, self.counts))).sum(0)
        return whiten(advantages, self.counts, sums)


def grpo(rows: AdvantageRows, args: Any) -> torch.Tensor:
    """GRPO, and Dr. GRPO without ``grpo_std_normalization``: see `group_advantages`."""
    rewards, groups = rows.everywhere("rewards"), rows.everywhere("group_ids")
    return rows.own(group_advantages(rewards.float(), groups, divide_by_std=args.grpo_std_normalization))


def rloo(rows: AdvantageRows, args: Any) -> torch.Tensor:
    """RLOO: see `leave_one_out_advantages`."""
    rewards, groups = rows.everywhere("rewards"), rows.everywhere("group_ids")
    return rows.own(leave_one_out_advantages(rewards.float(), groups))


def reinforce_plus_plus(rows: AdvantageRows, args: Any) -> torch.Tensor:
    """REINFORCE++ (Hu et al. 2025, arXiv 2501.03262): the discounted rewards from each token on, with the KL penalty in
    them, whitened over all tokens."""
    rewards = _token_rewards(rows, args)
    returns, _ = gae(rewards, torch.zeros_like(rewards), rows["loss_mask"], gamma=args.gamma, lam=1.0)
    return rows.whitened(returns) if args.normalize_advantages else returns


def reinforce_plus_plus_baseline(rows: AdvantageRows, args: Any) -> torch.Tensor:
    """REINFORCE++ with baseline (arXiv 2501.03262): rewards minus their group's mean, whitened over all tokens."""
    rewards, groups = rows.everywhere("rewards"), rows.everywhere("group_ids")
    of_rows = rows.own(group_advantages(rewards.float(), groups, divide_by_std=False))
    advantages = of_rows[:, None] * rows.counts
    return rows.whitened(advantages) if args.normalize_advantages else advantages


def gae_of_rewards(rows: AdvantageRows, args: Any) -> torch.Tensor:
    """Generalized advantage estimation with a critic's values: see `gae`."""
    advantages, _ = advantages_and_returns(rows, args)
    return rows.whitened(advantages) if args.normalize_advantages else advantages


def advantages_and_returns(rows: AdvantageRows, args: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return advantages and returns (the targets of the critic's values), (B, T) each."""
    rewards = _token_rewards(rows, args)
    return gae(rewards, rows["values"], rows["loss_mask"], gamma=args.gamma, lam=args.gae_lambda)


def _token_rewards(rows: AdvantageRows, args: Any) -> torch.Tensor:
    kl = kl_estimate(rows["old_log_probs"], rows["ref_log_probs"], "k1") if args.kl_coef else None
    return token_rewards(rows["rewards"], rows["loss_mask"], kl=kl, kl_coef=args.kl_coef)
