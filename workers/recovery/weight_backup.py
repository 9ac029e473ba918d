"""WeightBackup: named snapshots of a model's weights in host memory, restored in place."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from single_controller import SingleControllerError
from workers.device import has_accelerator, host_memory, synchronize

ALIGNMENT = 64
"""Alignment in bytes of tensors in a snapshot, suitable for any dtype."""

Layout = list[tuple[str, str, tuple[int, ...], int]]

_Memory = tuple[int, int, torch.dtype, tuple[int, ...], tuple[int, ...]]


class BackupError(SingleControllerError, LookupError):
    """There is no such snapshot, or it does not fit the live weights. Nothing was written."""


@dataclass(frozen=True)
class Snapshot:
    """Copies of tensors in one block of host memory.

    Attributes:
        memory: uint8.
        parts: name -> its view of the memory; tied tensors share theirs.
    """

    memory: torch.Tensor
    parts: dict[str, torch.Tensor]

    @classmethod
    def of(cls, memory: torch.Tensor, layout: Layout) -> Snapshot:
        """Return the snapshot whose `layout` this is, in a block of memory that has its bytes."""
        parts = {}
        for name, dtype, shape, begin in layout:
            view = memory[begin:].view(torch.uint8)
            kind = getattr(torch, dtype)
            nbytes = torch.Size(shape).numel() * kind.itemsize
            parts[name] = view[:nbytes].view(kind).view(shape) if nbytes else torch.empty(shape, dtype=kind)
        return cls(memory, parts)

    @property
    def layout(self) -> Layout:
        """By tensor: name, dtype, shape, and the first byte in the memory."""
        begin = self.memory.data_ptr()
        return [
            (name, str(part.dtype).removeprefix("torch."), tuple(part.shape), max(part.data_ptr() - begin, 0))
            for name, part in self.parts.items()  # an empty one has no address
        ]

    def fits(self, other: dict[str, torch.Tensor]) -> bool:
        return {name: (part.shape, part.dtype) for name, part in self.parts.items()} == {
            name: (tensor.shape, tensor.dtype) for name, tensor in other.items()
        }


class WeightBackup:
    """Snapshots by name: ``copy("actor")`` takes one, ``restore("ref")`` writes one into the live tensors.

    Elements are copied bit by bit; live tensors keep their storage and address. Tensors that share memory are copied
    once. Snapshots are pinned if there is an accelerator.

    Args:
        weights: returns (name, live tensor) pairs with unique names; called for each operation. Under FSDP these are
            the local shards, as plain tensors.
        after: called after `restore`, for example `TrainModel.weights_changed`.

    Raises:
        BackupError: by all methods: there is no such snapshot, or the weights are offloaded, or have other names,
            shapes or dtypes than it has. Nothing was written.
    """

    def __init__(
        self, weights: Callable[[], Iterable[tuple[str, torch.Tensor]]], after: Callable[[], None] | None = None
    ) -> None:
        self._weights = weights
        self._after = after
        self._snapshots: dict[str, Snapshot] = {}
        self._spares: list[Snapshot] = []

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the snapshots, in the order in which they were first taken."""
        return tuple(self._snapshots)

    @property
    def nbytes(self) -> int:
        """Host memory in bytes, including what `swapped` keeps for its next use."""
        return sum(one.memory.numel() for one in (*self._snapshots.values(), *self._spares))

    def copy(self, name: str) -> None:
        """Take a snapshot of the live weights. It replaces one of the same name and reuses its memory."""
        self._snapshots[name] = take_snapshot(self._live(), self._snapshots.get(name))

    def restore(self, name: str) -> None:
        """Write a snapshot into the live weights."""
        self._write(self._known(name), name)
        if self._after is not None:
            self._after()

    def clone(self, source: str, target: str) -> None:
        """Copy a snapshot to another name, without the live weights."""
        known = self._known(source)
        if source != target:
            self._snapshots[target] = take_snapshot(known.parts, self._snapshots.get(target))

    def drop(self, name: str) -> None:
        """Delete a snapshot."""
        self._known(name)
        del self._snapshots[name]

    def snapshot(self, name: str) -> Snapshot:
        """Return a snapshot. It is not a copy: later operations of that name write to it."""
        return self._known(name)

    def put(self, name: str, snapshot: Snapshot) -> None:
        """Add a snapshot that was taken of another model with the same weights, or of this one elsewhere."""
        self._snapshots[name] = snapshot

    @contextmanager
    def swapped(self, name: str) -> Iterator[None]:
        """Swap a snapshot into the live weights inside the context, and restore the previous weights afterwards.

        The previous weights are copied; the memory for that copy is kept for the next use. Contexts nest. Take no
        optimizer step inside: the optimizer's float32 copies of bf16 weights are not swapped."""
        known = self._known(name)
        before = take_snapshot(self._live(), self._spares.pop() if self._spares else None)
        try:
            self._write(known, name)
            yield
        finally:
            self._write(before, "of the previous weights")
            self._spares.append(before)

    def __contains__(self, name: object) -> bool:
        return name in self._snapshots

    def __repr__(self) -> str:
        return f"<WeightBackup of {', '.join(self.names) or 'nothing yet'}, {self.nbytes / 2**20:.1f} MiB>"

    def _known(self, name: str) -> Snapshot:
        known = self._snapshots.get(name)
        if known is None:
            close = difflib.get_close_matches(str(name), self._snapshots, 1)
            hint = f" (did you mean {close[0]!r}?)" if close else ""
            existing = ", ".join(map(repr, self._snapshots)) or "none yet"
            raise BackupError(
                f"there is no weight snapshot {name!r}; existing: {existing}{hint}. Call copy({name!r}) to take one"
            )
        return known

    def _live(self) -> dict[str, torch.Tensor]:
        return live_tensors(self._weights())

    def _write(self, snapshot: Snapshot, name: str) -> None:
        write_snapshot(snapshot, self._live(), name)


def live_tensors(pairs: Iterable[tuple[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Return name -> live tensor; a `BackupError` if a name occurs twice, or a tensor is offloaded."""
    live: dict[str, torch.Tensor] = {}
    for name, tensor in pairs:
        if name in live:
            raise BackupError(f"the model has two weights of the name {name!r}; weight names must be unique")
        if tensor.numel() and not tensor.untyped_storage().nbytes():
            raise BackupError(f"the weights are offloaded ({name!r} has no memory); call wake_up() first")
        live[name] = tensor.detach()
    return live


@torch.no_grad()
def write_snapshot(snapshot: Snapshot, live: dict[str, torch.Tensor], name: str) -> None:
    """Copy a snapshot into live tensors, bit by bit.

    Raises:
        BackupError: they have other names, shapes or dtypes than the snapshot ``name``. Nothing was written.
    """
    if not snapshot.fits(live):
        raise BackupError(f"snapshot {name!r} does not match the live weights: {_difference(snapshot.parts, live)}")
    written: set[_Memory] = set()
    with _waiting(live):
        for key, tensor in live.items():
            memory = _memory_of(tensor)
            if memory not in written:
                tensor.copy_(snapshot.parts[key], non_blocking=True)
                written.add(memory)


@torch.no_grad()
def take_snapshot(tensors: dict[str, torch.Tensor], old: Snapshot | None) -> Snapshot:
    """Take a snapshot of tensors, in the memory of an old one if it fits."""
    if old is None or not old.fits(tensors):
        old = empty_snapshot(tensors)
    written: set[int] = set()
    with _waiting(tensors):
        for name, tensor in tensors.items():
            part = old.parts[name]
            if part.data_ptr() not in written:
                part.copy_(tensor, non_blocking=True)
                written.add(part.data_ptr())
    return old


def empty_snapshot(tensors: dict[str, torch.Tensor]) -> Snapshot:
    """Allocate a snapshot for tensors, without their elements."""
    layout: Layout = []
    begin_of: dict[_Memory, int] = {}
    end = 0
    for name, tensor in tensors.items():
        place = _memory_of(tensor)
        if not (tensor.numel() and place in begin_of):
            begin_of[place] = end
            end += -(-tensor.numel() * tensor.element_size() // ALIGNMENT) * ALIGNMENT
        layout.append((name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), begin_of[place]))
    # Zeros, so that equal tensors make equal blocks, gaps included.
    return Snapshot.of(host_memory(end, pinned=has_accelerator()).zero_(), layout)


def _memory_of(tensor: torch.Tensor) -> _Memory:
    """Return a key that is equal for tensors with the same elements in the same memory."""
    return (
        tensor.untyped_storage().data_ptr(),
        int(tensor.storage_offset()) * tensor.element_size(),
        tensor.dtype,
        tuple(tensor.shape),
        tensor.stride(),
    )


@contextmanager
def _waiting(tensors: dict[str, torch.Tensor]) -> Iterator[None]:
    """At the end, wait for the copies that were begun inside: also after an error, because whoever handles it may free
    the memory that they write to."""
    try:
        yield
    finally:
        synchronize(tensor.device for tensor in tensors.values())


def _difference(parts: dict[str, torch.Tensor], live: dict[str, torch.Tensor]) -> str:
    missing, new = sorted(parts.keys() - live.keys()), sorted(live.keys() - parts.keys())
    if missing or new:
        return f"only the snapshot has {missing[:4]}, only the live weights have {new[:4]}"
    name = next(key for key in parts if (parts[key].shape, parts[key].dtype) != (live[key].shape, live[key].dtype))
    return (
        f"{name!r} is {parts[name].dtype} {tuple(parts[name].shape)} in the snapshot, and now {live[name].dtype} "
        f"{tuple(live[name].shape)}"
    )
