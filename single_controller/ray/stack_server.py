"""StackServer: asks a rank where it is, although the rank's only thread for calls is busy.

A concurrency group of Ray's would do, but then Ray runs all methods of the actor in threads of its own, and user code
needs the process's main thread: for signal handlers, for example. So each worker listens on a port of its node's
address. Whoever knows the worker's key, which travels with its location inside Ray, gets its Python stacks as text.
"""

from __future__ import annotations

import concurrent.futures as cf
import contextlib
import hmac
import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

logger = logging.getLogger(__name__)

CLIENT_SECONDS = 1.0
"""How long a client may take to send the key, and then to read the answer."""

MAX_CONNECTIONS = 32
KEY_BYTES = 16


class StackAddress(NamedTuple):
    """Where a `StackServer` listens.

    Attributes:
        address: the node's address.
        port: the port; 0 if the process cannot listen there.
        key: what a client must send.
        pid: the process, for messages.
    """

    address: str
    port: int
    key: bytes
    pid: int


class StackServer:
    """Answers with the process's stacks.

    Thread: a daemon thread named "stack-server", which blocks in ``accept`` and ends with the process.

    Args:
        address: the node's address, where it listens.
        stacks: returns the stacks as text.

    Attributes:
        address: where it listens.
    """

    def __init__(self, address: str, stacks: Callable[[], str]) -> None:
        self.address = StackAddress(address, 0, secrets.token_bytes(KEY_BYTES), os.getpid())
        self._stacks = stacks
        try:
            self._listener = socket.create_server((address, 0), family=_family(address), backlog=16)
        except OSError:  # the address is not one of this process's network namespace, for example
            logger.debug("cannot listen on %s", address, exc_info=True)
            return
        self.address = self.address._replace(port=self._listener.getsockname()[1])
        threading.Thread(target=self._serve, name="stack-server", daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:  # the process has too many open files, for example; a later client may find fewer
                logger.debug("cannot accept a connection", exc_info=True)
                time.sleep(CLIENT_SECONDS)
                continue
            # One client after the other: an answer takes milliseconds, and only drivers ask. The limit keeps a client
            # that sends no key from blocking the next one.
            with connection, contextlib.suppress(OSError):
                key = _read(connection, time.monotonic() + CLIENT_SECONDS, KEY_BYTES)
                if hmac.compare_digest(key, self.address.key):
                    answer = self._answer()
                    connection.settimeout(CLIENT_SECONDS)  # of sendall as a whole
                    connection.sendall(answer)

    def _answer(self) -> bytes:
        try:
            # Takes no lock of ours, so a method that holds one cannot block the answer.
            return self._stacks().encode()
        except Exception as error:  # a thread of the user's that changes what is being read
            return f"  its stack cannot be read: {type(error).__name__}: {error}".encode()


def ask_stacks(addresses: Mapping[int, StackAddress], seconds: float) -> dict[int, str]:
    """Ask ranks for their stacks, in parallel.

    Args:
        addresses: rank -> where it listens.
        seconds: how long this may take. One rank gets half of it, so that some that do not answer leave time for the
            others.

    Returns:
        rank -> the text, or why there is none; without the ranks that could not be asked in time.
    """
    pool = cf.ThreadPoolExecutor(min(MAX_CONNECTIONS, len(addresses) or 1), "ask-stacks")
    try:
        asked = {pool.submit(_ask, address, seconds / 2): rank for rank, address in addresses.items()}
        done = cf.wait(asked, seconds).done
        return {asked[future]: future.result() for future in done}
    finally:
        # Without waiting: a thread whose rank does not answer ends when its socket times out, half of ``seconds`` after
        # it began, and must not delay the error that shows the stacks.
        pool.shutdown(wait=False, cancel_futures=True)


def _ask(server: StackAddress, seconds: float) -> str:
    if not server.port:
        return f"  unknown: its process cannot listen on {server.address}"
    end = time.monotonic() + seconds
    try:
        with socket.create_connection((server.address, server.port), seconds) as connection:
            connection.sendall(server.key)  # fits into the socket's buffer
            answer = _read(connection, end).decode(errors="replace")
        unknown = f"  unknown: port {server.port} of {server.address} sends nothing; another process may have it now"
        return answer or unknown
    except TimeoutError:
        return (
            f"  unknown: it did not answer within {seconds:g} s. Its process is stopped, or C code holds the GIL. Run "
            f"`py-spy dump --native --pid {server.pid}` on its host to see more"
        )
    except OSError as error:
        return f"  unknown: port {server.port} of {server.address} cannot be reached: {error}"


def _read(connection: socket.socket, end: float, nbytes: int | None = None) -> bytes:
    """Some bytes, or all until the other side closes the connection.

    Raises:
        TimeoutError: they have not come by ``end``, however many have.
    """
    found = b""
    while nbytes is None or len(found) < nbytes:
        left = end - time.monotonic()
        if left <= 0:
            raise TimeoutError
        connection.settimeout(left)
        more = connection.recv(65536 if nbytes is None else nbytes - len(found))
        if not more:
            break
        found += more
    return found


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET
