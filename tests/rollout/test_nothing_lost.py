"""Runs of tests/rollout/nothing_lost.py, which kills asynchronous training runs at random moments."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent / "nothing_lost.py"


def killed(runs, seed, seconds):
    """The last line that the script prints."""
    command = [sys.executable, str(SCRIPT), "--runs", str(runs), "--seed", str(seed)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, env={**os.environ})
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-3000:]
    return done.stdout.splitlines()[-1]


@pytest.mark.timeout(200)
def test_killed_run_trains_each_prompt_once():
    assert killed(1, 3, 180).startswith("1 of 1 runs trained each prompt exactly once")


@pytest.mark.alone
@pytest.mark.full("chaos: processes killed at random moments, many groups created and closed")
@pytest.mark.timeout(3600)
def test_fifty_killed_runs_train_each_prompt_once():
    assert killed(50, 1, 3500).startswith("50 of 50 runs trained each prompt exactly once")
