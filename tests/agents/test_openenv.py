"""OpenEnvClient against a server of the package openenv-core, in an interpreter that has it (the variable
OPENENV_PYTHON, or this one), and against a stand-in that speaks the same messages, which needs websockets alone."""

import asyncio
import contextlib
import functools
import json
import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from rollout_helpers import BigramEngine
from waits import wait_until

from workers import AgentEngine, SamplingParams, SessionLimits
from workers.rollout.agents.clients.openenv import OpenEnvClient, OpenEnvError
from workers.rollout.agents.environment import Action

pytest.importorskip("websockets")
PYTHON = os.environ.get("OPENENV_PYTHON", sys.executable)
SERVER = Path(__file__).parent / "openenv_server.py"


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as one:
        return one.getsockname()[1]


def answers(port):
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 0.2):
        return True
    return False


@contextlib.contextmanager
def real_server():
    if subprocess.run([PYTHON, "-c", "import openenv.core"], capture_output=True).returncode:
        pytest.skip("openenv-core is not installed; set OPENENV_PYTHON to an interpreter that has it")
    port = free_port()
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    process = subprocess.Popen([PYTHON, str(SERVER), str(port)], env=environment)
    try:
        wait_until(lambda: answers(port), 60)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


async def play(socket_):
    number, steps = 0, 0
    async for text in socket_:
        message = json.loads(text)
        kind, data = message["type"], message.get("data", {})
        if kind == "close":
            return
        if kind == "reset":
            number, steps = data.get("number", data.get("seed", 0)), 0
            reply = {"type": "observation", "data": {"observation": {"hint": "guess"}, "reward": None, "done": False}}
        elif kind == "state":
            reply = {"type": "state", "data": {"episode_id": "e", "step_count": steps}}
        elif not isinstance(data.get("number"), int):
            reply = {"type": "error", "data": {"message": "number", "code": "VALIDATION_ERROR"}}
        elif data["number"] == 13:
            reply = {"type": "error", "data": {"message": "thirteen", "code": "EXECUTION_ERROR"}}
        else:
            time.sleep(0.5 * (data["number"] == 14))  # the whole server waits
            steps += 1
            hint = "right" if data["number"] == number else "higher" if data["number"] < number else "lower"
            right = data["number"] == number
            seen = {"observation": {"hint": hint}, "reward": float(right), "done": right}
            reply = {"type": "observation", "data": seen}
        await socket_.send(json.dumps(reply))


@contextlib.contextmanager
def stand_in():
    from websockets.asyncio.server import serve

    port, loop, ready = free_port(), asyncio.new_event_loop(), threading.Event()

    async def run():
        async with serve(play, "127.0.0.1", port):
            ready.set()
            await asyncio.Future()

    def main():
        with contextlib.suppress(asyncio.CancelledError):
            loop.run_until_complete(task)

    task = loop.create_task(run())
    thread = threading.Thread(target=main, daemon=True)
    thread.start()
    assert ready.wait(10)
    try:
        yield f"http://127.0.0.1:{port}/"
    finally:
        loop.call_soon_threadsafe(task.cancel)
        thread.join(5)
        assert not thread.is_alive(), "a client has left its socket open"


@pytest.fixture(scope="module", params=[real_server, stand_in], ids=["openenv-core", "stand-in"])
def url(request):
    with request.param() as url:
        yield url


def client(url):
    return OpenEnvClient(
        url,
        to_action=lambda action: {"number": action.token_ids[0] if action.token_ids[0] < 30 else "much"},
        to_observation=lambda observation: [{"lower": 30}.get(observation.get("hint"), 31)],
    )


def guess(number):
    return Action([number], "stop")


def test_episode(url):
    async def run():
        environment = client(url)
        assert await environment.reset({"seed": 5, "episode_id": "e", "other": 1}) == [31]
        steps = [await environment.step(guess(number)) for number in (3, 9, 5)]
        assert [one.observation for one in steps] == [[31], [30], [31]]
        assert [(one.reward, one.done) for one in steps] == [(0.0, False), (0.0, False), (1.0, True)]
        assert (await environment.state())["step_count"] == 3
        assert await environment.reset({"reset": {"number": 7}}) == [31]
        assert (await environment.step(guess(7))).done
        await environment.close()
        await environment.close()

    asyncio.run(run())


def test_errors(url):
    async def run():
        environment = client(url)
        await environment.reset({"seed": 5})
        wrong = await environment.step(guess(31))
        assert wrong.invalid and not wrong.done
        with pytest.raises(OpenEnvError, match="thirteen") as caught:
            await environment.step(guess(13))
        assert caught.value.code == "EXECUTION_ERROR"
        assert (await environment.step(guess(5))).done  # the session goes on
        await environment.close()

    asyncio.run(run())


def test_a_server_that_is_busy_answers_no_pings_and_is_waited_for(monkeypatch):
    from websockets.asyncio import client as sockets

    impatient = functools.partial(sockets.connect, ping_interval=0.05, ping_timeout=0.05)
    monkeypatch.setattr(sockets, "connect", impatient)

    async def run(url):
        environment = client(url)
        await environment.reset({"seed": 14})
        assert (await environment.step(guess(14))).done
        await environment.close()

    with stand_in() as url:
        asyncio.run(run(url))


def test_server_that_is_not_there():
    async def run():
        environment = client(f"http://127.0.0.1:{free_port()}")
        with pytest.raises(OSError, match="Connect call failed"):
            await environment.reset({})
        await environment.close()

    asyncio.run(run())
    with pytest.raises(ValueError, match="url='host'"):
        client("host")
    assert client("https://host/base/").url == "wss://host/base/ws"
    assert client("ws://host:1/ws").url == "ws://host:1/ws"


class Guesser(BigramEngine):
    """Guesses 0, 1, 2, ..."""

    def drawn(self, request):
        return [int(request.id.rpartition("/")[2])], [-1.0], "stop", [()]


def test_sessions_of_an_engine_play_episodes(url):
    engine = AgentEngine(Guesser, environment=lambda: client(url), limits=SessionLimits(turns=20, silence=20))
    made = engine.generate([[1]] * 4, SamplingParams(1), [0] * 4, extras={"seed": [2, 5, 11, 16]})
    engine.close()
    assert [one.info["end_reason"] for one in made] == ["done", "done", "done", "error"]
    assert [one.info["turns"] for one in made] == [3, 6, 12, 14]
    assert "OpenEnvError" in made[3].info["error"] and "thirteen" in made[3].info["error"]
