"""Weights from a train rank to a rollout worker by each transport, with both on simulated devices of one process."""

import pytest
import torch
from reference import small_llama

from single_controller import LocalWorkerGroup, RayClassWithInitArgs
from workers.rollout.engines.hf_engine import HFEngine
from workers.rollout.rollout_worker import RolloutWorker
from workers.weight_sync import WeightSender

simulated = torch._simdevice
ROUND = 40_000
"""Bytes: several rounds for each update."""


@pytest.fixture(autouse=True)
def no_faults():
    before = simulated.faults()
    yield
    for number in (0, 1):
        torch.cuda.synchronize(number)
    torch.cuda.set_device(0)
    assert simulated.faults() == before


@pytest.mark.parametrize("delta", [False, True], ids=["whole", "delta"])
@pytest.mark.parametrize("transport", ["store", "group", "disk", "device"])
def test_weights_arrive_bit_for_bit(transport, delta, tmp_path):
    if delta and transport == "disk":
        pytest.skip("files have whole tensors")
    made = RayClassWithInitArgs(RolloutWorker, HFEngine, small_llama().config)
    with LocalWorkerGroup(1, made, threads=True, collectives=False) as rollout:
        if transport == "device":  # memory cannot be opened in the process that made it
            rollout.execute_with_func_generator(lambda worker: send_versions(transport, None, delta, neighbour=worker))
            return
        torch.cuda.set_device(1 if transport == "group" else 0)  # nccl takes one rank per device
        folder = {"folder": str(tmp_path)} if transport == "disk" else {}
        send_versions(transport, rollout, delta, **folder)


def send_versions(transport, rollout, delta, neighbour=None, **options):
    """Send three versions, and compare what the engine has after each."""
    trained = small_llama().to("cuda")
    sender = WeightSender(
        transport, rollout, neighbour=neighbour, bucket_bytes=ROUND, verify="full", delta=delta, **options
    )
    for version in (1, 2, 3):
        with torch.no_grad():
            for parameter in trained.parameters():
                parameter.view(-1)[version::7] += 0.125
        sender.send(version, [(name, one.detach()) for name, one in trained.state_dict().items()])
        expected = {name: one.cpu() for name, one in trained.state_dict().items()}
        found, devices, held = (
            engine_weights(neighbour) if neighbour else rollout.execute_with_func_generator(engine_weights)[0]
        )
        assert found == version and devices == {"cuda:0"}
        assert all(torch.equal(held[name], expected[name]) for name in expected)
    sender.close()


def engine_weights(worker):
    """The version, where the engine's weights are, and copies in host memory."""
    held = worker.engine.model.state_dict()
    return worker.weight_version, {str(one.device) for one in held.values()}, {n: one.cpu() for n, one in held.items()}
