"""Names of experts: trainer and engine have them in one tensor per layer or in three per expert. The updates themselves
are tested in test_weight_sync.py."""

from types import SimpleNamespace

import pytest
import sync_workers
import torch
from model_types import config_of, model_of
from safetensors.torch import load_file
from sync_helpers import equal, mostly_full
from sync_workers import COLUMNS, EXPERTS, MODELS, ROWS
from transformers import AutoModelForCausalLM

from workers.hf_export import export_hf
from workers.hf_files import checkpoint_shapes
from workers.weight_sync.digest import digest, digests
from workers.weight_sync.expert_names import ExpertNames, one_by_one
from workers.weight_sync.weight_plan import Shard, make_plan, volume
from workers.weight_sync.weight_sender import layout_of, merge_layouts

pytestmark = pytest.mark.timeout(90)

WHOLE = sum(tensor.nbytes for tensor in sync_workers.stacked().values())
BUCKET = 24 << 10
WAYS = [("stacked", "one_by_one"), ("one_by_one", "stacked"), ("stacked", "stacked"), ("stacked", "like_mixtral"),
        ("like_mixtral", "stacked"), ("one_by_one", "one_by_one")]  # fmt: skip


def test_parts_of_one_tensor_have_one_dtype():
    held = sync_workers.one_by_one()
    name = next(name for name in held if "up_proj" in name)
    held[name] = held[name].bfloat16()
    names = ExpertNames(shapes_of(sync_workers.stacked()))
    with pytest.raises(ValueError, match="other parts of"):
        names.layout(layout_of([Shard.whole(*pair) for pair in held.items()]))


# --- names, in this process -------------------------------------------------------------------------------------------


def shapes_of(weights):
    return {name: tuple(tensor.shape) for name, tensor in weights.items()}


def shards_of(weights, cut, reads):
    """Each tensor in boxes, halved along each dim in ``cut``, which count how often they are read."""
    made = []
    for name, tensor in weights.items():
        boxes = [()]
        for dim, size in enumerate(tensor.shape):
            ends = [(0, size // 3), (size // 3, size)] if str(dim) in cut else [(0, size)]
            boxes = [(*box, end) for box in boxes for end in ends if end[0] < end[1]]
        for box in boxes:

            def read(tensor=tensor, box=box, name=name):
                reads.append((name, box))
                return sync_workers.cut(tensor, box)

            begin, size = tuple(b for b, _ in box), tuple(e - b for b, e in box)
            made.append(Shard(name, tuple(tensor.shape), begin, size, tensor.dtype, read))
    return made


@pytest.mark.parametrize(("held", "wanted"), WAYS)
@pytest.mark.parametrize("cut", mostly_full("shards of experts in every division", ["0", "012", "", "1"], "0"))
def test_shards_become_parts_of_the_engines_tensors(held, wanted, cut):
    trainers, engines, reads = MODELS[held](), MODELS[wanted](), []
    names = ExpertNames(shapes_of(engines))
    shards = shards_of(trainers, cut, reads)
    made = names.shards(shards)
    found = {name: torch.full_like(tensor, torch.nan) for name, tensor in engines.items()}
    for shard in made:
        assert shard.shape == tuple(engines[shard.name].shape)
        part = sync_workers.cut(found[shard.name], shard.box)
        assert part.isnan().all() and part.shape == shard.size
        part.copy_(shard.read())
    assert equal(found, engines)
    assert len(reads) == len(shards), "each is read, and converted, once"
    # Rank 0 plans with the layouts alone.
    assert names.layout(layout_of(shards)) == layout_of(made)
    held_by_ranks, _ = merge_layouts([layout_of(made)])
    make_plan(held_by_ranks, [{}], BUCKET)  # raises if something is missing, or is there twice


def test_what_does_not_fit_keeps_its_name():
    wanted = shapes_of(sync_workers.one_by_one())
    names = ExpertNames(wanted)
    prefix = "model.layers.0.mlp.experts"
    for name, shape in (
        (f"{prefix}.gate_up_proj", (EXPERTS + 1, 2 * ROWS, COLUMNS)),  # an expert too many
        (f"{prefix}.gate_up_proj", (EXPERTS, COLUMNS, 2 * ROWS)),  # transposed, as in Llama 4
        (f"{prefix}.gate_up_proj", (EXPERTS, 2 * ROWS + 1, COLUMNS)),
        (f"{prefix}.gate_up_proj_bias", (EXPERTS, 2 * ROWS)),
        ("model.layers.9.mlp.experts.down_proj", (EXPERTS, COLUMNS, ROWS)),
        (f"{prefix}.0.up_proj.weight", (ROWS, COLUMNS)),  # the engine has it
    ):
        assert names.places(name, shape) is None, (name, shape)
    stacked = ExpertNames(shapes_of(sync_workers.stacked()))
    assert stacked.places(f"{prefix}.{EXPERTS}.up_proj.weight", (ROWS, COLUMNS)) is None
    assert stacked.places(f"{prefix}.0.up_proj.weight", (2 * ROWS, COLUMNS)) is None


def test_checkpoint_names_and_digests_of_each_expert():
    stacked, single, mixtral = (MODELS[name]() for name in ("stacked", "one_by_one", "like_mixtral"))
    name = "model.layers.2.mlp.experts.gate_up_proj"
    made = dict(one_by_one(name, stacked[name]))
    assert equal(made, {key: single[key] for key in made}) and len(made) == 2 * EXPERTS
    name = "model.layers.2.block_sparse_moe.experts.down_proj"
    made = dict(one_by_one(name, stacked[name.replace("block_sparse_moe", "mlp")]))
    assert equal(made, {key: mixtral[key] for key in made}) and len(made) == EXPERTS
    tensor = stacked["model.layers.0.mlp.experts.down_proj"]
    assert digests(tensor[:, :, 2:]) == tuple(digest(one) for one in tensor[:, :, 2:])
    for plain in (tensor[0], tensor[:, :1], torch.randn(5, 1, 4), torch.randn(3), torch.tensor(1.0)):
        assert digests(plain) == (digest(plain),)


@pytest.mark.parametrize("model_type", ["qwen3_moe", "mixtral", "olmoe", "qwen2_moe", "granitemoe", "gpt_oss"])
def test_exports_have_the_names_of_checkpoints(model_type, tmp_path):
    """Those that transformers itself writes, which other engines read too; from stacked experts and from single ones,
    as Megatron has them."""
    model = model_of(config_of(model_type))
    model.save_pretrained(tmp_path / "transformers")
    expected = load_file(tmp_path / "transformers" / "model.safetensors")
    for held in (dict(model.state_dict()), expected):
        shards = [Shard.whole(*pair) for pair in held.items()]
        exported = SimpleNamespace(
            hf_shards=lambda own=shards: own, adapter_config=None, hf_config=model.config, role="actor"
        )
        export_hf(exported, tmp_path / "export")
        found = load_file(tmp_path / "export" / "model.safetensors")
        if model_type in ("granitemoe", "gpt_oss"):  # stacked in checkpoints too
            assert found.keys() == held.keys()
        else:
            assert equal(found, expected) and len(found) > len(model.state_dict())
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "export")
        assert equal(dict(loaded.state_dict()), dict(model.state_dict()))


def test_servers_get_the_names_of_checkpoints(tmp_path):
    model = model_of(config_of("mixtral"))
    model.save_pretrained(tmp_path)
    shapes = {name: tuple(tensor.shape) for name, tensor in load_file(tmp_path / "model.safetensors").items()}
    made = checkpoint_shapes(model.config, {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()})
    assert made == shapes


def test_rounds_are_filled_by_bytes():
    """With several experts each; an expert that is larger than a bucket is cut by its rows."""
    shards = [Shard.whole(*pair) for pair in sync_workers.stacked().items()]
    held, _ = merge_layouts([layout_of(shards)])
    for bucket in (BUCKET, 100):
        rounds = make_plan(held, [{}], bucket)
        sizes = [sum(4 * volume(piece.box) for of in one.values() for piece in of) for one in rounds]
        assert max(sizes) <= bucket and sum(sizes) == WHOLE
        assert len(rounds) <= 2 * WHOLE / bucket
