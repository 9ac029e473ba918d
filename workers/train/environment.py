"""The environment of train workers: what their libraries want, and what must be there before a process starts."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from workers.train.read_args import TrainArgsError

NOSET = tuple(
    f"RAY_EXPERIMENTAL_NOSET_{variable}"
    for variable in (
        "ASCEND_RT_VISIBLE_DEVICES",
        "CUDA_VISIBLE_DEVICES",
        "HABANA_VISIBLE_MODULES",
        "HIP_VISIBLE_DEVICES",
        "NEURON_RT_VISIBLE_CORES",
        "ONEAPI_DEVICE_SELECTOR",
        "ROCR_VISIBLE_DEVICES",
        "TPU_VISIBLE_CHIPS",
        "ZE_AFFINITY_MASK",
    )
)
"""With these, Ray leaves the lists of visible devices alone, so that the processes of a node see each other's devices:
weights can go from one to the other without the host. `workers.device` finds each one's own."""

BEFORE_START = frozenset({*NOSET, "LD_PRELOAD", "LD_LIBRARY_PATH", "TMS_INIT_ENABLE", "TMS_INIT_ENABLE_CPU_BACKUP"})
"""What counts only if it is there when the process starts."""


@dataclass(frozen=True)
class TrainEnvironment:
    """Environment variables of a train worker.

    Attributes:
        worker: set before user code runs.
        process: set before the process starts, which makes starting it slower: only where it is needed.
    """

    worker: dict[str, str]
    process: dict[str, str]


def train_environment(args: Any, role: str, use_gpu: bool) -> TrainEnvironment:
    """The environment of a role's workers.

    Args:
        args: the configuration; its ``train_env_vars`` win over everything else.
        role: "actor" or "critic".
        use_gpu: whether the workers have devices.

    Raises:
        TrainArgsError: memory is to be offloaded by torch_memory_saver, whose library is not where it should be.
    """
    variables = {
        "NCCL_CUMEM_ENABLE": os.environ.get("NCCL_CUMEM_ENABLE", "0"),
        "NVTE_FP8_BLOCK_SCALING_FP32_SCALES": "1",
        **dict.fromkeys(NOSET, "1"),
    }
    if role == "actor" and args.use_routing_replay:
        variables["ENABLE_ROUTING_REPLAY"] = "1"
    # Memory that torch_memory_saver looks after cannot be opened by another process.
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
    """What has torch_memory_saver catch the allocations of a process; nothing where it is not installed."""
    spec = importlib.util.find_spec("torch_memory_saver")
    if spec is None or spec.origin is None:
        return {}
    # The libraries lie beside the package, under names that tell the way of hooking and the version of CUDA. One that
    # does not find its CUDA ends the process before Python begins.
    stem = "torch_memory_saver_hook_mode_preload"
    folder = Path(spec.origin).parent.parent
    major = _cuda_major()
    found = sorted(folder.glob(f"{stem}_cu{major}*.so")) if major else []
    found = found or sorted(folder.glob(f"{stem}.*so"))
    if not found:
        raise TrainArgsError(
            "args.offload_train: torch_memory_saver is installed, but without its preload library beside it "
            f"for CUDA {major or 'of any version'} ({folder}); install it anew, or remove it: offloading works without"
        )
    variables = {"LD_PRELOAD": str(found[0]), "TMS_INIT_ENABLE": "1", "TMS_INIT_ENABLE_CPU_BACKUP": "1"}
    # CUDA's own libraries, which it looks for: where pip has put them, the system does not find them by itself.
    runtime = sorted(folder.glob(f"nvidia/*/lib/libcudart.so.{major}*")) if major else []
    if runtime:
        known = os.environ.get("LD_LIBRARY_PATH")
        variables["LD_LIBRARY_PATH"] = f"{runtime[0].parent}:{known}" if known else str(runtime[0].parent)
    return variables
