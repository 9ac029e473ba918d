"""A run's metrics and its folder. TensorBoard's files are read back with TensorBoard's own reader."""

import errno
import json
import logging
import math
import os
import shutil
import signal
import sys
import time
import weakref
from contextlib import suppress
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf
from run_batches import batch_of, check_clean, check_folder
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from waits import wait_collected, wait_until

from single_controller import ClassWithInitArgs, Dispatch, LocalWorkerGroup, Worker, WorkerDiedError, colocate, register
from single_controller.call.stats import KEPT_CALLS, CallRecord, CallStats
from single_controller.view.run_files import (
    EVENTS,
    METRICS,
    TIMELINE,
    VOCABULARY,
    RunFolderError,
    pid_namespace,
    read_lines,
    read_run,
    sample_files,
    sample_steps,
)
from workers import RunLog, read_args
from workers.tracking.run_folder import RunFolder, RunFolderInUse
from workers.tracking.run_log import _new_folder
from workers.tracking.timeline import CallLines


def lines(folder, name):
    return list(read_lines(folder / name))


def test_metrics_are_written_immediately(tmp_path):
    with RunLog(tmp_path / "log", run_dir=tmp_path / "run") as log:
        for step in range(3):
            with log.timed("rollout"):
                time.sleep(0.02)
            with log.timed("train"):
                time.sleep(0.01)
            with log.timed("rollout"):
                time.sleep(0.02)
            noted = log.log(step, {"reward": step / 2, "tokens": 100})
            events = EventAccumulator(str(tmp_path / "log"))
            events.Reload()
            assert [event.value for event in events.Scalars("reward")] == [k / 2 for k in range(step + 1)]
            assert [line["metrics"]["reward"] for line in lines(tmp_path / "run", METRICS)] == [
                k / 2 for k in range(step + 1)
            ]
        assert 0.04 <= noted["seconds/rollout"] < 0.5 and 0.01 <= noted["seconds/train"] < 0.5
        assert noted["tokens_per_second"] == pytest.approx(100 / (noted["seconds/rollout"] + noted["seconds/train"]))
    assert {event.step for event in events.Scalars("seconds/train")} == {0, 1, 2}
    parts = lines(tmp_path / "run", TIMELINE)
    assert [(part["method"], part["step"]) for part in parts[:3]] == [("rollout", 0), ("train", 0), ("rollout", 0)]
    assert sum(part["end"] - part["start"] for part in parts if part["method"] == "rollout") == pytest.approx(
        sum(log.column("seconds/rollout")), abs=0.01
    )


def test_nothing_is_written_without_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with RunLog(run_dir=None) as log:
        assert log.log(4, {"reward": 1}) == {"reward": 1.0}
        log.log(2, {"reward": 3, "kl": 2})
        log.event("mine", "nothing")
    assert (log.column("reward"), log.column("kl"), log.column("no such")) == ([3.0, 1.0], [2.0], [])
    assert list(tmp_path.iterdir()) == []


def test_a_folder_is_the_default(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with RunLog() as log:
        log.log(0, {"reward": 1})
    (folder,) = (tmp_path / "runs").iterdir()
    assert folder == tmp_path / log.run_dir and lines(folder, METRICS)[0]["metrics"] == {"reward": 1.0}


def test_seconds_are_recorded_even_if_the_block_raises():
    log = RunLog(run_dir=None)
    with pytest.raises(ZeroDivisionError), log.timed("train"):
        raise ZeroDivisionError
    assert "seconds/train" in log.log(0, {})


def test_what_the_run_is(tmp_path):
    args = {"hf_config": {"model_type": "llama"}, "seed": 7, "lr": 1e-4, "user": {"mine": 1}}
    with pytest.raises(KeyError), RunLog.from_args(args, run_dir=tmp_path / "abc"):
        run = read_run(tmp_path / "abc")
        raise KeyError("oops")
    assert run["name"] == "abc" and run["config"]["lr"] == 1e-4 and run["config"]["user"] == {"mine": 1}
    assert run["seeds"] == {"seed": 7} and run["versions"]["torch"] and run["ended"] is None
    assert run["process"]["pid"] == os.getpid() and run["process"]["pid_namespace"] == pid_namespace() is not None
    after = read_run(tmp_path / "abc")
    assert after["ended"]["reason"] == "KeyError: 'oops'" and after["id"] == run["id"]
    assert [line["kind"] for line in lines(tmp_path / "abc", EVENTS)] == ["start", "end"]
    for code, reason in ((None, "finished"), (0, "finished"), (2, "SystemExit: 2")):
        with pytest.raises(SystemExit), RunLog(run_dir=tmp_path / "abc"):
            sys.exit(code)
        assert read_run(tmp_path / "abc")["ended"]["reason"] == reason


def test_samples_hold_what_the_batch_has(tmp_path):
    class Words:
        def decode(self, ids):
            return " ".join(f"<{token}>" for token in ids)

    batch = batch_of(3)
    batch["rewards/format"] = batch["rewards"] / 2
    batch["weight_fingerprints"] = batch["weight_versions"].where(batch["weight_versions"] < 0, -2)
    with RunLog(run_dir=tmp_path / "run", tokenizer=Words()) as log:
        marked = log.mark(3, batch)
        assert "record_rows" not in batch.keys()  # noqa: SIM118
        log.log(3, {}, marked)
    data, text = sample_files(tmp_path / "run", 3)
    rows = json.loads(text.read_bytes())["rows"]
    arrays = dict(np.load(data))
    assert arrays["numbers"].tolist() == list(range(6)) == [row["number"] for row in rows]
    for row in range(6):
        begin, end = arrays["offsets"][row : row + 2]
        real = batch["attention_mask"][row].bool()
        for name, column in (("tokens", "input_ids"), ("loss_mask", "loss_mask"), ("versions", "weight_versions"),
                             ("rollout_log_probs", "rollout_log_probs")):  # fmt: skip
            assert arrays[name][begin:end].tolist() == batch[column][row][real].tolist()
        assert arrays["prompt_lengths"][row] == 2 + row % 2
        assert rows[row]["reward_parts"] == {"format": float(batch["rewards"][row]) / 2}
        assert rows[row]["prompt"] == " ".join(["<1>"] * (2 + row % 2))
        assert rows[row]["completion"] == " ".join([f"<{300 + row}>"] * (5 + row % 3))
        assert rows[row]["fingerprints"] == {"4": "fffffffffffffffe"}
    assert arrays["rewards"].tolist() == batch["rewards"].tolist()
    assert arrays["groups"].tolist() == batch["group_ids"].tolist()
    assert arrays["row/truncated"].tolist() == batch["truncated"].tolist()
    for step in (4, 5):  # a run that resumes writes no text again
        with RunLog(run_dir=tmp_path / "run", tokenizer=Words()) as log:
            log.log(step, {}, log.mark(step, batch))
    words = [(line["id"], line["text"]) for line in lines(tmp_path / "run", VOCABULARY)]
    assert words == [(token, f"<{token}>") for token in (1, *range(300, 306))]


def actor_of(group):
    """What a log asks of a train group."""
    said = {"role": "actor", "with_ref": False, "weight_version": 4, "last_checkpoint": None}
    workers = SimpleNamespace(world_size=1, dp_size=1)
    calls = {"async_train": None, "ready_workers": lambda _: workers, "recorded_rows": lambda _: {}}
    return SimpleNamespace(**said, **calls, last_sync=lambda: None, worker_group=group, actor_cls=Sleeper)


def test_checkpoint_and_parts_after_the_last_step_are_recorded(tmp_path):
    with LocalWorkerGroup(1, ClassWithInitArgs(Sleeper)) as group, RunLog(run_dir=tmp_path) as log:
        actor = actor_of(group)
        log.watch(actor)
        log.log(0, {})
        with log.timed("save"):
            actor.last_checkpoint = "checkpoints/rollout_0000000"
    (saved,) = [line for line in lines(tmp_path, EVENTS) if line["kind"] == "checkpoint"]
    assert saved["folder"] == actor.last_checkpoint
    assert [part["method"] for part in lines(tmp_path, TIMELINE) if part["group"] is None] == ["save"]


def test_rows_have_the_weight_version_of_before_the_training_and_the_run_its_ranks(tmp_path):
    with LocalWorkerGroup(1, ClassWithInitArgs(Sleeper)) as group, RunLog(run_dir=tmp_path) as log:
        actor = actor_of(group)
        log.watch(actor)
        batch = log.mark(0, batch_of(0))
        actor.weight_version = 5  # the script updates the weights before it logs the step
        actor.ready_workers("watch").world_size = 3  # it has grown
        log.log(0, {}, batch)
    assert json.loads(sample_files(tmp_path, 0)[1].read_bytes())["weight_version"] == 4
    assert read_run(tmp_path)["ranks"]["world_size"] == 3


def test_of_a_large_batch_the_worst_and_the_best_groups_are_recorded(tmp_path):
    batch = batch_of(0, rows=40)
    batch["rewards"][17], batch["rewards"][30] = -9.0, 9.0
    with RunLog(run_dir=tmp_path, record_rows=6) as log:
        recorded = log.mark(0, batch)["record_rows"]
        again = log.mark(0, batch)["record_rows"]
        other = log.mark(1, batch)["record_rows"]
    assert recorded.tolist() == again.tolist() != other.tolist()
    kept = [row for row, number in enumerate(recorded.tolist()) if number >= 0]
    assert all(recorded[row] == row for row in kept) and len(kept) == 6
    assert {16, 17, 30, 31} < set(kept) and len({row // 2 for row in kept}) == 3  # whole groups
    assert sum(number >= 0 for number in other.tolist()) == 6


def test_a_repeated_step_replaces_it_and_those_after_it(tmp_path):
    with RunLog(run_dir=tmp_path, loggers=["tensorboard"]) as log:
        for step in (0, 1, 2, 3, 4, 2, 3):
            log.log(step, {"value": step**2}, log.mark(step, batch_of(step)))
        assert sorted(log.steps) == [0, 1, 2, 3]
    check_clean(tmp_path, 4)
    assert [line["step"] for line in lines(tmp_path, EVENTS) if line["kind"] == "rewind"] == [2]
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [event.step for event in events.Scalars("value")] == [0, 1, 2, 3]


def test_a_run_that_loads_nothing_replaces_another_one(tmp_path):
    args, runs = {"load": None, "seed": 1}, []
    for seed in (1, 2):
        with RunLog(run_dir=tmp_path, args={**args, "seed": seed}, loggers=["tensorboard"]) as log:
            for step in range(6 // seed):
                log.log(step, {"value": step**2}, log.mark(step, batch_of(step)))
        runs.append(read_run(tmp_path))
    first, second = runs
    assert (second["seeds"], second["resumed"]) == ({"seed": 2}, []) and second["id"] != first["id"]
    check_clean(tmp_path, 3)
    assert [line["kind"] for line in lines(tmp_path, EVENTS)] == ["start", "end"]
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [event.step for event in events.Scalars("value")] == [0, 1, 2]
    with RunLog(run_dir=tmp_path, args={**args, "load": "checkpoints"}) as log:
        log.log(3, {"value": 9}, log.mark(3, batch_of(3)))
    assert read_run(tmp_path)["id"] == second["id"] and len(read_run(tmp_path)["resumed"]) == 1
    check_clean(tmp_path, 4)


def test_steps_out_of_order_are_kept_when_a_run_resumes(tmp_path):
    with RunLog(run_dir=tmp_path) as log:
        for step in (0, 4, 2, 6):
            log.log(step, {"value": step})
    with RunLog(run_dir=tmp_path) as log:
        log.log(3, {"value": 3})
    assert [line["step"] for line in lines(tmp_path, METRICS)] == [0, 2, 3]
    with RunLog(run_dir=tmp_path) as log:
        for step in (4, 5, 2):  # it goes back to a step of the process before
            log.log(step, {"value": step})
        assert log.column("value") == [2.0]
    assert [line["step"] for line in lines(tmp_path, METRICS)] == [0, 2]


def test_old_samples_are_dropped(tmp_path):
    with RunLog(run_dir=tmp_path / "steps", keep_steps=3) as log:
        for step in range(6):
            log.log(step, {"value": step**2}, log.mark(step, batch_of(step)))
    assert sample_steps(tmp_path / "steps") == [3, 4, 5]
    check_clean(tmp_path / "steps", 6)
    with RunLog(run_dir=tmp_path / "bytes", keep_bytes=20_000) as log:
        for step in range(12):
            log.log(step, {"value": step**2}, log.mark(step, batch_of(step)))
    kept = list((tmp_path / "bytes" / "samples").iterdir())
    assert 5_000 < sum(file.stat().st_size for file in kept) <= 20_000 and sample_steps(tmp_path / "bytes")[-1] == 11


def test_two_processes_cannot_write_one_folder(tmp_path):
    with RunLog(run_dir=tmp_path), pytest.raises(RunFolderInUse, match="by a log of this one that was not closed"):
        RunLog(run_dir=tmp_path)
    RunLog(run_dir=tmp_path).close()


def test_another_format_is_refused(tmp_path):
    (tmp_path / "run.json").write_text('{"format": 99}')
    with pytest.raises(RunFolderError, match="its format is not 1"):
        RunLog(run_dir=tmp_path)
    assert json.loads((tmp_path / "run.json").read_text()) == {"format": 99}


def test_a_full_disk_does_not_end_the_training(tmp_path, caplog):
    with RunLog(run_dir=tmp_path) as log:
        log.log(0, {"value": 0.0})
        real = log._folder._metrics._file
        log._folder._metrics._file = os.open("/dev/full", os.O_WRONLY)
        with caplog.at_level(logging.ERROR):
            log.log(1, {"value": 1.0})
            log.log(2, {"value": 2.0})
        os.close(log._folder._metrics._file)
        log._folder._metrics._file = real
        log.log(3, {"value": 3.0})
    assert [record.levelname for record in caplog.records] == ["ERROR", "WARNING"]  # once, and when it is over
    assert "cannot be written" in caplog.text and log.column("value") == [0.0, 1.0, 2.0, 3.0]
    assert [line["step"] for line in lines(tmp_path, METRICS)] == [0, 3]
    assert [line["kind"] for line in lines(tmp_path, EVENTS)] == ["start", "end"]  # step 1 was not repeated


def test_a_disk_that_is_too_full_for_samples_gets_the_metrics(tmp_path, caplog, monkeypatch):
    def full(self, data):
        with open(self, "wb"):
            raise OSError(errno.ENOSPC, "No space left on device", str(self))

    with RunLog(run_dir=tmp_path) as log:
        log.log(0, {"value": 0}, log.mark(0, batch_of(0)))
        with monkeypatch.context() as patch:
            patch.setattr("pathlib.Path.write_bytes", full)
            for step in (1, 2, 3):
                log.log(step, {"value": step**2}, log.mark(step, batch_of(step)))
                log.event("mine", "a line that fits")
                log._tick()
            patch.setattr(log, "_of_actor", lambda: [{"kind": "checkpoint", "text": "c", "folder": "c"}])
            with log.timed("train"):
                pass
            log.log(4, {"value": 16}, log.mark(4, batch_of(4)))
            assert check_folder(tmp_path) == [0, 1, 2, 3, 4] and sample_steps(tmp_path) == [0]
            assert {file.name for file in (tmp_path / "samples").iterdir()} == {
                "step_00000000.json", "step_00000000.npz"
            }  # fmt: skip
        log.log(5, {"value": 25}, log.mark(5, batch_of(5)))
    assert [record.levelname for record in caplog.records] == ["ERROR", "WARNING"]
    assert [line["step"] for line in lines(tmp_path, EVENTS) if line["kind"] == "checkpoint"] == [4]
    assert [line["step"] for line in lines(tmp_path, TIMELINE) if line["method"] == "train"] == [4]
    check_clean(tmp_path, 6)


def test_a_disk_that_is_full_at_the_end_does_not_keep_the_folder(tmp_path, caplog):
    log = RunLog(run_dir=tmp_path)
    log.log(0, {"value": 0})
    log._folder._events._file = os.open("/dev/full", os.O_WRONLY)
    log.close()
    assert "cannot be written" in caplog.text
    with RunLog(run_dir=tmp_path) as log:
        log.log(1, {"value": 1})
    assert check_folder(tmp_path) == [0, 1]


def test_a_disk_that_is_full_when_a_run_resumes(tmp_path, monkeypatch):
    with RunLog(run_dir=tmp_path) as log:
        for step in range(4):
            log.log(step, {"value": step**2})
    with RunLog(run_dir=tmp_path) as log:
        with monkeypatch.context() as patch:
            patch.setattr("workers.tracking.run_folder._write", Mock(side_effect=OSError(errno.ENOSPC, "full")))
            log.log(2, {"value": 4})
        log.log(2, {"value": 4})
    assert check_folder(tmp_path) == [0, 1, 2] and [one["step"] for one in read_run(tmp_path)["resumed"]] == [2]


def test_a_disk_that_is_too_full_to_halve_the_events_gets_each_once(tmp_path, monkeypatch):
    with RunFolder(tmp_path) as folder:
        folder._events._most = 100
        with monkeypatch.context() as patch:
            patch.setattr("workers.tracking.run_folder._write", Mock(side_effect=OSError(errno.ENOSPC, "full")))
            for number in range(4):
                folder.event("mine", f"{number}")
        assert [line["text"] for line in lines(tmp_path, EVENTS)][1:] == list("0123")
        folder.event("mine", "4")
        assert [line["text"] for line in lines(tmp_path, EVENTS)] in (list("34"), list("234"))


def test_a_folder_that_is_deleted_does_not_end_the_training(tmp_path, caplog):
    with RunLog(run_dir=tmp_path / "run", loggers=["json"]) as log:
        log.log(0, {"value": 0}, log.mark(0, batch_of(0)))
        shutil.rmtree(tmp_path / "run")
        for step in (1, 2):
            log.log(step, {"value": step})  # without samples: its open file takes it, and it would be lost silently
            log._tick()
        log.log(3, {"value": 9}, log.mark(3, batch_of(3)))
    said = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert len(said) == 1 and "the run's folder was deleted" in said[0] and log.column("value") == [0, 1, 2, 9]


def test_a_folder_that_cannot_be_written_says_what_to_do(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match=r"cannot be written .*; pass another run_dir, or None for no folder.*file/run"):
        RunLog(run_dir=tmp_path / "file" / "run")


def test_a_script_may_change_its_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "elsewhere").mkdir()
    with RunLog("events", run_dir="run", loggers=["json"]) as log:
        for step in (0, 1, 2, 1):
            log.log(step, {"value": step**2}, log.mark(step, batch_of(step)))
            monkeypatch.chdir(tmp_path / "elsewhere")
    check_clean(tmp_path / "run", 2)
    events = EventAccumulator(str(tmp_path / "events"))
    events.Reload()
    assert [event.step for event in events.Scalars("value")] == [0, 1]
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_runs_of_one_second_have_their_own_folders(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(time, "strftime", lambda format: "runs/now")
    with RunLog() as first, RunLog() as second:
        first.log(0, {"value": 0})
        second.log(0, {"value": 0})
    with RunLog() as third:
        assert len({first.run_dir, second.run_dir, third.run_dir}) == 3
    assert _new_folder() != _new_folder()  # as on two hosts, before either has written anything
    with pytest.raises(ValueError, match="keep_steps=0"):
        RunLog(keep_steps=0)  # which leaves no empty folder
    assert len([*(tmp_path / "runs").iterdir()]) == 5


def test_files_of_others_are_left_alone(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / ".letter.new").write_text("dear")
    RunLog(run_dir=tmp_path).close()
    assert (tmp_path / "mine" / ".letter.new").read_text() == "dear"


def test_a_fork_writes_nothing_and_does_not_hold_the_folder(tmp_path):
    log = RunLog(run_dir=tmp_path, loggers=["json", "tensorboard"])
    log.log(0, {"value": 0})
    ended = os.fork()
    if not ended:
        try:
            with log:
                log.log(1, {"value": 7})
                log.event("mine", "of the fork")
        finally:
            os._exit(0)
    assert os.waitpid(ended, 0)[1] == 0
    lives = os.fork()
    if not lives:
        time.sleep(60)
        os._exit(0)
    try:
        assert read_run(tmp_path)["ended"] is None
        log.log(1, {"value": 1})
        log.close()
        with RunLog(run_dir=tmp_path):  # although the fork of before is there
            pass
    finally:
        os.kill(lives, signal.SIGKILL)
        os.waitpid(lives, 0)
    assert check_folder(tmp_path) == [0, 1]
    assert [line["kind"] for line in lines(tmp_path, EVENTS)] == ["start", "end", "end"]
    assert [line["value"] for line in lines(tmp_path / "json", METRICS)] == [0, 1]


def test_a_closed_folder_is_free_although_a_fork_has_not_left_it(tmp_path):
    folder = RunFolder(tmp_path)
    fork = os.fork()
    if not fork:  # as a fork of a log is before its first step
        time.sleep(60)
        os._exit(0)
    try:
        folder.close()
        RunFolder(tmp_path).close()
    finally:
        os.kill(fork, signal.SIGKILL)
        os.waitpid(fork, 0)


def test_a_log_that_nobody_closes_leaves_no_file_open(tmp_path):
    """Although a group that it watches is open."""

    def open_files():
        found = 0
        for number in os.listdir("/proc/self/fd"):
            with suppress(FileNotFoundError):  # that of this list
                found += str(tmp_path) in os.readlink(f"/proc/self/fd/{number}")
        return found

    with LocalWorkerGroup(1, ClassWithInitArgs(Sleeper)) as group:
        log = RunLog(run_dir=tmp_path, loggers=["json"])
        log.watch(group)
        log.log(0, {"value": 0})
        assert open_files() == 6
        del log
        wait_collected(lambda: not open_files())


def test_secrets_are_not_recorded(tmp_path, monkeypatch):
    secrets = ["hunter2", "of-the-environment", "hf_" + "Ab1" * 10, "12-3-key", "password1", "Zx81-bearer"]
    secrets.append("hf_oauth_eyJhb." + "Ab1" * 10)
    monkeypatch.setenv("SOME_API_KEY", secrets[1])
    monkeypatch.setattr(sys, "argv", ["train.py", "--hf-token", "12-3-key", "wandb.api_key=hunter2", "--lr=1e-4"])
    args = {
        "load": f"s3://{secrets[1]}/x",
        "hub": {"hf_token": "hunter2", "password": 17123456, "max_tokens": 5, "pad_token": "<pad>"},
        "reward": {"url": "https://me:password1@host/score?token=hunter2&n=1"},
        "headers": ["Authorization: Bearer Zx81-bearer", "Authorization: Basic hunter2", "Basic aHVudGVyMg=="],
        "env": {"variables": [f"HF_TOKEN={secrets[2]}", "OMP_NUM_THREADS=1"]},
        "note": f"with {secrets[2]} or {secrets[-1]}",
        "judge": SimpleNamespace(api_key="hunter2", model="m"),
        "proxies": {"https://me:password1@proxy/"},
    }
    with pytest.raises(ValueError), RunLog(run_dir=tmp_path, args=args, loggers=["tensorboard"]) as log:
        log.event("mine", f"{secrets[1]} was refused", url="https://me:hunter2@host/", hf_token="password1")
        raise ValueError("https://me:hunter2@host/ does not answer")
    written = "".join(file.read_text() for file in tmp_path.iterdir() if file.is_file())
    assert not [secret for secret in [*secrets, "17123456", "aHVudGVyMg"] if secret in written]
    run = read_run(tmp_path)
    assert run["process"]["argv"] == ["train.py", "--hf-token", "***", "wandb.api_key=***", "--lr=1e-4"]
    assert run["config"]["hub"] == {"hf_token": "***", "password": "***", "max_tokens": 5, "pad_token": "<pad>"}
    assert run["config"]["reward"]["url"] == "https://me:***@host/score?token=***&n=1"
    assert run["config"]["env"]["variables"] == ["HF_TOKEN=***", "OMP_NUM_THREADS=1"]
    assert run["config"]["judge"] == "namespace(api_key='***', model='m')"
    assert args["hub"]["hf_token"] == "hunter2"  # the caller's is as it was


def test_a_configuration_without_secrets_is_recorded_as_it_is(tmp_path):
    plain = {"save": "checkpoints/hf_llama3_8b_instruct_math", "user": {"system": "You know basic arithmetic."}}
    args = read_args({"hf_config": {"model_type": "llama", "eos_token_id": 2, "pad_token": "<pad>"}, **plain})
    with RunLog(run_dir=tmp_path, args=args):
        assert read_run(tmp_path)["config"] == OmegaConf.to_container(args)


@pytest.mark.parametrize("value", ["0.5", None, torch.zeros(2), [1.0], 1j], ids=repr)
def test_metric_that_is_no_number(tmp_path, value):
    with RunLog(run_dir=tmp_path) as log:
        with pytest.raises(TypeError, match=r"RunLog.log: metric 'accuracy' is .*; pass a number"):
            log.log(0, {"value": 1, "accuracy": value})
        assert log.steps == {} == dict(lines(tmp_path, METRICS))
        with pytest.raises(TypeError, match=r"step is 1\.5; pass a whole number"):
            log.log(1.5, {})


def test_numbers_of_other_libraries(tmp_path):
    metrics = {"a": np.float32(0.5), "b": torch.tensor(2), "c": torch.tensor([3.0], dtype=torch.bfloat16), "d": True}
    with RunLog(run_dir=tmp_path) as log:
        noted = log.log(np.int64(7), metrics | {"e": np.float64("nan"), "f": np.array(-math.inf)})
        log.log(torch.tensor(8), {})
    assert [(line["step"], *line["metrics"]) for line in lines(tmp_path, METRICS)] == [(7, *"abcdef"), (8,)]
    assert all(type(value) is float for value in noted.values())
    (first, _) = lines(tmp_path, METRICS)
    assert list(first["metrics"].values())[:4] == [0.5, 2, 3, 1] and math.isnan(noted["e"]) and noted["f"] == -math.inf


def test_samples_that_are_larger_than_the_limit_are_left_out(tmp_path, caplog):
    with RunLog(run_dir=tmp_path, keep_bytes=50_000) as log:
        for step, length in enumerate((5, 3000, 3000, 5)):
            log.log(step, {"value": step**2}, log.mark(step, batch_of(step, length=length)))
    assert sample_steps(tmp_path) == [0, 3] and len(lines(tmp_path, METRICS)) == 4
    (event,) = [line for line in lines(tmp_path, EVENTS) if line["kind"] == "samples"]
    assert event["step"] == 1 and event["bytes"] > 50_000
    assert [record.levelname for record in caplog.records] == ["WARNING"]


def test_a_tokenizer_that_fails_does_not_end_the_training(tmp_path, caplog):
    class Words:
        def decode(self, ids):
            raise OverflowError("no such token")

    with RunLog(run_dir=tmp_path, tokenizer=Words()) as log:
        for step in range(3):
            log.log(step, {"value": step**2}, log.mark(step, batch_of(step)))
    assert check_folder(tmp_path) == [0, 1, 2]
    assert [record.levelname for record in caplog.records] == ["ERROR"] and "no such token" in caplog.text


class Sleeper(Worker):
    @register(Dispatch.ONE_TO_ALL)
    def nap(self, seconds):
        time.sleep(seconds)

    @register(Dispatch.ONE_TO_ALL)
    def fail(self):
        raise ValueError("on purpose")

    @register(Dispatch.ONE_TO_ALL)
    def end(self, rank):
        if self.rank == rank:
            sys.exit(3)


def test_timeline_has_the_calls_of_watched_groups(tmp_path, monkeypatch):
    monkeypatch.setattr("workers.tracking.timeline.SHORT_SECONDS", 0.15)
    with RunLog(run_dir=tmp_path) as log, LocalWorkerGroup(2, ClassWithInitArgs(Sleeper)) as group:
        log.watch(group)
        began = time.time()
        group.nap(0.1)  # by each rank, one after the other
        group.nap(0.0)  # too short to be recorded
        with pytest.raises(ValueError):
            group.fail()  # short, but it failed
        ended = time.time()
        log.log(0, {})
        log.log(1, {})
        assert read_run(tmp_path)["groups"] == [group.name]
    found = lines(tmp_path, TIMELINE)
    assert [(part["method"], part["rank"]) for part in found] == [("nap", None), ("nap", 0), ("nap", 1), ("fail", None)]
    for part in found:
        assert part["group"] == group.name and began - 0.1 <= part["start"] <= part["end"] <= ended + 0.1
    assert all(0.09 < part["end"] - part["start"] < 1.0 for part in found[1:3])
    assert found[0]["waits"]["method"] >= 0.09 and "queue" in found[1]["waits"]
    assert found[3]["failed"] == "WorkerError" and "failed" not in found[0]


def test_watching_a_group_keeps_what_the_script_records_of_its_ranks(tmp_path):
    with RunLog(run_dir=tmp_path) as log, LocalWorkerGroup(1, ClassWithInitArgs(Sleeper)) as group:
        group.record_ranks(200)
        for _ in range(110):
            group.nap(0.0)
        log.watch(group)
        assert [len(call.ranks) for call in group.stats().calls] == [1] * 110
        group.record_ranks(2)
        assert [len(call.ranks) for call in group.stats().calls] == [0] * 108 + [1] * 2


def test_call_of_a_role_is_in_the_timeline_once(tmp_path):
    made = ClassWithInitArgs(Sleeper)
    with RunLog(run_dir=tmp_path) as log, LocalWorkerGroup(1, colocate({"actor": made, "critic": made})) as group:
        log.watch(group, group.critic)  # as a rollout manager has it
        assert len(log._watchers) == 1
        for step in range(3):
            group.actor.nap(0.01)
            group.critic.nap(0.01)
            log.log(step, {})
    found = [
        (part["group"], part["method"], part["call"]) for part in lines(tmp_path, TIMELINE) if part["rank"] is None
    ]
    assert sorted(found, key=lambda call: call[2]) == [
        (group.name, f"{'critic' if number % 2 else 'actor'}.nap", number) for number in range(6)
    ]
    assert read_run(tmp_path)["groups"] == [group.name]


def test_groups_of_one_name_are_all_recorded(tmp_path):
    made = ClassWithInitArgs(Sleeper)
    with RunLog(run_dir=tmp_path) as log, LocalWorkerGroup(1, made) as one, LocalWorkerGroup(1, made) as two:
        train_groups = [SimpleNamespace(async_train=None, role="critic", worker_group=group) for group in (one, two)]
        log.watch(*train_groups)
        for step in range(3):
            one.nap(0.01)
            two.nap(0.02)
            log.log(step, {})
        assert len(log._watchers) == 2
        one.nap(0.04)  # nobody has looked since
        one.close()
        with LocalWorkerGroup(1, made) as train_groups[0].worker_group:  # as after a restart
            log.log(3, {})
            train_groups[0].worker_group.nap(0.03)
            log.log(4, {})
    naps = [part for part in lines(tmp_path, TIMELINE) if part["rank"] is None]
    assert [part["call"] for part in naps] == [0, 0, 1, 1, 2, 2, 3, 4] and naps[-1]["end"] - naps[-1]["start"] >= 0.03
    assert read_run(tmp_path)["groups"] == [one.name] == [two.name]
    assert [line["group"] for line in lines(tmp_path, EVENTS) if line["kind"] == "replace"] == [one.name]


def test_group_that_nobody_else_has_is_not_kept(tmp_path):
    with RunLog(run_dir=tmp_path) as log:
        group = LocalWorkerGroup(1, ClassWithInitArgs(Sleeper))
        log.watch(group)
        group.nap(0.01)
        left = weakref.ref(group)
        del group
        wait_collected(lambda: left() is None)
    assert {part["method"] for part in lines(tmp_path, TIMELINE)} == {"nap"}


def test_long_call_that_many_short_ones_overtake_is_in_the_timeline(monkeypatch):
    monkeypatch.setattr("workers.tracking.timeline.SHORT_SECONDS", 0.15)
    stats = CallStats()
    lines_of = CallLines(SimpleNamespace(name="g", _stats_by_role=lambda: {None: stats}))
    long = CallRecord("long", 100.0, 100.0)
    stats.calls.append(long)
    assert lines_of.new() == []
    for number in range(2 * KEPT_CALLS):
        stats.calls.append(CallRecord("short", 101.0 + number, settled=101.0 + number))
        stats.trim()
        if not number % 100:
            assert lines_of.new() == []
    long.settled = 5000.0
    (line,) = lines_of.new()
    assert (line["method"], line["call"], line["end"]) == ("long", 0, 5000.0)
    for ended in (5002.9, 5004.0):  # a stream polls, and its workers load weights
        stats.calls.append(CallRecord("exchange", 5001.0, settled=ended))
    assert [line["end"] for line in lines_of.new()] == [5004.0]
    assert lines_of.new() == [] and lines_of.count == 2 * KEPT_CALLS + 3


def test_deaths_and_replacements_are_events(tmp_path):
    with RunLog(run_dir=tmp_path) as log, LocalWorkerGroup(2, ClassWithInitArgs(Sleeper)) as group:
        log.watch(group)
        log.log(0, {})
        with pytest.raises(WorkerDiedError):
            group.end(1)
        wait_until(lambda: any(line["kind"] == "death" for line in lines(tmp_path, EVENTS)))  # before the next step
        group.restart()
        log.log(1, {})
    death, replaced = [line for line in lines(tmp_path, EVENTS) if line["kind"] in ("death", "replace")]
    assert (death["kind"], death["group"], death["rank"], death["step"]) == ("death", group.name, 1, None)
    assert "rank 1" in death["text"] and death["error"] == "WorkerDiedError"
    assert (replaced["kind"], replaced["group"]) == ("replace", group.name)


def test_alarms_are_in_the_log_and_in_the_events(tmp_path, caplog):
    with RunLog(run_dir=tmp_path) as log, caplog.at_level(logging.WARNING):
        for step in range(4):
            log.log(step, {"grad_norm": math.inf if step == 2 else 1.0})
    (alarm,) = [line for line in lines(tmp_path, EVENTS) if line["kind"] == "alarm"]
    assert (alarm["alarm"], alarm["step"]) == ("grad_norm", 2) and "learning rate" in alarm["advice"]
    assert [record.getMessage() for record in caplog.records] == [
        f"step 2: {alarm['text']}. Look at: {alarm['advice']}"
    ]


def test_wrong_arguments(tmp_path):
    with pytest.raises(ValueError, match="metric_names='vrl': expected one of own, verl, slime"):
        RunLog(run_dir=tmp_path, metric_names="vrl")
    with pytest.raises(ValueError, match="loggers has 'tensorbord': expected some of tensorboard, wandb"):
        RunLog(run_dir=tmp_path, loggers=["tensorbord"])
    with pytest.raises(TypeError, match="pass a list of names"):
        RunLog(run_dir=tmp_path, loggers="wandb")
    with pytest.raises(ValueError, match="'json', whose files go into the run's folder, but run_dir is None"):
        RunLog(run_dir=None, loggers=["console", "json"])
    assert list(tmp_path.iterdir()) == []


def test_what_a_kill_leaves_is_cleared(tmp_path):
    """A line of which only the beginning was written, and a file that was not renamed yet."""
    with RunLog(run_dir=tmp_path) as log:
        for step in range(3):
            log.log(step, {"value": step**2}, log.mark(step, batch_of(step)))
    for file in tmp_path.glob("*.jsonl"):
        with open(file, "ab") as torn:
            torn.write(b'{"step": 3, "time": 17')
    (tmp_path / "samples" / ".step_00000009.npz.new").write_bytes(b"PK")
    (tmp_path / ".timeline.jsonl.new").write_bytes(b"{")  # the later half of the file
    with RunLog(run_dir=tmp_path) as log:
        log.log(3, {"value": 9}, log.mark(3, batch_of(3)))
    check_clean(tmp_path, 4)


def test_a_step_is_there_as_a_whole_or_not_at_all(tmp_path, monkeypatch):
    """As if the process were killed at each of the renames of a step."""

    class Killed(BaseException):
        pass

    real, left = os.replace, []  # how many more renames succeed

    def rename(source, target):
        if not left:
            raise Killed
        left.pop()
        real(source, target)

    with RunLog(run_dir=tmp_path) as log:
        log.log(0, {"value": 0}, log.mark(0, batch_of(0)))
        monkeypatch.setattr(os, "replace", rename)
        for renamed in (0, 1):
            left[:] = [None] * renamed
            with pytest.raises(Killed):
                log.log(1, {"value": 1}, log.mark(1, batch_of(1)))
            assert check_folder(tmp_path) == [0] and sample_steps(tmp_path) == [0]
        monkeypatch.undo()
        log.log(1, {"value": 1}, log.mark(1, batch_of(1)))
    assert check_folder(tmp_path) == [0, 1] == sample_steps(tmp_path)
