"""Which types of models run on which backend: the table in docs/training.md against what they do.

Each decoder runs on two FSDP ranks and is compared with transformers' own forward and backward pass, row by row and
without padding. The types that run on Megatron are compared in tests/megatron/test_train_model.py.
"""

import re
from pathlib import Path

import pytest
import torch
from model_types import DECODERS, REFUSED, config_of, model_of
from shard_helpers import assembled, read_shards
from tensordict import TensorDict
from train_helpers import begin

from single_controller import Broadcast, WorkerError
from workers.fsdp.fsdp_model import FSDPOptions, FSDPTrainModel
from workers.megatron.config import check_model

pytestmark = pytest.mark.timeout(180)

TEMPERATURE, COUNTED = 0.7, 20.0
COMMON = "llama qwen3 bloom gemma2 gemma3_text gpt2 deepseek_v3 gpt_oss mamba qwen3_next"
"""qwen2 is trained in test_both_backends.py, qwen3_moe in test_moe_training.py."""
rare = pytest.mark.full("less common types of models on FSDP")


def rows():
    """Ragged rows with padding on either side."""
    drawn = torch.Generator().manual_seed(0)
    ids, mask = torch.randint(1, 32, (5, 12), generator=drawn), torch.zeros(5, 12, dtype=torch.long)
    for row, (start, end) in enumerate([(0, 12), (3, 12), (0, 7), (2, 9), (5, 8)]):
        mask[row, start:end] = 1
    return TensorDict(
        {"input_ids": ids * mask, "attention_mask": mask, "weights": torch.randn(5, 12, generator=drawn)}, [5]
    )


def weighted(outputs, part):
    """A loss in which every position counts differently."""
    return -(outputs.log_probs * part.others["weights"] * part.attention_mask)[:, 1:].sum() / COUNTED, {}


def run(worker, model_type, data):
    """On a rank: (its rows' log-probabilities, its shards, the report of a step that changes nothing)."""
    config = config_of(model_type)
    options = FSDPOptions(max_tokens_per_micro_batch=24, clip_grad=0.0, seed=5)
    model = FSDPTrainModel(config, "actor", worker.device, options)
    own = data[worker.rank :: worker.world_size]
    log_probs = model.log_probs(own, TEMPERATURE)
    report = model.train_step(dict(own), weighted, lr=0.0, temperature=TEMPERATURE)
    return log_probs, read_shards(model.hf_shards()), report, model._packed


def reference(model, data):
    """Log-probabilities (B, T), the loss, and the norm of its gradient."""
    whole = torch.zeros(data["input_ids"].shape)
    for row, mask in enumerate(data["attention_mask"].bool()):
        ids = data["input_ids"][row, mask]
        of_all = (model(input_ids=ids[None], use_cache=False).logits[0, :-1] / TEMPERATURE).log_softmax(-1)
        at = mask.nonzero()[1:, 0]
        whole = whole.index_put((torch.tensor(row), at), of_all.gather(-1, ids[1:, None])[:, 0])
    loss = -(whole * data["weights"]).sum() / COUNTED
    loss.backward()
    norm = torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm()
    return whole.detach(), loss.item(), norm.item()


@pytest.fixture(scope="module")
def two(fsdp_groups):
    begin(fsdp_groups(2), {"hf_config": config_of("llama").to_diff_dict()})
    return fsdp_groups(2).worker_group


@pytest.mark.parametrize("model_type", [pytest.param(t, marks=() if t in COMMON.split() else rare) for t in DECODERS])
def test_decoder_on_fsdp_matches_transformers(two, model_type):
    data = rows()
    model = model_of(config_of(model_type), seed=5)
    state = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    expected, loss, norm = reference(model, data)
    (first, shards, report, packed), (second, others, *_) = two.execute_with_func_generator(
        run, model_type, Broadcast(data)
    )
    found = torch.zeros_like(expected)
    found[0::2], found[1::2] = first, second
    difference = (found - expected).abs().max().item()
    print(f"{model_type}: difference of log-probabilities {difference:.1e}")
    assert difference < 5e-5
    assert report.sums["loss"] == pytest.approx(loss, rel=1e-4, abs=1e-5)
    assert report.grad_norm == pytest.approx(norm, rel=1e-3)
    whole = assembled([shards, others])
    assert packed is (model_type not in documented_as_padded())
    tied = set(getattr(model, "all_tied_weights_keys", None) or ())
    assert whole.keys() <= state.keys() and state.keys() - whole.keys() <= tied
    assert [name for name in whole if not torch.equal(whole[name], state[name])] == []


@pytest.mark.parametrize(
    "model_type", [pytest.param(one, marks=() if one in ("bert", "t5") else rare) for one in REFUSED]
)
def test_models_that_are_no_decoders_are_refused(two, model_type):
    with pytest.raises(WorkerError) as caught:
        two.execute_with_func_generator(build, model_type)
    assert caught.value.cause_type.endswith("ModelFilesError")
    assert re.search("sees the tokens after it|could not be built", str(caught.value))


def build(worker, model_type):
    FSDPTrainModel(config_of(model_type), "actor", worker.device, FSDPOptions(max_tokens_per_micro_batch=24))


def documented():
    """model_type -> (runs on FSDP, runs on Megatron), from the table in docs/training.md."""
    text = (Path(__file__).parents[3] / "docs" / "training.md").read_text()
    (table,) = re.findall(r"\| model types \|.*?\n\n", text, re.DOTALL)
    found = {}
    for line in table.strip().splitlines()[2:]:
        types, *backends = (cell.strip() for cell in line.strip("| \n").split("|"))
        for model_type in re.findall(r"`(\w+)`", types):
            assert model_type not in found
            found[model_type] = tuple({"yes": True, "no": False}[re.match(r"\w+", cell)[0]] for cell in backends)
    return found


def documented_as_padded():
    """The types with a dagger in that table."""
    text = (Path(__file__).parents[3] / "docs" / "training.md").read_text()
    return re.findall(r"`(\w+)`†", text)


def runs_on_megatron(model_type):
    try:
        check_model(config_of(model_type), {})
    except ValueError:
        return False
    return True


def test_the_table_in_the_docs_is_true():
    """What it says of FSDP is what the tests above run, and refuse."""
    expected = {name: (name in DECODERS, runs_on_megatron(name)) for name in (*DECODERS, *REFUSED)}
    assert documented() == expected
    assert not set(COMMON.split()) - DECODERS.keys()
