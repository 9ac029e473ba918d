"""On PYTHONPATH with SIMDEVICE=1: every Python process, Ray's workers too, has the simulated device."""

import os
import sys
from pathlib import Path

if os.environ.get("SIMDEVICE") == "1":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    import simdevice

    simdevice.hook()
