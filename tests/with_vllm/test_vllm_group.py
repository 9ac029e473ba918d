"""VLLMEngine in a rollout worker on Ray: a manager, a stream, weight versions, and the death of the process."""

import contextlib
import os
import signal
import threading
import time

import pytest

pytest.importorskip("vllm", reason="needs .venv-vllm: run make test-vllm")

import psutil
import torch
from rollout_helpers import check_versions, payload_of, plain_log_probs, plain_model
from transformers import LlamaConfig

from single_controller import (
    Broadcast,
    Dispatch,
    RayClassWithInitArgs,
    RayResourcePool,
    RayWorkerGroup,
    SingleControllerError,
    WorkerDiedError,
    register,
)
from workers import RolloutManager, RolloutStream, RolloutWorker, SampleBuffer, SamplingParams, VLLMEngine
from workers.data.rollout_data import group_numbers
from workers.weight_sync import WeightSender, WeightSyncError

pytestmark = pytest.mark.timeout(300)  # vLLM starts in 10 s, or in minutes on a busy machine

FIELDS = {"model_type": "llama", "hidden_size": 64, "intermediate_size": 48, "num_hidden_layers": 2,
          "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 32, "max_position_embeddings": 2048,
          "bos_token_id": 1, "eos_token_id": 2}  # fmt: skip
PROMPTS = [[5, 9, 2], [7], [3, 3, 8, 1], [11, 4]]


class Flipping(VLLMEngine):
    """Changes one bit of a tensor that it loads, if a test says so."""

    flipped = None

    def load_weights(self, weights):
        changed = []
        for name, tensor in weights:
            if name == self.flipped:
                tensor = tensor.clone()
                tensor.view(torch.int32).view(-1)[5] ^= 1
            changed.append((name, tensor))
        super().load_weights(changed)


class Rollout(RolloutWorker):
    @register(Dispatch.ONE_TO_ALL)
    def flip(self, name):
        self.engine.flipped = name

    @register(Dispatch.ONE_TO_ALL)
    def pid(self):
        return os.getpid()

    @register(Dispatch.RANK_ZERO)
    def processes(self):
        """The pids of vLLM's workers. They take their names some time after they have started."""
        return [one.pid for one in psutil.Process().children() if "resource_tracker" not in str(one.cmdline())]


@pytest.fixture(scope="module")
def pool(ray_cluster):
    with RayResourcePool([1], use_gpu=False) as pool:
        yield pool


@pytest.fixture(scope="module")
def group(pool):
    with RayWorkerGroup(pool, RayClassWithInitArgs(Rollout, Flipping, FIELDS)) as group:
        yield group


def update(group, model, version):
    """What a sender does, with one bucket after the other."""
    key = f"update-{version}"
    group.begin_weights(key, version, "test")
    state = list(model.state_dict().items())
    for begin in range(0, len(state), 5):
        group.receive_payload(key, payload_of(state[begin : begin + 5]))
    group.finish_weights(key)


def test_manager_generates_with_updated_weights(group):
    manager = RolloutManager(group, SamplingParams(12, temperature=0.7, top_p=0.8), samples_per_prompt=2)
    for version in (1, 2):
        model = plain_model(LlamaConfig(**FIELDS), version)
        update(group, model, version)
        data = manager.generate(PROMPTS)
        assert data["max_weight_versions"].tolist() == [version] * 8
        completions = group.generate(PROMPTS, Broadcast(SamplingParams(12, temperature=0.7, top_p=0.8)), [0, 1, 2, 3])
        for prompt, made in zip(PROMPTS, completions, strict=True):
            completion = made.completion
            expected = plain_log_probs(model, prompt, completion.token_ids, 0.7, completion.sampling_mask)
            found = torch.tensor(made.completion.log_probs).double()
            torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)


def test_what_the_engine_holds_is_proved_and_a_flipped_bit_is_named(group):
    sender = WeightSender("store", group, verify="full")
    weights = [plain_model(LlamaConfig(**FIELDS), version).state_dict() for version in range(4)]
    report = sender.send(1, weights[1].items())
    assert report.proved == "engine"
    for name in ("model.layers.1.self_attn.k_proj.weight", "model.norm.weight"):
        group.flip(name)
        with pytest.raises(WeightSyncError, match=f"does not hold what was sent as version 2: 1 .*: {name}"):
            sender.send(2, weights[2].items())
        assert group.current_weight_version() == [None]
        (made,) = group.generate([[1]], Broadcast(SamplingParams(4)), [0])
        assert made.completion is None and made.weight_version is None
    group.flip(None)
    assert sender.send(3, weights[3].items()).proved == "engine"
    (made,) = group.generate([[1]], Broadcast(SamplingParams(4)), [0])
    assert made.weight_version == 3 and len(made.completion.token_ids) == 4


def test_stream_continues_interrupted_groups_with_the_new_weights(group):
    """The groups of the next batch are running whenever the weights are updated."""
    models = {version: plain_model(LlamaConfig(**FIELDS), version) for version in range(1, 5)}
    manager = RolloutManager(
        group, SamplingParams(200, temperature=0.7), lambda prompt, completion: len(prompt), samples_per_prompt=2
    )
    buffer = SampleBuffer(2, max_staleness=1)
    found, mixed = [], 0
    with RolloutStream(
        manager,
        lambda rollout_id: PROMPTS[rollout_id % 2 :: 2],
        buffer,
        update_mode="interrupt",
        requests_per_worker=4,  # a batch at a time, so that the next one begins when this one ends
    ) as stream:
        for version, model in models.items():
            with stream.updating():
                manager.weight_version = version
                update(group, model, version)
            data = stream.take(120)
            rows = check_versions(
                data, lambda of, *generated, **mask: plain_log_probs(models[of], *generated, 0.7, **mask), 1e-4
            )
            for of in rows:
                assert len(of) == 200 and of == sorted(of) and version - 1 <= of[0] and of[-1] == version
                mixed += of[0] != of[-1]
            assert data["rewards"].tolist() == data["prompt_lengths"].tolist()
            found += group_numbers(data["group_ids"])[::2].tolist()
    assert found == list(range(8)) and mixed > 0


def test_killed_worker_is_told_and_restarted(group):
    (pid,) = group.pid()
    future = group.generate.remote([[1]] * 8, Broadcast(SamplingParams(2000)), list(range(8)))
    killer = threading.Timer(0.5, os.kill, (pid, signal.SIGKILL))
    killer.start()
    begin = time.monotonic()
    with pytest.raises(WorkerDiedError):
        future.result(60)
    assert time.monotonic() - begin < 10
    group.restart()
    assert group.pid() != [pid]
    (made,) = group.generate([[1]], Broadcast(SamplingParams(4)), [0])
    assert made.weight_version == 0 and len(made.completion.token_ids) == 4


@pytest.mark.timeout(600)
def test_worker_with_two_processes_leaves_none(pool):
    """Neither when it is closed nor when it is killed."""
    fields = {**FIELDS, "num_key_value_heads": 2}
    made = RayClassWithInitArgs(Rollout, VLLMEngine, fields, tensor_parallel_size=2)
    model = plain_model(LlamaConfig(**fields), 1)
    for end in (lambda group: group.close(), lambda group: os.kill(group.pid()[0], signal.SIGKILL)):
        with RayWorkerGroup(pool, made) as group:
            update(group, model, 1)
            (generated,) = group.generate([[5, 9, 2]], Broadcast(SamplingParams(12)), [0])
            expected = plain_log_probs(model, [5, 9, 2], generated.completion.token_ids)
            found = torch.tensor(generated.completion.log_probs).double()
            torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)
            processes = [psutil.Process(pid) for pid in group.processes()]
            assert len(processes) == 2
            end(group)
            _, left = psutil.wait_procs(processes, 20)
            assert not left


@pytest.mark.timeout(600)
def test_killed_worker_gets_the_weights_from_the_other_one(ray_cluster):
    """It generates what the other one generates, without an update."""
    made = RayClassWithInitArgs(Rollout, VLLMEngine, FIELDS)
    model = plain_model(LlamaConfig(**FIELDS), 1)
    with RayResourcePool([2], use_gpu=False) as pool, RayWorkerGroup(pool, made, collectives=False) as group:
        manager = RolloutManager(group, SamplingParams(100, temperature=0.7), samples_per_prompt=2)
        manager.refresh = lambda: pytest.fail("the weights were sent again")
        buffer = SampleBuffer(4, update_interval=10_000)
        found = []
        with RolloutStream(manager, lambda rollout_id: PROMPTS, buffer, requests_per_worker=4) as stream:
            with stream.updating():
                manager.weight_version = 1
                update(group, model, 1)
            found.append(stream.take(120))
            pids = group.pid()
            os.kill(pids[0], signal.SIGKILL)
            end, now = time.monotonic() + 300, []
            while now != [1, 1]:
                assert time.monotonic() < end
                found.append(stream.take(120))
                with contextlib.suppress(SingleControllerError):
                    now = group.current_weight_version()
            assert len(set(pids) & set(group.pid())) == 1
            one, other = group.generate([[5, 9, 2]] * 2, Broadcast(SamplingParams(50)), [7, 7])
            assert one.completion == other.completion and one.rank != other.rank
        for data in found:
            check_versions(data, lambda of, *made, **mask: plain_log_probs(model, *made, 0.7, **mask), 1e-4)
        assert [one for data in found for one in group_numbers(data["group_ids"])[::2].tolist()] == list(
            range(4 * len(found))
        )
