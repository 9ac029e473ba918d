"""Updates: which update of the weights a version came with. Pure Python, not safe for threads."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable


class Updates:
    """Numbers the updates with new weights from 1. Versions only grow; the number goes back with the trainer.

    Args:
        state: of `state_dict`; a list of versions numbers them from 1.
        shift: what to add to the versions of the state.
        count: see below; by default the last number of the state.

    Attributes:
        count: number of the update whose weights the trainer has sent last, or had when `rewind` was called.
        rewound: whether the next versions are those weights, sent again.
    """

    def __init__(self, state: Iterable[int | tuple[int, int]] = (), shift: int = 0, count: int | None = None) -> None:
        entries = [(one, number) if isinstance(one, int) else one for number, one in enumerate(state, 1)]
        self._versions = [version + shift for version, _ in entries]
        self._numbers = [number for _, number in entries]
        self.count = (self._numbers[-1] if entries else 0) if count is None else count
        self.rewound = self.behind

    @property
    def behind(self) -> bool:
        """Whether the last version has newer weights than the trainer."""
        return bool(self._numbers) and self.count < self._numbers[-1]

    def add(self, version: int, *, same_weights: bool = False) -> bool:
        """Note that the workers have a version, higher than all before. Returns whether its weights are new."""
        new = not self.count or not (same_weights or self.rewound)
        self.count += new
        self._versions.append(version)
        self._numbers.append(self.count)
        return new

    def of(self, version: int) -> int:
        """Return the number of the update whose weights a version has; 0 for those before the first update."""
        known = bisect_right(self._versions, version)
        return self._numbers[known - 1] if known else 0

    def rewind(self, count: int) -> None:
        """Note that the trainer has the weights of an earlier update again."""
        self.count, self.rewound = count, True

    def state_dict(self) -> list[tuple[int, int]]:
        """Return (version, number) of all versions."""
        return list(zip(self._versions, self._numbers, strict=True))
