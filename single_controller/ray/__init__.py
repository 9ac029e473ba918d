"""The Ray transport: pools as placement groups, workers as actors."""

from typing import TYPE_CHECKING

from dispatch.exports import lazy_exports

if TYPE_CHECKING:  # the table of what this package exports, which `lazy_exports` reads too
    from single_controller.ray.class_with_args import RayClassWithInitArgs as RayClassWithInitArgs
    from single_controller.ray.group import NVMegatronRayWorkerGroup as NVMegatronRayWorkerGroup
    from single_controller.ray.group import RayWorkerGroup as RayWorkerGroup
    from single_controller.ray.placement.manager import ResourcePoolManager as ResourcePoolManager
    from single_controller.ray.placement.pool import RayResourcePool as RayResourcePool
    from single_controller.ray.placement.pool import merge_resource_pool as merge_resource_pool
    from single_controller.ray.placement.pool import split_resource_pool as split_resource_pool
else:
    __all__, __getattr__, __dir__ = lazy_exports(__name__, __file__)
