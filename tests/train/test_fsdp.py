"""FSDP training against a naive loop in one process: the same losses, the same weights, on any number of ranks."""

import json
from pathlib import Path

import pytest
import ray
import torch
from reference import ReferenceGRPO, small_llama
from train_kit import begin, distance, learn, rollout, saved, whole_weights
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification, GPT2Config, Qwen2Config

from single_controller import WorkerError

pytestmark = pytest.mark.timeout(180)

GRPO = {"lr": 3e-3, "kl_loss_coef": 0.01, "entropy_coef": 0.003, "max_tokens_per_micro_batch": 64}


@pytest.fixture(scope="module")
def data():
    return rollout(small_llama())


def other_rollout(model, seed):
    return rollout(model, prompts=5, samples=3, seed=seed)


@pytest.mark.parametrize(
    ("ranks", "options"),
    [
        (1, {}),
        (2, {}),
        (4, {"balance_data": True}),
        (4, {"fsdp_shard_size": 2, "loss_aggregation": "sequence"}),
        (2, {"gradient_checkpointing": True}),
    ],
    ids=["one", "two", "four-balanced", "hsdp-by-sequence", "two-checkpointed"],
)
def test_three_steps_of_grpo_are_those_of_a_plain_loop(fsdp_groups, llama_folder, ranks, options):
    group = fsdp_groups(ranks)
    assert begin(group, {"hf_checkpoint": llama_folder, **GRPO, **options}, with_ref=True) == [0] * ranks
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


def test_tied_embeddings(fsdp_groups, tmp_path):
    model = small_llama(tie_word_embeddings=True)
    group = fsdp_groups(2)
    begin(group, {"hf_checkpoint": saved(model, tmp_path), "lr": 3e-3})
    plain = ReferenceGRPO(model)
    for step in range(2):
        rows = other_rollout(plain.model, seed=step)
        assert learn(group, step, rows)["loss"] == pytest.approx(plain.step(rows)["loss"], abs=1e-4)
    found = whole_weights(group)
    assert "lm_head.weight" not in found
    assert distance(found, plain.weights()) < 1e-4


@pytest.mark.parametrize(
    "config",
    [
        Qwen2Config(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, vocab_size=32,
                    num_key_value_heads=2),
        GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=32, n_positions=64),
    ],
    ids=["qwen2", "gpt2"],
)  # fmt: skip
def test_any_causal_model(fsdp_groups, data, config, tmp_path):
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(config).eval()
    group = fsdp_groups(2)
    begin(group, {"hf_checkpoint": saved(model, tmp_path), "max_tokens_per_micro_batch": 50})
    found = group.worker_group.compute_log_prob(data)
    torch.testing.assert_close(found, ReferenceGRPO(model).log_probs(data), atol=1e-5, rtol=1e-4)


def test_random_weights_are_the_seeds(fsdp_groups):
    config = {"model_type": "llama", **small_llama().config.to_dict()}
    found = []
    for ranks in (1, 2):
        begin(fsdp_groups(ranks), {"hf_config": config, "seed": 7})
        found.append(whole_weights(fsdp_groups(ranks)))
    torch.manual_seed(7)
    expected = AutoModelForCausalLM.from_config(small_llama().config).state_dict()
    assert distance(found[0], expected) == distance(found[1], expected) == 0.0


def test_bfloat16_is_near(fsdp_groups, llama_folder, data):
    group = fsdp_groups(2)
    begin(group, {"hf_checkpoint": llama_folder, "param_dtype": "bf16", "lr": 3e-3})
    found = group.worker_group.compute_log_prob(data)
    torch.testing.assert_close(found, ReferenceGRPO(small_llama()).log_probs(data), atol=0.1, rtol=0.1)
    assert learn(group, 0, data)["grad_norm"] > 0
    assert {tensor.dtype for tensor in whole_weights(group).values()} == {torch.bfloat16}


def test_several_steps_and_epochs_of_one_rollout(fsdp_groups, llama_folder, data):
    """With all rows in each step, epochs are the reference's: the ratio is to the policy before the first of them."""
    group = fsdp_groups(2)
    begin(group, {"hf_checkpoint": llama_folder, "lr": 3e-3, "ppo_epochs": 3})
    plain = ReferenceGRPO(small_llama())
    plain.step(data, epochs=3)
    assert learn(group, 0, data)["clip_fraction"] > 0
    assert distance(whole_weights(group), plain.weights()) < 1e-4


def test_rows_are_dealt_to_steps_of_the_optimizer_by_a_schedule(fsdp_groups, llama_folder, data):
    group = fsdp_groups(2)
    begin(group, {"hf_checkpoint": llama_folder, "lr": 7e-3, "num_steps_per_rollout": 4, "num_rollout": 2,
                  "lr_decay_style": "linear", "lr_warmup_iters": 2})  # fmt: skip
    # Eight steps: 3.5e-3, then from 7e-3 at step 1 down to 0 at step 8. The last of each rollout is told.
    assert [learn(group, step, data)["lr"] for step in range(2)] == pytest.approx([5e-3, 1e-3])


def test_checkpoints_go_on_on_other_numbers_of_ranks(fsdp_groups, llama_folder, data, tmp_path):
    args = {"hf_checkpoint": llama_folder, "lr": 3e-3, "save": str(tmp_path), "load": str(tmp_path)}
    four = fsdp_groups(4)
    assert begin(four, args) == [0] * 4
    for step in range(2):
        learn(four, step, data)
    assert four.save_model(1) == str(tmp_path / "rollout_0000001")
    note = json.loads((tmp_path / "latest.json").read_text())
    assert note == {"folder": "rollout_0000001", "rollout_id": 1, "optimizer_step": 2, "weight_version": 0}
    expected = learn(four, 2, data), whole_weights(four)
    for ranks in (2, 1):
        group = fsdp_groups(ranks)
        assert begin(group, args) == [2] * ranks
        metrics = learn(group, 2, data)
        assert metrics["loss"] == pytest.approx(expected[0]["loss"], abs=1e-6)
        assert distance(whole_weights(group), expected[1]) < 1e-5
        assert begin(group, {**args, "no_load_optim": True}) == [2] * ranks
        learn(group, 2, data)
        assert distance(whole_weights(group), expected[1]) > 1e-4  # Adam began anew


def test_a_checkpoint_in_the_background(fsdp_groups, llama_folder, data, tmp_path):
    group = fsdp_groups(2)
    args = {"hf_checkpoint": llama_folder, "lr": 3e-3, "save": str(tmp_path), "load": str(tmp_path), "async_save": True}
    begin(group, args)
    group.save_model(0)
    expected = whole_weights(group)
    learn(group, 1, data)  # while it is written
    assert distance(whole_weights(group), expected) > 1e-4
    group.worker_group.wait_for_save()
    assert begin(group, args) == [1, 1]
    assert distance(whole_weights(group), expected) == 0.0
    group.save_model(5, force_sync=True)
    assert json.loads((tmp_path / "latest.json").read_text())["rollout_id"] == 5


def test_an_unfinished_checkpoint_is_not_gone_on_from(fsdp_groups, llama_folder, tmp_path):
    (tmp_path / "rollout_0000003").mkdir()
    assert begin(fsdp_groups(2), {"hf_checkpoint": llama_folder, "load": str(tmp_path)}) == [0, 0]
    (tmp_path / "latest.json").write_text("{ broken")
    with pytest.raises(WorkerError, match="the latest checkpoint is not known"):
        fsdp_groups(2).worker_group.init({"hf_checkpoint": llama_folder, "load": str(tmp_path)}, "actor")


def test_the_export_is_a_hugging_face_model(fsdp_groups, llama_folder, data, tmp_path):
    group = fsdp_groups(2)
    begin(group, {"hf_checkpoint": llama_folder, "lr": 3e-3, "save_hf": str(tmp_path / "hf_{rollout_id}")})
    learn(group, 0, data)
    assert group.save_model(7) is None
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "hf_7").eval()
    found = group.worker_group.compute_log_prob(data)
    torch.testing.assert_close(found, ReferenceGRPO(model).log_probs(data), atol=1e-5, rtol=1e-4)


def test_sleep_frees_every_byte_and_waking_up_changes_none(fsdp_groups, llama_folder, data):
    group = fsdp_groups(2)
    begin(group, {"hf_checkpoint": llama_folder, "lr": 3e-3})
    learn(group, 0, data)
    before = whole_weights(group)
    freed = group.offload()
    # Parameters and Adam's two moments, float32: 12 bytes each.
    assert freed == 12 * sum(p.numel() for p in small_llama().parameters())
    with pytest.raises(WorkerError, match="this worker sleeps; call onload"):
        group.worker_group.train(1, data)
    assert group.onload() == freed
    assert distance(whole_weights(group), before) == 0.0
    expected = learn(group, 1, data)["loss"]
    begin(group, {"hf_checkpoint": llama_folder, "lr": 3e-3})
    learn(group, 0, data)
    assert learn(group, 1, data)["loss"] == expected


def test_the_critic_learns_what_is_to_be_expected(fsdp_groups, llama_folder, data, tmp_path):
    group = fsdp_groups(2)
    workers = group.worker_group
    args = {"hf_checkpoint": llama_folder, "critic_lr": 1e-2, "advantage_estimator": "gae", "gae_lambda": 1.0,
            "save_hf": str(tmp_path / "critic")}  # fmt: skip
    workers.init(args, "critic")
    losses = [workers.train(step, data)[0]["value_loss"] for step in range(60)]
    assert losses[-1] < losses[0] / 3
    counts = data["loss_mask"] != 0
    values = workers.compute_values(data)
    assert values.shape == data["input_ids"].shape
    expected = (data["rewards"][:, None] * counts)[counts]  # without discount every token is worth the reward
    assert values[counts].mean().item() == pytest.approx(expected.mean().item(), abs=0.05)
    workers.save_model(0)
    model = AutoModelForTokenClassification.from_pretrained(tmp_path / "critic").eval()
    row = data["attention_mask"][0].bool()
    with torch.no_grad():
        expected = model(data["input_ids"][0][row][None]).logits[0, :-1, 0]
    torch.testing.assert_close(values[0][row][1:], expected, atol=1e-5, rtol=1e-4)


def test_old_log_probs_are_those_of_the_version_that_generated(fsdp_groups, llama_folder, data):
    """Rows of the last version and of the one before are compared each with its own weights."""
    group = fsdp_groups(2)
    begin(group, {"hf_checkpoint": llama_folder, "lr": 3e-3, "keep_old_actor": True})
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


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: data.exclude("loss_mask"), "rollout data has no 'loss_mask'"),
        (lambda data: data.exclude("group_ids"), "GRPO needs rewards and group_ids"),
        (lambda data: data.clone().set("input_ids", data["input_ids"] + 30), "vocab_size is 32"),
        (lambda data: data.clone().set("rewards", data["input_ids"].float()), "rewards is .*one number for each row"),
        (
            lambda data: data.clone().set("loss_mask", torch.ones_like(data["loss_mask"])),
            "counts padding, or its first",
        ),
    ],
)
def test_rollout_data_that_is_wrong_is_refused_and_changes_nothing(fsdp_groups, llama_folder, data, change, message):
    group = fsdp_groups(2)
    begin(group, {"hf_checkpoint": llama_folder})
    before = whole_weights(group)
    with pytest.raises(WorkerError, match=message):
        group.worker_group.train(0, change(data))
    assert distance(whole_weights(group), before) == 0.0


def doubled(args, data):
    """A user's postprocessing: it sees the rows of its rank, and the user's own keys."""
    return data.clone().set("rewards", data["rewards"] * args.user.factor)


def test_rollout_data_is_postprocessed_on_each_rank(fsdp_groups, llama_folder, data):
    group = fsdp_groups(2)
    args = {"hf_checkpoint": llama_folder, "rollout_data_postprocess_path": "test_fsdp.doubled", "user": {"factor": 3}}
    begin(group, args)
    assert learn(group, 0, data)["reward"] == pytest.approx(3 * data["rewards"].mean().item())


def test_references_instead_of_data(fsdp_groups, llama_folder, data):
    group = fsdp_groups(2)
    found = []
    for given in (data, ray.put(data), [ray.put(data[:12]), ray.put(data[12:])]):
        begin(group, {"hf_checkpoint": llama_folder, "lr": 3e-3})
        found.append({**learn(group, 0, given), "seconds": 0})
    assert found[0] == found[1] == found[2]


def test_profiles_are_written(fsdp_groups, llama_folder, data, tmp_path):
    group = fsdp_groups(2)
    begin(group, {"hf_checkpoint": llama_folder, "profile_step_start": 1, "profile_step_end": 2,
                  "profile_dir": str(tmp_path)})  # fmt: skip
    for step in range(3):
        learn(group, step, data)
    names = sorted(path.name for path in Path(tmp_path).iterdir())
    assert names == ["rollout_0000001_rank_0.json", "rollout_0000001_rank_1.json"]
    assert json.loads((tmp_path / names[0]).read_text())["traceEvents"]
