"""Weights that stay on the device: within one process, or between two processes that share a device.

In each round, every train rank gets all pieces and serves the rollout workers on its own device: the one in its own
process directly, others through handles to its memory: device memory where torch has handles to it (see
`workers.device.Accelerator`), shared memory if the device is the CPU.
"""

from __future__ import annotations

import os
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from workers.device import (
    collect_shared,
    current_device,
    device,
    name_of,
    names,
    on_accelerator,
    opened_memory,
    share_memory,
)
from workers.weight_sync.buckets import FlatBuffer
from workers.weight_sync.pieces import Header, Payload
from workers.weight_sync.sync_protocol import Message, WeightSyncError
from workers.weight_sync.transports.weight_transport import Transport, Update, wait_all


class DeviceTransport(Transport):
    """See the module's docstring. The train ranks exchange their pieces in their own process group, round by round, so
    that each rank can serve the receivers on its device."""

    needs_all_headers = True

    def __init__(self) -> None:
        self._memory: SharedMemory | FlatBuffer | None = None
        self._served: list[str] = []
        """Ids of the receivers that this rank serves in the update."""

    def begin(self, update: Update) -> None:
        here = current_device()
        if update.receivers.neighbour is None:
            if on_accelerator(here) and not names().ipc:
                raise WeightSyncError(
                    f"torch shares no memory of a {here.type!r} device between processes, and transport='device' has "
                    "no other way to a rollout worker in a process of its own; use 'store', 'group' or 'disk' here"
                )
            self._served = _served_by_this_rank(update, here)
        if self._memory is None:
            if not on_accelerator(here) and not hasattr(os, "memfd_create"):
                raise WeightSyncError(
                    "transport='device' shares host memory only on Linux; use 'store', 'group' or 'disk' here"
                )
            self._memory = FlatBuffer(here) if on_accelerator(here) else SharedMemory()

    def transfer(
        self, update: Update, number: int, payloads: dict[int, Payload], headers: list[dict[int, Header]]
    ) -> None:
        """As in `Transport`. Returns when the receivers have copied the round."""
        neighbour = update.receivers.neighbour
        if neighbour is not None and update.ranks == 1:
            for payload in payloads.values():
                neighbour.take(update.key, payload)
            return
        offers = [(rank, index, header) for rank, of_rank in enumerate(headers) for index, header in of_rank.items()]
        sizes = [header.nbytes for *_, header in offers]
        if self._memory is None:
            raise WeightSyncError("no update has begun")
        memory = self._memory.take(max(sum(sizes), 1))
        flats = memory[: sum(sizes)].split(sizes)
        works = []
        # All ranks list the offers in the same order, as collectives of one group require.
        for (rank, index, header), flat in zip(offers, flats, strict=True):
            if rank == update.rank:
                payloads[index].copy_to(flat, header)
            if update.ranks > 1 and header.nbytes:
                works.append(dist.broadcast(flat, group=update.process_group, group_src=rank, async_op=True))
        # With NCCL, this only orders the current stream, on which `share_memory` records the event for the receivers.
        for work in works:
            work.wait()
        if neighbour is not None:
            own = next(index for index, one in enumerate(update.classes) if update.rank in one.members)
            for (_, index, header), flat in zip(offers, flats, strict=True):
                if index == own:
                    neighbour.take(update.key, Payload.of(header, flat))
            return
        with update.attempt(f"train rank {update.rank} could not share its weights"):
            # torch counts how often a handle is opened, so each receiver needs a handle of its own.
            handles = {receiver: self._handle(memory) for receiver in self._served}

        def load(offered: list[dict[str, Any]]) -> None:
            every = {receiver: handle for theirs in offered for receiver, handle in theirs.items()}
            class_of = {update.infos[one].id: index for index, of in enumerate(update.classes) for one in of.members}
            shared = SharedRound(every, class_of, [(index, header) for _, index, header in offers])
            wait_all(update.receivers.start("receive_weights", update.key, shared), update)

        # Also the barrier behind which the next round may overwrite the memory: rank 0 waits for every receiver.
        update.agree(f"shared {number}", handles, load)

    def flush(self, update: Update) -> None:
        """Nothing to wait for: `transfer` has waited for every round. Device memory is freed until the next update,
        because the train ranks may be about to offload."""
        if isinstance(self._memory, FlatBuffer):
            self._memory = None
            collect_shared()

    def failed(self, update: Update) -> None:
        self.flush(update)

    def close(self) -> None:
        self._memory = None

    def _handle(self, memory: torch.Tensor) -> Any:
        return self._memory.path if isinstance(self._memory, SharedMemory) else share_memory(memory)


@dataclass(frozen=True)
class SharedRound(Message):
    """Load a round from the memory of a train process on the same device.

    Attributes:
        handles: by receiver id: a path of shared memory, or what `workers.device.share_memory` returned.
        classes: of the receivers, by id.
        offers: the payloads in the memory, one after the other: class and header.
    """

    handles: dict[str, Any]
    classes: dict[str, int]
    offers: list[tuple[int, Header]]

    def receive(self, receiver: Any, key: str) -> None:
        receiver.check_update(key)
        here = device(receiver.local_rank, receiver.device_ids)
        own, sizes = self.classes[receiver.receiver_id], [header.nbytes for _, header in self.offers]
        handle, nbytes = self.handles[receiver.receiver_id], max(sum(sizes), 1)
        mapped = isinstance(handle, str)
        # `take` copies, so the receiver keeps no reference to this memory after the call.
        with nullcontext(_mapped(handle, nbytes)) if mapped else opened_memory(handle, here) as flat:
            for (index, header), part in zip(self.offers, flat[: sum(sizes)].split(sizes), strict=True):
                if index == own:
                    receiver.take(key, Payload.of(header, part))


class SharedMemory:
    """Flat host memory that other processes of this machine can map. It is freed when the last of them closes it."""

    def __init__(self) -> None:
        self._file = os.memfd_create("weights")
        self._memory = torch.empty(0, dtype=torch.uint8)
        # Receivers open this process's descriptor, so the memory has no name that a killed process could leave behind.
        self.path = f"/proc/{os.getpid()}/fd/{self._file}"

    def take(self, nbytes: int) -> torch.Tensor:
        """Return that many bytes (uint8), valid until the next call."""
        if self._memory.numel() < nbytes:
            # Receivers map the file again in each round, so none keeps a mapping of the smaller file.
            os.ftruncate(self._file, nbytes)
            self._memory = _mapped(self.path, nbytes)
        return self._memory[:nbytes]

    def __del__(self) -> None:
        os.close(self._file)


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
