"""ControlServer: reaches a rank although its only thread for calls is busy.

A concurrency group of Ray's would do, but then Ray runs all methods of the actor in threads of its own, and without the
lane user code has the process's main thread: for signal handlers, for example. So each worker listens on a port of its
node's address. A client that knows the worker's key, which travels with its location inside Ray, sends a command and
gets text. The request is one line: the key in hexadecimal, a space, the command. The answer is ``+`` or ``-``, for
whether the command's handler succeeded, and then text up to the end of the connection.
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

from single_controller.ray.frames import frames_file

logger = logging.getLogger(__name__)

CLIENT_SECONDS = 1.0
"""How long a client may take to send its request, and then to read the answer."""

MAX_CONNECTIONS = 32
MAX_REQUEST_BYTES = 128
KEY_BYTES = 16


class ControlAddress(NamedTuple):
    """Where a `ControlServer` listens.

    Attributes:
        address: the node's address.
        port: the port; 0 if the process cannot listen there.
        key: what a client must send, in hexadecimal.
        pid: the process.
        frames: the file in its ``/proc`` folder to which it writes its Python frames: see `frames_file`; -1 without.
    """

    address: str
    port: int
    key: bytes
    pid: int
    frames: int = -1


class Answer(NamedTuple):
    """What one rank answers.

    Attributes:
        text: what the command's handler returned, or why there is no answer.
        ok: whether the handler succeeded.
        told: whether the rank has answered at all. If not, it may do so later.
    """

    text: str
    ok: bool = True
    told: bool = True


class ControlServer:
    """Runs handlers of commands in its own thread, while the process's other threads are busy.

    Thread: a daemon thread named "control-server", which blocks in ``accept`` and ends with the process.

    Args:
        address: the node's address, where it listens.
        handlers: command -> what answers it. A handler runs in the server's thread. It must not acquire a lock of this
            library, which a busy method may hold, and must return soon: the next client waits for it.

    Attributes:
        address: where it listens.
    """

    def __init__(self, address: str, handlers: Mapping[str, Callable[[], str]]) -> None:
        self.address = ControlAddress(address, 0, secrets.token_hex(KEY_BYTES).encode(), os.getpid(), frames_file())
        self._handlers = dict(handlers)
        try:
            self._listener = socket.create_server((address, 0), family=_family(address), backlog=16)
        except OSError:  # the address is not one of this process's network namespace, for example
            logger.debug("cannot listen on %s", address, exc_info=True)
            return
        self.address = self.address._replace(port=self._listener.getsockname()[1])
        threading.Thread(target=self._serve, name="control-server", daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:  # the process has too many open files, for example; a later client may find fewer
                logger.debug("cannot accept a connection", exc_info=True)
                time.sleep(CLIENT_SECONDS)
                continue
            # One client after the other: an answer takes milliseconds, and only drivers ask. The limit keeps a client
            # that sends no request from blocking the next one.
            with connection, contextlib.suppress(OSError):
                request = _read(connection, time.monotonic() + CLIENT_SECONDS, MAX_REQUEST_BYTES, end_of_line=True)
                key, _, command = request.rstrip(b"\n").partition(b" ")
                if hmac.compare_digest(key, self.address.key):
                    answer = self._answer(command.decode(errors="replace"))
                    connection.settimeout(CLIENT_SECONDS)  # of sendall as a whole
                    connection.sendall(answer)

    def _answer(self, command: str) -> bytes:
        handler = self._handlers.get(command)
        if handler is None:
            return f"-the process has no command {command!r}; it runs another version of this library".encode()
        try:
            return b"+" + handler().encode()
        except Exception as error:  # for example, a thread of the user's has changed what is being read
            return f"-{command} failed: {type(error).__name__}: {error}".encode()


def ask(addresses: Mapping[int, ControlAddress], command: str, seconds: float) -> dict[int, Answer]:
    """Send a command to ranks, in parallel.

    Args:
        addresses: rank -> where it listens.
        command: a command that their servers have a handler for.
        seconds: how long this may take. One rank gets half of it, so that some that do not answer leave time for the
            others.

    Returns:
        rank -> its answer, or why there is none; without the ranks that could not be asked in time.
    """
    pool = cf.ThreadPoolExecutor(min(MAX_CONNECTIONS, len(addresses) or 1), "ask-ranks")
    try:
        asked = {pool.submit(_ask, address, command, seconds / 2): rank for rank, address in addresses.items()}
        done = cf.wait(asked, seconds).done
        return {asked[future]: future.result() for future in done}
    finally:
        # Without waiting: a thread whose rank does not answer ends when its socket times out, half of ``seconds`` after
        # it began, and must not delay the error that shows the answers.
        pool.shutdown(wait=False, cancel_futures=True)


def _ask(server: ControlAddress, command: str, seconds: float) -> Answer:
    if not server.port:
        return Answer(f"unknown: its process cannot listen on {server.address}", ok=False, told=False)
    end = time.monotonic() + seconds
    try:
        with socket.create_connection((server.address, server.port), seconds) as connection:
            connection.sendall(b"%s %s\n" % (server.key, command.encode()))  # fits into the socket's buffer
            answer = _read(connection, end).decode(errors="replace")
    except TimeoutError:
        return Answer(
            f"unknown: it did not answer within {seconds:g} s. Its process is stopped, or C code holds the GIL. Run "
            f"`py-spy dump --native --pid {server.pid}` on its host to see more",
            ok=False,
            told=False,
        )
    except OSError as error:
        told = f"unknown: port {server.port} of {server.address} cannot be reached: {error}"
        return Answer(told, ok=False, told=False)
    if not answer:
        told = f"unknown: port {server.port} of {server.address} sends nothing; another process may have it now"
        return Answer(told, ok=False, told=False)
    return Answer(answer[1:], ok=answer[0] == "+")


def _read(connection: socket.socket, end: float, nbytes: int | None = None, *, end_of_line: bool = False) -> bytes:
    """Some bytes, or all until the other side closes the connection or, if asked for, a line has ended.

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
        if end_of_line and more.endswith(b"\n"):
            break
    return found


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET
