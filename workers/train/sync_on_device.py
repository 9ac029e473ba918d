"""Weights that stay on the device: within one process, or from one process to another that shares the device.

Every train rank has all the weights then, and serves the rollout workers of its own device: the one in its own process
directly, others by handles to its memory (CUDA's, or shared memory where the device is the CPU).
"""

from __future__ import annotations

import functools
import os
import socket
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from workers.device import device
from workers.train.weight_buckets import FlatMemory, Lies, Pair, WeightSyncError, fill, side_by_side, views
from workers.train.weight_receivers import Neighbour, all_results, sync_error
from workers.train.weight_transport import OutOfStepError, Transport, Update


class Handle(NamedTuple):
    """Memory of another process.

    Attributes:
        device: where it is, see `device_name`.
        nbytes: its length.
        made: what opens it.
    """

    device: str
    nbytes: int
    made: Any


class DeviceTransport(Transport):
    """See this file's docstring."""

    everywhere = True

    def __init__(self) -> None:
        self._memory: SharedMemory | FlatMemory | None = None
        self._serves: dict[int, int] = {}
        self._key = ""

    def send(self, update: Update, bucket: Sequence[Pair]) -> None:
        """See `Transport.send`. Where there are handles, all ranks send the same buckets together."""
        if isinstance(update.receivers, Neighbour):
            update.receivers.worker.load_bucket(update.key, bucket)
            return
        lies, nbytes = side_by_side(bucket)
        mine: dict[int, Handle] = {}
        error: Exception | None = None
        here = bucket[0][1].device
        if self._key != update.key:
            self._serves, self._key = _who_serves(update, name_of(here)), update.key
        try:
            flat = self._room(here, nbytes)
            fill(flat, lies, bucket)
            # CUDA counts who has opened a handle: each receiver has one of its own.
            mine = {
                receiver: self._handle(flat) for receiver, rank in self._serves.items() if rank == update.ranks.rank
            }
        except Exception as failed:
            error = sync_error(f"train rank {update.ranks.rank} could not offer weights", failed)
        said = update.ranks.all("bucket", (mine, error, lies))
        differs = next((rank for rank, (_, _, theirs) in enumerate(said) if theirs != said[0][2]), None)
        if differs is not None:
            raise OutOfStepError(
                f"train ranks 0 and {differs} do not have the same pairs: transport='device' needs them on every rank, "
                "hf_weights(everywhere=sender.everywhere)"
            )
        error = next((one for _, one, _ in said if one is not None), None)
        if update.ranks.rank == 0 and error is None:
            error = self._offer(update, [handles for handles, _, _ in said], lies)
        error = update.ranks.all("loaded", error)[0]
        if error is not None:
            raise error

    def flush(self, update: Update) -> None:
        """See `Transport.flush`: every bucket was waited for. The device's memory is given back until the next update;
        its train ranks may be about to sleep."""
        if isinstance(self._memory, FlatMemory):
            self._memory = None
            torch.cuda.ipc_collect()

    def failed(self, update: Update) -> None:
        """See `Transport.failed`: what nobody takes any more is given back too."""
        self.flush(update)

    def close(self) -> None:
        """See `Transport.close`."""
        self._memory = None

    def _offer(self, update: Update, handles: list[dict[int, Handle]], lies: list[Lies]) -> Exception | None:
        by_receiver = [handles[self._serves[number]][number] for number in range(len(update.infos))]
        count = len(by_receiver)
        try:
            all_results(
                update.receivers.start_each("take_weight_handle", [update.key] * count, by_receiver, [lies] * count)
            )
        except Exception as error:
            return sync_error("the weights were not taken", error)
        return None

    def _room(self, here: torch.device, nbytes: int) -> torch.Tensor:
        if self._memory is None:
            if here.type != "cuda" and not hasattr(os, "memfd_create"):
                raise WeightSyncError(
                    "only on Linux can other processes open this one's host memory; use 'store', 'group' or 'disk'"
                )
            self._memory = FlatMemory(here) if here.type == "cuda" else SharedMemory()
        return self._memory.take(max(nbytes, 1))

    def _handle(self, flat: torch.Tensor) -> Handle:
        if isinstance(self._memory, SharedMemory):
            return Handle(name_of(flat.device), flat.numel(), self._memory.path)
        from torch.multiprocessing.reductions import reduce_tensor

        return Handle(name_of(flat.device), flat.numel(), reduce_tensor(flat)[1])


class SharedMemory:
    """Flat host memory that other processes of this machine can map; it ends with the last of those who have it."""

    def __init__(self) -> None:
        self._file = os.memfd_create("weights")
        self._memory = torch.empty(0, dtype=torch.uint8)
        self.path = f"/proc/{os.getpid()}/fd/{self._file}"

    def take(self, nbytes: int) -> torch.Tensor:
        """That many bytes, uint8; until the next call."""
        if self._memory.numel() < nbytes:
            os.ftruncate(self._file, nbytes)
            self._memory = _mapped(self.path, nbytes)
        return self._memory[:nbytes]

    def __del__(self) -> None:
        os.close(self._file)


@contextmanager
def opened(handle: Handle, lies: Iterable[Lies]) -> Iterator[list[Pair]]:
    """The tensors behind a handle, inside the context. They belong to the other process."""
    if isinstance(handle.made, str):
        flat = _mapped(handle.made, handle.nbytes)
        yield views(flat, lies)
        return
    from torch.multiprocessing.reductions import rebuild_cuda_tensor

    made = list(handle.made)
    made[6] = torch.cuda.current_device()  # the sender may have another number for the same device
    flat = rebuild_cuda_tensor(*made)
    try:
        yield views(flat, lies)
    finally:
        torch.cuda.synchronize()  # the sender writes the next bucket into it
        del flat
        torch.cuda.ipc_collect()


@functools.cache
def device_name(local_rank: int = 0, device_ids: tuple[str, ...] = ()) -> str:
    """The name of a worker's device, the same in every process that can open memory there."""
    return name_of(device(local_rank, device_ids))


def name_of(here: torch.device) -> str:
    """The same of a torch device of this process."""
    if here.type == "cuda":
        return f"cuda:{torch.cuda.get_device_properties(here).uuid}"
    try:
        namespace = os.readlink("/proc/self/ns/pid")
    except OSError:  # macOS has no /proc, and one namespace
        namespace = ""
    return f"cpu:{socket.gethostname()} {namespace}"


def _mapped(path: str, nbytes: int) -> torch.Tensor:
    return torch.from_file(path, shared=True, size=nbytes, dtype=torch.uint8)


def _who_serves(update: Update, mine: str) -> dict[int, int]:
    """By receiver, the first train rank on its device."""
    devices = update.ranks.all("devices", mine)
    served: dict[int, int] = {}
    for number, info in enumerate(update.infos):
        if info.device not in devices:
            raise WeightSyncError(
                f"rollout rank {info.rank} has the device {info.device}, the train ranks have "
                f"{', '.join(dict.fromkeys(devices))}: transport='device' needs a train rank on each rollout worker's "
                "device; use 'store', 'group' or 'disk'"
            )
        served[number] = devices.index(info.device)
    return served
