"""Weights from a train group to rollout workers, end to end: the log-probs of sampled tokens match the trainer's.

The other tests of weight sync (test_weight_sync.py) compare tensors; here both sides are the real ones, in processes.
"""

import hashlib
import itertools
import os
import time

import pytest
import ray
import torch
from devices import ON_DEVICE, need
from reference import ReferenceGRPO
from rollout_helpers import plain_model
from tensordict import TensorDict
from train_helpers import begin, learn, saved
from transformers import LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config, Qwen3MoeConfig

from single_controller import Dispatch, RayClassWithInitArgs, RayWorkerGroup, WorkerDiedError, WorkerError, register
from workers.rollout.engines.hf_engine import HFEngine
from workers.rollout.engines.rollout_engine import SamplingParams
from workers.rollout.rollout_errors import WeightVersionError
from workers.rollout.rollout_manager import RolloutManager
from workers.rollout.rollout_worker import RolloutWorker
from workers.train.train_group import RayTrainGroup

pytestmark = pytest.mark.timeout(180)

SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2, "vocab_size": 32, "max_position_embeddings": 64, "bos_token_id": None,
         "eos_token_id": None}  # fmt: skip
CONFIGS = {
    "untied": LlamaConfig(**SIZES, tie_word_embeddings=False),
    "tied": Qwen2Config(**SIZES, tie_word_embeddings=True),
}
OTHERS = {
    "mixture": Qwen3MoeConfig(**SIZES, head_dim=16, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24,
                              mlp_only_layers=[0], norm_topk_prob=True, tie_word_embeddings=True),
    "mistral": MistralConfig(**SIZES, head_dim=16, sliding_window=4),
    "qwen3": Qwen3Config(**SIZES, head_dim=16, rope_parameters={
        "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 8}),
}  # fmt: skip
"""Further model types, each with few layouts."""
LAYOUTS = {"fsdp": {}, "tp2": {"tensor_model_parallel_size": 2}, "pp2": {"pipeline_model_parallel_size": 2}}
OF_EXPERTS = {
    "ep2": {"expert_model_parallel_size": 2},
    "tp2 ep2": {"tensor_model_parallel_size": 2, "expert_model_parallel_size": 2, "expert_tensor_parallel_size": 1},
    "etp2": {"tensor_model_parallel_size": 2},
}
TIES = list(CONFIGS)
TRANSPORTS = ["store", "group", "disk"]
PROMPTS = [[5, 9, 2], [7], [3, 3, 8, 1, 30, 12], [11, 4], [1, 2, 3, 4], [0, 31]]
HOW = SamplingParams(8, temperature=0.7, stop_token_ids=(6, 17))


class Fragile(RolloutWorker):
    """Its engine can be replaced for another model, and its process exits during an update when told to."""

    fatal = None

    @register(Dispatch.ONE_TO_ALL, replay=True)
    def generate_with(self, config):
        self.engine = HFEngine(config, seed=99)
        self.weight_version = 0

    @register(Dispatch.ONE_TO_ALL)
    def die_at(self, name, rank):
        if rank == self.rank:
            self.fatal = name

    @register(Dispatch.ONE_TO_ALL)
    def held(self):
        """What identifies the engine's weights."""
        whole = hashlib.sha256()
        for name, tensor in sorted(self.engine.model.state_dict().items()):
            whole.update(name.encode() + tensor.cpu().numpy().tobytes())
        return whole.hexdigest()

    def take(self, key, payload):
        if self.fatal in [piece.name for piece in payload.pieces]:
            os._exit(1)
        super().take(key, payload)


def reward(prompt, completion):
    return float(completion.count(3))


def sharp_model(config):
    """The trainers' model before any training."""
    with torch.random.fork_rng():
        return plain_model(config, seed=1)


@pytest.fixture(scope="module")
def rollout(train_pool):
    """Two rollout workers whose weights differ from every trainer's."""
    need(4)
    made = RayClassWithInitArgs(Fragile, HFEngine, CONFIGS["untied"], seed=99)
    with RayWorkerGroup(train_pool[2:4], made, name_prefix="rollout_", collectives=False) as group:
        yield group


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """The trainers' model folders, by whether the embeddings are tied."""
    every = {**CONFIGS, **OTHERS}
    return {tie: saved(sharp_model(config), tmp_path_factory.mktemp(tie)) for tie, config in every.items()}


@pytest.fixture
def trainer(group_of, folders, tmp_path):
    """A group: ``trainer(layout, tie, ranks=2, **args)``."""

    def of(layout, tie="untied", ranks=2, **args) -> RayTrainGroup:
        if ON_DEVICE and args.get("update_weights_transport") == "device":
            pytest.skip("the rollout workers are on other devices; see tests/simdevice/on_device/test_two_ranks.py")
        group = group_of("fsdp" if layout == "fsdp" else "megatron", ranks)
        group.weight_version = group._tried = 0
        sizes = {**LAYOUTS, **OF_EXPERTS}[layout]
        given = {"hf_checkpoint": folders[tie], "lr": 1e-2, "temperature": HOW.temperature, **sizes, **args}
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
    """The largest difference between the rollout workers' log-probs of the sampled tokens and the trainer's."""
    counts = data["loss_mask"] != 0
    found = (train.worker_group.compute_log_prob(data) - data["rollout_log_probs"])[counts].abs()
    assert len(found) > 2 * len(PROMPTS)
    return found.max().item()


def synthetic_rollout():
    """Synthetic data to train on."""
    rows = torch.randint(0, 32, (8, 10), generator=torch.Generator().manual_seed(0))
    completions = torch.ones_like(rows)
    completions[:, :3] = 0
    data = {"input_ids": rows, "attention_mask": torch.ones_like(rows), "loss_mask": completions}
    return TensorDict({**data, "rewards": rows.float().mean(1), "group_ids": torch.arange(8) // 4}, batch_size=[8])


def change_weights(train, step):
    """Change the trainer's weights, so that they match no other copy."""
    learn(train, step, synthetic_rollout())


def combinations():
    """Every layout with every transport, with one kind of output layer: HUNDRED has them with the other. Each backend
    with two transports in `make test`: test_weight_sync.py compares the tensors that each transport brings."""
    other = pytest.mark.full("weights of each backend over each transport")
    for (row, layout), (column, transport) in itertools.product(enumerate(LAYOUTS), enumerate(TRANSPORTS)):
        tie = TIES[(row + column) % 2]
        short = (layout, transport) == ("fsdp", "disk")
        yield pytest.param(layout, tie, transport, marks=() if short else other)
    for layout in LAYOUTS:
        again = pytest.mark.full("memory of a device from Megatron")
        yield pytest.param(layout, "tied", "device", marks=() if layout == "fsdp" else again)
    experts = pytest.mark.full("weights of experts on Megatron over each transport")
    for layout, transport in (("ep2", "store"), ("ep2", "device"), ("tp2 ep2", "group"), ("etp2", "disk")):
        yield pytest.param(layout, "mixture", transport, marks=experts)
    yield "tp2", "qwen3", "store"
    yield "pp2", "mistral", "group"


@pytest.mark.parametrize(("layout", "tie", "transport"), combinations())
def test_rollout_log_probs_match_the_trainers(trainer, rollout, layout, tie, transport):
    train = trainer(layout, tie, update_weights_transport=transport, update_weights_bucket_bytes=6000)
    config = {**CONFIGS, **OTHERS}[tie]
    rollout.generate_with(config)
    manager = generating(rollout, train)
    before = manager.generate(PROMPTS)
    assert before["max_weight_versions"].tolist() == [0] * 2 * len(PROMPTS)
    assert difference(train, before) > 0.1
    assert train.update_weights() == 1
    data = manager.generate(PROMPTS)
    assert data["max_weight_versions"].tolist() == [1] * 2 * len(PROMPTS)
    assert difference(train, data) < 1e-4
    plain = ReferenceGRPO(sharp_model(config), temperature=HOW.temperature)
    expected = plain.log_probs(data) * (data["loss_mask"] != 0)
    torch.testing.assert_close(data["rollout_log_probs"], expected, atol=1e-4, rtol=0)
    learn(train, 0, data)
    assert difference(train, data) > 1e-2
    assert train.update_weights(verify="full") == 2
    assert train.last_sync().proved == "engine"
    data = manager.generate(PROMPTS, rollout_id=1)
    assert data["max_weight_versions"].tolist() == [2] * 2 * len(PROMPTS)
    assert difference(train, data) < 1e-4


@pytest.mark.parametrize("transport", ["store", "device"])
def test_four_ranks_send_to_two(trainer, rollout, transport):
    """More ranks than receivers, and pairs of ranks hold the same tensors: each tensor arrives once."""
    rollout.generate_with(CONFIGS["untied"])
    train = trainer("tp2", ranks=4, update_weights_transport=transport)
    manager = generating(rollout, train)
    change_weights(train, 0)
    train.update_weights()
    assert difference(train, manager.generate(PROMPTS)) < 1e-4


HUNDRED = [
    (layout, TIES[(row + column + 1) % 2], how)
    for (row, layout), (column, how) in itertools.product(enumerate(LAYOUTS), enumerate([*TRANSPORTS, "delta"]))
]


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("layout", "tie", "how", "updates"),
    [
        pytest.param("pp2", "tied", "delta", 4),
        *(
            pytest.param(*one, 100, marks=pytest.mark.full("a hundred updates with all layouts and transports"))
            for one in HUNDRED
        ),
    ],
)
def test_workers_hold_what_the_trainer_has_after_each_of_many_updates(trainer, rollout, layout, tie, how, updates):
    ranks = 4 if layout == "fsdp" and how in ("store", "group") else 2  # else four do what two do
    rollout.generate_with(CONFIGS[tie])
    by = {"update_weights_delta": True} if how == "delta" else {"update_weights_transport": how}
    train = trainer(layout, tie, ranks, lr=1e-3, update_weights_bucket_bytes=6000, **by)
    manager = generating(rollout, train)
    seen = set()
    for version in range(1, updates + 1):
        change_weights(train, version)
        assert train.update_weights(verify="full") == version
        report, held = train.last_sync(), rollout.held()
        assert (report.version, report.proved, report.receivers) == (version, "engine", 2)
        assert report.patched == (2 if how == "delta" and version > 1 else 0)
        assert held[0] == held[1] and held[0] not in seen
        seen.add(held[0])
    data = manager.generate(PROMPTS)
    assert set(data["weight_fingerprints"][data["weight_versions"] >= 0].tolist()) == {report.fingerprint}
    assert difference(train, data) < 1e-4


def test_running_rollout_keeps_its_weight_version(trainer, rollout):
    """With keep_old_actor, training uses the log-probs of that version."""
    train = trainer("pp2", keep_old_actor=True)
    rollout.generate_with(CONFIGS["untied"])
    manager = generating(rollout, train)
    train.update_weights()
    change_weights(train, 0)
    under_way = manager.generate_async(PROMPTS, rollout_id=1)
    train.update_weights()
    data = under_way.result()
    assert set(data["max_weight_versions"].tolist()) == {1}
    assert difference(train, data) > 1e-2
    assert difference(train, manager.generate(PROMPTS, rollout_id=2)) < 1e-4
    counts = data["loss_mask"] != 0
    ratio = (train.worker_group.compute_log_prob(data) - data["rollout_log_probs"]).exp()[counts].mean().item()
    assert abs(ratio - 1) > 1e-3
    assert learn(train, 1, data)["ratio"] == pytest.approx(ratio, abs=1e-4)


def test_restarted_workers_are_stale_until_updated(trainer, rollout):
    train = trainer("tp2")
    rollout.generate_with(CONFIGS["untied"])
    manager = generating(rollout, train)
    for _ in range(2):
        train.update_weights()
    change_weights(train, 0)  # weights that the rollout workers do not have yet
    rollout.restart()
    assert rollout.current_weight_version() == [0, 0]
    refresh, manager.refresh = manager.refresh, None
    with pytest.raises(WeightVersionError, match=r"weight version 2, but rank 0 has version 0") as caught:
        manager.generate(PROMPTS)
    assert (caught.value.expected, caught.value.versions) == (2, {0: 0, 1: 0})
    manager.refresh = refresh
    data = manager.generate(PROMPTS)
    assert set(data["max_weight_versions"].tolist()) == {3} and train.weight_version == 3
    assert difference(train, data) < 1e-4


def test_rollout_manager_as_ray_actor(trainer, rollout):
    """As in slime. The actor is told which version to expect, and its workers are found."""
    train = trainer("fsdp")
    rollout.generate_with(CONFIGS["untied"])
    manager = ray.remote(num_cpus=0)(RolloutManager).remote(rollout, HOW, reward, samples_per_prompt=2, seed=4)
    train.set_rollout_manager(manager)
    change_weights(train, 0)
    assert train.last_sync() is None
    with pytest.raises(ValueError, match="use 'fingerprint', 'full' or 'none'"):
        train.update_weights(verify="all")
    assert train.update_weights(verify="none") == 1
    assert (train.last_sync().version, train.last_sync().proved, train.last_sync().fingerprint) == (1, None, None)
    data = ray.get(manager.generate.remote(PROMPTS))
    assert data["weight_fingerprints"].unique().tolist() == [-1]
    assert set(data["max_weight_versions"].tolist()) == {1}
    assert difference(train, data) < 1e-4
    rollout.set_weight_version(7)
    with pytest.raises(WeightVersionError, match=r"weight version 1, but rank 0 has version 7"):
        ray.get(manager.generate.remote(PROMPTS))
    assert train.update_weights() == 2
    assert set(ray.get(manager.generate.remote(PROMPTS))["max_weight_versions"].tolist()) == {2}


@pytest.mark.full("deaths in an update of models")
@pytest.mark.parametrize(
    ("layout", "transport", "told"),
    [
        ("fsdp", "group", False),
        ("pp2", "store", True),
        ("tp2", "device", True),
    ],
)
def test_worker_death_during_an_update_is_an_error_and_the_next_update_works(trainer, rollout, layout, transport, told):
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
    assert train.worker_group.broken is None  # the train ranks are not affected
    with pytest.raises(WorkerDiedError):
        manager.generate(PROMPTS)
    rollout.restart(ranks=[1])
    assert rollout.current_weight_version() == [1, 0]  # the survivor has kept the version before
    change_weights(train, 0)
    if told:
        assert train.update_weights() == 3  # 2 was the number of the failed one
        manager.refresh = None
    data = manager.generate(PROMPTS)  # if not told, the manager requests the update itself
    assert train.weight_version == 3 and set(data["max_weight_versions"].tolist()) == {3}
    assert difference(train, data) < 1e-4
