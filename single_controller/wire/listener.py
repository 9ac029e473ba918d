"""Listener: a rank's side of the wire. Accepts connections, and gives each to the session of its driver.

A session outlives its connections. A driver whose connection was lost dials again, sends the calls again that have not
arrived, and gets the replies that it has not acknowledged. Commands are not sent again: without an answer they fail.
"""

from __future__ import annotations

import logging
import os
import secrets
import selectors
import socket
import threading
import time
from collections.abc import Callable, Mapping

from single_controller.wire.connection import MAX_FRAME_BYTES, Connection, hub
from single_controller.wire.handshake import (
    KEY_BYTES,
    MAX_HANDSHAKE_BYTES,
    HandshakeError,
    Kind,
    WireAddress,
    new_nonce,
    received_text,
    welcome,
)
from single_controller.wire.link import INPUTS_OF, SESSION_SECONDS, Session

logger = logging.getLogger(__name__)

HANDSHAKE_SECONDS = 5.0
"""How long a connection may take to show that it knows the key."""

MAX_STRANGERS = 512
"""Connections that may be open before they have shown it. With more, the oldest is closed."""


class Listener:
    """Accepts drivers, and gives their calls to the rank.

    Args:
        host: the node's address, where it listens.
        on_call: gets kind, session, number and payload of each call, once and in order, in the hub's thread.
        commands: command -> what answers it, in a thread "command", which ends with the answer. It must not acquire a
            lock of this library that a busy method may hold.
        frames: see `WireAddress`.
    """

    def __init__(
        self,
        host: str,
        on_call: Callable[[int, Session, int, bytes], None],
        commands: Mapping[str, Callable[[], str]],
        frames: int = -1,
    ) -> None:
        self._on_call, self._commands = on_call, dict(commands)
        self._sessions: dict[bytes, Session] = {}
        self._strangers: dict[Connection, None] = {}
        self._listener, address = listen(host)
        self.address = address._replace(frames=frames)  # where it listens
        accept_from(self._listener, self._accept)

    def session(self, key: bytes) -> Session:
        """The session of a driver, whose task may arrive before its connection."""
        if (session := self._sessions.get(key)) is None:
            session = self._sessions.setdefault(key, Session())
            hub.later(SESSION_SECONDS + 1, lambda: self._forget(key))
        return session

    def _accept(self, sock: socket.socket) -> None:
        nonce = new_nonce()

        def greeted(kind: int, number: int, acknowledged: int, frame: bytes) -> None:
            if kind != Kind.HELLO:
                raise HandshakeError("it does not follow the protocol")
            self._welcome(connection, nonce, frame, acknowledged)

        def forget(reason: str = "") -> None:
            self._strangers.pop(connection, None)

        def too_late() -> None:
            if connection in self._strangers:
                forget()
                connection.close()

        connection = Connection(sock, greeted, forget, MAX_HANDSHAKE_BYTES, server=True)
        self._strangers[connection] = None
        if len(self._strangers) > MAX_STRANGERS:
            oldest = next(iter(self._strangers))
            del self._strangers[oldest]
            oldest.close()
        hub.later(HANDSHAKE_SECONDS, too_late)
        connection.send(Kind.NONCE, 0, nonce)

    def _welcome(self, connection: Connection, nonce: bytes, frame: bytes, acknowledged: int) -> None:
        key, proof = welcome(self.address.key, nonce, frame)
        self._strangers.pop(connection, None)
        connection.max_bytes = MAX_FRAME_BYTES
        session = self.session(key)
        with session.changed:
            if session.connection is not None:
                session.connection.close()
            session.connection = connection
            session.acknowledge(acknowledged)
            connection.send(Kind.WELCOME, 0, received_text(proof, session.received))
            session.received = max(session.received, 0)
            for number, (kind, payload) in session.replies.items():
                connection.send(kind, number, payload)
        connection.on_frame = lambda *frame: self._take(session, connection, *frame)
        connection.on_lost = lambda reason: self._lost(key, session, connection)

    def _take(self, session: Session, connection: Connection, kind: int, number: int, acked: int, data: bytes) -> None:
        with session.changed:
            session.acknowledge(acked)
            if kind in (Kind.CALL, Kind.CONCURRENT, Kind.JOIN):
                if number <= session.received:
                    return  # it has arrived already, and its reply is sent, or will be
                session.received = number
            elif kind == Kind.CANCEL:
                session.cancelled.add(number)
                session.changed.notify_all()
            elif kind == Kind.WANT and number not in session.kept and number not in session.given:
                session.wanted.add(number)
                if number in session.replies:  # it was sent before, and the driver waits for one that it can fetch
                    session.reply(Kind.REPLY, number, session.replies[number][1])
            elif kind == Kind.INPUTS:
                session.give_parts(number + INPUTS_OF, (data,) if data else ())
            elif kind == Kind.ACK:
                session.forget(number)
            elif kind == Kind.DROP:
                session.kept.pop(number, None)
        if kind in (Kind.CALL, Kind.CONCURRENT, Kind.JOIN):
            self._on_call(kind, session, number, data)
        elif kind == Kind.COMMAND:
            name = data.decode(errors="replace")
            thread = threading.Thread(target=self._answer, args=(connection, number, name), name="command", daemon=True)
            try:
                thread.start()
            except RuntimeError:  # the process has as many threads as it may have
                self._answer(connection, number, name)
        elif kind not in (Kind.ACK, Kind.CANCEL, Kind.WANT, Kind.INPUTS, Kind.DROP):
            raise HandshakeError(f"it has sent a frame of kind {kind}")

    def _answer(self, connection: Connection, number: int, name: str) -> None:
        handler = self._commands.get(name)
        if handler is None:
            text = f"-the process has no command {name!r}; it runs another version of this library"
        else:
            try:
                text = "+" + handler()
            except Exception as error:  # for example, a thread of the user's has changed what is being read
                text = f"-{name} failed: {type(error).__name__}: {error}"
        connection.send(Kind.ANSWER, number, text.encode(errors="replace")[:MAX_FRAME_BYTES])

    def _lost(self, key: bytes, session: Session, connection: Connection) -> None:
        with session.changed:
            if session.connection is connection:
                session.connection, session.left, session.reset = None, time.monotonic(), connection.reset
        hub.later(SESSION_SECONDS + 1, lambda: self._forget(key))

    def _forget(self, key: bytes) -> None:
        """Forget a session if it has no connection for too long. Not all at once: each copy of a group has one."""
        session = self._sessions.get(key)
        if session is not None and session.connection is None and time.monotonic() - session.left > SESSION_SECONDS:
            del self._sessions[key]


def listen(host: str) -> tuple[socket.socket, WireAddress]:
    """Listen on a port that the system chooses, at an address of this host, with a key of its own."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        sock = socket.create_server((host, 0), family=family, backlog=4096)
    except OSError:  # the address is not one of this process's network namespace
        sock = socket.create_server(("", 0), family=family, backlog=4096)
    return sock, WireAddress(host, sock.getsockname()[1], secrets.token_bytes(KEY_BYTES), os.getpid())


def accept_from(listening: socket.socket, accepted: Callable[[socket.socket], None]) -> None:
    """Have the hub call a function with each connection to a socket that listens, until `Hub.remove`."""

    def accept(_: int) -> None:
        try:
            sock = listening.accept()[0]
        except OSError:  # the process has too many open files, for example: look again later
            logger.debug("cannot accept a connection", exc_info=True)
            # Not removed meanwhile, because `StreamListener.close` may come first. It is never ready for writing.
            hub.change(listening, selectors.EVENT_WRITE)
            hub.later(1.0, lambda: hub.change(listening, selectors.EVENT_READ))
            return
        hub.sockets.add(sock)
        accepted(sock)

    listening.setblocking(False)
    hub.add(listening, selectors.EVENT_READ, accept)
