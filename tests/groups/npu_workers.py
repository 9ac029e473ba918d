"""A worker in whose process torch has an accelerator of another name: "npu", with the backend "hccl", as torch_npu's.

It has no memory and no kernels: torch's own stand-in for a backend that is written in Python.
"""

import os
from datetime import timedelta
from types import SimpleNamespace

from single_controller import Dispatch, Worker, register


def install(made):
    """Give this process the accelerator. ``made`` takes rank and size of each backend that is made for it."""
    import torch.distributed as dist
    from torch.utils import backend_registration

    class Npu(backend_registration._DummyBackendModule):
        def device_count(self):
            return len(os.environ["ASCEND_RT_VISIBLE_DEVICES"].split(","))

        def get_device_properties(self, device):
            return SimpleNamespace(name="Ascend")  # has no uuid

    def hccl(options, _):
        made.append((options.group_rank, options.group_size, options.global_ranks_in_group))
        return dist.ProcessGroupGloo(options.store, options.group_rank, options.group_size, options.timeout)

    backend_registration._setup_privateuseone_for_python_backend("npu", Npu())
    dist.Backend.register_backend("hccl", hccl, extended_api=True, devices=["npu"])


class NpuWorker(Worker):
    def __init__(self):
        from workers.device import every_backend, take_device
        from workers.distributed import initialize_distributed

        self.made = []
        install(self.made)
        self.taken = take_device(self.local_rank, self.device_ids)
        initialize_distributed(self, every_backend(), 1.0)

    @register(Dispatch.ONE_TO_ALL)
    def where(self):
        from workers.device import backend, current_device, every_backend, name_of

        device = current_device()
        return {
            "ids": self.device_ids,
            "list": os.environ["ASCEND_RT_VISIBLE_DEVICES"],
            "taken": str(self.taken),
            "current": str(device),
            "names": (backend(), every_backend()),
            "name": name_of(device).split(" ")[-1],
        }

    @register(Dispatch.ONE_TO_ALL)
    def summed(self):
        """What the default group computes on the CPU, and the backends that were made for the device."""
        import torch
        import torch.distributed as dist

        value = torch.tensor([self.rank + 1.0])
        dist.all_reduce(value)
        own = dist.group.WORLD._get_backend(torch.device("npu"))
        return value.item(), self.made, own.size()

    @register(Dispatch.ONE_TO_ALL)
    def channel(self):
        """A backend of the transport "group"."""
        import torch.distributed as dist

        from workers.device import new_backend

        group = new_backend("hccl", dist.HashStore(), 0, 1, timedelta(seconds=5), self.taken)
        return group.size(), self.made[-1]

    @register(Dispatch.ONE_TO_ALL)
    def device_transport(self):
        """What the transport "device" says to a receiver in another process."""
        from workers.weight_sync.receiver_calls import Receivers
        from workers.weight_sync.sync_protocol import Budget, WeightSyncError
        from workers.weight_sync.transports.same_device import DeviceTransport
        from workers.weight_sync.transports.weight_transport import Update

        try:
            DeviceTransport().begin(Update(1, "device", 0, 1, Receivers(object(), None), Budget(1.0), "key"))
        except WeightSyncError as error:
            return str(error)
