"""A server that speaks as vLLM's does, for the requests that an engine makes, in front of a toy model.

The model is that of `rollout_helpers.Bigram`. Requests and answers have the fields that vLLM 0.32 documents. Only the
standard library is needed, so that it also starts quickly as a process: ``python fake_server.py [port [log_probs]]``
writes its port.
"""

import json
import math
import os
import random
import struct
import subprocess
import sys
import threading
import time
from array import array
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

VOCABULARY = 32
POSITIONS = 512
NEVER = -9999.0  # what vLLM sends for minus infinity


class FakeServer(ThreadingHTTPServer):
    """Begins to serve at once.

    Attributes:
        log_probs: what they are: "raw" or "processed", as by vLLM's --logprobs-mode, "tempered" or "logits".
        shift: is added to them.
        training: whether the endpoints of vLLM's development mode are there.
        api_key: the key that requests must have.
        delay: seconds per token.
        faults: path -> what goes wrong there next: a status code, or a function of the request's handler.
        always: the same of what goes wrong each time.
        seen: (path, body) of all requests.
        reloading: whether a reload of weights has failed in the middle, and was not finished.
    """

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, delay=0.001, port=0):
        super().__init__(("127.0.0.1", port), Handler)
        draw = random.Random(0)
        self.following = [[draw.gauss(0, 2) for _ in range(VOCABULARY)] for _ in range(VOCABULARY)]
        self.bias = [0.0] * VOCABULARY
        self.log_probs, self.shift, self.training, self.api_key = "raw", 0.0, True, None
        self.delay, self.faults, self.always, self.seen = delay, {}, {}, []
        self.version = "default"
        self.paused = self.asleep = self.reloading = False
        self.running = 0
        self.changed = threading.Condition()
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_port}"

    def handle_error(self, request, client_address):
        pass  # clients that go away

    def close(self):
        self.shutdown()
        self.server_close()

    def load(self, folder):
        index = json.loads(Path(folder, "model.safetensors.index.json").read_text())["weight_map"]
        for name, file in index.items():
            data = Path(folder, file).read_bytes()
            (size,) = struct.unpack("<Q", data[:8])
            about = json.loads(data[8 : 8 + size])[name]
            start, end = (8 + size + offset for offset in about["data_offsets"])
            numbers = array("f", data[start:end]).tolist()
            rows = [numbers[k : k + VOCABULARY] for k in range(0, len(numbers), VOCABULARY)]
            setattr(self, name, rows if name == "following" else rows[0])

    def tokens(self, prompt, count, draw, stops, temperature, top_p, top_k, min_p):
        """Yield (token, its log-probability, log-probabilities of all tokens) at temperature 1 or as configured."""
        last = prompt[-1]
        for _ in range(count):
            with self.changed:
                while self.paused:
                    self.changed.wait()
                logits = [a + b for a, b in zip(self.following[last], self.bias, strict=True)]
            raw, tempered = log_softmax(logits), log_softmax([one / (temperature or 1.0) for one in logits])
            kept = truncated(tempered, top_p, 1 if temperature == 0 else top_k, min_p)
            (token,) = draw.choices(range(VOCABULARY), [math.exp(one) for one in kept])
            whole = {
                "raw": raw,
                "processed": tempered if temperature == 0 else kept,
                "tempered": [NEVER if of == NEVER else one for one, of in zip(tempered, kept, strict=True)],
                "logits": [one / (temperature or 1.0) for one in logits],
            }[self.log_probs]
            yield token, whole[token] + self.shift, whole
            last = token
            if token in stops:
                return
            time.sleep(self.delay)


def log_softmax(logits):
    highest = max(logits)
    total = highest + math.log(math.fsum(math.exp(one - highest) for one in logits))
    return [one - total for one in logits]


def truncated(log_probs, top_p, top_k, min_p):
    order = sorted(range(len(log_probs)), key=lambda token: -log_probs[token])
    lowest = min_p * math.exp(log_probs[order[0]])
    order = [token for token in order[: top_k if top_k > 0 else None] if math.exp(log_probs[token]) >= lowest]
    whole = sum(math.exp(log_probs[token]) for token in order)
    kept, mass = [], 0.0
    for token in order:
        if mass < top_p:
            kept.append(token)
            mass += math.exp(log_probs[token]) / whole
    total = math.log(sum(math.exp(log_probs[token]) for token in kept))
    return [log_probs[token] - total if token in kept else NEVER for token in range(len(log_probs))]


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def do_GET(self):
        self.handled(None)

    def do_POST(self):
        data = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.handled(json.loads(data) if data else None)

    def handled(self, body):
        server = self.server
        parts = urlsplit(self.path)
        query = {name: values[0] for name, values in parse_qs(parts.query).items()}
        server.seen.append((parts.path, body))
        fault = server.faults.pop(parts.path, server.always.get(parts.path))
        if callable(fault):
            return fault(self)
        if fault is not None:
            return self.error(fault, "this was asked for")
        if server.api_key is not None and self.headers.get("Authorization") != f"Bearer {server.api_key}":
            return self.answer({"error": "Unauthorized"}, 401)
        if parts.path not in ROUTES[self.command] or not (server.training or parts.path.startswith("/v1/")):
            return self.answer({"detail": "Not Found"}, 404)
        getattr(self, parts.path.rpartition("/")[2])(body or {}, query)

    def answer(self, content, status=200):
        data = content.encode() if isinstance(content, str) else json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "text/plain" if isinstance(content, str) else "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def error(self, status, message):
        self.answer({"error": {"message": message, "type": "BadRequestError", "param": None, "code": status}}, status)

    def begin_stream(self):
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream; charset=utf-8")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()

    def event(self, content):
        text = f"data: {content if isinstance(content, str) else json.dumps(content)}\n\n".encode()
        self.wfile.write(b"%x\r\n%s\r\n" % (len(text), text))

    def end_stream(self):
        self.event("[DONE]")
        self.wfile.write(b"0\r\n\r\n")

    def streamed(self, events):
        with self.server.changed:
            self.server.running += 1
        try:
            self.begin_stream()
            with suppress(OSError):  # the client has gone
                for event in events:
                    self.event(event)
                self.end_stream()
        finally:
            with self.server.changed:
                self.server.running -= 1
                self.server.changed.notify_all()

    # --- vLLM -----------------------------------------------------------------------------------------------------

    def models(self, body, query):
        self.answer({"object": "list", "data": [{"id": "toy", "root": "/models/toy", "max_model_len": POSITIONS}]})

    def completions(self, body, query):
        server, top = self.server, body["logprobs"]
        assert body["stream"] and body["return_token_ids"] and body["ignore_eos"]
        if not all(token < VOCABULARY for token in body["prompt"]):
            return self.error(400, "Token id 99 is out of vocabulary")
        state = random.Random(body["seed"])  # the state goes on through a pause
        length = min(body["max_tokens"], POSITIONS - len(body["prompt"]))

        def events():
            stops = body["stop_token_ids"]
            how = body["temperature"], body["top_p"], body.get("top_k", 0), body.get("min_p", 0.0)
            tokens = server.tokens(body["prompt"], length, state, stops, *how)
            for number, (token, log_prob, whole) in enumerate(tokens, 1):
                order = sorted(range(VOCABULARY), key=lambda one: -whole[one])[:top]
                reason = "stop" if token in stops else "length" if number == length else None
                found = {
                    "text_offset": [0],
                    "token_logprobs": [log_prob],
                    "tokens": [f"token_id:{token}"],
                    "top_logprobs": [{f"token_id:{one}": whole[one] for one in dict.fromkeys([token, *order])}],
                }
                choice = {"index": 0, "text": "", "logprobs": found, "finish_reason": reason, "token_ids": [token]}
                yield {"id": "cmpl-0", "object": "text_completion", "model": "toy", "choices": [choice]}

        self.streamed(events())

    def pause(self, body, query):
        server = self.server
        with server.changed:
            server.paused = True
        self.answer({"status": "paused"})

    def resume(self, body, query):
        with self.server.changed:
            self.server.paused = False
            self.server.changed.notify_all()
        self.answer({"status": "resumed"})

    def is_paused(self, body, query):
        self.answer({"is_paused": self.server.paused or self.server.asleep})  # sleeping includes a pause

    def collective_rpc(self, body, query):
        server, options = self.server, body["kwargs"]
        assert body["method"] == "reload_weights" and server.paused
        if options != {"weights_iterator": []}:
            assert not server.reloading
            server.load(options["weights_path"])
        server.reloading = False
        self.answer({"results": [None]})

    def reset_prefix_cache(self, body, query):
        self.answer({"success": query["reset_running_requests"] == query.get("reset_external") == "true"})

    def update_weight_version(self, body, query):
        self.server.version = body["new_version"]
        self.answer({"success": True, "new_version": self.server.version})

    def weight_info(self, body, query):
        self.answer({"weight_version": self.server.version})

    def sleep(self, body, query):
        self.server.asleep = True
        self.answer({"status": "sleeping"})

    def wake_up(self, body, query):
        self.server.asleep = False
        self.resume(body, query)  # waking up ends every pause


ROUTES = {
    "GET": {"/v1/models", "/is_paused", "/weight_info"},
    "POST": {"/v1/completions", "/pause", "/resume", "/collective_rpc", "/reset_prefix_cache", "/sleep", "/wake_up",
             "/update_weight_version"},
}  # fmt: skip
"""The handler's methods have the names of their paths. Those of vLLM's development mode are not below /v1."""


def serving(*options):
    """Start a server as a process. The options are those of this file."""
    process = subprocess.Popen(
        [sys.executable, __file__, *options], stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": ""}
    )
    process.url = f"http://127.0.0.1:{int(process.stdout.readline())}"
    return process


def kill(process):
    process.kill()
    process.wait()
    process.stdout.close()


if __name__ == "__main__":
    server = FakeServer(port=int(sys.argv[1]) if sys.argv[1:] else 0)
    server.log_probs = sys.argv[2] if sys.argv[2:] else "raw"
    print(server.server_port, flush=True)
    threading.Event().wait()
