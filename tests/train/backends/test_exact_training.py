"""Exact mode with real trainers and rollout workers: FSDP on two ranks, HFEngine, weights by the object store."""

import os
import signal

import depth
import pytest
import ray
import torch
from rollout_helpers import LLAMA, Toy
from test_async_rollout import ARGS as PLAIN
from test_async_rollout import MODEL, B, prompts, reward
from test_replace_ranks import wait_for_snapshots
from train_helpers import begin, distance, kept_gradients, learn, whole_weights

from single_controller import Broadcast, RayClassWithInitArgs, RayWorkerGroup
from workers import HFEngine, RolloutManager, RolloutStream, SampleBuffer, SamplingParams
from workers.algorithms.corrections import PRESETS
from workers.weight_sync.sync_protocol import WeightSyncError

pytestmark = pytest.mark.timeout(240)

SAMPLES, ROLLOUTS = 3, 8 if depth.full else 3
HOW = SamplingParams(9, temperature=0.9, stop_token_ids=(6, 17))
ARGS = {**PLAIN, "temperature": HOW.temperature, "exact": True, "max_tokens_per_micro_batch": 40}


@pytest.fixture(scope="module")
def rollout_of(train_pool):
    """A group of so many rollout workers: ``rollout_of(2)``."""
    groups = {}

    def of(workers):
        if workers not in groups:
            made = RayClassWithInitArgs(Toy, HFEngine, LLAMA, exact=True, max_batch_size=5)
            groups[workers] = RayWorkerGroup(
                train_pool[:workers], made, name_prefix=f"exact{workers}_", collectives=False
            )
        return groups[workers]

    yield of
    for group in groups.values():
        group.close()


def trained(group, rollout, rollouts=ROLLOUTS, *, stream=False, victims=(), **args):
    """Train. Returns the weights, the data and the metrics of each rollout.

    Args:
        stream: generate asynchronously, at staleness 0.
        victims: rollouts after which rank 1 of the trainer is killed and replaced.
    """
    group.weight_version = 0
    begin(group, {**ARGS, **args})
    manager = RolloutManager(rollout, HOW, reward, samples_per_prompt=SAMPLES, seed=5)
    group.set_rollout_manager(manager)
    buffer = SampleBuffer(B, num_batches=rollouts, max_staleness=0, keep_batches=2)
    source = RolloutStream(manager, prompts, buffer) if stream else None
    data, metrics, victims, step = {}, {}, set(victims), 0
    while step < rollouts:
        group.update_weights()
        data[step] = source.take(60) if source else manager.generate(prompts(step), rollout_id=step)
        metrics[step] = learn(group, step, data[step])
        step += 1
        if step in victims:
            victims.remove(step)
            # Or the group goes back one rollout more, whose kept data is then of an older weight version.
            wait_for_snapshots(group)
            os.kill(group.worker_group.status().ranks[1].process.pid, signal.SIGKILL)
            (step, *_) = group.replace()
    if source:
        source.close()
    group.set_rollout_manager(None)
    return whole_weights(group), data, metrics


def timeless(metrics, *without):
    """Metrics without those of time and of snapshots, and without those that begin so."""
    left_out = ("snapshot", "peer", *without)
    return {name: value for name, value in metrics.items() if "seconds" not in name and not name.startswith(left_out)}


def assert_same_run(one, other):
    assert distance(one[0], other[0]) == 0.0
    for step in range(ROLLOUTS):
        for name in one[1][step].keys() - {"group_ids", "weight_versions", "min_weight_versions",
                                           "max_weight_versions"}:  # fmt: skip
            assert torch.equal(one[1][step][name], other[1][step][name]), (step, name)
        assert timeless(one[2][step]) == timeless(other[2][step]), step


@pytest.fixture(scope="module")
def synchronous(fsdp_groups, rollout_of):
    return trained(fsdp_groups(2), rollout_of(1))


def test_rollout_and_trainer_agree_to_the_last_bit(fsdp_groups, rollout_of, synchronous):
    weights, _, metrics = synchronous
    assert [metrics[step]["rollout_log_prob_diff"] for step in range(ROLLOUTS)] == [0.0] * ROLLOUTS
    assert len({metrics[step]["loss"] for step in range(ROLLOUTS)}) == ROLLOUTS, "it learns"
    assert distance(weights, trained(fsdp_groups(2), rollout_of(1), 1)[0]) > 1e-3


MIXTURE = {**MODEL, "model_type": "qwen3_moe", "head_dim": 8, "moe_intermediate_size": 24, "num_experts": 8,
           "num_experts_per_tok": 2, "norm_topk_prob": True}  # fmt: skip


def test_mixture_of_experts_agrees_to_the_last_bit(fsdp_groups, train_pool):
    """Also where an expert gets fewer tokens than the kernels need. Its weights change with each step."""
    made = RayClassWithInitArgs(Toy, HFEngine, MIXTURE, exact=True, max_batch_size=5)
    with RayWorkerGroup(train_pool[:1], made, name_prefix="exact_mixture_", collectives=False) as rollout:
        _, _, metrics = trained(fsdp_groups(2), rollout, 2, hf_config=MIXTURE, moe_aux_loss_coeff=0.05)
    assert [metrics[step]["rollout_log_prob_diff"] for step in range(2)] == [0.0] * 2
    assert len({metrics[step]["loss"] for step in range(2)}) == 2, "it learns"
    assert all(0 <= metrics[step]["moe/load_min"] < 1 < metrics[step]["moe/load_max"] for step in range(2))


@pytest.mark.full("exact training with other numbers of rollout workers")
def test_asynchronous_at_staleness_0_equals_synchronous_with_any_workers(fsdp_groups, rollout_of, synchronous):
    for workers, stream in ((1, True), (2, False), (4, True)):  # the next test has a stream of two
        assert_same_run(synchronous, trained(fsdp_groups(2), rollout_of(workers), stream=stream))


def test_a_killed_and_replaced_run_equals_the_other(fsdp_groups, rollout_of, synchronous):
    victims = (3, 6) if depth.full else (1, 2)
    assert_same_run(
        synchronous, trained(fsdp_groups(2), rollout_of(2), peer_snapshot_interval=1, victims=victims, stream=True)
    )


def test_a_replayed_step_is_equal(fsdp_groups, synchronous, tmp_path):
    """The weights were never sent here, so their version, and with it the staleness, is another one."""
    weights, data, metrics = synchronous
    group = fsdp_groups(2)
    begin(group, {**ARGS, "save": str(tmp_path)})
    for step in range(ROLLOUTS - 1):
        learn(group, step, data[step])
    group.save_model(ROLLOUTS - 2)
    for _ in range(2 if depth.full else 1):
        begin(group, {**ARGS, "load": str(tmp_path)})
        found = learn(group, ROLLOUTS - 1, data[ROLLOUTS - 1])
        assert timeless(found, "staleness") == timeless(metrics[ROLLOUTS - 1], "staleness")
        assert distance(whole_weights(group), weights) == 0.0


ROW_BY_ROW = {"max_tokens_per_micro_batch": 1, "fsdp_reduce_dtype": "fp64"}


def test_gradients_and_the_number_of_ranks(fsdp_groups, synchronous):
    """In the order of the split by default: the last bits differ, but those of one split are always the same."""
    _, data, _ = synchronous

    def of(ranks, **args):
        group = fsdp_groups(ranks)
        begin(group, {**ARGS, **args})
        return group.worker_group.execute_with_func_generator(gradients_of_a_step, Broadcast(data[0]))[0]

    def furthest(one, other):
        assert one.keys() == other.keys()
        return max(float((one[name] - of_one).abs().max() / of_one.abs().max()) for name, of_one in other.items())

    one, alone = of(1), of(1, **ROW_BY_ROW)
    assert furthest(alone, one) < 1e-6
    for ranks in (2, 4) if depth.full else (2,):
        found = of(ranks)
        assert 0 < furthest(found, one) < 1e-6 and furthest(of(ranks), found) == 0.0
    assert furthest(of(ranks, **ROW_BY_ROW), alone) == 0.0
    for name in ROW_BY_ROW:  # each of the two is needed
        assert furthest(of(ranks, **{**ROW_BY_ROW, name: ARGS.get(name, "fp32")}), alone) > 0.0


def gradients_of_a_step(worker, data):
    found = kept_gradients(worker.model)
    worker.train(0, data[worker.rank :: worker.world_size])
    return found


@pytest.mark.full("exact gradients on three and four ranks")
def test_row_by_row_any_number_of_ranks_trains_alike(fsdp_groups, synchronous):
    """Three ranks share a group's rows, and 3 is no power of two."""
    _, data, _ = synchronous
    found = {}
    for ranks in (1, 2, 3, 4):
        group = fsdp_groups(ranks)
        begin(group, {**ARGS, **ROW_BY_ROW, "clip_grad": 0.01})
        metrics = [timeless(learn(group, step, data[step]), "cost_spread") for step in range(3)]
        assert min(one["grad_norm"] for one in metrics) > 0.01
        found[ranks] = metrics, whole_weights(group)
        assert metrics == found[1][0] and distance(found[ranks][1], found[1][1]) == 0.0, ranks


LEVELS_AND_KINDS = ("icepop", "error_rs", "seq_mask_tis")
"""Each of both is in one of them, or in one of those below."""
ALIKE = pytest.mark.full("corrections that differ in numbers, or in how others are combined")
CORRECTIONS = [
    *(pytest.param({"rollout_correction": name}, marks=() if name in LEVELS_AND_KINDS else ALIKE) for name in PRESETS),
    {"rollout_correction": "geo_rs+token_tis"},
    {"rollout_correction": "seq_mis", "rollout_correction_normalize": True},
    {"opsm_delta": 1e-9},
    {"use_rollout_logprobs": True},
]


@pytest.mark.parametrize(
    "case", CORRECTIONS, ids=lambda case: "-".join(f"{key}={value}" for key, value in case.items())
)
def test_corrections_on_policy_do_nothing(fsdp_groups, synchronous, case):
    """Not even to the last bit: rollout and trainer agree, so each weight is 1."""
    _, data, metrics = synchronous
    group = fsdp_groups(2)
    begin(group, {**ARGS, **case})
    found = learn(group, 0, data[0])
    for name in ("loss", "grad_norm", "rollout_log_prob_diff"):
        assert found[name] == metrics[0][name], name
    bounds = {"correction_ratio": 1.0, "correction_ratio_max": 1.0, "correction_weight": 1.0,
              "correction_rejected": 0.0, "mismatch_k1": 0.0, "mismatch_k3": 0.0}  # fmt: skip
    assert {name: found.get(name, value) for name, value in bounds.items()} == bounds


def test_an_engine_that_is_not_exact_is_refused_before_anything_is_sent(fsdp_groups, train_pool):
    group = fsdp_groups(2)
    begin(group, ARGS)
    made = RayClassWithInitArgs(Toy, HFEngine, LLAMA)
    with RayWorkerGroup(train_pool[2:3], made, name_prefix="plain_", collectives=False) as rollout:
        group.set_rollout_manager(RolloutManager(rollout, HOW, reward))
        with pytest.raises(WeightSyncError, match=r"rollout worker 0 does not agree .* its engine is not exact"):
            group.update_weights()
        assert rollout.version_of_weights() != [1]
        group.set_rollout_manager(None)


def test_every_rank_is_told_when_one_cannot_be_exact(fsdp_groups):
    with pytest.raises(Exception, match=r"the ranks cannot train exactly: rank 0: ExactError: .* dropout of this"):
        begin(fsdp_groups(2), {**ARGS, "hf_config": {**MODEL, "attention_dropout": 0.1}})
    ray.get(fsdp_groups(2).async_init({"hf_config": MODEL}))
