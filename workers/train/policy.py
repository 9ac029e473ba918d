"""PolicyTrainWorker: policy-gradient training (GRPO, PPO) of a `TrainModel`, whichever backend runs it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from dispatch.rows import share_rows
from single_controller import Dispatch, register
from workers.seeds import mixed_seed
from workers.train.advantages import gae, group_advantages, moments, token_rewards, whiten
from workers.train.hf_files import tokens_of
from workers.train.losses import kl_estimate, policy_loss, token_weights, value_loss
from workers.train.model import StepReport, TokenLoss
from workers.train.model_worker import ModelWorker
from workers.train.postprocess import function_at
from workers.train.profiling import profiled
from workers.train.rollout_data import RolloutDataError, check_rollout_data
from workers.train.schedule import learning_rate
from workers.train.worker import own_rows

Data = dict[str, torch.Tensor]


class PolicyTrainWorker(ModelWorker):
    """How a policy and its critic learn from rollout data. What they learn with is told by ``args``: the estimator of
    advantages, the loss, and how rows are dealt to steps of the optimizer."""

    @classmethod
    def check_rows(cls, args: Any, rows: Any) -> None:
        """See `TrainWorker.check_rows`. What a user's function makes of the rows first is checked on the ranks."""
        if args.rollout_data_postprocess_path is None:
            check_rollout_data(rows, args.vocab_size)

    # --- learning ---------------------------------------------------------------------------------------

    def train(self, rollout_id: int, rollout_data_ref: Any, **computed: Any) -> dict[str, float]:
        """See `TrainWorker.train`."""
        if self.args.debug_rollout_only:
            return {}
        began = time.perf_counter()
        self._refuse_asleep("train")
        # Dropout, too, is the same in a run that goes on from a checkpoint.
        self.seed(mixed_seed(self.args.seed, rollout_id, self._dp_rank))
        with profiled(self.args, self.role, rollout_id, self.rank):
            data = self._checked(lambda: self._rows(rollout_data_ref, computed))
            learn = self._train_critic if self.role == "critic" else self._train_actor
            metrics = learn(data)
        return {**metrics, "seconds": time.perf_counter() - began}

    @register(Dispatch.MEGATRON_COMPUTE_PROTO, uneven="ragged")
    def compute_log_prob(self, rollout_data: Any) -> torch.Tensor | None:
        """Log-probabilities of the tokens under the actor as it is, (B, T) float32, 0 where there is none."""
        data = self._to_compute(rollout_data)
        return self.model.log_probs(data, self.args.temperature)

    @register(Dispatch.MEGATRON_COMPUTE_PROTO, uneven="ragged")
    def compute_old_log_prob(self, rollout_data: Any) -> torch.Tensor:
        """Log-probabilities of the tokens under the policy that the ratio is to, as ``args`` has it: (B, T) float32."""
        data = self._to_compute(rollout_data)
        if "old_log_probs" not in data and not self._old_log_probs(data):
            self._set(data, "old_log_probs", self.model.log_probs(data, self.args.temperature))
        return data["old_log_probs"]

    @register(Dispatch.MEGATRON_COMPUTE_PROTO, uneven="ragged")
    def compute_ref_log_prob(self, rollout_data: Any) -> torch.Tensor | None:
        """Log-probabilities of the tokens under the reference, (B, T) float32, 0 where there is none."""
        data = self._to_compute(rollout_data)
        if "ref" not in self.backup.names:
            raise RolloutDataError("there is no reference: init(with_ref=True) keeps one, for kl_coef and kl_loss_coef")
        with self.backup.swapped("ref"):
            return self.model.log_probs(data, self.args.temperature)

    @register(Dispatch.MEGATRON_COMPUTE_PROTO, uneven="ragged")
    def compute_values(self, rollout_data: Any) -> torch.Tensor | None:
        """What the critic expects before each token, (B, T) float32, 0 where there is nothing."""
        data = self._to_compute(rollout_data)
        return self.model.values(data)

    def _train_actor(self, data: Data) -> dict[str, float]:
        args = self.args
        metrics = self._about(data)
        if "ref_log_probs" not in data and "ref" in self.backup.names:
            with self.backup.swapped("ref"):
                self._set(data, "ref_log_probs", self.model.log_probs(data, args.temperature))
        if args.kl_loss_coef and "ref_log_probs" not in data:
            raise RolloutDataError(
                f"kl_loss_coef={args.kl_loss_coef} needs init(with_ref=True), or 'ref_log_probs' in the data"
            )
        if "old_log_probs" not in data:
            self._old_log_probs(data)
        if "advantages" not in data:
            data["advantages"] = self._advantages(data)
        elif data["advantages"].dim() == 1:
            data["advantages"] = data["advantages"][:, None] * (data["loss_mask"] != 0)
        loss = policy_loss(
            eps_clip=args.eps_clip,
            eps_clip_high=args.eps_clip_high,
            kl_coef=args.kl_loss_coef,
            kl_estimator=args.kl_loss_type,
            entropy_coef=args.entropy_coef,
        )
        return {**metrics, **self._steps(data, loss)}

    def _train_critic(self, data: Data) -> dict[str, float]:
        metrics = self._about(data)
        if "values" not in data:
            self._set(data, "values", self.model.values(data))
        _, data["returns"] = self._gae(data)
        return {**metrics, **self._steps(data, value_loss(eps_clip=self.args.value_clip or None))}

    def _steps(self, data: Data, loss: TokenLoss) -> dict[str, float]:
        """Go through the rows in steps of the optimizer. The mean of what the steps report."""
        args = self.args
        reports: list[StepReport] = []
        lr = 0.0
        for _ in range(args.ppo_epochs):
            for share in share_rows(len(data["input_ids"]), args.num_steps_per_rollout, "ragged"):
                rows = slice(*share.ranges[0])
                part = {name: value[rows] for name, value in data.items()}
                weights, count = token_weights(part["loss_mask"], args.loss_aggregation)
                total = sum(self._over_dp(float(count)))
                if not total:
                    continue  # no token of any rank counts
                part["loss_weights"] = weights / total
                lr = self._lr()
                temperature = args.temperature if self.role == "actor" else 1.0
                entropy = self.role == "actor"
                reports.append(self.model.train_step(part, loss, lr=lr, temperature=temperature, entropy=entropy))
                self.optimizer_step += math.isfinite(reports[-1].grad_norm)  # else an fp16 step was left out
        sums: dict[str, float] = {"grad_norm": 0.0}
        for report in reports:
            for name, value in {**report.sums, "grad_norm": report.grad_norm}.items():
                sums[name] = sums.get(name, 0.0) + value
        return {**{name: value / max(len(reports), 1) for name, value in sums.items()}, "lr": lr}

    def _lr(self) -> float:
        args = self.args
        steps = args.num_rollout * args.num_steps_per_rollout * args.ppo_epochs
        return learning_rate(
            self.optimizer_step,
            lr=args.lr,
            warmup=args.lr_warmup_iters,
            decay_style=args.lr_decay_style,
            decay_steps=args.lr_decay_iters or max(steps, args.lr_warmup_iters + 1),
            min_lr=min(args.min_lr, args.lr),
        )

    def _advantages(self, data: Data) -> torch.Tensor:
        """(B, T), from rewards."""
        args = self.args
        counts = data["loss_mask"] != 0
        if args.advantage_estimator == "gae":
            advantages, _ = self._gae(data)
            if not args.normalize_advantages:
                return advantages
            sums = torch.stack(self._over_dp(moments(advantages, counts))).sum(0)
            return whiten(advantages, counts, sums)
        for name in ("rewards", "group_ids"):
            if name not in data:
                raise RolloutDataError(f"rollout data has no {name!r}: GRPO needs rewards and group_ids, or advantages")
        # A group's answers may be on several ranks.
        everyone = self._over_dp((data["rewards"].float(), data["group_ids"]))
        own = self._dp_rank
        rewards, groups = (torch.cat([part[k] for part in everyone]) for k in (0, 1))
        before = sum(len(part[0]) for part in everyone[:own])
        of_rows = group_advantages(rewards, groups, divide_by_std=args.grpo_std_normalization)
        return of_rows[before : before + len(counts), None] * counts

    def _gae(self, data: Data) -> tuple[torch.Tensor, torch.Tensor]:
        """Advantages and returns, (B, T) each."""
        args = self.args
        for name in ("rewards", "values"):
            if name not in data:
                raise RolloutDataError(
                    f"rollout data has no {name!r}: the advantage_estimator 'gae' needs rewards, and a critic's values "
                    "(connect() one)"
                )
        kl = None
        if args.kl_coef:
            old = data.get("old_log_probs")
            if old is None or "ref_log_probs" not in data:
                raise RolloutDataError("kl_coef needs 'old_log_probs' and 'ref_log_probs' in the rollout data")
            kl = kl_estimate(old, data["ref_log_probs"], "k1")
        rewards = token_rewards(data["rewards"], data["loss_mask"], kl=kl, kl_coef=args.kl_coef)
        return gae(rewards, data["values"], data["loss_mask"], gamma=args.gamma, lam=args.gae_lambda)

    def _old_log_probs(self, data: Data) -> bool:
        """Add the log-probabilities that the ratio is to, where they are not simply those of the first step. Whether it
        did."""
        args = self.args
        if args.use_rollout_logprobs:
            if "rollout_log_probs" not in data:
                raise RolloutDataError("use_rollout_logprobs=True, but the rollout data has no 'rollout_log_probs'")
            data["old_log_probs"] = data["rollout_log_probs"]
        elif args.keep_old_actor:
            self._by_version(data)
        elif args.num_steps_per_rollout * args.ppo_epochs > 1 or args.kl_coef:
            self._set(data, "old_log_probs", self.model.log_probs(data, args.temperature))
        return "old_log_probs" in data

    def _by_version(self, data: Data) -> None:
        """Old log-probabilities by the very weights that generated each row."""
        kept = {version: name for name, version in self._versions.items()}
        versions = data.get("weight_versions")
        if versions is None:
            versions = torch.full((len(data["input_ids"]),), self.weight_version)
        wanted = sorted(set().union(*self._over_dp(set(versions.tolist()))))
        if missing := [version for version in wanted if version not in kept]:
            raise RolloutDataError(
                f"rollout data of the weight versions {missing}; keep_old_actor has those of "
                f"{sorted(kept) or 'no update since init()'}: train on rollouts of the last two updates"
            )
        for version in wanted:
            with self.backup.swapped(kept[version]):
                log_probs = self.model.log_probs(data, self.args.temperature)
            if log_probs is not None:
                before = data.get("old_log_probs", torch.zeros_like(log_probs))
                data["old_log_probs"] = torch.where((versions == version)[:, None], log_probs, before)
        if "old_log_probs" not in data:
            data["old_log_probs"] = torch.zeros(data["input_ids"].shape)

    # --- the inside -------------------------------------------------------------------------------------

    def _checked(self, rows: Callable[[], Data]) -> Data:
        """This rank's rows, if those of all data-parallel ranks are right; else it is an error on each of them, and
        none is left waiting for the others."""
        data: Data = {}
        error: Exception | None = None
        try:
            data = rows()
            check_rollout_data(data, self.args.vocab_size or tokens_of(self.model.hf_config))
        except Exception as raised:
            error = raised
        said = self._over_dp((None if error is None else f"{type(error).__name__}: {error}", sorted(data)))
        if error is not None:
            raise error
        if wrong := {rank: why for rank, (why, _) in enumerate(said) if why is not None}:
            first = min(wrong)
            raise RolloutDataError(f"the rows of the dp ranks {sorted(wrong)} are not right; {first}: {wrong[first]}")
        entries = [set(names) for _, names in said]
        if some := set.union(*entries) - set.intersection(*entries):
            name = min(some)
            having = [rank for rank, names in enumerate(entries) if name in names]
            raise RolloutDataError(f"only the dp ranks {having} of {len(said)} have {name!r} in their rollout data")
        return data

    def _rows(self, given: Any, computed: Mapping[str, Any]) -> Data:
        """This rank's rows, postprocessed, as tensors on the CPU; with what others have computed of them."""
        data = self._postprocessed(self._fetch(given))
        others = {name: own_rows(value, self._dp_rank) for name, value in computed.items() if value is not None}
        return {**others, **data}

    def _postprocessed(self, given: Any) -> Data:
        path = self.args.rollout_data_postprocess_path
        if path is None:
            return _tensors(given)
        by_gae = self.args.advantage_estimator == "gae"
        before = given["input_ids"].clone() if by_gae else None
        made = _tensors(function_at(path, "rollout_data_postprocess_path")(self.args, given))
        if before is not None and not torch.equal(made.get("input_ids", before[:0]), before):
            raise RolloutDataError(
                f"rollout_data_postprocess_path={path!r} has changed, moved or dropped rows; with gae it may change "
                "what they are worth, but values were computed of the rows as they came"
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
        """What the rollout itself was like, over all ranks."""
        tokens, real = float((data["loss_mask"] != 0).sum()), float((data["attention_mask"] != 0).sum())
        rewards = data.get("rewards", torch.zeros(0)).double()
        sums = self._over_dp((tokens, real, float(rewards.sum()), float(len(rewards))))
        tokens, real, reward, rows = (sum(part[k] for part in sums) for k in range(4))
        return {"tokens": real, "answer_tokens": tokens, **({"reward": reward / rows} if rows else {})}


def _tensors(given: Any) -> Data:
    if not isinstance(given, Mapping) and not hasattr(given, "keys"):
        raise RolloutDataError(f"rollout data is a TensorDict or a dict of tensors, got {type(given).__name__}")
    entries = {str(name): given[name] for name in given.keys()}  # noqa: SIM118
    return {name: value for name, value in entries.items() if isinstance(value, torch.Tensor) and value.dim()}
