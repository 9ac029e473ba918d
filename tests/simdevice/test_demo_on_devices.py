"""The demo on simulated CUDA devices: with both backends, colocated and not, and by each transport."""

import functools
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
STEPS = "num_rollout=5"
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


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """The folder of a model: Megatron draws random weights on the device."""
    folder = tmp_path_factory.mktemp("model")
    small_llama().save_pretrained(folder)
    return f"hf_checkpoint={folder}"


@pytest.fixture(scope="module")
def on_cpu(other_drivers, model, tmp_path_factory):
    """``on_cpu(*given)``: the rewards of a run on the CPU."""

    @functools.cache
    def of(*given):
        plain = demo_runs.environment()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(demo_runs, "environment", lambda: plain | other_drivers)
            return demo_runs.run(tmp_path_factory.mktemp("cpu"), STEPS, model, *given)

    return of


@pytest.mark.parametrize("way", WAYS)
def test_rewards_are_those_of_the_cpu(way, tmp_path, on_cpu, model, monkeypatch):
    """Two train ranks and one engine. The last digits of the log-probabilities differ between kernels. The CPU's are
    those of the backend: transports are exact, and so is sharing devices."""
    given = WAYS[way]
    if way == "fsdp-disk":
        given += (f"update_weights_disk_dir={tmp_path}/weights",)
    expected = on_cpu(*demo_runs.WAYS[way.partition("-")[0]])
    subprocess.run([sys.executable, str(HERE / "build.py")], check=True, capture_output=True)
    plain = demo_runs.environment()
    session = tmp_path / "session"
    monkeypatch.setattr(demo_runs, "environment", lambda: plain | GPUS | {"SIMDEVICE_SESSION": str(session)})
    (tmp_path / "device").mkdir()
    assert demo_runs.run(tmp_path / "device", STEPS, model, *given) == pytest.approx(expected, abs=1e-3)
    assert (session / "device-0").exists() and not (session / "faults").exists()
