"""Training with FSDP on one simulated device: as on the CPU, and without waiting for the device."""

from contextlib import contextmanager

import pytest
import torch
from host_waits import waits_of_any_number_of_micro_batches
from model_types import config_of, model_of
from reference import small_llama
from torch.nn.functional import dropout
from train_helpers import assert_seeds_decide, distance, rollout, saved

from single_controller import LocalWorkerGroup, RayClassWithInitArgs
from workers.device import every_backend
from workers.distributed import initialize_distributed
from workers.fsdp.fsdp_worker import FSDPTrainWorker

WAYS = {
    "plain": {},
    "bf16": {"param_dtype": "bf16"},
    "offloaded": {"fsdp_cpu_offload": True},
    "lora": {"lora_rank": 4},
    "checkpointed": {"gradient_checkpointing": True},
    "offloaded, checkpointed": {"fsdp_cpu_offload": True, "gradient_checkpointing": True},
    "exact": {"exact": True},
}
QUICK = ("bf16", "offloaded, checkpointed", "exact")
"""The second has the same kernels as "plain"."""


class OnCpu(FSDPTrainWorker):
    """The same worker on the CPU."""

    def begin(self):
        self.device = torch.device("cpu")
        initialize_distributed(self, every_backend(), self.args.distributed_timeout_minutes)
        self._dp_group = torch.distributed.group.WORLD
        self.register_layout({"dp": self.world_size}, dp=self.rank)


@pytest.fixture(scope="module")
def args(tmp_path_factory):
    folder = saved(small_llama(), tmp_path_factory.mktemp("llama"))
    return {"train_backend": "fsdp", "hf_checkpoint": folder, "lr": 3e-3, "max_tokens_per_micro_batch": 50}


@pytest.fixture(scope="module")
def data():
    return rollout(small_llama())


def worker(cls=FSDPTrainWorker):
    return LocalWorkerGroup(1, RayClassWithInitArgs(cls))


def trained(cls, args, data, role="actor"):
    """Log-probabilities, the metrics of two steps, and the weights afterwards."""
    with worker(cls) as group:
        group.init(args, role)
        outputs = None if role == "critic" else group.compute_log_prob(data).cpu()
        steps = [group.train(step, data)[0] for step in range(2)]
        of_worker = group.execute_with_func_generator(weights)[0]
    return outputs, [{**metrics, "seconds": 0.0} for metrics in steps], of_worker


def weights(worker):
    return {name: tensor.detach().cpu().float().clone() for name, tensor in worker.model.weights()}


@pytest.mark.parametrize(
    "way",
    [
        pytest.param(
            way, marks=() if way in QUICK else pytest.mark.full("steps on the simulated device with one option")
        )
        for way in WAYS
    ],
)
def test_steps_are_those_of_the_cpu(args, data, way):
    given = args | WAYS[way]
    # In bfloat16 the kernels round at other places: attention on the device is not the CPU's one kernel.
    close = {"abs": 5e-2, "rel": 5e-2} if way == "bf16" else {"abs": 1e-5, "rel": 1e-4}
    (found, metrics, after), (expected, of_cpu, wanted) = (
        trained(cls, given, data) for cls in (FSDPTrainWorker, OnCpu)
    )
    assert (found - expected).abs().max() < (0.1 if way == "bf16" else 1e-5)
    for one, other in zip(metrics, of_cpu, strict=True):
        assert one == pytest.approx(other, **close)
    assert after.keys() == wanted.keys()
    if way != "bf16":
        assert max((after[name] - wanted[name]).abs().max() for name in wanted) < 1e-4


def test_critic_is_that_of_the_cpu(args, data):
    given = args | {"advantage_estimator": "gae"}
    rows = data.clone()
    with worker() as group:
        group.init(given, "critic")
        rows["values"] = group.compute_values(rows).cpu()
    (_, metrics, after), (_, of_cpu, wanted) = (trained(cls, given, rows, "critic") for cls in (FSDPTrainWorker, OnCpu))
    for one, other in zip(metrics, of_cpu, strict=True):
        assert one == pytest.approx(other, abs=1e-5, rel=1e-4)
    assert max((after[name] - wanted[name]).abs().max() for name in wanted) < 1e-4


def test_reference_of_another_folder_is_read_beside_buffers_on_the_device(tmp_path):
    """The bias of the experts is a buffer; the parameters are in host memory."""
    actor, other = (model_of(config_of("deepseek_v3"), seed=seed) for seed in (0, 1))
    folders = {"hf_checkpoint": saved(actor, tmp_path / "actor"), "ref_load": saved(other, tmp_path / "other")}
    with worker() as group:
        group.init({**folders, "fsdp_cpu_offload": True}, "actor", True)
        found, reference, on_device = group.execute_with_func_generator(actor_and_reference)[0]
    assert distance(found, actor.state_dict()) == distance(reference, other.state_dict()) == 0.0 and on_device


def actor_and_reference(worker):
    with worker.backup.swapped("ref"):
        reference = weights(worker)
    bias = worker.model.module.model.layers[1].mlp.gate.e_score_correction_bias
    return weights(worker), reference, bias.device == worker.device


def test_dropout_on_the_device_depends_on_the_seed(args):
    with worker() as group:
        group.init(args, "actor")
        assert_seeds_decide(group, lambda worker: dropout(torch.ones(64, device=worker.device)).cpu())


@pytest.mark.parametrize(
    "extra",
    [{"fsdp_cpu_offload": True}, {"lora_rank": 4}, {"rollout_top_k": 9, "exact": True},
     *(pytest.param(extra, marks=pytest.mark.full("what the host waits for with each option alone"))
       for extra in ({}, {"exact": True}, {"fsdp_reduce_dtype": "fp64"}, {"rollout_top_k": 9}))],
    ids=str,
)  # fmt: skip
def test_the_host_waits_as_often_for_many_micro_batches_as_for_one(args, data, extra):
    """In a step and in a pass without gradients: the loop over micro-batches reads nothing and copies nothing that it
    waits for."""
    if "rollout_top_k" in extra:
        data = rollout(small_llama(), left=lambda log_probs: log_probs.topk(9).indices.tolist())
        assert data["sampling_mask_lengths"].max() == 9

    @contextmanager
    def start(most):
        with worker() as group:
            group.init(args | extra | {"max_tokens_per_micro_batch": most}, "actor")
            yield lambda: group.train(0, data), lambda: group.compute_log_prob(data)

    step, forward = waits_of_any_number_of_micro_batches(start)
    assert sum(step.values()) <= 4 and sum(forward.values()) <= 3, (step, forward)
