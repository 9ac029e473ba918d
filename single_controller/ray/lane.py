"""The lane: small calls that the driver waits for, over one TCP connection to each rank instead of through Ray.

A call through Ray costs the driver several times as much as the same bytes on a socket. The ranks connect to the driver
while they start (`Lane.listen`, `Lane.accept`); the driver listens only meanwhile. `RayEngine.send` decides for each
call which way it goes.

Order. Ray keeps the order of the messages that go through Ray, and TCP of those on the lane. Between the two:

- A rank's connection is not used while messages through Ray may not have ended there (`Peer.through_ray`). Once Ray has
  delivered the result of one of them, all earlier ones have ended.
- A message through Ray that is sent while calls on the lane are unanswered has the number of the last one
  (`Peer.last_unanswered`), and the rank runs it after that.

So neither side ever waits for a message of which nobody knows whether it comes.

Threads: the driver has none for this. A thread that waits for a call becomes the leader, if there is none, and takes
everything that arrives for any call. The others sleep until their call has ended, or they are to lead.

Locks (order: see `single_controller.base.call`): ``_leading`` is held by the leader. ``_changing`` protects the
connections and numbers of the peers, and what was not sent yet; it is acquired with ``_leading`` held, or without.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import secrets
import selectors
import socket
import threading
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager

from single_controller.ray.lane_connection import (
    MAX_HANDSHAKE_BYTES,
    Connection,
    ConnectionLostError,
    Handshake,
    LaneAddress,
)

logger = logging.getLogger(__name__)

VARIABLE = "SINGLE_CONTROLLER_LANE"
"""Environment variable that switches the lane off for the groups of a process: 0."""

ACCEPT_SECONDS = 5.0
"""How long ranks that have started may take to connect."""

MAX_STRANGERS = 64
"""Connections, beyond those that are expected, that may be open before they have shown that they know the token."""


def lane_enabled() -> bool:
    """Whether the environment allows the lane. With Ray's TLS it does not: its messages are not encrypted."""
    off = os.environ.get(VARIABLE, "1").lower() in ("0", "false", "off")
    return not off and os.environ.get("RAY_USE_TLS", "0").lower() not in ("1", "true")


class LaneToken:
    """Stands for the result of one rank. The leader fills it in, whichever thread waits for it.

    Attributes:
        number: number of the call on its connection.
        reply: what the rank has sent; empty if it keeps the result because it is large.
        lost: why no reply will come.
        ref: Ray's reference to a result that the rank keeps, once it was asked for.
    """

    __slots__ = ("lost", "number", "ref", "reply", "waiter")

    def __init__(self, number: int) -> None:
        self.number = number
        self.reply: bytes | None = None
        self.lost: str | None = None
        self.ref: object = None
        self.waiter: _Waiter | None = None

    @property
    def ended(self) -> bool:
        """Whether there is a reply, or will be none."""
        return self.reply is not None or self.lost is not None


class _Waiter:
    """A thread that waits for some replies."""

    def __init__(self, tokens: Sequence[LaneToken]) -> None:
        self._tokens = tokens
        self._first = 0  # all tokens before it have ended; another thread may set it back, which costs a look
        self.bell = queue.SimpleQueue[None]()

    def done(self) -> bool:
        first = self._first
        while first < len(self._tokens) and self._tokens[first].ended:
            first += 1
        self._first = first
        return first == len(self._tokens)


class Peer:
    """What the driver knows of the process of one rank.

    Attributes:
        key: Ray's id of its actor.
        connection: None if it has none, or it was lost.
        sent: number of the last call that was sent on the connection.
        waiting: number -> token, of the calls that have not ended.
        through_ray: the messages that were sent through Ray, in order, without those that have ended. Its values are
            not used. Each operation on a dict is atomic, so there is no lock.
    """

    def __init__(self, key: bytes) -> None:
        self.key = key
        self.connection: Connection | None = None
        self.sent = 0
        self.waiting: dict[int, LaneToken] = {}
        self.through_ray: dict[object, None] = {}

    @property
    def takes_calls(self) -> bool:
        """Whether a call on the lane keeps its place behind all messages that were sent before."""
        return self.connection is not None and not self.through_ray

    def last_unanswered(self) -> int:
        """Number of the last call, if calls have not ended, and otherwise 0."""
        return self.sent if any(not token.ended for token in list(self.waiting.values())) else 0

    def sent_through_ray(self, message: object) -> None:
        """Note a message, before or after it is sent, but before anything else is."""
        self.through_ray[message] = None

    def sent_directly(self) -> int:
        """Note a direct call, of whose end nobody tells the group. Returns `last_unanswered`."""
        self.through_ray[object()] = None
        return self.last_unanswered()

    def ended_through_ray(self, message: object, *, ran: bool) -> None:
        """Note the end of a message. If the rank ``ran`` it, all earlier ones have ended too."""
        if message in self.through_ray:
            for earlier in list(self.through_ray) if ran else ():
                if earlier == message:
                    break
                self.through_ray.pop(earlier, None)
            self.through_ray.pop(message, None)


class Lane:
    """The connections of one group. It outlives the group's engines: a rank that stays keeps its connection.

    Args:
        name: the group's name, for messages.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._peers: dict[bytes, Peer] = {}
        self._selector = selectors.DefaultSelector()
        self._leading = threading.Lock()
        self._changing = threading.RLock()  # reentrant: sending may find that a connection is lost
        self._waiters: dict[_Waiter, None] = {}
        self._token = secrets.token_bytes(32)
        self._listener: socket.socket | None = None

    def peers(self, keys: Sequence[bytes]) -> list[Peer]:
        """The processes of a group's ranks, in order; all others are forgotten."""
        with self._changing:
            for key in self._peers.keys() - set(keys):
                self._lose(self._peers.pop(key), "the rank was ended")
            return [self._peers.setdefault(key, Peer(key)) for key in keys]

    # --- connecting ---------------------------------------------------------------------------------------------------

    @contextmanager
    def listening(self, address: str) -> Iterator[LaneAddress | None]:
        """Listen as long as the context lasts. Gives what the ranks must know; None if it cannot listen there."""
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        try:
            self._listener = socket.create_server((address, 0), family=family, backlog=4096)
        except OSError as error:
            logger.warning("%s: cannot listen on %s, so its calls go through Ray: %s", self._name, address, error)
            yield None
            return
        try:
            with self._listener:
                self._listener.setblocking(False)
                yield LaneAddress(address, self._listener.getsockname()[1], self._token)
        finally:
            self._listener = None

    def accept(self, expected: Collection[Peer], seconds: float = ACCEPT_SECONDS) -> None:
        """Accept the connections of ranks, while this listens. Without a connection, their calls go through Ray."""
        listener = self._listener
        if listener is None:
            return
        missing = {peer.key: peer for peer in expected}
        refused: list[str] = []
        end = time.monotonic() + seconds
        with selectors.DefaultSelector() as selector:
            selector.register(listener, selectors.EVENT_READ)
            while missing and (left := end - time.monotonic()) > 0:
                for key, _ in selector.select(left):
                    if key.data is None:
                        self._begin_handshake(listener, selector, self._token, len(missing) + MAX_STRANGERS)
                        continue
                    connection, handshake = key.data
                    try:
                        if self._continue_handshake(connection, handshake, missing):
                            selector.unregister(connection)
                            self._adopt(missing.pop(handshake.key), connection)
                    except ConnectionLostError as error:
                        refused.append(str(error))
                        selector.unregister(connection)
                        connection.close()
            for key in list(selector.get_map().values()):
                if key.data is not None:
                    refused.append("it did not complete the handshake")
                    key.data[0].close()
        if refused:
            logger.warning("%s: refused %d connections: %s", self._name, len(refused), "; ".join(sorted(set(refused))))
        if missing:
            logger.warning(
                "%s: %d of %d ranks did not connect to the driver at port %d of %s within %g s, so calls on them go "
                "through Ray, which takes longer. Open the driver's ports to the ranks' hosts, or pass lane=False",
                self._name,
                len(missing),
                len(expected),
                *listener.getsockname()[1::-1],
                seconds,
            )

    @staticmethod
    def _begin_handshake(listener: socket.socket, selector: selectors.BaseSelector, token: bytes, limit: int) -> None:
        with contextlib.suppress(OSError, ConnectionLostError):  # the other side has closed it, or open files run out
            connection = Connection(listener.accept()[0], MAX_HANDSHAKE_BYTES)
            if len(selector.get_map()) > limit:
                connection.close()
                return
            connection.sock.setblocking(False)
            handshake = Handshake(token)
            selector.register(connection, selectors.EVENT_READ, (connection, handshake))
            handshake.begin(connection)

    @staticmethod
    def _continue_handshake(connection: Connection, handshake: Handshake, missing: Mapping[bytes, Peer]) -> bool:
        """Take what has arrived. Returns whether the connection is that of a rank."""
        connection.receive()
        for _, message in connection.take():
            handshake.step(connection, message)
        if handshake.complete and handshake.key not in missing:
            raise ConnectionLostError("it is not of a rank that is expected")
        return handshake.complete

    def _adopt(self, peer: Peer, connection: Connection) -> None:
        with self._changing:
            self._lose(peer, "the rank has opened another one")
            peer.connection = connection
            self._selector.register(connection, selectors.EVENT_READ, peer)

    # --- calls --------------------------------------------------------------------------------------------------------

    def send(self, messages: Mapping[int, tuple[Peer, bytes]]) -> dict[LaneToken, int]:
        """Send one call to ranks. A connection that is lost loses its result, which `wait` then says.

        Args:
            messages: rank -> its process, and what to send.

        Returns:
            token -> rank.
        """
        tokens: dict[LaneToken, int] = {}
        with self._changing:
            try:
                for rank, (peer, message) in messages.items():
                    peer.sent += 1
                    token = peer.waiting[peer.sent] = LaneToken(peer.sent)
                    tokens[token] = rank
                    connection = peer.connection
                    if connection is None:  # since the engine has chosen the lane
                        token.lost = "the connection was lost"
                        continue
                    try:
                        if not connection.send(peer.sent, message):
                            self._selector.modify(connection, selectors.EVENT_READ | selectors.EVENT_WRITE, peer)
                    except ConnectionLostError as error:
                        self._lose(peer, str(error))
            except BaseException as error:  # KeyboardInterrupt: half a message may have been sent
                for peer, _ in messages.values():
                    self._lose(peer, f"{type(error).__name__} while a message was being sent")
                raise
        return tokens

    def wait(self, tokens: Sequence[LaneToken], timeout: float) -> None:
        """Wait until all these tokens have ended, at most ``timeout`` seconds."""
        waiter, end = _Waiter(tokens), time.monotonic() + timeout
        for token in tokens:
            token.waiter = waiter
        self._waiters[waiter] = None  # before it finds that another thread leads, so that it is told when that ends
        try:
            left, looked = timeout, False
            while not waiter.done() and (left > 0 or not looked):
                looked = True
                if self._leading.acquire(blocking=False):
                    try:
                        self._take_what_arrives(max(left, 0.0))
                    finally:
                        self._leading.release()
                elif left > 0:
                    with contextlib.suppress(queue.Empty):
                        waiter.bell.get(timeout=left)
                left = end - time.monotonic()
        finally:
            self._waiters.pop(waiter, None)
            if self._waiters and not self._leading.locked():  # somebody else must lead
                for other in list(self._waiters):
                    if not other.done():
                        other.bell.put(None)
                        break

    def close(self) -> None:
        """Close all connections."""
        self.peers(())

    def _take_what_arrives(self, timeout: float) -> None:
        """The leader's work: wait for the connections, once."""
        for key, events in self._selector.select(timeout):
            peer: Peer = key.data
            connection = peer.connection
            if connection is not key.fileobj or connection is None:
                continue  # lost meanwhile
            try:
                if events & selectors.EVENT_WRITE:
                    self._flush(peer, connection)
                if events & selectors.EVENT_READ:
                    connection.receive()
                    self._deliver(peer, connection)
            except ConnectionLostError as error:
                self._lose(peer, str(error))

    def _flush(self, peer: Peer, connection: Connection) -> None:
        with self._changing:
            try:
                if connection.flush():
                    self._selector.modify(connection, selectors.EVENT_READ, peer)
            except BaseException as error:  # as in `send`
                self._lose(peer, f"{type(error).__name__} while a message was being sent")
                raise

    def _deliver(self, peer: Peer, connection: Connection) -> None:
        # Wherever a KeyboardInterrupt comes in here, the next leader does the rest: giving a token the same reply again
        # changes nothing, and `consume` is one assignment.
        messages = connection.messages()
        for number, reply in messages:
            token = peer.waiting.get(number)
            if token is None:
                raise ConnectionLostError(f"a reply to call {number} has come, which was not sent")
            token.reply = reply
            if token.waiter is not None and token.waiter.done():
                token.waiter.bell.put(None)
        connection.consume(messages)
        for number, _ in messages:
            peer.waiting.pop(number, None)

    def _lose(self, peer: Peer, reason: str) -> None:
        with self._changing:
            connection = peer.connection
            if connection is None:
                return
            # In this order: after a KeyboardInterrupt, whoever uses the connection next does the rest.
            for token in list(peer.waiting.values()):
                token.lost = reason
                if token.waiter is not None and token.waiter.done():
                    token.waiter.bell.put(None)
            with contextlib.suppress(KeyError):
                self._selector.unregister(connection)
            connection.close()
            peer.waiting, peer.connection = {}, None
            logger.debug("%s: a connection of the lane was lost: %s", self._name, reason)
