"""A short run of tests/chaos.py, which kills processes at random moments. `make chaos` is the long run."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

CHAOS = Path(__file__).resolve().parent.parent / "chaos.py"


def chaos(*options):
    """The last line that it prints."""
    done = subprocess.run(
        [sys.executable, str(CHAOS), *options],
        capture_output=True,
        text=True,
        timeout=170,
        env={**os.environ, "RAY_ADDRESS": "local"},
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout.splitlines()[-1]


@pytest.mark.alone
@pytest.mark.full("chaos: processes killed at random moments, many groups created and closed")
@pytest.mark.timeout(180)
def test_kills_at_random_moments():
    assert chaos("--rounds", "8", "--seed", "5").startswith("all 8 rounds kept: told of a rank's death within")


@pytest.mark.alone
@pytest.mark.full("chaos: processes killed at random moments, many groups created and closed")
@pytest.mark.timeout(180)
def test_creating_and_closing_groups_leaks_nothing():
    assert chaos("--churn", "10").startswith("10 groups made and closed")
