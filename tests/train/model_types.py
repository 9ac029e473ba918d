"""A tiny random model of each decoder type of transformers that the library is tested with."""

import torch
from transformers import AutoConfig, AutoModelForCausalLM

TINY = {
    "vocab_size": 32,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,  # with the usual .02 attention is nearly uniform, and a wrong mask hardly matters
    "init_std": 0.2,
    "ffn_dim": 48,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id")),
    **dict.fromkeys(
        (
            *("attention_dropout", "hidden_dropout", "embedding_dropout", "activation_dropout", "dropout"),
            *("attn_pdrop", "resid_pdrop", "embd_pdrop", "embed_dropout", "hidden_dropout_prob", "attn_dropout_prob"),
            *("attention_probs_dropout_prob", "residual_dropout", "layerdrop", "router_jitter_noise"),
            "input_jitter_noise",
        ),
        0.0,
    ),
}
"""Fields that a config has under these names get these values."""

DENSE = """llama mistral qwen2 qwen3 apertus arcee biogpt bitnet bloom cohere cohere2 diffllama ernie4_5 exaone4 falcon
gemma gemma2 gemma3_text glm glm4 gpt2 gpt_bigcode gpt_neox granite helium hunyuan_v1_dense ministral ministral3 mpt
nanochat nemotron olmo olmo2 olmo3 opt persimmon phi phi3 seed_oss smollm3 stablelm starcoder2 vaultgemma xglm"""
EXPERTS = """ernie4_5_moe flex_olmo glm4_moe gpt_oss granitemoe hunyuan_v1_moe llama4_text mixtral olmoe phimoe
qwen2_moe qwen3_moe"""
STATES = "falcon_mamba mamba minimax"

LATENT = {"kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8,
          "num_key_value_heads": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}  # fmt: skip
DELTA = {"linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
         "layer_types": ["linear_attention", "full_attention"]}  # fmt: skip
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_n_groups": 1, "mamba_d_state": 8}
GEMMA = {"num_kv_shared_layers": 0, "layer_types": ["sliding_attention", "full_attention"],
         "vocab_size_per_layer_input": 32, "hidden_size_per_layer_input": 8}  # fmt: skip

DECODERS = {
    **{name: {} for name in f"{DENSE} {EXPERTS} {STATES}".split()},
    "bamba": {**MAMBA, "attn_layer_indices": [1]},
    "codegen": {"rotary_dim": 4},
    "deepseek_v2": LATENT,
    "deepseek_v3": LATENT,
    "falcon_h1": {**MAMBA, "mamba_d_ssm": 64},
    "gemma3n_text": {**GEMMA, "laurel_rank": 4, "altup_num_inputs": 2, "activation_sparsity_pattern": [0.0, 0.0]},
    "gemma4_text": {**GEMMA, "global_head_dim": 8},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "gptj": {"rotary_dim": 4},
    "granitemoehybrid": {**MAMBA, "layer_types": ["mamba", "attention"]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "mamba2": {"num_heads": 8, "head_dim": 8, "n_groups": 1, "state_size": 8},
    "qwen3_5_text": DELTA,
    "qwen3_next": DELTA,
    "recurrent_gemma": {"num_hidden_layers": 3},
}
"""model_type -> fields of its own."""

REFUSED = ("bert", "clip", "electra", "roberta", "t5")
"""Types that no backend trains."""


def config_of(model_type):
    """The tiny config of a type."""
    plain = AutoConfig.for_model(model_type)
    known = {*plain.to_dict(), *type(plain).attribute_map}
    fields = {name: value for name, value in TINY.items() if name in known}
    if isinstance(getattr(type(plain), "head_dim", None), property):
        fields.pop("head_dim", None)
    return AutoConfig.for_model(model_type, **{**fields, **DECODERS.get(model_type, {})})


def model_of(config, seed=0):
    """A random model, in the mode for training: nothing of it is random any more."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32).train()
