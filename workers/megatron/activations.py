"""Activation functions by the names that transformers gives them."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from typing import Any

from workers.extras import require


def activation(name: str) -> Callable[..., Any]:
    """An activation function by its name in ``transformers.activations``; "silu" and "swish" need no transformers.

    Raises:
        ValueError: transformers has no such name.
        ImportError: transformers is not installed.
    """
    import torch.nn.functional as F

    if name in ("silu", "swish"):
        return F.silu
    require("transformers", extra="hf")
    from transformers.activations import ACT2FN

    if name not in ACT2FN:
        close = difflib.get_close_matches(str(name), ACT2FN, n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"it has {', '.join(sorted(ACT2FN))}"
        raise ValueError(f"hidden_act={name!r}: transformers has no such activation; {hint}")
    function: Callable[..., Any] = ACT2FN[name]
    return function
