"""Order rows so that shards with equal numbers of rows cost about as much to compute, and rows with common prefixes are
together where that saves more than it unbalances."""

from __future__ import annotations

import bisect
import heapq
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, islice, pairwise
from typing import Any

from dispatch.batch import share_rows
from workers.data.packing import common_prefixes, divide
from workers.data.rollout_data import require_entries, rollout_numbers, rows_of, sizes_of_steps, step_numbers
from workers.data.routed_experts import RoutingShape, size_of

_EXCHANGES = 4  # per part; the greedy assignment is already good, and more exchanges gain little
_CLOSE = 1e-3  # as a share of the cost: what is balanced better than this is not worth more time


@dataclass(frozen=True)
class SequenceCost:
    """What it costs to compute a sequence of L tokens: ``linear * L + quadratic * L**2``, in any unit.

    Tokens that a sequence shares with another one in a packed micro-batch are computed once. They are the first ones,
    so the rest of the sequence costs the difference of two such numbers.
    """

    linear: float = 1.0
    quadratic: float = 0.0

    def __call__(self, tokens: int, shared: int = 0) -> float:
        """Return the cost of a sequence, without that of its first ``shared`` tokens."""
        return (tokens - shared) * (self.linear + self.quadratic * (tokens + shared))

    @classmethod
    def of_model(cls, config: Any) -> SequenceCost:
        """Return the FLOPs of a forward pass of a Hugging Face model; backward passes take twice as many.

        A token is multiplied with every weight once, 2 FLOPs each. With hidden size h, intermediate size i (of all
        experts that a token has), n heads and g key-value heads of d numbers, and V tokens in the vocabulary, that is
        ``2 (2 h d (n + g) + 3 h i)`` in each layer, whose MLP has a gate, and ``2 h V`` in the output layer. Each pair
        of a token and one before it takes ``4 n d`` in each layer, for the products with its key and its value; there
        are ``L**2 / 2`` pairs, or ``w L`` in a layer with a sliding window of w tokens. Layers of other kinds count
        without pairs. (Kaplan et al. 2020, arXiv 2001.08361, section 2.1; Narayanan et al. 2021, arXiv 2104.04473,
        section 5.1; Chowdhery et al. 2022, arXiv 2204.02311, appendix B. They have all ``L**2`` pairs, or no gate.)

        Args:
            config: the model's config. Sizes that it does not have count as 0.
        """
        text = config.get_text_config()
        size = partial(size_of, text)
        hidden, layers, heads = size("hidden_size"), size("num_hidden_layers"), size("num_attention_heads")
        groups, per_head = size("num_key_value_heads") or heads, size("head_dim") or hidden // max(heads, 1)
        width = size("moe_intermediate_size", "intermediate_size", "ffn_dim", "n_inner") or 4 * hidden
        if (experts := RoutingShape.of(config)) is not None:
            shared = size("shared_expert_intermediate_size") or size("n_shared_experts") * width
            width = experts.k * width + shared
        window = size("sliding_window")
        kinds = getattr(text, "layer_types", None) or [f"{'sliding' if window else 'full'}_attention"] * layers
        weights = layers * (2 * hidden * per_head * (heads + groups) + 3 * hidden * width) + hidden * size("vocab_size")
        pair, within = 4 * heads * per_head, window * kinds.count("sliding_attention")
        return cls(float(2 * weights + pair * within), pair / 2 * kinds.count("full_attention"))


TOKENS = SequenceCost()
"""Every token costs the same."""


def sequence_cost(args: Any, config: Any) -> SequenceCost:
    """Return what a sequence costs: the numbers of ``args.sequence_cost``, or by default those of the model. Without
    its ``config``, every token costs the same."""
    if args.sequence_cost is not None:
        return SequenceCost(*args.sequence_cost)
    return TOKENS if config is None else SequenceCost.of_model(config)


@dataclass(frozen=True)
class Balance:
    """How rows are balanced over ranks.

    Attributes:
        parts: number of shards.
        steps: number of optimizer steps, into which each rank divides its rows; each is balanced by itself.
        cost: of a row.
        trees: whether the ranks compute common prefixes once.
    """

    parts: int
    steps: int = 1
    cost: SequenceCost = TOKENS
    trees: bool = False

    @classmethod
    def of(cls, args: Any, parts: int, config: Any) -> Balance:
        """Return what a configuration asks for; ``config`` is as for `sequence_cost`."""
        steps = 1 if args.shuffle_minibatches else args.num_steps_per_rollout
        trees = args.train_backend == "fsdp" and args.sequence_packing is not False and not args.exact
        return cls(parts, steps, sequence_cost(args, config), trees)


def balanced_rows(data: Any, how: Balance) -> Any:
    """Return rollout data in the order of `order_of_rows`."""
    require_entries(data, ("input_ids", "attention_mask"))
    return rows_of(data, order_of_rows(data, how))


def order_of_rows(data: Any, how: Balance) -> list[int]:
    """Return the `balanced_order` of rollout data, counting the real tokens of each row. With ``rollout_ids``, what is
    in a step is what `step_numbers` says, and each step is balanced."""
    real, ids = data["attention_mask"].bool().cpu(), data["input_ids"].cpu()
    steps: int | list[int] = how.steps
    given = list(range(len(real)))
    if how.steps > 1 and "rollout_ids" in data.keys():  # noqa: SIM118  (a TensorDict has no `in`)
        numbers, first = rollout_numbers(data["rollout_ids"].cpu())
        of_steps = step_numbers(numbers, len(first), how.steps)
        steps = of_steps.bincount(minlength=how.steps).tolist()
        given = of_steps.argsort(stable=True).tolist()
        real, ids = real[given], ids[given]
    prefixes = None
    if how.trees:
        prefixes = common_prefixes([row[mask] for row, mask in zip(ids, real, strict=True)])
    order = balanced_order(real.sum(1).tolist(), how.parts, how.cost, steps=steps, prefixes=prefixes)
    return [given[row] for row in order]


def balanced_order(
    lengths: Sequence[int],
    parts: int,
    cost: SequenceCost = TOKENS,
    *,
    steps: int | Sequence[int] = 1,
    prefixes: tuple[Sequence[int], Sequence[int]] | None = None,
) -> list[int]:
    """Order rows so that "ragged" sharding into ``parts`` gives each shard about as much to compute.

    The most expensive first, each row goes to the cheapest shard that has room. Then rows of the most expensive shard
    are exchanged with rows of the cheapest one while that helps. With common prefixes, this is tried with whole trees
    of rows too, with halves and with quarters of what a shard has room for. The best result is returned: the most
    expensive shard never costs more than in the given order, which is kept if nothing is better, or than with rows one
    by one. The result is deterministic.

    Args:
        lengths: number of tokens of each row.
        parts: number of shards.
        cost: of a row.
        steps: number of parts into which `sizes_of_steps` divides each shard, and each of which must be balanced. The
            first parts of all shards have the first rows, and so on, so that what is in a step does not depend on the
            number of shards if both divide the number of rows. Or the number of rows of each part, of all shards
            together, the first rows being in the first part: each shard then has equally many of them, or one more.
        prefixes: what `common_prefixes` returns for the rows; None if the ranks do not share prefixes.

    Returns:
        A permutation of the rows. Rows of one shard and step keep their order.
    """
    order, shared = prefixes or (range(len(lengths)), [0] * len(lengths))
    made: list[list[int]] = [[] for _ in range(parts)]
    begin = 0
    for room in _rooms(len(lengths), parts, steps):
        end = begin + sum(room)
        if begin == end:
            continue
        places = [at for at, row in enumerate(order) if begin <= row < end]
        rows = _Rows(
            [order[at] for at in places],
            [int(lengths[order[at]]) for at in places],
            [0, *(min(shared[before + 1 : at + 1]) for before, at in pairwise(places))],
            cost,
        )
        for part, chosen in zip(made, rows.balanced(room), strict=True):
            part += sorted(chosen)
        begin = end
    return [row for part in made for row in part]


def _rooms(rows: int, parts: int, steps: int | Sequence[int]) -> list[list[int]]:
    """Return for how many rows of each step each shard has room."""

    def shared(count: int, by: int) -> list[int]:
        return [share.rows for share in share_rows(count, by, "ragged")]

    if isinstance(steps, int):
        sizes = shared(rows, parts)
        begins = [0, *accumulate(sizes[:-1])]
        of_ranks = [sizes_of_steps(begin, size, steps) for begin, size in zip(begins, sizes, strict=True)]
        return [list(of_step) for of_step in zip(*of_ranks, strict=True)]
    ends = [shared(count, parts) for count in accumulate(steps, initial=0)]
    return [[end - begin for begin, end in zip(*pair, strict=True)] for pair in pairwise(ends)]


Unit = tuple[float, range]
"""What rows that stay together cost, and their positions among the rows."""


class _Rows:
    """Rows that are divided among shards, those with common prefixes next to each other.

    Args:
        numbers: of the rows, in the caller's order.
        lengths: number of tokens of each.
        shared: how many first tokens each shares with the one before it.
        cost: of a row.
    """

    def __init__(
        self, numbers: Sequence[int], lengths: Sequence[int], shared: Sequence[int], cost: SequenceCost
    ) -> None:
        self.numbers, self.shared = numbers, shared
        self._prefix = [cost(common) for common in shared]
        self._alone = [cost(length) for length in lengths]
        self._cost = cost
        # Of all rows up to a position, if they are computed together.
        self._ends = [0.0, *accumulate(map(operator.sub, self._alone, self._prefix))]

    def balanced(self, room: Sequence[int]) -> list[list[int]]:
        """Return the numbers of the rows of each shard, as many as it has room for."""
        given = iter(sorted(range(len(self.numbers)), key=self.numbers.__getitem__))
        best = [sorted(islice(given, size)) for size in room]
        lowest, least = max(map(self._together, best)), (1 + _CLOSE) * self._ends[-1] / len(room)
        most, ones, none = max(room), [1] * len(self.shared), [0] * len(self.shared)
        for size in (most, most // 2, most // 4, 1) if any(self.shared) else (1,):
            if lowest <= least:
                break
            units = [
                (self._ends[unit.stop] - self._ends[unit.start] + self._prefix[unit.start], unit)
                for unit in divide(self.shared, ones, none, size)
            ]
            found = [sorted(at for _, unit in part for at in unit) for part in _exchange(self._fill(units, room))]
            highest = max(map(self._together, found))
            if highest < lowest:
                lowest, best = highest, found
        return [[self.numbers[at] for at in part] for part in best]

    def _together(self, part: Sequence[int]) -> float:
        """Return what positions in ascending order cost together."""
        total = sum(self._alone[at] for at in part)
        for before, at in pairwise(part):
            if self._prefix[at]:
                common = min(self.shared[before + 1 : at + 1]) if before + 1 < at else self.shared[at]
                total -= self._cost(common)
        return total

    def _fill(self, units: Sequence[Unit], room: Sequence[int]) -> list[list[Unit]]:
        """Assign units to shards. One that fits nowhere is divided into rows."""
        parts: list[list[Unit]] = [[] for _ in room]
        left, open_parts = list(room), [(0.0, k) for k, size in enumerate(room) if size]
        # Of equal costs, the caller's order decides.
        waiting = [(-of, self.numbers[unit.start], unit) for of, unit in units]
        heapq.heapify(waiting)
        while waiting:
            of, _, unit = heapq.heappop(waiting)
            too_full = []
            while open_parts and left[open_parts[0][1]] < len(unit):
                too_full.append(heapq.heappop(open_parts))
            if open_parts:
                held, k = heapq.heappop(open_parts)
                parts[k].append((-of, unit))
                left[k] -= len(unit)
                if left[k]:
                    too_full.append((held - of, k))
            else:
                for at in unit:
                    heapq.heappush(waiting, (-self._alone[at], self.numbers[at], range(at, at + 1)))
            for part in too_full:
                heapq.heappush(open_parts, part)
        return parts


def _exchange(parts: list[list[Unit]]) -> list[list[Unit]]:
    """Exchange units of equally many rows between the most expensive and the cheapest part while that reduces their
    difference."""
    costs = [sum(of for of, _ in part) for part in parts]
    ranked = sorted((cost, -k) for k, cost in enumerate(costs))
    for _ in range(_EXCHANGES * len(parts)):
        # Of equally expensive parts, and of equally cheap ones, the first.
        high, low = -ranked[-1][1], -ranked[bisect.bisect(ranked, (ranked[0][0], 1)) - 1][1]
        gap = costs[high] - costs[low]
        if gap <= _CLOSE * costs[high]:
            break
        theirs: dict[int, list[tuple[float, int]]] = {}
        for number, (of, unit) in enumerate(parts[low]):
            theirs.setdefault(len(unit), []).append((of, number))
        for alike in theirs.values():
            alike.sort()
        best = (gap, -1, -1)
        for number, (of, unit) in enumerate(parts[high]):
            alike = theirs.get(len(unit), [])
            at = bisect.bisect_left(alike, (of - gap / 2, -1))
            for its, other in alike[max(0, at - 1) : at + 1]:
                best = min(best, (abs(gap - 2 * (of - its)), number, other))
        left, mine, other = best
        if left >= gap:
            break
        change = parts[high][mine][0] - parts[low][other][0]
        parts[high][mine], parts[low][other] = parts[low][other], parts[high][mine]
        for k, more in ((high, -change), (low, change)):
            del ranked[bisect.bisect_left(ranked, (costs[k], -k))]
            costs[k] += more
            bisect.insort(ranked, (costs[k], -k))
    return parts
