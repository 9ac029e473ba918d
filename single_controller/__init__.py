"""Drive many workers from one script. Exports everything that a driver needs.

- ``call``: groups, calls, futures and errors, independent of the transport.
- ``ray``: resource pools, and the transport that runs workers as Ray actors.
- ``local``: the transport that runs workers in the driver's process, for debugging and unit tests.
- ``view``: run folders, the page that shows them, and looking at groups from other processes.

A module is imported when one of its names is first used, so that a worker process does not load the driver's part.
"""

from typing import TYPE_CHECKING

from single_controller._shadowing import check_shadowing

check_shadowing()

from dispatch.exports import lazy_exports  # noqa: E402  (report a module that shadows `dispatch` first)

if TYPE_CHECKING:  # the table of what this package exports, which `lazy_exports` reads too
    from dispatch import Broadcast as Broadcast
    from dispatch import Dispatch as Dispatch
    from dispatch import DispatchError as DispatchError
    from dispatch import Execute as Execute
    from dispatch import Layout as Layout
    from dispatch import Mesh as Mesh
    from dispatch import ResultError as ResultError
    from dispatch import SingleControllerError as SingleControllerError
    from dispatch import collect_all_to_all as collect_all_to_all
    from dispatch import make_nd_compute_dataproto_dispatch_fn as make_nd_compute_dataproto_dispatch_fn
    from dispatch import register as register
    from dispatch import register_batch_type as register_batch_type
    from dispatch import register_dispatch_mode as register_dispatch_mode
    from dispatch import update_dispatch_mode as update_dispatch_mode
    from single_controller.call.errors import CallTimeoutError as CallTimeoutError
    from single_controller.call.errors import ControlStoreError as ControlStoreError
    from single_controller.call.errors import ForkedProcessError as ForkedProcessError
    from single_controller.call.errors import GroupBrokenError as GroupBrokenError
    from single_controller.call.errors import GroupClosedError as GroupClosedError
    from single_controller.call.errors import LocalGroupError as LocalGroupError
    from single_controller.call.errors import PlacementError as PlacementError
    from single_controller.call.errors import ResultLostError as ResultLostError
    from single_controller.call.errors import StartError as StartError
    from single_controller.call.errors import WorkerDiedError as WorkerDiedError
    from single_controller.call.errors import WorkerError as WorkerError
    from single_controller.call.future import WorkerFuture as WorkerFuture
    from single_controller.call.group import WorkerGroup as WorkerGroup
    from single_controller.call.worker.worker import Worker as Worker
    from single_controller.call.worker.worker_class import ClassWithInitArgs as ClassWithInitArgs
    from single_controller.call.worker.worker_class import colocate as colocate
    from single_controller.call.worker.worker_class import create_colocated_worker_cls as create_colocated_worker_cls
    from single_controller.call.worker.worker_class import (
        create_colocated_worker_cls_fused as create_colocated_worker_cls_fused,
    )
    from single_controller.call.worker.worker_class import (
        create_colocated_worker_raw_cls as create_colocated_worker_raw_cls,
    )
    from single_controller.local.group import LocalWorkerGroup as LocalWorkerGroup
    from single_controller.ray.attach import end_detached as end_detached
    from single_controller.ray.class_with_args import RayClassWithInitArgs as RayClassWithInitArgs
    from single_controller.ray.group import NVMegatronRayWorkerGroup as NVMegatronRayWorkerGroup
    from single_controller.ray.group import RayWorkerGroup as RayWorkerGroup
    from single_controller.ray.group import attach as attach
    from single_controller.ray.group_metrics import GroupMetrics as GroupMetrics
    from single_controller.ray.placement.manager import ResourcePoolManager as ResourcePoolManager
    from single_controller.ray.placement.pool import RayResourcePool as RayResourcePool
    from single_controller.ray.placement.pool import ResourcePool as ResourcePool
    from single_controller.ray.placement.pool import merge_resource_pool as merge_resource_pool
    from single_controller.ray.placement.pool import split_resource_pool as split_resource_pool
else:
    __all__, __getattr__, __dir__ = lazy_exports(__name__, __file__)
