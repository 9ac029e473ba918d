"""What the kinds of rounds have in common."""

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


def shares(total, weights):
    """Divide a number of rounds among kinds in proportion to their weights; the heaviest get what is left over."""
    counts = {kind: total * weight // sum(weights.values()) for kind, weight in weights.items()}
    for kind in sorted(weights, key=weights.get, reverse=True)[: total - sum(counts.values())]:
        counts[kind] += 1
    return counts
