"""cuda or cpu, nccl or gloo: the one place that decides. torch is imported when somebody asks."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def has_cuda() -> bool:
    """Whether this process has a CUDA device."""
    import torch

    return torch.cuda.is_available()


def backend() -> str:
    """The backend for ``torch.distributed``: nccl where this process has a CUDA device, gloo elsewhere."""
    return "nccl" if has_cuda() else "gloo"


def device(local_rank: int = 0) -> torch.device:
    """The device of this process.

    Ray shows a process only the devices that are its own, so that the first of them is meant; where all of a node's
    devices are visible, it is the one of the local rank.

    Args:
        local_rank: rank among the processes of the node.
    """
    import torch

    if not has_cuda():
        return torch.device("cpu")
    return torch.device("cuda", local_rank % torch.cuda.device_count())


def take_device(local_rank: int = 0) -> torch.device:
    """Make `device` the current one, and return it."""
    import torch

    mine = device(local_rank)
    if mine.type == "cuda":
        torch.cuda.set_device(mine)
    return mine
