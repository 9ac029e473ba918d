"""Sequence parallelism (DeepSpeed-Ulysses, Jacobs et al. 2023, arXiv 2309.14509): ranks share the sequence of a
micro-batch.

Each rank computes a slice of the tokens. In attention it computes all tokens for its share of the heads: an all-to-all
of queries, keys and values comes before, and one of the result after. So attention is computed as on a single rank, and
each rank has 1 / ranks of all activations, the logits included.

The log-probabilities of the slices are gathered, not their losses: many losses need whole rows, and every loss then
works as it is. A rank gathers a few numbers for each token of the micro-batch, far less than one layer's activations.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

_OF_LENGTH = {"dynamic", "longrope"}
"""Rotary embeddings that depend on the largest position of a pass, which differs from slice to slice."""


def check_sliceable(hf_config: Any, ranks: int) -> None:
    """Check that ranks can share a model's attention.

    Args:
        hf_config: the Hugging Face config.
        ranks: number of ranks that share a sequence.

    Raises:
        ValueError: they cannot.
    """
    if ranks == 1:
        return
    text = hf_config.get_text_config()
    heads = getattr(text, "num_attention_heads", None)
    if not isinstance(heads, int):
        raise ValueError(f"sequence_parallel_size={ranks}: a {text.model_type!r} has no attention heads to divide")
    if heads % ranks:
        raise ValueError(
            f"sequence_parallel_size={ranks} does not divide the model's {heads} attention heads, of which each rank "
            "gets an equal number"
        )
    if (kind := rope_of_length(text)) is not None:
        raise ValueError(
            f"sequence_parallel_size={ranks}: the rotary embedding {kind!r} depends on the length of the whole "
            "sequence, which ranks with a slice of it do not see"
        )


def rope_of_length(text: Any) -> str | None:
    """Return the type of a rotary embedding whose frequencies depend on the longest row of a pass, if a text config has
    one."""
    rope = getattr(text, "rope_parameters", None) or {}
    kinds = [of.get("rope_type") for of in (rope, *rope.values()) if isinstance(of, Mapping)]
    return next((kind for kind in kinds if kind in _OF_LENGTH), None)


def forget_lengths(model: Any) -> None:
    """Let rotary embeddings of the type "dynamic" choose their frequencies for the next pass alone. transformers keeps
    those of the longest row so far: later rows would depend on it, and a snapshot would lack the length."""
    for module in model.modules():
        if getattr(module, "rope_type", None) == "dynamic":
            module.max_seq_len_cached = module.original_max_seq_len
            module.inv_freq.copy_(module.original_inv_freq)


def repeat_groups(tensor: torch.Tensor, ranks: int) -> torch.Tensor:
    """Repeat keys or values until there is an equal number of groups for each rank.

    Args:
        tensor: (1, groups, n, D); heads of one group share it.
        ranks: number of ranks; it divides the number of heads.
    """
    groups = tensor.shape[1]
    return tensor.repeat_interleave(math.lcm(groups, ranks) // groups, dim=1)


def reslice(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Exchange slices of one dim for slices of another. All ranks of the group call it, with tensors of one shape.

    Args:
        tensor: (1, A, b, ...), this rank's slice of dim 2. Its number of ranks divides A.
        group: the ranks.

    Returns:
        (1, A / ranks, ranks * b, ...), this rank's slice of dim 1.
    """
    parts = tensor[0].unflatten(0, (group.size(), -1))
    received: torch.Tensor = _Exchange.apply(parts, group)
    return received.transpose(0, 1).flatten(1, 2)[None]


def gather_slices(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Return the ranks' tensors one after the other. Every rank must compute the same loss from them.

    Args:
        tensor: (M, ...), of one shape on all ranks.
        group: the ranks.

    Returns:
        (ranks * M, ...).
    """
    whole: torch.Tensor = _Gather.apply(tensor, group)
    return whole


class _Exchange(torch.autograd.Function):
    """Part k of each rank goes to rank k: (ranks, ...) -> (ranks, ...), by the rank that it comes from. The backward
    pass is the same exchange."""

    @staticmethod
    def forward(ctx: Any, parts: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        # The exchange requires a contiguous tensor. By default, `empty_like` keeps the strides of a transposed one.
        received = torch.empty_like(parts, memory_format=torch.contiguous_format)
        dist.all_to_all_single(received, parts.contiguous(), group=group)
        return received

    @staticmethod
    def backward(ctx: Any, of_received: torch.Tensor) -> Any:
        return _Exchange.apply(of_received, ctx.group), None


class _Gather(torch.autograd.Function):
    """As all ranks compute the same loss, each one has the whole gradient of its own part. The backward pass takes it,
    without communication; a sum over the ranks would be ``ranks`` times the gradient."""

    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        whole = part.new_empty(group.size() * len(part), *part.shape[1:])
        dist.all_gather_into_tensor(whole, part.contiguous(), group=group)
        return whole

    @staticmethod
    def backward(ctx: Any, of_whole: torch.Tensor) -> Any:
        return of_whole.chunk(ctx.group.size())[ctx.group.rank()], None
