"""Connection: one end of a TCP connection that carries frames. Hub: the thread that reads all of them.

Thread: a daemon thread named "wire", one per process, reads every connection and runs timers. It starts with the first
socket, and ends with the process. What it calls must be short and must not wait, because nobody reads meanwhile. Any
thread may send: bytes that the system does not take at once are sent by the hub when there is room.

With ``RAY_USE_TLS=1`` the connections use the certificates with which Ray encrypts its own.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import logging
import os
import queue
import selectors
import socket
import ssl
import struct
import threading
import time
import weakref
from collections.abc import Callable

logger = logging.getLogger(__name__)

HEADER = struct.Struct("<IBQQ")
"""What each frame begins with: bytes that follow, kind, number, and up to which number the sender has all replies."""

MAX_FRAME_BYTES = 2 << 20
"""More than any frame has: see `single_controller.call.codec.MAX_INLINE_BYTES`."""

SILENCE_SECONDS = 10
"""How long the other host may not acknowledge anything before the connection counts as lost. Longer than an outage that
is to heal unnoticed. Ranks and drivers always read, so a window stays closed only while a process is stopped; its
connection is then dialled again, at no loss."""

_READ_BYTES = 1 << 16
_WANT = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)
_BOTH = selectors.EVENT_READ | selectors.EVENT_WRITE

_REMOVED = (KeyError, ValueError, RuntimeError)
"""What a selector raises for a socket that it does not have. The last: it looks for a closed one among all that it has,
which other threads change meanwhile."""


class Hub:
    """Reads connections, and runs timers. `hub` is the process's instance.

    Attributes:
        sockets: those of the wire, which a fork of this process closes. Each is added as soon as it exists.

    Locks: ``_starting`` protects the start of the thread. It is a leaf. The selector needs none: the
    kernel's own may be changed while another thread waits in it, and Python's dictionary beside it changes atomically.
    """

    def __init__(self) -> None:
        self._reset()
        os.register_at_fork(after_in_child=self._leave_to_parent)

    def _reset(self) -> None:
        self._starting = threading.Lock()
        self._selector = selectors.DefaultSelector()
        self.sockets: weakref.WeakSet[socket.socket] = weakref.WeakSet()
        self._thread: threading.Thread | None = None
        self._timers: list[tuple[float, int, Callable[[], None]]] = []  # a heap, of the thread alone
        self._new: queue.SimpleQueue[tuple[float, int, Callable[[], None]]] = queue.SimpleQueue()
        self._order = itertools.count()
        self._wake, self._woken = socket.socketpair()
        self._wake.setblocking(False)
        self._woken.setblocking(False)
        self._selector.register(self._woken, selectors.EVENT_READ, lambda _: self._woken.recv(4096))

    def _leave_to_parent(self) -> None:
        # Without shutdown: the connections are the parent's. A fork that kept one would hide the parent's death.
        for sock in (*self.sockets, self._wake, self._woken):
            sock.close()
        self._selector.close()
        self._reset()

    def add(self, sock: socket.socket, events: int, ready: Callable[[int], None]) -> None:
        """Call a function with the events of a socket."""
        self.sockets.add(sock)
        self.start()
        self._selector.register(sock, events, ready)

    def change(self, sock: socket.socket, events: int) -> None:
        """Wait for other events of a socket."""
        with contextlib.suppress(*_REMOVED):
            self._selector.modify(sock, events, self._selector.get_key(sock).data)

    def remove(self, sock: socket.socket) -> None:
        """Forget a socket, before it is closed."""
        with contextlib.suppress(*_REMOVED):
            self._selector.unregister(sock)

    def later(self, seconds: float, run: Callable[[], None]) -> None:
        """Run a short function in this thread."""
        self.start()
        self.soon(run, seconds)

    def soon(self, run: Callable[[], None], seconds: float = 0.0) -> None:
        """Run a short function in this thread. Takes no lock: the garbage collector may call this, wherever it runs."""
        self._new.put((time.monotonic() + seconds, next(self._order), run))
        with contextlib.suppress(OSError):  # it is full, so the thread wakes anyway
            self._wake.send(b"\0")

    def start(self) -> None:
        """Start the thread, unless it runs. `add` and `later` do so too."""
        if self._thread is None:
            with self._starting:
                if self._thread is None:
                    thread = threading.Thread(target=self._run, name="wire", daemon=True)
                    thread.start()
                    self._thread = thread

    def _run(self) -> None:
        with self._starting:  # Ctrl-C may have interrupted `start`, which knows nothing of this thread then
            if self._thread not in (None, threading.current_thread()):
                return
            self._thread = threading.current_thread()
        while True:
            try:
                while not self._new.empty():
                    heapq.heappush(self._timers, self._new.get())
                while self._timers and self._timers[0][0] <= time.monotonic():
                    try:
                        heapq.heappop(self._timers)[2]()  # in no variable: it may be all that keeps its owner alive
                    except Exception:  # whatever one did, the others are due too
                        logger.exception("a function that was to run later has failed")
                left = max(0.0, self._timers[0][0] - time.monotonic()) if self._timers else None
                for key, events in self._selector.select(left):
                    try:
                        key.data(events)
                    except Exception:  # whatever one handler did, the other connections need this thread
                        logger.exception("a connection could not be handled")
            except Exception:
                with contextlib.suppress(Exception):  # a handler of the log may raise, too
                    logger.exception("the thread that reads connections goes on after an error")


class Connection:
    """One end of a connection. Sending never waits and never raises: a lost connection is told by ``on_lost``.

    Lock: ``_sending`` protects the socket and what was not sent. It is a leaf.

    Args:
        sock: a connected socket.
        on_frame: gets kind, number, acknowledged number and payload of each frame, in the hub's thread.
        on_lost: gets the reason, once, in the hub's thread.
        max_bytes: the most bytes that a frame of the other side may have.
        server: whether this side has accepted the connection.

    Attributes:
        on_frame, on_lost, max_bytes: see above; may be replaced.
        timed_out: whether it was lost because the other host acknowledged nothing for `SILENCE_SECONDS`.
    """

    def __init__(
        self,
        sock: socket.socket,
        on_frame: Callable[[int, int, int, bytes], None],
        on_lost: Callable[[str], None],
        max_bytes: int = MAX_FRAME_BYTES,
        server: bool = False,
    ) -> None:
        self.on_frame, self.on_lost, self.max_bytes = on_frame, on_lost, max_bytes
        self.timed_out = self.reset = False  # how it was lost, if it was: by silence, or by the other side
        self._sending = threading.Lock()
        self._read = bytearray()  # what has arrived of an incomplete frame
        self._unsent = bytearray()
        self._lost = False
        self._failed: OSError | None = None  # what sending raised first. The system tells each error once
        self._writing = False
        sock.setblocking(False)
        _keep_alive(sock)
        self._sock = encrypted(sock, server=server)
        self._handshaking = isinstance(self._sock, ssl.SSLSocket)
        hub.add(self._sock, _BOTH if self._handshaking else selectors.EVENT_READ, self._ready)

    def send(self, kind: int, number: int, payload: bytes = b"", acknowledged: int = 0) -> None:
        """Send a frame, or leave it to the hub's thread to do so."""
        data = HEADER.pack(len(payload), kind, number, acknowledged) + payload
        with self._sending:
            if self._lost:
                return
            try:
                sent = 0
                if not (self._unsent or self._handshaking):
                    with contextlib.suppress(*_WANT):
                        sent = self._sock.send(data)
                if sent < len(data):
                    self._unsent += data[sent:]
                    if not self._writing:
                        self._writing = True
                        hub.change(self._sock, _BOTH)
            except OSError as error:
                self._failed = self._failed or error.with_traceback(None)  # later ones only tell that it is shut down
                self._shut()  # the hub's thread sees that, and tells the reason
            except BaseException:  # KeyboardInterrupt: nobody knows how much was sent
                self._shut()
                raise

    def _shut(self) -> None:
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> bool:
        """Close it, also for forks of this process, and return whether it was open. ``on_lost`` is not called."""
        with self._sending:
            if self._lost:
                return False
            self._lost = True
            hub.remove(self._sock)
            self._shut()
            self._sock.close()
            return True

    def _ready(self, events: int) -> None:
        try:
            if self._handshaking and not self._shake_hands():
                return
            if events & selectors.EVENT_WRITE:
                self._flush()
            if events & selectors.EVENT_READ:
                self._receive()
        except OSError as error:
            self.timed_out, self.reset = isinstance(error, TimeoutError), isinstance(error, ConnectionError)
            if self.close():
                self.on_lost(str(error) or type(error).__name__)
        except Exception as error:  # a frame that its reader does not understand
            if self.close():
                self.on_lost(f"{type(error).__name__}: {error}")
            logger.warning("a connection is closed after an error", exc_info=True)

    def _shake_hands(self) -> bool:
        with self._sending:
            try:
                self._sock.do_handshake()  # type: ignore[attr-defined]
            except ssl.SSLWantReadError:
                hub.change(self._sock, selectors.EVENT_READ)
                return False
            except ssl.SSLWantWriteError:
                hub.change(self._sock, _BOTH)
                return False
            self._handshaking = False
            self._writing = bool(self._unsent)
            hub.change(self._sock, _BOTH if self._writing else selectors.EVENT_READ)
            return True

    def _flush(self) -> None:
        with self._sending:
            if self._unsent and not self._lost:
                with contextlib.suppress(*_WANT):
                    del self._unsent[: self._sock.send(self._unsent)]
            if not self._unsent:
                self._writing = False
                hub.change(self._sock, selectors.EVENT_READ)

    def _receive(self) -> None:
        more = True
        while more and not self._lost:
            try:
                with self._sending if isinstance(self._sock, ssl.SSLSocket) else contextlib.nullcontext():
                    data = self._sock.recv(_READ_BYTES)
                    more = isinstance(self._sock, ssl.SSLSocket) and self._sock.pending() > 0
            except _WANT:
                return
            if not data:
                raise self._failed or ConnectionResetError("the other side has closed it")
            self._take_frames(data)

    def _take_frames(self, data: bytes | bytearray) -> None:
        if self._read:
            self._read += data  # in place, because a large frame arrives in many parts
            data = self._read
        start, size = 0, HEADER.size
        while start + size <= len(data):
            nbytes, kind, number, acknowledged = HEADER.unpack_from(data, start)
            if nbytes > self.max_bytes:
                raise ConnectionAbortedError(f"{nbytes:,} bytes were announced; a frame has {self.max_bytes:,} at most")
            stop = start + size + nbytes
            if stop > len(data):
                break
            self.on_frame(kind, number, acknowledged, bytes(memoryview(data)[start + size : stop]))
            if self._lost:
                return
            start = stop
        if data is not self._read or start == len(data):  # a new bytearray: an emptied one would keep its memory
            self._read = bytearray(data[start:])
        else:
            del self._read[:start]


def _keep_alive(sock: socket.socket) -> None:
    """Notice a host that is gone: by probes, or by what it does not acknowledge."""
    options = [(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1), (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)]
    seconds = {"TCP_KEEPIDLE": 4, "TCP_KEEPINTVL": 2, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 1000 * SILENCE_SECONDS}
    options += [(socket.IPPROTO_TCP, getattr(socket, name), n) for name, n in seconds.items() if hasattr(socket, name)]
    for option in options:
        with contextlib.suppress(OSError):  # an option that this system does not have
            sock.setsockopt(*option)


def encrypted(sock: socket.socket, *, server: bool) -> socket.socket:
    """The socket to use in place of a connected one: encrypted with Ray's certificates, before its handshake, in which
    each side checks the other's; or the same one, unless Ray uses TLS. An OSError if they cannot be read."""
    if os.environ.get("RAY_USE_TLS", "0").lower() not in ("1", "true"):
        return sock
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False  # Ray's certificates need not name the addresses of the hosts
    context.verify_mode = ssl.CERT_REQUIRED
    try:
        context.load_cert_chain(os.environ["RAY_TLS_SERVER_CERT"], os.environ["RAY_TLS_SERVER_KEY"])
        context.load_verify_locations(os.environ["RAY_TLS_CA_CERT"])
    except (KeyError, OSError) as error:  # the text of the second does not say which files
        raise OSError(f"Ray's TLS files cannot be read: {type(error).__name__}: {error}") from error
    wrapped = context.wrap_socket(sock, server_side=server, do_handshake_on_connect=False)
    hub.sockets.add(wrapped)
    return wrapped


hub = Hub()
