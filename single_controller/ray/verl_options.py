"""Options of verl's groups, which drivers written for verl pass, and which have no meaning here."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

from single_controller.call.methods import suggestion


class VerlOptions(TypedDict, total=False):
    """Options of verl's groups that have no meaning here, and None where they were not given."""

    device_name: str | None
    ray_wait_register_center_timeout: float | None
    profile_steps: Sequence[int] | None
    worker_nsight_options: Mapping[str, Any] | None


_INSTEAD = {
    "device_name": "use_gpu= and resources= of the pool say which devices the workers have",
    "ray_wait_register_center_timeout": "start_timeout= limits the start",
    "profile_steps": "a worker's methods start and stop its profiler",
    "worker_nsight_options": "call ray_cls_with_init.update_options({'runtime_env': {'nsight': {...}}})",
}
"""What to use instead of each of `VerlOptions`."""


def check_verl_options(group: type, options: Mapping[str, Any]) -> None:
    """Warn of each option, and raise for one that verl has not either.

    Raises:
        TypeError: there is no such option.
        ValueError: ``worker_nsight_options`` is given.
    """
    for name, value in options.items():
        if name not in _INSTEAD:
            known = [other for other in inspect.signature(group).parameters if other != "verl"]
            raise TypeError(f"{group.__name__}() got an unexpected keyword argument {name!r}{suggestion(name, known)}")
        if value is None:
            continue
        if name == "worker_nsight_options":
            raise ValueError(f"{name} has no effect here: {_INSTEAD[name]}")
        warnings.warn(f"{name}={value!r} has no effect: {_INSTEAD[name]}", stacklevel=3)
