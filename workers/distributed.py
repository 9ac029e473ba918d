"""torch.distributed among the ranks of a worker group: initialization, process groups, and errors on all ranks.

Threads: `initialize_distributed` starts one named "rendezvous" and joins it, unless this rank is told to leave. Then
the thread ends with the timeout of the collectives.
"""

from __future__ import annotations

import datetime
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import wait
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from single_controller import GroupBrokenError
from workers import device
from workers.background import in_thread

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup, TCPStore

    from single_controller import Worker


STORE_POLL_SECONDS = 0.05
JOIN_POLL_SECONDS = 0.05

LEAVE_SECONDS = 0.5
"""How long a rank that has to leave waits for its connections to break, which ends most of what it may wait for."""

STORE_CONNECT_TIME = datetime.timedelta(seconds=1)
"""How long a rank tries to connect to a store before it asks whether it still should. torch may take three times as
long."""

_timeout = datetime.timedelta(minutes=30)
"""Timeout of the default process group. `new_cpu_group` and `new_rows` use it too, instead of torch's default."""

_default_group: ProcessGroup | None = None
"""The process group that `initialize_distributed` created for a single rank."""

_default_users: set[int] = set()
"""The ids of the workers that use it: the `LocalWorkerGroup`s of one rank in a process share it."""


def initialize_distributed(worker: Worker, backend: str, timeout_minutes: float = 30.0) -> None:
    """Call ``torch.distributed.init_process_group`` for a worker group, unless it was called before.

    Args:
        worker: provides the rank and the rendezvous address. A single rank needs no rendezvous. In a
            `LocalWorkerGroup` the process group is destroyed when the last group that uses it is closed.
        backend: of torch.distributed, such as ``"gloo"``, or ``workers.device.every_backend()``.
        timeout_minutes: timeout of a collective.

    Raises:
        LocalGroupError: the worker is in a `LocalWorkerGroup` of several ranks, which share one process.
        DeviceError: two ranks have the same device. This is checked if the backend has both gloo and the device's.
        GroupBrokenError: the group is having a rank replaced.
        RuntimeError: the worker replaces another one, and is still alone: see `Worker.is_replacement`.
    """
    import torch.distributed as dist

    global _timeout, _default_group
    worker._check_collectives("initialize_distributed()")
    if dist.is_initialized():
        if dist.group.WORLD is _default_group:
            _use_default_group(worker)
        return
    timeout = _timeout = datetime.timedelta(minutes=timeout_minutes)
    if worker.world_size == 1:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
        _default_group = dist.group.WORLD
        _default_users.clear()  # of a former one, which a worker has destroyed by itself
        _use_default_group(worker)
        return
    store = dist.PrefixStore("default_pg", _new_store(worker, timeout))
    options: dict[str, Any] = {"rank": worker.rank, "world_size": worker.world_size, "timeout": timeout}
    _unless_leaving(worker, lambda: dist.init_process_group(backend, store=store, **options))
    if device.has_accelerator() and "gloo" in backend and device.backend() in backend:
        _refuse_shared_devices()


def _new_store(worker: Worker, timeout: datetime.timedelta) -> TCPStore:
    """Create rank 0's store, or connect to it.

    While torch's TCPStore tries to connect, nothing can end that, neither a signal nor a broken connection. If rank 0
    died before this rank is connected, this rank could not take part in the replacement of rank 0. So it first waits
    until rank 0 listens, and then tries for a second at a time. For the same reason no rank waits in the
    constructor for the others to connect (``wait_for_workers``).

    Raises:
        GroupBrokenError: the group is having a rank replaced.
    """
    from torch.distributed import DistError, TCPStore

    address: tuple[str, int] = (worker.master_addr, worker.master_port)
    options: dict[str, Any] = {"world_size": worker.world_size, "wait_for_workers": False}
    if not worker.rank:
        return TCPStore(*address, is_master=True, timeout=timeout, multi_tenant=True, **options)
    end = time.monotonic() + timeout.total_seconds()
    while True:
        if worker._leaving:
            raise _left(worker)
        try:
            socket.create_connection(address, timeout=STORE_POLL_SECONDS).close()
        except OSError:
            if time.monotonic() < end:
                time.sleep(STORE_POLL_SECONDS)
                continue
            # At the deadline TCPStore tries once, so that the error is torch's and names the address.
        try:
            store = TCPStore(*address, is_master=False, timeout=STORE_CONNECT_TIME, **options)
            store.set_timeout(timeout)
            return store
        except DistError:
            if time.monotonic() >= end:
                raise


def _unless_leaving(worker: Worker, join: Callable[[], None]) -> None:
    """Join the other ranks, unless the group is having a rank replaced.

    gloo connects each rank to each other. If a rank dies meanwhile, gloo waits for it until the timeout, and there is
    no connection yet whose end would end that. So another thread joins, and is left to itself if this rank has to
    leave. It then ends with the timeout, without any effect.

    Raises:
        GroupBrokenError: the group is having a rank replaced.
    """

    def run() -> None:
        worker._prepare_thread()
        join()

    # A daemon: a worker that exits must not wait for a thread that was left to itself.
    joining = in_thread("rendezvous", run)
    left_at: float | None = None
    while not joining.done():
        wait([joining], JOIN_POLL_SECONDS)
        if worker._leaving:  # set by another thread of the worker; a bool needs no lock
            left_at = left_at or time.monotonic()
            if time.monotonic() - left_at > LEAVE_SECONDS:
                raise _left(worker)
    joining.result()


def _left(worker: Worker) -> GroupBrokenError:
    return GroupBrokenError(f"rank {worker.rank} was told to give up its rendezvous: a rank is being replaced")


def _use_default_group(worker: Worker) -> None:
    if id(worker) not in _default_users:
        _default_users.add(id(worker))
        worker._cleanups.append(lambda: _leave_default_group(worker))


def _leave_default_group(worker: Worker) -> None:
    import torch.distributed as dist

    global _default_group
    _default_users.discard(id(worker))
    if _default_users:
        return
    if dist.is_initialized() and dist.group.WORLD is _default_group:  # the worker may have destroyed it
        dist.destroy_process_group()
    _default_group = None


def _refuse_shared_devices() -> None:
    rank_of: dict[str, int] = {}
    for rank, name in enumerate(gathered(device.name_of(device.current_device()))):
        if name in rank_of:
            raise device.DeviceError(
                f"ranks {rank_of[name]} and {rank} are on the same GPU, but {device.backend()} needs a different GPU "
                "for each rank of a group. Give each rank its own GPU; different groups may share GPUs"
            )
        rank_of[name] = rank


def node_address() -> str:
    """Return the address at which other workers reach this process: that of its node in Ray."""
    import ray.util

    return str(ray.util.get_node_ip_address()) if ray.is_initialized() else "127.0.0.1"


@contextmanager
def rank_by_rank(worker: Worker) -> Iterator[None]:
    """Run the block on one rank of a node after the other, so that later ranks find files that the first one writes,
    such as a download cache. Every rank of the group must enter it. A rank that raises inside does not block the
    others."""
    import torch.distributed as dist

    turns = gathered(worker.local_world_size)
    for _ in range(worker.local_rank):
        dist.barrier()
    try:
        yield
    finally:
        for _ in range(max(turns) - worker.local_rank):
            dist.barrier()


def new_cpu_group() -> ProcessGroup:
    """Create a gloo process group of all ranks. All ranks call it."""
    import torch.distributed as dist

    group: ProcessGroup = dist.new_group(backend="gloo", timeout=_timeout)
    return group


def new_rows(rows: Sequence[Sequence[int]]) -> ProcessGroup:
    """Create a process group for each row of ranks, and return the one of this rank. All ranks call it with the same
    rows."""
    import torch.distributed as dist

    group: ProcessGroup = dist.new_subgroups_by_enumeration([list(row) for row in rows], timeout=_timeout)[0]
    return group


def gathered(value: Any, group: ProcessGroup | None = None) -> list[Any]:
    """Gather a value from every rank. All ranks call it. Without torch.distributed there is one rank.

    Args:
        value: of this rank.
        group: process group of these ranks; the default group, of all ranks, if None.

    Returns:
        The values, by rank in the group.
    """
    import torch.distributed as dist

    if not dist.is_initialized():
        return [value]
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group)
    return values


@contextmanager
def all_or_none(error_class: type[Exception], what: str, group: ProcessGroup | None = None) -> Iterator[None]:
    """Raise on all ranks if the block fails on any rank. Otherwise the other ranks would wait for the failed one in the
    next collective. All ranks must enter it.

    The block may use collectives only if it fails on all ranks, or after the last of them. A rank that fails earlier
    would wait for the others here while they wait for it in a collective.

    Args:
        error_class: class of the error.
        what: beginning of the message.
        group: process group of all ranks; the default group if None.

    Raises:
        Exception: an ``error_class`` that names each failed rank and its error.
    """
    error: BaseException | None = None
    try:
        yield
    except Exception as failed:
        error = failed
    errors = gathered(None if error is None else f"{type(error).__name__}: {error}", group)
    wrong = [f"rank {rank}: {why}" for rank, why in enumerate(errors) if why is not None]
    if wrong:
        raise error_class(f"{what}: {'; '.join(wrong)}") from error


def process_groups() -> list[ProcessGroup]:
    """Return all process groups of this process except the default one, in order of creation."""
    import torch.distributed as dist

    if not dist.is_initialized():
        return []
    return [group for group in dist.distributed_c10d._world.pg_map if group is not dist.group.WORLD]


def end_process_groups(groups: Sequence[ProcessGroup]) -> None:
    """Destroy process groups with their connections and threads. All ranks call it with the same groups in the same
    order.

    Each gloo group has a thread that wakes up 100 times per second even if the group is idle. A few hundred leaked
    groups use up all CPUs of a machine.
    """
    import torch.distributed as dist

    known = process_groups()
    groups = [group for group in groups if group in known]
    if not groups:  # or they were destroyed with the default group, when ranks were replaced
        return
    dist.barrier()  # another rank may still be receiving the last message of a group
    for group in groups:
        if group in process_groups():  # destroying one may destroy others
            dist.destroy_process_group(group)
