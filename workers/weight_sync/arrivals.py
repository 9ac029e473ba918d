"""Arrivals: assembles the tensors of an update from their pieces."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

import torch

from workers.weight_sync.buckets import BUCKET_BYTES
from workers.weight_sync.delta import SAME, Patch, apply
from workers.weight_sync.pieces import WHOLE, Payload, PieceSpec, differences, labels, pieces_of
from workers.weight_sync.sync_protocol import some
from workers.weight_sync.weight_plan import Box, size_of, volume, whole, within


class Arrivals:
    """The tensors of one update after the other.

    With ``keep``, they stay in host memory, which is used again, and differences are written into it. Otherwise a
    tensor is dropped when it is complete and has been taken.

    Attributes:
        missing: elements that have not yet arrived, by name.
        pieces: what has arrived.
    """

    def __init__(self) -> None:
        self.missing: dict[str, int] = {}
        self.pieces: list[PieceSpec] = []
        self._tensors: dict[str, torch.Tensor] = {}
        """Those that have begun to arrive, or were kept."""
        self._empty: dict[str, torch.Tensor] = {}
        """Those without elements, of which nothing is sent, until they have been taken. Engines expect them too."""
        self._seen: set[tuple[str, Box]] = set()
        self._boxes: dict[str, Box] = {}
        self._keep = False

    def begin(self, shapes: Mapping[str, tuple[int, ...]], slices: Mapping[str, Box], *, keep: bool) -> None:
        """Begin an update of whole tensors of these ``shapes``, or ``slices`` of some. With ``keep``, they stay."""
        self._boxes = {name: slices.get(name) or whole(shape) for name, shape in shapes.items()}
        self._keep = keep
        self.missing = {name: volume(box) for name, box in self._boxes.items() if volume(box)}
        self.pieces, self._seen = [], set()
        # Of another model, whose engine this worker had before, nothing stays.
        sizes = {name: size_of(box) for name, box in self._boxes.items()}
        fitting = {name: tensor for name, tensor in self._tensors.items() if sizes.get(name) == tensor.shape}
        self._tensors = fitting if keep else {}
        self._empty = {name: torch.empty(size) for name, size in sizes.items() if 0 in size}

    @property
    def nbytes(self) -> int:
        """Bytes of memory in use."""
        return sum(tensor.nbytes for tensor in self._tensors.values())

    def add(self, payload: Payload) -> None:
        """Take the pieces of a payload, which may then be freed; a `ValueError` if one is unexpected, came twice, or
        has other bytes than were sent."""
        for spec, parts in pieces_of(payload):
            box, left = self._boxes.get(spec.name), self.missing.get(spec.name, 0)
            count = volume(spec.box)
            # The count alone would not reveal a piece that came twice while others are missing.
            if box is None or count > left or (spec.name, spec.box) in self._seen:
                raise ValueError(f"{spec.name!r} {spec.box} was not expected, or was received twice")
            # Write the piece before its digest is compared: the engine gets the written bytes.
            part = self._write(spec, parts, box)
            self.missing[spec.name] = left - count
            if left == count:
                del self.missing[spec.name]
            self.pieces.append(spec)
            self._seen.add((spec.name, spec.box))
            if spec.digests is None:
                continue
            wrong = list(differences(spec, part.to(spec.dtype), lambda: labels([*self.pieces, *payload.pieces])))
            if wrong:
                raise ValueError(
                    f"{spec.name!r} {spec.box} did not arrive as it was sent: the digest differs of {some(wrong)}"
                )

    def _write(self, spec: PieceSpec, parts: list[torch.Tensor], box: Box) -> torch.Tensor:
        held = self._tensors.get(spec.name)
        if spec.kind == WHOLE:
            (new,) = parts
            device = torch.device("cpu") if self._keep else new.device
            if held is None or (held.dtype, held.device) != (new.dtype, device):
                held = self._tensors[spec.name] = torch.empty(size_of(box), dtype=new.dtype, device=device)
            part = held[within(spec.box, box)]
            part.copy_(new)
            return part
        if held is None:
            raise ValueError(f"differences of {spec.name!r} were sent to a worker that has nothing to add them to")
        part = held[within(spec.box, box)]
        apply(Patch(spec.kind, *parts), part)
        return part

    def take(self, *, every: bool) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the tensors that are complete, with ``every`` those too in which nothing has changed. Without ``keep``,
        they are dropped when the next one is requested."""
        changed: Collection[str] = self._tensors.keys()
        if self._keep:  # otherwise all have come whole, and this is called after each payload
            changed = {spec.name for spec in self.pieces if every or spec.kind != SAME}
        for name in [name for name in self._tensors if name in changed and name not in self.missing]:
            yield name, self._tensors[name]
            if not self._keep:
                del self._tensors[name]
        if every and not self.missing:  # with the last ones, so that no engine is called for them alone
            empty, self._empty = self._empty, {}
            yield from empty.items()

    def differing(self, read: Callable[[Sequence[str]], list[torch.Tensor]], *, every: bool) -> list[str]:
        """Return where the engine's tensors, as `RolloutEngine.read_weights` gives them, differ from the digests of
        what was sent: names of tensors, and of experts in them, see `pieces.differences`. ``every``: also in pieces in
        which nothing has changed."""
        by_name: dict[str, list[PieceSpec]] = {}
        for spec in self.pieces:
            if every or spec.kind != SAME:
                by_name.setdefault(spec.name, []).append(spec)
        differing: dict[str, None] = {}
        sent = functools.cache(lambda: labels(self.pieces))
        for names in self._batches(by_name):
            for name, tensor in zip(names, read(names), strict=True):
                box = self._boxes[name]
                for spec in by_name[name]:
                    if tensor.dtype != spec.dtype:
                        differing[name] = None
                    else:
                        differing.update(dict.fromkeys(differences(spec, tensor[within(spec.box, box)], sent)))
        return list(differing)

    def _batches(self, by_name: Mapping[str, list[PieceSpec]]) -> Iterator[list[str]]:
        """Divide names into batches of at most a bucket, or one tensor: reading may make copies, and asking each of an
        engine's processes for every single tensor takes long."""
        names: list[str] = []
        total = 0
        for name, specs in by_name.items():
            size = volume(self._boxes[name]) * specs[0].dtype.itemsize
            if names and total + size > BUCKET_BYTES:
                yield names
                names, total = [], 0
            names.append(name)
            total += size
        if names:
            yield names
