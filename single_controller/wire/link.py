"""Link and Session: the two ends of what connects a driver with a rank, through losses of the connection itself.

The driver dials again when its connection is lost. It sends the calls again that have not arrived, and the rank the
replies that the driver has not acknowledged.
"""

from __future__ import annotations

import errno
import functools
import logging
import os
import selectors
import socket
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

from single_controller.wire.connection import MAX_FRAME_BYTES, SILENCE_SECONDS, Connection, hub
from single_controller.wire.handshake import (
    MAX_HANDSHAKE_BYTES,
    HandshakeError,
    Kind,
    WireAddress,
    hello,
    new_nonce,
    welcomed,
)

logger = logging.getLogger(__name__)

K = TypeVar("K")

CONNECT_SECONDS = 2.0
"""How long one attempt to connect may take, with its handshake."""

REFUSED_SECONDS = 2.0
"""How long a process must have refused connections to count as dead, although Ray has not reported that yet."""

GONE_SECONDS = 12.0
"""How long a host must have been silent to count as gone."""

MAX_PAUSE_SECONDS = 1.0
ACK_REPLIES = 32
ACK_BYTES = 1 << 20
"""Replies, and their bytes, that the driver has received before it says so without another call."""

SESSION_SECONDS = 600.0
"""How long a driver may be without a connection before its session may be dropped, and no rank waits for it."""

RETURN_SECONDS = 10.0
"""How long a rank waits for a driver whose connection was reset, as by the end of its process. One that lives dials
again within `MAX_PAUSE_SECONDS`, unless the network fails at the same time."""

LOOK_SECONDS = 1.0
"""Time between two looks of a rank that waits for its driver."""

INPUTS_OF = 1 << 62
"""Added to the number of a call where its deferred arguments are meant."""


class Answer(NamedTuple):
    """What one rank answers to a command."""

    text: str  # what the command's handler returned, or why there is no answer
    ok: bool = True  # whether the handler succeeded
    told: bool = True  # whether the rank has answered at all. If not, it may do so later.


@dataclass(eq=False, slots=True, weakref_slot=True)
class Reply:
    """Stands for the reply of one rank to one call. `Link` calls its methods in the hub's thread. On Ray, it is a
    `RankReply` (``ray/results.py``)."""

    link: Link  # the link that carries the call
    number: int = field(default=0, init=False)  # number of the call on the link
    kind: int = field(default=0, init=False)  # ``REPLY``, ``KEPT`` or ``BESIDE`` once it has arrived
    payload: bytes = field(default=b"", init=False)  # the frame that has arrived

    def arrive(self) -> None:
        """Called when ``kind`` and ``payload`` are set."""
        raise NotImplementedError

    def lose(self, reason: str, *, dead: bool) -> None:
        """It will not come. ``dead``: because the rank's process has ended, and ``reason`` says why."""
        raise NotImplementedError


class Link:
    """The connection of one driver to one rank, through losses of the connection itself.

    Lock: ``lock`` protects all fields, and keeps the frames in the order of their numbers. Under it only
    leaves are acquired: ``Connection._sending`` and ``Hub._starting``.

    Args:
        address: where the rank listens.
    """

    def __init__(self, address: WireAddress) -> None:
        self.address = address
        self.opened = threading.Event()  # set once the rank has been reached for the first time
        self.session = new_nonce()  # the id of this driver's session there
        self.lock = threading.RLock()
        self._connection: Connection | None = None
        self._dialling: Connection | socket.socket | None = None
        self._closed: tuple[str, bool] | None = None  # why, and whether because the rank's process has ended
        self._sent = 0
        self._welcomed = False  # whether the rank knows the session
        # Number -> kind, payload and reply. Looking for the first key of a plain dict walks over all that were deleted.
        self._unanswered: OrderedDict[int, tuple[int, bytes, weakref.ref[Reply]]] = OrderedDict()
        # Payloads of ``WANT``, ``CANCEL`` and ``INPUTS`` frames. Repeated with each new connection, because a lost one
        # would hold up a rank.
        self._notes: dict[tuple[int, int], bytes] = {}
        self._asked: dict[int, Future[Answer]] = {}
        self._heard = time.monotonic()
        self._failures = 0  # dials since the last connection
        self.last_error = "no answer"  # why the last attempt to connect has failed
        self._refused_since: float | None = None
        self._unacknowledged = [0, 0]  # replies and bytes since the last frame that was sent
        self._dial()

    # --- calls --------------------------------------------------------------------------------------------------------

    def send(self, kind: int, payload: bytes, reply: Reply, before: Callable[[bytes, int], None] | None = None) -> None:
        """Send a call. Without a connection, it is sent when there is one.

        Args:
            kind: the kind of frame.
            payload: the message.
            reply: stands for its reply.
            before: called first, with the session and the call's number. What it raises is raised, and nothing is sent.
        """
        with self.lock:
            # A number that is drawn and then not sent, because of an error or Ctrl-C, is no harm: ranks only ask that
            # numbers grow.
            self._sent += 1
            reply.number = number = self._sent
            if before is not None:
                before(self.session, number)
            try:
                # Before it is sent, so that a connection that is lost meanwhile sends it again. The reply itself is
                # held by the call alone: one that nobody has any more is not fetched.
                self._unanswered[number] = kind, payload, weakref.ref(reply)
                if self._closed:
                    self._give_up(*self._closed)
                elif self._connection is not None:
                    self._unacknowledged = [0, 0]
                    self._connection.send(kind, number, payload, next(iter(self._unanswered)) - 1)
            except BaseException:  # Ctrl-C: nobody knows whether it was sent, so the next connection finds out
                if self._connection is not None:
                    self._connection._shut()
                raise

    def tell(self, kind: int, number: int, payload: bytes = b"") -> bool:
        """Send a note about a call that has not been answered. Returns whether there was one to send.

        Args:
            kind: ``WANT`` to have the rank keep the reply; ``CANCEL`` if the arguments beside it will not come;
                ``INPUTS`` with the deferred ones.
            number: the call.
            payload: the deferred arguments; empty if they will not come.
        """
        with self.lock:
            if number not in self._unanswered:
                return False
            self._notes[kind, number] = payload
            self._send(kind, number, payload)
            return True

    def ask(self, command: str) -> Future[Answer]:
        """Send a command. The future is done in the hub's thread, or at once if the rank cannot be reached. Cancel it
        to wait no longer."""
        answer: Future[Answer] = Future()
        with self.lock:
            if self._connection is not None:
                self._sent += 1
                self._asked = {number: one for number, one in self._asked.items() if not one.cancelled()}
                self._asked[self._sent] = answer
                self._send(Kind.COMMAND, self._sent, command.encode())
                return answer
        _no_answer(answer, f"port {self.address.port} of {self.address.host} cannot be reached")
        return answer

    def gone(self) -> str | None:
        """Why the process cannot live, as far as the network tells: "refused" or "silent"; None if it may live."""
        with self.lock:
            now = time.monotonic()
            if self._closed or self._connection is not None:
                return None
            if self._refused_since is not None and now - self._refused_since >= REFUSED_SECONDS:
                return "refused"
            return "silent" if self._failures and now - self._heard >= GONE_SECONDS else None

    @property
    def dead(self) -> str | None:
        """Why the rank's process has ended, as far as it is known."""
        closed = self._closed
        return closed[0] if closed is not None and closed[1] else None

    @property
    def connected(self) -> bool:
        """Whether there is a connection."""
        return self._connection is not None

    def close(self, dead: str | None = None) -> None:
        """Close the connection. What has not arrived is lost. ``dead``: why the rank's process has ended, if it has."""
        with self.lock:
            self._closed = self._closed or (dead or "the connection was closed", dead is not None)
            connection, self._connection = self._connection, None
            dialling, self._dialling = self._dialling, None
            self._give_up(*self._closed)
        for one in (connection, dialling):
            if isinstance(one, socket.socket):
                hub.remove(one)
            if one is not None:
                one.close()

    def _send(self, kind: int, number: int, payload: bytes = b"") -> None:
        if self._connection is not None:
            self._unacknowledged = [0, 0]
            self._connection.send(kind, number, payload, self._acknowledged)

    @property
    def _acknowledged(self) -> int:
        """Up to this number, all replies have arrived."""
        return next(iter(self._unanswered), self._sent + 1) - 1

    def _give_up(self, reason: str, dead: bool = False) -> None:
        unanswered, self._unanswered = self._unanswered, OrderedDict()
        asked, self._asked = self._asked, {}
        for _, _, weak in unanswered.values():
            reply = weak()
            if reply is not None and not reply.kind:  # see `_take`
                hub.soon(functools.partial(reply.lose, reason, dead=dead))  # not now: the caller holds the lock
        for answer in asked.values():
            hub.soon(functools.partial(_no_answer, answer, reason))

    # --- the hub's thread ---------------------------------------------------------------------------------------------

    def _take(self, kind: int, number: int, _: int, payload: bytes) -> None:
        self._heard = time.monotonic()
        if kind == Kind.ANSWER:
            with self.lock:
                answer = self._asked.pop(number, None)
            if answer is not None and answer.set_running_or_notify_cancel():
                text = payload.decode(errors="replace")
                answer.set_result(Answer(text[1:], ok=text[:1] == "+"))
            return
        if kind not in (Kind.REPLY, Kind.KEPT, Kind.BESIDE):
            raise HandshakeError(f"it has sent a frame of kind {kind}")
        with self.lock:
            call = self._unanswered.get(number)
            if call is None:  # a copy of a reply that has arrived before; what said so may have been lost
                self._send(Kind.ACK, number)
                return
            reply, wanted = call[2](), (Kind.WANT, number) in self._notes
            # If it was sent before the rank had the note, which may be lost, it comes again, as ``KEPT``.
            if kind != Kind.REPLY or not wanted:
                self._answered(number, len(payload))
                if reply is None and kind != Kind.REPLY and not wanted:  # otherwise a task takes it
                    self._send(Kind.DROP, number)  # if it is lost, the rank keeps the value as long as the session
            if reply is None or reply.kind:
                return
            reply.kind, reply.payload = kind, payload
        reply.arrive()  # outside the lock, because it acquires those of groups, which come before it

    def _answered(self, number: int, nbytes: int) -> None:
        """A reply has arrived for good. The caller holds the lock."""
        del self._unanswered[number]
        for note in (Kind.WANT, Kind.CANCEL, Kind.INPUTS) if self._notes else ():
            self._notes.pop((note, number), None)
        self._unacknowledged[0] += 1
        self._unacknowledged[1] += nbytes
        if number > self._acknowledged:  # an earlier call goes on, for which the rank would keep this reply, too
            self._send(Kind.ACK, number)
        elif self._unacknowledged[0] >= ACK_REPLIES or self._unacknowledged[1] >= ACK_BYTES:
            self._send(Kind.ACK, 0)

    def _dial(self) -> None:
        with self.lock:
            if self._closed or self._connection is not None or self._dialling is not None:
                return
            family = socket.AF_INET6 if ":" in self.address.host else socket.AF_INET
            try:
                sock = socket.socket(family, socket.SOCK_STREAM)
            except OSError as error:  # too many open files
                self._redial(str(error), tried=False)
                return
            hub.sockets.add(sock)
            sock.setblocking(False)
            code = sock.connect_ex(self.address[:2])
            self._dialling = sock
            if code in (0, errno.EINPROGRESS):
                hub.later(CONNECT_SECONDS, _if_alive(self._abort, sock))
                hub.add(sock, selectors.EVENT_WRITE, lambda _: self._connected(sock))
                return
        self._dial_failed(sock, code)

    def _connected(self, sock: socket.socket) -> None:
        # Under the lock, so that `close` finds either the socket or the connection. If it closed the socket between
        # remove() and the connection's add(), the hub would keep the number of a closed file, and refuse the next
        # socket that gets it.
        with self.lock:
            hub.remove(sock)  # also if Ctrl-C has interrupted `close`: it would be ready again and again
            if self._dialling is not sock:
                return
            code = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if code:
                self._dial_failed(sock, code)
                return
            self._heard, self._refused_since = time.monotonic(), None
            try:
                self._dialling = self._greeting(sock)
            except OSError as error:  # `encrypted` cannot read its files, for example
                self._dial_failed(sock, 0, str(error))
                return
            hub.later(2 * CONNECT_SECONDS, _if_alive(self._abort, self._dialling))

    def _greeting(self, sock: socket.socket) -> Connection:
        """A connection that shakes hands, and then opens the link."""
        nonce = new_nonce()
        of_rank = b""

        def greet(kind: int, number: int, acknowledged: int, frame: bytes) -> None:
            nonlocal of_rank
            self._heard = time.monotonic()
            if kind == Kind.NONCE:
                of_rank = frame
                proof = hello(self.address.key, of_rank, nonce, self.session)
                with self.lock:
                    connection.send(Kind.HELLO, 0, proof, self._acknowledged)
            elif kind == Kind.WELCOME and of_rank:
                self._open(connection, welcomed(self.address.key, of_rank, nonce, self.session, frame))
            else:
                raise HandshakeError("it does not follow the protocol")

        connection = Connection(sock, greet, lambda reason: self._lost(connection, reason), MAX_HANDSHAKE_BYTES)
        return connection

    def _open(self, connection: Connection, received: int) -> None:
        connection.max_bytes = MAX_FRAME_BYTES
        connection.on_frame = self._take
        with self.lock:
            if self._closed:
                connection.close()
                return
            if received < 0 and self._welcomed:  # the rank has forgotten the session, and what it has run
                self._give_up("its rank has been without a connection for too long")
                self.session, self._welcomed = new_nonce(), False
                self._notes.clear()
                self._lost(connection, "the session is another one")
                connection.close()
                return
            self._dialling, self._connection, self._failures, self._welcomed = None, connection, 0, True
            # In this order: the rank may forget a reply as soon as a later frame acknowledges it.
            for (kind, number), note in self._notes.items():
                self._send(kind, number, note)
            for number, (kind, payload, _) in self._unanswered.items():
                if number > received:
                    self._send(kind, number, payload)
        self.opened.set()

    def _lost(self, connection: Connection, reason: str) -> None:
        with self.lock:
            if connection is not self._connection and connection is not self._dialling:
                return
            welcomed_before = connection is self._connection
            self._connection = self._dialling = None
            # If it was reset, the host was alive just now; after silence, nothing was heard of it for as long.
            self._heard = time.monotonic() - (SILENCE_SECONDS if connection.timed_out else 0)
            asked, self._asked = self._asked, {}
            if not self._closed:
                self._redial(reason, tried=not welcomed_before)
        for answer in asked.values():
            _no_answer(answer, f"the connection was lost: {reason}")

    def _dial_failed(self, sock: socket.socket, code: int, reason: str = "") -> None:
        sock.close()
        with self.lock:
            if self._dialling is sock:
                self._dialling = None
                if code == errno.ECONNREFUSED:
                    self._heard = time.monotonic()
                    self._refused_since = self._refused_since or self._heard
                else:
                    self._refused_since = None
                self._redial(reason or os.strerror(code), tried=True)

    def _redial(self, reason: str, *, tried: bool) -> None:
        logger.debug("no connection to port %d of %s: %s", self.address.port, self.address.host, reason)
        self._failures += tried
        self.last_error = reason
        hub.later(min(0.02 * 2 ** min(self._failures, 10), MAX_PAUSE_SECONDS), _if_alive(self._dial))

    def _abort(self, dialling: Connection | socket.socket) -> None:
        """An attempt has taken too long."""
        if self._dialling is not dialling:
            return
        if isinstance(dialling, socket.socket):
            hub.remove(dialling)
            self._dial_failed(dialling, errno.ETIMEDOUT)
        else:  # it is accepted, but says nothing: the process is stopped, or is another one
            self._lost(dialling, "no handshake")
            dialling.close()


def _if_alive(method: Callable[..., None], *args: Any) -> Callable[[], None]:
    """What calls a method unless its object is gone: a timer must not keep a link that nobody has."""
    weak = weakref.WeakMethod(method)

    def run() -> None:
        alive = weak()
        if alive is not None:
            alive(*args)

    return run


class Session:
    """What a rank keeps for one driver.

    Lock: ``changed`` protects all fields, and wakes who waits for parts or results. Replies are sent again under it
    when the driver has dialled again (`Listener`).
    """

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.connection: Connection | None = None  # the driver's present connection, or None
        self.received = -1  # number of the last call that has arrived; -1 before the driver's first connection
        # Number -> kind and payload of the replies that the driver has not acknowledged. Ordered as `Link._unanswered`
        self.replies: OrderedDict[int, tuple[int, bytes]] = OrderedDict()
        self.kept: dict[int, Any] = {}  # number -> what the rank keeps of a call for `RankActor._sc_result`
        self.wanted: set[int] = set()  # numbers of calls whose small replies are to be kept too
        # Numbers of `replies` of which nothing is kept any more. A task may overtake the frame that asks for it.
        self.given: set[int] = set()
        self.parts: dict[int, tuple[Any, ...]] = {}  # number -> what came after the call: arguments, and `INPUTS_OF` it
        # Numbers of calls whose arguments were lost on the way
        self.cancelled: set[int] = set()
        self.acknowledged = 0  # up to this number, the driver has all replies
        self.left = time.monotonic()  # when the last connection was lost, by the monotonic clock
        self.reset = False  # whether that was reset, not cut

    def reply(self, kind: int, number: int, payload: bytes, kept: Any = None) -> None:
        """Send the reply to a call, and keep it until it is acknowledged. ``kept``: for `take_kept`."""
        with self.changed:
            if kept is not None:
                self.kept[number] = kept
            elif number in self.wanted:
                kind, self.kept[number] = Kind.KEPT, (payload, None)
            self.wanted.discard(number)
            self.cancelled.discard(number)
            self.replies[number] = kind, payload
            connection = self.connection
            self.changed.notify_all()
        # Outside the lock, for which the thread that reads the driver's next call would wait. A connection that is new
        # by now has sent it.
        if connection is not None:
            connection.send(kind, number, payload)

    def take_parts(
        self, number: int, of: int = 0, given_up: Callable[[], bool] = lambda: False
    ) -> tuple[Any, ...] | None:
        """Wait for the arguments that come beside a call, or, with `INPUTS_OF`, for its deferred arguments: () if they
        will not come. None: they were lost on the way to this rank, or the driver is gone or has ``given_up`` the
        call."""
        with self.changed:
            while number + of not in self.parts and number not in self.cancelled:
                if self._driver_is_gone() or given_up():
                    break
                self.changed.wait(LOOK_SECONDS)
            return self.parts.pop(number + of, None)

    def withdrawn(self, number: int) -> bool:
        """Whether the deferred arguments of a call will not come."""
        return self.parts.get(number + INPUTS_OF) == ()

    def give_parts(self, number: int, parts: tuple[Any, ...]) -> None:
        """Give what `take_parts` waits for, unless the driver has the reply to the call already."""
        with self.changed:
            if number % INPUTS_OF > self.acknowledged:
                self.parts[number] = parts
                self.changed.notify_all()

    def take_kept(self, number: int) -> Any:
        """Wait until a call has ended; what was kept of it. The driver has sent a ``WANT`` frame, or was told."""
        with self.changed:
            while number not in self.kept:
                if self._driver_is_gone():  # the frame was lost with it, and a thread waits here
                    raise ConnectionResetError(f"its driver has been gone for {time.monotonic() - self.left:.0f} s")
                self.changed.wait(LOOK_SECONDS)
            if number in self.replies:  # otherwise the driver has the reply, and asks for nothing any more
                self.given.add(number)
            return self.kept.pop(number)

    def _driver_is_gone(self) -> bool:
        seconds = RETURN_SECONDS if self.reset else SESSION_SECONDS
        return self.connection is None and time.monotonic() - self.left > seconds

    def acknowledge(self, number: int) -> None:
        """Forget what belongs to calls whose replies the driver has."""
        while self.replies and (first := next(iter(self.replies))) <= number:
            self.forget(first)
        if number > self.acknowledged:  # not at each frame: many calls may wait with their arguments behind a long one
            self.acknowledged = number
            for late in [one for one in self.parts if one % INPUTS_OF <= number]:  # they came after the reply was sent
                del self.parts[late]

    def forget(self, number: int) -> None:
        """Forget the reply to a call, which the driver has."""
        self.replies.pop(number, None)
        self.given.discard(number)


def _no_answer(answer: Future[Answer], reason: str) -> None:
    if answer.set_running_or_notify_cancel():
        answer.set_result(Answer(f"unknown: {reason}", ok=False, told=False))


def ask(links: Mapping[K, Link], command: str, seconds: float) -> dict[K, Answer]:
    """Send a command to ranks at once, each over its link, and return the answer of each within ``seconds``, or why
    there is none. ``links``: by rank, or by what else names it."""
    end = time.monotonic() + seconds
    asked = {rank: link.ask(command) for rank, link in links.items()}
    wait(asked.values(), max(0.0, end - time.monotonic()))
    answers = {}
    for rank, answer in asked.items():
        if not answer.cancel():
            answers[rank] = answer.result()
            continue
        answers[rank] = Answer(
            f"unknown: it did not answer within {seconds:g} s. Its process is stopped, or C code holds the GIL. Run "
            f"`py-spy dump --native --pid {links[rank].address.pid}` on its host to see more",
            ok=False,
            told=False,
        )
    return answers


def ask_at(addresses: Mapping[int, WireAddress], command: str, seconds: float) -> dict[int, Answer]:
    """Send a command to ranks to which this process has no links. Arguments and result as of `ask`."""
    links = {rank: Link(address) for rank, address in addresses.items()}
    end = time.monotonic() + seconds
    try:
        wait_open(list(links.values()), seconds / 2)
        return ask(links, command, end - time.monotonic())
    finally:
        for link in links.values():
            link.close()


def wait_open(links: Sequence[Link], seconds: float) -> list[Link]:
    """Wait until links are open. Returns those that are not."""
    end = time.monotonic() + seconds
    return [link for link in links if not link.opened.wait(max(0.0, end - time.monotonic()))]
