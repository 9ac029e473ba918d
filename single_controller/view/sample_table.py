"""StepTable: one line for each sample of a step. `select` sorts, filters and cuts the lines of several steps."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

NUMBERS = (
    "step",
    "row",
    "reward",
    "tokens",
    "prompt",
    "completion",
    "oldest",
    "newest",
    "group",
    "difference",
    "equal",
)
"""The columns that are numbers. ``oldest`` and ``newest`` are weight versions, -1 where they are not known.
``difference``: mean of |log-prob of the trainer - log-prob of the engine| over trained tokens. ``equal``: whether all
rewards of the row's group are equal, and the group has several rows. ``group``: from 0 in each step, because the ids of
groups have 63 bits, of which a browser's numbers keep 53."""


@dataclass
class StepTable:
    """The lines of one step, in columns of one length.

    Attributes:
        changed: other for another content of the file.
        columns: name -> array, of `NUMBERS`.
        finish: why each row ended; None where it is not known.
        versions: row -> its weight versions, of rows that may have none between the oldest and the newest one.
    """

    changed: tuple[int, ...]
    columns: dict[str, np.ndarray]
    finish: np.ndarray
    versions: Mapping[int, frozenset[int]]

    @classmethod
    def of(
        cls, step: int, changed: tuple[int, ...], arrays: Mapping[str, np.ndarray], texts: Sequence[Mapping[str, Any]]
    ) -> StepTable:
        """Make it of a step's arrays and texts.

        Raises:
            ValueError: the arrays do not fit each other.
        """
        offsets = np.asarray(arrays["offsets"], np.int64)
        rows = len(offsets) - 1
        tokens = len(arrays["tokens"]) if "tokens" in arrays else 0
        if rows < 0 or offsets[0] or offsets[-1] != tokens or (np.diff(offsets) < 0).any():
            raise ValueError(f"its offsets do not cut {tokens} tokens into rows")
        lengths = np.diff(offsets)

        def of_rows(name: str, missing: float) -> np.ndarray:
            found = np.asarray(arrays[name]) if name in arrays else np.full(rows, missing)
            if found.shape != (rows,):
                raise ValueError(f"{name} has the shape {found.shape}, for {rows} rows")
            return found

        prompts = of_rows("prompt_lengths", 0)
        rewards, groups = of_rows("rewards", np.nan).astype(np.float64), of_rows("groups", -1).astype(np.int64)
        oldest = newest = np.full(rows, -1)
        several: dict[int, frozenset[int]] = {}
        if "versions" in arrays:
            versions = np.asarray(arrays["versions"])
            newest = _by_row(np.maximum, versions, offsets, -1)
            known = np.where(versions < 0, np.iinfo(np.int32).max, versions)
            oldest = np.where(newest < 0, -1, _by_row(np.minimum, known, offsets, -1))
            for row in np.flatnonzero(newest > oldest + 1).tolist():
                several[row] = frozenset(versions[offsets[row] : offsets[row + 1]].tolist())
        difference = np.full(rows, np.nan)
        if "log_probs" in arrays and "rollout_log_probs" in arrays:
            apart = np.abs(np.asarray(arrays["log_probs"]) - arrays["rollout_log_probs"])
            counted = ~np.isnan(apart)
            if "loss_mask" in arrays:
                counted &= np.asarray(arrays["loss_mask"]) > 0
            total = _by_row(np.add, np.where(counted, apart, 0).astype(np.float64), offsets, 0)
            count = _by_row(np.add, counted.astype(np.int64), offsets, 0)
            difference = np.where(count > 0, total / np.maximum(count, 1), np.nan)
        columns = {
            "step": np.full(rows, step),
            "row": np.arange(rows),
            "reward": rewards,
            "tokens": lengths,
            "prompt": prompts,
            "completion": lengths - prompts,
            "oldest": oldest,
            "newest": newest,
            "group": _numbered(groups),
            "difference": difference,
            "equal": _equal(groups, rewards),
        }
        finish = np.array([None] * rows, dtype=object)
        for row, text in enumerate(texts[:rows]):
            finish[row] = None if text.get("finish") is None else str(text["finish"])[:40]
        return cls(changed, columns, finish, several)

    def has(self, version: float) -> np.ndarray:
        """Whether each row has tokens of a weight version."""
        found: np.ndarray = (self.columns["oldest"] <= version) & (version <= self.columns["newest"])
        for row, versions in self.versions.items():
            found[row] &= version in versions
        return found


@dataclass(frozen=True)
class Filter:
    """Which lines to show; None shows all. Both limits of a range belong to it."""

    ranges: Mapping[str, tuple[float, float]]  # column -> smallest and largest value
    finish: str | None = None  # why the row ended; "" where it is not known
    equal: bool | None = None  # only rows in groups with equal rewards, or only the others
    version: float = math.nan  # only rows with tokens of this weight version; NaN for all


def select(
    tables: Sequence[StepTable], chosen: Filter, sort: str, *, descending: bool, offset: int, limit: int
) -> dict[str, Any]:
    """Sort and filter lines. Values that are not numbers come last, in both directions.

    Returns:
        ``rows``, one dict each, from ``offset`` on and at most ``limit``; ``total``, how many pass the filter; ``all``,
        how many there are; ``finish``, the reasons that occur, with their counts; ``equal_groups`` and ``groups``, how
        many groups pass and have equal rewards, or pass.
    """
    columns = {
        name: np.concatenate([table.columns[name] for table in tables]) if tables else np.empty(0) for name in NUMBERS
    }
    finish = np.concatenate([table.finish for table in tables]) if tables else np.empty(0, object)
    keep = np.ones(len(finish), bool)
    for name, (low, high) in chosen.ranges.items():
        keep &= (columns[name] >= low) & (columns[name] <= high)
    if chosen.finish is not None:
        keep &= np.array([(one or "") == chosen.finish for one in finish], bool)
    if chosen.equal is not None:
        keep &= columns["equal"].astype(bool) == chosen.equal
    if tables and not math.isnan(chosen.version):
        keep &= np.concatenate([table.has(chosen.version) for table in tables])
    rows = np.flatnonzero(keep)
    if sort == "finish":
        ranks = {name: number for number, name in enumerate(sorted({one or "" for one in finish}))}
        values = np.array([ranks[one or ""] for one in finish[rows]], np.float64)
    else:
        values = columns[sort][rows].astype(np.float64)
    order = np.argsort(-values if descending else values, kind="stable")  # NaN last
    shown = rows[order[offset : offset + limit]]
    reasons = Counter(one or "" for one in finish[rows])
    groups = np.unique(np.stack([columns["step"][rows], columns["group"][rows], columns["equal"][rows]]), axis=1)
    return {
        "rows": [
            {name: columns[name][row].item() for name in NUMBERS} | {"finish": finish[row]} for row in shown.tolist()
        ],
        "total": len(rows),
        "all": len(finish),
        "finish": reasons,
        "groups": int(groups.shape[1]),
        "equal_groups": int(groups[2].sum()) if groups.size else 0,
    }


def branches(tokens: Mapping[int, np.ndarray], turns: Mapping[int, Sequence[int]]) -> list[dict[str, Any]]:
    """The tree of rows that begin with the same tokens, such as those of a session in which an agent has tried several
    ways.

    Args:
        tokens: row -> its tokens.
        turns: row -> where its turns begin. Rows that part within a turn part where it begins.

    Returns:
        Its nodes, parents first: ``parent``, the number of a node or None; ``start`` and ``end``, positions in its
        ``rows``; and ``ends``, those of its rows that end in it.
    """
    nodes: list[dict[str, Any]] = []
    todo: list[tuple[int | None, int, list[int]]] = [(None, 0, sorted(tokens))] if tokens else []
    while todo:
        parent, start, rows = todo.pop(0)
        first = tokens[rows[0]]
        same = len(first)
        for row in rows[1:]:
            same = min(same, len(tokens[row]))
            same = min([same, *np.flatnonzero(first[:same] != tokens[row][:same])[:1].tolist()])
        ends = [row for row in rows if len(tokens[row]) == same]
        end = same
        if not ends:
            end = max((at for row in rows for at in turns.get(row, ()) if start < at <= same), default=same)
        if end > start or ends:
            nodes.append({"parent": parent, "start": start, "end": end, "rows": rows, "ends": ends})
            parent = len(nodes) - 1
        parts: dict[int, list[int]] = {}
        for row in rows:
            if row not in ends:
                parts.setdefault(int(tokens[row][same]), []).append(row)
        todo += [(parent, end, part) for part in parts.values()]
    return nodes


def _by_row(reduce: np.ufunc, values: np.ndarray, offsets: np.ndarray, empty: float) -> np.ndarray:
    """Reduce a flat array by rows; ``empty`` for rows without values."""
    if len(values) != offsets[-1]:
        raise ValueError(f"an array has {len(values)} values, for {offsets[-1]} tokens")
    lengths = np.diff(offsets)
    found = np.full(len(lengths), empty, np.result_type(values, np.int64))
    found[lengths > 0] = reduce.reduceat(values, offsets[:-1][lengths > 0])
    return found


def _numbered(groups: np.ndarray) -> np.ndarray:
    """Number groups from 0 in the order of their first rows; -1 stays."""
    numbers, known = np.full(len(groups), -1), groups != -1
    _, first, of_row = np.unique(groups[known], return_index=True, return_inverse=True)
    numbers[known] = np.argsort(np.argsort(first))[of_row]
    return numbers


def _equal(groups: np.ndarray, rewards: np.ndarray) -> np.ndarray:
    """Whether all rewards of each row's group are equal, and the group has several rows."""
    if not len(groups):
        return np.zeros(0, bool)
    _, of_row, counts = np.unique(groups, return_inverse=True, return_counts=True)
    low, high = np.full(len(counts), np.inf), np.full(len(counts), -np.inf)
    with np.errstate(invalid="ignore"):  # a reward that is not known makes its group unequal
        np.minimum.at(low, of_row, rewards)
        np.maximum.at(high, of_row, rewards)
    equal: np.ndarray = ((low == high) & (counts > 1))[of_row] & (groups != -1)
    return equal
