"""Blocks of host memory from one process to another, over a TCP connection of their own.

A connection carries one block: the receiver's token, the header as JSON, the bytes, and their checksum. The receiver
answers with one byte when it has kept the block.

Threads: `BlockServer` starts one that accepts connections and ends with `BlockServer.close`, and one per connection,
which ends with it. All are daemons. `send_block` runs in the caller's thread.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import logging
import secrets
import socket
import struct
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

logger = logging.getLogger(__name__)

CHUNK_BYTES = 4 << 20
TOKEN_BYTES = 32
MAX_HEADER_BYTES = 256 << 20
IDLE_SECONDS = 60.0
"""How long a receiver waits for further bytes."""

KEPT = b"+"
_LENGTH = struct.Struct("!Q")
_CHECKSUM = struct.Struct("!L")


class TransportError(ConnectionError):
    """The other side has refused a block, or has sent something else."""


@dataclass(frozen=True)
class Block:
    """What is sent at once, such as a snapshot.

    Attributes:
        header: what can be written as JSON; ``header["nbytes"]`` is the length of the memory.
        memory: uint8, in host memory.
        checksum: `checksum_of` the memory.
    """

    header: dict[str, Any]
    memory: torch.Tensor
    checksum: int


@dataclass(frozen=True)
class BlockAddress:
    """Where a `BlockServer` listens, and the token that it requires."""

    host: str
    port: int
    token: bytes


class BlockServer:
    """Receives blocks.

    Args:
        host: address of this host at which to listen.
        allocate: header -> memory of ``header["nbytes"]`` bytes for the block; None refuses it.
        keep: called with each block that has arrived completely. It may refuse it by raising an OSError.
        name: what the blocks are, for the threads' names and the log.

    Attributes:
        address: what `send_block` needs.
    """

    def __init__(
        self,
        host: str,
        allocate: Callable[[dict[str, Any]], torch.Tensor | None],
        keep: Callable[[Block], None],
        name: str = "snapshot",
    ) -> None:
        self._allocate, self._keep, self._name = allocate, keep, name
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, 0), family=family, backlog=64)
        self.address = BlockAddress(host, self._listener.getsockname()[1], secrets.token_bytes(TOKEN_BYTES))
        threading.Thread(target=self._serve, name=f"{name}-server", daemon=True).start()

    def close(self) -> None:
        """Stop listening. Blocks that are on their way still arrive."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # close() alone would not wake the thread in accept()
        self._listener.close()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError as error:
                if self._listener.fileno() < 0 or isinstance(error, ValueError) or error.errno == 22:
                    return  # closed, or shut down
                time.sleep(1)  # the process has too many open files, for example
                continue
            name = f"{self._name}-receive"
            threading.Thread(target=self._receive, args=(connection,), name=name, daemon=True).start()

    def _receive(self, connection: socket.socket) -> None:
        try:
            with connection:
                connection.settimeout(IDLE_SECONDS)
                if not hmac.compare_digest(_read(connection, TOKEN_BYTES), self.address.token):
                    raise TransportError("wrong token")
                (length,) = _LENGTH.unpack(_read(connection, _LENGTH.size))
                if length > MAX_HEADER_BYTES:
                    raise TransportError(f"a header of {length} bytes")
                header = json.loads(_read(connection, length))
                memory = self._allocate(header)
                if memory is None:
                    raise TransportError("nobody needs it any more")
                checksum = 0
                for part in _chunks(memory):
                    _read_into(connection, part)
                    checksum = zlib.crc32(part, checksum)
                if checksum != _CHECKSUM.unpack(_read(connection, _CHECKSUM.size))[0]:
                    raise TransportError("its checksum is wrong")
                self._keep(Block(header, memory, checksum))
                connection.sendall(KEPT)
        except (OSError, ValueError) as error:
            logger.warning("a %s of another rank was not received: %s: %s", self._name, type(error).__name__, error)


def send_block(address: BlockAddress, header: dict[str, Any], memory: torch.Tensor, end: float) -> int:
    """Send a block, and wait until the receiver has kept it.

    Args:
        address: of the receiver.
        header: see `Block`.
        memory: see `Block`. It must not change meanwhile.
        end: when to give up, as `time.monotonic` counts.

    Returns:
        The checksum.

    Raises:
        OSError: it could not be sent in time, or the receiver has refused it.
    """
    encoded = json.dumps(header).encode()
    checksum = 0
    with socket.create_connection((address.host, address.port), timeout=_left(end)) as connection:
        connection.sendall(address.token + _LENGTH.pack(len(encoded)) + encoded)
        for part in _chunks(memory):
            connection.settimeout(_left(end))  # of this part as a whole
            connection.sendall(part)
            checksum = zlib.crc32(part, checksum)
        connection.sendall(_CHECKSUM.pack(checksum))
        connection.settimeout(_left(end))
        if connection.recv(1) != KEPT:
            raise TransportError("the receiver has refused it; its log has the reason")
    return checksum


def checksum_of(memory: torch.Tensor) -> int:
    """Return the CRC-32 of host memory (uint8). Other threads run meanwhile."""
    checksum = 0
    for part in _chunks(memory):
        checksum = zlib.crc32(part, checksum)
    return checksum


def _chunks(memory: torch.Tensor) -> Iterator[memoryview]:
    view = memory.numpy().data
    return (view[begin : begin + CHUNK_BYTES] for begin in range(0, len(view), CHUNK_BYTES))


def _left(end: float) -> float:
    left = end - time.monotonic()
    if left <= 0:
        raise TimeoutError("the time is over")
    return left


def _read(connection: socket.socket, nbytes: int) -> bytes:
    read = bytearray(nbytes)
    _read_into(connection, memoryview(read))
    return bytes(read)


def _read_into(connection: socket.socket, view: memoryview) -> None:
    while view:
        got = connection.recv_into(view)
        if not got:
            raise TransportError("the connection was closed")
        view = view[got:]
