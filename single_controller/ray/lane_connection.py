"""One TCP connection of the lane: numbered messages, and the handshake. See `single_controller.ray.lane`.

A message is a header of 12 bytes (its length and number, little-endian) and its bytes. The first three messages are the
handshake. Each side shows that it has the token of the start message, which came through Ray, without sending it:

1. The driver sends a nonce.
2. The rank sends its key, a nonce of its own, and the HMAC of both nonces and the key.
3. The driver sends another HMAC of them.

Both sides close a connection on which anything else arrives.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import secrets
import socket
import struct
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

MAX_MESSAGE_BYTES = 1 << 20
"""More than any message has: see `single_controller.base.result.MAX_INLINE_BYTES`."""

MAX_HANDSHAKE_BYTES = 128
NONCE_BYTES = 16
_READ_BYTES = 1 << 18
_HEADER = struct.Struct("<IQ")

# A connection outlives an outage that Ray outlives, whose health checks take up to 65 s by default.
_SILENCE_SECONDS = 120
_PROBE_SECONDS = 15


class LaneAddress(NamedTuple):
    """Where a driver listens, for the ranks that it starts.

    Attributes:
        address: address of the driver's node, or 127.0.0.1.
        port: the port.
        token: what both sides know, 32 random bytes.
    """

    address: str
    port: int
    token: bytes


class ConnectionLostError(Exception):
    """The connection was closed, has failed, or carries something else than messages."""


class Connection:
    """One end of a connection. Not thread-safe, except that one thread may send while another one receives.

    Args:
        sock: the socket. Its blocking mode stays as it is.
        limit: the most bytes that a message may have.
    """

    def __init__(self, sock: socket.socket, limit: int = MAX_MESSAGE_BYTES) -> None:
        self.sock = sock
        self.limit = limit
        self._read = deque[bytes]()
        self._unsent = bytearray()
        with contextlib.suppress(OSError, AttributeError):  # an option that this system does not have
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _PROBE_SECONDS)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _PROBE_SECONDS)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _SILENCE_SECONDS // _PROBE_SECONDS - 1)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * _SILENCE_SECONDS)
        _open.add(self)

    def fileno(self) -> int:
        """For selectors."""
        return self.sock.fileno()

    def send(self, number: int, message: bytes) -> bool:
        """Send a message. A blocking socket waits until the system has taken it.

        Returns:
            Whether the system has taken all of it; otherwise call `flush` when the socket is writable.

        Raises:
            ConnectionLostError: the connection is lost.
        """
        data = _HEADER.pack(len(message), number) + message
        if self._unsent:
            self._unsent += data
            return False
        if self.sock.getblocking():
            self._lost_if_it_raises(self.sock.sendall, data)
            return True
        sent = self._lost_if_it_raises(self.sock.send, data) or 0
        if sent < len(data):
            self._unsent += memoryview(data)[sent:]
            return False
        return True

    def flush(self) -> bool:
        """Send what the system has not taken before. Returns whether it has taken all.

        Raises:
            ConnectionLostError: the connection is lost.
        """
        del self._unsent[: self._lost_if_it_raises(self.sock.send, self._unsent) or 0]
        return not self._unsent

    def receive(self) -> None:
        """Read what has arrived.

        Raises:
            ConnectionLostError: the connection is lost.
        """
        # Reading and keeping is one step of the interpreter, for which `map` and `extend` are written in C: an
        # exception that a signal's handler raises, such as KeyboardInterrupt, comes before or after it.
        self._lost_if_it_raises(self._read.extend, map(self.sock.recv, (_READ_BYTES,)))
        if self._read and not self._read[-1]:
            raise ConnectionLostError("it was closed")

    def messages(self) -> list[tuple[int, bytes]]:
        """The messages that have arrived completely, as (number, bytes). The same again until `consume`.

        Raises:
            ConnectionLostError: something else than messages has arrived.
        """
        if len(self._read) > 1:
            self._read = deque((b"".join(self._read),))
        return [(number, data[start:stop]) for data in self._read for number, start, stop in self._split(data)]

    def consume(self, messages: list[tuple[int, bytes]]) -> None:
        """Drop the messages that `messages` has returned."""
        nbytes = sum(_HEADER.size + len(message) for _, message in messages)
        self._read = deque(data[nbytes:] for data in self._read if len(data) > nbytes)

    def take(self) -> list[tuple[int, bytes]]:
        """`messages`, and `consume` them."""
        found = self.messages()
        self.consume(found)
        return found

    def _split(self, data: bytes) -> Iterator[tuple[int, int, int]]:
        start = 0
        while start + _HEADER.size <= len(data):
            nbytes, number = _HEADER.unpack_from(data, start)
            if nbytes > self.limit:
                raise ConnectionLostError(f"a message of {nbytes:,} bytes was announced; at most {self.limit:,} come")
            start += _HEADER.size
            if start + nbytes > len(data):
                return
            yield number, start, start + nbytes
            start += nbytes

    @staticmethod
    def _lost_if_it_raises(function: Callable[..., Any], *args: Any) -> Any:
        try:
            return function(*args)
        except (BlockingIOError, InterruptedError):
            return None
        except OSError as error:
            raise ConnectionLostError(str(error)) from error

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


class Handshake:
    """The handshake, on either side.

    Args:
        token: what the peer must know too.
        key: the rank's key, 16 bytes; None on the driver's side, which learns it.

    Attributes:
        key: the rank's key.
        complete: whether the peer has shown that it knows the token.
    """

    def __init__(self, token: bytes, key: bytes | None = None) -> None:
        self.key = key
        self.complete = False
        self._token = token
        self._nonces = [secrets.token_bytes(NONCE_BYTES)]
        self._is_driver = key is None

    def begin(self, connection: Connection) -> None:
        """Send the first message, on the driver's side."""
        connection.send(0, self._nonces[0])

    def step(self, connection: Connection, message: bytes) -> None:
        """Take the peer's next message, and respond.

        Raises:
            ConnectionLostError: the peer does not know the token.
        """
        if self._is_driver:
            self.key, nonce, proof = message[:NONCE_BYTES], message[NONCE_BYTES : 2 * NONCE_BYTES], message[-32:]
            self._nonces.append(nonce)
            if len(message) != 2 * NONCE_BYTES + 32 or not hmac.compare_digest(proof, self._proof(b"rank")):
                raise ConnectionLostError("its token is wrong")
            connection.send(0, self._proof(b"driver"))
        elif len(self._nonces) == 1:
            self._nonces.insert(0, message)
            connection.send(0, (self.key or b"") + self._nonces[1] + self._proof(b"rank"))
            return
        elif not hmac.compare_digest(message, self._proof(b"driver")):
            raise ConnectionLostError("its token is wrong")
        self.complete, connection.limit = True, MAX_MESSAGE_BYTES

    def _proof(self, side: bytes) -> bytes:
        return hmac.digest(self._token, b"|".join((side, *self._nonces, self.key or b"")), "sha256")
