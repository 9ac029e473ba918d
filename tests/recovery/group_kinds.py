"""Kill processes of a group many times, have them replaced, and print how long it took as a table.

    python tests/recovery.py --rounds 200

Each round kills something at a random moment, waits until the driver is told, replaces what died, and checks that the
collectives work, that the other ranks have kept their processes and what they hold, and that nothing else has changed.
The rounds of a kind share a group. "Told" is the time from the kill to the error, "back" the time from the error until
all ranks have run a collective again. At the end no process and no memory may be left.

It starts its own Ray. The seed is printed; moments depend on the machine, too.
"""

import argparse
import os
import random
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections import defaultdict
from pathlib import Path

HERE = Path(__file__).resolve().parent
FOLDERS = [str(folder) for folder in (HERE, HERE / "groups", HERE.parent)]
sys.path += [folder for folder in FOLDERS if folder not in sys.path]
if __name__ == "__main__":  # tests/conftest.py does the same for the tests
    os.environ["PYTHONPATH"] = os.pathsep.join([*FOLDERS, os.environ.get("PYTHONPATH", "")])
    os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}

from footprint import Footprint  # noqa: E402
from replace_workers import Member  # noqa: E402

from single_controller import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup, WorkerDiedError  # noqa: E402

RANKS = 4
TOTAL = [16.0 * 10] * RANKS
HANG = 60
"""Seconds after which a round that has not ended hangs."""


class Group:
    """A group with a standby, and one kill per call of a method. Methods return (seconds until told, until back)."""

    def __init__(self, rng, folder):
        self.rng, self.folder = rng, Path(folder)
        self.pool = RayResourcePool([RANKS + 1], use_gpu=False)
        self.group = RayWorkerGroup(self.pool, RayClassWithInitArgs(Member, folder), standby=1)
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
        os.kill(self.group._engine.standbys[0].location().pid, signal.SIGKILL)
        return self._kill(self._loop, after=self.rng.uniform(0, 0.3), ready=False)

    def rank_and_another_while_it_is_replaced(self):
        (self.folder / "die").touch()
        return self._kill(self._loop, after=self.rng.uniform(0, 0.3), more=1)

    def two_ranks(self):
        return self._kill(self._loop, after=self.rng.uniform(0, 0.3), victims=2)

    def _loop(self, rank):
        return lambda: self.group.loop(30.0)

    def _standby_ready(self):
        wait(lambda: self.group.standbys() and self.group.standbys()[0].memory, "no standby is ready")

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
        return told - killed[0], back - told


KINDS = tuple(name for name in vars(Group) if not name.startswith("_") and name != "close")


def wait(condition, what, seconds=20.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, what
        time.sleep(0.02)


def hangs(*_):
    """Handle SIGALRM."""
    raise AssertionError(f"a round has not ended after {HANG} s: something hangs")


def quantiles(values):
    """p50 and p99 as text."""
    ordered = sorted(values)
    return f"{statistics.median(ordered):6.2f} {ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))]:6.2f}"


def main():
    options = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    options.add_argument("--rounds", type=int, default=50)
    options.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1_000_000))
    given = options.parse_args()
    rng = random.Random(given.seed)
    print(f"{given.rounds} rounds, seed {given.seed}")
    import ray

    ray.init(num_cpus=16, include_dashboard=False, log_to_driver=False, object_store_memory=512 << 20)
    signal.signal(signal.SIGALRM, hangs)
    seconds = defaultdict(list)
    with tempfile.TemporaryDirectory() as folder:
        before = Footprint.now()
        group = Group(rng, folder)
        for number in range(given.rounds):
            kind = KINDS[number % len(KINDS)]
            signal.alarm(HANG)
            seconds[kind].append(getattr(group, kind)())
            signal.alarm(0)
            print(
                f"{number + 1:4d}  {kind:42}told {seconds[kind][-1][0]:5.2f}  back {seconds[kind][-1][1]:5.2f}",
                flush=True,
            )
        group.close()
        before.wait_same(30)
    print(f"\n{'killed':42}  n   told p50, p99   back p50, p99 (s)")
    for kind, pairs in seconds.items():
        told, back = zip(*pairs, strict=True)
        print(f"{kind.replace('_', ' '):42}{len(pairs):3d}  {quantiles(told)}   {quantiles(back)}")
    print(f"all {given.rounds} rounds kept: every survivor kept its process and its state; nothing was left behind")
    ray.shutdown()


if __name__ == "__main__":
    main()
