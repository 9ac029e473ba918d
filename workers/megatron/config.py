"""Megatron's configurations from what users have: a few keys of OmegaConf, or a Hugging Face config.

What megatron-core cannot do as it is installed here is refused in this file, with the reason.
"""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from workers.device import has_cuda
from workers.dtypes import dtype_of
from workers.extras import require
from workers.megatron.activations import activation
from workers.megatron.checks import check_names

if TYPE_CHECKING:
    import torch
    from megatron.core import ModelParallelConfig
    from megatron.core.transformer import TransformerConfig

RANK_KEYS = ("pipeline_model_parallel_rank", "virtual_pipeline_model_parallel_rank")
"""Keys that say where a rank stands. Megatron's parallel state knows it; they are taken and not needed."""

SUPPORTED_MODELS = ("llama", "qwen2")


def init_model_parallel_config(config: Mapping[str, Any]) -> ModelParallelConfig:
    """Megatron's `ModelParallelConfig` for layers that are used by themselves, such as `ParallelLlamaMLP`.

    Args:
        config: an OmegaConf or any mapping with the keys sequence_parallel, param_dtype ("fp32", "bf16", "fp16"),
            tensor_model_parallel_size, pipeline_model_parallel_rank, pipeline_model_parallel_size,
            virtual_pipeline_model_parallel_rank, virtual_pipeline_model_parallel_size, all of them optional, and any
            other field of ``ModelParallelConfig``. Sizes are by default those that megatron was initialised with.

    Raises:
        ValueError: an unknown key, a size that is not the one megatron was initialised with, or a combination that
            megatron-core cannot do here.
        ImportError: megatron-core is not installed.
    """
    require("megatron.core", extra="megatron")
    from megatron.core import ModelParallelConfig

    given = {str(key): value for key, value in dict(config).items() if key not in RANK_KEYS}
    dtype = dtype_of(given.pop("param_dtype", given.pop("params_dtype", "fp32")))
    known = [field.name for field in dataclasses.fields(ModelParallelConfig)]
    check_names("init_model_parallel_config()", given, [*known, "param_dtype", *RANK_KEYS])
    sizes = _parallel_sizes()
    _check_sizes(given, sizes)
    made = ModelParallelConfig(**{**_for_this_machine(dtype), **sizes, **given})
    refuse_impossible(made)
    return made


def transformer_config(
    hf_config: Any, param_dtype: Any = "fp32", overrides: Mapping[str, Any] | None = None
) -> TransformerConfig:
    """Megatron's `TransformerConfig` of a Hugging Face ``LlamaConfig`` or ``Qwen2Config``. Megatron's model parallelism
    must be initialised: its sizes are taken from there.

    Fusions that need Transformer Engine or Apex are off, so that the numbers are those of the Hugging Face model.

    Args:
        hf_config: the Hugging Face config.
        param_dtype: as in `init_model_parallel_config`.
        overrides: fields of ``TransformerConfig`` to set. What names and shapes of weights hang on is the Hugging Face
            config's to say, and parallel sizes are those that megatron was initialised with.

    Raises:
        ValueError: a model that cannot be built or cut in this way, an override that is no field or contradicts the
            Hugging Face config or the parallel sizes, or a combination that megatron-core cannot do here; the message
            has the reason.
        ImportError: megatron-core is not installed.
    """
    require("megatron.core", extra="megatron")
    from megatron.core.transformer import TransformerConfig

    overrides = dict(overrides or {})
    check_names("transformer_config(overrides=)", overrides, [f.name for f in dataclasses.fields(TransformerConfig)])
    _refuse_model(hf_config)
    sizes = _parallel_sizes()
    _check_divides(hf_config, sizes)
    _check_sizes(overrides, sizes)
    structure = _structure(hf_config)
    _check_structure(overrides, structure)
    fields = {
        **_for_this_machine(dtype_of(param_dtype)),
        **structure,
        "layernorm_epsilon": hf_config.rms_norm_eps,
        "activation_func": activation(hf_config.hidden_act),
        "hidden_dropout": 0.0,
        "attention_dropout": float(getattr(hf_config, "attention_dropout", 0.0) or 0.0),
        "init_method_std": hf_config.initializer_range,
        "masked_softmax_fusion": False,
        "bias_activation_fusion": False,
        "bias_dropout_fusion": False,
        "apply_rope_fusion": False,
        "persist_layer_norm": False,
        "use_cpu_initialization": not has_cuda(),
        **overrides,
        **sizes,
    }
    made = TransformerConfig(**fields)
    refuse_impossible(made)
    return made


def refuse_impossible(config: ModelParallelConfig) -> None:
    """Refuse what megatron-core cannot do as it is installed here.

    Raises:
        ValueError: with the reason and the way out.
    """
    if importlib.util.find_spec("transformer_engine") is None:
        if config.sequence_parallel:
            raise ValueError(
                "sequence_parallel=True needs Transformer Engine, which is not installed: megatron-core's own layer "
                "spec refuses it; set sequence_parallel=False"
            )
        if config.context_parallel_size > 1:
            raise ValueError(
                f"context_parallel_size={config.context_parallel_size} needs Transformer Engine, which is not "
                "installed: megatron-core's own attention sees only its part of the sequence; use 1"
            )
    virtual = config.virtual_pipeline_model_parallel_size or 1
    told_apart = config.overlap_p2p_comm and not config.batch_p2p_comm
    if config.pipeline_model_parallel_size == 2 and virtual > 1 and not told_apart:
        raise ValueError(
            f"pipeline_model_parallel_size=2 with virtual_pipeline_model_parallel_size={virtual} is silently wrong "
            "with batched point-to-point communication, where the next and the previous stage are the same rank; set "
            "overlap_p2p_comm=True and batch_p2p_comm=False"
        )


def key_value_heads(hf_config: Any) -> int:
    """Number of key and value heads."""
    return getattr(hf_config, "num_key_value_heads", None) or int(hf_config.num_attention_heads)


def head_dim(hf_config: Any) -> int:
    """Size of one attention head."""
    return getattr(hf_config, "head_dim", None) or hf_config.hidden_size // hf_config.num_attention_heads


def has_qkv_bias(hf_config: Any) -> bool:
    """Whether queries, keys and values have a bias: always in Qwen2, by choice in Llama."""
    return hf_config.model_type == "qwen2" or bool(getattr(hf_config, "attention_bias", False))


def rope_parameters(hf_config: Any) -> dict[str, Any]:
    """rope_theta, rope_type and what belongs to it, from configs of transformers 4 and 5."""
    found = getattr(hf_config, "rope_parameters", None)
    if not found:
        found = {"rope_theta": hf_config.rope_theta, **(getattr(hf_config, "rope_scaling", None) or {})}
    return {"rope_type": "default", **found}


def _for_this_machine(dtype: torch.dtype) -> dict[str, Any]:
    import torch

    return {
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype is torch.bfloat16,
        "fp16": dtype is torch.float16,
        # The whole weight is drawn on the CPU and cut, so that one seed gives one layer at every tp.
        "use_cpu_initialization": True,
        "gradient_accumulation_fusion": False,  # needs Apex
        "batch_p2p_sync": has_cuda(),
    }


def _parallel_sizes() -> dict[str, Any]:
    from megatron.core import parallel_state

    if not parallel_state.is_initialized():
        return {}
    return {
        "tensor_model_parallel_size": parallel_state.get_tensor_model_parallel_world_size(),
        "pipeline_model_parallel_size": parallel_state.get_pipeline_model_parallel_world_size(),
        "virtual_pipeline_model_parallel_size": parallel_state.get_virtual_pipeline_model_parallel_world_size(),
        "context_parallel_size": parallel_state.get_context_parallel_world_size(),
    }


def _check_sizes(given: Mapping[str, Any], sizes: Mapping[str, Any]) -> None:
    for name, value in given.items():
        if name in sizes and (value or 1) != (sizes[name] or 1):
            raise ValueError(
                f"{name}={value}, but megatron was initialised with {sizes[name]}; leave it out, or initialise "
                "megatron with it"
            )


def _structure(hf_config: Any) -> dict[str, Any]:
    """The fields of ``TransformerConfig`` that the names and shapes of the weights hang on."""
    return {
        "num_layers": hf_config.num_hidden_layers,
        "hidden_size": hf_config.hidden_size,
        "ffn_hidden_size": hf_config.intermediate_size,
        "num_attention_heads": hf_config.num_attention_heads,
        "num_query_groups": key_value_heads(hf_config),
        "kv_channels": head_dim(hf_config),
        "normalization": "RMSNorm",
        "gated_linear_unit": True,
        "add_bias_linear": bool(getattr(hf_config, "attention_bias", False)),
        "add_qkv_bias": has_qkv_bias(hf_config),
        # What no Llama or Qwen2 has.
        "attention_output_gate": False,
        "multi_latent_attention": False,
        "num_moe_experts": None,
        "qk_layernorm": False,
        "softmax_type": "vanilla",
    }


def _check_structure(overrides: Mapping[str, Any], structure: Mapping[str, Any]) -> None:
    for name, value in overrides.items():
        if name in structure and value != structure[name]:
            raise ValueError(
                f"{name}={value!r}, but the Hugging Face config decides it, and gives {structure[name]!r}; "
                "leave it out, or change the Hugging Face config"
            )


def _refuse_model(hf_config: Any) -> None:
    kind = getattr(hf_config, "model_type", None)
    if kind not in SUPPORTED_MODELS:
        raise ValueError(f"model_type {kind!r}: a LlamaConfig or Qwen2Config is needed ({', '.join(SUPPORTED_MODELS)})")
    rope = rope_parameters(hf_config)
    if rope["rope_type"] not in ("default", "llama3"):
        raise ValueError(f"rope_type {rope['rope_type']!r}: megatron-core's GPTModel has 'default' and 'llama3'")
    if rope["rope_type"] == "llama3":
        built_in = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
        for key, value in built_in.items():
            if rope.get(key, value) != value:
                raise ValueError(f"rope_parameters[{key!r}]={rope[key]}: megatron-core's llama3 scaling has {value}")
    if bool(getattr(hf_config, "attention_bias", False)) != bool(getattr(hf_config, "mlp_bias", False)):
        raise ValueError(
            "attention_bias and mlp_bias differ: megatron-core has biases on all linear layers, or on none"
        )
    if getattr(hf_config, "use_sliding_window", False):
        raise ValueError("use_sliding_window=True: megatron-core's own attention has no window here")


def _check_divides(hf_config: Any, sizes: Mapping[str, Any]) -> None:
    tp = sizes.get("tensor_model_parallel_size", 1)
    stages = sizes.get("pipeline_model_parallel_size", 1) * (sizes.get("virtual_pipeline_model_parallel_size") or 1)
    counts = {
        "num_attention_heads": hf_config.num_attention_heads,
        "num_key_value_heads": key_value_heads(hf_config),
        "intermediate_size": hf_config.intermediate_size,
    }
    for name, count in counts.items():
        if count % tp:
            raise ValueError(f"{name}={count} cannot be cut over tensor_model_parallel_size={tp}")
    if hf_config.num_hidden_layers % stages:
        raise ValueError(
            f"num_hidden_layers={hf_config.num_hidden_layers} cannot be cut over {stages} pipeline stages "
            "(pipeline_model_parallel_size times virtual_pipeline_model_parallel_size)"
        )
