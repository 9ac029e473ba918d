"""Helpers for tests of train groups: rollouts, groups that are initialized again, functions that run on the ranks."""

import sys
from collections import Counter
from contextlib import ExitStack
from dataclasses import replace
from functools import cache
from unittest import mock

import ray
import torch
from reference import random_prompts, sample, small_llama
from shard_helpers import assembled, read_shards
from tensordict import TensorDict
from torch.utils._python_dispatch import TorchDispatchMode

from single_controller import Broadcast
from workers.lora import BASE_DIGEST
from workers.train.train_group import RayTrainGroup


def lucky(prompt, completion):
    """The fraction of small tokens."""
    return sum(token < 8 for token in completion) / len(completion)


def rollout(model, prompts=6, samples=4, tokens=10, seed=0, left=None):
    """Ragged rollout data: prompts of various lengths, completions that stop early. See `sample` for ``left``."""
    made = random_prompts(prompts, (4, 2, 5), seed=seed)
    data = sample(model, made, samples, tokens, reward=lucky, seed=seed, stop_token_ids=(3, 4), left=left)
    return TensorDict(data, batch_size=[len(data["input_ids"])])


@cache
def _llamas_rollout(**options):
    return rollout(small_llama(), **options)


def llamas_rollout(**options):
    """A rollout of `small_llama`. Sampling it takes a tenth of a second, so it is made once."""
    return _llamas_rollout(**options).clone()


def actor_class(args):
    """The ``actor_cls`` of a group: Megatron's for the CPU, or the backend's own."""
    if args["train_backend"] != "megatron":
        return None
    from workers.megatron.cpu import CpuMegatronTrainWorker

    return CpuMegatronTrainWorker


def begin(group: RayTrainGroup, args, with_ref=False):
    """Initialize the group again with another configuration."""
    return ray.get(group.async_init(args, with_ref=with_ref))


def learn(group, rollout_id, data):
    """The metrics of one step; asserts that all ranks agree on them."""
    metrics = ray.get(group.async_train(rollout_id, data))
    assert len(metrics) == group.world_size
    for other in metrics:
        assert {**other, "seconds": 0} == {**metrics[0], "seconds": 0}
    return metrics[0]


def whole_weights(group):
    """The Hugging Face weights, gathered from all ranks."""
    return assembled(group.worker_group.execute_with_func_generator(own_shards))


def own_shards(worker):
    """What a rank's shards of the weights read; for `assembled`."""
    return [shard for shard in read_shards(worker.model.hf_shards()) if shard[0] != BASE_DIGEST]


def distance(one, other):
    """The largest difference between two state dicts with the same names, except for a tied output layer."""
    names = one.keys() & other.keys()
    assert (one.keys() | other.keys()) - names <= {"lm_head.weight"}
    return max((one[name].float() - other[name].float()).abs().max().item() for name in names)


def assert_seeds_decide(group, draw):
    """What ``draw(worker)`` returns depends on the worker's seed, and on nothing else."""
    first, again, other = group.execute_with_func_generator(drawn_after, Broadcast(draw))[0]
    assert torch.equal(first, again) and not torch.equal(first, other)


def drawn_after(worker, draw):
    found = []
    for seed in (7, 7, 8):
        worker.seed(seed)
        found.append(draw(worker))
    return found


def set_tokens(worker, most):
    """Set the largest number of tokens of a micro-batch."""
    if worker.args.train_backend == "fsdp":
        worker.model.options = replace(worker.model.options, max_tokens_per_micro_batch=most)
    else:
        worker.model.max_tokens = most


def gradients(worker, data, cases, most):
    """Case -> (metrics, this rank's shards of the gradients, for `assembled`) of a step on its rows. The weights
    are as before afterwards."""
    rows = data[worker._dp_rank :: worker.get_parallel_config()["dp_size"]]  # groups are spread over the ranks
    set_tokens(worker, most)
    worker.backup.copy("before")
    before = own_shards(worker)
    return {name: gradients_of_case(worker, rows, changes, before) for name, changes in cases.items()}


def gradients_of_case(worker, rows, changes, before):
    """What `gradients` returns of a case, which changes these arguments. ``before`` are the shards of the weights in
    the backup "before"."""
    usual, worker.args = worker.args, worker.args.copy()
    for key, value in changes.items():
        worker.args[key] = value
    metrics = worker.train(0, rows)
    after = own_shards(worker)
    worker.backup.restore("before")
    worker.args = usual
    return metrics, [(*old[:3], old[3] - new[3]) for old, new in zip(before, after, strict=True)]


def kept_gradients(model):
    """A dict that gets the whole gradients of each step of an FSDP model, by name."""
    gradients = {}

    def keep(*_):
        for name, parameter in model.module.named_parameters():
            if parameter.grad is not None:
                gradients[name] = parameter.grad.full_tensor().clone()

    model._optimizer.register_step_pre_hook(keep)
    return gradients


class HostReads(TorchDispatchMode):
    """Counts where this library would wait for a CUDA device: numbers read from tensors, and copies to the host.

    Reads by `workers.data.micro_batches` and `packing` do not count, because the rows that they cut are in host memory.

    Attributes:
        places: function -> how often it, or what it called in torch, read.
    """

    def __init__(self):
        super().__init__()
        self.places = Counter()
        self._patches = ExitStack()

    def __enter__(self):
        for name in ("cpu", "numpy", "tolist"):  # without an effect on CPU tensors, and so not dispatched
            self._patches.enter_context(
                mock.patch.object(torch.Tensor, name, self._counted(getattr(torch.Tensor, name)))
            )
        return super().__enter__()

    def __exit__(self, *error):
        super().__exit__(*error)
        self._patches.close()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default):
            self._count()
        return func(*args, **(kwargs or {}))

    def _counted(self, method):
        def counted(tensor, *args, **kwargs):
            self._count()
            return method(tensor, *args, **kwargs)

        return counted

    def _count(self):
        frame = sys._getframe(1)
        while frame is not None:
            module = frame.f_globals.get("__name__", "")
            # megatron's stand-in for CUDA is between torch's functions and their callers
            if module.partition(".")[0] not in ("torch", __name__) and module != "workers.megatron.cpu":
                break
            frame = frame.f_back
        if module.startswith("workers.") and module not in ("workers.data.micro_batches", "workers.data.packing"):
            self.places[f"{module}.{frame.f_code.co_name}"] += 1


def saved(model, folder):
    """Save the model; return its Hugging Face folder."""
    model.save_pretrained(folder)
    return str(folder)
