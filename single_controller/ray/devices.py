"""Which devices are this process's own. For every worker's process, so it imports little.

Ray itself sets the list of visible devices (CUDA_VISIBLE_DEVICES, HIP_VISIBLE_DEVICES on AMD, ASCEND_RT_VISIBLE_DEVICES
for the resource NPU, and so on) before a task and before an actor's constructor; unless its variable
RAY_EXPERIMENTAL_NOSET_<list> is true there, or it gave the process no device. Only for that last case, in which Ray
leaves all devices of the node visible, a list is set here.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import ray

_LISTS = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")


def own_devices() -> tuple[str, ...]:
    """Ids of the devices that Ray gave this process, GPUs first, as numbers; () without any. Not in the driver.

    Whether or not Ray hides the others from it.
    """
    by_kind: Mapping[str, Iterable[str]] = ray.get_runtime_context().get_accelerator_ids()
    kinds = sorted(by_kind, key=lambda kind: (kind != "GPU", kind))
    return tuple(
        device for kind in kinds for device in sorted(map(str, by_kind[kind]), key=lambda name: device_key([name]))
    )


def hide_other_devices(devices: Sequence[str], given: Mapping[str, str]) -> None:
    """Have a process to which Ray gave no device see no GPU, so that it takes none from those who reserved them. Before
    torch is imported there.

    Args:
        devices: `own_devices`.
        given: variables that were asked for; a list among them stays. So do all where Ray's own switch for this,
            RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO, is 0.
    """
    if devices or os.environ.get("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "1").lower() in ("0", "false"):
        return
    os.environ.update({name: "" for name in _LISTS if name not in given})


def device_key(devices: Sequence[str]) -> tuple[Any, ...]:
    """Sorts device ids as numbers: GPU 2 before GPU 10. What is no number (a UUID) sorts by text, after them."""
    return tuple((0, int(device), "") if device.isdigit() else (1, 0, device) for device in devices)
