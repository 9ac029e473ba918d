"""GRPO runs whose trainers are killed end with the weights of a run without kills."""

import os
import random
import signal
import threading
import time

import pytest
import ray
from devices import ON_DEVICE, need
from ray.exceptions import RayError
from train_helpers import actor_class, whole_weights

from single_controller import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup, SingleControllerError
from workers import HFEngine, RayTrainGroup, RolloutManager, RolloutWorker, SamplingParams, read_args

pytestmark = [pytest.mark.full("training runs with kills"), pytest.mark.timeout(400)]

STEPS = 30
MODEL = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 32,
    "max_position_embeddings": 64,
}
WAYS = {
    "fsdp2": (2, {"train_backend": "fsdp"}, 0.0),
    "fsdp4": (4, {"train_backend": "fsdp"}, 0.0),
    "megatron-tp2-dp2": (4, {"train_backend": "megatron", "tensor_model_parallel_size": 2}, 1e-6),
}
KILLS = {7: "before an update", 14: "in an update", 21: "in a step"}


def reward(prompt, completion):
    """The share of token 7."""
    return sum(token == 7 for token in completion) / len(completion)


def prompts(step):
    rng = random.Random(step)
    return [[rng.randrange(1, 32) for _ in range(4)] for _ in range(4)]


class Killer:
    """Kills a random trainer at each of the moments, once."""

    def __init__(self, kills, seed=0):
        self.left, self.rng, self.killed = dict(kills), random.Random(seed), []

    def now(self, group, step, moment):
        if self.left.get(step) != moment:
            return
        del self.left[step]
        rank = self.rng.randrange(group.world_size)
        pid = group.worker_group.status().ranks[rank].process.pid
        self.killed.append((step, moment, rank))
        delay = 0.0 if moment.startswith("before") else self.rng.uniform(0, 0.05)
        threading.Timer(delay, os.kill, (pid, signal.SIGKILL)).start()
        time.sleep(delay / 2)


def train(ranks, args, kills, seconds=None):
    """Train; return the weights, the gradient norms by step, the steps that were taken, and the kills."""
    args = read_args(
        {
            "hf_config": MODEL,
            "lr": 3e-3,
            "rollout_batch_size": 4,
            "n_samples_per_prompt": 4,
            "rollout_max_response_len": 8,
            "num_rollout": STEPS,
            "peer_snapshot_interval": 2,
            **args,
        }
    )
    killer, norms, taken, step = Killer(kills), {}, [], 0
    need(ranks + 2)
    with RayResourcePool([ranks + 2], use_gpu=ON_DEVICE, num_cpus=0.5) as pool:
        actor = RayTrainGroup(args, 1, ranks, pool[: ranks + 1], standby=1, actor_cls=actor_class(args))
        ray.get(actor.async_init())
        made = RayClassWithInitArgs(RolloutWorker, HFEngine, MODEL, random_weights=True)
        rollout = RayWorkerGroup(pool[ranks + 1 :], made, collectives=False)
        manager = RolloutManager(rollout, SamplingParams.from_args(args), reward, samples_per_prompt=4, seed=1)
        actor.set_rollout_manager(manager)
        while step < STEPS:
            try:
                killer.now(actor, step, "before an update")
                killer.now(actor, step, "in an update")
                actor.update_weights()
                data = manager.generate(prompts(step), rollout_id=step)
                refs = actor.async_train(step, data)
                killer.now(actor, step, "in a step")
                norms[step] = ray.get(refs)[0]["grad_norm"]
                taken.append(step)
                step += 1
            except (RayError, SingleControllerError):
                began = time.monotonic()
                (step, *_) = actor.replace()
                (seconds if seconds is not None else []).append(time.monotonic() - began)
        weights = whole_weights(actor)
        actor.close()
    return weights, norms, taken, killer.killed


@pytest.mark.parametrize("way", WAYS)
def test_run_with_three_kills_ends_with_the_same_weights(way, ray_cluster):
    ranks, args, tolerance = WAYS[way]
    expected, norms, taken, _ = train(ranks, args, {})
    assert taken == list(range(STEPS))
    seconds = []
    found, found_norms, taken, killed = train(ranks, args, KILLS, seconds)
    print(
        f"\n{way}: killed {killed}; replaced in {[round(s, 2) for s in seconds]} s; {len(taken) - STEPS} steps repeated"
    )
    assert len(killed) == len(KILLS) and sorted(set(taken)) == list(range(STEPS))
    assert expected.keys() == found.keys()
    worst = max((expected[name].float() - found[name].float()).abs().max().item() for name in expected)
    assert worst <= tolerance, f"the weights differ by up to {worst}"
    # Where gradients are not clipped, the weights do not depend on their norm.
    assert found_norms == pytest.approx(norms, abs=tolerance)
