"""A worker for the tests of ``group.map``. It writes down what it runs, in a file that outlives it."""

import os
import signal
import sys
import time
from pathlib import Path

import numpy as np
import torch

from single_controller import Dispatch, Worker, register


def split(group, numbers):
    return [list(numbers)[rank :: group.world_size] for rank in range(group.world_size)]


def summed(group, results):
    return sum(results)


def stacked(group, results):
    return torch.from_numpy(np.stack([one.numpy() for one in results]))


class Scorer(Worker):
    """Args: ``folder`` has the file ``run``, a line for each row that was scored: its number, and the rank. A file
    ``die-<row>`` kills the process that is given the row, once; ``poison-<row>`` each time."""

    def __init__(self, folder, delay=0.0):
        super().__init__()
        self.folder, self.delay = Path(folder), delay

    @register(Dispatch.DP_COMPUTE_PROTO, uneven="ragged")
    def score(self, rows):
        numbers = list(map(int, rows))
        for number in numbers:
            if (self.folder / f"poison-{number}").exists():
                self.die()
            if (self.folder / f"die-{number}").exists():
                (self.folder / f"die-{number}").unlink()
                self.die()
            if (self.folder / f"raise-{number}").exists():
                raise ValueError(f"row {number}")
        time.sleep(self.delay * (1 + self.rank))
        with open(self.folder / "run", "a") as file:
            file.write("".join(f"{number} {self.rank}\n" for number in numbers))
        return torch.tensor(numbers) * 10 if isinstance(rows, torch.Tensor) else [number * 10 for number in numbers]

    def die(self):
        time.sleep(0.1)  # the other ranks run by now
        if self.in_process:
            sys.exit("as told")
        os.kill(os.getpid(), signal.SIGKILL)

    @property
    def in_process(self):
        return (self.folder / "in-process").exists()

    @register(Dispatch.DP_COMPUTE_PROTO, uneven="pad")
    def score_padded(self, rows):
        return self.score(rows)

    @register(Dispatch.DP_COMPUTE_METRIC, uneven="ragged")
    def count(self, rows):
        return len(rows)

    @register(Dispatch.ONE_TO_ALL)
    def slow(self, seconds):
        time.sleep(seconds)
        return seconds

    @register({"dispatch_fn": lambda group, numbers: ((split(group, numbers),), {}), "collect_fn": stacked})
    def arrays(self, numbers):
        return torch.tensor(numbers)

    @register({"dispatch_fn": lambda group, numbers: ((split(group, numbers),), {}), "collect_fn": summed})
    def total(self, numbers):
        return sum(self.score(numbers))
