"""Streams: connections with blocking reads and writes, for bytes in bulk, on which frames would hold up calls.

They begin with the handshake of all connections, and use Ray's certificates if Ray does.

Threads: the hub's thread accepts the connections of a `StreamListener`, which has a daemon thread for each of them. It
ends with the connection. `connect` and its stream work in the caller's thread. There are no locks: a stream belongs to
one thread.
"""

from __future__ import annotations

import logging
import socket
import ssl
import threading
import time
import weakref
from collections.abc import Callable
from typing import Self

from single_controller.wire.connection import encrypted, hub
from single_controller.wire.handshake import (
    HELLO_BYTES,
    NONCE_BYTES,
    WELCOME_BYTES,
    WireAddress,
    hello,
    new_nonce,
    received_text,
    welcome,
    welcomed,
)
from single_controller.wire.listener import MAX_STRANGERS, accept_from, listen

logger = logging.getLogger(__name__)

IDLE_SECONDS = 60.0
"""How long a handshake may take, and then each read and write of a stream without an ``end``."""


class Stream:
    """One end of a connection. A context manager, which closes it.

    Args:
        sock: a connected socket.
        server: whether this side has accepted the connection.
        end: when to give up, as `time.monotonic` counts; None gives each read and write `IDLE_SECONDS`.

    Raises:
        OSError: also by all methods: the connection has failed, or the time is over.
    """

    def __init__(self, sock: socket.socket, *, server: bool, end: float | None) -> None:
        self.end = end
        self._sock = sock
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._sock = encrypted(sock, server=server)
            # Limited too: a peer that connects and sends nothing would otherwise hold this thread, and the file
            # descriptor, for ever.
            if isinstance(self._sock, ssl.SSLSocket):
                self._limit()
                self._sock.do_handshake()
        except BaseException:  # nobody else has the socket yet
            self.close()
            raise

    def write(self, data: bytes | memoryview) -> None:
        """Send bytes."""
        view = memoryview(data)
        while view:
            self._limit()  # not `sendall`, which begins the time anew for each part that it encrypts
            view = view[self._sock.send(view) :]

    def read(self, nbytes: int) -> bytes:
        """Return so many bytes, which are waited for."""
        read = bytearray(nbytes)
        self.read_into(memoryview(read))
        return bytes(read)

    def read_into(self, view: memoryview) -> None:
        """Fill memory with bytes, which are waited for."""
        while view:
            self._limit()
            count = self._sock.recv_into(view)
            if not count:
                raise ConnectionResetError(f"the other side has closed the connection; {len(view):,} bytes are missing")
            view = view[count:]

    def close(self) -> None:
        """Close the connection."""
        self._sock.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _limit(self) -> None:
        # Before each system call, because a timeout of a socket begins anew with each, and `end` does not.
        self._sock.settimeout(IDLE_SECONDS if self.end is None else _left(self.end))


class StreamListener:
    """Accepts streams.

    Args:
        host: this host's address, where it listens.
        serve: gets each stream, in a thread of its own. What it raises as OSError or ValueError is logged.
        name: what the streams bring, for the threads' names and the log.
    """

    def __init__(self, host: str, serve: Callable[[Stream], None], name: str) -> None:
        self._serve, self._name = serve, name
        self._strangers: weakref.WeakSet[socket.socket] = weakref.WeakSet()  # have not shown that they know the key
        self._listener, self.address = listen(host)  # the address is what `connect` needs
        accept_from(self._listener, self._accept)

    def close(self) -> None:
        """Stop listening. Open streams continue."""
        hub.remove(self._listener)
        self._listener.close()

    def _accept(self, sock: socket.socket) -> None:
        # One thread per stream: a sender whose host is slow must not hold up the others, whose weights or snapshots
        # arrive at the same time. Senders are the ranks of one group, so there are few; strangers may be many.
        if len(self._strangers) >= MAX_STRANGERS:
            sock.close()
            return
        self._strangers.add(sock)
        name = f"{self._name}-receive"
        threading.Thread(target=self._receive, args=(sock,), name=name, daemon=True).start()

    def _receive(self, sock: socket.socket) -> None:
        try:
            with Stream(sock, server=True, end=time.monotonic() + IDLE_SECONDS) as stream:
                nonce = new_nonce()
                stream.write(nonce)
                _, proof = welcome(self.address.key, nonce, stream.read(HELLO_BYTES))
                self._strangers.discard(sock)
                stream.write(received_text(proof, 0))
                # The whole may take minutes. A sender that stops in the middle is found by `IDLE_SECONDS`.
                stream.end = None
                self._serve(stream)
        except (OSError, ValueError) as error:  # the sender learns of it by the closed connection
            logger.warning("a %s of another rank was not received: %s: %s", self._name, type(error).__name__, error)
        finally:
            self._strangers.discard(sock)  # at once: a record of the log may keep the error, and with it this frame


def connect(address: WireAddress, end: float) -> Stream:
    """Connect to a `StreamListener`, and give up at ``end``, as `time.monotonic` counts. An OSError if nobody listens
    there, it does not know the key, or the time is over."""
    sock = socket.create_connection(address[:2], _left(end))
    hub.sockets.add(sock)
    stream = Stream(sock, server=False, end=end)
    try:
        of_listener, nonce, session = stream.read(NONCE_BYTES), new_nonce(), new_nonce()
        stream.write(hello(address.key, of_listener, nonce, session))
        welcomed(address.key, of_listener, nonce, session, stream.read(WELCOME_BYTES))
    except BaseException:
        stream.close()
        raise
    return stream


def _left(end: float) -> float:
    left = end - time.monotonic()
    if left <= 0:
        raise TimeoutError("the time is over")
    return left
