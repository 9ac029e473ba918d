"""Packed rows train as padded ones do, with fewer tokens computed."""

import time

import pytest
import torch
from model_types import config_of, model_of
from tensordict import TensorDict
from train_helpers import begin, kept_gradients

from dispatch.jagged import build
from single_controller import Broadcast, WorkerError
from workers.data.rollout_data import rows_of
from workers.fsdp.fsdp_model import FSDPOptions, FSDPTrainModel
from workers.fsdp.packed_attention import why_not_packed
from workers.lora import LoraSettings
from workers.train.args import read_args
from workers.train.args_checks import TrainArgsError

pytestmark = pytest.mark.timeout(180)

WIDTH, PROMPT = 40, 20


def rows():
    """Three samples of each of three prompts, of very different lengths, with padding on both sides."""
    g = torch.Generator().manual_seed(0)
    ids, mask = torch.zeros(9, WIDTH, dtype=torch.long), torch.zeros(9, WIDTH, dtype=torch.long)
    counts = torch.zeros(9, WIDTH, dtype=torch.long)
    prompts = torch.randint(1, 32, (3, PROMPT), generator=g)
    for row, length in enumerate([12, 1, 5, 9, 9, 2, 16, 3, 1]):
        begin, prompt = row % 4, prompts[row // 3, : PROMPT - row // 3]
        tokens = torch.cat([prompt, torch.randint(1, 32, (length,), generator=g)])
        ids[row, begin : begin + len(tokens)], mask[row, begin : begin + len(tokens)] = tokens, 1
        counts[row, begin + len(prompt) : begin + len(tokens)] = 1 + torch.arange(length) % 3
    ids[4] = ids[3].roll(1)  # the same completion twice
    mask[4], counts[4] = mask[3].roll(1), counts[3].roll(1)
    sets = [
        torch.cat([((ids[row, at] + torch.tensor([0, 9, 20])) % 32)[: counts[row, at]] for at in counts[row].nonzero()])
        for row in range(9)
    ]
    ends = torch.tensor([0, *map(len, sets)]).cumsum(0)
    return TensorDict(
        {
            "input_ids": ids,
            "attention_mask": mask,
            "weights": torch.randn(9, WIDTH, generator=g),
            "candidate_ids": torch.stack([7 * ids, 3 * ids + 1], dim=-1) % 32,
            "sampling_mask": build(torch.cat(sets), ends, 0),
            "sampling_mask_lengths": counts,
        },
        [9],
    )


def samples_of_a_long_prompt():
    """Eight for each of two ranks, whose lengths are log-normal."""
    g = torch.Generator().manual_seed(0)
    lengths = 2000 + (4.5 + 0.8 * torch.randn(16, generator=g)).exp().long().clamp(8, 400)
    mask = (torch.arange(int(lengths.max())) < lengths[:, None]).long()
    ids = torch.randint(1, 32, mask.shape, generator=g)
    ids[:, :2000] = ids[0, :2000]
    weights = torch.randn(mask.shape, generator=g)
    return TensorDict({"input_ids": ids * mask, "attention_mask": mask, "weights": weights}, [16])


def weighted(outputs, part):
    """A loss of everything that a model returns, in which every place counts differently."""
    made = [outputs.log_probs, outputs.entropy, outputs.values]
    total = sum(of * weight for of, weight in zip(made, (1.0, 0.3, 1.0), strict=True) if of is not None)
    if outputs.candidates is not None:
        total = total + 0.1 * outputs.candidates.sum(-1)
    return (total * part.others["weights"] * part.attention_mask)[:, 1:].sum() / 50, {}


def run(worker, given):
    """On a rank, computed with padding and packed: outputs, the step's report and gradients, how many tokens were
    computed for all of this, and seconds of CPU time that the step took."""
    data, role, model_type, without, options = given
    own = rows_of(data.exclude(*without), list(range(worker.rank, len(data), worker.world_size)))
    found = []
    for packing in (False, True):
        options = {"max_tokens_per_micro_batch": 100, **options}
        of = FSDPOptions(clip_grad=0.0, seed=5, sequence_packing=packing, **options)
        model = FSDPTrainModel(config_of(model_type), role, worker.device, of)
        outputs = model.values(own) if role == "critic" else model.log_probs(own, 0.7)
        computed, gradients = [], kept_gradients(model)

        def count(module, args, given, computed=computed):
            computed.append(given["input_ids"].numel())

        forward = model.module.register_forward_pre_hook(count, with_kwargs=True)
        begun = time.process_time()
        report = model.train_step(dict(own), weighted, lr=0.0, temperature=0.7, entropy=role != "critic")
        took = time.process_time() - begun
        forward.remove()
        found.append((outputs, report, gradients, sum(computed), took))
    return found


@pytest.fixture(scope="module")
def two(fsdp_groups):
    begin(fsdp_groups(2), {"hf_config": config_of("llama").to_diff_dict()})
    return fsdp_groups(2).worker_group


SETS, CANDIDATES = ("sampling_mask", "sampling_mask_lengths"), ("candidate_ids",)


@pytest.mark.parametrize(
    ("role", "model_type", "without", "options"),
    [
        pytest.param("actor", "llama", (*SETS, *CANDIDATES), {"gradient_checkpointing": True}, id="recomputed"),
        pytest.param("actor", "llama", (), {}, id="sampling sets and candidates"),
        pytest.param("actor", "mistral", CANDIDATES, {"cpu_offload": True}, id="sliding window, offloaded"),
        pytest.param("actor", "qwen3_moe", SETS, {}, id="experts"),
        pytest.param("actor", "qwen2", SETS, {"lora": LoraSettings(2, 4.0, 0.0, "all-linear")}, id="adapter"),
        pytest.param("critic", "llama", (*SETS, *CANDIDATES), {}, id="critic"),
    ],
)
def test_packed_rows_train_as_padded_ones(two, role, model_type, without, options):
    ranks = two.execute_with_func_generator(run, Broadcast((rows(), role, model_type, without, options)))
    for padded, packed in ranks:
        assert (packed[0] - padded[0]).abs().max() < 1e-5
        assert packed[1].sums["loss"] == pytest.approx(padded[1].sums["loss"], abs=1e-5)
        assert packed[1].grad_norm == pytest.approx(padded[1].grad_norm, rel=1e-5)
        assert packed[2].keys() == padded[2].keys() and packed[2]
        for name, gradient in padded[2].items():
            assert (packed[2][name] - gradient).abs().max() < 1e-5, name
        assert packed[3] < 0.75 * padded[3]
    for which in (0, 1):
        computed = sum(rank[which][3] for rank in ranks)
        assert ranks[0][which][1].sums["computed_ratio"] == computed / int(rows()["attention_mask"].sum())


@pytest.mark.full("the time that a common prefix saves")
def test_a_long_prompt_is_computed_once(two):
    given = samples_of_a_long_prompt(), "actor", "llama", (), {"max_tokens_per_micro_batch": 2**15}
    for padded, packed in two.execute_with_func_generator(run, Broadcast(given)):
        assert (packed[0] - padded[0]).abs().max() < 1e-5
        assert packed[1].grad_norm == pytest.approx(padded[1].grad_norm, rel=1e-5)
        tokens, seconds = packed[3] / padded[3], packed[4] / padded[4]
        print(f"a prompt of 2,000 tokens: {tokens:.2f} of the padded tokens, {seconds:.2f} of the CPU time")
        assert tokens <= 0.4 and seconds <= 0.5


def test_bfloat16(two):
    (padded, packed), _ = two.execute_with_func_generator(
        run, Broadcast((rows(), "actor", "llama", (*SETS, *CANDIDATES), {"param_dtype": torch.bfloat16}))
    )
    assert (packed[0] - padded[0]).abs().max() < 0.1
    assert packed[1].grad_norm == pytest.approx(padded[1].grad_norm, rel=0.05)


def test_models_that_cannot_be_packed_say_so(two):
    """A state-space model would carry its state from one row to the next."""
    with pytest.raises(WorkerError, match=r"ModelFilesError: sequence packing is not possible with 'mamba'"):
        two.execute_with_func_generator(run, Broadcast((rows(), "actor", "mamba", (*SETS, *CANDIDATES), {})))


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_rotary_embeddings_of_the_longest_row_are_not_packed(kind):
    """The common comparison has no row that is long enough to change the frequencies."""
    scaling = {"factor": 2.0, "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    config = config_of("llama")
    config.rope_parameters = {**config.rope_parameters, "rope_type": kind, **scaling}
    why = why_not_packed(model_of(config).eval(), "actor", torch.device("cpu"), torch.float32)
    assert why == f"its rotary embedding {kind!r} depends on the longest row"


def around_a_longer_row(worker):
    """On a rank: the log-probabilities of a row beyond the original length, before and after a longer one."""
    config = config_of("llama")
    config.max_position_embeddings = 16
    config.rope_parameters = {**config.rope_parameters, "rope_type": "dynamic", "factor": 2.0}
    model = FSDPTrainModel(config, "actor", worker.device, FSDPOptions(seed=5))

    def log_probs(length):
        ids = torch.arange(length)[None] * 7 % 32
        return model.log_probs({"input_ids": ids, "attention_mask": torch.ones_like(ids)}, 1.0)

    return log_probs(24), log_probs(40)[:, :24], log_probs(24)


def test_dynamic_rotary_embeddings_do_not_depend_on_rows_before(two):
    """transformers keeps the frequencies of the longest row so far."""
    for before, of_longer, after in two.execute_with_func_generator(around_a_longer_row):
        assert torch.equal(before, after) and not torch.allclose(before, of_longer, atol=1e-4)


@pytest.mark.parametrize("other", [{"exact": True}, {"train_backend": "megatron"}], ids=str)
def test_packing_that_is_not_possible_is_refused(other):
    with pytest.raises(TrainArgsError, match=r"sequence_packing=True (does not go|needs)"):
        read_args({"hf_config": config_of("llama").to_diff_dict(), "sequence_packing": True, **other})
