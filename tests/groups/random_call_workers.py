"""Worker classes for the tests of the order of calls. They record what they run."""

import asyncio
import contextlib
import threading
import time
import zlib

import numpy as np

from single_controller import Dispatch, Worker, collect_all_to_all, register

START = (0, 0)
"""The state of a sequence of calls before the first one: how many there were, and a checksum of all of them."""


def advance(state, number, method):
    """The state after one more call."""
    count, checksum = state
    return count + 1, zlib.crc32(f"{number} {method}".encode(), checksum)


def digest(value):
    """What a value is, in a few bytes."""
    if isinstance(value, np.ndarray):
        return "array", digest(value.tobytes())
    if isinstance(value, bytes):
        return len(value), zlib.crc32(value)
    if isinstance(value, (list, tuple)):
        return [digest(item) for item in value]
    return repr(value)


def pattern(nbytes, key, array=False):
    """Some bytes that depend on the key."""
    text = f"{key} ".encode()
    data = (text * (nbytes // len(text) + 1))[:nbytes]
    return np.frombuffer(data, np.uint8).copy() if array else data


def each_its_own(group, call, items):
    return ([call] * group.world_size, items), {}


class Journal(Worker):
    """Records its calls: a global list, and for each sender the state that `advance` describes.

    Methods return that state: (rank, count, checksum). So a call that was lost, repeated or overtaken changes the
    results of all later ones of its sender.
    """

    def __init__(self):
        super().__init__()
        tp = 1 if self.world_size % 2 else 2
        self.register_layout(dp=self.rank // tp, tp=self.rank % tp)
        self.thread = threading.current_thread()
        self.reset()

    @register(Dispatch.ONE_TO_ALL)
    def reset(self):
        self.entries, self.states, self.faults, self.running = [], {}, [], None

    @register(Dispatch.ONE_TO_ALL)
    def journal(self):
        return self.entries, self.faults

    @register(Dispatch.ONE_TO_ALL)
    def threads(self):
        """The thread of the constructor and the one of this call, and whether that is the main thread."""
        now = threading.current_thread()
        return self.thread.ident, now.ident, now is threading.main_thread()

    @register(Dispatch.ONE_TO_ALL)
    async def thread_of_async(self):
        return threading.current_thread().ident

    @contextlib.contextmanager
    def _entry(self, call, method):
        if self.running is not None:
            self.faults.append(f"{call} {method} began while {self.running} was running")
        if not method.startswith("async") and threading.current_thread() is not self.thread:
            self.faults.append(f"{call} {method} ran on {threading.current_thread()}, not {self.thread}")
        self.running = (*call, method)
        sender, number = call
        self.entries.append(self.running)
        self.states[sender] = state = advance(self.states.get(sender, START), number, method)
        try:
            yield (self.rank, *state)
        finally:
            self.running = None

    @register(Dispatch.ONE_TO_ALL)
    def small(self, call, data=None):
        with self._entry(call, "small") as state:
            return state, digest(data)

    @register(Dispatch.ONE_TO_ALL)
    def make(self, call, nbytes, array=False):
        with self._entry(call, "make") as state:
            return state, pattern(nbytes, state, array)

    @register(Dispatch.RANK_ZERO)
    def zero(self, call, data=None):
        with self._entry(call, "zero") as state:
            return state, digest(data)

    @register(Dispatch.DP_COMPUTE)
    def items(self, call, item):
        with self._entry(call, "items") as state:
            return state, digest(item)

    @register(Dispatch.DP_COMPUTE_PROTO, uneven="ragged")
    def rows(self, call, batch):
        with self._entry(call, "rows") as state:
            return [(state, digest(row)) for row in batch]

    @register(Dispatch.MEGATRON_COMPUTE)
    def by_layout(self, call, item):
        with self._entry(call, "by_layout") as state:
            return state, digest(item)

    @register({"dispatch_fn": each_its_own, "collect_fn": collect_all_to_all})
    def custom(self, call, item):
        with self._entry(call, "custom") as state:
            return state, digest(item)

    @register(Dispatch.ONE_TO_ALL, materialize_futures=False)
    def take(self, call, future):
        with self._entry(call, "take") as state:
            return state, digest(future.result(timeout=60))

    @register(Dispatch.ONE_TO_ALL)
    def fail(self, call, ranks):
        with self._entry(call, "fail") as state:
            if self.rank in ranks:
                raise ValueError(f"as told, {call}")
            return state

    @register(Dispatch.ONE_TO_ALL)
    def unpicklable(self, call, ranks):
        with self._entry(call, "unpicklable") as state:
            return threading.Lock() if self.rank in ranks else state

    @register(Dispatch.ONE_TO_ALL)
    def sleep(self, call, seconds):
        with self._entry(call, "sleep") as state:
            time.sleep(seconds)
            return state

    @register(Dispatch.ONE_TO_ALL)
    async def async_sleep(self, call, seconds):
        with self._entry(call, "async_sleep") as state:
            await asyncio.sleep(seconds)
            return state

    def plain(self, call, data=None):
        with self._entry(call, "plain") as state:
            return state, digest(data)


class ConcurrentJournal(Journal):
    """With methods that are not part of the order."""

    @register(Dispatch.ONE_TO_ALL, concurrent=True)
    async def aside(self, data, seconds=0.0):
        await asyncio.sleep(seconds)
        return self.rank, digest(data)

    @register(Dispatch.RANK_ZERO, concurrent=True)
    def aside_zero(self, data):
        return self.rank, digest(data)
