"""What weight sync, offloading and a training step take on a GPU, against the speed of what they move bytes over.

    python -m benchmarks.gpu [--quick] [--gb 4] [--rounds 10]

One command on a machine with at least one GPU, or another accelerator that torch knows; without one it says so and
exits with 2. Tables, each from one run, with the median of the rounds, the least and the most:

- *links*: copies between host and device, pinned against pageable (PCIe); within the device; and, with two devices, a
  broadcast from one to the other with the devices' backend, such as nccl.
- *offload*: `DeviceMemory`, which offloads the tensors of a train worker, against the pinned copies.
- *weights*: an update from one train rank to one rollout worker in another process, by "group" against the broadcast
  (needs two devices), by "device" on the same device against the copy within it, by "store" against the pinned copy.
- *step*: a training step of `RayTrainGroup` on one device, its tokens per second, and offload() and onload() with the
  optimizer's state.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import ray
import torch
import torch.distributed as dist

from benchmarks.machine import machine
from benchmarks.recovery import MODEL, rows, step_of
from benchmarks.sync_workers import Rollout, Shapes, Train
from benchmarks.weight_sync import header, shapes_of, show
from single_controller import Dispatch, RayClassWithInitArgs, RayResourcePool, RayWorkerGroup, Worker, register
from workers import RayTrainGroup
from workers.device import ACCELERATORS, every_backend, has_accelerator, kind, names, synchronize, take_device
from workers.device_memory import DeviceMemory
from workers.distributed import initialize_distributed
from workers.train.train_placement import slot_devices

LARGE = {
    **MODEL,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 22,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "vocab_size": 32000,
    "max_position_embeddings": 2048,
}
"""1.1 billion parameters."""

Seconds = list[float]


def timed(do: Callable[[], Any], rounds: int, wait: Callable[[], None] = lambda: None) -> Seconds:
    """Run something ``rounds`` times, after two times that do not count."""
    seconds = []
    for _ in range(rounds + 2):
        wait()
        begun = time.perf_counter()
        do()
        wait()
        seconds.append(time.perf_counter() - begun)
    return seconds[2:]


class Links(Worker):
    """Measures copies of one device, and offloading."""

    def __init__(self) -> None:
        super().__init__()
        self.here = take_device(self.local_rank, self.device_ids)
        if self.world_size > 1:
            initialize_distributed(self, every_backend())

    def wait(self) -> None:
        """Wait for the device."""
        synchronize([self.here])

    @register(Dispatch.RANK_ZERO)
    def copies(self, nbytes: int, rounds: int) -> dict[str, Seconds]:
        """Seconds of each kind of copy."""
        options = {"dtype": torch.uint8}
        pageable, pinned = torch.ones(nbytes, **options), torch.ones(nbytes, **options).pin_memory()
        one, other = (torch.ones(nbytes, device=self.here, **options) for _ in range(2))
        pairs = {
            "pinned to device": (one, pinned), "device to pinned": (pinned, one), "pageable to device": (one, pageable),
            "device to pageable": (pageable, one), "within the device": (other, one),
        }  # fmt: skip
        return {
            what: timed(lambda to=to, source=source: to.copy_(source, non_blocking=True), rounds, self.wait)  # type: ignore[misc]
            for what, (to, source) in pairs.items()
        }

    @register(Dispatch.ONE_TO_ALL)
    def broadcast(self, nbytes: int, rounds: int) -> Seconds:
        """Seconds of a broadcast from rank 0."""
        memory = torch.ones(nbytes, dtype=torch.uint8, device=self.here)
        return timed(lambda: dist.broadcast(memory, 0), rounds, self.wait)

    @register(Dispatch.RANK_ZERO)
    def offload(self, nbytes: int, rounds: int) -> dict[str, Seconds]:
        """Seconds of `DeviceMemory`: of the first time, which pins host memory, and of later ones."""
        tensors = [torch.ones(nbytes // 16, dtype=torch.uint8, device=self.here) for _ in range(16)]
        memory = DeviceMemory(lambda: tensors)
        found: dict[str, Seconds] = {"offload, first": [], "offload": [], "onload": []}
        for number in range(rounds + 1):
            for what, do in (("offload", memory.sleep), ("onload", memory.wake_up)):
                self.wait()
                begun = time.perf_counter()
                do()
                self.wait()
                first = ", first" if not number and what == "offload" else ""
                found[what + first].append(time.perf_counter() - begun)
        return found


class DeviceTrain(Train):
    """A train rank whose weights are on its device."""

    def __init__(self, shapes: Shapes, dtype: torch.dtype) -> None:
        here = take_device(self.local_rank, self.device_ids)
        super().__init__(shapes, dtype)
        self.shards = {name: tensor.to(here) for name, tensor in self.shards.items()}

    @register(Dispatch.RANK_ZERO)
    def updates(self, sender: str, rounds: int) -> Seconds:
        """Seconds of each update."""
        return timed(lambda: self.update(sender, verify="none"), rounds)


class DeviceRollout(Rollout):
    """Stores weights on its device."""

    def __init__(self, shapes: Shapes, dtype: torch.dtype) -> None:
        here = take_device(self.local_rank, self.device_ids)
        super().__init__(shapes, dtype)
        self.engine.weights = {name: tensor.to(here) for name, tensor in self.engine.weights.items()}


@contextmanager
def pool_of(slots: int, share: float = 1.0) -> Iterator[RayResourcePool]:
    """Slots with a share of a device each."""
    options = slot_devices(True)
    resources = dict.fromkeys(options["resources"], share)
    with RayResourcePool([slots], use_gpu=options["use_gpu"], num_gpus=share, resources=resources) as pool:
        yield pool


def row(what: str, nbytes: float, seconds: Seconds, against: Seconds | None = None) -> None:
    """Print a row: seconds, gigabytes per second, and the share of the link's speed."""
    mean = statistics.median(seconds)
    share = "" if against is None else f"{statistics.median(against) / mean:.0%}"
    show(what, mean, f"{min(seconds):.3f} - {max(seconds):.3f}", f"{nbytes / mean / 1e9:.2f}", share)


def weights(transport: str, shapes: Shapes, rounds: int, slots: Sequence[float]) -> Seconds:
    """Seconds of an update by one transport: on two slots with a device each, or on two halves of one."""
    made = [RayClassWithInitArgs(cls, shapes, torch.bfloat16) for cls in (DeviceTrain, DeviceRollout)]
    with pool_of(2, *slots) as pool:
        with RayWorkerGroup(pool[:1], made[0]) as train, RayWorkerGroup(pool[1:], made[1]) as rollout:
            train.connect(transport, rollout, transport, {"double_buffer": False})
            seconds: Seconds = train.updates(transport, rounds)
            return seconds


def step(model: dict[str, Any], tokens: int, rounds: int) -> None:
    """The last table."""
    args = {"hf_config": model, "train_backend": "fsdp", "lr": 1e-4, "num_rollout": 10_000, "offload_train": True}
    data = rows(tokens)
    with RayTrainGroup(args, 1, 1) as group:
        ray.get(group.async_init(args))
        count = iter(range(10_000))
        seconds = timed(lambda: step_of(group, next(count), data), rounds)
        nbytes = group.offload()
        group.onload()
        offloads, onloads = [], []
        for _ in range(rounds):
            begun = time.perf_counter()
            group.offload()
            offloads.append(time.perf_counter() - begun)
            begun = time.perf_counter()
            group.onload()
            onloads.append(time.perf_counter() - begun)
    header("step", "s", "least - most", "GB/s", "tokens per s")
    median = statistics.median(seconds)
    show("a step", median, f"{min(seconds):.3f} - {max(seconds):.3f}", "", f"{data['input_ids'].numel() / median:.0f}")
    row("offload()", nbytes, offloads)
    row("onload()", nbytes, onloads)


def main() -> int:
    """Read the options and run."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--quick", action="store_true", help="a small model, twice: to see that it runs")
    options.add_argument("--gb", type=float, default=4.0, help="of each copy, and of the weights")
    options.add_argument("--rounds", type=int, default=10)
    given = options.parse_args()
    if not has_accelerator():
        sys.stderr.write("benchmarks.gpu: torch sees no GPU on this machine, so there is nothing to measure\n")
        return 2
    nbytes, rounds = (1 << 24, 2) if given.quick else (int(given.gb * 1e9) // 16 * 16, given.rounds)
    devices, what = torch.accelerator.device_count(), torch.get_device_module(kind()).get_device_name(0)
    os.environ.setdefault("RAY_ADDRESS", "local")
    there = {"num_gpus": devices} if names().resource == "GPU" else {"resources": {names().resource: devices}}
    ray.init(num_cpus=16, include_dashboard=False, log_to_driver=False, **there)
    print(f"{devices} x {what}, torch {torch.__version__}, {machine()}, n = {rounds}, {nbytes / 1e9:g} GB")

    header("links", "s", "least - most", "GB/s", "")
    with pool_of(min(devices, 2)) as pool, RayWorkerGroup(pool, RayClassWithInitArgs(Links)) as links:
        links_of: dict[str, Seconds] = links.copies(nbytes, rounds)
        if devices > 1:
            links_of["broadcast between two devices"] = links.broadcast(nbytes, rounds)[1]
        for way, seconds in links_of.items():
            row(way, nbytes, seconds)
        header("offload", "s", "least - most", "GB/s", "of the pinned copy")
        for way, seconds in links.offload(nbytes, rounds).items():
            row(way, nbytes, seconds, links_of["pinned to device" if way == "onload" else "device to pinned"])

    shapes = shapes_of(nbytes, torch.bfloat16)
    header("weights", "s", "least - most", "GB/s", "of the link")
    ways: dict[str, tuple[str, Sequence[float]]] = {"store": ("device to pinned", [0.5])}
    if ACCELERATORS[kind()].ipc:
        ways["device"] = ("within the device", [0.5])
    if devices > 1:
        ways["group"] = ("broadcast between two devices", [1.0])
    for transport, (link, slots) in ways.items():
        row(transport, nbytes, weights(transport, shapes, rounds, slots), links_of[link])

    step(MODEL if given.quick else LARGE, 128 if given.quick else 1024, rounds)
    ray.shutdown()
    return 0


if __name__ == "__main__":
    from benchmarks import gpu  # workers find the classes there

    sys.exit(gpu.main())
