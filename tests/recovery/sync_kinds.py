"""Rounds in which senders and receivers are killed at random moments of a weight update.

Two train ranks send to three rollout workers, by each transport in turn, as whole tensors or as differences, with and
without a double buffer. After each round every living receiver has the complete weights of the update before or of this
one, bit for bit, as its version says, or says that it has none (without a double buffer). The next update reaches all.

"Told" is the time from the kill until the driver's call of the update raised. An update that ended before the kill
tells nothing.
"""

import os
import signal
import statistics
import threading
import time
from collections import defaultdict

import ray
from recovery_workers import Receiver, Sender, digests
from rounds import Seen

from single_controller import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup, SingleControllerError

SENDERS, RECEIVERS = 2, 3
TOLD = 5.0
"""Seconds in which everyone must be told."""


class Sync:
    """The groups, and one round per call of a method.

    Args:
        rng: draws moments and victims.
        folder: an empty folder.
    """

    def __init__(self, rng, folder):
        self.rng, self.folder = rng, folder
        self.pool = RayResourcePool([4], use_gpu=False, max_colocate_count=2)
        self.train = RayWorkerGroup(self.pool[0:SENDERS], RayClassWithInitArgs(Sender))
        made = RayClassWithInitArgs(Receiver)
        self.rollout = RayWorkerGroup(self.pool[0:RECEIVERS], made, collectives=False)
        self.version = 0
        self.seconds = defaultdict(lambda: [0.3])
        self.rounds = 0
        self.how = ()

    def close(self):
        self.pool.close()

    def sender_in_an_update(self):
        return self._kill(self.train)

    def receiver_in_an_update(self):
        return self._kill(self.rollout)

    def receiver_that_joins_in_an_update(self):
        return self._kill(self.rollout, joins=True)

    def _next(self):
        """Take the next transport and options."""
        transport = ("store", "group", "device", "disk")[self.rounds % 4]
        buffered = self.rounds // 4 % 3 != 2
        delta = self.rounds // 4 % 3 == 1 and transport != "disk"
        self.rounds += 1
        self.how = (transport, delta, buffered)

    def _connect(self):
        transport, delta, buffered = self.how
        folder = {"folder": str(self.folder / "weights")} if transport == "disk" else {}
        self.train.connect(self.rollout, transport, delta=delta, double_buffer=buffered, **folder)

    def _update(self):
        self.version += 1
        began = time.monotonic()
        self.train.update(self.version)
        self.seconds[self.how].append(time.monotonic() - began)

    def _kill(self, group, *, joins=False):
        self._next()
        self._connect()
        for _ in range(2):  # the second one finds process groups, and a base for differences
            self._update()
        rank = self.rng.randrange(group.world_size)
        if joins:
            os.kill(group.pids()[rank], signal.SIGKILL)
            group.restart(ranks=[rank])
            self.train.reconnect(self.rollout)
        before = [self.version if not joins or other != rank else 0 for other in range(RECEIVERS)]
        pid = group.pids()[rank]
        after = self.rng.uniform(0, 1.2 * statistics.median(self.seconds[self.how][-5:]))
        killed = []

        def kill():
            killed.append(time.monotonic())
            os.kill(pid, signal.SIGKILL)

        timer = threading.Timer(after, kill)
        timer.start()
        told = None
        try:
            self._update()
        except SingleControllerError:
            assert killed, "the update failed before anything was killed"
            told = time.monotonic() - killed[0]
            assert told < TOLD, f"told after {told:.1f} s"
        timer.join()
        began = time.monotonic()
        living = [other for other in range(RECEIVERS) if group is self.train or other != rank]
        for other in living:
            version, held = ray.get(self.rollout.workers[other].holds.remote(), timeout=20)
            allowed = (before[other], self.version) if self.how[2] else (None, before[other], self.version)
            assert version in allowed, f"{self.how}: rank {other} has version {version}, not one of {allowed}"
            assert not version or held == digests(version), f"{self.how}: rank {other} has mixed weights"
            assert told is not None or version == self.version
        self._repair(group, rank)
        self._update()
        assert self.rollout.holds() == [(self.version, digests(self.version))] * RECEIVERS
        return Seen(told, time.monotonic() - began)

    def _repair(self, group, rank):
        if group is self.rollout:
            group.restart(ranks=[rank])
        else:
            group.restart()
        self._connect()
