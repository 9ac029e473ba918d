"""A small HTTP client on the standard library, for engines behind a server: JSON in and out, and streams of events.

Each request has its own connection: a request that is sent twice would generate twice, so none may go out on a
connection that the server is about to close. Only what the server has surely not begun is sent again: requests that it
turned away as too many, and GET.
"""

from __future__ import annotations

import http.client
import json
import socket
import ssl
import threading
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any
from urllib.parse import quote, urlencode, urlsplit

from workers.rollout.rollout_errors import RolloutError

CONNECT_SECONDS = 10.0
"""How long a connection may take to be made."""

RETRY_SECONDS = (0.5, 1.0, 2.0, 4.0)
"""The waits between tries of a request that the server turned away with `BUSY`."""

BUSY = (429, 503)
"""Status codes of a server that did not begin a request, because it has too many."""

KEEPALIVE = {"TCP_KEEPIDLE": 15, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}
"""A host that dies without a word is noticed after 30 s, also by a stream that waits for its next token."""


class ServerError(RolloutError):
    """A server could not be reached, did not answer in time, or answered with an error.

    Attributes:
        status: the HTTP status code; None if there was no answer.
    """

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


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
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
            raise ValueError(f"url={url!r}; expected an address such as 'http://127.0.0.1:8000'")
        self.url = url.rstrip("/")
        self.host = parts.hostname
        self.timeout = timeout
        self._tls = parts.scheme == "https"
        self._port = parts.port or (443 if self._tls else 80)
        self._prefix = parts.path.rstrip("/")
        self._headers = {"Accept": "application/json, text/event-stream"}
        if api_key is not None:
            self._headers["Authorization"] = f"Bearer {api_key}"

    def get(self, path: str) -> Any:
        """Return what the server answers: JSON as Python objects, anything else as text. A connection that fails is
        tried once more.

        Raises:
            ServerError: see the class.
        """
        try:
            return self._exchange("GET", path, None)
        except ServerError as error:
            if error.status is not None or isinstance(error.__cause__, TimeoutError):
                raise
        return self._exchange("GET", path, None)

    def post(self, path: str, body: Any = None, **query: str) -> Any:
        """Send JSON, and return what the server answers.

        Raises:
            ServerError: see the class.
        """
        return self._exchange("POST", f"{path}?{urlencode(query)}" if query else path, body)

    def has(self, path: str) -> bool:
        """Whether the server answers a GET of this path with anything but "there is no such path".

        Raises:
            ServerError: the server could not be reached.
        """
        try:
            self.get(path)
        except ServerError as error:
            if error.status is None:
                raise
            return error.status not in (404, 405)
        return True

    def stream(self, path: str, body: Any) -> Stream:
        """Return the events that the server will send as an answer. Nothing is sent before they are asked for."""
        return Stream(self, path, body)

    def _exchange(self, method: str, path: str, body: Any) -> Any:
        connection = self.connect(self.timeout)
        try:
            response = self.send(connection, method, path, body)
            content = response.read()
        except (OSError, http.client.HTTPException) as error:
            raise self.broken(f"{method} {path}", error) from error
        finally:
            connection.close()
        return json.loads(content) if _is_json(response) and content else content.decode(errors="replace")

    def connect(self, timeout: float | None) -> http.client.HTTPConnection:
        """Make a connection, whose reads and writes may take so many seconds each.

        Raises:
            ServerError: the server could not be reached.
        """
        made = (
            http.client.HTTPSConnection(
                self.host, self._port, timeout=CONNECT_SECONDS, context=ssl.create_default_context()
            )
            if self._tls
            else http.client.HTTPConnection(self.host, self._port, timeout=CONNECT_SECONDS)
        )
        try:
            made.connect()
        except OSError as error:
            made.close()
            raise ServerError(
                f"cannot reach the server at {self.url}: {_told(error)}. Check the URL, that the server runs, and that "
                f"this host ({socket.gethostname()}) may connect to it"
            ) from error
        made.sock.settimeout(timeout)
        made.sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, seconds in KEEPALIVE.items():
            with suppress(AttributeError, OSError):  # not all systems have them
                made.sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), seconds)
        return made

    def send(
        self, connection: http.client.HTTPConnection, method: str, path: str, body: Any
    ) -> http.client.HTTPResponse:
        """Send a request, and return the response once its header has come.

        Raises:
            ServerError: the server answered with an error.
        """
        headers: Mapping[str, str] = self._headers
        data = None
        if body is not None:
            data, headers = json.dumps(body).encode(), {**headers, "Content-Type": "application/json"}
        connection.request(method, self._prefix + quote(path, safe="/?&=%"), data, dict(headers))
        response = connection.getresponse()
        if response.status >= 300:
            what = _message(response.read().decode(errors="replace"))
            why = "; pass its key as api_key=" if response.status in (401, 403) else ""
            raise ServerError(
                f"the server at {self.url} answered {method} {path} with {response.status}: {what}{why}",
                response.status,
            )
        return response

    def broken(self, what: str, error: BaseException) -> ServerError:
        """The error for a connection that failed after it was made."""
        if isinstance(error, TimeoutError):
            why = f"did not answer {what} within {self.timeout:g} s; it is overloaded or hangs: see its log"
        else:
            why = f"closed the connection during {what} ({_told(error)}); it has probably died: see its log"
        return ServerError(f"the server at {self.url} {why}")


class Stream:
    """The events of one answer, in the format of server-sent events. Iterate in one thread; any thread may `close`."""

    def __init__(self, server: Server, path: str, body: Any) -> None:
        self._server = server
        self._path = path
        self._body = body
        self._closed = threading.Event()
        self._lock = threading.Lock()
        """Protects ``_socket``. It is a leaf."""
        self._socket: socket.socket | None = None

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed.is_set()

    def close(self) -> None:
        """End the iteration now. The server notices that nobody listens."""
        # First, so that the reading thread either finds this set before it sends, or has left a socket to shut down.
        self._closed.set()
        with self._lock:
            if self._socket is not None:
                with suppress(OSError):
                    self._socket.shutdown(socket.SHUT_RDWR)  # unlike close(), this ends a read of another thread

    def __iter__(self) -> Iterator[Any]:
        """Send the request, and yield each event as Python objects until the server sends ``[DONE]``.

        Raises:
            ServerError: see the class. After `close` there are no errors.
        """
        waits = iter(RETRY_SECONDS)
        while not self.closed:
            try:
                yield from self._events()
                return
            except ServerError as error:
                wait = next(waits, None) if error.status in BUSY else None
                if wait is None:
                    if self.closed:
                        return
                    raise
                self._closed.wait(wait)

    def _events(self) -> Iterator[Any]:
        # No limit for a read: a request may wait long at a busy server. `HTTPEngine` looks for streams that are silent.
        connection = self._server.connect(None)
        with self._lock:
            self._socket = connection.sock
        try:
            if self.closed:  # before there was a socket to shut down
                return
            response = self._server.send(connection, "POST", self._path, self._body)
            rest = b""
            while data := response.read1(1 << 16):
                *lines, rest = (rest + data).split(b"\n")
                for line in lines:
                    if line.startswith(b"data:"):  # others are comments, which keep the connection alive
                        event = line[5:].strip()
                        if event == b"[DONE]":
                            return
                        yield self._checked(json.loads(event))
            raise ConnectionError("it ended before the last event")
        except (OSError, http.client.HTTPException, ValueError) as error:
            if not self.closed:
                raise self._server.broken(f"POST {self._path}", error) from error
        finally:
            with self._lock:
                # Before it is closed: `close` must not shut down another connection that got the same number.
                self._socket = None
            connection.close()

    def _checked(self, event: Any) -> Any:
        if isinstance(event, dict) and event.get("error"):
            error = event["error"]
            status = error.get("code") if isinstance(error, dict) else None
            raise ServerError(
                f"the server at {self._server.url} failed in the middle of POST {self._path}: "
                f"{_message(json.dumps(event))}",
                # Not `status` itself: a request that has begun must not be sent again, whatever the server says.
                500 if status in BUSY else status if isinstance(status, int) else None,
            )
        return event


def _is_json(response: http.client.HTTPResponse) -> bool:
    return "json" in (response.headers.get("Content-Type") or "")


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


def _told(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
