"""RunReader: run folders as docs/runs.md describes them, while they are written, cut, and damaged."""

import io
import json
import math
import os
import re
import socket
import subprocess
import sys
import time

import numpy as np
import pytest
from synthetic_run import STARTED, update, write_lines, write_run, write_samples

from single_controller.__main__ import _redraw, _text
from single_controller.view.run_files import RunFolderError
from single_controller.view.run_reader import Arrays, RunReader
from single_controller.view.sample_table import Filter, branches, select
from single_controller.view.server import finite
from single_controller.view.timeline_bars import bars_of


@pytest.fixture
def run(tmp_path):
    """The folder of a run that has logged nothing."""
    return write_run(tmp_path / "run")


def refreshed(run):
    reader = RunReader(run)
    reader.refresh()
    return reader


def series(reader, name, *, by_time=False, first=-math.inf, last=math.inf, points=100):
    return reader.metrics.series(name, by_time=by_time, first=first, last=last, points=points)


class TestMetrics:
    def test_follows_a_file_without_its_torn_last_line(self, tmp_path):
        run = write_run(tmp_path / "run", steps=3)
        reader = refreshed(run)
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
        reader = refreshed(run)
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
        reader = refreshed(run)
        values = [json.loads(line)["metrics"]["loss"] for line in (run / "metrics.jsonl").read_text().splitlines()]
        found = series(reader, "loss", points=10)
        parts = np.array(values).reshape(10, 100)
        np.testing.assert_allclose(found["mean"], parts.mean(1))
        assert found["min"] == parts.min(1).tolist() and found["max"] == parts.max(1).tolist()
        assert found["x"] == list(range(99, 1000, 100))
        assert series(reader, "loss", first=10, last=12)["mean"] == values[10:13]
        assert series(reader, "loss", by_time=True, first=STARTED + 998)["x"] == [STARTED + 998, STARTED + 999]
        assert series(reader, "unknown") == {"x": [], "mean": [], "min": [], "max": []}

    def test_numbers_that_are_not_finite(self, run):
        lines = [{"step": n, "time": n, "metrics": {"a": value}} for n, value in enumerate([1.0, math.inf, math.nan])]
        write_lines(run / "metrics.jsonl", [*lines, {"step": "x", "metrics": {}}, {"step": 3, "metrics": [1]}])
        reader = refreshed(run)
        assert series(reader, "a")["mean"] == [1, math.inf] and math.isnan(reader.metrics.latest()["a"])
        assert finite([series(reader, "a")["mean"], reader.metrics.latest()]) == [[1, None], {"a": None}]
        write_lines(run / "metrics.jsonl", [{"step": 5, "time": 5, "metrics": {"a": 2.0}}], "a")
        reader.refresh()
        assert reader.metrics.latest() == {"a": 2.0}

    def test_values_that_are_no_metrics(self, run):
        texts = ["1" * 5000, json.dumps({"step": 1, "metrics": {"a": 10**400, "b": True, "c": "x", "d": 4.0}})]
        texts += [json.dumps({"step": step, "metrics": {"a": 1.0}}) for step in (2**70, True, 1.5, None)]
        (run / "metrics.jsonl").write_text("\n".join(texts) + "\n" + "[" * 100_000 + "\n")
        reader = refreshed(run)
        assert list(reader.metrics.steps) == [1]
        assert finite(reader.metrics.latest()) == {"a": None, "b": 1.0, "c": None, "d": 4.0}

    def test_a_name_for_each_step_takes_little_memory(self, run):
        write_lines(run / "metrics.jsonl", [{"step": n, "time": n, "metrics": {f"m{n}": 1.0}} for n in range(3000)])
        write_lines(run / "metrics.jsonl", [{"step": 5, "time": 5, "metrics": {"m2000": 7.0}}], "a")
        reader = refreshed(run)
        columns = reader.metrics.columns
        assert sum(map(len, columns.values())) < 6000
        assert series(reader, "m2000")["mean"] == [7.0, 1.0] and series(reader, "m2000")["x"] == [5, 2000]
        assert series(reader, "m2999")["x"] == [2999]

    @pytest.mark.parametrize("chunk", [1, 7, 100, 10_000])
    def test_lines_of_any_length_are_read_in_pieces(self, run, monkeypatch, chunk):
        path = run / "metrics.jsonl"
        lines = [json.dumps({"step": n, "time": n, "metrics": {"a": float(n)}}) for n in range(4)]
        monkeypatch.setattr("single_controller.view.run_reader.CHUNK_BYTES", chunk)
        monkeypatch.setattr("single_controller.view.run_reader.MAX_LINE_BYTES", 200)
        path.write_text("\n".join([lines[0], "x" * 1000, lines[1], "y" * 190, lines[2] + "\n"]) + "z" * 500)
        reader = refreshed(run)
        reader.refresh()
        assert list(reader.metrics.steps) == [0, 1, 2]
        with open(path, "a") as file:  # the end of the long line
            file.write("z\n" + lines[3] + "\n")
        reader.refresh()
        assert list(reader.metrics.steps) == [0, 1, 2, 3]

    def test_a_clock_that_was_set_back(self, run):
        times = [5.0, 6.0, 1.0, math.inf, math.nan, 2.0]
        write_lines(run / "metrics.jsonl", [{"step": n, "time": at, "metrics": {"a": n}} for n, at in enumerate(times)])
        reader = refreshed(run)
        found = series(reader, "a", by_time=True)
        assert found["x"] == [1, 2, 5, 6] and found["mean"] == [2, 5, 0, 1]


class TestFolder:
    def test_what_is_no_run_is_refused(self, tmp_path):
        with pytest.raises(RunFolderError, match=r"run\.json"):
            RunReader(tmp_path)
        with pytest.raises(RunFolderError, match="format"):
            RunReader(write_run(tmp_path / "run", format=99))

    def test_links_that_lead_out_of_the_folder_are_refused(self, run, tmp_path):
        secret = write_run(tmp_path / "secret", steps=3)
        write_samples(secret, 1, [4])
        stem = run / "samples" / "step_00000001"
        stem.with_suffix(".npz").symlink_to(secret / "samples" / "step_00000001.npz")
        with pytest.raises(RunFolderError, match="outside"):
            RunReader(run).table(1)
        (run / "events.jsonl").symlink_to("/etc/passwd")
        with pytest.raises(RunFolderError, match="outside"):
            RunReader(run)

    def test_clocks_of_two_hosts(self, tmp_path):
        """The run's clock is an hour behind or ahead of this one: its file says when it logged a step."""
        for hours in (-1, 1):
            at = time.time() + 3600 * hours
            process = {"host": "elsewhere", "pid": 1, "argv": []}
            run = write_run(tmp_path / f"{hours}", ended=False, started=at, process=process)
            write_lines(run / "metrics.jsonl", [{"step": 1, "time": at, "metrics": {}}])
            reader = refreshed(run)
            assert reader.silent(60) is None and reader.summary()["age"] < 60
            os.utime(run / "metrics.jsonl", (time.time() - 100,) * 2)
            assert reader.silent(60) is None  # it has resumed: run.json is new
            os.utime(run / "run.json", (time.time() - 100,) * 2)
            assert re.search("no step for 10. s", reader.silent(60))

    def test_a_run_that_has_resumed_is_not_silent(self, tmp_path):
        process = {"host": socket.gethostname(), "pid": os.getpid(), "argv": []}
        for started, silent in ((time.time() - 3000, True), (time.time() - 5, False)):
            about = {"started": time.time() - 7200, "process": process | {"started": started}}
            run = write_run(tmp_path / f"{silent}", ended=False, **about)
            write_lines(run / "metrics.jsonl", [{"step": 1, "time": time.time() - 3600, "metrics": {}}])
            os.utime(run / "metrics.jsonl", (time.time() - 3600,) * 2)
            reader = refreshed(run)
            assert (reader.silent(60) is not None) is silent

    def test_what_is_of_another_type_is_as_if_it_were_absent(self, tmp_path):
        wrong = {"groups": [1, "group a", None], "resumed": {"time": 1}, "process": [1], "git": "x"}
        reader = RunReader(write_run(tmp_path / "run", ended=False, **wrong | {"started": "noon", "ray_address": 7}))
        assert reader.about["groups"] == ["group a"] and reader.about["resumed"] == []
        assert not {"process", "git", "started", "ray_address"} & reader.about.keys()
        assert reader.summary()["state"] == "running" and reader.silent(1) is not None

    def test_a_folder_that_goes_away_and_comes_back(self, tmp_path):
        run = write_run(tmp_path / "run", steps=3)
        reader = refreshed(run)
        os.rename(run, tmp_path / "away")
        reader.refresh()
        assert "cannot be read" in reader.summary()["state"] and list(reader.metrics.steps) == [0, 1, 2]
        os.rename(tmp_path / "away", run)
        reader.refresh()
        assert reader.summary()["state"] == "ended: finished" and reader.silent(60) is None

    @pytest.mark.parametrize("name", ["run.json", "metrics.jsonl", "events.jsonl", "timeline.jsonl"])
    def test_what_is_no_regular_file_is_not_opened(self, tmp_path, name):
        run = write_run(tmp_path / "run", steps=3)
        reader = RunReader(run)
        (run / name).unlink(missing_ok=True)
        os.mkfifo(run / name)  # opening it for reading would wait for a writer
        if name == "timeline.jsonl":
            with pytest.raises(RunFolderError, match="regular"):
                reader.timeline_span()
        else:
            reader.refresh()
            assert "not a regular file" in reader.summary()["state"]
        (run / name).unlink()
        (run / name).symlink_to("/etc/passwd")
        reader.refresh()
        assert name == "timeline.jsonl" or "outside" in reader.summary()["state"]
        (run / name).unlink()
        (run / name).mkdir()
        opened = len(os.listdir("/proc/self/fd"))
        for _ in range(20):
            reader.refresh()
        assert len(os.listdir("/proc/self/fd")) < opened + 20

    def test_deeply_nested_json_is_no_run(self, run):
        (run / "run.json").write_text("[" * 200_000)
        with pytest.raises(RunFolderError, match="cannot be read"):
            RunReader(run)

    def test_only_the_latest_events_are_kept(self, run, monkeypatch):
        monkeypatch.setattr("single_controller.view.run_reader.MAX_EVENTS", 10)
        reader = RunReader(run)
        for begin in (0, 35):
            write_lines(run / "events.jsonl", [update(n, n) for n in range(begin, begin + 35)], "a")
            reader.refresh()
            assert [event["version"] for event in reader.events] == list(range(begin + 25, begin + 35))

    def test_state_of_a_run_whose_process_is_gone(self, tmp_path, monkeypatch):
        gone = subprocess.Popen(["true"])
        gone.wait()
        exists = os.path.exists  # another user may not see the processes in /proc
        monkeypatch.setattr(os.path, "exists", lambda path: not str(path).startswith("/proc") and exists(path))
        for name, pid, namespace, state in (
            ("a", os.getpid(), None, "running"),
            ("b", gone.pid, os.stat("/proc/self/ns/pid").st_ino, "killed"),
            ("c", gone.pid, 7, "running"),  # in a container that has the name of its host
            ("d", "?", None, "running"),
        ):
            process = {"host": socket.gethostname(), "pid": pid, "pid_namespace": namespace, "argv": []}
            assert RunReader(write_run(tmp_path / name, ended=False, process=process)).summary()["state"] == state


def test_text_for_a_terminal_has_no_control_characters(tmp_path):
    alarm = {"step": 1, "time": 1.0, "kind": "alarm", "text": "entropy\x1b[2J\x9b1m\r\u202e collapsed"}
    run = write_run(tmp_path / "run", steps=5, name="mine\x07")
    write_lines(run / "events.jsonl", [alarm])
    reader = refreshed(run)
    text = _text({"text": [], "run": reader.summary(), "problems": ["a\tb"]})
    assert "mine?: ended: finished, step 4\n" in text and "  alarm at step 1: entropy?[2J?1m?? collapsed\n" in text
    assert (
        "no group is running" in text
        and text.endswith("Problems\n  a?b")
        and re.search(r"^  loss -?[0-9.]+$", text, re.M)
    )
    seen = {"text": ["0 of a thousand ranks"], "run": None, "problems": ["rank 999 is dead"]}
    assert _text(seen, problems_first=True).startswith("Problems\n  rank 999 is dead\n\n0 of")


def test_terminal_is_redrawn_within_its_size(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    monkeypatch.setattr("sys.stdout", Terminal())
    monkeypatch.setattr("shutil.get_terminal_size", lambda *_, **__: os.terminal_size((40, 10)))
    _redraw("\n".join(f"{n} {'x' * 100}" for n in range(30)))
    said = sys.stdout.getvalue()
    assert said.startswith("\x1b[H") and said.endswith("\x1b[J") and said.count("\n") == 9
    lines = [line.removesuffix("\x1b[K") for line in said.splitlines()]
    assert "Ctrl-C" in lines[0] and max(map(len, lines[1:-1])) == 40 and lines[-2] == "... 23 more lines"


class TestSamples:
    def test_the_last_token_before_empty_rows_counts(self, run):
        arrays = write_samples(run, 1, [3, 5, 0])
        arrays["versions"][-1] = 9
        np.savez(run / "samples" / "step_00000001.npz", **arrays)
        tables = [RunReader(run).table(1)]
        assert tables[0].columns["newest"].tolist() == [1, 9, -1]
        for version, rows in ((1, [0, 1]), (5, []), (9, [1])):  # it has no token of a version in between
            found = select(tables, Filter({}, version=version), "row", descending=False, offset=0, limit=9)
            assert [line["row"] for line in found["rows"]] == rows

    def test_lines_of_a_step(self, run):
        lengths = [5, 2, 9, 7, 4]
        rewards, groups = [1.0, 1.0, 0.0, 0.5, 0.5], [2**62 + 1, 2**62 + 1, 7, 7, -1]
        arrays = write_samples(run, 3, lengths, rewards=rewards, groups=groups)
        arrays["versions"][5 + 2 + 8] = 9  # the last but two of row 2
        np.savez(run / "samples" / "step_00000003.npz", **arrays)
        found = select([RunReader(run).table(3)], Filter({}), "row", descending=False, offset=0, limit=9)
        assert (found["total"], found["all"], found["groups"], found["equal_groups"]) == (5, 5, 3, 1)
        for row, line in enumerate(finite(found["rows"])):
            part = slice(*arrays["offsets"][row : row + 2])
            sampled = arrays["versions"][part][arrays["versions"][part] >= 0]
            apart = np.abs(arrays["log_probs"] - arrays["rollout_log_probs"])[part][arrays["loss_mask"][part] > 0]
            assert (line["tokens"], line["completion"], line["step"]) == (lengths[row], lengths[row] - 2, 3)
            assert line["oldest"] == (sampled.min() if len(sampled) else -1)
            assert line["newest"] == (sampled.max() if len(sampled) else -1)
            assert line["difference"] == (pytest.approx(apart.mean(), rel=1e-5) if len(apart) else None)
            assert line["group"] == (0, 0, 1, 1, -1)[row]  # numbers that a browser keeps
            assert line["equal"] == (row < 2) and line["finish"] == ("stop", "length")[row % 2]

    def test_rows_without_a_group_are_not_equal(self, run):
        arrays = write_samples(run, 1, [4, 5], rewards=[1.0, 1.0])
        del arrays["groups"]
        np.savez(run / "samples" / "step_00000001.npz", **arrays)
        assert not RunReader(run).table(1).columns["equal"].any()

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
        assert [line["reward"] for line in finite(last)] == [None, None]  # unknown rewards come last

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

    def test_arrays_and_their_rows(self, tmp_path):
        wanted = {
            "a": np.arange(10, dtype=np.int32),
            "b": np.zeros((0, 3)),
            "c": np.float32(4),
            "d": np.ones((2, 3), order="F") * [1, 2, 3],
            "e": np.arange(24).reshape(4, 3, 2),
        }
        np.savez(tmp_path / "x.npz", **wanted)
        with Arrays(open(tmp_path / "x.npz", "rb")) as found:
            assert set(found) == set(wanted)
            for name, array in wanted.items():
                np.testing.assert_array_equal(found[name], array)
                assert found.shape(name) == np.shape(array)
            for name, start, stop in (("a", 3, 7), ("d", 1, 2), ("e", 1, 4), ("e", 2, 2), ("b", 0, 0)):
                np.testing.assert_array_equal(found.rows(name, start, stop), wanted[name][start:stop])
            for name, start, stop in (("a", 3, 11), ("a", -1, 2), ("c", 0, 1)):
                with pytest.raises(ValueError, match="has no rows"):
                    found.rows(name, start, stop)

    @pytest.mark.parametrize("how", ["deleted", "replaced", "cut", "shape"])
    def test_files_that_change_while_they_are_read(self, run, how):
        """In a process of its own, a file that is mapped into memory and cut would end the interpreter."""
        write_samples(run, 1, [2000] * 50)
        path = run / "samples" / "step_00000001.npz"
        with RunReader(run).arrays(1) as arrays:
            assert arrays.rows("tokens", 0, 5).shape == (5,)
            if how == "deleted":
                path.unlink()
            elif how == "replaced":
                os.replace(write_samples(run, 2, [3]) and run / "samples" / "step_00000002.npz", path)
            elif how == "cut":
                os.truncate(path, 5000)
            if how in ("cut", "shape"):
                if how == "shape":  # a header that promises more than there is
                    text = path.read_bytes().replace(b"(100000,)", b"(900000,)")
                    path.write_bytes(text)
                with pytest.raises((ValueError, RunFolderError)):
                    np.asarray(arrays["tokens"]) if how == "cut" else RunReader(run).table(1)
            else:
                assert len(arrays["tokens"]) == 100_000

    def test_arrays_that_no_run_writes(self, run):
        arrays = write_samples(run, 1, [9])
        path = run / "samples" / "step_00000001.npz"
        np.savez_compressed(path, **arrays)
        with pytest.raises(RunFolderError, match="is compressed"):
            RunReader(run).table(1)
        for shape, told in ((b"(-9,), }", "is cut"), (b"(9,(, } ", "cannot be read")):
            np.savez(path, **arrays)
            path.write_bytes(path.read_bytes().replace(b"(9,), } ", shape))
            with pytest.raises(RunFolderError, match=told):
                RunReader(run).table(1)

    def test_tables_of_deleted_steps_are_forgotten(self, run):
        for step in range(5):
            write_samples(run, step, [3])
        (run / "samples" / "step_\u00b2.npz").write_bytes(b"")
        (run / "samples" / "step_7.npz").write_bytes(b"")
        reader = RunReader(run)
        for step in reader.sample_steps():
            reader.table(step)
        for step in range(4):
            (run / "samples" / f"step_{step:08d}.npz").unlink()
        assert reader.sample_steps() == [4] and list(reader._tables) == [4]

    def test_the_tree_of_a_session(self):
        """Two rows part in the middle of a turn, which is shown whole; another one has left them before."""
        rows = {3: [1, 2, 3, 4, 5, 6], 4: [1, 2, 3, 4, 7, 8], 7: [1, 2, 9], 8: [1, 2]}
        nodes = branches({row: np.array(tokens) for row, tokens in rows.items()}, {3: [0, 3], 4: [0, 3], 7: [0, 2]})
        assert [(n["parent"], n["start"], n["end"], n["rows"], n["ends"]) for n in nodes] == [
            (None, 0, 2, [3, 4, 7, 8], [8]),
            (0, 2, 3, [3, 4], []),
            (0, 2, 3, [7], [7]),
            (1, 3, 6, [3], [3]),
            (1, 3, 6, [4], [4]),
        ]
        apart = branches({0: np.array([1, 2]), 1: np.array([3]), 2: np.array([3])}, {})
        assert [(n["parent"], n["ends"]) for n in apart] == [(None, [0]), (None, [1, 2])] and branches({}, {}) == []

    def test_texts_of_tokens(self, tmp_path):
        run = write_run(tmp_path / "run", vocabulary=["", "a"])
        reader = RunReader(run)
        assert reader.pieces([1, 2]) == ["a", None]
        write_lines(run / "vocabulary.jsonl", [{"id": 2, "text": "<b>"}], "a")
        assert reader.pieces([2, 1]) == ["<b>", "a"]

    def test_the_update_of_a_version(self, run):
        write_lines(run / "events.jsonl", [update(1, 1), update(2, 2), update(2, 5, digest="again")])
        reader = refreshed(run)
        assert reader.update_of(2)["digest"] == "again" and reader.update_of(3) is None


class TestTimeline:
    def test_a_time_in_a_large_file(self, run):
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

    def test_parts_that_are_written_at_the_end_of_their_step(self, run):
        """The script's are, long after they have ended."""
        parts = []
        for step in range(12):
            at = 300.0 * step
            for call in range(12):
                begin = at + 25 * call
                one = {"group": "g", "method": "m", "call": 12 * step + call, "start": begin, "end": begin + 24}
                ranks = [{"rank": rank, "waits": {"queue": 0.001, "open": 0.0}} for rank in (None, *range(200))]
                parts += [one | rank for rank in ranks]
            for method, begin, end in (("rollout", 0, 60), ("train", 60, 298), ("sync", 298, 299.9)):
                parts.append({"group": None, "rank": None, "method": method, "start": at + begin, "end": at + end})
        write_lines(run / "timeline.jsonl", parts)
        reader = RunReader(run)
        for begin in (300 * step + later for step in (0, 4, 8, 11) for later in (61, 141, 221)):
            found, more = reader.timeline(begin, begin + 60)
            assert found == [one for one in parts if one["end"] >= begin and one["start"] <= begin + 60], begin
            assert not more

    def test_clocks_of_ranks_do_not_mislead_the_search(self, run):
        """Rank 0's clock is two hours ahead, rank 1's two hours behind; the driver's lines are those to find."""
        parts = []
        for n in range(8000):
            for rank, shift in ((0, 7200), (1, -7200)):
                parts.append({"group": "g", "rank": rank, "method": "m", "start": n + shift, "end": n + 0.5 + shift})
            parts.append({"group": "g", "rank": None, "method": "m", "start": n, "end": n + 0.6})
        write_lines(run / "timeline.jsonl", [*parts, {"method": "m", "start": 1, "end": math.inf}])
        reader = RunReader(run)
        assert reader.timeline_span() == (0, 7999.6)
        for begin in (0, 3000, 7990):
            found = [one for one in reader.timeline(begin, begin + 5)[0] if one.get("rank", 0) is None]
            assert found == [
                one for one in parts if one["rank"] is None and begin <= one["end"] and one["start"] <= begin + 5
            ]

    def test_times_that_are_no_numbers(self):
        wrong = [
            {"start": start, "end": end} for start in (0, math.nan, -math.inf, 10**400) for end in (math.inf, None)
        ]
        wrong.append({"method": "m", "start": 1, "end": 2, "rank": True, "waits": {"queue": "x"}})
        lanes, bars = bars_of(wrong, 0.0, 10.0, 100, 1000)
        assert len(lanes) == len(bars) == 1

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
