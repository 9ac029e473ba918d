"""Layouts, and an independent reference for what a call must do.

The reference picks rows one by one, by number, and joins by hand: it shares no code with `dispatch`.
"""

from __future__ import annotations

from collections import Counter, namedtuple
from collections.abc import Callable, Iterator, Sequence
from itertools import permutations
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase

from dispatch import Layout, register
from dispatch.modes import Join
from dispatch.plan import CallPlan, plan_call, put_back
from dispatch.register import MethodSpec, registered_methods

AXES = ("tp", "cp", "dp", "pp")


def plain_layout(world_size: int) -> Layout:
    """The layout of ranks that have registered no coordinates."""
    return Layout({}, world_size=world_size)


# --- declaring and simulating a call ----------------------------------------------------------------------


def declare(mode: Any = "ALL_TO_ALL", method: Callable[..., Any] | None = None, **options: Any) -> MethodSpec:
    """The spec of a method called ``work`` with the given declaration. By default it accepts any arguments."""

    def work(self, x=None, y=None, *more, key=None, **others):
        return (x, y, *more), {"key": key, **others}

    worker = type("Actor", (), {"work": register(mode, **options)(method or work)})
    return registered_methods(worker)["work"]


def plan_of(mode: Any, layout: Layout, *args: Any, uneven: str = "error", **kwargs: Any) -> CallPlan:
    """The plan of one call of a method that accepts any arguments."""
    return plan_call(declare(mode, uneven=uneven), layout, args, kwargs)


def arguments(plan, rank):
    """The positional and keyword arguments of one rank."""
    shard = plan.shard_of[rank]
    if shard is None:
        raise ValueError(f"rank {rank} is not called")
    given = {**plan.whole, **plan.shards[shard].values}
    put_back(given)
    return tuple(given[p] for p in sorted(key for key in given if isinstance(key, int))), {
        key: value for key, value in given.items() if isinstance(key, str)
    }


def run(plan: CallPlan, function: Callable[..., Any]) -> dict[int, Any]:
    """Call ``function(rank, *args, **kwargs)`` for every rank that the plan calls. Returns rank -> result."""
    results = {}
    for rank, shard in enumerate(plan.shard_of):
        if shard is not None:
            args, kwargs = arguments(plan, rank)
            results[rank] = function(rank, *args, **kwargs)
    return results


def simulate(plan: CallPlan, function: Callable[..., Any]) -> Any:
    """What the driver gets: the collecting ranks' results, without padding, joined as the plan says."""
    results = run(plan, function)
    values = [results[rank] for rank in plan.collecting]
    if plan.collect is not None:
        return plan.collect(values)
    if plan.join is Join.VALUE:
        return values[0]
    if plan.join is Join.LIST:
        return values
    kept = []
    for rank, value in zip(plan.collecting, values, strict=True):
        shard = plan.shards[plan.shard_of[rank]]
        if shard.rows is None or shard.rows == shard.real:
            kept.append(value)
        elif shard.real:  # the method returned several rows for each row of the shard
            kept.append(pick(value, range(rows_in(value) // shard.rows * shard.real)))
    return concat(kept)


# --- rows, by number --------------------------------------------------------------------------------------


def rows_in(value: Any) -> int:
    """Rows of a batch, for the types that the tests use."""
    if isinstance(value, (torch.Tensor, np.ndarray)):
        return value.shape[0]
    if isinstance(value, TensorDictBase):
        return value.batch_size[0]
    if isinstance(value, dict):
        return rows_in(next(iter(value.values())))
    if hasattr(value, "_fields"):
        return rows_in(value[0])
    return len(value) if isinstance(value, (list, tuple)) else len(value.items)


def pick(value: Any, rows: Sequence[int]) -> Any:
    """The rows of a batch with the given numbers, one by one."""
    rows = list(rows)
    if isinstance(value, (torch.Tensor, TensorDictBase)):
        return value[torch.tensor(rows, dtype=torch.long)]
    if isinstance(value, np.ndarray):
        return value[np.array(rows, dtype=int)]
    if isinstance(value, dict):
        return type(value)((key, pick(part, rows)) for key, part in value.items())
    if hasattr(value, "_fields"):
        return type(value)(*(pick(part, rows) for part in value))
    if isinstance(value, (list, tuple)):
        return type(value)([value[row] for row in rows])
    return type(value)([value.items[row] for row in rows])


def concat(values: Sequence[Any]) -> Any:
    """The rows of several batches of one type, one after the other."""
    first = values[0]
    if isinstance(first, torch.Tensor):
        return torch.cat(list(values))
    if isinstance(first, np.ndarray):
        return np.concatenate(list(values))
    if isinstance(first, TensorDictBase):
        keys = list(first.keys())  # iterating a TensorDict itself yields its rows
        joined = {key: concat([value[key] for value in values]) for key in keys}
        return TensorDict(joined, batch_size=[sum(value.batch_size[0] for value in values)])
    if isinstance(first, dict):
        return type(first)((key, concat([value[key] for value in values])) for key in first)
    if hasattr(first, "_fields"):
        return type(first)(*(concat(parts) for parts in zip(*values, strict=True)))
    if isinstance(first, (list, tuple)):
        return type(first)([item for value in values for item in value])
    return type(first)([item for value in values for item in value.items])


def same(a: Any, b: Any) -> bool:
    """Whether two values are equal and of the same types, recursively."""
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and a.shape == b.shape and bool((a == b).all())
    if isinstance(a, TensorDictBase):
        return a.batch_size == b.batch_size and same(a.to_dict(), b.to_dict())
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    if hasattr(a, "items"):
        return same(a.items, b.items)
    return a == b


def expected_rows(rows: int, shards: int, uneven: str) -> tuple[list[list[int]], list[int]]:
    """Row numbers of every shard, and how many of them are real rows, not padding."""
    small, larger = rows // shards, rows % shards
    if uneven == "pad" and larger:
        size = small + 1
        numbers = [row % rows for row in range(size * shards)]
        cut = [numbers[k * size : (k + 1) * size] for k in range(shards)]
        return cut, [len([p for p in range(k * size, (k + 1) * size) if p < rows]) for k in range(shards)]
    left = list(range(rows))
    cut = []
    for k in range(shards):
        size = small + (k < larger)
        cut.append(left[:size])
        left = left[size:]
    return cut, [len(rows_of_shard) for rows_of_shard in cut]


# --- batches of every type --------------------------------------------------------------------------------

Pair = namedtuple("Pair", ["ids", "text"])


class Chunked:
    """A user's batch with only what the protocol requires: no slicing."""

    def __init__(self, items: list[Any]) -> None:
        self.items = list(items)

    def __len__(self) -> int:
        return len(self.items)

    def chunk(self, n: int) -> list[Any]:
        if not self.items:
            return [self]  # as in torch: an empty batch is one chunk
        size = len(self.items) // n
        assert size * n == len(self.items), "only equal chunks may be requested"
        return [type(self)(self.items[k * size : (k + 1) * size]) for k in range(n)]

    @classmethod
    def concat(cls, values: list[Any]) -> Any:
        return cls([item for value in values for item in value.items])


class Sliced(Chunked):
    """A `Chunked` with slicing."""

    def __getitem__(self, rows: slice) -> Any:
        return type(self)(self.items[rows])


class Columns(Chunked):
    """A `Chunked` whose ``[]`` selects by name."""

    def __getitem__(self, name: str) -> Any:
        raise KeyError(name)


class Table:
    """A user's type without methods: only `register_batch_type` makes it a batch."""

    def __init__(self, items: list[Any]) -> None:
        self.items = list(items)


def table_functions() -> dict[str, Callable[..., Any]]:
    """The arguments of `register_batch_type` for `Table`."""
    return {
        "length": lambda table: len(table.items),
        "cut": lambda table, start, stop: type(table)(table.items[start:stop]),
        "join": lambda tables: type(tables[0])([item for table in tables for item in table.items]),
    }


def batches(rows: int) -> dict[str, Any]:
    """One batch of every type, with distinct rows. `Table` must have been registered."""
    ids = list(range(rows))
    matrix = torch.arange(rows * 3).reshape(rows, 3)
    return {
        "tensor": matrix,
        "tensor 1-d": torch.arange(rows, dtype=torch.float64),
        "ndarray": matrix.numpy() + 100,
        "ndarray of objects": np.array([f"row {k}" for k in ids] or [], dtype=object),
        "TensorDict": TensorDict({"a": matrix, "b": {"c": matrix + 7}}, batch_size=[rows]),
        "list": [f"prompt {k}" for k in ids],
        "tuple": tuple({"id": k} for k in ids),
        "dict": {"ids": matrix, "text": [f"t{k}" for k in ids]},
        "nested dict": {"a": {"b": {"c": np.arange(rows)}, "d": tuple(ids)}, "e": torch.arange(rows)},
        "namedtuple": Pair(torch.arange(rows), [f"n{k}" for k in ids]),
        "dict of namedtuple": {"pair": Pair(np.arange(rows), ids)},
        "chunk and concat": Chunked(ids),
        "chunk, concat, slices": Sliced(ids),
        "chunk, concat, columns": Columns(ids),
        "registered": Table(ids),
    }


NO_EMPTY_SHARD = {"chunk and concat", "chunk, concat, columns"}
"""Types that cannot create an empty shard."""

BATCH_KINDS = list(batches(1))


# --- layouts ----------------------------------------------------------------------------------------------


def factorizations(n: int, factors: int) -> Iterator[tuple[int, ...]]:
    """All ways to write ``n`` as an ordered product."""
    if factors == 1:
        yield (n,)
        return
    for d in (d for d in range(1, n + 1) if n % d == 0):
        for rest in factorizations(n // d, factors - 1):
            yield (d, *rest)


def coordinates(sizes: dict[str, int], order: Sequence[str]) -> list[dict[str, int]]:
    """The coordinates of each rank, when the first axis of ``order`` changes fastest from rank to rank."""
    ranks: list[dict[str, int]] = [{}]
    for axis in order:
        ranks = [{**inner, axis: k} for k in range(sizes.get(axis, 1)) for inner in ranks]
    return ranks


def layout_of(ranks: Sequence[dict[str, int]], **more: Any) -> Layout:
    """The layout in which rank r has the coordinates ``ranks[r]``."""
    return Layout({axis: [coordinate[axis] for coordinate in ranks] for axis in ranks[0]}, **more)


def orders(sizes: dict[str, int]) -> Iterator[tuple[str, ...]]:
    """All distinct nestings of the axes: the position of an axis of size 1 makes no difference."""
    real = [axis for axis in AXES if sizes[axis] > 1]
    flat = [axis for axis in AXES if sizes[axis] == 1]
    for order in permutations(real):
        yield (*order, *flat)


# --- the MEGATRON modes -----------------------------------------------------------------------------------

MEGATRON = {
    mode: declare(mode)
    for mode in ("MEGATRON_COMPUTE", "MEGATRON_COMPUTE_PROTO", "MEGATRON_PP_AS_DP", "MEGATRON_PP_AS_DP_PROTO")
}


def check_megatron_modes(sizes: dict[str, int], places: Sequence[dict[str, int]]) -> None:
    """All four MEGATRON modes on a layout, against each rank's own coordinates."""
    layout = layout_of(places)
    check_by_dp(layout, sizes, places)
    check_pp_as_dp(layout, sizes, places)


def check_by_dp(layout: Layout, sizes: dict[str, int], places: Sequence[dict[str, int]], per_shard: int = 2) -> None:
    """The rows modes and the items modes by dp: the reference uses each rank's own coordinates."""
    dp = sizes["dp"]
    items = [f"item {k}" for k in range(dp)]
    by_item = plan_call(MEGATRON["MEGATRON_COMPUTE"], layout, (items,), {})
    by_rows = plan_call(MEGATRON["MEGATRON_COMPUTE_PROTO"], layout, (list(range(per_shard * dp)),), {})
    assert len(by_item.shards) == len(by_rows.shards) == dp
    collecting = {}
    readers = Counter()
    first_seen = {}
    for rank, place in enumerate(places):
        d = place["dp"]
        assert arguments(by_item, rank)[0] == (items[d],)
        (rows,) = arguments(by_rows, rank)[0]
        assert rows == list(range(per_shard * d, per_shard * (d + 1)))
        assert first_seen.setdefault(d, rows) is rows, "ranks that share a shard share the object"
        readers.update(rows)
        if place["tp"] == 0 and place["cp"] == 0 and place["pp"] == sizes["pp"] - 1:
            collecting[d] = rank
    assert set(readers) == set(range(per_shard * dp))
    assert set(readers.values()) == {len(places) // dp}, "each row at all tp, cp and pp ranks of its dp rank, once"
    assert by_item.collecting == by_rows.collecting == tuple(collecting[d] for d in range(dp))


def check_pp_as_dp(layout: Layout, sizes: dict[str, int], places: Sequence[dict[str, int]]) -> None:
    """pp and cp count as data: dp-major, then cp, then pp; tp 0 collects."""
    data = [(d, c, p) for d in range(sizes["dp"]) for c in range(sizes["cp"]) for p in range(sizes["pp"])]
    collecting = {
        (place["dp"], place["cp"], place["pp"]): rank for rank, place in enumerate(places) if place["tp"] == 0
    }
    for mode in ("MEGATRON_PP_AS_DP", "MEGATRON_PP_AS_DP_PROTO"):
        made = plan_call(MEGATRON[mode], layout, (data,), {})
        assert len(made.shards) == len(data)
        for rank, place in enumerate(places):
            own = (place["dp"], place["cp"], place["pp"])
            assert arguments(made, rank)[0] == ((own,) if mode == "MEGATRON_PP_AS_DP" else ([own],))
        assert made.collecting == tuple(collecting[place] for place in data)
