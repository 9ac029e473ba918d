"""The demo on the simulated device by another name and with another resource of Ray: an NPU, as an extension of torch
has it. `tests/groups/test_other_accelerator.py` has the names alone."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import demo_runs
import pytest

HERE = Path(__file__).resolve().parent
NPUS = {
    "SIMDEVICE": "npu",
    "RAY_OVERRIDE_RESOURCES": '{"NPU": 3}',
    "PYTHONPATH": os.pathsep.join([str(HERE / "boot"), str(HERE.parents[1])]),
}

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.skipif(shutil.which("g++") is None, reason="the simulated device needs a C++ compiler"),
    pytest.mark.full("the demo on the simulated device by another name, for which it is compiled again"),
]


def test_demo_on_npus_equals_the_cpu(tmp_path, monkeypatch):
    """FSDP on two devices and an engine on a third. Weights go through a process group of the devices' backend."""
    given = ("num_rollout=5", "update_weights_transport=group")
    for name in ("cpu", "npu", "device"):
        (tmp_path / name).mkdir()
    on_cpu = demo_runs.run(tmp_path / "cpu", *given)
    # Without `boot` on the path: the device cannot be loaded where it is compiled.
    subprocess.run(
        [sys.executable, str(HERE / "build.py")], env=os.environ | {"SIMDEVICE": "npu"}, check=True, capture_output=True
    )
    plain = demo_runs.environment()
    monkeypatch.setattr(demo_runs, "environment", lambda: plain | NPUS)
    assert demo_runs.run(tmp_path / "npu", *given) == pytest.approx(on_cpu, abs=1e-3)
    with pytest.raises(RuntimeError, match="torch shares no memory of a 'npu' device between processes"):
        demo_runs.run(tmp_path / "device", "num_rollout=5", "update_weights_transport=device", *demo_runs.COLOCATED)
