"""What ``run.json`` says about the process of a run, without its secrets."""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

PACKAGES = ("single-controller", "ray", "torch", "tensordict", "transformers", "megatron-core", "numpy", "vllm", "peft")
GIT_SECONDS = 5.0

HIDDEN = "***"

# The last words of a name. Alone, "token" is one of text more often than not: in "pad_token", and in "per_token".
_WORDS = r"passwords?|passwd|passphrase|secrets?|credentials?|authorization|(?:api|access|private|secret)[_-]?key"
_TOKENS = r"(?<![a-z])(?:(?:hf|hub|api|auth|access|bearer|session|secret|refresh|git\w*|wandb|hugging\w*)[_-])+token"
_NAME = re.compile(rf"(?:{_WORDS}|{_TOKENS})$|^token$", re.IGNORECASE)
_IN_TEXT = re.compile(
    # NAME=VALUE, and "Authorization: Basic VALUE"
    rf"""((?:{_WORDS}|{_TOKENS}|[?&]token|^\W*token)["']?[=:]\s*["']?(?:(?:bearer|basic)\s+)?)[^\s&"',;]+"""
    # "basic arithmetic" is no secret, nor is the folder hf_llama3_8b_instruct_math
    r"|((?:bearer|basic(?-i:(?=\s+[a-z.~_-]*[A-Z\d+/=])))\s+)[\w.~+/=-]{8,}"
    r"|(://[^\s/@:]*:)[^\s/@]+(?=@)"  # the password in an address
    r"|()\b(?:hf_[^\W_]{20,}|hf_(?:oauth|jwt)_[\w.-]{20,}|sk-[\w-]{20,}|gh[pousr]_\w{20,}|github_pat_\w{20,}"
    r"|glpat-[\w-]{16,}|xox[a-z]-[\w-]{10,}|AKIA[0-9A-Z]{16}|eyJ[\w-]{10,}\.[\w-]+\.[\w-]+)",
    re.IGNORECASE,
)
_ENVIRONMENT = re.compile(r"(?:TOKEN|PASSWORD|PASSWD|SECRET|CREDENTIALS?|KEY|AUTH)$", re.IGNORECASE)


def without_secrets(value: Any, name: str = "") -> Any:
    """Return a configuration, or a part of it, with `HIDDEN` in place of its tokens, passwords and keys: the values of
    names such as ``hf_token`` and ``api_key``, texts that look like one, and the values that variables of the
    environment with such a name have.

    Args:
        value: of mappings, lists and tuples of any depth, or a text. Another object is searched as text, and
            returned as text if that has a secret.
        name: of the value.
    """
    number = isinstance(value, (bool, int, float))
    empty = value is None or (isinstance(value, str) and not value)
    if not empty and _NAME.search(name) and not (number and name.lower().endswith("token")):
        return HIDDEN
    if isinstance(value, Mapping):
        return {key: without_secrets(one, str(key)) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        made, flag = [], ""
        for one in value:
            made.append(without_secrets(one, flag))
            flag = one.lstrip("-") if isinstance(one, str) and one.startswith("-") else ""  # ["--api-key", "..."]
        return made
    if number or value is None:
        return value
    text = said = str(value)
    for variable, secret in os.environ.items():
        if len(secret) >= 8 and secret in text and _ENVIRONMENT.search(variable):
            text = text.replace(secret, HIDDEN)
    text = _IN_TEXT.sub(lambda found: "".join(part or "" for part in found.groups()) + HIDDEN, text)
    return value if text == said else text


def about_process(config: Mapping[str, Any], name: str | None) -> dict[str, Any]:
    """Return entries of ``run.json``: configuration, versions, git, seeds, Ray's address."""
    seeds = {key: config[key] for key in ("seed", "rollout_seed") if config.get(key) is not None}
    about = {"config": config, "versions": versions(), "git": git_state(), "seeds": seeds, "ray_address": ray_address()}
    return {**about, "groups": [], "ranks": None} | ({} if name is None else {"name": name})


def versions() -> dict[str, str]:
    """Return the versions of Python and of the installed packages that matter."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def git_state() -> dict[str, Any] | None:
    """Return the commit of the script's folder, and whether files differ from it; None without git."""
    script = Path(sys.argv[0] if sys.argv else "").resolve()
    own = script.is_file() and "site-packages" not in script.parts  # not so with ``python -m pytest``
    folder = script.parent if own else Path.cwd()

    def git(*arguments: str) -> str:
        # No optional locks: looking must not get into the way of somebody who works in the folder.
        command = ["git", "--no-optional-locks", "-C", str(folder), *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=GIT_SECONDS, check=True).stdout.strip()

    try:
        return {"commit": git("rev-parse", "HEAD"), "dirty": bool(git("status", "--porcelain", "-uno"))}
    except (OSError, subprocess.SubprocessError):
        return None


def ray_address() -> str | None:
    """Return the address of the cluster that this process is connected to."""
    ray: Any = sys.modules.get("ray")
    if ray is None or not ray.is_initialized():
        return None
    address: str | None = ray.get_runtime_context().gcs_address
    return address
