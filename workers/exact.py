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

None of this is a promise of the kernels. `probe` tests it with the shapes of a model, on the machine that is to run it.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from single_controller import SingleControllerError
from workers.algorithms.token_log_probs import next_token_log_probs
from workers.extras import require

EXACT = "exact"
"""Name of the attention and of the experts, among transformers' implementations."""

COLUMNS = 64
"""Keys are padded to a multiple of this."""

VECTOR = 64
"""Inputs of activations are padded to a multiple of this: kernels take two vectors of up to 512 bits at a time."""

PROBE_LAYERS = 2


class ExactError(SingleControllerError, RuntimeError):
    """Exact mode is not possible with this model, or on this machine."""


class _Positions(NamedTuple):
    """Where queries and keys are, in the forward pass of an engine.

    Attributes:
        queries: (B, M) int64, position of each query in its row.
        begin: (B,) int64, column of each row's first key; None for 0.
    """

    queries: torch.Tensor
    begin: torch.Tensor | None


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
        value: (B, groups, L, D).
        attention_mask: None. Rows are found by `row_positions`.
        dropout: must be 0.
        scaling: factor of the products; by default 1 / sqrt(D).
        sliding_window: number of last keys that a query sees, its own included; None for all.
        softcap: bound of the products, by tanh; None for none.
        others: ignored, except for those that would change the result.

    Returns:
        (B, M, heads, D), and None instead of the weights.

    Raises:
        ExactError: for dropout, a mask or attention sinks.
    """
    wrong = {"dropout": dropout, "attention mask": attention_mask is not None, "sinks": others.get("s_aux") is not None}
    if named := [name for name, there in wrong.items() if there]:
        raise ExactError(f"exact mode has no attention with {named[0]}, which {type(module).__name__} asks for")
    batch, heads, count, size = query.shape
    groups, length = key.shape[1:3]
    at = _positions.get()
    if at is None:
        queries = torch.arange(length - count, length, device=query.device)[None]
    else:
        queries = at.queries
        if at.begin is not None:
            columns = (torch.arange(length, device=key.device) + at.begin[:, None]).clamp_(max=length - 1)
            index = columns[:, None, :, None].expand(batch, groups, length, size)
            key, value = key.gather(2, index), value.gather(2, index)
    if more := -length % COLUMNS:
        key, value = F.pad(key, (0, 0, 0, more)), F.pad(value, (0, 0, 0, more))
    width, together = length + more, heads // groups * count
    query = _with_rows(query.reshape(batch, groups, together, size))
    columns = torch.arange(width, device=query.device)
    hidden = columns > queries[..., None]
    if sliding_window is not None:
        hidden |= columns <= queries[..., None] - sliding_window
    scores = torch.matmul(query, key.transpose(-1, -2)) * (size**-0.5 if scaling is None else scaling)
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    scores = scores[:, :, :together].unflatten(2, (-1, count)).masked_fill(hidden[:, None, None], -torch.inf)
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)
    made = torch.matmul(_with_rows(weights.flatten(2, 3)), value)[:, :, :together]
    return made.reshape(batch, heads, count, size).transpose(1, 2).contiguous(), None


def _with_rows(tensor: torch.Tensor) -> torch.Tensor:
    """Pad the second to last dim with zeros."""
    return F.pad(tensor, (0, 0, 0, max(0, least_rows() - tensor.shape[-2])))


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
    flat = x.reshape(-1)
    made = activation(F.pad(flat, (0, more)) if (more := -len(flat) % VECTOR) else flat)
    return made[: len(flat)].view(x.shape)


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


def probe(config: Any, dtype: torch.dtype, device: torch.device, *, trust_remote_code: bool = False) -> str:
    """Compare what an engine and a trainer compute, with a model of this config with random weights and at most
    `PROBE_LAYERS` layers: completions of prompts of several lengths that join a running batch and end one by one,
    against forward passes over all of them, over some and over each one alone.

    Args:
        config: the Hugging Face config.
        dtype: of the computation.
        device: of the computation.
        trust_remote_code: whether code that comes with the model may run.

    Returns:
        A digest of the log-probabilities: equal on machines that compute equal bits.

    Raises:
        ExactError: a log-probability differs, with how much and between what.
    """
    from workers.rollout.engines.exact_decoding import ExactBatch
    from workers.rollout.engines.request_engine import Request
    from workers.rollout.engines.rollout_engine import SamplingParams

    config = copy.deepcopy(config)
    text = config.get_text_config()
    text.num_hidden_layers = min(text.num_hidden_layers, PROBE_LAYERS)
    if "layer_types" in vars(text) and text.layer_types:
        text.layer_types = text.layer_types[: text.num_hidden_layers]
    auto = require("transformers", extra="hf").AutoModelForCausalLM
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = auto.from_config(config, trust_remote_code=trust_remote_code, dtype=torch.float32)
    make_exact(model)
    dropout = max((one.p for one in model.modules() if isinstance(one, torch.nn.Dropout)), default=0.0)
    if dropout or getattr(text, "attention_dropout", 0.0):
        raise ExactError(
            f"exact mode does not go with the dropout of this {config.model_type!r} config: training would compute "
            "other log-probabilities than the rollout did. Set its probabilities to 0"
        )
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
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
