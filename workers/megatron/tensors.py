"""Tensors cut over the tensor-parallel ranks: this rank's part, and the whole again."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def own_part(whole: torch.Tensor, dim: int = 0) -> torch.Tensor:
    """This tensor-parallel rank's part of a tensor: a view of equal size on all ranks."""
    from megatron.core import parallel_state

    size = parallel_state.get_tensor_model_parallel_world_size()
    return whole.chunk(size, dim)[parallel_state.get_tensor_model_parallel_rank()]


def gather(part: torch.Tensor, dim: int = 0) -> torch.Tensor:
    """The whole tensor from the parts of the tensor-parallel ranks; every one of them calls this and gets it.

    Returns:
        Memory of its own.
    """
    from megatron.core import parallel_state

    size = parallel_state.get_tensor_model_parallel_world_size()
    part = part.detach().contiguous()
    if size == 1:
        return part.clone()
    parts = [torch.empty_like(part) for _ in range(size)]
    torch.distributed.all_gather(parts, part, group=parallel_state.get_tensor_model_parallel_group())
    return torch.cat(parts, dim)


def join_gate_up(whole: Sequence[torch.Tensor]) -> torch.Tensor:
    """This rank's part of a fused gate and up: its rows of the gate, then its rows of up.

    Args:
        whole: gate and up.
    """
    return torch.cat([own_part(tensor) for tensor in whole])


def split_gate_up(part: torch.Tensor) -> list[torch.Tensor]:
    """Gate and up, whole, from the ranks' parts that `join_gate_up` made."""
    return [gather(half) for half in part.chunk(2)]
