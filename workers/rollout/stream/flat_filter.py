"""FlatFilter: which groups without variance of reward are filtered (dynamic sampling).

Pure Python. Dynamic sampling is from DAPO, https://arxiv.org/abs/2503.14476, section 3.2.
"""

from __future__ import annotations

import math
from typing import Any


class FlatFilter:
    """Decides for each flat group whether it is filtered or kept. Not safe for threads.

    Going through all numbers in order, a flat group is filtered if fewer than ``max_filtered`` were filtered since the
    last ``groups_per_batch`` groups were kept. So the decision depends on which numbers are flat, and not on when they
    arrive; it is made as soon as it is certain.

    Args:
        groups_per_batch: groups in a batch.
        max_filtered: limit for each batch. None: every flat group is filtered.

    Attributes:
        undecided: flat groups that have arrived and may be filtered or kept, depending on lower numbers.
    """

    def __init__(self, groups_per_batch: int, max_filtered: int | None) -> None:
        self._groups_per_batch = groups_per_batch
        self._limit = math.inf if max_filtered is None else max_filtered
        self.undecided: set[int] = set()
        self._flat: dict[int, bool] = {}
        """Whether the groups that have arrived are flat, from `_next` on."""
        self._next = 0
        """All lower numbers have arrived and are decided."""
        self._kept = 0
        self._filtered = 0
        """Of the numbers below `_next`, in the batch that is not full yet."""

    def arrive(self, number: int, flat: bool) -> list[int]:
        """Note that a group has arrived, and return the numbers that are filtered now.

        A group may arrive again after it was dropped. If it was kept or not flat the first time, it is kept.
        """
        if number < self._next:
            return []
        self._flat[number] = flat and self._flat.get(number, True)
        if self._flat[number]:
            self.undecided.add(number)
        filtered = []
        while self._next in self._flat:
            if self._flat.pop(self._next) and self._filtered < self._limit:
                self._filtered += 1
                if self._next in self.undecided:  # else it was filtered early
                    filtered.append(self._next)
            else:
                self._kept = (self._kept + 1) % self._groups_per_batch
                self._filtered = self._filtered if self._kept else 0
            self.undecided.discard(self._next)
            self._next += 1
        # Early: those that are within the limit even if all lower numbers turn out to be flat.
        most = self._filtered
        for other in range(self._next, max(self.undecided, default=-1) + 1):
            if self._flat.get(other, True):
                if other in self.undecided and most < self._limit:
                    self.undecided.discard(other)
                    filtered.append(other)
                most += 1
        return filtered

    def drop(self, number: int) -> None:
        """Forget an undecided group, which will arrive again."""
        if number in self.undecided:
            self.undecided.discard(number)
            del self._flat[number]

    def state_dict(self) -> dict[str, Any]:
        """Return the state, of numbers, lists and a dict."""
        state = {"next": self._next, "kept": self._kept, "filtered": self._filtered}
        return {**state, "flat": dict(self._flat), "undecided": sorted(self.undecided)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a state of `state_dict`."""
        self._next, self._kept, self._filtered = state["next"], state["kept"], state["filtered"]
        self._flat, self.undecided = dict(state["flat"]), set(state["undecided"])
