"""The handshake with which a connection of the lane begins. See `single_controller.ray.lane`.

Each side shows that it has the token of the start message, which came through Ray, without sending it:

1. The driver sends a nonce.
2. The rank sends its key, a nonce of its own, and the HMAC of both nonces and the key.
3. The driver sends another HMAC of them.
"""

from __future__ import annotations

import hmac
import secrets
from typing import NamedTuple

MAX_BYTES = 128
"""More than any message of the handshake has."""

KEY_BYTES = NONCE_BYTES = 16


class LaneAddress(NamedTuple):
    """Where a driver listens for the ranks that it starts.

    Attributes:
        address: address of the driver's node, or 127.0.0.1.
        port: the port.
        token: what both sides know, 32 random bytes.
    """

    address: str
    port: int
    token: bytes


class HandshakeError(Exception):
    """The peer does not know the token, or is no rank that is expected."""


class Handshake:
    """One side of a handshake. It sends nothing itself.

    Args:
        token: what the peer must know too.
        key: the rank's key, 16 bytes; empty on the driver's side, which learns it.

    Attributes:
        key: the rank's key.
        nonce: this side's nonce, 16 bytes. The driver sends it first.
        complete: whether the peer has shown that it knows the token.
    """

    def __init__(self, token: bytes, key: bytes = b"") -> None:
        self.key = key
        self.nonce = secrets.token_bytes(NONCE_BYTES)
        self.complete = False
        self._token = token
        self._of_driver: bytes | None = None if key else self.nonce
        self._of_rank = self.nonce if key else b""
        self._is_rank = bool(key)

    def respond(self, message: bytes) -> bytes:
        """Take the peer's next message.

        Returns:
            What to send; empty for nothing.

        Raises:
            HandshakeError: the peer does not know the token.
        """
        if self._is_rank and self._of_driver is None:
            self._of_driver = message
            return self.key + self.nonce + self._proof(b"rank")
        proof = message
        if not self._is_rank:
            self.key, self._of_rank = message[:KEY_BYTES], message[KEY_BYTES : KEY_BYTES + NONCE_BYTES]
            proof = message[KEY_BYTES + NONCE_BYTES :]
        if not hmac.compare_digest(proof, self._proof(b"driver" if self._is_rank else b"rank")):
            raise HandshakeError("its token is wrong")
        self.complete = True
        return b"" if self._is_rank else self._proof(b"driver")

    def _proof(self, side: bytes) -> bytes:
        # The sizes are fixed: a nonce of another size, and so any other division of these bytes, is no nonce.
        nonces = self._of_driver or b"", self._of_rank, self.key
        if {len(nonce) for nonce in nonces} != {NONCE_BYTES}:
            raise HandshakeError("it does not follow the protocol")
        return hmac.digest(self._token, side + b"".join(nonces), "sha256")
