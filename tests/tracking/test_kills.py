"""Runs that are killed with SIGKILL at random moments, and resumed. Each is a fork of this process: the driver's own
part, without Ray."""

import contextlib
import multiprocessing
import os
import random
import signal
import time

import pytest
from run_batches import batch_of, check_clean, check_folder

from single_controller.view.run_files import EVENTS, METRICS, read_lines, read_run
from workers import RunLog

STEPS = 60
SAVE_EVERY = 4


def drive(folder, checkpoint, pause):
    """A driver's loop: continue from the checkpoint, and log."""
    first = int(checkpoint.read_text()) if checkpoint.exists() else 0
    with RunLog(run_dir=folder, record_rows=4, keep_steps=10) as log:
        for step in range(first, STEPS):
            with log.timed("train"):
                batch = log.mark(step, batch_of(step, rows=40, length=60))
            log.event("update", "an update", step, version=step)
            log.log(step, {"value": step**2}, batch)
            if step % SAVE_EVERY == 0:
                fresh = checkpoint.with_suffix(".new")
                fresh.write_text(str(step + 1))
                os.replace(fresh, checkpoint)
            time.sleep(pause)


MANY = pytest.mark.full("kills of a driver while it records"), pytest.mark.timeout(300)


@pytest.mark.parametrize(("kills", "seed"), [(3, 0), pytest.param(50, 1, marks=MANY)])
def test_killed_runs_leave_whole_folders(tmp_path, kills, seed):
    folder, checkpoint = tmp_path / "run", tmp_path / "checkpoint"
    draw, context = random.Random(seed), multiprocessing.get_context("fork")
    batch_of(0)  # so that the forks need not import torch
    metrics, landed, most = folder / METRICS, 0, 0
    while landed < kills:
        size = metrics.stat().st_size if metrics.exists() else 0
        driver = context.Process(target=drive, args=(folder, checkpoint, 0.001))
        driver.start()
        while landed % 4 < 3 and driver.is_alive() and (not metrics.exists() or metrics.stat().st_size == size):
            time.sleep(0.002)  # others are killed while they open the folder
        driver.join(draw.uniform(0.0, 0.1))
        alive = driver.exitcode is None
        with contextlib.suppress(ProcessLookupError):
            os.kill(driver.pid, signal.SIGKILL)
        driver.join()
        landed += alive
        if (folder / "run.json").exists():
            most = max(most, len(check_folder(folder)))
        if not alive:  # the run has ended before: begin another one
            check_clean(folder, STEPS)
            checkpoint.unlink()
    driver = context.Process(target=drive, args=(folder, checkpoint, 0.0))
    driver.start()
    driver.join(60)
    assert driver.exitcode == 0
    check_clean(folder, STEPS)
    run = read_run(folder)
    assert run["ended"]["reason"] == "finished" and run["resumed"]
    # A kill may fall between a change of run.json and its event, which is written next.
    steps = [line["step"] for line in read_lines(folder / EVENTS) if line["kind"] == "resume"]
    noted = iter(one["step"] for one in run["resumed"])
    assert all(step in noted for step in steps) and len(run["resumed"]) - len(steps) <= kills
    assert most > 0
