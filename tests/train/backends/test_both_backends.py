"""FSDP and Megatron against a naive loop in one process: same losses and weights under every parallel configuration.

Starting processes is slow: groups of one, two and four ranks serve all tests and are initialized again for each.
"""

import functools
import json
import math
import shutil
from concurrent.futures import Future
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
import ray
import torch
from reference import ReferenceGRPO, small_llama
from train_helpers import HostReads, distance, learn, rollout, saved, set_tokens, whole_weights
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification, GenerationConfig, Qwen2Config

from single_controller import Broadcast, WorkerError
from workers.data.micro_batches import cut_by_tokens
from workers.data.rollout_data import RolloutDataError
from workers.hf_files import ModelFilesError
from workers.train.args import TrainArgsError

pytestmark = pytest.mark.timeout(180)

rare = pytest.mark.full("rare variants of train groups")
four_of_fsdp = pytest.mark.full("FSDP on four ranks")

GRPO = {"lr": 3e-3, "kl_loss_coef": 0.01, "entropy_coef": 0.003, "max_tokens_per_micro_batch": 64}


@dataclass(frozen=True)
class Way:
    """A parallel configuration: the backend, the number of ranks, and the axis sizes."""

    backend: str
    ranks: int
    sizes: dict[str, int] = field(default_factory=dict)

    @property
    def parallel(self):
        """What the group's get_parallel_config() returns."""
        if self.backend == "fsdp":
            shard = self.sizes.get("fsdp_shard_size", self.ranks)
            sp = self.sizes.get("sequence_parallel_size", 1)
            replicas = self.ranks // shard
            return {"dp_size": self.ranks // sp, "sp_size": sp, "shard_size": shard, "replicas": replicas}
        tp = self.sizes.get("tensor_model_parallel_size", 1)
        pp = self.sizes.get("pipeline_model_parallel_size", 1)
        return {"dp_size": self.ranks // tp // pp, "tp_size": tp, "pp_size": pp, "cp_size": 1}

    def arguments(self, folder, **args):
        return {"train_backend": self.backend, "hf_checkpoint": folder, "lr": 3e-3, **self.sizes, **args}


TP = {"tensor_model_parallel_size": 2}
PP = {"pipeline_model_parallel_size": 2}
FSDP1, FSDP2, FSDP4 = (Way("fsdp", ranks) for ranks in (1, 2, 4))
HSDP = Way("fsdp", 4, {"fsdp_shard_size": 2})
SP2_DP2 = Way("fsdp", 4, {"sequence_parallel_size": 2})
TP2, PP2, DP2, DP4 = Way("megatron", 2, TP), Way("megatron", 2, PP), Way("megatron", 2), Way("megatron", 4)
TP2_DP2, TP2_PP2 = Way("megatron", 4, TP), Way("megatron", 4, TP | PP)
NAMES = {"FSDP1": FSDP1, "FSDP2": FSDP2, "FSDP4": FSDP4, "HSDP": HSDP, "TP2": TP2, "PP2": PP2, "DP2": DP2, "DP4": DP4,
         "TP2_DP2": TP2_DP2, "TP2_PP2": TP2_PP2, "SP2_DP2": SP2_DP2}  # fmt: skip


def called(value):
    """The name of a configuration, used in test ids."""
    if isinstance(value, Way):
        return next(name.lower() for name, way in NAMES.items() if way == value)
    return "-".join(value) or "plain" if isinstance(value, dict) else None


def ways(*of, rarely=()):
    """Parametrize a test with ``way``; those of ``rarely`` only in `make test-all`."""
    return pytest.mark.parametrize("way", [*of, *(pytest.param(way, marks=rare) for way in rarely)], ids=called)


def other_rollout(model, seed):
    return rollout(model, prompts=5, samples=3, seed=seed)


@functools.cache
def plain_steps(aggregation):
    """(rows, metrics) of two steps of the plain loop, and the weights after them."""
    plain = ReferenceGRPO(small_llama(), kl_coef=0.01, entropy_coef=0.003, aggregation=aggregation)
    made = []
    for step in range(2):
        rows = other_rollout(plain.model, seed=step)  # 15 rows: not divisible by any number of ranks
        made.append((rows, plain.step(rows)))
    return made, plain.weights()


@pytest.mark.parametrize(
    ("way", "options"),
    [
        pytest.param(FSDP1, {}, marks=rare),
        (FSDP2, {"balance_data": True, "gradient_checkpointing": True}),
        pytest.param(FSDP4, {"balance_data": True}, marks=four_of_fsdp),
        pytest.param(HSDP, {"loss_aggregation": "sequence"}, marks=four_of_fsdp),
        pytest.param(HSDP, {"fsdp_reduce_dtype": "fp64", "fsdp_cpu_offload": True}, marks=four_of_fsdp),
        pytest.param(SP2_DP2, {"balance_data": True}, marks=four_of_fsdp),
        pytest.param(TP2, {}, marks=rare),
        (TP2_DP2, {"balance_data": True, "use_distributed_optimizer": True}),
        (TP2_PP2, {"loss_aggregation": "sequence", "gradient_checkpointing": True}),
        pytest.param(TP2, {"gradient_checkpointing": True}, marks=rare),
        pytest.param(PP2, {"gradient_checkpointing": True}, marks=rare),
    ],
    ids=called,
)
def test_grpo_steps_match_a_plain_loop(start, way, options):
    """The prompts contain the config's padding token, which Hugging Face does not train; Megatron must not either."""
    group = start(way, with_ref=True, **GRPO, **options)
    assert group.get_parallel_config() == way.parallel
    steps, weights = plain_steps(options.get("loss_aggregation", "token"))
    for step, (rows, expected) in enumerate(steps):
        metrics = learn(group, step, rows)
        assert metrics["loss"] == pytest.approx(expected["loss"], abs=1e-4)
        assert metrics["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-3)
        assert metrics["kl"] == pytest.approx(expected["kl"], abs=1e-5)
        assert metrics["entropy"] == pytest.approx(expected["entropy"], abs=1e-4)
        assert metrics["reward"] == pytest.approx(rows["rewards"].mean().item())
    assert distance(whole_weights(group), weights) < 1e-4


def half_of_them(log_probs):
    """The most likely tokens that together have half of the probability, at least three."""
    order = log_probs.argsort(descending=True).tolist()
    return order[: max(3, int((log_probs[order].exp().cumsum(0) < 0.5).sum()) + 1)]


@functools.cache
def plain_steps_over_sets():
    """(rows, log-probabilities before) of two steps of the plain loop, and the weights after them."""
    plain = ReferenceGRPO(small_llama(), kl_coef=0.01, entropy_coef=0.003)
    made = []
    for step in range(2):
        rows = rollout(plain.model, prompts=5, samples=3, seed=step, left=half_of_them)
        made.append((rows, plain.log_probs(rows)))
        plain.step(rows, epochs=2)
    return made, plain.weights()


@ways(FSDP2, rarely=[TP2, TP2_PP2])  # Megatron: see test_candidates_with_and_without_a_sampling_mask
def test_steps_with_a_sampling_mask_match_a_plain_loop(start, way):
    """Policy, old policy, reference and entropy over the sets that the tokens were drawn from, through all that cuts
    rows: several ranks, balancing, micro-batches and several steps."""
    group = start(way, with_ref=True, **GRPO, balance_data=True, ppo_epochs=2)
    steps, weights = plain_steps_over_sets()
    for step, (rows, expected) in enumerate(steps):
        log_probs = group.compute_log_prob(rows)
        torch.testing.assert_close(log_probs, expected, atol=1e-4, rtol=0)
        counts = rows["loss_mask"].bool()
        off = (log_probs - rows["rollout_log_probs"])[counts].abs()
        assert float(off.max()) < 1e-4
        without = group.compute_log_prob(rows.exclude("sampling_mask", "sampling_mask_lengths"))
        gap = (rows["rollout_log_probs"] - without)[counts]  # minus the log of the kept mass
        assert 0.3 < float(gap.mean()) < 0.7
        learn(group, step, rows)
    assert distance(whole_weights(group), weights) < 1e-4


def small_qwen2(tie_word_embeddings):
    config = Qwen2Config(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
                         vocab_size=32, num_key_value_heads=2, tie_word_embeddings=tie_word_embeddings)  # fmt: skip
    torch.manual_seed(3)
    return AutoModelForCausalLM.from_config(config).eval()


@ways(FSDP2, rarely=[PP2, TP2])  # Megatron: see test_train_model.py
def test_tied_embeddings_and_biases(start, way, tmp_path):
    """A Qwen2; in a pipeline its first and last stage share a tensor and its gradient."""
    model = small_qwen2(tie_word_embeddings=True)
    group = start(way, hf_checkpoint=saved(model, tmp_path), calculate_entropy=True)
    plain = ReferenceGRPO(model)
    for step in range(2):
        rows = other_rollout(plain.model, seed=step)
        metrics, expected = learn(group, step, rows), plain.step(rows)
        assert metrics["loss"] == pytest.approx(expected["loss"], abs=1e-4)
        assert metrics["entropy"] == pytest.approx(expected["entropy"], abs=1e-4)
    found = whole_weights(group)
    assert "lm_head.weight" not in found
    assert distance(found, plain.weights()) < 1e-4


@ways(PP2, rarely=[FSDP2, TP2])
def test_several_epochs_over_one_rollout(start, way, data):
    """With all rows in each step, epochs match the reference: the ratio is to the policy before the first epoch."""
    group = start(way, ppo_epochs=3)
    plain = ReferenceGRPO(small_llama())
    plain.step(data, epochs=3)
    metrics = learn(group, 0, data)
    assert metrics["clip_fraction"] > 0
    assert "entropy" not in metrics  # it is neither in the loss nor requested
    assert distance(whole_weights(group), plain.weights()) < 1e-4


@ways(PP2, rarely=[FSDP2, TP2, FSDP1])  # FSDP: see test_training_continues_bit_for_bit
def test_kl_coef_approaches_the_target(start, way, data, tmp_path):
    """Against a loop over tokens, with a completion that does not count; then from a checkpoint."""
    data = data.clone()
    data["loss_mask"][2] = 0
    args = {"advantage_estimator": "reinforce_plus_plus", "kl_coef": 0.3, "kl_target": 0.004, "kl_horizon": 60,
            "num_steps_per_rollout": 2, "save": str(tmp_path), "load": str(tmp_path)}  # fmt: skip
    group = start(way, with_ref=True, **args)
    ref = group.worker_group.compute_ref_log_prob(data)
    counts = data["loss_mask"] != 0
    expected, kls, found = [0.3], [], []
    for step in range(4):
        now = group.worker_group.compute_log_prob(data)
        means = [(now - ref)[row][counts[row]].double().mean().item() for row in range(len(data)) if counts[row].any()]
        kls.append(sum(means) / len(means))
        error = min(max(kls[-1] / 0.004 - 1, -0.2), 0.2)
        expected.append(expected[-1] * (1 + error * len(means) / 60))
        found.append(learn(group, step, data))
    assert [metrics["kl_coef"] for metrics in found] == pytest.approx(expected[:-1], rel=1e-4)
    assert [metrics["reward_kl"] for metrics in found] == pytest.approx(kls, abs=1e-6)
    assert min(kls) < 0.004 < max(kls), "the coefficient went one way only"
    group.save_model(3)
    assert json.loads((tmp_path / "latest.json").read_text())["kl_coef"] == pytest.approx(expected[-1], rel=1e-4)
    again = learn(group, 4, data)
    group = start(way, begins=4, with_ref=True, **args, ref_load=group.args.hf_checkpoint)
    assert learn(group, 4, data)["kl_coef"] == again["kl_coef"]
    group = start(way, begins=4, with_ref=True, **args, no_load_optim=True)
    assert learn(group, 4, data)["kl_coef"] == 0.3


@ways(TP2, rarely=[FSDP1])
def test_shuffled_steps_are_those_of_rows_in_that_order(start, way, data):
    """Both tensor parallel ranks have the same order, as their result is that of one rank."""
    args = {"num_steps_per_rollout": 3, "advantage_estimator": "grpo"}
    group = start(way, **args, ppo_epochs=2, shuffle_minibatches=True)
    learn(group, 5, data)
    shuffled = whole_weights(group)
    orders = group.worker_group.execute_with_func_generator(orders_of, 5, len(data))
    assert all(order == orders[0] for order in orders)
    first, second = orders[0]
    assert first != second and sorted(first) == sorted(second) == list(range(len(data)))
    # By hand, with advantages and old log-probabilities of the whole rollout.
    group = start(way, **args)
    given = data.clone().set("old_log_probs", group.worker_group.compute_log_prob(data))
    for step, order in enumerate((first, second)):
        learn(group, step, given[order])
    assert distance(whole_weights(group), shuffled) < 1e-6
    group = start(way, **args, ppo_epochs=2)
    learn(group, 5, data)
    assert distance(whole_weights(group), shuffled) > 1e-5


def orders_of(worker, rollout_id, rows):
    worker._rollout_id = rollout_id
    return [worker._order(rows, worker._dp_rank, epoch).tolist() for epoch in range(2)]


@ways(FSDP2, rarely=[DP2])
def test_order_depends_on_rollout_and_dp_rank_alone(start, way, data):
    """Uneven rows: eight and seven."""
    group = start(way, num_steps_per_rollout=2, shuffle_minibatches=True, ppo_epochs=2)
    orders = group.worker_group.execute_with_func_generator(orders_of, 3, 15)
    assert orders[0][0] != orders[1][0]
    assert orders != group.worker_group.execute_with_func_generator(orders_of, 4, 15)
    losses = [learn(group, step, data[:15]) for step in (3, 4)]
    group = start(way, num_steps_per_rollout=2, shuffle_minibatches=True, ppo_epochs=2)
    torch.manual_seed(99)  # whatever random numbers were drawn before
    assert orders == group.worker_group.execute_with_func_generator(orders_of, 3, 15)
    for step, expected in zip((3, 4), losses, strict=True):
        assert {**learn(group, step, data[:15]), "seconds": 0} == {**expected, "seconds": 0}


@ways(FSDP2)
def test_bypass_mode_saves_a_forward_pass(start, way, data):
    """With log-probabilities of the trainer's own, it changes nothing else."""
    found, weights = [], []
    for bypass in (False, True):
        group = start(way, use_rollout_logprobs=bypass, ppo_epochs=2)
        same = data.clone().set("rollout_log_probs", group.worker_group.compute_log_prob(data))
        group.worker_group.execute_with_func_generator(count_forward_passes)
        metrics = learn(group, 0, same)
        found.append(group.worker_group.execute_with_func_generator(lambda worker: worker.model.passes))
        weights.append(whole_weights(group))
        assert metrics["clip_fraction"] > 0
    assert found == [[1, 1], [0, 0]]
    assert distance(*weights) < 1e-6


def count_forward_passes(worker):
    model, whole = worker.model, worker.model.log_probs
    model.passes = 0

    def counting(*args):
        model.passes += 1
        return whole(*args)

    model.log_probs = counting


@ways(TP2, rarely=[FSDP2, PP2])  # FSDP: see tests/simdevice/on_device/test_training.py
def test_no_number_is_read_per_micro_batch(start, way, data):
    """On CUDA each such read waits for all work on the device. How many there are in a step does not depend on how many
    micro-batches it has."""
    group = start(way, with_ref=True, kl_loss_coef=0.01, entropy_coef=0.01)
    learn(group, 0, data)  # the optimizer's first step creates its state
    found = [
        group.worker_group.execute_with_func_generator(reads_in_a_step, Broadcast(data[:8]), most)
        for most in (1000, 16)
    ]
    for (few, reads), (many, more) in zip(*found, strict=True):
        assert few < many
        assert reads == more


def reads_in_a_step(worker, data, most):
    """(micro-batches of this rank's rows, where a step on them reads numbers from tensors)."""
    rows = data[worker._dp_rank :: worker.get_parallel_config()["dp_size"]]
    set_tokens(worker, most)
    with HostReads() as reads:
        worker.train(0, rows)
    return len(cut_by_tokens(rows, most)), dict(reads.places)


@ways(FSDP2, rarely=[TP2])  # Megatron: see test_lm.py, and test_train_model.py
def test_bfloat16_is_close(start, way, data):
    group = start(way, param_dtype="bf16")
    found = group.worker_group.compute_log_prob(data)
    torch.testing.assert_close(found, ReferenceGRPO(small_llama()).log_probs(data), atol=0.1, rtol=0.1)
    assert learn(group, 0, data)["grad_norm"] > 0
    before = whole_weights(group)
    assert {tensor.dtype for tensor in before.values()} == {torch.bfloat16}
    group.offload()
    group.onload()
    assert distance(whole_weights(group), before) == 0.0


@pytest.mark.parametrize(
    ("way", "tied"),
    [(FSDP2, False), (TP2, False), (PP2, True), *(pytest.param(way, tied, marks=rare) for way, tied in
     ((FSDP1, False), (FSDP2, True), (TP2, True), (TP2_PP2, False), (HSDP, True)))],
    ids=called,
)  # fmt: skip
def test_output_layer_in_float32_under_bfloat16(start, way, tied, data, tmp_path):
    """The logits are those of the layer's own input and weights in float32, and training follows their gradient."""
    config = small_llama().config
    config.tie_word_embeddings = tied
    torch.manual_seed(3)
    folder = saved(AutoModelForCausalLM.from_config(config), tmp_path)
    errors, weights = {}, {}
    for exact in (False, True):
        group = start(way, hf_checkpoint=folder, param_dtype="bf16", fp32_lm_head=exact, num_steps_per_rollout=2)
        group.worker_group.execute_with_func_generator(watch_the_output_layer)
        learn(group, 0, data)
        (*_, seen) = group.worker_group.execute_with_func_generator(lambda worker: worker.seen)
        errors[exact], dtypes = seen
        assert dtypes == {("bfloat16", "bfloat16", "float32" if exact else "bfloat16")}
        weights[exact] = whole_weights(group)
        assert {tensor.dtype for tensor in weights[exact].values()} == {torch.bfloat16}
    assert errors[True] < 1e-6 < 1e-4 < errors[False]
    assert ("lm_head.weight" in weights[True]) != tied
    assert 0 < distance(weights[True], weights[False]) < 0.02


def watch_the_output_layer(worker):
    """Keep in ``worker.seen``: the largest error of the logits, and the dtypes of input, weight and output."""
    model = worker.model
    worker.seen = (0.0, set())
    layers = [model.module.get_output_embeddings()] if worker.args.train_backend == "fsdp" else [
        part.output_layer for part in model.models if part.post_process
    ]  # fmt: skip

    def check(layer, args, kwargs, output):
        weight = kwargs.get("weight")
        weight = layer.weight if weight is None else weight
        logits = output[0] if isinstance(output, tuple) else output
        exact = args[0].detach().double() @ weight.detach().double().T
        error = float((logits.detach().double() - exact).abs().max())
        dtypes = tuple(str(tensor.dtype).removeprefix("torch.") for tensor in (args[0], weight, logits))
        worker.seen = (max(worker.seen[0], error), worker.seen[1] | {dtypes})

    for layer in layers:
        layer.register_forward_hook(check, with_kwargs=True)


@ways(FSDP2, TP2)
def test_swapping_weights_keeps_the_optimizers_float32_precision(start, way, data):
    """Steps too small for a bf16 weight add up in the optimizer's float32 copy, with a reference model too."""
    found = {}
    for with_ref in (False, True):
        group = start(way, with_ref, param_dtype="bf16", lr=2e-5)
        for step in range(2):
            learn(group, step, data[:2])
        found[with_ref] = whole_weights(group)
    assert distance(found[True], found[False]) == 0.0
    assert distance(found[True], small_llama().to(torch.bfloat16).state_dict()) > 0


@ways(FSDP2, rarely=[PP2, DP2])
def test_old_log_probs_use_the_version_that_generated_each_token(start, way, data):
    """Tokens of the last two weight versions are each compared with the weights that generated them."""
    group = start(way, keep_old_actor=True)
    kept = []
    for version in (1, 2):
        group.worker_group.execute_with_func_generator(lambda worker, v: worker._keep_version(v), version)
        kept.append(group.worker_group.compute_log_prob(data))
        learn(group, version, data.clone().set("weight_versions", torch.full((len(data),), version)))
    counts = data["loss_mask"] != 0
    versions = (torch.arange(len(data))[:, None] + torch.arange(data["input_ids"].shape[1])) % 2 + 1
    versions[~counts] = -1
    mixed = torch.where(versions == 1, kept[0], kept[1])
    now = group.worker_group.compute_log_prob(data)
    ratio = (now - mixed).exp()[counts].mean().item()
    group.worker_group.execute_with_func_generator(lambda worker: setattr(worker, "weight_version", 3))
    metrics = learn(group, 3, data.clone().set("weight_versions", versions))
    assert metrics["ratio"] == pytest.approx(ratio, abs=1e-5)
    behind = (3 - versions)[counts].tolist()  # counted here, over all rows; a rank has only its own
    found = {name: metrics[f"staleness/{name}"] for name in ("mean", "max", "0", "1", "2", "3", "4_or_more")}
    shares = {str(k): behind.count(k) / len(behind) for k in range(4)}
    assert found == pytest.approx({"mean": sum(behind) / len(behind), "max": 2, **shares, "4_or_more": 0})
    group.worker_group.execute_with_func_generator(lambda worker: worker._keep_version(3))
    with pytest.raises(WorkerError, match=r"weight versions \[1\], but keep_old_actor keeps \[2, 3\]"):
        group.worker_group.train(4, data.clone().set("weight_versions", versions * 0 + 1))


@ways(FSDP2, rarely=[DP2, PP2])
def test_weights_that_are_sent_again_keep_those_before(start, way, data, tmp_path):
    """As refresh() and replace() send them: two versions of the same weights, and tokens of all three are compared."""
    group = start(way, keep_old_actor=True, save=str(tmp_path))

    def of_version(version):
        return data.clone().set("weight_versions", torch.full((len(data),), version))

    before = group.worker_group.compute_log_prob(data)
    learn(group, 0, of_version(0))
    for version in (1, 2):
        group.worker_group.execute_with_func_generator(lambda worker, v: worker._keep_version(v), version)
    sent = group.worker_group.compute_log_prob(data)
    for version, expected in ((0, before), (1, sent), (2, sent)):
        found = group.worker_group.compute_old_log_prob(of_version(version))
        torch.testing.assert_close(found, expected, atol=1e-6, rtol=0)
    with pytest.raises(WorkerError, match=r"weight versions \[3\], but keep_old_actor keeps \[0, 1, 2\]"):
        group.worker_group.compute_old_log_prob(of_version(3))
    group.worker_group.execute_with_func_generator(fail_to_update, 3)
    counts = data["loss_mask"] != 0
    # Without the log-probabilities of the rollout, which are about those of `before`.
    unknown = group.worker_group.compute_old_log_prob(of_version(-1).exclude("rollout_log_probs"))
    torch.testing.assert_close(unknown[counts], before[counts], atol=1e-6, rtol=0)  # weight_version is 0

    def are_the_rollouts(version):
        found = group.worker_group.compute_old_log_prob(of_version(version))
        return torch.equal(found[counts], data["rollout_log_probs"][counts].float())

    assert are_the_rollouts(3)
    group.save_model(0)
    assert json.loads((tmp_path / "latest.json").read_text())["weight_version"] == 3  # no other update gets it
    for version in (4, 5):
        learn(group, version, of_version({4: 2, 5: 4}[version]))
        group.worker_group.execute_with_func_generator(lambda worker, v: worker._keep_version(v), version)
    assert are_the_rollouts(3)
    with pytest.raises(WorkerError, match=r"weight versions \[2\], but keep_old_actor keeps \[4, 5\]"):
        group.worker_group.compute_old_log_prob(of_version(2))


def fail_to_update(worker, version):
    """Some rollout workers may have got the weights."""
    worker._sender = SimpleNamespace(send=lambda *args, **options: 1 / 0, close=lambda: None)
    with pytest.raises(ZeroDivisionError):
        worker.update_weights(version)


@ways(FSDP1, rarely=[FSDP2, TP2, PP2])
def test_critic_learns_the_expected_values(start, way, llama_folder, data, tmp_path):
    workers = start(way).worker_group
    args = way.arguments(llama_folder, critic_lr=1.5e-2, gae_lambda=1.0, advantage_estimator="gae")
    args |= {"ppo_epochs": 8, "value_clip": 0.0}
    workers.init({**args, "save_hf": str(tmp_path)}, "critic")
    losses = [workers.train(step, data)[0]["value_loss"] for step in range(5)]
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


@pytest.mark.parametrize(
    ("way", "others"),
    [
        pytest.param(FSDP2, [FSDP1], id="fsdp"),
        pytest.param(TP2, [PP2], id="megatron", marks=rare),
        pytest.param(TP2_DP2, [PP2], id="megatron4", marks=rare),
        pytest.param(FSDP4, [FSDP2, FSDP1], id="fsdp4", marks=four_of_fsdp),
    ],
)
def test_checkpoint_resumes_with_another_layout(start, way, others, llama_folder, data, tmp_path):
    folders = {"save": str(tmp_path), "load": str(tmp_path)}
    group = start(way, **folders)
    for step in range(2):
        learn(group, step, data)
    assert group.save_model(1) == str(tmp_path / "rollout_0000001")
    note = json.loads((tmp_path / "latest.json").read_text())
    assert note == {"folder": "rollout_0000001", "rollout_id": 1, "optimizer_step": 2, "weight_version": 0}
    kept = whole_weights(group)
    expected = learn(group, 2, data)["loss"], whole_weights(group)
    group.save_model(2)
    assert distance(whole_weights(start(others[0], begins=3, **folders)), expected[1]) == 0.0
    with pytest.raises(WorkerError, match="ckpt_step=7; found: rollout_0000001, rollout_0000002"):
        group.worker_group.init(way.arguments(llama_folder, ckpt_step=7, **folders), "actor")
    with pytest.raises(WorkerError, match="this worker has no model"):  # it has other weights than was asked for
        group.worker_group.train(2, data)
    for call in (group.worker_group.sleep, group.worker_group.wake_up, group.worker_group.load_driver_state):
        with pytest.raises(WorkerError, match="this worker has no model"):
            call()
    folders["ckpt_step"] = 1
    for other in others:
        group = start(other, begins=2, **folders)
        assert distance(whole_weights(group), kept) == 0.0
        assert learn(group, 2, data)["loss"] == pytest.approx(expected[0], abs=1e-5)
        assert distance(whole_weights(group), expected[1]) < 1e-5
        group = start(other, begins=2, no_load_optim=True, **folders)
        learn(group, 2, data)
        assert distance(whole_weights(group), expected[1]) > 1e-4  # Adam started from zero


@pytest.mark.parametrize(
    ("way", "other"), [(FSDP2, FSDP2), pytest.param(TP2, PP2, marks=rare)], ids=["fsdp", "megatron"]
)
def test_checkpoint_in_the_background(start, way, other, data, tmp_path):
    args = {"save": str(tmp_path), "load": str(tmp_path), "async_save": True}
    group = start(way, **args)
    group.save_model(0)
    expected = whole_weights(group)
    learn(group, 1, data)  # while it is being written
    assert distance(whole_weights(group), expected) > 1e-4
    group.worker_group.wait_for_save()
    group = start(other, begins=1, **args)
    assert distance(whole_weights(group), expected) == 0.0
    group.save_model(5, force_sync=True)
    assert json.loads((tmp_path / "latest.json").read_text())["rollout_id"] == 5


@ways(FSDP2, rarely=[TP2_PP2])  # Megatron: see test_train_model.py
def test_export_is_a_hugging_face_model(start, way, data, tmp_path, llama_folder):
    """With the generation config of the original, so that a run that starts from it stops at the same tokens."""
    original = shutil.copytree(llama_folder, tmp_path / "original")
    GenerationConfig(eos_token_id=[6, 7], temperature=0.5).to_json_file(original / "generation_config.json")
    group = start(way, hf_checkpoint=str(original), save_hf=str(tmp_path / "hf_{rollout_id}"))
    learn(group, 0, data)
    assert group.save_model(7) is None
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "hf_7").eval()
    found = group.worker_group.compute_log_prob(data)
    torch.testing.assert_close(found, ReferenceGRPO(model).log_probs(data), atol=1e-5, rtol=1e-4)
    exported = GenerationConfig.from_pretrained(tmp_path / "hf_7")
    assert (exported.eos_token_id, exported.temperature) == ([6, 7], 0.5)


def gradient_bytes(worker):
    """Size of Megatron's gradients, which are float32 and padded."""
    chunks = getattr(worker.model, "_chunks", [])
    return sum(4 * buffer.numel for chunk in chunks for buffer in chunk.buffers)


@pytest.mark.parametrize(
    ("way", "options", "bytes_per_parameter", "more"),
    [
        (FSDP2, {}, 12, 0.0),  # a float32 parameter and Adam's two moments
        # Plus its gradient; both tp ranks hold the norms, and Megatron pads its buffers.
        pytest.param(TP2, {}, 16, 0.05, marks=rare),
        pytest.param(PP2, {}, 16, 0.05, marks=rare),
        # Both hold everything but half of Adam. In bfloat16: see test_train_model.py.
        pytest.param(DP2, {"use_distributed_optimizer": True}, 2 * 8 + 8, 0.05, marks=rare),
    ],
    ids=called,
)
def test_offload_frees_all_memory_and_onload_restores_it(start, data, way, options, bytes_per_parameter, more):
    group = start(way, **options)
    learn(group, 0, data)
    before = whole_weights(group)
    freed = group.offload()
    copied = sum(group.worker_group.execute_with_func_generator(lambda worker: worker.memory.nbytes))
    gradients = sum(group.worker_group.execute_with_func_generator(gradient_bytes))
    assert (gradients > 0) == (way.backend == "megatron")
    assert copied == freed - gradients  # the next step sets them to 0
    assert freed == pytest.approx(bytes_per_parameter * sum(p.numel() for p in small_llama().parameters()), rel=more)
    with pytest.raises(WorkerError, match="this worker is offloaded; call onload"):
        group.worker_group.train(1, data)
    with pytest.raises(WorkerError, match="this worker is offloaded; call onload"):
        group.worker_group.compute_log_prob(data)
    assert group.onload() == freed
    assert distance(whole_weights(group), before) == 0.0
    expected = learn(group, 1, data)["loss"]
    group = start(way, **options)
    learn(group, 0, data)
    assert learn(group, 1, data)["loss"] == expected


WRONG = [
    (lambda data: data.exclude("loss_mask"), "rollout data has no 'loss_mask'"),
    (lambda data: data.exclude("group_ids"), "no 'group_ids', which advantage_estimator='grpo' needs"),
    (lambda data: data.clone().set("input_ids", data["input_ids"] + 30), "but vocab_size is 32"),
    (lambda data: data.clone().set("rewards", data["input_ids"].float()), "rewards is .*one number per row"),
    (lambda data: data.clone().set("loss_mask", torch.ones_like(data["loss_mask"])), "loss_mask of row 0 counts"),
    (
        lambda data: data.clone().set("candidate_ids", data["input_ids"]),
        "candidate_ids is .*expected k numbers per token",
    ),
    (lambda data: with_one(data, "rewards", torch.inf), "rewards of row 0 is not finite"),
    (lambda data: with_one(data, "ref_log_probs", torch.nan), "ref_log_probs of row 0 is not finite at a token"),
    (lambda data: data.exclude("rewards"), "no 'rewards', which advantage_estimator='grpo' needs"),
    (lambda data: data.clone().set("position_ids", data["input_ids"]), "position_ids of row 0 do not count"),
    (lambda data: [dict(row.items()) for row in data], "list of dict; pass all rows as one TensorDict"),
    (lambda data: None, "must be a TensorDict or a dict of tensors, got NoneType"),
]


def with_one(data, name, number):
    data = data.clone()
    if name not in data.keys():  # noqa: SIM118
        data[name] = torch.zeros(data["input_ids"].shape)
    data[name][0] = number
    return data


@ways(FSDP2, rarely=[PP2])  # checked before the backend sees them
def test_invalid_rollout_data_is_rejected_and_changes_nothing(start, way, data):
    group = start(way)
    before = whole_weights(group)
    for change, message in WRONG[:-2]:
        with pytest.raises(WorkerError, match=message):
            group.worker_group.train(0, change(data))

    # Rows that are on the driver are rejected before anything is sent.
    wrong = data.clone()
    wrong["rewards"][-2] = torch.nan
    calls = [call.method for call in group.worker_group.stats().calls]
    later = Future()
    later.set_result(wrong)
    for given in (wrong, dict(wrong.items()), later):
        with pytest.raises(RolloutDataError, match=f"rewards of row {len(data) - 2} is not finite"):
            group.async_train(0, given)
    for change, message in WRONG:
        with pytest.raises(RolloutDataError, match=message):
            group.async_train(0, change(data))
    assert [call.method for call in group.worker_group.stats().calls] == calls
    with pytest.raises(ray.exceptions.RayTaskError, match=r"rewards of row .* is not finite"):
        ray.get(group.async_train(0, ray.put(wrong)))

    # Invalid rows of one rank are an error on all ranks, of which none waits for the others.
    wrong = data.clone()
    wrong["input_ids"][-1] = 77
    for call in (group.worker_group.train, lambda _, rows: group.worker_group.compute_log_prob(rows)):
        with pytest.raises(WorkerError, match=r"token ids from .* to 77, but vocab_size is 32"):
            call(0, wrong)
    assert group.worker_group.broken is None
    assert distance(whole_weights(group), before) == 0.0
    learn(group, 0, data)


@ways(FSDP2, PP2)
def test_rollout_without_a_token_that_counts_has_the_metric_loss(start, way, data):
    group = start(way)
    before = whole_weights(group)
    metrics = learn(group, 0, data.clone().set("loss_mask", torch.zeros_like(data["loss_mask"])))
    assert (metrics["loss"], metrics["grad_norm"], metrics["completion_tokens"]) == (0.0, 0.0, 0.0)
    assert distance(whole_weights(group), before) == 0.0


@ways(FSDP2, PP2, rarely=[DP2, TP2])
def test_non_finite_gradient_changes_nothing(start, way, data):
    """The step is skipped: later steps are as if it had never happened."""
    group = start(way, lr_warmup_iters=3)
    expected = [learn(group, step, data) for step in range(2)]
    weights = whole_weights(group)
    group = start(way, lr_warmup_iters=3)
    huge = data.exclude("rewards").set("advantages", torch.full((len(data),), 3e38))
    found = []
    for step in range(2):
        assert not any(math.isfinite(m["grad_norm"]) for m in ray.get(group.async_train(step, huge)))
        found.append(learn(group, step, data))
    for one, other in zip(found, expected, strict=True):
        assert {**one, "seconds": 0} == {**other, "seconds": 0}
    assert distance(whole_weights(group), weights) == 0.0


@ways(FSDP2, DP2)
def test_resumed_run_uses_its_own_optimizer_settings(start, way, data, tmp_path):
    """Not the settings stored in the checkpoint's optimizer."""
    group = start(way, save=str(tmp_path), weight_decay=0.0)
    learn(group, 0, data)
    group.save_model(0)
    group = start(way, begins=1, load=str(tmp_path), weight_decay=0.25, adam_beta1=0.5, adam_eps=1e-4)

    def settings(worker):
        groups = getattr(worker.model, "_optimizer", None) or worker.model.stages.optimizer
        return [(one["betas"], one["eps"], one["weight_decay"]) for one in groups.param_groups]

    found = group.worker_group.execute_with_func_generator(settings)[0]
    assert {(tuple(betas), eps) for betas, eps, _ in found} == {((0.5, 0.999), 1e-4)}
    assert max(decay for *_, decay in found) == 0.25


@pytest.mark.parametrize(
    ("way", "options"),
    [
        (FSDP2, {}),
        pytest.param(DP2, {}, marks=rare),
        pytest.param(TP2, {}, marks=rare),
        pytest.param(PP2, {}, marks=rare),
        (TP2_DP2, {"use_distributed_optimizer": True}),
        pytest.param(TP2_PP2, {}, marks=rare),
    ],
    ids=called,
)
def test_decay_of_each_tensor(start, way, options, tmp_path):
    """Without a gradient, AdamW multiplies each tensor by 1 - lr * weight_decay. Megatron leaves out norms and biases,
    which this Qwen2 has; also after it has loaded a checkpoint."""
    model = small_qwen2(tie_word_embeddings=False)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.uniform_(0.5, 1.0)  # biases begin with 0
    rows = other_rollout(model, seed=0).exclude("rewards")
    rows["advantages"] = torch.zeros(len(rows))
    args = {"lr": 0.1, "weight_decay": 0.5, "hf_checkpoint": saved(model, tmp_path), **options}
    group = start(way, save=str(tmp_path / "checkpoint"), **args)
    learn(group, 0, rows)
    group.save_model(0)
    group = start(way, begins=1, load=str(tmp_path / "checkpoint"), **args)
    learn(group, 1, rows)
    weights = whole_weights(group)
    for name, before in model.state_dict().items():
        factor = 1.0 if way.backend == "megatron" and before.ndim == 1 else 0.95**2
        torch.testing.assert_close(weights[name], before * factor, rtol=1e-5, atol=0, msg=name)


@ways(FSDP2)
def test_checkpoint_weights_have_no_version(start, way, data, tmp_path):
    """They were trained after the rollout workers received them, so rows of that version are not compared with them."""
    group = start(way, save=str(tmp_path), keep_old_actor=True)
    learn(group, 0, data)
    group.save_model(0)
    group = start(way, begins=1, load=str(tmp_path), keep_old_actor=True)
    alone = data.exclude("rollout_log_probs")
    with pytest.raises(
        WorkerError,
        match=r"weight versions \[0\], but keep_old_actor keeps none, because there was no update since init",
    ):
        group.worker_group.train(1, alone)
    # What the rollout workers have said is all that is known of them.
    counts = data["loss_mask"] != 0
    found = group.worker_group.compute_old_log_prob(data)
    assert torch.equal(found[counts], data["rollout_log_probs"][counts].float())
    group.worker_group.execute_with_func_generator(lambda worker: worker._keep_version(1))
    of_one = data.clone().set("weight_versions", torch.full((len(data),), 1))
    expected = group.worker_group.compute_log_prob(data)
    torch.testing.assert_close(group.worker_group.compute_old_log_prob(of_one), expected, atol=1e-6, rtol=0)
    learn(group, 1, of_one)
    for version in (2, 3):
        group.worker_group.execute_with_func_generator(lambda worker, v: worker._keep_version(v), version)
        learn(group, version, of_one.clone().set("weight_versions", torch.full((len(data),), version)))
    with pytest.raises(WorkerError, match=r"weight versions \[1\], but keep_old_actor keeps \[2, 3\]"):
        group.worker_group.train(4, of_one)
    group.worker_group.set_weight_version(7)
    with pytest.raises(
        WorkerError, match=r"weight versions \[1\], but keep_old_actor keeps none, because there was no update"
    ):
        group.worker_group.train(4, of_one.exclude("rollout_log_probs"))


@ways(FSDP2, rarely=[DP2])  # both fail before the backend writes, and in the export that they share
def test_rank_zero_checkpoint_failure_is_an_error_on_all_ranks(start, way, data, tmp_path):
    (tmp_path / "file").write_text("in the way")
    in_the_way = str(tmp_path / "file")
    for args, message in (
        ({"save": in_the_way}, "a checkpoint could not be written: rank 0: "),
        ({"save_hf": in_the_way}, "the Hugging Face model could not be written to .*: rank 0: "),
    ):
        group = start(way, **args)
        with pytest.raises(WorkerError, match=message):
            group.save_model(0)
        assert group.worker_group.broken is None
    learn(group, 0, data)


@ways(DP2, rarely=[FSDP2])  # FSDP: see test_actor_critic.py
def test_references_instead_of_data(start, way, data):
    group = start(way, lr=0.0)  # so that each step does the same
    plain = dict(data.items())
    found = [
        {**learn(group, 0, given), "seconds": 0}
        for given in (data, ray.put(data), [ray.put(data[:12]), ray.put(data[12:])], plain, ray.put(plain))
    ]
    assert all(other == found[0] for other in found)


@pytest.mark.parametrize(
    ("backend", "args", "with_ref", "message"),
    [
        ("fsdp", {"fsdp_shard_size": 3}, False, "fsdp_shard_size=3 does not divide the group's 2 ranks"),
        (
            "megatron",
            {"tensor_model_parallel_size": 3},
            False,
            "=3 times pipeline.* does not divide the group's 2 ranks",
        ),
        ("fsdp", {"hf_checkpoint": None}, False, "args names no model"),
        ("megatron", {"enable_weights_backuper": False}, True, "needs enable_weights_backuper=True"),
    ],
)
def test_invalid_configuration_is_rejected_before_sending(group_of, llama_folder, backend, args, with_ref, message):
    group = group_of(backend, 2)
    before = group.args
    with pytest.raises((TrainArgsError, ModelFilesError), match=message):
        group.async_init({"train_backend": backend, "hf_checkpoint": llama_folder, **args}, with_ref=with_ref)
    assert group.args is before


@pytest.mark.parametrize(
    ("way", "changes", "message"),
    [
        (FSDP2, {"num_hidden_layers": 3}, "num_hidden_layers is 3, not 2"),
        (TP2, {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, "rope_parameters is .*500000"),
    ],
    ids=called,
)
def test_reference_of_another_model_is_rejected(group_of, llama_folder, tmp_path, way, changes, message):
    """Its weights have all that the model needs."""
    other = saved(small_llama(**changes), tmp_path)
    with pytest.raises(WorkerError, match=f"has another model: its {message}"):
        group_of(way.backend, way.ranks).worker_group.init(way.arguments(llama_folder, ref_load=other), "actor", True)


@ways(FSDP2, TP2)
def test_folder_whose_config_ties_different_weights_is_rejected(group_of, tmp_path, way):
    """transformers ties no weights that differ, but the other ranks read none; Megatron would ignore one of the two."""
    folder, workers = saved(small_llama(), tmp_path), group_of(way.backend, way.ranks).worker_group
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    said = r"different weights for 'lm_head\.weight' and 'model\.embed_tokens\.weight', which its config ties"
    with pytest.raises(WorkerError, match=said):
        workers.init(way.arguments(folder), "actor")
    assert workers.broken is None
