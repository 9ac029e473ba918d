"""The router of gateways: sessions outlive the worker's process, which is killed here."""

import asyncio
import errno
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from urllib.parse import quote

import numpy
import pytest
from agent_helpers import Characters, ScriptEngine, log_prob, user
from gateway_helpers import CLIENT, chat, httpx, routing, serving
from gateway_worker import engine as reversing
from waits import wait_until

from workers.rollout.agents.gateway import gateway_router
from workers.rollout.agents.gateway.gateway import Gateway
from workers.rollout.agents.gateway.gateway_router import GatewayRouter

HERE = Path(__file__).parent
ENV = {**os.environ, "PYTHONPATH": f"{HERE.parent.parent}:{HERE}"}


@contextmanager
def worker_processes(*engines):
    """A process with a gateway for each engine, whose tokens and delay are given, and its endpoint."""
    with ExitStack() as stack:
        processes = []
        for engine in engines:
            command = [sys.executable, str(HERE / "gateway_worker.py"), *map(str, engine)]
            process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=ENV)
            processes.append(stack.enter_context(process))
            stack.callback(process.kill)
        yield [(process, tuple(json.loads(process.stdout.readline()))) for process in processes]


FAST = (1000, 0.0)


def fast():
    """The engine of such a process, for a gateway in this one."""
    return reversing(*FAST)


def test_sessions_go_where_there_are_fewest_and_stay_there():
    with serving(fast()) as one, serving(fast()) as two, routing(one.endpoint, two.endpoint) as router:
        tokens = [router.open(seed=number)[1] for number in numpy.arange(6)]
        for token in tokens:
            messages = [user("abc")]
            for _ in range(2):
                reply = chat(router, token, messages)
                assert reply.status_code == 200, reply.text
                messages += [reply.json()["choices"][0]["message"], user("xyz")]
        assert sorted(len(one.sessions) for one in router._workers) == [3, 3]
        assert chat(router, "sk-none", [user("a")]).status_code == 401
        assert chat(router, tokens[0], []).status_code == 400
        trees = [router.close(token) for token in tokens]
        assert [len(tree.nodes) for tree in trees] == [4] * 6 and router.moved == 0
        assert chat(router, tokens[0], [user("a")]).status_code == 401


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


def kill_while_playing(router, pid, sessions, turns, after):
    """Open sessions, play them, kill a worker once ``after`` turns have been played, and check all that was sampled.

    Returns:
        The seconds from the kill until each call that was open then had its reply; and (begin, end) of all calls, when
        the worker was killed, and how many sessions the router's first worker had then.
    """
    kept = {"tokens": [router.open(seed=one)[1] for one in range(sessions)], "calls": [], "done": [0] * sessions}

    async def kill():
        while sum(kept["done"]) < after:
            await asyncio.sleep(0.01)
        kept["there"] = len(router._workers[0].sessions)
        os.kill(pid, signal.SIGKILL)
        kept["killed"] = time.monotonic()

    async def all_of():
        await asyncio.gather(kill(), *(play(router, one, turns, kept) for one in range(sessions)))

    asyncio.run(all_of())
    for number, token in enumerate(kept["tokens"]):
        check(router.close(token), turns, number)
    calls, at = kept["calls"], kept["killed"]
    return max((end - at for begun, end in calls if begun < at < end), default=0.0), calls, at, kept["there"]


def test_killing_a_worker_with_200_open_sessions_loses_nothing():
    sessions, turns = 200, 3
    with worker_processes((8, 0.02), (8, 0.02)) as ((process, one), (_, two)), routing(one, two) as router:
        waited, calls, at, there = kill_while_playing(router, process.pid, sessions, turns, sessions * turns // 3)
        usual = median(end - begun for begun, end in calls if end < at)
        print(
            f"\nkilled with {there} of {sessions} sessions there; {router.moved} were opened again; all go on after "
            f"{waited:.1f} s; a call takes {usual:.1f} s"
        )
        assert waited and there >= 90 and router.moved >= there // 2
        assert router.sessions == 0


def test_a_router_that_was_killed_continues_from_its_state():
    with worker_processes(FAST) as ((process, one),), serving(fast()) as two:
        with routing(one) as router:
            _, token = router.open("row", seed=5)
            messages = [user("abc")]
            messages += [chat(router, token, messages).json()["choices"][0]["message"], user("xyz")]
            state, port = json.dumps(router.state_dict(), default=bytes.decode), int(router.address.rpartition(":")[2])
        process.kill()
        state = json.loads(state)
        state["sessions"] = {
            name: (head, [line.encode() for line in kept]) for name, (head, kept) in state["sessions"].items()
        }
        with routing(two.endpoint, port=port) as router:
            router.load_state_dict(state)
            reply = chat(router, token, messages)
            assert reply.json()["choices"][0]["message"]["content"].endswith(":zyx")
            tree = router.close(token)
    assert [node.parent for node in tree.nodes] == [None, 0, 1, 2]


def test_a_state_replaces_the_sessions_of_a_running_router(monkeypatch):
    """A call that is being answered begins again, and workers forget the sessions that are not in the state."""
    monkeypatch.setattr(gateway_router, "HEALTH_SECONDS", 0.05)
    engine = ScriptEngine(lambda *_: "fine" * 100, tokens=1, delay=0.02)
    with serving(engine) as gateway, routing(gateway.endpoint) as router, ThreadPoolExecutor() as pool:
        _, kept = router.open()
        state = router.state_dict()
        _, other = router.open()
        calls = [pool.submit(chat, router, token, [user("a")]) for token in (kept, other)]
        wait_until(lambda: engine.load().running == 2, 10)
        router.load_state_dict(state)
        engine.tokens = 1000  # it need not take as long again
        assert [call.result().status_code for call in calls] == [200, 401]
        assert gateway.sessions == 1 and router._workers[0].sessions == {kept}
        assert len(router.close(kept).nodes) == 2 and not router.sessions


def test_a_session_of_a_state_does_not_expire_during_a_call_that_began_before(monkeypatch):
    monkeypatch.setattr(gateway_router, "HEALTH_SECONDS", 0.05)
    engine = ScriptEngine(lambda *_: "fine" * 50, tokens=1, delay=0.01)  # more than two seconds
    limits = gateway_router.GatewayLimits(idle_seconds=0.6)
    with serving(engine) as gateway, routing(gateway.endpoint, limits=limits) as router, ThreadPoolExecutor() as pool:
        _, token = router.open()
        call = pool.submit(chat, router, token, [user("a")])
        wait_until(lambda: engine.load().running, 10)
        router.load_state_dict(router.state_dict())
        assert call.result().status_code == 200


@contextmanager
def gateways(kind=Gateway):
    """A gateway of this process behind a router, and the token of a session."""
    with serving(ScriptEngine(lambda *_: "fine"), kind=kind) as gateway, routing(gateway.endpoint) as router:
        yield gateway, router, router.open("mine", seed=1)[1]


BREAKS = "/health HTTP/1.1\r\nhost: x\r\n\r\nPUT /private/sessions"


@pytest.mark.parametrize("path", ["/private/sessions", BREAKS], ids=["private", "line breaks"])
def test_a_client_reaches_nothing_but_its_sessions_calls(path):
    """With the router's key it could choose how to sample, write its own tokens, or answer others' calls."""
    with gateways() as (gateway, router, token):
        assert chat(router, token, [user("a")]).status_code == 200
        head = {"row_id": "forged", "seed": 2, "sampling_params": {"temperature": 5.0}, "token_ids": False}
        for method in ("PUT", "POST", "DELETE"):
            url = f"{router.address}{quote(path)}"
            reply = CLIENT.request(method, url, content=json.dumps(head), headers={"x-api-key": token})
            assert (reply.status_code, reply.json()["error"]["code"]) == (404, "path")
        assert CLIENT.get(f"{router.address}/v1/models", headers={"x-api-key": token}).json()["data"]
        assert chat(router, token, [user("b")]).json()["choices"][0]["message"]["content"] == "fine"
        assert [(one.row_id, one.sampling_params.temperature) for one in gateway._sessions.values()] == [("mine", 1.0)]


def test_a_session_that_is_closed_while_it_is_opened_at_a_worker_is_closed_there():
    class SlowToOpen(Gateway):
        def _of_router(self, call):
            time.sleep(0.3)
            return super()._of_router(call)

    with gateways(SlowToOpen) as (gateway, router, token), ThreadPoolExecutor() as pool:
        call = pool.submit(chat, router, token, [user("a")])
        time.sleep(0.15)
        router.close(token)
        assert call.result().status_code == 401
        wait_until(lambda: not gateway.sessions, 10)
        assert not gateway.engine.seen and router._workers[0].sessions == set()


def test_a_session_that_is_closed_as_its_worker_is_noted_is_closed_there():
    with gateways() as (gateway, router, token), ThreadPoolExecutor() as pool:

        class Closing(dict):
            def get(self, token):
                found = super().get(token)
                if found is not None and gateway.sessions:  # the router looks whether the session is still open
                    pool.submit(router.close, token).result()
                return found

        router._sessions = Closing(router._sessions)
        assert chat(router, token, [user("a")]).status_code == 401
        wait_until(lambda: not gateway.sessions, 10)


def test_a_reply_that_comes_after_its_session_was_closed_is_an_error():
    """What a client has seen is in the session's tree."""
    made, closed = threading.Event(), threading.Event()

    class SlowToReply(Gateway):
        async def _play_for_router(self, call):
            reply = await super()._play_for_router(call)
            if call.dialect is not None:
                made.set()
                await asyncio.to_thread(closed.wait, 10)
            return reply

    with gateways(SlowToReply) as (_, router, token), ThreadPoolExecutor() as pool:
        call = pool.submit(chat, router, token, [user("a")])
        assert made.wait(10)
        assert router.close(token).nodes == []
        closed.set()
        assert call.result().status_code == 401


def test_a_client_that_leaves_while_its_session_is_opened_leaves_one_session():
    opened = []

    class SlowToOpen(Gateway):
        def _of_router(self, call):
            opened.append(call.method)
            time.sleep(0.3)
            return super()._of_router(call)

    with gateways(SlowToOpen) as (gateway, router, token):
        with pytest.raises(httpx.TimeoutException):
            chat(router, token, [user("a")], timeout=0.15)
        assert chat(router, token, [user("a")]).status_code == 200
        assert (opened, gateway.sessions, router.moved) == (["PUT"], 1, 0)


def test_a_worker_that_comes_back_forgets_the_sessions_that_have_moved(monkeypatch):
    monkeypatch.setattr(gateway_router, "HEALTH_SECONDS", 0.05)
    with gateways() as (gateway, router, _), serving(fast()) as other:
        tokens = [router.open()[1] for _ in range(3)]
        messages = [user("a")]
        for token in tokens:
            assert chat(router, token, messages).status_code == 200
        router.set_workers([gateway.endpoint, other.endpoint])
        router._front.loop.call_soon_threadsafe(router._lost, router._workers[0], "a cut")
        wait_until(lambda: gateway.sessions == 0 and router._workers[0].up, 10)
        for token in tokens:
            assert chat(router, token, messages).status_code == 200
            assert len(router.close(token).nodes) == 3  # a retry is a branch


def test_a_session_that_its_worker_has_forgotten_is_opened_there_again_and_has_not_moved():
    with gateways() as (gateway, router, token):
        for text in "ab":
            assert chat(router, token, [user(text)]).status_code == 200
            gateway.close(token)
        assert len(router.close(token).nodes) == 4 and router.moved == 0


@pytest.mark.parametrize("closing", [False, True])
def test_sessions_can_be_closed_after_the_router_was_stopped(monkeypatch, closing):
    """Also as if its loop were closed between a check and the call."""
    with gateways() as (_, router, token):
        assert chat(router, token, [user("a")]).status_code == 200
        router.stop()
        if closing:
            monkeypatch.setattr(router._front.loop, "is_closed", lambda: False)
        assert len(router.close(token).nodes) == 2


class Mortal:
    """A worker that opens sessions, answers "fine", and ends its connections when it reads "poison"."""

    headers = ""

    def __init__(self):
        self.read, self.connections, self.started = 0, 0, threading.Event()
        self.thread = threading.Thread(target=lambda: asyncio.run(self.serve()), daemon=True)

    def __enter__(self):
        self.thread.start()
        self.started.wait(10)
        return self

    def __exit__(self, *raised):
        self.loop.call_soon_threadsafe(self.ended.set)
        self.thread.join(10)

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
                if (status := self.status(head, body)) is None:
                    break
                writer.write(f"HTTP/1.1 {status}\r\n{self.headers}content-length: 4\r\n\r\nfine".encode())
        writer.close()

    def status(self, head, body):
        self.read += b"poison" in body
        return None if b"poison" in body else "200 OK"


def test_a_call_that_its_workers_die_of_is_not_given_to_all():
    with ExitStack() as stack:
        workers = [stack.enter_context(Mortal()) for _ in range(gateway_router.MAX_LOSSES + 1)]
        router = stack.enter_context(routing(*(one.endpoint for one in workers)))
        (_, bad), (_, good) = router.open(), router.open()
        for _ in range(2):  # its client tries again
            died = chat(router, bad, [user("poison")])
            assert (died.status_code, died.json()["error"]["code"]) == (500, "failed") and "3 workers" in died.text
        assert sorted(one.read for one in workers) == [0, 1, 1, 1]
        assert chat(router, good, [user("x")]).text == "fine"


def test_a_call_that_breaks_the_connection_of_the_only_worker_gets_an_error(monkeypatch):
    """The worker itself answers again at once."""
    monkeypatch.setattr(gateway_router, "HEALTH_SECONDS", 0.05)
    with Mortal() as one, routing(one.endpoint) as router:
        (_, bad), (_, good) = router.open(), router.open()
        died = chat(router, bad, [user("poison")], timeout=20)
        assert (died.status_code, died.json()["error"]["code"]) == (500, "failed")
        assert one.read == gateway_router.MAX_LOSSES
        assert chat(router, good, [user("x")], timeout=20).text == "fine"


class Full(Mortal):
    """Has no connection left for calls, nor for the first request to forget a session, as uvicorn says it."""

    headers = "content-type: text/plain\r\n"

    def status(self, head, body):
        self.read += head.startswith("DELETE")
        taken = head.startswith(("PUT", "GET")) or self.read > 1
        return "200 OK" if taken else "503 Service Unavailable"


def test_a_worker_without_a_connection_left_is_asked_again():
    """Its server refuses requests before the gateway sees them. Clients get an error in the shape of their dialect."""

    async def look_twice():
        worker = gateway_router._Worker(*one.endpoint)
        worker.left.add("token")
        await worker.look()
        first = len(worker.left)
        await worker.look()
        worker.leave()
        return first, len(worker.left)

    with Full() as one, routing(one.endpoint) as router:
        _, token = router.open()
        refused = chat(router, token, [user("a")])
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "unavailable")
        assert asyncio.run(look_twice()) == (1, 0)


def test_a_connection_that_the_worker_may_be_closing_is_not_used(monkeypatch):
    async def play():
        worker, seen = gateway_router._Worker(*one.endpoint), []
        for reuse in (60.0, 60.0, 0.0):
            monkeypatch.setattr(gateway_router, "REUSE_SECONDS", reuse)
            assert (await worker.send("GET", "/health", {}, b""))[2] == b"fine"
            seen.append(one.connections)
        worker.leave()
        return seen

    with Mortal() as one:
        assert asyncio.run(play()) == [1, 1, 2]


def test_a_router_without_file_descriptors_keeps_its_workers(monkeypatch, caplog):
    opened, refused = asyncio.open_connection, []

    async def scarce(*args, **options):
        if len(refused) < 5:
            refused.append(args)
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return await opened(*args, **options)

    async def play():
        workers = GatewayRouter([one.endpoint] * 2)._workers
        sent = [worker.send("GET", "/health", {}, b"") for worker in workers for _ in range(3)]
        replies = await asyncio.gather(*sent)
        for worker in workers:
            worker.leave()
        return [body for _, _, body in replies]

    monkeypatch.setattr(asyncio, "open_connection", scarce)
    with Mortal() as one:
        assert asyncio.run(play()) == [b"fine"] * 6 and len(refused) == 5
    assert caplog.text.count("cannot open another connection: [Errno 24] Too many open files") == 1


def test_connections_of_a_peak_are_closed(monkeypatch):
    async def play():
        worker = gateway_router._Worker(*one.endpoint)
        await asyncio.gather(*(worker.send("GET", "/health", {}, b"") for _ in range(9)))
        most = len(worker.idle)
        monkeypatch.setattr(gateway_router, "REUSE_SECONDS", 0.6)
        for _ in range(4):  # one of them is always in use
            await asyncio.sleep(0.25)
            await worker.look()
        left = len(worker.idle)
        worker.leave()
        return most, left

    with Mortal() as one:
        most, left = asyncio.run(play())
    assert most > 1 and left == 1


def test_a_call_does_not_look_at_all_idle_connections():
    """A peak of thousands of calls leaves as many. The gateway has closed the one that was used last."""
    looked, closed = [], []
    reader = SimpleNamespace(at_eof=lambda: looked.append(1) or len(looked) == 1)
    writer = SimpleNamespace(close=lambda: closed.append(1))
    worker = gateway_router._Worker("http://127.0.0.1:1", "key")
    worker.idle.extend([(reader, writer, time.monotonic())] * 1000)
    assert asyncio.run(worker._connection()) == (reader, writer)
    assert (len(looked), len(closed), len(worker.idle)) == (2, 1, 998)


def test_a_head_request_costs_no_worker():
    with gateways() as (_, router, token):
        for method in ("HEAD", "POST"):
            url, headers = f"{router.address}/v1/models", {"x-api-key": token}
            assert CLIENT.request(method, url, headers=headers, timeout=5).status_code == 405
        assert all(worker.up for worker in router._workers)


def test_a_call_waits_while_no_worker_is_there():
    """Also if a state is loaded meanwhile, which has its session."""
    with serving(fast()) as one, routing() as router, ThreadPoolExecutor() as pool:
        _, token = router.open()
        call = pool.submit(chat, router, token, [user("abc")])
        time.sleep(0.3)
        assert not call.done()
        router.load_state_dict(router.state_dict())
        router.set_workers([one.endpoint])
        assert call.result().status_code == 200


def has_forgotten(gateway, token):
    """Whether a gateway no longer knows a session."""
    (address, key), body = gateway.endpoint, {"messages": [user("x")]}
    headers = {"x-api-key": token, "x-gateway-key": key}
    return CLIENT.post(f"{address}/v1/chat/completions", json=body, headers=headers).status_code == 410


def test_sessions_that_nobody_closes_expire_at_the_router_and_at_its_worker():
    limits = gateway_router.GatewayLimits(idle_seconds=1.0)
    with serving(reversing(2, 0.07)) as one, routing(one.endpoint, limits=limits) as router:
        _, left = router.open("left")
        assert chat(router, left, [user("ab")]).status_code == 200
        _, used = router.open("used")
        assert chat(router, used, [user("x" * 50)]).status_code == 200  # takes 1.8 s
        assert router.sessions == 1 and router.moved == 0 and router._workers[0].sessions == {used}
        late = chat(router, left, [user("x")])
        assert late.status_code == 401 and "expired" in late.text
        with pytest.raises(KeyError, match="expire"):
            router.close(left)
        # The worker, whose own limit is an hour, has closed it too.
        assert has_forgotten(one, left)
        assert len(router.close(used).nodes) == 2


def test_a_worker_that_was_replaced_gives_its_sessions_away():
    with (
        serving(reversing(1, 0.05)) as one,
        serving(fast()) as two,
        routing(one.endpoint) as router,
        ThreadPoolExecutor() as pool,
    ):
        _, token = router.open()
        call = pool.submit(chat, router, token, [user("abcdefghijklmnopqrstuvwxyz" * 3)])
        time.sleep(0.5)
        router.set_workers([two.endpoint])
        assert call.result().status_code == 200
        assert has_forgotten(one, token)
        assert len(router.close(token).nodes) == 2 and router.moved == 1


def tasks_of(router, method):
    """How many tasks of the router's event loop run a method."""

    async def count():
        return sum(one.get_coro().__name__ == method for one in asyncio.all_tasks())

    return router._front.run(count())


def test_a_router_is_started_once_and_again_after_its_stop(monkeypatch):
    monkeypatch.setattr(gateway_router, "HEALTH_SECONDS", 0.05)
    with (
        serving(ScriptEngine(lambda *_: "fine", delay=0.1)) as gateway,
        routing(gateway.endpoint) as router,
        ThreadPoolExecutor(8) as pool,
    ):
        tokens = [router.open()[1] for _ in range(8)]
        assert {one.status_code for one in pool.map(lambda token: chat(router, token, [user("a")]), tokens)} == {200}
        assert len(router._workers[0].idle) > 1
        router.start()
        assert tasks_of(router, "_watch") == 1
        router.stop()
        assert not router._workers[0].idle
        router.set_workers([gateway.endpoint])
        router.start()
        time.sleep(0.2)  # it has looked at its worker
        assert chat(router, tokens[0], [user("b")], timeout=10).status_code == 200
        assert len(router.close(tokens[0]).nodes) == 4 and router.moved == 0


def test_a_worker_that_was_replaced_is_not_looked_at(monkeypatch):
    monkeypatch.setattr(gateway_router, "HEALTH_SECONDS", 0.05)
    monkeypatch.setattr(gateway_router, "FORGET_SECONDS", 0.05)
    with socket.create_server(("127.0.0.1", 0)) as silent:  # it never answers
        with routing((f"http://127.0.0.1:{silent.getsockname()[1]}", "key")) as router:
            wait_until(lambda: tasks_of(router, "look") == 1, 10)
            router.set_workers([])
            wait_until(lambda: not tasks_of(router, "look"), 10)


def test_workers_are_set_although_the_router_is_stopped_meanwhile(monkeypatch):
    monkeypatch.setattr(gateway_router, "FORGET_SECONDS", 20)
    with socket.create_server(("127.0.0.1", 0)) as silent, ThreadPoolExecutor() as pool:  # it never answers
        with routing((f"http://127.0.0.1:{silent.getsockname()[1]}", "key")) as router:
            setting = pool.submit(router.set_workers, [])
            wait_until(lambda: not router._workers, 10)  # it tells the one that was replaced
            router.stop()
            assert setting.result(10) is None and router._workers == []
