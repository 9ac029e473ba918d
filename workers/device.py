"""cuda or cpu, nccl or gloo: the one place that decides. torch is imported when somebody asks."""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import weakref
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from single_controller import SingleControllerError

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

_LISTS = ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")
"""What hides devices from torch: the first of them that is set, on AMD; elsewhere the second alone."""


class DeviceError(SingleControllerError):
    """The device that Ray gave this process is not one that torch can use here."""


def has_cuda() -> bool:
    """Whether this process has a CUDA device."""
    import torch

    return torch.cuda.is_available()


def backend() -> str:
    """The backend for ``torch.distributed``: nccl where this process has a CUDA device, gloo elsewhere."""
    return "nccl" if has_cuda() else "gloo"


def every_backend() -> str:
    """The backends for ``torch.distributed`` where the CPU's tensors travel too: by gloo, and by nccl the devices'."""
    return "cpu:gloo,cuda:nccl" if has_cuda() else "gloo"


def host_memory(nbytes: int, *, pinned: bool) -> torch.Tensor:
    """Host memory, uint8; pinned, CUDA devices copy to and from it directly.

    It is registered with CUDA as it is: torch's own pinned memory is rounded up to a power of two, and is kept when
    nobody needs it any more. Where the machine pins no more of it, the copies are slower, and a warning says so.
    """
    import numpy as np
    import torch

    if not pinned or not nbytes:
        return torch.empty(nbytes, dtype=torch.uint8)
    # Whole pages, which no other memory is on. Weak references to an array are told before it is freed.
    whole = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
    memory = np.empty(whole + mmap.PAGESIZE, np.uint8)
    begin = -memory.ctypes.data % mmap.PAGESIZE
    address = memory.ctypes.data + begin
    runtime = torch.cuda.cudart()
    status = int(runtime.cudaHostRegister(address, whole, 0))
    if status:
        logger.warning("%.2f GB of host memory were not pinned (CUDA error %d)", nbytes / 1e9, status)
        with contextlib.suppress(RuntimeError):  # CUDA keeps the error for the next kernel: this one
            torch.zeros(1, device="cuda")
    else:
        weakref.finalize(memory, runtime.cudaHostUnregister, address).atexit = False
    return torch.from_numpy(memory[begin : begin + nbytes])


def device(local_rank: int = 0, device_ids: Sequence[str] = ()) -> torch.device:
    """The device of this process.

    Ray shows a process only the devices that are its own, and then the first of them is meant. Where it does not (a
    variable RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES or ..._HIP_... tells it so), the process sees others too: then
    its own is where its id stands in the list of visible devices.

    Args:
        local_rank: rank among the processes of the node; decides where no ids are known.
        device_ids: ``Worker.device_ids``, what Ray gave it.

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
            f"Ray gave this worker device {device_ids[0]}, number {index} of those that it may see, but torch has "
            f"{count} here: Ray was told of more GPUs than there are (ray.init(num_gpus=...)), or the list of visible "
            "devices was changed after torch had read it"
        )
    return torch.device("cuda", index)


def visible_index(device_id: str, environment: Mapping[str, str], amd: bool = False) -> int:
    """torch's index of a device.

    Args:
        device_id: Ray's id of it: its number on the node, or what a list that was set before Ray started calls it.
        environment: the process's variables.
        amd: whether torch runs on ROCm.

    Raises:
        DeviceError: the list of visible devices does not have it.
    """
    name = next((name for name in _LISTS[0 if amd else 1 :] if name in environment), None)
    if name is None:
        if not device_id.isdigit():
            raise DeviceError(f"Ray gave this worker device {device_id!r}, which is no number, and no list has it")
        return int(device_id)
    visible = [item.strip() for item in environment[name].split(",")]
    if device_id not in visible:
        raise DeviceError(
            f"Ray gave this worker device {device_id}, but {name}={environment[name]!r} hides it: leave that variable "
            "to Ray (take it out of worker_env and runtime_env), or let it name all devices of the node"
        )
    return visible.index(device_id)


def use_device(taken: torch.device | None) -> None:
    """Make a device that was taken before the current one of this thread: each has its own."""
    import torch

    if taken is not None and taken.type == "cuda":
        torch.cuda.set_device(taken)


def take_device(local_rank: int = 0, device_ids: Sequence[str] = ()) -> torch.device:
    """Make `device` the current one, and return it."""
    import torch

    mine = device(local_rank, device_ids)
    if mine.type == "cuda":
        torch.cuda.set_device(mine)
    return mine


def current_device() -> torch.device:
    """The device that this process has taken: the current CUDA device, or the CPU where there is none."""
    import torch

    return torch.device("cuda", torch.cuda.current_device()) if has_cuda() else torch.device("cpu")
