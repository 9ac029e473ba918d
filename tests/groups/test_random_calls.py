"""Random calls against a sequential model: results and order, and what senders are told when a rank is killed.

A failure shows the seed. RANDOM_CALLS_SEED=... repeats the choices, though not the timing.
"""

import os
import random
import signal
import sys
import threading
import time

import depth
import pytest
from interrupted_waits import Interrupts, no_hang
from random_call_workers import ConcurrentJournal
from random_calls import Sender, check_journals, lost_references
from ray.exceptions import RayActorError

from single_controller import (
    CallTimeoutError,
    GroupBrokenError,
    RayClassWithInitArgs,
    RayWorkerGroup,
    ResultError,
    WorkerDiedError,
)

TOLD = 5.0
"""Seconds within which every sender must be told that a rank has died."""


def new_seed():
    return int(os.environ.get("RANDOM_CALLS_SEED") or random.SystemRandom().randrange(1_000_000))


@pytest.fixture(scope="module")
def lost(ray_cluster):
    return lost_references()


@pytest.fixture
def interrupts():
    with Interrupts() as made:
        yield made


@pytest.fixture
def frequent_switches():
    """Threads alternate fifty times as often as usual."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-4)
    yield
    sys.setswitchinterval(before)


def in_threads(functions):
    """Run functions at the same time, the first in this thread, and raise the first error."""
    failed = []

    def run(function):
        try:
            function()
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=run, args=(function,), daemon=True) for function in functions[1:]]
    for thread in threads:
        thread.start()
    run(functions[0])
    for thread in threads:
        thread.join()
    if failed:
        raise failed[0]


def make_calls(group, count, senders, seed):
    """Have senders make random calls until there were that many of them."""
    left = iter(range(count))
    failed = threading.Event()

    def send(sender):
        try:
            for _ in left:
                if failed.is_set():
                    return
                sender.step()
            sender.finish()
        except BaseException as error:
            failed.set()
            error.add_note(f"seed {seed}, sender {sender.name} of {len(senders)}, at {sender.doing}")
            raise

    in_threads([lambda sender=sender: send(sender) for sender in senders])
    check_journals(group, senders)


@pytest.mark.parametrize(
    ("ranks", "threads"), [(2, 1), (3, 3), pytest.param(4, 2, marks=pytest.mark.full("random calls on more ranks"))]
)
@pytest.mark.timeout(400 if depth.full else 120)
@pytest.mark.usefixtures("frequent_switches")
def test_results_and_order(pool, lost, interrupts, ranks, threads):
    count = 6700 if depth.full else 100
    seed = new_seed()
    with RayWorkerGroup(pool[:ranks], RayClassWithInitArgs(ConcurrentJournal)) as group:
        with no_hang(group, 360 if depth.full else 80):
            senders = [Sender(group, f"t{k}", seed, lost, interrupts if k == 0 else None) for k in range(threads)]
            make_calls(group, count, senders, seed)


@pytest.mark.timeout(500 if depth.full else 120)
def test_every_sender_is_told_when_a_rank_is_killed_or_late(pool, lost):
    rounds, seed = 30 if depth.full else 1, new_seed()
    rng = random.Random(seed)
    with RayWorkerGroup(pool[:3], RayClassWithInitArgs(ConcurrentJournal)) as group:
        for number in range(rounds):
            with no_hang(group, 40):
                group.reset()
                what = f"seed {seed}, round {number} of {rounds}"
                break_group(group, rng, lost, what)
                recover = group.restart if rng.random() < 0.5 or not group._state.dead else group.replace
                recover()
                group.reset()
                make_calls(group, 30, [Sender(group, f"after{number}", seed, lost)], seed)


def break_group(group, rng, lost, what):
    """Kill a rank, or have a call exceed its timeout, while some threads make calls. All of them must be told."""
    pids = [rank.process.pid for rank in group.status().ranks]
    late = rng.random() < 0.25
    begun, told = [], {}

    def send(sender):
        while sender.name not in told and (not begun or time.monotonic() < begun[0] + TOLD):
            try:
                sender.step()
            except Exception as error:
                cause = error.__cause__ if isinstance(error, AssertionError) else error
                if isinstance(cause, (WorkerDiedError, GroupBrokenError, CallTimeoutError)):
                    told[sender.name] = time.monotonic(), cause
                elif isinstance(cause, ResultError) and "is lost" in str(cause):
                    pass  # a large result of a call that had ended, which was on the rank that has died
                elif not isinstance(cause, RayActorError):  # a direct call of a rank tells only its own end
                    error.add_note(f"{what}, sender {sender.name}, at {sender.doing}")
                    raise

    def harm():
        time.sleep(rng.uniform(0.0, 0.8))
        if late:
            with pytest.raises((CallTimeoutError, GroupBrokenError)):
                group.sleep.options(timeout=0.1)(("late", 1), 20.0)
            begun.append(time.monotonic())
        else:
            begun.append(time.monotonic())
            os.kill(rng.choice(pids), signal.SIGKILL)

    # Behind a late call, a direct call has to wait.
    count = rng.randrange(1, 5)
    senders = [Sender(group, f"s{k}", rng.random(), lost, references=not late) for k in range(count)]
    in_threads([lambda sender=sender: send(sender) for sender in senders] + [harm])
    for sender in senders:
        assert sender.name in told, f"{what}: {sender.name} was not told within {TOLD} s"
        when, error = told[sender.name]
        seconds = when - begun[0]
        assert seconds < TOLD, f"{what}: {sender.name} was told only after {seconds:.1f} s: {error}"
