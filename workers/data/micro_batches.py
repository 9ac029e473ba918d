"""Split a batch into micro-batches by a token budget, packed into one sequence each, or with rows of similar length."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch

from dispatch import jagged
from workers.data.balance import TOKENS, SequenceCost
from workers.data.packing import PackedRows, common_prefixes, fill, pack_rows
from workers.data.rollout_data import CANDIDATES, SAMPLING_MASK, jagged_rows
from workers.data.routed_experts import NATIVE, ROUTED_EXPERTS, padded_routes, route_keys
from workers.device import to_device

logger = logging.getLogger(__name__)

_warned: set[int] = set()
"""The maximum numbers of tokens for which this process has warned of longer rows."""

_FILLER_TOKENS = 2  # an input and a target, so that a model that shifts by one has a token left


@dataclass(frozen=True)
class MicroBatch:
    """Rows that go through the model in one pass: b rows of s tokens. Rows are left-aligned, so that padding is only on
    the right and attention needs no more than a causal mask.

    Attributes:
        rows: (b,) int64, indices of the rows in the batch; empty for a filler.
        input_ids: (b, s) int64.
        lengths: (b,) int64, number of real tokens of each row.
        others: the batch's other entries; (B, T) becomes (b, s), (B, T, k) of `CANDIDATES` (b, s, k), and (B, ...)
            becomes (b, ...). Of a jagged tensor, they have the rows' values, one row after the other.
        starts: (b,) int64, column of each row's first token in the batch.
        packed: the rows as one sequence; None if they are not packed.
        cost: of computing it; padding counts, and common prefixes of packed rows count once.
        routed_experts: (n, layers, k) int16, the experts of the n tokens that go through the model: those of the packed
            rows, or all b * s; -1 where the router chooses, as at padding. None if the batch has none.
    """

    rows: torch.Tensor
    input_ids: torch.Tensor
    lengths: torch.Tensor
    others: Mapping[str, torch.Tensor]
    starts: torch.Tensor
    packed: PackedRows | None = None
    cost: float = 0.0
    routed_experts: torch.Tensor | None = None

    @property
    def attention_mask(self) -> torch.Tensor:
        """(b, s) bool, true for real tokens."""
        return self.position_ids < self.lengths[:, None]

    @property
    def position_ids(self) -> torch.Tensor:
        """(b, s) int64, from 0 in every row."""
        rows, tokens = self.input_ids.shape
        return torch.arange(tokens, device=self.input_ids.device).expand(rows, tokens)

    @property
    def computed(self) -> int:
        """Number of tokens that go through the model."""
        return (self.input_ids if self.packed is None else self.packed.input_ids).numel()

    @property
    def real(self) -> int:
        """Number of tokens of its rows. Waits for a device."""
        return 0 if self.is_filler else int(self.lengths.sum())

    @property
    def sampling_mask(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """The tokens that each token was drawn from: ids of all positions, and their number at each, (b, s); None if
        they are not known. It is the argument of `workers.algorithms.token_log_probs.token_log_probs`."""
        ids, lengths = (self.others.get(name) for name in SAMPLING_MASK)
        return None if ids is None or lengths is None else (ids, lengths)

    @property
    def is_filler(self) -> bool:
        """Whether it has no rows of the batch. A filler is all zeros and must add 0 to the loss."""
        return not len(self.rows)

    def to(self, device: torch.device) -> MicroBatch:
        """Return a copy on a device, which is not waited for. ``rows``, ``starts``, the packed rows' ``owners`` and the
        lengths of sampling masks stay where they are."""
        return dataclasses.replace(
            self,
            input_ids=to_device(self.input_ids, device),
            lengths=to_device(self.lengths, device),
            others={
                name: value if name == SAMPLING_MASK[1] else to_device(value, device)
                for name, value in self.others.items()
            },
            packed=None if self.packed is None else self.packed.to(device),
            routed_experts=None if self.routed_experts is None else to_device(self.routed_experts, device),
        )


def cut_by_tokens(
    data: Mapping[str, torch.Tensor],
    max_tokens: int,
    *,
    at_least: int = 0,
    multiple_of: int = 1,
    packed: bool = False,
    cost: SequenceCost = TOKENS,
) -> list[MicroBatch]:
    """Cut a batch into micro-batches of at most ``max_tokens`` tokens.

    Packed, these are the tokens that the model computes: there is no padding, and a common prefix of a micro-batch's
    rows counts once. Rows with common prefixes are kept together, see `workers.data.packing`. Two rows share a token
    only if its ``candidate_ids`` and ``routed_experts`` are the same too and it has no sampling mask.

    Not packed, padding on the right counts. Rows are sorted by length, longest first, and each micro-batch takes as
    many as fit: the number of rows times the longest length is at most ``max_tokens``.

    A row that is longer than ``max_tokens`` gets a micro-batch of its own, and a warning is logged once. The most
    expensive micro-batch is first, so that those that several ranks compute together cost about as much. If more
    micro-batches are requested than the batch needs (all ranks run the model together, and another rank may have
    more), fillers are appended: one row of two tokens, all zeros. The result is deterministic.

    Args:
        data: ``input_ids`` and ``attention_mask``, both (B, T), and other entries with B rows. A (B, T) tensor, or one
            of `CANDIDATES`, is treated as per-token data: it is left-aligned with its row, and masked positions become
            0. The attention mask and entries that are not tensors are left out of ``others``.
        max_tokens: maximum number of tokens of a micro-batch, at least 1.
        at_least: minimum number of micro-batches.
        multiple_of: the number of micro-batches is a multiple of this.
        packed: whether to pack the rows of each micro-batch into one sequence.
        cost: of a row.

    Returns:
        The micro-batches. Every row is in exactly one. The list is empty if there are no rows and ``at_least`` is 0.

    Raises:
        ValueError: ``max_tokens`` is below 1, or a row's mask has no token or has padding between tokens.
    """
    if max_tokens < 1:
        raise ValueError(f"cut_by_tokens: max_tokens={max_tokens!r}; expected at least 1")
    real = data["attention_mask"].bool()
    lengths, starts = _spans(real)
    if len(lengths) and max_tokens not in _warned and (longest := int(lengths.max())) > max_tokens:
        _warned.add(max_tokens)
        logger.warning(
            "a row has %d tokens, but a micro-batch at most %d (max_tokens_per_micro_batch for each rank that shares "
            "it); such rows are computed alone, in the memory that all their tokens need",
            longest,
            max_tokens,
        )
    tensors = _tensors(data)
    if packed:
        cut = _packed(tensors, lengths, starts, real.shape, max_tokens, cost)
    else:
        together = _rows_together(lengths.tolist(), max_tokens)
        cut = [_take(tensors, rows, lengths, starts, real.shape) for rows in together]
        cut = [dataclasses.replace(part, cost=len(part.rows) * cost(part.input_ids.shape[1])) for part in cut]
    cut.sort(key=lambda part: -part.cost)
    wanted = max(len(cut), at_least)
    wanted += -wanted % multiple_of
    return cut + fillers(data, wanted - len(cut), packed=packed)


def fillers(data: Mapping[str, torch.Tensor], count: int, *, packed: bool = False) -> list[MicroBatch]:
    """Return so many fillers, as `cut_by_tokens` appends them to the micro-batches of this batch.

    Args:
        data: the batch.
        count: how many; none if it is not positive.
        packed: whether the other micro-batches are.
    """
    tensors, shape = _tensors(data), data["attention_mask"].shape
    return [_filler(tensors, shape, packed) for _ in range(count)]


def restore(
    outputs: Sequence[torch.Tensor], micro_batches: Sequence[MicroBatch], shape: tuple[int, int]
) -> torch.Tensor:
    """Scatter outputs of micro-batches back to the positions that their tokens have in the batch, on the CPU. If they
    are on a device, it is waited for once.

    Args:
        outputs: one (b, s) tensor per micro-batch, all of one dtype and device. Values at padding, and the outputs of
            fillers, are ignored.
        micro_batches: the result of `cut_by_tokens`, in the same order.
        shape: (B, T) of the batch.

    Returns:
        (B, T) on the CPU, 0 at padding, with the outputs' dtype (float32 if there are none).
    """
    if not outputs:
        return torch.zeros(shape)
    flat = torch.cat([output.reshape(-1) for output in outputs]).cpu()
    whole = flat.new_zeros(shape)
    parts = flat.split([output.numel() for output in outputs])
    for part, output, micro_batch in zip(parts, outputs, micro_batches, strict=True):
        if micro_batch.is_filler:
            continue
        row, column = (torch.arange(output.shape[1]) < micro_batch.lengths.cpu()[:, None]).nonzero(as_tuple=True)
        whole[micro_batch.rows[row], micro_batch.starts[row] + column] = part.view(output.shape)[row, column]
    return whole


def restore_routes(
    recorded: Sequence[torch.Tensor], micro_batches: Sequence[MicroBatch], lengths: Sequence[int]
) -> torch.Tensor:
    """Return the column ``routed_experts`` of a batch from the experts that computed its micro-batches: the reverse of
    `MicroBatch.routed_experts`.

    Args:
        recorded: one (n, layers, k) int16 tensor on the CPU per micro-batch, for the n tokens that went through the
            model. More than n are ignored.
        micro_batches: the result of `cut_by_tokens`, in the same order. At least one, which may be a filler.
        lengths: number of tokens of each row of the batch.
    """
    rows = [recorded[0][:0]] * len(lengths)
    for of_tokens, part in zip(recorded, micro_batches, strict=True):
        if part.is_filler:
            continue
        of_places = of_tokens[: part.computed]
        if (packed := part.packed) is not None:
            nothing = of_places.new_full((1, *of_places.shape[1:]), NATIVE)
            of_places = torch.cat([of_places, nothing])[packed.every_place().cpu().flatten()]
        for row, own in zip(part.rows.tolist(), of_places.unflatten(0, part.input_ids.shape), strict=True):
            rows[row] = own[: lengths[row]]
    offsets = torch.tensor([0, *accumulate(lengths)])
    return jagged.build(torch.cat([recorded[0][:0], *rows]), offsets, 0)


def sum_reports(reports: Sequence[Mapping[str, torch.Tensor]]) -> tuple[list[str], torch.Tensor]:
    """Sum what the loss function reported for each micro-batch, on the device.

    Args:
        reports: by micro-batch; scalars, all of one dtype and device. Not every report needs to have every name.

    Returns:
        The names, sorted, and (names,) their sums. Read them with one copy from the device, not one per number.
    """
    names = sorted({name for report in reports for name in report})
    sums = [torch.stack([report[name] for report in reports if name in report]).sum() for name in names]
    return names, torch.stack(sums) if sums else torch.zeros(0, dtype=torch.float64)


def _tensors(data: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return what a micro-batch gets its shares of."""
    return {
        name: data[name]
        for name in data.keys()  # noqa: SIM118  (a TensorDict has no `in`, and iterates over its rows)
        if name != "attention_mask" and isinstance(data[name], torch.Tensor)
    }


def _spans(real: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the number of real tokens of each row and the column of its first, both (B,) on the CPU."""
    real = real.cpu()
    lengths = real.sum(1)
    if not real.numel():
        if len(real):
            raise ValueError("cut_by_tokens: attention_mask has rows, but no columns")
        return lengths, lengths
    starts = real.int().argmax(1)
    within = torch.arange(real.shape[1])
    together = (within >= starts[:, None]) & (within < (starts + lengths)[:, None])
    bad = (lengths == 0) | (together != real).any(1)
    if bool(bad.any()):
        raise ValueError(
            f"cut_by_tokens: the attention_mask of row {int(bad.nonzero()[0])} must be one contiguous run of ones; "
            "padding may only come before and after it"
        )
    return lengths, starts


def _rows_together(lengths: list[int], max_tokens: int) -> Iterator[torch.Tensor]:
    """Yield the rows of each micro-batch. Filling greedily from the longest row down gives the fewest micro-batches."""
    order = sorted(range(len(lengths)), key=lambda row: (-lengths[row], row))
    begin = 0
    while begin < len(order):
        fit = max(1, max_tokens // lengths[order[begin]])
        yield torch.tensor(order[begin : begin + fit])
        begin += fit


def _packed(
    tensors: Mapping[str, torch.Tensor],
    lengths: torch.Tensor,
    starts: torch.Tensor,
    shape: torch.Size,
    max_tokens: int,
    cost: SequenceCost,
) -> list[MicroBatch]:
    ids = tensors["input_ids"].cpu().long()[..., None]
    if (candidates := tensors.get("candidate_ids")) is not None:
        ids = torch.cat([ids, candidates.cpu().long()], dim=-1)
    spans = [slice(begin, begin + length) for begin, length in zip(starts.tolist(), lengths.tolist(), strict=True)]
    most = None
    if (sets := tensors.get(SAMPLING_MASK[1])) is not None:
        drawn = sets.cpu() > 0
        most = [int(drawn[row, span].int().cumsum(0).eq(0).sum()) for row, span in enumerate(spans)]
    keys = [ids[row, span] for row, span in enumerate(spans)]
    if (routes := tensors.get(ROUTED_EXPERTS)) is not None:
        of_rows = route_keys(jagged_rows(routes, range(len(keys))).values().cpu()).split(lengths.tolist())
        keys = [torch.cat([key, of_row[:, None]], dim=-1) for key, of_row in zip(keys, of_rows, strict=True)]
    order, shared = common_prefixes(keys, most)
    made = []
    for unit in fill(order, lengths.tolist(), shared, max_tokens):
        part = _take(tensors, torch.tensor([order[at] for at in unit]), lengths, starts, shape)
        # What two rows share is the least that any two neighbours between them do.
        common = [0, *(min(shared[before + 1 : at + 1]) for before, at in pairwise(unit))]
        packed = pack_rows(part.input_ids.cpu(), part.lengths.tolist(), common)
        experts = None if part.routed_experts is None else part.routed_experts[packed.owners]
        costs = sum(map(cost, part.lengths.tolist(), common))
        made.append(dataclasses.replace(part, packed=packed, cost=costs, routed_experts=experts))
    return made


def _take(
    tensors: Mapping[str, torch.Tensor],
    rows: torch.Tensor,
    lengths: torch.Tensor,
    starts: torch.Tensor,
    shape: torch.Size,
) -> MicroBatch:
    lengths, starts = lengths[rows], starts[rows]
    within = torch.arange(int(lengths.max()))
    columns = (starts[:, None] + within).clamp(max=shape[1] - 1)
    padding = within >= lengths[:, None]

    def take(name: str, value: torch.Tensor) -> torch.Tensor:
        if value.is_nested:
            return jagged_rows(value, rows.tolist()).values()
        at = rows.to(value.device)
        if not _is_per_token(name, value, shape):
            return value[at]
        hidden = padding.to(value.device).view(*padding.shape, *(1 for _ in value.shape[2:]))
        return value[at[:, None], columns.to(value.device)].masked_fill(hidden, 0)

    taken = {name: take(name, value) for name, value in tensors.items()}
    input_ids, experts = taken.pop("input_ids"), taken.pop(ROUTED_EXPERTS, None)
    if experts is not None:
        experts = padded_routes(experts, lengths.tolist(), input_ids.shape[1]).flatten(0, 1)
    return MicroBatch(rows, input_ids, lengths.to(input_ids.device), taken, starts, routed_experts=experts)


def _filler(tensors: Mapping[str, torch.Tensor], shape: torch.Size, packed: bool) -> MicroBatch:
    def zeros_of(name: str, value: torch.Tensor) -> torch.Tensor:
        if value.is_nested:
            return value.values().new_zeros(0)
        per_token = _is_per_token(name, value, shape)
        return value.new_zeros((1, _FILLER_TOKENS, *value.shape[2:]) if per_token else (1, *value.shape[1:]))

    zeros = {name: zeros_of(name, value) for name, value in tensors.items() if name != ROUTED_EXPERTS}
    input_ids, experts = zeros.pop("input_ids"), tensors.get(ROUTED_EXPERTS)
    if experts is not None:
        experts = experts.values().new_full((_FILLER_TOKENS, *experts.values().shape[1:]), NATIVE)
    none = torch.zeros(0, dtype=torch.int64)
    lengths = torch.tensor([_FILLER_TOKENS], device=input_ids.device)
    rows = pack_rows(torch.zeros(1, _FILLER_TOKENS, dtype=torch.int64), [_FILLER_TOKENS], [0]) if packed else None
    return MicroBatch(none, input_ids, lengths, zeros, none, rows, routed_experts=experts)


def _is_per_token(name: str, value: torch.Tensor, shape: torch.Size) -> bool:
    return value.shape == shape or (name in CANDIDATES and value.shape[:2] == shape)
