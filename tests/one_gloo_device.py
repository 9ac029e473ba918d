"""One gloo device for all process groups of a process.

torch gives each gloo process group its own device, with a thread that wakes every 10 ms. A Megatron rank has about
thirty groups, so the threads of a dozen idle ranks use half a processor. Sharing one device changes nothing else.
"""

import torch.distributed.distributed_c10d as c10d
from torch.distributed import ProcessGroupGloo


class OnSharedDevice(ProcessGroupGloo):
    device = None

    def __init__(self, store, rank, size, timeout):
        options = ProcessGroupGloo._Options()
        OnSharedDevice.device = OnSharedDevice.device or ProcessGroupGloo.create_default_device()
        options._devices, options._threads, options._timeout = [OnSharedDevice.device], 2, timeout
        super().__init__(store, rank, size, options)


def share_gloo_device():
    """Have the process groups that this process creates from now on share one device."""
    c10d.ProcessGroupGloo = OnSharedDevice
