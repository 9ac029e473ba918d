"""The server of the page: what it answers, and what it refuses. No browser."""

import http.client
import json
import os
import socket
import time
import urllib.parse
from pathlib import Path

import numpy as np
import pytest
from served import served_runs
from synthetic_run import update, write_lines, write_run, write_samples
from waits import within

from single_controller.__main__ import main
from single_controller.view.server import PAGE, ViewServer

SECRET = "the secret of another folder"

HOSTILE = [
    "<script>window.hacked = 1</script>",
    "<img src=x onerror='window.hacked = 1'>",
    "</script><svg onload=window.hacked=1>",
    "javascript:window.hacked=1",
    "\x00\x01\x1b[2J\x07\x7f",
    "\u202eevil\u202c\u200b\ufeff",
    "\ud800 alone",
    "&lt;b&gt; ' \" ` ${window.hacked = 1}",
    "{{constructor.constructor('window.hacked=1')()}}",
    "__proto__",
    "x" * 1_000_000,
    "]]>--></style><style>body{display:none}</style>",
]


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """A server of two runs, and beside them a folder that is none of its business."""
    folder = tmp_path_factory.mktemp("served")
    (folder / "secret.json").write_text(SECRET)
    run = write_run(folder / "run", steps=30)
    write_run(folder / "other", steps=5)
    write_lines(run / "events.jsonl", [update(version, version) for version in range(1, 6)])
    write_samples(run, 4, [6, 3, 8])
    write_samples(
        run,
        5,
        [12, 9, 3000, 7],
        groups=[2**62, 2**62, 1, 1],
        rewards=[1, 1, 0, 1],
        texts=[{}, {"fingerprints": {"5": "0" * 16}}],
    )
    with served_runs([run, folder / "other"]) as server:
        yield server


def request(server, path, method="GET", headers=None, token=None):
    """Send one request. Returns (code, headers, body)."""
    url = urllib.parse.urlsplit(server.url)
    connection = http.client.HTTPConnection(url.hostname, url.port, timeout=20)
    connection.putrequest(
        method, f"/{server.token if token is None else token}/{path}", skip_host="Host" in (headers or {})
    )
    for name, value in (headers or {}).items():
        connection.putheader(name, value)
    connection.endheaders()
    answer = connection.getresponse()
    body = answer.read()
    connection.close()
    return answer.status, dict(answer.getheaders()), body


def api(server, path):
    code, headers, body = request(server, f"api/{path}")
    assert code == 200 and headers["Content-Type"] == "application/json", body
    return json.loads(body)


def test_command_refuses_what_is_no_run(tmp_path, capsys):
    write_run(tmp_path / "run")
    for arguments in (["view", str(tmp_path)], ["view", str(tmp_path / "run"), str(tmp_path / "none")]):
        with pytest.raises(SystemExit) as exit:
            main(arguments)
        assert exit.value.code == 1 and "is not a run folder" in capsys.readouterr().err


def test_port_in_use_is_said(tmp_path):
    run = write_run(tmp_path / "run")
    with ViewServer([run]) as server:  # and closes one that has never served
        port = urllib.parse.urlsplit(server.url).port
        assert server._server.socket.getsockname() == ("127.0.0.1", port)  # only this host can connect
        for wrong in (port, 99999999):
            with pytest.raises(OSError, match=f"port {wrong} of 127.0.0.1 cannot be used"):
                ViewServer([run], port=wrong)


class TestAnswers:
    def test_all_metrics_are_told_and_damaged_events_are_left_out(self, tmp_path):
        run = write_run(tmp_path / "run", steps=1, metrics=[f"m{n}" for n in range(1500)])
        write_lines(run / "timeline.jsonl", [{"method": "m", "start": 1, "end": 2}])
        write_lines(run / "events.jsonl", [{"kind": "alarm", "time": 10**400}])
        with served_runs([run]) as server:
            assert len(api(server, "runs")["runs"][0]["metrics"]) == 1500
            assert api(server, "timeline")["events"] == []

    def test_runs(self, served):
        first, second = api(served, "runs")["runs"]
        assert (first["name"], first["steps"], first["last_step"], first["samples"]) == ("run", 30, 29, [4, 5, 2])
        assert first["events"] == {"update": 5} and second["samples"] is None and second["state"] == "ended: finished"

    def test_series(self, served):
        found = api(served, "series?name=reward&name=loss&name=none&first=10&last=19")
        assert set(found) == {"reward", "loss"} and found["loss"]["x"] == list(range(10, 20))
        assert len(api(served, "series?run=1&name=reward&points=3")["reward"]["x"]) == 3

    def test_worst_sample_of_the_last_step(self, served):
        found = api(served, "samples?sort=reward&order=up&limit=1")
        assert (found["rows"][0]["step"], found["rows"][0]["row"], found["total"]) == (5, 2, 4)
        assert api(served, "samples?step=all&version=4")["total"] == 3
        assert [row["row"] for row in api(served, "samples?equal=yes")["rows"]] == [0, 1]

    def test_a_sample_with_its_updates(self, served):
        arrays = np.load(served.runs[0].folder / "samples" / "step_00000005.npz")
        found = api(served, "sample?step=5&row=1")
        part = slice(*arrays["offsets"][1:3])
        assert found["tokens"] == arrays["tokens"][part].tolist() and found["pieces"] == [None] * 9
        np.testing.assert_allclose(found["columns"]["advantages"], arrays["advantages"][part], rtol=1e-6)
        assert found["columns"]["rollout_log_probs"][:2] == [None, None]  # the prompt's: NaN in the file
        assert found["updates"]["5"]["digest"] == f"{5:016x}" and found["text"]["fingerprints"] == {"5": "0" * 16}
        assert [one["row"] for one in found["group"]] == [0, 1]
        assert found["row_columns"] == {
            "numbers": 1, "prompt_lengths": 2, "rewards": 1, "groups": str(2**62), "truncated": True,
        }  # fmt: skip
        later = api(served, "sample?step=5&row=2&first=2990&count=100")
        assert (later["first"], len(later["tokens"]), later["length"]) == (2990, 10, 3000)

    def test_columns_of_several_values_per_token(self, tmp_path):
        """As a step has them whose rows are all recorded: experts of each token, a sampling mask, and candidates."""
        run = write_run(tmp_path / "run")
        lengths, experts = [5, 3], np.arange(8 * 6, dtype=np.int16).reshape(8, 3, 2)
        kept = np.array([0, 0, 2, 1, 3, 0, 0, 2], np.int32)
        more = {
            "jagged/routed_experts": experts,
            "jagged/routed_experts/offsets": np.array([0, 5, 8]),
            "jagged/sampling_mask": np.arange(100, 108, dtype=np.int32),
            "jagged/sampling_mask/offsets": np.array([0, 6, 8]),
            "token/sampling_mask_lengths": kept,
            "token/candidate_log_probs": np.full((8, 4), np.nan, np.float32),
        }
        write_samples(run, 1, lengths, **more)
        with served_runs([run]) as server:
            found = api(server, "sample?step=1&row=1")
            assert sorted(found["several"]) == ["candidate_log_probs", "routed_experts", "sampling_mask"]
            for row, token, mask in ((0, 4, [103, 104, 105]), (1, 2, [106, 107]), (0, 1, [])):
                found = api(server, f"token?step=1&row={row}&token={token}")
                at = (0, 5)[row] + token
                assert found["routed_experts"] == {"shape": [3, 2], "values": experts[at].reshape(-1).tolist()}
                assert found["sampling_mask"]["values"] == mask
                assert found["candidate_log_probs"]["values"] == [None] * 4
            for wrong in ("token=5&row=0", "token=-1", "token=0&row=2", "token=0&row=-1", "token=0&step=2"):
                assert request(server, f"api/token?step=1&{wrong}")[0] == 404

    def test_a_session_of_several_rows(self, tmp_path):
        run = write_run(tmp_path / "run")
        tokens = np.array([1, 2, 3, 4, 5, 9, 9, 1, 2, 3, 6, 7], np.int32)
        turns = [{"start": 0, "end": 2, "kind": "given"}, {"start": 2, "end": 5, "kind": "sampled"}]
        texts = [{"turns": turns}, {"turns": [None, {"start": "x"}]}, {"turns": turns}]
        write_samples(run, 1, [5, 2, 5], texts=texts, tokens=tokens, **{"row/rollout_ids": np.array([7, 8, 7])})
        with served_runs([run]) as server:
            given, first, second = api(server, "sample?step=1&row=2")["branches"]
            assert (given["parent"], given["turns"], first["parent"]) == (None, [{"kind": "given", "tokens": 2}], 0)
            assert (first["ends"], second["ends"]) == ([0], [2]) and second["turns"] == [
                {"kind": "sampled", "tokens": 3}
            ]
            assert api(server, "sample?step=1&row=1")["branches"] == []

    def test_runs_of_one_name(self, tmp_path):
        runs = [write_run(tmp_path / folder / "run", name="grpo") for folder in ("a", "b", "x/d", "y/d")]
        with served_runs([*runs, write_run(tmp_path / "c"), runs[0]]) as server:
            names = [one["name"] for one in api(server, "runs")["runs"]]
        assert names == ["grpo (0)", "grpo (b/run)", "grpo (2)", "grpo (3)", "c", "grpo (5)"]

    def test_a_run_that_has_nothing_yet(self, tmp_path):
        run = write_run(tmp_path / "run", ended=False)
        (run / "metrics.jsonl").unlink()
        (run / "samples").rmdir()
        with served_runs([run]) as server:
            (found,) = api(server, "runs")["runs"]
            assert found["last_step"] is None and found["samples"] is None
            for step in ("last", "all"):
                assert api(server, f"samples?step={step}")["rows"] == []
            assert api(server, "events")["rows"] == api(server, "timeline")["bars"] == []
            assert api(server, "series?name=reward") == {}

    def test_steps_that_cannot_be_read_do_not_hide_the_others(self, tmp_path):
        run = write_run(tmp_path / "run")
        for step in (-1, 0, 1, 2):
            write_samples(run, step, [4, 5])
        (run / "samples" / "step_00000001.npz").write_bytes(b"PK")
        (run / "samples" / "step_00000002.npz").unlink()
        (run / "samples" / "step_00000002.npz").symlink_to(tmp_path / "nothing")
        with served_runs([run]) as server:
            found = api(server, "samples?step=all")
            assert found["total"] == 4 and len(found["unreadable"]) == 2
            assert api(server, "samples?step=-1")["total"] == 2
            assert request(server, "api/samples?step=1")[0] == 404

    def test_arrays_that_json_does_not_have(self, tmp_path):
        run = write_run(tmp_path / "run")
        write_samples(
            run, 1, [4, 5], rewards=[np.inf, np.nan],
            **{"token/c": np.ones(9, complex), "row/s": np.array([b"a", b"b"]), "row/t": np.zeros(2, "M8[s]")},
        )  # fmt: skip
        write_lines(run / "events.jsonl", [{"kind": "alarm", "value": float("nan"), "more": [float("inf"), 10**300]}])
        with served_runs([run]) as server:
            found = api(server, "sample?step=1&row=0")
            assert found["line"]["reward"] is None and len(found["columns"]["c"]) == 4
            assert api(server, "events")["rows"][0]["value"] is None
            arrays = write_samples(run, 1, [4, 5])
            np.savez(run / "samples" / "step_00000001.npz", **arrays | {"versions": np.full(9, 2**62)})
            assert api(server, "sample?step=1&row=0")["updates"] == {}
            write_samples(run, 1, [4, 5], **{"token/c": np.ones(3), "row/s": np.ones(1)})
            assert request(server, "api/sample?step=1&row=1")[0] == 404

    def test_events(self, served):
        found = api(served, "events?kind=update&limit=2&offset=1")
        assert (found["total"], [event["version"] for event in found["rows"]]) == (5, [4, 3])

    def test_page_loads_nothing_from_elsewhere(self, served):
        assert {file.name for file in (Path(__file__).parents[2] / "single_controller/view/page").iterdir()} == {
            file for file, _ in PAGE.values()
        }
        for name in PAGE:
            code, headers, body = request(served, name)
            text = body.decode().replace("http://www.w3.org/2000/svg", "")
            assert code == 200 and "://" not in text, name
            assert "innerHTML" not in text and "insertAdjacentHTML" not in text and "eval(" not in text
            policy = headers["Content-Security-Policy"]
            assert "default-src 'none'" in policy and "unsafe" not in policy and "http" not in policy


class TestRefusals:
    @pytest.mark.parametrize(
        "host", ["evil.example", "127.0.0.1.evil.example:80", "0.0.0.0", "localhost.evil", "", "127.0.0.1@evil"]
    )
    def test_other_hosts(self, served, host):
        code, _, body = request(served, "api/runs", headers={"Host": host})
        assert code == 403 and b"run" not in body.replace(b"runs", b"")

    @pytest.mark.parametrize("host", ["127.0.0.1", "localhost:9999", "LOCALHOST", "[::1]:80"])
    def test_own_names_through_any_tunnel(self, served, host):
        assert request(served, "api/runs", headers={"Host": host})[0] == 200

    @pytest.mark.parametrize(
        "line",
        [
            "GET http://evil.example{path}api/runs HTTP/1.1",
            "GET http://[::1{path}api/runs HTTP/1.1",
            "GET [{path} HTTP/1.1",
            "GET * HTTP/1.1",
            "GET localhost:80 HTTP/1.1",
            "GET {path}api/runs?%zz=%00&[=] HTTP/1.1",
            "GET {path}" + "a" * 70_000 + " HTTP/1.1",
            "GET /%s%00{path} HTTP/1.1",
            "GET {path} HTTP/1.1\r\nHost: localhost\r\nHost: evil.example",
        ],
        ids=range(9),
    )
    def test_hostile_lines(self, served, line, caplog):
        url = urllib.parse.urlsplit(served.url)
        with socket.create_connection((url.hostname, url.port)) as raw:
            raw.sendall(f"{line.format(path=url.path)}\r\nHost: localhost\r\n\r\n".encode())
            answer = raw.recv(4096)
        wanted = b"200" if "%zz" in line else b"4"
        assert answer.split(b" ")[1].startswith(wanted) and not caplog.records, answer

    def test_what_follows_a_body_is_no_request(self, served):
        url = urllib.parse.urlsplit(served.url)
        second = f"GET {url.path}api/runs HTTP/1.1\r\nHost: localhost\r\n\r\n"
        with socket.create_connection((url.hostname, url.port)) as raw:
            raw.sendall(f"GET / HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(second)}\r\n\r\n{second}".encode())
            answer = b"".join(iter(lambda: raw.recv(4096), b""))
        assert answer.count(b"HTTP/1.1") == 1 and b" 403 " in answer

    @pytest.mark.parametrize("token", ["", "x", "None", "..", "%00", "a" * 5000, "\xe4"])
    def test_wrong_tokens(self, served, token):
        for path in ("", "view.js", "api/runs"):
            code, _, body = request(served, path, token=urllib.parse.quote(token, safe="%"))
            assert code == 403 and b"ppo" not in body

    @pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "EVIL<script>"])
    def test_other_methods(self, served, method):
        code, headers, body = request(served, "api/runs", method, {"Content-Length": "0"})
        assert code == 405 and b"EVIL" not in body and headers["X-Content-Type-Options"] == "nosniff"

    @pytest.mark.parametrize(
        "path",
        [
            *("../secret.json", "..%2fsecret.json", "%2e%2e/secret.json", "page/../../secret.json"),
            *("api/../../secret.json", "api/runs/../../../secret.json", "/etc/passwd", "file:///etc/passwd"),
            *("samples/step_00000005.npz", "run.json", "server.py", "view.js%00", "api/__init__"),
            *("api/sample?step=../../secret&row=0", "api/sample?step=5&row=999", "api/sample?step=5&row=-1"),
            *("api/sample?step=1e400", "api/sample?step=nan", "api/samples?step=../secret"),
            *("api/samples?sort=__class__", "api/samples?step=99999999999999999999"),
            *("api/events?run=7", "api/events?limit=-5&offset=x", "api/live?run=-1"),
            "api/series?points=1e9&name=" + "&name=".join(["a"] * 300),
        ],
    )
    def test_addresses_outside_of_the_run(self, served, path):
        code, _, body = request(served, path)
        assert 400 <= code < 500 and SECRET.encode() not in body and b"root:" not in body and b"Traceback" not in body

    def test_a_wrong_argument_is_no_damaged_file(self, served):
        for path, status, said in (
            ("sample?step=5&row=0&first=x", 400, "first is not a number"),
            ("token?step=5&row=0&token=99", 404, "row 0 of step 5 has no token 99"),
        ):
            code, _, body = request(served, f"api/{path}")
            assert (code, json.loads(body)) == (status, {"error": said})

    @pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
    def test_hostile_texts_arrive_as_they_are(self, tmp_path, text):
        run = write_run(tmp_path / "run", name=text[:1000], ended=False, config={"x": text})
        write_lines(run / "metrics.jsonl", [{"step": 1, "time": 1, "metrics": {text[:100]: 1.0}}])
        write_lines(
            run / "events.jsonl", [{"step": 1, "time": 1.0, "kind": "alarm", "text": text, "x": {text[:50]: text}}]
        )
        write_samples(
            run, 1, [4], texts=[{"completion": text, "finish": text, "columns": {"label": [text]}, "turns": text}]
        )
        with served_runs([run]) as server:
            (found,) = api(server, "runs")["runs"]
            assert found["name"] == text[:1000] and list(found["metrics"]) == [text[:100]]
            (event,) = api(server, "events")["rows"]
            assert event["text"][:20_000] == text[:20_000] and len(event["text"]) < 20_100
            code, _, body = request(server, "api/sample?step=1&row=0")
            assert code == 200 and len(body) < 300_000
            assert all(byte >= 32 for byte in body)  # control characters are escaped
            assert json.loads(body)["text"]["completion"][:20_000] == text[:20_000]

    @pytest.mark.parametrize(
        "address", ["192.0.2.77:6379", "evil.example:6379", "ray://evil.example:10001", "x" * 3000, ""]
    )
    def test_a_folder_from_elsewhere_names_no_cluster(self, tmp_path, address):
        run = write_run(tmp_path / "run", ended=False, ray_address=address)
        with served_runs([run]) as server:
            with within(5):
                found = api(server, "live")
            assert "--address" in found["error"] and server._live._address is None

    @pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to give a file to another user")
    def test_a_folder_of_another_user_names_no_cluster(self, tmp_path):
        run = write_run(tmp_path / "run", ended=False, ray_address="127.0.0.1:1")
        with served_runs([run]) as server:
            assert "no Ray cluster responds" in api(server, "live")["error"]
            os.chown(run / "run.json", 4321, -1)
            assert "another user: give it with --address" in api(server, "live")["error"]

    def test_slow_clients_do_not_hold_up_others(self, served):
        url = urllib.parse.urlsplit(served.url)
        with socket.create_connection((url.hostname, url.port)) as slow, within(2):
            slow.sendall(b"GET /")
            api(served, "runs")


@pytest.mark.full("large runs on the page")
@pytest.mark.alone
class TestLargeRuns:
    """In CPU time, of the server and its client, because other processes share the machine."""

    def test_ten_thousand_samples_of_a_thousand_tokens(self, tmp_path):
        run = write_run(tmp_path / "run", steps=1)
        texts = [{"completion": "word " * 800}] * 10_000
        write_samples(run, 1, [1000] * 10_000, texts=texts)
        with served_runs([run]) as server:
            begin = time.process_time()
            assert len(api(server, "samples?limit=100")["rows"]) == 100
            first = time.process_time() - begin
            begin = time.process_time()
            for offset in range(0, 10_000, 1000):
                assert len(api(server, f"samples?sort=completion&offset={offset}")["rows"]) == 100
            assert len(api(server, "sample?step=1&row=7777")["tokens"]) == 1000
            later = time.process_time() - begin
            assert first < 2 and later < 2, (first, later)

    def test_a_hundred_thousand_steps(self, tmp_path):
        names = [f"metric/{n}" for n in range(20)]
        run = write_run(tmp_path / "run", steps=100_000, metrics=names)
        with served_runs([run]) as server:
            begin = time.process_time()
            assert api(server, "runs")["runs"][0]["steps"] == 100_000
            query = "&".join(f"name={name}" for name in names)
            assert all(len(one["x"]) == 800 for one in api(server, f"series?{query}").values())
            assert time.process_time() - begin < 2
            begin = time.process_time()
            api(server, "runs")
            assert time.process_time() - begin < 0.1
