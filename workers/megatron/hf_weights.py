"""Weights of a decoder: from Hugging Face tensors to this rank's Megatron shards, and back.

Each parameter of a Megatron model is one `Weight`: the Hugging Face tensors it consists of, and how they are split over
the tensor-parallel ranks. Loading, export and weight sync follow from it. The table in `weights_of` is the only place
that knows both sides' names.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from workers.distributed import gathered
from workers.extras import require
from workers.megatron.config import Experts, check_names, experts_of, has_qk_norm, key_value_heads, tied
from workers.megatron.gpt import ValueHead
from workers.seeds import mixed_seed
from workers.weight_sync.weight_plan import Shard

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
SCORE, SCORE_BIAS = "score.weight", "score.bias"


# --- the table ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Weight:
    """One parameter of a Megatron model: this rank's equal share of each of some Hugging Face tensors.

    Attributes:
        parameter: this rank's shard.
        names: the Hugging Face tensors it consists of.
        dim: dim of these tensors along which the tensor-parallel ranks split them; None if each rank has them whole.
        blocks: number of blocks along dim 0 of ``parameter``. Each has rows of all the tensors, in the order of
            ``names``.
        ratio: how many rows of each tensor a block has, up to a common factor; None if equally many.
        rows: of the whole tensor, if it is padded to a multiple of the tensor-parallel size.
        expert: whether it is of an expert, which the expert-tensor-parallel ranks split.
    """

    parameter: nn.Parameter
    names: tuple[str, ...]
    dim: int | None = 0
    blocks: int = 1
    ratio: tuple[int, ...] | None = None
    rows: int | None = None
    expert: bool = False

    def load(self, state_dict: Mapping[str, torch.Tensor]) -> None:
        """Copy this rank's shares of whole tensors into the parameter. Padding is set to 0."""
        for shard, part in zip(self.shards(), self._parts(), strict=True):
            box = tuple(slice(begin, begin + size) for begin, size in zip(shard.begin, shard.size, strict=True))
            own = state_dict[shard.name][box]
            if self.rows is not None and len(own) < len(self.parameter):
                own = torch.cat([own, own.new_zeros(len(self.parameter) - len(own), *own.shape[1:])])
            part.copy_(own.reshape(part.shape))

    def shards(self) -> Iterator[Shard]:
        """This rank's shares as parts of the whole tensors, without padding. A shard whose ``size`` has a 0 is only
        padding."""
        rank, tp = _tensor_parallel(self.expert)
        for number, (name, part) in enumerate(zip(self.names, self._parts(), strict=True)):
            size = [part.shape[:3].numel(), *part.shape[3:]]
            shape, begin = list(size), [0] * len(size)
            if self.dim is not None:
                shape[self.dim] = self.rows or tp * size[self.dim]
                begin[self.dim] = min(rank * size[self.dim], shape[self.dim])
                size[self.dim] = min(size[self.dim], shape[self.dim] - begin[self.dim])
            read = partial(self._share, number, size[0])
            yield Shard(name, tuple(shape), tuple(begin), tuple(size), self.parameter.dtype, read)

    def whole(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (name, whole tensor), new tensors. All tensor-parallel ranks call it together."""
        for number, name in enumerate(self.names):
            yield name, gather(self._share(number), self.dim, self.expert)[: self.rows]

    def _share(self, number: int, rows: int | None = None) -> torch.Tensor:
        """This rank's share of one of the tensors, or its first ``rows``. A view, or a copy if it is in several
        blocks."""
        return self._parts()[number].flatten(0, 2)[:rows]

    def _parts(self) -> Sequence[torch.Tensor]:
        """Views of the parameter, one for each of the tensors: (blocks, ratio, rows, ...)."""
        ratio = self.ratio or (1,) * len(self.names)
        return self.parameter.detach().unflatten(0, (self.blocks, sum(ratio), -1)).split(ratio, dim=1)


def gather(share: torch.Tensor, dim: int | None, expert: bool = False) -> torch.Tensor:
    """Concatenate the tensor-parallel ranks' shares along a dim; None if each has the whole tensor. All of them call
    this, and each gets a new tensor."""
    _, tp = _tensor_parallel(expert)
    if dim is None or tp == 1:
        return share.clone()
    share = share.contiguous()
    shares = [torch.empty_like(share) for _ in range(tp)]
    torch.distributed.all_gather(shares, share, group=_tensor_parallel_group(expert))
    return torch.cat(shares, dim)


def _tensor_parallel(expert: bool = False) -> tuple[int, int]:
    """This rank's tensor-parallel rank, and their number; for experts, of expert tensor parallelism."""
    group = _tensor_parallel_group(expert)
    return group.rank(), group.size()


def _tensor_parallel_group(expert: bool) -> Any:
    from megatron.core import parallel_state

    if expert:
        return parallel_state.get_expert_tensor_parallel_group()
    return parallel_state.get_tensor_model_parallel_group()


def weights_of(model: Any, hf_config: Any) -> Iterator[Weight]:
    """The weights of one pipeline stage: a GPTModel on megatron's local layer spec."""
    vocab, groups, experts = int(hf_config.vocab_size), key_value_heads(hf_config), experts_of(hf_config)
    # Megatron stores the queries of a key-value head next to its key and its value, and splits by key-value head.
    qkv = {"blocks": groups // _tensor_parallel()[1], "ratio": (hf_config.num_attention_heads // groups, 1, 1)}

    if model.pre_process:
        yield Weight(model.embedding.word_embeddings.weight, (EMBEDDING,), rows=vocab)
    for layer in model.decoder.layers:
        at = f"model.layers.{layer.layer_number - 1}."
        attention, mlp = layer.self_attention, layer.mlp
        yield Weight(layer.input_layernorm.weight, (f"{at}input_layernorm.weight",), None)
        yield Weight(layer.pre_mlp_layernorm.weight, (f"{at}post_attention_layernorm.weight",), None)
        if has_qk_norm(hf_config):
            yield Weight(attention.q_layernorm.weight, (f"{at}self_attn.q_norm.weight",), None)
            yield Weight(attention.k_layernorm.weight, (f"{at}self_attn.k_norm.weight",), None)
        if experts is not None and hasattr(mlp, "router"):
            yield from _experts(mlp, experts, at)
        for kind in ("weight", "bias"):
            q, k, v, o = (f"{at}self_attn.{name}_proj.{kind}" for name in "qkvo")
            gate, up, down = (f"{at}mlp.{name}_proj.{kind}" for name in ("gate", "up", "down"))
            by_input = 1 if kind == "weight" else None
            table: tuple[tuple[Any, tuple[str, ...], int | None, dict[str, Any]], ...] = (
                (attention.linear_qkv, (q, k, v), 0, qkv),
                (attention.linear_proj, (o,), by_input, {}),
            )
            if not hasattr(mlp, "router"):
                table += ((mlp.linear_fc1, (gate, up), 0, {}), (mlp.linear_fc2, (down,), by_input, {}))
            for linear, names, dim, blocks in table:
                parameter = getattr(linear, kind)
                if parameter is not None:
                    yield Weight(parameter, names, dim, **blocks)
    if model.post_process:
        yield Weight(model.decoder.final_layernorm.weight, ("model.norm.weight",), None)
        if isinstance(model.output_layer, ValueHead):
            yield Weight(model.output_layer.weight, (SCORE,), None)
            yield Weight(model.output_layer.bias, (SCORE_BIAS,), None)
        elif model.output_layer.weight is not None:
            yield Weight(model.output_layer.weight, (EMBEDDING if tied(hf_config) else HEAD,), rows=vocab)


def _experts(layer: Any, experts: Experts, at: str) -> Iterator[Weight]:
    """The weights of a mixture of experts. A rank has some of the experts, and of each a share."""
    from workers.megatron.moe import expert_linears

    at += f"{experts.block}."
    yield Weight(layer.router.weight, (f"{at}gate.weight",), None)
    for number, (fc1, fc2) in zip(layer.local_expert_indices, expert_linears(layer), strict=True):
        gate, up, down = (f"{at}experts.{number}.{name}.weight" for name in experts.names)
        yield Weight(fc1, (gate, up), 0, expert=True)
        yield Weight(fc2, (down,), 1, expert=True)
    if layer.shared_experts is not None:
        shared, at = layer.shared_experts, f"{at}shared_expert"
        yield Weight(shared.linear_fc1.weight, (f"{at}.gate_proj.weight", f"{at}.up_proj.weight"))
        yield Weight(shared.linear_fc2.weight, (f"{at}.down_proj.weight",), 1)
        yield Weight(shared.gate_weight, (f"{at}_gate.weight",), None)


def distinct_weights(models: Sequence[Any], hf_config: Any) -> Iterator[Weight]:
    """The weights of this rank's pipeline stages. A tied output layer comes once, as the embedding, from the first
    stage."""
    for model in models:
        for weight in weights_of(model, hf_config):
            if model.pre_process or weight.names != (EMBEDDING,):
                yield weight


def hf_shapes(models: Sequence[Any], hf_config: Any) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor of the Hugging Face model, including a ``lm_head.weight`` that is tied, or that a
    critic does not have. All ranks call it together, because each knows those of its own stages and experts."""
    from megatron.core import parallel_state

    own = {
        shard.name: shard.shape
        for model in models
        for weight in weights_of(model, hf_config)
        for shard in weight.shards()
    }
    of_ranks = gathered(own, parallel_state.get_expert_tensor_model_pipeline_parallel_group())
    shapes = {name: shape for of_rank in of_ranks for name, shape in of_rank.items()}
    return {HEAD: shapes[EMBEDDING], **shapes}


# --- reading and writing --------------------------------------------------------------------------------


@torch.no_grad()
def draw_weights(models: Sequence[Any], hf_config: Any, config: Any) -> None:
    """Draw the initial weights anew, the same at all parallel sizes: each tensor has a seed of its own. On the CPU,
    megatron draws those of a stage one after the other, and the experts of each rank from the same random numbers. All
    ranks call it together.

    Args:
        models: this rank's GPTModels.
        hf_config: their Hugging Face config.
        config: their ``TransformerConfig``.
    """
    from megatron.core import parallel_state

    # That of the first stage, because each stage has another one.
    seed = gathered(torch.initial_seed(), parallel_state.get_pipeline_model_parallel_group())[0]
    with torch.random.fork_rng(devices=[]):
        for weight in (weight for model in models for weight in weights_of(model, hf_config)):
            if weight.parameter.dim() < 2 or weight.names == (SCORE,):
                continue  # norms and biases begin with constants, and a value head has a seed of its own
            whole = {shard.name: torch.empty(shard.shape) for shard in weight.shards()}
            for name, tensor in whole.items():
                draw = config.embedding_init_method if name == EMBEDDING else config.init_method
                if name.endswith(("o_proj.weight", "down_proj.weight", "w2.weight")):
                    draw = config.output_layer_init_method
                # Not torch.manual_seed(): it seeds devices too, on each rank by its last tensor.
                torch.default_generator.manual_seed(mixed_seed(seed, *name.encode()))
                draw(tensor)
            weight.load(whole)


@torch.no_grad()
def load_hf(
    models: Sequence[Any],
    hf_config: Any,
    shapes: Mapping[str, tuple[int, ...]],
    state_dict: Mapping[str, torch.Tensor],
) -> None:
    """Load the weights of a Hugging Face causal language model; each rank copies its shards.

    A critic loads the weights of a model with a value head, or of a language model: then the output layer is skipped
    and the value head keeps its weights.

    Args:
        models: this rank's GPTModels.
        hf_config: their Hugging Face config.
        shapes: what `hf_shapes` returned.
        state_dict: the whole model's tensors, or a mapping that reads a tensor when it is accessed.

    Raises:
        ValueError: a name is missing or unknown, a tensor has the wrong shape, or two differ that the config ties. No
            weight was changed.
    """
    optional = {HEAD, SCORE, SCORE_BIAS} if SCORE in shapes else {HEAD} if tied(hf_config) else set()
    known = {name: value for name, value in state_dict.items() if not name.endswith("rotary_emb.inv_freq")}
    check_state_dict("load_hf_state_dict()", known, shapes, optional)
    if optional == {HEAD} and HEAD in known and not torch.equal(known[HEAD], known[EMBEDDING]):
        raise ValueError(
            f"load_hf_state_dict(): the state dict has different weights for {HEAD!r} and {EMBEDDING!r}, which its "
            "config ties; set tie_word_embeddings=false in its config.json"
        )
    for model in models:
        for weight in weights_of(model, hf_config):
            if weight.names[0] in state_dict:
                weight.load(state_dict)
            elif weight.names == (SCORE_BIAS,) and SCORE in state_dict:
                weight.parameter.zero_()  # a head without a bias


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

    folder = Path(folder)
    files = [folder / "model.safetensors"]
    if not files[0].is_file():
        # Not all files that are there: others may have the weights again, under other names.
        index = folder / "model.safetensors.index.json"
        named = set(json.loads(index.read_text())["weight_map"].values()) if index.is_file() else ()
        files = [folder / name for name in sorted(named)] or sorted(folder.glob("*.safetensors"))
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
