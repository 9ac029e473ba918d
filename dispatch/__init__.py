"""What a call is: modes, layouts, plans and batches. No Ray here, and no torch on import.

A worker method declares with `register` how it is called; `plan.plan_call` turns the driver's arguments into
a `plan.CallPlan`. `layout.Layout` decides which ranks share a shard and which collect.
"""

from dispatch.batch import Broadcast, register_batch_type
from dispatch.errors import DispatchError, ResultError, SingleControllerError
from dispatch.layout import Layout, Mesh
from dispatch.modes import (
    Dispatch,
    Execute,
    collect_all_to_all,
    make_nd_compute_dataproto_dispatch_fn,
    register_dispatch_mode,
    update_dispatch_mode,
)
from dispatch.register import register

__all__ = [
    "Broadcast",
    "Dispatch",
    "DispatchError",
    "Execute",
    "Layout",
    "Mesh",
    "ResultError",
    "SingleControllerError",
    "collect_all_to_all",
    "make_nd_compute_dataproto_dispatch_fn",
    "register",
    "register_batch_type",
    "register_dispatch_mode",
    "update_dispatch_mode",
]
