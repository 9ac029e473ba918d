"""A short run of tests/chaos.py, which kills processes at random moments. The long one is a command of its own."""

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


@pytest.mark.timeout(180)
def test_kills_at_random_moments():
    assert chaos("--rounds", "8", "--seed", "5").startswith("all 8 rounds kept: told of a rank's death within")


@pytest.mark.timeout(180)
def test_groups_made_and_closed_one_after_the_other_leave_everything_flat():
    assert chaos("--churn", "10").startswith("10 groups made and closed")
