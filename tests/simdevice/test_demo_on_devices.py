"""The demo on simulated CUDA devices: with both backends, colocated and not, and by each transport."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import demo_runs
import pytest
from reference import small_llama

HERE = Path(__file__).resolve().parent
GPUS = {
    "SIMDEVICE": "1",
    "RAY_OVERRIDE_RESOURCES": '{"GPU": 3}',
    "PYTHONPATH": os.pathsep.join([str(HERE / "boot"), str(HERE.parents[1])]),
}
WAYS = {
    "fsdp": ("update_weights_transport=group",),
    "fsdp-store": ("update_weights_transport=store", "fsdp_cpu_offload=true"),
    "fsdp-disk": ("update_weights_transport=disk",),
    "fsdp-colocated": ("update_weights_transport=device", *demo_runs.COLOCATED),
    "megatron": (*demo_runs.WAYS["megatron"], "update_weights_transport=group"),
    "megatron-colocated": (*demo_runs.WAYS["megatron-colocated"], "update_weights_transport=device"),
}

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.skipif(shutil.which("g++") is None, reason="the simulated device needs a C++ compiler"),
    pytest.mark.full("the demo on simulated CUDA devices"),
]


@pytest.mark.parametrize("way", WAYS)
def test_rewards_are_those_of_the_cpu(way, tmp_path, monkeypatch):
    """Two train ranks and one engine. The last digits of the log-probabilities differ between kernels. Megatron draws
    random weights on the device, so the model is in a folder."""
    small_llama().save_pretrained(tmp_path / "model")
    given = ("num_rollout=5", f"hf_checkpoint={tmp_path}/model", *WAYS[way])
    if way == "fsdp-disk":
        given += (f"update_weights_disk_dir={tmp_path}/weights",)
    for name in ("cpu", "device"):
        (tmp_path / name).mkdir()
    on_cpu = demo_runs.run(tmp_path / "cpu", *given)
    subprocess.run([sys.executable, str(HERE / "build.py")], check=True, capture_output=True)
    plain = demo_runs.environment()
    session = tmp_path / "session"
    monkeypatch.setattr(demo_runs, "environment", lambda: plain | GPUS | {"SIMDEVICE_SESSION": str(session)})
    assert demo_runs.run(tmp_path / "device", *given) == pytest.approx(on_cpu, abs=1e-3)
    assert (session / "device-0").exists() and not (session / "faults").exists()
