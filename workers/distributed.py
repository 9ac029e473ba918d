"""torch.distributed among the ranks of a worker's group: how it begins, and one rank after the other."""

from __future__ import annotations

import datetime
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from workers.device import DeviceError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from single_controller import Worker


_timeout = datetime.timedelta(minutes=30)
"""Of the default process group; the others, to which torch gives its own default, get it too."""


def initialize_distributed(worker: Worker, backend: str, timeout_minutes: float = 30.0) -> None:
    """``torch.distributed.init_process_group`` of a worker's group, unless it was called before.

    Args:
        worker: it knows its rank, and where the ranks meet. One that was made by hand is alone.
        backend: of torch.distributed, such as ``"gloo"`` or ``"cpu:gloo,cuda:nccl"``.
        timeout_minutes: a collective that takes longer has failed.

    Raises:
        DeviceError: two ranks have the same GPU (noticed where the backends are gloo and nccl).
    """
    import torch.distributed as dist

    global _timeout
    if dist.is_initialized():
        return
    timeout = _timeout = datetime.timedelta(minutes=timeout_minutes)
    if worker.world_size == 1 and not worker.master_port:  # made by hand, in no group
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
        return
    host = f"[{worker.master_addr}]" if ":" in worker.master_addr else worker.master_addr
    address = f"tcp://{host}:{worker.master_port}"
    dist.init_process_group(
        backend, init_method=address, rank=worker.rank, world_size=worker.world_size, timeout=timeout
    )
    if "nccl" in backend and "gloo" in backend:
        _refuse_shared_devices()


def _refuse_shared_devices() -> None:
    import torch

    rank_of: dict[str, int] = {}
    for rank, name in enumerate(gathered(str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid))):
        if name in rank_of:
            raise DeviceError(
                f"the ranks {rank_of[name]} and {rank} are on the same GPU, and nccl connects ranks of different GPUs "
                "alone: give each rank of a group a GPU of its own; groups may share theirs"
            )
        rank_of[name] = rank


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


def new_cpu_group() -> ProcessGroup:
    """A process group of all ranks on gloo; all ranks call it."""
    import torch.distributed as dist

    group: ProcessGroup = dist.new_group(backend="gloo", timeout=_timeout)
    return group


def new_rows(rows: Sequence[Sequence[int]]) -> ProcessGroup:
    """The process group of the row of ranks that this rank is in; all ranks call it with the same rows."""
    import torch.distributed as dist

    group: ProcessGroup = dist.new_subgroups_by_enumeration([list(row) for row in rows], timeout=_timeout)[0]
    return group


def gathered(value: Any) -> list[Any]:
    """What every rank says, by rank; all ranks call it. Without torch.distributed there is one rank."""
    import torch.distributed as dist

    if not dist.is_initialized():
        return [value]
    said: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(said, value)
    return said


@contextmanager
def all_or_none(error_class: type[Exception], what: str) -> Iterator[None]:
    """What fails inside on one rank is an error on all of them, so that no rank goes on and waits for one that does not
    come. All ranks go through it; inside, they do not speak to each other.

    Args:
        error_class: of the error.
        what: its message begins with this.

    Raises:
        Exception: ``error_class``, with what went wrong on which rank.
    """
    error: BaseException | None = None
    try:
        yield
    except Exception as failed:
        error = failed
    said = gathered(None if error is None else f"{type(error).__name__}: {error}")
    wrong = [f"rank {rank}: {why}" for rank, why in enumerate(said) if why is not None]
    if wrong:
        raise error_class(f"{what}: {'; '.join(wrong)}") from error


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
