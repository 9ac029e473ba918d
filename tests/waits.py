"""Waiting for events with a limit, which every test of processes needs."""

import gc
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any


class within:
    """Assert that the block finishes within some seconds."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def __enter__(self) -> None:
        self.begin = time.monotonic()

    def __exit__(self, *error: object) -> None:
        took = time.monotonic() - self.begin
        assert took < self.seconds, f"took {took:.1f} s, more than {self.seconds} s"


def wait_until(condition: Callable[[], Any], seconds: float = 20, what: str = "what was waited for") -> float:
    """Wait until a condition is true; ``what`` names it in the error. Returns the seconds that it took."""
    begun = time.monotonic()
    while not condition():
        assert time.monotonic() < begun + seconds, f"{what} did not come within {seconds} s"
        time.sleep(0.005)
    return time.monotonic() - begun


def wait_collected(condition: Callable[[], Any], seconds: float = 20, what: str = "what was waited for") -> None:
    """Wait until a condition is true, and collect garbage meanwhile."""

    def collected() -> Any:
        gc.collect()
        return condition()

    wait_until(collected, seconds, what)


def runs(pid: int) -> bool:
    """Whether a process with this pid is running; a zombie is not."""
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    """Stop a process during the block: all its threads, which stop once one of them has handled the signal."""
    os.kill(pid, signal.SIGSTOP)

    def all_stopped() -> bool:
        for stat in Path(f"/proc/{pid}/task").glob("*/stat"):
            with suppress(FileNotFoundError, ProcessLookupError):  # a thread that ends meanwhile
                if stat.read_text().rsplit(")", 1)[1].split()[0] != "T":
                    return False
        return True

    try:
        wait_until(all_stopped, what="the stop of all threads")
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def kill_before(call: Callable[[], Any], pid: int) -> None:
    """Kill the process of a rank. The call of its group that comes next tells of it."""
    from single_controller import WorkerDiedError

    os.kill(pid, signal.SIGKILL)
    try:
        call()
    except WorkerDiedError:
        return
    raise AssertionError("the call has not told of the death")


@contextmanager
def existing(file: Path) -> Iterator[None]:
    """Have a file during the block, by which workers know what to do."""
    file.touch()
    try:
        yield
    finally:
        file.unlink()


def interrupt_first_start(patch: Any, name: str) -> list[threading.Thread]:
    """Have Ctrl-C come in the start of the first thread of this name, which runs then. Returns those that have started,
    which grows."""
    start, started = threading.Thread.start, list[threading.Thread]()

    def interrupted(thread: threading.Thread) -> None:
        start(thread)
        if thread.name == name:
            started.append(thread)
            if len(started) == 1:
                raise KeyboardInterrupt

    patch.setattr(threading.Thread, "start", interrupted)
    return started


@contextmanager
def repeated(function: Callable[[], Any], pause: float = 0, threads: int = 1) -> Iterator[None]:
    """Call a function in other threads, again and again after pauses, until the block ends; its error comes then."""
    over = threading.Event()

    def repeat() -> None:
        while not over.wait(pause):
            function()

    with ThreadPoolExecutor(threads) as pool:
        repeating = [pool.submit(repeat) for _ in range(threads)]
        try:
            yield
        finally:
            over.set()
        for one in repeating:
            one.result()


def refuse_threads(patch: Any, refused: Callable[[str], bool] = lambda name: True) -> None:
    """Have no thread start, or none of the names that are ``refused``, as in a process that has too many."""
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if refused(thread.name):
            raise RuntimeError("can't start new thread")
        start(thread)

    patch.setattr(threading.Thread, "start", refuse)


def in_fork(function: Callable[[], str], seconds: int = 20) -> str:
    """Run a function in a fork of this process, and return its result, a text."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:  # must not return into pytest, nor run the exit handlers of Ray
        try:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)  # ends it in native code, too
            signal.alarm(seconds)
            os.write(write, function().encode())
        except BaseException as error:
            os.write(write, repr(error).encode())
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read) as result:
        text = result.read()
    os.waitpid(child, 0)
    return text


def wait_gone(pids: Iterable[int | str], seconds: float = 15) -> None:
    """Wait until none of the processes runs."""
    pids = [int(pid) for pid in pids]
    wait_until(lambda: not any(map(runs, pids)), seconds, f"the end of {pids}")
