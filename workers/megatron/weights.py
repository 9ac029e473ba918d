"""Weights of a decoder, from Hugging Face's names and shapes to Megatron's parts of a rank, and back.

Every parameter of a Megatron model is one `Weight`: the Hugging Face tensors that it is made of, how this rank's part
is cut from them, and how they are had whole again. The table in `weights_of` is all there is to know.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from workers.extras import require
from workers.megatron.checks import check_state_dict
from workers.megatron.config import has_qkv_bias, head_dim, key_value_heads
from workers.megatron.tensors import gather, join_gate_up, own_part, split_gate_up
from workers.megatron.value_head import ValueHead

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
SCORE, SCORE_BIAS = "score.weight", "score.bias"


@dataclass(frozen=True)
class Weight:
    """One parameter of a Megatron model.

    Attributes:
        parameter: this rank's part.
        names: the Hugging Face tensors that it is made of.
        part: those tensors, whole -> this rank's part.
        whole: this rank's part -> those tensors, whole; every tensor-parallel rank calls it.
    """

    parameter: nn.Parameter
    names: tuple[str, ...]
    part: Callable[[Sequence[torch.Tensor]], torch.Tensor]
    whole: Callable[[torch.Tensor], Sequence[torch.Tensor]]


def padded_vocab_size(hf_config: Any) -> int:
    """The vocabulary, rounded up to what the tensor-parallel ranks can share."""
    from megatron.core import parallel_state

    tp = parallel_state.get_tensor_model_parallel_world_size()
    return -(-int(hf_config.vocab_size) // tp) * tp


def weights_of(model: Any, hf_config: Any) -> Iterator[Weight]:
    """The weights of one GPTModel on megatron's local layer spec: all of the model, or one pipeline stage of it."""
    vocab = int(hf_config.vocab_size)
    in_vocab = (
        (lambda whole: own_part(_pad_rows(whole[0], padded_vocab_size(hf_config)))),
        (lambda part: [gather(part)[:vocab]]),
    )
    columns = (lambda whole: own_part(whole[0], dim=1)), (lambda part: [gather(part, dim=1)])
    same = (lambda whole: whole[0]), (lambda part: [part.detach().clone()])
    gated = join_gate_up, split_gate_up
    qkv = _Qkv(hf_config.num_attention_heads, key_value_heads(hf_config), head_dim(hf_config))

    if model.pre_process:
        yield Weight(model.embedding.word_embeddings.weight, (EMBEDDING,), *in_vocab)
    for layer in model.decoder.layers:
        at = f"model.layers.{layer.layer_number - 1}."
        attention, mlp = layer.self_attention, layer.mlp
        yield Weight(layer.input_layernorm.weight, (f"{at}input_layernorm.weight",), *same)
        yield Weight(layer.pre_mlp_layernorm.weight, (f"{at}post_attention_layernorm.weight",), *same)
        for kind in ("weight", "bias"):
            q, k, v, o = (f"{at}self_attn.{name}_proj.{kind}" for name in "qkvo")
            gate, up, down = (f"{at}mlp.{name}_proj.{kind}" for name in ("gate", "up", "down"))
            table = (
                (attention.linear_qkv, (q, k, v), (qkv.join, qkv.split)),
                (attention.linear_proj, (o,), columns if kind == "weight" else same),
                (mlp.linear_fc1, (gate, up), gated),
                (mlp.linear_fc2, (down,), columns if kind == "weight" else same),
            )
            for linear, names, (part, whole) in table:
                parameter = getattr(linear, kind)
                if parameter is not None:
                    yield Weight(parameter, names, part, whole)
    if model.post_process:
        yield Weight(model.decoder.final_layernorm.weight, ("model.norm.weight",), *same)
        if isinstance(model.output_layer, ValueHead):
            yield Weight(model.output_layer.weight, (SCORE,), *same)
            yield Weight(model.output_layer.bias, (SCORE_BIAS,), *same)
        elif model.output_layer.weight is not None:
            yield Weight(model.output_layer.weight, (EMBEDDING if tied(hf_config) else HEAD,), *in_vocab)


def hf_shapes(hf_config: Any, critic: bool = False) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor of the Hugging Face model, ``lm_head.weight`` included where it is tied; of a
    critic, those of the value head too."""
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
    everywhere = bool(getattr(hf_config, "attention_bias", False))
    with_bias = {name for name in linear if everywhere or (has_qkv_bias(hf_config) and name[-6:-5] in "qkv")}
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


def tied(hf_config: Any) -> bool:
    """Whether embedding and output layer share their weight."""
    return bool(getattr(hf_config, "tie_word_embeddings", False))


@torch.no_grad()
def load_hf(
    models: Sequence[Any], hf_config: Any, state_dict: Mapping[str, torch.Tensor], critic: bool = False
) -> None:
    """Take the weights of a Hugging Face causal language model; each rank keeps its part.

    A critic takes those of a model with a value head, or of a language model: then its output layer is left out, and
    the value head stays as it is.

    Args:
        models: this rank's GPTModels.
        hf_config: their Hugging Face config.
        state_dict: the whole model's, or a mapping that reads a tensor when it is asked for it.
        critic: whether they have a value head.

    Raises:
        ValueError: a key is missing or unknown, or a tensor has another shape. Nothing was changed then.
    """
    optional = {HEAD, SCORE, SCORE_BIAS} if critic else {HEAD} if tied(hf_config) else set()
    known = {name: value for name, value in state_dict.items() if not name.endswith("rotary_emb.inv_freq")}
    check_state_dict("load_hf_state_dict()", known, hf_shapes(hf_config, critic), optional)
    for model in models:
        for weight in weights_of(model, hf_config):
            if weight.names[0] in state_dict:
                weight.parameter.copy_(weight.part([state_dict[name] for name in weight.names]))
            elif weight.names == (SCORE_BIAS,) and SCORE in state_dict:
                weight.parameter.zero_()  # a head without a bias


@torch.no_grad()
def to_hf(models: Sequence[Any], hf_config: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, whole tensor) of what this rank's pipeline stage has, as Hugging Face names it. All tensor-parallel ranks
    go through it together. A tied output layer comes once, as the embedding, from where that is."""
    for model in models:
        for weight in weights_of(model, hf_config):
            if tied(hf_config) and weight.names == (EMBEDDING,) and not model.pre_process:
                continue
            yield from zip(weight.names, weight.whole(weight.parameter), strict=True)


def read_folder(folder: str | Path) -> dict[str, torch.Tensor]:
    """The tensors of a folder that Hugging Face's ``save_pretrained`` wrote. Their memory is the files', mapped: what
    is never looked at is never read.

    Raises:
        FileNotFoundError: the folder has no ``.safetensors`` files.
    """
    require("safetensors", extra="hf")
    from safetensors.torch import load_file

    files = sorted(Path(folder).glob("*.safetensors"))
    if not files:
        raise FileNotFoundError(f"{str(folder)!r} has no .safetensors files: is it what save_pretrained() wrote?")
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def read_hf(name: str) -> dict[str, torch.Tensor]:
    """The tensors of a folder, as `read_folder`, or of a model on the Hugging Face hub, by its name.

    Raises:
        FileNotFoundError: neither is there.
    """
    if Path(name).is_dir():
        return read_folder(name)
    require("huggingface_hub", extra="hf")
    from huggingface_hub import snapshot_download

    try:
        folder = snapshot_download(name, allow_patterns=["*.safetensors", "*.json"])
    except Exception as error:
        raise FileNotFoundError(f"{name!r} is no folder, and the Hugging Face hub does not give it: {error}") from error
    return read_folder(folder)


@dataclass(frozen=True)
class _Qkv:
    """Megatron keeps each group's queries, its key and its value next to each other, and cuts by groups.

    Attributes:
        heads: attention heads.
        groups: key and value heads.
        size: of one head.
    """

    heads: int
    groups: int
    size: int

    def join(self, whole: Sequence[torch.Tensor]) -> torch.Tensor:
        rest = whole[0].shape[1:]
        by_group = torch.cat([tensor.reshape(self.groups, -1, self.size, *rest) for tensor in whole], dim=1)
        return own_part(by_group).reshape(-1, *rest)

    def split(self, part: torch.Tensor) -> Sequence[torch.Tensor]:
        rest = part.shape[1:]
        per_group = self.heads // self.groups
        by_group = gather(part).reshape(self.groups, per_group + 2, self.size, *rest)
        return [tensor.reshape(-1, *rest) for tensor in by_group.split([per_group, 1, 1], dim=1)]


def _pad_rows(tensor: torch.Tensor, rows: int) -> torch.Tensor:
    if tensor.shape[0] == rows:
        return tensor
    return torch.cat([tensor, tensor.new_zeros(rows - tensor.shape[0], *tensor.shape[1:])])
