"""FSDP workers only, and what surrounds the computation. The numbers are checked in test_both_backends.py."""

import json
from pathlib import Path

import pytest
import ray
import torch
from reference import ReferenceGRPO, small_llama
from shard_helpers import assembled, assert_same, read_shards
from tensordict import TensorDict
from test_both_backends import FSDP2, HSDP
from train_helpers import begin, distance, learn, saved, whole_weights
from transformers import AutoModelForCausalLM, GPT2Config, Qwen2Config
from waits import within

from single_controller import LocalWorkerGroup, RayClassWithInitArgs, WorkerError
from workers import RolloutManager, RolloutWorker, SamplingParams
from workers.data.rollout_data import RolloutDataError
from workers.rollout.engines.hf_engine import HFEngine
from workers.train.checkpoints import CheckpointError

pytestmark = pytest.mark.timeout(180)

others = pytest.mark.full("FSDP with the other pairs of options")


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
    if config.model_type == "gpt2":
        ids = torch.ones(2, 65, dtype=torch.int64)
        rows = TensorDict({"input_ids": ids, "attention_mask": ids, "loss_mask": 0 * ids}, [2])
        with pytest.raises(WorkerError, match="a row of 65 tokens, but this 'gpt2' has only 64 positions"):
            group.worker_group.compute_log_prob(rows)


def test_random_weights_depend_only_on_the_seed(fsdp_groups):
    config = {"model_type": "llama", **small_llama().config.to_dict()}
    found = []
    for ranks in (1, 2):
        begin(fsdp_groups(ranks), {"hf_config": config, "seed": 7})
        found.append(whole_weights(fsdp_groups(ranks)))
    torch.manual_seed(7)
    expected = AutoModelForCausalLM.from_config(small_llama().config).state_dict()
    assert distance(found[0], expected) == distance(found[1], expected) == 0.0


def doubled(args, data):
    """User postprocessing: it sees the rows of its own rank, and the user's own keys."""
    return data.clone().set("rewards", data["rewards"] * args.user.factor)


def test_rollout_data_is_postprocessed_on_each_rank(start, data):
    group = start(FSDP2, rollout_data_postprocess_path="test_fsdp.doubled", user={"factor": 3})
    assert learn(group, 0, data)["reward"] == pytest.approx(3 * data["rewards"].mean().item())


def test_profiles_are_written(start, data, tmp_path):
    group = start(FSDP2, profile_step_start=1, profile_step_end=2, profile_dir=str(tmp_path))
    for step in range(3):
        learn(group, step, data)
    names = sorted(path.name for path in Path(tmp_path).iterdir())
    assert names == ["actor_rollout_0000001_rank_0.json", "actor_rollout_0000001_rank_1.json"]
    assert json.loads((tmp_path / names[0]).read_text())["traceEvents"]


def test_postprocessing_must_not_move_rows_with_known_values(start, data):
    path = "test_fsdp.backwards"
    learn(start(FSDP2, rollout_data_postprocess_path=path), 0, data)
    group = start(FSDP2, rollout_data_postprocess_path=path, advantage_estimator="gae")
    with pytest.raises(WorkerError, match=r"'test_fsdp.backwards' has changed, moved or dropped rows"):
        group.worker_group.train(0, data)


def backwards(args, data):
    """Postprocessing that reverses the rows."""
    return data.flip(0)


def test_dropout_depends_only_on_the_seed_after_resuming(fsdp_groups, data, tmp_path):
    config = {"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 32, "n_positions": 64}
    args = {"hf_config": {**config, "resid_pdrop": 0.3}, "lr": 1e-2, "save": str(tmp_path), "seed": 1 << 40}
    group = fsdp_groups(2)
    found = []
    for load in (None, str(tmp_path)):
        (start, _) = begin(group, {**args, "load": load})
        for step in range(start, 3):
            learn(group, step, data)
            if step == 1 and not load:
                group.save_model(step)
        found.append(whole_weights(group))
    assert start == 2
    assert distance(*found) == 0.0
    begin(group, {**args, "seed": 2, "load": str(tmp_path)})
    learn(group, 2, data)
    assert distance(whole_weights(group), found[0]) > 1e-4


def test_checkpoint_before_the_first_step_changes_nothing(start, data, tmp_path):
    found = []
    for save, load in ((False, None), (True, None), (False, str(tmp_path))):
        group = start(FSDP2, weight_decay=0.1, save=str(tmp_path), load=load)
        if save:
            group.save_model(-1)
        for step in range(2):
            learn(group, step, data)
        found.append(whole_weights(group))
    assert distance(found[0], found[1]) == distance(found[0], found[2]) == 0.0


def test_complete_checkpoint_is_never_overwritten(fsdp_groups, llama_folder, data, tmp_path):
    group = fsdp_groups(1)
    args = {"hf_checkpoint": llama_folder, "lr": 3e-3, "save": str(tmp_path), "load": str(tmp_path)}
    begin(group, args)
    written = []
    for background in (False, False, True):
        learn(group, 0, data)
        group.args.async_save = background
        written.append(Path(group.save_model(3)).name)
    group.wait_for_save()
    assert written == ["rollout_0000003", "rollout_0000003_again", "rollout_0000003"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest.json", "rollout_0000003"]
    expected = whole_weights(group)
    assert begin(group, args) == [4]
    assert distance(whole_weights(group), expected) == 0.0
    for name in ("*.distcp", ".metadata"):
        for file in tmp_path.glob(f"*/{name}"):
            file.write_bytes(b"")
        with pytest.raises(CheckpointError, match=r"rollout_0000003' cannot be read\. It may be damaged"):
            group.async_init(args).result()


def test_rank_that_cannot_copy_its_state_does_not_keep_the_others(start, data, tmp_path):
    group = start(FSDP2, save=str(tmp_path), async_save=True)
    learn(group, 0, data)
    group.worker_group.execute_with_func_generator(fail_to_copy_once)
    with within(30), pytest.raises(CheckpointError, match="could not be written: rank 1: MemoryError: no room"):
        group.save_model(0)
    with within(30):
        learn(group, 1, data)
        group.save_model(1)
        group.wait_for_save()
    assert json.loads((tmp_path / "latest.json").read_text())["rollout_id"] == 1


def test_checkpoint_of_a_parameter_without_gradients_is_loaded(start, data, tmp_path):
    """Such as those for images, when only texts are trained: the optimizer has no state of them."""
    group = start(FSDP2, save=str(tmp_path))
    learn(group, 0, data)
    group.worker_group.execute_with_func_generator(
        lambda worker: len(worker.model._optimizer.state.pop(worker.model.module.lm_head.weight))
    )
    group.save_model(0)
    expected = whole_weights(group)
    group = start(FSDP2, begins=1, load=str(tmp_path))
    assert distance(whole_weights(group), expected) == 0.0
    learn(group, 1, data)


def fail_to_copy_once(worker):
    from torch.distributed.checkpoint import FileSystemWriter

    stage = FileSystemWriter.stage

    def fail(writer, state):
        FileSystemWriter.stage = stage
        raise MemoryError("no room")

    if worker.rank == 1:
        FileSystemWriter.stage = fail


def test_separate_reference_model(start, llama_folder, data, tmp_path):
    other = small_llama(seed=9)
    group = start(FSDP2, with_ref=True, ref_load=saved(other, tmp_path))
    found = group.worker_group.compute_ref_log_prob(data)
    torch.testing.assert_close(found, ReferenceGRPO(other).log_probs(data), atol=1e-5, rtol=1e-4)
    found = group.worker_group.compute_log_prob(data)
    torch.testing.assert_close(found, ReferenceGRPO(small_llama()).log_probs(data), atol=1e-5, rtol=1e-4)
    start(FSDP2)
    with pytest.raises(WorkerError, match=r"there are no reference weights; call init\(with_ref=True\)"):
        group.worker_group.compute_ref_log_prob(data)
    with pytest.raises(WorkerError, match="needs enable_weights_backuper=True"):
        group.worker_group.init({"hf_checkpoint": llama_folder, "enable_weights_backuper": False}, "actor", True)


def test_rollout_engine_accepts_every_tensor_of_the_model(fsdp_groups):
    """Buffers too: this model's expert bias is not a parameter."""
    config = {"model_type": "deepseek_v3", "hidden_size": 32, "intermediate_size": 48, "moe_intermediate_size": 16,
              "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 32,
              "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "q_lora_rank": 8,
              "kv_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8,
              "first_k_dense_replace": 1}  # fmt: skip
    group = fsdp_groups(2)
    begin(group, {"hf_config": config, "param_dtype": "bf16"})
    found = whole_weights(group)
    assert {name: tuple(tensor.shape) for name, tensor in found.items()} == HFEngine(config).weight_shapes()
    bias = "model.layers.1.mlp.gate.e_score_correction_bias"
    assert (found[bias].dtype, found["lm_head.weight"].dtype) == (torch.float32, torch.bfloat16)
    shards = group.worker_group.execute_with_func_generator(lambda worker: read_shards(worker.model.hf_shards()))
    assert_same(assembled(shards), found)


def small_share(prompt_ids, completion_ids):
    return sum(token < 40 for token in completion_ids) / len(completion_ids)


@pytest.mark.parametrize(
    ("how", "exact"),
    [
        ({"top_p": 0.9}, True),
        ({"top_k": 50, "temperature": 0.7}, False),
        pytest.param({"top_p": 0.9}, False, marks=others),
        pytest.param({"top_k": 50, "temperature": 0.7}, True, marks=others),
    ],
)
def test_log_probs_of_engine_and_trainer_agree_with_a_sampling_mask_alone(fsdp_groups, tmp_path, how, exact):
    """Without it, they differ by the log of the probability that the sampler kept."""
    folder = saved(small_llama(vocab_size=160), tmp_path)
    group = fsdp_groups(2)
    temperature = how.get("temperature", 1.0)
    options = {"hf_checkpoint": folder, "balance_data": True, "rollout_correction": "token_tis",
               "temperature": temperature, "max_tokens_per_micro_batch": 64, "exact": exact}  # fmt: skip
    worker = RayClassWithInitArgs(RolloutWorker, HFEngine, folder, exact=exact)
    with LocalWorkerGroup(2, worker, collectives=False) as engines:
        manager = RolloutManager(engines, SamplingParams(12, **how), small_share, samples_per_prompt=4)
        rows = manager.generate([[5, 6, 7], [8], [9, 10], [11, 12, 13, 14], [15] * 6])
    begin(group, options)
    metrics = learn(group, 0, rows)
    if exact:
        assert metrics["rollout_log_prob_diff"] == 0.0
        assert metrics["correction_weight"] == metrics["correction_ratio_max"] == 1.0
    assert metrics["rollout_log_prob_diff"] < 2e-6
    assert metrics["correction_weight"] == pytest.approx(1.0, abs=1e-5) == metrics["correction_ratio_max"]
    begin(group, options)
    biased = learn(group, 0, rows.exclude("sampling_mask", "sampling_mask_lengths"))
    with torch.no_grad():  # by the definition, with the engine's own model
        model = AutoModelForCausalLM.from_pretrained(folder)
        mass = []
        for row, values in enumerate(rows["sampling_mask"].unbind()):
            real = rows["attention_mask"][row].bool()
            ids, lengths = rows["input_ids"][row][real], rows["sampling_mask_lengths"][row][real].tolist()
            probs = (model(ids[None]).logits[0].double() / temperature).softmax(-1)
            left = iter(values.tolist())
            mass += [float(probs[t - 1, [next(left) for _ in range(n)]].sum()) for t, n in enumerate(lengths) if n]
    gap = -torch.tensor(mass).log().mean()
    assert biased["rollout_log_prob_diff"] == pytest.approx(float(gap), abs=1e-5) and gap > 0.05
    assert biased["correction_weight"] < 0.96


def test_output_layer_in_float32_is_exact_where_engine_and_trainer_have_it(fsdp_groups, tmp_path):
    """Under bfloat16: in one of them alone, the logits of the other are rounded."""
    folder = saved(small_llama(), tmp_path)
    options = {"param_dtype": "bf16", "exact": True}
    group = fsdp_groups(2)
    for fp32_lm_head in (True, False):
        worker = RayClassWithInitArgs(RolloutWorker, HFEngine, folder, fp32_lm_head=fp32_lm_head, **options)
        with LocalWorkerGroup(1, worker, collectives=False) as engines:
            manager = RolloutManager(engines, SamplingParams(12), small_share, samples_per_prompt=4)
            rows = manager.generate([[5, 6, 7], [8], [9, 10]])
        begin(group, {"hf_checkpoint": folder, "fp32_lm_head": True, **options})
        off = learn(group, 0, rows)["rollout_log_prob_diff"]
        assert off == 0.0 if fp32_lm_head else off > 1e-4


def test_critic_requires_a_token_classification_model(fsdp_groups):
    config = {"model_type": "olmo2", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1,
              "num_attention_heads": 4, "vocab_size": 32}  # fmt: skip
    with pytest.raises(WorkerError, match="'olmo2' cannot be a critic: transformers has no token classification"):
        fsdp_groups(1).worker_group.init({"hf_config": config, "advantage_estimator": "gae"}, "critic")


BASE = {"lr": 3e-3, "ppo_epochs": 2, "num_rollout": 4, "lr_decay_style": "cosine"}
GRPO = {**BASE, "kl_loss_coef": 0.05, "entropy_coef": 0.01}
GAE = {**BASE, "advantage_estimator": "gae"}
KEYS = {
    "actor": (GRPO, {
        "adam_beta1": 0.5, "adam_beta2": 0.9, "adam_eps": 1e-2, "weight_decay": 0.1, "clip_grad": 0.01, "lr": 1e-3,
        "min_lr": 1e-3, "lr_decay_iters": 3, "lr_warmup_iters": 3, "lr_decay_style": "linear", "eps_clip": 1e-3,
        "eps_clip_high": 1e-3, "kl_loss_coef": 0.0, "kl_loss_type": "k2", "entropy_coef": 0.0,
        "loss_aggregation": "sequence", "grpo_std_normalization": False, "num_steps_per_rollout": 2, "ppo_epochs": 1,
        "advantage_estimator": "rloo", "policy_loss_type": "cispo", "overlong_buffer_len": 16,
        "rollout_correction": "token_tis", "temperature": 0.5, "use_rollout_logprobs": True,
        "fsdp_reduce_dtype": "bf16", "param_dtype": "bf16",
    }),
    "actor by gae": (GAE, {"gamma": 0.5, "gae_lambda": 0.5, "normalize_advantages": False, "kl_coef": 0.1}),
    "critic": (GAE, {"critic_lr": 1e-2, "critic_lr_warmup_iters": 3, "gamma": 0.5, "gae_lambda": 0.5,
                     "value_clip": 1e-4}),
}  # fmt: skip


@pytest.mark.full("the effect of each configuration key, in thirty short trainings")
@pytest.mark.parametrize("what", KEYS)
def test_every_configuration_key_has_an_effect(fsdp_groups, llama_folder, data, what):
    """Two steps with another value of the key end with different weights."""
    given, changes = KEYS[what]
    group = fsdp_groups(1)
    rows = data.clone()
    if what == "actor by gae":
        rows["values"] = torch.rand(data["input_ids"].shape, generator=torch.Generator().manual_seed(0))

    def trained(**change):
        args = {"hf_checkpoint": llama_folder, **given, **change}
        group.worker_group.init(args, what.split()[0], what != "critic")
        for step in range(2):
            group.worker_group.train(step, rows)
        return whole_weights(group)

    expected = trained()
    assert distance(trained(), expected) == 0.0
    ignored = [name for name, value in changes.items() if distance(trained(**{name: value}), expected) < 1e-7]
    assert not ignored
    assert distance(trained(fsdp_cpu_offload=True), expected) < 1e-5


def marked(args, data):
    """Postprocessing that adds an entry on some ranks only."""
    return data.clone().set("mine", data["rewards"]) if int(data["group_ids"][0]) == 0 else data


def test_entry_on_some_ranks_only_is_an_error_on_all_ranks(start, data):
    group = start(FSDP2, rollout_data_postprocess_path="test_fsdp.marked")
    with pytest.raises(WorkerError, match=r"only the dp ranks \[0\] of 2 have 'mine'"):
        group.worker_group.train(0, data)
    assert group.worker_group.broken is None


def refused(args, data):
    """Postprocessing that fails on one rank only."""
    if torch.distributed.get_rank():
        raise OSError("no disk")
    return data


def test_rows_that_one_rank_of_a_sequence_lacks_are_an_error_on_all_ranks(start, data):
    """Both ranks have the same rows, and are one dp rank."""
    group = start(FSDP2, sequence_parallel_size=2, rollout_data_postprocess_path="test_fsdp.refused")
    with pytest.raises(WorkerError, match="no disk"):
        group.worker_group.train(0, data)
    assert group.get_parallel_config()["dp_size"] == 1, "a rank waits for the other one"


def test_rows_in_a_dict_are_balanced_and_extra_entries_follow_them_or_go_to_all_ranks(fsdp_groups, llama_folder, data):
    plain = dict(data.items())
    given = {**plain, "texts": [str(k) for k in range(len(data))], "nothing": None, "name": "n", "one": torch.tensor(3)}
    begin(fsdp_groups(2), {"hf_checkpoint": llama_folder, "balance_data": True, "lr": 0.0})  # each step does the same
    found = [{**learn(fsdp_groups(2), 0, rows), "seconds": 0} for rows in (data, plain, given, ray.put(given))]
    assert all(metrics == found[0] for metrics in found)
    ref = {"ref_log_probs": -4 * torch.rand(data["input_ids"].shape)}  # also as what a teacher's method has returned
    flat, nested = (learn(fsdp_groups(2), 0, {**plain, **of}) for of in (ref, {"teacher": ref}))
    assert flat["kl"] == nested["kl"] > 0
    with pytest.raises(RolloutDataError, match=r"mine is torch.int64 \(3,\), but there are 24 rows"):
        fsdp_groups(2).async_train(0, {**plain, "mine": torch.arange(3)})
    with pytest.raises(ray.exceptions.RayTaskError, match="mine has 25 rows, but input_ids has 24"):
        ray.get(fsdp_groups(2).async_train(0, ray.put({**plain, "mine": torch.arange(25)})))


def test_interrupted_pass_restores_the_weights(start, data):
    """Including weights that were swapped in for the pass."""
    group = start(FSDP2, with_ref=True)
    learn(group, 0, data)
    before = whole_weights(group)

    def break_off(worker):
        def full(*_):
            raise torch.OutOfMemoryError("no memory left")

        worker.hook = worker.model.module.model.layers[1].mlp.register_forward_hook(full)

    group.worker_group.execute_with_func_generator(break_off)
    for call in (group.worker_group.compute_ref_log_prob, lambda rows: group.worker_group.train(1, rows)):
        with pytest.raises(WorkerError, match="no memory left"):
            call(data)
    group.worker_group.execute_with_func_generator(lambda worker: worker.hook.remove())
    assert distance(whole_weights(group), before) == 0.0
    found = group.worker_group.compute_ref_log_prob(data)
    torch.testing.assert_close(found, ReferenceGRPO(small_llama()).log_probs(data), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("fails", "dtype"),
    [
        ("register_forward_hook", "fp32"),
        ("register_full_backward_pre_hook", "fp64"),
        pytest.param("register_forward_hook", "fp64", marks=others),
        pytest.param("register_full_backward_pre_hook", "fp32", marks=others),
    ],
)
def test_step_that_failed_midway_leaves_no_gradient(start, data, dtype, fails):
    options = {"max_tokens_per_micro_batch": 32, "fsdp_reduce_dtype": dtype}
    group = start(FSDP2, **options)
    expected, weights = learn(group, 0, data), whole_weights(group)

    def break_off(worker):
        def full(*_):
            worker.passes += 1
            if worker.passes == 3:
                raise torch.OutOfMemoryError("no memory left")

        worker.passes = 0
        worker.hook = getattr(worker.model.module.model.layers[0].self_attn.o_proj, fails)(full)

    start(FSDP2, **options)
    group.worker_group.compute_log_prob(data)  # finds out whether the model can be packed
    group.worker_group.execute_with_func_generator(break_off)
    with pytest.raises(WorkerError, match="no memory left"):
        group.worker_group.train(0, data)

    def half_made(worker):
        """As AdamW leaves its state if its first step runs out of memory."""
        worker.hook.remove()
        worker.model._optimizer.state[worker.model.module.lm_head.weight]["step"] = torch.tensor(0.0)

    group.worker_group.execute_with_func_generator(half_made)
    assert {**learn(group, 0, data), "seconds": 0} == {**expected, "seconds": 0}
    assert distance(whole_weights(group), weights) == 0.0


def test_folder_with_missing_weights_is_rejected(fsdp_groups, llama_folder, tmp_path):
    model = small_llama()
    state = {name: value for name, value in model.state_dict().items() if "layers.1.mlp" not in name}
    model.save_pretrained(tmp_path, state_dict=state)
    workers = fsdp_groups(2).worker_group
    with pytest.raises(WorkerError, match="lacks 3 of the model's weights"):
        workers.init({"hf_checkpoint": str(tmp_path)}, "actor")
    with pytest.raises(WorkerError, match="lacks 3 of the model's weights"):
        workers.init({"hf_checkpoint": llama_folder, "ref_load": str(tmp_path)}, "actor", True)
    assert workers.broken is None


def test_update_weights_without_a_rollout_manager(start):
    group = start(FSDP2)
    group.set_rollout_manager(None)
    with pytest.raises(WorkerError, match="there is no rollout manager"):
        group.update_weights()


@pytest.mark.full("FSDP on four ranks")
def test_every_process_group_has_the_timeout(start, tmp_path):
    """Those of HSDP's rows and columns, and the one used to write checkpoints."""
    group = start(HSDP, async_save=True, save=str(tmp_path))
    group.save_model(0)

    def limits(worker):
        from workers.distributed import process_groups

        return {str(one._get_backend(torch.device("cpu")).options._timeout) for one in process_groups()}

    assert group.worker_group.execute_with_func_generator(limits) == [{"0:10:00"}] * 4
