"""The client of NeMo-Gym's resources servers. The package is on no index here, so the server is written from the wire
of its example with a counter per session (`resources_servers/example_session_state_mgmt`): its state is a cookie's."""

import json
import secrets
import threading
import time
from contextlib import closing, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from agent_helpers import Characters, ScriptEngine

from workers.rollout.agents.agent_engine import AgentEngine
from workers.rollout.agents.clients.nemo_gym import NemoGymClient
from workers.rollout.agents.environment import SessionLimits
from workers.rollout.agents.rendering import TokenRenderer
from workers.rollout.engines.rollout_engine import SamplingParams

pytest.importorskip("httpx")


class Server(ThreadingHTTPServer):
    daemon_threads, request_queue_size = True, 128

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.counters, self.verified, self.broken, self.seconds, self.tool_seconds = {}, [], False, 0.0, 0.0
        self.down = False
        self.url = f"http://127.0.0.1:{self.server_port}"
        threading.Thread(target=self.serve_forever, args=(0.01,), name="nemo-gym", daemon=True).start()

    def close(self):
        self.shutdown()
        self.server_close()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *args):
        pass

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        session = (self.headers["cookie"] or "").removeprefix("session=")
        fresh, of = not session, self.server
        session = session or secrets.token_hex(8)
        status, reply = 200, {}
        if self.path == "/seed_session":
            of.counters[session] = body["initial_count"]
        elif self.path == "/increment_counter" and isinstance(body.get("count"), int):
            time.sleep(of.tool_seconds)
            of.counters[session] += body["count"]
            reply = {"success": True}
        elif self.path == "/get_counter_value" and not of.down:
            reply = {"count": of.counters[session]}
        elif self.path == "/verify" and not of.broken:
            time.sleep(of.seconds)
            of.verified.append(body)
            reply = {**body, "reward": float(body["expected_count"] == of.counters[session]), "parts": {"x": 1}}
        else:
            status, reply = (500 if self.path in ("/verify", "/get_counter_value") else 422), {"detail": "wrong"}
        text = json.dumps(reply).encode()
        self.send_response(status)
        if fresh:
            self.send_header("set-cookie", f"session={session}; Path=/")
        self.send_header("content-length", str(len(text)))
        self.end_headers()
        with suppress(ConnectionError):  # the client has not waited
            self.wfile.write(text)


def tool(name, properties):
    parameters = {"type": "object", "properties": properties}
    return {"type": "function", "name": name, "description": name, "parameters": parameters, "strict": True}


TOOLS = [tool("increment_counter", {"count": {"type": "integer"}}), tool("get_counter_value", {})]


def row(initial, expected, count):
    given = {
        "input": [{"role": "system", "content": "count"}, {"role": "user", "content": f"add {count}"}],
        "tools": TOOLS,
    }
    return {"responses_create_params": given, "initial_count": initial, "expected_count": expected}


def counts(prompt, seed):
    """A policy: increments by what it is asked, looks, and tells. A request for 13 is called wrongly first."""
    wanted = prompt.rpartition("add ")[2].partition("<end>")[0]
    results = prompt.count("<|tool|>")
    if wanted == "13" and results < 2:
        call = ["no_such_tool", "increment_counter"][results]
        return f'<tool_call>{{"name": "{call}", "arguments": {{"count": "many"}}}}</tool_call>'
    results -= 2 * (wanted == "13")
    if results == 0:
        return f'<tool_call>{{"name": "increment_counter", "arguments": {{"count": {wanted}}}}}</tool_call>'
    if results == 1:
        return '<tool_call>{"name": "get_counter_value", "arguments": {}}</tool_call>'
    return "it is " + prompt.rpartition("<|tool|>")[2].partition("<end>")[0]


def test_sessions_of_a_resources_server(monkeypatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")  # of no use for servers of the cluster
    with closing(Server()) as server:
        done = play(
            server, counts, [row(3, 8, 5), row(0, 1, 2), row(1, 14, 13), *(row(n, 2 * n, n) for n in range(20, 40))]
        )
    assert [one.info["reward"] for one in done] == [1.0, 0.0, 1.0] + [1.0] * 20
    assert {one.info["end_reason"] for one in done} == {"done"} and done[0].info["parts"] == {"x": 1}
    assert [one.info["turns"] for one in done[:3]] == [3, 3, 5]
    assert 'it is {"count": 8}' in Characters().decode(done[0].token_ids)
    # What is verified has the row, and the whole conversation as output items of a response.
    (verified,) = [one for one in server.verified if one["initial_count"] == 3]
    kinds = [one["type"] for one in verified["response"]["output"]]
    assert kinds == ["function_call", "function_call_output"] * 2 + ["message"]
    calls = [one for one in verified["response"]["output"] if one["type"] == "function_call"]
    assert json.loads(calls[0]["arguments"]) == {"count": 5} and verified["expected_count"] == 8
    outputs = [one for one in verified["response"]["output"] if one["type"] == "function_call_output"]
    assert [one["call_id"] for one in outputs] == [one["call_id"] for one in calls] and len(calls) == 2
    assert len({one["call_id"] for one in calls}) == 2
    # The policy sees what was wrong with its calls.
    seen = Characters().decode(done[2].token_ids)
    assert "there is no tool 'no_such_tool'" in seen and '{"detail": "wrong"}' in seen


def play(server, script, rows, limits=None, **client):
    """The completions of sessions."""
    engine = AgentEngine(
        ScriptEngine(script),
        environment=lambda: NemoGymClient(server.url, **client),
        renderer=TokenRenderer(Characters()),
        limits=limits,
    )
    extras = {name: [one[name] for one in rows] for name in rows[0]}
    with closing(engine):
        return engine.generate([[20]] * len(rows), SamplingParams(200), [0] * len(rows), extras=extras)


@pytest.mark.parametrize(("seconds", "reason"), [(10.0, "done"), (0.2, "error")])
def test_verifying_has_a_limit_of_its_own(seconds, reason):
    with closing(Server()) as server:
        server.seconds = 0.9
        (done,) = play(server, lambda *_: "8", [row(3, 8, 5)], SessionLimits(silence=0.6), verify_seconds=seconds)
    assert done.info["end_reason"] == reason


def test_tools_may_take_longer_than_verifying():
    with closing(Server()) as server:
        server.tool_seconds = 1.2
        (done,) = play(server, counts, [row(3, 8, 5)], verify_seconds=0.8)
    assert (done.info["end_reason"], done.info["reward"]) == ("done", 1.0)


def test_a_server_that_fails_ends_its_session_with_a_reason():
    with closing(Server()) as server:
        server.broken = True
        (done,) = play(server, lambda *_: "8", [row(3, 8, 5)])
    assert done.info["end_reason"] == "error" and "/verify: 500" in done.info["error"]


def test_a_tool_that_fails_at_the_server_is_no_invalid_call():
    with closing(Server()) as server:
        server.down = True
        (done,) = play(server, counts, [row(3, 8, 5)], SessionLimits(invalid=1))
    assert (done.info["end_reason"], done.info["reward"]) == ("done", 1.0)


def test_the_server_judges_any_arguments_that_the_policy_writes():
    """NaN, and half of an emoji."""
    arguments = iter(['{"count": NaN}', '{"count": "\\ud83d"}'])

    def script(prompt, seed):
        given = next(arguments, None)
        return f'<tool_call>{{"name": "increment_counter", "arguments": {given}}}</tool_call>' if given else "3"

    with closing(Server()) as server:
        (done,) = play(server, script, [row(3, 3, 0)])
    assert (done.info["end_reason"], done.info["reward"], done.info["turns"]) == ("done", 1.0, 3)
