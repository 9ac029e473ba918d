"""What the kinds of rounds have in common."""

import time
from typing import NamedTuple


class Seen(NamedTuple):
    """What a round has seen. None: it does not apply.

    Attributes:
        told: seconds from the kill until the driver was told.
        back: seconds from then until the work went on.
        repeated: steps that were repeated.
        lost: prompts that were lost.
        twice: prompts that were trained twice.
    """

    told: float | None
    back: float
    repeated: int | None = None
    lost: int | None = None
    twice: int | None = None


def wait(condition, what, seconds=30.0):
    """Wait until the condition holds.

    Raises:
        AssertionError: it does not hold after some seconds.
    """
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, what
        time.sleep(0.02)


def shares(total, weights):
    """Divide a number of rounds among kinds in proportion to their weights; the heaviest get what is left over."""
    counts = {kind: total * weight // sum(weights.values()) for kind, weight in weights.items()}
    for kind in sorted(weights, key=weights.get, reverse=True)[: total - sum(counts.values())]:
        counts[kind] += 1
    return counts
