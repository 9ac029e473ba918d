"""The environment of a worker process, and the devices that Ray assigned to it. Every worker process imports this
module, so it imports little.

Ray sets the list of visible devices (CUDA_VISIBLE_DEVICES, HIP_VISIBLE_DEVICES on AMD, ASCEND_RT_VISIBLE_DEVICES for
the resource NPU, and so on) before a task and before an actor's constructor, unless its variable
RAY_EXPERIMENTAL_NOSET_<list> is true, or it assigned no device. In the last case Ray leaves all devices of the node
visible; only then this module sets a list.
"""

from __future__ import annotations

import faulthandler
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import ray

from single_controller.ray.compat import device_lists_before

NOSET = {
    f"RAY_EXPERIMENTAL_NOSET_{name}": name
    for name in (
        *("ASCEND_RT_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES", "HABANA_VISIBLE_MODULES", "HIP_VISIBLE_DEVICES"),
        *("NEURON_RT_VISIBLE_CORES", "ONEAPI_DEVICE_SELECTOR", "ROCR_VISIBLE_DEVICES"),
    )
}
"""The switches whose effect `_show_all_devices` has, and their lists. Not those of TPUs, for which Ray sets more than
the list, and of ZE_AFFINITY_MASK, whose former value Ray does not keep."""

_NONE_VISIBLE = dict.fromkeys(
    ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ZE_AFFINITY_MASK", "ASCEND_RT_VISIBLE_DEVICES"), ""
)
"""The lists of a process without devices, for the devices that torch knows. Ray reads "" as none, too."""

SOCKET_INTERFACES = {"GLOO": "", "NCCL": "=", "HCCL": "=", "TP": ""}
"""What has a variable ..._SOCKET_IFNAME, and what comes before the interface there. Without "=", NCCL would also take
every interface whose name begins with this one; HCCL has the same rule."""

_PREFIXES = ("LD_", "PYTHON", "MALLOC_", "GLIBC_", "RAY_", "TMS_")
"""Variables that are read once when a process starts, or may be. The last are those of torch_memory_saver."""

_PYTHON = (
    *("PYTHONASYNCIODEBUG", "PYTHONBREAKPOINT", "PYTHONDONTWRITEBYTECODE"),
    *("PYTHONFAULTHANDLER", "PYTHONUNBUFFERED"),
)
"""Exceptions: Python reads the first two when it needs them, and `set_environment` has the effect of the others. Ray's
workers never buffer their output."""


def own_devices() -> tuple[str, ...]:
    """Ids of the devices that Ray assigned to this worker process, GPUs first, in numeric order; () if none."""
    by_kind: Mapping[str, Iterable[str]] = ray.get_runtime_context().get_accelerator_ids()
    kinds = sorted(by_kind, key=lambda kind: (kind != "GPU", kind))
    return tuple(
        device for kind in kinds for device in sorted(map(str, by_kind[kind]), key=lambda name: device_key([name]))
    )


def device_key(devices: Sequence[str]) -> tuple[Any, ...]:
    """Sort key that compares device ids as numbers: GPU 2 before GPU 10. Other ids (UUIDs) follow, by text."""
    return tuple((0, int(device), "") if device.isdigit() else (1, 0, device) for device in devices)


def before_start(key: str, value: str) -> bool:
    """Whether a variable of ``worker_env`` must be set before the process starts, by a runtime_env. This makes the
    start slower: Ray is imported twice, and processes that Ray has started in advance cannot be used."""
    at_run_time = _is_noset(key, value) or (key in _PYTHON and value != "")
    return key.startswith(_PREFIXES) and not at_run_time


def set_environment(environment: Mapping[str, str]) -> None:
    """Set the variables of ``worker_env`` in this worker, and the lists of visible devices. Must run before user code
    is imported: importing torch reads the environment."""
    # A process to which Ray assigned no device must not use those that others reserved. The second condition is Ray's
    # own switch for this.
    if not own_devices() and os.environ.get("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "1").lower() not in ("0", "false"):
        os.environ.update(_NONE_VISIBLE)
    _show_all_devices(environment)
    os.environ.update(environment)
    if environment.get("PYTHONDONTWRITEBYTECODE"):
        sys.dont_write_bytecode = True
    if environment.get("PYTHONFAULTHANDLER"):
        faulthandler.enable(2)  # Ray has enabled it for one thread; 2 is stderr, as when Python starts


def _show_all_devices(given: Mapping[str, str]) -> None:
    """Restore the lists that Ray has set in this process although a variable of `NOSET` is true. Ray reads these when
    it creates the actor, before ``given`` is in the environment."""
    lists = {NOSET[key] for key, value in given.items() if _is_noset(key, value)}
    for name, value in device_lists_before().items() if lists else ():
        if name in lists and value is None:
            os.environ.pop(name, None)
        elif name in lists and value is not None:
            os.environ[name] = value


def _is_noset(key: str, value: str) -> bool:
    """Whether a variable tells Ray not to set a list that `_show_all_devices` can restore."""
    return key in NOSET and value.lower() in ("1", "true")
