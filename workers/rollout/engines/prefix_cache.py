"""PrefixCache: keys and values of requests that have ended, for requests that begin with the same tokens."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import torch

    from workers.rollout.engines.rollout_engine import RoutedExperts

BLOCK = 16
"""Tokens that are looked up together. A shorter prefix is not found."""


class KeysValues(NamedTuple):
    """Of some tokens in one layer: each (1, heads, tokens, size)."""

    keys: torch.Tensor
    values: torch.Tensor

    def first(self, count: int) -> KeysValues:
        """Views of those of the first tokens."""
        return KeysValues(self.keys[:, :, :count], self.values[:, :, :count])


@dataclass(eq=False)
class Prefix:
    """Tokens with their keys and values in each layer, and the experts that computed these, if they are recorded."""

    token_ids: array[int]
    layers: Sequence[KeysValues]
    experts: RoutedExperts | None = None

    @property
    def nbytes(self) -> int:
        """Memory of the keys and values."""
        return sum(tensor.nbytes for layer in self.layers for tensor in layer)


class PrefixCache:
    """Keeps keys and values within a limit, and drops the least recently used ones. Not thread-safe.

    Args:
        max_bytes: memory for keys and values, on the model's device; 0 keeps nothing.

    Attributes:
        nbytes: memory in use.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes, self.nbytes = max_bytes, 0
        self._kept: dict[Prefix, None] = {}
        """The least recently used one first."""
        self._blocks: dict[int, Prefix] = {}
        """Hash of the tokens up to the end of a block -> of those that begin with them, the most recently used one. So
        one that is dropped takes no block from another."""

    def find(self, token_ids: Sequence[int]) -> tuple[Prefix | None, int]:
        """Return the entry that has the most first tokens in common with a prompt, and how many: less than all, because
        the last token has to be computed. ``(None, 0)`` if there is none."""
        given, found = array("i", token_ids), None
        for key in _keys(given):
            if key not in self._blocks:
                break
            found = self._blocks[key]
        if found is None:
            return None, 0
        count = min(len(found.token_ids), len(given) - 1)
        own = found.token_ids[:count]
        if own != given[:count]:  # the key is a hash, so the tokens are compared
            count = next(at for at, token in enumerate(own) if token != given[at])
        self._use(found)
        return (found, count) if count else (None, 0)

    def add(self, token_ids: Sequence[int], layers: Sequence[KeysValues], experts: RoutedExperts | None = None) -> None:
        """Keep keys and values. They replace those of tokens that these begin with.

        Args:
            token_ids: the tokens.
            layers: their keys and values, which must be no views of larger tensors.
            experts: of the tokens; None if they are not recorded.
        """
        made = Prefix(array("i", token_ids), layers, experts)
        if len(made.token_ids) < BLOCK or made.nbytes > self.max_bytes:
            return
        for other in {self._blocks[key]: None for key in _keys(made.token_ids) if key in self._blocks}:
            shorter = min(len(other.token_ids), len(made.token_ids))
            if other.token_ids[:shorter] == made.token_ids[:shorter]:
                if shorter == len(made.token_ids):  # there is one that has all of them
                    self._use(other)
                    return
                self._drop(other)
        self._kept[made] = None
        self.nbytes += made.nbytes
        self._use(made)
        while self.nbytes > self.max_bytes:
            self._drop(next(iter(self._kept)))

    def clear(self) -> None:
        """Drop all: they are of other weights, or the memory is needed."""
        self._kept.clear()
        self._blocks.clear()
        self.nbytes = 0

    def _use(self, prefix: Prefix) -> None:
        self._kept[prefix] = self._kept.pop(prefix)
        self._blocks.update(dict.fromkeys(_keys(prefix.token_ids), prefix))

    def _drop(self, prefix: Prefix) -> None:
        del self._kept[prefix]
        self.nbytes -= prefix.nbytes
        for key in _keys(prefix.token_ids):
            if self._blocks.get(key) is prefix:
                del self._blocks[key]


def _keys(token_ids: array[int]) -> Iterator[int]:
    """A hash for each whole block, of all tokens up to its end."""
    key = 0
    for end in range(BLOCK, len(token_ids) + 1, BLOCK):
        key = hash((key, *token_ids[end - BLOCK : end]))
        yield key
