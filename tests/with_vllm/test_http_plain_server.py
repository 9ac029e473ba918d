"""HTTPEngine against vLLM's server as it is by default: no endpoints for training, raw log-probabilities."""

import time

import pytest

pytest.importorskip("vllm", reason="needs .venv-vllm: run make test-vllm")

from engine_contract import PROMPTS, SEEDS, Subject
from rollout_helpers import plain_model
from vllm_server import CONFIG, VLLMServer

from workers import HTTPEngine, PromptError, RolloutError, SamplingParams

pytestmark = pytest.mark.timeout(500)  # the server takes a minute or two to start
KEY = "secret"


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    server = VLLMServer(tmp_path_factory.mktemp("model"), "--api-key", KEY)
    yield server
    server.close()


@pytest.fixture(params=["vllm", "openai"])
def subject(server, request):
    # the server compiles kernels for its first request, which takes more than a minute on a busy machine
    engine = HTTPEngine(server.url, dialect=request.param, api_key=KEY, timeout=300)
    yield Subject(engine, config=CONFIG)
    engine.close()


def test_server_wants_a_key(server):
    with pytest.raises(RolloutError, match="401: Unauthorized; pass its key as api_key="):
        HTTPEngine(server.url)


@pytest.mark.parametrize("options", [{}, {"top_p": 0.8, "top_k": 9}, {"temperature": 0}], ids=str)
def test_log_probs_match_the_reference(subject, options):
    model = plain_model(CONFIG, 0)
    completions = subject.engine.generate(PROMPTS, SamplingParams(12, **options), SEEDS)
    assert completions == subject.engine.generate(PROMPTS, SamplingParams(12, **options), SEEDS)
    for prompt, completion in zip(PROMPTS, completions, strict=True):
        assert len(completion.token_ids) == 12
        subject.check(completion, prompt, {0: model})


def test_what_the_server_cannot_do_is_refused(subject):
    with pytest.raises(RolloutError, match=r"at temperature 1; with temperature=0.7"):
        subject.engine.generate([[1]], SamplingParams(4, temperature=0.7), [0])
    with pytest.raises(RolloutError, match=r"VLLM_SERVER_DEV_MODE=1|dialect='vllm'"):
        subject.engine.weight_shapes()
    with pytest.raises(RolloutError, match=r"no endpoint for sleep\(\)"):
        subject.engine.sleep()
    with pytest.raises(PromptError, match="prompt 1 has token ids from 64 to 64"):
        subject.engine.generate([[1], [64]], SamplingParams(4), [0, 0])


def test_pause_interrupts_requests(subject):
    model = plain_model(CONFIG, 0)
    for _ in range(10):
        futures = subject.submit(400)
        subject.until(lambda load: load.running or not load.waiting)
        subject.engine.pause()
        done = [future.done() for future in futures]
        if not all(done):
            break
        subject.engine.resume()  # on a busy machine, the server may send the first tokens with the last
    time.sleep(0.2)
    assert [future.done() for future in futures] == done and not all(done)
    subject.engine.resume()
    for prompt, future in zip(PROMPTS, futures, strict=True):
        completion = future.result(60)
        assert len(completion.token_ids) == 400
        subject.check(completion, prompt, {0: model})
