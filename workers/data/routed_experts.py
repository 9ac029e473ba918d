"""Routed experts: which experts of a mixture computed each token, as the column ``routed_experts`` of rollout data.

The column is a jagged int16 tensor, (B, tokens, layers, k): for each real token of a row, in order, the k experts of
each hidden layer of the model, in any order. -1 in all k places leaves the choice to the trainer's router. Layers
without experts have a place too, whose content is ignored. Nothing follows a row's last token, so its experts do not
matter.

No backend is imported here: `workers.fsdp` and `workers.megatron` check, slice and count with the same functions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dispatch import jagged

if TYPE_CHECKING:
    import torch

ROUTED_EXPERTS = "routed_experts"

NATIVE = -1
"""In place of an expert: the trainer's router chooses."""


@dataclass(frozen=True)
class RoutingShape:
    """What a model chooses experts from.

    Attributes:
        layers: number of hidden layers, those without experts included.
        experts: number of experts that each router chooses from.
        k: number of experts of a token.
        sparse: numbers of the layers with experts, ascending.
    """

    layers: int
    experts: int
    k: int
    sparse: tuple[int, ...]

    @classmethod
    def of(cls, config: Any) -> RoutingShape | None:
        """Return that of a Hugging Face config; None if the model has no experts."""
        text = config.get_text_config()

        def size(*names: str) -> int:
            return next((value for name in names if isinstance(value := getattr(text, name, None), int) and value), 0)

        layers, experts = size("num_hidden_layers"), size("num_local_experts", "num_experts", "n_routed_experts")
        if not experts or not layers:
            return None
        kinds = getattr(text, "mlp_layer_types", None)
        dense = set(range(getattr(text, "first_k_dense_replace", None) or 0))
        dense |= {*(getattr(text, "mlp_only_layers", None) or ())}
        step = size("decoder_sparse_step") or 1
        sparse = (
            number
            for number in range(layers)
            if (kinds[number] == "sparse" if kinds else number not in dense and (number + 1) % step == 0)
        )
        return cls(layers, experts, size("num_experts_per_tok") or 1, tuple(sparse))


def wrong_routes(routes: Any, real: torch.Tensor, shape: RoutingShape | None) -> str | None:
    """Say what is wrong with the column, with the row's number; None if nothing is.

    Args:
        routes: the column.
        real: (B, T) bool, the real tokens.
        shape: of the model; None if it is not known. Then the experts themselves are not checked.
    """
    import torch

    what = f"{getattr(routes, 'dtype', type(routes).__name__)} {tuple(getattr(routes, 'shape', ()))}"
    if not jagged.is_jagged(routes) or routes.dim() != 4 or routes._ragged_idx != 1 or routes.dtype != torch.int16:
        return f"is {what}; expected a jagged int16 tensor (rows, tokens, layers, k), ragged in its tokens"
    routes = jagged.compact(routes, {})
    held, lengths = routes.offsets().diff().cpu(), real.sum(1).cpu()
    if len(held) != len(lengths):
        return f"has {len(held)} rows, but there are {len(lengths)}"
    if bool((held != lengths).any()):
        row = int((held != lengths).nonzero()[0])
        return (
            f"of row {row} has {int(held[row])} tokens, but its attention_mask {int(lengths[row])}; each real token, "
            f"of prompt and completion, needs its experts, or {NATIVE} where they are not known"
        )
    if shape is None:
        return None
    values = routes.values()
    if values.shape[1:] != (shape.layers, shape.k):
        return (
            f"has {values.shape[1]} layers and {values.shape[2]} experts per token; the model has {shape.layers} "
            f"hidden layers, those without experts included, and {shape.k} experts per token"
        )
    if not values.numel():
        return None
    if len(shape.sparse) < shape.layers:
        values = values[:, list(shape.sparse)]
    ordered = values.sort(-1).values
    native = ordered[..., -1] == NATIVE
    outside = (ordered[..., 0] < NATIVE) | (ordered[..., -1] >= shape.experts)
    some = (ordered[..., 0] == NATIVE) & ~native
    twice = (ordered[..., 1:] == ordered[..., :-1]).any(-1) & ~native
    if not bool((outside | some | twice).any()):
        return None
    token, layer = (int(at) for at in (outside | some | twice).nonzero()[0])
    row = int((routes.offsets().cpu() > token).nonzero()[0]) - 1
    found = values[token, layer].tolist()
    if bool(outside[token, layer]):
        why = f"expected experts from 0 to below {shape.experts}"
    elif bool(some[token, layer]):
        why = f"{NATIVE} leaves the choice to the router, and stands in all {shape.k} places or in none"
    else:
        why = "an expert can be chosen once for a token"
    at = token - int(routes.offsets()[row])
    return f"of row {row} has the experts {found} at its token {at} in layer {shape.sparse[layer]}; {why}"


def padded_routes(values: torch.Tensor, lengths: Sequence[int], width: int) -> torch.Tensor:
    """Return the experts of left-aligned rows, (b, s, layers, k), `NATIVE` at padding.

    Args:
        values: (tokens, layers, k), of the real tokens, one row after the other.
        lengths: number of tokens of each row.
        width: s.
    """
    import torch

    within = torch.arange(width, device=values.device)
    real = within < torch.as_tensor(lengths, device=values.device)[:, None]
    padded = values.new_full((*real.shape, *values.shape[1:]), NATIVE)
    padded[real] = values
    return padded


def route_keys(values: torch.Tensor) -> torch.Tensor:
    """Return a number for each token, (tokens,) int64, equal for tokens with the same experts and, but for a chance of
    about 2**-60, for no others.

    Args:
        values: (tokens, layers, k) int16.
    """
    import torch

    flat = values.flatten(1)
    random = torch.Generator().manual_seed(0)
    factors = torch.randint(-(2**63), 2**63 - 1, flat.shape[1:], generator=random) | 1
    return (flat.long() * factors).sum(1)


def without_routes(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return entries without the column, for a model that is to choose its experts itself."""
    return {name: data[name] for name in data.keys() if name != ROUTED_EXPERTS}  # noqa: SIM118
