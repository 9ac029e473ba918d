"""Weights from a train rank to a rollout worker by each transport, with both on simulated devices of one process."""

import datetime
import multiprocessing
import threading

import pytest
import torch
from devices import need
from other_process import copy_shared, device_inside, serve
from reference import small_llama

from single_controller import LocalWorkerGroup, RayClassWithInitArgs
from workers.device import share_memory
from workers.rollout.engines.hf_engine import HFEngine
from workers.rollout.rollout_worker import RolloutWorker
from workers.weight_sync import WeightSender, WeightSyncError
from workers.weight_sync.transports.process_group import Channel, Invitation

simulated = torch._simdevice
ROUND = 40_000
"""Bytes: several rounds for each update."""


@pytest.fixture(autouse=True)
def no_faults():
    before = simulated.faults()
    yield
    for number in range(torch.cuda.device_count()):
        torch.cuda.synchronize(number)
    torch.cuda.set_device(0)
    assert simulated.faults() == before


@pytest.mark.parametrize("delta", [False, True], ids=["whole", "delta"])
@pytest.mark.parametrize("transport", ["store", "group", "disk", "device"])
def test_weights_arrive_bit_for_bit(transport, delta, tmp_path):
    if delta and transport == "disk":
        pytest.skip("files have whole tensors")
    made = RayClassWithInitArgs(RolloutWorker, HFEngine, small_llama().config)
    workers = 2 if transport in ("store", "disk") else 1  # on a device each
    need(1 if transport == "device" else 2)
    with LocalWorkerGroup(workers, made, threads=True, collectives=False) as rollout:
        if transport == "device":  # memory cannot be opened in the process that made it
            rollout.execute_with_func_generator(lambda worker: send_versions(transport, None, delta, neighbour=worker))
            return
        torch.cuda.set_device(1 if transport == "group" else 0)  # nccl takes one rank per device
        folder = {"folder": str(tmp_path)} if transport == "disk" else {}
        send_versions(transport, rollout, delta, **folder)


def test_every_thread_of_a_worker_uses_its_device():
    """torch keeps the current device per thread, and each begins with the first one."""
    need(2)
    made = RayClassWithInitArgs(RolloutWorker, HFEngine, small_llama().config)
    with LocalWorkerGroup(2, made, threads=True, collectives=False) as rollout:
        assert rollout.execute_with_func_generator(device_of_a_thread) == [0, 1]


def device_of_a_thread(worker):
    found = []

    def run():
        worker._prepare_thread()
        found.append(torch.cuda.current_device())

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return found[0]


def send_versions(transport, rollout, delta, neighbour=None, **options):
    """Send versions, and compare what the engine has after each."""
    trained = small_llama().to("cuda")
    sender = WeightSender(
        transport, rollout, neighbour=neighbour, bucket_bytes=ROUND, verify="full", delta=delta, **options
    )
    for version in (1, 2, 3) if delta else (1, 2):
        with torch.no_grad():
            for parameter in trained.parameters():
                parameter.view(-1)[version::7] += 0.125
        sender.send(version, [(name, one.detach()) for name, one in trained.state_dict().items()])
        expected = {name: one.cpu() for name, one in trained.state_dict().items()}
        if neighbour is not None:
            received = [engine_weights(neighbour)]
        else:
            received = rollout.execute_with_func_generator(engine_weights)
        for rank, (found, devices, held) in enumerate(received):
            assert found == version and devices == {f"cuda:{rank}"}
            assert all(torch.equal(held[name], expected[name]) for name in expected)
    sender.close()


def engine_weights(worker):
    """The version, where the engine's weights are, and copies in host memory."""
    held = worker.engine.model.state_dict()
    return worker.weight_version, {str(one.device) for one in held.values()}, {n: one.cpu() for n, one in held.items()}


@pytest.fixture(scope="module")
def other_process():
    """Queues to and from another process: see `other_process.serve`."""
    context = multiprocessing.get_context("spawn")
    tasks, answers = context.Queue(), context.Queue()
    process = context.Process(target=serve, args=(tasks, answers), daemon=True)
    process.start()
    yield tasks, answers
    tasks.put(None)
    process.join(60)
    assert process.exitcode == 0


def test_another_process_has_copied_when_it_closes_the_memory(other_process):
    """The sender overwrites the memory then."""
    tasks, answers = other_process
    memory = torch.arange(1000.0, device="cuda:0")
    tasks.put((copy_shared, share_memory(memory)))
    assert answers.get(timeout=100) == "closed"
    memory.zero_()
    tasks.put("overwritten")
    assert answers.get(timeout=100) == list(range(1000)) and answers.get(timeout=100) == []


def test_opened_memory_is_on_the_current_device(other_process):
    """Also in a thread that has never selected one."""
    need(2)
    tasks, answers = other_process
    memory = torch.arange(1000.0, device="cuda:1")
    tasks.put((device_inside, share_memory(memory)))
    assert answers.get(timeout=100) == (1, 0)


def test_failed_transfer_of_nccl_is_an_error():
    """nccl's work completes on failure as well."""
    need(2)
    seconds = datetime.timedelta(seconds=30)
    server = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=seconds)
    invitation = Invitation("key", ("127.0.0.1", server.port), 1, (("one",),), "nccl", 30.0, 30.0)
    made = {}

    def make(rank):
        made[rank] = Channel(invitation, "senders", rank, 2, torch.device("cuda", rank))

    threads = [threading.Thread(target=make, args=(rank,)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    made[0].leave()
    with pytest.raises(WeightSyncError, match="reports REMOTE_ERROR"):
        made[1].exchange(torch.zeros(64, dtype=torch.uint8, device="cuda:1"), [64, 0], 20.0, receive=True)
