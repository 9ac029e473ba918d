"""Kill processes and hosts many times, have them replaced, and print what was seen as a table.

    python tests/recovery --rounds 280
    python tests/recovery --rounds 20 --kinds trainer_in_a_step,idle_rank

Each round kills something at a random moment, waits until the driver is told, has what died replaced, and checks that
nothing else has changed, and that no prompt was lost or trained twice. The kinds of rounds are methods: of groups that
start and of drivers (start_kinds.py), of a plain group (group_kinds.py), of weight updates (sync_kinds.py), of an
asynchronous training run (training_kinds.py), and of such a run on several hosts (host_kinds.py). Those of a file share
what they kill: there is one group, and one run.

"Told" is the time from the kill to the driver's error; for a rollout worker, to the library's warning. "Back" is the
time from then until the work goes on: until all ranks of the group have run a collective, or a further training step is
complete. After an outage nobody is told, and "back" is the time from its end to the next complete step. For steps that
are repeated, prompts that are lost and prompts that are trained twice, see training_kinds.py.

At the end no processes, placement groups, objects in Ray's store and files in shared memory are left. A round that
takes too long hangs: it ends this program, which shows where each rank is. The seed is printed; moments depend on the
machine, too.

It starts its own Ray, and needs root and network namespaces for the hosts. The workers of the training run are forked
from a process that has imported everything (tests/fork_workers.py), so that a standby is ready for the next round
within a second; those of the group and of the hosts are started as Ray does. With `--fork`, those of the group are
forked, too; "back" is then shorter than for a user.
"""

import argparse
import faulthandler
import gc
import os
import random
import signal
import statistics
import sys
import tempfile
import time
import traceback
import uuid
from collections import Counter, defaultdict
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path

HERE = Path(__file__).resolve().parent
TESTS = HERE.parent
FOLDERS = [str(folder) for folder in (HERE, TESTS, TESTS / "groups", TESTS / "hosts", TESTS.parent)]
sys.path += [folder for folder in FOLDERS if folder not in sys.path]
MARK = f"RECOVERY_{uuid.uuid4().hex}"
"""An environment variable of all processes that come from this one."""

# Ray reads the variables when it is imported. Its workers import the classes by name.
os.environ["PYTHONPATH"] = os.pathsep.join([*FOLDERS, os.environ.get("PYTHONPATH", "")])
os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", MARK: "1"}

import ray  # noqa: E402
from footprint import Footprint  # noqa: E402
from fork_workers import ORIGIN, PRELOADED, RANKS_ONLY, forked_workers  # noqa: E402
from group_kinds import Group  # noqa: E402
from host_kinds import Hosts  # noqa: E402
from host_network import missing  # noqa: E402
from rounds import shares  # noqa: E402
from start_kinds import Starts  # noqa: E402
from sync_kinds import Sync  # noqa: E402
from training_kinds import Training  # noqa: E402
from waits import wait_until  # noqa: E402

from single_controller.ray import inspect_groups  # noqa: E402

HANG = {Starts: 60, Group: 60, Sync: 60, Training: 60, Hosts: 240}
"""Seconds after which a round that has not ended hangs. The first one of a class also starts what it kills."""

START = 150
WEIGHTS = {
    Starts.rank_while_its_group_starts: 8,
    Starts.rank_while_its_group_restarts: 6,
    Starts.driver: 6,
    Group.rank_in_a_collective: 12,
    Group.rank_that_others_wait_for: 12,
    Group.idle_rank: 12,
    Group.standby_and_then_a_rank: 12,
    Group.rank_and_another_while_it_is_replaced: 12,
    Group.two_ranks: 12,
    Sync.sender_in_an_update: 20,
    Sync.receiver_in_an_update: 20,
    Sync.receiver_that_joins_in_an_update: 20,
    Training.trainer_in_a_step: 16,
    Training.trainer_in_a_snapshot: 14,
    Training.trainer_in_a_weight_update: 14,
    Training.trainer_in_a_save: 14,
    Training.trainer_in_a_background_save: 14,
    Training.trainer_and_the_one_that_replaces_it: 14,
    Training.rollout_worker_that_generates: 14,
    Training.rollout_worker_in_a_weight_update: 14,
    Hosts.host_whose_processes_are_killed: 4,
    Hosts.host_that_loses_its_power: 4,
    Hosts.host_cut_off_for_5_s: 6,
}
"""How many rounds of 280."""


def name(kind):
    return kind.__name__


def class_of(kind):
    return next(cls for cls in HANG if vars(cls).get(name(kind)) is kind)


def say(line):
    print(line, file=OUT, flush=True)


OUT = sys.stdout
SERVER = Path(os.environ.pop(ORIGIN)) if ORIGIN in os.environ else None
"""The server of the tests, to fork the training run's from. What is forked from it does not show MARK, so that of the
group is a program."""


# --- what is killed -----------------------------------------------------------------------------------------


@contextmanager
def local_ray(modules):
    """A Ray of one node, with workers that are forked from a process that has imported these modules, if there are any.
    What was made in it must be gone at the end."""
    server = SERVER if modules is PRELOADED else None
    with forked_workers(modules, server) if modules else nullcontext() as start_server:
        ray.init(
            "local",
            num_cpus=16,
            num_gpus=0,
            include_dashboard=False,
            log_to_driver=False,
            object_store_memory=512 << 20,
        )
        if modules:
            start_server()
        try:
            before, room = Footprint.now(shared_memory=False), free_store()
            yield
            before.wait_same(30, shared_memory=False)
            gc.collect()  # what was killed refers to groups that refer to it
            wait_until(lambda: free_store() >= room, 30, f"{room:.0f} free bytes in the object store")
        finally:
            ray.shutdown()


def free_store():
    """Bytes of Ray's object store that are free."""
    return ray.available_resources()["object_store_memory"]


def show_stacks(made):
    """Show where the processes are."""
    faulthandler.dump_traceback(all_threads=True)
    try:
        if isinstance(made, Hosts):
            say(made.stacks())
        else:
            say(inspect_groups.stacks(""))
    except Exception:
        say(f"the ranks cannot be asked:\n{traceback.format_exc()}")


class Hang(AssertionError):
    """A round takes too long."""


def hangs(*_):
    """Handle SIGALRM."""
    raise Hang("it has not ended in time: something hangs")


def play(cls, kinds, rng, seen, folder, fork):
    """Run rounds of the kinds of a class, in this order. Returns whether all was right."""
    doing = "the start"
    try:
        modules = PRELOADED if cls in (Training, Sync) else RANKS_ONLY if fork else ()
        with nullcontext() if cls is Hosts else local_ray(modules):
            signal.alarm(START)
            made = cls(rng, folder)
            try:
                for kind in kinds:
                    doing = name(kind)
                    signal.alarm(HANG[cls])
                    one = kind(made)
                    signal.alarm(0)
                    seen[kind].append(one)
                    row = "  ".join("-" if value is None else f"{value:.2f}" for value in one[:2])
                    say(f"{sum(map(len, seen.values())):4d}  {doing:40}told, back: {row}")
                    assert not one.lost and not one.twice, f"{one.lost} prompts lost, {one.twice} trained twice"
                doing = "the end"
                signal.alarm(START)
            except BaseException:
                signal.alarm(0)
                show_stacks(made)
                raise
            finally:
                made.close()
                made = None
    except BaseException:
        say(f"FAILED in {doing}:\n{traceback.format_exc()}")
        return False
    finally:
        signal.alarm(0)
    return True


# --- what is left -------------------------------------------------------------------------------------------


def left_behind(before):
    """Processes that come from this one, and files in shared memory that are new and that no process uses."""
    processes, used = [], set()
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if MARK.encode() in (process / "environ").read_bytes() and int(process.name) != os.getpid():
                processes.append((process.name, (process / "cmdline").read_text().replace("\0", " ")[:80]))
        with suppress(OSError):
            used.update(line.split("/dev/shm/")[1] for line in (process / "maps").open() if "/dev/shm/" in line)
        with suppress(OSError):
            used.update(Path(os.readlink(file)).name for file in (process / "fd").iterdir())
    return processes, sorted(set(os.listdir("/dev/shm")) - before - used)


# --- the table ----------------------------------------------------------------------------------------------


def quantiles(values):
    """p50 and p99 as text."""
    known = sorted(value for value in values if value is not None)
    if not known:
        return f"{'-':>6} {'-':>6}"
    return f"{statistics.median(known):6.2f} {known[min(len(known) - 1, int(0.99 * len(known)))]:6.2f}"


def total(values):
    return "-" if None in values else str(sum(values))


def show(seen):
    say(f"\n{'killed':40}  n    told p50, p99   back p50, p99 (s)   steps repeated  prompts lost, trained twice")
    for kind, all_of_it in seen.items():
        told, back, repeated, lost, twice = zip(*all_of_it, strict=True)
        times = f"{quantiles(told)}   {quantiles(back)}"
        counts = f"{total(repeated):>16} {total(lost):>13}, {total(twice)}"
        say(f"{name(kind).replace('_', ' '):40}{len(all_of_it):3d}   {times}    {counts}")


def read_options():
    kinds = {name(kind): kind for kind in WEIGHTS}
    options = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    options.add_argument("--rounds", type=int, default=50)
    options.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1_000_000))
    options.add_argument("--fork", action="store_true", help="start ranks of the group quickly, as forks")
    options.add_argument("--kinds", default=",".join(kinds), help=f"comma-separated, of: {', '.join(kinds)}")
    given = options.parse_args()
    unknown = set(given.kinds.split(",")) - set(kinds)
    if unknown:
        options.error(f"no such kinds: {', '.join(unknown)}")
    given.kinds = [kinds[chosen] for chosen in given.kinds.split(",")]
    return given


def main():
    """Read the options and run. Returns the exit status."""
    given, began = read_options(), time.monotonic()
    rng = random.Random(given.seed)
    reason = missing()
    if reason is not None and any(class_of(kind) is Hosts for kind in given.kinds):
        say(f"no rounds with hosts: {reason}")
        given.kinds = [kind for kind in given.kinds if class_of(kind) is not Hosts]
    counts = Counter(shares(given.rounds, {kind: WEIGHTS[kind] for kind in given.kinds}))
    say(f"{given.rounds} rounds, seed {given.seed}")
    signal.signal(signal.SIGALRM, hangs)
    memory, seen, right = set(os.listdir("/dev/shm")), defaultdict(list), True
    with tempfile.TemporaryDirectory(prefix="recovery-") as folder:
        log = os.open(Path(folder) / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        error = os.dup(2)
        os.dup2(log, 2)  # what Ray and the library say about deaths
        for cls in HANG:
            kinds = [kind for kind in counts.elements() if class_of(kind) is cls]
            rng.shuffle(kinds)
            path = Path(folder) / cls.__name__
            path.mkdir()
            if kinds and right:
                right = play(cls, kinds, rng, seen, path, given.fork)
        os.dup2(error, 2)
        if not right:
            say(f"The log ends with:\n{(Path(folder) / 'log').read_text()[-20_000:]}")
    with suppress(AssertionError):
        wait_until(lambda: not any(left_behind(memory)), 30)
    left = left_behind(memory)
    show(seen)
    say(f"\nprocesses left: {left[0] or 'none'}; shared memory left: {left[1] or 'none'}")
    done = sum(map(len, seen.values()))
    say(f"{done} of {given.rounds} rounds kept what is promised, in {time.monotonic() - began:.0f} s")
    return int(not right or any(left) or done < given.rounds)


if __name__ == "__main__":
    sys.exit(main())
