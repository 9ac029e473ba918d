"""The lane: small calls that the driver waits for, over one TCP connection to each rank instead of through Ray.

A call through Ray costs the driver several times as much as the same bytes on a socket. The ranks connect to the driver
while they start (`Lane.listen`, `Lane.accept`); the driver listens only meanwhile. `RayEngine.send` decides for each
call which way it goes.

Order. Ray keeps the order of the messages that go through Ray, and TCP of those on the lane. Between the two:

- A rank's connection is not used while messages through Ray may not have ended there (`Peer.through_ray`). Once Ray has
  delivered the result of one of them, all earlier ones have ended.
- A message through Ray that is sent while calls on the lane are unanswered has the number of the last one
  (`Peer.last_unanswered`), and the rank runs it after that. Once the connection is lost, it has `LOST` instead.

So neither side ever waits for a message of which nobody knows whether it comes.

Threads: the driver has none for this. A thread that waits for a call becomes the leader, if there is none, and takes
everything that arrives for any call. The others sleep until their call has ended, or they are to lead.

Locks (order: see `single_controller.base.call`): ``_leading`` is held by the leader, while it waits too. ``_changing``
protects the connections and numbers of the peers, and what was not sent yet.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import queue
import secrets
import selectors
import socket
import struct
import threading
import time
import weakref
from collections import OrderedDict, deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import cast

from single_controller.ray.lane_handshake import MAX_BYTES, Handshake, HandshakeError, LaneAddress

logger = logging.getLogger(__name__)

VARIABLE = "SINGLE_CONTROLLER_LANE"
"""Environment variable that switches the lane off for the groups of a process: 0."""

ACCEPT_SECONDS = 5.0
"""How long ranks that have started may take to connect."""

MAX_STRANGERS = 512
"""Connections, beyond those that are expected, that may be open before they have shown that they know the token. With
more, the oldest is closed: a rank shows it at once."""

LOST = -1
"""Number in a message through Ray that tells the rank that the driver has given up all calls on the connection."""

MAX_MESSAGE_BYTES = 1 << 20
"""More than any message has: see `single_controller.base.result.MAX_INLINE_BYTES`."""

_HEADER = struct.Struct("<IQ")
"""What each message begins with: the number of bytes that follow, and the number of the call."""

_INCOMPLETE = "it did not complete the handshake"

# A connection outlives an outage that Ray outlives, whose health checks take up to 65 s by default. There is no
# TCP_USER_TIMEOUT: it also counts the time in which the other side does not read, because it runs a long method or is
# stopped.
_SILENCE_SECONDS = 120
_PROBE_SECONDS = 15


def lane_enabled() -> bool:
    """Whether the environment allows the lane. With Ray's TLS it does not: its messages are not encrypted."""
    off = os.environ.get(VARIABLE, "1").lower() in ("0", "false", "off")
    return not off and os.environ.get("RAY_USE_TLS", "0").lower() not in ("1", "true")


class Connection:
    """One end of a connection: numbered messages over TCP. One thread may send while another one receives.

    Args:
        sock: the socket. Its blocking mode stays as it is.
        max_bytes: the most bytes that a message from the other side may have.

    Attributes:
        sock: the socket.
        max_bytes: see above.
        read: what was read, without the messages that were taken.
        unsent: what the system has not taken yet; only of a non-blocking socket.
    """

    def __init__(self, sock: socket.socket, max_bytes: int = MAX_MESSAGE_BYTES) -> None:
        self.sock = sock
        self.max_bytes = max_bytes
        self.read = deque[bytes]()
        self.unsent = bytearray()
        self._recv, self._send = sock.recv, sock.send
        with contextlib.suppress(OSError, AttributeError):  # an option that this system does not have
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _PROBE_SECONDS)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _PROBE_SECONDS)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _SILENCE_SECONDS // _PROBE_SECONDS - 1)
        _open.add(self)

    def send(self, number: int, message: bytes) -> None:
        """Send a message. A non-blocking socket may leave a part of it in ``unsent``.

        Raises:
            OSError: the connection is lost.
        """
        data = _HEADER.pack(len(message), number) + message
        if self.unsent:
            self.unsent += data
            return
        try:
            sent = self._send(data)
        except BlockingIOError:
            sent = 0
        if sent != len(data):
            rest = memoryview(data)[sent:]
            if self.sock.getblocking():
                self.sock.sendall(rest)
            else:
                self.unsent += rest

    def receive(self) -> tuple[list[tuple[int, bytes]], deque[bytes]]:
        """Read what has arrived.

        Returns:
            The messages, as (number, bytes), and what is to be assigned to ``read`` to take them. Until then, they are
            returned again.

        Raises:
            OSError: the connection is lost, or carries something else than messages.
        """
        # Reading and keeping is one step of the interpreter, because `map` and `extend` are written in C: an exception
        # that the handler of a signal raises, such as KeyboardInterrupt, comes before or after it.
        read = self.read
        try:  # noqa: SIM105  (`suppress` would take longer than the rest)
            read.extend(map(self._recv, (1 << 16,)))
        except BlockingIOError:
            pass
        if read and not read[-1]:
            raise ConnectionResetError("the other side has closed it")
        data, start, messages = read[0] if len(read) == 1 else b"".join(read), 0, []
        while start + _HEADER.size <= len(data):
            nbytes, number = _HEADER.unpack_from(data, start)
            if nbytes > self.max_bytes:
                raise ConnectionAbortedError(
                    f"{nbytes:,} bytes were announced; a message has {self.max_bytes:,} at most"
                )
            stop = start + _HEADER.size + nbytes
            if stop > len(data):
                break
            messages.append((number, data[start + _HEADER.size : stop]))
            start = stop
        return messages, deque((data[start:],) if start < len(data) else ())

    def close(self) -> None:
        """Close the connection, also for forks of this process that have it too."""
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)
        self.sock.close()


_open: weakref.WeakSet[Connection] = weakref.WeakSet()


def _close_in_fork() -> None:
    # Without shutdown: the connection is the parent's. A fork that kept it would hide the parent's death from the peer.
    for connection in list(_open):
        connection.sock.close()


os.register_at_fork(after_in_child=_close_in_fork)


@dataclass(eq=False, slots=True)
class LaneCall:
    """A call whose results are on their way.

    Attributes:
        label: the method.
        left: how many ranks have not replied. After a KeyboardInterrupt in the leader it may be too large, and then the
            thread that waits looks again later.
        bell: rung when the last one has, or the thread that waits is to lead.
    """

    label: str
    left: int
    bell: queue.SimpleQueue[None] = field(default_factory=queue.SimpleQueue)


@dataclass(eq=False, slots=True)
class LaneToken:
    """Stands for the result of one rank. The leader fills it in, whichever thread waits for it.

    Attributes:
        number: number of the call on its connection.
        call: the call.
        reply: what the rank has sent; empty if it keeps the result because it is large.
        lost: why no reply will come.
        ref: Ray's reference to a result that the rank keeps, once it was asked for.
    """

    number: int
    call: LaneCall
    reply: bytes | None = None
    lost: str | None = None
    ref: object = None


class Peer:
    """What the driver knows of the process of one rank.

    Attributes:
        key: Ray's id of its actor.
        connection: None if it has none, or it was lost.
        sent: number of the last call that was sent on the connection.
        waiting: number -> token, of the calls that have not ended.
        through_ray: the messages that were sent through Ray, without those that are known to have ended, and a number
            for each: if one has ended, those with a lower number have too. A call that takes the lane meanwhile would
            overtake them.
        numbers: draws these numbers: for a call of the group before it is sent, for a direct call afterwards. Two
            threads may send one of each at once, so nobody knows which of them Ray takes first.

    Lock: ``_noting`` protects ``through_ray``, to which any thread may add. It is a leaf.
    """

    def __init__(self, key: bytes) -> None:
        self.key = key
        self.connection: Connection | None = None
        self.sent = 0
        self.waiting: dict[int, LaneToken] = {}
        self.through_ray: OrderedDict[object, int] = OrderedDict()
        self.numbers = itertools.count()
        self._noting = threading.Lock()

    def last_unanswered(self) -> int:
        """Number of the last call, if calls have not ended, and otherwise 0; `LOST` if the connection was lost."""
        unanswered = any(token.reply is None for token in list(self.waiting.values()))
        return LOST if self.connection is None and self.sent else self.sent if unanswered else 0

    def sent_through_ray(self, message: object, number: int) -> None:
        """Note a message, or that it has another number, behind the others."""
        with self._noting:
            self.through_ray[message] = number
            self.through_ray.move_to_end(message)

    @contextmanager
    def sending_directly(self) -> Iterator[int]:
        """Note a direct call, which is sent inside. Nobody tells the group of its end. Gives `last_unanswered`."""
        message = object()
        self.sent_through_ray(message, next(self.numbers))
        try:
            yield self.last_unanswered()
        finally:
            self.sent_through_ray(message, next(self.numbers))

    def ended_through_ray(self, message: object, *, ran: bool) -> None:
        """Note the end of a message. If the rank ``ran`` it, all earlier ones have ended too."""
        with self._noting:
            ended = self.through_ray.pop(message, None)
            if ran and ended is not None:
                while self.through_ray and next(iter(self.through_ray.values())) < ended:
                    self.through_ray.popitem(last=False)


class Lane:
    """The connections of one group. It outlives the group's engines: a rank that stays keeps its connection.

    Args:
        name: the group's name, for messages.
    """

    def __init__(self, name: str) -> None:
        self._name, self._selector = name, selectors.DefaultSelector()
        self._peers: dict[bytes, Peer] = {}
        self._leading = threading.Lock()
        self._changing = threading.RLock()  # reentrant: sending may find that a connection is lost
        self._followers: dict[LaneCall, None] = {}
        self._unfinished = False  # whether a leader was interrupted, and may not have given out what it has read
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
        refused, end = list[str](), time.monotonic() + seconds
        with selectors.DefaultSelector() as selector:
            selector.register(listener, selectors.EVENT_READ)
            while missing and (left := end - time.monotonic()) > 0:
                for key, _ in selector.select(left):
                    if key.data is None:
                        self._begin_handshake(listener, selector, self._token)
                        continue
                    connection, handshake = key.data
                    try:
                        if self._continue_handshake(connection, handshake, missing):
                            selector.unregister(connection.sock)
                            self._adopt(missing.pop(handshake.key), connection)
                    except (OSError, HandshakeError) as error:
                        refused.append(str(error))
                        selector.unregister(connection.sock)
                        connection.close()
                if len(selector.get_map()) > 1 + len(missing) + MAX_STRANGERS:
                    oldest = list(selector.get_map().values())[1]
                    refused.append(_INCOMPLETE)
                    selector.unregister(oldest.fileobj)
                    oldest.data[0].close()
            for key in list(selector.get_map().values())[1:]:
                refused.append(_INCOMPLETE)
                key.data[0].close()
        if refused:
            reasons = "; ".join(sorted(set(refused))[:4])
            logger.warning("%s: refused %d connections: %s", self._name, len(refused), reasons)
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
    def _begin_handshake(listener: socket.socket, selector: selectors.BaseSelector, token: bytes) -> None:
        with contextlib.suppress(OSError):  # the other side has closed it, or too many files are open
            connection = Connection(listener.accept()[0], MAX_BYTES)
            connection.sock.setblocking(False)
            selector.register(connection.sock, selectors.EVENT_READ, (connection, handshake := Handshake(token)))
            connection.send(0, handshake.nonce)

    @staticmethod
    def _continue_handshake(connection: Connection, handshake: Handshake, missing: Mapping[bytes, Peer]) -> bool:
        """Take what has arrived. Returns whether the connection is that of a rank."""
        messages, connection.read = connection.receive()
        for _, message in messages:
            connection.send(0, handshake.respond(message))
        if handshake.complete and handshake.key not in missing:
            raise HandshakeError("it is not of a rank that is expected")
        return handshake.complete

    def _adopt(self, peer: Peer, connection: Connection) -> None:
        with self._changing:
            self._lose(peer, "the rank has opened another one")
            connection.max_bytes = MAX_MESSAGE_BYTES
            peer.connection = connection
            self._selector.register(connection.sock, selectors.EVENT_READ, peer)

    # --- calls --------------------------------------------------------------------------------------------------------

    def send(self, label: str, messages: Mapping[int, tuple[Peer, bytes]]) -> dict[LaneToken, int]:
        """Send one call to ranks, unless the connection to one of them is lost.

        Args:
            label: the method.
            messages: rank -> its process, and what to send.

        Returns:
            token -> rank; empty if nothing was sent.
        """
        tokens: dict[LaneToken, int] = {}
        call = LaneCall(label, len(messages))
        with self._changing:
            # A rank that has no call, and gets none from another thread now, sends nothing: its connection has ended.
            idle = [peer for peer, _ in messages.values() if not peer.waiting]
            for key, _ in self._selector.select(0) if idle else ():
                if key.data in idle:
                    self._lose(key.data, "it has ended, or something has arrived on it, between calls")
            if any(peer.connection is None for peer, _ in messages.values()):
                return {}
            try:
                for rank, (peer, message) in messages.items():
                    connection = cast(Connection, peer.connection)
                    peer.sent += 1
                    token = LaneToken(peer.sent, call)
                    tokens[token] = rank
                    peer.waiting[peer.sent] = token
                    try:
                        connection.send(peer.sent, message)
                        if connection.unsent:
                            both = selectors.EVENT_READ | selectors.EVENT_WRITE
                            self._selector.modify(connection.sock, both, peer)
                    except OSError as error:
                        self._lose(peer, str(error))
            except BaseException as error:  # KeyboardInterrupt: half a message may have been sent
                for peer, _ in messages.values():
                    self._lose(peer, f"{type(error).__name__} while a message was being sent")
                raise
        return tokens

    def wait(self, tokens: Collection[LaneToken], timeout: float) -> None:
        """Wait until all these tokens of one call have replies or are lost, at most ``timeout`` seconds."""
        call, left, end = next(iter(tokens)).call, timeout, time.monotonic() + timeout
        self._followers[call] = None  # before it finds that another thread leads, so that it is told when that ends
        try:
            looked = False
            while (left > 0 or not looked) and any(token.reply is None and token.lost is None for token in tokens):
                looked = True
                leads: list[bool] = []
                try:
                    leads.extend(map(self._leading.acquire, (False,)))  # one step: see `Connection.receive`
                    if leads[0]:
                        self._take_what_arrives(max(left, 0.0))
                finally:
                    if leads == [True]:
                        self._leading.release()
                if not leads[0] and left > 0:
                    with contextlib.suppress(queue.Empty):
                        call.bell.get(timeout=left)
                left = end - time.monotonic()
        finally:
            self._followers.pop(call, None)
            if self._followers and not self._leading.locked():  # somebody else must lead
                for other in list(self._followers):
                    if other.left > 0:
                        other.bell.put(None)
                        break

    def close(self) -> None:
        """Close all connections."""
        self.peers(())

    def _take_what_arrives(self, timeout: float) -> None:
        """The leader's work: wait for the connections, once, and give the replies to those that wait for them.

        Wherever a KeyboardInterrupt comes in here, the next leader does the rest. To give a token the same reply again
        changes nothing, and taking the messages from the connection is one assignment.
        """
        if self._unfinished:  # a connection from which everything was read is not ready
            ready = [(peer, peer.connection, selectors.EVENT_READ) for peer in list(self._peers.values())]
        else:
            ready = [(key.data, key.data.connection, events) for key, events in self._selector.select(timeout)]
        self._unfinished = True
        for peer, connection, events in ready:
            if connection is None:
                continue  # lost meanwhile
            try:
                if events & selectors.EVENT_WRITE:
                    self._flush(peer, connection)
                messages, rest = connection.receive()
                for number, reply in messages:
                    token = peer.waiting[number]
                    if token.reply is None:
                        token.reply = reply
                        token.call.left -= 1
                        if token.call.left <= 0:
                            token.call.bell.put(None)
                connection.read = rest
                for number, _ in messages:
                    peer.waiting.pop(number, None)
            except KeyError as error:
                self._lose(peer, f"a reply has come to call {error}, which was not sent", connection)
            except OSError as error:
                self._lose(peer, str(error), connection)
        self._unfinished = False

    def _flush(self, peer: Peer, connection: Connection) -> None:
        with self._changing:
            try:
                del connection.unsent[: connection.sock.send(connection.unsent)]
                if not connection.unsent:
                    self._selector.modify(connection.sock, selectors.EVENT_READ, peer)
            except BlockingIOError:
                pass
            except BaseException as error:  # as in `send`
                self._lose(peer, f"{type(error).__name__} while a message was being sent")
                raise

    def _lose(self, peer: Peer, reason: str, which: Connection | None = None) -> None:
        """Give up the connection to a rank. ``which``: only if it still is this one, because the rank may have opened
        another since the leader took it."""
        with self._changing:
            connection = peer.connection
            if connection is None or which not in (None, connection):
                return
            # In this order: after a KeyboardInterrupt, whoever uses the connection next does the rest.
            for token in list(peer.waiting.values()):
                if token.lost is None:
                    token.lost = reason
                    token.call.left -= 1
                    if token.call.left <= 0:
                        token.call.bell.put(None)
            with contextlib.suppress(KeyError):
                self._selector.unregister(connection.sock)
            connection.close()
            peer.waiting, peer.connection = {}, None
            logger.debug("%s: a connection of the lane was lost: %s", self._name, reason)
