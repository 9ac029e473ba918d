"""Workers for the tests of the wire."""

import gc
import os
import pickle
import sys
import threading
import time
from types import SimpleNamespace

import ray
import torch
from group_workers import Fragile

from single_controller import Dispatch, register
from single_controller.ray.rank import actor
from single_controller.wire import connection, link


class Wired(Fragile):
    """Counts its calls, returns what is hard to send, and ends in several ways."""

    def __init__(self, seconds=0.0):
        super().__init__()
        time.sleep(seconds)
        self.calls = 0
        self.tensor = torch.zeros(4)

    @register(Dispatch.ONE_TO_ALL)
    def count(self, seconds=0.0):
        """Number of calls of this method so far."""
        time.sleep(seconds)
        self.calls += 1
        return self.calls

    @register(Dispatch.ONE_TO_ALL)
    def echo(self, value):
        return value

    @register(Dispatch.ONE_TO_ALL)
    def large(self, key, nbytes=1 << 21):
        return bytes([key % 256, self.rank]) * (nbytes // 2)

    @register(Dispatch.ONE_TO_ALL)
    def reference(self):
        return {"ref": ray.put(("stored", self.rank))}

    @register(Dispatch.ONE_TO_ALL)
    def unpicklable(self):
        return threading.Lock()

    @register(Dispatch.ONE_TO_ALL)
    def increment(self, size=4):
        """Change the tensor that was returned last, and return it again."""
        if len(self.tensor) != size:
            self.tensor = torch.zeros(size)
        self.tensor += 1
        return self.tensor

    @register(Dispatch.ONE_TO_ALL)
    def raise_large(self, nbytes):
        try:
            raise KeyError("k" * nbytes)
        except KeyError as error:
            raise ValueError("v" * nbytes, b"b" * nbytes) from error

    @register(Dispatch.ONE_TO_ALL)
    def end(self, rank, how, others_wait=60):
        """End the process of one rank, while the others wait."""
        if self.rank != rank:
            time.sleep(others_wait)
            return
        if how.startswith("sys.exit"):
            sys.exit(int(how[-2]))
        elif how == "exit_actor":
            ray.actor.exit_actor()
        os.kill(os.getpid(), 9)

    @register(Dispatch.ONE_TO_ALL)
    def fork(self, seconds):
        """Fork a child that lives on for a while."""
        if os.fork() == 0:
            try:
                time.sleep(seconds)
            finally:
                os._exit(0)

    @register(Dispatch.ONE_TO_ALL)
    def cut(self, times=1, pause=0.02):
        """Have the driver's connection to this rank reset, again and again."""
        for _ in range(times):
            time.sleep(pause)
            for one in gc.get_objects():
                if isinstance(one, connection.Connection):
                    one._shut()
        return "done"

    @register(Dispatch.ONE_TO_ALL)
    def break_reply(self):
        """Have the encoding of this call's reply fail, after the method has returned."""

        def fail(*_, **__):
            actor.pickle = pickle
            raise MemoryError("no room for the reply")

        actor.pickle = SimpleNamespace(dumps=fail, loads=pickle.loads)

    @register(Dispatch.ONE_TO_ALL)
    def kept(self):
        """Number of results that this rank keeps for drivers."""
        sessions = [one for one in gc.get_objects() if isinstance(one, link.Session)]
        return sum(len(one.kept) for one in sessions)
