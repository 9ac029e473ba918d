"""Weights from a train group to rollout workers, end to end: what was sampled has the trainer's probabilities.

The other tests of weight sync (test_weight_sync.py) look at tensors; here both sides are the real ones, on processes.
"""

import itertools
import os
import time

import pytest
import ray
import torch
from reference import ReferenceGRPO
from rollout_kit import plain_model
from tensordict import TensorDict
from train_kit import begin, learn, saved
from transformers import LlamaConfig, Qwen2Config

from single_controller import Dispatch, RayClassWithInitArgs, RayWorkerGroup, WorkerDiedError, WorkerError, register
from workers.rollout.engine import Sampling
from workers.rollout.errors import WeightVersionError
from workers.rollout.hf_engine import HFEngine
from workers.rollout.manager import RolloutManager
from workers.rollout.worker import RolloutWorker
from workers.train.group import RayTrainGroup

pytestmark = pytest.mark.timeout(180)

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 32,
    "max_position_embeddings": 64,
    "bos_token_id": None,
    "eos_token_id": None,
}
CONFIGS = {
    "untied": LlamaConfig(**SIZES, tie_word_embeddings=False),
    "tied": Qwen2Config(**SIZES, tie_word_embeddings=True),
}
LAYOUTS = {
    "fsdp": {},
    "tp2": {"tensor_model_parallel_size": 2},
    "pp2": {"pipeline_model_parallel_size": 2},
}
PROMPTS = [[5, 9, 2], [7], [3, 3, 8, 1, 30, 12], [11, 4], [1, 2, 3, 4], [0, 31]]
HOW = Sampling(8, temperature=0.7, stop_token_ids=(6, 17))


class Fragile(RolloutWorker):
    """Its engine can be made anew for another model, and its process ends amid an update where it is told to."""

    fatal = None

    @register(Dispatch.ONE_TO_ALL, replay=True)
    def generate_with(self, config):
        self.engine = HFEngine(config, seed=99)
        self.weight_version = 0

    @register(Dispatch.ONE_TO_ALL)
    def die_at(self, name, rank):
        if rank == self.rank:
            self.fatal = name

    def load_bucket(self, key, bucket):
        if self.fatal in [name for name, _ in bucket]:
            os._exit(1)
        super().load_bucket(key, bucket)


def reward(prompt, answer):
    return float(answer.count(3))


def sharp_model(config):
    """The trainers' model, before they learn."""
    with torch.random.fork_rng():
        return plain_model(config, seed=1)


@pytest.fixture(scope="module")
def rollout(train_pool):
    """Two rollout workers, whose weights are others than any trainer's."""
    made = RayClassWithInitArgs(Fragile, HFEngine, CONFIGS["untied"], seed=99)
    with RayWorkerGroup(train_pool[2:4], made, name_prefix="rollout_", collectives=False) as group:
        yield group


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """The trainers' models, by tie."""
    return {tie: saved(sharp_model(config), tmp_path_factory.mktemp(tie)) for tie, config in CONFIGS.items()}


@pytest.fixture
def trainer(fsdp_groups, megatron_groups, folders, tmp_path):
    """A group of two ranks, by layout and more arguments."""

    def of(layout, tie="untied", **args) -> RayTrainGroup:
        group = (fsdp_groups if layout == "fsdp" else megatron_groups)(2)
        group.weight_version = 0
        given = {"hf_checkpoint": folders[tie], "lr": 1e-2, "temperature": HOW.temperature, **LAYOUTS[layout], **args}
        if given.get("update_weights_transport") == "disk":
            given["update_weights_disk_dir"] = str(tmp_path / "sync")
        begin(group, given)
        return group

    return of


def generating(rollout, train=None):
    manager = RolloutManager(rollout, HOW, reward, samples_per_prompt=2, seed=4)
    if train is not None:
        train.set_rollout_manager(manager)
    return manager


def difference(train, data):
    """Between what the rollout workers say of the tokens that they sampled, and what the trainer says."""
    counts = data["loss_mask"] != 0
    found = (train.worker_group.compute_log_prob(data) - data["rollout_log_probs"])[counts].abs()
    assert len(found) > 2 * len(PROMPTS)
    return found.max().item()


def something():
    """To learn from, without a rollout."""
    rows = torch.randint(0, 32, (8, 10), generator=torch.Generator().manual_seed(0))
    answers = torch.ones_like(rows)
    answers[:, :3] = 0
    data = {"input_ids": rows, "attention_mask": torch.ones_like(rows), "loss_mask": answers}
    return TensorDict({**data, "rewards": rows.float().mean(1), "group_ids": torch.arange(8) // 4}, batch_size=[8])


def learn_something(train, step):
    """Change the trainer's weights, so that they are nobody else's."""
    learn(train, step, something())


@pytest.mark.parametrize(
    ("layout", "tie", "transport"),
    [
        *itertools.product(LAYOUTS, CONFIGS, ["store", "group", "disk"]),
        *itertools.product(LAYOUTS, ["tied"], ["device"]),
    ],
)
def test_rollouts_have_the_trainers_probabilities(trainer, rollout, folders, layout, tie, transport):
    train = trainer(layout, tie, update_weights_transport=transport, update_weights_bucket_bytes=6000)
    rollout.generate_with(CONFIGS[tie])
    manager = generating(rollout, train)
    before = manager.generate(PROMPTS)
    assert before["weight_versions"].tolist() == [0] * 2 * len(PROMPTS)
    assert difference(train, before) > 0.1
    assert train.update_weights() == 1
    data = manager.generate(PROMPTS)
    assert data["weight_versions"].tolist() == [1] * 2 * len(PROMPTS)
    assert difference(train, data) < 1e-4
    plain = ReferenceGRPO(sharp_model(CONFIGS[tie]), temperature=HOW.temperature)
    expected = plain.log_probs(data) * (data["loss_mask"] != 0)
    torch.testing.assert_close(data["rollout_log_probs"], expected, atol=1e-4, rtol=0)
    learn(train, 0, data)
    assert difference(train, data) > 1e-2
    assert train.update_weights() == 2
    data = manager.generate(PROMPTS, rollout_id=1)
    assert data["weight_versions"].tolist() == [2] * 2 * len(PROMPTS)
    assert difference(train, data) < 1e-4


@pytest.mark.parametrize("transport", ["store", "device"])
def test_four_ranks_send_to_two(megatron_groups, rollout, folders, transport):
    """More ranks than receivers, and pairs of ranks that hold the same: each tensor comes once."""
    rollout.generate_with(CONFIGS["untied"])
    train = megatron_groups(4)
    begin(train, {"hf_checkpoint": folders["untied"], "temperature": HOW.temperature, "lr": 1e-2,
                  "update_weights_transport": transport, **LAYOUTS["tp2"]})  # fmt: skip
    manager = generating(rollout, train)
    learn_something(train, 0)
    train.update_weights()
    assert difference(train, manager.generate(PROMPTS)) < 1e-4


def test_a_rollout_that_is_under_way_keeps_the_weights_it_began_with(trainer, rollout):
    """And is learnt from as what it is, where the old actor is kept."""
    train = trainer("pp2", keep_old_actor=True)
    rollout.generate_with(CONFIGS["untied"])
    manager = generating(rollout, train)
    train.update_weights()
    learn_something(train, 0)
    under_way = manager.generate_async(PROMPTS, rollout_id=1)
    train.update_weights()
    data = under_way.result()
    assert set(data["weight_versions"].tolist()) == {1}
    assert difference(train, data) > 1e-2
    assert difference(train, manager.generate(PROMPTS, rollout_id=2)) < 1e-4
    counts = data["loss_mask"] != 0
    ratio = (train.worker_group.compute_log_prob(data) - data["rollout_log_probs"]).exp()[counts].mean().item()
    assert abs(ratio - 1) > 1e-3
    assert learn(train, 1, data)["ratio"] == pytest.approx(ratio, abs=1e-4)


def test_restarted_workers_are_stale_and_are_brought_up_to_date(trainer, rollout):
    train = trainer("tp2")
    rollout.generate_with(CONFIGS["untied"])
    manager = generating(rollout, train)
    for _ in range(2):
        train.update_weights()
    learn_something(train, 0)  # weights that the rollout workers do not have yet
    rollout.restart()
    assert rollout.current_weight_version() == [0, 0]
    refresh, manager.refresh = manager.refresh, None
    with pytest.raises(WeightVersionError, match=r"weights of version 2, but rank 0 has version 0") as caught:
        manager.generate(PROMPTS)
    assert (caught.value.expected, caught.value.versions) == (2, {0: 0, 1: 0})
    manager.refresh = refresh
    data = manager.generate(PROMPTS)
    assert set(data["weight_versions"].tolist()) == {3} and train.weight_version == 3
    assert difference(train, data) < 1e-4


def test_a_manager_that_is_a_ray_actor(trainer, rollout):
    """As slime has it. It is told which version to expect, and its workers are found."""
    train = trainer("fsdp")
    rollout.generate_with(CONFIGS["untied"])
    manager = ray.remote(num_cpus=0)(RolloutManager).remote(rollout, HOW, reward, samples_per_prompt=2, seed=4)
    train.set_rollout_manager(manager)
    learn_something(train, 0)
    assert train.update_weights() == 1
    data = ray.get(manager.generate.remote(PROMPTS))
    assert set(data["weight_versions"].tolist()) == {1}
    assert difference(train, data) < 1e-4
    rollout.set_weight_version(7)
    with pytest.raises(WeightVersionError, match=r"weights of version 1, but rank 0 has version 7"):
        ray.get(manager.generate.remote(PROMPTS))
    assert train.update_weights() == 2
    assert set(ray.get(manager.generate.remote(PROMPTS))["weight_versions"].tolist()) == {2}


@pytest.mark.parametrize(
    ("layout", "transport", "told"), [("fsdp", "group", True), ("pp2", "store", False), ("tp2", "device", True)]
)
def test_a_worker_that_dies_amid_an_update_is_an_error_soon_and_the_next_update_works(
    trainer, rollout, layout, transport, told
):
    train = trainer(layout, update_weights_transport=transport, update_weights_bucket_bytes=6000)
    rollout.generate_with(CONFIGS["untied"])
    manager = generating(rollout, train)
    train.update_weights()
    rollout.die_at("model.norm.weight", 1)
    begun = time.monotonic()
    with pytest.raises(WorkerError, match="rank 1 died") as caught:
        train.update_weights()
    assert time.monotonic() - begun < 10
    assert caught.value.cause_type.endswith("WeightSyncError")
    assert train.weight_version == 1
    assert train.worker_group.broken is None  # the train ranks are well
    with pytest.raises(WorkerDiedError):
        manager.generate(PROMPTS)
    rollout.restart(ranks=[1])
    assert rollout.current_weight_version() == [None, 0]
    learn_something(train, 0)
    if told:
        assert train.update_weights() == 2
        manager.refresh = None
    data = manager.generate(PROMPTS)  # or else the manager asks for weights: nobody has the whole
    assert train.weight_version == 2 and set(data["weight_versions"].tolist()) == {2}
    assert difference(train, data) < 1e-4
