"""Derive a seed from several numbers."""

from __future__ import annotations

import hashlib


def mixed_seed(*numbers: int) -> int:
    """Mix numbers into a seed from 0 to 2^63 - 1, the same in every process. A hash is used because torch's CPU
    generator uses only the lower 32 bits: any difference in the numbers must change those as well."""
    text = " ".join(map(str, numbers)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest()) >> 1
