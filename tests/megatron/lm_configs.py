"""The small Llama of the language model tests, and parallel sizes."""

from transformers import LlamaConfig

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 131,  # does not divide by 2: the vocabulary is padded
    "max_position_embeddings": 64,
}
LLAMA = LlamaConfig(**SIZES)
TP2 = {"tensor_model_parallel_size": 2}
PP2 = {"pipeline_model_parallel_size": 2}
PP4 = {"pipeline_model_parallel_size": 4}
VPP = {**PP2, "virtual_pipeline_model_parallel_size": 2}
