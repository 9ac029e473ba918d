"""Gateways in the processes of rollout workers on Ray, behind one router: a worker is killed and replaced."""

import random
import time
from contextlib import contextmanager

import pytest
from agent_helpers import ScriptEngine
from devices import ON_DEVICE
from gateway_helpers import routing
from gateway_worker import engine, renderer
from rollout_helpers import EchoEngine
from test_gateway_router import kill_while_playing

from single_controller import LocalWorkerGroup, RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from workers.rollout.rollout_errors import RolloutError
from workers.rollout.rollout_worker import RolloutWorker

SESSIONS, TURNS = 40, 3


@contextmanager
def group_of_two():
    made = RayClassWithInitArgs(RolloutWorker, engine)
    with RayResourcePool([2], use_gpu=ON_DEVICE) as pool, RayWorkerGroup(pool, made, collectives=False) as group:
        yield group


def test_sessions_outlive_a_worker_of_a_group(ray_cluster):
    with group_of_two() as group:
        endpoints = group.start_gateway(renderer)
        assert endpoints == group.start_gateway(renderer) and len(set(endpoints)) == 2
        with routing(*endpoints) as router:
            pid = group.status().ranks[0].process.pid
            waited, *_ = kill_while_playing(router, pid, SESSIONS, TURNS, SESSIONS)
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
            pid = group.status().ranks[rank].process.pid
            waited, *_ = kill_while_playing(router, pid, SESSIONS, TURNS, turns)
            moved, begun = router.moved - before, time.monotonic()
            assert moved
            assert group.replace([rank]) == (rank,)
            router.set_workers(group.start_gateway(renderer))
            print(
                f"round {number + 1}: rank {rank} killed after {turns} turns, {moved} sessions opened again, all go on "
                f"after {waited:.1f} s; replaced in {time.monotonic() - begun:.1f} s"
            )


def test_an_engine_without_requests_serves_no_gateway():
    with LocalWorkerGroup(1, RayClassWithInitArgs(RolloutWorker, EchoEngine)) as group:
        with pytest.raises(RolloutError, match="batches only"):
            group.start_gateway(renderer)


def test_an_engine_with_requests_may_have_an_attribute_engine():
    wraps = type("Wraps", (ScriptEngine,), {"engine": None})  # such as that of another library
    with LocalWorkerGroup(1, RayClassWithInitArgs(RolloutWorker, wraps)) as group:
        assert len(group.start_gateway(renderer, host="127.0.0.1")) == 1
