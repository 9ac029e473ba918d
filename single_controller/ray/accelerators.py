"""Ray's resources that are devices, and the devices of reserved slots."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import ray
from ray.exceptions import GetTimeoutError

from single_controller.base.errors import PlacementError
from single_controller.ray.devices import own_devices
from single_controller.ray.order import Slot

RAYS_OWN = ("CPU", "GPU", "memory", "object_store_memory")
"""Resources that have an option of their own."""

_LEAST = 0.0001
"""The least that Ray gives of a resource."""

_KNOWN = frozenset({"NPU", "TPU", "HPU", "neuron_cores"})


def accelerator_names() -> frozenset[str]:
    """Resources whose units are devices with ids, besides GPU: a worker must ask for its part to be given an id."""
    try:
        from ray._private.accelerators import get_all_accelerator_resource_names

        return frozenset(get_all_accelerator_resource_names()) - {"GPU"}
    except ImportError:  # not a public name of Ray's
        return _KNOWN


def device_kinds(bundle: Iterable[str]) -> frozenset[str]:
    """Those of a slot's resources whose units are devices."""
    return frozenset(bundle) & {"GPU", *accelerator_names()}


def devices_in(slots: Sequence[Slot], kinds: Iterable[str], timeout: float, name: str) -> list[tuple[str, ...] | None]:
    """The devices of reserved slots, asked by short tasks in them, which take next to nothing.

    Args:
        slots: the slots, none of them full.
        kinds: the resources that are devices, GPU or one of `accelerator_names`.
        timeout: seconds.
        name: the pool, for messages.

    Returns:
        By slot, the ids; None where Ray gives no part of such a device (of a TPU).

    Raises:
        PlacementError: a task had not run within ``timeout`` seconds.
    """
    each = dict.fromkeys(kinds, _LEAST)
    try:
        ask = ray.remote(num_cpus=0, num_gpus=each.pop("GPU", 0), resources=each, max_retries=0)(own_devices)
    except ValueError:
        return [None] * len(slots)
    asked = [ask.options(scheduling_strategy=slot.strategy()).remote() for slot in slots]
    try:
        devices: list[tuple[str, ...] | None] = ray.get(asked, timeout=timeout)
    except GetTimeoutError:
        for task in asked:
            ray.cancel(task)
        raise PlacementError(
            f"{name}: its slots did not say within {timeout:g} s which devices they have: they are full, or the nodes "
            "start no processes"
        ) from None
    return devices
