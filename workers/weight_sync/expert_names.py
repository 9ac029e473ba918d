"""Names of experts: trainer and engine may have the weights of a mixture under other names, and cut otherwise.

| stacked, as in the models of transformers 5 | one by one, as in checkpoints | Mixtral's |
|---|---|---|
| ``mlp.experts.gate_up_proj`` (E, 2 I, H): the rows of gate, then those of up | ``mlp.experts.K.gate_proj.weight``, \
``mlp.experts.K.up_proj.weight``, (I, H) each | ``block_sparse_moe.experts.K.w1.weight``, ``...w3.weight`` |
| ``mlp.experts.down_proj`` (E, H, I) | ``mlp.experts.K.down_proj.weight`` (H, I) | ``...w2.weight`` |
| ``mlp.gate.weight``: the router | the same | ``block_sparse_moe.gate.weight`` |

The sender cuts or joins its shards, so that an update has the engine's names throughout: plan, digests, and errors.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, NamedTuple

from workers.weight_sync.weight_plan import Box, Shard, overlap, size_of, whole, within

if TYPE_CHECKING:
    import torch

Shape = tuple[int, ...]

_ONE = re.compile(r"(.*\.experts)\.(\d+)\.(?:(gate_proj|w1)|(up_proj|w3)|(?:down_proj|w2))\.weight")
_STACKED = re.compile(r"(.*\.experts)\.(gate_up_proj|down_proj)")
PARTS = ("gate_up_proj", "gate_proj", "up_proj", "down_proj", "w1", "w2", "w3")
"""What the parts of an expert are called."""

_GATE, _UP, _DOWN, _GATE_UP = "gate", "up", "down", "gate_up"
_STACK_OF = {_GATE: _GATE_UP, _UP: _GATE_UP, _DOWN: _DOWN}


class Place(NamedTuple):
    """Where a part of a tensor is in a tensor of the engine.

    Attributes:
        part: of the tensor.
        name, shape: of the engine's tensor.
        begin: index of the part's first element in it. It has a dim more than ``part`` if experts are stacked, and one
            less if they are taken apart; that is the dim of the experts, the first one.
    """

    part: Box
    name: str
    shape: Shape
    begin: tuple[int, ...]

    def of(self, box: Box) -> Box | None:
        """Return where a box of the tensor is in the engine's; None if nothing of it is there."""
        shared = overlap(box, self.part)
        if shared is None:
            return None
        moved = [(begin - zero, end - zero) for (begin, end), (zero, _) in zip(shared, self.part, strict=True)]
        if len(moved) > len(self.begin):
            moved = moved[1:]
        elif len(moved) < len(self.begin):
            moved = [(0, 1), *moved]
        return tuple((zero + begin, zero + end) for (begin, end), zero in zip(moved, self.begin, strict=True))


class ExpertNames:
    """Finds the engine's tensors, whose shapes are ``wanted``, for those of a trainer that have other names."""

    def __init__(self, wanted: Mapping[str, Shape]) -> None:
        self._wanted = wanted

    @cached_property
    def _by_key(self) -> dict[Any, str]:
        return {_key(name): name for name in self._wanted}

    def places(self, name: str, shape: Shape) -> list[Place] | None:
        """Return where the parts of a trainer's tensor are in the engine's tensors; None if the engine has a tensor of
        that name, or nothing that fits."""
        if name in self._wanted:
            return None
        key = _key(name)
        found: list[tuple[Any, Box, tuple[int, ...]]]
        if isinstance(key, str):
            found = [(key, whole(shape), (0,) * len(shape))]
        elif len(key) == 3:
            prefix, part, expert = key
            found = [((prefix, _STACK_OF[part]), whole(shape), (expert, shape[0] * (part == _UP), 0))]
        else:
            found = list(_taken_apart(key, shape))
        places = []
        for of, part, begin in found:
            own = self._by_key.get(of)
            if own is None or not _fits(part, begin, self._wanted[own], 2 if of[1] == _GATE_UP else 1):
                return None
            places.append(Place(part, own, tuple(self._wanted[own]), begin))
        return places or None

    def shards(self, shards: Iterable[Shard]) -> list[Shard]:
        """Return the shards as parts of the engine's tensors. A shard that is taken apart is read once for all parts
        that are read one after the other."""
        read, made = _LastRead(), []
        for shard in shards:
            places = self.places(shard.name, shard.shape)
            if places is None:
                made.append(shard)
            for place in places or ():
                box, own = place.of(shard.box), overlap(shard.box, place.part)
                if box is not None and own is not None:
                    begin, size = tuple(begin for begin, _ in box), size_of(box)
                    index = within(own, shard.box)
                    made.append(
                        Shard(place.name, place.shape, begin, size, shard.dtype, partial(read, shard, index, size))
                    )
        return made

    def layout(self, layout: Mapping[str, tuple[Shape, Any, list[Box]]]) -> dict[str, tuple[Shape, Any, list[Box]]]:
        """As `shards`, for name -> shape and dtype of a tensor, and boxes of it."""
        made: dict[str, tuple[Shape, Any, list[Box]]] = {}
        for name, (shape, dtype, boxes) in layout.items():
            places = self.places(name, shape)
            if places is None:
                made[name] = shape, dtype, boxes
            for place in places or ():
                moved = [box for box in map(place.of, boxes) if box is not None]
                if moved:
                    _, of_others, into = made.setdefault(place.name, (place.shape, dtype, []))
                    if of_others != dtype:
                        raise ValueError(f"{name!r} has dtype {dtype}, other parts of {place.name!r} have {of_others}")
                    into.extend(moved)
        return made


def stack_of(name: str) -> str | None:
    """Return the name of the module whose experts are stacked in a tensor of this name; None for other names."""
    found = _STACKED.fullmatch(name)
    return None if found is None else found[1]


def one_by_one(name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the weights of the experts that are stacked in a tensor, as views under their names in a checkpoint."""
    module = stack_of(name)
    names = _names_in(name, name)
    for expert, matrix in enumerate(tensor):
        for own, part in zip(names, matrix.chunk(len(names)), strict=True):
            yield f"{module}.{expert}.{own}.weight", part


def as_in_checkpoints(shapes: Mapping[str, Shape], block: str) -> dict[str, Shape]:
    """Return the names and shapes that a checkpoint has for the tensors of a model. ``block`` is what it calls the
    module of a mixture, which transformers calls "mlp"."""
    found: dict[str, Shape] = {}
    for name, shape in shapes.items():
        module = stack_of(name)
        if module is not None and len(shape) == 3:
            names = _names_in(f".{block}.", name)
            size = (shape[1] // len(names), shape[2])
            prefix = module.replace(".mlp.", f".{block}.")
            found |= {f"{prefix}.{expert}.{own}.weight": size for expert in range(shape[0]) for own in names}
        else:
            found[re.sub(r"\.mlp\.(?=gate\.weight$)", f".{block}.", name)] = shape
    return found


def _names_in(module: str, stack: str) -> list[str]:
    """Names of the parts of an expert that are one tensor of a model."""
    names = ["gate_proj", "up_proj"] if stack.endswith("gate_up_proj") else ["down_proj"]
    if ".block_sparse_moe." in module:
        names = ["w1", "w3"] if len(names) == 2 else ["w2"]
    return names


class _LastRead:
    """Reads parts of shards, and keeps the last shard: there is memory for one that was converted."""

    def __init__(self) -> None:
        self._last: tuple[Shard, torch.Tensor] | None = None

    def __call__(self, shard: Shard, index: tuple[slice, ...], size: Shape) -> torch.Tensor:
        if self._last is None or self._last[0] is not shard:
            self._last = None  # first
            self._last = shard, shard.read()
        return self._last[1][index].view(size)


def _key(name: str) -> Any:
    """What is the same in all names of a weight: (layer, part, expert), or (layer, part) for all experts of a layer;
    for other weights, the name."""
    name = name.replace(".block_sparse_moe.", ".mlp.")
    if found := _ONE.fullmatch(name):
        prefix, expert, gate, up = found.groups()
        return prefix, _GATE if gate else _UP if up else _DOWN, int(expert)
    if found := _STACKED.fullmatch(name):
        return found[1], _GATE_UP if found[2] == "gate_up_proj" else _DOWN
    return name


def _taken_apart(key: tuple[str, str], shape: Shape) -> Iterator[tuple[Any, Box, tuple[int, ...]]]:
    if len(shape) != 3 or (key[1] == _GATE_UP and shape[1] % 2):
        return
    parts = [_DOWN] if key[1] == _DOWN else [_GATE, _UP]
    rows = shape[1] // len(parts)
    for expert in range(shape[0]):
        for number, part in enumerate(parts):
            box = (expert, expert + 1), (number * rows, (number + 1) * rows), (0, shape[2])
            yield (key[0], part, expert), box, (0, 0)


def _fits(part: Box, begin: tuple[int, ...], shape: Shape, stacked: int) -> bool:
    """Whether a part is a whole tensor of the engine, or one of so many that an expert has in one that is stacked."""
    size = [end - first for first, end in part]
    if len(size) < len(begin):
        return len(shape) == 3 and begin[0] < shape[0] and [size[0] * stacked, *size[1:]] == list(shape[1:])
    return size[len(size) - len(begin) :] == list(shape)
