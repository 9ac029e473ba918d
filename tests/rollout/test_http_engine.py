"""HTTPEngine in front of a server with a toy model: the contract of all engines, and what goes wrong.

tests/with_vllm runs the same against vLLM's own server.
"""

import asyncio
import json
import socket
import threading
import time

import fake_server
import pytest
import torch
from engine_contract import EngineContract, Subject
from fake_server import FakeServer, kill, serving
from rollout_helpers import LLAMA, TIED, Bigram, chosen_log_probs, kept_sets, left_to_choose, plain_model
from waits import wait_until

from single_controller import Broadcast, LocalWorkerGroup, RayClassWithInitArgs
from workers import AgentEngine, HTTPEngine, PromptError, RolloutError, RolloutWorker, SamplingParams
from workers.rollout.agents.environment import Environment, Step
from workers.rollout.engines import http_client, http_engine
from workers.rollout.rollout_errors import SamplingParamsError, WeightsError

CONFIG = {"vocab_size": 32}
SHAPES = {"following": (32, 32), "bias": (32,)}
LONG = SamplingParams(200)


@pytest.fixture
def server():
    server = FakeServer()
    yield server
    server.close()


@pytest.fixture
def engine_of(server, tmp_path):
    """Make an engine of the server; its weights are those of the toy model."""
    made = []

    def make(**options):
        engine = HTTPEngine(options.pop("url", server.url), **{"config": CONFIG, "weights_dir": tmp_path, **options})
        engine._shapes = SHAPES  # transformers has no such model
        made.append(engine)
        return engine

    yield make
    for engine in made:
        engine.close()


@pytest.fixture
def engine(engine_of):
    """An engine that has got version 1 of the weights."""
    engine = engine_of()
    load(engine)
    return engine


class TestContract(EngineContract):
    updates = 5
    long = 60
    seeded_continuation = False

    @pytest.fixture(scope="class")
    @classmethod
    def subject(cls, tmp_path_factory):
        server = FakeServer(delay=0.002)
        server.log_probs = "tempered"
        weights = tmp_path_factory.mktemp("weights")
        engine = HTTPEngine(server.url, config=CONFIG, weights_dir=weights, max_logprobs=32)
        engine._shapes = SHAPES
        yield Subject(engine, model_of=Bigram, distributions=Bigram.distributions, positions=fake_server.POSITIONS)
        engine.close()
        server.close()


def load(engine, seed=3, version=1):
    model = Bigram(seed)
    engine.begin_update()
    engine.load_weights(model.state_dict().items())
    engine.finish_update(version)
    return model


def begun(engine, count=1):
    wait_until(lambda: engine.load().running >= count)


# --- what is sent ---------------------------------------------------------------------------------------------------


def test_requests_run_after_a_thread_could_not_be_started(monkeypatch):
    monkeypatch.setattr(http_client, "_loop", None)

    def fail(self):
        raise RuntimeError("can't start new thread")

    request = asyncio.sleep(0, "done")
    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="can't start"):
        patch.setattr(threading.Thread, "start", fail)
        http_client.run(request)
    assert http_client.run(request).result(10) == "done"


@pytest.mark.parametrize("dialect", ["vllm", "openai"])
def test_request_has_the_documented_fields(server, engine_of, dialect):
    engine = engine_of(dialect=dialect, request_fields={"stream_interval": 4})
    how = SamplingParams(5, top_p=0.9, top_k=7, stop_token_ids=(31,))
    engine.generate([[1, 2]], how, [-1])  # vLLM takes -1 for "no seed"
    body = dict(server.seen[-1][1])
    wanted = {
        **{"model": "toy", "prompt": [1, 2], "max_tokens": 5, "temperature": 1.0, "top_p": 0.9, "top_k": 7},
        **{"seed": 2**63 - 1, "stop_token_ids": [31], "ignore_eos": True, "logprobs": 0, "stream": True},
        **{"return_token_ids": True, "stream_interval": 4},
    }
    assert body | wanted == body
    assert ("repetition_penalty" in body) == (dialect == "vllm")  # others may not know it


def test_key_is_sent_and_missing_one_is_named(server, engine_of):
    server.api_key = "secret"
    with pytest.raises(RolloutError, match=r"GET /v1/models with 401: Unauthorized; pass its key as api_key="):
        engine_of()
    assert engine_of(api_key="secret").generate([[1]], SamplingParams(2), [0])[0].finish_reason == "length"


def test_token_ids_are_read_from_the_tokens_if_need_be(server, engine_of, monkeypatch):
    expected = engine_of().generate([[1]], SamplingParams(4), [0])
    sent = fake_server.Handler.event

    def without_ids(self, content):
        if isinstance(content, dict):
            del content["choices"][0]["token_ids"]
        sent(self, content)

    monkeypatch.setattr(fake_server.Handler, "event", without_ids)
    assert engine_of(dialect="openai").generate([[1]], SamplingParams(4), [0]) == expected

    def with_text(self, content):
        if isinstance(content, dict):
            content["choices"][0]["logprobs"]["tokens"] = ["the"]
        without_ids(self, content)

    monkeypatch.setattr(fake_server.Handler, "event", with_text)
    with pytest.raises(RolloutError, match=r"'the' as a token; completions need token ids.*return_token_ids"):
        engine_of(dialect="openai")


# --- log-probabilities ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("meaning", "allowed", "refused"),
    [
        ("raw", [{"top_k": 5}, {"temperature": 0}], [{"temperature": 0.7}, {"temperature": 2, "top_p": 0.9}]),
        ("processed", [{"temperature": 0.7}, {"temperature": 0, "top_k": 5}], [{"top_k": 5}, {"top_p": 0.9}]),
        ("tempered", [{"temperature": 0.7, "top_p": 0.5, "top_k": 9}, {"temperature": 0, "top_k": 5}], []),
    ],
)
def test_log_probs_that_mean_something_else_are_refused(server, engine_of, meaning, allowed, refused):
    server.log_probs = meaning
    engine = engine_of()
    model = load(engine)
    for options in allowed:
        how = SamplingParams(8, **options)
        (completion,) = engine.generate([[1]], how, [0])
        of_all = model.distributions([1], completion.token_ids, how.temperature or 1.0)
        expected = chosen_log_probs(of_all, completion.token_ids, completion.sampling_mask)
        assert (completion.sampling_mask is not None) == (meaning == "tempered" and how.truncates)
        torch.testing.assert_close(torch.tensor(completion.log_probs).double(), expected, atol=1e-4, rtol=0)
        if not how.temperature:
            last = torch.tensor([1, *completion.token_ids[:-1]])
            assert completion.token_ids == (model.following[last] + model.bias).argmax(-1).tolist()
    sent = len(server.seen)
    for options in refused:
        with pytest.raises(SamplingParamsError, match=r"not those that a trainer computes. Change .*--logprobs-mode"):
            engine.submit([1], SamplingParams(8, **options), "a", seed=0)
    assert len(server.seen) == sent
    with pytest.raises(ValueError, match=r"temperature=0.005; .* has 0, and from 0.01 on"):
        engine.generate([[1]], SamplingParams(4, temperature=0.005), [0])


def test_set_of_more_tokens_than_the_server_tells_is_the_whole_vocabulary(server, engine_of):
    """For those tokens, both the log-probability and what the trainer computes are those before the truncation."""
    server.log_probs = "tempered"
    engine = engine_of(max_logprobs=6)
    model, how = load(engine), SamplingParams(40, temperature=1.5, top_p=0.8)
    (completion,) = engine.generate([[1]], how, [0])
    of_all = model.distributions([1], completion.token_ids, 1.5)
    expected = [left_to_choose(log_probs, how) for log_probs in of_all]
    found = [sorted(kept) for kept in kept_sets(completion.sampling_mask)]
    assert found == [kept if len(kept) < 6 else [] for kept in expected]
    assert 0 < sum(map(bool, found)) < 40  # of both kinds
    plain = chosen_log_probs(of_all, completion.token_ids, completion.sampling_mask)
    torch.testing.assert_close(torch.tensor(completion.log_probs).double(), plain, atol=1e-4, rtol=0)
    assert server.seen[-1][1]["logprobs"] == 6
    for name, wrong in (("max_logprobs", -1), ("max_logprobs", "5"), ("max_running", "8"), ("timeout", 0)):
        with pytest.raises(ValueError, match=name):
            engine_of(**{name: wrong})
    none = engine_of(max_logprobs=0)
    assert not none.sampling_masks and none.largest_mask == 0


def test_min_p_needs_sets_that_the_server_tells(server, engine_of):
    """vLLM applies it before `LogProbs`, so that with a larger set, the log-probability of a token is neither that
    before the truncation nor that after it."""
    server.log_probs = "tempered"
    for most, needed in ((6, "needs top_k from 1 to 5 with vLLM"), (0, "needs a larger max_logprobs")):
        with pytest.raises(ValueError, match=needed):
            engine_of(max_logprobs=most).submit([1], SamplingParams(8, top_k=9, min_p=0.1), "a", seed=0)
    (completion,) = engine_of(max_logprobs=6).generate([[1]], SamplingParams(8, top_k=5, min_p=0.1), [0])
    assert all(1 <= length <= 5 for length in completion.sampling_mask.lengths)


def test_numbers_that_are_not_log_probabilities_are_refused(server, engine_of):
    engine = engine_of()
    for shift, why in ((9.0, r"not log-probabilities \(vLLM's --logprobs-mode\)"), (-9990.0, "not finite")):
        server.shift = shift
        with pytest.raises(RolloutError, match=why):
            engine.generate([[1]], SamplingParams(4), [0])
    server.shift, server.log_probs = 0.0, "logits"
    with pytest.raises(RolloutError, match="returns logits instead of log-probabilities; start vLLM with"):
        engine_of()


# --- stops ----------------------------------------------------------------------------------------------------------


def test_server_that_stops_at_its_own_tokens_is_an_error(server, engine_of):
    engine = engine_of(config=None)
    with pytest.raises(RolloutError, match=r"ended a completion after 12 of 200 tokens \(finish_reason 'length'\)"):
        engine.max_positions = None
        engine.generate([[1] * 500], LONG, [0])


def test_server_checks_the_tokens_where_the_vocabulary_is_not_known(engine_of, caplog):
    engine = engine_of(config=None)
    assert "the vocabulary of the model at" in caplog.text
    with pytest.raises(RolloutError, match=r"POST /v1/completions with 400: Token id 99 is out of vocabulary"):
        engine.generate([[1], [99]], SamplingParams(4), [0, 0])
    with pytest.raises(PromptError, match=r"prompt 0 has 500 tokens.*the server's 512 positions"):
        engine.generate([[1] * 500], SamplingParams(16), [0])


def test_server_forgets_requests_that_end_here(server, engine_of):
    engine = engine_of()
    futures = [engine.submit([1], LONG, str(k), seed=k) for k in range(4)]
    begun(engine, 4)
    engine.abort(["1"])
    assert futures[1].result(10).finish_reason == "abort"
    wait_until(lambda: server.running == 3)
    engine.pause("abort")  # its streams end although the engine takes no steps
    wait_until(lambda: server.paused)
    engine.resume()
    wait_until(lambda: server.running == 0)


def test_only_so_many_requests_are_at_the_server(server, engine_of):
    engine = engine_of(max_running=2)
    futures = [engine.submit([1], SamplingParams(30), str(k), seed=k) for k in range(12)]
    begun(engine, 2)
    assert engine.load().waiting >= 8
    most = 0
    while not all(future.done() for future in futures):
        most = max(most, server.running)
        time.sleep(0.001)
    assert 2 <= most < 8  # the server may see the end of one after the beginning of the next
    assert all(len(future.result().token_ids) == 30 for future in futures)


# --- pauses, without and with the server's help ---------------------------------------------------------------------


def test_server_without_pause_is_asked_for_the_rest(server, engine_of):
    engine = engine_of(dialect="openai")
    model = Bigram(0)
    with torch.no_grad():
        model.following.copy_(torch.tensor(server.following))
        model.bias.zero_()
    future = engine.submit([1], LONG, "a", seed=5)
    begun(engine)
    engine.pause()
    wait_until(lambda: server.running == 0)
    assert not future.done() and not server.paused
    engine.resume()
    completion = future.result(20)
    assert len(completion.token_ids) == 200
    expected = model.log_probs([1], completion.token_ids)
    torch.testing.assert_close(torch.tensor(completion.log_probs).double(), expected, atol=1e-4, rtol=0)
    rest = server.seen[-1][1]
    done = 200 - rest["max_tokens"]
    assert done > 0 and rest["prompt"] == [1, *completion.token_ids[:done]]
    assert rest["seed"] != 5  # would draw the same numbers once more


def test_paused_request_is_not_late(server, engine_of):
    engine = engine_of(timeout=0.3)
    future = engine.submit([1], SamplingParams(50), "a", seed=0)
    begun(engine)
    engine.pause()
    engine._looked = 0.0
    time.sleep(0.5)
    engine.resume()
    assert len(future.result(10).token_ids) == 50


def test_update_of_a_paused_server_leaves_it_paused(server, engine_of):
    engine = engine_of()
    models = {1: load(engine)}
    future = engine.submit([1], LONG, "a", seed=0)
    begun(engine)
    engine.pause()
    models[2] = load(engine, 4, 2)
    assert server.paused and not future.done()
    engine.resume()
    completion = future.result(20)
    assert not server.paused and set(completion.weight_versions) == {1, 2}
    Subject(engine, distributions=Bigram.distributions).check(completion, [1], models)


def test_engine_that_was_killed_leaves_no_paused_server(server, engine_of):
    server.paused = True
    assert len(engine_of().generate([[1]], SamplingParams(3), [0])[0].token_ids) == 3
    engine = engine_of()
    engine.pause()
    assert server.paused
    engine.close()
    assert not server.paused


def test_engine_that_was_killed_leaves_no_sleeping_server(server, engine_of):
    """Without its memory, the server would fail in its next step."""
    engine_of().sleep()
    assert server.asleep
    engine_of()
    assert not server.asleep and not server.paused


def test_engine_is_not_paused_if_its_server_could_not_be(server, engine_of):
    engine = engine_of()
    server.faults["/pause"] = 500
    with pytest.raises(RolloutError, match=r"POST /pause with 500"):
        engine.pause()
    engine.generate([[1]], SamplingParams(2), [0])
    engine.pause()
    server.faults["/pause"] = 500
    with pytest.raises(RolloutError, match=r"POST /pause with 500"):
        engine.pause()
    assert server.paused and engine.is_held("pause")  # both as before
    engine.resume()
    engine.generate([[1]], SamplingParams(2), [0])


def test_sleep_refuses_requests_and_wake_up_continues_them(server, engine_of):
    engine = engine_of()
    future = engine.submit([1], LONG, "a", seed=0)
    begun(engine)
    engine.sleep()
    assert server.asleep and engine.keeps_weights
    wait_until(lambda: server.running == 0)
    with pytest.raises(RolloutError, match="asleep"):
        engine.generate([[1]], SamplingParams(2), [0])
    engine.wake_up()
    assert not server.asleep and len(future.result(20).token_ids) == 200
    # vLLM pauses before it frees memory.
    server.faults["/sleep"] = lambda handler: (setattr(server, "paused", True), handler.error(500, "no pool of memory"))
    with pytest.raises(RolloutError, match=r"POST /sleep.* with 500"):
        engine.sleep()
    engine.generate([[1]], SamplingParams(2), [0])
    with pytest.raises(RolloutError, match=r"no endpoint for sleep\(\) \(dialect 'openai'\)"):
        engine_of(dialect="openai").sleep()


def test_pause_and_sleep_do_not_end_each_other(server, engine_of):
    engine = engine_of()
    future = engine.submit([1], LONG, "a", seed=0)
    begun(engine)
    engine.pause()
    engine.sleep()
    engine.wake_up()
    assert server.paused and not server.asleep and not future.done()
    engine.sleep()
    sent = len(server.seen)
    engine.resume()
    assert len(server.seen) == sent  # it would take a step without its memory
    engine.wake_up()
    assert not server.paused and len(future.result(20).token_ids) == 200


def test_sleeping_server_takes_no_weights(server, engine_of):
    """They are not on its device then."""
    engine = engine_of()
    engine.sleep()
    engine.begin_update()
    with pytest.raises(RolloutError, match=r"it is asleep; call wake_up\(\) first"):
        engine.load_weights(Bigram(3).state_dict().items())
    engine.abandon_update()
    engine.wake_up()
    load(engine)
    assert engine.generate([[1]], SamplingParams(2), [0])[0].weight_versions == [1, 1]


# --- weights --------------------------------------------------------------------------------------------------------


def test_server_that_cannot_take_weights_says_so_before_any_are_sent(server, engine_of):
    for engine, why in (
        (engine_of(dialect="openai"), "an OpenAI-compatible server has no endpoint for weights"),
        (engine_of(config=None), r"pass config="),
    ):
        sent = len(server.seen)
        for call in (engine.weight_shapes, lambda engine=engine: engine.load_weights([("bias", torch.zeros(32))])):
            with pytest.raises(RolloutError, match=f"cannot take weights: {why}"):
                call()
        assert len(server.seen) == sent
    server.training = False
    with pytest.raises(RolloutError, match="start vLLM with the environment variable VLLM_SERVER_DEV_MODE=1"):
        engine_of().weight_shapes()
    engine = engine_of(weights_dir=None)
    engine._server.host, engine._weights_dir, engine._dialect.no_updates = "far", None, ""
    with pytest.raises(RolloutError, match=r"pass weights_dir=, a folder that this worker and the server both see"):
        engine.weight_shapes()


def test_folder_of_an_update_is_removed(server, engine, tmp_path):
    engine.begin_update()
    engine.load_weights([("bias", torch.ones(32))])
    (folder,) = tmp_path.iterdir()
    engine.abandon_update()
    assert not folder.exists() and server.bias != [1.0] * 32  # it never got them
    engine.begin_update()
    engine.load_weights(Bigram(1).state_dict().items())
    server.faults["/collective_rpc"] = 500
    with pytest.raises(RolloutError, match=r"POST /collective_rpc with 500: this was asked for"):
        engine.finish_update(2)
    engine.abandon_update()
    assert list(tmp_path.iterdir()) == [] and not server.paused
    load(engine, version=3)
    assert engine.generate([[1]], SamplingParams(1), [0])[0].weight_versions == [3]


def test_reload_that_failed_is_finished_before_the_next_one(server, engine_of):
    """Otherwise, vLLM would mix tensors of both."""
    engine = engine_of()

    def fail(handler):
        server.reloading = True
        handler.error(500, "no such file")

    server.faults["/collective_rpc"] = fail
    with pytest.raises(RolloutError, match=r"POST /collective_rpc with 500: no such file"):
        load(engine)
    engine.abandon_update()
    assert not server.reloading and not server.paused
    model = load(engine, version=2)
    (completion,) = engine.generate([[1]], SamplingParams(4), [0])
    assert completion.log_probs == pytest.approx(model.log_probs([1], completion.token_ids), abs=1e-4)


@pytest.mark.parametrize(
    "weights, told",
    [
        ({"bias": torch.ones(32), "bios": torch.ones(32)}, "has a tensor 'bios', but the model has none of this name"),
        ({"bias": torch.ones(31)}, r"'bias' with shape \(31,\), but the model's has shape \(32,\)"),
        ({"bias": torch.ones(32)}, "1 of 2 tensors of the update are missing, such as 'following'"),
    ],
    ids=["name", "shape", "missing"],
)
def test_tensors_that_do_not_fit_are_refused_before_the_server_reads_them(server, engine_of, tmp_path, weights, told):
    engine = engine_of()
    engine.begin_update()
    with pytest.raises(WeightsError, match=told):
        engine.load_weights(weights.items())
        engine.finish_update(1)
    engine.abandon_update()
    assert list(tmp_path.iterdir()) == []
    engine.begin_update()
    engine.load_weights([("bias", torch.ones(32))])
    with pytest.raises(WeightsError, match="'bias' twice"):
        engine.load_weights([("bias", torch.ones(32))])
    load(engine, version=2)
    assert engine.generate([[1]], SamplingParams(1), [0])[0].weight_versions == [2]


def test_server_that_lost_the_weights_is_not_used(server, engine, engine_of, monkeypatch, caplog):
    monkeypatch.setattr(http_engine, "ASK_SECONDS", 0.0)
    engine.generate([[1]], SamplingParams(1), [0])
    server.version = "default"  # as after a restart
    with pytest.raises(RolloutError, match=r"has weights 'default' instead of '1\.\w+': it was restarted"):
        engine.generate([[1]], SamplingParams(1), [0])
    with pytest.raises(RolloutError, match="no complete weights"):
        engine.generate([[1]], SamplingParams(1), [0])
    load(engine, version=2)
    engine.generate([[1]], SamplingParams(1), [0])
    with caplog.at_level("WARNING"):
        engine_of()
    assert "of an earlier update; update them again" in caplog.text


def test_submit_does_not_wait_for_the_servers_weight_version(server, engine, monkeypatch):
    """The event loop of sessions calls it, and of a gateway."""
    monkeypatch.setattr(http_engine, "ASK_SECONDS", 0.0)
    answer = threading.Event()
    version = engine._dialect.version
    monkeypatch.setattr(engine._dialect, "version", lambda: answer.wait(5) and version())
    begun = time.monotonic()
    future = engine.submit([1], SamplingParams(1), "a", seed=0)
    assert time.monotonic() - begun < 2 and not future.done()
    answer.set()
    assert future.result(10).weight_versions == [1]
    server.version = "default"
    with pytest.raises(RolloutError, match=r"has weights 'default' instead of"):
        engine.submit([1], SamplingParams(1), "a", seed=0).result(10)


@pytest.mark.parametrize("fault", [503, 500])
def test_version_that_the_server_does_not_tell_fails_no_request(server, engine, monkeypatch, fault):
    running = engine.submit([1], SamplingParams(200), "a", seed=0)
    begun(engine)
    monkeypatch.setattr(http_engine, "ASK_SECONDS", 0.0)
    server.faults["/weight_info"] = fault
    engine.submit([1], SamplingParams(1), "b", seed=0).result(10)
    assert "/weight_info" not in server.faults and running.result(10).finish_reason == "length"


@pytest.fixture
def restarted(server):
    """A server that has lost its weights, and answers only its third request for the version."""
    asked = []

    def turn_away(handler):
        asked.append(handler.path)
        if len(asked) < 3:
            server.faults["/weight_info"] = turn_away
        handler.error(503, "starting")

    def restart():
        server.version = "default"
        server.faults["/weight_info"] = turn_away

    return restart


def test_no_request_begins_while_the_server_does_not_tell_its_version(server, engine, monkeypatch, restarted):
    monkeypatch.setattr(http_engine, "ASK_SECONDS", 0.0)
    restarted()
    sent = len(server.seen)
    with pytest.raises(RolloutError, match="has weights 'default'"):
        engine.generate([[1]], SamplingParams(3), [0])
    assert {path for path, _ in server.seen[sent:]} == {"/weight_info"}


def test_request_that_was_turned_away_does_not_count_for_weights_that_are_lost(server, engine, monkeypatch, restarted):
    monkeypatch.setattr(http_engine, "ASK_SECONDS", 0.3)

    def restart(handler):
        restarted()
        handler.error(503, "starting")

    server.faults["/v1/completions"] = restart  # it is sent again after half a second
    with pytest.raises(RolloutError, match="has weights 'default'"):
        engine.generate([[1]], SamplingParams(3), [0])


def test_server_that_never_tells_its_version_is_an_error(server, engine_of, monkeypatch):
    server.delay = 0.01
    engine = engine_of(timeout=1.0)
    load(engine)
    running = engine.submit([1], SamplingParams(500), "a", seed=0)
    begun(engine)
    monkeypatch.setattr(http_engine, "ASK_SECONDS", 0.0)
    server.always["/weight_info"] = lambda handler: handler.error(503, "no time")
    with pytest.raises(RolloutError, match=r"GET /weight_info with 503: no time"):
        engine.generate([[1]], SamplingParams(1), [0])
    server.always.clear()
    server.delay = 0.0
    assert engine.generate([[1]], SamplingParams(1), [0])[0].finish_reason == "length"
    assert running.result(20).finish_reason == "length"


def during_the_check(engine, monkeypatch):
    """A request for which the engine asks for the version. The answer, once the event is set, is that of a server that
    was restarted."""
    monkeypatch.setattr(http_engine, "ASK_SECONDS", 0.0)
    asking, answer = threading.Event(), threading.Event()
    load(engine)
    monkeypatch.setattr(engine._dialect, "version", lambda: asking.set() or (answer.wait(10) and "default"))
    request = engine.submit([1], SamplingParams(1), "a", seed=0)
    assert asking.wait(10)
    return request, answer


def test_update_that_begins_during_the_check_is_not_abandoned(server, engine_of, monkeypatch):
    engine = engine_of()
    failing, answer = during_the_check(engine, monkeypatch)
    worker = threading.Thread(target=engine.begin_update)
    worker.start()
    wait_until(lambda: "update" in engine._holds, 10)
    answer.set()
    with pytest.raises(RolloutError, match="has weights 'default' instead of"):
        failing.result(10)
    worker.join(10)
    monkeypatch.undo()
    later = engine.submit([1], SamplingParams(1), "b", seed=0)  # it waits for the update
    engine.load_weights(Bigram(3).state_dict().items())
    engine.finish_update(2)
    assert later.result(10).weight_versions == [2]


def test_loss_of_the_weights_fails_also_what_came_during_the_check(server, engine_of, monkeypatch):
    engine = engine_of()
    first, answer = during_the_check(engine, monkeypatch)
    second = engine.submit([1], SamplingParams(1), "b", seed=0)
    answer.set()
    for future in (first, second):
        with pytest.raises(RolloutError, match="has weights 'default' instead of"):
            future.result(10)


def test_slow_answers_about_the_version_do_not_add_up(server, engine, monkeypatch):
    monkeypatch.setattr(http_engine, "ASK_SECONDS", 0.2)
    version, asked = engine._dialect.version, []
    monkeypatch.setattr(engine._dialect, "version", lambda: asked.append(time.sleep(0.3)) or version())
    time.sleep(0.3)
    assert len(engine.generate([[1]] * 50, SamplingParams(2), list(range(50)))) == 50
    assert 1 <= len(asked) <= 10


class Turns(Environment):
    """Two turns, after the first of which the server begins anew."""

    restart = staticmethod(lambda: None)
    turn = 0

    async def step(self, action):
        self.turn += 1
        self.restart()
        return Step([5], done=self.turn == 2)


def test_session_waits_while_the_server_has_no_weights(server, engine, monkeypatch):
    monkeypatch.setattr(http_engine, "ASK_SECONDS", 0.0)
    sessions = AgentEngine(engine, environment=Turns)

    def restart():
        Turns.restart = staticmethod(lambda: None)
        server.version = "default"

    Turns.restart = staticmethod(restart)
    future = sessions.submit([1], SamplingParams(2), "a", seed=0)
    wait_until(lambda: engine.weight_version is None, 10)
    time.sleep(0.2)
    assert not future.done()
    load(engine, version=2)
    assert future.result(10).weight_versions == [1, 1, -1, 2, 2]
    Turns.restart = staticmethod(restart)
    with pytest.raises(RolloutError, match=r"has weights 'default'|no complete weights"):
        sessions.generate([[1]], SamplingParams(2), [0])  # an update would have to wait for it
    sessions.close()


def test_names_of_weights_are_those_of_transformers(server, engine_of, tmp_path):
    for config, given in ((LLAMA, LLAMA), (TIED, TIED), (TIED, TIED.to_dict())):
        engine = engine_of(config=given)
        engine._shapes = None
        state = plain_model(config, 0).state_dict()
        shapes = engine.weight_shapes()
        assert shapes == {name: tuple(state[name].shape) for name in shapes}
        assert {tensor.data_ptr() for tensor in state.values()} == {state[name].data_ptr() for name in shapes}
    (tmp_path / "config.json").write_text(json.dumps(LLAMA.to_dict()))
    assert engine_of(config=tmp_path).vocab_size == 32
    with pytest.raises(ValueError, match=r"config=17; expected a Hugging Face config"):
        engine_of(config=17)


def test_worker_with_a_server(server, tmp_path):
    wanted = RayClassWithInitArgs(RolloutWorker, HTTPEngine, server.url, dialect="openai", config=CONFIG)
    with LocalWorkerGroup(1, wanted) as group:
        assert group.current_weight_version() == [0]
        (generated,) = group.generate([[1, 2]], Broadcast(SamplingParams(3)), [0])
        assert generated.completion.weight_versions == [0] * 3
        with pytest.raises(Exception, match="cannot take weights"):
            group.begin_weights("key", 1, "sender")


# --- servers that fail ----------------------------------------------------------------------------------------------


def test_server_that_is_not_there():
    start = time.monotonic()
    with pytest.raises(RolloutError, match=r"cannot reach the server at http://127\.0\.0\.1:9: ConnectionRefused.*URL"):
        HTTPEngine("http://127.0.0.1:9")
    assert time.monotonic() - start < 5
    for url in ("localhost:8000", "http://127.0.0.1:80000", "http://127.0.0.1:port"):
        with pytest.raises(ValueError, match=f"url='{url}'; expected an address such as"):
            HTTPEngine(url)


def test_killed_server_fails_its_requests_at_once():
    process = serving()
    try:
        engine = HTTPEngine(process.url, config=CONFIG)
        futures = [engine.submit([1], LONG, str(k), seed=k) for k in range(3)]
        begun(engine, 3)
        killed = time.monotonic()
        process.kill()
        for future in futures:
            with pytest.raises(RolloutError, match=r"closed the connection during POST.*probably died|cannot reach"):
                future.result(10)
        assert time.monotonic() - killed < 5
        with pytest.raises(RolloutError, match="cannot reach the server"):
            engine.generate([[1]], SamplingParams(2), [0])
    finally:
        kill(process)
    engine.close()


def test_server_that_is_restarted_under_its_requests_gets_weights_from_the_next_update(engine_of, caplog):
    """Which waits for it. Until then, whoever asks is told."""
    process = serving()
    try:
        engine = engine_of(url=process.url, timeout=20)
        load(engine)
        futures = [engine.submit([1], LONG, str(k), seed=k) for k in range(3)]
        begun(engine, 3)
        kill(process)
        for future in futures:
            with pytest.raises(RolloutError, match=f"cannot reach the server at {process.url}"):
                future.result(10)
        with pytest.raises(RolloutError, match=f"no complete weights: cannot reach the server at {process.url}"):
            engine.submit([1], LONG, "a", seed=0)
        updated = []
        updating = threading.Thread(target=lambda: updated.append(load(engine, seed=4, version=2)))
        updating.start()
        wait_until(lambda: "The update waits for it, for at most 20 s" in caplog.text, 10)
        process = serving(process.url.rpartition(":")[2])
        updating.join(10)
        (completion,) = engine.generate([[1]], SamplingParams(8), [0])
        assert completion.weight_versions == [2] * 8
        assert completion.log_probs == pytest.approx(updated[0].log_probs([1], completion.token_ids), abs=1e-4)
        kill(process)
        engine._server.timeout = 0.5
        with pytest.raises(http_client.ServerError, match="cannot reach the server"):
            load(engine, version=3)
    finally:
        kill(process)


def cut(after, then=lambda: None):
    """What goes wrong with a request: its connection breaks after some tokens."""

    def streamed(handler):
        event, sent = handler.event, []

        def some(content):
            if len(sent) == after:
                then()
                handler.connection.shutdown(socket.SHUT_RDWR)
            sent.append(event(content))

        handler.event = some
        handler.completions(handler.server.seen[-1][1], {})

    return streamed


def test_request_whose_connection_broke_goes_on(server, engine_of):
    engine = engine_of()
    model, sent = load(engine), len(server.seen)
    server.faults["/v1/completions"] = cut(5)
    (completion,) = engine.generate([[1]], SamplingParams(20), [0])
    assert completion.weight_versions == [1] * 20
    assert completion.log_probs == pytest.approx(model.log_probs([1], completion.token_ids), abs=1e-4)
    bodies = [body for path, body in server.seen[sent:] if path == "/v1/completions"]
    assert [body["prompt"] for body in bodies] == [[1], [1, *completion.token_ids[:5]]]
    server.always["/v1/completions"] = cut(0)
    with pytest.raises(RolloutError, match="closed the connection during POST"):
        engine.generate([[1]], SamplingParams(20), [0])


@pytest.mark.parametrize("after", [3, 0])
def test_request_that_the_server_aborts_goes_on(server, engine_of, after):
    """Somebody else has told the server, or it is about to end. Before the first token, vLLM gives no reason."""
    engine = engine_of(timeout=10)
    model, sent = load(engine), len(server.seen)

    def abort(handler):
        event = handler.event

        def changed(content):
            if isinstance(content, dict) and content["choices"][0]["finish_reason"]:
                content["choices"][0]["finish_reason"] = "abort"
            event(content)

        handler.event = changed
        handler.completions({**server.seen[-1][1], "max_tokens": after}, {})

    server.faults["/v1/completions"] = abort
    (completion,) = engine.generate([[1]], SamplingParams(20), [0])
    assert len(completion.token_ids) == 20 and completion.finish_reason == "length"
    assert completion.log_probs == pytest.approx(model.log_probs([1], completion.token_ids), abs=1e-4)
    again = server.seen[sent:]
    assert [path for path, _ in again][-2:] == ["/weight_info", "/v1/completions"]
    assert again[-1][1]["prompt"] == [1, *completion.token_ids[:after]]


def test_request_that_the_server_only_aborts_is_an_error(server, engine_of):
    engine, other = engine_of(timeout=1.0), engine_of(dialect="openai")
    sent = len(server.seen)
    server.always["/v1/completions"] = lambda handler: handler.streamed(())
    with pytest.raises(RolloutError, match="ended a request before its next token"):
        engine.generate([[1]], SamplingParams(2), [0])
    assert 2 <= [path for path, _ in server.seen[sent:]].count("/v1/completions") <= 20  # it has waited in between
    sent = len(server.seen)
    with pytest.raises(RolloutError, match="ended a request before its next token"):
        other.generate([[1]], SamplingParams(2), [0])
    assert len(server.seen) == sent + 1


@pytest.mark.parametrize("how", ["cut", "error"])
def test_request_that_failed_with_its_server_does_not_go_on_with_other_weights(server, engine, how):
    sent = len(server.seen)

    def fail(handler):
        server.version = "default"
        handler.error(500, "EngineCore died")

    server.faults["/v1/completions"] = cut(5, lambda: setattr(server, "version", "default")) if how == "cut" else fail
    with pytest.raises(RolloutError, match="has weights 'default' instead of"):
        engine.generate([[1]], SamplingParams(20), [0])
    assert [path for path, _ in server.seen[sent:]].count("/v1/completions") == 1


def test_errors_carry_the_servers_message(server, engine_of):
    engine = engine_of()
    server.faults["/v1/completions"] = 500
    with pytest.raises(RolloutError, match=r"answered POST /v1/completions with 500: this was asked for") as caught:
        engine.generate([[1]], SamplingParams(2), [0])
    assert caught.value.status == 500

    def in_the_middle(handler):
        handler.begin_stream()
        handler.event({"error": {"message": "EngineCore died", "code": 503}})
        handler.end_stream()

    server.faults["/v1/completions"] = in_the_middle
    with pytest.raises(RolloutError, match=r"in the middle of POST /v1/completions: EngineCore died"):
        engine.generate([[1]], SamplingParams(2), [0])

    def truncated(handler):
        handler.begin_stream()
        handler.wfile.flush()
        handler.connection.close()
        handler.close_connection = True

    server.faults["/v1/completions"] = truncated
    with pytest.raises(RolloutError, match="closed the connection"):
        engine.generate([[1]], SamplingParams(2), [0])
    server.faults["/v1/models"] = lambda handler: handler.answer({"data": []})
    with pytest.raises(RolloutError, match="names no model"):
        engine_of()
    with pytest.raises(RolloutError, match="has no model 'other'; it has toy"):
        engine_of(model="other")


def test_request_that_was_turned_away_is_sent_again(server, engine_of, monkeypatch):
    monkeypatch.setattr(http_client, "RETRY_SECONDS", (0.01, 0.01))
    engine = engine_of()
    server.seen.clear()
    server.faults["/v1/completions"] = 429
    assert len(engine.generate([[1]], SamplingParams(2), [0])[0].token_ids) == 2
    assert [path for path, _ in server.seen].count("/v1/completions") == 2
    server.always["/v1/completions"] = lambda handler: handler.error(503, "no room")
    with pytest.raises(RolloutError, match="503: no room"):
        engine.generate([[1]], SamplingParams(2), [0])
    assert [path for path, _ in server.seen].count("/v1/completions") == 5


def test_silent_server_is_an_error(server, engine_of):
    engine = engine_of(timeout=0.3)
    held = threading.Event()
    server.faults["/v1/completions"] = lambda handler: (handler.begin_stream(), handler.wfile.flush(), held.wait(10))
    with pytest.raises(RolloutError, match=r"did not answer a request for tokens within 0.3 s; it is overloaded or"):
        engine.generate([[1]], SamplingParams(2), [0])
    server.faults["/weight_info"] = lambda handler: held.wait(10)
    with pytest.raises(RolloutError, match=r"did not answer GET /weight_info within 0.3 s"):
        engine._dialect.version()
    held.set()


def test_url_may_have_a_path(server):
    prefixed = http_client.Server(f"{server.url}/prefix/")
    with pytest.raises(RolloutError, match="answered GET /v1/models with 404"):
        prefixed.get("/v1/models")
    assert server.seen[-1][0] == "/prefix/v1/models"
