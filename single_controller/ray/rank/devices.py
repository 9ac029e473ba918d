"""The devices that Ray assigned to this process. Every worker process imports this module, so it imports little.

Ray sets the list of visible devices (CUDA_VISIBLE_DEVICES, HIP_VISIBLE_DEVICES on AMD, ASCEND_RT_VISIBLE_DEVICES for
the resource NPU, and so on) before a task and before an actor's constructor, unless its variable
RAY_EXPERIMENTAL_NOSET_<list> is true, or it assigned no device. In the last case Ray leaves all devices of the node
visible; only then this module sets a list.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import ray

from single_controller.ray.compat import device_lists_before

_LISTS = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")

NOSET = {
    f"RAY_EXPERIMENTAL_NOSET_{name}": name
    for name in (
        *("ASCEND_RT_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES", "HABANA_VISIBLE_MODULES", "HIP_VISIBLE_DEVICES"),
        *("NEURON_RT_VISIBLE_CORES", "ONEAPI_DEVICE_SELECTOR", "ROCR_VISIBLE_DEVICES"),
    )
}
"""The switches whose effect `show_all_devices` has, and their lists. Not those of TPUs, for which Ray sets more than
the list, and of ZE_AFFINITY_MASK, whose former value Ray does not keep."""


def own_devices() -> tuple[str, ...]:
    """Ids of the devices that Ray assigned to this worker process, GPUs first, in numeric order; () if none."""
    by_kind: Mapping[str, Iterable[str]] = ray.get_runtime_context().get_accelerator_ids()
    kinds = sorted(by_kind, key=lambda kind: (kind != "GPU", kind))
    return tuple(
        device for kind in kinds for device in sorted(map(str, by_kind[kind]), key=lambda name: device_key([name]))
    )


def hide_other_devices(devices: Sequence[str], given: Mapping[str, str]) -> None:
    """Hide all GPUs from a process to which Ray assigned none, so that it cannot use those that others reserved. Must
    run before torch is imported.

    Args:
        devices: `own_devices`.
        given: variables that the user set; a list among them stays. Ray's own switch for this,
            RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO=0, disables hiding.
    """
    if devices or os.environ.get("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "1").lower() in ("0", "false"):
        return
    os.environ.update({name: "" for name in _LISTS if name not in given})


def show_all_devices(given: Mapping[str, str]) -> None:
    """Restore the lists that Ray has set in this process although a variable of `NOSET` is true. Ray reads these when
    it creates the actor, before ``given`` is in the environment.

    Args:
        given: variables that the user set.
    """
    lists = {NOSET[key] for key, value in given.items() if is_noset(key, value)}
    for name, value in device_lists_before().items() if lists else ():
        if name in lists and value is None:
            os.environ.pop(name, None)
        elif name in lists and value is not None:
            os.environ[name] = value


def is_noset(key: str, value: str) -> bool:
    """Whether a variable tells Ray not to set a list that `show_all_devices` can restore."""
    return key in NOSET and value.lower() in ("1", "true")


def device_key(devices: Sequence[str]) -> tuple[Any, ...]:
    """Sort key that compares device ids as numbers: GPU 2 before GPU 10. Other ids (UUIDs) follow, by text."""
    return tuple((0, int(device), "") if device.isdigit() else (1, 0, device) for device in devices)
