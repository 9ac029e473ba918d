"""The shards of an FSDPTrainModel, which weight sync sends, compared with the Hugging Face model.

Four ranks are the processes of the Megatron group: FSDP needs nothing but torch.distributed there.
"""

import copy
import functools
import math
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from reference import small_llama
from shard_helpers import assembled, assert_same, read_shards
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from train_helpers import begin, learn, saved, whole_weights
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification, LlamaConfig, Qwen2Config

from workers.fsdp.fsdp_build import _clear_cache

pytestmark = pytest.mark.timeout(180)

UNEVEN = {"hidden_size": 24, "intermediate_size": 50, "num_hidden_layers": 2, "num_attention_heads": 4,
          "num_key_value_heads": 1}  # fmt: skip
TIED = Qwen2Config(**UNEVEN, vocab_size=33, tie_word_embeddings=True)
SMALL_VOCABULARY = LlamaConfig(**UNEVEN, vocab_size=5, tie_word_embeddings=False)
BF16 = {"param_dtype": torch.bfloat16}


def saved_weights(config, folder, dtype, critic=False):
    """Save a model with random weights. Returns (its folder, its weights, a tied output layer once)."""
    torch.manual_seed(1)
    if critic:
        config = copy.deepcopy(config)
        config.num_labels = 1
    kind = AutoModelForTokenClassification if critic else AutoModelForCausalLM
    model = kind.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return saved(model, folder), {name: value.detach().to(dtype) for name, value in model.named_parameters()}


def shards_of(group):
    """Whole tensors from the ranks' shards. The ranks are asked in turn, so hf_shards() must not be a collective."""

    def of_rank(worker, rank):
        return read_shards(worker.model.hf_shards()) if worker.rank == rank else None

    run = group.worker_group.execute_with_func_generator
    return assembled([run(of_rank, rank)[rank] for rank in range(group.world_size)])


@pytest.mark.parametrize(
    ("config", "args"),
    [
        pytest.param(TIED, {"param_dtype": "bf16"}, id="tied, bf16"),
        pytest.param(SMALL_VOCABULARY, {"fsdp_cpu_offload": True}, id="cpu offload"),
    ],
)
def test_shards_on_two_ranks_are_the_whole_model(fsdp_groups, tmp_path, config, args):
    dtype = torch.bfloat16 if "param_dtype" in args else torch.float32
    folder, expected = saved_weights(config, tmp_path, dtype)
    group = fsdp_groups(2)
    begin(group, {"hf_checkpoint": folder, **args})
    assert_same(shards_of(group), expected)


@pytest.fixture(scope="module")
def four(megatron_groups, llama_folder):
    """Runs a function in four processes in which torch.distributed is initialized."""
    begin(megatron_groups(4), {"hf_checkpoint": llama_folder})
    return megatron_groups(4).worker_group.execute_with_func_generator


def make_fsdp(worker, config, role, folder, options):
    """A model in a process that another model started torch.distributed in."""
    from workers.fsdp.fsdp_model import FSDPOptions, FSDPTrainModel

    worker.fsdp = FSDPTrainModel(config, role, torch.device("cpu"), FSDPOptions(**options), folder)


@pytest.mark.parametrize(
    ("config", "role", "options"),
    [
        pytest.param(SMALL_VOCABULARY, "actor", BF16, id="bf16"),
        pytest.param(TIED, "critic", {}, id="critic"),
        pytest.param(TIED, "actor", {**BF16, "shard_size": 2}, id="replicas, bf16"),
    ],
)
def test_shards_on_four_ranks_are_the_whole_model(four, tmp_path, config, role, options):
    """The last rank has no shard of a tensor whose rows the ranks before it have: chunks are rounded up."""
    folder, expected = saved_weights(config, tmp_path, options.get("param_dtype", torch.float32), role == "critic")
    four(partial(make_fsdp, config=config, role=role, folder=folder, options=options))
    shards = four(lambda worker: read_shards(worker.fsdp.hf_shards()))
    assert_same(assembled(shards), expected)
    size = options.get("shard_size", 4)
    rows = {name: len(tensor) for name, tensor in expected.items()}
    present = {name for name, *_ in shards[3]}
    assert present == {name for name, count in rows.items() if (size - 1) * math.ceil(count / size) < count}
    assert (present == rows.keys()) == (size == 2)


def test_shards_read_the_weights_of_now(fsdp_groups, llama_folder, data):
    """Also when a forward pass has left the model unsharded, or other weights were swapped in."""
    group = fsdp_groups(2)
    begin(group, {"hf_checkpoint": llama_folder, "lr": 3e-3}, with_ref=True)
    run = group.worker_group.execute_with_func_generator
    run(lambda worker: setattr(worker, "kept", worker.model.hf_shards()))

    def now():
        return assembled(run(lambda worker: read_shards(worker.kept)))

    assert_same(now(), dict(small_llama().named_parameters()))
    learn(group, 0, data)
    trained = whole_weights(group)
    group.worker_group.compute_ref_log_prob(data)
    assert_same(now(), trained)
    group.worker_group.compute_log_prob(data)
    assert_same(now(), trained)
    assert_same(shards_of(group), trained)
    group.offload()
    group.onload()
    assert_same(now(), trained)


def test_shards_of_tensors_on_a_mesh_of_two_dims(four):
    whole = torch.arange(35.0).view(7, 5)
    placements = [(Shard(0), Shard(1)), (Shard(0), Shard(0)), (Shard(1), Shard(1)), (Replicate(), Shard(1))]

    def of(worker):
        from workers.fsdp.fsdp_model import local_shard

        mesh = init_device_mesh("cpu", (2, 2))
        shards = [
            local_shard(str(number), distribute_tensor(whole, mesh, placement), torch.float64)
            for number, placement in enumerate(placements)
        ]
        sums = DTensor.from_local(whole, mesh, (Partial(), Shard(0)))
        try:
            local_shard("sums", sums, torch.float64)
        except ValueError as error:
            return read_shards([shard for shard in shards if 0 not in shard.size]), str(error)

    shards, errors = zip(*four(of), strict=True)
    assert_same(assembled(shards), {str(number): whole.double() for number in range(len(placements))})
    assert all("'sums' has the placements (Partial(sum), Shard(dim=0))" in error for error in errors)


def test_cache_is_cleared_with_torch_that_has_no_function_for_it(monkeypatch):
    """torch 2.6 to 2.8: its caches have no method for it either."""
    cache = SimpleNamespace(cache=functools.lru_cache(lambda schema: schema))
    cache.cache(None)
    monkeypatch.setattr(DTensor._op_dispatcher.sharding_propagator, "propagate_op_sharding", cache)
    monkeypatch.delattr(torch.distributed.tensor.debug, "_clear_sharding_prop_cache")
    _clear_cache()
    assert cache.cache.cache_info().currsize == 0
