"""ViewServer: serves the page of one or several runs to this host's browser. Standard library alone.

Access: the socket is bound to 127.0.0.1. The path of every address begins with a random token, so the page's own
relative addresses carry it, and no other site or user knows it. Requests that name another host are refused, which
keeps out sites whose names were made to mean 127.0.0.1. Only GET and HEAD are answered; nothing is written. Files of
the page come from a fixed list, files of runs from fixed names and numbers of steps, so no part of a request becomes a
path. Answers are JSON, which the page inserts as text; its policy forbids scripts and styles in the page itself, and
any other host.

Threads: `http.server` starts one for each connection. They end with it; `ViewServer.close` waits for none.
Lock: ``_reading`` protects the readers of the runs. No other lock is acquired while it is
held.
"""

from __future__ import annotations

import hmac
import json
import logging
import math
import os
import re
import secrets
import threading
import time
import urllib.parse
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np

from single_controller.call.state import Closing
from single_controller.view.live import Live, is_own
from single_controller.view.run_files import RunFolderError
from single_controller.view.run_reader import Arrays, RunReader, as_number, telling
from single_controller.view.sample_table import NUMBERS, Filter, select
from single_controller.view.sample_table import branches as tree_of
from single_controller.view.timeline_bars import bars_of

logger = logging.getLogger(__name__)

PAGE = {
    "": ("index.html", "text/html; charset=utf-8"),
    "index.html": ("index.html", "text/html; charset=utf-8"),
    "icon.svg": ("icon.svg", "image/svg+xml"),
    "view.css": ("view.css", "text/css; charset=utf-8"),
    "view.js": ("view.js", "text/javascript; charset=utf-8"),
    "common.js": ("common.js", "text/javascript; charset=utf-8"),
    "curves.js": ("curves.js", "text/javascript; charset=utf-8"),
    "timeline.js": ("timeline.js", "text/javascript; charset=utf-8"),
    "ranks.js": ("ranks.js", "text/javascript; charset=utf-8"),
    "events.js": ("events.js", "text/javascript; charset=utf-8"),
    "samples.js": ("samples.js", "text/javascript; charset=utf-8"),
}
"""The files of the page."""

HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}

OWN_NAMES = re.compile(r"(127\.0\.0\.1|localhost|\[::1\])(:\d{1,5})?", re.IGNORECASE)
"""What a browser on this host, or at the other end of an ssh tunnel, may call it. Any port: tunnels have their own."""

MAX_TEXT = 20_000
"""Characters of one text that are sent. Its length is sent with it."""

MAX_TOKENS = 20_000
"""Tokens of one sample that are sent at once."""

MAX_BRANCHES = 64
"""Rows of one session whose tree is sent."""

MAX_VALUES = 4_000
"""Values of one token's column that are sent."""

MAX_ROWS = 500
"""Rows of a table that are sent at once."""

MAX_POINTS = 4_000
"""Points of a curve that are sent at most."""

MAX_BARS = 20_000
"""Parts of a timeline that are sent at most; those next to each other are merged."""

ROW_ARRAYS = frozenset(("numbers", "starts", "prompt_lengths", "rewards", "groups"))
"""The arrays of samples that have one value for each row."""

REQUEST_SECONDS = 10.0
"""How long a client may take to send its request."""


class RequestError(Exception):
    """A request that cannot be answered.

    Args:
        status: HTTP's code.
        text: why.
    """

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


class ViewServer(Closing):
    """Serves the page. A context manager.

    Args:
        folders: the runs' folders.
        port: where to listen; 0 for any free port.
        address: of the Ray cluster; by default what each run says.

    Attributes:
        url: the page's address, with its token.

    Raises:
        RunFolderError: a folder is no run folder.
        OSError: the port is in use, or is none.
    """

    def __init__(self, folders: Sequence[str | Path], port: int = 0, address: str | None = None) -> None:
        self.token = secrets.token_urlsafe(24)
        self._reading = threading.Lock()
        self.runs = [RunReader(folder) for folder in folders]
        self._live = Live()
        self._address = address
        self._serving = False
        try:
            self._server = _Server(("127.0.0.1", port), _Handler)
        except (OSError, OverflowError) as error:
            raise OSError(f"port {port} of 127.0.0.1 cannot be used: {error}. Choose another one, or 0") from error
        self._server.view = self
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}/{self.token}/"

    def serve(self) -> None:
        """Answer requests until `close` is called in another thread."""
        self._serving = True  # before: a close() meanwhile must find it
        self._server.serve_forever(poll_interval=0.1)

    def close(self) -> None:
        """Stop answering, and close the connections to clusters."""
        if self._serving:  # otherwise, shutdown() would wait for ever
            self._server.shutdown()
        self._server.server_close()
        self._live.close()

    # --- answers ----------------------------------------------------------------------------------------------------

    def answer(self, name: str, query: Mapping[str, list[str]]) -> Any:
        """The answer to a request of the page.

        Raises:
            RequestError: there is no such thing, or an argument is wrong.
        """
        answer: Callable[[Query], Any] | None = {
            "runs": self._runs,
            "series": self._series,
            "events": self._events,
            "samples": self._samples,
            "sample": self._sample,
            "token": self._token,
            "timeline": self._timeline,
            "live": self._now,
        }.get(name)
        if answer is None:
            raise RequestError(404, "there is no such address")
        asked = Query(query)
        if name == "live":  # waits for Ray, so it must not hold the lock
            return answer(asked)
        with self._reading:
            try:
                return answer(asked)
            except RunFolderError as error:
                raise RequestError(404, str(error)) from None

    def _run(self, query: Query) -> RunReader:
        number = query.integer("run", 0)
        if not 0 <= number < len(self.runs):
            raise RequestError(404, f"there is no run {number}")
        self.runs[number].refresh()
        return self.runs[number]

    def _runs(self, query: Query) -> Any:
        found = []
        folders = [f"{run.folder.parent.name}/{run.folder.name}" for run in self.runs]
        for run in self.runs:
            run.refresh()
        summaries = [run.summary() for run in self.runs]
        names = [summary["name"] for summary in summaries]
        for number, (run, summary) in enumerate(zip(self.runs, summaries, strict=True)):
            steps = run.sample_steps()
            name = names[number]
            if names.count(name) > 1:  # told apart by their folders, or by their numbers
                name = f"{name} ({number if folders.count(folders[number]) > 1 else folders[number]})"
            found.append(
                _cut(summary)
                | {
                    "run": number,
                    "name": _cut(name),
                    "about": _cut(run.about),
                    "steps": len(run.metrics.steps),
                    # All of them, because a curve is asked for by its name; `_cut` would leave the first 1000.
                    "metrics": {one: value for one, value in summary["metrics"].items() if len(one) <= 200},
                    "events": _cut(Counter(str(event.get("kind")) for event in run.events)),
                    "samples": [steps[0], steps[-1], len(steps)] if steps else None,
                }
            )
        return {"runs": found, "time": time.time()}

    def _series(self, query: Query) -> Any:
        run = self._run(query)
        points = max(1, min(query.integer("points", 800), MAX_POINTS))
        by_time = query.choice("x", ("step", "time")) == "time"
        first, last = query.number("first", -math.inf), query.number("last", math.inf)
        names = [name for name in query.several("name") if name in run.metrics.columns][:100]
        return {
            name: run.metrics.series(name, by_time=by_time, first=first, last=last, points=points) for name in names
        }

    def _events(self, query: Query) -> Any:
        events: Sequence[dict[str, Any]] = self._run(query).events
        kind, text = query.text("kind"), (query.text("text") or "").lower()
        if kind is not None:
            events = [event for event in events if event.get("kind") == kind]
        if text:
            events = [event for event in events if text in str(event.get("text", "")).lower()]
        offset, limit = query.page()
        newest = [*reversed(events)][offset : offset + limit]
        return {"total": len(events), "offset": offset, "rows": [_cut(event) for event in newest]}

    def _samples(self, query: Query) -> Any:
        run = self._run(query)
        known = run.sample_steps()
        step = query.text("step") or "last"
        if step not in ("last", "all") and not step.removeprefix("-").isdecimal():
            raise RequestError(400, "step is a number, 'last' or 'all'")
        steps = known if step == "all" else known[-1:] if step == "last" else [int(step[:12])]
        sort = query.choice("sort", ("reward", *NUMBERS, "finish"))
        ranges = {}
        for name in NUMBERS:
            low, high = query.number(f"min_{name}", -math.inf), query.number(f"max_{name}", math.inf)
            if low > -math.inf or high < math.inf:
                ranges[name] = low, high
        equal = {"": None, "yes": True, "no": False}[query.choice("equal", ("", "yes", "no"))]
        chosen = Filter(ranges, query.text("finish"), equal, query.number("version", math.nan))
        offset, limit = query.page()
        tables, unreadable = [], []
        for one in steps:
            try:
                tables.append(run.table(one))
            except RunFolderError as error:  # the run deletes old ones
                if step not in ("last", "all"):
                    raise
                if one in run.sample_steps():
                    unreadable.append(str(error))
        found = select(
            tables,
            chosen,
            sort,
            descending=query.choice("order", ("up", "down")) == "down",
            offset=offset,
            limit=limit,
        )
        return found | {"offset": offset, "step": step, "steps": known[-2000:], "unreadable": unreadable[:20]}

    def _sample(self, query: Query) -> Any:
        run = self._run(query)
        step, row = query.integer("step", -1), query.integer("row", 0)
        first, count = query.integer("first", 0), query.integer("count", MAX_TOKENS)
        table = run.table(step)
        if not 0 <= row < len(table.finish):
            raise RequestError(404, f"step {step} has no row {row}")
        with run.arrays(step) as arrays, telling(f"the samples of step {step}"):
            start, stop = _ends(arrays, row)
            begin = start + max(0, min(first, stop - start))
            end = min(stop, begin + max(1, min(count, MAX_TOKENS)))
            per_token, per_row, several = {}, {}, []
            for name in arrays:
                if name == "offsets" or name.endswith("/offsets"):
                    continue
                shape = arrays.shape(name)
                if name.startswith("jagged/") or (len(shape) > 1 and name.startswith("token/")):
                    several.append(name.partition("/")[2])
                elif len(shape) != 1:
                    continue
                elif name in ROW_ARRAYS or name.startswith("row/"):
                    per_row[name.removeprefix("row/")] = _plain(arrays.rows(name, row, row + 1))[0]
                else:
                    per_token[name.removeprefix("token/")] = _plain(arrays.rows(name, begin, end))
            branches = self._branches(run, arrays, step, row)
        tokens = per_token.pop("tokens", [])
        texts = run.texts(step)
        text = texts[row] if row < len(texts) else {}
        groups = table.columns["group"]
        same_group = np.flatnonzero(groups == groups[row])[:256].tolist() if groups[row] >= 0 else []
        versions = sorted({one for one in per_token.get("versions", []) if isinstance(one, int) and one >= 0})
        return {
            "step": step,
            "row": row,
            "length": stop - start,
            "first": begin - start,
            "prompt_length": int(table.columns["prompt"][row]),
            "line": select([table], Filter({"row": (row, row)}), "row", descending=False, offset=0, limit=1)["rows"][0],
            "tokens": tokens,
            "pieces": run.pieces(tokens),
            "columns": per_token,
            "row_columns": per_row,
            "several": several,
            "branches": branches,
            "text": _cut(text),
            "group": [{"row": one, "reward": _plain(table.columns["reward"][one : one + 1])[0]} for one in same_group],
            "updates": {str(version): run.update_of(version) for version in versions[:50]},
        }

    @staticmethod
    def _branches(run: RunReader, arrays: Arrays, step: int, row: int) -> list[dict[str, Any]]:
        """The tree of the session of a row; [] if it is one row."""
        if "row/rollout_ids" not in arrays:
            return []
        of = arrays["row/rollout_ids"]
        those = np.flatnonzero(of == of[row])
        rows = sorted({row, *those[:MAX_BRANCHES].tolist()})
        if len(rows) < 2:
            return []
        texts = run.texts(step)
        turns = {one: _turns(texts[one]) if one < len(texts) else [] for one in rows}
        tokens = {one: arrays.rows("tokens", *_ends(arrays, one)) for one in rows}
        nodes = tree_of(tokens, {one: [turn["start"] for turn in turns[one]] for one in rows})
        for node in nodes:
            node["turns"] = [
                {"kind": turn["kind"], "tokens": min(turn["end"], node["end"]) - max(turn["start"], node["start"])}
                for turn in turns[node["rows"][0]]
                if turn["end"] > node["start"] and turn["start"] < node["end"]
            ]
        return nodes

    def _token(self, query: Query) -> Any:
        """The columns of one token that have several values: a fixed number for each token, or another one for each."""
        run = self._run(query)
        step, row, token = query.integer("step", -1), query.integer("row", 0), query.integer("token", 0)
        found = {}
        with run.arrays(step) as arrays, telling(f"the samples of step {step}"):
            start, stop = _ends(arrays, row)
            there = 0 <= token < stop - start
            for name in list(arrays) if there else []:
                kind, _, short = name.partition("/")
                if kind == "token" and len(arrays.shape(name)) > 1:
                    found[short] = arrays.rows(name, start + token, start + token + 1)[0]
                elif kind == "jagged" and f"{name}/offsets" in arrays:
                    first, last = (int(one) for one in arrays.rows(f"{name}/offsets", row, row + 2))
                    if f"token/{short}_lengths" in arrays:
                        lengths = arrays.rows(f"token/{short}_lengths", start, start + token + 1)
                        begin = first + int(lengths[:token].sum())
                        found[short] = arrays.rows(name, begin, min(last, begin + int(lengths[token])))
                    elif last - first == stop - start:
                        found[short] = arrays.rows(name, first + token, first + token + 1)[0]
        if not there:
            raise RequestError(404, f"row {row} of step {step} has no token {token}")
        return {
            name: {"shape": list(values.shape), "values": _plain(values.reshape(-1)[:MAX_VALUES])}
            for name, values in found.items()
        }

    def _timeline(self, query: Query) -> Any:
        run = self._run(query)
        span = run.timeline_span()
        if span is None:
            return {"span": None, "lanes": [], "bars": [], "events": [], "more": False}
        end = query.number("end", span[1])
        begin = query.number("begin", max(span[0], end - 60.0))
        if not (math.isfinite(begin) and math.isfinite(end) and begin < end):
            begin, end = span
        parts, more = run.timeline(begin, end)

        pixels = max(100, min(query.integer("pixels", 1000), 4000))
        lanes, bars = bars_of(parts, begin, end, pixels, MAX_BARS)
        kinds = ("update", "death", "replace", "checkpoint", "alarm", "resume", "rewind")
        shown = [one for one in run.events if one.get("kind") in kinds and begin <= as_number(one.get("time")) <= end]
        events = [_cut(event) for event in shown[-500:]]
        return {"span": span, "begin": begin, "end": end, "lanes": lanes, "bars": bars, "events": events, "more": more}

    def _now(self, query: Query) -> Any:
        with self._reading:
            run = self._run(query)
            address, ended, groups = run.about.get("ray_address"), run.about.get("ended"), run.about["groups"]
            theirs = run.owner not in (0, os.geteuid())
        address = self._address or address
        if ended and self._address is None:
            return {"ended": ended, "groups": [], "problems": []}
        if address is None or (self._address is None and (theirs or not is_own(address))):
            # A folder from elsewhere must not decide whom this process trusts: records of groups are pickles.
            where = "is named by another user" if theirs else "is on another host"
            where = "run.json has no ray_address" if address is None else f"its cluster, {address}, {where}"
            return {"error": f"{where}: give it with --address", "groups": [], "problems": []}
        # Without the lock: looking waits for Ray, and the pages of files must not wait with it.
        seen = self._live.look(address)
        order = sorted(seen["groups"], key=lambda one: one["name"].partition(" (driver: ")[0] not in groups)
        return seen | {"groups": order}


class Query:
    """The arguments of a request. Each method raises `RequestError` if its argument is wrong."""

    def __init__(self, given: Mapping[str, list[str]]) -> None:
        self._given = given

    def several(self, name: str) -> list[str]:
        """All values of an argument."""
        return self._given.get(name, [])

    def text(self, name: str) -> str | None:
        """An argument; None if it was not given."""
        return self._given[name][-1] if self._given.get(name) else None

    def number(self, name: str, default: float) -> float:
        """An argument that is a number."""
        text = self.text(name)
        if text is None or text == "":
            return default
        try:
            value = float(text)
        except ValueError:
            raise RequestError(400, f"{name} is not a number") from None
        return value if not math.isnan(value) else default

    def integer(self, name: str, default: int) -> int:
        """An argument that is an integer."""
        value = self.number(name, default)
        if not math.isfinite(value) or value != int(value) or abs(value) > 2**53:
            raise RequestError(400, f"{name} is not an integer")
        return int(value)

    def choice(self, name: str, choices: Sequence[str]) -> str:
        """One of several words, by default the first one."""
        text = self.text(name)
        if text is None:
            return choices[0]
        if text not in choices:
            raise RequestError(400, f"{name} is none of {', '.join(map(repr, choices))}")
        return text

    def page(self) -> tuple[int, int]:
        """Where a page of a table begins, and how many rows it has."""
        return max(0, self.integer("offset", 0)), max(0, min(self.integer("limit", 100), MAX_ROWS))


class _Server(ThreadingHTTPServer):
    """Answers each connection in a thread of its own."""

    view: ViewServer
    daemon_threads = True  # a request that waits for Ray must not keep the process from ending

    def service_actions(self) -> None:
        """Called several times per second."""
        try:
            self.view._live.disconnect_if_idle()
        except Exception:  # whatever Ray raises, the page continues to show the files
            logger.debug("a connection to Ray could not be closed", exc_info=True)

    def handle_error(self, request: Any, client_address: Any) -> None:
        logger.debug("a connection has failed", exc_info=True)  # the client has gone; nobody else is concerned


class _Handler(BaseHTTPRequestHandler):
    """One connection."""

    server: _Server
    protocol_version = "HTTP/1.1"
    server_version, sys_version = "view", ""
    timeout = REQUEST_SECONDS  # of the socket: an idle connection, too, holds its thread no longer

    def do_GET(self) -> None:
        if "Transfer-Encoding" in self.headers or self.headers.get("Content-Length", "0") != "0":
            self.close_connection = True  # what follows is not read, and must not be taken for another request
        try:
            self._check_host()
            self._answer()
        except RequestError as error:
            self._send(error.status, "application/json", json.dumps({"error": str(error)}).encode())
        except (BrokenPipeError, ConnectionResetError, TimeoutError):
            self.close_connection = True
        except Exception as error:
            logger.exception("a request could not be answered")
            self._send(500, "application/json", json.dumps({"error": f"{type(error).__name__}; see the log"}).encode())

    do_HEAD = do_GET

    def _check_host(self) -> None:
        hosts = self.headers.get_all("Host") or []
        if len(hosts) != 1 or not OWN_NAMES.fullmatch(hosts[0]):
            raise RequestError(403, "this server answers only to 127.0.0.1 and localhost")

    def _answer(self) -> None:
        path, _, text = self.path.partition("?")  # no urlsplit: it raises at "[", and takes "http://host/" too
        root, _, rest = path.partition("/")
        if root:
            raise RequestError(403, "an address begins with /")
        token, slash, name = rest.partition("/")
        if not slash or not hmac.compare_digest(token.encode(), self.server.view.token.encode()):
            raise RequestError(
                403, "the address has no token, or a wrong one: open the address that the command printed"
            )
        if name in PAGE:
            file, kind = PAGE[name]
            self._send(200, kind, (resources.files(__package__) / "page" / file).read_bytes())
            return
        if not name.startswith("api/"):
            raise RequestError(404, "there is no such address")
        try:
            query = urllib.parse.parse_qs(text, keep_blank_values=True, max_num_fields=200)
        except ValueError as error:
            raise RequestError(400, f"the query cannot be read: {error}") from None
        answer = self.server.view.answer(name.removeprefix("api/"), query)
        self._send(200, "application/json", json.dumps(finite(answer), allow_nan=False).encode())

    def _send(self, status: int, kind: str, body: bytes) -> None:
        self.send_response(status)
        for header, value in HEADERS.items():
            self.send_header(header, value)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Answer what http.server itself refuses, such as other methods, without repeating anything of the request."""
        self.close_connection = True
        if code == 501:
            code, message = 405, "only GET and HEAD are answered"
        self._send(code, "application/json", json.dumps({"error": message or "the request cannot be read"}).encode())

    def log_message(self, format: str, *args: Any) -> None:
        # Addresses have the token, and may have control characters: nothing of them is logged.
        logger.debug("%s answered", self.command if self.command in ("GET", "HEAD") else "a request")


def _cut(value: Any, depth: int = 0) -> Any:
    """Plain data without the ends of long texts and lists."""
    if isinstance(value, str):
        rest = len(value) - MAX_TEXT
        return value if rest <= 0 else f"{value[:MAX_TEXT]} ... ({rest:,} more characters)"
    if depth > 8:
        return "..."
    if isinstance(value, dict):
        return {str(key)[:200]: _cut(one, depth + 1) for key, one in list(value.items())[:1000]}
    if isinstance(value, list):
        return [_cut(one, depth + 1) for one in value[:2000]]
    return value


def finite(value: Any) -> Any:
    """Plain data with None for numbers that are not finite, which JSON does not have."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: finite(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(one) for one in value]
    return value


def _plain(values: np.ndarray) -> list[Any]:
    """Numbers as Python's, rounded to what float32 holds."""
    if values.dtype.kind == "f":
        return [float(f"{one:.7g}") for one in values.tolist()]
    if values.dtype.kind not in "bui":
        return [str(one)[:200] for one in values.tolist()]
    # JavaScript's numbers have 53 bits
    return [str(one) if isinstance(one, int) and abs(one) > 2**53 else one for one in values.tolist()]


def _ends(arrays: Arrays, row: int) -> tuple[int, int]:
    start, stop = (int(one) for one in arrays.rows("offsets", row, row + 2))
    return start, stop


def _turns(text: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The turns of a row that are as the format says."""
    turns = text.get("turns")
    return [
        {"start": one["start"], "end": one["end"], "kind": str(one.get("kind"))[:40]}
        for one in (turns if isinstance(turns, list) else [])
        if isinstance(one, dict) and type(one.get("start")) is int and type(one.get("end")) is int
    ]
