"""Run folders as docs/runs.md describes them, written without the library's writer."""

import json
from pathlib import Path

import numpy as np

STARTED = 1_764_119_600.0


def write_lines(path, records, mode="w"):
    with open(path, mode) as file:
        file.writelines(json.dumps(record) + "\n" for record in records)


def write_run(
    folder, *, steps=0, metrics=("reward", "loss", "entropy"), ended=True, values=None, vocabulary=(), **about
):
    """A folder with run.json, ``steps`` lines of metrics, of the given values, (steps, metrics), or any, and the texts
    of a vocabulary. Returns the folder."""
    folder = Path(folder)
    (folder / "samples").mkdir(parents=True, exist_ok=True)
    known = {
        "format": 1,
        "name": folder.name,
        "id": "0123abcd",
        "started": STARTED,
        "config": {"lr": 1e-6, "model": "tiny"},
        "versions": {"torch": "2.13.0"},
        "git": {"commit": "df2d8c2", "dirty": False},
        "seeds": {"seed": 1},
        "ray_address": None,
        "groups": [],
        "vocabulary": {"file": "vocabulary.jsonl"} if vocabulary else None,
        "resumed": [],
        "ended": {"time": STARTED + steps, "reason": "finished"} if ended else None,
    }
    (folder / "run.json").write_text(json.dumps(known | about))
    if values is None:
        values = np.random.default_rng(0).standard_normal((steps, len(metrics))).cumsum(0)
    named = (dict(zip(metrics, row, strict=True)) for row in values)
    lines = ({"step": step, "time": STARTED + step, "metrics": logged} for step, logged in enumerate(named))
    write_lines(folder / "metrics.jsonl", lines)
    if vocabulary:
        write_lines(folder / "vocabulary.jsonl", [{"id": n, "text": text} for n, text in enumerate(vocabulary)])
    return folder


def write_samples(
    folder, step, lengths, *, prompt=2, rewards=None, groups=None, texts=None, seed=0, versions=None, **more
):
    """The samples of one step, with every array of the format. Returns the arrays."""
    random = np.random.default_rng(seed)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    tokens, rows = int(offsets[-1]), len(lengths)
    position = np.arange(tokens) - np.repeat(offsets[:-1], lengths)
    sampled = position >= prompt
    engine = np.where(sampled, -random.exponential(1.0, tokens), np.nan).astype(np.float32)
    arrays = {
        "offsets": offsets,
        "numbers": np.arange(rows),
        "prompt_lengths": np.minimum(prompt, lengths).astype(np.int32),
        "tokens": random.integers(0, 100, tokens).astype(np.int32),
        "loss_mask": sampled.astype(np.uint8),
        "rollout_log_probs": engine,
        "log_probs": (engine + 0.01 * random.standard_normal(tokens)).astype(np.float32),
        "advantages": np.where(sampled, random.standard_normal(tokens), 0).astype(np.float32),
        "versions": np.where(sampled, step if versions is None else versions, -1).astype(np.int32),
        "rewards": np.asarray(random.random(rows) if rewards is None else rewards, np.float32),
        "groups": np.asarray(np.arange(rows) // 4 if groups is None else groups, np.int64),
        "row/truncated": np.arange(rows) % 2 == 1,
        "token/ref_log_probs": engine,
    } | more
    stem = Path(folder) / "samples" / f"step_{step:08d}"
    known = [{"number": row, "finish": ("stop", "length")[row % 2]} for row in range(rows)]
    for row, text in enumerate(texts or []):
        known[row] |= text
    stem.with_suffix(".json").write_text(json.dumps({"step": step, "time": STARTED + step, "rows": known}))
    np.savez(stem.with_suffix(".npz"), **arrays)
    return arrays


def update(version, step, **more):
    return {
        "step": step,
        "time": STARTED + step,
        "kind": "update",
        "text": f"version {version}",
        "version": version,
        "bytes": 4096 * version,
        "seconds": 0.25,
        "proof": "received",
        "digest": f"{version:016x}",
    } | more
