"""The workers for the table of bad calls: methods of several dispatch modes, and one per way to fail."""

import asyncio
import gc
import os
import signal
import sys
import threading
import time

import ray

from single_controller import Dispatch, Worker, collect_all_to_all, register


def as_told(group, made):
    """A dispatch_fn that returns what the driver passes, so that a row of the table can return anything."""
    return made


def collect_badly(group, results):
    raise LookupError("collect_fn found nothing")


class HoldsLock(Exception):
    """Cannot be pickled."""

    def __init__(self, message):
        super().__init__(message)
        self.lock = threading.Lock()


class NeedsTwo(Exception):
    """Can be pickled but not unpickled: its constructor needs two arguments, and pickle passes one."""

    def __init__(self, code, text):
        super().__init__(f"{code}: {text}")


class Mute(Exception):
    """Its `str` and `repr` raise."""

    def __str__(self):
        raise RuntimeError("no text today")

    __repr__ = __str__


def actor_error_of_its_own(message):
    """The error that a worker gets from an actor that it started itself."""
    return ray.exceptions.RayActorError(error_msg=message)


class UnpicklesOnlyInItsProcess:
    """Pickles anywhere, but unpickles only in the process that created it."""

    def __init__(self):
        self.home = os.getpid()

    def __setstate__(self, state):
        if state["home"] != os.getpid():
            raise ModuleNotFoundError("No module named 'only_here'")


class Kit(Worker):
    """Counts the calls that reached the rank in `seen`, so that a test can check that a rejected call did not."""

    def __init__(self, start=0, guard=None):
        super().__init__()
        self.start = start
        self.seen = 0

    @register(Dispatch.ONE_TO_ALL)
    def add(self, x):
        self.seen += 1
        return self.start + self.rank + x

    @register(Dispatch.ONE_TO_ALL)
    def calls(self):
        return self.seen

    @register(Dispatch.ONE_TO_ALL)
    def pid(self):
        return os.getpid()

    @register(Dispatch.ONE_TO_ALL)
    def echo(self, value):
        self.seen += 1
        return value

    def plain(self, x, y=0):
        self.seen += 1
        return self.rank + x + y

    @property
    def expensive(self):
        raise AssertionError("the group must not read properties of the worker")

    # --- methods of several modes ----------------------------------------------------------------------

    @register(Dispatch.RANK_ZERO)
    def first(self, x):
        self.seen += 1
        return x

    @register(Dispatch.ALL_TO_ALL)
    def items(self, x, y=0):
        self.seen += 1
        return (self.rank, x, y)

    @register(Dispatch.DP_COMPUTE)
    def compute(self, x, y=0):
        self.seen += 1
        return x

    @register(Dispatch.DP_COMPUTE_PROTO)
    def rows(self, batch, other=None):
        self.seen += 1
        return batch

    @register(Dispatch.DP_COMPUTE_PROTO_WITH_FUNC)
    def apply(self, function, batch):
        self.seen += 1
        return function(self, batch)

    @register(Dispatch.MEGATRON_COMPUTE)
    def mega(self, x):
        self.seen += 1
        return x

    @register(Dispatch.MEGATRON_PP_AS_DP)
    def pp(self, x):
        self.seen += 1
        return x

    @register(Dispatch.DIRECT_ROLLOUT_METHOD)
    def rollout(self, prompt):
        self.seen += 1
        return prompt

    @register(Dispatch.mesh("actor"))
    def on_mesh(self, batch):
        self.seen += 1
        return batch

    @register({"dispatch_fn": as_told, "collect_fn": collect_all_to_all})
    def custom(self, x):
        self.seen += 1
        return x

    @register({"dispatch_fn": as_told, "collect_fn": collect_badly})
    def collected_badly(self, x):
        self.seen += 1
        return x

    # --- coordinates -----------------------------------------------------------------------------------

    @register(Dispatch.ONE_TO_ALL)
    def set_layout(self, axes, ranks=None, sizes=None):
        if ranks is None or self.rank in ranks:
            self.register_layout(sizes, **{axis: coordinates[self.rank] for axis, coordinates in axes.items()})

    @register(Dispatch.ONE_TO_ALL)
    def join_mesh(self, name, dp_ranks, collects, ranks=None):
        if ranks is None or self.rank in ranks:
            self.register_mesh(name, dp_ranks[self.rank], collects[self.rank])

    # --- failures --------------------------------------------------------------------------------------

    @register(Dispatch.ONE_TO_ALL)
    def fail(self, ranks=None, error=ValueError, message="the true cause"):
        if ranks is None or self.rank in ranks:
            raise error(message)

    @register(Dispatch.ONE_TO_ALL)
    def fail_deep(self):
        try:
            try:
                raise KeyError("hidden_size")
            except KeyError as error:
                raise ValueError("the config has no hidden size") from error
        except ValueError as error:
            raise RuntimeError("the model was not built") from error

    @register(Dispatch.ONE_TO_ALL)
    def fail_needs_two(self):
        raise NeedsTwo(7, "seven")

    @register(Dispatch.ONE_TO_ALL)
    async def fail_async(self, error=ValueError):
        await asyncio.sleep(0)
        raise error("from a coroutine")

    @register(Dispatch.ONE_TO_ALL)
    def recurse(self):
        def deeper():
            return deeper()

        gc.disable()  # in the driver's own process, other finalizers would fail at this depth
        try:
            return deeper()
        finally:
            gc.enable()

    @register(Dispatch.DP_COMPUTE_PROTO)
    def fail_rows(self, batch):
        raise ValueError("the true cause")

    @register(Dispatch.ONE_TO_ALL)
    def make_generator(self):
        return (row for row in range(3))

    @register(Dispatch.DP_COMPUTE_PROTO)
    def return_unpicklable_elsewhere(self, batch):
        return [UnpicklesOnlyInItsProcess() for _ in batch]

    @register(Dispatch.ONE_TO_ALL)
    def leave(self, how, ranks=None):
        if ranks is not None and self.rank not in ranks:
            return
        if how == "sys.exit":
            sys.exit(3)
        elif how == "os._exit":
            os._exit(3)
        elif how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif how == "abort":
            os.abort()


class Starts(Worker):
    """Its constructor fails when told to."""

    def __init__(self, how=None, rank=None, mark=""):
        super().__init__()
        if rank is not None and self.rank != rank:
            return
        if how == "raise":
            raise RuntimeError("no checkpoint at /nowhere")
        if how == "raise if marked" and os.path.exists(mark):
            raise RuntimeError("the file is marked")
        if how == "exit":
            os._exit(3)
        if how == "sleep":
            time.sleep(60)

    @register(Dispatch.ONE_TO_ALL)
    def add(self, x):
        return self.rank + x


class Quiet(Worker):
    """Registers no method."""

    def train(self):
        return self.rank


class HasClose(Worker):
    @register(Dispatch.ONE_TO_ALL)
    def close(self):
        return None


class HasStats(Worker):
    @register(Dispatch.ONE_TO_ALL)
    def stats(self):
        return None


class HasWorkers(Worker):
    @register(Dispatch.ONE_TO_ALL)
    def workers(self):
        return None


class NoWorker:
    def add(self, x):
        return x
