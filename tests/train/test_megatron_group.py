"""A train group on Megatron against a naive loop in one process, over tensor, pipeline and data parallelism.

Megatron processes are slow to start: a group of four ranks and one of two serve all tests, and are initialised anew
with the sizes that each test is about.
"""

import json

import pytest
import ray
import torch
from reference import ReferenceGRPO, small_llama
from train_kit import begin, distance, learn, rollout, saved, whole_weights
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification, Qwen2Config

from single_controller import WorkerError
from workers.distributed import process_groups

pytestmark = pytest.mark.timeout(180)

GRPO = {"lr": 3e-3, "kl_loss_coef": 0.01, "entropy_coef": 0.003, "max_tokens_per_micro_batch": 64}
TP2 = {"tensor_model_parallel_size": 2}
PP2 = {"pipeline_model_parallel_size": 2}


@pytest.fixture(scope="module")
def data():
    return rollout(small_llama())


def other_rollout(model, seed):
    return rollout(model, prompts=5, samples=3, seed=seed)


@pytest.mark.parametrize(
    ("ranks", "sizes", "options"),
    [
        (2, TP2, {}),
        (2, PP2, {}),
        (4, TP2, {"balance_data": True, "use_distributed_optimizer": True}),
        (4, {**TP2, **PP2}, {"loss_aggregation": "sequence"}),
        (2, TP2, {"gradient_checkpointing": True}),
        (2, PP2, {"gradient_checkpointing": True}),
    ],
    ids=["tp2", "pp2", "tp2-dp2", "tp2-pp2", "tp2-checkpointed", "pp2-checkpointed"],
)
def test_three_steps_of_grpo_are_those_of_a_plain_loop_at(megatron_groups, llama_folder, ranks, sizes, options):
    """The prompts have the config's padding token in them, which Hugging Face does not train; nor may Megatron."""
    group = megatron_groups(ranks)
    assert begin(group, {"hf_checkpoint": llama_folder, **GRPO, **sizes, **options}, with_ref=True) == [0] * ranks
    config = group.get_parallel_config()
    assert config == {
        "dp_size": ranks // config["tp_size"] // config["pp_size"],
        "tp_size": sizes.get("tensor_model_parallel_size", 1),
        "pp_size": sizes.get("pipeline_model_parallel_size", 1),
        "cp_size": 1,
    }
    plain = ReferenceGRPO(
        small_llama(), kl_coef=0.01, entropy_coef=0.003, aggregation=options.get("loss_aggregation", "token")
    )
    for step in range(3):
        rows = other_rollout(plain.model, seed=step)  # 15 rows: no number of ranks divides them
        expected = plain.step(rows)
        metrics = learn(group, step, rows)
        assert metrics["loss"] == pytest.approx(expected["loss"], abs=1e-4)
        assert metrics["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-3)
        assert metrics["kl"] == pytest.approx(expected["kl"], abs=1e-5)
        assert metrics["entropy"] == pytest.approx(expected["entropy"], abs=1e-4)
        assert metrics["reward"] == pytest.approx(rows["rewards"].mean().item())
    assert distance(whole_weights(group), plain.weights()) < 1e-4


@pytest.mark.parametrize("sizes", [TP2, PP2], ids=["tp2", "pp2"])
def test_tied_embeddings_and_biases(megatron_groups, sizes, tmp_path):
    """A Qwen2, whose first and last stage share a tensor and its gradient."""
    config = Qwen2Config(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
                         vocab_size=32, num_key_value_heads=2, tie_word_embeddings=True)  # fmt: skip
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(config).eval()
    group = megatron_groups(2)
    begin(group, {"hf_checkpoint": saved(model, tmp_path), "lr": 3e-3, **sizes})
    plain = ReferenceGRPO(model)
    for step in range(2):
        rows = other_rollout(plain.model, seed=step)
        assert learn(group, step, rows)["loss"] == pytest.approx(plain.step(rows)["loss"], abs=1e-4)
    found = whole_weights(group)
    assert "lm_head.weight" not in found
    assert distance(found, plain.weights()) < 1e-4


def test_the_same_processes_take_one_layout_after_the_other(megatron_groups, llama_folder, data):
    expected = ReferenceGRPO(small_llama()).log_probs(data)
    group = megatron_groups(4)
    for sizes in (TP2, {**TP2, **PP2}, {}):
        begin(group, {"hf_checkpoint": llama_folder, "max_tokens_per_micro_batch": 50, **sizes})
        assert group.worker_group.dp_size == 4 // 2 ** len(sizes)
        found = group.worker_group.compute_log_prob(data)
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)
    with pytest.raises(WorkerError, match=r"tensor_model_parallel_size=3 .* does not divide the group's 4 ranks"):
        group.worker_group.init({"hf_checkpoint": llama_folder, "tensor_model_parallel_size": 3}, "actor")
    counts = []
    for _ in range(2):
        begin(group, {"hf_checkpoint": llama_folder, **TP2})
        counts.append(group.worker_group.execute_with_func_generator(lambda worker: len(process_groups())))
    assert counts[0] == counts[1]  # those of the layout before are gone
    torch.testing.assert_close(group.worker_group.compute_log_prob(data), expected, atol=1e-5, rtol=1e-4)


def test_several_steps_and_epochs_of_one_rollout(megatron_groups, llama_folder, data):
    """With all rows in each step, epochs are the reference's: the ratio is to the policy before the first of them."""
    group = megatron_groups(2)
    for sizes in (TP2, PP2):
        begin(group, {"hf_checkpoint": llama_folder, "lr": 3e-3, "ppo_epochs": 3, **sizes})
        plain = ReferenceGRPO(small_llama())
        plain.step(data, epochs=3)
        assert learn(group, 0, data)["clip_fraction"] > 0
        assert distance(whole_weights(group), plain.weights()) < 1e-4


def test_rows_are_dealt_to_steps_of_the_optimizer(megatron_groups, llama_folder, data):
    """Two steps of half the rows each, of one rollout: advantages and old log-probabilities are those before both."""
    plain = ReferenceGRPO(small_llama())
    half = data.clone()
    half["old_log_probs"] = plain.log_probs(data)
    half["advantages"] = torch.tensor(plain.advantages(data))
    for rows in (slice(0, 12), slice(12, 24)):
        plain.step(half[rows])
    group = megatron_groups(2)
    begin(group, {"hf_checkpoint": llama_folder, "lr": 3e-3, "num_steps_per_rollout": 2, "num_rollout": 2,
                  "lr_decay_style": "constant", **PP2})  # fmt: skip
    learn(group, 0, data)
    assert distance(whole_weights(group), plain.weights()) < 1e-4
    # Four steps: 1.5e-3, then from 3e-3 at step 1 down to 0 at step 4. The last of each rollout is told.
    begin(group, {"hf_checkpoint": llama_folder, "lr": 3e-3, "num_steps_per_rollout": 2, "num_rollout": 2,
                  "lr_decay_style": "linear", "lr_warmup_iters": 2, **PP2})  # fmt: skip
    assert [learn(group, step, data)["lr"] for step in range(2)] == pytest.approx([3e-3, 1e-3])


@pytest.mark.parametrize("sizes", [PP2, {}], ids=["pp2", "dp2"])
def test_old_log_probs_are_those_of_the_version_that_generated(megatron_groups, llama_folder, data, sizes):
    """Rows of the last version and of the one before are compared each with its own weights."""
    group = megatron_groups(2)
    begin(group, {"hf_checkpoint": llama_folder, "lr": 3e-3, "keep_old_actor": True, **sizes})
    kept = []
    for version in (1, 2):
        group.worker_group.execute_with_func_generator(lambda worker, v: worker._keep_version(v), version)
        kept.append(group.worker_group.compute_log_prob(data))
        learn(group, version, data.clone().set("weight_versions", torch.full((len(data),), version)))
    versions = torch.arange(len(data)) % 2 + 1
    mixed = torch.where((versions == 1)[:, None], kept[0], kept[1])
    now = group.worker_group.compute_log_prob(data)
    counts = data["loss_mask"] != 0
    ratio = (now - mixed).exp()[counts].mean().item()
    assert learn(group, 3, data.clone().set("weight_versions", versions))["ratio"] == pytest.approx(ratio, abs=1e-5)
    with pytest.raises(WorkerError, match=r"weight versions \[0\]; keep_old_actor has those of \[1, 2\]"):
        group.worker_group.train(4, data.clone().set("weight_versions", versions * 0))


@pytest.mark.parametrize("sizes", [TP2, PP2], ids=["tp2", "pp2"])
def test_the_critic_learns_what_is_to_be_expected(megatron_groups, llama_folder, data, sizes, tmp_path):
    workers = megatron_groups(2).worker_group
    args = {"hf_checkpoint": llama_folder, "train_backend": "megatron", "critic_lr": 2e-2, "gae_lambda": 1.0,
            "advantage_estimator": "gae", "save_hf": str(tmp_path / "critic"), **sizes}  # fmt: skip
    workers.init(args, "critic")
    losses = [workers.train(step, data)[0]["value_loss"] for step in range(30)]
    assert losses[-1] < losses[0] / 3
    counts = data["loss_mask"] != 0
    values = workers.compute_values(data)
    assert values.shape == data["input_ids"].shape
    expected = (data["rewards"][:, None] * counts)[counts]  # without discount every token is worth the reward
    assert values[counts].mean().item() == pytest.approx(expected.mean().item(), abs=0.15)
    workers.save_model(0)
    model = AutoModelForTokenClassification.from_pretrained(tmp_path / "critic").eval()
    row = data["attention_mask"][0].bool()
    with torch.no_grad():
        expected = model(data["input_ids"][0][row][None]).logits[0, :-1, 0]
    torch.testing.assert_close(values[0][row][1:], expected, atol=1e-5, rtol=1e-4)


def test_an_actor_takes_values_from_a_critic_of_another_backend(
    megatron_groups, fsdp_groups, llama_folder, data, monkeypatch
):
    """Two tensor-parallel ranks share what two data-parallel ranks of the critic have computed, each for its rows."""
    actor, critic = megatron_groups(2), fsdp_groups(2)
    args = {"hf_checkpoint": llama_folder, "lr": 3e-3, "advantage_estimator": "gae", "kl_coef": 0.05, **TP2}
    begin(actor, args, with_ref=True)
    monkeypatch.setattr(critic, "role", "critic")
    begin(critic, args)
    for group, name in ((actor, "_critic"), (critic, "_actor"), (actor, "_seen"), (critic, "_seen")):
        monkeypatch.setattr(group, name, getattr(group, name))  # put back after this test
    actor.connect(critic)
    values = critic.worker_group.compute_values(data)
    of_critic = critic.async_train(0, data)
    found = ray.get(actor.async_train(0, data))[0]
    assert ray.get(of_critic)[0]["value_loss"] > 0
    weights = whole_weights(actor)
    begin(actor, args, with_ref=True)
    workers = actor.worker_group
    known = data.clone()
    known["values"] = values
    known["old_log_probs"], known["ref_log_probs"] = workers.compute_log_prob(data), workers.compute_ref_log_prob(data)
    again = workers.train(0, known)[0]
    assert again["loss"] == pytest.approx(found["loss"], abs=1e-6)
    assert again["grad_norm"] == pytest.approx(found["grad_norm"], rel=1e-4)
    assert distance(whole_weights(actor), weights) < 1e-6


def test_checkpoints_go_on_in_other_layouts(megatron_groups, llama_folder, data, tmp_path):
    args = {"hf_checkpoint": llama_folder, "lr": 3e-3, "save": str(tmp_path), "load": str(tmp_path)}
    four = megatron_groups(4)
    assert begin(four, {**args, **TP2}) == [0] * 4
    for step in range(2):
        learn(four, step, data)
    assert four.save_model(1) == str(tmp_path / "rollout_0000001")
    note = json.loads((tmp_path / "latest.json").read_text())
    assert note == {"folder": "rollout_0000001", "rollout_id": 1, "optimizer_step": 2, "weight_version": 0}
    saved_weights = whole_weights(four)
    expected = learn(four, 2, data), whole_weights(four)
    two = megatron_groups(2)
    assert begin(two, {**args, **PP2}) == [2, 2]
    assert distance(whole_weights(two), saved_weights) == 0.0
    metrics = learn(two, 2, data)
    assert metrics["loss"] == pytest.approx(expected[0]["loss"], abs=1e-5)
    assert distance(whole_weights(two), expected[1]) < 1e-5
    assert begin(two, {**args, **PP2, "no_load_optim": True}) == [2, 2]
    learn(two, 2, data)
    assert distance(whole_weights(two), expected[1]) > 1e-4  # Adam began anew


def test_a_checkpoint_in_the_background(megatron_groups, llama_folder, data, tmp_path):
    group = megatron_groups(2)
    args = {"hf_checkpoint": llama_folder, "lr": 3e-3, "save": str(tmp_path), "load": str(tmp_path),
            "async_save": True, **TP2}  # fmt: skip
    begin(group, args)
    group.save_model(0)
    expected = whole_weights(group)
    learn(group, 1, data)  # while it is written
    assert distance(whole_weights(group), expected) > 1e-4
    group.worker_group.wait_for_save()
    assert begin(group, {**args, "tensor_model_parallel_size": 1, **PP2}) == [1, 1]
    assert distance(whole_weights(group), expected) == 0.0
    group.save_model(5, force_sync=True)
    assert json.loads((tmp_path / "latest.json").read_text())["rollout_id"] == 5


def test_the_export_is_a_hugging_face_model(megatron_groups, llama_folder, data, tmp_path):
    group = megatron_groups(4)
    begin(group, {"hf_checkpoint": llama_folder, "lr": 3e-3, "save_hf": str(tmp_path / "hf_{rollout_id}"),
                  **TP2, **PP2})  # fmt: skip
    learn(group, 0, data)
    assert group.save_model(7) is None
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "hf_7").eval()
    found = group.worker_group.compute_log_prob(data)
    torch.testing.assert_close(found, ReferenceGRPO(model).log_probs(data), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("options", "per_parameter"),
    [
        (TP2, 16),  # bytes of a parameter and its gradient, float32, and of Adam's two moments
        (PP2, 16),
        ({"use_distributed_optimizer": True}, 2 * 8 + 8),  # two dp ranks have all of it, and half of Adam each
    ],
    ids=["tp2", "pp2", "dp2-distributed-optimizer"],
)
def test_sleep_and_waking_up_change_no_bit(megatron_groups, llama_folder, data, options, per_parameter):
    group = megatron_groups(2)
    args = {"hf_checkpoint": llama_folder, "lr": 3e-3, **options}
    begin(group, args)
    learn(group, 0, data)
    before = whole_weights(group)
    freed = group.offload()
    # Norms are on both tp ranks, and Megatron pads its buffers.
    assert freed == pytest.approx(per_parameter * sum(p.numel() for p in small_llama().parameters()), rel=0.05)
    with pytest.raises(WorkerError, match="this worker sleeps; call onload"):
        group.worker_group.train(1, data)
    with pytest.raises(WorkerError, match="this worker sleeps; call onload"):
        group.worker_group.compute_log_prob(data)
    assert group.onload() == freed
    assert distance(whole_weights(group), before) == 0.0
    expected = learn(group, 1, data)["loss"]
    begin(group, args)
    learn(group, 0, data)
    assert learn(group, 1, data)["loss"] == expected


def test_bfloat16_is_near(megatron_groups, llama_folder, data):
    group = megatron_groups(2)
    begin(group, {"hf_checkpoint": llama_folder, "param_dtype": "bf16", "lr": 3e-3, **TP2})
    found = group.worker_group.compute_log_prob(data)
    torch.testing.assert_close(found, ReferenceGRPO(small_llama()).log_probs(data), atol=0.1, rtol=0.1)
    assert learn(group, 0, data)["grad_norm"] > 0
    assert {tensor.dtype for tensor in whole_weights(group).values()} == {torch.bfloat16}
    before = whole_weights(group)
    group.offload()
    group.onload()
    assert distance(whole_weights(group), before) == 0.0


def test_rollout_data_that_is_wrong_is_refused_and_changes_nothing(megatron_groups, llama_folder, data):
    group = megatron_groups(2)
    begin(group, {"hf_checkpoint": llama_folder, **PP2})
    before = whole_weights(group)
    with pytest.raises(WorkerError, match="vocab_size is 32"):
        group.worker_group.train(0, data.clone().set("input_ids", data["input_ids"] + 30))
    with pytest.raises(WorkerError, match="rollout data has no 'loss_mask'"):
        group.worker_group.train(0, data.exclude("loss_mask"))
    assert distance(whole_weights(group), before) == 0.0


def test_references_instead_of_data(megatron_groups, llama_folder, data):
    group = megatron_groups(2)
    found = []
    for given in (data, ray.put(data), [ray.put(data[:12]), ray.put(data[12:])]):
        begin(group, {"hf_checkpoint": llama_folder, "lr": 3e-3})
        found.append({**learn(group, 0, given), "seconds": 0})
    assert found[0] == found[1] == found[2]
