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
    """Return a torch dtype by name: ``"fp32"``, ``"bf16"``, ``"fp16"`` or torch's own names. A dtype is returned as is.

    Raises:
        ValueError: the name is unknown.
    """
    import torch

    if isinstance(name, torch.dtype):
        return name
    torch_name = DTYPES.get(str(name).removeprefix("torch."))
    if torch_name is None:
        raise ValueError(f"param_dtype={name!r}: expected one of {', '.join(DTYPES)}")
    dtype: torch.dtype = getattr(torch, torch_name)
    return dtype
