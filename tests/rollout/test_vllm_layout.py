"""What a process of vLLM has of each tensor, on layers with the attributes of vLLM's. Runs without vLLM."""

import pytest
import torch

from workers.rollout.engines.vllm_layout import find_parts, joined
from workers.rollout.rollout_errors import RolloutError

HIDDEN, HEAD, HEADS = 6, 4, 8
PACKED = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}


class Layer(torch.nn.Module):
    def __init__(self, weight, bias=None, **attributes):
        super().__init__()
        self.weight = torch.nn.Parameter(weight, requires_grad=False)
        if bias is not None:
            self.bias = torch.nn.Parameter(bias, requires_grad=False)
        self.__dict__.update(attributes)


class Indices:
    def __init__(self, begin, end):
        self.org_vocab_start_index, self.org_vocab_end_index = begin, end


def checkpoint(kv_heads, vocabulary=70):
    shapes = {
        "model.embed_tokens.weight": (vocabulary, HIDDEN),
        "model.attn.q_proj.weight": (HEADS * HEAD, HIDDEN),
        "model.attn.k_proj.weight": (kv_heads * HEAD, HIDDEN),
        "model.attn.v_proj.weight": (kv_heads * HEAD, HIDDEN),
        "model.attn.q_proj.bias": (HEADS * HEAD,),
        "model.attn.k_proj.bias": (kv_heads * HEAD,),
        "model.attn.v_proj.bias": (kv_heads * HEAD,),
        "model.attn.o_proj.weight": (HIDDEN, HEADS * HEAD),
        "model.attn.o_proj.bias": (HIDDEN,),
        "model.mlp.gate_proj.weight": (16, HIDDEN),
        "model.mlp.up_proj.weight": (16, HIDDEN),
        "model.norm.weight": (HIDDEN,),
        "scale": (),
    }
    return {name: torch.randn(shape) for name, shape in shapes.items()}


def rows(tensor, rank, ranks, copies=1):
    return tensor.chunk(ranks // copies)[rank // copies]


def model_of(full, rank, ranks, kv_heads):
    """What vLLM makes of a checkpoint in one process."""
    copies, here = max(1, ranks // kv_heads), {"tp_rank": rank, "tp_size": ranks}

    def attention(kind):
        parts = [rows(full[f"model.attn.{one}_proj.{kind}"], rank, ranks, 1 if one == "q" else copies) for one in "qkv"]
        return torch.cat(parts), [len(part) for part in parts]

    gates = [rows(full[f"model.mlp.{one}_proj.weight"], rank, ranks) for one in ("gate", "up")]
    words = full["model.embed_tokens.weight"]
    each = -(-len(words) // 64) * 64 // ranks  # padded
    begin, end = min(rank * each, len(words)), min(rank * each + each, len(words))
    padded = torch.zeros(each, HIDDEN)
    padded[: end - begin] = words[begin:end]
    (weight, sizes), (bias, _) = attention("weight"), attention("bias")
    model = torch.nn.Module()
    model.packed_modules_mapping = PACKED
    model.scale = torch.nn.Parameter(full["scale"].clone())
    model.model = torch.nn.ModuleDict(
        {
            "embed_tokens": Layer(
                padded, shard_indices=Indices(begin, end), org_vocab_size=len(words), output_partition_sizes=[each]
            ),
            "attn": torch.nn.ModuleDict(
                {
                    "qkv_proj": Layer(weight, bias, output_partition_sizes=sizes, **here),
                    "o_proj": Layer(
                        full["model.attn.o_proj.weight"].chunk(ranks, 1)[rank].contiguous(),
                        full["model.attn.o_proj.bias"],
                        output_partition_sizes=[HIDDEN],
                        **here,
                    ),
                }
            ),
            "mlp": torch.nn.ModuleDict(
                {"gate_up_proj": Layer(torch.cat(gates), output_partition_sizes=[16 // ranks] * 2, **here)}
            ),
            "norm": Layer(full["model.norm.weight"].clone()),
        }
    )
    return model


def read(model, parts, name):
    part, tensor = parts[name], model.state_dict()[parts[name].parameter]
    if part.box:
        tensor = tensor[part.begin : part.begin + part.box[0][1] - part.box[0][0]]
    return part.box, tensor


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
@pytest.mark.parametrize("kv_heads", [1, 2, 8])
def test_parts_of_all_processes_are_the_checkpoint(ranks, kv_heads):
    full = checkpoint(kv_heads)
    shapes = {name: tuple(tensor.shape) for name, tensor in full.items()}
    models = [model_of(full, rank, ranks, kv_heads) for rank in range(ranks)]
    parts = [find_parts(model, shapes) for model in models]
    for name, tensor in full.items():
        found = [read(*one, name) for one in zip(models, parts, strict=True)]
        assert torch.equal(joined(name, shapes[name], found), tensor), name
    copies = max(1, ranks // kv_heads)
    boxes = [one["model.attn.k_proj.weight"].box for one in parts]
    assert len(set(boxes)) == ranks // copies


def test_processes_that_differ_are_named():
    one, other = torch.zeros(2, 3), torch.zeros(2, 3)
    other[1, 1] = -0.0
    with pytest.raises(RolloutError, match="processes 0 and 2 hold different bytes of 'norm'"):
        joined("norm", (4, 3), [(((0, 2), (0, 3)), one), (((2, 4), (0, 3)), one), (((0, 2), (0, 3)), other)])


def broken(change):
    full = checkpoint(2)
    model = model_of(full, 0, 2, 2)
    change(model, model.model)
    return find_parts(model, {name: tuple(tensor.shape) for name, tensor in full.items()})


@pytest.mark.parametrize(
    "change",
    [
        lambda model, inner: inner.pop("norm"),
        lambda model, inner: setattr(model, "packed_modules_mapping", {}),
        lambda model, inner: setattr(inner["norm"], "weight", torch.nn.Parameter(torch.zeros(HIDDEN // 2))),
        lambda model, inner: setattr(inner["norm"], "weight", torch.nn.Parameter(torch.zeros(HIDDEN, 1))),
        lambda model, inner: inner["norm"].to(torch.float8_e4m3fn),
        lambda model, inner: setattr(inner["embed_tokens"], "org_vocab_size", 64),
        lambda model, inner: setattr(inner["attn"]["qkv_proj"], "output_partition_sizes", [24, 8]),
        # Fused in the checkpoint too, so that the order of its rows is not known.
        lambda model, inner: setattr(inner["attn"]["o_proj"], "output_partition_sizes", [3, 3]),
    ],
    ids=["absent", "not packed", "smaller", "dims", "quantized", "vocabulary", "sizes", "fused"],
)
def test_model_that_is_not_understood_is_not_read(change):
    assert broken(lambda model, inner: None) is not None
    assert broken(change) is None
