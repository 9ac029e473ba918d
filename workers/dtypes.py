"""Names of the dtypes that models compute in."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

DTYPES = {
    "fp32": "float32",
    "float32": "float32",
    "float": "float32",
    "bf16": "bfloat16",
    "bfloat16": "bfloat16",
    "fp16": "float16",
    "float16": "float16",
    "half": "float16",
}


def dtype_of(name: Any) -> torch.dtype:
    """A torch dtype from ``"fp32"``, ``"bf16"``, ``"fp16"``, torch's own names, or a dtype.

    Raises:
        ValueError: none of these.
    """
    import torch

    if isinstance(name, torch.dtype):
        return name
    found = DTYPES.get(str(name).removeprefix("torch."))
    if found is None:
        raise ValueError(f"param_dtype={name!r}: it is one of {', '.join(DTYPES)}")
    dtype: torch.dtype = getattr(torch, found)
    return dtype
