"""ResourcePoolManager: pools by name, and the pool of each role. For the lock, see `_creating`."""

from __future__ import annotations

import threading
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

from dispatch.checks import suggestion
from single_controller.call.errors import GroupClosedError
from single_controller.call.state import Closing
from single_controller.ray.placement.plan import refuse_impossible
from single_controller.ray.placement.pool import RayResourcePool
from single_controller.ray.runtime import nodes

_creating = threading.Lock()
"""Protects the pools and the closed state of every manager: two threads that create the pools at once both get those of
the first, and `close` misses none. A leaf."""


class ResourcePoolManager(Closing):
    """Pools by name, and the pool of each role.

    The pools are created together when one is first asked for. The first group on each reserves its slots. Closing the
    manager closes the pools.

    Args:
        resource_pool_spec: name of a pool -> its processes on each node, ``{"global": [8, 8]}``.
        mapping: role -> name of its pool. A role is any key of a dict: a string, a member of an Enum. By default, the
            name of each pool is its only role.
        use_gpu: whether a slot has a GPU.
        options: further options of `RayResourcePool` for every pool.

    Attributes:
        resource_pool_spec, mapping: as given.
        resource_pool_dict: name -> pool; empty until they are created.

    Raises:
        TypeError, ValueError: the spec is no dict of pools, or the mapping none of roles and its pools.
    """

    def __init__(
        self,
        resource_pool_spec: Mapping[str, Sequence[int]],
        mapping: Mapping[Any, str] | None = None,
        *,
        use_gpu: bool = True,
        **options: Any,
    ) -> None:
        if not isinstance(resource_pool_spec, Mapping):
            raise TypeError(f"resource_pool_spec is a dict of pools ({{'global': [8, 8]}}), got {resource_pool_spec!r}")
        mapping = {name: name for name in resource_pool_spec} if mapping is None else mapping
        if not isinstance(mapping, Mapping):
            raise TypeError(f"mapping is a dict of roles ({{'actor': 'global'}}), got {mapping!r}")
        if not resource_pool_spec:
            raise ValueError("resource_pool_spec names no pool; it is a dict like {'global': [8, 8]}")
        for role, name in mapping.items():
            if name not in resource_pool_spec:
                raise ValueError(
                    f"mapping: {_name(role)} is mapped to the pool {name!r}, which is not in resource_pool_spec"
                    f"{suggestion(str(name), resource_pool_spec)}"
                )
        self.resource_pool_spec = {name: list(entries) for name, entries in resource_pool_spec.items()}
        self.mapping = dict(mapping)
        self.resource_pool_dict: dict[str, RayResourcePool] = {}
        self._options = {"use_gpu": bool(use_gpu), **options}
        self._closed = False

    def create_resource_pool(self) -> None:
        """Create the pools, once. Reserves nothing.

        Raises:
            PlacementError: the nodes can never hold one of them, or all of them side by side.
            ValueError: an option of a pool is not possible.
            GroupClosedError: the manager is closed.
        """
        self._check_open()
        # The lock is not needed here: the dict is replaced once, by a complete one. A thread that misses this creates
        # pools of its own, which have reserved nothing, and drops them below.
        if self.resource_pool_dict:
            return
        made = {
            name: RayResourcePool(entries, **{"name_prefix": name, **self._options})
            for name, entries in self.resource_pool_spec.items()
        }
        cluster, requests = nodes(), {name: pool.reservations[0].request for name, pool in made.items()}
        for name, request in requests.items():
            refuse_impossible([request], cluster, f"the pool {name!r}")
        pools = ", ".join(f"{name} {entries}" for name, entries in self.resource_pool_spec.items())
        refuse_impossible(list(requests.values()), cluster, f"{pools}: this set of pools, side by side,")
        with _creating:  # not before: asking Ray for its nodes may take long. Nothing is reserved until now
            self._check_open()
            self.resource_pool_dict = self.resource_pool_dict or made

    def _check_open(self) -> None:
        if self._closed:
            raise GroupClosedError("the ResourcePoolManager is closed; make a new one")

    def get_resource_pool(self, role: Hashable) -> RayResourcePool:
        """Return the pool of a role; create the pools if that was not done.

        Raises:
            ValueError: the mapping does not have the role.
            PlacementError: see `create_resource_pool`.
        """
        if role not in self.mapping:
            raise ValueError(
                f"no pool is mapped to the role {_name(role)}{suggestion(_name(role), map(_name, self.mapping))}"
            )
        self.create_resource_pool()
        return self.resource_pool_dict[self.mapping[role]]

    def get_n_gpus(self) -> float:
        """Return the GPUs of all pools: 0 for CPU-only ones, an int if the number is whole."""
        if not self._options["use_gpu"]:
            return 0
        each = self._options.get("num_gpus", 1)
        gpus = each * sum(sum(entries) for entries in self.resource_pool_spec.values())
        return int(gpus) if gpus == int(gpus) else float(gpus)

    def close(self) -> None:
        """Close the pools. A second close does nothing."""
        with _creating:
            self._closed = True
        # Outside the lock: ending workers takes long, and after `_closed` nobody adds pools
        for pool in self.resource_pool_dict.values():
            pool.close()

    def __repr__(self) -> str:
        return f"ResourcePoolManager({self.resource_pool_spec})"


def _name(role: Hashable) -> str:
    """A role for a message: the name of an Enum's member."""
    return str(getattr(role, "name", role))
