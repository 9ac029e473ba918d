"""Whether the tests' groups run on devices: ``make test-device`` simulates them, and ``make test-gpu`` sets TEST_GPUS,
the number that the machine has. Otherwise they run on the CPU."""

import os

SIMULATED = os.environ.get("SIMDEVICE") == "1"
DEVICES = int(os.environ.get("SIMDEVICE_DEVICES", "16")) if SIMULATED else int(os.environ.get("TEST_GPUS", "0"))
"""The devices that the tests' Ray has."""

ON_DEVICE = DEVICES > 0
