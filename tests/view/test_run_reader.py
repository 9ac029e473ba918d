"""RunReader: run folders as docs/runs.md describes them, while they are written, cut, and damaged."""

import io
import json
import math
import os
import re
import socket
import subprocess
import sys

import numpy as np
import pytest
from synthetic_run import STARTED, update, write_lines, write_run, write_samples

from single_controller.__main__ import _redraw, _text
from single_controller.view.run_files import RunFolderError
from single_controller.view.run_reader import Arrays, RunReader
from single_controller.view.sample_table import Filter, select
from single_controller.view.timeline_bars import bars_of


def series(reader, name, *, by_time=False, first=-math.inf, last=math.inf, points=100):
    return reader.metrics.series(name, by_time=by_time, first=first, last=last, points=points)


class TestMetrics:
    def test_follows_a_file_without_its_torn_last_line(self, tmp_path):
        run = write_run(tmp_path / "run", steps=3)
        reader = RunReader(run)
        reader.refresh()
        line = json.dumps({"step": 3, "time": STARTED + 3, "metrics": {"reward": 7.0, "new": 1.0}}) + "\n"
        for half in (line[:20], line[20:-1]):
            with open(run / "metrics.jsonl", "a") as file:
                file.write(half)
            reader.refresh()
            assert len(reader.metrics.steps) == 3
        with open(run / "metrics.jsonl", "a") as file:
            file.write("\n[1]\nnot json\n")
        reader.refresh()
        assert list(reader.metrics.steps) == [0, 1, 2, 3]
        assert series(reader, "reward")["mean"][-1] == 7 and series(reader, "new") == {
            "x": [3], "mean": [1], "min": [1], "max": [1],
        }  # fmt: skip

    @pytest.mark.parametrize("how", ["in place", "renamed"])
    def test_steps_that_are_logged_again_replace_the_former(self, tmp_path, how):
        run = write_run(tmp_path / "run", steps=10)
        reader = RunReader(run)
        reader.refresh()
        lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)[:5]
        lines += [json.dumps({"step": 5, "time": 0, "metrics": {"reward": 50.0}}) + "\n"] * 9
        target = run / ("metrics.jsonl" if how == "in place" else "new")
        target.write_text("".join(lines) + " " * 2000 + "\n")
        if how == "renamed":
            os.replace(target, run / "metrics.jsonl")
        reader.refresh()
        assert list(reader.metrics.steps) == [0, 1, 2, 3, 4, 5]
        assert series(reader, "reward")["mean"][-1] == 50

    def test_series_are_the_means_and_ranges_of_buckets(self, tmp_path):
        run = write_run(tmp_path / "run", steps=1000)
        reader = RunReader(run)
        reader.refresh()
        values = [json.loads(line)["metrics"]["loss"] for line in (run / "metrics.jsonl").read_text().splitlines()]
        found = series(reader, "loss", points=10)
        parts = np.array(values).reshape(10, 100)
        np.testing.assert_allclose(found["mean"], parts.mean(1))
        assert found["min"] == parts.min(1).tolist() and found["max"] == parts.max(1).tolist()
        assert found["x"] == list(range(99, 1000, 100))
        assert series(reader, "loss", first=10, last=12)["mean"] == values[10:13]
        assert series(reader, "loss", by_time=True, first=STARTED + 998)["x"] == [STARTED + 998, STARTED + 999]
        assert series(reader, "unknown") == {"x": [], "mean": [], "min": [], "max": []}

    def test_numbers_that_are_not_finite(self, tmp_path):
        run = write_run(tmp_path / "run")
        lines = [{"step": n, "time": n, "metrics": {"a": value}} for n, value in enumerate([1.0, math.inf, math.nan])]
        write_lines(run / "metrics.jsonl", [*lines, {"step": "x", "metrics": {}}, {"step": 3, "metrics": [1]}])
        reader = RunReader(run)
        reader.refresh()
        assert series(reader, "a")["mean"] == [1, None] and reader.metrics.latest() == {"a": None}


class TestFolder:
    def test_what_is_no_run_is_refused(self, tmp_path):
        with pytest.raises(RunFolderError, match=r"run\.json"):
            RunReader(tmp_path)
        with pytest.raises(RunFolderError, match="format"):
            RunReader(write_run(tmp_path / "run", format=99))

    def test_links_that_lead_out_of_the_folder_are_refused(self, tmp_path):
        secret = write_run(tmp_path / "secret", steps=3)
        write_samples(secret, 1, [4])
        run = write_run(tmp_path / "run")
        stem = run / "samples" / "step_00000001"
        stem.with_suffix(".npz").symlink_to(secret / "samples" / "step_00000001.npz")
        with pytest.raises(RunFolderError, match="outside"):
            RunReader(run).table(1)
        (run / "events.jsonl").symlink_to("/etc/passwd")
        with pytest.raises(RunFolderError, match="outside"):
            RunReader(run)

    def test_a_run_without_steps_for_long_is_a_problem(self, tmp_path):
        assert "no step" in RunReader(write_run(tmp_path / "silent", ended=False)).silent(60)
        assert RunReader(write_run(tmp_path / "ended")).silent(60) is None

    def test_state_of_a_run_whose_process_is_gone(self, tmp_path):
        gone = subprocess.Popen(["true"])
        gone.wait()
        for name, pid, state in (("a", os.getpid(), "running"), ("b", gone.pid, "killed")):
            process = {"host": socket.gethostname(), "pid": pid, "argv": []}
            assert RunReader(write_run(tmp_path / name, ended=False, process=process)).summary()["state"] == state


def test_text_for_a_terminal_has_no_control_characters(tmp_path):
    alarm = {"step": 1, "time": 1.0, "kind": "alarm", "text": "entropy\x1b[2J\x9b1m\r\u202e collapsed"}
    run = write_run(tmp_path / "run", steps=5, name="mine\x07")
    write_lines(run / "events.jsonl", [alarm])
    reader = RunReader(run)
    reader.refresh()
    text = _text({"text": [], "run": reader.summary(), "problems": ["a\tb"]})
    assert "mine?: ended: finished, step 4\n" in text and "  alarm at step 1: entropy?[2J?1m?? collapsed\n" in text
    assert (
        "no group is running" in text
        and text.endswith("Problems\n  a?b")
        and re.search(r"^  loss -?[0-9.]+$", text, re.M)
    )


def test_terminal_is_redrawn_within_its_size(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    monkeypatch.setattr("sys.stdout", Terminal())
    monkeypatch.setattr("shutil.get_terminal_size", lambda: os.terminal_size((40, 10)))
    _redraw("\n".join(f"{n} {'x' * 100}" for n in range(30)))
    said = sys.stdout.getvalue()
    assert said.startswith("\x1b[H") and said.endswith("\x1b[J") and said.count("\n") == 9
    lines = [line.removesuffix("\x1b[K") for line in said.splitlines()]
    assert "Ctrl-C" in lines[0] and max(map(len, lines[1:-1])) == 40 and lines[-2] == "... 23 more lines"


class TestSamples:
    @pytest.fixture
    def run(self, tmp_path):
        return write_run(tmp_path / "run")

    def test_lines_of_a_step(self, run):
        lengths = [5, 2, 9, 7, 4]
        rewards, groups = [1.0, 1.0, 0.0, 0.5, 0.5], [2**62 + 1, 2**62 + 1, 7, 7, -1]
        arrays = write_samples(run, 3, lengths, rewards=rewards, groups=groups)
        arrays["versions"][5 + 2 + 8] = 9  # the last but two of row 2
        np.savez(run / "samples" / "step_00000003.npz", **arrays)
        found = select([RunReader(run).table(3)], Filter({}), "row", descending=False, offset=0, limit=9)
        assert (found["total"], found["all"], found["groups"], found["equal_groups"]) == (5, 5, 3, 1)
        for row, line in enumerate(found["rows"]):
            part = slice(*arrays["offsets"][row : row + 2])
            sampled = arrays["versions"][part][arrays["versions"][part] >= 0]
            apart = np.abs(arrays["log_probs"] - arrays["rollout_log_probs"])[part][arrays["loss_mask"][part] > 0]
            assert (line["tokens"], line["completion"], line["step"]) == (lengths[row], lengths[row] - 2, 3)
            assert line["oldest"] == (sampled.min() if len(sampled) else -1)
            assert line["newest"] == (sampled.max() if len(sampled) else -1)
            assert line["difference"] == (pytest.approx(apart.mean(), rel=1e-5) if len(apart) else None)
            assert line["group"] == (0, 0, 1, 1, -1)[row]  # numbers that a browser keeps
            assert line["equal"] == (row < 2) and line["finish"] == ("stop", "length")[row % 2]

    def test_sort_filter_and_pages(self, run):
        for step in (1, 2):
            write_samples(run, step, [4, 6, 8] * 40, seed=step, rewards=np.append(np.arange(119) / 119, np.nan))
        reader = RunReader(run)
        tables = [reader.table(step) for step in reader.sample_steps()]
        found = select(tables, Filter({"completion": (4, 6)}, "stop"), "reward", descending=True, offset=10, limit=20)
        expected = [(n / 119, step) for step in (1, 2) for n in range(119) if n % 3 and n % 2 == 0]
        expected.sort(key=lambda one: (-one[0], one[1]))
        assert [(line["reward"], line["step"]) for line in found["rows"]] == [
            (pytest.approx(reward), step) for reward, step in expected[10:30]
        ]
        last = select(tables, Filter({}), "reward", descending=True, offset=238, limit=9)["rows"]
        assert [line["reward"] for line in last] == [None, None]  # unknown rewards come last

    def test_empty_rows_and_steps(self, run):
        write_samples(run, 1, [])
        write_samples(run, 2, [3, 0, 4, 0])
        reader = RunReader(run)
        assert select([reader.table(1)], Filter({}), "reward", descending=False, offset=0, limit=9)["rows"] == []
        lines = select([reader.table(2)], Filter({}), "row", descending=False, offset=0, limit=9)["rows"]
        assert [(line["tokens"], line["newest"]) for line in lines] == [(3, 2), (0, -1), (4, 2), (0, -1)]

    @pytest.mark.parametrize("damage", ["offsets", "rewards", "versions", "not a zip", "pickle", "no texts"])
    def test_damaged_files_are_reported(self, run, damage):
        arrays = write_samples(run, 1, [3, 4])
        path = run / "samples" / "step_00000001.npz"
        if damage == "not a zip":
            path.write_bytes(b"PK\x03\x04 nothing")
        elif damage == "no texts":
            path.with_suffix(".json").write_text("{")
        elif damage == "pickle":
            np.savez(path, **arrays | {"rewards": np.array([{}, []], object)})
        else:
            np.savez(path, **arrays | {damage: arrays[damage][:-1] + 1})
        with pytest.raises(RunFolderError, match=r"cannot be read"):
            RunReader(run).table(1)

    def test_arrays_are_mapped_unless_they_are_compressed(self, tmp_path):
        wanted = {
            "a": np.arange(10, dtype=np.int32),
            "b": np.zeros((0, 3)),
            "c": np.float32(4),
            "d": np.ones((2, 3), order="F"),
        }
        for save in (np.savez, np.savez_compressed):
            save(tmp_path / "x.npz", **wanted)
            found = Arrays(tmp_path / "x.npz")
            assert set(found) == set(wanted)
            for name, array in wanted.items():
                np.testing.assert_array_equal(found[name], array)
            assert isinstance(found["a"], np.memmap) == (save is np.savez)

    def test_texts_of_tokens(self, run):
        about = json.loads((run / "run.json").read_text()) | {"vocabulary": {"file": "vocabulary.jsonl"}}
        (run / "run.json").write_text(json.dumps(about))
        write_lines(run / "vocabulary.jsonl", [{"id": 1, "text": "a"}])
        reader = RunReader(run)
        assert reader.pieces([1, 2]) == ["a", None]
        write_lines(run / "vocabulary.jsonl", [{"id": 2, "text": "<b>"}], "a")
        assert reader.pieces([2, 1]) == ["<b>", "a"]

    def test_the_update_of_a_version(self, run):
        write_lines(run / "events.jsonl", [update(1, 1), update(2, 2), update(2, 5, digest="again")])
        reader = RunReader(run)
        reader.refresh()
        assert reader.update_of(2)["digest"] == "again" and reader.update_of(3) is None


class TestTimeline:
    def test_a_time_in_a_large_file(self, tmp_path):
        run = write_run(tmp_path / "run")
        parts = [
            {"group": "g", "rank": rank, "method": "m", "start": n + rank / 10, "end": n + 0.5}
            for n in range(20_000)
            for rank in range(3)
        ]
        write_lines(run / "timeline.jsonl", parts)
        reader = RunReader(run)
        assert reader.timeline_span() == (0, 19_999.5)
        for begin, end in ((0, 3), (9_999.9, 10_010), (19_990, 30_000), (50_000, 60_000)):
            found, more = reader.timeline(begin, end)
            assert found == [one for one in parts if one["end"] >= begin and one["start"] <= end] and not more
        assert reader.timeline(0, 1e9)[1] is (sum(len(json.dumps(one)) + 1 for one in parts) > 8 * 2**20)

    def test_bars(self):
        parts = [{"group": None, "rank": None, "method": "train", "start": 0.0, "end": 4.0}]
        parts += [
            {"group": "g", "rank": 1, "method": "m", "start": n / 1000, "end": (n + 0.5) / 1000} for n in range(5000)
        ]
        parts += [
            {"group": "g", "rank": None, "method": "m", "start": 1, "end": 6, "failed": "X", "waits": {"queue": 2}}
        ]
        lanes, bars = bars_of([*parts, {"start": None}, {"start": 1, "end": "x"}], 0.0, 10.0, 100, 1000)
        assert [(lane["group"], lane["rank"]) for lane in lanes] == [("", None), ("g", None), ("g", 1)]
        assert [lane["busy"] for lane in lanes] == [
            pytest.approx(0.4),
            pytest.approx(0.5),
            pytest.approx(0.25, rel=1e-3),
        ]
        assert bars[0] == [0, 0.0, 4.0, "train", 1, 0.0, False] and bars[1] == [1, 1, 6, "m", 1, 2.0, True]
        assert sum(bar[4] for bar in bars if bar[0] == 2) == 5000 and len(bars) < 210
