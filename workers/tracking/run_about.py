"""What ``run.json`` says about the process of a run."""

from __future__ import annotations

import platform
import subprocess
import sys
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

PACKAGES = ("single-controller", "ray", "torch", "tensordict", "transformers", "megatron-core", "numpy", "vllm", "peft")
GIT_SECONDS = 5.0


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
