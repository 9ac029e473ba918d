"""A worker that reports its placement as Ray and the operating system see it, independently of this library."""

import os
import re

import ray

from single_controller import Dispatch, Worker, register


class Placed(Worker):
    @register(Dispatch.ONE_TO_ALL)
    def where(self):
        context = ray.get_runtime_context()
        assigned = context.get_assigned_resources()
        held = ray._private.worker.global_worker.core_worker.resource_ids()
        bundles = {int(found[1]) for key in held if (found := re.search(r"_group_(\d+)_[0-9a-f]+$", key))}
        kinds = context.get_accelerator_ids()
        return {
            "node": context.get_node_id(),
            "address": ray.util.get_node_ip_address(),
            "group": ray.util.get_current_placement_group().id.hex(),
            "bundle": max(bundles, default=None),
            "gpus": sorted(kinds["GPU"], key=int),
            "npus": sorted(kinds["NPU"], key=int),
            "assigned": assigned,
            "visible": os.environ.get("CUDA_VISIBLE_DEVICES"),
            "ascend": os.environ.get("ASCEND_RT_VISIBLE_DEVICES"),
            "pid": os.getpid(),
        }

    @register(Dispatch.ONE_TO_ALL)
    def said(self):
        """What this library reports."""
        return {
            "rank": self.rank,
            "local": (self.local_rank, self.local_world_size),
            "node_rank": self.node_rank,
            "NODE_RANK": os.environ["NODE_RANK"],
            "devices": self.device_ids,
            "master": self.master_addr,
        }

    @register(Dispatch.ONE_TO_ALL)
    def index(self):
        """The index that torch would use for the device."""
        from workers.device import ACCELERATORS, visible_index

        return visible_index(self.device_ids[0], os.environ, ACCELERATORS["cuda"].visible)
