"""Drive many workers from one script: pools, groups, and everything that a driver needs of `dispatch`.

`base` has the groups, futures and errors without any engine; `ray` runs them as Ray actors.
"""

from single_controller._neighbours import check_neighbours

check_neighbours()

from dispatch import (  # noqa: E402  (a foreign package of that name must be reported first)
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
from single_controller.base.errors import (  # noqa: E402
    CallTimeoutError,
    GroupBrokenError,
    GroupClosedError,
    PlacementError,
    StartError,
    WorkerDiedError,
    WorkerError,
)
from single_controller.base.future import WorkerFuture  # noqa: E402
from single_controller.base.group import WorkerGroup  # noqa: E402
from single_controller.base.pool import ClassWithInitArgs, ResourcePool  # noqa: E402
from single_controller.base.worker import Worker  # noqa: E402
from single_controller.ray import (  # noqa: E402
    NVMegatronRayWorkerGroup,
    RayClassWithInitArgs,
    RayResourcePool,
    RayWorkerGroup,
    merge_resource_pool,
)

__all__ = [
    "Broadcast",
    "CallTimeoutError",
    "ClassWithInitArgs",
    "Dispatch",
    "DispatchError",
    "Execute",
    "GroupBrokenError",
    "GroupClosedError",
    "Layout",
    "Mesh",
    "NVMegatronRayWorkerGroup",
    "PlacementError",
    "RayClassWithInitArgs",
    "RayResourcePool",
    "RayWorkerGroup",
    "ResourcePool",
    "ResultError",
    "SingleControllerError",
    "StartError",
    "Worker",
    "WorkerDiedError",
    "WorkerError",
    "WorkerFuture",
    "WorkerGroup",
    "collect_all_to_all",
    "make_nd_compute_dataproto_dispatch_fn",
    "merge_resource_pool",
    "register",
    "register_batch_type",
    "register_dispatch_mode",
    "update_dispatch_mode",
]
