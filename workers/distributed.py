"""torch.distributed among the ranks of a worker's group: how it begins, and one rank after the other."""

from __future__ import annotations

import datetime
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from single_controller import Worker


def initialize_distributed(worker: Worker, backend: str, timeout_minutes: float = 30.0) -> None:
    """``torch.distributed.init_process_group`` of a worker's group, unless it was called before.

    Args:
        worker: it knows its rank, and where the ranks meet. One that was made by hand is alone.
        backend: of torch.distributed, such as ``"gloo"`` or ``"cpu:gloo,cuda:nccl"``.
        timeout_minutes: a collective that takes longer has failed.
    """
    import torch.distributed as dist

    if dist.is_initialized():
        return
    timeout = datetime.timedelta(minutes=timeout_minutes)
    if worker.world_size == 1 and not worker.master_port:  # made by hand, in no group
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
        return
    host = f"[{worker.master_addr}]" if ":" in worker.master_addr else worker.master_addr
    address = f"tcp://{host}:{worker.master_port}"
    dist.init_process_group(
        backend, init_method=address, rank=worker.rank, world_size=worker.world_size, timeout=timeout
    )


@contextmanager
def rank_by_rank(worker: Worker) -> Iterator[None]:
    """Inside, the ranks of a node run one after the other, so that files which the first of them writes (a cache of
    downloads, say) are there for the next. Every rank of the group goes through it; one that raises inside does not
    keep the others."""
    import torch.distributed as dist

    turns: list[int] = [0] * worker.world_size
    dist.all_gather_object(turns, worker.local_world_size)
    for _ in range(worker.local_rank):
        dist.barrier()
    try:
        yield
    finally:
        for _ in range(max(turns) - worker.local_rank):
            dist.barrier()


def process_groups() -> list[ProcessGroup]:
    """The process groups of this process but the default one, in the order in which they were made."""
    import torch.distributed as dist

    if not dist.is_initialized():
        return []
    return [group for group in dist.distributed_c10d._world.pg_map if group is not dist.group.WORLD]


def end_process_groups(groups: Sequence[ProcessGroup]) -> None:
    """End process groups: their connections and threads. All ranks call it with the same ones, in the same order.

    Each group of gloo has a thread that wakes a hundred times a second, whether anybody uses it or not: some hundreds
    of forgotten ones take all of a machine.
    """
    import torch.distributed as dist

    if not groups:
        return
    dist.barrier()  # a rank may still be receiving the last that came through them
    for group in groups:
        if group in process_groups():
            dist.destroy_process_group(group)
