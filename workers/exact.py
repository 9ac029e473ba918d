"""Exact mode: an engine and a trainer that compute the same log-probabilities, bit for bit.

Floating-point addition depends on its order, and most kernels choose an order by the shape of their input. A token's
log-probability then differs in its last bits between decoding with a key/value cache and a full forward pass, and
between batches. In exact mode both sides use operations whose result for one token does not depend on what else is
computed with it:

- Linear layers, on a CPU: the kernels for 1 to 3 rows add in another order than those for more, which all add alike.
  So each pass has at least `least_rows` rows (sequences times tokens): decoding steps and small micro-batches are
  padded.
- Attention (`exact_attention`): explicit products, also with at least that many rows per head. Keys are padded with
  zeros to a multiple of `COLUMNS`. Keys of a row start at column 0 in both, because a sum over keys depends on the
  columns that they are in.
- Experts (`exact_experts`): each expert gets at least that many rows.
- Activations: the kernels of some (SiLU, the tanh form of GELU) compute whole vectors in another way than the numbers
  that are left at the end. So their inputs are padded to whole vectors.
- Norms, rotary embeddings, the softmax and the log-softmax are computed for each token alone, always alike.

None of this is a promise of the kernels. `workers.rollout.engines.exact_decoding.probe` tests it with the shapes of a
model, on the machine that is to run it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache, partial
from typing import Any

import torch
import torch.nn.functional as F

from single_controller import SingleControllerError
from workers.extras import require

EXACT = "exact"
"""Name of the attention and of the experts, among transformers' implementations."""

COLUMNS = 16
"""Keys are padded to a multiple of this."""

VECTOR = 64
"""Inputs of activations are padded to a multiple of this: kernels take two vectors of up to 512 bits at a time."""


class ExactError(SingleControllerError, RuntimeError):
    """Exact mode is not possible with this model, or on this machine."""


class _Positions:
    """Where queries and keys are, in one forward pass of an engine; see `row_positions`."""

    def __init__(self, queries: torch.Tensor, begin: torch.Tensor | None) -> None:
        self.queries, self.begin = queries, begin
        self._masks: dict[tuple[int, int | None], torch.Tensor] = {}

    def mask(self, width: int, window: int | None, dtype: torch.dtype) -> torch.Tensor:
        """Return `_mask_of` the queries, (B, M, width). It is the same for most layers."""
        if (width, window) not in self._masks:
            self._masks[width, window] = _mask_of(self.queries, width, window, dtype)
        return self._masks[width, window]


_positions: ContextVar[_Positions | None] = ContextVar("exact_positions", default=None)


@contextmanager
def row_positions(queries: torch.Tensor, begin: torch.Tensor | None = None) -> Iterator[None]:
    """Say where the rows of the forward passes inside are. Otherwise, each row begins at column 0 with position 0.

    Args:
        queries: (B, M) int64, position of each query in its row.
        begin: (B,) int64, column of each row's first key, if rows are padded on the left; None if they all begin at 0.
    """
    token = _positions.set(_Positions(queries, begin))
    try:
        yield
    finally:
        _positions.reset(token)


def least_rows() -> int:
    """Return the number of rows from which on a linear layer computes each row alike."""
    threads = torch.get_num_threads()
    return 4 if threads == 1 else 8 * threads


def exact_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Causal attention whose result for a query depends on nothing but that query and the keys before it, to the bit.

    Args:
        module: the attention layer.
        query: (B, heads, M, D).
        key: (B, groups, L, D); heads of one group share keys. Columns behind a row's last query are ignored.
        value: (B, groups, L, D'); D' is D, but for some models.
        attention_mask: None. Rows are found by `row_positions`.
        dropout: must be 0.
        scaling: factor of the products; by default 1 / sqrt(D).
        sliding_window: number of last keys that a query sees, its own included; None for all.
        softcap: bound of the products, by tanh; None for none.
        others: ignored, except for those that would change the result.

    Returns:
        (B, M, heads, D'), and None instead of the weights.

    Raises:
        ExactError: for dropout, a mask or attention sinks.
    """
    if dropout or attention_mask is not None or others.get("s_aux") is not None:
        what = "dropout" if dropout else "sinks" if attention_mask is None else "attention mask"
        raise ExactError(f"exact mode has no attention with {what}, which {type(module).__name__} asks for")
    batch, heads, count, size = query.shape
    groups, length = key.shape[1:3]
    at = _positions.get()
    if at is not None and at.begin is not None:
        columns = (torch.arange(length, device=key.device) + at.begin[:, None]).clamp_(max=length - 1)
        index = columns[:, None, :, None]
        key, value = (one.gather(2, index.expand(one.shape)) for one in (key, value))
    if more := -length % COLUMNS:
        key, value = F.pad(key, (0, 0, 0, more)), F.pad(value, (0, 0, 0, more))
    width = length + more
    if at is None:
        mask = _causal_mask(length - count, length, width, sliding_window, query.device, query.dtype)
    else:
        mask = at.mask(width, sliding_window, query.dtype)
    # Few operations, because in small models each costs more than what it computes.
    rows = heads // groups * count
    lacking = max(0, least_rows() - rows)
    query = (query * (size**-0.5 if scaling is None else scaling)).reshape(batch * groups, rows, size)
    if lacking:
        query = F.pad(query, (0, 0, 0, lacking))
    scores = torch.bmm(query, key.flatten(0, 1).transpose(1, 2))
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if lacking and count > 1:  # otherwise the other rows are of the same position, and stay
        scores = scores[:, :rows]
    scores = scores.reshape(batch, -1, count, width) + mask[:, None]
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype).view(batch * groups, -1, width)
    if lacking and count > 1:
        weights = F.pad(weights, (0, 0, 0, lacking))
    made = torch.bmm(weights, value.flatten(0, 1))
    if lacking:
        made = made[:, :rows]
    return made.reshape(batch, heads, count, -1).transpose(1, 2).contiguous(), None


@lru_cache(maxsize=4)
def _causal_mask(
    begin: int, end: int, width: int, window: int | None, device: torch.device, dtype: torch.dtype
) -> torch.Tensor:
    """Return `_mask_of` the queries at positions from ``begin`` to before ``end``, (1, M, width)."""
    with torch.inference_mode(False):  # or it could not be used again in training
        return _mask_of(torch.arange(begin, end, device=device)[None], width, window, dtype)


def _mask_of(queries: torch.Tensor, width: int, window: int | None, dtype: torch.dtype) -> torch.Tensor:
    """Return (B, M, width): 0 for the columns that a query sees, and -inf for the others. Adding it changes no bit of
    a score, and takes a fifth of the time of ``masked_fill``."""
    columns = torch.arange(width, device=queries.device)
    hidden = columns > queries[..., None]
    if window is not None:
        hidden |= columns <= queries[..., None] - window
    return torch.zeros(hidden.shape, dtype=dtype, device=queries.device).masked_fill_(hidden, -torch.inf)


def exact_experts(
    module: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """The model's own loop over its experts, with rows of zeros for each expert that would get fewer than `least_rows`.

    Args:
        module: the experts, whose class transformers has decorated.
        hidden_states: (tokens, H).
        top_k_index: (tokens, k) int64, the experts of each token.
        top_k_weights: (tokens, k).

    Returns:
        (tokens, H).
    """
    loop = type(module).forward.__wrapped__
    tokens, k = top_k_index.shape
    counts = torch.bincount(top_k_index.flatten(), minlength=module.num_experts)[: module.num_experts]
    lacking = torch.where(counts > 0, least_rows() - counts, 0).clamp_(min=0)
    extra = torch.repeat_interleave(lacking)
    if not len(extra):
        return loop(module, hidden_states, top_k_index, top_k_weights)
    extra = torch.cat([extra, extra[-1:].expand(-len(extra) % k)]).view(-1, k)
    made = loop(
        module,
        F.pad(hidden_states, (0, 0, 0, len(extra))),
        torch.cat([top_k_index, extra]),
        F.pad(top_k_weights, (0, 0, 0, len(extra))),
    )
    return made[:tokens]


def make_exact(model: Any) -> None:
    """Let a model of transformers compute attention and experts exactly, in place. It must have its own config object,
    which is changed.

    Raises:
        ExactError: the model's attention cannot be replaced.
    """
    transformers = require("transformers", extra="hf")
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    transformers.AttentionInterface.register(EXACT, exact_attention)
    ALL_EXPERTS_FUNCTIONS.register(EXACT, exact_experts)
    try:
        model.set_attn_implementation(EXACT)
        if model._can_set_experts_implementation():
            model.set_experts_implementation(EXACT)
    except (ValueError, AttributeError) as error:
        raise ExactError(f"exact mode cannot replace the attention of {type(model).__name__}: {error}") from error
    if model.config.get_text_config()._attn_implementation != EXACT:
        raise ExactError(f"exact mode cannot replace the attention of {type(model).__name__}")
    for module in model.modules():
        if type(module).__module__ in ("transformers.activations", "torch.nn.modules.activation"):
            module.forward = partial(_in_whole_vectors, module.forward)
    head = model.get_output_embeddings()
    if head is not None:
        # Of the last tokens of longer rows, which are not contiguous, torch would multiply each row for itself.
        head.register_forward_pre_hook(_contiguous)


def _in_whole_vectors(activation: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    more = -x.numel() % VECTOR
    if not more and x.is_contiguous():
        return activation(x)
    made = activation(F.pad(x.reshape(-1), (0, more)))
    return made[: x.numel()].view(x.shape)


def _contiguous(module: Any, given: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    return tuple(one.contiguous() for one in given)


def exact_logits(model: Any, input_ids: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
    """Return the logits of a model for rows that begin at column 0, as a trainer computes them.

    Args:
        model: after `make_exact`.
        input_ids: (b, s).
        position_ids: (b, s).

    Returns:
        (b, s, V).
    """
    rows, tokens = input_ids.shape
    more = max(0, -(-least_rows() // tokens) - rows)
    if more:
        input_ids, position_ids = (F.pad(ids, (0, 0, 0, more)) for ids in (input_ids, position_ids))
    logits: torch.Tensor = model(input_ids=input_ids, position_ids=position_ids, use_cache=False).logits
    return logits[:rows]
