"""PoolOptions: what the slots of a pool reserve, and how they are placed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dispatch.checks import check_amounts, check_count, check_seconds
from single_controller.ray.compat import accelerator_names
from single_controller.ray.placement.feasibility import Request

STRATEGIES = ("PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD")

_UNIT = 10_000
"""Ray counts resources in ten-thousandths."""

_HAVE_OPTIONS = {"CPU": "use num_cpus=", "GPU": "use num_gpus=", "memory": "use memory="}
_NO_CUSTOM_RESOURCES = {**_HAVE_OPTIONS, "object_store_memory": "Ray does not reserve it"}


@dataclass(frozen=True)
class PoolOptions:
    """What each slot of a pool reserves, and how: see `RayResourcePool`. A `ValueError` if an option is impossible."""

    use_gpu: bool
    name_prefix: str
    max_colocate_count: int
    detached: bool
    resources: Mapping[str, float]
    num_cpus: float
    num_gpus: float
    memory: float
    placement_timeout: float
    accelerator_type: str | None = None
    strategy: str | None = None
    across_nodes: bool = False

    def __post_init__(self) -> None:
        check_count("max_colocate_count", self.max_colocate_count)
        for name in ("name_prefix", "accelerator_type"):
            if not isinstance(getattr(self, name), str | None):
                raise ValueError(f"{name} is a string or None, got {getattr(self, name)!r}")
        for name in check_amounts("resources", self.resources):
            if name in _NO_CUSTOM_RESOURCES:
                raise ValueError(f"resources takes custom resources; {name!r} is none: {_NO_CUSTOM_RESOURCES[name]}")
        for name, what in (
            ("num_cpus", "logical CPUs of each slot (2, or 0.5)"),
            ("num_gpus", "GPUs of each slot (1, or 0.5 for two slots on a GPU)"),
            ("memory", "bytes of each slot (8 * 2**30, or 0 to reserve none)"),
        ):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < math.inf:
                raise ValueError(f"{name} is a number, the {what}, got {value!r}")
        self._check_gpus()
        if self.strategy is not None and self.strategy not in STRATEGIES:
            raise ValueError(f"strategy is None or one of {', '.join(STRATEGIES)}, got {self.strategy!r}")
        if not isinstance(self.across_nodes, bool):
            raise ValueError(
                f"across_nodes is True (one placement group for all entries) or False (one for each), got "
                f"{self.across_nodes!r}"
            )
        check_seconds("placement_timeout", self.placement_timeout)
        if not self.bundle:
            raise ValueError("a slot must reserve something: set num_cpus, memory or resources, or use_gpu=True")
        for name, resource in (("num_cpus", "CPU"), ("num_gpus", "GPU")):
            amount = self.bundle.get(resource, 0)
            if 0 < amount * _UNIT < self.max_colocate_count:
                raise ValueError(
                    f"max_colocate_count={self.max_colocate_count} workers cannot share {name}={amount:g}: Ray does "
                    "not allocate less than 0.0001 to a worker"
                )

    def _check_gpus(self) -> None:
        gpus = self.num_gpus
        if not self.use_gpu:
            if gpus not in (0, 1):
                raise ValueError(f"num_gpus={gpus!r} with use_gpu=False: give only one of the two")
            return
        if gpus == 0:
            raise ValueError("num_gpus=0: use_gpu=False makes CPU-only slots")
        part = gpus / self.max_colocate_count
        if gpus > 1 and gpus != int(gpus):
            raise ValueError(f"num_gpus is a fraction below 1 or a whole number, got {gpus!r}: Ray supports no others")
        if part > 1 and part != int(part):
            raise ValueError(
                f"num_gpus={gpus:g} shared by max_colocate_count={self.max_colocate_count} workers gives each worker "
                f"{part:g} GPUs, but a worker needs a fraction below 1 or a whole number; change one of the two"
            )

    @property
    def bundle(self) -> dict[str, float]:
        """What one slot reserves: resource -> amount."""
        reserved: dict[str, float] = {"CPU": self.num_cpus, "GPU": self.num_gpus if self.use_gpu else 0}
        reserved |= {"memory": self.memory, **self.resources}
        if self.accelerator_type is not None:
            reserved[f"accelerator_type:{self.accelerator_type}"] = 0.001
        return {name: amount for name, amount in reserved.items() if amount}

    def request(self, entries: Sequence[int], bin_pack: bool, resources: Mapping[str, float]) -> Request:
        """Return what Ray is asked for. Arguments as for `RayResourcePool` and its `place`."""
        bundle = self.bundle
        bundle |= {name: max(amount, bundle.get(name, 0.0)) for name, amount in resources.items()}
        strategy = self.strategy or ("STRICT_PACK" if bin_pack and not self.across_nodes else "PACK")
        return Request(tuple(entries), bundle, strategy, self.across_nodes)

    def share(self, use_gpu: bool) -> dict[str, Any]:
        """Return what each worker takes, as Ray's actor options: 1 / max_colocate_count of its slot's CPU, GPU and
        memory, and of custom resources that are devices (NPU). Ray gives a process ids only of devices it takes."""
        devices = accelerator_names() & set(self.resources)
        return {
            "num_cpus": self._part(self.num_cpus),
            "num_gpus": self._part(self.num_gpus) if use_gpu else 0,
            "memory": int(self.memory // self.max_colocate_count) or None,
            "resources": {name: self._part(self.resources[name]) for name in sorted(devices)},
        }

    def _part(self, amount: float) -> float:
        """Rounded down, so that max_colocate_count parts always fit."""
        return math.floor(amount * _UNIT / self.max_colocate_count + 1e-6) / _UNIT
