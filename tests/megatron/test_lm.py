"""The decoder on eight real processes, against the Hugging Face model in this one."""

import lm_workers
import pytest
import torch
from lm_configs import LLAMA, SIZES
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config

from single_controller import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup, WorkerError

QWEN2_TIED = Qwen2Config(**SIZES, tie_word_embeddings=True)
LLAMA3_ROPE = LlamaConfig(
    **SIZES,
    rope_parameters={
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
)
BIASED_GELU = LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True, hidden_act="gelu", head_dim=32)
TP2_PP2 = {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2}

pytestmark = pytest.mark.timeout(240)  # eight processes that import megatron on two cores


@pytest.fixture(scope="module")
def group(ray_cluster):
    """Eight ranks; on tp2 x pp2 they are dp2 besides."""
    with (
        RayResourcePool([8], use_gpu=False) as pool,
        # On two cores one rank may need long to find the error that the others have found.
        RayWorkerGroup(pool, RayClassWithInitArgs(lm_workers.ManyModels), error_grace=60) as group,
    ):
        yield group


def dense(config, seed=0):
    """The reference: the Hugging Face model with random weights, biases and norms included."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config).float()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def weights(model):
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def reference_log_probs(model, ids, mask=None):
    positions = None if mask is None else (mask.cumsum(1) - 1).clamp(min=0)
    logits = model(ids, attention_mask=mask, position_ids=positions).logits[:, :-1]
    return logits.log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]


def tokens(rows, length=12, seed=1):
    return torch.randint(0, SIZES["vocab_size"], (rows, length), generator=torch.Generator().manual_seed(seed))


def trained(group, model, steps=3, lr=1e-3, clip=0.5):
    """Take the same steps on both sides, on rows that do not divide, and compare what the group said of each."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.0)
    for step in range(steps):
        ids = tokens(6 + step, seed=10 + step)
        counts = torch.ones_like(ids)
        counts[:, 0] = 0
        counts[:step, 3:] = 0  # the ranks have different numbers of tokens
        said = group.train_step(ids, loss_mask=counts)
        optimizer.zero_grad()
        loss = -(reference_log_probs(model, ids) * counts[:, 1:]).sum() / counts[:, 1:].sum()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        assert len(said) == group.dp_size and all(one == said[0] for one in said)
        assert said[0]["loss"] == pytest.approx(loss.item(), rel=1e-5)
        assert said[0]["grad_norm"] == pytest.approx(norm.item(), rel=1e-4)
        assert said[0]["tokens"] == counts[:, 1:].sum()
        assert said[0]["lr"] == lr


def check_weights(group, model, start, within=1e-4):
    """The group's weights are the model's, they load into a new one, and they have moved."""
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


@pytest.mark.parametrize(
    ("config", "parallel", "options"),
    [
        pytest.param(LLAMA, TP2_PP2, {}, id="Llama, dp2 tp2 pp2"),
        pytest.param(QWEN2_TIED, TP2_PP2, {}, id="Qwen2 with tied embeddings, dp2 tp2 pp2"),
        pytest.param(LLAMA, {**TP2_PP2, "order": "pp-dp-tp-cp-ep"}, {}, id="another order of the axes"),
        pytest.param(
            LLAMA, {"tensor_model_parallel_size": 2}, {"optimizer": {"distributed": True}}, id="distributed optimizer"
        ),
        pytest.param(
            LLAMA,
            {**TP2_PP2, "virtual_pipeline_model_parallel_size": 2},
            {"overrides": {"overlap_p2p_comm": True, "batch_p2p_comm": False}},
            id="interleaved pipeline",
        ),
        pytest.param(BIASED_GELU, TP2_PP2, {}, id="biases, gelu, a head size of its own"),
        pytest.param(LLAMA3_ROPE, {"pipeline_model_parallel_size": 4}, {}, id="llama3 rope, dp2 pp4"),
    ],
)
def test_log_probs_and_three_adam_steps_are_those_of_hugging_face(group, config, parallel, options):
    adam = {"lr": 1e-3, "clip_grad": 0.5, **options.pop("optimizer", {})}
    group.become(config, parallel, adam, micro_batch_size=2, **options)
    model = dense(config)
    start = weights(model)
    group.load_hf_state_dict(start)
    ids = tokens(7)
    log_probs = group.compute_log_prob(ids)
    assert log_probs.shape == (7, 11) and log_probs.dtype == torch.float32
    assert (log_probs - reference_log_probs(model, ids)).abs().max() < 1e-4
    trained(group, model)
    check_weights(group, model, start)


@pytest.fixture(scope="module")
def llama_model(group):
    """The Llama at dp2 tp2 pp2."""
    group.become(LLAMA, TP2_PP2, {"lr": 1e-3}, micro_batch_size=2)
    return dense(LLAMA, seed=3)


@pytest.fixture
def llama(group, llama_model):
    """It, and the model whose weights it has."""
    group.load_hf_state_dict(weights(llama_model))
    return group, llama_model


def test_weights_go_in_and_out_unchanged_and_each_rank_holds_its_part(llama):
    group, model = llama
    found = group.hf_state_dict()
    assert all(torch.equal(found[name], tensor) for name, tensor in weights(model).items())
    whole = sum(parameter.numel() for parameter in model.parameters())
    assert max(group.parameters_here()) < 0.35 * whole, "a quarter, and the norms and the padding of the vocabulary"


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


@pytest.mark.parametrize("masked", [False, True], ids=["no loss_mask", "loss_mask"])
def test_a_step_is_the_same_with_padding_on_either_side(group, masked):
    model = dense(LLAMA, seed=3)
    lengths = [12, 9, 5, 2, 1]
    alone = [tokens(1, length=length, seed=length) for length in lengths]
    losses = torch.cat([-reference_log_probs(model, row)[0] for row in alone if row.shape[1] > 1])
    losses.mean().backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item()
    for side in ("left", "right"):
        ids, real, counts = torch.full((5, 12), 7), torch.zeros(5, 12).long(), torch.zeros(5, 12).long()
        for number, row in enumerate(alone):
            start = 12 - row.shape[1] if side == "left" else 0
            ids[number, start : start + row.shape[1]] = row[0]
            real[number, start : start + row.shape[1]] = 1
            counts[number, start + 1 : start + row.shape[1]] = 1
        group.become(LLAMA, TP2_PP2, {"lr": 1e-3}, micro_batch_size=2)
        group.load_hf_state_dict(weights(dense(LLAMA, seed=3)))
        said = group.train_step(ids, real, counts if masked else None)[0]
        assert said["tokens"] == len(losses) == 24
        assert said["loss"] == pytest.approx(losses.mean().item(), rel=1e-5)
        assert said["grad_norm"] == pytest.approx(norm, rel=1e-4)


def test_temperature_divides_the_logits(llama):
    group, model = llama
    ids = tokens(2)
    expected = (model(ids).logits[:, :-1] / 0.7).log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
    assert (group.compute_log_prob(ids, temperature=0.7) - expected).abs().max() < 1e-4


@pytest.mark.parametrize("rows", [0, 1])
def test_fewer_rows_than_dp_ranks(llama, rows):
    group, model = llama
    ids = tokens(2)[:rows]
    log_probs = group.compute_log_prob(ids)
    assert log_probs.shape == (rows, 11)
    if rows:
        assert (log_probs - reference_log_probs(model, ids)).abs().max() < 1e-4


def test_weights_from_a_saved_folder(llama, tmp_path):
    group, _ = llama
    model = dense(LLAMA, seed=9)
    model.save_pretrained(tmp_path, max_shard_size="100KB")
    group.load_hf(str(tmp_path))
    found = group.hf_state_dict()
    assert all(torch.equal(found[name], tensor) for name, tensor in weights(model).items())
    with pytest.raises(WorkerError, match=r"no \.safetensors files"):
        group.load_hf(str(tmp_path / "nothing"))


def test_weights_loaded_after_a_step_are_those_that_train(llama):
    """The optimizer keeps no copy of the old ones."""
    group, _ = llama
    group.train_step(tokens(4))
    model = dense(LLAMA, seed=11)
    group.load_hf_state_dict(weights(model))
    assert (group.compute_log_prob(tokens(2)) - reference_log_probs(model, tokens(2))).abs().max() < 1e-4


@pytest.mark.parametrize(
    ("change", "told"),
    [
        pytest.param(lambda sd: sd.pop("model.norm.weight"), "'model.norm.weight' missing", id="missing"),
        pytest.param(lambda sd: sd.update({"model.norm.wieght": torch.ones(64)}), "did you mean", id="unknown"),
        pytest.param(lambda sd: sd.update({"lm_head.weight": torch.ones(7, 64)}), r"is \(7, 64\), not", id="shape"),
    ],
)
def test_a_state_dict_that_does_not_fit_changes_nothing(llama, change, told):
    group, model = llama
    state = weights(dense(LLAMA, seed=4))
    change(state)
    with pytest.raises(WorkerError, match=told):
        group.load_hf_state_dict(state)
    assert torch.equal(group.hf_state_dict()["lm_head.weight"], model.lm_head.weight)


@pytest.mark.parametrize(
    ("call", "told"),
    [
        pytest.param(lambda g: g.compute_log_prob(tokens(2) + 120), "vocab_size is 131", id="token"),
        pytest.param(lambda g: g.compute_log_prob(tokens(2).float()), "integers", id="floats"),
        pytest.param(lambda g: g.compute_log_prob(tokens(2, length=1)), "two tokens", id="one token"),
        pytest.param(lambda g: g.train_step(tokens(2), loss_mask=torch.ones(2, 3)), "same shape", id="mask"),
        pytest.param(
            lambda g: g.train_step(tokens(2), loss_mask=torch.ones(2, 12)), "counts token 0", id="first token"
        ),
    ],
)
def test_batches_that_make_no_sense(llama, call, told):
    group, _ = llama
    with pytest.raises(WorkerError, match=told):
        call(group)
    assert group.compute_log_prob(tokens(2)).shape == (2, 11)


def test_training_without_an_optimizer_says_so(group):
    group.become(LLAMA, TP2_PP2)
    with pytest.raises(WorkerError, match="without an optimizer"):
        group.train_step(tokens(2))


def test_a_step_on_one_row_alone(group):
    group.become(LLAMA, TP2_PP2, {"lr": 1e-3}, micro_batch_size=2)
    model = dense(LLAMA, seed=3)
    start = weights(model)
    group.load_hf_state_dict(start)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
    ids = tokens(1)
    said = group.train_step(ids)
    loss = -reference_log_probs(model, ids).mean()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    assert said[0]["loss"] == pytest.approx(loss.item(), rel=1e-5)
    found = group.hf_state_dict()
    assert max((found[name] - tensor).abs().max().item() for name, tensor in weights(model).items()) < 1e-4
    assert any((found[name] != start[name]).any() for name in start)


def test_a_model_in_bfloat16(group):
    group.become(LLAMA, TP2_PP2, {"lr": 1e-3}, param_dtype="bf16", micro_batch_size=2)
    model = dense(LLAMA, seed=6)
    group.load_hf_state_dict(weights(model))
    ids = tokens(4)
    assert (group.compute_log_prob(ids) - reference_log_probs(model, ids)).abs().max() < 0.05
    first = group.train_step(ids)[0]["loss"]
    for _ in range(5):
        last = group.train_step(ids)[0]["loss"]
    assert last < first
    assert all(tensor.dtype == torch.bfloat16 for tensor in group.hf_state_dict().values())


@pytest.mark.parametrize(
    ("sizes", "told"),
    [
        ({"tensor_model_parallel_size": 4}, "num_key_value_heads=2 cannot be cut over tensor_model_parallel_size=4"),
        ({"pipeline_model_parallel_size": 8}, "num_hidden_layers=4 cannot be cut over 8 pipeline stages"),
    ],
)
def test_sizes_that_do_not_divide_the_model_are_refused(group, sizes, told):
    with pytest.raises(WorkerError, match=told):
        group.become(LLAMA, sizes)
