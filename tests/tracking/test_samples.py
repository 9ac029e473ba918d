"""What the samples say of rows besides their numbers: finish reasons, columns, sessions."""

import gc
import json
import pickle
import weakref

import numpy as np
import torch
from rollout_helpers import EchoEngine
from tensordict import TensorDict

from single_controller import ClassWithInitArgs, LocalWorkerGroup
from single_controller.view.run_files import sample_files
from workers import Completion, RolloutManager, RolloutWorker, RunLog, SamplingParams, collate
from workers.rollout.engines.rollout_engine import Row
from workers.tracking.samples import RowNotes, step_samples, with_record_rows


def rows_of(folder, step):
    return json.loads(sample_files(folder, step)[1].read_bytes())["rows"]


def test_rows_of_a_manager_have_their_finish_reason_and_the_columns_of_their_prompt(tmp_path):
    engines = ClassWithInitArgs(RolloutWorker, EchoEngine)
    with LocalWorkerGroup(2, engines, collectives=False) as group, RunLog(run_dir=tmp_path) as log:
        manager = RolloutManager(group, SamplingParams(4), lambda prompt, completion: 1.0, samples_per_prompt=2)
        log.watch(manager)
        labels = {"label": ["odd", "even", "odd"], "number": [7, 8, 9]}
        batch = log.mark(0, manager.generate([[1, 2], [3], [4, 5, 6]], extras=labels))
        log.log(0, {}, batch)
        log.log(1, {}, log.mark(1, dict(batch.items())))  # of a plain dict, nothing is known
        copied = pickle.loads(pickle.dumps(manager.row_notes.of(batch)))
    assert [note.columns["number"] for note in copied] == [7, 7, 8, 8, 9, 9]
    rows = rows_of(tmp_path, 0)
    assert [row["columns"] for row in rows] == [
        {"label": label, "number": number}
        for label, number in zip(labels["label"], labels["number"], strict=True)
        for _ in range(2)
    ]
    assert {row["finish"] for row in rows} == {"length"} and {row["info"] for row in rows} == {None}
    assert [row["columns"] for row in rows_of(tmp_path, 1)] == [{}] * 6


def test_sessions_have_their_turns_and_branches(tmp_path):
    """One session is two rows, with two turns in the first; the other one has failed."""

    def turns(mask):
        return Completion(list(range(10, 10 + len(mask))), [-0.5] * len(mask), "stop", loss_mask=mask)

    info = {"end_reason": "done", "turns": 3, "reward": 1.0, "trace": {1, 2}}
    branched = Completion([7], [-0.1], "stop", info=info, rows=[Row([1, 2], turns([1, 1, 0, 1])), Row([1], turns([1]))])
    failed = Completion([5, 6], [-0.1, -0.2], "error", info={"end_reason": "error", "error": "Boom"})
    batch = collate([[1, 2], [3]], [branched, failed], group_ids=[4, 4], rewards=[1.0, 0.0])
    notes = RowNotes()
    notes.put(batch, [branched, failed], [{"label": "a"}, {"label": "b"}])
    marked = with_record_rows(batch, None, 0)
    notes.same(batch, marked)
    arrays, about = step_samples(marked, {}, notes.of(marked))
    first, second, third = about["rows"]
    assert first["info"]["trace"] == {1, 2} and second["info"]["turns"] == 3 and third["info"]["error"] == "Boom"
    assert [row["finish"] for row in about["rows"]] == ["stop", "stop", "error"]
    assert [row["columns"]["label"] for row in about["rows"]] == ["a", "a", "b"]
    assert first["turns"] == [
        {"start": 0, "end": 2, "kind": "given"},
        {"start": 2, "end": 4, "kind": "sampled"},
        {"start": 4, "end": 5, "kind": "given"},
        {"start": 5, "end": 6, "kind": "sampled"},
    ]
    same = arrays["row/rollout_ids"]
    assert same[0] == same[1] != same[2]
    assert notes.of(batch.clone()) is None  # another batch
    with RunLog(run_dir=tmp_path) as log:  # a set is written as a list
        log._folder.step(0, {}, (arrays, about))
    assert rows_of(tmp_path, 0)[0]["info"]["trace"] == [1, 2]


def test_other_columns_are_kept_in_their_shapes():
    """Log-probabilities that only some rows have, sampling masks, fractions of a mask, numbers in half and in double
    precision, and what a method of another group has returned. Arrays are left out: ranks train with both."""
    batch = collate([[1, 2], [3]], [Completion([4], [-0.5], "stop"), Completion([5, 6], [-0.5] * 2, "stop")])
    batch["loss_mask"] = batch["loss_mask"] * 0.25
    batch["candidate_ids"] = torch.arange(batch["input_ids"].numel() * 3).view(*batch["input_ids"].shape, 3)
    batch["halves"] = torch.tensor([0.5, 1.5], dtype=torch.bfloat16)
    batch["rewards"] = torch.tensor([0.1, 0.2], dtype=torch.float64)
    values, offsets = torch.tensor([9, 8, 7], dtype=torch.int32), torch.tensor([0, 1, 3])
    batch["sampling_mask"] = torch.nested.nested_tensor_from_jagged(values, offsets)
    batch["teacher"] = TensorDict({"margins": torch.tensor([1, 2])}, [2])
    given = {**dict(batch.items()), "labels": np.array(["\u00e4", "b"])}
    computed = {1: {"log_probs": np.array([0.0, -1.0, -2.0], np.float32)}}
    arrays, about = step_samples(with_record_rows(given, None, 0), computed)
    assert arrays["loss_mask"].dtype == np.float32 and set(arrays["loss_mask"].tolist()) == {0.0, 0.25}
    assert np.isnan(arrays["log_probs"][:3]).all() and arrays["log_probs"][3:].tolist() == [0.0, -1.0, -2.0]
    real = batch["attention_mask"].bool()
    assert arrays["token/candidate_ids"].tolist() == batch["candidate_ids"][real].tolist()
    assert arrays["row/halves"].tolist() == [0.5, 1.5] and arrays["rewards"].tolist() == [0.1, 0.2]
    assert arrays["jagged/sampling_mask"].tolist() == [9, 8, 7]
    assert arrays["jagged/sampling_mask/offsets"].tolist() == [0, 1, 3]
    assert arrays["row/margins"].tolist() == [1, 2] and "labels" not in about["columns"]
    assert about["columns"]["halves"] == "bfloat16" and "finish" in about["rows"][0]


def test_values_that_json_cannot_have_are_text():
    endless = []
    endless.append(endless)
    info = {"board": {(0, 1): "x"}, (0, 1): 1, "endless": endless}
    completion = Completion([2], [-0.5], "stop", info=info)
    batch = collate([[1]], [completion])
    notes = RowNotes()
    notes.put(batch, [completion], [{}])
    (row,) = step_samples(with_record_rows(batch, None, 0), {}, notes.of(batch))[1]["rows"]
    assert row["info"] == {"board": "{(0, 1): 'x'}", "(0, 1)": 1, "endless": "[[...]]"}


def test_large_values_of_a_prompt_are_cut():
    image = np.zeros((256, 256, 3), np.uint8)
    columns = {"label": "x" * 200_000, "image": image, "images": [image], "pixels": [0.5] * 50_000, "id": 7}
    info = {"turns": 3, "log": b"y" * 100_000}
    completion = Completion([2], [-0.5], "stop", info=info)
    batch = collate([[1]], [completion])
    notes = RowNotes()
    notes.put(batch, [completion], [columns])
    (row,) = step_samples(with_record_rows(batch, None, 0), {}, notes.of(batch))[1]["rows"]
    assert row["columns"] == {
        "label": "x" * 65536 + "... (200000 bytes)",
        "image": "ndarray... (196608 bytes)",
        "images": "list... (196612 bytes)",
        "pixels": "list... (250000 bytes)",
        "id": 7,
    }
    assert row["info"] == {"turns": 3, "log": "bytes... (100000 bytes)"}


def test_notes_are_kept_as_long_as_their_batch():
    """Of any number of batches that wait for their training, and of none that is gone."""

    class Image:
        pass

    notes, completion, image = RowNotes(), Completion([2], [-0.5], "stop"), Image()
    batches = [collate([[1]], [completion]) for _ in range(12)]
    for number in range(12):
        notes.put(batches[number], [completion], [{"number": number, "image": image}])
    assert [notes.of(batch)[0].columns["number"] for batch in batches] == list(range(12))
    gone = weakref.ref(image)
    del image, batches[:]
    gc.collect()
    assert gone() is None
