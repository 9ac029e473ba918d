"""Decoding for exact mode; see `workers.exact`."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import repeat
from typing import Any

import torch
from transformers.cache_utils import DynamicCache, DynamicLayer

from workers.exact import COLUMNS, ExactError, least_rows, row_positions
from workers.rollout.engines.decoding import ROOM, Batch


class ExactBatch(Batch):
    """A `Batch` whose log-probabilities are a trainer's, bit for bit, whatever else is in the batch.

    Tokens of one row are always in the same columns of the cache: it begins at column 0. A prompt's forward pass pads
    on the left, as in `Batch`, and `exact_attention` moves its keys.

    Args:
        model: a causal language model of transformers, after `make_exact`.
        device: of the model while it generates.

    Raises:
        ExactError: the model has no ordinary key/value cache, or takes no positions.
    """

    def __init__(self, model: Any, device: torch.device) -> None:
        super().__init__(model, device)
        if not self._takes_positions or not self._takes_cache or not self._ordinary:
            raise ExactError(
                f"exact mode needs a model with position_ids and an ordinary key/value cache, which "
                f"{type(model).__name__} does not have"
            )

    def _forward(self, tokens: Sequence[Sequence[int]], lengths: Sequence[int], width: int, cache: Any = None) -> Any:
        count, new = len(tokens), max(map(len, tokens))
        spare = max(0, least_rows() - count)
        tokens = [*tokens, *([0] for _ in range(spare))]
        ids = torch.tensor([[*repeat(0, new - len(row)), *row] for row in tokens], device=self._device)
        last = torch.tensor([*lengths, *repeat(1, spare)], device=self._device) - 1
        positions = last[:, None]
        if new > 1:
            positions = (positions - torch.arange(new - 1, -1, -1, device=self._device)).clamp_(min=0)
        begin = None
        if cache is None:
            cache = DynamicCache()
            begin = new - 1 - last if spare or min(lengths) < new else None
        else:
            at = last[:, None, None, None]
            for layer in cache.layers:
                layer.at, layer.width = at, width
        with row_positions(positions, begin):
            made = self._model(
                input_ids=ids, position_ids=positions, past_key_values=cache, use_cache=True, **self._options
            )
        made.logits = made.logits[:count]
        return made

    def _join(self, parts: Sequence[tuple[Any, list[int]]], width: int) -> None:
        room = max(1, min(ROOM, max(row.request.remaining for row in self._rows)))
        capacity = -(-(width + room) // COLUMNS) * COLUMNS
        lacking = max(row.length for row in self._rows) - width  # 1 if the last tokens are not in the cache yet
        filled = [row.length - lacking for row in self._rows]
        layers = []
        for number in range(len(parts[-1][0].layers)):
            of = [(cache.layers[number], places) for cache, places in parts]
            layers.append(_AlignedLayer(of, filled, capacity))
        cache = parts[-1][0]
        cache.layers = layers
        self._cache, self._width, self._capacity = cache, width, capacity


class _AlignedLayer(DynamicLayer):
    """Keys and values of rows that all begin at column 0. Columns behind a row's last token are never read.

    Args:
        parts: layers, and the rows to take from each: of this class, or with rows that are padded on the left.
        filled: number of tokens of each row.
        capacity: number of columns to allocate.

    Attributes:
        at: (rows, 1, 1, 1) int64, the column of each row's next token; set before each forward pass.
        width: number of tokens of the longest row after it.
    """

    at: torch.Tensor
    width: int
    keys: torch.Tensor
    values: torch.Tensor

    def __init__(self, parts: Sequence[tuple[Any, list[int]]], filled: Sequence[int], capacity: int) -> None:
        super().__init__()
        first = parts[0][0]
        self.dtype, self.device = first.keys.dtype, first.keys.device
        self.is_initialized = True
        self._all_keys = _aligned([(part, part.keys, rows) for part, rows in parts], filled, capacity)
        self._all_values = _aligned([(part, part.values, rows) for part, rows in parts], filled, capacity)
        self._set_width(max(filled))

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self._all_keys.scatter_(2, self.at.expand_as(key_states), key_states)
        self._all_values.scatter_(2, self.at.expand_as(value_states), value_states)
        self._set_width(self.width)
        return self.keys, self.values

    def _set_width(self, width: int) -> None:
        end = -(-width // COLUMNS) * COLUMNS
        self.keys, self.values = self._all_keys[:, :, :end], self._all_values[:, :, :end]


def _aligned(
    parts: Sequence[tuple[Any, torch.Tensor, list[int]]], filled: Sequence[int], capacity: int
) -> torch.Tensor:
    _, heads, _, size = parts[0][1].shape
    whole = parts[0][1].new_zeros(max(len(filled), least_rows()), heads, capacity, size)
    first = 0
    for layer, tensor, rows in parts:
        columns = tensor.shape[-2]
        alike: dict[tuple[int, int], list[int]] = {}
        for at in range(first, first + len(rows)):
            begin = 0 if isinstance(layer, _AlignedLayer) else columns - filled[at]
            count = min(columns, capacity) if isinstance(layer, _AlignedLayer) else filled[at]
            alike.setdefault((begin, count), []).append(at)
        for (begin, count), places in alike.items():
            source = torch.tensor([rows[at - first] for at in places], device=tensor.device)
            whole[places, :, :count] = tensor[:, :, begin : begin + count].index_select(0, source)
        first += len(rows)
    return whole
