"""From what users have (an OmegaConf config, a mapping, a Namespace) to a complete and checked configuration."""

from __future__ import annotations

import dataclasses
import difflib
import math
import operator
import warnings
from collections.abc import Mapping
from typing import Any, get_type_hints

from single_controller import SingleControllerError
from workers.train.args import TrainArgs, type_name


class TrainArgsError(SingleControllerError, ValueError):
    """A key of the configuration does not exist, or its value has another type or makes no sense."""


def read_args(given: Any = None) -> Any:
    """A complete and checked configuration.

    Args:
        given: an OmegaConf config or a mapping, in which every key must exist here; or a Namespace (any object with
            attributes), whose further attributes pass through, with one warning. None for the defaults.

    Returns:
        An OmegaConf ``DictConfig`` with every key of `TrainArgs` as an attribute. Asking for another is an error.

    Raises:
        TrainArgsError: an unknown key, with the closest one; or a value of another type, or one that makes no sense.
    """
    from omegaconf import DictConfig, OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    known = {item.name: item for item in dataclasses.fields(TrainArgs)}
    values, extras = _split(given, known)
    args = OmegaConf.structured(TrainArgs)
    hints = get_type_hints(TrainArgs)
    for name, value in values.items():
        wanted = hints[name]
        is_number = isinstance(value, int) and not isinstance(value, bool)
        try:
            args[name] = float(value) if is_number and wanted in (float, float | None) else value
        except OmegaConfBaseException as error:
            raise TrainArgsError(f"args.{name}={value!r}: it is {type_name(wanted)} ({_first_line(error)})") from None
    for name, item in known.items():
        _check_value(name, item, args[name])
    _check_together(args)
    made = DictConfig({**{name: args._get_node(name) for name in known}}, flags={"allow_objects": True})
    for name, value in extras.items():
        made[name] = value
    OmegaConf.set_struct(made, True)
    OmegaConf.set_struct(made.user, False)
    return made


def role_args(args: Any, role: str) -> Any:
    """The configuration as a role sees it: for the critic, ``critic_*`` stands in for what it has a key of its own.

    Args:
        args: what `read_args` returned.
        role: "actor" or "critic".
    """
    from omegaconf import OmegaConf

    seen = OmegaConf.create(args)
    if role == "critic":
        with_struct_off = seen.copy()
        for own, general in (("critic_load", "load"), ("critic_save", "save"), ("critic_save_hf", "save_hf")):
            beside = None if args[general] is None else f"{args[general]}/critic"
            with_struct_off[general] = beside if args[own] is None else args[own]
        with_struct_off.lr = args.lr if args.critic_lr is None else args.critic_lr
        with_struct_off.lr_warmup_iters = args.critic_lr_warmup_iters
        return with_struct_off
    return seen


def actor_size(args: Any) -> tuple[int, int]:
    """Nodes of the actor, and ranks on each."""
    return args.actor_num_nodes, args.actor_num_gpus_per_node


def critic_size(args: Any) -> tuple[int, int]:
    """Nodes of the critic, and ranks on each."""
    nodes, per_node = actor_size(args)
    return args.critic_num_nodes or nodes, args.critic_num_gpus_per_node or per_node


def _split(given: Any, known: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    from omegaconf import DictConfig, OmegaConf

    if given is None:
        return {}, {}
    if isinstance(given, TrainArgs):
        return {name: getattr(given, name) for name in known}, {}
    if isinstance(given, (DictConfig, Mapping)):
        passed = isinstance(given, DictConfig) and given._get_flag("allow_objects")
        items = {str(key): given[key] for key in given}
        if unknown := [name for name in items if name not in known]:
            if passed:  # it has been here before, as a Namespace
                return {k: v for k, v in items.items() if k in known}, {k: items[k] for k in unknown}
            close = difflib.get_close_matches(unknown[0], known, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else "; keys of your own go under 'user'"
            raise TrainArgsError(f"args has no key {unknown[0]!r}{hint}")
        return items, {}
    if isinstance(given, (str, int, float, list, tuple)) or not hasattr(given, "__dict__"):
        raise TrainArgsError(f"args is an OmegaConf config, a mapping or a Namespace, got {given!r}")
    items = {name: value for name, value in vars(given).items() if not name.startswith("_")}
    extras = {name: value for name, value in items.items() if name not in known}
    if extras:
        names = ", ".join(sorted(extras))
        warnings.warn(f"args: not keys of TrainArgs, passed through as they are: {names}", stacklevel=4)
    plain = {name: OmegaConf.to_container(v) if OmegaConf.is_config(v) else v for name, v in items.items()}
    return {name: value for name, value in plain.items() if name in known}, extras


_WITHIN = {"from": operator.ge, "above": operator.gt, "at most": operator.le, "below": operator.lt}


def _check_value(name: str, item: dataclasses.Field[Any], value: Any) -> None:
    choices = item.metadata["choices"]
    if value is None:
        return
    if choices and value not in choices:
        close = difflib.get_close_matches(str(value), choices, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise TrainArgsError(f"args.{name}={value!r}: it is one of {', '.join(map(repr, choices))}{hint}")
    limits = {word: limit for word, limit in item.metadata["limits"].items() if limit is not None}
    if not all(_WITHIN[word](value, limit) for word, limit in limits.items()):
        said = " and ".join(f"{word} {limit}" for word, limit in limits.items())
        raise TrainArgsError(f"args.{name}={value!r}: it is a number {said}")


def _check_together(args: Any) -> None:
    if args.hf_checkpoint is not None and args.hf_config is not None:
        raise TrainArgsError("args.hf_checkpoint and args.hf_config are both set: the model comes from one of them")
    if args.hf_config is not None and "model_type" not in args.hf_config:
        raise TrainArgsError("args.hf_config has no 'model_type' (such as 'llama'), which says what model it is of")
    if args.keep_old_actor and not args.enable_weights_backuper:
        raise TrainArgsError("args.keep_old_actor needs enable_weights_backuper=True: it is a copy of the weights")
    if args.update_weights_transport == "disk" and not args.update_weights_disk_dir:
        raise TrainArgsError("args.update_weights_transport='disk' needs update_weights_disk_dir")
    for name in ("save_hf", "critic_save_hf"):
        try:
            str(args[name] or "").format(rollout_id=0)
        except (LookupError, ValueError) as error:
            raise TrainArgsError(
                f"args.{name}={args[name]!r}: {{rollout_id}} is all that is replaced in it ({type(error).__name__}: "
                f"{error})"
            ) from None
    if (args.profile_step_start is None) != (args.profile_step_end is None):
        raise TrainArgsError("args.profile_step_start and args.profile_step_end are set together")
    if args.profile_step_start is not None and args.profile_step_end <= args.profile_step_start:
        raise TrainArgsError(
            f"args.profile_step_end={args.profile_step_end}: it is the rollout id after the last, above "
            f"profile_step_start={args.profile_step_start}"
        )
    for warmup in ("lr_warmup_iters", "critic_lr_warmup_iters"):
        if args.lr_decay_style != "constant" and (args.lr_decay_iters or args[warmup]) < args[warmup]:
            raise TrainArgsError(
                f"args.lr_decay_iters={args.lr_decay_iters} is less than {warmup}={args[warmup]}: it is the step at "
                "which the decay ends, counted from the first one of the warm-up"
            )
    if args.train_backend == "fsdp" and args.param_dtype == "fp16":
        raise TrainArgsError("args.param_dtype='fp16': on fsdp it is 'bf16' or 'fp32', for losses are not scaled there")
    if args.kl_coef and args.advantage_estimator != "gae":
        raise TrainArgsError(
            f"args.kl_coef={args.kl_coef} counts with advantage_estimator='gae' alone; kl_loss_coef is the weight of "
            "the divergence in the loss"
        )
    actor, critic = actor_size(args), critic_size(args)
    if args.advantage_estimator == "gae" and math.prod(actor) != math.prod(critic):
        raise TrainArgsError(
            f"args.critic_num_nodes and critic_num_gpus_per_node make {math.prod(critic)} ranks, actor_num_nodes and "
            f"actor_num_gpus_per_node {math.prod(actor)}; rank i of the actor is connected with rank i of the critic"
        )
    if args.profile_step_start is not None and not args.profile_dir:
        raise TrainArgsError("args.profile_step_start needs profile_dir")


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0]
