"""What a process of vLLM has of each tensor, on layers with the attributes of vLLM's. Runs without vLLM."""

from types import SimpleNamespace

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


def checkpoint(kv_heads, vocabulary=70):
    attention = {"q": HEADS * HEAD, "k": kv_heads * HEAD, "v": kv_heads * HEAD}
    shapes = {
        "model.embed_tokens.weight": (vocabulary, HIDDEN),
        **{f"model.attn.{one}_proj.weight": (size, HIDDEN) for one, size in attention.items()},
        **{f"model.attn.{one}_proj.bias": (size,) for one, size in attention.items()},
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
    embed = Layer(
        padded,
        shard_indices=SimpleNamespace(org_vocab_start_index=begin, org_vocab_end_index=end),
        org_vocab_size=len(words),
        output_partition_sizes=[each],
    )
    own = full["model.attn.o_proj.weight"].chunk(ranks, 1)[rank].contiguous()
    attn = {
        "qkv_proj": Layer(weight, bias, output_partition_sizes=sizes, **here),
        "o_proj": Layer(own, full["model.attn.o_proj.bias"], output_partition_sizes=[HIDDEN], **here),
    }
    mlp = {"gate_up_proj": Layer(torch.cat(gates), output_partition_sizes=[16 // ranks] * 2, **here)}
    norm = Layer(full["model.norm.weight"].clone())
    model = torch.nn.Module()
    model.packed_modules_mapping = PACKED
    model.scale = torch.nn.Parameter(full["scale"].clone())
    model.model = torch.nn.ModuleDict(
        {"embed_tokens": embed, "attn": torch.nn.ModuleDict(attn), "mlp": torch.nn.ModuleDict(mlp), "norm": norm}
    )
    return model


def read(model, parts, name):
    found, state = [], model.state_dict()
    for part in parts[name]:
        begin = zip(part.begin, part.box, strict=True)
        index = tuple(slice(first, first + end - start) for first, (start, end) in begin)
        found.append((part.box, state[part.parameter][index]))
    return found


def shapes_of(full):
    return {name: tuple(tensor.shape) for name, tensor in full.items()}


def check_joined(full, models):
    """What is read of the processes' models, joined, is the checkpoint. Returns the parts of each."""
    parts = [find_parts(model, shapes_of(full)) for model in models]
    for name, tensor in full.items():
        found = [read(*one, name) for one in zip(models, parts, strict=True)]
        assert torch.equal(joined(name, tuple(tensor.shape), found), tensor), name
    return parts


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
@pytest.mark.parametrize("kv_heads", [1, 2, 8])
def test_parts_of_all_processes_are_the_checkpoint(ranks, kv_heads):
    full = checkpoint(kv_heads)
    parts = check_joined(full, [model_of(full, rank, ranks, kv_heads) for rank in range(ranks)])
    copies = max(1, ranks // kv_heads)
    boxes = [one["model.attn.k_proj.weight"][0].box for one in parts]
    assert len(set(boxes)) == ranks // copies


def test_processes_that_differ_are_named():
    one, other = torch.zeros(2, 3), torch.zeros(2, 3)
    other[1, 1] = -0.0
    with pytest.raises(RolloutError, match="processes 0 and 2 hold different bytes of 'norm'"):
        joined("norm", (4, 3), [[(((0, 2), (0, 3)), one)], [(((2, 4), (0, 3)), one)], [(((0, 2), (0, 3)), other)]])


def broken(change):
    full = checkpoint(2)
    model = model_of(full, 0, 2, 2)
    change(model, model.model)
    return find_parts(model, shapes_of(full))


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


# --- mixtures of experts ----------------------------------------------------------------------------------------------

EXPERTS, WIDTH = 8, 12


class Mixture(torch.nn.Module):
    """A process's layer of experts with vLLM's attributes."""

    def __init__(self, gate_up, down, rank, ranks, by_expert, padding=0):
        super().__init__()
        here = slice(rank * EXPERTS // ranks, (rank + 1) * EXPERTS // ranks) if by_expert else slice(None)
        tp, place = (1, 0) if by_expert else (ranks, rank)
        halves = [half.chunk(tp, 1)[place] for half in gate_up[here].chunk(2, 1)]
        halves = [torch.nn.functional.pad(half, (0, 0, 0, padding)) for half in halves]
        own = torch.nn.functional.pad(down[here].chunk(tp, 2)[place], (0, padding))
        self.w13_weight = torch.nn.Parameter(torch.cat(halves, 1), requires_grad=False)
        self.w2_weight = torch.nn.Parameter(own.contiguous(), requires_grad=False)
        self.expert_map = None
        if by_expert:
            numbers = torch.arange(EXPERTS) - here.start
            self.expert_map = torch.where((numbers >= 0) & (numbers < EXPERTS // ranks), numbers, -1)
        self.is_fused_checkpoint_transposed = False
        self.quant_method = SimpleNamespace(unquantized_backend=SimpleNamespace(value="TRITON"))
        self.moe_config = SimpleNamespace(
            moe_parallel_config=SimpleNamespace(tp_size=tp, tp_rank=place),
            intermediate_size_per_partition_unpadded=WIDTH // tp,
            hidden_dim=HIDDEN,
            hidden_dim_unpadded=HIDDEN,
            num_experts=EXPERTS,
            has_bias=False,
        )


def mixture_of(full, rank, ranks, by_expert, padding=0, block="mlp"):
    model = torch.nn.Module()
    weights = [full[f"model.mlp.experts.{part}"] for part in ("gate_up_proj", "down_proj")]
    experts = torch.nn.ModuleDict({"routed_experts": Mixture(*weights, rank, ranks, by_expert, padding)})
    router = Layer(full["model.mlp.gate.weight"])
    model.model = torch.nn.ModuleDict({block: torch.nn.ModuleDict({"experts": experts, "gate": router})})
    return model


def mixture():
    return {
        "model.mlp.gate.weight": torch.randn(EXPERTS, HIDDEN),
        "model.mlp.experts.gate_up_proj": torch.randn(EXPERTS, 2 * WIDTH, HIDDEN),
        "model.mlp.experts.down_proj": torch.randn(EXPERTS, HIDDEN, WIDTH),
    }


@pytest.mark.parametrize("block", ["mlp", "block_sparse_moe"])
@pytest.mark.parametrize("padding", [0, 4])
@pytest.mark.parametrize("by_expert", [False, True])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_experts_of_all_processes_are_the_checkpoints(ranks, by_expert, padding, block):
    full = mixture()
    check_joined(full, [mixture_of(full, rank, ranks, by_expert, padding, block) for rank in range(ranks)])


@pytest.mark.parametrize(
    "change",
    [
        lambda layer: setattr(layer.quant_method.unquantized_backend, "value", "FLASHINFER_CUTLASS"),
        lambda layer: setattr(layer, "is_fused_checkpoint_transposed", True),
        lambda layer: setattr(layer.moe_config, "has_bias", True),
        lambda layer: setattr(layer.moe_config, "hidden_dim", HIDDEN + 2),
        lambda layer: setattr(layer.moe_config, "num_experts", EXPERTS + 2),
        lambda layer: setattr(layer, "expert_map", torch.tensor([0, -1, 1, -1, 2, -1, 3, -1])),
    ],
    ids=["kernel", "transposed", "bias", "hidden", "redundant", "scattered"],
)
def test_experts_that_are_not_understood_are_not_read(change):
    full = mixture()
    model = mixture_of(full, 0, 2, True)
    assert find_parts(model, shapes_of(full)) is not None
    change(model.model["mlp"]["experts"]["routed_experts"])
    assert find_parts(model, shapes_of(full)) is None
