"""WeightBackup: named snapshots of a model's weights in host memory, which go back into the live tensors in place."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from single_controller import SingleControllerError
from workers.device import has_cuda, host_memory

ALIGNMENT = 64
"""Bytes: every tensor of a snapshot begins at a multiple, which any dtype can be read at."""

_Place = tuple[int, int, torch.dtype, tuple[int, ...], tuple[int, ...]]


class BackupError(SingleControllerError, LookupError):
    """There is no such snapshot, or the live weights are no longer what it was taken of; nothing was written."""


@dataclass(frozen=True)
class _Snapshot:
    """Copies of tensors, side by side in one piece of host memory.

    Attributes:
        memory: uint8.
        parts: name -> its view of the memory; tied tensors share theirs.
    """

    memory: torch.Tensor
    parts: dict[str, torch.Tensor]

    def fits(self, other: dict[str, torch.Tensor]) -> bool:
        return {name: (part.shape, part.dtype) for name, part in self.parts.items()} == {
            name: (tensor.shape, tensor.dtype) for name, tensor in other.items()
        }


class WeightBackup:
    """Snapshots by name: ``copy("actor")`` takes one, ``restore("ref")`` writes one into the live tensors.

    What is copied are the tensors' own elements, bit by bit; tensors keep their storage and address. Tensors that are
    the same memory are copied once. Snapshots are pinned where there is CUDA.

    Args:
        weights: gives (name, live tensor), each name once; asked anew every time. Under FSDP these are the local
            shards, as plain tensors.
        after: called when the live tensors were written to for good, for example `TrainModel.weights_changed`.
    """

    def __init__(
        self, weights: Callable[[], Iterable[tuple[str, torch.Tensor]]], after: Callable[[], None] | None = None
    ) -> None:
        self._weights = weights
        self._after = after
        self._snapshots: dict[str, _Snapshot] = {}
        self._spares: list[_Snapshot] = []

    @property
    def names(self) -> tuple[str, ...]:
        """The snapshots, in the order in which they were first taken."""
        return tuple(self._snapshots)

    @property
    def nbytes(self) -> int:
        """Host memory of all snapshots, in bytes; with what `swapped` keeps for its next use."""
        return sum(one.memory.numel() for one in (*self._snapshots.values(), *self._spares))

    def copy(self, name: str) -> None:
        """Take a snapshot of the live weights; one of the same name is overwritten, and its memory used again.

        Raises:
            BackupError: the weights are asleep.
        """
        self._snapshots[name] = _take(self._live(), self._snapshots.get(name))

    def restore(self, name: str) -> None:
        """Write a snapshot into the live weights.

        Raises:
            BackupError: there is no such snapshot, the weights are asleep, or have other names, shapes or dtypes.
        """
        self._write(self._known(name), name)
        if self._after is not None:
            self._after()

    def clone(self, source: str, target: str) -> None:
        """Make one snapshot the copy of another; the live weights are not asked.

        Raises:
            BackupError: there is no snapshot ``source``.
        """
        known = self._known(source)
        if source != target:
            self._snapshots[target] = _take(known.parts, self._snapshots.get(target))

    def drop(self, name: str) -> None:
        """Forget a snapshot and free its memory.

        Raises:
            BackupError: there is no such snapshot.
        """
        self._known(name)
        del self._snapshots[name]

    @contextmanager
    def swapped(self, name: str) -> Iterator[None]:
        """Inside, the live weights are those of a snapshot; afterwards they are again what they were.

        What they were is copied too. The memory for it is kept for the next time. Contexts nest. The optimizer is not
        told, and takes no step inside: its float32 copies of bf16 weights stay as they are, digits and all.

        Raises:
            BackupError: as `restore`.
        """
        known = self._known(name)
        before = _take(self._live(), self._spares.pop() if self._spares else None)
        try:
            self._write(known, name)
            yield
        finally:
            self._write(before, "what was live before")
            self._spares.append(before)

    def __contains__(self, name: object) -> bool:
        return name in self._snapshots

    def __repr__(self) -> str:
        return f"<WeightBackup of {', '.join(self.names) or 'nothing yet'}, {self.nbytes / 2**20:.1f} MiB>"

    def _known(self, name: str) -> _Snapshot:
        found = self._snapshots.get(name)
        if found is None:
            close = difflib.get_close_matches(str(name), self._snapshots, 1)
            hint = f"; is {close[0]!r} meant?" if close else ""
            having = ", ".join(map(repr, self._snapshots)) or "none yet"
            raise BackupError(f"there is no snapshot {name!r} of the weights: copy({name!r}) takes one; {having}{hint}")
        return found

    def _live(self) -> dict[str, torch.Tensor]:
        live: dict[str, torch.Tensor] = {}
        for name, tensor in self._weights():
            if name in live:
                raise BackupError(f"two of the weights are called {name!r}")
            if tensor.numel() and not tensor.untyped_storage().nbytes():
                raise BackupError(f"the weights are asleep ({name!r} has no memory): wake_up() comes first")
            live[name] = tensor.detach()
        return live

    @torch.no_grad()
    def _write(self, snapshot: _Snapshot, name: str) -> None:
        live = self._live()
        if not snapshot.fits(live):
            raise BackupError(f"snapshot {name!r} does not fit the live weights: {_difference(snapshot.parts, live)}")
        written: set[_Place] = set()
        for key, tensor in live.items():
            place = _place(tensor)
            if place not in written:
                tensor.copy_(snapshot.parts[key], non_blocking=True)
                written.add(place)
        _wait(live)


@torch.no_grad()
def _take(tensors: dict[str, torch.Tensor], old: _Snapshot | None) -> _Snapshot:
    """A snapshot of tensors, in the memory of an old one if they fit there."""
    if old is None or not old.fits(tensors):
        old = _room_for(tensors)
    written: set[int] = set()
    for name, tensor in tensors.items():
        part = old.parts[name]
        if part.data_ptr() not in written:
            part.copy_(tensor, non_blocking=True)
            written.add(part.data_ptr())
    _wait(tensors)
    return old


def _room_for(tensors: dict[str, torch.Tensor]) -> _Snapshot:
    begins: dict[str, int] = {}
    of_place: dict[_Place, int] = {}
    end = 0
    for name, tensor in tensors.items():
        place = _place(tensor)
        if tensor.numel() and place in of_place:
            begins[name] = of_place[place]
            continue
        begins[name] = of_place[place] = end
        end += -(-tensor.numel() * tensor.element_size() // ALIGNMENT) * ALIGNMENT
    memory = host_memory(end, pinned=has_cuda())
    parts = {}
    for name, tensor in tensors.items():
        length = tensor.numel() * tensor.element_size()
        part = memory[begins[name] : begins[name] + length]
        parts[name] = part.view(tensor.dtype).view(tensor.shape) if length else tensor.new_empty(tensor.shape)
    return _Snapshot(memory, parts)


def _place(tensor: torch.Tensor) -> _Place:
    """Equal for tensors that are the same elements of the same memory."""
    return (
        tensor.untyped_storage().data_ptr(),
        int(tensor.storage_offset()) * tensor.element_size(),
        tensor.dtype,
        tuple(tensor.shape),
        tensor.stride(),
    )


def _wait(tensors: dict[str, torch.Tensor]) -> None:
    for device in {tensor.device for tensor in tensors.values() if tensor.is_cuda}:
        torch.cuda.synchronize(device)


def _difference(parts: dict[str, torch.Tensor], live: dict[str, torch.Tensor]) -> str:
    missing, new = sorted(parts.keys() - live.keys()), sorted(live.keys() - parts.keys())
    if missing or new:
        return f"it has {missing[:4] or 'nothing'} that they lack, they have {new[:4] or 'nothing'} that it lacks"
    name = next(key for key in parts if (parts[key].shape, parts[key].dtype) != (live[key].shape, live[key].dtype))
    return (
        f"{name!r} was {tuple(parts[name].shape)} of {parts[name].dtype}, is {tuple(live[name].shape)} of "
        f"{live[name].dtype}"
    )
