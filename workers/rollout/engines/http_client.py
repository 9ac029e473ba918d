"""What `HTTPEngine` needs of HTTP, by httpx: JSON in and out, streams of events, and errors that say what to do.

Each request has its own connection: a request that is sent twice would generate twice, so none may go out on a
connection that the server is about to close. Only what the server has surely not begun is sent again: requests that it
turned away as too many, and GET.

Thread: "http-streams", a daemon, runs the event loop in which all streams of the process are read. It ends with the
process. Lock: `_starting` protects its start; it is a leaf.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import ssl
import threading
from collections.abc import AsyncIterator, Coroutine
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit

from workers.extras import require
from workers.rollout.rollout_errors import RolloutError

if TYPE_CHECKING:
    import httpx
else:
    httpx = require("httpx", "http")

CONNECT_SECONDS = 10.0
"""How long a connection may take to be made."""

RETRY_SECONDS = (0.5, 1.0, 2.0, 4.0)
"""The waits between tries of a request that the server turned away with `BUSY`."""

BUSY = (429, 503)
"""Status codes of a server that did not begin a request, because it has too many."""

KEEPALIVE = {"TCP_KEEPIDLE": 15, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}
"""A host that dies without a word is noticed after 30 s, also by a stream that waits for its next token."""

T = TypeVar("T")

_starting = threading.Lock()
# This loop is never closed, because another engine may need it.
_loop: asyncio.AbstractEventLoop | None = None


def run(coroutine: Coroutine[Any, Any, T]) -> Future[T]:
    """Begin a coroutine in the thread "http-streams"."""
    global _loop
    with _starting:
        if _loop is None:
            loop = asyncio.new_event_loop()
            threading.Thread(target=loop.run_forever, name="http-streams", daemon=True).start()
            _loop = loop  # only now: in a loop without a thread, coroutines would wait for ever
    return asyncio.run_coroutine_threadsafe(coroutine, _loop)


def _after_fork() -> None:
    global _loop, _starting
    _loop, _starting = None, threading.Lock()  # the loop's thread, and who may hold the lock, are the parent's


os.register_at_fork(after_in_child=_after_fork)


class ServerError(RolloutError):
    """A server could not be reached, did not answer in time, or answered with an error.

    Attributes:
        status: the HTTP status code; None if there was no answer.
        gone: whether the connection could not be made, or broke: the server has died, or is being restarted.
    """

    def __init__(self, message: str, status: int | None = None, *, gone: bool = False) -> None:
        super().__init__(message)
        self.status, self.gone = status, gone


class Server:
    """A server's address, and how to speak to it. It keeps no connection.

    Args:
        url: ``http://host:port``, or ``https://``; a path is a prefix of all paths.
        api_key: sent as ``Authorization: Bearer``; None for no such header.
        timeout: seconds that an answer may take; streams have no limit of their own.

    Raises:
        ValueError: ``url`` is not such an address.
    """

    def __init__(self, url: str, api_key: str | None = None, timeout: float = 300.0) -> None:
        parts = urlsplit(url)
        try:
            usable = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
        except ValueError:  # of the port
            usable = False
        if not usable or parts.query or parts.fragment:
            raise ValueError(f"url={url!r}; expected an address such as 'http://127.0.0.1:8000'")
        self.url = url.rstrip("/")
        self.host = str(parts.hostname)
        self.timeout = timeout
        headers = {"Accept": "application/json, text/event-stream"}
        if api_key is not None:
            headers["Authorization"] = f"Bearer {api_key}"
        keepalive = [
            (socket.IPPROTO_TCP, getattr(socket, name), seconds)
            for name, seconds in KEEPALIVE.items()
            if hasattr(socket, name)  # not all systems have them
        ]
        transport: dict[str, Any] = {
            "verify": ssl.create_default_context(),  # the host's certificates, not httpx's
            "limits": httpx.Limits(max_connections=None, max_keepalive_connections=0),
            "socket_options": [(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1), *keepalive],
        }
        # Proxies of the environment are not for servers of the cluster.
        client: dict[str, Any] = {"base_url": self.url, "headers": headers, "trust_env": False}
        # Any thread may use this client: httpx's clients are thread-safe.
        self._client = httpx.Client(
            **client,
            transport=httpx.HTTPTransport(**transport),
            timeout=httpx.Timeout(timeout, connect=CONNECT_SECONDS),
        )
        # No limit for a read: a request may wait long at a busy server. `HTTPEngine` looks for streams that are silent.
        # Only the thread of `run` may use this client, because asyncio's objects belong to one loop.
        self._streams = httpx.AsyncClient(
            **client,
            transport=httpx.AsyncHTTPTransport(**transport),
            timeout=httpx.Timeout(None, connect=CONNECT_SECONDS),
        )

    def get(self, path: str) -> Any:
        """Return what the server answers: JSON as Python objects, anything else as text. A connection that fails is
        tried once more. Raises a `ServerError`."""
        try:
            return self._exchange("GET", path)
        except ServerError as error:
            # A late server may still be working on the request, and a second request would delay it further.
            late = isinstance(error.__cause__, httpx.TimeoutException) and not error.gone
            if error.status is not None or late:
                raise
        return self._exchange("GET", path)

    def post(self, path: str, body: Any = None, **query: str) -> Any:
        """Send JSON, and return what the server answers. Raises a `ServerError`."""
        return self._exchange("POST", path, body, query)

    async def events(self, path: str, body: Any) -> AsyncIterator[Any]:
        """Send a request, and yield each event of the answer as Python objects until the server sends ``[DONE]``. Run
        it with `run`; the server notices when that is cancelled. Raises a `ServerError`."""
        for wait in (*RETRY_SECONDS, None):
            try:
                async for event in self._events(path, body):
                    yield event
                return
            except ServerError as error:
                if wait is None or error.status not in BUSY:
                    raise
            await asyncio.sleep(wait)

    async def _events(self, path: str, body: Any) -> AsyncIterator[Any]:
        what = f"POST {path}"
        try:
            async with self._streams.stream("POST", path, json=body) as response:
                if response.status_code >= 300:
                    await response.aread()
                    raise self._refused(what, response)
                rest = b""
                # Not `aiter_lines`, for which a line also ends at characters that JSON may contain.
                async for data in response.aiter_bytes():
                    *lines, rest = (rest + data).split(b"\n")
                    for line in lines:
                        if line.startswith(b"data:"):  # others are comments, which keep the connection alive
                            event = line[5:].strip()
                            if event == b"[DONE]":
                                return
                            yield self._checked(what, json.loads(event))
                raise ConnectionError("it ended before the last event")
        except (OSError, httpx.HTTPError, ValueError) as error:
            raise self.broken(what, error) from error

    def _exchange(self, method: str, path: str, body: Any = None, query: Any = None) -> Any:
        what = f"{method} {path}"
        try:
            response = self._client.request(method, path, json=body, params=query)
            if response.status_code >= 300:
                raise self._refused(what, response)
            is_json = "json" in response.headers.get("Content-Type", "") and response.content
            return response.json() if is_json else response.text
        except (httpx.HTTPError, ValueError) as error:
            raise self.broken(what, error) from error

    def _refused(self, what: str, response: httpx.Response) -> ServerError:
        status = response.status_code
        why = "; pass its key as api_key=" if status in (401, 403) else ""
        message = _message(response.text)
        return ServerError(f"the server at {self.url} answered {what} with {status}: {message}{why}", status)

    def broken(self, what: str, error: BaseException) -> ServerError:
        """The error for a request that got no answer, or only a part of one."""
        cause = error
        while (inner := cause.__cause__ or cause.__context__) is not None and str(inner):
            cause = inner  # what the system said; httpx's own exceptions may say less
        told = f"{type(cause).__name__}: {cause}" if str(cause) else type(cause).__name__
        if isinstance(error, (httpx.ConnectError, httpx.ConnectTimeout)):
            return ServerError(
                f"cannot reach the server at {self.url}: {told}. Check the URL, that the server runs, and that "
                f"this host ({socket.gethostname()}) may connect to it",
                gone=True,
            )
        late = isinstance(error, (TimeoutError, httpx.TimeoutException))
        if late:
            why = f"did not answer {what} within {self.timeout:g} s; it is overloaded or hangs: see its log"
        else:
            why = f"closed the connection during {what} ({told}); it has probably died: see its log"
        return ServerError(f"the server at {self.url} {why}", gone=not late)

    def _checked(self, what: str, event: Any) -> Any:
        if isinstance(event, dict) and event.get("error"):
            error = event["error"]
            status = error.get("code") if isinstance(error, dict) else None
            raise ServerError(
                f"the server at {self.url} failed in the middle of {what}: {_message(json.dumps(event))}",
                # Not `status` itself: a request that has begun must not be sent again, whatever the server says.
                500 if status in BUSY else status if isinstance(status, int) else None,
            )
        return event


def _message(content: str) -> str:
    """The server's own message, from the places where the known servers put it."""
    try:
        found = json.loads(content)
    except ValueError:
        return content.strip()[:2000] or "(no message)"
    for key in ("error", "message", "detail"):
        if isinstance(found, dict) and found.get(key):
            found = found[key]
    return (found if isinstance(found, str) else json.dumps(found))[:2000]
