"""Drive many workers from one script. Exports everything that a driver needs.

- ``base``: groups, calls, futures and errors, independent of the transport.
- ``ray``: resource pools, and the transport that runs workers as Ray actors.
- ``local``: the transport that runs workers in the driver's process, for debugging and unit tests.

A module is imported when one of its names is first used, so that a worker process does not load the driver's part.
"""

from typing import TYPE_CHECKING

from single_controller._shadowing import check_shadowing

check_shadowing()

from dispatch.exports import lazy_exports  # noqa: E402  (report a module that shadows `dispatch` first)

if TYPE_CHECKING:
    from dispatch import (
        Broadcast,
        Dispatch,
        DispatchError,
        Execute,
        Layout,
        Mesh,
        ResultError,
        SingleControllerError,
        collect_all_to_all,
        make_nd_compute_dataproto_dispatch_fn,
        register,
        register_batch_type,
        register_dispatch_mode,
        update_dispatch_mode,
    )
    from single_controller.call.colocate import (
        colocate,
        create_colocated_worker_cls,
        create_colocated_worker_cls_fused,
        create_colocated_worker_raw_cls,
    )
    from single_controller.call.errors import (
        CallTimeoutError,
        ForkedProcessError,
        GroupBrokenError,
        GroupClosedError,
        LocalGroupError,
        PlacementError,
        ResultLostError,
        StartError,
        WorkerDiedError,
        WorkerError,
    )
    from single_controller.call.future import WorkerFuture
    from single_controller.call.group import WorkerGroup
    from single_controller.call.pool import ClassWithInitArgs, ResourcePool
    from single_controller.call.worker import Worker
    from single_controller.local.group import LocalWorkerGroup
    from single_controller.ray.attach import end_detached
    from single_controller.ray.class_with_args import RayClassWithInitArgs
    from single_controller.ray.group import RayWorkerGroup, attach
    from single_controller.ray.megatron_group import NVMegatronRayWorkerGroup
    from single_controller.ray.placement.manager import ResourcePoolManager
    from single_controller.ray.placement.pool import RayResourcePool, merge_resource_pool, split_resource_pool

__all__ = [
    "Broadcast",
    "CallTimeoutError",
    "ClassWithInitArgs",
    "Dispatch",
    "DispatchError",
    "Execute",
    "ForkedProcessError",
    "GroupBrokenError",
    "GroupClosedError",
    "Layout",
    "LocalGroupError",
    "LocalWorkerGroup",
    "Mesh",
    "NVMegatronRayWorkerGroup",
    "PlacementError",
    "RayClassWithInitArgs",
    "RayResourcePool",
    "RayWorkerGroup",
    "ResourcePool",
    "ResourcePoolManager",
    "ResultError",
    "ResultLostError",
    "SingleControllerError",
    "StartError",
    "Worker",
    "WorkerDiedError",
    "WorkerError",
    "WorkerFuture",
    "WorkerGroup",
    "attach",
    "collect_all_to_all",
    "colocate",
    "create_colocated_worker_cls",
    "create_colocated_worker_cls_fused",
    "create_colocated_worker_raw_cls",
    "end_detached",
    "make_nd_compute_dataproto_dispatch_fn",
    "merge_resource_pool",
    "register",
    "register_batch_type",
    "register_dispatch_mode",
    "split_resource_pool",
    "update_dispatch_mode",
]

_HOMES = {
    "Broadcast": "dispatch",
    "CallTimeoutError": "single_controller.call.errors",
    "ClassWithInitArgs": "single_controller.call.pool",
    "Dispatch": "dispatch",
    "DispatchError": "dispatch",
    "Execute": "dispatch",
    "ForkedProcessError": "single_controller.call.errors",
    "GroupBrokenError": "single_controller.call.errors",
    "GroupClosedError": "single_controller.call.errors",
    "Layout": "dispatch",
    "LocalGroupError": "single_controller.call.errors",
    "LocalWorkerGroup": "single_controller.local.group",
    "Mesh": "dispatch",
    "NVMegatronRayWorkerGroup": "single_controller.ray.megatron_group",
    "PlacementError": "single_controller.call.errors",
    "RayClassWithInitArgs": "single_controller.ray.class_with_args",
    "RayResourcePool": "single_controller.ray.placement.pool",
    "RayWorkerGroup": "single_controller.ray.group",
    "ResourcePool": "single_controller.call.pool",
    "ResourcePoolManager": "single_controller.ray.placement.manager",
    "ResultError": "dispatch",
    "ResultLostError": "single_controller.call.errors",
    "SingleControllerError": "dispatch",
    "StartError": "single_controller.call.errors",
    "Worker": "single_controller.call.worker",
    "WorkerDiedError": "single_controller.call.errors",
    "WorkerError": "single_controller.call.errors",
    "WorkerFuture": "single_controller.call.future",
    "WorkerGroup": "single_controller.call.group",
    "attach": "single_controller.ray.group",
    "collect_all_to_all": "dispatch",
    "colocate": "single_controller.call.colocate",
    "create_colocated_worker_cls": "single_controller.call.colocate",
    "create_colocated_worker_cls_fused": "single_controller.call.colocate",
    "create_colocated_worker_raw_cls": "single_controller.call.colocate",
    "end_detached": "single_controller.ray.attach",
    "make_nd_compute_dataproto_dispatch_fn": "dispatch",
    "merge_resource_pool": "single_controller.ray.placement.pool",
    "register": "dispatch",
    "register_batch_type": "dispatch",
    "register_dispatch_mode": "dispatch",
    "split_resource_pool": "single_controller.ray.placement.pool",
    "update_dispatch_mode": "dispatch",
}

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_exports(__name__, _HOMES)
