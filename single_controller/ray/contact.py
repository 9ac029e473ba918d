"""Contact: whether the process of a rank still runs, after contact with it was lost."""

from __future__ import annotations

import errno
import logging
import select
import socket
import time
from contextlib import suppress
from typing import Any

from single_controller.ray.internals import Process, death_of, node_service, process_of

logger = logging.getLogger(__name__)

ASK_SECONDS = 0.2
"""Pause between two questions to Ray's control store about one rank."""

CONNECT_SECONDS = 1.0
"""How long a connection may take. After that, a new one is tried: the kernel's own next attempts are further apart."""

REFUSED_SECONDS = 2.0
"""How long a process must have refused connections to count as dead, although Ray has not reported that yet."""


_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
"""What a gRPC client sends first: the preface of HTTP/2 and empty settings."""


class Contact:
    """Asks who can know whether a rank is alive, again and again, until one of them does. No question waits for the
    rank's host. Ray's control store is asked as by any other request, and ends the driver if it is gone for a minute.

    - Ray's control store knows of a killed process at once, and of a host that has gone after its health checks. When
      they have had the time to find out and it still says "alive", the rank is alive.
    - The process: if it runs, its gRPC server greets whoever connects to the port on which it takes Ray's calls. The
      server has threads of its own, so this needs no thread of Python, whatever the rank is computing. If connections
      are refused, the process is gone. A proxy or a firewall may accept a connection to a dead host, but cannot greet.

    Not thread-safe: `RayEngine` asks under a lock.

    Args:
        actor: the rank's actor.
        death_seconds: how long Ray may take to report the death of a host.

    Attributes:
        alive: whether the process runs; None while nobody knows.
        reason: why it is dead.
        asked: when this was last asked, by the monotonic clock.
    """

    def __init__(self, actor: Any, death_seconds: float) -> None:
        self.alive: bool | None = None
        self.reason = ""
        self.asked = 0.0
        self._actor = actor
        self._since = time.monotonic()
        self._death_seconds = death_seconds
        self._process: Process | None = None
        self._connection: _Connection | None = None
        self._refused_since: float | None = None

    def ask(self) -> None:
        """Ask once more, unless it is known already."""
        now = time.monotonic()
        if self.alive is None and now - self.asked >= ASK_SECONDS:
            self.asked = now
            self._ask_control_store(now)
            if self.alive is None:
                try:
                    self._ask_process(now)
                except OSError:  # this process has too many open files; the next question may find fewer
                    logger.debug("the process of %r could not be asked", self._actor, exc_info=True)
        if self.alive is not None and self._connection is not None:
            self._connection.close()

    def _ask_control_store(self, now: float) -> None:
        try:
            late = now - self._since > self._death_seconds
            death = death_of(self._actor, ask=late)  # its last word may be older than the loss of contact
            if death is None and self._process is None:
                self._process = process_of(self._actor)
        except Exception:  # the control store does not respond either
            logger.debug("Ray's control store could not be asked about %r", self._actor, exc_info=True)
            return
        if death is not None:
            self.alive, self.reason = False, death
        elif late:
            self.alive = True

    def _ask_process(self, now: float) -> None:
        if self._process is None:
            return
        if self._connection is None:
            self._connection = _Connection(self._process.address)
        self._connection.look()
        if self._connection.greeted:
            self.alive = True
        elif self._connection.refused:
            self._refused_since = self._refused_since or now
            if now - self._refused_since >= REFUSED_SECONDS:
                self.alive, self.reason = False, self._missing(self._process.node_id)
        elif self._connection.accepted:
            self._refused_since = None
        if self._connection.refused or self._connection.older_than(CONNECT_SECONDS):
            self._connection.close()
            self._connection = None

    def _missing(self, node_id: str) -> str:
        """What is gone besides the process. Waits for the Ray process of its host."""
        service = node_service(node_id)
        if service is not None:
            connection = _Connection(service)
            connection.look(CONNECT_SECONDS)
            connection.close()
            if not connection.greeted:
                return "its host is gone: neither its process nor its Ray node responds"
        return "its process no longer listens on its port"


class _Connection:
    """A connection to a gRPC server, until the server greets.

    Attributes:
        accepted: whether the connection was accepted.
        greeted: whether the server has sent something.
        refused: whether nothing listens there.
    """

    def __init__(self, address: tuple[str, int]) -> None:
        self.accepted = self.greeted = self.refused = False
        self._socket = socket.socket(socket.AF_INET6 if ":" in address[0] else socket.AF_INET, socket.SOCK_STREAM)
        self._socket.setblocking(False)
        self._begun = time.monotonic()
        self._socket.connect_ex(address)  # its outcome is the first event of `look`

    def older_than(self, seconds: float) -> bool:
        """Whether it was begun longer ago."""
        return time.monotonic() - self._begun > seconds

    def close(self) -> None:
        """Close it."""
        self._socket.close()

    def look(self, timeout: float = 0.0) -> None:
        """Take one or two steps, each at most ``timeout`` seconds long."""
        if not self.accepted and self._event(select.POLLOUT, timeout):
            error = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            self.refused, self.accepted = error == errno.ECONNREFUSED, error == 0
            if self.accepted:
                with suppress(OSError):
                    self._socket.send(_PREFACE)
        if self.accepted and not self.greeted and self._event(select.POLLIN, timeout):
            with suppress(OSError):  # it was reset
                self.greeted = self._socket.recv(1) != b""

    def _event(self, event: int, timeout: float) -> bool:
        poll = select.poll()  # unlike select.select, for any number of open files
        poll.register(self._socket, event)
        return bool(poll.poll(timeout * 1000))
