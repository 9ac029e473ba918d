"""Rounds in which ranks of a plain group of torch workers, and its standby, are killed.

After each round the collectives work, the other ranks have kept their processes and what they hold, and the group has
made nothing else anew.
"""

import os
import signal
import threading
import time
from pathlib import Path

from replace_workers import Member
from rounds import Seen
from waits import wait_until

from single_controller import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup, WorkerDiedError

RANKS = 4
TOTAL = [16.0 * 10] * RANKS


class Group:
    """A group with a standby, and one round per call of a method.

    Args:
        rng: draws moments and victims.
        folder: an empty folder.
    """

    def __init__(self, rng, folder):
        self.rng, self.folder = rng, Path(folder)
        self.pool = RayResourcePool([RANKS + 1], use_gpu=False)
        self.group = RayWorkerGroup(self.pool, RayClassWithInitArgs(Member, str(folder)), standby=1)
        self.group.configure("value")

    def close(self):
        self.pool.close()

    def rank_in_a_collective(self):
        return self._kill(self._loop, after=self.rng.uniform(0, 0.5))

    def rank_that_others_wait_for(self):
        return self._kill(lambda rank: lambda: self.group.total(asleep=[rank]), after=self.rng.uniform(0, 0.5))

    def idle_rank(self):
        return self._kill(lambda rank: self.group.total, after=0.0)

    def standby_and_then_a_rank(self):
        self._standby_ready()
        os.kill(self.group._transport.standbys[0].location().pid, signal.SIGKILL)
        return self._kill(self._loop, after=self.rng.uniform(0, 0.3), ready=False)

    def rank_and_another_while_it_is_replaced(self):
        (self.folder / f"die-{self.rng.randrange(RANKS)}").touch()
        return self._kill(self._loop, after=self.rng.uniform(0, 0.3), more=1)

    def two_ranks(self):
        return self._kill(self._loop, after=self.rng.uniform(0, 0.3), victims=2)

    def _loop(self, rank):
        return lambda: self.group.loop(30.0)

    def _standby_ready(self):
        wait_until(lambda: self.group.standbys() and self.group.standbys()[0].memory, 30, "a standby")

    def _kill(self, call, *, after, ready=True, victims=1, more=0):
        if ready:
            self._standby_ready()
        before = self.group.me()
        ranks = self.rng.sample(range(RANKS), victims)
        killed = []

        def kill():
            killed.append(time.monotonic())
            for rank in ranks:
                os.kill(before[rank]["pid"], signal.SIGKILL)

        if after:
            threading.Timer(after, kill).start()
        else:
            kill()
        try:
            call(ranks[0])()
            raise AssertionError("the call did not raise")
        except WorkerDiedError:
            told = time.monotonic()
        replaced = set(self.group.replace())
        assert self.group.total() == TOTAL
        back = time.monotonic()
        told_of = f"generation {self.group.generation}"
        assert set(ranks) <= replaced and len(replaced) <= victims + more, f"killed {ranks}, replaced {replaced}"
        for rank, (was, one) in enumerate(zip(before, self.group.me(), strict=True)):
            kept = ["constructed", "configured value"] if rank in replaced else was["history"]
            assert (was["pid"] != one["pid"]) == (rank in replaced)
            # The second of two deaths begins the change of membership again, so a rank may be told twice.
            assert list(dict.fromkeys(one["history"])) == list(dict.fromkeys([*kept, told_of])), one
        return Seen(told - killed[0], back - told)
