"""Tests that need the simulated device: `test_simdevice` and ``make test-device`` run them with it."""

import os

collect_ignore_glob = [] if os.environ.get("SIMDEVICE") == "1" else ["test_*.py"]
