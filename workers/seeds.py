"""One seed from several numbers."""

from __future__ import annotations

import hashlib


def mixed_seed(*numbers: int) -> int:
    """A seed from 0 to 2^63 - 1, the same for the same numbers in every process. Numbers that differ in any way give
    seeds that differ in all places: torch's generator on the CPU looks at the lower 32 bits alone."""
    text = " ".join(map(str, numbers)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest()) >> 1
