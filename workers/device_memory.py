"""DeviceMemory: offload device memory to host memory, and bring it back.

Only this file chooses between the two ways: torch_memory_saver, if the process was started with it; otherwise the
storages are emptied and refilled, which works on any device and is how the CPU tests it.
"""

from __future__ import annotations

import importlib.util
import logging
import os
from collections.abc import Callable, Iterable

import torch

from workers.device import empty_cache, free_device_memory, has_accelerator, host_memory, on_accelerator, synchronize

logger = logging.getLogger(__name__)


class DeviceMemory:
    """The device memory of tensors that can be offloaded.

    The tensors stay the same objects and have the same contents after `wake_up`. Do not use them in between. Their
    address may change, unless torch_memory_saver is used; that of scratch tensors may change in any case. Tensors that
    share a storage are moved once, with the whole storage. If there is a device, tensors on the CPU are not moved.

    torch_memory_saver is used if there is a device, it can be imported, and the process was started with it
    (``TMS_INIT_ENABLE=1``, ``TMS_INIT_ENABLE_CPU_BACKUP=1`` and its library in ``LD_PRELOAD``). It then frees
    everything that the process has allocated since its start, not only these tensors.

    Args:
        tensors: returns the tensors to offload; called by each `sleep`.
        scratch: returns tensors whose contents nobody needs, such as gradient buffers between steps. Their memory is
            freed without a copy, and they are all zeros after `wake_up`. A storage that is also one of ``tensors`` is
            copied.

    Attributes:
        asleep: whether the tensors are offloaded.
        paused: whether torch_memory_saver has paused all device memory of the process. Until `wake_up`, none of it may
            be freed or allocated.
    """

    def __init__(
        self,
        tensors: Callable[[], Iterable[torch.Tensor]],
        scratch: Callable[[], Iterable[torch.Tensor]] = tuple,
    ) -> None:
        self._tensors = tensors
        self._scratch = scratch
        self.asleep = self.paused = False
        self._moved: list[tuple[torch.UntypedStorage, torch.Tensor]] = []
        self._dropped: list[tuple[torch.UntypedStorage, int]] = []
        # Kept for the next `sleep`: to pin and touch new memory takes longer than the copy.
        self._host: dict[int, torch.Tensor] = {}

    @property
    def nbytes(self) -> int:
        """Host memory in bytes that the copies take, including what is kept for the next `sleep`. Without what
        torch_memory_saver takes."""
        return sum(memory.numel() for memory in self._host.values())

    @torch.no_grad()
    def sleep(self) -> int:
        """Offload the tensors to host memory. Does nothing if they are offloaded already.

        Returns:
            Freed device memory in bytes.
        """
        if self.asleep:
            return 0
        kept = _storages(self._tensors())
        self.asleep = True  # already now: if anything below fails, `wake_up` brings back what was moved
        try:
            # torch_memory_saver copies whatever is allocated when it pauses, so the scratch tensors' memory goes first.
            freed = self._drop(kept)
            if saver_preloaded():
                freed += _pause()
                self.paused = True
            else:
                freed += self._empty(kept)
                empty_cache()
        except BaseException:
            self.wake_up()  # if this fails as well, the copies stay, and the caller can call it again
            raise
        return freed

    def wake_up(self) -> int:
        """Bring the tensors back to the device. Does nothing if they are not offloaded.

        Returns:
            Allocated device memory in bytes.
        """
        if not self.asleep:
            return 0
        taken = 0
        if self.paused:  # if `_fill` fails, the next call does not resume again
            taken, self.paused = _resume(), False
        taken += self._fill()
        self.asleep = False
        return taken

    def _drop(self, kept: Iterable[torch.UntypedStorage]) -> int:
        """Free the memory of the scratch tensors. `_fill` brings it back."""
        copied = {storage._cdata for storage in kept}
        storages = [one for one in _storages(self._scratch()) if one.nbytes() and one._cdata not in copied]
        synchronize(one.device for one in storages)  # collectives on other streams may still read gradients
        for storage in storages:
            self._dropped.append((storage, storage.nbytes()))
            storage.resize_(0)
        return sum(nbytes for _, nbytes in self._dropped)

    def _empty(self, kept: Iterable[torch.UntypedStorage]) -> int:
        """Copy storages to host memory, and free their own. `_fill` brings them back."""
        host: dict[int, torch.Tensor] = {}
        storages = [one for one in kept if one.nbytes()]
        try:
            for storage in storages:
                memory = self._host.get(storage._cdata)
                if memory is None or memory.numel() != storage.nbytes():
                    memory = host_memory(storage.nbytes(), pinned=on_accelerator(storage.device))
                memory.copy_(_bytes_of(storage), non_blocking=True)
                host[storage._cdata] = memory
        finally:
            # Before anything is freed: the storages, after a success; after a failure, the host memory that copies may
            # still be written to.
            synchronize(storage.device for storage in storages)
            self._host = host
        self._moved = [(storage, host[storage._cdata]) for storage in storages]
        for storage in storages:
            storage.resize_(0)
        return sum(memory.numel() for _, memory in self._moved)

    @torch.no_grad()
    def _fill(self) -> int:
        for storage, memory in self._moved:
            storage.resize_(memory.numel())
            _bytes_of(storage).copy_(memory, non_blocking=True)
        for storage, nbytes in self._dropped:
            storage.resize_(nbytes)
            _bytes_of(storage).zero_()
        synchronize(storage.device for storage, _ in self._moved)
        taken = sum(memory.numel() for _, memory in self._moved) + sum(nbytes for _, nbytes in self._dropped)
        self._moved, self._dropped = [], []
        return taken


def saver_preloaded() -> bool:
    """Whether torch_memory_saver manages this process's device memory, with copies in host memory."""
    return (
        has_accelerator()
        and os.environ.get("TMS_INIT_ENABLE") == "1"
        and os.environ.get("TMS_INIT_ENABLE_CPU_BACKUP") == "1"
        and "torch_memory_saver" in os.environ.get("LD_PRELOAD", "")
        and importlib.util.find_spec("torch_memory_saver") is not None
    )


def _pause() -> int:
    from torch_memory_saver import torch_memory_saver  # type: ignore[import-not-found,unused-ignore]

    empty_cache()  # torch's unused cached memory would be copied too
    before = free_device_memory()
    torch.accelerator.synchronize()
    torch_memory_saver.pause()
    return max(0, free_device_memory() - before)


def _resume() -> int:
    from torch_memory_saver import torch_memory_saver

    before = free_device_memory()
    torch_memory_saver.resume()
    return max(0, before - free_device_memory())


def _storages(tensors: Iterable[torch.Tensor]) -> list[torch.UntypedStorage]:
    """Return the distinct storages that can be offloaded."""
    by_address: dict[int, torch.UntypedStorage] = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage.device.type == "cpu" and has_accelerator():
            continue
        if not storage.resizable():  # the memory of a numpy array, of a file, or of another process
            logger.debug("a tensor of shape %s does not own its memory and is not offloaded", tuple(tensor.shape))
            continue
        by_address.setdefault(storage._cdata, storage)
    return list(by_address.values())


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
