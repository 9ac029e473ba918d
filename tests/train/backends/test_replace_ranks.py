"""Train groups whose ranks are killed: they continue from snapshots in memory as if nothing had happened."""

import os
import signal

import pytest
import torch
from model_types import config_of, model_of
from train_helpers import begin, distance, learn, llamas_rollout, saved, whole_weights
from waits import wait_until

from workers.recovery import peer_snapshots
from workers.recovery.train_recovery import common_position

pytestmark = pytest.mark.timeout(180)

FSDP = {"train_backend": "fsdp"}
MEGATRON = {"train_backend": "megatron"}
TP2 = {"tensor_model_parallel_size": 2}
EP2 = {"expert_model_parallel_size": 2}

# name -> ranks, ranks with the same state, arguments
WAYS = {
    "fsdp2": (2, 1, {**FSDP}),
    "fsdp2-mixture": (2, 1, {**FSDP, "moe_aux_loss_coeff": 0.05}),
    "fsdp2-lora": (2, 1, {**FSDP, "lora_rank": 4}),
    "hsdp4": (4, 2, {**FSDP, "fsdp_shard_size": 2}),
    "sp2-dp2": (4, 1, {**FSDP, "sequence_parallel_size": 2}),
    "tp2": (2, 1, {**MEGATRON, **TP2}),
    "dp2-distributed": (2, 1, {**MEGATRON, "use_distributed_optimizer": True}),
    "dp2-distributed-bf16": (2, 1, {**MEGATRON, "use_distributed_optimizer": True, "param_dtype": "bf16"}),
    "dp2": (2, 2, {**MEGATRON}),
    "ep2": (2, 1, {**MEGATRON, **EP2}),
    "ep2-distributed": (2, 1, {**MEGATRON, **EP2, "use_distributed_optimizer": True}),
    "ep2-dp4": (4, 2, {**MEGATRON, **EP2}),
    "tp2-ep2-dp4": (4, 2, {**MEGATRON, **TP2, **EP2, "expert_tensor_parallel_size": 1}),
    "dp2-fp16": (2, 2, {**MEGATRON, "param_dtype": "fp16"}),
}
FAST = {"fsdp2"}


def kill(group, *ranks):
    """Kill ranks, and wait until Ray knows."""
    pids = group.worker_group.execute_with_func_generator(lambda worker: os.getpid())
    for rank in ranks:
        os.kill(pids[rank], signal.SIGKILL)
    wait_until(lambda: not any(group.worker_group.alive()[rank] for rank in ranks), 10)


def wait_for_snapshots(group):
    """Wait until each rank has sent its latest snapshot."""
    wait_until(lambda: all(group.worker_group.execute_with_func_generator(is_sent)), 10)


def is_sent(worker):
    worker._peers.finish_sending()
    return worker._peers._latest in worker._peers._sent


def state(worker):
    """The bytes of all that training depends on, from the live model."""
    return {
        name: tensor.detach().contiguous().reshape(-1).view(torch.uint8).clone()
        for name, tensor in worker._state()
        if tensor.numel()
    }


def states(group):
    return group.worker_group.execute_with_func_generator(state)


def learning(group, step, rows):
    """All metrics of a step, except of what it took."""
    metrics = learn(group, step, rows)
    return {name: value for name, value in metrics.items() if "seconds" not in name and "snapshot" not in name}


def same(ones, others):
    return all(
        one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
        for one, other in zip(ones, others, strict=True)
    )


rare = pytest.mark.full("rare ways to recover")


@pytest.mark.parametrize("way", [name if name in FAST else pytest.param(name, marks=rare) for name in WAYS])
def test_training_continues_bit_for_bit(way, group_of, llama_folder, mixture_folder):
    """Every metric and the whole state, with what else changes from rollout to rollout: the order of the rows, the KL
    coefficient, the learning rate."""
    ranks, replicas, args = WAYS[way]
    group = group_of(args["train_backend"], ranks)
    folder = mixture_folder if args.keys() & {*EP2, "moe_aux_loss_coeff"} else llama_folder
    args = {**args, "hf_checkpoint": folder, "lr": 3e-3, "kl_loss_coef": 0.01, "weight_decay": 0.1,
            "lr_decay_style": "linear", "num_rollout": 8, "num_steps_per_rollout": 2, "shuffle_minibatches": True,
            "advantage_estimator": "reinforce_plus_plus", "kl_coef": 0.1, "kl_target": 1e-3,
            "kl_horizon": 20}  # fmt: skip
    rollouts = [llamas_rollout(prompts=5, samples=3, seed=seed) for seed in range(5)]
    begin(group, args, with_ref=True)
    expected = [learning(group, step, rows) for step, rows in enumerate(rollouts)]
    assert len({metrics["kl_coef"] for metrics in expected}) == 5
    weights = states(group)
    begin(group, {**args, "peer_snapshot_interval": 1}, with_ref=True)
    step, found, victims = 0, {}, {2: ranks - 1, 4: 0}
    while step < 5:
        found[step] = learning(group, step, rollouts[step])
        step += 1
        if step in victims:
            kill(group, victims.pop(step))
            (step, *_) = group.replace()
            assert step in (len(found) - 1, len(found)), "the last snapshot may have been on its way"
    assert [found[step] for step in range(5)] == expected
    assert same(states(group), weights)
    sizes = group.worker_group.execute_with_func_generator(lambda worker: len(worker._peers._replicas))
    assert sizes == [replicas] * ranks, "replicas are bit-identical, and send nothing"


@rare
def test_without_complete_snapshots_all_ranks_begin_at_the_checkpoint(
    fsdp_groups, llama_folder, data, tmp_path, caplog
):
    """A rank and its buddy die together: the snapshots of neither are left."""
    group = fsdp_groups(2)
    begin(group, {"hf_checkpoint": llama_folder, "peer_snapshot_interval": 1, "save": str(tmp_path), "lr": 3e-3})
    learn(group, 0, data)
    group.save_model(0)
    saved_state = states(group)
    learn(group, 1, data)
    kill(group, 0, 1)
    assert group.replace() == [1, 1]
    assert "do not have a complete set of snapshots" in caplog.text
    assert same(states(group), saved_state)
    # The new ranks have snapshots again.
    kill(group, 1)
    assert group.replace() == [1, 1]
    assert same(states(group), saved_state)
    assert group.replace() is None


@rare
def test_weights_of_older_versions_are_restored_too(fsdp_groups, llama_folder, data):
    group = fsdp_groups(2)
    begin(group, {"hf_checkpoint": llama_folder, "peer_snapshot_interval": 1, "keep_old_actor": True, "lr": 3e-3})
    learn(group, 0, data)
    group.worker_group.execute_with_func_generator(lambda worker: worker._keep_version(1))
    learn(group, 1, data)
    expected = states(group)
    wait_for_snapshots(group)
    kill(group, 0)
    assert group.replace() == [2, 2]
    assert same(states(group), expected)
    versions = group.worker_group.execute_with_func_generator(lambda worker: worker._versions)
    assert versions == [{"rollout_actor": [1], "old_actor": [0]}] * 2


def test_frozen_parameters_are_restored_too(fsdp_groups, tmp_path):
    """The expert bias of this model is a parameter that is not trained."""
    model = model_of(config_of("ernie4_5_moe"))
    frozen = {name: parameter for name, parameter in model.named_parameters() if not parameter.requires_grad}
    for parameter in frozen.values():
        parameter.data.normal_()
    group = fsdp_groups(2)
    begin(group, {"hf_checkpoint": saved(model, tmp_path), "peer_snapshot_interval": 1}, with_ref=True)
    wait_for_snapshots(group)
    expected = whole_weights(group)
    assert frozen and frozen.keys() <= expected.keys()
    kill(group, 1)
    assert group.replace() == [0, 0]
    assert distance(whole_weights(group), expected) == 0.0


@rare
def test_ranks_of_which_one_could_not_take_a_snapshot_agree_on_the_next(fsdp_groups, llama_folder, data):
    group = fsdp_groups(2)
    begin(group, {"hf_checkpoint": llama_folder, "peer_snapshot_interval": 1, "lr": 3e-3})
    learn(group, 0, data)
    group.worker_group.execute_with_func_generator(fail_to_take_once)
    with pytest.raises(MemoryError, match="no room"):
        learn(group, 1, data)
    learn(group, 2, data)
    wait_for_snapshots(group)
    expected = states(group)
    kill(group, 0)
    assert group.replace() == [3, 3]
    assert same(states(group), expected)


def fail_to_take_once(worker):
    take = peer_snapshots.take_snapshot

    def fail(*args):
        peer_snapshots.take_snapshot = take
        raise MemoryError("no room")

    if worker.rank == 1:
        peer_snapshots.take_snapshot = fail


def test_a_rollout_that_failed_halfway_is_not_continued(fsdp_groups, llama_folder, data):
    """Two of its four steps are taken: those weights are of no rollout, neither of the one before nor of this one."""
    group = fsdp_groups(2)
    begin(group, {"hf_checkpoint": llama_folder, "peer_snapshot_interval": 1, "num_steps_per_rollout": 4})
    learn(group, 0, data)
    wait_for_snapshots(group)
    group.worker_group.execute_with_func_generator(fail_in_third_step)
    with pytest.raises(ZeroDivisionError, match="the third step"):
        learn(group, 1, data)
    assert group.worker_group.execute_with_func_generator(lambda worker: worker.optimizer_step) == [6, 6]
    assert common_position(group.worker_group, 60) is None
    group.worker_group.take_peer_snapshot()  # as `grow` does: takes none of this state
    kill(group, 0)
    assert group.replace() == [1, 1]
    step, _ = common_position(group.worker_group, 60)  # and the weight version, to which other tests have added
    assert step == 1


def fail_in_third_step(worker):
    train_step, steps = worker.model.train_step, []

    def failing(*args, **options):
        steps.append(None)
        if len(steps) == 3:
            raise ZeroDivisionError("the third step")
        return train_step(*args, **options)

    worker.model.train_step = failing
