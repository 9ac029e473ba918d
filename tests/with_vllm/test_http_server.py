"""HTTPEngine against vLLM's own server, which this module starts and ends. Run by `make test-vllm`."""

import os
import signal
import time

import pytest

pytest.importorskip("vllm", reason="needs .venv-vllm: run make test-vllm")

from engine_contract import PROMPTS, SEEDS, EngineContract, Subject
from vllm_server import CONFIG, VLLMServer

from workers import HTTPEngine, RolloutError, SamplingParams

pytestmark = pytest.mark.timeout(500)  # the server takes a minute or two to start


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    server = VLLMServer(
        tmp_path_factory.mktemp("model"),
        *("--logprobs-mode", "processed_logits", "--logits-processors", "workers.rollout.engines.vllm_worker:LogProbs"),
        *("--max-logprobs", "64"),
        VLLM_SERVER_DEV_MODE="1",
        VLLM_USE_V2_MODEL_RUNNER="0",
    )
    yield server
    server.close()


@pytest.fixture(scope="module")
def subject(server):
    engine = HTTPEngine(server.url, timeout=300, max_logprobs=64)
    yield Subject(engine, config=CONFIG, positions=512)
    engine.close()


class TestContract(EngineContract):
    seeded_continuation = False


def test_server_names_its_model(subject, server):
    engine = subject.engine
    assert engine.vocab_size == 64 and engine.max_positions == 512


def test_two_engines_share_a_server(subject, server):
    """Requests of one engine outlive an update by the other, which they cannot know of."""
    model = subject.model(3)
    subject.update(model, 1)
    other = HTTPEngine(server.url, timeout=60)
    futures = Subject(other, config=CONFIG).run(300)
    subject.update(subject.model(4), 2)
    assert all(len(future.result(60).token_ids) == 300 for future in futures)
    time.sleep(1.1)
    with pytest.raises(RolloutError, match="somebody else has updated it"):
        other.generate([[1]], SamplingParams(1), [0])
    other.close()
    subject.check_all(subject.engine.generate(PROMPTS, SamplingParams(12), SEEDS), {2: subject.model(4)})


def test_sleeping_server(subject, server):
    """On the CPU vLLM frees nothing, but the endpoints are there."""
    subject.update(subject.model(3), 1)
    subject.engine.sleep()
    with pytest.raises(RolloutError, match="asleep"):
        subject.engine.generate([[1]], SamplingParams(1), [0])
    subject.engine.wake_up()
    subject.check_next({1: subject.model(3)})


def test_killed_engine_core_fails_the_requests(subject, server):
    """The last test of this module: the server is gone afterwards."""
    futures = subject.run(400)
    (core,) = server.engine_cores()
    killed = time.monotonic()
    os.kill(core, signal.SIGKILL)
    for future in futures:
        with pytest.raises(RolloutError, match=server.url):
            future.result(30)
    assert time.monotonic() - killed < 15
    with pytest.raises(RolloutError, match=server.url):
        subject.engine.generate([[1]], SamplingParams(1), [0])
