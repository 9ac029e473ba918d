"""What tests of train groups share: rollouts, groups that are initialised anew, and functions that run on the ranks."""

import ray
import torch
from reference import random_prompts, sample, small_llama
from tensordict import TensorDict

from workers.train.group import RayTrainGroup


def lucky(prompt, answer):
    """The share of small tokens."""
    return sum(token < 8 for token in answer) / len(answer)


def rollout(model, prompts=6, samples=4, tokens=10, seed=0):
    """Ragged rollout data of a model: prompts of several lengths, answers that stop early."""
    made = random_prompts(prompts, (4, 2, 5), seed=seed)
    data = sample(model, made, samples, tokens, reward=lucky, seed=seed, stop_token_ids=(3, 4))
    return TensorDict(data, batch_size=[len(data["input_ids"])])


def begin(group: RayTrainGroup, args, with_ref=False):
    """Make the group's model anew, from another configuration."""
    return ray.get(group.async_init(args, with_ref=with_ref))


def learn(group, rollout_id, data):
    """The metrics of a step, which all ranks agree on."""
    metrics = ray.get(group.async_train(rollout_id, data))
    assert len(metrics) == group.world_size
    for other in metrics:
        assert {**other, "seconds": 0} == {**metrics[0], "seconds": 0}
    return metrics[0]


def whole_weights(group):
    """The Hugging Face weights that the ranks have together."""
    parts = group.worker_group.execute_with_func_generator(
        lambda worker: {name: tensor.detach().cpu().clone() for name, tensor in worker.model.hf_weights()}
    )
    return {name: tensor for part in parts for name, tensor in part.items()}


def distance(one, other):
    """The largest difference of two sets of weights that have the same names, a tied output layer aside."""
    names = one.keys() & other.keys()
    assert (one.keys() | other.keys()) - names <= {"lm_head.weight"}
    return max((one[name].float() - other[name].float()).abs().max().item() for name in names)


def saved(model, folder):
    """A Hugging Face folder."""
    model.save_pretrained(folder)
    return str(folder)


__all__ = ["begin", "distance", "learn", "lucky", "rollout", "saved", "small_llama", "torch", "whole_weights"]
