"""Runs tests/rollout/nothing_lost.py, which kills asynchronous training runs at random moments and resumes them."""

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent / "nothing_lost.py"


@pytest.mark.alone
@pytest.mark.full("chaos: processes killed at random moments, many groups created and closed")
@pytest.mark.timeout(2500)
def test_killed_runs_train_each_prompt_once():
    command = [sys.executable, str(SCRIPT), "--runs", "50", "--seed", "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=2400)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-3000:]
    assert done.stdout.splitlines()[-1].startswith("50 of 50 runs trained each prompt exactly once")
