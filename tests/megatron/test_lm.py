"""MegatronLMWorker on real processes, compared with the Hugging Face model in this process. Its model, a
MegatronTrainModel, has more tests in test_train_model.py."""

import pytest
import torch
from lm_configs import LLAMA, PP2, PP4, SIZES, TP2
from megatron_workers import count_parameters
from mixtures import by_expert
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3MoeConfig

from single_controller import WorkerError

QWEN2_TIED = Qwen2Config(**SIZES, tie_word_embeddings=True)
LLAMA3_ROPE = LlamaConfig(**SIZES, rope_parameters={
    "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192})  # fmt: skip
BIASED_GELU = LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True, hidden_act="gelu", head_dim=32)

pytestmark = pytest.mark.timeout(240)  # starting the shared processes counts towards the first test
rare = pytest.mark.full("rare variants of Megatron models and layouts")


def weights(model):
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def reference_log_probs(model, ids, mask=None, temperature=1.0):
    positions = None if mask is None else (mask.cumsum(1) - 1).clamp(min=0)
    logits = model(ids, attention_mask=mask, position_ids=positions).logits[:, :-1] / temperature
    return logits.log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]


def tokens(rows, length=12, seed=1):
    return torch.randint(0, SIZES["vocab_size"], (rows, length), generator=torch.Generator().manual_seed(seed))


def train_both(group, model, steps=2, lr=1e-3, clip=0.5):
    """Take the same steps on both sides, on batches that dp does not divide, and compare the metrics of each."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.0)
    for step in range(steps):
        ids = tokens(6 + step, seed=10 + step)
        counts = torch.ones_like(ids)
        counts[:, 0] = 0
        counts[:step, 3:] = 0  # the ranks have different numbers of tokens
        metrics = group.train_step(ids, loss_mask=counts)
        optimizer.zero_grad()
        loss = -(reference_log_probs(model, ids) * counts[:, 1:]).sum() / counts[:, 1:].sum()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        assert len(metrics) == group.dp_size and all(one == metrics[0] for one in metrics)
        assert metrics[0]["loss"] == pytest.approx(loss.item(), rel=1e-5)
        assert metrics[0]["grad_norm"] == pytest.approx(norm.item(), rel=1e-4)
        assert metrics[0]["tokens"] == counts[:, 1:].sum()
        assert metrics[0]["lr"] == lr


def check_weights(group, model, start, within=1e-4):
    """The group's weights match the model's, can be loaded into a new model, and have changed."""
    found = group.hf_state_dict()
    expected = weights(model)
    assert found.keys() == expected.keys()
    assert max((found[name] - expected[name]).abs().max().item() for name in expected) < within
    assert max((found[name] - start[name]).abs().max().item() for name in expected) > 1e-3
    again = AutoModelForCausalLM.from_config(model.config).float()
    loaded = again.load_state_dict(found)
    assert not loaded.missing_keys and not loaded.unexpected_keys
    ids = tokens(3, seed=5)
    assert (again(ids).logits - model(ids).logits).abs().max() < 1e-4


def check_parity(group, saved, config, parallel):
    group.become(config, parallel, {"lr": 1e-3, "clip_grad": 0.5}, micro_batch_size=2)
    model, _ = saved(config)
    start = weights(model)
    group.load_hf_state_dict(start)
    ids = tokens(7)
    for temperature in (1.0, 0.7):
        log_probs = group.compute_log_prob(ids, temperature=temperature)
        assert log_probs.shape == (7, 11) and log_probs.dtype == torch.float32
        assert (log_probs - reference_log_probs(model, ids, temperature=temperature)).abs().max() < 1e-4
    train_both(group, model)
    check_weights(group, model, start)


@pytest.mark.parametrize(
    ("config", "parallel"),
    [
        pytest.param(QWEN2_TIED, {**TP2, **PP2}, id="Qwen2 with tied embeddings, tp2 pp2", marks=rare),
        pytest.param(BIASED_GELU, TP2, id="biases, gelu, an explicit head size, dp2 tp2"),
        pytest.param(LLAMA3_ROPE, PP4, id="llama3 rope, pp4", marks=rare),
        pytest.param(LLAMA, {**TP2, **PP2, "order": "pp-dp-tp-cp-ep"}, id="another order of the axes", marks=rare),
    ],
)
def test_log_probs_and_adam_steps_match_hugging_face(four, saved, config, parallel):
    check_parity(four, saved, config, parallel)


@pytest.mark.full("Megatron on eight ranks")
@pytest.mark.parametrize("config", [LLAMA, QWEN2_TIED], ids=["Llama", "Qwen2, tied"])
def test_parity_at_dp2_tp2_pp2(eight, saved, config):
    check_parity(eight, saved, config, {**TP2, **PP2})


@pytest.fixture(scope="module")
def llama_model(four_processes, saved):
    """A Llama at tp2 pp2. Tests that use it must precede those that initialize megatron with other sizes."""
    four_processes.become(LLAMA, {**TP2, **PP2}, {"lr": 1e-3}, micro_batch_size=2)
    return saved(LLAMA, seed=3)[0]


@pytest.fixture
def llama(four, llama_model):
    """(group, Hugging Face model) with the same weights."""
    four.load_hf_state_dict(weights(llama_model))
    return four, llama_model


def test_weights_round_trip_exactly_and_each_rank_holds_its_shard(llama):
    group, model = llama
    found = group.hf_state_dict()
    assert all(torch.equal(found[name], tensor) for name, tensor in weights(model).items())
    whole = sum(parameter.numel() for parameter in model.parameters())
    assert max(group.run(count_parameters)) < 0.35 * whole, "a quarter, plus norms and vocabulary padding"


def test_padding_on_either_side_changes_nothing(llama):
    group, model = llama
    ids = tokens(5, seed=8)
    mask = torch.ones_like(ids)
    mask[0, :4] = mask[1, :1] = 0
    mask[2, 7:] = mask[4, 11:] = 0
    real = (mask[:, 1:] * mask[:, :-1]).bool()
    log_probs = group.compute_log_prob(ids, mask)
    assert (log_probs - reference_log_probs(model, ids, mask))[real].abs().max() < 1e-4
    alone = reference_log_probs(model, ids[:1, 4:])
    assert (log_probs[:1, 4:] - alone).abs().max() < 1e-4


@pytest.mark.parametrize("with_loss_mask", [False, True], ids=["no loss_mask", "loss_mask"])
def test_step_is_the_same_with_padding_on_either_side(llama, saved, with_loss_mask):
    group, model = llama[0], saved(LLAMA, seed=3)[0]
    lengths = [12, 9, 5, 2, 1, 0]
    alone = [tokens(1, length=length, seed=length) for length in lengths]
    losses = torch.cat([-reference_log_probs(model, row)[0] for row in alone if row.shape[1] > 1])
    losses.mean().backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item()
    for side in ("left", "right"):
        ids, real, counts = torch.full((6, 12), 7), torch.zeros(6, 12).long(), torch.zeros(6, 12).long()
        for number, row in enumerate(alone):
            start = 12 - row.shape[1] if side == "left" else 0
            ids[number, start : start + row.shape[1]] = row[0]
            real[number, start : start + row.shape[1]] = 1
            counts[number, start + 1 : start + row.shape[1]] = 1
        group.load_hf_state_dict(weights(llama[1]))
        metrics = group.train_step(ids, real, counts if with_loss_mask else None)[0]
        assert metrics["tokens"] == len(losses) == 24
        assert metrics["loss"] == pytest.approx(losses.mean().item(), rel=1e-5)
        assert metrics["grad_norm"] == pytest.approx(norm, rel=1e-4)


def test_loss_is_the_mean_weighted_by_the_loss_mask(llama):
    """Also if the weights add up to less than 1."""
    group, model = llama
    ids, counts = tokens(2), torch.ones(2, 12)
    counts[:, 0] = 0
    whole = group.train_step(ids, loss_mask=counts)[0]["loss"]
    group.load_hf_state_dict(weights(model))
    assert group.train_step(ids, loss_mask=counts * 0.01)[0]["loss"] == pytest.approx(whole, rel=1e-4)
    group.load_hf_state_dict(weights(model))


def test_batch_without_rows(llama):
    group, _ = llama
    assert group.compute_log_prob(tokens(2)[:0]).shape == (0, 11)


def test_weights_from_a_saved_folder(llama, saved, tmp_path):
    group, _ = llama
    model = saved(LLAMA, seed=9)[0]
    model.save_pretrained(tmp_path, max_shard_size="100KB")
    group.load_hf(str(tmp_path))
    found = group.hf_state_dict()
    assert all(torch.equal(found[name], tensor) for name, tensor in weights(model).items())
    with pytest.raises(WorkerError, match=r"no \.safetensors files"):
        group.load_hf(str(tmp_path / "nothing"))


def test_wrong_state_dict_changes_nothing(llama, saved):
    group, model = llama
    state = weights(saved(LLAMA, seed=4)[0])
    state["lm_head.weight"] = torch.ones(7, 64)
    with pytest.raises(WorkerError, match=r"has shape \(7, 64\); expected \(131, 64\)"):
        group.load_hf_state_dict(state)
    assert torch.equal(group.hf_state_dict()["lm_head.weight"], model.lm_head.weight)


def test_invalid_batch_is_rejected_and_the_group_stays_usable(llama):
    group, _ = llama
    for call, message in (
        (lambda: group.compute_log_prob(tokens(2) + 120), "vocab_size is 131"),
        (lambda: group.train_step(tokens(2), loss_mask=torch.ones(2, 12)), "counts token 0"),
    ):
        with pytest.raises(WorkerError, match=message):
            call()
        assert group.compute_log_prob(tokens(2)).shape == (2, 11)


def test_invalid_rows_of_one_data_parallel_rank_are_an_error_on_all(four):
    four.become(LLAMA, TP2, {"lr": 1e-3}, micro_batch_size=2)
    ids = tokens(4)
    ids[3, 0] = 131
    with pytest.raises(WorkerError, match=r"rank 1: ValueError: .*vocab_size is 131"):
        four.train_step(ids)
    real = torch.ones_like(ids)
    real[3, 5] = 0
    with pytest.raises(WorkerError, match=r"rank 1: ValueError: .*attention_mask of row 1 has padding"):
        four.train_step(tokens(4), real)
    assert four.train_step(tokens(4))[0]["tokens"] == 4 * 11


def test_model_in_bfloat16(four, saved):
    four.become(LLAMA, {**TP2, **PP2}, {"lr": 1e-3}, param_dtype="bf16", micro_batch_size=2)
    model = saved(LLAMA, seed=6)[0]
    four.load_hf_state_dict(weights(model))
    ids = tokens(4)
    assert (four.compute_log_prob(ids) - reference_log_probs(model, ids)).abs().max() < 0.05
    first = four.train_step(ids)[0]["loss"]
    for _ in range(3):
        last = four.train_step(ids)[0]["loss"]
    assert last < first
    assert all(tensor.dtype == torch.bfloat16 for tensor in four.hf_state_dict().values())


@rare
@pytest.mark.parametrize("sizes", [{}, TP2, {**PP2, "expert_tensor_parallel_size": 1}], ids=["dp4", "tp2", "pp2"])
def test_experts_of_all_ranks_are_gathered(four, saved, sizes):
    """ep divides dp: rows are cut by dp, and every rank gets its own."""
    config = Qwen3MoeConfig(**SIZES, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=48, head_dim=16)
    model = saved(config)[0]
    four.become(config, {**sizes, "expert_model_parallel_size": 2}, {"lr": 1e-3}, micro_batch_size=2)
    assert four.layout.sizes["ep"] == 2
    expected = by_expert(config, weights(model))
    four.load_hf_state_dict(expected)
    found = four.hf_state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    ids = tokens(7)
    assert (four.compute_log_prob(ids) - reference_log_probs(model, ids)).abs().max() < 1e-5
