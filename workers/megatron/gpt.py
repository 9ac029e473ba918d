"""The part of a Hugging Face decoder that this rank holds, as megatron GPTModels."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import nn

from workers.device import current_device
from workers.megatron.config import padded_vocab_size, rope_parameters, scaled_rope, tied

if TYPE_CHECKING:
    from megatron.core.models.gpt import GPTModel
    from megatron.core.transformer import TransformerConfig


def build_models(hf_config: Any, config: TransformerConfig, *, critic: bool) -> list[GPTModel]:
    """Build this rank's pipeline stages with random weights, on the rank's device.

    Args:
        hf_config: the Hugging Face config.
        config: megatron's config of the same model.
        critic: whether the last stage has a `ValueHead` instead of the output layer.

    Returns:
        One GPTModel; several with virtual pipeline parallelism.
    """
    virtual = config.virtual_pipeline_model_parallel_size
    stages = [None] if virtual is None else list(range(virtual))
    return [_build_stage(hf_config, config, critic, stage) for stage in stages]


def _build_stage(hf_config: Any, config: TransformerConfig, critic: bool, stage: int | None) -> GPTModel:
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    if config.num_moe_experts:
        from workers.megatron.moe import layers_of_stage

        layers: Any = layers_of_stage(config, stage)
    else:
        layers = get_gpt_layer_local_spec(qk_layernorm=config.qk_layernorm, normalization=config.normalization)
    model: GPTModel = GPTModel(
        config,
        layers,
        vocab_size=padded_vocab_size(hf_config),
        max_sequence_length=hf_config.max_position_embeddings,
        pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=stage),
        post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=stage),
        share_embeddings_and_output_weights=tied(hf_config) and not critic,
        position_embedding_type="rope",
        rotary_base=rope_parameters(hf_config)["rope_theta"],
        vp_stage=stage,
    )
    if (scaled := scaled_rope(hf_config)) is not None:
        model.rotary_pos_emb.inv_freq = scaled[0]  # its factor is in config.softmax_scale
    if config.num_moe_experts:
        from workers.megatron.moe import reduce_apart

        reduce_apart(model)
    if model.pre_process:
        _freeze_padding_token(model.embedding.word_embeddings, hf_config)
    if critic and model.post_process:
        model.output_layer = ValueHead(config)
    return model.to(current_device())


class ValueHead(nn.Module):
    """A critic's output layer: linear from hidden to 1 with a bias, as in Hugging Face's ``...ForTokenClassification``
    with one label.

    It is called like megatron's output layer and computes in float32. Every tensor-parallel rank holds all of it, with
    the same initial weights.
    """

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self._gathers = bool(config.sequence_parallel)
        drawn = torch.randn(1, config.hidden_size, generator=torch.Generator().manual_seed(0))
        self.weight = nn.Parameter((drawn * config.init_method_std).to(config.params_dtype))
        self.bias = nn.Parameter(torch.zeros(1, dtype=config.params_dtype))

    def forward(self, hidden: torch.Tensor, weight: None = None, runtime_gather_output: Any = None) -> Any:
        """(tokens, rows, hidden) -> (tokens, rows, 1) float32, and None for the bias that megatron adds later."""
        if self._gathers:
            from megatron.core.tensor_parallel import gather_from_sequence_parallel_region

            # Every tensor-parallel rank computes the same loss of all tokens, so each keeps its slice of the gradient.
            hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=False)
        return F.linear(hidden.float(), self.weight.float(), self.bias.float()), None


def compute_output_in_float32(layer: Any) -> None:
    """Make megatron's output layer compute in float32, whatever its dtype, from the same weights: the logits are not
    rounded to bfloat16 (MiniMax 2025, arXiv 2506.13585).

    Args:
        layer: a ``ColumnParallelLinear``, which may get the embedding's weight in each call.
    """
    # Its fused gradient would be added to an attribute of the weight that the float32 copy does not have.
    layer.gradient_accumulation_fusion = False
    own = layer.forward

    def forward(hidden: torch.Tensor, weight: torch.Tensor | None = None, runtime_gather_output: Any = None) -> Any:
        weight = layer.weight if weight is None else weight
        return own(hidden.float(), weight.float(), runtime_gather_output)

    layer.forward = forward


def _freeze_padding_token(embedding: Any, hf_config: Any) -> None:
    """Stop gradients to the embedding of ``pad_token_id``, as ``padding_idx`` does in Hugging Face's models.

    The embedding is not trained even where the padding token occurs as a real token. A tied output layer still
    learns its row.
    """
    pad = getattr(hf_config, "pad_token_id", None)
    if pad is None:
        return
    pad = int(pad) % int(hf_config.vocab_size)  # -1 is the last token

    def mask_gradient(module: Any, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        if output.requires_grad:
            is_pad = (inputs[0] == pad)[..., None]
            if module.reduce_scatter_embeddings:  # with sequence parallelism: (tokens of this rank, rows, hidden)
                group = module.tp_group
                is_pad = is_pad.transpose(0, 1).chunk(group.size())[group.rank()]
            output.register_hook(lambda gradient: gradient.masked_fill(is_pad, 0.0))

    embedding.register_forward_hook(mask_gradient)
