"""Worker classes for the tests on several hosts."""

import datetime
import os
import time

from group_workers import Fragile

from single_controller import Dispatch, register


class OnHost(Fragile):
    """A `Fragile` that computes, and keeps, results of some size."""

    def __init__(self):
        super().__init__()
        self.calls = 0

    @register(Dispatch.ONE_TO_ALL)
    def join(self, timeout):
        """Join a gloo process group whose collectives give up after some seconds."""
        import torch.distributed as dist

        dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=timeout))

    @register(Dispatch.ONE_TO_ALL)
    def reduce_for(self, seconds):
        """All-reduce again and again. Returns whether every result was right."""
        import torch
        import torch.distributed as dist

        right, go_on = True, torch.ones(())
        end = time.monotonic() + seconds
        while go_on:
            go_on = torch.tensor(float(time.monotonic() < end))
            dist.broadcast(go_on, src=0)  # all ranks end after the same round
            value = torch.full((10_000,), float(self.rank + 1))
            dist.all_reduce(value)
            right = right and bool((value == self.world_size * (self.world_size + 1) / 2).all())
            time.sleep(0.01)
        return right

    @register(Dispatch.ONE_TO_ALL)
    def count(self, seconds=0.0):
        """Number of calls of this method so far."""
        time.sleep(seconds)
        self.calls += 1
        return self.calls

    @register(Dispatch.DP_COMPUTE_PROTO, blocking=False)
    def enlarge(self, batch):
        """Large results, which stay in the store of this rank's host."""
        return batch.repeat_interleave(1 << 20, dim=1)

    @register(Dispatch.DP_COMPUTE_PROTO)
    def total(self, batch):
        return batch.sum(dim=1, keepdim=True)

    @register(Dispatch.ONE_TO_ALL)
    def interfaces(self):
        return {name: os.environ.get(f"{name}_SOCKET_IFNAME") for name in ("GLOO", "NCCL", "TP")}
