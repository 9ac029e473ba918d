"""Which accelerator this process uses, and its names; and dtypes by name. No other file decides this or names a device;
`single_controller.ray.rank.devices` has the variables that Ray sets. torch is imported on first use."""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import socket
import threading
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from single_controller import SingleControllerError

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Accelerator:
    """The names of one kind of accelerator. Everything else is asked of ``torch.accelerator``.

    Attributes:
        backend: of torch.distributed for tensors on it. None if there is none: workers, which need one, use the CPU.
        visible: variables that list the devices that torch sees. The first one that is set counts.
        resource: Ray's resource.
        ipc: whether torch can share its memory with another process.
    """

    backend: str | None
    visible: tuple[str, ...] = ()
    resource: str = "GPU"
    ipc: bool = False


# Only "cuda" and "npu" have run, on a simulated device. Sources of the other names: torch's default_device_backend_map,
# Ray's accelerator managers (ray._private.accelerators), and torch_npu, which registers hccl when it is imported.
ACCELERATORS = {
    "cuda": Accelerator("nccl", ("CUDA_VISIBLE_DEVICES",), ipc=True),
    "rocm": Accelerator("nccl", ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"), ipc=True),
    "xpu": Accelerator("xccl", ("ZE_AFFINITY_MASK", "ONEAPI_DEVICE_SELECTOR")),
    "npu": Accelerator("hccl", ("ASCEND_RT_VISIBLE_DEVICES",), resource="NPU"),
    "mps": Accelerator(None),  # torch maps it to gloo, which takes no tensors on it
}
"""By torch's device type; "rocm" is torch's "cuda" on AMD."""

CUMEM = "NCCL_CUMEM_ENABLE"
"""How nccl allocates memory. Processes that differ in it cannot connect."""

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
    """Whether code that names CUDA itself, such as megatron's, finds it here. All other code asks `has_accelerator`."""
    import torch

    return torch.cuda.is_available()


def has_accelerator() -> bool:
    """Whether this process has an accelerator that workers can use."""
    return kind() != "cpu"


def kind() -> str:
    """Return torch's type of this process's device: "cuda", another accelerator's, or "cpu".

    Raises:
        DeviceError: the accelerator is not in `ACCELERATORS`.
    """
    import torch

    found = torch.accelerator.current_accelerator(check_available=True)
    if found is None:
        return "cpu"
    if found.type not in ACCELERATORS:
        raise DeviceError(
            f"torch has an accelerator of the type {found.type!r}, whose names workers.device.ACCELERATORS does not "
            "have: add its backend of torch.distributed and its list of visible devices there"
        )
    return "cpu" if ACCELERATORS[found.type].backend is None else found.type


def names() -> Accelerator:
    """Return the names of this process's accelerator. It must have one."""
    import torch

    return ACCELERATORS["rocm" if torch.version.hip is not None else kind()]


def backend() -> str:
    """Return the backend for ``torch.distributed``: the accelerator's if this process has one, otherwise gloo."""
    return str(names().backend) if has_accelerator() else "gloo"


def every_backend() -> str:
    """Return the ``torch.distributed`` backends for tensors on any device, such as ``"cpu:gloo,cuda:nccl"``."""
    return f"cpu:gloo,{kind()}:{backend()}" if has_accelerator() else "gloo"


def on_accelerator(device: torch.device) -> bool:
    """Whether a device is an accelerator: neither the CPU nor torch's "meta"."""
    return device.type not in ("cpu", "meta")


def synchronize(devices: Iterable[torch.device]) -> None:
    """Wait for everything that was started on the accelerators among devices."""
    import torch

    for one in {device for device in devices if on_accelerator(device)}:
        torch.accelerator.synchronize(one)


def empty_cache() -> None:
    """Give the accelerator's memory that torch has cached back to the driver."""
    import torch

    if has_accelerator():
        torch.accelerator.empty_cache()


def free_device_memory() -> int:
    """Return the free bytes of the current device, over all processes. This process must have an accelerator."""
    import torch

    return int(torch.accelerator.get_memory_info()[0])


def host_memory(nbytes: int, *, pinned: bool) -> torch.Tensor:
    """Allocate host memory (uint8). Accelerators copy to and from pinned memory directly.

    CUDA registers memory of numpy's. Other accelerators have only torch's pinned memory, which is rounded up to a power
    of two and cached after it is freed. If CUDA cannot pin it, a warning is logged and copies are slower.
    """
    import numpy as np
    import torch

    if not pinned or not nbytes:
        return torch.empty(nbytes, dtype=torch.uint8)
    if kind() != "cuda":
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
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

    if not has_accelerator():
        return torch.device("cpu")
    count = torch.accelerator.device_count()
    if not device_ids:
        return torch.device(kind(), local_rank % count)
    index = visible_index(device_ids[0], os.environ, names().visible)
    if index >= count:
        raise DeviceError(
            f"Ray assigned device {device_ids[0]} to this worker, at index {index} of its visible devices, but torch "
            f"sees only {count}: ray.init(num_gpus=...) promised more GPUs than the node has, or the list of visible "
            "devices was changed after torch had read it"
        )
    return torch.device(kind(), index)


def visible_index(device_id: str, environment: Mapping[str, str], lists: Sequence[str]) -> int:
    """Return torch's index of a device.

    Args:
        device_id: Ray's id of the device: its number on the node, or its entry in the list of visible devices if that
            was set before Ray started.
        environment: environment variables of the process.
        lists: ``visible`` of the `Accelerator`.

    Raises:
        DeviceError: the device is not in the list of visible devices.
    """
    name = next((name for name in lists if name in environment), None)
    if name is None:
        if not device_id.isdigit():
            raise DeviceError(
                f"Ray assigned device {device_id!r} to this worker; it is not a number, and none of the "
                f"variables {', '.join(lists)} lists it"
            )
        return int(device_id)
    # ONEAPI_DEVICE_SELECTOR is "level_zero:0,1".
    visible = [item.strip() for item in environment[name].removeprefix("level_zero:").split(",")]
    if device_id not in visible:
        raise DeviceError(
            f"Ray assigned device {device_id} to this worker, but {name}={environment[name]!r} hides it: remove that "
            "variable from worker_env and runtime_env, so that Ray sets it, or list all devices of the node in it"
        )
    return visible.index(device_id)


def use_device(taken: torch.device | None) -> None:
    """Make a device that `take_device` returned the current one of this thread. torch has one for each thread."""
    import torch

    if taken is not None and on_accelerator(taken):
        torch.accelerator.set_device_index(taken)


def take_device(local_rank: int = 0, device_ids: Sequence[str] = ()) -> torch.device:
    """Make `device` the current device, and return it."""
    mine = device(local_rank, device_ids)
    use_device(mine)
    return mine


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy a tensor to a device without waiting for the device: from host memory by way of pinned memory, which torch
    keeps until the copy is done."""
    if on_accelerator(device) and tensor.device.type == "cpu":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def current_device() -> torch.device:
    """Return the current device: of this process's accelerator, or the CPU."""
    import torch

    if not has_accelerator():
        return torch.device("cpu")
    return torch.device(kind(), torch.accelerator.current_device_index())


@cache
def device_name(local_rank: int = 0, device_ids: tuple[str, ...] = ()) -> str:
    """Return the name of a worker's device. It is the same in every process that can open memory there."""
    return name_of(device(local_rank, device_ids))


def name_of(here: torch.device) -> str:
    """`device_name` of a torch device of this process: ``<type>:<uuid>``, or ``cpu:<host> <namespace>``."""
    import torch

    if on_accelerator(here):
        properties = torch.get_device_module(here).get_device_properties(here)
        return f"{here.type}:{getattr(properties, 'uuid', None) or _number_on_host(here)}"
    try:
        namespace = os.readlink("/proc/self/ns/pid")
    except OSError:  # macOS has neither /proc nor namespaces
        namespace = ""
    return f"cpu:{socket.gethostname()} {namespace}"


def _number_on_host(here: torch.device) -> str:
    listed = next((os.environ[name] for name in names().visible if name in os.environ), None)
    number = str(here.index) if listed is None else listed.split(",")[here.index]
    return f"{socket.gethostname()} {number}"


def new_backend(name: str, store: Any, rank: int, size: int, timeout: timedelta, device: torch.device) -> Any:
    """Create and connect a backend of torch.distributed that belongs to no process group.

    Args:
        name: of the backend: "gloo", or an accelerator's.
        store: for the rendezvous.
        rank: of this process.
        size: number of processes.
        timeout: of its operations.
        device: of its tensors. An accelerator becomes the current device of this thread.
    """
    import torch.distributed as dist

    use_device(device)
    if name in ("gloo", "nccl", "xccl"):
        backend: Any = getattr(dist, f"ProcessGroup{'Gloo' if name == 'gloo' else name.upper()}")
        if name == "gloo":
            return backend(store, rank, size, timeout)
        options = backend.Options()
        options._timeout = timeout
        with _watchdog_reports_errors():
            made = backend(store, rank, size, options)
    else:  # registered with torch by an extension
        plugin = dist.Backend._plugins[name.upper()]
        arguments: tuple[Any, ...] = (store, rank, size, timeout)
        if plugin.extended_api:
            wanted = dist.distributed_c10d._DistributedBackendOptions()
            wanted.store, wanted.group_rank, wanted.group_size, wanted.timeout = arguments
            wanted.global_ranks_in_group, arguments = list(range(size)), (wanted, None)
        made = plugin.creator_fn(*arguments)
    # Connect now, while the caller still notices a missing member; nccl would connect lazily.
    if hasattr(made, "eager_connect_single_device"):
        made.eager_connect_single_device(device)
    return made


_watchdog_lock = threading.Lock()
"""Protects `_watchdog_before` and the variable of `_watchdog_reports_errors`."""

_watchdog_before: list[str | None] = []
"""What the variable was, once for each thread that is inside."""


@contextlib.contextmanager
def _watchdog_reports_errors() -> Iterator[None]:
    """Inside, an nccl group is created with a watchdog that reports errors instead of ending the process.

    torch reads the setting from the environment, which all threads of the process share: also those of an in-process
    worker group, which create the other ends. The last one to leave restores it.
    """
    name = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
    with _watchdog_lock:
        _watchdog_before.append(_watchdog_before[0] if _watchdog_before else os.environ.get(name))
        os.environ[name] = "2"  # clean up the communicator only
    try:
        yield
    finally:
        with _watchdog_lock:
            before = _watchdog_before.pop()
            if not _watchdog_before:
                os.environ.pop(name, None)
                if before is not None:
                    os.environ[name] = before


def share_memory(memory: torch.Tensor) -> tuple[Any, ...]:
    """Return a handle with which another process can open a device's memory once. Needs `Accelerator.ipc`."""
    from torch.multiprocessing.reductions import reduce_tensor

    handle: tuple[Any, ...] = reduce_tensor(memory)[1]
    return handle


@contextlib.contextmanager
def opened_memory(handle: Sequence[Any], here: torch.device) -> Iterator[torch.Tensor]:
    """Open what `share_memory` returned in another process on the same device. The device is also the current one
    inside: torch keeps it per thread, and the thread that runs a method of a worker may never have selected one."""
    import torch
    from torch.multiprocessing.reductions import rebuild_cuda_tensor

    arguments = list(handle)
    arguments[6] = here.index  # the sender may see the same device under another index
    with torch.accelerator.device_index(here.index):
        memory = rebuild_cuda_tensor(*arguments)
        try:
            yield memory
        finally:
            synchronize([here])  # the sender overwrites the memory with the next round
            del memory
            collect_shared()


def collect_shared() -> None:
    """Free memory that was shared with other processes and that none of them uses any more."""
    import torch

    if has_accelerator() and names().ipc:
        torch.cuda.ipc_collect()


def device_runtime(folder: Path) -> tuple[str, list[Path]]:
    """Return the major version of torch's CUDA, "" without one, and the CUDA runtimes that pip has installed."""
    import torch

    major = (torch.version.cuda or "").split(".")[0]
    return major, sorted(folder.glob(f"nvidia/*/lib/libcudart.so.{major}*")) if major else []


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
