"""The names of accelerators: in one table, which agrees with torch and Ray, and nowhere else in the library."""

import ast
import re

import pytest
import torch
from import_graph import ROOT, library_files
from ray._private.accelerators import (
    AMDGPUAcceleratorManager,
    AppleGPUAcceleratorManager,
    IntelGPUAcceleratorManager,
    NPUAcceleratorManager,
    NvidiaGPUAcceleratorManager,
)
from torch.distributed import Backend

from workers.device import ACCELERATORS, DeviceError, kind

NAMED = re.compile(
    r"cuda|nccl(?!ient)|rocm|hccl|xccl|ascend|oneapi|ze_aff|habana|(?<![a-z])(hip|[nx]pu|mps)(?![a-z])", re.I
)

MAY_NAME = {
    "workers/device.py": "decides",
    "single_controller/ray/rank/devices.py": "has the environment of a process; it may not import workers",
    "single_controller/verl.py": "has verl's names",
    "single_controller/call/worker/worker.py": "takes an argument of verl's",
    "workers/megatron/": "calls megatron, which itself names CUDA",
}


def test_devices_are_named_in_one_module():
    """Docstrings, comments, and messages, which have spaces, may give an example."""
    found = {
        f"{file.relative_to(ROOT)}:{line}: {name}"
        for file in library_files()
        if not str(file.relative_to(ROOT)).startswith(tuple(MAY_NAME)) and NAMED.search(file.read_text())
        for line, name in identifiers(file)
        if NAMED.search(name)
    }
    assert found == set()


def identifiers(file):
    """The names and the strings without spaces of a file."""
    for node in ast.walk(ast.parse(file.read_text())):
        for field in ("id", "attr", "name", "arg", "value", "module"):
            name = getattr(node, field, None)
            if isinstance(name, str) and " " not in name:
                yield getattr(node, "lineno", 0), name


RAY = {
    "cuda": NvidiaGPUAcceleratorManager,
    "rocm": AMDGPUAcceleratorManager,
    "xpu": IntelGPUAcceleratorManager,
    "npu": NPUAcceleratorManager,
    "mps": AppleGPUAcceleratorManager,
}


@pytest.mark.parametrize("name", ACCELERATORS)
def test_table_agrees_with_ray_and_torch(name, monkeypatch):
    monkeypatch.delenv("ROCR_VISIBLE_DEVICES", raising=False)
    names, ray = ACCELERATORS[name], RAY[name]
    assert names.resource == ray.get_resource_name()
    assert next(iter(names.visible), None) == ray.get_visible_accelerator_ids_env_var()
    default = Backend.default_device_backend_map
    if name in ("cuda", "xpu"):
        assert names.backend == default[name]
    elif name == "mps":  # torch's default takes no tensors on it
        assert names.backend is None and name not in Backend.backend_capability[default[name]]


def test_unknown_accelerator_is_an_error(monkeypatch):
    """Not the CPU without a word."""
    monkeypatch.setattr("torch.accelerator.current_accelerator", lambda check_available=False: torch.device("hpu"))
    with pytest.raises(DeviceError, match=r"type 'hpu'.*ACCELERATORS"):
        kind()


def test_accelerator_without_collectives_is_not_used(monkeypatch):
    monkeypatch.setattr("torch.accelerator.current_accelerator", lambda check_available=False: torch.device("mps"))
    assert kind() == "cpu"
