"""Functions for `Lab.run` in the tests of MegatronTrainModel, and the losses that those tests train with."""

from functools import partial
from pathlib import Path
from unittest import mock

import torch
from megatron.core import parallel_state
from shard_helpers import read_shards
from waits import wait_until

from workers.data.rollout_data import jagged_rows
from workers.device_memory import DeviceMemory
from workers.hf_export import export_hf
from workers.hf_files import ModelFilesError
from workers.megatron.megatron_model import MegatronTrainModel
from workers.train.checkpoints import CheckpointError, RolloutCheckpoints


def make(worker, config, parallel, **options):
    """A new model at these parallel sizes. Its shards are made here, once: they must follow every change."""
    if worker.sizes == parallel:  # megatron's process groups cost most of the time
        worker.model = worker.kept_shards = None
    else:
        worker.tear_down()
        worker.initialize_model_parallel(**parallel)
        worker.sizes = parallel
    worker.model = MegatronTrainModel(config, **{"max_tokens_per_micro_batch": 24, **options})
    worker.kept_shards = worker.model.hf_shards()


def load_hf(worker, folder):
    worker.model.load_hf(folder)


def create_state(worker):
    """Create the optimizer's state, as a snapshot before the first step does."""
    dict(worker.model.state_tensors())


def own_rows(data):
    """This dp rank's rows: every n-th."""
    rank, size = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
    return {
        name: jagged_rows(value, range(len(value))[rank::size]) if value.is_nested else value[rank::size]
        for name, value in data.items()
    }


def gathered(worker, data, found):
    """(dp rank, tp rank, the result or None) of this rank."""
    return parallel_state.get_data_parallel_rank(), parallel_state.get_tensor_model_parallel_rank(), found


def log_probs(worker, data, temperature=1.0):
    return gathered(worker, data, worker.model.log_probs(own_rows(data), temperature))


def log_probs_and_routes(worker, data, temperature=1.0):
    """(dp rank, log-probabilities or None, the experts of each of its rows that this rank knows)"""
    found, routes = worker.model.log_probs_and_routes(own_rows(data), temperature)
    return parallel_state.get_data_parallel_rank(), found, list(routes.unbind())


def disturb_routers(worker, noise):
    """Add the same noise to the routers of all ranks that have them."""
    for name, weight in worker.model.weights():
        if name.endswith("router.weight"):
            layer = int(name.partition("layers.")[2].partition(".")[0])
            weight.add_(torch.randn(weight.shape, generator=torch.Generator().manual_seed(layer)) * noise)
    worker.model.weights_changed()


def values(worker, data):
    return gathered(worker, data, worker.model.values(own_rows(data)))


def policy_loss(outputs, part, normalizer):
    """Clipped policy gradient with an entropy bonus, and sums in which every position counts differently."""
    others = part.others
    ratio = (outputs.log_probs - others["old_log_probs"]).exp()
    gain = torch.minimum(ratio * others["advantages"], ratio.clamp(0.8, 1.2) * others["advantages"])
    counts = others["loss_mask"]
    loss = -((gain + 0.05 * outputs.entropy) * counts).sum() / normalizer
    return loss, {"tokens": counts.sum(), "entropy": (outputs.entropy * counts * others["weights"]).sum()}


def value_loss(outputs, part, normalizer):
    counts = part.others["loss_mask"]
    return ((outputs.values - part.others["returns"]) ** 2 * counts).sum() / normalizer, {"tokens": counts.sum()}


def candidate_loss(outputs, part, normalizer):
    """Cross-entropy with weights of other tokens."""
    counts = part.others["loss_mask"]
    of_token = -(outputs.candidates * torch.tensor([0.5, 0.3, 0.2])).sum(-1) * part.others["weights"]
    return (of_token * counts).sum() / normalizer, {"tokens": counts.sum()}


def distillation_loss(outputs, part, normalizer):
    """`candidate_loss` and a policy gradient."""
    total, sums = candidate_loss(outputs, part, normalizer)
    gain = outputs.log_probs * part.others["advantages"] * part.others["loss_mask"]
    return total - gain.sum() / normalizer, sums


def no_loss(outputs, part, normalizer):
    """A loss without a gradient."""
    return torch.zeros([]), {}


def train_step(worker, data, loss, normalizer, lr, temperature=1.0, infinite=None):
    """``infinite`` is a part of the names of parameters that get infinite gradients."""
    wants_entropy = loss is policy_loss
    hooks = [
        parameter.register_hook(lambda gradient: gradient * torch.inf)
        for model in worker.model.models
        for name, parameter in model.named_parameters()
        if infinite is not None and infinite in name
    ]
    report = worker.model.train_step(
        own_rows(data), partial(loss, normalizer=normalizer), lr=lr, temperature=temperature, entropy=wants_entropy
    )
    for hook in hooks:
        hook.remove()
    return {**report.sums, "grad_norm": report.grad_norm}


def step_fails(worker, data):
    """A loss function that raises. Returns whether this rank's routers keep nothing of the step."""

    def broken(outputs, part):
        raise ArithmeticError

    try:
        worker.model.train_step(own_rows(data), broken, lr=0.0)
    except ArithmeticError:
        return all(not router.waiting for router in worker.model._routing.routers)
    return False


def hf_shards(worker, rank=None):
    """What the model's shards read now; None on other ranks than ``rank``."""
    return read_shards(worker.kept_shards) if rank in (None, worker.rank) else None


def snapshot_step_back(worker, data, normalizer):
    """Take a snapshot, make a step and restore the snapshot. Returns (the step changed the weights, they are
    restored, no tensor moved in memory, the log-probabilities are unchanged)."""
    model = worker.model
    before = {name: tensor.clone() for name, tensor in model.weights()}
    pointers = [tensor.data_ptr() for _, tensor in model.weights()]
    expected = model.log_probs(own_rows(data), 1.0)
    train_step(worker, data, policy_loss, normalizer, 1e-2)
    moved = any(not torch.equal(before[name], tensor) for name, tensor in model.weights())
    for name, tensor in model.weights():
        tensor.copy_(before[name])
    model.weights_changed()
    train_step(worker, data, policy_loss, normalizer, 0.0)  # writes the optimizer's copies back
    same = all(torch.equal(before[name], tensor) for name, tensor in model.weights())
    again = model.log_probs(own_rows(data), 1.0)
    return (
        moved,
        same,
        pointers == [tensor.data_ptr() for _, tensor in model.weights()],
        expected is None or torch.equal(expected, again),
    )


def sleep_and_wake(worker, data, normalizer):
    """Offload and onload. Returns (bytes of parameters while offloaded, bytes freed, bytes copied, the next step)."""
    model = worker.model
    train_step(worker, data, policy_loss, normalizer, 1e-3)
    memory = DeviceMemory(model.tensors, model.scratch)
    freed = memory.sleep()
    asleep = sum(tensor.untyped_storage().size() for _, tensor in model.weights())
    copied = memory.nbytes
    assert memory.wake_up() == freed
    return asleep, freed, copied, train_step(worker, data, policy_loss, normalizer, 1e-3)


def parameter_bytes(worker):
    return sum(tensor.nbytes for _, tensor in worker.model.weights())


def save(worker, folder):
    worker.model.save(Path(folder), background=False)


def save_in_background(worker, folder):
    """Change the weights as soon as `save` returns. The checkpoint completes without a wait."""
    worker.model.save(Path(folder), background=True)
    for _, tensor in worker.model.weights():
        tensor.add_(1.0)
    worker.model.weights_changed()
    wait_until((Path(folder) / "metadata.json").exists, 60, "a complete checkpoint")
    worker.model.wait_for_save()


def load_unseen_by(worker, rank, folder):
    """Load where one rank sees another disk. Returns the error."""
    try:
        worker.model.load(Path(folder) / ("elsewhere" if worker.rank == rank else ""), optimizer=False)
    except FileNotFoundError as error:
        return str(error)
    return ""


def load_hf_unseen_by(worker, rank, folder, elsewhere):
    """As `load_unseen_by`, with the weights of a Hugging Face folder."""
    try:
        worker.model.load_hf(elsewhere if worker.rank == rank else folder)
    except ModelFilesError as error:
        return str(error)
    return ""


def save_fails(worker, folder):
    """With a full disk, the errors of `save`, `wait_for_save`, and a second `wait_for_save`."""

    def full(*args, **kwargs):
        raise OSError("the disk is full")

    def said(function, *args, **kwargs):
        try:
            function(*args, **kwargs)
        except OSError as error:
            return str(error)
        return ""

    with mock.patch("torch.distributed.checkpoint.save", full):
        return [
            said(worker.model.save, Path(folder), background=True),
            said(worker.model.wait_for_save),
            said(worker.model.wait_for_save),
        ]


def save_completes_not(worker, folder):
    """Rank 0 alone cannot write the file that completes a checkpoint. Returns each rank's error."""

    def full(*args, **kwargs):
        raise OSError("the disk is full")

    checkpoints = RolloutCheckpoints(None, folder, worker.rank)
    with mock.patch("megatron.core.dist_checkpointing.core.save_config", full):
        try:
            checkpoints.save(worker.model, 1, optimizer_step=1, weight_version=0, background=False)
        except CheckpointError as error:
            return str(error)
    return ""


def load(worker, folder, optimizer=True):
    worker.model.load(Path(folder), optimizer=optimizer)


def export(worker, folder, **options):
    export_hf(worker.model, folder, **options)
