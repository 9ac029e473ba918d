"""Weights of a decoder: from Hugging Face tensors to this rank's Megatron shards, and back.

Each parameter of a Megatron model is one `Weight`: the Hugging Face tensors it consists of, how this rank's shard is
made from them, and how they are restored. The table in `weights_of` is the only place that knows both sides' names.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from workers.extras import require
from workers.megatron.config import check_names, has_qkv_bias, head_dim, key_value_heads, padded_vocab_size, tied
from workers.megatron.gpt import ValueHead

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
SCORE, SCORE_BIAS = "score.weight", "score.bias"


# --- shards of tensor-parallel ranks --------------------------------------------------------------------


def own_shard(whole: torch.Tensor, dim: int = 0) -> torch.Tensor:
    """This tensor-parallel rank's equal share of a tensor, as a view."""
    from megatron.core import parallel_state

    size = parallel_state.get_tensor_model_parallel_world_size()
    return whole.chunk(size, dim)[parallel_state.get_tensor_model_parallel_rank()]


def gather(shard: torch.Tensor, dim: int = 0) -> torch.Tensor:
    """Concatenate the tensor-parallel ranks' shards. All of them call this, and each gets a new tensor."""
    from megatron.core import parallel_state

    size = parallel_state.get_tensor_model_parallel_world_size()
    shard = shard.detach().contiguous()
    if size == 1:
        return shard.clone()
    shards = [torch.empty_like(shard) for _ in range(size)]
    torch.distributed.all_gather(shards, shard, group=parallel_state.get_tensor_model_parallel_group())
    return torch.cat(shards, dim)


def join_gate_up(whole: Sequence[torch.Tensor]) -> torch.Tensor:
    """This rank's shard of the fused gate and up projection: its rows of the gate, then its rows of up."""
    return torch.cat([own_shard(tensor) for tensor in whole])


def split_gate_up(shard: torch.Tensor) -> list[torch.Tensor]:
    """Gate and up, whole, from the ranks' shards that `join_gate_up` made."""
    return [gather(half) for half in shard.chunk(2)]


def _qkv(hf_config: Any) -> tuple[Callable[..., torch.Tensor], Callable[..., Sequence[torch.Tensor]]]:
    """Join and split of the fused query, key and value projection.

    Megatron stores the queries of a key-value head next to its key and its value, and shards by key-value head.
    """
    groups, size = key_value_heads(hf_config), head_dim(hf_config)
    queries = hf_config.num_attention_heads // groups

    def join(whole: Sequence[torch.Tensor]) -> torch.Tensor:
        rest = whole[0].shape[1:]
        by_group = torch.cat([tensor.reshape(groups, -1, size, *rest) for tensor in whole], dim=1)
        return own_shard(by_group).reshape(-1, *rest)

    def split(shard: torch.Tensor) -> Sequence[torch.Tensor]:
        rest = shard.shape[1:]
        by_group = gather(shard).reshape(groups, queries + 2, size, *rest)
        return [tensor.reshape(-1, *rest) for tensor in by_group.split([queries, 1, 1], dim=1)]

    return join, split


# --- the table ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Weight:
    """One parameter of a Megatron model.

    Attributes:
        parameter: this rank's shard.
        names: the Hugging Face tensors it consists of.
        shard: whole Hugging Face tensors -> this rank's shard.
        whole: this rank's shard -> whole Hugging Face tensors. All tensor-parallel ranks call it together.
    """

    parameter: nn.Parameter
    names: tuple[str, ...]
    shard: Callable[[Sequence[torch.Tensor]], torch.Tensor]
    whole: Callable[[torch.Tensor], Sequence[torch.Tensor]]


def weights_of(model: Any, hf_config: Any) -> Iterator[Weight]:
    """The weights of one pipeline stage: a GPTModel on megatron's local layer spec."""
    vocab, padded = int(hf_config.vocab_size), padded_vocab_size(hf_config)

    def pad(rows: torch.Tensor) -> torch.Tensor:
        return rows if vocab == padded else torch.cat([rows, rows.new_zeros(padded - vocab, *rows.shape[1:])])

    by_vocab = (lambda whole: own_shard(pad(whole[0]))), (lambda shard: [gather(shard)[:vocab]])
    by_column = (lambda whole: own_shard(whole[0], dim=1)), (lambda shard: [gather(shard, dim=1)])
    replicated = (lambda whole: whole[0]), (lambda shard: [shard.detach().clone()])

    if model.pre_process:
        yield Weight(model.embedding.word_embeddings.weight, (EMBEDDING,), *by_vocab)
    for layer in model.decoder.layers:
        at = f"model.layers.{layer.layer_number - 1}."
        attention, mlp = layer.self_attention, layer.mlp
        yield Weight(layer.input_layernorm.weight, (f"{at}input_layernorm.weight",), *replicated)
        yield Weight(layer.pre_mlp_layernorm.weight, (f"{at}post_attention_layernorm.weight",), *replicated)
        for kind in ("weight", "bias"):
            q, k, v, o = (f"{at}self_attn.{name}_proj.{kind}" for name in "qkvo")
            gate, up, down = (f"{at}mlp.{name}_proj.{kind}" for name in ("gate", "up", "down"))
            by_input = by_column if kind == "weight" else replicated
            table = (
                (attention.linear_qkv, (q, k, v), _qkv(hf_config)),
                (attention.linear_proj, (o,), by_input),
                (mlp.linear_fc1, (gate, up), (join_gate_up, split_gate_up)),
                (mlp.linear_fc2, (down,), by_input),
            )
            for linear, names, (shard, whole) in table:
                parameter = getattr(linear, kind)
                if parameter is not None:
                    yield Weight(parameter, names, shard, whole)
    if model.post_process:
        yield Weight(model.decoder.final_layernorm.weight, ("model.norm.weight",), *replicated)
        if isinstance(model.output_layer, ValueHead):
            yield Weight(model.output_layer.weight, (SCORE,), *replicated)
            yield Weight(model.output_layer.bias, (SCORE_BIAS,), *replicated)
        elif model.output_layer.weight is not None:
            yield Weight(model.output_layer.weight, (EMBEDDING if tied(hf_config) else HEAD,), *by_vocab)


def hf_shapes(hf_config: Any, critic: bool = False) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor of the Hugging Face model, including a tied ``lm_head.weight``; for a critic also
    those of the value head."""
    hidden, wide, head = int(hf_config.hidden_size), int(hf_config.intermediate_size), head_dim(hf_config)
    heads, key_value = hf_config.num_attention_heads * head, key_value_heads(hf_config) * head
    linear = {
        "self_attn.q_proj": (heads, hidden),
        "self_attn.k_proj": (key_value, hidden),
        "self_attn.v_proj": (key_value, hidden),
        "self_attn.o_proj": (hidden, heads),
        "mlp.gate_proj": (wide, hidden),
        "mlp.up_proj": (wide, hidden),
        "mlp.down_proj": (hidden, wide),
    }
    all_biases = bool(getattr(hf_config, "attention_bias", False))
    with_bias = {name for name in linear if all_biases or (has_qkv_bias(hf_config) and name[-6:-5] in "qkv")}
    layer: dict[str, tuple[int, ...]] = {f"{name}.weight": shape for name, shape in linear.items()}
    layer |= {f"{name}.bias": linear[name][:1] for name in with_bias}
    layer |= {"input_layernorm.weight": (hidden,), "post_attention_layernorm.weight": (hidden,)}
    vocab = (int(hf_config.vocab_size), hidden)
    shapes: dict[str, tuple[int, ...]] = {EMBEDDING: vocab, "model.norm.weight": (hidden,), HEAD: vocab}
    for number in range(hf_config.num_hidden_layers):
        shapes |= {f"model.layers.{number}.{name}": shape for name, shape in layer.items()}
    if critic:
        shapes |= {SCORE: (1, hidden), SCORE_BIAS: (1,)}
    return shapes


# --- reading and writing --------------------------------------------------------------------------------


@torch.no_grad()
def load_hf(
    models: Sequence[Any], hf_config: Any, state_dict: Mapping[str, torch.Tensor], critic: bool = False
) -> None:
    """Load the weights of a Hugging Face causal language model; each rank copies its shards.

    A critic loads the weights of a model with a value head, or of a language model: then the output layer is skipped
    and the value head keeps its weights.

    Args:
        models: this rank's GPTModels.
        hf_config: their Hugging Face config.
        state_dict: the whole model's tensors, or a mapping that reads a tensor when it is accessed.
        critic: whether the models have a value head.

    Raises:
        ValueError: a name is missing or unknown, or a tensor has the wrong shape. No weight was changed.
    """
    optional = {HEAD, SCORE, SCORE_BIAS} if critic else {HEAD} if tied(hf_config) else set()
    known = {name: value for name, value in state_dict.items() if not name.endswith("rotary_emb.inv_freq")}
    check_state_dict("load_hf_state_dict()", known, hf_shapes(hf_config, critic), optional)
    for model in models:
        for weight in weights_of(model, hf_config):
            if weight.names[0] in state_dict:
                weight.parameter.copy_(weight.shard([state_dict[name] for name in weight.names]))
            elif weight.names == (SCORE_BIAS,) and SCORE in state_dict:
                weight.parameter.zero_()  # a head without a bias


@torch.no_grad()
def to_hf(models: Sequence[Any], hf_config: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """(Hugging Face name, whole tensor) of this rank's pipeline stages.

    All tensor-parallel ranks iterate together. A tied output layer comes once, as the embedding, from the first stage.
    """
    for model in models:
        for weight in weights_of(model, hf_config):
            if tied(hf_config) and weight.names == (EMBEDDING,) and not model.pre_process:
                continue
            yield from zip(weight.names, weight.whole(weight.parameter), strict=True)


def check_state_dict(
    where: str,
    state_dict: Mapping[str, torch.Tensor],
    shapes: Mapping[str, tuple[int, ...]],
    optional: Collection[str] = (),
) -> None:
    """Check the names and shapes of a state dict, before any tensor is copied.

    Args:
        where: the function, for the message.
        state_dict: what was given.
        shapes: name -> expected shape.
        optional: names that may be missing.

    Raises:
        ValueError: a name is missing or unknown, or a tensor has the wrong shape.
    """
    if unknown := state_dict.keys() - shapes.keys():
        check_names(where, sorted(unknown), shapes)
    missing = [name for name in shapes if name not in state_dict and name not in optional]
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise ValueError(f"{where}: the state dict lacks {missing[0]!r}{more}")
    for name in state_dict:
        if (shape := tuple(state_dict[name].shape)) != shapes[name]:
            raise ValueError(f"{where}: {name!r} has shape {shape}; expected {shapes[name]}")


def read_folder(folder: str | Path) -> dict[str, torch.Tensor]:
    """The tensors of a folder written by Hugging Face's ``save_pretrained``. The files are memory-mapped: a tensor that
    is not used is not read.

    Raises:
        FileNotFoundError: the folder has no ``.safetensors`` files.
    """
    require("safetensors", extra="hf")
    from safetensors.torch import load_file

    files = sorted(Path(folder).glob("*.safetensors"))
    if not files:
        raise FileNotFoundError(
            f"{str(folder)!r} has no .safetensors files; write the model there with save_pretrained()"
        )
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def read_hf(name: str) -> dict[str, torch.Tensor]:
    """The tensors of a local folder (see `read_folder`) or of a model on the Hugging Face hub.

    Raises:
        FileNotFoundError: there is no such folder and no such model.
    """
    if Path(name).is_dir():
        return read_folder(name)
    require("huggingface_hub", extra="hf")
    from huggingface_hub import snapshot_download

    try:
        folder = snapshot_download(name, allow_patterns=["*.safetensors", "*.json"])
    except Exception as error:  # huggingface_hub raises many types, requests' and its own
        raise FileNotFoundError(
            f"{name!r} is not a folder, and it could not be downloaded from the Hugging Face hub: {error}"
        ) from error
    return read_folder(folder)
