"""The router of gateways: sessions outlive the worker's process, which is killed here."""

import asyncio
import errno
import json
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from statistics import median
from urllib.parse import quote

import pytest
from agent_helpers import Characters, ScriptEngine, log_prob

from workers.rollout.agents.gateway.gateway import Gateway
from workers.rollout.agents.rendering import TokenRenderer

httpx = pytest.importorskip("httpx")
pytest.importorskip("uvicorn")
gateway_router = pytest.importorskip("workers.rollout.agents.gateway.gateway_router")

HERE = Path(__file__).parent
CLIENT = httpx.Client()
ENV = {**os.environ, "PYTHONPATH": f"{HERE.parent.parent}:{HERE}"}


@contextmanager
def worker(tokens=1000, delay=0.0):
    """A process with a gateway, and its endpoint."""
    command = [sys.executable, str(HERE / "gateway_worker.py"), str(tokens), str(delay)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=ENV) as process:
        try:
            yield process, tuple(json.loads(process.stdout.readline()))
        finally:
            process.kill()


@contextmanager
def routing(*workers, **options):
    router = gateway_router.GatewayRouter(workers, **options)
    router.start()
    try:
        yield router
    finally:
        router.stop()


def post(router, token, messages, timeout=60):
    body, headers = {"model": "m", "messages": messages}, {"x-api-key": token}
    return CLIENT.post(f"{router.address}/v1/chat/completions", json=body, headers=headers, timeout=timeout)


def user(text):
    return {"role": "user", "content": text}


def test_sessions_go_where_there_are_fewest_and_stay_there():
    with worker() as (_, one), worker() as (_, two), routing(one, two) as router:
        tokens = [router.open(seed=number)[1] for number in range(6)]
        for token in tokens:
            messages = [user("abc")]
            for _ in range(2):
                reply = post(router, token, messages)
                assert reply.status_code == 200, reply.text
                messages += [reply.json()["choices"][0]["message"], user("xyz")]
        assert sorted(len(one.sessions) for one in router._workers) == [3, 3]
        assert post(router, "sk-none", [user("a")]).status_code == 401
        assert post(router, tokens[0], []).status_code == 400
        trees = [router.close(token) for token in tokens]
        assert [len(tree.nodes) for tree in trees] == [4] * 6 and router.moved == 0
        assert post(router, tokens[0], [user("a")]).status_code == 401


def check(tree, turns, number):
    """A session's tree: one path, of which each token was given by the client or sampled by an engine, once."""
    assert [node.parent for node in tree.nodes] == [None, *range(2 * turns - 1)]
    for node in range(1, 2 * turns, 2):
        of, prompt = tree.nodes[node], tree.token_ids(node - 1)
        assert of.sampled and not tree.nodes[node - 1].sampled
        assert list(of.log_probs) == [log_prob(prompt, list(of.token_ids), i) for i in range(len(of.token_ids))]
        said = Characters().decode(of.token_ids)
        assert said.endswith(f":{f'turn {node // 2} of {number}'[::-1]}<end>"), said


async def play(router, number, turns, kept):
    """A client: it knows nothing of workers, and no call of it may fail. It notes how long each took.

    Each has a pool of connections of its own: httpx looks at all connections of a pool for each request.
    """
    token, messages = kept["tokens"][number], []
    async with httpx.AsyncClient(timeout=60, verify=False) as client:
        for turn in range(turns):
            messages.append(user(f"turn {turn} of {number}"))
            begun = time.monotonic()
            reply = await client.post(
                f"{router.address}/v1/chat/completions", json={"messages": messages}, headers={"x-api-key": token}
            )
            kept["calls"].append((begun, time.monotonic()))
            assert reply.status_code == 200, reply.text
            messages.append(reply.json()["choices"][0]["message"])
            kept["done"][number] = turn + 1


def test_killing_a_worker_with_200_open_sessions_loses_nothing():
    sessions, turns = 200, 3
    with ExitStack() as stack:
        processes, endpoints = zip(*(stack.enter_context(worker(8, 0.02)) for _ in range(2)), strict=True)
        router = stack.enter_context(routing(*endpoints))
        kept = {"tokens": [router.open(seed=one)[1] for one in range(sessions)], "calls": [], "done": [0] * sessions}
        killed = []

        async def kill():
            while sum(kept["done"]) < sessions * turns // 3:
                await asyncio.sleep(0.01)
            open_there = [len(one.sessions) for one in router._workers]
            os.kill(processes[0].pid, signal.SIGKILL)
            killed.extend([time.monotonic(), open_there[0]])

        async def all_of():
            await asyncio.gather(kill(), *(play(router, one, turns, kept) for one in range(sessions)))

        asyncio.run(all_of())
        for number, token in enumerate(kept["tokens"]):
            check(router.close(token), turns, number)
        # The calls that were open when the worker died: the last of them to end is when all go on.
        at, there = killed
        waited = max(end - at for begun, end in kept["calls"] if begun < at < end)
        usual = median(end - begun for begun, end in kept["calls"] if end < at)
        print(
            f"\nkilled with {there} of {sessions} sessions there; {router.moved} were opened again; all go on after "
            f"{waited:.1f} s; a call takes {usual:.1f} s"
        )
        assert there >= 90 and router.moved >= there // 2
        assert router.sessions == 0


def test_a_router_that_was_killed_continues_from_its_state():
    with worker() as (process, one), worker() as (_, two):
        with routing(one) as router:
            _, token = router.open("row", seed=5)
            messages = [user("abc")]
            messages += [post(router, token, messages).json()["choices"][0]["message"], user("xyz")]
            state, port = json.dumps(router.state_dict(), default=bytes.decode), int(router.address.rpartition(":")[2])
        process.kill()
        state = json.loads(state)
        state["sessions"] = {
            name: (head, [line.encode() for line in kept]) for name, (head, kept) in state["sessions"].items()
        }
        with routing(two, port=port) as router:
            router.load_state_dict(state)
            reply = post(router, token, messages)
            assert reply.json()["choices"][0]["message"]["content"].endswith(":zyx")
            tree = router.close(token)
    assert [node.parent for node in tree.nodes] == [None, 0, 1, 2]


@contextmanager
def gateways(kind=Gateway):
    """A gateway of this process behind a router."""
    engine = ScriptEngine(lambda *_: "fine")
    gateway = kind(engine, TokenRenderer(Characters()))
    gateway.start()
    try:
        with routing(gateway.endpoint) as router:
            yield gateway, router
    finally:
        gateway.stop()
        engine.close()


BREAKS = "/health HTTP/1.1\r\nhost: x\r\n\r\nPUT /private/sessions"


@pytest.mark.parametrize("path", ["/private/sessions", BREAKS], ids=["private", "line breaks"])
def test_a_client_reaches_nothing_but_its_sessions_calls(path):
    """With the router's key it could choose how to sample, write its own tokens, or answer others' calls."""
    with gateways() as (gateway, router):
        _, token = router.open("mine", seed=1)
        assert post(router, token, [user("a")]).status_code == 200
        head = {"row_id": "forged", "seed": 2, "sampling_params": {"temperature": 5.0}, "token_ids": False}
        for method in ("PUT", "POST", "DELETE"):
            url = f"{router.address}{quote(path)}"
            reply = CLIENT.request(method, url, content=json.dumps(head), headers={"x-api-key": token})
            assert (reply.status_code, reply.json()["error"]["code"]) == (404, "path")
        assert CLIENT.get(f"{router.address}/v1/models", headers={"x-api-key": token}).json()["data"]
        assert post(router, token, [user("b")]).json()["choices"][0]["message"]["content"] == "fine"
        assert [(one.row_id, one.sampling_params.temperature) for one in gateway._sessions.values()] == [("mine", 1.0)]


def test_a_session_that_is_closed_while_it_is_opened_at_a_worker_is_closed_there():
    class SlowToOpen(Gateway):
        def _of_router(self, call):
            time.sleep(0.3)
            return super()._of_router(call)

    with gateways(SlowToOpen) as (gateway, router), ThreadPoolExecutor() as pool:
        _, token = router.open()
        call = pool.submit(post, router, token, [user("a")])
        time.sleep(0.15)
        router.close(token)
        assert call.result().status_code == 401
        end = time.monotonic() + 10
        while gateway.sessions and time.monotonic() < end:
            time.sleep(0.02)
        assert not gateway.sessions and not gateway.engine.seen and router._workers[0].sessions == set()


def test_a_client_that_leaves_while_its_session_is_opened_leaves_one_session():
    opened = []

    class SlowToOpen(Gateway):
        def _of_router(self, call):
            opened.append(call.method)
            time.sleep(0.3)
            return super()._of_router(call)

    with gateways(SlowToOpen) as (gateway, router):
        _, token = router.open()
        with pytest.raises(httpx.TimeoutException):
            post(router, token, [user("a")], timeout=0.15)
        assert post(router, token, [user("a")]).status_code == 200
        assert (opened, gateway.sessions, router.moved) == (["PUT"], 1, 0)


def test_a_worker_that_comes_back_forgets_the_sessions_that_have_moved(monkeypatch):
    monkeypatch.setattr(gateway_router, "HEALTH_SECONDS", 0.05)
    with gateways() as (gateway, router), worker() as (_, other):
        tokens = [router.open()[1] for _ in range(3)]
        messages = [user("a")]
        for token in tokens:
            assert post(router, token, messages).status_code == 200
        router.set_workers([gateway.endpoint, other])
        router._front.loop.call_soon_threadsafe(router._lost, router._workers[0], "a cut")
        end = time.monotonic() + 10
        while (gateway.sessions or not router._workers[0].up) and time.monotonic() < end:
            time.sleep(0.02)
        assert gateway.sessions == 0 and router._workers[0].up
        for token in tokens:
            assert post(router, token, messages).status_code == 200
            assert len(router.close(token).nodes) == 3  # a retry is a branch


def test_sessions_can_be_closed_after_the_router_was_stopped():
    with gateways() as (_, router):
        _, token = router.open()
        assert post(router, token, [user("a")]).status_code == 200
        router.stop()
        assert len(router.close(token).nodes) == 2


class Mortal:
    """A worker that opens sessions, answers "fine", and ends its connections when it reads "poison"."""

    def __init__(self):
        self.read, self.connections, self.started = 0, 0, threading.Event()
        self.thread = threading.Thread(target=lambda: asyncio.run(self.serve()), daemon=True)
        self.thread.start()
        self.started.wait(10)

    async def serve(self):
        server = await asyncio.start_server(self.answer, "127.0.0.1", 0)
        self.endpoint = (f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", "key")
        self.loop, self.ended = asyncio.get_running_loop(), asyncio.Event()
        self.started.set()
        await self.ended.wait()
        server.close()

    async def answer(self, reader, writer):
        self.connections += 1
        with suppress(EOFError, ConnectionError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                body = await reader.readexactly(int(head.lower().partition("content-length: ")[2].split()[0]))
                self.read += b"poison" in body
                if b"poison" in body:
                    break
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\nfine")
        writer.close()


def test_a_call_that_its_workers_die_of_is_not_given_to_all():
    workers = [Mortal() for _ in range(gateway_router.MAX_LOSSES + 1)]
    try:
        with routing(*(one.endpoint for one in workers)) as router:
            (_, bad), (_, good) = router.open(), router.open()
            for _ in range(2):  # its client tries again
                died = post(router, bad, [user("poison")])
                assert (died.status_code, died.json()["error"]["code"]) == (500, "failed") and "3 workers" in died.text
            assert sorted(one.read for one in workers) == [0, 1, 1, 1]
            assert post(router, good, [user("x")]).text == "fine"
    finally:
        for one in workers:
            one.loop.call_soon_threadsafe(one.ended.set)
            one.thread.join(10)


def test_a_connection_that_the_worker_may_be_closing_is_not_used(monkeypatch):
    one = Mortal()

    async def play():
        worker, seen = gateway_router._Worker(*one.endpoint), []
        for reuse in (60.0, 60.0, 0.0):
            monkeypatch.setattr(gateway_router, "REUSE_SECONDS", reuse)
            assert (await worker.send("GET", "/health", {}, b""))[2] == b"fine"
            seen.append(one.connections)
        worker.leave()
        return seen

    assert asyncio.run(play()) == [1, 1, 2]
    one.loop.call_soon_threadsafe(one.ended.set)
    one.thread.join(10)


def test_a_router_without_file_descriptors_keeps_its_workers(monkeypatch, caplog):
    opened, refused = asyncio.open_connection, []

    async def scarce(*args, **options):
        if len(refused) < 5:
            refused.append(args)
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return await opened(*args, **options)

    async def play():
        worker = gateway_router._Worker(*one.endpoint)
        reply = await worker.send("GET", "/health", {}, b"")
        worker.leave()
        return reply

    one = Mortal()
    monkeypatch.setattr(asyncio, "open_connection", scarce)
    assert asyncio.run(play())[2] == b"fine" and len(refused) == 5
    assert caplog.text.count("cannot open another connection: [Errno 24] Too many open files") == 1
    one.loop.call_soon_threadsafe(one.ended.set)
    one.thread.join(10)


def test_connections_of_a_peak_are_closed(monkeypatch):
    one = Mortal()

    async def play():
        worker = gateway_router._Worker(*one.endpoint)
        await asyncio.gather(*(worker.send("GET", "/health", {}, b"") for _ in range(9)))
        most = len(worker.idle)
        monkeypatch.setattr(gateway_router, "REUSE_SECONDS", 1.0)
        for _ in range(4):  # one of them is always in use
            await asyncio.sleep(0.4)
            await worker.look()
        left = len(worker.idle)
        worker.leave()
        return most, left

    most, left = asyncio.run(play())
    assert most > 1 and left == 1
    one.loop.call_soon_threadsafe(one.ended.set)
    one.thread.join(10)


def test_a_head_request_costs_no_worker():
    with gateways() as (_, router):
        _, token = router.open("mine", seed=1)
        for method in ("HEAD", "POST"):
            url, headers = f"{router.address}/v1/models", {"x-api-key": token}
            assert CLIENT.request(method, url, headers=headers, timeout=5).status_code == 405
        assert all(worker.up for worker in router._workers)


def test_a_call_waits_while_no_worker_is_there():
    with routing() as router, worker() as (_, one):
        _, token = router.open()

        async def late():
            async with httpx.AsyncClient(timeout=30) as client:
                body = {"messages": [user("abc")]}
                url, headers = f"{router.address}/v1/chat/completions", {"x-api-key": token}
                call = asyncio.ensure_future(client.post(url, json=body, headers=headers))
                await asyncio.sleep(0.5)
                assert not call.done()
                await asyncio.to_thread(router.set_workers, [one])
                return await call

        assert asyncio.run(late()).status_code == 200


def test_sessions_that_nobody_closes_expire_at_the_router_and_at_its_worker():
    with worker(2, 0.1) as (_, one), routing(one, limits=gateway_router.GatewayLimits(idle_seconds=1.5)) as router:
        _, left = router.open("left")
        assert post(router, left, [user("ab")]).status_code == 200
        _, used = router.open("used")
        assert post(router, used, [user("x" * 50)]).status_code == 200  # takes 2.5 s
        assert router.sessions == 1 and router.moved == 0 and router._workers[0].sessions == {used}
        late = post(router, left, [user("x")])
        assert late.status_code == 401 and "expired" in late.text
        with pytest.raises(KeyError, match="expire"):
            router.close(left)
        # The worker, whose own limit is an hour, has closed it too.
        headers = {"x-api-key": left, "x-gateway-key": one[1]}
        url = f"{one[0]}/v1/chat/completions"
        assert CLIENT.post(url, json={"messages": [user("x")]}, headers=headers).status_code == 410
        assert len(router.close(used).nodes) == 2


def test_a_worker_that_was_replaced_gives_its_sessions_away():
    with worker(1, 0.05) as (_, one), worker() as (_, two), routing(one) as router:
        _, token = router.open()

        async def replaced():
            async with httpx.AsyncClient(timeout=30) as client:
                body = {"messages": [user("abcdefghijklmnopqrstuvwxyz" * 3)]}
                url, headers = f"{router.address}/v1/chat/completions", {"x-api-key": token}
                call = asyncio.ensure_future(client.post(url, json=body, headers=headers))
                await asyncio.sleep(0.5)
                await asyncio.to_thread(router.set_workers, [two])
                return await call

        assert asyncio.run(replaced()).status_code == 200
        headers = {"x-api-key": token, "x-gateway-key": one[1]}
        url = f"{one[0]}/v1/chat/completions"
        assert CLIENT.post(url, json={"messages": [user("x")]}, headers=headers).status_code == 410  # it has forgotten
        assert len(router.close(token).nodes) == 2 and router.moved == 1
