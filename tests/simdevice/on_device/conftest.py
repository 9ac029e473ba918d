"""Tests that need a device: `test_simdevice` and ``make test-device`` run them on the simulated one, ``make test-gpu``
on the GPUs of a machine, which show no faults and count nothing."""

from types import SimpleNamespace

import devices

collect_ignore_glob = [] if devices.SIMULATED else ["test_device.py"] if devices.ON_DEVICE else ["test_*.py"]

if devices.ON_DEVICE and not devices.SIMULATED:
    import torch

    torch._simdevice = SimpleNamespace(faults=list, counts=lambda reset: {}, opened=int)
