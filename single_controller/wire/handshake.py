"""The handshake with which each connection begins, and the kinds of frames.

Each side shows that it has the rank's key, which travels with its location inside Ray, without sending it:

1. The rank sends a nonce.
2. The driver sends a nonce of its own, the id of its session, and the HMAC of both nonces and that id.
3. The rank sends another HMAC of them, and the number of the last call of that session which has arrived; -1 if it does
   not know that session.
"""

from __future__ import annotations

import hmac
import secrets
import struct
from typing import NamedTuple

NONCE_BYTES = SESSION_BYTES = 16
KEY_BYTES = 32
MAX_HANDSHAKE_BYTES = 128
"""More than any frame of the handshake has: a stranger cannot make the other side keep more."""


class Kind:
    """Kinds of frames. The numbers are those of calls or commands."""

    NONCE, HELLO, WELCOME = range(3)  # the handshake: from the rank, from the driver, from the rank
    # To the rank: a method, one that runs beside others, or a rank's place in the group and its constructors
    CALL, CONCURRENT, JOIN = range(3, 6)
    # To the driver: a reply; one whose value is large and stays on the rank, or of which the rank keeps a copy because
    # of ``WANT``; one that stays there whole
    REPLY, KEPT, BESIDE = range(6, 9)
    # To the rank: forget the reply to one call; do not wait for the arguments of a call, which are lost; drop what was
    # kept of a call; keep a copy of its reply, for a task that fetches it; the deferred arguments of a call
    ACK, CANCEL, DROP, WANT, INPUTS = range(9, 14)
    COMMAND, ANSWER = range(14, 16)  # to the rank and back


_RECEIVED = struct.Struct("<q")

HELLO_BYTES = NONCE_BYTES + SESSION_BYTES + 32
WELCOME_BYTES = 32 + _RECEIVED.size
"""Of the last two messages of the handshake. A proof has 32 bytes."""


class WireAddress(NamedTuple):
    """Where a rank takes calls and commands."""

    host: str  # the node's address
    port: int  # the port
    key: bytes  # what both sides know, 32 random bytes
    pid: int  # the process
    # the file in its ``/proc`` folder to which it writes its Python frames: see `frames_file`; -1 without
    frames: int = -1


class HandshakeError(ConnectionError):
    """The other side does not know the key, or does not follow the protocol."""


def new_nonce() -> bytes:
    """Return a nonce, or the id of a session."""
    return secrets.token_bytes(NONCE_BYTES)


def hello(key: bytes, of_rank: bytes, of_driver: bytes, session: bytes) -> bytes:
    """Return the driver's frame, in reply to the rank's nonce."""
    if len(of_rank) != NONCE_BYTES:
        raise HandshakeError("it does not follow the protocol")
    return of_driver + session + _proof(key, b"driver", of_rank, of_driver, session)


def welcome(key: bytes, of_rank: bytes, frame: bytes) -> tuple[bytes, bytes]:
    """Check the driver's frame.

    Returns:
        The session, and the rank's proof, which `welcomed` checks.

    Raises:
        HandshakeError: the driver does not know the key.
    """
    of_driver, session = frame[:NONCE_BYTES], frame[NONCE_BYTES : NONCE_BYTES + SESSION_BYTES]
    if not hmac.compare_digest(frame, hello(key, of_rank, of_driver, session)):
        raise HandshakeError("its key is wrong")
    return session, _proof(key, b"rank", of_rank, of_driver, session)


def received_text(proof: bytes, received: int) -> bytes:
    """Return the rank's last frame."""
    return proof + _RECEIVED.pack(received)


def welcomed(key: bytes, of_rank: bytes, of_driver: bytes, session: bytes, frame: bytes) -> int:
    """Check the rank's last frame. Returns the number of the last call that has arrived there, or -1.

    Raises:
        HandshakeError: the rank does not know the key: another process has its port now.
    """
    proof, rest = frame[: -_RECEIVED.size], frame[-_RECEIVED.size :]
    if not hmac.compare_digest(proof, _proof(key, b"rank", of_rank, of_driver, session)):
        raise HandshakeError("its key is wrong")
    received: int = _RECEIVED.unpack(rest)[0]
    return received


def _proof(key: bytes, side: bytes, *parts: bytes) -> bytes:
    return hmac.digest(key, side + b"".join(parts), "sha256")
