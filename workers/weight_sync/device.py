"""Weights that stay on the device: within one process, or between two processes that share a device.

Every train rank has all the weights and serves the rollout workers on its own device: the one in its own process
directly, others through handles to its memory (CUDA IPC handles, or shared memory if the device is the CPU).
"""

from __future__ import annotations

import functools
import hashlib
import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from workers.device import device
from workers.weight_sync.protocol import (
    FlatBuffer,
    Message,
    OutOfStepError,
    Pair,
    TensorSpec,
    Transport,
    Update,
    WeightSyncError,
    copy_into,
    sync_error,
    tensor_specs,
    views,
    wait_all,
)


class DeviceTransport(Transport):
    """See the module's docstring. Unless the receiver is in this process, all ranks send the same buckets together."""

    everywhere = True

    def __init__(self) -> None:
        self._memory: SharedMemory | FlatBuffer | None = None
        self._served: list[str] = []  # ids of the receivers that this rank serves, in the update of `_key`
        self._key = ""

    def send(self, update: Update, bucket: Sequence[Pair]) -> None:
        """See `Transport.send`."""
        if update.receivers.neighbour is not None:
            # The engine copies, so the tensors may change as soon as this returns.
            update.receivers.neighbour.load_bucket(update.key, bucket)
            return
        here = bucket[0][1].device
        if self._key != update.key:
            self._served, self._key = _served_by_this_rank(update, here), update.key
        specs, nbytes = tensor_specs(bucket)
        handles: dict[str, Any] = {}
        error: WeightSyncError | None = None
        try:
            flat = self._take(here, nbytes)
            copy_into(flat, specs, bucket)
            # CUDA counts how often a handle is opened, so each receiver needs a handle of its own.
            handles = {receiver: self._handle(flat) for receiver in self._served}
        except Exception as failed:  # not raised here, where the other ranks would wait for this one
            error = sync_error(f"train rank {update.rank} could not share its weights", failed)

        def load(offers: list[tuple[dict[str, Any], bytes]]) -> None:
            differs = next((rank for rank, (_, theirs) in enumerate(offers) if theirs != offers[0][1]), None)
            if differs is not None:
                raise OutOfStepError(
                    f"train ranks 0 and {differs} sent different weights, but transport='device' needs all weights "
                    "on every rank, in the same order. Pass the result of hf_weights(everywhere=sender.everywhere)"
                )
            every = {receiver: handle for theirs, _ in offers for receiver, handle in theirs.items()}
            try:
                wait_all(update.receivers.start("receive_weights", update.key, SharedBucket(every, nbytes, specs)))
            except Exception as failed:
                raise sync_error("the rollout workers did not load the weights", failed) from failed

        # Also the barrier behind which the next bucket may overwrite the memory: rank 0 waits for every receiver.
        update.agree("bucket", (handles, hashlib.sha256(repr(specs).encode()).digest()), error, load)

    def flush(self, update: Update) -> None:
        """See `Transport.flush`: `send` has waited for every bucket. Device memory is freed until the next update,
        because the train ranks may be about to offload."""
        if isinstance(self._memory, FlatBuffer):
            self._memory = None
            torch.cuda.ipc_collect()

    def failed(self, update: Update) -> None:
        """See `Transport.failed`."""
        self.flush(update)

    def close(self) -> None:
        """See `Transport.close`."""
        self._memory = None

    def _take(self, here: torch.device, nbytes: int) -> torch.Tensor:
        if self._memory is None:
            if here.type != "cuda" and not hasattr(os, "memfd_create"):
                raise WeightSyncError(
                    "transport='device' shares host memory only on Linux; use 'store', 'group' or 'disk' here"
                )
            self._memory = FlatBuffer(here) if here.type == "cuda" else SharedMemory()
        return self._memory.take(max(nbytes, 1))

    def _handle(self, flat: torch.Tensor) -> Any:
        if isinstance(self._memory, SharedMemory):
            return self._memory.path
        from torch.multiprocessing.reductions import reduce_tensor

        return reduce_tensor(flat)[1]


@dataclass(frozen=True)
class SharedBucket(Message):
    """Load a bucket from the memory of a train process on the same device.

    Attributes:
        handles: by receiver id: a path of shared memory, or the arguments of torch's ``rebuild_cuda_tensor``.
        nbytes: length of the memory.
        specs: the tensors in it.
    """

    handles: dict[str, Any]
    nbytes: int
    specs: list[TensorSpec]

    def receive(self, receiver: Any, key: str) -> None:
        """See `Message.receive`."""
        receiver.check_update(key)
        here = device(receiver.local_rank, receiver.device_ids)
        with self._opened(self.handles[receiver.receiver_id], here) as flat:
            receiver.load_bucket(key, views(flat, self.specs))

    @contextmanager
    def _opened(self, handle: Any, here: torch.device) -> Iterator[torch.Tensor]:
        """Open the memory on the receiver's device, which is also the current one inside. Torch keeps the current
        device per thread, and the thread that runs a method of a worker may never have selected one."""
        if isinstance(handle, str):
            yield _mapped(handle, self.nbytes)
            return
        from torch.multiprocessing.reductions import rebuild_cuda_tensor

        arguments = list(handle)
        arguments[6] = here.index  # the sender may see the same device under another index
        with torch.cuda.device(here):
            flat = rebuild_cuda_tensor(*arguments)
            try:
                yield flat
            finally:
                torch.cuda.synchronize(here)  # the sender overwrites the memory with the next bucket
                del flat
                torch.cuda.ipc_collect()


class SharedMemory:
    """Flat host memory that other processes of this machine can map. It is freed when the last of them closes it."""

    def __init__(self) -> None:
        self._file = os.memfd_create("weights")
        self._memory = torch.empty(0, dtype=torch.uint8)
        self.path = f"/proc/{os.getpid()}/fd/{self._file}"

    def take(self, nbytes: int) -> torch.Tensor:
        """Return that many bytes (uint8), valid until the next call."""
        if self._memory.numel() < nbytes:
            os.ftruncate(self._file, nbytes)
            self._memory = _mapped(self.path, nbytes)
        return self._memory[:nbytes]

    def __del__(self) -> None:
        os.close(self._file)


@functools.cache
def device_name(local_rank: int = 0, device_ids: tuple[str, ...] = ()) -> str:
    """Return the name of a worker's device. It is the same in every process that can open memory there."""
    return name_of(device(local_rank, device_ids))


def name_of(here: torch.device) -> str:
    """`device_name` of a torch device of this process."""
    if here.type == "cuda":
        return f"cuda:{torch.cuda.get_device_properties(here).uuid}"
    try:
        namespace = os.readlink("/proc/self/ns/pid")
    except OSError:  # macOS has neither /proc nor namespaces
        namespace = ""
    return f"cpu:{socket.gethostname()} {namespace}"


def _mapped(path: str, nbytes: int) -> torch.Tensor:
    return torch.from_file(path, shared=True, size=nbytes, dtype=torch.uint8)


def _served_by_this_rank(update: Update, here: torch.device) -> list[str]:
    """Ids of the receivers that this rank serves: each is served by the first train rank on its device."""
    devices: list[str] = update.agree("devices", name_of(here), decide=list)
    served = []
    for info in update.infos:
        if info.device not in devices:
            raise WeightSyncError(
                f"rollout rank {info.rank} is on the device {info.device}, but the train ranks are on "
                f"{', '.join(dict.fromkeys(devices))}: transport='device' needs a train rank on the device of each "
                "rollout worker; use 'store', 'group' or 'disk'"
            )
        if devices.index(info.device) == update.rank:
            served.append(info.id)
    return served
