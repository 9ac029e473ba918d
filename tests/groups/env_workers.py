"""Workers of another Python environment, which alone has the module `only_there`."""

import asyncio
import contextlib
import ctypes
import os
import sys
import threading

import ray

import single_controller
from single_controller import Dispatch, Worker, register

ONLY_THERE = """
class Odd:
    def __init__(self, rank):
        self.rank = rank


class OddError(Exception):
    pass


class Unreadable:
    def __reduce__(self):
        return read, ()


def read():
    raise OddError("nobody can read this")
"""


class InAnEnvironment(Worker):
    """Its module is pickled by reference, and found on the PYTHONPATH of the tests."""

    @register(Dispatch.ONE_TO_ALL)
    def where(self):
        return {"pid": os.getpid(), "prefix": sys.prefix, "library": single_controller.__file__}

    @register(Dispatch.ONE_TO_ALL)
    def child(self, code):
        """Run code in another process of the worker's Python. Returns what it prints."""
        import subprocess

        return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()

    @register(Dispatch.ONE_TO_ALL)
    def fail(self):
        import only_there

        raise only_there.OddError("the text of an odd error")

    @register(Dispatch.ONE_TO_ALL)
    def make_odd(self):
        import only_there

        return only_there.Odd(self.rank)

    @register(Dispatch.ONE_TO_ALL)
    def make_unreadable(self):
        import only_there

        return only_there.Unreadable()

    @register(Dispatch.ALL_TO_ALL)
    def look(self, value):
        return type(value).__module__, getattr(value, "rank", None)


class InTheDriversEnvironment(Worker):
    @register(Dispatch.ALL_TO_ALL)
    def look(self, value):
        return type(value).__module__


class Constructed(Worker):
    """Its constructor takes `python` itself."""

    def __init__(self, python):
        super().__init__()
        self.python = python


def stopped():
    """What breakpoint() calls if PYTHONBREAKPOINT names it."""
    return "stopped"


class WithPythonVariables(InAnEnvironment):
    @register(Dispatch.ONE_TO_ALL)
    def effects(self):
        with contextlib.closing(asyncio.new_event_loop()) as loop:
            debug = loop.get_debug()
        return ray.get_runtime_context().runtime_env, breakpoint(), debug, sys.dont_write_bytecode

    @register(Dispatch.ONE_TO_ALL)
    def crash(self):
        threading.Thread(target=threading.Event().wait, daemon=True).start()
        ctypes.string_at(0)
