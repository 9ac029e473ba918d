"""Micro-batches by a budget of tokens: rows of similar length together, without the padding that they came with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class MicroBatch:
    """Rows that go through the model together: b rows of s tokens, each moved to the left, so that padding is on the
    right only and a causal mask is all that attention needs.

    Attributes:
        rows: (b,) int64, the numbers of the rows in the batch; empty for one that only fills up.
        input_ids: (b, s) int64.
        lengths: (b,) int64, real tokens of each row.
        others: the batch's other entries: what was (B, T) is (b, s), what was (B, ...) is (b, ...).
    """

    rows: torch.Tensor
    input_ids: torch.Tensor
    lengths: torch.Tensor
    others: Mapping[str, torch.Tensor]

    @property
    def attention_mask(self) -> torch.Tensor:
        """(b, s) bool, true for real tokens."""
        raise NotImplementedError

    @property
    def position_ids(self) -> torch.Tensor:
        """(b, s) int64, from 0 in every row."""
        raise NotImplementedError

    def to(self, device: torch.device) -> MicroBatch:
        """The same on a device; ``rows`` stays on the CPU."""
        raise NotImplementedError


def cut_by_tokens(
    data: Mapping[str, torch.Tensor], max_tokens: int, *, at_least: int = 0, multiple_of: int = 1
) -> list[MicroBatch]:
    """Cut a batch into micro-batches. To be written."""
    raise NotImplementedError


def restore(parts: Sequence[torch.Tensor], micro_batches: Sequence[MicroBatch], shape: tuple[int, int]) -> torch.Tensor:
    """Put outputs of micro-batches back where their tokens stood. To be written."""
    raise NotImplementedError
