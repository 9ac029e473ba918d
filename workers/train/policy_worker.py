"""PolicyTrainWorker: policy-gradient training (GRPO, PPO) and supervised fine-tuning of a `TrainModel`, on any
backend."""

from __future__ import annotations

import logging
import math
import statistics
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from dispatch.batch import described
from single_controller import Dispatch, register
from workers.algorithms.advantages import overlong_penalty, token_rewards
from workers.algorithms.corrections import Correction, correct, correction_metrics, correction_of, mean_weight, rejects
from workers.algorithms.estimators import (
    NEEDS,
    TOKEN_REWARDS,
    AdvantageRows,
    check_groups,
    check_reward_parts,
    missing,
    value_targets,
)
from workers.algorithms.losses import kl_estimate, policy_loss, token_weights, value_loss
from workers.algorithms.policy_losses import SELECTIONS, StepTokens
from workers.algorithms.registry import NEEDS_GROUPS
from workers.algorithms.schedule import adaptive_kl_coef, learning_rate
from workers.algorithms.supervised import check_pairs
from workers.data.rollout_data import (
    RECORD_ROWS,
    RECORD_STEP,
    REWARD_PART,
    RolloutDataError,
    check_rollout_data,
    entries_of,
    is_tensor,
    rows_of,
    sizes_of_steps,
    step_numbers,
    token_versions,
)
from workers.data.routed_experts import ROUTED_EXPERTS, RoutingShape, missing_routes, without_routes
from workers.distributed import gathered
from workers.hf_files import known_config, tokens_of
from workers.seeds import mixed_seed
from workers.train.args import TrainArgsError
from workers.train.args_checks import function_at, function_of
from workers.train.kept_rows import KeptRows
from workers.train.model_worker import ModelWorker
from workers.train.train_model import StepReport, TokenLoss
from workers.train.train_worker import own_rows

logger = logging.getLogger(__name__)

Data = dict[str, torch.Tensor]

STALENESS_SHARES = 4
"""Up to which staleness, in versions, each has a share of the tokens of its own in the metrics."""

LEARNED_POSITIONS = frozenset({"biogpt", "gpt2", "gpt_bigcode", "gpt_neo", "openai-gpt", "opt"})
"""Model types with an embedding for each position: a longer row would be an error of the device."""


class PolicyTrainWorker(ModelWorker):
    """Trains a policy or its critic on rollout data. ``args`` choose the advantage estimator, the loss, and how rows
    are split into optimizer steps."""

    _rollout_id = 0
    """Of the rollout in training."""
    _kept: KeptRows | None = None
    """Of that rollout."""
    _recorded: tuple[tuple[int, dict[str, Any] | None], ...] = ()
    """What was kept of the last two rollouts, by step of the run: the driver may ask when it has sent the next one."""
    _told_gone = False
    """Whether the log says that the rows of a step are not kept."""
    _told_length = False
    """Whether the log says that completions are longer than `overlong_buffer_len` expects."""
    _told_lost = False
    """Whether the log says that `keep_old_actor` has lost weights."""

    @classmethod
    def check_args(cls, args: Any, ranks: int, with_ref: bool) -> None:
        super().check_args(args, ranks, with_ref)
        if args.debug_rollout_only or args.routing_replay is None or (config := known_config(args)) is None:
            return
        if RoutingShape.of(config) is None:
            raise TrainArgsError(
                f"args.routing_replay={args.routing_replay!r} needs a mixture of experts, and the model is a "
                f"{config.model_type!r}; leave it out"
            )

    @classmethod
    def check_rows(cls, args: Any, rows: Any, role: str, computed: Collection[str]) -> None:
        """As in `TrainWorker`. Rows that a user's function postprocesses are checked on the ranks instead."""
        if args.rollout_data_postprocess_path is None:
            replays = _replays_rollout(args, role)
            config = known_config(args) if replays or args.vocab_size is None else None
            rows = entries_of(rows)
            read = rows if replays else without_routes(rows)
            routing = RoutingShape.of(config) if replays and config is not None else None
            check_rollout_data(read, args.vocab_size or (config and tokens_of(config)), routing)
            check_entries({*rows, *computed}, args, role)
            compares = role == "actor" and args.advantage_estimator in NEEDS_GROUPS
            if compares and "advantages" not in rows:
                check_groups(AdvantageRows(rows, estimator=args.advantage_estimator))
            if args.advantage_estimator == "dpo":
                check_pairs(rows)

    def recorded_rows(self, step: int | None = None) -> dict[str, Any] | None:
        if step is None:
            return self._recorded[-1][1] if self._recorded else None
        kept = dict(self._recorded)
        rows = kept.get(step)
        if kept and rows is None and not (self._told_gone or self.rank):
            self._told_gone = True
            logger.warning(
                "RunLog: the trainer does not have the log-probabilities and advantages of step %d. Pass the same step "
                "to mark() and log(), train on what mark() returns, and log a step before you send the second rollout "
                "after it",
                step,
            )
        return rows

    # --- training ---------------------------------------------------------------------------------------

    def train(self, rollout_id: int, rollout_data_ref: Any, **computed: Any) -> dict[str, float]:
        if self.args.debug_rollout_only:
            return {}
        began = time.perf_counter()
        self._refuse_asleep("train")
        self._rollout_id, self._kept = rollout_id, None
        # A run that continues from a checkpoint also repeats the dropout of this rollout.
        self.seed(mixed_seed(self.args.seed, rollout_id, self._dp_rank))
        with _profiled(self.args, self.role, rollout_id, self.rank):
            data = self._checked(lambda: self._rows(rollout_data_ref, computed))
            # All ranks have the same entries here, so either all ranks raise or none does.
            computes_ref = self.role == "actor" and "ref" in self.backup.names
            check_entries({*data, *({"ref_log_probs"} if computes_ref else ())}, self.args, self.role)
            learn = self._train_critic if self.role == "critic" else self._train_actor
            metrics = {**learn(data), **self.snapshot_after(rollout_id)}
        self.next_rollout_id = rollout_id + 1
        kept, self._kept = self._kept, None
        steps = data[RECORD_STEP].tolist() if RECORD_STEP in data else ()
        recorded = next(iter(steps), rollout_id), None if kept is None else kept.arrays()
        self._recorded = (*self._recorded[-1:], recorded)
        return {**metrics, "seconds": time.perf_counter() - began}

    @register(Dispatch.MEGATRON_COMPUTE_PROTO, uneven="ragged")
    def compute_log_prob(self, rollout_data: Any) -> torch.Tensor | None:
        """Return log-probabilities of the tokens under the current actor, (B, T) float32, 0 at padding."""
        data = self._to_compute(rollout_data)
        return self.model.log_probs(data, self.args.temperature)

    @register(Dispatch.MEGATRON_COMPUTE_PROTO, uneven="ragged")
    def compute_old_log_prob(self, rollout_data: Any) -> torch.Tensor:
        """Return log-probabilities of the tokens under the old policy that ``args`` choose, (B, T) float32."""
        data = self._to_compute(rollout_data)
        if "old_log_probs" not in data and not self._old_log_probs(data):
            self._set(data, "old_log_probs", self.model.log_probs(data, self.args.temperature))
        return data["old_log_probs"]

    @register(Dispatch.MEGATRON_COMPUTE_PROTO, uneven="ragged")
    def compute_ref_log_prob(self, rollout_data: Any) -> torch.Tensor | None:
        """Return log-probabilities of the tokens under the reference, (B, T) float32, 0 at padding."""
        data = self._to_compute(rollout_data)
        if "ref" not in self.backup.names:
            raise RolloutDataError("compute_ref_log_prob(): there are no reference weights; call init(with_ref=True)")
        with self.backup.swapped("ref"):
            return self.model.log_probs(without_routes(data), self.args.temperature)

    @register(Dispatch.MEGATRON_COMPUTE_PROTO, uneven="ragged")
    def compute_values(self, rollout_data: Any) -> torch.Tensor | None:
        """Return the critic's value before each token, (B, T) float32, 0 at padding."""
        data = self._to_compute(rollout_data)
        return self.model.values(data)

    def _train_actor(self, data: Data) -> dict[str, float]:
        args = self.args
        # Also of a rollout that only the critic is trained on: a replay needs its values.
        # With these options, old log-probabilities are of the weights that generated the tokens.
        of_others = bool(args.use_rollout_logprobs or args.keep_old_actor)
        self._kept = KeptRows(data, of_others=of_others) if RECORD_ROWS in data else None
        metrics = {**self._about(data), **self._penalize_length(data), **self._filter_overlong(data)}
        waits = self._rollout_id < args.num_critic_only_steps
        if waits and args.kl_target is None:
            return {**metrics, **_mean([])}
        if "ref_log_probs" not in data and "ref" in self.backup.names:
            with self.backup.swapped("ref"):
                self._set(data, "ref_log_probs", self.model.log_probs(without_routes(data), args.temperature))
        if args.advantage_estimator == "dpo":  # its slopes are those of the present weights, not of an earlier call
            data.pop("old_log_probs", None)
        computed = "old_log_probs" not in data and self._old_log_probs(data)
        if waits:  # the critic adapts its coefficient in these rollouts too
            return {**metrics, **self._adapt_kl_coef(data), **_mean([])}
        if args.num_steps_per_rollout * args.ppo_epochs > 1:  # a single step chooses the same experts
            self._record_routes(data)
        if "advantages" not in data and args.advantage_estimator == "optimal_token_baseline":
            self._sum_pi_squared(data, computed=computed and not (args.use_rollout_logprobs or args.keep_old_actor))
        metrics |= self._correct(data)
        if "advantages" not in data:
            data["advantages"] = self._advantages(data)
            # Adapt it after the advantages, whose KL penalty uses this rollout's coefficient.
            metrics |= self._adapt_kl_coef(data)
        if data["advantages"].dim() == 1:
            data["advantages"] = data["advantages"][:, None] * (data["loss_mask"] != 0)
        # Set this after the advantages, in which completions that are left out of training still count.
        data["loss_mask"] = self._trained(data)
        metrics |= self._of_tokens("advantage", data["advantages"], data)
        loss = policy_loss(
            partial(function_of(args, "policy_loss_type"), args=args),
            kl_coef=args.kl_loss_coef,
            kl_estimator=args.kl_loss_type,
            unbiased_kl=args.use_unbiased_kl,
            entropy_coef=args.entropy_coef,
            opsm_delta=args.opsm_delta,
        )
        return {**metrics, **self._steps(data, loss)}

    def _train_critic(self, data: Data) -> dict[str, float]:
        metrics = {**self._about(data), **self._penalize_length(data), **self._filter_overlong(data)}
        if rejects(self.args):
            metrics["correction_rejected"] = self._correct(data)["correction_rejected"]
        if "values" not in data:
            self._set(data, "values", self.model.values(data))
        data["returns"] = value_targets(self._advantage_rows(data), self.args)
        metrics |= self._adapt_kl_coef(data)
        data["loss_mask"] = self._trained(data)
        metrics |= self._of_tokens("return", data["returns"], data)
        metrics |= self._of_tokens("value", data["values"], data)
        metrics |= self._explained_variance(data)
        return {**metrics, **self._steps(data, value_loss(eps_clip=self.args.value_clip or None))}

    def _steps(self, data: Data, loss: TokenLoss) -> dict[str, float]:
        """Take optimizer steps over the rows. Returns the mean of the steps' reports."""
        args = self.args
        length = args.loss_constant_length or args.rollout_max_response_len
        reports: list[StepReport] = []
        lr = 0.0
        totals = None
        kept = self._kept
        watches = kept is not None and ("old_log_probs" not in data or kept.of_others)
        if "rollout_ids" in data:
            totals = self._of_rollouts(data, data["loss_mask"].float().sum(1))
        # Until all steps are taken, nobody may take this for the state after a rollout.
        self.next_rollout_id = None
        for epoch in range(args.ppo_epochs):
            for rows in self._rows_of_steps(data, epoch):
                part = rows_of(data, rows)
                of_rollouts = None if totals is None else totals[rows]
                weights, count = token_weights(part["loss_mask"], args.loss_aggregation, length, of_rollouts)
                # Sum over all dp ranks, so that all skip the same steps. Otherwise, ranks would wait in a collective.
                total = sum(self._over_dp(float(count)))
                if not total:
                    continue  # no token of any rank counts
                part["loss_weights"] = weights / total
                if args.loss_aggregation == "constant" and args.policy_loss_type != "dpo":
                    # The weights of such a loss do not sum to 1, so they make no mean of a metric.
                    counted = part["loss_mask"].float()
                    part["metric_weights"] = counted / sum(self._over_dp(float(counted.sum())))
                part |= self._selected(part)
                lr = self._lr()
                temperature = args.temperature if self.role == "actor" else 1.0
                entropy = self.role == "actor" and bool(args.entropy_coef or args.calculate_entropy)
                of_tokens = kept.watch(loss, part) if kept is not None and watches else loss
                reports.append(self.model.train_step(part, of_tokens, lr=lr, temperature=temperature, entropy=entropy))
                if kept is not None:
                    kept.take()
                self.optimizer_step += math.isfinite(reports[-1].grad_norm)  # otherwise the fp16 step was skipped
        return {**_mean(reports, lr), **self._spread([report.cost for report in reports])}

    def _spread(self, costs: Sequence[float]) -> dict[str, float]:
        """Return the metric of how evenly the cost of each step is spread over the dp ranks, from this rank's costs."""
        steps = [of for of in zip(*self._over_dp(list(costs)), strict=True) if any(of)]
        return {"cost_spread": statistics.fmean(max(of) / statistics.fmean(of) for of in steps)} if steps else {}

    def _rows_of_steps(self, data: Data, epoch: int) -> list[slice | list[int]]:
        """Return this rank's rows of each optimizer step of an epoch. Of rollouts that are several rows, all are in one
        step, and the steps have equally many rollouts: what is in a step does not depend on the number of rows."""
        size, steps = len(data["input_ids"]), self.args.num_steps_per_rollout
        if "rollout_ids" in data:
            of_all = self._advantage_rows(data)
            rollouts = len(of_all.everywhere("rollout_ids"))
            numbers = step_numbers(of_all.numbers, rollouts, steps, self._order(rollouts, epoch))
            return [(numbers == step).nonzero()[:, 0].tolist() for step in range(steps)]
        order = self._order(size, self._dp_rank, epoch)
        before = sum(self._over_dp(size)[: self._dp_rank])
        ends = accumulate(sizes_of_steps(before, size, steps), initial=0)
        parts = [slice(*ends_of_step) for ends_of_step in pairwise(ends)]
        return [*parts] if order is None else [order[part].tolist() for part in parts]

    def _order(self, count: int, *numbers: int) -> torch.Tensor | None:
        """Return the order of this rank's rows, or of all rollouts, (count,) int64; None to keep it. It depends on
        nothing but the seed, the rollout, and the numbers, such as the epoch and the dp rank, so the tensor and
        pipeline parallel ranks of one dp rank have the same, and so has a rollout that is repeated after ranks were
        replaced."""
        if not self.args.shuffle_minibatches:
            return None
        seed = mixed_seed(self.args.seed, self._rollout_id, *numbers)
        return torch.randperm(count, generator=torch.Generator().manual_seed(seed))

    def _selected(self, part: Data) -> Data:
        """Choose tokens among those of the whole step, if the policy loss needs that, for one more forward pass."""
        select = SELECTIONS.get(function_of(self.args, "policy_loss_type")) if self.role == "actor" else None
        if select is None:
            return {}
        log_probs = self.model.log_probs(part, self.args.temperature)
        if log_probs is None:  # a pipeline stage that is not the last; its choice is not used
            log_probs = torch.zeros(part["input_ids"].shape)
        step = StepTokens(
            log_probs,
            part.get("old_log_probs", log_probs),
            part["advantages"],
            part["loss_mask"] != 0,
            gather=self._over_dp,
            seed=mixed_seed(self.args.seed, self.optimizer_step),
        )
        return {"selected_tokens": select(step, self.args)}

    def _lr(self) -> float:
        args = self.args
        rollouts = args.num_rollout - (args.num_critic_only_steps if self.role == "actor" else 0)
        steps = rollouts * args.num_steps_per_rollout * args.ppo_epochs
        return learning_rate(
            self.optimizer_step,
            lr=args.lr,
            warmup=args.lr_warmup_iters,
            decay_style=args.lr_decay_style,
            decay_steps=args.lr_decay_iters or max(steps, args.lr_warmup_iters + 1),
            min_lr=min(args.min_lr, args.lr),
        )

    def _advantages(self, data: Data) -> torch.Tensor:
        """Compute advantages, (B,) or (B, T)."""
        estimator = function_of(self.args, "advantage_estimator")
        made = estimator(self._advantage_rows(data), self.args)
        rows, tokens = data["input_ids"].shape
        if not isinstance(made, torch.Tensor) or made.shape not in ((rows,), (rows, tokens)):
            raise ValueError(
                f"advantage_estimator={self.args.advantage_estimator!r} returned {described(made)}; expected a tensor "
                f"of shape ({rows},) or ({rows}, {tokens}), for this dp rank's rows"
            )
        return made

    def _adapt_kl_coef(self, data: Data) -> dict[str, float]:
        """Set the KL coefficient of the next rollout, if ``kl_target`` is set. Returns the metrics of this one.

        ``args.kl_coef`` is the state, which snapshots and checkpoints contain. The actor and the critic, whose returns
        have the penalty too, compute the same from the same rows."""
        args = self.args
        if args.kl_target is None:
            return {}
        rows = self._advantage_rows(data)
        old, ref = self.of_last_stage((rows["old_log_probs"], rows["ref_log_probs"]))
        counts = rows["loss_mask"] != 0  # also of completions that are left out, whose rewards have the penalty too
        divergences = torch.where(counts, kl_estimate(old, ref, "k1").double(), 0.0).sum(1)
        lengths = rows.everywhere(counts.sum(1), "sum")
        completions = int((lengths > 0).sum())
        total = float((rows.everywhere(divergences, "sum") / lengths.clamp(min=1)).sum())
        coef, kl = args.kl_coef, total / max(completions, 1)
        if completions:
            self.next_rollout_id = None  # as in `_steps`: a repetition would adapt it twice
            args.kl_coef = adaptive_kl_coef(
                coef, kl, target=args.kl_target, horizon=args.kl_horizon, completions=completions
            )
        return {"kl_coef": coef, "reward_kl": kl}

    def _advantage_rows(self, data: Data) -> AdvantageRows:
        return AdvantageRows(data, self._dp_rank, self._over_dp, self.args.advantage_estimator)

    def _penalize_length(self, data: Data) -> dict[str, float]:
        """Subtract the overlong penalty from the rewards. Returns its metric."""
        args = self.args
        if not args.overlong_buffer_len or "rewards" not in data:
            return {}
        lengths = self._of_rollouts(data, (data["loss_mask"] != 0).sum(1))
        if len(lengths) and int(lengths.max()) > args.rollout_max_response_len and not self._told_length:
            self._told_length = True
            logger.warning(
                "overlong_buffer_len: a completion has %d tokens, more than rollout_max_response_len=%d, and gets the "
                "full penalty. The tokens of all turns of a session count, but that key limits each turn: leave "
                "overlong_buffer_len out, and penalize the length in the reward function",
                int(lengths.max()),
                args.rollout_max_response_len,
            )
        penalty = overlong_penalty(lengths, args.rollout_max_response_len, args.overlong_buffer_len)
        penalty *= args.overlong_penalty_factor
        data["rewards"] = data["rewards"] + penalty
        if "token_rewards" in data:
            data["token_rewards"] = data["token_rewards"] + token_rewards(penalty, data["loss_mask"])
        return {"overlong_penalty": self._mean_of_rollouts(data, penalty)}

    def _filter_overlong(self, data: Data) -> dict[str, float]:
        """Leave truncated completions out, as far as that is configured. Returns the metric."""
        if not self.args.overlong_filtering:
            return {}
        data["left_out"] = data["truncated"].bool()
        return {"overlong_filtered": self._mean_of_rollouts(data, data["left_out"])}

    def _of_rollouts(self, data: Data, of_rows: torch.Tensor) -> torch.Tensor:
        """Return for each row, (B,), the sum of its rollout's rows."""
        rows = self._advantage_rows(data)
        return rows.own(rows.everywhere(of_rows, "sum"))

    def _mean_of_rollouts(self, data: Data, of_rows: torch.Tensor) -> float:
        """Return the mean over the rollouts of all ranks of what is the same in each row of a rollout, (B,)."""
        of_all = self._advantage_rows(data).everywhere(of_rows)
        return float(of_all.double().mean()) if len(of_all) else 0.0

    def _trained(self, data: Data) -> torch.Tensor:
        """Return the ``loss_mask`` without the completions that are left out."""
        return data["loss_mask"] * ~data["left_out"][:, None] if "left_out" in data else data["loss_mask"]

    def _sum_pi_squared(self, data: Data, *, computed: bool) -> None:
        """Add ``sum_pi_squared``, ``current_log_probs`` of the same weights, and missing ``old_log_probs``.

        With z = logits / temperature, log p = z - log sum exp z. At half the temperature, log q = 2 z - log sum exp 2z.
        So the sum of p^2 is exp(2 log p - log q): one more forward pass, which every backend has.

        Args:
            computed: whether ``old_log_probs`` are those of the current weights.
        """
        temperature = self.args.temperature
        if "sum_pi_squared" in data and "old_log_probs" in data:
            return
        current = data["old_log_probs"] if computed else self.model.log_probs(data, temperature)
        if "old_log_probs" not in data:
            self._set(data, "old_log_probs", current)
        if "sum_pi_squared" not in data:
            self._set(data, "current_log_probs", current)
            halved = self.model.log_probs(data, temperature / 2)
            # In float64, it is not rounded below p^2, so no energy is negative.
            made = None if current is None or halved is None else (2 * current - halved).double().exp().clamp(0, 1)
            self._set(data, "sum_pi_squared", made)

    def _correct(self, data: Data) -> dict[str, float]:
        """Correct for the difference between ``rollout_log_probs`` and ``old_log_probs``: add weights, and leave out
        rejected completions. Returns the metrics, also of a rollout that has both without a correction."""
        correction = correction_of(self.args)
        if "rollout_log_probs" not in data:
            return {}
        if correction is None and ("old_log_probs" not in data or self.args.use_rollout_logprobs):
            return {}
        # All stages need the same loss_mask, so that they skip the same steps.
        old = self.of_last_stage(data["old_log_probs"])
        made = correct(old, data["rollout_log_probs"], self._trained(data), correction or Correction())
        parts = self._over_dp((made.sums, float(made.largest)))
        sums = torch.stack([part[0] for part in parts]).sum(0)
        if correction is not None:
            data["correction_weights"] = made.weights / (mean_weight(sums) if correction.normalize else 1.0)
            data["left_out"] = data.get("left_out", False) | made.rejected
        return correction_metrics(sums, [part[1] for part in parts])

    def _old_log_probs(self, data: Data) -> bool:
        """Add ``old_log_probs``, unless they equal those of the first step. Returns whether they were added."""
        args = self.args
        if args.use_rollout_logprobs:
            if "rollout_log_probs" not in data:
                raise missing_rollout_log_probs()
            data["old_log_probs"] = data["rollout_log_probs"]
        elif args.keep_old_actor:
            self._by_version(data)
        elif args.advantage_estimator != "sft" and (
            args.num_steps_per_rollout * args.ppo_epochs > 1
            or args.kl_coef
            or args.rollout_correction
            or args.advantage_estimator == "dpo"
        ):
            if args.routing_replay == "R2":
                self._record_routes(data)
            else:
                self._set(data, "old_log_probs", self.model.log_probs(data, args.temperature))
        return "old_log_probs" in data

    def _record_routes(self, data: Data) -> None:
        """With ``routing_replay="R2"``, add the experts of the current weights, and ``old_log_probs`` if the data has
        none."""
        if self.args.routing_replay == "R2" and ROUTED_EXPERTS not in data:
            log_probs, data[ROUTED_EXPERTS] = self.model.log_probs_and_routes(data, self.args.temperature)
            if "old_log_probs" not in data:
                self._set(data, "old_log_probs", log_probs)

    def _by_version(self, data: Data) -> None:
        """Compute old log-probabilities with the weight version that generated each token. Of versions that are gone
        since a resume, a recovery or a failed update, they are the rollout's."""
        kept = {version for of in self._versions.values() for version in of}
        given, latest = token_versions(data), torch.full(data["input_ids"].shape, self.weight_version)
        # Completions that a script has assembled may lack their versions; use the latest version for them.
        versions = latest if given is None else torch.where((given < 0) & (data["loss_mask"] != 0), latest, given)
        # Collect over all dp ranks, because each forward pass below has collectives that all ranks must enter.
        wanted = set().union(*self._over_dp(set(versions[data["loss_mask"] != 0].tolist())))
        missing = sorted(wanted - kept)
        too_old = [version for version in missing if version > self._lost_until and version not in self._failed]
        if too_old or (missing and "rollout_log_probs" not in data):
            raise RolloutDataError(
                f"rollout data has tokens of the weight versions {too_old or missing}, but keep_old_actor keeps "
                f"{sorted(kept) or 'none, because there was no update since init()'}. Train on rollouts of the "
                "last two versions"
            )
        old = torch.zeros(data["input_ids"].shape)
        if missing:
            if not self._told_lost and not self.rank:
                logger.warning(
                    "keep_old_actor: the weights of versions %s are gone since the run was resumed, ranks were "
                    "replaced or an update failed. The old log-probabilities of their tokens are the rollout's",
                    missing,
                )
            self._told_lost = True
            old = torch.where(torch.isin(versions, torch.tensor(missing)), data["rollout_log_probs"].float(), old)
        for name, of in self._versions.items():
            if wanted.isdisjoint(of):
                continue
            with self.backup.swapped(name):
                log_probs = self.model.log_probs(data, self.args.temperature)
            if log_probs is not None:
                old = torch.where(torch.isin(versions, torch.tensor(of)), log_probs, old)
        data["old_log_probs"] = old

    # --- rows -------------------------------------------------------------------------------------

    def _checked(self, rows: Callable[[], Data]) -> Data:
        """Return this rank's rows if the rows of all ranks are valid. Otherwise raise on all ranks, so that none waits
        for another one in a collective: of the ranks with the same rows too, one alone may fail to fetch them."""
        data: Data = {}
        error: Exception | None = None
        try:
            data = rows()
            if not _replays_rollout(self.args, self.role):
                data.pop(ROUTED_EXPERTS, None)
            config = self.model.hf_config
            check_rollout_data(data, self.args.vocab_size or tokens_of(config), RoutingShape.of(config))
            lengths = data["attention_mask"].bool().sum(1)
            if config.model_type in LEARNED_POSITIONS and bool((lengths > config.max_position_embeddings).any()):
                raise RolloutDataError(
                    f"rollout data has a row of {int(lengths.max())} tokens, but this {config.model_type!r} has only "
                    f"{config.max_position_embeddings} positions; leave out longer rows, as SFTData does with "
                    "max_prompt_len"
                )
        except Exception as raised:
            error = raised
        said = gathered((self._dp_rank, None if error is None else f"{type(error).__name__}: {error}", sorted(data)))
        if error is not None:
            raise error
        if wrong := {rank: why for rank, why, _ in said if why is not None}:
            first = min(wrong)
            raise RolloutDataError(
                f"the rows of the dp ranks {sorted(wrong)} are invalid; dp rank {first}: {wrong[first]}"
            )
        entries = [set(names) for *_, names in said]
        if some := set.union(*entries) - set.intersection(*entries):
            name = min(some)
            ranks = sorted({rank for rank, _, names in said if name in names})
            raise RolloutDataError(
                f"only the dp ranks {ranks} of {len({rank for rank, *_ in said})} have {name!r} in their rollout data; "
                "all dp ranks need the same entries"
            )
        return data

    def _rows(self, given: Any, computed: Mapping[str, Any]) -> Data:
        """Return this rank's rows, postprocessed, as CPU tensors, with what other ranks computed from them."""
        data = self._postprocessed(self._fetch(given), computed)
        others = {name: own_rows(value, self._dp_rank) for name, value in computed.items() if value is not None}
        return {**others, **data}

    def _postprocessed(self, given: Any, computed: Mapping[str, Any]) -> Data:
        path = self.args.rollout_data_postprocess_path
        if path is None:
            return _tensors(given)
        estimator = self.args.advantage_estimator
        # Clone the tokens, because the function may change rows in place.
        before = given["input_ids"].clone() if computed or estimator == "gae" else None
        made = _tensors(function_at(path, "rollout_data_postprocess_path")(self.args, given))
        if before is not None and not torch.equal(made.get("input_ids", before[:0]), before):
            raise RolloutDataError(
                f"rollout_data_postprocess_path={path!r} has changed, moved or dropped rows. With "
                f"advantage_estimator={estimator!r} it may change only rewards, because values were computed from the "
                "original rows"
            )
        return made

    def _to_compute(self, given: Any) -> Data:
        self._refuse_asleep("compute")
        return self._checked(lambda: _tensors(self._fetch(given)))

    def _fetch(self, given: Any) -> Any:
        return own_rows(given, self._dp_rank, dist.get_world_size(self.dp_group))

    def _set(self, data: Data, name: str, value: torch.Tensor | None) -> None:
        # A pipeline stage that is not the last has no outputs, and needs none: its loss function is never called.
        data[name] = torch.zeros(data["input_ids"].shape) if value is None else value

    def _about(self, data: Data) -> dict[str, float]:
        """Return metrics of the rollout itself, over all ranks."""
        tokens, real = float((data["loss_mask"] != 0).sum()), float((data["attention_mask"] != 0).sum())
        rewards = {name: data[name].double() for name in sorted(data) if name.startswith(REWARD_PART)}
        if "rewards" in data:
            rewards["reward"] = data["rewards"].double()
        shares = self._advantage_rows(data).shares  # so that a rollout counts once, whatever its number of rows
        parts = {name: float((shares * of_rows).sum()) for name, of_rows in rewards.items()}
        size, missing, known = len(data["input_ids"]), 0, 0
        if ROUTED_EXPERTS in data and (shape := RoutingShape.of(self.model.hf_config)) is not None:
            missing, known = missing_routes(data[ROUTED_EXPERTS], shape)
        said = self._over_dp((tokens, real, float(shares.sum()), size, self._staleness(data), parts, missing, known))
        tokens, real, rollouts, size = (sum(part[k] for part in said) for k in range(4))
        missing, known = (sum(part[k] for part in said) for k in (6, 7))
        return {
            "tokens": real,
            "completion_tokens": tokens,
            **({name: sum(part[5][name] for part in said) / rollouts for name in rewards} if size else {}),
            **({"rows_per_rollout": size / rollouts} if size and "rollout_ids" in data else {}),
            **({"replay/missing": missing / max(known, 1)} if ROUTED_EXPERTS in data else {}),
            **staleness_metrics(sum((part[4] for part in said), Counter())),
        }

    def _of_tokens(self, name: str, values: torch.Tensor, data: Data) -> dict[str, float]:
        """Return the mean, the largest and the smallest of a number per token, (B, T), over the trained tokens of all
        ranks."""
        of_rank = values[data["loss_mask"] != 0].double()
        said = (len(of_rank), float(of_rank.sum()), *map(float, of_rank.aminmax())) if len(of_rank) else None
        # Only the last stage has log-probabilities, on which advantages and returns may depend.
        parts = [part for part in self._over_dp(self.of_last_stage(said)) if part is not None]
        if not parts:
            return {}
        mean = sum(part[1] for part in parts) / sum(part[0] for part in parts)
        return {
            f"{name}/mean": mean,
            f"{name}/max": max(part[3] for part in parts),
            f"{name}/min": min(part[2] for part in parts),
        }

    def _explained_variance(self, data: Data) -> dict[str, float]:
        """Return what share of the returns' variance the values explain: 1 - Var(returns - values) / Var(returns), over
        the trained tokens of all ranks. Returns that are all equal have none to explain, and there is no such metric.
        """
        at = data["loss_mask"] != 0
        both = torch.stack([data["returns"][at], data["returns"][at] - data["values"][at]]).double()
        means = both.mean(1, keepdim=True)
        said = (both.shape[1], means[:, 0].tolist(), ((both - means) ** 2).sum(1).tolist()) if both.shape[1] else None
        parts = [part for part in self._over_dp(self.of_last_stage(said)) if part is not None]
        count = sum(part[0] for part in parts)
        squares = []  # sums over all tokens, from those of each rank about its own mean
        for one in (0, 1):
            mean = sum(part[0] * part[1][one] for part in parts) / count if count else 0.0
            squares.append(sum(part[2][one] + part[0] * (part[1][one] - mean) ** 2 for part in parts))
            if one == 0 and squares[0] <= count * (1e-6 * mean) ** 2:  # equal, but for what float32 rounds
                return {}
        return {"explained_variance": 1 - squares[1] / squares[0]}

    def _staleness(self, data: Data) -> Counter[int]:
        """Count this rank's generated tokens by how many weight versions they are behind the last one that was sent."""
        versions = token_versions(data)
        if versions is None or self.role == "critic":  # only the actor's weights have versions
            return Counter()
        known = versions[(data["loss_mask"] != 0) & (versions >= 0)]
        return Counter((self.weight_version - known).tolist())


def _mean(reports: Sequence[StepReport], lr: float = 0.0) -> dict[str, float]:
    """Return the metrics of a rollout: the mean of each metric over the steps that report it. There are no steps if no
    token counts, or if the actor waits for its critic."""
    found: dict[str, list[float]] = {}
    for report in reports:
        for name, value in {**report.sums, "grad_norm": report.grad_norm}.items():
            found.setdefault(name, []).append(value)
    means = {name: sum(values) / len(values) for name, values in found.items()}
    return {"loss": 0.0, "grad_norm": 0.0, **means, "lr": lr}


def _replays_rollout(args: Any, role: str) -> bool:
    """Whether this model computes tokens with the experts of the rollout: the actor does, also when it computes old
    log-probabilities. A critic is another model, and the reference is meant as it is, with its own router."""
    return role == "actor" and args.routing_replay == "R3"


def missing_rollout_log_probs() -> RolloutDataError:
    """The error of ``use_rollout_logprobs`` without them."""
    return RolloutDataError(
        "use_rollout_logprobs=True needs 'rollout_log_probs' in the rollout data; add them, or set "
        "use_rollout_logprobs=False"
    )


def check_entries(names: Collection[str], args: Any, role: str) -> None:
    """Check that rollout data has the entries that the configuration needs.

    Args:
        names: of the entries, with those that the ranks compute.
        args: the configuration.
        role: "actor" or "critic".

    Raises:
        RolloutDataError: one is missing.
    """
    if args.advantage_estimator == "dpo" and "advantages" in names:
        raise RolloutDataError("rollout data has 'advantages', which policy_loss_type='dpo' computes; leave them out")
    if role == "critic" or "advantages" not in names:
        needed = list(NEEDS.get(args.advantage_estimator, ()))
        if args.kl_coef and needed:  # an estimator of the user's may take its penalty from elsewhere
            needed.append("ref_log_probs")
        for name in needed:
            if name not in names and not (name == "values" and role == "critic"):  # it computes them itself
                raise missing(name, args.advantage_estimator)
        if args.advantage_estimator == "gdpo":
            check_reward_parts(names, args)
        # Supervised fine-tuning reads no rewards, and an estimator of the user's may read these.
        if "token_rewards" in names and args.advantage_estimator in NEEDS.keys() - TOKEN_REWARDS - {"sft"}:
            raise RolloutDataError(
                f"rollout data has 'token_rewards', but advantage_estimator={args.advantage_estimator!r} compares "
                f"completions by their 'rewards' alone; use one of {', '.join(sorted(TOKEN_REWARDS))}, or leave "
                "token_rewards out: AgentEngine without turn_discount"
            )
    if args.overlong_filtering and "truncated" not in names:
        raise RolloutDataError("overlong_filtering=True needs 'truncated' in the rollout data")
    if _replays_rollout(args, role) and ROUTED_EXPERTS not in names:
        raise RolloutDataError(
            f"routing_replay='R3' needs {ROUTED_EXPERTS!r} in the rollout data; give the rollout's engine "
            "return_routed_experts=True, or use 'R2'"
        )
    if role == "critic":
        if rejects(args) and "rollout_log_probs" not in names:
            raise missing("rollout_log_probs", args.advantage_estimator)
        if rejects(args) and "old_log_probs" not in names:
            raise RolloutDataError(
                f"rollout data has no 'old_log_probs', by which the critic leaves out what rollout_correction="
                f"{args.rollout_correction!r} rejects; call connect() with the actor's group, or add them"
            )
        return
    if args.kl_loss_coef and "ref_log_probs" not in names:
        raise RolloutDataError(
            f"kl_loss_coef={args.kl_loss_coef} needs 'ref_log_probs' in the rollout data, or init(with_ref=True)"
        )
    if "rollout_log_probs" not in names and "old_log_probs" not in names and args.use_rollout_logprobs:
        raise missing_rollout_log_probs()
    for name in ("rollout_correction", "opsm_delta"):
        if "rollout_log_probs" not in names and args[name] is not None:
            raise RolloutDataError(f"{name}={args[name]!r} needs 'rollout_log_probs' in the rollout data")


def staleness_metrics(counts: Mapping[int, int]) -> dict[str, float]:
    """Return the mean, the maximum and the shares of 0, 1, ... versions, from the number of tokens of each staleness.
    Empty if there are none."""
    total = sum(counts.values())
    if not total:
        return {}
    more = sum(count for behind, count in counts.items() if behind >= STALENESS_SHARES)
    return {
        "staleness/mean": sum(behind * count for behind, count in counts.items()) / total,
        "staleness/max": float(max(counts)),
        **{f"staleness/{behind}": counts.get(behind, 0) / total for behind in range(STALENESS_SHARES)},
        f"staleness/{STALENESS_SHARES}_or_more": more / total,
    }


def _tensors(given: Any) -> Data:
    kept: dict[str, Any] = {
        name: value
        for name, value in entries_of(given).items()
        # An array stays where it is an error, which the check then says.
        if (isinstance(value, torch.Tensor) and value.dim()) or (isinstance(value, np.ndarray) and is_tensor(name))
    }
    return kept


@contextmanager
def _profiled(args: Any, role: str, rollout_id: int, rank: int) -> Iterator[None]:
    """Record what runs inside, for rollouts from ``profile_step_start`` to before ``profile_step_end``, into
    ``profile_dir/actor_rollout_0000003_rank_0.json``: a Chrome trace for Perfetto."""
    start, end = args.profile_step_start, args.profile_step_end
    if start is None or not start <= rollout_id < end:
        yield
        return
    with torch.profiler.profile() as profiler:  # by default, of the CPU and whatever device torch can profile
        yield
    folder = Path(args.profile_dir)
    folder.mkdir(parents=True, exist_ok=True)
    profiler.export_chrome_trace(str(folder / f"{role}_rollout_{rollout_id:07d}_rank_{rank}.json"))
