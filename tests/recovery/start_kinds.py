"""Rounds in which a rank is killed while its group starts or restarts, and in which a driver is killed.

After each round the group works, or its start has failed and another group works. Nothing of either is left after its
end, nor of the killed driver: no actor, process, placement group or resource.

"Told" is the time from the kill to the driver's error. "Back" is the time from then until the group has been started
again, or until nothing of the driver is left.
"""

import os
import random
import signal
import subprocess
import sys
import threading
import time

import ray
from footprint import Footprint
from group_workers import Fragile
from rounds import Seen
from waits import wait_gone, wait_until

from single_controller import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup, SingleControllerError

RANKS = 3
TOLD = 5.0
"""Seconds within which the driver must be told."""


class Slow(Fragile):
    """Its constructor takes a while, so that a kill can happen during it."""

    def __init__(self):
        super().__init__()
        time.sleep(0.8)


def started(pool):
    return RayWorkerGroup(pool, RayClassWithInitArgs(Slow))


class Starts:
    """One round per call of a method.

    Args:
        rng: draws moments and victims.
        folder: ignored.
    """

    def __init__(self, rng, folder):
        self.rng = rng
        self.before = Footprint.now(shared_memory=False)

    def close(self):
        pass

    def rank_while_its_group_starts(self):
        return self._kill(lambda pool: lambda: started(pool))

    def rank_while_its_group_restarts(self):
        return self._kill(lambda pool: started(pool).restart)

    def driver(self):
        """Starting a group, idle, in a call, in a collective, or restarting the group."""
        script = f"import sys; sys.path[:0] = {sys.path!r}; from start_kinds import drive; drive({self.rng.random()})"
        environment = os.environ | {"RAY_ADDRESS": ray.get_runtime_context().gcs_address}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        with subprocess.Popen([sys.executable, "-c", script], env=environment, **pipes) as process:
            assert process.stdout.readline() == b"ready\n", "the driver did not begin"
            time.sleep(self.rng.uniform(0, 1.2))
            process.kill()
        began = time.monotonic()
        self.before.wait_same(30, shared_memory=False)
        return Seen(None, time.monotonic() - began)

    def _kill(self, call_of):
        with RayResourcePool([RANKS], use_gpu=False) as pool:
            call = call_of(pool)
            known, killed = living(), []

            def kill():
                wait_until(lambda: living() - known, 20, "the start of a process")
                time.sleep(self.rng.uniform(0, 1.0))
                victim = self.rng.choice(sorted(living() - known))
                killed.append(time.monotonic())
                os.kill(victim, signal.SIGKILL)

            thread = threading.Thread(target=kill)
            thread.start()
            group = getattr(call, "__self__", None)
            try:
                group = call() or group
                thread.join()  # if all had started before the kill, the next call raises
                group.ping()
                raise AssertionError("no call raised")
            except SingleControllerError as error:
                told = time.monotonic()
                assert killed, f"the call raised although no process was killed: {error}"
                assert "died" in str(error), error
            assert told - killed[0] < TOLD, f"told after {told - killed[0]:.1f} s"
            if group is None:
                group = started(pool)
            else:
                group.restart()
            assert group.ping() == list(range(RANKS)), "the group did not recover"
            back = time.monotonic()
            pids = group.pid()
        wait_gone(pids, 10)
        self.before.wait_same(30, shared_memory=False)
        return Seen(told - killed[0], back - told)


def living():
    """pids of the processes of actors."""
    return Footprint.now(shared_memory=False).processes


def drive(seed):
    """What the driver does that is killed."""
    ray.init(log_to_driver=False)
    pool = RayResourcePool([RANKS], use_gpu=False)
    moment = random.Random(seed).choice(("start", "idle", "call", "collective", "restart"))
    if moment == "start":
        print("ready", flush=True)
    group = started(pool)
    if moment == "collective":
        group.join_process_group()
    print("ready", flush=True)
    if moment == "call":
        group.sleep(60)
    elif moment == "collective":
        group.all_reduce(10_000, absent=1)
    elif moment == "restart":
        group.restart()
    time.sleep(60)
