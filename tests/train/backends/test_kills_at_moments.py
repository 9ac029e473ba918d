"""Train ranks that are killed at a given moment: in a save, while a snapshot is sent, in an update, beside a critic."""

import json
import os
import signal
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import ray
from plain_train_workers import Manager
from ray.exceptions import RayError
from reference import small_llama
from test_replace_ranks import kill, same, states, wait_for_snapshots
from train_helpers import begin, learn, rollout
from waits import wait_until

from single_controller import SingleControllerError, WorkerError
from workers.rollout.stream.sample_buffer import SampleBuffer
from workers.train.checkpoints import CheckpointError
from workers.train.train_group import RayTrainGroup

pytestmark = [pytest.mark.timeout(180), pytest.mark.full("trainers killed at rare moments")]

ARGS = {"peer_snapshot_interval": 1, "lr": 3e-3}


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def die_in_save(worker, victim, background):
    """Kill a rank while it writes its shard; or rank 0, when all shards are written and the checkpoint is not noted."""
    from torch.distributed.checkpoint import FileSystemWriter

    def write(writer, *args):
        (Path(writer.path) / "half").write_text("half")
        time.sleep(0.5 if background else 0)  # save_model() returns
        die()

    def replace(*args):
        time.sleep(0.5)
        die()

    if worker.rank == victim and victim:
        FileSystemWriter.write_data = write
    elif worker.rank == victim:
        os.replace = replace


@pytest.mark.parametrize(("background", "victim"), [(False, 1), (True, 1), (True, 0)])
def test_rank_killed_in_a_save(fsdp_groups, llama_folder, data, tmp_path, background, victim):
    group = fsdp_groups(2)
    begin(group, {**ARGS, "hf_checkpoint": llama_folder, "save": str(tmp_path), "async_save": background})
    learn(group, 0, data)
    group.save_model(0, force_sync=True)
    learn(group, 1, data)
    expected = states(group)
    wait_for_snapshots(group)
    group.worker_group.execute_with_func_generator(die_in_save, victim, background)
    if background:
        group.save_model(1)
        wait_until(lambda: not all(group.worker_group.alive()), 10)
    else:
        with pytest.raises(SingleControllerError):
            group.save_model(1)
    assert group.replace() == [2, 2]
    assert same(states(group), expected)
    assert json.loads((tmp_path / "latest.json").read_text())["rollout_id"] == 0
    assert not group._saved.writing, "the next save would take it for complete"
    # The same step again, from the same state.
    assert group.save_model(1, force_sync=True) == str(tmp_path / "rollout_0000001")
    learn(group, 2, data)
    assert group.restart() == [2, 2]
    assert same(states(group), expected)


def die_while_sending(worker, victim):
    """Kill a rank when it has sent half of the first block of its next snapshot."""
    from workers import blocks

    chunks = blocks._chunks

    def half(memory):
        if threading.current_thread().name != "snapshot-send":
            yield from chunks(memory)
            return
        yield next(chunks(memory))[: memory.numel() // 2]
        time.sleep(0.2)  # the other side receives it
        die()

    if worker.rank == victim:
        blocks._chunks = half


def test_rank_killed_while_it_sends_a_snapshot(fsdp_groups, llama_folder, data):
    """All ranks return to the snapshot before, though the other rank's newer one is complete."""
    group = fsdp_groups(2)
    begin(group, {**ARGS, "hf_checkpoint": llama_folder})
    learn(group, 0, data)
    wait_for_snapshots(group)
    expected = states(group)
    group.worker_group.execute_with_func_generator(die_while_sending, 1)
    try:
        loss = learn(group, 1, data)["loss"]
    except RayError:
        loss = None  # it died before all had returned
    wait_until(lambda: not all(group.worker_group.alive()), 10)
    assert group.replace() == [1, 1]
    assert same(states(group), expected)
    again = learn(group, 1, data)["loss"]
    assert loss is None or again == loss
    # Snapshots of the same number again, of which none is mistaken for what was sent before.
    expected = states(group)
    wait_for_snapshots(group)
    kill(group, 0)
    assert group.replace() == [2, 2]
    assert same(states(group), expected)


# --- A critic --------------------------------------------------------------------------------------------------------

PPO = {"advantage_estimator": "gae", "critic_lr": 3e-3, **ARGS}


@pytest.fixture(scope="module")
def pair(fsdp_groups, train_pool):
    actor = fsdp_groups(2)
    with RayTrainGroup({}, 1, 2, train_pool, 0.1, role="critic") as critic:
        actor.connect(critic)
        yield actor, critic
        critic.disconnect()


def step(pair, rollout_id, rows, trained=("actor", "critic")):
    learning = [group.async_train(rollout_id, rows) for group in pair if group.role in trained]
    return [(metrics["loss"], metrics.get("kl_coef")) for metrics in (ray.get(refs)[0] for refs in learning)]


@pytest.mark.parametrize("victim", ["actor", "critic"])
def test_actor_and_critic_return_to_the_same_rollout(pair, llama_folder, victim):
    """The victim dies in a step which the other one has finished, whose KL coefficient has changed already."""
    rollouts = [rollout(small_llama(), prompts=3, samples=2, seed=seed) for seed in range(4)]
    args = {**PPO, "hf_checkpoint": llama_folder, "num_critic_only_steps": 1, "num_steps_per_rollout": 2,
            "shuffle_minibatches": True, "kl_coef": 0.2, "kl_target": 1e-3, "kl_horizon": 20}  # fmt: skip
    for group in pair:
        begin(group, args, with_ref=group.role == "actor")
    expected = [step(pair, number, rows) for number, rows in enumerate(rollouts)]
    coefs = [[coef for _, coef in of_groups] for of_groups in expected]
    assert all(of_actor == of_critic for of_actor, of_critic in coefs)
    assert len({coef for coef, _ in coefs}) == len(rollouts)
    weights = [states(group) for group in pair]
    for group in pair:
        begin(group, args, with_ref=group.role == "actor")
    found = [step(pair, number, rows) for number, rows in enumerate(rollouts[:2])]
    for group in pair:
        wait_for_snapshots(group)
    others = [group.role for group in pair if group.role != victim]
    pids = [group.worker_group.status().ranks[0].process.pid for group in pair]
    step(pair, 2, rollouts[2], trained=others)
    kill(next(group for group in pair if group.role == victim), 1)
    assert pair[0].replace() == [2, 2], "either of them replaces the ranks of both"
    assert pair[1].replace() is None
    assert pids == [group.worker_group.status().ranks[0].process.pid for group in pair]
    found += [step(pair, number, rollouts[number]) for number in (2, 3)]
    assert found == expected
    assert all(same(states(group), before) for group, before in zip(pair, weights, strict=True))


class Streaming(Manager):
    """A manager with the buffer of a stream, of one group a batch."""

    def __init__(self):
        super().__init__()
        self.group, self.buffer = SimpleNamespace(workers=()), SampleBuffer(1, update_interval=100)
        self.stream = SimpleNamespace(buffer=self.buffer)
        self.buffer.set_version(1)

    def __getstate__(self):
        return {"group": self.group}

    def take(self):
        begun = self.buffer.begin()
        if begun is not None:
            self.buffer.put(begun.number, begun.number, versions=(1, 1), flat=False, tokens=1)
        return [one.number for one in self.buffer.take(10)]


def test_batch_that_neither_group_has_trained_on_is_taken_again(pair, llama_folder, data):
    """The critic dies between two rollouts, so it refuses the next batch before the actor gets it."""
    actor, critic = pair
    for group in pair:
        begin(group, {**PPO, "hf_checkpoint": llama_folder})
    manager = Streaming()
    actor.set_rollout_manager(manager)
    try:
        assert manager.take() == [0]
        step(pair, 0, data)
        for group in pair:
            wait_for_snapshots(group)
        kill(critic, 0)
        assert manager.take() == [1]
        with pytest.raises(SingleControllerError):
            critic.async_train(1, data).result()
        assert actor.replace() == [1, 1]
        assert manager.take() == [1]
    finally:
        actor.set_rollout_manager(None)  # the pair serves other tests too


def test_update_that_fails_leaves_actor_and_critic_at_one_rollout(pair, llama_folder, data, monkeypatch):
    actor = pair[0]
    for group in pair:
        begin(group, {**PPO, "hf_checkpoint": llama_folder, "peer_snapshot_interval": 2})
    tried = []

    def send():
        tried.append(1)
        if len(tried) == 1:
            raise WorkerError("a rollout worker is dead, too")
        actor._weights_lost = False

    monkeypatch.setattr(actor, "update_weights", send)
    actor.set_rollout_manager(Streaming())
    try:
        step(pair, 0, data)
        actor.weight_version, actor._progress.sent_after = 1, 0
        for group in pair:
            wait_for_snapshots(group)
        kill(actor, 0)
        with pytest.raises(WorkerError, match="dead, too"):
            actor.replace()
        at = [group.worker_group.execute_with_func_generator(lambda worker: worker.next_rollout_id) for group in pair]
        assert at == [[0, 0]] * 2 and actor.next_rollout_id == 0
        assert actor.replace() is None and len(tried) == 2, "what has failed is repeated"
        step(pair, 0, data)
    finally:
        actor.set_rollout_manager(None)
        actor.weight_version = 0


def test_group_that_is_where_the_other_returns_to_keeps_its_model(pair, llama_folder, data):
    actor, critic = pair
    for group in pair:
        begin(group, {**PPO, "hf_checkpoint": llama_folder})
    step(pair, 0, data)
    for group in pair:
        wait_for_snapshots(group)
    models = critic.worker_group.execute_with_func_generator(lambda worker: id(worker.model))
    kill(actor, 0)
    assert actor.replace() == [1, 1]
    assert models == critic.worker_group.execute_with_func_generator(lambda worker: id(worker.model))
    step(pair, 1, data)


def test_checkpoints_of_different_rollouts_are_an_error(pair, llama_folder, data, tmp_path):
    _, critic = pair
    args = {**PPO, "peer_snapshot_interval": 0, "hf_checkpoint": llama_folder, "save": str(tmp_path / "actor"),
            "critic_save": str(tmp_path / "critic")}  # fmt: skip
    for group in pair:
        begin(group, args)
    for number in range(2):
        step(pair, number, data)
        for group in pair[: 2 - number]:
            group.save_model(number)
    kill(critic, 1)
    with pytest.raises(CheckpointError, match=r"different rollouts; to continue with: critic: 1, actor: 2"):
        critic.replace()
