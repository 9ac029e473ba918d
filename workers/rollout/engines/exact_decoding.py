"""Decoding for exact mode, and the probe that compares it with a trainer; see `workers.exact`."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Sequence
from itertools import repeat
from typing import Any

import torch
from transformers.cache_utils import DynamicCache, DynamicLayer

from workers.algorithms.token_log_probs import next_token_log_probs
from workers.exact import COLUMNS, ExactError, exact_logits, least_rows, make_exact, row_positions
from workers.hf_files import compute_output_in_float32, make_model
from workers.hf_routing import Routers
from workers.rollout.engines.decoding import ROOM, Batch
from workers.rollout.engines.request_engine import Request
from workers.rollout.engines.rollout_engine import SamplingParams

PROBE_LAYERS = 2

_RANDOM_FIELDS = ("attention_dropout", "residual_dropout", "hidden_dropout", "embedding_dropout", "activation_dropout",
                  "resid_pdrop", "dropout", "layerdrop", "router_jitter_noise", "input_jitter_noise")  # fmt: skip
"""Fields of configs that make training random without a module for dropout."""

_Move = tuple[torch.Tensor, torch.Tensor, slice]
"""Rows of one cache, (n,) int64; the rows of another one that they become; and the columns to take."""


class ExactBatch(Batch):
    """A `Batch` whose log-probabilities are a trainer's, bit for bit, whatever else is in the batch.

    Tokens of one row are always in the same columns of the cache: it begins at column 0. A prompt's forward pass pads
    on the left, as in `Batch`, and `exact_attention` moves its keys.

    Args:
        model: a causal language model of transformers, after `make_exact`.
        device: of the model while it generates.
        routers: see `Batch`.

    Raises:
        ExactError: the model has no ordinary key/value cache, or takes no positions.
    """

    def __init__(self, model: Any, device: torch.device, routers: Routers | None = None) -> None:
        super().__init__(model, device, routers)
        if not self._takes_positions or not self._takes_cache or not self._ordinary:
            raise ExactError(
                f"exact mode needs a model with position_ids and an ordinary key/value cache, which "
                f"{type(model).__name__} does not have"
            )

    def _forward(self, tokens: Sequence[Sequence[int]], lengths: Sequence[int], width: int, cache: Any = None) -> Any:
        count, new = len(tokens), max(map(len, tokens))
        # A matrix product of few rows may sum in another order than one of many rows; see `least_rows`.
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
            at = None if min(lengths) == width else last[:, None, None, None]
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
        size, moves, first = max(len(filled), least_rows()), [], 0
        for part, rows in parts:
            moves.append(_moves(part.layers[0], rows, filled[first : first + len(rows)], first, capacity))
            first += len(rows)
        layers = [
            _AlignedLayer(list(zip(of, moves, strict=True)), max(filled), size, capacity)
            for of in zip(*(part.layers for part, _ in parts), strict=True)
        ]
        cache = parts[-1][0]
        cache.layers = layers
        self._cache, self._width, self._capacity = cache, width, capacity


class _AlignedLayer(DynamicLayer):
    """Keys and values of rows that all begin at column 0. Columns behind a row's last token are never read.

    Args:
        parts: layers, and the `_moves` of each: of this class, or with rows that are padded on the left.
        width: number of tokens of the longest row.
        rows: number of rows to allocate.
        capacity: number of columns to allocate.

    Attributes:
        at: (rows, 1, 1, 1) int64, the column of each row's next token; None if it is the last one for all. Set before
            each forward pass.
        width: number of tokens of the longest row after it.
    """

    at: torch.Tensor | None
    width: int
    keys: torch.Tensor
    values: torch.Tensor

    def __init__(self, parts: Sequence[tuple[Any, list[_Move]]], width: int, rows: int, capacity: int) -> None:
        super().__init__()
        first = parts[0][0]
        self.dtype, self.device = first.keys.dtype, first.keys.device
        self.is_initialized = True
        self._all_keys = _aligned([(layer.keys, moves) for layer, moves in parts], rows, capacity)
        self._all_values = _aligned([(layer.values, moves) for layer, moves in parts], rows, capacity)
        self._set_width(width)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        for whole, states in ((self._all_keys, key_states), (self._all_values, value_states)):
            if self.at is None:
                whole[:, :, self.width - 1 : self.width] = states
            else:
                whole.scatter_(2, self.at.expand_as(states), states)
        self._set_width(self.width)
        return self.keys, self.values

    def _set_width(self, width: int) -> None:
        end = -(-width // COLUMNS) * COLUMNS
        self.keys, self.values = self._all_keys[:, :, :end], self._all_values[:, :, :end]


def _moves(layer: Any, rows: Sequence[int], filled: Sequence[int], first: int, capacity: int) -> list[_Move]:
    """Return how to move rows of a part's layers to rows of new ones, so that they begin at column 0. It is the same
    for all layers.

    Args:
        layer: one of the part's.
        rows: of the part.
        filled: number of tokens of each.
        first: where the first one goes.
        capacity: number of columns there.
    """
    columns = layer.keys.shape[-2]
    alike: dict[tuple[int, int], list[int]] = {}
    for at, count in enumerate(filled):
        span = (0, min(columns, capacity)) if isinstance(layer, _AlignedLayer) else (columns - count, count)
        alike.setdefault(span, []).append(at)
    device = layer.keys.device
    return [
        (
            torch.tensor([rows[at] for at in places], device=device),
            torch.tensor([first + at for at in places], device=device),
            slice(begin, begin + count),
        )
        for (begin, count), places in alike.items()
    ]


def _aligned(parts: Sequence[tuple[torch.Tensor, list[_Move]]], rows: int, capacity: int) -> torch.Tensor:
    _, heads, _, size = parts[0][0].shape
    whole = parts[0][0].new_zeros(rows, heads, capacity, size)
    for tensor, moves in parts:
        for source, target, columns in moves:
            moved = tensor[:, :, columns].index_select(0, source)
            whole[:, :, : moved.shape[2]].index_copy_(0, target, moved)
    return whole


def probe(
    config: Any,
    dtype: torch.dtype,
    device: torch.device,
    *,
    trust_remote_code: bool = False,
    fp32_lm_head: bool = False,
) -> str:
    """Compare what an engine and a trainer compute, with a model of this config with random weights and at most
    `PROBE_LAYERS` layers: completions of prompts of several lengths that join a running batch and end one by one,
    against forward passes over all of them, over some and over each one alone.

    Args:
        config: the Hugging Face config.
        dtype: of the computation.
        device: of the computation.
        trust_remote_code: whether code that comes with the model may run.
        fp32_lm_head: whether the output layer is computed in float32.

    Returns:
        A digest of the log-probabilities: equal on machines that compute equal bits.

    Raises:
        ExactError: a log-probability differs, with how much and between what.
    """
    config = copy.deepcopy(config)
    text = config.get_text_config()
    text.num_hidden_layers = min(text.num_hidden_layers, PROBE_LAYERS)
    if "layer_types" in vars(text) and text.layer_types:
        text.layer_types = text.layer_types[: text.num_hidden_layers]
    model = make_model(config, True, 0, trust_remote_code)
    make_exact(model)
    dropout = max((one.p for one in model.modules() if isinstance(one, torch.nn.Dropout)), default=0.0)
    if dropout or any(getattr(text, name, 0.0) for name in _RANDOM_FIELDS):
        raise ExactError(
            f"exact mode does not go with the dropout of this {config.model_type!r} config, or jitter of its routers: "
            "training would compute other log-probabilities than the rollout did. Set them to 0"
        )
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    if fp32_lm_head:
        compute_output_in_float32(model)
    model.eval().requires_grad_(False).to(device)

    most = min(getattr(text, "max_position_embeddings", None) or COLUMNS + 8, COLUMNS + 8)
    # The longest row crosses a multiple of COLUMNS while it is decoded.
    sizes = [(min(length, most - count), count) for length, count in ((1, 8), (most, 12), (3, 2), (11, 5), (6, 1))]
    requests = [
        Request(str(row), [(7 * row + 3 * at) % text.vocab_size for at in range(length)], SamplingParams(count), row)
        for row, (length, count) in enumerate(sizes)
    ]
    batch = ExactBatch(model, device)
    batch.add(requests[:3])
    waiting = requests[3:]
    while len(batch):
        for request, token, log_prob in zip(*batch.step()[:3], strict=True):
            if not request.ended:
                request.token_ids.append(token)
                request.log_probs.append(log_prob)
                request.ended = request.remaining <= 0
        batch.add(waiting[:2])
        del waiting[:2]

    decoded = [torch.tensor(request.log_probs) for request in requests]
    rows = [torch.tensor(request.prompt + request.token_ids) for request in requests]
    with torch.no_grad():
        for name, size in (("all rows", len(rows)), ("three rows", 3), ("one row", 1)):
            for begin in range(0, len(rows), size):
                ids = torch.nn.utils.rnn.pad_sequence(rows[begin : begin + size], batch_first=True).to(device)
                positions = torch.arange(ids.shape[1], device=device).expand(ids.shape)
                found, _ = next_token_log_probs(exact_logits(model, ids, positions), ids)
                for row, of_row in enumerate(found.cpu(), begin):
                    prompt, length = len(requests[row].prompt), len(rows[row])
                    _compare(decoded[row], of_row[prompt:length], f"a forward pass over {name}", config, dtype)
    return hashlib.sha256(torch.cat(decoded).numpy().tobytes()).hexdigest()[:16]


def _compare(one: torch.Tensor, other: torch.Tensor, what: str, config: Any, dtype: torch.dtype) -> None:
    if torch.equal(one, other):
        return
    difference = (one - other).abs()
    raise ExactError(
        f"exact mode is not possible here: with a {config.model_type!r} model of this size in {dtype} and "
        f"{torch.get_num_threads()} threads, {int((difference > 0).sum())} of {len(one)} log-probabilities differ "
        f"between decoding and {what}, by up to {float(difference.max()):.1e}. Use one thread (OMP_NUM_THREADS=1) and "
        "float32, or set exact=False"
    )
