"""Names and options of verl that this library knows, for workers and drivers that were written for it.

Most are other names of what is here anyway. `create_colocated_worker_cls` and its like are beside `colocate`, which
needs `Worker`; this module is below all others.
"""

from __future__ import annotations

import inspect
import os
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict

from dispatch.checks import suggestion
from dispatch.layout import Mesh
from dispatch.modes import Dispatch, Execute
from dispatch.plan import plan_execute, plan_rank_zero
from dispatch.register import register


class VerlWorker:
    """The methods of `Worker` that workers written for verl call. ``self`` is a `Worker`."""

    @register(Dispatch.DP_COMPUTE_PROTO_WITH_FUNC)
    def execute_with_func_generator(self, func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a function of the driver on every rank, with the worker as its first argument, in the mode
        DP_COMPUTE_PROTO: ``group.execute_with_func_generator(func, batch)``. Without a batch it returns the list of all
        ranks' results.

        Args:
            func: ``func(worker, *args, **kwargs)``. It is pickled and may be a lambda.
            args: batches, and values that are sent whole.
            kwargs: likewise.
        """
        return func(self, *args, **kwargs)

    @register(Dispatch.ALL_TO_ALL, execute_mode=Execute.RANK_ZERO)
    def execute_func_rank_zero(self, func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run ``func(*args, **kwargs)`` on rank 0 alone, without the worker, and return its result."""
        return func(*args, **kwargs)

    def _register_dispatch_collect_info(self: Any, mesh_name: str, dp_rank: int, is_collect: bool) -> None:
        """`Worker.register_mesh`."""
        self.register_mesh(mesh_name, dp_rank, is_collect)

    def query_collect_info(self: Any, mesh_name: str) -> bool:
        """Whether this rank collects on a mesh that it has registered; a `LookupError` for any other."""
        meshes: dict[str, tuple[int, bool]] = self._layout_report.meshes
        if mesh_name not in meshes:
            known = ", ".join(meshes) or "none"
            raise LookupError(f"{type(self).__name__} registered no mesh {mesh_name!r} (registered: {known})")
        return meshes[mesh_name][1]

    def get_dispatch_collect(self: Any) -> dict[str, dict[str, Any]]:
        """The meshes that this worker has registered, as keyword arguments of `set_dispatch_collect`."""
        meshes = self._layout_report.meshes.items()
        return {
            "dispatch_dp_rank": {name: dp_rank for name, (dp_rank, _) in meshes},
            "collect_dp_rank": {name: collects for name, (_, collects) in meshes},
        }

    def set_dispatch_collect(
        self: Any, mesh_name: str, dispatch_dp_rank: Mapping[str, int], collect_dp_rank: Mapping[str, bool]
    ) -> None:
        """Register a mesh with the coordinates of a worker that this one wraps, on its only mesh or that of this name:
        ``self.set_dispatch_collect("actor", **inner.get_dispatch_collect())``.

        Raises:
            ValueError: the other worker has several meshes, none of this name, or has none.
        """
        its = mesh_name if len(dispatch_dp_rank) != 1 else next(iter(dispatch_dp_rank))
        if its not in dispatch_dp_rank or its not in collect_dp_rank:
            raise ValueError(
                f"set_dispatch_collect({mesh_name!r}): the other worker registered {list(dispatch_dp_rank) or 'none'}; "
                f"call register_mesh({mesh_name!r}, dp_rank, is_collect) with the coordinates of the one that you mean"
            )
        self.register_mesh(mesh_name, dispatch_dp_rank[its], collect_dp_rank[its])

    def get_fused_worker_by_name(self: Any, worker_name: str) -> Any:
        """`Worker.role_worker`."""
        return self.role_worker(worker_name)

    @property
    def fused_worker_dict(self: Any) -> dict[str, Any]:
        """role -> worker, of this process; empty in a group without roles."""
        workers: dict[str, Any] = self._role_workers
        return workers

    def get_master_addr_port(self: Any) -> tuple[str, str]:
        """`Worker.master_addr` and `Worker.master_port`, both as text."""
        return self.master_addr, str(self.master_port)

    def get_cuda_visible_devices(self) -> str:
        """The variable CUDA_VISIBLE_DEVICES, or "not set". `Worker.device_ids` is there for every kind of device."""
        return os.environ.get("CUDA_VISIBLE_DEVICES", "not set")


class VerlGroup:
    """The methods of `WorkerGroup` that drivers written for verl call. ``self`` is a `WorkerGroup`."""

    @property
    def _dispatch_info(self: Any) -> dict[str, list[int]]:
        """`_query_dispatch_info` of every mesh that the workers have registered."""
        return {name: list(mesh.dp_rank) for name, mesh in self.layout.meshes.items()}

    @property
    def _collect_info(self: Any) -> dict[str, list[bool]]:
        """`_query_collect_info` of every mesh that the workers have registered."""
        return {name: list(mesh.collects) for name, mesh in self.layout.meshes.items()}

    def _query_dispatch_info(self: Any, mesh_name: str) -> list[int]:
        """``group.layout.mesh(mesh_name).dp_rank``, by rank."""
        return list(self._mesh(mesh_name).dp_rank)

    def _query_collect_info(self: Any, mesh_name: str) -> list[bool]:
        """``group.layout.mesh(mesh_name).collects``, by rank."""
        return list(self._mesh(mesh_name).collects)

    def _mesh(self: Any, mesh_name: str) -> Mesh:
        self._state.check_process()
        mesh: Mesh = self._layout_with(lambda layout: mesh_name in layout.meshes).mesh(mesh_name)
        return mesh

    def fuse(self: Any, prefix_set: Iterable[str]) -> None:
        """Raise a `DispatchError` unless the group has these roles. ``group.<role>`` works without this call."""
        self.spawn(prefix_set)

    def start_worker_aliveness_check(self: Any, every_n_seconds: float = 1) -> Any:
        """`WorkerGroup.watch`. A death breaks the group; it does not abort the driver."""
        return self.watch(interval=every_n_seconds)

    def execute_all_async(self: Any, method_name: str, *args: Any, **kwargs: Any) -> list[Any]:
        """Call any method, registered or not, on all ranks without waiting.

        Args:
            method_name: name of the method.
            args: if every argument is a list of length world_size, rank i gets item i of each. If none is a list, every
                rank gets them unchanged. ``Broadcast(x)`` is always sent whole.
            kwargs: likewise.

        Returns:
            The transport's references, one per rank; ObjectRefs on Ray.

        Raises:
            AttributeError: the worker has no such method.
            DispatchError: only some arguments are lists, or a list has another length.
        """
        refs: list[Any] = self._execute(plan_execute, method_name, args, kwargs, wait=False)
        return refs

    execute_all = execute_all_async

    def execute_all_sync(self: Any, method_name: str, *args: Any, **kwargs: Any) -> list[Any]:
        """`execute_all_async`, but wait, return the results by rank, and raise as a call does."""
        results: list[Any] = self._execute(plan_execute, method_name, args, kwargs, wait=True)
        return results

    def execute_rank_zero_async(self: Any, method_name: str, *args: Any, **kwargs: Any) -> Any:
        """Call any method on rank 0 alone, with unchanged arguments, without waiting. Returns the transport's reference
        to the result; an ObjectRef on Ray. An `AttributeError` if the worker has no such method."""
        return self._execute(plan_rank_zero, method_name, args, kwargs, wait=False)[0]

    execute_rank_zero = execute_rank_zero_async

    def execute_rank_zero_sync(self: Any, method_name: str, *args: Any, **kwargs: Any) -> Any:
        """`execute_rank_zero_async`, but wait, return the value, and raise as a call does."""
        return self._execute(plan_rank_zero, method_name, args, kwargs, wait=True)


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


def check_verl_options(function: Any, options: Mapping[str, Any]) -> None:
    """Warn about each option that was passed to a function or a class. Raise an error for ``worker_nsight_options``,
    and for an option that verl does not have either."""
    for name, value in options.items():
        if name not in _INSTEAD:
            known = [other for other in inspect.signature(function).parameters if other != "verl"]
            told = suggestion(name, known)
            raise TypeError(f"{function.__name__}() got an unexpected keyword argument {name!r}{told}")
        if value is None:
            continue
        if name == "worker_nsight_options":
            raise ValueError(f"{name} has no effect here: {_INSTEAD[name]}")
        warnings.warn(f"{name}={value!r} has no effect: {_INSTEAD[name]}", stacklevel=3)


@dataclass(frozen=True)
class MegatronRankInfo:
    """The coordinates of one rank on Megatron's axes, each from 0. ``dp`` is without context parallelism."""

    tp_rank: int
    dp_rank: int
    pp_rank: int
    cp_rank: int


@dataclass(frozen=True)
class MegatronGlobalInfo:
    """The sizes of Megatron's axes. ``dp`` is without context parallelism."""

    tp_size: int
    dp_size: int
    pp_size: int
    cp_size: int


class MegatronInfo:
    """The two methods of verl's Megatron group. ``self`` is a group of `workers.MegatronWorker`s, or the group of a
    role with such workers. Before these have initialized Megatron, both methods raise a `DispatchError`."""

    def get_megatron_rank_info(self: Any, rank: int) -> MegatronRankInfo:
        """The coordinates of a rank; an `IndexError` if the group has no such rank."""
        if not isinstance(rank, int) or not 0 <= rank < self.world_size:
            raise IndexError(f"rank {rank!r}: the group has the ranks 0 to {self.world_size - 1}")
        self.get_megatron_global_info()
        layout = self.layout
        return MegatronRankInfo(**{f"{axis}_rank": layout.coordinate(axis, rank) for axis in ("tp", "dp", "pp", "cp")})

    def get_megatron_global_info(self: Any) -> MegatronGlobalInfo:
        """The sizes of the axes."""
        return MegatronGlobalInfo(self.tp_size, self.dp_size, self.pp_size, self.cp_size)
