"""The environment variables of train workers, and which of them must be set before the process starts."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from single_controller.ray.rank.devices import NOSET
from workers.train.args import TrainArgsError

BEFORE_START = frozenset({"LD_PRELOAD", "LD_LIBRARY_PATH", "TMS_INIT_ENABLE", "TMS_INIT_ENABLE_CPU_BACKUP"})
"""Variables that take effect only if they are set when the process starts."""


@dataclass(frozen=True)
class TrainEnvironment:
    """Environment variables of a train worker.

    Attributes:
        worker: set before user code runs.
        process: set before the process starts. This slows the start down, so it is used only where it is needed.
    """

    worker: dict[str, str]
    process: dict[str, str]


def train_environment(args: Any, use_gpu: bool) -> TrainEnvironment:
    """Return the environment of the train workers.

    Args:
        args: the configuration; its ``train_env_vars`` take precedence.
        use_gpu: whether the workers have GPUs.

    Raises:
        TrainArgsError: torch_memory_saver is installed without its preload library.
    """
    variables = {
        "NCCL_CUMEM_ENABLE": os.environ.get("NCCL_CUMEM_ENABLE", "0"),
        "NVTE_FP8_BLOCK_SCALING_FP32_SCALES": "1",
        # The processes of a node see each other's devices, and can exchange weights without the host. `workers.device`
        # finds the process's own device.
        **dict.fromkeys(NOSET, "1"),
    }
    # Other processes cannot open memory that torch_memory_saver manages.
    by_saver = args.offload_train and args.update_weights_transport != "device"
    if use_gpu and by_saver and args.train_backend == "megatron":
        variables |= _memory_saver()
    variables |= {str(name): str(value) for name, value in args.train_env_vars.items()}
    process: Mapping[str, str] = {}
    if use_gpu or "LD_PRELOAD" in args.train_env_vars:
        process = {name: value for name, value in variables.items() if name in BEFORE_START}
    return TrainEnvironment({name: value for name, value in variables.items() if name not in process}, dict(process))


def _cuda_major() -> str:
    import torch

    return (torch.version.cuda or "").split(".")[0]


def _memory_saver() -> dict[str, str]:
    """Variables that make torch_memory_saver hook the allocations of a process; none if it is not installed."""
    spec = importlib.util.find_spec("torch_memory_saver")
    if spec is None or spec.origin is None:
        return {}
    # The libraries are beside the package; their names have the hook mode and the CUDA version. A library that does not
    # find its CUDA ends the process before Python starts.
    stem = "torch_memory_saver_hook_mode_preload"
    folder = Path(spec.origin).parent.parent
    major = _cuda_major()
    found = sorted(folder.glob(f"{stem}_cu{major}*.so")) if major else []
    found = found or sorted(folder.glob(f"{stem}.*so"))
    if not found:
        raise TrainArgsError(
            "args.offload_train: torch_memory_saver is installed without its preload library for CUDA "
            f"{major or 'of any version'} ({folder}); reinstall it, or uninstall it to offload by copying instead"
        )
    variables = {"LD_PRELOAD": str(found[0]), "TMS_INIT_ENABLE": "1", "TMS_INIT_ENABLE_CPU_BACKUP": "1"}
    # The CUDA runtime that the library links to. The dynamic loader does not find it where pip installs it.
    runtime = sorted(folder.glob(f"nvidia/*/lib/libcudart.so.{major}*")) if major else []
    if runtime:
        known = os.environ.get("LD_LIBRARY_PATH")
        variables["LD_LIBRARY_PATH"] = f"{runtime[0].parent}:{known}" if known else str(runtime[0].parent)
    return variables
