"""Runs the tests of `on_device` in a process that has a simulated CUDA device."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path.insert(0, str(HERE))

from build import build  # noqa: E402

pytestmark = [
    pytest.mark.skipif(shutil.which("g++") is None, reason="the simulated device needs a C++ compiler"),
    pytest.mark.skipif(os.environ.get("SIMDEVICE") == "1", reason="these run the tests below on it anyway"),
]


@pytest.mark.timeout(600)
def test_on_the_simulated_device():
    run_there("tests/simdevice/on_device")


@pytest.mark.timeout(900)
@pytest.mark.full("tests of device memory, engines and batches, again on the simulated device")
def test_other_tests_on_the_simulated_device():
    """Those of ``make test-device`` that are elsewhere."""
    run_there(*(HERE / "files.txt").read_text().split()[1:])


def run_there(*files):
    build()
    environment = os.environ | {
        "SIMDEVICE": "1",
        "PYTHONPATH": os.pathsep.join([str(HERE / "boot"), str(ROOT), os.environ.get("PYTHONPATH", "")]),
    }
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *files]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=850)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
