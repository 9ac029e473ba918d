"""Gateways in the processes of rollout workers on Ray, behind one router: a worker is killed and replaced."""

import asyncio
import os
import signal
import time

import pytest
from devices import ON_DEVICE
from gateway_group import Served, engine, renderer
from rollout_helpers import EchoEngine
from test_gateway_router import check, play

from single_controller import LocalWorkerGroup, RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from workers.rollout.agents.gateway.gateway_router import GatewayRouter
from workers.rollout.rollout_errors import RolloutError

httpx = pytest.importorskip("httpx")


def test_sessions_outlive_a_worker_of_a_group(ray_cluster):
    pool = RayResourcePool([2], use_gpu=ON_DEVICE)
    group = RayWorkerGroup(pool, RayClassWithInitArgs(Served, engine), collectives=False)
    router = None
    try:
        endpoints = group.start_gateway(renderer)
        assert endpoints == group.start_gateway(renderer) and len(set(endpoints)) == 2
        pids = group.pid_of_process()
        router = GatewayRouter(endpoints)
        router.start()
        sessions, turns = 40, 3
        kept = {"tokens": [router.open(seed=one)[1] for one in range(sessions)], "calls": [], "done": [0] * sessions}

        async def kill():
            while sum(kept["done"]) < sessions:
                await asyncio.sleep(0.01)
            os.kill(pids[0], signal.SIGKILL)
            kept["killed"] = time.monotonic()

        async def all_of():
            await asyncio.gather(kill(), *(play(router, one, turns, kept) for one in range(sessions)))

        asyncio.run(all_of())
        waited = max(end - kept["killed"] for begun, end in kept["calls"] if begun < kept["killed"] < end)
        print(f"\nall {sessions} sessions go on after {waited:.1f} s; {router.moved} were opened again")
        for number, token in enumerate(kept["tokens"]):
            check(router.close(token), turns, number)
        assert router.moved >= sessions // 4
    finally:
        if router is not None:
            router.stop()
        group.close()
        pool.close()


def test_an_engine_without_requests_serves_no_gateway():
    with LocalWorkerGroup(1, RayClassWithInitArgs(Served, EchoEngine)) as group:
        with pytest.raises(RolloutError, match="batches only"):
            group.start_gateway(renderer)
