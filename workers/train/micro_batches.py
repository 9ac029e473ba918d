"""Micro-batches by a budget of tokens: rows of similar length together, without the padding that they came with."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

_FILLER_TOKENS = 2  # one that is given and one that is predicted: models that shift by one have something to do


@dataclass(frozen=True)
class MicroBatch:
    """Rows that go through the model together: b rows of s tokens, each moved to the left, so that padding is on the
    right only and a causal mask is all that attention needs.

    Attributes:
        rows: (b,) int64, the numbers of the rows in the batch; empty for one that only fills up.
        input_ids: (b, s) int64.
        lengths: (b,) int64, real tokens of each row.
        others: the batch's other entries: what was (B, T) is (b, s), what was (B, ...) is (b, ...).
        starts: (b,) int64, the column of the batch where each row's first token stood.
    """

    rows: torch.Tensor
    input_ids: torch.Tensor
    lengths: torch.Tensor
    others: Mapping[str, torch.Tensor]
    starts: torch.Tensor

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
    def is_filler(self) -> bool:
        """Whether it holds nothing of the batch: all that it has is 0, and it must add 0 to the loss."""
        return not len(self.rows)

    def to(self, device: torch.device) -> MicroBatch:
        """The same on a device; ``rows`` and ``starts`` stay on the CPU."""
        return dataclasses.replace(
            self,
            input_ids=self.input_ids.to(device),
            lengths=self.lengths.to(device),
            others={name: value.to(device) for name, value in self.others.items()},
        )


def cut_by_tokens(
    data: Mapping[str, torch.Tensor], max_tokens: int, *, at_least: int = 0, multiple_of: int = 1
) -> list[MicroBatch]:
    """Cut a batch into micro-batches of at most ``max_tokens`` tokens, padding on the right included.

    Rows go by length, the longest first, as many together as fit: rows times the longest is at most ``max_tokens``. A
    row longer than that is a micro-batch alone. Where more micro-batches are wanted than that makes (because another
    rank has more, and all ranks run the model together), fillers come last: a row of two tokens, everything 0. The
    same batch is always cut alike.

    Args:
        data: ``input_ids`` and ``attention_mask``, both (B, T), and others with B rows. A (B, T) tensor is taken to be
            per token, and moves to the left with its row; what the attention mask leaves out becomes 0. The mask
            itself is not among ``others``, and neither is what is no tensor.
        max_tokens: tokens of a micro-batch, from 1.
        at_least: how many micro-batches there are at least.
        multiple_of: their number can be divided by this.

    Returns:
        The micro-batches, in which every row occurs once; none if there are no rows and none are asked for.

    Raises:
        ValueError: a number makes no sense, or a row's mask has no token, or padding between tokens.
    """
    for name, value, low in (("max_tokens", max_tokens, 1), ("at_least", at_least, 0), ("multiple_of", multiple_of, 1)):
        if value < low:
            raise ValueError(f"cut_by_tokens: {name}={value!r}; it is from {low}")
    real = data["attention_mask"].bool()
    lengths, starts = _spans(real)
    tensors = {
        name: data[name]
        for name in data.keys()  # noqa: SIM118  (a TensorDict has no `in`, and iterates over its rows)
        if name != "attention_mask" and isinstance(data[name], torch.Tensor)
    }
    cut = [_take(tensors, rows, lengths, starts, real.shape) for rows in _rows_together(lengths.tolist(), max_tokens)]
    wanted = max(len(cut), at_least)
    wanted += -wanted % multiple_of
    return cut + [_filler(tensors, real.shape) for _ in range(wanted - len(cut))]


def restore(parts: Sequence[torch.Tensor], micro_batches: Sequence[MicroBatch], shape: tuple[int, int]) -> torch.Tensor:
    """Put outputs of micro-batches back where their tokens stood.

    Args:
        parts: one (b, s) tensor for each micro-batch, all of one dtype and device. What they say of padding, and
            those of fillers, are not looked at.
        micro_batches: what `cut_by_tokens` gave, in the same order.
        shape: (B, T) of the batch.

    Returns:
        (B, T), 0 where there is padding; of the parts' dtype and on their device (float32 on the CPU without parts).

    Raises:
        ValueError: there are more or fewer parts than micro-batches, or one has another shape than its micro-batch.
    """
    if len(parts) != len(micro_batches):
        raise ValueError(f"restore: {len(parts)} parts for {len(micro_batches)} micro-batches")
    whole = parts[0].new_zeros(shape) if parts else torch.zeros(shape)
    for k, (part, micro_batch) in enumerate(zip(parts, micro_batches, strict=True)):
        if part.shape != micro_batch.input_ids.shape:
            raise ValueError(
                f"restore: part {k} is {tuple(part.shape)}, its micro-batch {tuple(micro_batch.input_ids.shape)}"
            )
        if micro_batch.is_filler:
            continue
        lengths = micro_batch.lengths.cpu()
        row, column = (torch.arange(part.shape[1]) < lengths[:, None]).nonzero(as_tuple=True)
        to = (micro_batch.rows[row], micro_batch.starts[row] + column)
        whole[tuple(index.to(whole.device) for index in to)] = part[row.to(part.device), column.to(part.device)]
    return whole


def _spans(real: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Number of real tokens of each row and the column of the first, on the CPU."""
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
            f"cut_by_tokens: the attention_mask of row {int(bad.nonzero()[0])} is not a run of ones with padding on "
            "either side"
        )
    return lengths, starts


def _rows_together(lengths: list[int], max_tokens: int) -> Iterator[torch.Tensor]:
    """Rows of each micro-batch. From the longest down, each takes what fits: no other way needs fewer."""
    order = sorted(range(len(lengths)), key=lambda row: (-lengths[row], row))
    begin = 0
    while begin < len(order):
        fit = max(1, max_tokens // lengths[order[begin]])
        yield torch.tensor(order[begin : begin + fit])
        begin += fit


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

    def take(value: torch.Tensor) -> torch.Tensor:
        at = rows.to(value.device)
        if value.shape != shape:
            return value[at]
        return value[at[:, None], columns.to(value.device)].masked_fill(padding.to(value.device), 0)

    taken = {name: take(value) for name, value in tensors.items()}
    input_ids = taken.pop("input_ids")
    return MicroBatch(rows, input_ids, lengths.to(input_ids.device), taken, starts)


def _filler(tensors: Mapping[str, torch.Tensor], shape: torch.Size) -> MicroBatch:
    zeros = {
        name: value.new_zeros((1, _FILLER_TOKENS) if value.shape == shape else (1, *value.shape[1:]))
        for name, value in tensors.items()
    }
    input_ids = zeros.pop("input_ids")
    none = torch.zeros(0, dtype=torch.int64)
    return MicroBatch(none, input_ids, torch.tensor([_FILLER_TOKENS], device=input_ids.device), zeros, none)
