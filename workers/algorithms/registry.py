"""Policy losses and advantage estimators by name: the built-in ones, and a user's own.

A name stands for the dotted path of a function, and the ranks import that path. So a configuration may have the path
itself, and a registered name works on ranks that have not imported the module.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])

_BUILT_IN = {
    "policy_loss_type": {
        "ppo_clip": "workers.algorithms.policy_losses.ppo_clip_loss",
        "gspo": "workers.algorithms.policy_losses.gspo_loss",
        "cispo": "workers.algorithms.policy_losses.cispo_loss",
        "sapo": "workers.algorithms.policy_losses.sapo_loss",
        "gpg": "workers.algorithms.policy_losses.gpg_loss",
        "geo_mean": "workers.algorithms.policy_losses.geo_mean_loss",
        "dro": "workers.algorithms.policy_losses.dro_loss",
        "dppo_tv": "workers.algorithms.policy_losses.dppo_tv_loss",
        "dppo_kl": "workers.algorithms.policy_losses.dppo_kl_loss",
        "clip_cov": "workers.algorithms.policy_losses.clip_cov_loss",
        "kl_cov": "workers.algorithms.policy_losses.kl_cov_loss",
    },
    "advantage_estimator": {
        "grpo": "workers.algorithms.estimators.grpo",
        "rloo": "workers.algorithms.estimators.rloo",
        "reinforce_plus_plus": "workers.algorithms.estimators.reinforce_plus_plus",
        "reinforce_plus_plus_baseline": "workers.algorithms.estimators.reinforce_plus_plus_baseline",
        "gae": "workers.algorithms.estimators.gae_of_rewards",
        "opo": "workers.algorithms.estimators.opo",
        "remax": "workers.algorithms.estimators.remax",
        "grpo_passk": "workers.algorithms.estimators.grpo_passk",
        "maxrl": "workers.algorithms.estimators.maxrl",
        "gdpo": "workers.algorithms.estimators.gdpo",
        "optimal_token_baseline": "workers.algorithms.estimators.optimal_token_baseline",
    },
}
NEEDS_GROUPS = frozenset({"grpo", "rloo", "reinforce_plus_plus_baseline", "opo", "grpo_passk", "maxrl", "gdpo"})
"""Estimators that compare the completions of a group. A completion that is alone in its group has the advantage 0."""

POLICY_LOSS_KEYS: dict[str, dict[str, float | str | None]] = {
    "ppo_clip": {"eps_clip": 0.2, "eps_clip_high": None, "eps_clip_dual": None},
    "gspo": {"eps_clip": 3e-4, "eps_clip_high": 4e-4, "loss_aggregation": "sequence"},
    "cispo": {"eps_clip": 0.2, "eps_clip_high": None},
    "sapo": {"tau_pos": 1.0, "tau_neg": 1.05, "loss_aggregation": "sequence"},
    "gpg": {},
    "geo_mean": {"eps_clip": 0.4, "eps_clip_high": None, "loss_aggregation": "sequence"},
    "dro": {"dro_beta": None},
    "dppo_tv": {"eps_clip": 0.15, "eps_clip_high": None, "eps_clip_dual": 20.0, "dppo_kl_tau": 0.0},
    "dppo_kl": {"eps_clip": 0.05, "eps_clip_high": None, "eps_clip_dual": 20.0, "dppo_kl_tau": 0.0},
    "clip_cov": {
        "eps_clip": 0.2, "eps_clip_high": None, "clip_cov_ratio": 2e-4, "clip_cov_lb": 1.0, "clip_cov_ub": 5.0,
    },
    "kl_cov": {"kl_cov_ratio": 2e-4, "ppo_kl_coef": 1.0},
}  # fmt: skip
"""The keys of the configuration that belong to policy losses, by the built-in losses that read them, and their defaults
there. ``loss_aggregation`` belongs to all; it is here where the paper of a loss needs another mean."""

_own: dict[str, dict[str, str]] = {key: {} for key in _BUILT_IN}


def register_policy_loss(name: str) -> Callable[[F], F]:
    """Register a policy loss, so that ``policy_loss_type=name`` chooses it.

    The function takes ``(tokens, args)``: a `policy_losses.PolicyTokens` and the configuration. It returns each
    token's loss, (b, s), and a dict of metrics, (b, s) each, the same names in every call. It is called once per
    micro-batch, which has whole rows. The mean over tokens, corrections, KL and entropy terms are added to it.

    Args:
        name: without a dot.

    Raises:
        ValueError: the name has a dot, or is another function's; or the function is not at the top of its module.
    """
    return _register("policy_loss_type", name)


def register_advantage(name: str) -> Callable[[F], F]:
    """Register an advantage estimator, so that ``advantage_estimator=name`` chooses it.

    The function takes ``(rows, args)``: an `estimators.AdvantageRows` and the configuration. It returns the advantages
    of this dp rank's rows: (B,), one per completion, or (B, T), one per token.

    Args:
        name: without a dot.

    Raises:
        ValueError: as `register_policy_loss`.
    """
    return _register("advantage_estimator", name)


def names(key: str) -> list[str]:
    """Return the names that a key of the configuration can have, besides dotted paths."""
    return [*_BUILT_IN[key], *_own[key]]


def policy_loss_keys(name: str) -> dict[str, float | str | None] | None:
    """Return the entry of `POLICY_LOSS_KEYS` of a policy loss, by its name or path; None for a user's own."""
    of_path = {path: known for known, path in _BUILT_IN["policy_loss_type"].items()}
    return POLICY_LOSS_KEYS.get(of_path.get(name, name))


def path_of(key: str, name: str) -> str:
    """Return the dotted path of a name, or the name itself if it is a path.

    Args:
        key: "policy_loss_type" or "advantage_estimator".
        name: the configuration's value.

    Raises:
        ValueError: there is no such name, or its function is in ``__main__``, which the ranks cannot import.
    """
    path = {**_BUILT_IN[key], **_own[key]}.get(name, name)
    if "." not in path:
        close = difflib.get_close_matches(name, names(key), n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise ValueError(
            f"expected one of {', '.join(map(repr, names(key)))}, a name that your driver has registered, or the "
            f"dotted path of a function{hint}"
        )
    if path.startswith("__main__."):
        raise ValueError("the function is in __main__, which the ranks cannot import; move it to a module")
    return path


def _register(key: str, name: str) -> Callable[[F], F]:
    if not isinstance(name, str):
        given = f"{name!r:.80}"
        raise TypeError(f"the name is {given}; write it in parentheses, such as @register_advantage('my_advantage')")
    if "." in name or not name:
        raise ValueError(f"{name!r} cannot be a name, because it has a dot or is empty")

    def register(function: F) -> F:
        if not callable(function) or not hasattr(function, "__qualname__"):
            raise TypeError(f"{name!r} is for a function at the top of a module, got {function!r:.80}")
        path = f"{function.__module__}.{function.__qualname__}"
        if "<locals>" in path or function.__qualname__.count("."):
            raise ValueError(f"{path} is not at the top of its module, so the ranks cannot import it")
        before = {**_BUILT_IN[key], **_own[key]}.get(name, path)
        if before != path:
            raise ValueError(f"{name!r} is already the {key} of {before}")
        _own[key][name] = path
        return function

    return register
