"""The samples of a step: which rows of a batch are recorded, and the arrays and texts of them. docs/runs.md has the
format."""

from __future__ import annotations

import json
import random
import weakref
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from workers.data.rollout_data import RECORD_ROWS, RECORD_STEP, REWARD_PART, entries_of, token_versions

if TYPE_CHECKING:
    import torch

    from workers.rollout.engines.rollout_engine import Completion

Decode = Callable[[Sequence[int]], str]

MOST_BYTES = 1 << 16
"""A value of a row's prompt or session of which more would be written is cut."""

_OWN = frozenset({"input_ids", "attention_mask", "loss_mask", "rollout_log_probs", "advantages", "rewards"}) | {
    "group_ids",
    "weight_versions",
    "weight_fingerprints",
    "prompt_lengths",
    RECORD_ROWS,
    RECORD_STEP,
}
"""Columns that have a place of their own in the format."""


class RowNote(NamedTuple):
    """What is known of a row that is no number.

    Attributes:
        finish: the finish reason.
        info: of its session, or None.
        columns: what its prompt had besides its tokens.
    """

    finish: str
    info: Mapping[str, Any] | None
    columns: Mapping[str, Any]


class RowNotes:
    """The notes of batches, each for as long as the batch exists."""

    def __init__(self) -> None:
        self._kept: dict[int, tuple[weakref.ref[Any], list[RowNote]]] = {}  # by the id of the batch

    def put(self, batch: Any, completions: Sequence[Completion], columns: Sequence[Mapping[str, Any]]) -> None:
        """Note the rows of a batch that `collate` has made.

        Args:
            batch: the batch.
            completions: as `collate` was given them.
            columns: what the prompt of each had besides its tokens.
        """
        notes = [
            RowNote(one.finish_reason, one.info, of_prompt)
            for one, of_prompt in zip(completions, columns, strict=True)
            for _ in one.rows or (None,)
        ]
        self._keep(batch, notes)

    def same(self, batch: Any, other: Any) -> None:
        """Note that another batch has the same rows. Plain dicts have no notes."""
        notes = self.of(batch)
        if notes is not None and not isinstance(other, dict):
            self._keep(other, notes)

    def of(self, batch: Any) -> list[RowNote] | None:
        """Return the notes of a batch's rows."""
        found = self._kept.get(id(batch))
        return None if found is None else found[1]

    def _keep(self, batch: Any, notes: list[RowNote]) -> None:
        kept, key = self._kept, id(batch)
        # Python reuses an id only after the batch is deleted, when the callback has already removed its notes.
        kept[key] = weakref.ref(batch, lambda _: kept.pop(key, None)), notes


def with_record_rows(batch: Any, limit: int | None, step: int) -> Any:
    """Return a batch with the entries ``record_step``, and ``record_rows``: all its rows if there are at most
    ``limit``; else whole groups, as far as they fit: that of the lowest reward, that of the highest, and others by
    chance.

    Args:
        batch: rollout data, a TensorDict or a dict of tensors. It is not changed.
        limit: number of rows; None for all.
        step: of the run, also the seed of the choice.
    """
    import torch

    count = len(batch["input_ids"])
    numbers = torch.arange(count)
    if limit is not None and count > limit:
        chosen = torch.tensor(_choose(batch, count, limit, step))
        numbers = torch.full((count,), -1).scatter(0, chosen, chosen)
    marks = {RECORD_ROWS: numbers, RECORD_STEP: torch.full((count,), step)}
    return {**batch, **marks} if isinstance(batch, dict) else batch.clone(recurse=False).update(marks)


def _choose(batch: Any, count: int, limit: int, seed: int) -> list[int]:
    names = batch.keys()
    groups = batch["group_ids"].tolist() if "group_ids" in names else list(range(count))
    members: dict[int, list[int]] = {}
    for row, group in enumerate(groups):
        members.setdefault(group, []).append(row)
    order = list(members)
    random.Random(seed).shuffle(order)
    if "rewards" in names:
        rewards = batch["rewards"].tolist()
        worst, best = min(range(count), key=rewards.__getitem__), max(range(count), key=rewards.__getitem__)
        members[groups[worst]].sort(key=rewards.__getitem__)  # of a group that is larger than the limit
        order = list(dict.fromkeys([groups[worst], groups[best], *order]))
    return sorted([row for group in order for row in members[group]][:limit])


def step_samples(
    batch: Any,
    computed: Mapping[int, Mapping[str, np.ndarray]],
    notes: Sequence[RowNote] | None = None,
    decode: Decode | None = None,
) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Return the arrays of a step's samples, and what the JSON file has.

    Args:
        batch: rollout data with ``record_rows``.
        computed: by row, what the trainer computed: see `RayTrainGroup.recorded_rows`.
        notes: of each row of the batch.
        decode: turns token ids into text.
    """
    import torch

    entries = {name: value for name, value in entries_of(batch).items() if isinstance(value, torch.Tensor)}
    at = (entries[RECORD_ROWS] >= 0).nonzero()[:, 0]
    real = entries["attention_mask"][at].bool()
    shape = tuple(entries["input_ids"].shape)
    numbers, lengths = entries[RECORD_ROWS][at].tolist(), real.sum(1).numpy()
    offsets = np.concatenate([np.zeros(1, np.int64), lengths.cumsum(dtype=np.int64)])

    positions = (at[:, None] * shape[1]).add(torch.arange(shape[1]))[real]

    def flat(value: torch.Tensor) -> np.ndarray:
        return _numpy(value.flatten(0, 1).index_select(0, positions))

    mask = flat(entries["loss_mask"])
    whole = mask.dtype.kind in "iub" or bool((mask == mask.astype(np.uint8)).all())
    arrays: dict[str, np.ndarray] = {
        "offsets": offsets,
        "numbers": np.array(numbers, np.int64),
        "starts": real.int().argmax(1).numpy().astype(np.int32),
        "tokens": flat(entries["input_ids"]).astype(np.int32),
        "loss_mask": mask.astype(np.uint8) if whole else mask,
    }
    if "prompt_lengths" in entries:
        prompts = entries["prompt_lengths"][at]
    else:  # what stands before the first token that is trained
        prompts = (real & ((entries["loss_mask"][at] != 0).cumsum(1) == 0)).sum(1)
    arrays["prompt_lengths"] = _numpy(prompts).astype(np.int32)
    if "rollout_log_probs" in entries:
        arrays["rollout_log_probs"] = flat(entries["rollout_log_probs"])
    if (versions := token_versions(entries)) is not None:
        arrays["versions"] = flat(versions).astype(np.int32)
    if "rewards" in entries:  # float64 stays, because a replay compares bits
        rewards = _numpy(entries["rewards"][at])
        arrays["rewards"] = rewards if rewards.dtype == np.float64 else rewards.astype(np.float32)
    if "group_ids" in entries:
        arrays["groups"] = _numpy(entries["group_ids"][at]).astype(np.int64)
    for name in {name for columns in computed.values() for name in columns}:
        column = np.full(int(offsets[-1]), np.nan, np.float32)
        for row, number in enumerate(numbers):
            if name in computed.get(number, {}):
                column[offsets[row] : offsets[row + 1]] = computed[number][name]
        arrays[name if name in ("log_probs", "advantages") else f"token/{name}"] = column
    for name, value in entries.items():
        if name in _OWN:
            continue
        if value.is_nested:
            if len(numbers) == shape[0]:  # large, and for a replay only, which needs all rows
                arrays |= _jagged(name, value, at.tolist())
        elif tuple(value.shape[:2]) == shape:
            arrays.setdefault(f"token/{name}", flat(value))
        elif tuple(value.shape[:1]) == shape[:1]:
            arrays[f"row/{name}"] = _numpy(value[at])
    parts = {one.removeprefix(REWARD_PART): entries[one][at].tolist() for one in entries if one.startswith(REWARD_PART)}
    digests: list[dict[str, str]] = [{} for _ in numbers]
    if "weight_fingerprints" in entries and "versions" in arrays:
        _note_digests(digests, offsets, arrays["versions"], flat(entries["weight_fingerprints"]))
    truncated = _numpy(entries["truncated"][at]).tolist() if "truncated" in entries else [False] * len(numbers)
    tokens = [] if decode is None else arrays["tokens"].tolist()
    rows = []
    for row, number in enumerate(numbers):
        begin, end = offsets[row], offsets[row + 1]
        note = None if notes is None else notes[number]
        prompt = begin + arrays["prompt_lengths"][row]
        rows.append(
            {
                "number": number,
                "finish": note.finish if note is not None else "length" if truncated[row] else None,
                "reward_parts": {name: values[row] for name, values in parts.items()},
                "columns": {} if note is None else _bounded(note.columns),
                "fingerprints": digests[row],
                "prompt": None if decode is None else decode(tokens[begin:prompt]),
                "completion": None if decode is None else decode(tokens[prompt:end]),
                "info": None if note is None or note.info is None else _bounded(note.info),
                "turns": _turns(mask[begin:end]) if note is not None and note.info is not None else None,
            }
        )
    columns = {name: str(value.dtype).removeprefix("torch.") for name, value in entries.items()}
    return arrays, {"batch_rows": shape[0], "width": shape[1], "columns": columns, "rows": rows}


def hexadecimal(digest: int) -> str:
    """Return a digest of 64 bits as 16 hexadecimal digits."""
    return f"{digest & (2**64 - 1):016x}"


def _note_digests(
    digests: list[dict[str, str]], offsets: np.ndarray, versions: np.ndarray, fingerprints: np.ndarray
) -> None:
    """Note weight version -> digest, of each row's tokens."""
    known = (fingerprints != -1).nonzero()[0]
    rows, versions, fingerprints = np.searchsorted(offsets, known, "right") - 1, versions[known], fingerprints[known]
    begins = np.ones(len(known), bool)  # of tokens of one row that have the same: nearly always one run per row
    begins[1:] = (np.diff(rows) != 0) | (np.diff(versions) != 0) | (fingerprints[1:] != fingerprints[:-1])
    at = zip(rows[begins].tolist(), versions[begins].tolist(), fingerprints[begins].tolist(), strict=True)
    for row, version, digest in at:
        digests[row][str(version)] = hexadecimal(digest)


def _bounded(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a row's prompt or session has, without what is too large to look at, such as images, and as text what
    JSON cannot have."""
    made = {}
    for name, value in values.items():
        size = getattr(value, "nbytes", 0)
        if isinstance(value, (str, bytes)):
            size = len(value)
        elif not size and not (value is None or isinstance(value, (bool, int, float))):
            try:
                size = len(json.dumps(value, default=_as_long))
            except (TypeError, ValueError, RecursionError):  # a key that is a tuple, for example
                try:
                    value = str(value)
                except RecursionError:
                    value = type(value).__name__
                size = len(value)
        made[str(name)] = value
        if size > MOST_BYTES:
            begin = value[:MOST_BYTES] if isinstance(value, str) else type(value).__name__
            made[str(name)] = f"{begin}... ({size} bytes)"
    return made


def _as_long(value: Any) -> str:
    """Return a text about as long as what JSON gets for a value that it does not know. An array's own is an excerpt."""
    return "-" * getattr(value, "nbytes", 0) or str(value)


def _turns(mask: np.ndarray) -> list[dict[str, Any]]:
    """Return the runs of a row's tokens: "sampled" ones, on which the policy is trained, and all others as "given"."""
    turns, begin = [], 0
    for sampled, run in groupby((mask != 0).tolist()):
        end = begin + sum(1 for _ in run)
        turns.append({"start": begin, "end": end, "kind": "sampled" if sampled else "given"})
        begin = end
    return turns


def _jagged(name: str, value: Any, at: Sequence[int]) -> dict[str, np.ndarray]:
    values, ends = _numpy(value.values()), value.offsets().tolist()
    parts = [values[ends[row] : ends[row + 1]] for row in at]
    offsets = np.cumsum([0, *map(len, parts)], dtype=np.int64)
    return {f"jagged/{name}": np.concatenate([values[:0], *parts]), f"jagged/{name}/offsets": offsets}


def _numpy(value: torch.Tensor) -> np.ndarray:
    value = value.detach().cpu()
    made: np.ndarray = (value.float() if value.dtype.itemsize == 2 and value.is_floating_point() else value).numpy()
    return made
