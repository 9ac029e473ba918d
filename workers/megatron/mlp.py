"""ParallelLlamaMLP: the gated MLP of a Llama layer, sharded over the tensor-parallel ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from workers.device import current_device
from workers.extras import require
from workers.megatron.config import activation, refuse_unsupported
from workers.megatron.hf_weights import Weight, check_state_dict

if TYPE_CHECKING:
    from megatron.core import ModelParallelConfig


class ParallelLlamaMLP(nn.Module):
    """``down(act(gate(x)) * up(x))`` on megatron's column- and row-parallel layers.

    Gate and up are one column-parallel layer, ``gate_up_proj``: a rank holds its rows of the gate, then its rows of
    up. ``down_proj`` is row-parallel, so the whole output is available, and equal, on every tensor-parallel rank. One
    seed gives the same initial weights at every tensor-parallel size.

    Args:
        config: an OmegaConf, a Hugging Face config or any object or mapping with hidden_size and intermediate_size,
            and optionally hidden_act (a name known to transformers; "silu"), mlp_bias (False) and
            initializer_range (0.02).
        megatron_config: from `init_model_parallel_config`.

    Raises:
        ValueError: intermediate_size is not divisible by the tensor-parallel size, hidden_act is unknown, a size is
            missing, or megatron-core does not support the combination here.
        RuntimeError: megatron's model parallelism is not initialized.
    """

    def __init__(self, config: Any, megatron_config: ModelParallelConfig) -> None:
        require("megatron.core", extra="megatron")
        from megatron.core import parallel_state
        from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear

        super().__init__()
        if not parallel_state.is_initialized():
            raise RuntimeError(
                "megatron's model parallelism is not initialised; call MegatronWorker.initialize_model_parallel(), or "
                "megatron's own function, before you create the layer"
            )
        refuse_unsupported(megatron_config)
        self.hidden_size = int(_value(config, "hidden_size"))
        self.intermediate_size = int(_value(config, "intermediate_size"))
        self.activation = activation(_value(config, "hidden_act", "silu"))
        tp = parallel_state.get_tensor_model_parallel_world_size()
        if self.intermediate_size % tp:
            raise ValueError(
                f"ParallelLlamaMLP: intermediate_size={self.intermediate_size} is not divisible by tp={tp}"
            )
        bias = bool(_value(config, "mlp_bias", False))
        deviation = float(_value(config, "initializer_range", 0.02))

        def draw(weight: torch.Tensor) -> None:
            nn.init.normal_(weight, std=deviation)

        common = {"config": megatron_config, "init_method": draw, "bias": bias, "skip_bias_add": False}
        self.gate_up_proj = ColumnParallelLinear(
            self.hidden_size, 2 * self.intermediate_size, gather_output=False, stride=2, **common
        )
        self.down_proj = RowParallelLinear(self.intermediate_size, self.hidden_size, input_is_parallel=True, **common)
        self.to(current_device())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(..., hidden_size) -> (..., hidden_size); input and output are the same on every tensor-parallel rank."""
        gate_up, _ = self.gate_up_proj(x)
        gate, up = gate_up.chunk(2, dim=-1)
        y: torch.Tensor = self.down_proj(self.activation(gate) * up)[0]
        return y

    @torch.no_grad()
    def load_hf_state_dict(self, state_dict: Mapping[str, torch.Tensor]) -> None:
        """Load the weights of a Hugging Face ``LlamaMLP``; each rank copies its shards.

        Args:
            state_dict: gate_proj.weight and up_proj.weight (intermediate_size, hidden_size), down_proj.weight
                (hidden_size, intermediate_size), and their biases if the layer has any.

        Raises:
            ValueError: a name is missing or unknown, or a tensor has the wrong shape. No weight was changed.
        """
        weights = list(self._weights())
        shapes = {shard.name: shard.shape for weight in weights for shard in weight.shards()}
        check_state_dict("load_hf_state_dict()", state_dict, shapes)
        for weight in weights:
            weight.load(state_dict)

    @torch.no_grad()
    def hf_state_dict(self) -> dict[str, torch.Tensor]:
        """The whole weights under the names of a Hugging Face ``LlamaMLP``, on the CPU. All tensor-parallel ranks call
        this together and get the same."""
        return {name: tensor.cpu() for weight in self._weights() for name, tensor in weight.whole()}

    def _weights(self) -> Iterator[Weight]:
        for kind in ("weight", "bias"):
            if getattr(self.down_proj, kind) is not None:
                yield Weight(getattr(self.gate_up_proj, kind), (f"gate_proj.{kind}", f"up_proj.{kind}"))
                yield Weight(getattr(self.down_proj, kind), (f"down_proj.{kind}",), 1 if kind == "weight" else None)


def _value(config: Any, key: str, *default: Any) -> Any:
    value = config.get(key) if isinstance(config, Mapping) else getattr(config, key, None)
    if value is not None:
        return value
    if not default:
        raise ValueError(f"ParallelLlamaMLP: the config has no {key!r}")
    return default[0]
