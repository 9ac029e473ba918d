"""Choose between cuda and cpu, nccl and gloo; and dtypes by name. No other file decides this. torch is imported on
first use."""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from single_controller import SingleControllerError

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

_LISTS = ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")
"""Variables that restrict the devices that torch sees. On ROCm the first one that is set counts, elsewhere only
CUDA_VISIBLE_DEVICES."""


DTYPES = {
    "fp32": "float32",
    "float32": "float32",
    "float": "float32",
    "bf16": "bfloat16",
    "bfloat16": "bfloat16",
    "fp16": "float16",
    "float16": "float16",
    "half": "float16",
}


class DeviceError(SingleControllerError):
    """torch cannot use the device that Ray assigned to this process."""


def has_cuda() -> bool:
    """Whether this process has a CUDA device."""
    import torch

    return torch.cuda.is_available()


def backend() -> str:
    """Return the backend for ``torch.distributed``: nccl if this process has a CUDA device, otherwise gloo."""
    return "nccl" if has_cuda() else "gloo"


def every_backend() -> str:
    """Return the ``torch.distributed`` backends for tensors on any device: gloo for the CPU, nccl for CUDA."""
    return "cpu:gloo,cuda:nccl" if has_cuda() else "gloo"


def host_memory(nbytes: int, *, pinned: bool) -> torch.Tensor:
    """Allocate host memory (uint8). CUDA devices copy to and from pinned memory directly.

    The memory is registered with CUDA instead of allocated by torch, which rounds pinned allocations up to a power of
    two and caches them after they are freed. If CUDA cannot pin it, a warning is logged and copies are slower.
    """
    import numpy as np
    import torch

    if not pinned or not nbytes:
        return torch.empty(nbytes, dtype=torch.uint8)
    # CUDA pins whole pages, so no other memory may share them. `weakref.finalize` runs before the array is freed.
    whole = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
    memory = np.empty(whole + mmap.PAGESIZE, np.uint8)
    begin = -memory.ctypes.data % mmap.PAGESIZE
    address = memory.ctypes.data + begin
    runtime = torch.cuda.cudart()
    status = int(runtime.cudaHostRegister(address, whole, 0))
    if status:
        logger.warning("%.2f GB of host memory were not pinned (CUDA error %d)", nbytes / 1e9, status)
        with contextlib.suppress(RuntimeError):  # CUDA reports the error again at the next kernel; consume it here
            torch.zeros(1, device="cuda")
    else:
        weakref.finalize(memory, runtime.cudaHostUnregister, address).atexit = False
    return torch.from_numpy(memory[begin : begin + nbytes])


def free_host_memory() -> int:
    """Return the bytes of host memory that this process can still get: what the kernel calls available, within the
    limit of the container. 0 if neither is known, as on macOS."""
    try:
        with open("/proc/meminfo") as file:
            free = next(int(line.split()[1]) << 10 for line in file if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        return 0
    folder = Path("/sys/fs/cgroup")
    for limit, used in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        with contextlib.suppress(OSError, ValueError):  # there is no limit, or it is "max"
            free = min(free, int((folder / limit).read_text()) - int((folder / used).read_text()))
    return max(free, 0)


def device(local_rank: int = 0, device_ids: Sequence[str] = ()) -> torch.device:
    """Return the device of this process.

    By default, Ray makes only the assigned devices visible, and the first visible device is used. With
    RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES (or ..._HIP_...) the process sees all devices; its own is found by id in
    the list of visible devices.

    Args:
        local_rank: rank among the processes of the node; selects the device if there are no ids.
        device_ids: ``Worker.device_ids``, the devices that Ray assigned.

    Raises:
        DeviceError: the device is hidden from this process, or torch has no such device.
    """
    import torch

    if not has_cuda():
        return torch.device("cpu")
    count = torch.cuda.device_count()
    if not device_ids:
        return torch.device("cuda", local_rank % count)
    index = visible_index(device_ids[0], os.environ, amd=torch.version.hip is not None)
    if index >= count:
        raise DeviceError(
            f"Ray assigned device {device_ids[0]} to this worker, at index {index} of its visible devices, but torch "
            f"sees only {count}: ray.init(num_gpus=...) promised more GPUs than the node has, or the list of visible "
            "devices was changed after torch had read it"
        )
    return torch.device("cuda", index)


def visible_index(device_id: str, environment: Mapping[str, str], amd: bool = False) -> int:
    """Return torch's index of a device.

    Args:
        device_id: Ray's id of the device: its number on the node, or its entry in the list of visible devices if that
            was set before Ray started.
        environment: environment variables of the process.
        amd: whether torch runs on ROCm.

    Raises:
        DeviceError: the device is not in the list of visible devices.
    """
    name = next((name for name in _LISTS[0 if amd else 1 :] if name in environment), None)
    if name is None:
        if not device_id.isdigit():
            raise DeviceError(
                f"Ray assigned device {device_id!r} to this worker; it is not a number, and no variable such as "
                f"{_LISTS[-1]} lists it"
            )
        return int(device_id)
    visible = [item.strip() for item in environment[name].split(",")]
    if device_id not in visible:
        raise DeviceError(
            f"Ray assigned device {device_id} to this worker, but {name}={environment[name]!r} hides it: remove that "
            "variable from worker_env and runtime_env, so that Ray sets it, or list all devices of the node in it"
        )
    return visible.index(device_id)


def use_device(taken: torch.device | None) -> None:
    """Make a device that `take_device` returned the current one of this thread. CUDA's current device is per thread."""
    import torch

    if taken is not None and taken.type == "cuda":
        torch.cuda.set_device(taken)


def take_device(local_rank: int = 0, device_ids: Sequence[str] = ()) -> torch.device:
    """Make `device` the current device, and return it."""
    import torch

    mine = device(local_rank, device_ids)
    if mine.type == "cuda":
        torch.cuda.set_device(mine)
    return mine


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy a tensor to a device without waiting for the device: from host memory by way of pinned memory, which torch
    keeps until the copy is done."""
    if device.type == "cuda" and tensor.device.type == "cpu":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def current_device() -> torch.device:
    """Return the current CUDA device, or the CPU if there is no CUDA device."""
    import torch

    return torch.device("cuda", torch.cuda.current_device()) if has_cuda() else torch.device("cpu")


def dtype_of(name: Any) -> torch.dtype:
    """Return a torch dtype by name: ``"fp32"``, ``"bf16"``, ``"fp16"`` or torch's own names. A dtype is returned as is.

    Raises:
        ValueError: the name is unknown.
    """
    import torch

    if isinstance(name, torch.dtype):
        return name
    torch_name = DTYPES.get(str(name).removeprefix("torch."))
    if torch_name is None:
        raise ValueError(f"param_dtype={name!r}: expected one of {', '.join(DTYPES)}")
    dtype: torch.dtype = getattr(torch, torch_name)
    return dtype
