"""Megatron configs, from a Hugging Face config or from a few OmegaConf keys.

Combinations that the installed megatron-core does not support are refused here, with the reason.
"""

from __future__ import annotations

import dataclasses
import difflib
import importlib.util
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from workers.data.routed_experts import RoutingShape
from workers.device import dtype_of, has_cuda
from workers.extras import require

if TYPE_CHECKING:
    import torch
    from megatron.core import ModelParallelConfig
    from megatron.core.transformer import TransformerConfig

RANK_KEYS = ("pipeline_model_parallel_rank", "virtual_pipeline_model_parallel_rank")
"""Keys that name a rank's coordinates. They are accepted and ignored: megatron's parallel state has them."""

SUPPORTED_MODELS = ("llama", "mistral", "qwen2", "qwen3", "mixtral", "qwen2_moe", "qwen3_moe")
"""The ``model_type`` of Hugging Face configs that Megatron models can be made from."""

LOAD_BALANCING = ("seq_aux_loss", "aux_loss")
"""The ``moe_router_load_balancing_type`` that `workers.megatron.moe` has."""

DISPATCHERS = ("alltoall", "allgather")
"""The ``moe_token_dispatcher_type`` that were run."""

ROPE_TYPES = ("default", "linear", "llama3", "yarn")
"""The ``rope_type`` of these configs. The frequencies of others depend on the length of the sequence."""


def init_model_parallel_config(config: Mapping[str, Any]) -> ModelParallelConfig:
    """Make megatron's `ModelParallelConfig` for stand-alone layers such as `ParallelLlamaMLP`.

    Args:
        config: an OmegaConf or any mapping. All keys are optional: sequence_parallel, param_dtype ("fp32", "bf16",
            "fp16"), tensor_model_parallel_size, pipeline_model_parallel_rank, pipeline_model_parallel_size,
            virtual_pipeline_model_parallel_rank, virtual_pipeline_model_parallel_size, and any other field of
            ``ModelParallelConfig``. Sizes default to those that megatron was initialized with.

    Raises:
        ValueError: an unknown key, a size that differs from the one megatron was initialized with, or a combination
            that megatron-core does not support here.
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
    made = ModelParallelConfig(**{**_machine_fields(dtype), **sizes, **given})
    refuse_unsupported(made)
    return made


def transformer_config(
    hf_config: Any, param_dtype: Any = "fp32", overrides: Mapping[str, Any] | None = None
) -> TransformerConfig:
    """Make megatron's `TransformerConfig` from the Hugging Face config of a model in `SUPPORTED_MODELS`.

    Parallel sizes are those that megatron was initialized with. Fusions that need Transformer Engine or Apex are off,
    so that the results match the Hugging Face model.

    Args:
        hf_config: the Hugging Face config.
        param_dtype: as in `init_model_parallel_config`.
        overrides: fields of ``TransformerConfig`` to set. Fields that determine the weights and the attention come from
            the Hugging Face config and cannot be overridden; neither can parallel sizes.

    Raises:
        ValueError: the model is not supported or not divisible by the parallel sizes, an override is unknown or
            contradicts the Hugging Face config or the parallel sizes, or megatron-core does not support the
            combination here.
        ImportError: megatron-core is not installed.
    """
    require("megatron.core", extra="megatron")
    from megatron.core.transformer import TransformerConfig

    overrides = dict(overrides or {})
    check_names("transformer_config(overrides=)", overrides, [f.name for f in dataclasses.fields(TransformerConfig)])
    sizes = _parallel_sizes()
    check_model(hf_config, sizes)
    _check_sizes(overrides, sizes)
    structure = _structure(hf_config)
    for name, value in overrides.items():
        if name in structure and value != structure[name]:
            raise ValueError(
                f"{name}={value!r} contradicts the Hugging Face config, which has {structure[name]!r}; remove the "
                "override, or change the Hugging Face config"
            )
    fields = {
        **_machine_fields(dtype_of(param_dtype)),
        **structure,
        "layernorm_epsilon": hf_config.rms_norm_eps,
        "activation_func": activation(hf_config.hidden_act),
        **_experts_fields(hf_config, overrides, sizes),
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
    if made.context_parallel_size > 1 or (made.sequence_parallel and not made.num_moe_experts):
        raise ValueError(
            f"context_parallel_size={made.context_parallel_size} and sequence_parallel={made.sequence_parallel}: "
            "models are built of megatron-core's local layers, also where Transformer Engine is installed, and these "
            "support neither; use 1 and False"
        )
    refuse_unsupported(made)
    return made


def refuse_unsupported(config: ModelParallelConfig) -> None:
    """Refuse combinations that the installed megatron-core does not support.

    Raises:
        ValueError: with the reason and what to change.
    """
    if importlib.util.find_spec("transformer_engine") is None:
        # Mixtures of experts have norms of their own, see workers.megatron.moe.
        if config.sequence_parallel and not getattr(config, "num_moe_experts", None):
            raise ValueError(
                "sequence_parallel=True needs Transformer Engine, which is not installed: megatron-core's local layer "
                "spec rejects it; set sequence_parallel=False"
            )
        if config.context_parallel_size > 1:
            raise ValueError(
                f"context_parallel_size={config.context_parallel_size} needs Transformer Engine, which is not "
                "installed: megatron-core's local attention sees only this rank's shard of the sequence; use 1"
            )
        if getattr(config, "moe_grouped_gemm", False):
            raise ValueError(
                "moe_grouped_gemm=True needs Transformer Engine, which is not installed: leave it out, and the experts "
                "of a rank run one after the other"
            )
    if getattr(config, "window_size", None) and getattr(config, "masked_softmax_fusion", False):
        raise ValueError(
            "masked_softmax_fusion=True does not suit a sliding window, which megatron-core's fused softmax ignores: "
            "leave it out"
        )
    virtual = config.virtual_pipeline_model_parallel_size or 1
    unbatched = config.overlap_p2p_comm and not config.batch_p2p_comm
    if config.pipeline_model_parallel_size == 2 and virtual > 1 and not unbatched:
        raise ValueError(
            f"pipeline_model_parallel_size=2 with virtual_pipeline_model_parallel_size={virtual} silently gives wrong "
            "results with batched point-to-point communication, because the next and the previous stage are the same "
            "rank; set overlap_p2p_comm=True and batch_p2p_comm=False"
        )


# --- facts of a Hugging Face config ---------------------------------------------------------------------


def key_value_heads(hf_config: Any) -> int:
    """Number of key and value heads."""
    return getattr(hf_config, "num_key_value_heads", None) or int(hf_config.num_attention_heads)


def head_dim(hf_config: Any) -> int:
    """Size of one attention head."""
    return getattr(hf_config, "head_dim", None) or hf_config.hidden_size // hf_config.num_attention_heads


def has_qkv_bias(hf_config: Any) -> bool:
    """Whether queries, keys and values have a bias: always in Qwen2, configurable in Llama."""
    if hf_config.model_type == "qwen2_moe":
        return bool(hf_config.qkv_bias)
    return hf_config.model_type == "qwen2" or bool(getattr(hf_config, "attention_bias", False))


def has_qk_norm(hf_config: Any) -> bool:
    """Whether each head's queries and keys are normalized: always in Qwen3."""
    return hf_config.model_type in ("qwen3", "qwen3_moe")


@dataclass(frozen=True)
class Experts:
    """The mixture of experts of a Hugging Face config.

    Attributes:
        shape: how many there are, in which layers, and how many compute a token.
        width: size of an expert's hidden layer.
        normalized: whether the scores of a token's experts are divided by their sum.
        shared_width: size of the hidden layer of the expert that every token goes to; None without one.
        block: what the Hugging Face checkpoint calls the feed-forward part of a layer with experts.
        names: what it calls an expert's gate, up and down projections.
    """

    shape: RoutingShape
    width: int
    normalized: bool
    shared_width: int | None = None
    block: str = "mlp"
    names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")


def experts_of(hf_config: Any) -> Experts | None:
    """The mixture of experts of a config in `SUPPORTED_MODELS`; None without one."""
    kind = hf_config.model_type
    if kind not in ("mixtral", "qwen2_moe", "qwen3_moe") or (shape := RoutingShape.of(hf_config)) is None:
        return None
    if kind == "mixtral":
        return Experts(shape, hf_config.intermediate_size, True, None, "block_sparse_moe", ("w1", "w3", "w2"))
    shared = hf_config.shared_expert_intermediate_size if kind == "qwen2_moe" else None
    return Experts(shape, hf_config.moe_intermediate_size, bool(hf_config.norm_topk_prob), shared)


def window_layers(hf_config: Any) -> tuple[int | None, list[int]]:
    """The sliding window, and which layers have it.

    Returns:
        Number of tokens that a token sees in such a layer, itself included, or None without any; and for each layer 1
        if it has the window, 0 if it sees all tokens before.
    """
    layers = int(hf_config.num_hidden_layers)
    if hf_config.model_type in ("mistral", "mixtral", "qwen3_moe"):
        with_window = [1] * layers
    elif hf_config.model_type in ("qwen2", "qwen3", "qwen2_moe"):
        with_window = [int(kind == "sliding_attention") for kind in hf_config.layer_types]
    else:
        with_window = [0] * layers
    window = getattr(hf_config, "sliding_window", None)
    return (int(window), with_window) if window and any(with_window) else (None, [0] * layers)


def scaled_rope(hf_config: Any) -> tuple[torch.Tensor, float] | None:
    """The rotary embedding of a config whose ``rope_type`` is not "default", by transformers' own functions.

    ``GPTModel`` itself has llama3 scaling with fixed parameters, and YaRN (Peng et al., 2023, arXiv:2309.00071) without
    ``attention_factor``.

    Returns:
        Inverse frequencies, (head_dim / 2,) float32, and the factor of queries and keys; None for "default".
    """
    kind = rope_parameters(hf_config)["rope_type"]
    if kind == "default":
        return None
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    frequencies, factor = ROPE_INIT_FUNCTIONS[kind](hf_config)
    return frequencies.float(), float(factor)


def tied(hf_config: Any) -> bool:
    """Whether embedding and output layer share their weight."""
    return bool(getattr(hf_config, "tie_word_embeddings", False))


def padded_vocab_size(hf_config: Any) -> int:
    """The vocabulary size, rounded up to a multiple of the tensor-parallel size."""
    tp = _parallel_sizes()["tensor_model_parallel_size"]
    return -(-int(hf_config.vocab_size) // tp) * int(tp)


def rope_parameters(hf_config: Any) -> dict[str, Any]:
    """rope_theta, rope_type and the parameters of that type, from configs of transformers 4 and 5."""
    rope = getattr(hf_config, "rope_parameters", None)
    if not rope:
        rope = {"rope_theta": hf_config.rope_theta, **(getattr(hf_config, "rope_scaling", None) or {})}
    return {"rope_type": "default", **rope}


def activation(name: str) -> Callable[..., Any]:
    """An activation function by its name in ``transformers.activations``; "silu" and "swish" work without transformers.

    Raises:
        ValueError: transformers has no activation of this name.
        ImportError: transformers is not installed.
    """
    import torch.nn.functional as F

    if name in ("silu", "swish"):
        return F.silu
    require("transformers", extra="hf")
    from transformers.activations import ACT2FN

    if name not in ACT2FN:
        close = difflib.get_close_matches(str(name), ACT2FN, n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"use one of {', '.join(sorted(ACT2FN))}"
        raise ValueError(f"hidden_act={name!r} is not an activation function of transformers; {hint}")
    function: Callable[..., Any] = ACT2FN[name]
    return function


def check_names(where: str, given: Iterable[str], known: Iterable[str]) -> None:
    """Check that every given name is known.

    Raises:
        ValueError: a name is unknown; the message suggests the closest known one.
    """
    known = list(known)
    for name in given:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            raise ValueError(f"{where}: unknown name {name!r}{hint}")


# --- helpers --------------------------------------------------------------------------------------------


def _machine_fields(dtype: torch.dtype) -> dict[str, Any]:
    import torch

    return {
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype is torch.bfloat16,
        "fp16": dtype is torch.float16,
        # The whole weight is drawn on the CPU and then split, so one seed gives the same layer at every tp.
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
        "expert_model_parallel_size": parallel_state.get_expert_model_parallel_world_size(),
        "expert_tensor_parallel_size": parallel_state.get_expert_tensor_parallel_world_size(),
    }


def _check_sizes(given: Mapping[str, Any], sizes: Mapping[str, Any]) -> None:
    for name, value in given.items():
        if name in sizes and (value or 1) != (sizes[name] or 1):
            raise ValueError(
                f"{name}={value}, but megatron was initialised with {sizes[name]}; remove it, or initialise megatron "
                "with this size"
            )


def _structure(hf_config: Any) -> dict[str, Any]:
    """The fields of ``TransformerConfig`` that determine the names and shapes of the weights, and the attention."""
    window, with_window = window_layers(hf_config)
    _, factor = scaled_rope(hf_config) or (None, 1.0)
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
        "qk_layernorm": has_qk_norm(hf_config),
        "window_size": None if window is None else (window - 1, 0),  # tokens before, and after
        "window_attn_skip_freq": None if window is None else with_window,
        # Queries and keys are multiplied by the factor, so their product by its square.
        "softmax_scale": None if factor == 1 else factor**2 / head_dim(hf_config) ** 0.5,
        # Features that none of these models has.
        "attention_output_gate": False,
        "multi_latent_attention": False,
        "softmax_type": "vanilla",
        **_experts_structure(experts_of(hf_config)),
    }


def _experts_structure(experts: Experts | None) -> dict[str, Any]:
    if experts is None:
        return {"num_moe_experts": None}
    return {
        "num_moe_experts": experts.shape.experts,
        "moe_ffn_hidden_size": experts.width,
        "moe_layer_freq": [int(layer in experts.shape.sparse) for layer in range(experts.shape.layers)],
        "moe_router_topk": experts.shape.k,
        # The softmax of the chosen logits is that of all logits, divided by its sum over the chosen.
        "moe_router_pre_softmax": not experts.normalized,
        "moe_shared_expert_intermediate_size": experts.shared_width,
        "moe_shared_expert_gate": experts.shared_width is not None,
        # Features that none of these models has.
        "moe_router_score_function": "softmax",
        "moe_router_enable_expert_bias": False,
        "moe_router_num_groups": None,
        "moe_router_group_topk": None,
        "moe_router_topk_scaling_factor": None,
        "moe_expert_capacity_factor": None,
        "moe_latent_size": None,
        # Routes are replayed by workers.megatron.moe, without megatron's registry.
        "moe_enable_routing_replay": False,
        # Only megatron's own router reads these; `workers.megatron.moe.MoERouter` replaces it.
        "moe_input_jitter_eps": None,
        "moe_router_force_load_balancing": False,
    }


def _experts_fields(hf_config: Any, overrides: Mapping[str, Any], sizes: Mapping[str, Any]) -> dict[str, Any]:
    """Defaults of the fields that do not determine the model, and what megatron needs of the parallel sizes."""
    if experts_of(hf_config) is None:
        return {}
    balancing, dispatcher = (
        overrides.get("moe_router_load_balancing_type", LOAD_BALANCING[0]),
        overrides.get("moe_token_dispatcher_type", DISPATCHERS[0]),
    )
    for name, value, choices in (
        ("moe_router_load_balancing_type", balancing, LOAD_BALANCING),
        ("moe_token_dispatcher_type", dispatcher, DISPATCHERS),
    ):
        if value not in choices:
            raise ValueError(f"{name}={value!r} is not supported; use one of {', '.join(map(repr, choices))}")
    for name in ("moe_aux_loss_coeff", "moe_z_loss_coeff"):
        if not isinstance(overrides.get(name) or 0.0, (int, float)) or (overrides.get(name) or 0.0) < 0:
            raise ValueError(f"{name}={overrides[name]!r} must be a number of at least 0")
    # Without sequence parallelism each tensor-parallel rank would send the same tokens to the experts, and their
    # gradient would count each token once per rank.
    parallel = sizes.get("tensor_model_parallel_size", 1) > 1
    if overrides.get("sequence_parallel", parallel) != parallel:
        raise ValueError(
            f"sequence_parallel={overrides['sequence_parallel']!r}: a mixture of experts needs sequence parallelism if "
            "and only if tensor_model_parallel_size is above 1; remove the override"
        )
    return {
        "moe_token_dispatcher_type": DISPATCHERS[0],
        "moe_router_load_balancing_type": LOAD_BALANCING[0],
        "sequence_parallel": parallel,
    }


def check_model(hf_config: Any, sizes: Mapping[str, Any]) -> None:
    """Check that Megatron can run a model at these parallel sizes, without megatron-core.

    Raises:
        ValueError: with the reason.
    """
    _refuse_model(hf_config)
    _check_divisible(hf_config, sizes)


def _refuse_model(hf_config: Any) -> None:
    kind = getattr(hf_config, "model_type", None)
    if kind not in SUPPORTED_MODELS:
        raise ValueError(f"model_type {kind!r} is not supported on Megatron; use one of {', '.join(SUPPORTED_MODELS)}")
    rope = rope_parameters(hf_config)
    if rope["rope_type"] not in ROPE_TYPES:
        raise ValueError(
            f"rope_type {rope['rope_type']!r} is not supported on Megatron; use one of {', '.join(ROPE_TYPES)}"
        )
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise ValueError(
            f"rope_parameters['partial_rotary_factor']={rope['partial_rotary_factor']} is not supported: a {kind} "
            "rotates all dims of a head"
        )
    of_mlp = kind == "llama" and bool(getattr(hf_config, "mlp_bias", False))  # other models do not read it
    if bool(getattr(hf_config, "attention_bias", False)) != of_mlp:
        raise ValueError(
            "attention_bias and mlp_bias differ, but megatron-core adds biases to all linear layers or to none; set "
            "both to the same value. Only a 'llama' can have an mlp_bias"
        )
    if (experts := experts_of(hf_config)) is not None:
        _refuse_experts(experts)
        if getattr(hf_config, "router_jitter_noise", 0.0):
            raise ValueError(
                f"router_jitter_noise={hf_config.router_jitter_noise} is not supported on Megatron, where "
                "recomputation would draw other noise; set it to 0"
            )
    kinds = set(getattr(hf_config, "layer_types", None) or ()) if kind not in ("mistral", "mixtral") else set()
    if unknown := kinds - {"full_attention", "sliding_attention"}:
        raise ValueError(f"layer_types has {min(unknown)!r}; Megatron has 'full_attention' and 'sliding_attention'")


def _refuse_experts(experts: Experts) -> None:
    k, count = experts.shape.k, experts.shape.experts
    if k > count:
        raise ValueError(f"num_experts_per_tok={k} must be at most the number of experts, {count}")
    if k == 1 and experts.normalized:
        raise ValueError(
            "num_experts_per_tok=1 with normalized scores is not supported: each token's only score would be 1, and "
            "the router would get no gradient"
        )
    if not experts.shape.sparse:
        raise ValueError("mlp_only_layers and decoder_sparse_step leave no layer with experts; use a dense model_type")


def _check_divisible(hf_config: Any, sizes: Mapping[str, Any]) -> None:
    tp = sizes.get("tensor_model_parallel_size", 1)
    stages = sizes.get("pipeline_model_parallel_size", 1) * (sizes.get("virtual_pipeline_model_parallel_size") or 1)
    counts = {
        "num_attention_heads": hf_config.num_attention_heads,
        "num_key_value_heads": key_value_heads(hf_config),
        "intermediate_size": hf_config.intermediate_size,
    }
    for name, count in counts.items():
        if count % tp:
            raise ValueError(f"{name}={count} is not divisible by tensor_model_parallel_size={tp}")
    experts = experts_of(hf_config)
    ep, etp = sizes.get("expert_model_parallel_size") or 1, sizes.get("expert_tensor_parallel_size") or tp
    if experts is None and ep > 1:
        raise ValueError(f"expert_model_parallel_size={ep}, but model_type {hf_config.model_type!r} has no experts")
    if experts is not None:
        for what, count, name, size in (
            ("number of experts", experts.shape.experts, "expert_model_parallel_size", ep),
            ("width of an expert", experts.width, "expert_tensor_parallel_size", etp),
            ("width of the shared expert", experts.shared_width or 0, "tensor_model_parallel_size", tp),
        ):
            if count % size:
                raise ValueError(f"the {what}, {count}, is not divisible by {name}={size}")
    if hf_config.num_hidden_layers % stages:
        raise ValueError(
            f"num_hidden_layers={hf_config.num_hidden_layers} is not divisible by {stages} pipeline stages "
            "(pipeline_model_parallel_size times virtual_pipeline_model_parallel_size)"
        )
