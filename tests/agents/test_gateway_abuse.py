"""What clients can do to a gateway: nothing hangs, nothing leaks, and other sessions go on."""

import asyncio
import itertools
import json
import os
import resource
import socket
import subprocess
import sys
import threading
import time
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from agent_helpers import ScriptEngine, user
from gateway_helpers import chat, httpx, serving
from waits import wait_until

from workers.rollout.agents.gateway.http_front import GatewayLimits

LIMITS = GatewayLimits(body_bytes=2**20, read_seconds=2.0, write_seconds=1.0, connections=4096)


@contextmanager
def attacked(limits=LIMITS, engine=None):
    """A gateway, and a session that must go on: each call of it is one of another client. Afterwards the gateway has as
    many files, threads and sessions as before."""
    engine = engine or ScriptEngine(lambda *_: "fine")
    with httpx.Client() as client, serving(engine, limits=limits) as gateway:
        _, token = gateway.open()

        def others_go_on():
            begun = time.monotonic()
            reply = chat(gateway, token, [user("hi")], client=client, timeout=20)
            assert reply.status_code == 200, reply.text
            return time.monotonic() - begun

        others_go_on()
        files = open_files()
        yield gateway, others_go_on, (token,)
        others_go_on()
        wait_until(lambda: open_files() <= files and engine.load().running == engine.load().waiting == 0, 15)


def open_files():
    return len(os.listdir("/proc/self/fd"))


def raw(gateway, data=b"", buffer=None):
    host, port = gateway.address.removeprefix("http://").split(":")
    connection = socket.socket()
    connection.settimeout(30)
    if buffer is not None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
    connection.connect((host, int(port)))
    with suppress(OSError):
        connection.sendall(data)
    return connection


def request(token, body=b"", **headers):
    given = {"host": "x", "x-api-key": token, "content-length": str(len(body)), **headers}
    lines = ["POST /v1/chat/completions HTTP/1.1", *(f"{name}: {value}" for name, value in given.items()), "", ""]
    return "\r\n".join(lines).encode() + body


def status(gateway, data):
    """Of the reply to some bytes."""
    with raw(gateway, data) as connection:
        return connection.recv(4096).split()[1]


def test_a_body_of_100_mb_is_not_read():
    with attacked() as (gateway, others_go_on, (token,)):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        # With its length, and in pieces of a length that nobody says; with a session's token, and without.
        for name, headers in itertools.product((token, "sk-no"), ({}, {"transfer-encoding": "chunked"})):
            head = request(name, **headers)
            if headers:
                head = head.replace(b"content-length: 0\r\n", b"")
            else:
                head = head.replace(b"content-length: 0", b"content-length: 104857600")
            with raw(gateway, head) as connection:
                piece = b"x" * 65536
                with suppress(OSError):
                    for _ in range(1600):
                        connection.sendall(b"10000\r\n" + piece + b"\r\n" if headers else piece)
                reply = b""
                with suppress(OSError):
                    reply = connection.recv(65536)
                # The kernel may have thrown the reply away, because the client went on sending.
                assert not reply or reply.split()[1] == (b"413" if name == token else b"401"), reply
            assert others_go_on() < 10
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        assert grown < 60 * 1024, f"{grown} KiB"
        reply = httpx.post(
            f"{gateway.address}/v1/messages", content=b"x" * (2**20 + 1), headers={"x-api-key": token}, timeout=20
        )
        assert (reply.status_code, reply.json()["error"]["type"]) == (413, "request_too_large")


def test_garbage():
    with attacked() as (gateway, others_go_on, (token,)):
        for data in (os.urandom(5000), b"GET / HTTP/9.9\r\n\r\n", b"\x16\x03\x01" + os.urandom(200), b"\r\n" * 1000):
            with raw(gateway, data) as connection, suppress(OSError):
                connection.settimeout(0.2)
                connection.recv(1000)
        for body in (b"\x00" * 1000, b'{"messages": "' + b"\\ud800" * 100 + b'"}', b'{"a":' * 50_000, b"1" * 100_000):
            assert status(gateway, request(token, body)) == b"400"
        surrogate = json.dumps({"messages": [user("\ud800")]}).encode()
        assert status(gateway, request(token, surrogate)) == b"200"
        others_go_on()


def test_headers_without_end_and_a_key_of_strange_letters():
    """Also with httptools installed, which `HTTPFront` does not use."""
    with attacked() as (gateway, others_go_on, _):
        assert status(gateway, request("x", **{"x-gateway-key": "\xe9"})) == b"401"
        with raw(gateway, b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n") as connection:
            assert connection.recv(1000).split()[1] == b"200"
            with suppress(OSError):  # it closes the connection
                connection.sendall(b"GET /health HTTP/1.1\r\nx: " + b"a" * 2**20)
                while connection.recv(1000):
                    pass
        others_go_on()


def test_clients_that_send_slowly_or_never():
    with attacked(replace(LIMITS, read_seconds=0.5)) as (gateway, others_go_on, (token,)):
        begun = time.monotonic()
        silent = raw(gateway)
        half_a_head = raw(gateway, request(token)[:40])
        half_a_body = raw(gateway, request(token, b'{"messages"', **{"content-length": "1000"}))
        half_of_two = raw(gateway, b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
        answer = b""
        while not answer.endswith(b"}"):
            answer += half_of_two.recv(1000)
        half_of_two.sendall(b"GET /hea")
        others_go_on()
        assert half_a_body.recv(1000).split()[1] == b"408"
        for connection in (silent, half_a_head, half_of_two):
            with suppress(ConnectionResetError):
                assert connection.recv(1000) == b""  # closed
        assert time.monotonic() - begun < 10
        for connection in (silent, half_a_head, half_a_body, half_of_two):
            connection.close()


def test_clients_that_never_read():
    """Replies of 5 MB each, which nobody takes."""
    engine = ScriptEngine(lambda prompt, _: "fine" if "hi" in prompt else "\U0001f600" * 300_000)
    engine.max_positions, engine.log_probs = None, False
    with attacked(replace(LIMITS, write_seconds=0.5), engine) as (gateway, others_go_on, _):
        gateway.sampling_params = gateway.sampling_params.__class__(max_new_tokens=400_000)
        tokens = [gateway.open()[1] for _ in range(2)]
        body = json.dumps({"messages": [user("long")], "return_token_ids": True}).encode()
        deaf = [raw(gateway, request(token, body), 4096) for token in tokens]
        others_go_on()
        wait_until(lambda: all(len(gateway._sessions[token].tree.nodes) == 2 for token in tokens), 40)
        others_go_on()
        # The gateway gives them up, while they stay connected. That of the other client is left.
        wait_until(lambda: len(gateway._front._server.server_state.connections) <= 1, 40)
        for connection in deaf:
            connection.close()


def test_1000_connections_at_once():
    with attacked() as (gateway, others_go_on, (token,)):
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, max(soft, 8192)), hard))
        connections = [raw(gateway) for _ in range(1000)]
        assert others_go_on() < 10
        body = json.dumps({"messages": [user("hi")]}).encode()
        busy = [raw(gateway, request(token, body)) for _ in range(200)]  # 64 calls of a session at once, see `calls`
        statuses = [connection.recv(4096).split()[1] for connection in busy]
        assert set(statuses) <= {b"200", b"429"} and b"200" in statuses
        for connection in (*connections, *busy):
            connection.close()


def test_too_many_connections_are_refused():
    with attacked(GatewayLimits(connections=50, read_seconds=0.5)) as (gateway, others_go_on, (token,)):
        connections = [raw(gateway) for _ in range(60)]
        time.sleep(0.2)
        assert status(gateway, request(token, b"{}")) == b"503"
        for connection in connections:  # those that send nothing are dropped, and there is room again
            with suppress(ConnectionResetError):
                connection.recv(10)
            connection.close()
        others_go_on()


def test_a_thousand_cancelled_calls():
    """Clients that leave in the middle, all the time: each request of the engine ends."""
    engine = ScriptEngine(lambda prompt, _: "fine" if "hi" in prompt else "w" * 50_000, tokens=1, delay=0.001)
    with attacked(engine=engine) as (gateway, others_go_on, _):
        tokens = [gateway.open()[1] for _ in range(20)]
        asked = {"messages": [user("long")]}
        # uvicorn stops reading in the middle of large bodies.
        bodies = [json.dumps({**asked, "user": "x" * size}).encode() for size in (0, 1_000_000)]
        for _ in range(10):
            connections = [raw(gateway, request(token, bodies[i == 0])) for i, token in enumerate(tokens)]
            time.sleep(0.05)
            others_go_on()
            for connection in connections:
                connection.close()
        wait_until(lambda: not engine.load().running + engine.load().waiting)
        for token in tokens:
            tree = gateway.close(token)
            assert len(tree.nodes) == 1 and not tree.nodes[0].sampled


def test_a_tool_that_never_returns_holds_nothing_but_its_session():
    """Its program has played a turn, and waits for the tool: the gateway has a tree, and no task, file or thread."""
    with attacked() as (gateway, others_go_on, _):
        threads, files = threading.active_count(), open_files()
        for _ in range(50):
            _, token = gateway.open()
            body = json.dumps({"messages": [user("hi")]}).encode()
            assert status(gateway, request(token, body)) == b"200"
        time.sleep(0.2)
        tasks = asyncio.run_coroutine_threadsafe(_tasks(), gateway._front.loop).result()
        assert tasks <= 4 and threading.active_count() <= threads and open_files() <= files + 2
        assert gateway.sessions == 51
        for token in list(gateway._sessions)[1:]:
            gateway.close(token)
        others_go_on()


async def _tasks():
    return len(asyncio.all_tasks())


def test_a_gateway_ends_with_its_calls_and_its_process():
    program = """
import sys, threading, time
sys.path[:0] = sys.argv[1:]
import httpx
from agent_helpers import Characters, ScriptEngine
from workers.rollout.agents.gateway.gateway import Gateway
from workers.rollout.agents.rendering import TokenRenderer
gateway = Gateway(ScriptEngine(lambda *_: "w" * 10**6, tokens=1, delay=0.001), TokenRenderer(Characters()))
gateway.start()
_, token = gateway.open()
def call():
    try:
        reply = httpx.post(gateway.address + "/v1/chat/completions", timeout=60, headers={"x-api-key": token},
                           json={"messages": [{"role": "user", "content": "x"}]})
        print(reply.status_code)
    except httpx.HTTPError as error:
        print(500)
thread = threading.Thread(target=call); thread.start()
while not gateway.engine.load().running: time.sleep(0.01)
gateway.stop(); thread.join(10); print(gateway.engine.load().running)
"""
    here = Path(__file__).parent
    done = subprocess.run(
        [sys.executable, "-c", program, str(here), str(here.parent.parent)], capture_output=True, text=True, timeout=60
    )
    assert done.stdout.split() == ["500", "0"], done.stdout + done.stderr
    assert "Traceback" not in done.stderr, done.stderr
