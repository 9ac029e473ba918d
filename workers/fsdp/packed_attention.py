"""Attention over packed rows, for models of transformers, and the check that a model computes them as it does rows."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from workers.data.packing import PackedRows, pack_rows
from workers.extras import require
from workers.fsdp.sequence_parallel import repeat_groups, reslice, rope_of_length

PACKED = "packed"
"""Name of the attention among transformers' implementations."""

MAX_WINDOW = 8192
"""A sliding window up to this length is crossed by `why_not_packed`; models with a longer one are not packed."""

_EXTRA = 16
"""Number of tokens of the compared rows beyond a window, and beyond their common prefix."""


class SeenTokens:
    """Which tokens each token of packed rows sees. FSDP would copy a dataclass for each layer.

    Args:
        rows: the packed rows, on the model's device.
        group: the ranks that have slices of them, see `workers.fsdp.sequence_parallel`; None if this rank has all.

    Attributes:
        group: these ranks.
        sizes: number of tokens of each segment.
        seen: numbers of the segments that each one sees, itself last.
        alike: (tokens of a segment, tokens that its last one sees) -> numbers of such segments, which one call of the
            kernel computes.
    """

    def __init__(self, rows: PackedRows, group: dist.ProcessGroup | None = None) -> None:
        self.group = group
        self.sizes = [segment.end - segment.begin for segment in rows.segments]
        self.seen = [(*segment.before, number) for number, segment in enumerate(rows.segments)]
        self.alike: dict[tuple[int, int], list[int]] = {}
        for number, seen in enumerate(self.seen):
            length = sum(self.sizes[part] for part in seen)
            self.alike.setdefault((self.sizes[number], length), []).append(number)
        self._device = rows.input_ids.device
        self._masks: dict[tuple[int, int, int | None, torch.dtype], torch.Tensor] = {}

    def mask(self, count: int, length: int, window: int | None, dtype: torch.dtype) -> torch.Tensor:
        """Return what is added to the products of the last ``count`` of ``length`` tokens with all of them. Layers
        share it, because the backward pass keeps it."""
        wanted = count, length, window, dtype
        if wanted not in self._masks:
            at = torch.arange(length, device=self._device)
            behind = at[length - count :, None] - at
            hidden = behind < 0 if window is None else (behind < 0) | (behind >= window)
            mask = torch.zeros(count, length, dtype=dtype, device=self._device)
            self._masks[wanted] = mask.masked_fill_(hidden, -torch.inf)
        return self._masks[wanted]


def packed_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    seen_tokens: SeenTokens | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Causal attention of each token to the tokens before it in its rows.

    Args:
        module: the attention layer.
        query: (1, heads, N, D); N tokens are this rank's slice, if ranks share the sequence.
        key: (1, groups, N, D); heads of one group share keys.
        value: (1, groups, N, D).
        attention_mask: None.
        dropout: probability.
        scaling: factor of the products; by default 1 / sqrt(D).
        sliding_window: number of last keys that a query sees, its own included; None for all.
        seen_tokens: which tokens they are. Models pass on arguments that they do not know.
        others: ignored, except for those that would change the result.

    Returns:
        (1, N, heads, D), and None instead of the weights.

    Raises:
        NotImplementedError: for what this attention does not have.
    """
    if seen_tokens is None or attention_mask is not None:
        raise NotImplementedError(f"{type(module).__name__} does not pass on which rows are packed")
    for name in ("softcap", "s_aux", "position_bias"):
        if others.get(name) is not None:
            raise NotImplementedError(f"packed rows have no attention with {name}")
    if (group := seen_tokens.group) is not None:  # from its tokens for all heads to all tokens for its heads
        key, value = (repeat_groups(of, group.size()) for of in (key, value))
        query, key, value = (reslice(of, group) for of in (query, key, value))
    query_parts, key_parts, value_parts = (of.split(seen_tokens.sizes, dim=2) for of in (query, key, value))
    made: dict[int, torch.Tensor] = {}
    for (count, length), numbers in seen_tokens.alike.items():
        window = sliding_window if sliding_window is not None and sliding_window < length else None
        mask = None if count == length and window is None else seen_tokens.mask(count, length, window, query.dtype)
        keys, values = (
            torch.cat([of[part] for number in numbers for part in seen_tokens.seen[number]], dim=2)
            .unflatten(2, (len(numbers), length))
            .transpose(1, 2)[0]
            for of in (key_parts, value_parts)
        )
        parts = F.scaled_dot_product_attention(
            torch.cat([query_parts[number] for number in numbers]),
            keys,
            values,
            attn_mask=mask,
            dropout_p=dropout,
            is_causal=mask is None,
            scale=scaling,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        made.update(zip(numbers, parts.transpose(1, 2).split(1), strict=True))
    result = torch.cat([made[number] for number in range(len(made))], dim=1)
    return result if group is None else reslice(result, group), None


def use_packed_attention(model: Any, *, on: bool = True) -> None:
    """Let a model compute packed rows, in place; or rows again, if not ``on``. It must have its own config."""
    transformers: Any = require("transformers", extra="hf")
    transformers.AttentionInterface.register(PACKED, packed_attention)
    model.set_attn_implementation(PACKED if on else "sdpa")


def run_packed(
    model: Any, rows: PackedRows, role: str, index: torch.Tensor, group: dist.ProcessGroup | None = None
) -> torch.Tensor:
    """Return a model's logits of some tokens, (M, V), or values, (M, 1).

    Args:
        model: after `use_packed_attention`.
        rows: the tokens, or this rank's slice of them.
        role: "critic" for a model whose logits are values.
        index: (M,) int64, the tokens that are wanted, in any order. Only for them, logits are computed.
        group: the ranks that have slices; all of them call this.
    """
    options = {} if role == "critic" else {"logits_to_keep": index}
    logits: torch.Tensor = model(
        input_ids=rows.input_ids,
        position_ids=rows.position_ids,
        use_cache=False,
        seen_tokens=SeenTokens(rows, group),
        **options,
    ).logits
    return logits[0, index] if role == "critic" else logits[0]


@torch.no_grad()
def why_not_packed(
    model: Any, role: str, device: torch.device, dtype: torch.dtype, group: dist.ProcessGroup | None = None
) -> str | None:
    """Compare the logits of packed rows with those of single ones. If the model is sharded, all its ranks call this.

    Args:
        model: in evaluation mode.
        role: "critic" for a model whose logits are values.
        device: of the computation.
        dtype: of the computation.
        group: ranks that are to share the sequence, each with a slice.

    Returns:
        Why the model cannot be packed; None if it can. It then computes packed rows, otherwise single ones.
    """
    text = model.config.get_text_config()
    if text._attn_implementation != "sdpa":
        return f"its attention is {text._attn_implementation!r}, not 'sdpa'"
    if getattr(text, "attention_chunk_size", None):
        return "its attention is chunked"
    if (kind := rope_of_length(text)) is not None:
        return f"its rotary embedding {kind!r} depends on the longest row"
    window = getattr(text, "sliding_window", None) or 0
    if window > MAX_WINDOW:
        return f"its sliding window is longer than {MAX_WINDOW} tokens"
    longest = min(window + 2 * _EXTRA, getattr(text, "max_position_embeddings", None) or MAX_WINDOW)
    lengths, common = [longest, longest - 3, longest - 5], longest - min(_EXTRA, longest // 2)
    ids = torch.arange(3 * longest).view(3, longest) * 7 % text.vocab_size
    ids[1:, :common] = ids[0, :common]
    rows = pack_rows(ids, lengths, [0, common, common])
    # Only of the last tokens, before which a window ends and rows divide: logits are large.
    ends = [slice(max(length - 2 * _EXTRA, 1), length) for length in lengths]
    index = torch.cat([of[end] for of, end in zip(rows.places, ends, strict=True)])
    own = torch.ones_like(index, dtype=torch.bool)
    if group is not None:
        rows = rows.slice_of(group.rank(), group.size())
        each = rows.input_ids.shape[1]
        own, index = index // each == group.rank(), index % each
    try:
        single = []
        for row, end in zip(ids.to(device), ends, strict=True):
            at = torch.arange(end.stop, device=device)
            options = {} if role == "critic" else {"logits_to_keep": at[end]}
            made = model(input_ids=row[None, : end.stop], position_ids=at[None], use_cache=False, **options).logits[0]
            single.append(made[end] if role == "critic" else made)
        expected = torch.cat(single).float()
        use_packed_attention(model)
        found = run_packed(model, rows.to(device), role, index.to(device), group)
        deviation = float(((found.float() - expected).abs().amax(-1) * own.to(device)).max() / expected.std())
        if deviation < (1e-3 if dtype is torch.float32 else 0.2):
            return None
        why = f"its logits of packed rows differ from those of single ones by {deviation:.1g} standard deviations"
    except Exception as error:  # what a model raises that cannot, is up to its code
        why = f"{type(error).__name__}: {error}"
    use_packed_attention(model, on=False)
    return why
