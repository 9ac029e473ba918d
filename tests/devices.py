"""Whether the tests' groups run on devices: ``make test-device`` simulates them, and ``make test-gpu`` sets TEST_GPUS,
the number that the machine has. Otherwise they run on the CPU."""

import os
from pathlib import Path

import pytest

SIMULATED = os.environ.get("SIMDEVICE") == "1"
DEVICES = int(os.environ.get("SIMDEVICE_DEVICES", "16")) if SIMULATED else int(os.environ.get("TEST_GPUS", "0"))
"""The devices that the tests' Ray has."""

ON_DEVICE = DEVICES > 0


def need(count):
    """Skip the test on a machine that has devices, but fewer."""
    if 0 < DEVICES < count:
        pytest.skip(f"needs {count} devices, and this machine has {DEVICES}")


def simulated_faults():
    """What simulated devices have found so far, in all processes of this run: see `simdevice/simdevice.py`."""
    file = Path(os.environ["SIMDEVICE_SESSION"], "faults")
    return file.read_text().splitlines() if file.exists() else []
