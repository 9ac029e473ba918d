"""Gateways in the processes of rollout workers on Ray, behind one router: a worker is killed and replaced."""

import asyncio
import os
import random
import signal
import time
from contextlib import contextmanager

import pytest
from devices import ON_DEVICE
from gateway_group import Served, engine, renderer
from rollout_helpers import EchoEngine
from test_gateway_router import check, play, routing

from single_controller import LocalWorkerGroup, RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from workers.rollout.rollout_errors import RolloutError

SESSIONS, TURNS = 40, 3


@contextmanager
def group_of_two():
    pool = RayResourcePool([2], use_gpu=ON_DEVICE)
    group = RayWorkerGroup(pool, RayClassWithInitArgs(Served, engine), collectives=False)
    try:
        yield group
    finally:
        group.close()
        pool.close()


def kill_while_playing(router, pid, turns):
    """Open sessions, play them, kill a worker once this many turns have been played, and check all that was sampled.

    Returns:
        The seconds from the kill until each call that was open then had its reply.
    """
    tokens = [router.open(seed=one)[1] for one in range(SESSIONS)]
    kept = {"tokens": tokens, "calls": [], "done": [0] * SESSIONS}
    at = []

    async def kill():
        while sum(kept["done"]) < turns:
            await asyncio.sleep(0.01)
        os.kill(pid, signal.SIGKILL)
        at.append(time.monotonic())

    async def all_of():
        await asyncio.gather(kill(), *(play(router, one, TURNS, kept) for one in range(SESSIONS)))

    asyncio.run(all_of())
    for number, token in enumerate(tokens):
        check(router.close(token), TURNS, number)
    return max((end - at[0] for begun, end in kept["calls"] if begun < at[0] < end), default=0.0)


def test_sessions_outlive_a_worker_of_a_group(ray_cluster):
    with group_of_two() as group:
        endpoints = group.start_gateway(renderer)
        assert endpoints == group.start_gateway(renderer) and len(set(endpoints)) == 2
        with routing(*endpoints) as router:
            waited = kill_while_playing(router, group.pid_of_process()[0], SESSIONS)
            print(f"\nall {SESSIONS} sessions go on after {waited:.1f} s; {router.moved} were opened again")
            assert router.moved >= SESSIONS // 4


@pytest.mark.full("twenty workers with open sessions of gateways, killed one after the other")
@pytest.mark.timeout(900)
def test_twenty_workers_are_killed_and_replaced(ray_cluster):
    rng = random.Random(36)
    with group_of_two() as group, routing(*group.start_gateway(renderer)) as router:
        for number in range(20):
            rank, turns = rng.randrange(2), rng.randrange(1, SESSIONS * TURNS // 2)
            before = router.moved
            waited = kill_while_playing(router, group.pid_of_process()[rank], turns)
            moved, begun = router.moved - before, time.monotonic()
            assert moved
            assert group.replace([rank]) == (rank,)
            router.set_workers(group.start_gateway(renderer))
            print(
                f"round {number + 1}: rank {rank} killed after {turns} turns, {moved} sessions opened again, all go on "
                f"after {waited:.1f} s; replaced in {time.monotonic() - begun:.1f} s"
            )


def test_an_engine_without_requests_serves_no_gateway():
    with LocalWorkerGroup(1, RayClassWithInitArgs(Served, EchoEngine)) as group:
        with pytest.raises(RolloutError, match="batches only"):
            group.start_gateway(renderer)
