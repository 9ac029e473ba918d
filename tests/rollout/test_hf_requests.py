"""HFEngine: the contract of all engines, and its batches, compared with plain forward passes."""

import subprocess
import sys
import textwrap

import pytest
import torch
from engine_contract import EngineContract, Subject
from rollout_helpers import GPT2, LLAMA, plain_log_probs, plain_model
from transformers import LlamaConfig, MambaConfig, MistralConfig

from workers.rollout.engines import decoding
from workers.rollout.engines.hf_engine import HFEngine
from workers.rollout.engines.rollout_engine import EngineLoad, SamplingParams
from workers.rollout.rollout_errors import RolloutError

CONFIG = LlamaConfig(**{**LLAMA.to_diff_dict(), "max_position_embeddings": 512})
MISTRAL = MistralConfig(**{**LLAMA.to_diff_dict(), "sliding_window": 8})
MAMBA = MambaConfig(vocab_size=32, hidden_size=32, num_hidden_layers=2, state_size=8)
PROMPTS = [[5, 9, 2], [7], [3, 3, 8, 1, 30, 12] * 4, [11, 4], [1, 2, 3, 4], [7], [7]]


@pytest.fixture(scope="module")
def subject():
    engine = HFEngine(CONFIG)
    yield Subject(engine, config=CONFIG, positions=512)
    engine.close()


class TestContract(EngineContract):
    long = 150


@pytest.fixture
def make():
    """config -> an engine with the weights of `plain_model`, and that model."""
    engines = []

    def made(config, **options):
        model = plain_model(config, 3)
        engines.append(HFEngine(config, **options))
        engines[-1].load_weights(model.state_dict().items())
        return engines[-1], model

    yield made
    for engine in engines:
        engine.close()


def shapes_of(engine):
    """The (rows, columns) of the tokens of each forward pass from now on."""
    shapes = []
    engine.model.register_forward_pre_hook(
        lambda model, args, kwargs: shapes.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )
    return shapes


def check(model, prompt, completion, temperature=1.0, atol=5e-5):
    expected = plain_log_probs(model, prompt, completion.token_ids, temperature or 1.0)
    torch.testing.assert_close(torch.tensor(completion.log_probs).double(), expected, atol=atol, rtol=0)


@pytest.mark.parametrize("config", [LLAMA, GPT2], ids=["llama", "gpt2"])
def test_rows_join_and_leave_a_running_batch(make, monkeypatch, config):
    """Rows with their own length, sampling parameters and end, in a cache that is copied again and again."""
    monkeypatch.setattr(decoding, "ROOM", 5)
    monkeypatch.setattr(decoding, "WASTE", 8)
    engine, model = make(config, max_batch_size=5)
    how = [
        SamplingParams(9 + 4 * k, temperature=(1.0, 0.0, 0.7)[k % 3], top_k=(0, 6)[k % 2], top_p=(1.0, 0.9)[k % 2])
        for k in range(len(PROMPTS))
    ]
    alone = [engine.generate([prompt], how[k], [k])[0] for k, prompt in enumerate(PROMPTS)]
    shapes = shapes_of(engine)
    futures = []

    def submit(*_):
        """Each request is submitted when the one before has ended or has three tokens."""
        k = len(futures)
        if k < len(PROMPTS) and (k == 0 or len(shapes) >= 3 * k):
            futures.append(engine.submit(PROMPTS[k], how[k], f"request-{k}", seed=k))

    engine.model.register_forward_hook(submit)
    submit()
    while len(futures) < len(PROMPTS):
        futures[-1].result(30)
    completions = [future.result(30) for future in futures]
    assert [one.token_ids for one in completions] == [one.token_ids for one in alone]
    for prompt, params, completion in zip(PROMPTS, how, completions, strict=True):
        check(model, prompt, completion, params.temperature)
    rows = [count for count, columns in shapes if columns == 1]
    assert max(rows) == 5 and rows[-1] == 1  # the last ones run alone, without the rows that have ended


def test_equal_prompts_are_computed_once_and_others_with_little_padding(make):
    engine, model = make(CONFIG)
    prompts = [[1 + k % 8] * (2 if k % 8 else 300) for k in range(16)]
    shapes = shapes_of(engine)
    completions = engine.generate(prompts, SamplingParams(3), range(16))
    for prompt, completion in zip(prompts, completions, strict=True):
        check(model, prompt, completion)
    prompts_alone = [shape for shape in shapes if shape[1] > 1]
    assert (1, 300) in prompts_alone and (7, 2) in prompts_alone and shapes[-2:] == [(16, 1)] * 2


@pytest.mark.parametrize("config", [MISTRAL, MAMBA], ids=["sliding", "recurrent"])
def test_models_with_other_caches(make, config):
    engine, model = make(config)
    future = engine.submit([4, 5, 6], SamplingParams(12), "first", seed=0)
    completions = engine.generate(PROMPTS, SamplingParams(12), range(len(PROMPTS)))
    for prompt, completion in zip([[4, 5, 6], *PROMPTS], [future.result(30), *completions], strict=True):
        assert len(completion.token_ids) == 12
        check(model, prompt, completion, atol=5e-4)


def test_sleep_and_weights_without_an_update_in_the_middle_of_requests(make):
    engine, first = make(CONFIG)
    second = plain_model(CONFIG, 8)
    unbroken = engine.generate(PROMPTS, SamplingParams(100), range(len(PROMPTS)))
    for new in (first, second):
        futures = [engine.submit(p, SamplingParams(100), str(k), seed=k) for k, p in enumerate(PROMPTS)]
        Subject(engine).until(lambda load: load.running == len(PROMPTS))
        engine.sleep()
        counts = [len(engine._requests[str(k)].token_ids) for k in range(len(PROMPTS))]
        assert all(counts) and engine._batch._cache is None  # keys and values were freed
        with pytest.raises(RolloutError, match="asleep"):
            engine.submit([1], SamplingParams(2), "refused", seed=0)
        engine.load_weights(new.state_dict().items())
        engine.wake_up()
        completions = [future.result(30) for future in futures]
        for prompt, count, completion in zip(PROMPTS, counts, completions, strict=True):
            expected = torch.cat(
                [
                    plain_log_probs(first, prompt, completion.token_ids)[:count],
                    plain_log_probs(new, prompt, completion.token_ids)[count:],
                ]
            )
            torch.testing.assert_close(torch.tensor(completion.log_probs).double(), expected, atol=5e-5, rtol=0)
        same = [one.token_ids for one in completions] == [one.token_ids for one in unbroken]
        assert same == (new is first)


def test_logits_that_are_not_finite_fail_the_requests_and_the_engine_goes_on(make):
    engine, model = make(CONFIG)
    futures = [engine.submit([7], SamplingParams(400), name, seed=0) for name in "ab"]
    Subject(engine).until(lambda load: load.running == 2)
    with engine.parked("test"):
        engine.load_weights([("lm_head.weight", torch.full((32, 32), torch.nan))])
    for future in futures:
        with pytest.raises(RolloutError, match="logits are not finite"):
            future.result(30)
    assert engine.load() == EngineLoad(0, 0)
    engine.load_weights(model.state_dict().items())
    (completion,) = engine.generate([[5, 9, 2]], SamplingParams(8), [0])
    check(model, [5, 9, 2], completion)


def test_script_may_end_in_the_middle_of_requests():
    """An engine's thread that came back from torch while the interpreter ends would abort the process."""
    code = f"""
        import time
        from workers import HFEngine, SamplingParams
        engine = HFEngine({CONFIG.to_dict()!r})
        futures = [engine.submit([1, k], SamplingParams(500), str(k), seed=k) for k in range(30)]
        while not engine.load().running:
            time.sleep(0.001)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True)
    assert done.returncode == 0 and "terminate" not in done.stderr, done.stderr
