"""ValueHead: what a critic has where a language model has its output layer."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn


class ValueHead(nn.Module):
    """A number for each token: linear from hidden to 1, with a bias, as in Hugging Face's ``...ForTokenClassification``
    of one label. Every tensor-parallel rank has all of it, and computes the same.

    It is called as megatron's output layer is, and computes in float32. It begins with the same weights on every rank.

    Args:
        config: megatron's ``TransformerConfig``.
    """

    def __init__(self, config: Any) -> None:
        super().__init__()
        drawn = torch.randn(1, config.hidden_size, generator=torch.Generator().manual_seed(0))
        self.weight = nn.Parameter((drawn * config.init_method_std).to(config.params_dtype))
        self.bias = nn.Parameter(torch.zeros(1, dtype=config.params_dtype))

    def forward(self, hidden: torch.Tensor, weight: None = None, runtime_gather_output: Any = None) -> Any:
        """(tokens, rows, hidden) -> (tokens, rows, 1) float32, and no bias that is still to be added."""
        return F.linear(hidden.float(), self.weight.float(), self.bias.float()), None
