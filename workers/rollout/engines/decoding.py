"""Decoding: a batch of requests and its keys and values, one forward pass after another."""

from __future__ import annotations

import inspect
import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import repeat
from typing import Any

import torch
from transformers.cache_utils import DynamicCache, DynamicLayer

from workers.algorithms.token_log_probs import token_log_probs
from workers.hf_routing import Routers
from workers.rollout.engines.prefix_cache import KeysValues, Prefix, PrefixCache
from workers.rollout.engines.request_engine import Request
from workers.rollout.engines.rollout_engine import RoutedExperts, SamplingParams

SPARSE = 0.75
"""Rows that have ended are removed when this share of the rows is left. That copies all keys and values."""

ROOM = 128
"""Maximum number of columns that are allocated ahead. When they are full, all keys and values are copied."""

WASTE = 256
"""Maximum number of padding tokens in a forward pass of prompts. Prompts that would add more get another pass."""


@dataclass(eq=False)
class Row:
    """A request in a batch.

    Attributes:
        request: its tokens so far are those that were recorded.
        generator: of its random numbers; None before the first token.
        filled: number of its tokens with keys and values in the batch's cache, which are the cache's last columns; -1
            once it has ended, since later columns are of no token of its.
        experts: of these tokens; None if they are not recorded.
    """

    request: Request
    generator: torch.Generator | None = None
    filled: int = 0
    experts: RoutedExperts | None = None

    @property
    def tokens(self) -> list[int]:
        return self.request.prompt + self.request.token_ids

    @property
    def length(self) -> int:
        return len(self.request.prompt) + len(self.request.token_ids)


class _Prompt:
    """Rows with equal tokens, which are computed once.

    Args:
        rows: at least one.

    Attributes:
        tokens: of each.
        length: the number of the tokens.
        prefix: keys and values with which they begin.
        known: how many of its tokens are theirs.
    """

    def __init__(self, rows: list[Row]) -> None:
        self.rows, self.tokens, self.length = rows, rows[0].tokens, rows[0].length
        self.prefix: Prefix | None = None
        self.known = 0

    @property
    def new(self) -> int:
        """How many tokens have to be computed."""
        return self.length - self.known


class Batch:
    """Requests that generate together. Rows are padded on the left, so that their last tokens are in one column.

    Rows can join a batch that is running, and equal prompts are computed once, if the model has an ordinary key/value
    cache. With any other cache (sliding windows, recurrent states), or none, a batch keeps its rows until all have
    ended.

    Args:
        model: a causal language model of transformers.
        device: of the model while it generates.
        routers: of the model, to record which experts it chooses; None to record nothing.

    Attributes:
        prefixes: gets the keys and values of rows that end, and has those with which rows begin; None to compute each
            row from its first token. Not used if the key/value cache is not an ordinary one.
    """

    def __init__(self, model: Any, device: torch.device, routers: Routers | None = None) -> None:
        self._model, self._device, self._routers = model, device, routers
        self.prefixes: PrefixCache | None = None
        self._rows: list[Row] = []
        """Rows of the cache. Those of requests that have ended stay until `remove_ended`."""
        self._added: list[Row] = []
        """Rows without keys and values."""
        self._cache: Any = None
        self._width = 0
        """Number of columns of the cache."""
        self._capacity = 0
        known = inspect.signature(model.forward).parameters
        self._options = {"logits_to_keep": 1} if "logits_to_keep" in known else {}
        self._takes_positions = "position_ids" in known
        self._takes_cache = "past_key_values" in known

    def __len__(self) -> int:
        """How many rows have not ended."""
        return sum(not row.request.ended for row in self._rows + self._added)

    @property
    def open(self) -> bool:
        """Whether rows may be added now."""
        return not len(self) or self._ordinary

    @cached_property
    def _ordinary(self) -> bool:
        if not self._takes_cache:
            return False
        layers = getattr(self._forward([[0]], [1], 1).past_key_values, "layers", [None])
        return all(type(layer) is DynamicLayer and layer.keys is not None for layer in layers)

    def add(self, requests: Sequence[Request]) -> None:
        """Begin with these requests at the next step."""
        self._added += map(Row, requests)

    def forget(self) -> None:
        """Free the keys and values. The next step computes them again."""
        self._added = [row for row in self._rows if not row.request.ended] + self._added
        self._rows, self._cache = [], None

    @torch.inference_mode()
    def step(
        self,
    ) -> tuple[list[Request], list[int], list[float], list[Sequence[int]], list[RoutedExperts | None]]:
        """Draw the next token of each request. The caller records it before the next step.

        Returns:
            The requests, of each what `sample` returns, and the experts of the tokens that were computed for it.
        """
        self.remove_ended()
        logits: list[torch.Tensor] = []
        experts: list[RoutedExperts | None] = []
        if self._rows:
            lengths = [row.length for row in self._rows]
            # Rows are aligned at their ends, so the last token of each gets the same new column.
            self._width += 1
            last = [row.request.token_ids[-1:] for row in self._rows]
            made, of_rows = self._recorded(last, lengths, self._width, self._cache)
            logits.append(made.logits[:, -1])
            experts += of_rows
        if self._added:
            of_added, of_rows = self._prefill()
            logits += of_added
            experts += of_rows
        if not logits:  # all requests were aborted a moment ago
            return [], [], [], [], []
        # The cache contains keys and values of the tokens so far, without those that this step draws.
        for row, of_row in zip(self._rows, experts, strict=True):
            if row.filled < 0:
                continue
            if of_row is not None and row.experts is not None and len(of_row) < row.length:  # the last token's
                row.experts.ids.extend(of_row.ids)
            elif of_row is not None:
                row.experts = of_row.of_tokens(0)
            row.filled = row.length
        requests, scores = [row.request for row in self._rows], torch.cat(logits)
        generators = [self._generator(row, scores.shape[-1]) for row in self._rows]
        # A model without a cache computes whole rows in each step, as if they had just been added.
        if self._cache is None:
            self.forget()
        return requests, *sample(scores, [request.sampling_params for request in requests], generators), experts

    def _generator(self, row: Row, vocabulary: int) -> torch.Generator:
        """The generator of a row, whose first tokens this process or another one may have drawn. The random numbers are
        drawn on the model's device, and differ between devices."""
        if row.generator is None:
            request = row.request
            # It takes no larger seeds; -1 is 2**64 - 1 to it too.
            row.generator = torch.Generator(self._device).manual_seed(request.seed % 2**64)
            noise = torch.empty(vocabulary, device=self._device)
            for _ in range(len(request.token_ids) if request.sampling_params.temperature else 0):
                noise.exponential_(generator=row.generator)  # not in one call: on a GPU that would be other numbers
        return row.generator

    @torch.inference_mode()
    def remove_ended(self) -> None:
        """Free the keys and values of rows that have ended, after the prefixes have got them."""
        self._added = [row for row in self._added if not row.request.ended]
        prefixes = self.prefixes if self._cache is not None and self._ordinary else None
        for place, row in enumerate(self._rows):
            if row.request.ended and row.filled > 0:
                # Now or never, since the next forward pass writes into all rows.
                if prefixes is not None:
                    own = slice(place, place + 1), slice(None), slice(self._width - row.filled, self._width)
                    layers = self._cache.layers
                    kept = [KeysValues(layer.keys[own].clone(), layer.values[own].clone()) for layer in layers]
                    prefixes.add(row.tokens[: row.filled], kept, row.experts)
                row.filled = -1
        live = [place for place, row in enumerate(self._rows) if not row.request.ended]
        if not live:
            self._rows, self._cache = [], None
        elif self._ordinary and (
            len(live) <= SPARSE * len(self._rows)
            or (self._added and len(live) < len(self._rows))  # so that they do not count as rows of the batch
            or self._width == self._capacity
        ):
            self._rows = [self._rows[place] for place in live]
            # Subtract 1, because the next forward pass computes and adds the column of each row's last token.
            self._join([(self._cache, live)], max(row.length for row in self._rows) - 1)

    def _prefill(self) -> tuple[list[torch.Tensor], list[RoutedExperts | None]]:
        """Compute the keys and values of the rows that were added. Returns the logits of their last tokens, and the
        experts of all."""
        alike: dict[Any, list[Row]] = {}
        for number, row in enumerate(self._added):
            alike.setdefault(tuple(row.tokens) if self._ordinary else number, []).append(row)
        added = [_Prompt(rows) for rows in alike.values()]
        if self.prefixes is not None and self._ordinary:
            for prompt in added:
                prompt.prefix, prompt.known = self.prefixes.find(prompt.tokens)
        passes: list[list[_Prompt]] = []
        waste = 0
        for prompt in sorted(added, key=lambda prompt: (prompt.new, prompt.length), reverse=True):
            if passes:
                waste += passes[-1][0].new - prompt.new
            if not passes or (waste > WASTE and self._ordinary):
                passes.append([])
                waste = 0
            passes[-1].append(prompt)
        logits, parts, experts = [], [], []
        if self._rows:
            parts.append((self._cache, list(range(len(self._rows)))))
        for one in passes:
            made, of_rows = self._prefill_pass(one)
            places = [place for place, prompt in enumerate(one) for _ in prompt.rows]
            experts += [of_rows[place] for place in places]
            logits.append(made.logits[:, -1][places])
            parts.append((getattr(made, "past_key_values", None), places))
            self._rows = self._rows + [row for prompt in one for row in prompt.rows]
        self._added = []
        width = max(row.length for row in self._rows)
        if self._ordinary:
            self._join(parts, width)
        else:
            ((self._cache, _),) = parts
            self._width = width
        return logits, experts

    def _prefill_pass(self, prompts: Sequence[_Prompt]) -> tuple[Any, list[RoutedExperts | None]]:
        """One forward pass. Each prompt computes as many tokens as the first one, which has the most new ones, so that
        all end in the last column and none has a gap: those with fewer new ones take less of their prefix."""
        lengths = [prompt.length for prompt in prompts]
        new, width = prompts[0].new, max(lengths)
        taken = [max(0, prompt.length - new) if prompt.prefix else 0 for prompt in prompts]
        cache = None
        if longest := max(taken):
            cache = DynamicCache()
            some = next(prompt.prefix.layers for prompt in prompts if prompt.prefix)
            kept = [prompt.prefix.layers if prompt.prefix else some for prompt in prompts]
            row = torch.zeros(1, dtype=torch.int64, device=self._device)
            cache.layers = [
                _RoomyLayer([(layer.first(count), row) for layer, count in zip(of, taken, strict=True)], longest, new)
                for of in zip(*kept, strict=True)
            ]
        tokens = [prompt.tokens[count:] for prompt, count in zip(prompts, taken, strict=True)]
        made, experts = self._recorded(tokens, lengths, width, cache)
        for at, (prompt, count) in enumerate(zip(prompts, taken, strict=True)):
            own = experts[at]
            if own is not None and prompt.prefix and prompt.prefix.experts is not None:
                whole = prompt.prefix.experts.of_tokens(0, count)
                whole.ids.extend(own.ids)
                experts[at] = whole
        return made, experts

    def _join(self, parts: Sequence[tuple[Any, list[int]]], width: int) -> None:
        """Make one cache of some rows of several. It has ``width`` columns, and room for more."""
        room = max(1, min(ROOM, max(row.request.remaining for row in self._rows)))
        layers = zip(*(cache.layers for cache, _ in parts), strict=True)
        places = [torch.tensor(places, device=self._device) for _, places in parts]
        cache = parts[-1][0]
        cache.layers = [_RoomyLayer(list(zip(of, places, strict=True)), width, room) for of in layers]
        self._cache, self._width, self._capacity = cache, width, width + room

    def _recorded(
        self, tokens: Sequence[Sequence[int]], lengths: Sequence[int], width: int, cache: Any = None
    ) -> tuple[Any, list[RoutedExperts | None]]:
        """`_forward`, and the experts of each row's tokens."""
        if self._routers is None:
            return self._forward(tokens, lengths, width, cache), [None] * len(tokens)
        self._routers.record()
        made = self._forward(tokens, lengths, width, cache)
        new = max(map(len, tokens))
        found = self._routers.recorded().cpu()[: len(tokens) * new].unflatten(0, (len(tokens), new)).numpy()
        return made, [
            RoutedExperts(array("h", of_row[new - len(row) :].tobytes()), *of_row.shape[1:])
            for of_row, row in zip(found, tokens, strict=True)
        ]

    def _forward(self, tokens: Sequence[Sequence[int]], lengths: Sequence[int], width: int, cache: Any = None) -> Any:
        """Run the model.

        Args:
            tokens: of each row, without those in the cache.
            lengths: of each row, with those in the cache.
            width: of the longest row, with those in the cache.
            cache: None for a new one.
        """
        new = max(map(len, tokens))
        ids = torch.tensor([[*repeat(0, new - len(row)), *row] for row in tokens], device=self._device)
        begin = width - torch.tensor(lengths, device=self._device)[:, None]
        columns = torch.arange(width, device=self._device)
        options: dict[str, Any] = dict(self._options)
        if self._takes_positions:
            options["position_ids"] = (columns[-new:] - begin).clamp_(min=0)
        if self._takes_cache:
            options["past_key_values"] = cache
        mask = None if min(lengths) == width else (columns >= begin).long()  # without one, attention is faster
        return self._model(input_ids=ids, attention_mask=mask, use_cache=self._takes_cache, **options)


class _RoomyLayer(DynamicLayer):
    """Keys and values with room for more tokens: transformers' layer copies all of them for each token.

    Args:
        parts: layers, or `KeysValues`, and the rows to take from each.
        width: number of columns. Layers with more lose columns on the left, those with fewer are padded there.
        room: number of columns for more tokens.
    """

    def __init__(self, parts: Sequence[tuple[Any, torch.Tensor]], width: int, room: int) -> None:
        super().__init__()
        self.dtype, self.device = parts[0][0].keys.dtype, parts[0][0].keys.device
        self.is_initialized = True
        self._all_keys = _joined([(layer.keys, rows) for layer, rows in parts], width, room)
        self._all_values = _joined([(layer.values, rows) for layer, rows in parts], width, room)
        self.keys: torch.Tensor = self._all_keys[:, :, :width]
        self.values: torch.Tensor = self._all_values[:, :, :width]

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        begin = self.keys.shape[-2]
        end = begin + key_states.shape[-2]
        self._all_keys[:, :, begin:end] = key_states
        self._all_values[:, :, begin:end] = value_states
        self.keys, self.values = self._all_keys[:, :, :end], self._all_values[:, :, :end]
        return self.keys, self.values


def _joined(parts: Sequence[tuple[torch.Tensor, torch.Tensor]], width: int, room: int) -> torch.Tensor:
    _, heads, _, size = parts[0][0].shape
    # Zeros, because padding counts with probability 0, and 0 times what is in unused memory may be NaN.
    whole = parts[0][0].new_zeros(sum(len(rows) for _, rows in parts), heads, width + room, size)
    begin = 0
    for tensor, rows in parts:
        columns = min(width, tensor.shape[-2])
        whole[begin : begin + len(rows), :, width - columns : width] = tensor[:, :, -columns:].index_select(0, rows)
        begin += len(rows)
    return whole


def sample(
    logits: torch.Tensor, sampling_params: Sequence[SamplingParams], generators: Sequence[torch.Generator]
) -> tuple[list[int], list[float], list[Sequence[int]]]:
    """Draw the next token of each row.

    Adding Gumbel noise to log-probabilities and taking the argmax samples from the distribution. The draw does not
    depend on other rows' random numbers, and small differences in the logits (another batch, other padding) rarely
    change it.

    Args:
        logits: (rows, vocabulary).
        sampling_params: of each row.
        generators: of each row.

    Returns:
        The tokens, their log-probabilities, see `Completion`, and the tokens that each was drawn from, see
        `SamplingMask`: none where nothing was left out.
    """
    alike: dict[tuple[float, int, float, float], list[int]] = {}
    for row, how in enumerate(sampling_params):
        alike.setdefault((how.temperature, how.top_k, how.top_p, how.min_p), []).append(row)
    tokens = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
    log_probs = torch.empty(len(logits), device=logits.device)
    kept: list[Sequence[int]] = [()] * len(logits)
    for (temperature, top_k, top_p, min_p), rows in alike.items():
        where: torch.Tensor | slice = slice(None) if len(alike) == 1 else torch.tensor(rows, device=logits.device)
        of_model = torch.log_softmax(logits[where].float() / (temperature or 1.0), dim=-1)
        left = truncated(of_model, top_k, top_p, min_p) if temperature else of_model
        noisy = _with_noise(left, [generators[row] for row in rows]) if temperature else of_model
        chosen = noisy.argmax(dim=-1)
        sets = None
        if left is not of_model:
            places = left.isfinite()
            sets = places.nonzero()[:, 1].int(), places.sum(-1)
            of_rows = sets[0].cpu().split(sets[1].tolist())
            for row, of_row in zip(rows, of_rows, strict=True):
                kept[row] = array("i", of_row.numpy().tobytes())
        # The trainer's own function, so that both round alike.
        tokens[where] = chosen
        log_probs[where], _ = token_log_probs(logits[where], chosen, temperature=temperature, sampling_mask=sets)
    return tokens.tolist(), log_probs.tolist(), kept


def _with_noise(log_probs: torch.Tensor, generators: Sequence[torch.Generator]) -> torch.Tensor:
    noise = torch.empty_like(log_probs)
    for row, generator in zip(noise, generators, strict=True):
        row.exponential_(generator=generator)
    smallest = torch.finfo(noise.dtype).tiny  # log(0) would win, whatever the token's probability
    return log_probs - noise.clamp_(min=smallest).log_()


def truncated(log_probs: torch.Tensor, top_k: int, top_p: float, min_p: float = 0.0) -> torch.Tensor:
    """Set log-probabilities to -inf outside ``top_k`` and ``min_p``, then outside ``top_p`` of the renormalized rest.
    The most likely token always stays.

    Args:
        log_probs: (rows, vocabulary).
        top_k: number of tokens to keep; 0 for all.
        top_p: probability to keep; 1 for all.
        min_p: lowest probability to keep, as a share of the most likely token's; 0 for all.

    Returns:
        (rows, vocabulary), not renormalized.
    """
    vocabulary = log_probs.shape[-1]
    kept = min(top_k or vocabulary, vocabulary)
    if kept == vocabulary and top_p >= 1 and min_p <= 0:
        return log_probs
    best, tokens = log_probs.topk(kept, dim=-1)
    if min_p > 0:
        best = best.masked_fill(best < best[:, :1] + math.log(min_p), -torch.inf)
    if top_p < 1:
        probs = best.softmax(-1)
        best = best.masked_fill(probs.cumsum(-1) - probs >= top_p, -torch.inf)
        best[:, 0] = log_probs.amax(-1)  # rounding must not remove the last token
    return torch.full_like(log_probs, -torch.inf).scatter_(1, tokens, best)
