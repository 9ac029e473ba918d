"""Advantage estimators by name: from a dp rank's rows to their advantages. The formulas are in
`workers.algorithms.advantages`.

With ``kl_coef``, every estimator subtracts the KL divergence from the reference from the rewards: kl_coef times
log(p_old / p_ref) of each token. Estimators of whole completions subtract the sum over the tokens that count, as verl
does. `maxrl` and `gdpo` scale rewards, and subtract the penalty, less its group's mean, afterwards: their scales are
those of the task's rewards.

Completions that are left out of the loss (rejected, or truncated with ``overlong_filtering``) still have their part in
the means and deviations of their groups: what they earned is known, and without them the others' baselines would be
biased towards what is kept. They have none in whitening, in the optimal token baseline and in the critic's loss, which
are over the tokens that are trained. verl does the same with rejected completions; the overlong filtering of NeMo-RL
and SkyRL keeps the rewards in the groups, too.

A rollout of several rows (``rollout_ids``) counts once in its group, whatever its number of rows: its length and its KL
divergence are the sums over them. All its rows get its advantage. Estimators that go from token to token take each row
as a sequence of its own, and whitening is over all tokens.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.nn.functional as F

from workers.algorithms.advantages import (
    baseline_sums,
    gae,
    group_advantages,
    leave_one_out_advantages,
    length_adaptive_lambda,
    mean_normalized_advantages,
    moments,
    optimal_baseline_advantages,
    pass_at_k_advantages,
    token_baselines,
    token_rewards,
    whiten,
)
from workers.algorithms.losses import kl_estimate
from workers.data.rollout_data import REWARD_PART, RolloutDataError, rollout_numbers

logger = logging.getLogger(__name__)

_HINTS = {
    "values": "call connect() with the critic's group, or add them",
    "old_log_probs": "call connect() with the critic's group, or add them",
    "ref_log_probs": "call init(with_ref=True), for a critic connect() with its group, or add them",
    "reward_baselines": "use RolloutManager(greedy_baselines=True), or add the rewards of greedy completions",
}

NEEDS = {
    "grpo": ("rewards", "group_ids"),
    "rloo": ("rewards", "group_ids"),
    "reinforce_plus_plus": ("rewards",),
    "reinforce_plus_plus_baseline": ("rewards", "group_ids"),
    "gae": ("rewards", "values"),
    "opo": ("rewards", "group_ids"),
    "remax": ("rewards", "reward_baselines"),
    "grpo_passk": ("rewards", "group_ids"),
    "maxrl": ("rewards", "group_ids"),
    "gdpo": ("rewards", "group_ids"),
    "optimal_token_baseline": ("rewards", "group_ids"),
    "sft": (),
    "dpo": ("rewards", "group_ids", "ref_log_probs"),
}
"""The entries of the rollout data that each estimator needs; with ``kl_coef`` log-probabilities too."""

TOKEN_REWARDS = frozenset({"gae", "reinforce_plus_plus", "remax", "optimal_token_baseline"})
"""The estimators that go from token to token, and so take ``token_rewards`` instead of ``rewards`` if there are any."""


def missing(name: str, estimator: str) -> RolloutDataError:
    """The error for an entry that an estimator needs."""
    hint = _HINTS.get(name, "add it" if estimator == "dpo" else "add it, or the advantages themselves")
    return RolloutDataError(f"rollout data has no {name!r}, which advantage_estimator={estimator!r} needs; {hint}")


def check_groups(rows: AdvantageRows) -> tuple[torch.Tensor, int]:
    """Return the ``group_ids`` of the rollouts of all ranks, (N,), and how many rollouts are alone in their groups.

    Args:
        rows: the rows; their ``estimator`` compares the completions of a group.

    Raises:
        RolloutDataError: all are alone, so all advantages would be 0. No error is raised if at least half of the
            completions are not trained: `collate` moves failed sessions out of their groups, which may be the reason.
    """
    groups = rows.everywhere("group_ids")
    sizes = groups.unique(return_counts=True)[1]
    alone = int((sizes == 1).sum())
    trained = int((rows.everywhere((rows["loss_mask"] != 0).sum(1), "amax") > 0).sum())
    if alone and alone == len(sizes) and 2 * trained > alone:
        raise RolloutDataError(
            f"rollout data: each of the {alone} completions is alone in its group (group_ids), so "
            f"advantage_estimator={rows.estimator!r} would give all of them the advantage 0. Generate several "
            "completions per prompt (samples_per_prompt, n_samples_per_prompt), and give those of one prompt the same "
            "group id"
        )
    return groups, alone


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
    _known: dict[str, Any] = field(default_factory=dict, repr=False, compare=False)
    """What was gathered once for all calls. Not a `cached_property`: all instances share its lock in Python 3.11, so
    ranks that are threads would wait for each other in it."""

    def _once(self, name: str, make: Callable[[], Any]) -> Any:
        if name not in self._known:
            self._known[name] = make()
        return self._known[name]

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
        """(B, T) bool, true for tokens that count and are trained: without the completions that are left out."""
        counts = self["loss_mask"] != 0
        return counts & ~self.data["left_out"][:, None] if "left_out" in self.data else counts

    @property
    def _rollouts(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """What `rollout_numbers` returns for the rows of all dp ranks; None if each row is a rollout."""
        if "rollout_ids" not in self.data:
            return None
        made: tuple[torch.Tensor, torch.Tensor] = self._once(
            "rollouts", lambda: rollout_numbers(torch.cat(self.gather(self.data["rollout_ids"])))
        )
        return made

    def everywhere(self, entry: str | torch.Tensor, reduce: Literal["first", "sum", "amax"] = "first") -> torch.Tensor:
        """Return an entry of the rollouts of all dp ranks, (N,), in the order of the ranks, or of ``rollout_ids`` if
        there are any.

        Args:
            entry: its name, or this rank's values, (B,). If it has more dims, all rows are returned.
            reduce: what a rollout of several rows has: the value of one of them, which is right for what is the same in
                all, or their sum or maximum.
        """
        values = torch.cat(self.gather(self[entry] if isinstance(entry, str) else entry))
        if self._rollouts is None or values.dim() > 1:
            return values
        numbers, first = self._rollouts
        if reduce == "first":
            return values[first]
        return values[first].scatter_reduce(0, numbers, values, reduce, include_self=False)

    @property
    def numbers(self) -> torch.Tensor:
        """(B,) int64, for each of this rank's rows the place of its rollout in what `everywhere` returns."""
        lengths = self._once("lengths", lambda: self.gather(len(self["input_ids"])))
        begin = sum(lengths[: self.rank])
        rows = torch.arange(begin, begin + lengths[self.rank])
        return rows if self._rollouts is None else self._rollouts[0][rows]

    @property
    def shares(self) -> torch.Tensor:
        """(B,) float64, 1 / the number of rows of each row's rollout. The sum over all ranks is the number of
        rollouts."""
        ones = torch.ones(len(self["input_ids"]), dtype=torch.float64)
        return ones if self._rollouts is None else 1 / self.own(self.everywhere(ones, "sum"))

    def groups(self) -> torch.Tensor:
        """Return the ``group_ids`` of the rollouts of all dp ranks, (N,), and warn of rollouts that are alone in
        theirs.

        Raises:
            RolloutDataError: see `check_groups`.
        """
        groups, alone = check_groups(self)
        if alone and not self.rank:
            logger.warning(
                "%d of %d completions are alone in their groups: advantage_estimator=%r gives them the advantage 0 "
                "(before whitening, if the estimator whitens)",
                alone,
                len(groups),
                self.estimator,
            )
        return groups

    def own(self, values: torch.Tensor) -> torch.Tensor:
        """Return the B values of this rank's rows.

        Args:
            values: (N, ...), for the rollouts of all dp ranks.
        """
        return values[self.numbers]

    def whitened(self, advantages: torch.Tensor) -> torch.Tensor:
        """Normalize (B, T) advantages over the tokens of all dp ranks that count, to mean 0 and variance 1."""
        sums = torch.stack(self.gather(moments(advantages, self.counts))).sum(0)
        return whiten(advantages, self.counts, sums)


def grpo(rows: AdvantageRows, args: Any) -> torch.Tensor:
    """GRPO, and Dr. GRPO without ``grpo_std_normalization``: see `group_advantages`."""
    rewards, groups = rollout_rewards(rows, args), rows.groups()
    return rows.own(group_advantages(rewards, groups, divide_by_std=args.grpo_std_normalization))


def rloo(rows: AdvantageRows, args: Any) -> torch.Tensor:
    """RLOO: see `leave_one_out_advantages`."""
    return rows.own(leave_one_out_advantages(rollout_rewards(rows, args), rows.groups()))


def opo(rows: AdvantageRows, args: Any) -> torch.Tensor:
    """OPO: see `optimal_baseline_advantages`."""
    lengths = rows.everywhere((rows["loss_mask"] != 0).sum(1), "sum")
    return rows.own(optimal_baseline_advantages(rollout_rewards(rows, args), lengths, rows.groups()))


def grpo_passk(rows: AdvantageRows, args: Any) -> torch.Tensor:
    """Pass@k with k = ``passk_k``, divided by the group's standard deviation with ``grpo_std_normalization``: see
    `pass_at_k_advantages`."""
    rewards, groups = rollout_rewards(rows, args), rows.groups()
    return rows.own(pass_at_k_advantages(rewards, groups, args.passk_k, divide_by_std=args.grpo_std_normalization))


def maxrl(rows: AdvantageRows, args: Any) -> torch.Tensor:
    """MaxRL: see `mean_normalized_advantages`. The KL penalty is not divided by the group's mean reward.

    Raises:
        RolloutDataError: a reward is negative, on any rank.
    """
    rewards, groups = rows.everywhere(rows["rewards"].float()), rows.groups()
    try:
        advantages = mean_normalized_advantages(rewards, groups)
    except ValueError as error:
        raise RolloutDataError(f"rollout data: {error}") from None
    return rows.own(advantages - _group_penalties(rows, args, groups))


def gdpo(rows: AdvantageRows, args: Any) -> torch.Tensor:
    """GDPO (Liu et al. 2026, arXiv 2601.05242): each reward of a completion normalized within its group as GRPO does,
    then their sum with the weights ``gdpo_weights`` (1 by default), whitened over all tokens. So a reward of wide
    spread does not hide one of narrow spread. The rewards are the entries ``rewards/NAME``, (B,) each.

    Raises:
        RolloutDataError: there is no such entry, or ``gdpo_weights`` names one that there is not.
    """
    names = sorted(name for name in rows.data if name.startswith(REWARD_PART))
    check_reward_parts(names, args)
    weights, groups = dict(args.gdpo_weights), rows.groups()
    total = torch.zeros(len(groups))
    for name in names:
        each = group_advantages(rows.everywhere(rows[name].float()), groups, divide_by_std=args.grpo_std_normalization)
        total = total + weights.get(name.removeprefix(REWARD_PART), 1.0) * each
    of_rows = rows.own(total - _group_penalties(rows, args, groups))
    return _whitened_rows(rows, args, of_rows)


def remax(rows: AdvantageRows, args: Any) -> torch.Tensor:
    """ReMax (Li et al. 2023, arXiv 2310.10505): the rewards from each token on minus ``reward_baselines``, (B,): the
    reward of the prompt's greedy completion. `RolloutManager` generates these with ``greedy_baselines=True``."""
    returns = _returns(rows, args, 1.0)
    return (returns - rows["reward_baselines"].float()[:, None]) * (rows["loss_mask"] != 0)


def optimal_token_baseline(rows: AdvantageRows, args: Any) -> torch.Tensor:
    """The rewards from each token on minus the optimal token baseline: see `token_baselines`. ``sum_pi_squared``,
    (B, T), has the sum of the squares of all tokens' probabilities, under the policy of ``current_log_probs`` if there
    are any, otherwise of ``old_log_probs``. Energies are multiplied by the square of ``correction_weights``, which the
    gradients are multiplied by."""
    returns, counts = _returns(rows, args, 1.0), rows.counts
    log_probs = rows.data.get("current_log_probs", rows["old_log_probs"])
    energies = 1 - 2 * log_probs.double().exp() + rows["sum_pi_squared"].double()
    if "correction_weights" in rows.data:
        energies = energies * rows["correction_weights"].double().square()
    ids, shares = rows["group_ids"], rows.shares
    own = {
        group: baseline_sums(*(x[ids == group] for x in (returns, energies, counts, shares)))
        for group in ids.unique().tolist()
    }
    longest, groups = rows.everywhere(counts.sum(1), "amax"), rows.everywhere("group_ids")
    # Only groups whose rows are on several ranks are exchanged.
    ranks = rows.gather(set(own))
    shared = rows.gather({group: of for group, of in own.items() if sum(group in there for there in ranks) > 1})
    baselines = torch.zeros_like(returns)
    for group, of in own.items():
        parts = [there[group] for there in shared if group in there] or [of]
        width = max(part.shape[1] for part in parts)
        sums = torch.stack([F.pad(part, (0, width - part.shape[1])) for part in parts]).sum(0)
        sums[2] = (longest[groups == group][:, None] > torch.arange(width)).sum(0)  # rollouts, not rows
        baselines[ids == group] = token_baselines(sums, counts[ids == group])
    return (returns - baselines) * counts


def reinforce_plus_plus(rows: AdvantageRows, args: Any) -> torch.Tensor:
    """REINFORCE++ (Hu et al. 2025, arXiv 2501.03262): the discounted rewards from each token on, with the KL penalty in
    them, whitened over all tokens."""
    returns = _returns(rows, args, args.gamma)
    return rows.whitened(returns) if args.normalize_advantages else returns


def reinforce_plus_plus_baseline(rows: AdvantageRows, args: Any) -> torch.Tensor:
    """REINFORCE++ with baseline (arXiv 2501.03262): rewards minus their group's mean, whitened over all tokens."""
    rewards, groups = rollout_rewards(rows, args), rows.groups()
    return _whitened_rows(rows, args, rows.own(group_advantages(rewards, groups, divide_by_std=False)))


def gae_of_rewards(rows: AdvantageRows, args: Any) -> torch.Tensor:
    """Generalized advantage estimation with a critic's values: see `gae`. The lambda is ``gae_lambda``, or that of
    `length_adaptive_lambda` with ``gae_length_adaptive_alpha``."""
    alpha, mask = args.gae_length_adaptive_alpha, rows["loss_mask"]
    lam = args.gae_lambda if alpha is None else length_adaptive_lambda(mask, alpha)
    advantages, _ = gae(_token_rewards(rows, args), rows["values"], mask, gamma=args.gamma, lam=lam)
    return rows.whitened(advantages) if args.normalize_advantages else advantages


def value_targets(rows: AdvantageRows, args: Any) -> torch.Tensor:
    """Return the targets of the critic's values, (B, T): `gae`'s returns with ``gae_lambda_value``, by default
    ``gae_lambda``. VAPO (arXiv 2504.05118) and VC-PPO (arXiv 2503.01491) take 1 for the critic, whose targets then have
    no bias, and less for the policy: decoupled GAE."""
    lam = args.gae_lambda if args.gae_lambda_value is None else args.gae_lambda_value
    return gae(_token_rewards(rows, args), rows["values"], rows["loss_mask"], gamma=args.gamma, lam=lam)[1]


def check_reward_parts(names: Collection[str], args: Any) -> None:
    """Check that there are rewards for `gdpo`.

    Args:
        names: of the entries of the rollout data.
        args: the configuration.

    Raises:
        RolloutDataError: there are none, or ``gdpo_weights`` names another one.
    """
    parts = sorted(name.removeprefix(REWARD_PART) for name in names if name.startswith(REWARD_PART))
    if not parts:
        raise RolloutDataError(
            f"rollout data has no entry '{REWARD_PART}NAME', which advantage_estimator='gdpo' needs for each reward; "
            "return a dict of rewards from the reward function, or add them"
        )
    if unknown := sorted(set(args.gdpo_weights) - set(parts)):
        raise RolloutDataError(
            f"args.gdpo_weights has {unknown[0]!r}, but the rewards in the rollout data are {', '.join(parts)}"
        )


def rollout_rewards(rows: AdvantageRows, args: Any) -> torch.Tensor:
    """Return the rewards of the rollouts of all dp ranks, (N,) float32, minus ``kl_coef`` times the KL divergence from
    the reference."""
    return rows.everywhere(rows["rewards"].float()) - _penalties(rows, args)


def _penalties(rows: AdvantageRows, args: Any) -> torch.Tensor:
    of_rows = -token_rewards(torch.zeros(len(rows["loss_mask"])), rows["loss_mask"], **_kl(rows, args)).sum(1)
    return rows.everywhere(of_rows, "sum")


def _group_penalties(rows: AdvantageRows, args: Any, groups: torch.Tensor) -> torch.Tensor:
    """Return the penalties of the rollouts of all ranks, minus their group's mean."""
    if not args.kl_coef:
        return torch.zeros(len(groups))
    return group_advantages(_penalties(rows, args), groups, divide_by_std=False)


def _whitened_rows(rows: AdvantageRows, args: Any, of_rows: torch.Tensor) -> torch.Tensor:
    advantages = of_rows[:, None] * rows.counts
    return rows.whitened(advantages) if args.normalize_advantages else advantages


def _returns(rows: AdvantageRows, args: Any, gamma: float) -> torch.Tensor:
    rewards = _token_rewards(rows, args)
    return gae(rewards, torch.zeros_like(rewards), rows["loss_mask"], gamma=gamma, lam=1.0)[0]


def _token_rewards(rows: AdvantageRows, args: Any) -> torch.Tensor:
    mask, earned = rows["loss_mask"], rows.data.get("token_rewards")
    if earned is None:
        return token_rewards(rows["rewards"], mask, **_kl(rows, args))
    penalties = token_rewards(torch.zeros(len(mask)), mask, **_kl(rows, args))
    return torch.where(mask != 0, earned.float(), 0.0) + penalties


def _kl(rows: AdvantageRows, args: Any) -> dict[str, Any]:
    if not args.kl_coef:
        return {}
    return {"kl": kl_estimate(rows["old_log_probs"], rows["ref_log_probs"], "k1"), "kl_coef": args.kl_coef}
