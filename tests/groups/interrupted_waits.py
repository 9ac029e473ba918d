"""Ends waits from outside: as Ctrl-C does, and those that hang."""

import contextlib
import faulthandler
import signal
import sys
import threading

from single_controller.call.call import Call
from single_controller.call.group import WorkerGroup


class Interrupts:
    """Interrupts waits of the main thread, as Ctrl-C does, by SIGUSR1. pytest-timeout has SIGALRM."""

    def __init__(self):
        self._armed = False
        self._before = signal.signal(signal.SIGUSR1, self._handle)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        signal.signal(signal.SIGUSR1, self._before)

    def _handle(self, _, frame):
        while self._armed and frame is not None:
            # While a call is being sent, it breaks the group. Before, while the layout is asked for, nothing is sent.
            if frame.f_code is Call.value.__code__ and frame.f_back.f_code is WorkerGroup._invoke.__code__:
                self._armed = False
                raise KeyboardInterrupt
            frame = frame.f_back

    @contextlib.contextmanager
    def after(self, seconds):
        """Raise once, at the earliest after some seconds, in a wait inside this block."""
        ended = threading.Event()

        def interrupt():
            pause = seconds
            while not ended.wait(pause) and self._armed:
                signal.pthread_kill(threading.main_thread().ident, signal.SIGUSR1)
                pause = 0.001

        self._armed = True
        thread = threading.Thread(target=interrupt)
        thread.start()
        try:
            yield
        finally:
            self._armed = False
            ended.set()
            thread.join()


@contextlib.contextmanager
def no_hang(group, seconds):
    """If the block takes longer, show where all threads and ranks are, and close the group, which ends all waits."""
    ended = threading.Event()

    def watch():
        if ended.wait(seconds):
            return
        sys.stderr.write(f"\nhangs: not ended after {seconds} s\n")
        faulthandler.dump_traceback(file=sys.__stderr__, all_threads=True)
        for rank, stack in group._ray.stacks(range(group.world_size)).items():
            sys.stderr.write(f"rank {rank}:\n{stack}\n")
        group.close()

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
    assert thread.is_alive() or not group.closed, f"did not end within {seconds} s; see the stacks above"
