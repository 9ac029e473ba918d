"""Which of Ray's resources are devices, and which devices reserved slots have."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import ray
from ray.exceptions import GetTimeoutError, RayError

from single_controller.base.errors import PlacementError
from single_controller.ray.devices import own_devices
from single_controller.ray.internals import accelerator_names
from single_controller.ray.placement.slots import Slot

RAYS_OWN = ("CPU", "GPU", "memory", "object_store_memory")
"""Resources that are no custom resources."""

_LEAST = 0.0001
"""The smallest amount of a resource that a task can take."""


def device_kinds(bundle: Iterable[str]) -> frozenset[str]:
    """Return those of a slot's resources whose units are devices."""
    return frozenset(bundle) & {"GPU", *accelerator_names()}


def devices_in(
    slots: Sequence[Slot], bundle: Iterable[str], timeout: float, name: str
) -> Sequence[tuple[str, ...] | None]:
    """Return the devices of each reserved slot, as reported by short tasks in them that take next to nothing.

    Args:
        slots: the slots, none of them full.
        bundle: the resources of a slot.
        timeout: seconds.
        name: the pool, for messages.

    Returns:
        By slot, the ids; () for slots without devices, None where Ray gives no part of such a device (of a TPU).

    Raises:
        PlacementError: a task had not run within ``timeout`` seconds.
    """
    kinds = device_kinds(bundle)
    if not kinds:
        return [()] * len(slots)
    each = dict.fromkeys(kinds, _LEAST)
    try:
        ask = ray.remote(num_cpus=0, num_gpus=each.pop("GPU", 0), resources=each, max_retries=0)(own_devices)
    except ValueError:
        return [None] * len(slots)
    asked = [ask.options(scheduling_strategy=slot.scheduling_strategy()).remote() for slot in slots]
    try:
        devices: list[tuple[str, ...] | None] = ray.get(asked, timeout=timeout)
    except GetTimeoutError:
        for task in asked:
            ray.cancel(task)
        raise PlacementError(
            f"{name}: its slots did not report their devices within {timeout:g} s. Check "
            "whether other actors use up the slots, and whether the nodes can start processes"
        ) from None
    except RayError as error:
        raise PlacementError(f"{name}: a slot did not report its devices: {type(error).__name__}: {error}") from error
    return devices
