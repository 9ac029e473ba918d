"""Workers for the tests of replacing ranks. Drivers that import them need not import torch, which takes seconds."""

import os
import signal
import time
from pathlib import Path

from single_controller import Dispatch, Worker, register
from workers.distributed import initialize_distributed


class Member(Worker):
    """Keeps a process group, as models do, and counts what happens to it."""

    def __init__(self, folder=None):
        super().__init__()
        self.folder = folder
        self.history = ["constructed"]
        if folder is not None and (Path(folder) / "refuse").exists():
            raise OSError("no device")
        if not self.is_replacement:
            self._form()

    @classmethod
    def prepare_standby(cls):
        import torch.distributed  # noqa: F401 - not when it takes the place of a rank

        while os.path.exists(os.environ.get("HOLD_STANDBY", "")):
            time.sleep(0.02)

    def _form(self):
        import torch.distributed as dist

        initialize_distributed(self, "gloo")
        self.group = dist.new_group(list(range(self.world_size)))

    def on_membership_change(self, generation):
        self.history.append(f"generation {generation}")
        if self.folder is not None:
            try:  # once
                (Path(self.folder) / f"die-{self.rank}").unlink()
                os.kill(os.getpid(), signal.SIGKILL)
            except FileNotFoundError:
                pass
        self._form()

    @register(Dispatch.ONE_TO_ALL, replay=True)
    def configure(self, value):
        self.history.append(f"configured {value}")

    @register(Dispatch.ONE_TO_ALL)
    def note(self, text):
        self.history.append(text)

    @register(Dispatch.ONE_TO_ALL)
    def total(self, kill=None, absent=(), asleep=()):
        """The sum of rank + 1 over all ranks, three times over; kill a rank, leave some out, or let some sleep."""
        import torch
        import torch.distributed as dist

        if self.rank in asleep:
            time.sleep(60)
        if self.rank == kill:
            time.sleep(0.2)
            os.kill(os.getpid(), signal.SIGKILL)
        value = torch.full((1000,), self.rank + 1.0)
        for _ in range(0 if self.rank in absent else 3):
            dist.all_reduce(value, group=self.group)
        return float(value[0])

    @register(Dispatch.ONE_TO_ALL)
    def loop(self, seconds):
        """All-reduce again and again."""
        import torch
        import torch.distributed as dist

        end = time.monotonic() + seconds
        while time.monotonic() < end:
            dist.all_reduce(torch.ones(1000), group=self.group)

    @register(Dispatch.ONE_TO_ALL)
    def sleep_on(self, ranks, seconds, kill=None):
        if self.rank == kill:
            os.kill(os.getpid(), signal.SIGKILL)
        if self.rank in ranks:
            time.sleep(seconds)

    @register(Dispatch.ONE_TO_ALL)
    def me(self):
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT")
        return {
            "pid": os.getpid(),
            "history": self.history,
            "port": self.master_port,
            "environment": [os.environ[name] for name in names],
        }


class Lone(Worker):
    """Uses no collectives."""

    def __init__(self, fail=None, hold=None):
        super().__init__()
        if fail is not None and Path(fail).exists():
            raise RuntimeError("told to fail")
        while hold is not None and (Path(hold) / "hold").exists():
            (Path(hold) / f"held-{os.getpid()}").touch()
            time.sleep(0.02)
        self.value = 0

    @register(Dispatch.ONE_TO_ALL)
    def add(self, x, kill=None):
        if self.rank == kill:
            os.kill(os.getpid(), signal.SIGKILL)
        self.value += x
        return self.value

    @register(Dispatch.DP_COMPUTE, replay=True)
    def give(self, x):
        self.value += x

    @register(Dispatch.ONE_TO_ALL)
    def rank_and_size(self):
        return self.rank, self.world_size

    def on_membership_change(self, generation):
        self.value = "told"


class Sulky(Lone):
    """No good as a standby."""

    @classmethod
    def prepare_standby(cls):
        raise OSError("no weights")


class Replica(Member):
    """One of the two ranks of a data-parallel replica."""

    def _form(self):
        super()._form()
        self.register_layout({"dp": self.world_size // 2, "tp": 2}, dp=self.rank // 2, tp=self.rank % 2)

    @register(Dispatch.MEGATRON_COMPUTE_PROTO, replay=True)
    def load(self, x):
        self.history.append(f"loaded {x}")
        return x

    @register(Dispatch.MEGATRON_COMPUTE_PROTO)
    def rows(self, x):
        return [(self.rank, value) for value in x]
