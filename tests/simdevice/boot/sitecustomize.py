"""On PYTHONPATH with SIMDEVICE=1, or npu: every Python process, Ray's workers too, has the simulated device."""

import os
import sys
from pathlib import Path

if os.environ.get("SIMDEVICE") in ("1", "npu"):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    import simdevice

    simdevice.hook()
