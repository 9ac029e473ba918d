"""A short run of tests/chaos.py, which kills processes at random moments. `make chaos` is the long run."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

CHAOS = Path(__file__).resolve().parent.parent / "chaos.py"


@pytest.mark.alone
@pytest.mark.full("chaos: processes killed at random moments")
@pytest.mark.timeout(180)
def test_kills_at_random_moments():
    done = subprocess.run(
        [sys.executable, str(CHAOS), "--rounds", "8", "--seed", "5"],
        capture_output=True,
        text=True,
        timeout=170,
        env={**os.environ, "RAY_ADDRESS": "local"},
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert done.stdout.splitlines()[-1].startswith("all 8 rounds kept: told of a rank's death within")
