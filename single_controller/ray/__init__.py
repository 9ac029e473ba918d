"""The Ray transport: pools as placement groups, workers as actors."""

from typing import TYPE_CHECKING

from dispatch.exports import lazy_exports

if TYPE_CHECKING:
    from single_controller.ray.class_with_args import RayClassWithInitArgs
    from single_controller.ray.group import RayWorkerGroup
    from single_controller.ray.megatron_group import NVMegatronRayWorkerGroup
    from single_controller.ray.placement.manager import ResourcePoolManager
    from single_controller.ray.placement.pool import RayResourcePool, merge_resource_pool, split_resource_pool

__all__ = [
    "NVMegatronRayWorkerGroup",
    "RayClassWithInitArgs",
    "RayResourcePool",
    "RayWorkerGroup",
    "ResourcePoolManager",
    "merge_resource_pool",
    "split_resource_pool",
]

_HOMES = {
    "NVMegatronRayWorkerGroup": "single_controller.ray.megatron_group",
    "RayClassWithInitArgs": "single_controller.ray.class_with_args",
    "RayResourcePool": "single_controller.ray.placement.pool",
    "RayWorkerGroup": "single_controller.ray.group",
    "ResourcePoolManager": "single_controller.ray.placement.manager",
    "merge_resource_pool": "single_controller.ray.placement.pool",
    "split_resource_pool": "single_controller.ray.placement.pool",
}

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_exports(__name__, _HOMES)
