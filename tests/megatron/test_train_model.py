"""MegatronTrainModel on four real processes, compared with the Hugging Face model in this one.

Tests of the same parallel sizes follow one another: `train_model_workers.make` then keeps megatron's process groups.
"""

from functools import partial

import pytest
import torch
import train_model_workers as on_ranks
from hf_reference import (
    TOKENS,
    Reference,
    Whole,
    assert_training_continues,
    batch,
    check_weights,
    joined,
    loaded,
    steps,
    whole_weights,
)
from lm_configs import LLAMA, PP2, PP4, SIZES, TP2, VPP
from shard_helpers import assembled, assert_same
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForTokenClassification,
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
    Qwen3Config,
)

from single_controller import WorkerError
from workers.megatron.config import SUPPORTED_MODELS
from workers.megatron.hf_weights import read_folder

TIED = LlamaConfig(**SIZES, tie_word_embeddings=True)
HEADS = {**SIZES, "num_attention_heads": 8, "num_key_value_heads": 4}  # two key-value heads per rank at tp2
QWEN2 = Qwen2Config(**HEADS)
ROPE = {"rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 8}
MODELS = {
    "llama": LlamaConfig(**HEADS),
    "mistral": MistralConfig(**HEADS, head_dim=16, sliding_window=5),
    "qwen2": Qwen2Config(**HEADS, use_sliding_window=True, sliding_window=5, max_window_layers=2),
    "qwen3": Qwen3Config(**HEADS, head_dim=16, tie_word_embeddings=True),
    "qwen3, yarn": Qwen3Config(**HEADS, head_dim=16, rope_parameters={"rope_type": "yarn", **ROPE}),
    "mistral, yarn": MistralConfig(
        **HEADS, sliding_window=None,
        rope_parameters={"rope_type": "yarn", **ROPE, "attention_factor": 1.3, "beta_fast": 2.0, "truncate": False},
    ),
    "qwen2, yarn": Qwen2Config(
        **HEADS, rope_parameters={"rope_type": "yarn", **ROPE, "mscale": 0.7, "mscale_all_dim": 0.2}
    ),
    "llama, llama3": LlamaConfig(
        **HEADS, rope_parameters={"rope_type": "llama3", **ROPE, "low_freq_factor": 1.0, "high_freq_factor": 3.0}
    ),
    "llama, linear": LlamaConfig(**HEADS, rope_parameters={"rope_type": "linear", **ROPE}),
}  # fmt: skip
"""Each model type, with each kind of rotary embedding and a sliding window that is shorter than the rows."""
ADAM = {"clip_grad": 0.5}

pytestmark = pytest.mark.timeout(240)
rare = pytest.mark.full("rare variants of Megatron models and layouts")
DP2_TP2 = pytest.param(TP2, id="dp2 tp2", marks=rare)
TP2_PP2 = pytest.param({**TP2, **PP2}, id="tp2 pp2")
INTERLEAVED = pytest.param(VPP, id="interleaved pipeline")


@pytest.mark.parametrize(
    ("config", "parallel", "options"),
    [
        pytest.param(
            LLAMA, VPP, {"overrides": {"overlap_p2p_comm": True, "batch_p2p_comm": False}}, id="interleaved pipeline"
        ),
        pytest.param(TIED, PP4, {}, id="pp4, tied", marks=rare),
        pytest.param(QWEN2, {**TP2, **PP2}, {}, id="tp2 pp2, Qwen2"),
        pytest.param(LLAMA, TP2, {}, id="dp2 tp2", marks=rare),
        pytest.param(TIED, PP2, {}, id="dp2 pp2, tied"),
        pytest.param(
            LLAMA, {}, {"optimizer": {**ADAM, "distributed": True}}, id="dp4, distributed optimizer", marks=rare
        ),
    ],
)
def test_log_probs_entropy_and_steps_match_hugging_face(four, saved, config, parallel, options):
    model, _ = loaded(four, saved, config, parallel, **{"optimizer": ADAM, **options})
    data = batch()
    found = joined(four.run(on_ranks.log_probs, data, 0.7), 7)
    assert (found - Reference(model, data, 0.7).log_probs).abs().max() < 1e-4
    steps(four, model, on_ranks.policy_loss)
    check_weights(four, model)


def test_every_model_type_is_among_these():
    experts = {"mixtral", "qwen2_moe", "qwen3_moe"}  # in test_moe.py
    assert {config.model_type for config in MODELS.values()} == set(SUPPORTED_MODELS) - experts


@pytest.mark.parametrize(
    ("name", "parallel"),
    [
        *((name, {}) for name in MODELS),  # tp1 pp1
        ("mistral", {**TP2, **PP2}),
        ("qwen2", {**TP2, **PP2}),
        ("qwen3", {**TP2, **PP2}),
        pytest.param("mistral", TP2, marks=rare),
        pytest.param("qwen3, yarn", TP2, marks=rare),  # test_gradients.py has them
        pytest.param("qwen3", PP4, marks=rare),
        pytest.param("llama, llama3", PP4, marks=rare),
        pytest.param("mistral, yarn", PP4, marks=rare),
    ],
)
def test_model_type_gives_transformers_log_probs(four, saved, name, parallel):
    model, _ = loaded(four, saved, MODELS[name], parallel, sharp=True)
    data = batch()
    expected = Reference(model, data).log_probs
    difference = (joined(four.run(on_ranks.log_probs, data), 7) - expected).abs().max().item()
    plain = MODELS[name].to_diff_dict()
    plain |= {"sliding_window": None, "layer_types": None, "rope_parameters": None, "use_sliding_window": False}
    without = AutoModelForCausalLM.from_config(type(MODELS[name])(**plain)).eval()
    without.load_state_dict(model.state_dict())
    effect = (Reference(without, data).log_probs - expected).abs().max().item()
    print(f"{name}, {parallel}: difference of log-probabilities {difference:.1e}, effect of the options {effect:.1e}")
    assert difference < 2e-5
    assert effect > 0.05 or name in ("llama", "qwen3"), "a window or a scaling that is ignored would not be noticed"


@rare
@pytest.mark.parametrize("name", ["mistral", "qwen3", "qwen3, yarn"])
def test_export_has_the_same_tensors_and_training_matches(four, saved, tmp_path, name):
    model, folder = loaded(four, saved, MODELS[name], {**TP2, **PP2}, optimizer=ADAM)
    four.run(on_ranks.export, str(tmp_path))
    assert_same(read_folder(tmp_path), read_folder(folder))
    again = AutoConfig.from_pretrained(tmp_path)
    assert (type(again), again.to_diff_dict()) == (type(model.config), model.config.to_diff_dict())
    steps(four, model, on_ranks.policy_loss)
    check_weights(four, model)


@pytest.mark.parametrize("masked", [True, pytest.param(False, marks=rare)], ids=["mask", "no mask"])
@pytest.mark.parametrize("parallel", [INTERLEAVED, DP2_TP2, TP2_PP2])
def test_candidates_with_and_without_a_sampling_mask(four, saved, parallel, masked):
    """The tokens' own log-probabilities are over the sets, a teacher's candidates over the whole vocabulary: 131 tokens
    on two ranks. The step is one whose change of the weights is the gradient: Adam's own moves what has hardly a
    gradient by rounding."""
    drawn = torch.Generator().manual_seed(5)
    data = batch()
    data["candidate_ids"] = torch.randint(0, SIZES["vocab_size"], (7, TOKENS, 3), generator=drawn)
    data["candidate_ids"][..., 0] = SIZES["vocab_size"] - 1  # the last one before the padding
    data |= sampling_sets(data, drawn) if masked else {}
    p2p = {"overrides": {"overlap_p2p_comm": True, "batch_p2p_comm": False}} if parallel is VPP else {}
    gradient_descent = {"clip_grad": 0.0, "betas": (0.0, 0.999), "eps": 1e6}
    model, _ = loaded(four, saved, LLAMA, parallel, sharp=True, optimizer=gradient_descent, **p2p)
    expected = Reference(model, data, 0.7)
    off = (joined(four.run(on_ranks.log_probs, data, 0.7), 7) - expected.log_probs).abs().max().item()
    whole = {name: value for name, value in data.items() if not name.startswith("sampling_mask")}
    effect = (Reference(model, whole, 0.7).log_probs - expected.log_probs).abs().max().item()
    before = whole_weights(four)
    (report, *_) = four.run(on_ranks.train_step, data, on_ranks.distillation_loss, 9.0, 1e6, 0.7)
    after = whole_weights(four)
    total, sums = on_ranks.distillation_loss(expected, Whole(data), 9.0)
    total.backward()
    found = {
        name: ((before[name] - after[name] - one.grad).abs().max() / one.grad.abs().max()).item()
        for name, one in model.named_parameters()
    }
    furthest, of_loss = max(found.values()), abs(report["loss"] - total.item())
    print(f"{parallel}: log-probabilities {off:.1e} (effect of the mask {effect:.1e}), loss {of_loss:.1e}, gradients "
          f"{furthest:.1e} of a tensor's largest")  # fmt: skip
    assert off < 2e-5 and (effect > 0.1) == masked
    assert of_loss < 1e-5 and report["tokens"] == sums["tokens"].item()
    assert furthest < 1e-4, found


def sampling_sets(data, drawn):
    """A sampling mask with sets of 1 token, so of one tensor-parallel rank alone, of some, and of all."""
    lengths, kept = torch.zeros(data["input_ids"].shape, dtype=torch.int32), []
    for row, counts in enumerate(data["loss_mask"].bool()):
        of_row = []
        for at in counts.nonzero()[:, 0].tolist():
            length = (0, 1, 3, 40, SIZES["vocab_size"])[int(torch.randint(0, 5, (), generator=drawn))]
            if length:
                others = torch.randperm(SIZES["vocab_size"], generator=drawn).tolist()
                token = int(data["input_ids"][row, at])
                others.remove(token)
                of_row += [token, *others[: length - 1]]
                lengths[row, at] = length
        kept.append(torch.tensor(of_row, dtype=torch.int32))
    assert set(lengths[data["loss_mask"].bool()].tolist()) == {0, 1, 3, 40, SIZES["vocab_size"]}
    return {"sampling_mask": torch.nested.as_nested_tensor(kept, layout=torch.jagged), "sampling_mask_lengths": lengths}


@pytest.mark.parametrize("parallel", [DP2_TP2, TP2_PP2])
def test_critic_matches_a_token_classifier(four, saved, parallel):
    model, folder = saved(LlamaConfig(**SIZES, tie_word_embeddings=True, num_labels=1), AutoModelForTokenClassification)
    four.run(on_ranks.make, TIED, parallel, role="critic", optimizer=ADAM)
    four.run(on_ranks.load_hf, folder)
    data = batch()
    found = joined(four.run(on_ranks.values, data), 7)
    assert (found - Reference(model, data).values).abs().max() < 1e-4
    steps(four, model, on_ranks.value_loss)
    check_weights(four, model)


@pytest.mark.parametrize(
    ("parallel", "options"),
    [
        pytest.param({**TP2, **PP2}, {"optimizer": {}}, id="tp2 pp2, bf16", marks=rare),
        pytest.param(TP2, {"optimizer": {"distributed": True}}, id="dp2 tp2, bf16, distributed optimizer"),
    ],
)
def test_restored_weights_are_trained(four, saved, parallel, options):
    """The optimizer's float32 copies follow, and no tensor moves in memory."""
    loaded(four, saved, TIED, parallel, param_dtype="bf16", **options)
    assert four.run(on_ranks.snapshot_step_back, batch(), 9.0) == [(True,) * 4] * 4
    assert all(tensor.dtype == torch.bfloat16 for tensor in whole_weights(four).values())


@pytest.mark.parametrize(
    ("param_dtype", "distributed"),
    [
        ("bf16", True),
        pytest.param("fp32", False, marks=rare),
        pytest.param("bf16", False, marks=rare),
        pytest.param("fp32", True, marks=rare),
    ],
)
def test_offloaded_model_continues_unchanged(four, saved, param_dtype, distributed):
    again = partial(loaded, four, saved, LLAMA, TP2, param_dtype=param_dtype, optimizer={"distributed": distributed})
    again()
    four.run(on_ranks.train_step, batch(), on_ranks.policy_loss, 9.0, 1e-3)
    expected = four.run(on_ranks.train_step, batch(), on_ranks.policy_loss, 9.0, 1e-3)
    again()
    for (asleep, freed, copied, found), held, wanted in zip(
        four.run(on_ranks.sleep_and_wake, batch(), 9.0), four.run(on_ranks.parameter_bytes), expected, strict=True
    ):
        assert asleep == 0
        assert found == wanted
        # In float32 there are parameters, gradients and two moments; bfloat16 adds float32 copies. The distributed
        # optimizer shards everything but parameters and gradients over dp2. Gradients are float32, and not copied.
        per_parameter = {"fp32": (4, 3), "bf16": (9, 6)}[param_dtype][distributed]
        gradients = {"fp32": 1, "bf16": 2}[param_dtype]
        assert freed == pytest.approx(held * per_parameter, rel=0.05)
        assert copied == pytest.approx(held * (per_parameter - gradients), rel=0.05)


@pytest.mark.parametrize(
    ("config", "before", "after", "distributed"),
    [
        pytest.param(QWEN2, TP2, PP2, True, id="dp2 tp2 to dp2 pp2, distributed optimizer, Qwen2", marks=rare),
        pytest.param(MODELS["qwen3"], {**TP2, **PP2}, TP2, True, id="tp2 pp2 to dp2 tp2, distributed optimizer, Qwen3"),
        pytest.param(LLAMA, {**TP2, **PP2}, PP2, False, id="tp2 pp2 to dp2 pp2", marks=rare),
        pytest.param(TIED, PP4, TP2, False, id="pp4 to dp2 tp2, tied", marks=rare),
        pytest.param(TIED, {}, {**TP2, **PP2}, False, id="dp4 to tp2 pp2, tied", marks=rare),
        pytest.param(TIED, {**TP2, **PP2}, {}, True, id="tp2 pp2 to dp4, distributed optimizer, tied", marks=rare),
    ],
)
def test_training_continues_from_a_checkpoint_at_other_sizes(four, saved, tmp_path, config, before, after, distributed):
    optimizer = {**ADAM, "distributed": distributed}
    assert_training_continues(four, saved, str(tmp_path), config, before, after, optimizer=optimizer)


def test_background_checkpoint_has_the_state_at_the_call(four, saved, tmp_path):
    """The weights change while it is being written. With bfloat16 it contains the float32 copies too."""
    loaded(four, saved, LLAMA, TP2, param_dtype="bf16", optimizer=ADAM)
    four.run(on_ranks.train_step, batch(), on_ranks.policy_loss, 9.0, 1e-3)
    weights = whole_weights(four)
    four.run(on_ranks.save_in_background, str(tmp_path))
    four.run(on_ranks.make, LLAMA, {**TP2, **PP2}, param_dtype="bf16", optimizer=ADAM)
    four.run(on_ranks.load, str(tmp_path))
    found = whole_weights(four)
    assert all(torch.equal(found[name], weights[name]) for name in weights)
    four.run(on_ranks.train_step, batch(), on_ranks.policy_loss, 9.0, 0.0)
    found = whole_weights(four)
    assert all(torch.equal(found[name], weights[name]) for name in weights), "the optimizer has the same copies"
    four.run(on_ranks.make, LLAMA, {**TP2, **PP2}, optimizer=ADAM)
    with pytest.raises(WorkerError, match="the state of an optimizer of another param_dtype"):
        four.run(on_ranks.load, str(tmp_path))


def test_critic_starts_with_a_language_models_weights(four, saved):
    model, _ = loaded(four, saved, LLAMA, {**TP2, **PP2}, role="critic")
    found = whole_weights(four)
    assert found.keys() - dict(model.named_parameters()).keys() == {"score.weight", "score.bias"}
    assert "lm_head.weight" not in found
    assert torch.equal(found["model.norm.weight"], model.model.norm.weight)


def test_exported_critic_is_a_token_classifier(four, saved, tmp_path):
    model, folder = saved(LlamaConfig(**SIZES, tie_word_embeddings=True, num_labels=1), AutoModelForTokenClassification)
    four.run(on_ranks.make, TIED, {**TP2, **PP2}, role="critic")
    four.run(on_ranks.load_hf, folder)
    four.run(on_ranks.export, str(tmp_path))
    again, info = AutoModelForTokenClassification.from_pretrained(tmp_path, output_loading_info=True)
    ids = batch()["input_ids"]
    assert not any(info.values())
    assert torch.equal(again.eval()(ids).logits, model(ids).logits)


@pytest.mark.parametrize(
    ("config", "parallel", "files"),
    [(MODELS["mistral"], {**TP2, **PP2}, 1), (QWEN2, {**TP2, **PP2}, 6), pytest.param(TIED, PP4, 1, marks=rare)],
    ids=["mistral, tp2 pp2", "small files", "pp4, tied"],
)
def test_export_can_be_loaded_by_transformers(four, saved, tmp_path, config, parallel, files):
    model, _ = loaded(four, saved, config, parallel)
    total = sum(parameter.nbytes for parameter in model.parameters())
    options = {"max_file_bytes": total // 5} if files == 6 else {}
    (tmp_path / ".unfinished").mkdir()
    for old in ("model-00001-of-00009.safetensors", ".unfinished/model.safetensors"):
        (tmp_path / old).write_bytes(b"of a run before")
    four.run(on_ranks.export, str(tmp_path), **options)
    assert len(list(tmp_path.glob("*.safetensors"))) == files
    assert AutoConfig.from_pretrained(tmp_path).to_diff_dict() == model.config.to_diff_dict()
    again, info = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info.values()) and type(again) is type(model)
    ids = batch()["input_ids"]
    assert torch.equal(again.float()(ids).logits, model(ids).logits)


@pytest.mark.parametrize(
    ("config", "parallel", "empty"),
    [
        pytest.param(Qwen2Config(**HEADS, tie_word_embeddings=True), {**TP2, **PP2}, 0, id="tp2 pp2, tied"),
        pytest.param(Qwen2Config(**{**HEADS, "vocab_size": 5}), {"tensor_model_parallel_size": 4}, 1, id="tp4"),
        pytest.param(LlamaConfig(**HEADS, attention_bias=True, mlp_bias=True, tie_word_embeddings=True), TP2, 0,
                     id="dp2 tp2, all biases, tied"),
    ],
)  # fmt: skip
def test_shards_are_the_whole_model(four, saved, config, parallel, empty):
    """They are read on one rank after the other: no rank needs the others for it."""
    model, _ = loaded(four, saved, config, parallel, param_dtype="bf16")
    expected = {name: parameter.detach().bfloat16() for name, parameter in model.named_parameters()}
    shards = [four.run(on_ranks.hf_shards, rank)[rank] for rank in range(4)]
    assert_same(assembled(shards), expected)
    heads = [[begin[0] for name, _, begin, _ in rank if name == "lm_head.weight"] for rank in shards]
    assert heads.count([]) == (empty or 4), "padding of the vocabulary is no shard"


def test_bfloat16_export_records_its_dtype(four, saved, tmp_path):
    model, _ = loaded(four, saved, TIED, TP2, param_dtype="bf16")
    four.run(on_ranks.export, str(tmp_path))
    again = AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto")
    assert again.dtype == torch.bfloat16 and AutoConfig.from_pretrained(tmp_path).dtype == torch.bfloat16
    assert all(torch.equal(tensor, model.state_dict()[name].bfloat16()) for name, tensor in again.state_dict().items())


def test_background_error_is_raised_by_the_next_wait(four, tmp_path):
    four.run(on_ranks.make, LLAMA, TP2)
    assert four.run(on_ranks.save_fails, str(tmp_path)) == [["", "the disk is full", ""]] * 4
    with pytest.raises(WorkerError, match="is not a complete checkpoint"):
        four.run(on_ranks.load, str(tmp_path), optimizer=False)


def test_rank_that_does_not_see_a_checkpoint_leaves_no_other_waiting(four, tmp_path):
    four.run(on_ranks.make, LLAMA, TP2)
    four.run(on_ranks.save, str(tmp_path))
    assert all("rank 1: FileNotFoundError" in error for error in four.run(on_ranks.load_unseen_by, 1, str(tmp_path)))


def test_rank_that_does_not_see_the_weights_leaves_no_other_waiting(four, saved, tmp_path):
    four.run(on_ranks.make, LLAMA, TP2)
    errors = four.run(on_ranks.load_hf_unseen_by, 1, saved(LLAMA)[1], str(tmp_path))
    assert all("rank 1: FileNotFoundError" in error for error in errors)


def test_error_of_the_rank_that_completes_a_checkpoint_is_raised_on_all_ranks(four, tmp_path):
    """No rank goes on to the next collective, where it would wait for rank 0."""
    four.run(on_ranks.make, LLAMA, TP2)
    errors = four.run(on_ranks.save_completes_not, str(tmp_path))
    assert all("could not be completed: rank 0: OSError: the disk is full" in error for error in errors), errors
    assert not (tmp_path / "latest.json").exists()
    four.run(on_ranks.save, str(tmp_path / "again"))  # the ranks are at the same step


def test_missing_checkpoint_and_checkpoint_of_another_model(four, tmp_path):
    four.run(on_ranks.make, LLAMA, TP2)
    with pytest.raises(WorkerError, match="FileNotFoundError"):
        four.run(on_ranks.load, str(tmp_path / "nothing"))
    four.run(on_ranks.save, str(tmp_path))
    with pytest.raises(WorkerError, match="created without an optimizer"):
        four.run(on_ranks.load, str(tmp_path))
    four.run(on_ranks.make, LLAMA, TP2, optimizer=ADAM)
    with pytest.raises(WorkerError, match="has no optimizer state"):
        four.run(on_ranks.load, str(tmp_path))
    four.run(on_ranks.make, LLAMA, TP2, role="critic")
    with pytest.raises(WorkerError, match="is a checkpoint of the role 'actor'; this model has the role 'critic'"):
        four.run(on_ranks.load, str(tmp_path), optimizer=False)
    four.run(on_ranks.make, LlamaConfig(**{**SIZES, "vocab_size": 132}), TP2)  # of the same size with the padding
    with pytest.raises(WorkerError, match="of a model with vocab_size=131; this model has vocab_size=132"):
        four.run(on_ranks.load, str(tmp_path), optimizer=False)


def test_invalid_calls_are_rejected(four):
    four.run(on_ranks.make, LLAMA, TP2)
    with pytest.raises(WorkerError, match=r"values\(\) needs a model with the role 'critic'"):
        four.run(on_ranks.values, batch())
    with pytest.raises(WorkerError, match="vocab_size is 131"):
        four.run(on_ranks.log_probs, {**batch(), "input_ids": batch()["input_ids"] + 131})
    with pytest.raises(WorkerError, match="without an optimizer"):
        four.run(on_ranks.train_step, batch(), on_ranks.policy_loss, 1.0, 1e-3)


def test_checkpoint_from_before_the_first_step(four, saved, tmp_path):
    """It is continued; then its weights alone are loaded at other sizes, as a reference model loads an actor's."""
    model, _ = loaded(four, saved, LLAMA, TP2, optimizer=ADAM)
    four.run(on_ranks.create_state)
    four.run(on_ranks.save, str(tmp_path))
    four.run(on_ranks.train_step, batch(), on_ranks.policy_loss, 9.0, 1e-3)
    four.run(on_ranks.load, str(tmp_path))
    steps(four, model, on_ranks.policy_loss, count=2)
    check_weights(four, model)
    four.run(on_ranks.make, LLAMA, PP2)
    four.run(on_ranks.load, str(tmp_path), optimizer=False)
    check_weights(four, saved(LLAMA)[0], within=1e-9)


@pytest.mark.parametrize("rows", [0, 1])
def test_ranks_without_rows_run_fillers(four, saved, rows):
    model, _ = loaded(four, saved, LLAMA, PP2, optimizer=ADAM)
    data = batch(rows)
    results = four.run(on_ranks.log_probs, data)
    assert [tensor is None for _, _, tensor in results].count(True) == 2, "the first stages return nothing"
    assert (joined(results, rows) - Reference(model, data).log_probs).abs().sum() < 1e-4
    if rows:
        steps(four, model, on_ranks.policy_loss, count=1, rows=1)
        check_weights(four, model)
    reports = four.run(on_ranks.train_step, data, on_ranks.no_loss, 1.0, 0.0)
    assert reports[0] == {"loss": 0.0, "grad_norm": 0.0}
