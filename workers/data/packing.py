"""Pack rows of tokens into one sequence, without padding, in which rows with a common prefix share it.

A prompt that was sampled eight times goes through the model once. The result is a forest: each token knows the tokens
before it, and what attention and the positions make of it is exactly what they would make of the row alone.
"""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.nn.functional as F

from workers.device import to_device

MIN_SHARED = 8
"""Rows share a common prefix of at least this many tokens: each split adds calls of the attention kernel."""


@dataclass(frozen=True)
class Segment:
    """Consecutive tokens of a packed sequence that the same rows have.

    Attributes:
        begin: its first token.
        end: the token after its last one.
        before: numbers of the segments before it in its rows, the first one first.
    """

    begin: int
    end: int
    before: tuple[int, ...] = ()


@dataclass(frozen=True)
class PackedRows:
    """b rows of at most s tokens as one sequence of N tokens.

    Attributes:
        input_ids: (1, N) int64.
        position_ids: (1, N) int64, of each token in its rows.
        predictors: (N,) int64, the token before each one in its rows; 0 for the first of a row, which nothing predicts.
        owners: (N,) int64, one of the places of each token in the rows, as an index of (b * s). They ascend.
        places: (b, s) int64, the token at each place of the rows; N for padding and for the first token of a row.
        segments: the sequence, divided where rows begin and divide.
    """

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    predictors: torch.Tensor
    owners: torch.Tensor
    places: torch.Tensor
    segments: tuple[Segment, ...]

    def to(self, device: torch.device) -> PackedRows:
        """Return a copy on a device, which is not waited for. ``owners`` stay on the CPU: they index what is there."""
        moved: dict[str, Any] = {name: to_device(of, device) for name, of in vars(self).items() if torch.is_tensor(of)}
        return dataclasses.replace(self, **moved | {"owners": self.owners})

    def slice_of(self, rank: int, ranks: int) -> PackedRows:
        """Return what one of several ranks computes of the sequence: its share of the tokens, and the outputs for the
        tokens that those predict. The rows must be on the CPU.

        Args:
            rank: number of the rank.
            ranks: number of ranks. The sequence is padded to a multiple of it.

        Returns:
            The rows with n = N / ranks tokens of N: ``input_ids`` and ``position_ids`` of the slice; ``predictors`` in
            the slice, and ``owners``, of the M tokens that it predicts, repeated at the end up to the most of any rank;
            ``places`` in the ranks' outputs one after the other; and the ``segments`` of the whole sequence.
        """
        count = self.input_ids.shape[1]
        each = -(-count // ranks)
        padding = each * ranks - count
        tokens = self.position_ids[0].nonzero()[:, 0]  # nothing predicts the first of a row
        of_ranks = [tokens[self.predictors[tokens] // each == other] for other in range(ranks)]
        most = max(1, *map(len, of_ranks))
        places = torch.full((count + 1,), ranks * most)
        for other, its in enumerate(of_ranks):
            places[its] = other * most + torch.arange(len(its))
        own, part = of_ranks[rank], slice(rank * each, (rank + 1) * each)
        return PackedRows(
            F.pad(self.input_ids, (0, padding))[:, part],
            F.pad(self.position_ids, (0, padding))[:, part],
            F.pad(self.predictors[own] - part.start, (0, most - len(own))),
            F.pad(self.owners[own], (0, most - len(own))),
            places[self.places],
            (*self.segments, Segment(count, count + padding)) if padding else self.segments,
        )

    def every_place(self) -> torch.Tensor:
        """Return `places` with the first token of each row, too. Not of a slice."""
        width = self.places.shape[1]
        begins = (self.owners % width == 0).nonzero()[:, 0]
        # A row without a first token of its own shares that of the row before it.
        last = torch.bucketize(torch.arange(len(self.places)), self.owners[begins] // width, right=True) - 1
        return torch.cat([to_device(begins[last, None], self.places.device), self.places[:, 1:]], dim=1)

    def of_rows(self, of_tokens: torch.Tensor) -> torch.Tensor:
        """Return what is at each place of the rows.

        Args:
            of_tokens: (N, ...).

        Returns:
            (b, s, ...): 0 for padding and for the first token of a row.
        """
        return torch.cat([of_tokens, of_tokens.new_zeros(1, *of_tokens.shape[1:])])[self.places]


def pack_rows(input_ids: torch.Tensor, lengths: Sequence[int], shared: Sequence[int]) -> PackedRows:
    """Pack rows. Each shares its first tokens with the row before it.

    Args:
        input_ids: (b, s) int64 on the CPU, left-aligned.
        lengths: number of tokens of each row, at least 1.
        shared: number of first tokens that each row shares with the one before it; 0 for the first.
    """
    rows, width = input_ids.shape
    places = torch.full((rows, width), -1)
    starts, branches, count = [], [], 0
    for row, (length, common) in enumerate(zip(lengths, shared, strict=True)):
        if common:
            places[row, :common] = places[row - 1, :common]
        if common < length:
            starts.append(count)
            branches.append(int(places[row, common - 1]) if common else -1)
            places[row, common:length] = torch.arange(count, count + length - common)
            count += length - common
    of_places = places.flatten()
    at = (of_places >= 0).nonzero()[:, 0]
    owners = torch.empty(count, dtype=torch.int64)
    owners[of_places[at].flip(0)] = at.flip(0)  # the first of the places of a token
    predictors = torch.arange(-1, count - 1)
    predictors[starts] = torch.tensor(branches)
    segments: list[Segment] = []
    ending: dict[int, int] = {}
    cuts = sorted({*starts, *(token + 1 for token in branches if token >= 0), count})
    for begin, end in pairwise(cuts):
        last = ending.get(int(predictors[begin]))
        ending[end - 1] = len(segments)
        segments.append(Segment(begin, end, () if last is None else (*segments[last].before, last)))
    places[places < 0] = count
    places[:, 0] = count
    return PackedRows(
        input_ids.flatten()[owners][None],
        (owners % width)[None],
        predictors.clamp_(min=0),
        owners,
        places,
        tuple(segments),
    )


def common_prefixes(rows: Sequence[torch.Tensor], most: Sequence[int] | None = None) -> tuple[list[int], list[int]]:
    """Order rows so that those with common prefixes are neighbours.

    Args:
        rows: (L_i,) or (L_i, k) integers on the CPU, of one dtype: what must be equal for a token to be shared.
        most: number of first tokens that each row may share; None for all.

    Returns:
        The order, and for each row in it how many first tokens it shares with the one before it, at least
        `MIN_SHARED` or 0.
    """
    keys = [row.numpy().astype(">i8").tobytes() for row in rows]
    order = sorted(range(len(rows)), key=lambda row: keys[row])
    shared = [0] * len(order)
    for at in range(1, len(order)):
        first, second = rows[order[at - 1]], rows[order[at]]
        least = min(len(first), len(second))
        if most is not None:
            least = min(least, most[order[at - 1]], most[order[at]])
        differ = (first[:least] != second[:least]).nonzero()
        common = int(differ[0, 0]) if len(differ) else least
        shared[at] = common if common >= MIN_SHARED else 0
    return order, shared


def divide(shared: Sequence[int], alone: Sequence[int], saved: Sequence[int], most: int) -> list[range]:
    """Divide rows into units of neighbours that share a prefix, of a size of at most ``most``. Where a unit would be
    larger, it is divided between rows that share least, and as late as the first part fits.

    Args:
        shared: as `common_prefixes` returns it.
        alone: size of each row.
        saved: by how much a row is smaller next to the one before it, if they share a prefix.
        most: the largest size. A row that is larger is a unit of its own.

    Returns:
        Positions among the rows, in their order.
    """
    ends = [0, *accumulate(size - less for size, less in zip(alone, saved, strict=True))]  # of rows next to each other
    starts = [at for at, common in enumerate(shared) if not common]
    left = [range(*of) for of in pairwise([*starts, len(shared)])][::-1]
    made = []
    while left:
        run = left.pop()
        more = most - saved[run.start] + ends[run.start]  # the first row is not next to the one before it
        if len(run) == 1 or ends[run.stop] <= more:
            made.append(run)
            continue
        least = min(shared[run.start + 1 : run.stop])
        last = bisect.bisect_right(ends, more, run.start + 1, run.stop) - 1
        fits = next((at for at in range(last, run.start, -1) if shared[at] == least), 0)
        at = fits or shared.index(least, run.start + 1)
        left += [range(at, run.stop), range(run.start, at)]
    return made


def fill(order: Sequence[int], lengths: Sequence[int], shared: Sequence[int], most: int) -> list[list[int]]:
    """Divide rows into micro-batches of at most ``most`` tokens, those with a common prefix together. A longer row gets
    one of its own.

    Rows that share tokens are kept together; where they are more than fits, they are divided where they share least.
    The largest of these units is placed first, each where the least room is left (best-fit decreasing).

    Args:
        order: of the rows; see `common_prefixes`.
        lengths: number of tokens of each row, by row.
        shared: as `common_prefixes` returns it.
        most: number of tokens.

    Returns:
        Positions in ``order``, ascending in each micro-batch.
    """
    alone = [lengths[row] for row in order]
    units = [
        (sum(alone[unit.start : unit.stop]) - sum(shared[unit.start + 1 : unit.stop]), unit)
        for unit in divide(shared, alone, shared, most)
    ]
    made: list[tuple[int, list[int]]] = []
    for tokens, unit in sorted(units, key=lambda unit: -unit[0]):
        room = [(most - held - tokens, k) for k, (held, _) in enumerate(made) if held + tokens <= most]
        if room:
            _, k = min(room)
            made[k] = made[k][0] + tokens, [*made[k][1], *unit]
        else:
            made.append((tokens, [*unit]))
    return [sorted(unit) for _, unit in made]
