"""The Ray engine: pools as placement groups, workers as actors."""

from single_controller.ray.class_with_args import RayClassWithInitArgs
from single_controller.ray.group import RayWorkerGroup
from single_controller.ray.megatron_group import NVMegatronRayWorkerGroup
from single_controller.ray.pool import RayResourcePool, merge_resource_pool

__all__ = [
    "NVMegatronRayWorkerGroup",
    "RayClassWithInitArgs",
    "RayResourcePool",
    "RayWorkerGroup",
    "merge_resource_pool",
]
