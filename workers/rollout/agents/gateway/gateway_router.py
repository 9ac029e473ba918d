"""GatewayRouter: one address for the gateways of all workers, from which sessions continue when a worker dies.

It keeps each session's journal: the nodes of its tree, which a gateway sends along with each reply. The router stores
them before it passes the reply on. If the session's worker dies, the session continues on another one from the
journal, and its calls are sent again: what the worker had generated for them, nobody has seen.

Everything but `open`, `close` and the state runs on the thread of `HTTPFront`. Lock: ``GatewayRouter._lock`` protects
the table of sessions and their journals.
"""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import CancelledError
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from operator import index
from typing import Any
from urllib.parse import urlsplit

from workers.rollout.agents.gateway.dialect import GatewayError
from workers.rollout.agents.gateway.gateway import JOURNAL_HEADER, NODES_HEADER, no_path, read_node
from workers.rollout.agents.gateway.http_front import KEY_HEADER, MODELS, Call, GatewayLimits, HTTPFront, Reply, Use
from workers.rollout.agents.trajectory import Trajectory
from workers.rollout.engines.rollout_engine import SamplingParams
from workers.rollout.rollout_errors import RolloutError

logger = logging.getLogger(__name__)

HEALTH_SECONDS = 2.0
"""Between two looks at a worker."""

SILENCE_SECONDS = 20.0
"""A worker that does not answer for this long is taken for dead, until it answers again."""

FORGET_SECONDS = 2.0
"""How long a worker that was replaced may take to close its sessions."""

RETRY_SECONDS = 0.1

REUSE_SECONDS = 60.0
"""How long a connection to a worker may have been idle. After 75 s the worker closes it, perhaps just as a request is
on its way, and that would look like the worker's death."""

MAX_LOSSES = 3
"""A session whose worker was gone this many times in a row before it had answered gets errors: a call of its own may be
the reason."""


class WorkerGoneError(ConnectionError):
    """A worker's gateway cannot be reached."""


@dataclass(eq=False)
class _Worker:
    """A gateway.

    Attributes:
        address, key: its `Gateway.endpoint`.
        up: whether sessions may be opened there.
        sessions: that were.
        left: sessions that have moved away, which it may still have. It is not up as long as there are some.
        calls: that it has not answered.
        idle: connections that no call uses, and since when, in order of that.
        short: tasks of the router that wait for a file descriptor, those of its other workers too.
        looking: the last `look`, which began at ``looked``; None before the first one.
    """

    address: str
    key: str
    up: bool = True
    sessions: set[str] = field(default_factory=set)
    left: set[str] = field(default_factory=set)
    calls: set[asyncio.Future[Any]] = field(default_factory=set)
    idle: deque[tuple[asyncio.StreamReader, asyncio.StreamWriter, float]] = field(default_factory=deque)
    short: set[asyncio.Task[Any] | None] = field(default_factory=set)
    looking: asyncio.Future[None] | None = None
    looked: float = 0.0

    async def send(
        self, method: str, path: str, headers: dict[str, str], body: bytes
    ) -> tuple[int, dict[str, str], bytes]:
        """Send a request over HTTP/1.1 and read the reply, which has a length. An idle connection that the gateway has
        closed meanwhile is replaced; if another one fails, that is a `WorkerGoneError`."""
        head = [
            f"{method} {path} HTTP/1.1",
            "host: gateway",
            f"{KEY_HEADER}: {self.key}",
            f"content-length: {len(body)}",
        ]
        head += [f"{name}: {value}" for name, value in headers.items()]
        request = "\r\n".join([*head, "", ""]).encode("latin-1") + body
        reader, writer = await self._connection()
        whole = False
        try:
            writer.write(request)
            await writer.drain()
            lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
            given = dict(line.lower().split(": ", 1) for line in lines[1:] if ": " in line)
            reply = await reader.readexactly(int(given.get("content-length", 0)))
            whole = given.get("connection") != "close"
            return int(lines[0].split()[1]), given, reply
        except (OSError, EOFError, ValueError, asyncio.LimitOverrunError) as error:
            raise WorkerGoneError(f"{self.address}: {type(error).__name__}: {error}") from error
        finally:
            # After an error or a cancellation, do not reuse the connection: the rest of a reply may still arrive.
            if whole:
                self.idle.append((reader, writer, time.monotonic()))
            else:
                writer.transport.abort()

    async def _connection(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """An idle connection, or a new one."""
        url, task = urlsplit(self.address), asyncio.current_task()
        try:
            while True:
                try:
                    self._close_old()
                    while self.idle:
                        # Take the connection that was used last: the worker is the least likely to have closed it.
                        reader, writer, _ = self.idle.pop()
                        if not reader.at_eof():
                            return reader, writer
                        writer.close()
                    async with asyncio.timeout(SILENCE_SECONDS):
                        return await asyncio.open_connection(url.hostname, url.port)
                except OSError as error:
                    if error.errno not in (errno.EMFILE, errno.ENFILE):
                        raise WorkerGoneError(f"{self.address}: {error}") from error
                    if not self.short:  # the router's own lack, which other calls may end
                        logger.warning("calls wait, because the router cannot open another connection: %s", error)
                    self.short.add(task)
                await asyncio.sleep(RETRY_SECONDS)
        finally:
            self.short.discard(task)

    def _close_old(self) -> None:
        """Close the connections that the gateway may be closing. They are the first ones: no call looks at all."""
        oldest = time.monotonic() - REUSE_SECONDS
        while self.idle and self.idle[0][2] < oldest:
            self.idle.popleft()[1].close()

    async def look(self) -> None:
        """Make it forget the sessions that have moved away; a `WorkerGoneError` if it does not answer."""
        await self.send("GET", "/health", {}, b"")
        while self.left:
            token = next(iter(self.left))
            headers = {"authorization": f"Bearer {token}"}
            status, _, _ = await self.send("DELETE", "/private/sessions", headers, b"")
            if status != 200:  # for example, the worker has too many connections; the next look tries again
                return
            self.left.discard(token)

    def leave(self) -> None:
        """End all calls, and close the connections."""
        self.up = False
        self.left |= self.sessions
        self.sessions.clear()
        for call in list(self.calls):
            call.cancel()
        self.close_idle()

    def close_idle(self) -> None:
        """Close the connections that no call uses."""
        while self.idle:
            self.idle.pop()[1].close()


@dataclass(eq=False)
class _Session:
    """A session as the router knows it.

    Attributes:
        head: how a gateway opens it.
        journal: a line of JSON for each node.
        worker: where it is; None if it has to be opened from the journal.
        moves: how often it was opened. A reply from before the last time does not count.
        opened: the last worker that has opened it.
        lost: the values of ``moves`` at which its worker was gone before it had answered, since the last answer.
        placing: gets it a worker. All its calls wait for that, and it goes on if their clients leave: a worker that was
            told to open the session has it.
        use: its calls.
    """

    head: dict[str, Any]
    journal: list[bytes] = field(default_factory=list)
    worker: _Worker | None = None
    moves: int = 0
    opened: _Worker | None = None
    lost: set[int] = field(default_factory=set)
    placing: asyncio.Future[None] | None = None
    use: Use = field(default_factory=Use)


def _endpoints(workers: Any) -> list[tuple[str, str]]:
    """Endpoints of gateways, checked."""
    given = [workers] if isinstance(workers, str) or not isinstance(workers, Iterable) else list(workers)
    for one in given:
        if not (isinstance(one, (tuple, list)) and len(one) == 2 and all(isinstance(part, str) for part in one)):
            raise TypeError(
                f"GatewayRouter: workers has {one!r:.80}; expected (address, key) of each gateway: pass the list that "
                "group.start_gateway(renderer) returns"
            )
    return [(one[0], one[1]) for one in given]


class GatewayRouter:
    """Forwards the calls of sessions to the gateways of workers.

    Args:
        workers: `Gateway.endpoint` of each: what ``group.start_gateway(...)`` returns.
        limits: what clients can take. They hold at each gateway too.
        host: address to listen at. Use one that programs can reach.
        port: 0 for any. With a port of its own, programs find the router again after the driver was restarted.
    """

    def __init__(
        self,
        workers: Iterable[tuple[str, str]] = (),
        *,
        limits: GatewayLimits | None = None,
        host: str = "127.0.0.1",
        port: int = 0,
    ) -> None:
        self.limits = limits or GatewayLimits()
        self._lock = threading.Lock()
        self._short = set[asyncio.Task[Any] | None]()
        self._workers = [_Worker(*one, short=self._short) for one in _endpoints(workers)]
        self._sessions: dict[str, _Session] = {}
        self._front = HTTPFront(self, self.limits, host, port)
        self._told_waiting = False
        self.moved = 0
        """How many times a session was opened at another worker."""

    @property
    def address(self) -> str:
        """``http://host:port``.

        Raises:
            RolloutError: the router was not started.
        """
        if not self._front.address:
            raise RolloutError("GatewayRouter: the router has no address yet; call start() first")
        return self._front.address

    def start(self) -> str:
        """Start the server, and return its address; see `HTTPFront.start`."""
        # Read `running` before the server is started: only a new loop needs a new watch.
        running, address = self._front.running, self._front.start()
        if not running:
            asyncio.run_coroutine_threadsafe(self._watch(), self._front.loop)
        return address

    def stop(self) -> None:
        """End all calls, and the server. Sessions remain, and can be closed or kept as `state_dict`."""
        self._front.stop()

    def set_workers(self, workers: Iterable[tuple[str, str]]) -> None:
        """Say which gateways there are now. Sessions of those that are gone continue on the others.

        Args:
            workers: as in the constructor.
        """
        wanted = _endpoints(workers)

        def change() -> list[_Worker]:
            gone = [one for one in self._workers if (one.address, one.key) not in wanted]
            known = {(one.address, one.key): one for one in self._workers}
            self._workers = [known.get(one) or _Worker(*one, short=self._short) for one in wanted]
            for worker in gone:
                self._lost(worker, "it was replaced")
                if worker.looking is not None:
                    worker.looking.cancel()
            return gone

        self._change(change)

    def _change(self, change: Callable[[], list[_Worker]]) -> None:
        """Change the workers or the sessions. While the server runs, only its loop's thread does. ``change`` returns
        workers that were replaced: they may be alive, and are told to forget their sessions."""

        async def change_and_tell() -> None:
            if looks := [asyncio.ensure_future(worker.look()) for worker in change()]:
                for late in (await asyncio.wait(looks, timeout=FORGET_SECONDS))[1]:
                    late.cancel()

        while self._front.running:
            with suppress(CancelledError):  # the server was stopped meanwhile
                self._front.run(change_and_tell())
                return
        change()  # perhaps for the second time, which changes nothing

    # --- sessions -------------------------------------------------------------------------------------------------

    def open(
        self,
        row_id: str = "",
        *,
        seed: int | None = None,
        sampling_params: SamplingParams | None = None,
        token_ids: bool = False,
    ) -> tuple[str, str]:
        """Open a session. See `Gateway.open`; a worker is chosen with the first call.

        Raises:
            GatewayError: too many sessions are open.
            RolloutError: the router was not started.
        """
        address, token = self.address, f"sk-{secrets.token_urlsafe(24)}"
        head = {
            "row_id": row_id or token[:8],
            "seed": secrets.randbits(62) if seed is None else index(seed),  # it goes through JSON
            "sampling_params": None if sampling_params is None else asdict(sampling_params),
            "token_ids": token_ids,
        }
        with self._lock:
            if len(self._sessions) >= self.limits.sessions:
                raise GatewayError("limit", f"{len(self._sessions)} sessions are open, which is the limit; close some")
            self._sessions[token] = _Session(head)
        return address, token

    def close(self, token: str) -> Trajectory:
        """Close a session, and return its tokens.

        Raises:
            KeyError: there is no such session.
        """
        # Remove the session first: replies that arrive later find no session, so the journal no longer grows.
        with self._lock:
            session = self._sessions.pop(token, None)
        if session is None:
            raise KeyError("GatewayRouter.close(): no session has this token; was it closed, or did it expire?")
        if session.worker is not None:
            leaving = self._leave(session.worker, token)
            try:
                asyncio.run_coroutine_threadsafe(leaving, self._front.loop)
            except RuntimeError:  # `stop` has closed the loop, possibly in another thread
                leaving.close()
        return Trajectory(list(map(read_node, session.journal)))  # to which no call adds any more

    @property
    def sessions(self) -> int:
        """How many sessions are open."""
        return len(self._sessions)

    def state_dict(self) -> dict[str, Any]:
        """Return the sessions, for a checkpoint. Calls that have not been answered are not in it."""
        with self._lock:
            return {"sessions": {name: (dict(one.head), list(one.journal)) for name, one in self._sessions.items()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue the sessions of a `state_dict`, at whatever workers there are now, instead of those that are open.
        Calls that are being answered begin again; those of sessions that the state does not have get an error."""
        loaded = {token: _Session(dict(head), list(kept)) for token, (head, kept) in state["sessions"].items()}

        def change() -> list[_Worker]:
            with self._lock:
                # Waiting calls look up their session again, and find the loaded session or none.
                self._sessions = loaded
            for worker in self._workers:
                if worker.sessions:  # it gets others as soon as it has forgotten these
                    worker.leave()
            return []

        self._change(change)

    def expire(self) -> None:
        """See `Player.expire`. Workers do the same with what they have of a session."""
        seconds = self.limits.idle_seconds
        with self._lock:
            expired = {token: one for token, one in self._sessions.items() if one.use.idle(seconds)}
            for token in expired:
                del self._sessions[token]
        for token, session in expired.items():
            logger.warning("session %s has expired: it had no call for %g s", session.head["row_id"], seconds)
            if session.worker is not None:
                asyncio.run_coroutine_threadsafe(self._leave(session.worker, token), self._front.loop)

    # --- calls ----------------------------------------------------------------------------------------------------

    def admit(self, call: Call) -> int:
        """See `Player.admit`."""
        if call.token not in self._sessions:
            raise GatewayError("token", "no session has this token; it is not open, was closed, or has expired")
        return self.limits.body_bytes

    async def play(self, call: Call) -> Reply:
        """See `Player.play`."""
        # What goes to a worker has its key, so it must be nothing but a session's call. The path was decoded: it may
        # have line breaks, and further requests behind them.
        if call.dialect is None and call.path != MODELS:
            raise no_path(call)
        while (session := self._sessions.get(call.token)) is not None:
            with session.use:  # each time: a state may have put another one there, which must not expire meanwhile
                reply = await self._forwarded(call, session)
            if reply is not None:
                return reply
        raise GatewayError("token", "the session was closed")

    async def _forwarded(self, call: Call, session: _Session) -> Reply | None:
        """Send a call to the session's worker, or get it one. None: the call has to be sent again."""
        headers = {"authorization": f"Bearer {call.token}", "content-type": "application/json"}
        if len(session.lost) >= MAX_LOSSES:
            raise GatewayError(
                "failed",
                f"{len(session.lost)} workers in a row have died while they answered the session's calls; one of "
                "these may be the reason, so no further worker gets them",
            )
        worker = session.worker
        if worker is None or not worker.up:
            # All calls of the session share one placement: two placements would open it at two workers.
            if session.placing is None or session.placing.done():
                session.placing = asyncio.ensure_future(self._place(call.token, session))
            await asyncio.shield(session.placing)
            return None  # by now the worker may be gone again
        moves, headers[JOURNAL_HEADER] = session.moves, str(len(session.journal))
        try:
            status, given, body = await self._send(worker, call.method, call.path, headers, call.body)
        except WorkerGoneError as error:
            # If `moves` has changed, another call has already moved the session to a worker that is not gone.
            if session.moves == moves:
                session.worker = None
            if worker in self._workers:  # not one that was replaced
                session.lost.add(moves)
            self._lost(worker, str(error))
            return None
        # Between sending and here the loop ran other calls, which may have moved the session.
        if session.moves != moves or session.worker is None:
            return None  # the session went on elsewhere, without this
        if status == 410:  # the worker has forgotten the session
            worker.sessions.discard(call.token)
            session.worker = None
            return None
        session.lost.clear()
        if given.get("content-type", "").startswith("text/plain"):  # from its server, which has too many connections
            raise GatewayError("unavailable", f"the worker at {worker.address} refused the call: {body[:500]!r}")
        count = int(given.get(NODES_HEADER, 0))
        # Before the client gets the reply: what it has seen must survive the worker, and be in what `close` returns.
        with self._lock:
            if self._sessions.get(call.token) is not session:
                return None
            lines = body[:count].splitlines()
            # Other calls of this session may have brought some of these nodes already.
            session.journal += lines[len(session.journal) - int(headers[JOURNAL_HEADER]) :]
        return Reply(status, body[count:], given.get("content-type", "application/json"))

    async def _send(self, worker: _Worker, *request: Any) -> tuple[int, dict[str, str], bytes]:
        # Send in a separate task, so that `leave` can cancel it without cancelling the client's call.
        sending = asyncio.ensure_future(worker.send(*request))
        worker.calls.add(sending)
        try:
            return await sending
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():  # the client has left
                raise
            raise WorkerGoneError(f"{worker.address} is gone") from None
        finally:
            worker.calls.discard(sending)

    async def _place(self, token: str, session: _Session) -> None:
        """Open a session at the least busy worker. If it is closed, or a state replaces it, nothing remains to be done:
        its calls look it up again."""
        while session.worker is None or not session.worker.up:
            if self._sessions.get(token) is not session:
                return
            up = [one for one in self._workers if one.up]
            if not up:
                if not self._told_waiting:
                    self._told_waiting = True
                    logger.warning("calls wait, because the router has no worker; see GatewayRouter.set_workers")
                await asyncio.sleep(RETRY_SECONDS)
                continue
            self._told_waiting = False
            worker = min(up, key=lambda one: len(one.sessions))
            worker.sessions.add(token)
            body = b"\n".join([json.dumps(session.head).encode(), *session.journal])
            session.moves += 1  # before sending: replies of the worker before must not count from here on
            try:
                headers = {"authorization": f"Bearer {token}"}
                status, _, said = await self._send(worker, "PUT", "/private/sessions", headers, body)
            except WorkerGoneError as error:
                self._lost(worker, str(error))
                continue
            if status != 200:
                worker.sessions.discard(token)
                raise GatewayError("unavailable", f"the worker at {worker.address} does not open it: {said[:500]!r}")
            session.worker = worker  # before this look: `close`, in another thread, looks here after it
            if self._sessions.get(token) is not session:  # it was closed meanwhile, and so must be what was opened
                await self._leave(worker, token)
                return
            self.moved += session.opened not in (None, worker)
            session.opened = worker

    async def _leave(self, worker: _Worker, token: str) -> None:
        worker.sessions.discard(token)
        try:
            await self._send(worker, "DELETE", "/private/sessions", {"authorization": f"Bearer {token}"}, b"")
        except WorkerGoneError:
            logger.debug("a session was closed at a worker that is gone")

    def _lost(self, worker: _Worker, why: str) -> None:
        """Move the sessions of a worker away. It comes back when it answers."""
        if worker.up:
            logger.warning(
                "the gateway at %s is gone (%s); its %d sessions move", worker.address, why, len(worker.sessions)
            )
        worker.leave()

    async def _watch(self) -> None:
        """Look at each worker now and then, until the server ends."""
        try:
            while True:
                for worker in self._workers:
                    self._look(worker)
                await asyncio.sleep(HEALTH_SECONDS)
        finally:  # a server that is started again has another event loop, in which these are of no use
            for worker in self._workers:
                worker.looking = None
                worker.close_idle()

    def _look(self, worker: _Worker) -> None:
        """Look at a worker if the last look has ended."""
        looking = worker.looking
        if looking is not None and not looking.done():
            if time.monotonic() - worker.looked > SILENCE_SECONDS and looking not in worker.short:
                self._lost(worker, f"it has not answered for {SILENCE_SECONDS:g} s")
                looking.cancel()
            return
        if looking is not None and not looking.cancelled():
            alive = looking.exception() is None
            if worker.up and not alive:
                self._lost(worker, str(looking.exception()))
            # A worker stays down until `look` has made it forget the sessions that have moved away.
            worker.up = alive and not worker.left
        worker.looked, worker.looking = time.monotonic(), asyncio.ensure_future(worker.look())
