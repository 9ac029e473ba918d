"""The asynchronous loop with real trainers: FSDP on two ranks, two rollout workers, weights by the object store."""

import dataclasses
import itertools
import os
import random
import signal
from contextlib import nullcontext
from functools import partial

import depth
import pytest
import torch
from devices import need
from rollout_helpers import LLAMA, Toy
from train_helpers import begin, distance, learn, whole_weights

from single_controller import RayClassWithInitArgs, RayWorkerGroup, SingleControllerError
from workers import HFEngine, RolloutManager, RolloutStream, SampleBuffer, SamplingParams, group_numbers

pytestmark = pytest.mark.timeout(240)

B, SAMPLES = 4, 2
HOW = SamplingParams(6, temperature=0.9, stop_token_ids=(6, 17))
MODEL = {"model_type": "llama", **{name: LLAMA.to_dict()[name] for name in (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "vocab_size",
    "max_position_embeddings",
)}}  # fmt: skip
ARGS = {"hf_config": MODEL, "lr": 1e-2, "temperature": HOW.temperature, "seed": 3}


def prompts(rollout_id):
    draw = random.Random(rollout_id)
    return [[draw.randrange(32) for _ in range(draw.randint(1, 4))] for _ in range(B)]


def reward(prompt_ids, completion_ids):
    return sum(token < 12 for token in completion_ids) / len(completion_ids) + len(completion_ids) / 100


@pytest.fixture(scope="module")
def rollout(train_pool):
    """Each request is generated alone, so that no bit of it depends on what else is generated."""
    need(4)
    made = RayClassWithInitArgs(Toy, HFEngine, LLAMA, max_batch_size=1)
    with RayWorkerGroup(train_pool[2:4], made, name_prefix="rollout_", collectives=False) as group:
        yield group


def trained(group, rollout, rollouts, *, load=None, save=None, stop=None, mode="wait", kill=None, **policy):
    """Train, synchronously without a ``policy``. Returns the weights, the data of each rollout, and the stream's state.

    Args:
        save: a folder for a checkpoint, and after which rollout to write it.
        stop: the first rollout that is not trained.
        kill: before which rollout a rollout worker is killed.
    """
    group.weight_version = 0
    (start, _) = begin(group, {**ARGS, "load": load, "save": save and save[0]})
    manager = RolloutManager(rollout, HOW, reward, samples_per_prompt=SAMPLES, seed=5)
    group.set_rollout_manager(manager)
    stream = nullcontext()
    if policy:
        stream = RolloutStream(manager, prompts, SampleBuffer(B, num_batches=rollouts, **policy), update_mode=mode)
    data = {}
    with stream:
        if policy and load:
            stream.load_state_dict(group.load_driver_state())
        for step in range(start, rollouts if stop is None else stop):
            group.update_weights()
            if step == kill:
                os.kill(rollout.execute_all_sync("pid_of_process")[0], signal.SIGKILL)
            data[step] = stream.take(60) if policy else manager.generate(prompts(step), rollout_id=step)
            learn(group, step, data[step])
            if save and step == save[1]:
                group.save_model(step, driver_state=stream.state_dict() if policy else None)
    group.set_rollout_manager(None)
    return whole_weights(group), data


ROLLOUTS = 20 if depth.full else 3


@pytest.fixture(scope="module")
def asynchronous(fsdp_groups, rollout):
    """A run without staleness."""
    return trained(fsdp_groups(2), rollout, ROLLOUTS, max_staleness=0)


def test_without_staleness_it_equals_the_synchronous_run_bit_for_bit(fsdp_groups, rollout, asynchronous):
    synchronous, expected = trained(fsdp_groups(2), rollout, ROLLOUTS)
    weights, found = asynchronous
    assert distance(weights, synchronous) == 0.0
    assert distance(weights, trained(fsdp_groups(2), rollout, 0)[0]) > 1e-2
    for step in range(ROLLOUTS):
        for name in expected[step].keys() - {"group_ids"}:
            assert torch.equal(found[step][name], expected[step][name]), (step, name)


def test_resumed_run_goes_on_exactly(fsdp_groups, rollout, asynchronous, tmp_path):
    group, (whole, expected) = fsdp_groups(2), asynchronous
    trained(group, rollout, ROLLOUTS, max_staleness=0, save=(str(tmp_path), 0), stop=2)  # one after it is lost
    weights, found = trained(group, rollout, ROLLOUTS, max_staleness=0, load=str(tmp_path))
    assert list(found) == list(range(1, ROLLOUTS)) and distance(weights, whole) == 0.0
    assert all(torch.equal(found[step]["weight_versions"], expected[step]["weight_versions"]) for step in found)


@pytest.mark.parametrize(
    "mode", [pytest.param("wait", marks=pytest.mark.full("asynchronous runs in the other update mode")), "interrupt"]
)
def test_stale_run_trains_each_prompt_once_though_a_worker_dies_and_it_resumes(fsdp_groups, rollout, tmp_path, mode):
    group, policy = fsdp_groups(2), {"max_staleness": 2, "order": "window", "mode": mode}
    _, before = trained(group, rollout, 6, save=(str(tmp_path), 3), stop=5, kill=2, **policy)
    _, after = trained(group, rollout, 6, load=str(tmp_path), **policy)
    assert list(before) == list(range(5)) and list(after) == [4, 5]
    rows = [row for data in (before, after) for step, row in data.items() if data is after or step < 4]
    assert sorted(number for row in rows for number in group_numbers(row["group_ids"]).tolist()) == sorted(
        list(range(6 * B)) * SAMPLES
    )
    for step, row in {**before, **after}.items():
        assert row["max_weight_versions"].max() <= step + 1 and row["min_weight_versions"].min() >= step - 1


@pytest.mark.full("asynchronous runs whose trainer is killed")
def test_rollout_workers_get_weights_if_the_trainer_died_while_it_sent_them(fsdp_groups, rollout):
    """Also if it goes back to the rollout of the update before: they have given up those weights."""
    group = fsdp_groups(2)
    group.weight_version = 0
    begin(group, {**ARGS, "peer_snapshot_interval": 2})
    manager = RolloutManager(rollout, HOW, reward, samples_per_prompt=SAMPLES, seed=5)
    group.set_rollout_manager(manager)
    group.update_weights()
    expected = manager.generate(prompts(0), rollout_id=0)
    learn(group, 0, expected)
    group.worker_group.execute_with_func_generator(die_in_update)
    with pytest.raises(SingleControllerError):
        group.update_weights()
    assert group.replace() == [0, 0]
    again = manager.generate(prompts(0), rollout_id=0)
    assert torch.equal(again["input_ids"], expected["input_ids"])
    assert again["max_weight_versions"].unique().tolist() == [3] == [group.weight_version], "2 are other weights"
    group.set_rollout_manager(None)


def die_in_update(worker):
    """Rank 0 dies when it reads its second shard, as something has been sent."""
    reads = itertools.count()

    def read(shard):
        if next(reads):
            os.kill(os.getpid(), signal.SIGKILL)
        return shard.read()

    def shards():
        return [dataclasses.replace(shard, read=partial(read, shard)) for shard in hf_shards()]

    if worker.rank == 0:
        hf_shards, worker.model.hf_shards = worker.model.hf_shards, shards
