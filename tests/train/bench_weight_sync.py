"""Compare weight sync with raw Ray: send the same bytes from one process to two, alternating between the two methods.

    python tests/train/bench_weight_sync.py [--rounds 10] [--mb 256] [--transports store,group]

Raw Ray is one ``ray.put`` of a uint8 numpy array, which both actors copy into memory whose pages are already mapped.
The target for the object store is at most three times raw Ray's time; the exit status is 1 if it is missed.
"""

import argparse
import os
import statistics
import sys
import tempfile
import time

import numpy
import ray
import sync_workers
import torch

from single_controller import Dispatch, RayClassWithInitArgs, RayResourcePool, RayWorkerGroup, Worker, register
from workers.weight_sync import WeightSender

AIM = 3.0
TENSOR = (1024, 1024)  # 4 MB of float32


class Trainer(Worker):
    """Sends the same tensors repeatedly."""

    def __init__(self, rollout, hands, megabytes, folder):
        super().__init__()
        self.pairs = [(name, torch.randn(shape)) for name, shape in shapes(megabytes).items()]
        self.array = numpy.ones(megabytes << 20, numpy.uint8)
        self.hands = hands
        self.senders = {
            name: WeightSender(name, rollout, folder=folder if name == "disk" else None)
            for name in ("store", "group", "disk", "device")
        }
        self.version = 0

    @register(Dispatch.RANK_ZERO)
    def ours(self, transport):
        """Seconds of one update."""
        self.version += 1
        return self.senders[transport].send(self.version, self.pairs).seconds

    @register(Dispatch.RANK_ZERO)
    def raw(self):
        """Seconds of the same transfer with raw Ray."""
        begun = time.perf_counter()
        ref = ray.put(self.array)
        ray.get([hand.copy.remote(ref) for hand in self.hands])
        return time.perf_counter() - begun


@ray.remote
class Hand:
    """Copies into memory whose pages are already mapped."""

    def __init__(self, megabytes):
        self.memory = numpy.ones(megabytes << 20, numpy.uint8)

    def copy(self, array):
        numpy.copyto(self.memory, array)


def shapes(megabytes):
    return {f"layer.{number}": TENSOR for number in range(megabytes // 4)}


def measure(megabytes=256, rounds=10, transports=("store",)):
    """Seconds of each, interleaved: {"raw": [...], "store": [...]}. Two warm-up rounds are not counted."""
    found = {name: [] for name in ("raw", *transports)}
    made = RayClassWithInitArgs(sync_workers.Rollout, torch.float32, shapes(megabytes))
    with tempfile.TemporaryDirectory() as folder, RayResourcePool([2], use_gpu=False) as pool:
        hands = [Hand.options(num_cpus=0).remote(megabytes) for _ in range(2)]
        rollout = RayWorkerGroup(pool, made)
        arguments = (rollout, hands, megabytes, os.path.join(folder, "sync"))
        trainer = RayWorkerGroup(pool[0:1], RayClassWithInitArgs(Trainer, *arguments))
        for number in range(rounds + 2):
            for name in found if number % 2 else reversed(found):
                seconds = trainer.raw() if name == "raw" else trainer.ours(name)
                found[name] += [seconds] if number >= 2 else []
        for hand in hands:
            ray.kill(hand)
    return found


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--mb", type=int, default=256)
    parser.add_argument("--transports", default="store,group,disk,device")
    options = parser.parse_args()
    ray.init("local", num_cpus=16, include_dashboard=False, object_store_memory=2 << 30, log_to_driver=False)
    found = measure(options.mb, options.rounds, options.transports.split(","))
    raw = statistics.median(found["raw"])
    print(f"{options.mb} MB from one process to two, n = {options.rounds}, medians")
    for name, seconds in found.items():
        middle = statistics.median(seconds)
        spread = f"{min(seconds) * 1e3:.0f} - {max(seconds) * 1e3:.0f}"
        print(f"{name:>7}  {middle * 1e3:7.0f} ms  ({spread})  {middle / raw:.2f} x raw")
    missed = "store" in found and statistics.median(found["store"]) > AIM * raw
    print(f"aim for the store, at most {AIM:g} x raw: {'MISSED' if missed else 'reached'}")
    sys.exit(missed)


if __name__ == "__main__":
    main()
