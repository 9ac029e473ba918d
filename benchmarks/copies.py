"""What the host asks a device for: reads, waits, copies by kind, collectives and memory; counted on a simulated device.

    python -m benchmarks.copies [--quick]

The counts are those of any CUDA device; `tests/simdevice` has the one that counts them, which needs a C++ compiler. It
says nothing of seconds. One table: a training step of FSDP on one device, with and without cpu offload; offload and
onload; and an update of the weights by each transport from a trainer to an engine, of which both sides are counted: on
two devices for "group", otherwise on one, and without handles to memory for "device". Each is done once before it is
counted, as the first time allocates buffers. Updates are without the receiver's double buffer, except for one.

- *reads*: values that the host reads, such as by ``item()``.
- *waits*: other times that it waits: copies that are not asynchronous, and synchronizations with streams and devices.
- *events*: that it waits for. FSDP does when a backward pass has copied gradients to host memory.
- *to the device*, *to the host*, *within*, *collectives*: megabytes.
- *peak*: of the devices' memory, in megabytes more than before; the weights are in the first line.
"""

from __future__ import annotations

import argparse
import gc
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.recovery import MODEL, rows
from benchmarks.weight_sync import header, show, sizes
from single_controller import LocalWorkerGroup, RayClassWithInitArgs
from workers.fsdp.fsdp_worker import FSDPTrainWorker
from workers.rollout.engines.hf_engine import HFEngine
from workers.rollout.rollout_worker import RolloutWorker
from workers.weight_sync import WeightSender

SIMDEVICE = Path(__file__).resolve().parents[1] / "tests" / "simdevice"
WAITS = ("sync:device", "sync:stream", "copy:d2h sync", "copy:h2d sync", "copy:h2d staged", "copy:d2h non_blocking")
DEVICES = (0, 1)
UPDATES = [("device", False), ("group", False), ("store", False), ("disk", False), ("group", True)]
"""Transports, and whether with the double buffer."""
SMALL = {**MODEL, "hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 2}


def counted(what: str, do: Callable[[], Any]) -> None:
    """Do something twice, and print a row of the second time."""
    simulated = torch._simdevice  # type: ignore[attr-defined]
    do()
    gc.collect()
    for device in DEVICES:
        torch.accelerator.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
    before = sum(map(torch.cuda.memory_allocated, DEVICES))
    simulated.counts(True)
    simulated.moved(True)
    do()
    counts, moved = simulated.counts(True), simulated.moved(True)
    peak = sum(map(torch.cuda.max_memory_allocated, DEVICES)) - before

    def number(*kinds: str) -> int:
        return int(sum(count for kind, count in counts.items() if kind.startswith(kinds)))

    def megabytes(*kinds: str) -> str:
        return sizes(sum(nbytes for kind, nbytes in moved.items() if kind.startswith(kinds)))

    kinds = (("copy:h2d",), ("copy:d2h",), ("copy:d2d", "copy:p2p"), ("collective",))
    waits = number("host read"), number(*WAITS), number("sync:event")
    show(what, *waits, *(megabytes(*kind) for kind in kinds), sizes(peak))


def steps(args: dict[str, Any], tokens: int) -> None:
    """Rows of training steps, of offload and of onload."""
    data = rows(tokens)
    for way, extra in {"a step": {}, "a step, cpu offload": {"fsdp_cpu_offload": True}}.items():
        with LocalWorkerGroup(1, RayClassWithInitArgs(FSDPTrainWorker)) as group:
            group.init({**args, **extra}, "actor")
            counted(way, lambda group=group: group.train(0, data))  # type: ignore[misc]
            if not extra:
                counted("a pass for log-probabilities", lambda group=group: group.compute_log_prob(data))  # type: ignore[misc]
                counted("offload and onload", lambda group=group: (group.sleep(), group.wake_up()))  # type: ignore[misc]


def updates(model: dict[str, Any]) -> None:
    """Rows of updates."""
    config = AutoConfig.for_model(**model)
    made = RayClassWithInitArgs(RolloutWorker, HFEngine, config)
    for transport, buffered in UPDATES:
        how: dict[str, Any] = {"verify": "none", "double_buffer": buffered}
        what = f"an update, `{transport}`{', double buffer' if buffered else ''}"
        torch.cuda.set_device(1 if transport == "group" else 0)  # nccl takes one rank per device

        def update(sender: WeightSender, what: str = what) -> None:
            weights = list(AutoModelForCausalLM.from_config(config).to("cuda").state_dict().items())
            versions = iter((1, 2))
            counted(what, lambda: sender.send(next(versions), weights))
            sender.close()

        with (
            tempfile.TemporaryDirectory() as folder,
            LocalWorkerGroup(1, made, threads=True, collectives=False) as rollout,
        ):
            if transport == "device":  # memory cannot be opened in the process that made it: there is one side
                rollout.execute_with_func_generator(
                    lambda worker, how=how: update(WeightSender("device", None, neighbour=worker, **how))  # type: ignore[misc]
                )
            else:
                options = {"folder": folder} if transport == "disk" else {}
                update(WeightSender(transport, rollout, **how, **options))


def main() -> int:
    """Read the options and run, on a simulated device."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--quick", action="store_true", help="a small model: to see that it runs")
    given = options.parse_args()
    if not hasattr(torch, "_simdevice"):  # it has to be there before torch is imported
        subprocess.run([sys.executable, str(SIMDEVICE / "build.py")], check=True, stdout=subprocess.DEVNULL)
        paths = [str(SIMDEVICE / "boot"), str(SIMDEVICE.parents[1])]
        simulated = {"SIMDEVICE": "1", "PYTHONPATH": os.pathsep.join(paths)}
        again = [sys.executable, "-m", "benchmarks.copies", *sys.argv[1:]]
        return subprocess.run(again, env=os.environ | simulated).returncode
    model = SMALL if given.quick else MODEL
    nbytes = sum(one.nbytes for one in AutoModelForCausalLM.from_config(AutoConfig.for_model(**model)).parameters())
    print(f"torch {torch.__version__}, weights of {sizes(nbytes)} MB")
    header("", "reads", "waits", "events", "to the device", "to the host", "within", "collectives", "peak")
    steps({"hf_config": model, "train_backend": "fsdp", "lr": 1e-4, "num_rollout": 10_000}, 16 if given.quick else 128)
    updates(model)
    return 0


if __name__ == "__main__":
    sys.exit(main())
