"""Metric names of other libraries, for people whose dashboards exist: verl's and slime's. Pure.

A name is used only where the number is what that library means by it. Metrics without such a name keep their own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from workers.algorithms.registry import NEEDS_GROUPS

NAMES = ("own", "verl", "slime")

_VERL = {
    "policy_loss": "actor/pg_loss",
    "ppo_kl": "actor/ppo_kl",
    "clip_fraction": "actor/pg_clipfrac",
    "entropy": "actor/entropy",
    "grad_norm": "actor/grad_norm",
    "lr": "actor/lr",
    "kl": "actor/kl_loss",
    "advantage/mean": "critic/advantages/mean",
    "advantage/max": "critic/advantages/max",
    "advantage/min": "critic/advantages/min",
    "tokens": "perf/total_num_tokens",
    "seconds/rollout": "timing_s/gen",
    "seconds/train": "timing_s/update_actor",
    "seconds/sync": "timing_s/update_weights",
    "seconds/eval": "timing_s/testing",
    "critic/value_loss": "critic/vf_loss",
    "critic/value_clip_fraction": "critic/vf_clipfrac",
    "critic/value": "critic/vpred_mean",
    "critic/return/mean": "critic/returns/mean",
    "critic/return/max": "critic/returns/max",
    "critic/return/min": "critic/returns/min",
    "critic/value/mean": "critic/values/mean",
    "critic/value/max": "critic/values/max",
    "critic/value/min": "critic/values/min",
    "critic/explained_variance": "critic/vf_explained_var",
}

_OTHER_MEANS = {
    "sequence": ("ppo_kl", "clip_fraction", "critic/value", "critic/value_clip_fraction"),
    "constant": ("kl", "entropy"),
}
"""By ``loss_aggregation``: metrics that are not the same means in verl, which averages the first four over all tokens,
and the last two like the loss."""

_SUMS_OF_DPO = ("ppo_kl", "kl", "entropy", "rollout_log_prob_diff")
"""Metrics that are means over completions of sums over tokens with DPO. Those libraries have means over tokens."""

_SLIME = {
    "loss": "train/loss",
    "policy_loss": "train/pg_loss",
    "ppo_kl": "train/ppo_kl",
    "clip_fraction": "train/pg_clipfrac",
    "entropy": "train/entropy_loss",
    "kl": "train/kl_loss",
    "grad_norm": "train/grad_norm",
    "lr": "train/lr-pg_0",
    "rollout_log_prob_diff": "train/train_rollout_logprob_abs_diff",
    "reward": "rollout/raw_reward",
    "completion_length/mean": "rollout/response_lengths",
    "row_length/mean": "rollout/total_lengths",
    "truncated": "rollout/truncated",
    "seconds/rollout": "perf/rollout_time",
    "seconds/train": "perf/actor_train_time",
    "seconds/sync": "perf/update_weights_time",
    "critic/loss": "train/critic-loss",
    "critic/value_loss": "train/critic-value_loss",
    "critic/grad_norm": "train/critic-grad_norm",
}


@dataclass(frozen=True)
class BatchNumbers:
    """Numbers of a batch that the driver has: one of each row.

    Attributes:
        rewards: of the rows; None without rewards.
        completions: number of tokens behind the prompt.
        prompts: number of tokens of the prompt.
        truncated: share of rows without a stop token; None where it is not known.
    """

    rewards: list[float] | None
    completions: list[int]
    prompts: list[int]
    truncated: float | None

    @classmethod
    def of(cls, batch: Any) -> BatchNumbers:
        """Read them from rollout data."""
        names = batch.keys()
        if "completion_lengths" in names and "prompt_lengths" in names:
            completions, prompts = batch["completion_lengths"], batch["prompt_lengths"]
        else:
            real, counted = batch["attention_mask"].bool(), batch["loss_mask"] != 0
            prompts = (real & (counted.cumsum(1) == 0)).sum(1)
            completions = real.sum(1) - prompts
        return cls(
            batch["rewards"].tolist() if "rewards" in names else None,
            completions.tolist(),
            prompts.tolist(),
            float(batch["truncated"].double().mean()) if "truncated" in names and len(completions) else None,
        )

    def metrics(self) -> dict[str, float]:
        """Return the metrics in the names of this library."""
        if not self.completions:
            return {}
        rows = [left + right for left, right in zip(self.prompts, self.completions, strict=True)]
        made = {
            **_spread("completion_length", self.completions),
            **_spread("prompt_length", self.prompts),
            "row_length/mean": sum(rows) / len(rows),
        }
        if self.rewards:
            made |= {"reward/max": max(self.rewards), "reward/min": min(self.rewards)}
        return made | ({} if self.truncated is None else {"truncated": self.truncated})


def _spread(name: str, values: list[Any]) -> dict[str, float]:
    return {f"{name}/mean": sum(values) / len(values), f"{name}/max": max(values), f"{name}/min": min(values)}


def renamed(
    names: str,
    metrics: Mapping[str, float],
    numbers: BatchNumbers | None = None,
    config: Mapping[str, Any] | None = None,
) -> dict[str, float]:
    """Return a step's metrics in other names.

    Args:
        names: one of `NAMES`.
        metrics: in the names of this library.
        numbers: of the step's batch.
        config: of the run; ``rollout_max_response_len``, ``rollout_max_prompt_len``, ``kl_coef``, ``kl_loss_coef``,
            ``policy_loss_type``, ``eps_clip_dual``, ``advantage_estimator``, ``loss_aggregation``,
            ``overlong_buffer_len`` and the number of training ranks are read.
    """
    if names == "own":
        return dict(metrics)
    config, known = config or {}, dict(_VERL if names == "verl" else _SLIME)
    if config.get("policy_loss_type") == "clip_cov" or config.get("eps_clip_dual") is not None:
        del known["clip_fraction"]  # theirs then counts other tokens
    others = _OTHER_MEANS.get(config.get("loss_aggregation") or "", ()) if names == "verl" else ()
    for name in _SUMS_OF_DPO if config.get("policy_loss_type") == "dpo" else others:
        known.pop(name, None)
    made = {known.get(name, name): value for name, value in metrics.items()}
    parts = {name.removeprefix("seconds/"): value for name, value in metrics.items() if name.startswith("seconds/")}
    if names == "slime":
        return made | ({"perf/step_time": sum(parts.values())} if parts else {})
    if numbers is not None and numbers.completions:
        for own in [name for name in metrics if name.startswith(("completion_length/", "prompt_length/"))]:
            made.pop(own, None)
        made |= _verl_of_batch(numbers, config)
    if config.get("advantage_estimator") in NEEDS_GROUPS and "advantage/mean" in metrics:  # as verl's returns
        made |= {f"critic/returns/{what}": metrics[f"advantage/{what}"] for what in ("mean", "max", "min")}
    if "kl" in metrics and "kl_loss_coef" in config:
        made["actor/kl_coef"] = float(config["kl_loss_coef"])
    if parts:
        seconds = made["timing_s/step"] = made["perf/time_per_step"] = sum(parts.values())
        if "tokens" in metrics:
            ranks = int(config.get("actor_num_nodes") or 1) * int(config.get("actor_num_gpus_per_node") or 1)
            if seconds:
                made["perf/throughput"] = metrics["tokens"] / seconds / ranks
            if "train" in parts and metrics["tokens"]:
                made["timing_per_token_ms/update_actor"] = 1000 * parts["train"] / metrics["tokens"]
        generated = 0 if numbers is None else sum(numbers.completions)
        if "rollout" in parts and generated:
            made["timing_per_token_ms/gen"] = 1000 * parts["rollout"] / generated
    return made


def _verl_of_batch(numbers: BatchNumbers, config: Mapping[str, Any]) -> dict[str, float]:
    """Return what verl computes of a batch. A row without a completion is "aborted", and left out of its scores."""
    lengths = numbers.completions
    kept = [row for row, length in enumerate(lengths) if length]
    most, longest_prompt = config.get("rollout_max_response_len"), config.get("rollout_max_prompt_len")
    made = {
        **_spread("response_length", lengths),
        **_spread("prompt_length", numbers.prompts),
        "response/aborted_ratio": 1 - len(kept) / len(lengths),
    }
    if most:
        made["response_length/clip_ratio"] = lengths.count(most) / len(lengths)
    if longest_prompt:
        made["prompt_length/clip_ratio"] = numbers.prompts.count(longest_prompt) / len(lengths)
    if kept:
        made |= _spread("response_length_non_aborted", [lengths[row] for row in kept])
        if most:
            made["response_length_non_aborted/clip_ratio"] = lengths.count(most) / len(kept)
    # verl's scores include an overlong penalty.
    if kept and numbers.rewards is not None and not config.get("overlong_buffer_len"):
        scores = [numbers.rewards[row] for row in kept]
        made |= _spread("critic/score", scores)
        if not config.get("kl_coef"):  # otherwise verl's rewards have the KL penalty of each token
            made |= _spread("critic/rewards", scores)
    return made
