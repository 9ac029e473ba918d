"""Pieces of tensors on their way: how a train rank packs them, and what a receiver is told about them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from workers.weight_sync.buckets import TensorSpec, copy_into, tensor_specs, views
from workers.weight_sync.delta import SAME, Patch, encode
from workers.weight_sync.digest import digests as digests_of
from workers.weight_sync.digest import stacked
from workers.weight_sync.sync_protocol import ReceiverClass, WeightSyncError
from workers.weight_sync.weight_plan import Box, Piece, overlap, size_of, within

if TYPE_CHECKING:
    import torch

    from workers.weight_sync.weight_plan import Shard

WHOLE = "whole"


class PieceSpec(NamedTuple):
    """A piece of a payload.

    Attributes:
        name, box: see `workers.weight_sync.weight_plan.Piece`.
        kind: `WHOLE`, or that of a `workers.weight_sync.delta.Patch`.
        dtype: in which the engine holds the tensor; that of the trainer if the engine does not tell.
        digests: of the new bytes in this dtype, see `workers.weight_sync.digest.digests`; None if nobody asked.
    """

    name: str
    box: Box
    kind: str
    dtype: torch.dtype
    digests: tuple[int, ...] | None

    @property
    def parts(self) -> int:
        """How many tensors the piece consists of: itself, or positions and values."""
        return 1 if self.kind == WHOLE else 2

    def label(self, number: int) -> str:
        """Name what one of the digests is of: the tensor, or an expert of it."""
        experts = stacked(size_of(self.box))
        return f"{self.name}[{self.box[0][0] + number}]" if experts else self.name


class Header(NamedTuple):
    """What a receiver must know of a payload.

    Attributes:
        pieces: in order.
        specs: their tensors in a flat buffer.
        nbytes: its length.
    """

    pieces: list[PieceSpec]
    specs: list[TensorSpec]
    nbytes: int


@dataclass(frozen=True)
class Payload:
    """All pieces of one train rank for one class of receivers in one round.

    Attributes:
        pieces: what they are.
        tensors: `PieceSpec.parts` tensors of each. They may be views of the live weights.
    """

    pieces: list[PieceSpec]
    tensors: list[torch.Tensor]

    def header(self) -> Header:
        """Lay the tensors out in a flat buffer."""
        return Header(self.pieces, *tensor_specs([("", tensor) for tensor in self.tensors]))

    def copy_to(self, flat: torch.Tensor, header: Header) -> None:
        """Copy the tensors into a flat buffer (uint8)."""
        copy_into(flat, header.specs, self.tensors)

    @classmethod
    def of(cls, header: Header, flat: torch.Tensor) -> Payload:
        """Return the payload that was copied into a flat buffer, as views."""
        return cls(header.pieces, [tensor for _, tensor in views(flat, header.specs)])


class Packer:
    """Packs a train rank's pieces, and keeps what it has sent for the differences of the next update.

    Args:
        delta: whether to keep it.

    Attributes:
        base: key of the last update that all train ranks have ended, if its bytes are kept.
    """

    def __init__(self, *, delta: bool) -> None:
        self.base: str | None = None
        self._delta = delta
        self._sent: dict[Piece, torch.Tensor] = {}
        self._packed: set[Piece] = set()
        self._shards: dict[str, dict[Box, Shard]] = {}
        self._patches: dict[Piece, Patch | None] = {}
        self._last: tuple[Shard, torch.Tensor] | None = None

    def begin(self, shards: Iterable[Shard]) -> None:
        """Begin an update with these weights. Until `end`, there is no base."""
        self._shards = {}
        for shard in shards:
            self._shards.setdefault(shard.name, {})[shard.box] = shard
        # If the last update has failed, the receivers do not have the kept bytes.
        if self.base is None:
            self._sent = {}
        # `_patch` overwrites the kept bytes, so they match no update of the receivers until `end`.
        self.base = None
        self._packed = set()

    def end(self, key: str | None) -> None:
        """End an update. ``key`` is None if it failed."""
        self.base = key if self._delta else None
        # What another rank has sent in this update, by another plan, is not as the receivers have it.
        self._sent = {piece: sent for piece, sent in self._sent.items() if piece in self._packed}
        self._shards, self._last = {}, None
        self._patches.clear()

    def pack(self, pieces: Sequence[Piece], receivers: ReceiverClass, *, digests: bool) -> Payload:
        """Pack pieces of one round for a class of receivers, with or without ``digests``."""
        import torch

        specs, tensors = [], []
        with torch.no_grad():
            for piece in pieces:
                new = self._read(piece)
                patch = self._patch(piece, new) if self._delta else None
                if patch is None or not receivers.patched:
                    kind, parts = WHOLE, [new]
                else:
                    kind, parts = patch.kind, [patch.positions, patch.values]
                dtype = (receivers.dtypes or {}).get(piece.name, new.dtype)
                hashed = digests_of(new.to(dtype)) if digests else None
                specs.append(PieceSpec(*piece, kind, dtype, hashed))
                tensors += parts
        return Payload(specs, tensors)

    def next_round(self) -> None:
        """A round has been packed for all classes."""
        self._patches.clear()

    def _patch(self, piece: Piece, new: torch.Tensor) -> Patch | None:
        """Compare with what was sent before, and keep the new bytes. None if everything is to be sent."""
        if piece not in self._patches:  # not yet packed for another class
            self._packed.add(piece)
            host = new.cpu().contiguous()
            before = self._sent.get(piece)
            if before is not None and before.dtype != host.dtype:
                before = None
            patch = self._patches[piece] = None if before is None else encode(host, before)
            if before is None:
                self._sent[piece] = host.clone()
            elif patch is None or patch.kind != SAME:
                before.copy_(host)
        return self._patches[piece]

    def _read(self, piece: Piece) -> torch.Tensor:
        if self._last is None or not _has(self._last[0], piece):
            self._last = None  # first: there is memory for one
            held = self._shards.get(piece.name, {})
            # Mostly a piece is a whole shard. There may be a shard for each of many experts.
            shard = held.get(piece.box) or next((one for one in held.values() if _has(one, piece)), None)
            if shard is None:
                raise WeightSyncError(
                    f"this rank has no {piece.name!r} {piece.box}, which it had when the plan was made"
                )
            self._last = shard, shard.read()
        shard, tensor = self._last
        return tensor[within(piece.box, shard.box)]


def _has(shard: Shard, piece: Piece) -> bool:
    return shard.name == piece.name and overlap(piece.box, shard.box) == piece.box


def pieces_of(payload: Payload) -> Iterator[tuple[PieceSpec, list[torch.Tensor]]]:
    """Yield each piece with its tensors."""
    position = 0
    for spec in payload.pieces:
        yield spec, payload.tensors[position : position + spec.parts]
        position += spec.parts


def differences(spec: PieceSpec, tensor: torch.Tensor, sent: Callable[[], Mapping[int, str]]) -> Iterator[str]:
    """Compare a piece's bytes with its digests.

    Args:
        spec: the piece.
        tensor: what is there, in the dtype of the digests.
        sent: returns digest -> label of what was sent; called if something differs.

    Yields:
        The label of each tensor or expert that differs, and of which other one it has the bytes.
    """
    for number, (found, expected) in enumerate(zip(digests_of(tensor), spec.digests or (), strict=True)):
        if found != expected:
            other = sent().get(found)
            yield spec.label(number) + (f" (has the bytes of {other})" if other else "")


def labels(specs: Iterable[PieceSpec]) -> dict[int, str]:
    """Return digest -> label of all pieces that have digests."""
    return {one: spec.label(number) for spec in specs for number, one in enumerate(spec.digests or ())}
