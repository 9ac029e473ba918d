"""HTTPFront: the HTTP side of the gateway and of its router, as an ASGI application on a thread of its own.

It bounds what a client can take: the size of a body, the seconds for sending a request and for taking a reply, and the
number of connections. What a request means is up to its `Player`.

Threads: `HTTPFront.start` starts "gateway", which runs an event loop; `HTTPFront.stop` ends it.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import socket
import threading
import time
import weakref
from collections.abc import Awaitable, Callable, Coroutine, MutableMapping
from concurrent.futures import wait
from dataclasses import dataclass, fields
from typing import Any, NamedTuple, Protocol

from workers.extras import require
from workers.rollout.agents.gateway.chat_dialect import ChatDialect
from workers.rollout.agents.gateway.dialect import Dialect, GatewayError, stream_of
from workers.rollout.agents.gateway.messages_dialect import MessagesDialect
from workers.rollout.agents.gateway.responses_dialect import ResponsesDialect
from workers.rollout.agents.gateway.tokens_dialect import TokensDialect
from workers.rollout.rollout_errors import RolloutError

logger = logging.getLogger(__name__)

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

DIALECTS: dict[str, Dialect] = {
    "/chat/completions": ChatDialect(),
    "/messages": MessagesDialect(),
    "/responses": ResponsesDialect(),
    "/inference/v1/generate": TokensDialect(),
}
"""The dialect of each path, which may have /v1 before it: some clients add that to the address, and others do not."""

MODELS = "/models"
"""The only path of sessions without a dialect."""

KEY_HEADER = "x-gateway-key"
"""Of requests from a `GatewayRouter`."""

START_SECONDS = 30.0
BACKLOG = 2048

SKIP_BYTES = 2**20
"""How much of a refused body is read."""

CONNECTION = "connection"
"""Of a scope's state: uvicorn's protocol, with the ``calls`` that are being answered and end with it."""

EXPIRE_SECONDS = 10.0
"""Between two looks for sessions that have expired, at most."""


@dataclass(frozen=True)
class GatewayLimits:
    """What clients can take of a gateway.

    Attributes:
        body_bytes: of a request.
        sessions: that are open at the same time, those of a rollout left out.
        nodes: of a session's tree; a turn adds two.
        calls: of a session that are being answered at the same time.
        connections: that are open at the same time.
        read_seconds: for sending a request, and until a new connection has sent one.
        write_seconds: for taking a reply.
        call_seconds: for answering a request, waiting for the engine included.
        wait_seconds: for an engine that takes no requests now, because it sleeps for example.
        ping_seconds: of silence, after which a client that asked for a stream gets a comment, so that nothing between
            it and the gateway closes the connection.
        idle_seconds: without a call, after which a session is closed, and its tokens are lost.

    Raises:
        ValueError: a limit is not above 0.
    """

    body_bytes: int = 16 * 2**20
    sessions: int = 8192
    nodes: int = 1024
    calls: int = 64
    connections: int = 16384
    read_seconds: float = 30.0
    write_seconds: float = 30.0
    call_seconds: float = 1800.0
    wait_seconds: float = 60.0
    ping_seconds: float = 10.0
    idle_seconds: float = 3600.0

    def __post_init__(self) -> None:
        for one in fields(self):
            if not getattr(self, one.name) > 0:
                raise ValueError(f"GatewayLimits: {one.name}={getattr(self, one.name)!r}; expected a number above 0")


def check_limits(where: str, limits: Any) -> None:
    """Raise a `TypeError` if ``limits`` is not a `GatewayLimits`, for example a `SessionLimits`."""
    if not isinstance(limits, GatewayLimits):
        raise TypeError(f"{where}: limits={limits!r:.80}; expected GatewayLimits(...)")


class Call(NamedTuple):
    """A request of which the client is known.

    Attributes:
        method, path, body: of HTTP.
        headers: with names in lower case.
        token: the bearer token or ``x-api-key``.
        dialect: of the path; None if it is none of `DIALECTS`.
    """

    method: str
    path: str
    headers: dict[str, str]
    token: str
    dialect: Dialect | None
    body: bytes


class Reply(NamedTuple):
    """What a `Player` answers."""

    status: int
    body: bytes
    content_type: str = "application/json"
    headers: tuple[tuple[str, str], ...] = ()


class Player(Protocol):
    """Answers requests."""

    def admit(self, call: Call) -> int:
        """Return how many bytes the call's unread body may have. Raises a `GatewayError`, such as "token"."""

    async def play(self, call: Call) -> Reply:
        """Answer. Cancelled if the client leaves. If it raises a `GatewayError`, the client gets that."""

    def expire(self) -> None:
        """Close the sessions that have been idle for too long. Called now and then, in the server's thread."""


class Use:
    """How long a session has been idle. Its calls enter this, in the server's thread.

    Attributes:
        calls: how many are inside.
    """

    def __init__(self) -> None:
        self.calls, self._since = 0, time.monotonic()

    def __enter__(self) -> None:
        self.calls += 1

    def __exit__(self, *raised: object) -> None:
        self.calls, self._since = self.calls - 1, time.monotonic()

    def idle(self, seconds: float) -> bool:
        """Whether there was no call for this long."""
        return not self.calls and time.monotonic() - self._since > seconds


def json_reply(value: Any, status: int = 200) -> Reply:
    """A reply with JSON."""
    return Reply(status, _json(value).encode("utf-8", "replace"))


_json = json.JSONEncoder(ensure_ascii=False).encode


class _Gone(RolloutError):
    """The client has closed its connection."""


class HTTPFront:
    """An HTTP server.

    Args:
        player: answers requests.
        limits: for clients.
        host: address to listen at.
        port: 0 for any.

    Attributes:
        address: ``http://host:port``, once started; of this machine, if it listens at all of its addresses.
        loop: of the server's thread, once started.
    """

    address: str = ""
    loop: asyncio.AbstractEventLoop
    _listening: socket.socket

    def __init__(self, player: Player, limits: GatewayLimits, host: str = "127.0.0.1", port: int = 0) -> None:
        check_limits(type(player).__name__, limits)
        self.player, self.limits, self.host, self.port = player, limits, host, port
        self._thread: threading.Thread | None = None
        self._server: Any = None

    # --- the thread -----------------------------------------------------------------------------------------------

    def start(self) -> str:
        """Start the server, unless it is running, and return its address. Needs ``pip install
        'single-controller[agents]'``.

        Raises:
            ImportError: uvicorn is not installed.
            OSError: the address is in use.
            RolloutError: the server did not start.
        """
        if self.running:
            return self.address
        uvicorn = require("uvicorn", "agents")
        family = socket.AF_INET6 if ":" in self.host else socket.AF_INET
        both = self.host == "::" and socket.has_dualstack_ipv6()  # or nobody could reach an address of IPv4
        listening = socket.create_server((self.host, self.port), family=family, backlog=BACKLOG, dualstack_ipv6=both)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        # uvicorn sends the body of a reply after its head, and asyncio sets this only for sockets made otherwise.
        listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        host, port = listening.getsockname()[:2]
        if host in ("0.0.0.0", "::"):  # all addresses of this machine, of which clients need one
            host = _own_address()
        self.address = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        config = uvicorn.Config(
            self,
            http=_protocol(self.limits),
            ws="none",
            lifespan="off",
            proxy_headers=False,
            log_config=None,
            log_level="critical",  # a client that behaves badly is no event of ours
            access_log=False,
            server_header=False,
            date_header=False,
            limit_concurrency=self.limits.connections,
            timeout_keep_alive=75,
            timeout_graceful_shutdown=5,
        )
        self._server, self._listening = uvicorn.Server(config), listening
        # Add this only after both are set: another thread may fork at any time, and `_leave_to_parent` reads them.
        _started.add(self)
        started, failed = threading.Event(), []

        async def serve() -> None:
            self.loop = asyncio.get_running_loop()
            self.loop.set_exception_handler(_log_exception)
            # The socket is already listening: clients that connect before uvicorn accepts them wait in its backlog.
            started.set()
            expiring = asyncio.ensure_future(self._expire())
            # Outside the main thread, uvicorn does not change the process's signal handlers.
            await self._server.serve(sockets=[listening])
            expiring.cancel()

        def run() -> None:
            try:
                asyncio.run(serve())
            except BaseException as error:
                failed.append(error)
                logger.exception("the gateway's server has failed")
            finally:
                listening.close()
                # Set the event after a failure too, so that `start` does not wait for its whole timeout.
                started.set()

        self._thread = threading.Thread(target=run, name="gateway", daemon=True)
        try:
            self._thread.start()
        except RuntimeError as error:  # this process has as many threads as it may have
            self._thread = None
            listening.close()  # the next attempt needs the port
            raise RolloutError(f"the gateway did not start at {self.address}: {error}") from error
        if not started.wait(START_SECONDS) or failed:
            self.stop()  # a thread that is late would serve beside the gateway of the next attempt
            raise RolloutError(f"the gateway did not start at {self.address}: {failed or 'timeout'}")
        return self.address

    @property
    def running(self) -> bool:
        """Whether the server's thread runs."""
        return self._thread is not None and self._thread.is_alive()

    def stop(self) -> None:
        """Close all connections, and end the thread."""
        if self._server is not None:
            # These flags can be set from another thread: uvicorn polls them ten times per second.
            self._server.should_exit = True
            self._server.force_exit = True
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(START_SECONDS)

    def _leave_to_parent(self) -> None:
        """In a fork: give up its copies of the sockets, which would hide from others that the parent has ended."""
        connections = [one.transport for one in self._server.server_state.connections if one.transport is not None]
        sockets = [self._listening, *(one.get_extra_info("socket") for one in connections)]
        nothing = os.open(os.devnull, os.O_RDWR)
        for number in [one.fileno() for one in sockets if one.fileno() >= 0]:
            os.dup2(nothing, number, inheritable=False)  # asyncio's objects keep the number, and may still close it
        os.close(nothing)

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """Run a coroutine in the server's loop, from another thread, and return its result.

        Raises:
            CancelledError: of concurrent.futures. The server was stopped before the coroutine ended, and its thread has
                ended too.
        """
        thread, future = self._thread, asyncio.run_coroutine_threadsafe(coroutine, self.loop)
        while not future.done() and thread is not None and thread.is_alive():
            wait((future,), 0.1)  # not for ever: a loop that ends may leave it undone
        if future.cancel() and thread is not None:  # it was left undone, or the loop has cancelled it
            thread.join(START_SECONDS)
        return future.result()

    async def _expire(self) -> None:
        while True:
            await asyncio.sleep(min(EXPIRE_SECONDS, self.limits.idle_seconds / 4))
            self.player.expire()

    # --- a request ------------------------------------------------------------------------------------------------

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        if scope["type"] != "http":
            return
        path = scope["path"].rstrip("/")
        while path.startswith("/v1/"):
            path = path[3:]
        dialect = DIALECTS.get(path)
        if path == "/health":
            await self._send(send, json_reply({"status": "ok"}))
            return
        try:
            call = await self._call(scope, path, dialect, receive)
        except _Gone:
            return
        except GatewayError as error:
            reply = json_reply((dialect or DIALECTS["/chat/completions"]).error(error), error.status)
            if error.kind in ("large", "slow", "token"):  # the rest of the body is not read
                await _skip(receive, self.limits)
                reply = reply._replace(headers=(("connection", "close"),))
            await self._send(send, reply)
            return
        connection = scope.get("state", {}).get(CONNECTION)
        if connection is not None:  # uvicorn stops reading in large bodies, and would not see that the client leaves
            connection.flow.resume_reading()
        await self._play(call, set() if connection is None else connection.calls, send)

    async def _call(self, scope: Scope, path: str, dialect: Dialect | None, receive: Receive) -> Call:
        headers = {key.decode("latin-1"): value.decode("latin-1") for key, value in scope["headers"]}
        bearer = headers.get("authorization", "")
        token = bearer[7:].strip() if bearer[:7].lower() == "bearer " else headers.get("x-api-key", "")
        call = Call(scope["method"], path, headers, token, dialect, b"")
        most = self.player.admit(call)
        expected = "POST" if dialect is not None else "GET" if path == MODELS else call.method
        if call.method != expected:  # a worker's reply to HEAD, for which its router would wait, has no body
            raise GatewayError("method", f"{call.method} is not supported here; use {expected}")
        return call._replace(body=await self._body(headers, receive, most))

    async def _body(self, headers: dict[str, str], receive: Receive, most: int) -> bytes:
        told = headers.get("content-length", "0")
        if told.isdigit() and int(told) > most:
            raise GatewayError("large", f"the body has {told} bytes; the limit is {most}")
        parts, size = [], 0
        try:
            async with asyncio.timeout(self.limits.read_seconds):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise _Gone("while its request was read")
                    parts.append(message.get("body", b""))
                    size += len(parts[-1])
                    if size > most:
                        raise GatewayError("large", f"the body has more than {most} bytes, which is the limit")
                    if not message.get("more_body"):
                        return parts[0] if len(parts) == 1 else b"".join(parts)
        except TimeoutError:
            raise GatewayError("slow", f"the body has not come within {self.limits.read_seconds:g} s") from None

    async def _play(self, call: Call, calls: set[asyncio.Task[Any] | None], send: Send) -> None:
        """Answer, unless this is cancelled because the client leaves: then it is one of the connection's calls."""
        task, pings = asyncio.current_task(), _Pings(self.limits.ping_seconds, call, send)
        waiting = asyncio.get_running_loop().call_later(self.limits.ping_seconds, pings.start)
        calls.add(task)
        try:
            reply = await self._reply(call)
        finally:
            calls.discard(task)
            waiting.cancel()
            if pings.task is not None:
                pings.task.cancel()
                # Wait until the task has ended, so that it does not write between the parts of the reply.
                await asyncio.wait((pings.task,))
        if not pings.begun:
            await self._send(send, reply)
            return
        if reply.status != 200 and call.dialect is not None:
            event = call.dialect.error_event(json.loads(reply.body))
            reply = reply._replace(body=stream_of(iter([event])))
        await send({"type": "http.response.body", "body": reply.body})

    async def _reply(self, call: Call) -> Reply:
        """The player's reply, also if it is an error."""
        try:
            async with asyncio.timeout(self.limits.call_seconds) as limit:
                return await self.player.play(call)
        except GatewayError as error:
            failed = error
        except Exception as error:
            # If the limit has not expired, the player has raised the `TimeoutError`.
            if limit.expired():
                failed = GatewayError("late", f"there was no completion within {self.limits.call_seconds:g} s")
            else:
                logger.exception("a call of the gateway has failed")
                failed = GatewayError("failed", f"{type(error).__name__}: {error}")
        return json_reply((call.dialect or DIALECTS["/chat/completions"]).error(failed), failed.status)

    async def _send(self, send: Send, reply: Reply) -> None:
        length = ("content-length", str(len(reply.body)))
        await send(_start(reply._replace(headers=(*reply.headers, length))))
        await send({"type": "http.response.body", "body": reply.body})


def _start(reply: Reply) -> dict[str, Any]:
    headers = (*reply.headers, ("content-type", reply.content_type))
    encoded = [(name.encode(), value.encode("latin-1")) for name, value in headers]
    return {"type": "http.response.start", "status": reply.status, "headers": encoded}


_started: weakref.WeakSet[HTTPFront] = weakref.WeakSet()
"""Those that have a socket, or had one."""


def _leave_all_to_parent() -> None:
    for one in _started:
        one._leave_to_parent()


os.register_at_fork(after_in_child=_leave_all_to_parent)


class _Pings:
    """Comments for a client that waits for a stream.

    Attributes:
        begun: whether the stream has begun.
        task: sends them, once the client has waited for `GatewayLimits.ping_seconds`.
    """

    def __init__(self, seconds: float, call: Call, send: Send) -> None:
        self._seconds, self._call, self._send = seconds, call, send
        self.begun = False
        self.task: asyncio.Task[None] | None = None

    def start(self) -> None:
        if _wants_stream(self._call):
            self.task = asyncio.ensure_future(self._run())

    async def _run(self) -> None:
        await self._send(_start(Reply(200, b"", "text/event-stream")))
        self.begun = True
        while True:
            await self._send({"type": "http.response.body", "body": b": waiting\n\n", "more_body": True})
            await asyncio.sleep(self._seconds)


async def _skip(receive: Receive, limits: GatewayLimits) -> None:
    """Take the rest of a body that is not too large. Otherwise the kernel tells the client that the connection was
    reset, before it has read the reply."""
    size = 0
    try:
        async with asyncio.timeout(min(2.0, limits.read_seconds)):
            while size < SKIP_BYTES:
                message = await receive()
                size += len(message.get("body", b""))
                if not message.get("more_body"):
                    return
    except TimeoutError:
        return


def _wants_stream(call: Call) -> bool:
    if KEY_HEADER in call.headers:  # the router keeps its own client waiting
        return False
    try:
        return call.dialect is not None and bool(json.loads(call.body).get("stream"))
    except (ValueError, AttributeError, RecursionError):
        return False


def _own_address() -> str:
    """An address of this machine that others reach: that of its node in Ray, or of its route to elsewhere."""
    import ray

    if ray.is_initialized():
        return str(ray.util.get_node_ip_address())
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as route:
        try:
            route.connect(("192.0.2.1", 9))  # chooses an address, and sends nothing
            return str(route.getsockname()[0])
        except OSError:  # no network
            return "127.0.0.1"


def _log_exception(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    logger.debug("in the gateway's loop: %s", context.get("message"), exc_info=context.get("exception"))


def _protocol(limits: GatewayLimits) -> type[asyncio.Protocol]:
    """uvicorn's protocol, with two deadlines that it does not have: for the head of a request, the first of a
    connection included, and for taking a reply. Not the one with httptools, which takes headers of any size."""
    base = require("uvicorn.protocols.http.h11_impl", "agents").H11Protocol

    class Impatient(base):  # type: ignore[misc, valid-type]
        def connection_made(self, transport: asyncio.Transport) -> None:
            super().connection_made(transport)
            self._timers: dict[str, asyncio.TimerHandle] = {}
            self.calls: set[asyncio.Task[Any]] = set()
            self.app_state = {CONNECTION: self}
            transport.set_write_buffer_limits(high=0)  # `pause_writing` is called as soon as the kernel takes no more
            self._abort_after(limits.read_seconds, "head")

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            # uvicorn has parsed the data above: it sets `cycle` when the head is complete.
            if self.cycle is None or self.cycle.response_complete:
                self._abort_after(limits.read_seconds, "head")
            else:  # a request has begun
                self._stop("head")

        def pause_writing(self) -> None:
            super().pause_writing()
            self._abort_after(limits.write_seconds, "reply")

        def resume_writing(self) -> None:
            super().resume_writing()
            self._stop("reply")

        def connection_lost(self, exc: Exception | None) -> None:
            self._stop("head")
            self._stop("reply")
            super().connection_lost(exc)
            # The client is gone, so its calls need not be finished.
            for call in self.calls:
                call.cancel()

        def _abort_after(self, seconds: float, what: str) -> None:
            # Keep the first deadline, so that a client cannot extend it by sending single bytes.
            if what not in self._timers:
                self._timers[what] = self.loop.call_later(seconds, self.transport.abort)

        def _stop(self, what: str) -> None:
            if (timer := self._timers.pop(what, None)) is not None:
                timer.cancel()

    return Impatient
