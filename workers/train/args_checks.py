"""Checks of the values of a training run's configuration, and the functions that it names."""

from __future__ import annotations

import dataclasses
import difflib
import importlib
import logging
import math
import operator
import re
import warnings
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from single_controller import SingleControllerError
from workers.algorithms.registry import NEEDS_GROUPS, POLICY_LOSS_KEYS, SUPERVISED, name_of, path_of
from workers.data.rollout_data import LARGEST_SET
from workers.lora import LoraSettings

logger = logging.getLogger(__name__)

ROLES = ("actor", "critic")

READY_REWARDS = {
    "exact_match": "workers.rollout.rewards.answers.exact_match",
    "number_match": "workers.rollout.rewards.answers.number_match",
    "math_match": "workers.rollout.rewards.answers.math_match",
    "code_tests": "workers.rollout.rewards.code_reward.code_tests",
}
"""The names that ``reward_function`` may have, besides paths."""

_UPDATE_AT_MOST = 0.8
"""The longest time for a weight update, as a share of the timeout of the collectives."""


class TrainArgsError(SingleControllerError, ValueError):
    """A key of the configuration does not exist, or its value has the wrong type or is out of range."""


_WITHIN = {"of at least": operator.ge, "above": operator.gt, "at most": operator.le, "below": operator.lt}


def check_value(name: str, item: dataclasses.Field[Any], value: Any) -> None:
    """Check a value against the choices and limits of its key."""
    choices = item.metadata["choices"]
    if value is None:
        return
    if choices and value not in choices:
        close = difflib.get_close_matches(str(value), choices, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise TrainArgsError(f"args.{name}={value!r}: expected one of {', '.join(map(repr, choices))}{hint}")
    limits = {word: limit for word, limit in item.metadata["limits"].items() if limit is not None}
    if not all(_WITHIN[word](value, limit) for word, limit in limits.items()):
        said = " and ".join(f"{word} {limit}" for word, limit in limits.items())
        raise TrainArgsError(f"args.{name}={value!r}: expected a number {said}")


def check_rollout(args: Any) -> None:
    """Check the keys of asynchronous rollout and dynamic sampling together."""
    for name, needed in (
        ("max_staleness", args.async_rollout or not args.max_staleness),
        ("rollout_window", args.rollout_order == "window" or args.rollout_window is None),
        ("dynamic_sampling_max", args.dynamic_sampling or args.dynamic_sampling_max is None),
    ):
        if not needed:
            other = {"max_staleness": "async_rollout=True", "rollout_window": "rollout_order='window'"}
            raise TrainArgsError(f"args.{name}={args[name]} needs {other.get(name, 'dynamic_sampling=True')}")
    streams = [name for name in ("async_rollout", "dynamic_sampling") if args[name]]
    shares = [name for name in ("colocate", "offload_train") if args[name]]
    if streams and shares:
        raise TrainArgsError(
            f"args.{streams[0]} and {shares[0]} are both set, but rollout workers that generate while others train "
            "need devices of their own; set only one of them"
        )


def check_together(args: Any) -> None:
    """Check the keys together."""
    _check_routing_replay(args)
    if args.hf_checkpoint is not None and args.hf_config is not None:
        raise TrainArgsError("args.hf_checkpoint and args.hf_config are both set; set only one of them")
    if args.hf_config is not None and "model_type" not in args.hf_config:
        raise TrainArgsError("args.hf_config has no 'model_type', such as 'llama'")
    if args.save_keep_every is not None and args.save_keep is None:
        raise TrainArgsError("args.save_keep_every needs save_keep; without it, all checkpoints are kept")
    if args.save_keep == 1 and args.advantage_estimator == "gae":
        raise TrainArgsError(
            "args.save_keep=1 would leave no checkpoint that actor and critic both have if the run is killed between "
            "their saves; use at least 2"
        )
    if args.keep_old_actor and not args.enable_weights_backuper:
        raise TrainArgsError(
            "args.keep_old_actor needs enable_weights_backuper=True, which keeps the copy of the weights"
        )
    stale = f"max_staleness={args.max_staleness}" if args.max_staleness > 1 else f"on_stale={args.on_stale!r}"
    if args.keep_old_actor and args.async_rollout and (args.max_staleness > 1 or args.on_stale == "train"):
        raise TrainArgsError(
            f"args.keep_old_actor keeps the weights of the last two updates, but with {stale} tokens may be older; set "
            "max_staleness=1 and another on_stale, or use_rollout_logprobs=True instead of keep_old_actor"
        )
    most = _UPDATE_AT_MOST * args.distributed_timeout_minutes
    if (args.update_weights_timeout_minutes or 0) > most:
        raise TrainArgsError(
            f"args.update_weights_timeout_minutes={args.update_weights_timeout_minutes} is more than {_UPDATE_AT_MOST} "
            f"of distributed_timeout_minutes={args.distributed_timeout_minutes}: train ranks that wait for the update "
            "in a collective would fail first. Lower it, or raise distributed_timeout_minutes"
        )
    if args.update_weights_transport == "disk" and not args.update_weights_disk_dir:
        raise TrainArgsError("args.update_weights_transport='disk' needs update_weights_disk_dir")
    if args.update_weights_delta and args.update_weights_transport == "disk":
        raise TrainArgsError(
            "args.update_weights_delta does not go with update_weights_transport='disk', whose files have whole tensors"
        )
    if args.update_weights_delta and args.update_weights_double_buffer is False:
        raise TrainArgsError(
            "args.update_weights_delta needs rollout workers that keep the weights before: leave out "
            "update_weights_double_buffer=False"
        )
    _check_data(args)
    for name in ("save_hf", "critic_save_hf"):
        try:
            str(args[name] or "").format(rollout_id=0)
        except (LookupError, ValueError) as error:
            raise TrainArgsError(
                f"args.{name}={args[name]!r}: the only placeholder is {{rollout_id}} ({type(error).__name__}: {error})"
            ) from None
    _check_exports(args)
    _check_lora(args)
    _check_exact(args)
    for name, off, why in (
        ("sequence_packing", (None, False), "megatron packs with Transformer Engine only"),
        ("sequence_parallel_size", (1,), "megatron's own context parallelism needs Transformer Engine"),
    ):
        if args[name] not in off and args.exact:
            raise TrainArgsError(
                f"args.{name}={args[name]} does not go with exact=True: its attention needs rows of their own"
            )
        if args[name] not in off and args.train_backend != "fsdp":
            raise TrainArgsError(f"args.{name}={args[name]} needs train_backend='fsdp': {why}")
    cost = args.sequence_cost
    if cost is not None and not (len(cost) == 2 and all(0 <= one < math.inf for one in cost) and any(cost)):
        raise TrainArgsError(
            f"args.sequence_cost={list(cost)}: expected two numbers, a and b of the cost a L + b L^2 of a row of L "
            "tokens, at least 0 and not both 0"
        )
    if (args.profile_step_start is None) != (args.profile_step_end is None):
        raise TrainArgsError("set both args.profile_step_start and args.profile_step_end, or neither")
    if args.profile_step_start is not None and args.profile_step_end <= args.profile_step_start:
        raise TrainArgsError(
            f"args.profile_step_end={args.profile_step_end}: expected a rollout id above "
            f"profile_step_start={args.profile_step_start}"
        )
    for warmup in ("lr_warmup_iters", "critic_lr_warmup_iters"):
        if args.lr_decay_style != "constant" and (args.lr_decay_iters or args[warmup]) < args[warmup]:
            raise TrainArgsError(
                f"args.lr_decay_iters={args.lr_decay_iters} is less than {warmup}={args[warmup]}; the decay "
                "ends at lr_decay_iters, counted from the first step of the warm-up"
            )
    if args.fp32_lm_head and args.param_dtype == "fp32":
        raise TrainArgsError("args.fp32_lm_head=True has no effect with param_dtype='fp32'; leave it out")
    if args.train_backend == "fsdp" and args.param_dtype == "fp16":
        raise TrainArgsError("args.param_dtype='fp16': use 'bf16' or 'fp32' with fsdp, which does not scale the loss")
    if args.on_reward_timeout is not None and args.reward_timeout is None:
        raise TrainArgsError(f"args.on_reward_timeout={args.on_reward_timeout} needs reward_timeout")
    if args.eval_temperature == 0 and args.n_samples_per_eval_prompt > 1:
        raise TrainArgsError(
            f"args.n_samples_per_eval_prompt={args.n_samples_per_eval_prompt}: with eval_temperature=0 all completions "
            "of a prompt are the same; use 1"
        )
    actor, critic = actor_size(args), critic_size(args)
    if args.advantage_estimator == "gae" and math.prod(actor) != math.prod(critic):
        raise TrainArgsError(
            f"args.critic_num_nodes * critic_num_gpus_per_node is {math.prod(critic)}, but actor_num_nodes * "
            f"actor_num_gpus_per_node is {math.prod(actor)}; actor and critic need the same number of ranks"
        )
    if args.ckpt_step is not None and args.load is None and args.critic_load is None:
        raise TrainArgsError(f"args.ckpt_step={args.ckpt_step} needs load, the folder that has this checkpoint")
    if args.profile_step_start is not None and not args.profile_dir:
        raise TrainArgsError("args.profile_step_start needs profile_dir")


def _check_routing_replay(args: Any) -> None:
    """Check the keys of routing replay, and set ``routing_replay`` to what slime's names for it say."""
    # slime sets the first with the second.
    flag = next((name for name in ("use_rollout_routing_replay", "use_routing_replay") if args[name]), None)
    if flag is not None:
        named = "R2" if flag == "use_routing_replay" else "R3"
        if args.routing_replay not in (None, named):
            raise TrainArgsError(
                f"args.routing_replay={args.routing_replay!r} and {flag}=True, which is {named!r}, are both set; leave "
                "one of them out"
            )
        args.routing_replay = named
    if args.routing_replay is None:
        return
    for name in ("use_rollout_logprobs", "keep_old_actor"):
        if args.routing_replay == "R2" and args[name]:
            raise TrainArgsError(
                f"args.routing_replay='R2' does not go with {name}=True: it records the experts in the pass for old "
                "log-probabilities with the current weights, which is not taken then. Use 'R3'"
            )


def _check_lora(args: Any) -> None:
    if not args.lora_rank:
        return
    if args.train_backend != "fsdp":
        raise TrainArgsError(
            f"args.lora_rank={args.lora_rank} needs train_backend='fsdp'; {args.train_backend} trains all weights"
        )
    if args.ref_load is not None:
        raise TrainArgsError(
            f"args.ref_load={args.ref_load!r} does not go with lora_rank={args.lora_rank}: the reference is the base "
            "model, without a copy of its weights; leave it out"
        )
    if args.fp32_lm_head and "lm_head" in args.lora_target_modules:
        raise TrainArgsError(
            "args.fp32_lm_head=True does not go with lm_head in lora_target_modules: the adapter's part of the logits "
            "would still be in param_dtype. Leave one of them out"
        )
    try:
        LoraSettings.from_args(args)
    except ValueError as error:
        raise TrainArgsError(f"args.lora_target_modules={list(args.lora_target_modules)}: {error}") from None


def _check_data(args: Any) -> None:
    weights, data = args.rollout_data_weights, args.rollout_data
    for name in ("rollout_data", "eval_data"):
        if args[name] is not None and not len(args[name]):
            raise TrainArgsError(f"args.{name} is an empty list; name a file, or leave it out")
    if args.reward_function is not None and args.reward_function not in READY_REWARDS:
        if "." not in args.reward_function:
            raise TrainArgsError(
                f"args.reward_function={args.reward_function!r}: expected {', '.join(READY_REWARDS)}, or the dotted "
                "path of a function"
            )
        function_at(args.reward_function, "reward_function")
    if weights is None:
        return
    if data is None:
        raise TrainArgsError(f"args.rollout_data_weights={list(weights)} needs rollout_data")
    if not any(set("*?[") & set(one) for one in data) and len(weights) != len(data):
        raise TrainArgsError(
            f"args.rollout_data_weights={list(weights)}: rollout_data has {len(data)} entries, and each needs a weight"
        )
    if wrong := [one for one in weights if not (math.isfinite(one) and one > 0)]:
        raise TrainArgsError(f"args.rollout_data_weights={list(weights)}: {wrong[0]!r} is not a number above 0")


def _check_exact(args: Any) -> None:
    if not args.exact:
        return
    if args.train_backend != "fsdp":
        raise TrainArgsError(
            f"args.exact=True needs train_backend='fsdp': {args.train_backend} has a model of its own, whose norms and "
            "attention round differently from HFEngine's, and tensor parallel ranks add partial sums"
        )
    if args.lora_rank and args.lora_dropout:
        raise TrainArgsError(
            f"args.exact=True does not go with lora_dropout={args.lora_dropout}: training would compute other "
            "log-probabilities than the rollout did"
        )


def _check_exports(args: Any) -> None:
    """An export into a checkpoint's folder would mix with it, and be deleted with it. Files of the critic in a folder
    of the actor would replace those. An export into the folder that training starts from would delete its weights,
    which an adapter, the reference and a restart need, and its generation config, which is copied from there."""
    from workers.train.checkpoints import folder_of

    for name in ("save_hf", "critic_save_hf"):
        for source in ("hf_checkpoint", "ref_load") if args[name] else ():
            # What an earlier run has exported under the same pattern may be of a rollout that this run has, too.
            ids = [0, *(int(one) for one in re.findall(r"\d+", args[source] or "") if int(one) < args.num_rollout)]
            folders = {Path(args[name].format(rollout_id=one)).resolve() for one in ids}
            if args[source] and Path(args[source]).resolve() in folders:
                raise TrainArgsError(
                    f"args.{name}={args[name]!r} is also {source}, whose weights an export would delete; choose another"
                )

    for name in ("save", "save_hf"):
        own = args[f"critic_{name}"]
        if args.advantage_estimator not in _WITHOUT_CRITIC and own and args[name] and Path(own) == Path(args[name]):
            raise TrainArgsError(f"args.critic_{name}={own!r} is also {name}; leave it out, or choose another folder")

    for save in (args.save, critic_folder(args, "save")):
        for name in ("save_hf", "critic_save_hf"):
            if save and args[name] and Path(args[name].format(rollout_id=0)).is_relative_to(Path(save, folder_of(0))):
                raise TrainArgsError(f"args.{name}={args[name]!r} is a checkpoint's folder in save; choose another")


def check_algorithm(args: Any) -> None:
    """Check the keys of the algorithm together. Registered names are replaced by paths, which the ranks can import, and
    paths of built-in functions by their names, by which the checks know them."""
    for key in ("policy_loss_type", "advantage_estimator"):
        try:
            path = path_of(key, args[key])
        except ValueError as error:
            raise TrainArgsError(f"args.{key}={args[key]!r}: {error}") from None
        name = name_of(key, path)
        if name == path:
            function_at(path, key)
        args[key] = name
    _complete_supervised(args)
    _check_estimator(args)
    _complete_policy_loss(args)
    if args.kl_target is not None and not args.kl_coef:
        raise TrainArgsError(
            f"args.kl_target={args.kl_target} adapts kl_coef, which is 0 and would stay 0; set kl_coef to begin with"
        )
    if args.num_critic_only_steps and args.advantage_estimator != "gae" and "." not in args.advantage_estimator:
        raise TrainArgsError(
            f"args.num_critic_only_steps={args.num_critic_only_steps} needs advantage_estimator='gae': "
            f"{args.advantage_estimator!r} has no critic"
        )
    if args.shuffle_minibatches and args.num_steps_per_rollout == 1:
        raise TrainArgsError(
            "args.shuffle_minibatches=True needs num_steps_per_rollout above 1: a single step takes all rows"
        )
    if args.overlong_buffer_len > args.rollout_max_response_len:
        raise TrainArgsError(
            f"args.overlong_buffer_len={args.overlong_buffer_len} is more than rollout_max_response_len="
            f"{args.rollout_max_response_len}, the length at whose end it is"
        )
    bounds = ("rollout_correction_low", "rollout_correction_high", "rollout_rejection_low", "rollout_rejection_high")
    if args.rollout_correction is None:
        if given := [name for name in (*bounds, "rollout_correction_normalize") if args[name] not in (None, False)]:
            raise TrainArgsError(f"args.{given[0]} needs rollout_correction")
        return
    if args.use_rollout_logprobs:
        raise TrainArgsError(
            "args.rollout_correction compares the rollout's log-probabilities with the trainer's, which "
            "use_rollout_logprobs=True does not compute; set only one of them"
        )
    from workers.algorithms.corrections import correction_of

    try:
        correction_of(args)
    except ValueError as error:
        raise TrainArgsError(f"args.rollout_correction={args.rollout_correction!r}: {error}") from None


def _complete_supervised(args: Any) -> None:
    """Set the advantage estimator of `SUPERVISED` losses, and refuse what would make them others."""
    loss, estimator = args.policy_loss_type, args.advantage_estimator
    if loss not in SUPERVISED:
        if estimator in SUPERVISED:
            raise TrainArgsError(
                f"args.advantage_estimator={estimator!r} comes with policy_loss_type={estimator!r}; set that instead"
            )
        return
    if estimator not in (loss, "grpo"):  # the default
        raise TrainArgsError(
            f"args.advantage_estimator={estimator!r} has no effect with policy_loss_type={loss!r}; leave it out"
        )
    args.advantage_estimator = loss
    for key, without in (
        ("kl_coef", 0),
        ("kl_target", None),
        ("overlong_buffer_len", 0),
        ("overlong_filtering", False),
        ("rollout_correction", None),
        ("opsm_delta", None),
        ("use_rollout_logprobs", False),
        ("keep_old_actor", False),
        ("use_unbiased_kl", False),
        ("temperature", 1),
    ):
        if args[key] != without:
            raise TrainArgsError(
                f"args.{key}={args[key]!r} does not go with policy_loss_type={loss!r}, whose data no policy has "
                "sampled; leave it out"
            )
    if loss == "dpo":
        if args.num_steps_per_rollout * args.ppo_epochs > 1:
            raise TrainArgsError(
                f"args.num_steps_per_rollout={args.num_steps_per_rollout} and ppo_epochs={args.ppo_epochs}: with "
                "policy_loss_type='dpo', each call of async_train takes one optimizer step; call it for each batch"
            )
        if args.loss_aggregation not in (None, "constant") or args.loss_constant_length not in (None, 1):
            raise TrainArgsError(
                f"args.loss_aggregation={args.loss_aggregation!r}, loss_constant_length={args.loss_constant_length}: "
                "policy_loss_type='dpo' is the mean over pairs of sums over tokens; leave both out"
            )
        args.loss_aggregation, args.loss_constant_length = "constant", 1


def _check_estimator(args: Any) -> None:
    estimator = args.advantage_estimator
    if estimator in NEEDS_GROUPS and args.n_samples_per_prompt == 1:
        raise TrainArgsError(
            f"args.n_samples_per_prompt=1: advantage_estimator={estimator!r} compares the completions of a prompt, and "
            "one that has no others gets the advantage 0, so nothing would be trained. Use at least 2, or "
            "advantage_estimator='reinforce_plus_plus', 'remax' or 'gae'"
        )
    for name, its in (
        ("passk_k", "grpo_passk"),
        ("gdpo_weights", "gdpo"),
        ("gae_lambda_value", "gae"),
        ("gae_length_adaptive_alpha", "gae"),
    ):
        if args[name] not in (None, {}) and estimator != its:
            raise TrainArgsError(f"args.{name}={args[name]} needs advantage_estimator={its!r}")
    if args.passk_k is not None and args.passk_k > args.n_samples_per_prompt:
        raise TrainArgsError(
            f"args.passk_k={args.passk_k} is more than n_samples_per_prompt={args.n_samples_per_prompt}, the number of "
            "completions to choose them from"
        )
    if args.overlong_buffer_len and estimator in ("maxrl", "gdpo"):
        why = {
            "maxrl": "divides by the mean reward, which the penalty would make negative",
            "gdpo": "normalizes each reward by itself; return the penalty as one of the rewards",
        }
        raise TrainArgsError(
            f"args.overlong_buffer_len={args.overlong_buffer_len} does not go with advantage_estimator={estimator!r}, "
            f"which {why[estimator]}. To leave truncated completions out of the loss, set overlong_filtering=True"
        )


def _complete_policy_loss(args: Any) -> None:
    """Set the keys of the policy loss that are not set to its own defaults, and refuse those of other losses."""
    name, usual = args.policy_loss_type, {"loss_aggregation": "token", **POLICY_LOSS_KEYS["ppo_clip"]}
    own = POLICY_LOSS_KEYS.get(name)
    if own is not None:
        own = {"loss_aggregation": "token", **own}
        for key in sorted({key for keys in POLICY_LOSS_KEYS.values() for key in keys} - own.keys()):
            if args[key] is not None:
                users = " or ".join(repr(other) for other, keys in POLICY_LOSS_KEYS.items() if key in keys)
                raise TrainArgsError(
                    f"args.{key}={args[key]} has no effect with policy_loss_type={name!r}; leave it out, or use {users}"
                )
        if "dro_beta" in own and args.dro_beta is None:
            raise TrainArgsError(f"args.policy_loss_type={name!r} needs dro_beta; there is no usual value")
    chosen: dict[str, Any] = {}
    high_follows = args.eps_clip is not None  # a lower bound of the user's is also the upper one
    for key, value in (usual if own is None else own).items():
        if args[key] is None and value is not None and not (key == "eps_clip_high" and high_follows):
            args[key] = chosen[key] = value
    if name == "clip_cov" and not args.clip_cov_lb < args.clip_cov_ub:
        raise TrainArgsError(
            f"args.clip_cov_lb={args.clip_cov_lb} and clip_cov_ub={args.clip_cov_ub}: no covariance is "
            "between them, so no token would be chosen; expected clip_cov_lb < clip_cov_ub"
        )
    if unusual := {key: value for key, value in chosen.items() if key in usual and value != usual[key]}:
        said = ", ".join(f"{key}={value!r}" for key, value in unusual.items())
        logger.warning("policy_loss_type=%r chooses %s, as in its paper; set these keys to choose others", name, said)


def warn_of_defaults(values: Mapping[str, Any], args: Any) -> None:
    """Warn if a policy loss gets the defaults of another one. This happens if ``policy_loss_type`` is changed in a
    configuration that `read_args` has already completed.

    Args:
        values: the values of all keys that were passed.
        args: the configuration.
    """
    losses = {name: {"loss_aggregation": "token", **keys} for name, keys in POLICY_LOSS_KEYS.items()}
    own = losses.get(args.policy_loss_type, losses["ppo_clip"])
    for name, keys in losses.items():
        kept = {key: value for key, value in keys.items() if key in own and value not in (None, own[key])}
        if kept and "eps_clip" in keys and all(values[key] == value for key, value in keys.items()):
            said = ", ".join(f"{key}={value!r}" for key, value in kept.items())
            warnings.warn(
                f"args: policy_loss_type={args.policy_loss_type!r} with {said}, the defaults of {name!r}. If "
                f"read_args has set these keys, set them to None to get the defaults of {args.policy_loss_type!r}",
                stacklevel=3,
            )
            return


def check_effects(given: Collection[str], args: Any) -> None:
    """Refuse or report keys that are set, but have no effect.

    A key that asks for another algorithm than the one that would run is an error. A key of a feature that is off is a
    warning, since configurations are shared between runs.

    Args:
        given: the keys whose values are not the defaults.
        args: the configuration.
    """
    if args.keep_old_actor and args.use_rollout_logprobs:
        raise TrainArgsError(
            "args.keep_old_actor has no effect with use_rollout_logprobs=True, which takes the old log-probabilities "
            "from the rollout; set only one of them"
        )
    if args.loss_constant_length is not None and args.loss_aggregation != "constant":
        raise TrainArgsError(
            f"args.loss_constant_length={args.loss_constant_length} has no effect with loss_aggregation="
            f"{args.loss_aggregation!r}; it needs 'constant'"
        )
    if args.use_unbiased_kl and not args.kl_loss_coef:
        raise TrainArgsError("args.use_unbiased_kl=True has no effect with kl_loss_coef=0; set kl_loss_coef")
    if args.kl_loss_coef and args.kl_loss_type == "k1" and not args.use_unbiased_kl:
        warnings.warn(
            "args.kl_loss_type='k1': the gradient of k1 has mean 0, so kl_loss_coef adds only noise; use 'k1+' or 'k3'",
            stacklevel=3,
        )
    truncates = args.rollout_top_p < 1 or args.rollout_top_k or args.rollout_min_p
    if truncates and not 0 < args.rollout_top_k <= LARGEST_SET:
        warnings.warn(
            f"args.rollout_top_p={args.rollout_top_p}, rollout_top_k={args.rollout_top_k} and rollout_min_p="
            f"{args.rollout_min_p} may leave any number of tokens to choose from. The rollout data has 4 bytes for "
            f"each of them, and VLLMEngine and HTTPEngine return no sets of more than {LARGEST_SET}. Set rollout_top_k "
            f"to at most {LARGEST_SET}",
            stacklevel=3,
        )
    on_policy = args.num_steps_per_rollout * args.ppo_epochs == 1 and not (
        args.use_rollout_logprobs or args.keep_old_actor
    )
    if on_policy and args.policy_loss_type in _HOLDS_NEAR_OLD:
        warnings.warn(
            f"args.policy_loss_type={args.policy_loss_type!r}: {_HOLDS_NEAR_OLD[args.policy_loss_type]} is 0 in the "
            "first step of a rollout, where the policy is the old one, and there is no other step. Set "
            "num_steps_per_rollout or ppo_epochs above 1, or use_rollout_logprobs",
            stacklevel=3,
        )
    if on_policy and args.use_unbiased_kl:
        warnings.warn(
            "args.use_unbiased_kl=True: p / p_old is 1 in the first step of a rollout, where the policy is the old "
            "one, also for tokens of older weights, and there is no other step. Set num_steps_per_rollout or "
            "ppo_epochs above 1, use_rollout_logprobs or keep_old_actor",
            stacklevel=3,
        )
    if "gae_lambda" in given and None not in (args.gae_lambda_value, args.gae_length_adaptive_alpha):
        warnings.warn(
            "args: gae_lambda has no effect with both gae_length_adaptive_alpha, which replaces it for the policy, and "
            "gae_lambda_value, which replaces it for the critic",
            stacklevel=3,
        )
    off: list[tuple[str, tuple[str, ...]]] = []
    if args.rollout_data is None and args.eval_data is None:
        off.append(("without rollout_data or eval_data", _DATA))
    if not (args.async_rollout or args.dynamic_sampling):
        off.append(("without async_rollout or dynamic_sampling", _STREAM))
    off += [(f"with {name}={args[name]!r}", keys) for name, is_off, keys in _FEATURES if is_off(args[name])]
    for why, keys in off:
        if idle := [key for key in keys if key in given]:
            verb = "has" if len(idle) == 1 else "have"
            warnings.warn(f"args: {', '.join(idle)} {verb} no effect {why}", stacklevel=3)


_DATA = (
    "input_key", "label_key", "apply_chat_template", "apply_chat_template_kwargs", "rollout_max_prompt_len",
    "on_bad_row",
)  # fmt: skip
"""Keys of ``rollout_data`` and ``eval_data``."""

_STREAM = ("rollout_order", "on_stale", "update_weights_mode")
"""Keys of a `RolloutStream`."""

_HOLDS_NEAR_OLD = {"kl_cov": "the penalty |log(p / p_old)|", "dro": "the penalty log(p / p_old)^2"}
_GROUP_BASELINES = ("grpo", "rloo", "opo", "grpo_passk", "maxrl")
_UNNORMALIZED = (*_GROUP_BASELINES, *SUPERVISED, "remax", "optimal_token_baseline")
_UNDISCOUNTED = (*_UNNORMALIZED, "gdpo", "reinforce_plus_plus_baseline")
_WITHOUT_CRITIC = (*_UNDISCOUNTED, "reinforce_plus_plus")
_DIVIDES_BY_STD = ("grpo", "grpo_passk", "gdpo")
_FEATURES: tuple[tuple[str, Callable[[Any], bool], tuple[str, ...]], ...] = (
    ("train_backend", lambda value: value != "megatron", (
        "tensor_model_parallel_size", "pipeline_model_parallel_size", "use_distributed_optimizer", "megatron_overrides",
        "expert_model_parallel_size", "expert_tensor_parallel_size",
    )),
    ("train_backend", lambda value: value != "fsdp", ("fsdp_shard_size", "fsdp_reduce_dtype", "fsdp_cpu_offload")),
    ("lora_rank", lambda value: not value, ("lora_alpha", "lora_dropout", "lora_target_modules")),
    ("lr_decay_style", lambda value: value == "constant", ("min_lr", "lr_decay_iters")),
    ("advantage_estimator", lambda value: value in _UNNORMALIZED, ("normalize_advantages",)),
    ("advantage_estimator", lambda value: value in _UNDISCOUNTED, ("gamma",)),
    ("advantage_estimator", lambda value: value in _WITHOUT_CRITIC, (
        "gae_lambda", "value_clip", "critic_lr", "critic_lr_warmup_iters", "critic_load", "critic_save",
        "critic_save_hf", "critic_num_nodes", "critic_num_gpus_per_node",
    )),
    ("advantage_estimator", lambda value: value in {*_WITHOUT_CRITIC, "gae"} - {*_DIVIDES_BY_STD}, (
        "grpo_std_normalization",
    )),
    ("kl_target", lambda value: value is None, ("kl_horizon",)),
    ("overlong_buffer_len", lambda value: not value, ("overlong_penalty_factor",)),
    ("rollout_data", lambda value: value is None, ("rollout_shuffle",)),
    ("update_weights_transport", lambda value: value != "disk", ("update_weights_disk_dir",)),
    ("update_weights_delta", lambda value: not value, ("update_weights_full_every",)),
)  # fmt: skip
"""Keys of features that are off: the key that says so, whether its value does, and the keys without an effect then. An
estimator that is not listed may read any key."""


def function_at(path: str, key: str) -> Callable[..., Any]:
    """Import the function ``package.module.name``.

    Args:
        path: its dotted path.
        key: the configuration's key, for the message.

    Raises:
        TrainArgsError: there is no such module or function.
    """
    module, _, name = path.rpartition(".")
    if not module:
        raise TrainArgsError(f"args.{key}={path!r}: expected a dotted path such as 'my_package.my_module.my_function'")
    try:
        target = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise TrainArgsError(f"args.{key}={path!r} cannot be imported: {error}") from error
    if not callable(target):
        raise TrainArgsError(f"args.{key}={path!r} is a {type(target).__name__}, not a function")
    function: Callable[..., Any] = target
    return function


def function_of(args: Any, key: str) -> Callable[..., Any]:
    """Return the function that a key names.

    Args:
        args: the configuration.
        key: "policy_loss_type" or "advantage_estimator".
    """
    return function_at(path_of(key, args[key]), key)


def role_args(args: Any, role: str) -> Any:
    """Return the configuration as a role sees it: for the critic, ``critic_*`` keys replace the general ones.

    Args:
        args: what `read_args` returned.
        role: "actor" or "critic".
    """
    if role == "actor":
        return args
    seen = args.copy()
    for name in ("load", "save", "save_hf"):
        seen[name] = critic_folder(args, name)
    seen.lr = args.lr if args.critic_lr is None else args.critic_lr
    seen.lr_warmup_iters = args.critic_lr_warmup_iters
    seen.lora_rank = 0  # its head is random, so an adapter alone would not do
    return seen


def critic_folder(args: Any, name: str) -> str | None:
    """Return the critic's ``load``, ``save`` or ``save_hf``: by default a folder in the actor's."""
    own, general = args[f"critic_{name}"], args[name]
    return f"{general}/critic" if own is None and general is not None else own


def actor_size(args: Any) -> tuple[int, int]:
    """Return the number of nodes of the actor, and its ranks per node."""
    return args.actor_num_nodes, args.actor_num_gpus_per_node


def critic_size(args: Any) -> tuple[int, int]:
    """Return the number of nodes of the critic, and its ranks per node."""
    nodes, per_node = actor_size(args)
    return args.critic_num_nodes or nodes, args.critic_num_gpus_per_node or per_node
