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
from functools import partial
from typing import TYPE_CHECKING, Any

from dispatch import jagged

if TYPE_CHECKING:
    import torch

ROUTED_EXPERTS = "routed_experts"

NATIVE = -1
"""In place of an expert: the trainer's router chooses."""


def size_of(text: Any, *names: str) -> int:
    """Return the first of some sizes that a Hugging Face config has, an integer above 0; 0 if it has none."""
    return next((value for name in names if isinstance(value := getattr(text, name, None), int) and value), 0)


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
        size = partial(size_of, text)
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


class RoutingMeter:
    """Counts which experts compute the tokens of a step, on the device.

    Args:
        shape: of the model.
        device: of the tokens.

    Attributes:
        real: (n,) bool, which tokens of the passes that follow count; None for all.
    """

    def __init__(self, shape: RoutingShape, device: torch.device) -> None:
        import torch

        self._shape = shape
        self._counts = torch.zeros(shape.layers, shape.experts, dtype=torch.float64, device=device)
        self._replayed = torch.zeros(2, dtype=torch.float64, device=device)  # choices, and those that are native too
        self.real: torch.Tensor | None = None

    def add(self, layer: int, chosen: torch.Tensor, native: torch.Tensor, replayed: torch.Tensor | None) -> None:
        """Count the tokens of a layer.

        Args:
            layer: its number.
            chosen: (n or more, k), the experts that compute them. Further tokens do not count.
            native: (n or more, k), those of the router.
            replayed: (n, layers, k), the recorded ones; None if nothing is replayed.
        """
        import torch

        count = len(chosen) if self.real is None else len(self.real)
        chosen = chosen[:count].long()
        weights = torch.ones_like(chosen, dtype=torch.float64)
        if self.real is not None:
            weights *= self.real[:, None]
        self._counts[layer].scatter_add_(0, chosen.flatten(), weights.flatten())
        if replayed is not None:
            known = replayed[:count, layer] != NATIVE
            same = (chosen[: len(known), :, None] == native[: len(known), None, :]).any(-1) & known
            self._replayed += torch.stack([known.sum(), same.sum()])

    def sums(self) -> torch.Tensor:
        """Return what ranks add up, float64 on the device; see `metrics`."""
        import torch

        return torch.cat([self._counts.flatten(), self._replayed])

    @staticmethod
    def metrics(sums: torch.Tensor, shape: RoutingShape) -> dict[str, float]:
        """Return the metrics of a step.

        Args:
            sums: of all ranks, each layer and token on one of them.
            shape: of the model.

        Returns:
            ``moe/load_min`` and ``moe/load_max``: tokens of the expert that has the fewest, or the most, of all layers,
            as a multiple of what it had if all experts of its layer had equally many. If experts were replayed also
            ``replay/overlap``: the share of them that the router would have chosen too.
        """
        counts = sums[:-2].view(shape.layers, shape.experts)[list(shape.sparse)]
        if not bool(counts.any()):
            return {}
        load = counts / counts.mean(1, keepdim=True)
        replayed, same = sums[-2:].tolist()
        made = {"moe/load_min": float(load.min()), "moe/load_max": float(load.max())}
        return made | ({"replay/overlap": same / replayed} if replayed else {})


def missing_routes(routes: Any, shape: RoutingShape) -> tuple[int, int]:
    """Return how many tokens of the column have no experts in some layer, and how many tokens there are. A row's last
    token counts in neither."""
    import torch

    routes = jagged.compact(routes, {})
    inner = torch.ones(len(routes.values()), dtype=torch.bool)
    ends = routes.offsets()[1:].cpu()
    inner[ends[ends > 0] - 1] = False
    unknown = (routes.values()[:, list(shape.sparse), 0] == NATIVE).any(1)
    return int((unknown & inner).sum()), int(inner.sum())
