"""Requests and updates, on a toy engine: the contract of all engines, and what goes wrong."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from engine_contract import EngineContract, Subject
from rollout_helpers import Bigram, BigramEngine
from waits import wait_until

from workers.rollout.engines import request_engine as requests
from workers.rollout.engines.rollout_engine import EngineLoad, RolloutEngine, SamplingParams
from workers.rollout.rollout_errors import RolloutError


@pytest.fixture(scope="module")
def subject():
    engine = BigramEngine(delay=0.001)
    yield Subject(engine, model_of=Bigram, distributions=Bigram.distributions, positions=BigramEngine.max_positions)
    engine.close()


@pytest.fixture
def engine():
    engine = BigramEngine(delay=0.001)
    yield engine
    engine.close()


class TestContract(EngineContract):
    long = 100


def submit(engine, name, length=500, **options):
    return engine.submit([1], SamplingParams(length), name, seed=0, **options)


def test_error_fails_the_running_requests_and_the_engine_goes_on(engine):
    futures = [submit(engine, name) for name in "ab"]
    wait_until(lambda: engine.load().running == 2)
    with engine.parked("test"):
        engine.load_weights([("bias", torch.full((32,), torch.nan))])
    errors = [future.exception(10) for future in futures]
    assert [str(error) for error in errors] == ["the logits are not finite"] * 2
    assert errors[0] is not errors[1]
    engine.load_weights([("bias", torch.zeros(32))])
    assert len(submit(engine, "a", 3).result(10).token_ids) == 3
    engine.drawn = None
    with pytest.raises(RolloutError, match="the engine failed: TypeError: 'NoneType' object is not callable"):
        submit(engine, "b").result(10)


def test_hold_lasts_as_long_as_somebody_is_inside_parked(engine):
    """Such as two threads that read the weights at once."""
    with engine.parked("test"):
        with engine.parked("test"):
            pass
        assert engine.is_held("test")
    assert not engine.is_held("test")


def test_engine_whose_thread_cannot_begin_fails_its_requests(engine):
    engine.serve = None
    for _ in range(2):
        with pytest.raises(RolloutError, match="the engine failed: TypeError"):
            submit(engine, "a").result(10)


def test_engine_whose_serve_returns_early_fails_its_requests(engine):
    engine.serve = engine.next_step  # one step
    for _ in range(2):
        with pytest.raises(RolloutError, match=r"serve\(\) returned before next_step\(\) had returned None"):
            submit(engine, "a").result(10)


def test_closed_engine_fails_its_requests(engine):
    futures = [submit(engine, name) for name in "ab"]
    engine.close()
    for future in futures:
        with pytest.raises(RolloutError, match="closed before the request ended"):
            future.result(10)
    for generate in (lambda: submit(engine, "c"), lambda: engine.generate([[1]], SamplingParams(), [0])):
        with pytest.raises(RolloutError, match="the engine was closed"):
            generate()


def test_interrupted_batch_leaves_no_requests(engine):
    engine.check_request = lambda number, prompt, sampling_params: None  # so that the second prompt fails in its step
    with pytest.raises(RolloutError, match="IndexError"):
        engine.generate([[1], [99]], SamplingParams(400), [0, 0])
    assert engine.load() == EngineLoad(0, 0)


def test_idle_engine_has_no_thread_and_can_be_collected(engine, monkeypatch):
    monkeypatch.setattr(requests, "IDLE_SECONDS", 0.05)
    submit(engine, "a", 2).result(10)
    thread = engine._thread
    thread.join(10)
    assert not thread.is_alive()
    assert len(submit(engine, "a", 2).result(10).token_ids) == 2  # another thread serves it


def test_held_engine_whose_requests_were_aborted_has_no_thread_either(engine, monkeypatch):
    """It took no step any more, and looked again and again for the end of the pause."""
    monkeypatch.setattr(requests, "IDLE_SECONDS", 0.05)
    first = submit(engine, "a")
    wait_until(lambda: engine.load().running)
    engine.pause("abort")
    thread = engine._thread
    thread.join(10)
    assert not thread.is_alive() and first.result(0).finish_reason == "abort"
    second = submit(engine, "a", 2)
    engine.resume()
    assert len(second.result(10).token_ids) == 2


def test_pause_that_waits_lets_new_requests_wait(engine):
    engine.delay = 0.002
    first = submit(engine, "first", 50)
    wait_until(lambda: engine.load().running)
    with ThreadPoolExecutor(1) as pool:
        paused = pool.submit(engine.pause, "wait")
        wait_until(lambda: engine._draining)
        second = submit(engine, "second", 2)
        paused.result(10)
    assert len(first.result(0).token_ids) == 50 and not second.done()
    steps = engine.steps
    time.sleep(0.05)
    assert engine.steps == steps and engine.load() == EngineLoad(0, 1)
    engine.resume()
    assert len(second.result(10).token_ids) == 2


def test_pause_that_could_never_end_is_refused(engine):
    submit(engine, "a")
    wait_until(lambda: engine.load().running)
    engine.begin_update()
    with pytest.raises(RolloutError, match=r"requests are running and cannot end \(update\)"):
        engine.pause("wait")
    engine.finish_update(1)


def test_hanging_step_is_an_error_for_those_who_wait(engine, monkeypatch):
    monkeypatch.setattr(requests, "STEP_SECONDS", 0.1)
    monkeypatch.setattr(requests, "CLOSE_SECONDS", 0.1)
    go_on = threading.Event()
    engine.drawn = lambda request: go_on.wait(20) and ([1], [0.0], None)
    submit(engine, "a")
    time.sleep(0.05)
    for waits in (engine.pause, engine.begin_update):
        with pytest.raises(RolloutError, match=r"BigramEngine has not finished a step for 0.1 s"):
            waits()
    other = submit(engine, "b", 1)
    engine.drawn = lambda request: ([1], [0.0], "length")
    go_on.set()
    assert other.result(10).token_ids == [1]  # neither paused nor in an update


def test_callback_of_a_completion_may_use_the_engine(engine):
    engine.pause()  # so that the callback runs in the engine's thread
    other = submit(engine, "other", 100)
    first = submit(engine, "first", 5)
    done = threading.Event()

    def pause(_):
        with pytest.raises(RolloutError, match=r"cannot end \(callback\)"):
            engine.pause("wait")
        with pytest.raises(RolloutError, match=r"before this callback .* use submit\(\)"):
            engine.generate([[1]], SamplingParams(1), [0])
        engine.pause()
        second = submit(engine, "second", 2)
        engine.resume()
        second.add_done_callback(lambda _: done.set())

    first.add_done_callback(pause)
    engine.resume()
    assert done.wait(10) and len(other.result(10).token_ids) == 100


def test_many_threads_submit_and_abort(engine):
    Subject(engine).check_threads(60)


def test_engine_without_requests_says_so():
    class Batches(RolloutEngine):
        def generate(self, prompts, sampling_params, seeds): ...
        def load_weights(self, weights): ...
        def weight_shapes(self): ...

    engine = Batches()
    with pytest.raises(RolloutError, match=r"Batches.submit\(\): Batches generates batches only"):
        submit(engine, "a")
    engine.begin_update()
    assert engine.weight_version is None
    engine.finish_update(4)
    assert engine.weight_version == 4
    engine.abandon_update(), engine.close()
