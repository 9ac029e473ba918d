"""Blocks of host memory from one process to another: snapshots, and buckets of weights.

A stream carries one block: the header as JSON, the bytes, and their checksum. The receiver answers with one byte when
it has kept the block. For the threads that receive, see `single_controller.wire.stream`. `send_block` runs in the
caller's thread.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from single_controller.wire.handshake import WireAddress
from single_controller.wire.stream import Stream, StreamListener, connect

CHUNK_BYTES = 4 << 20
MAX_HEADER_BYTES = 256 << 20

KEPT = b"+"
_LENGTH = struct.Struct("!Q")
_CHECKSUM = struct.Struct("!L")


class BlockError(ConnectionError):
    """The other side has refused a block, or has sent something else."""


@dataclass(frozen=True)
class Block:
    """What is sent at once, such as a snapshot.

    Attributes:
        header: what can be written as JSON; ``header["nbytes"]`` is the length of the memory.
        memory: uint8, in host memory.
        checksum: `checksum_of` the memory; None if it was not computed.
    """

    header: dict[str, Any]
    memory: torch.Tensor
    checksum: int | None


def receive_blocks(
    host: str,
    allocate: Callable[[dict[str, Any]], torch.Tensor | None],
    keep: Callable[[Block], None],
    name: str,
) -> StreamListener:
    """Receive blocks until the listener is closed. Blocks that are on their way then still arrive.

    Args:
        host: address of this host at which to listen.
        allocate: header -> memory of ``header["nbytes"]`` bytes for the block; None refuses it.
        keep: called with each block that has arrived completely. It may refuse it by raising an OSError.
        name: what the blocks are, for the threads' names and the log.
    """

    def receive(stream: Stream) -> None:
        (length,) = _LENGTH.unpack(stream.read(_LENGTH.size))
        if length > MAX_HEADER_BYTES:
            raise BlockError(f"a header of {length} bytes")
        header = json.loads(stream.read(length))
        memory = allocate(header)
        if memory is None:
            raise BlockError("nobody needs it any more")
        checksum = 0
        for part in _chunks(memory):
            stream.read_into(part)
            checksum = zlib.crc32(part, checksum)
        if checksum != _CHECKSUM.unpack(stream.read(_CHECKSUM.size))[0]:
            raise BlockError("its checksum is wrong")
        keep(Block(header, memory, checksum))
        stream.write(KEPT)

    return StreamListener(host, receive, name)


def send_block(address: WireAddress, header: dict[str, Any], memory: torch.Tensor, end: float) -> int:
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
    with connect(address, end) as stream:
        stream.write(_LENGTH.pack(len(encoded)) + encoded)
        for part in _chunks(memory):
            stream.write(part)
            checksum = zlib.crc32(part, checksum)
        stream.write(_CHECKSUM.pack(checksum))
        try:
            stream.read(len(KEPT))
        except ConnectionError as error:
            raise BlockError("the receiver has refused it; its log has the reason") from error
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
