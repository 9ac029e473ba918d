"""Batches whose content says which step they are of, and what is checked of a folder that a killed run has left."""

import json

import numpy as np

from single_controller.view.run_files import METRICS, SAMPLES, read_lines, read_run, sample_files, sample_steps
from workers import Completion, collate


def batch_of(step, rows=6, length=5):
    """Rollout data: all completion tokens of row r are 100 * step + r."""
    completions = [
        Completion([100 * step + row] * (length + row % 3), [-0.5] * (length + row % 3), ("stop", "length")[row % 2])
        for row in range(rows)
    ]
    return collate(
        [[1] * (2 + row % 2) for row in range(rows)],
        completions,
        group_ids=[row // 2 for row in range(rows)],
        weight_versions=[step + 1] * rows,
        rewards=[float((row * 7 + step) % 5) for row in range(rows)],
    )


def check_folder(folder):
    """Check that a folder opens, and that nothing in it is torn or doubled. Returns its steps."""
    read_run(folder)
    steps = []
    for line in read_lines(folder / METRICS):
        steps.append(line["step"])
        assert line["metrics"]["value"] == float(line["step"] ** 2)
    assert steps == list(range(len(steps)))  # each once, in order, none missing
    for name in ("events.jsonl", "timeline.jsonl"):
        for line in read_lines(folder / name):
            assert {"time", "method"} & line.keys()
    for step in sample_steps(folder):
        data, text = sample_files(folder, step)
        about = json.loads(text.read_bytes())
        assert about["step"] == step
        with np.load(data) as arrays:
            assert len(arrays["offsets"]) == len(about["rows"]) + 1
            assert arrays["offsets"][-1] == len(arrays["tokens"])
            for row, number in enumerate(arrays["numbers"]):
                begin, end = arrays["offsets"][row : row + 2]
                completion = arrays["tokens"][begin + arrays["prompt_lengths"][row] : end]
                assert set(completion.tolist()) == {100 * step + number}
    return steps


def check_clean(folder, steps):
    """Check a folder whose run has ended: also that no file is left over, and that every line is complete."""
    assert check_folder(folder) == list(range(steps))
    assert sample_steps(folder)[-1] == steps - 1
    files = {file.name for file in folder.iterdir()}
    assert not [name for name in files if name.endswith(".new")]
    assert not [file for file in (folder / SAMPLES).iterdir() if file.name.startswith(".")]
    for file in folder.glob("*.jsonl"):
        data = file.read_bytes()
        assert not data or data.endswith(b"\n")
        for line in data.splitlines():
            json.loads(line)
