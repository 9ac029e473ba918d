"""HFEngine: the contract of all engines, and comparisons with plain forward passes of the same model."""

import gc
import math
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
from devices import SIMULATED
from engine_contract import EngineContract, Subject
from model_types import config_of, model_of
from rollout_helpers import GPT2, LLAMA, TIED, check_completion, left_to_choose, plain_log_probs, plain_model
from torch_scripts import printed
from transformers import LlamaConfig, MambaConfig, MistralConfig
from waits import wait_until

from workers.rollout.engines import decoding
from workers.rollout.engines.hf_engine import HFEngine
from workers.rollout.engines.rollout_engine import EngineLoad, SamplingParams
from workers.rollout.rollout_errors import RolloutError, WeightsError

CONFIG = LlamaConfig(**{**LLAMA.to_diff_dict(), "max_position_embeddings": 512})
MISTRAL = MistralConfig(**{**LLAMA.to_diff_dict(), "sliding_window": 8})
MAMBA = MambaConfig(vocab_size=32, hidden_size=32, num_hidden_layers=2, state_size=8)
MANY = [[5, 9, 2], [7], [3, 3, 8, 1, 30, 12] * 4, [11, 4], [1, 2, 3, 4], [7], [7]]
PROMPTS = [[5, 9, 2], [7], [3, 3, 8, 1, 30, 12], [11, 4], [1, 2, 3, 4]]
SEEDS = [10, 11, 12, 13, 14]


def engine_of(config, seed=3, **options):
    model = plain_model(config, seed)
    engine = HFEngine(config, **options)
    engine.load_weights(model.state_dict().items())
    return engine, model


@pytest.fixture(scope="module")
def llama():
    return engine_of(LLAMA)


@pytest.mark.parametrize("config", [LLAMA, GPT2], ids=["llama", "gpt2"])
def test_temperature_zero_is_the_argmax(config):
    engine, model = engine_of(config)
    for prompt, completion in zip(
        PROMPTS, engine.generate(PROMPTS, SamplingParams(8, temperature=0), SEEDS), strict=True
    ):
        tokens = list(prompt)
        for _ in range(8):
            with torch.no_grad():
                tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
        assert completion.token_ids == tokens[len(prompt) :]
        check_completion(model, prompt, completion)


def drawn_first(engine, prompt, how, times=4000):
    engine.max_batch_size = 1000
    completions = engine.generate([prompt] * times, how, range(times))
    engine.max_batch_size = 128
    return torch.bincount(torch.tensor([completion.token_ids[0] for completion in completions]), minlength=32)


def chi_square(counts, probs):
    """The statistic, and its expected upper bound: four standard deviations above its mean."""
    expected = probs * counts.sum()
    often = expected > 5
    pooled = torch.cat([expected[often], expected[~often].sum()[None]])
    found = torch.cat([counts[often], counts[~often].sum()[None]]).double()
    kept = pooled > 0
    freedom = int(kept.sum()) - 1
    return float(((found - pooled)[kept] ** 2 / pooled[kept]).sum()), freedom + 4 * math.sqrt(2 * freedom)


alone = pytest.mark.full("frequencies of tokens with one sampling parameter at a time")
ALONE = [SamplingParams(1, temperature=0.5), SamplingParams(1, top_k=5), SamplingParams(1, top_p=0.7)]


@pytest.mark.parametrize(
    "how",
    [SamplingParams(1), SamplingParams(1, 2.0, 0.8, 9), *(pytest.param(how, marks=alone) for how in ALONE)],
    ids=str,
)
def test_sampled_frequencies_match_the_softmax(llama, how):
    engine, model = llama
    with torch.no_grad():
        probs = (model(torch.tensor([[5, 9, 2]])).logits[0, -1].double() / how.temperature).softmax(-1)
    kept = left_to_choose(probs.log(), how) or [*range(32)]
    expected = torch.zeros(32, dtype=torch.float64)
    expected[kept] = probs[kept] / probs[kept].sum()
    counts = drawn_first(engine, [5, 9, 2], how)
    assert counts[expected == 0].sum() == 0
    statistic, bound = chi_square(counts, expected)
    assert statistic < bound


def test_frequency_bound_can_fail(llama):
    engine, model = llama
    with torch.no_grad():
        probs = (model(torch.tensor([[5, 9, 2]])).logits[0, -1].double() / 1.2).softmax(-1)
    statistic, bound = chi_square(drawn_first(engine, [5, 9, 2], SamplingParams(1)), probs)
    assert statistic > bound


def test_generation_config_in_the_folder_is_ignored(tmp_path):
    model = plain_model(LLAMA, 3)
    model.generation_config.update(eos_token_id=list(range(16)), repetition_penalty=5.0, max_new_tokens=2)
    model.save_pretrained(tmp_path)
    from_folder = HFEngine(str(tmp_path)).generate(PROMPTS, SamplingParams(9), SEEDS)
    assert from_folder == engine_of(LLAMA)[0].generate(PROMPTS, SamplingParams(9), SEEDS)


def test_random_weights_depend_on_the_seed(tmp_path):
    plain_model(LLAMA, 3).save_pretrained(tmp_path)
    first, same = HFEngine(LLAMA, seed=1), HFEngine(LLAMA.to_dict(), seed=1)
    from_folder, other = HFEngine(tmp_path, random_weights=True, seed=1), HFEngine(LLAMA, seed=2)
    before = torch.get_rng_state()
    for name, tensor in first.model.state_dict().items():
        assert torch.equal(tensor, same.model.state_dict()[name])
        assert torch.equal(tensor, from_folder.model.state_dict()[name])
    assert not torch.equal(first.model.lm_head.weight, other.model.lm_head.weight)
    assert torch.equal(before, torch.get_rng_state())


def test_random_weights_depend_on_the_seed_in_threads():
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with ThreadPoolExecutor(4) as pool:
            made = list(pool.map(lambda seed: HFEngine(LLAMA, seed=seed), [1, 2] * 4))
    finally:
        sys.setswitchinterval(interval)
    for seed, engine in zip([1, 2] * 4, made, strict=True):
        expected = HFEngine(LLAMA, seed=seed).model.state_dict()
        for name, tensor in engine.model.state_dict().items():
            assert torch.equal(tensor, expected[name]), name


def test_param_dtype_keeps_rotary_frequencies_in_float32():
    engine = HFEngine(LLAMA, param_dtype="bf16")
    assert engine.model.lm_head.weight.dtype is torch.bfloat16
    assert engine.model.model.rotary_emb.inv_freq.dtype is torch.float32
    (completion,) = engine.generate([[1, 2]], SamplingParams(3), [0])
    assert len(completion.token_ids) == 3


def test_buffers_of_a_folder_in_bfloat16_are_those_of_a_trainer(tmp_path):
    """In float32. Of this model, the scale of its embeddings is a buffer."""
    model_of(config_of("gemma3_text")).bfloat16().save_pretrained(tmp_path)
    assert float(HFEngine(tmp_path).model.model.embed_tokens.embed_scale) == pytest.approx(32**0.5, rel=1e-6)


@pytest.mark.parametrize("config", [LLAMA, TIED], ids=["untied", "tied"])
def test_output_layer_in_float32_under_bfloat16(config):
    """The log-probabilities are those of the layer's own input and weights, in float64."""
    errors = {}
    for fp32_lm_head in (False, True):
        engine, seen = HFEngine(config, param_dtype="bf16", fp32_lm_head=fp32_lm_head), []
        engine.load_weights([("model.norm.weight", torch.full((32,), 8.0))])  # logits of more than a few thousandths
        engine.model.get_output_embeddings().register_forward_pre_hook(partial(keep_input, seen))
        (completion,) = engine.generate([[5, 9, 2]], SamplingParams(6), [3])
        weight = engine.read_weights(["lm_head.weight" if config is LLAMA else "model.embed_tokens.weight"])[0]
        assert weight.dtype is torch.bfloat16 and len(seen) >= 6
        logits = torch.cat(seen[-6:]).cpu().double() @ weight.cpu().double().T
        expected = logits.log_softmax(-1)[range(6), completion.token_ids]
        errors[fp32_lm_head] = float((torch.tensor(completion.log_probs).double() - expected).abs().max())
    assert errors[True] < 1e-6 < 1e-4 < errors[False]
    with pytest.raises(ValueError, match=r"output layer of LlamaForCausalLM .* without a LoRA adapter"):
        HFEngine(LLAMA, param_dtype="bf16", fp32_lm_head=True, lora={"rank": 2, "target_modules": ["lm_head"]})


def keep_input(seen, layer, given):
    seen.append(given[0][:, -1])


@pytest.mark.parametrize("config", [LLAMA, TIED], ids=["untied", "tied"])
def test_weights_are_loaded_in_place(config):
    engine, _ = engine_of(config, seed=3)
    new = plain_model(config, 8)
    places = {name: tensor.data_ptr() for name, tensor in engine.model.state_dict().items()}
    shapes = engine.weight_shapes()
    assert ("lm_head.weight" in shapes) == (config is LLAMA)
    given = {name: new.state_dict()[name] for name in shapes}  # a tied output layer comes once, as the embedding
    assert {name: tuple(tensor.shape) for name, tensor in given.items()} == shapes
    half = len(given) // 2
    engine.load_weights(list(given.items())[:half])
    engine.load_weights(iter(list(given.items())[half:]))
    assert {name: tensor.data_ptr() for name, tensor in engine.model.state_dict().items()} == places
    (completion,) = engine.generate([[5, 9, 2]], SamplingParams(12), [1])
    check_completion(new, [5, 9, 2], completion)


def test_adapter_of_the_embeddings():
    engine, plain = HFEngine(LLAMA, lora={"rank": 2, "alpha": 4, "target_modules": ["embed_tokens"]}), HFEngine(LLAMA)
    a, b = torch.arange(64.0).sin().view(2, 32), torch.arange(64.0).cos().view(32, 2)
    name = "base_model.model.model.embed_tokens.lora_embedding_"
    engine.load_weights([(f"{name}A", a), (f"{name}B", b)])
    merged = plain.model.get_input_embeddings().weight.cpu() + 2 * (b @ a).T
    plain.load_weights([("model.embed_tokens.weight", merged)])
    found, expected = (one.generate(PROMPTS, SamplingParams(4), SEEDS) for one in (engine, plain))
    assert [one.token_ids for one in found] == [one.token_ids for one in expected]
    assert found[0].log_probs == pytest.approx(expected[0].log_probs, abs=1e-5)


def test_error_names_weights_that_do_not_fit():
    engine = HFEngine(LLAMA)
    with pytest.raises(WeightsError, match=r"'model.layer.0.w', but LlamaForCausalLM has none of this name"):
        engine.load_weights([("model.layer.0.w", torch.zeros(1))])
    with pytest.raises(
        WeightsError, match=r"'lm_head.weight' with shape \(3, 32\), but the model's has shape \(32, 32\)"
    ):
        engine.load_weights([("lm_head.weight", torch.zeros(3, 32))])


@pytest.mark.gpu
def test_sleep_frees_device_memory():
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    HFEngine(LLAMA).generate(PROMPTS, SamplingParams(6), SEEDS)  # cuBLAS allocates its own memory once
    # An engine's thread keeps its memory for some seconds, also those of the tests before.
    wait_until(lambda: "engine" not in {thread.name for thread in threading.enumerate()}, 20)
    gc.collect()
    before = torch.cuda.memory_allocated()
    engine = HFEngine(LLAMA)
    completions = engine.generate(PROMPTS, SamplingParams(6), SEEDS)
    taken = torch.cuda.memory_allocated() - before
    assert taken >= sum(p.numel() * 4 for p in engine.model.parameters())
    engine.sleep()
    assert torch.cuda.memory_allocated() - before < taken / 10
    engine.wake_up()
    assert engine.generate(PROMPTS, SamplingParams(6), SEEDS) == completions


# --- requests ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def subject():
    engine = HFEngine(CONFIG)
    yield Subject(engine, config=CONFIG, positions=512)
    engine.close()


class TestContract(EngineContract):
    long = 80


@pytest.mark.full("the contract of all engines in exact mode")
class TestExactContract(EngineContract):
    long = 150

    @pytest.fixture(scope="class")
    @classmethod
    def subject(cls):
        engine = HFEngine(CONFIG, exact=True)
        yield Subject(engine, config=CONFIG, positions=512)
        engine.close()


@pytest.fixture
def make():
    """config -> an engine with the weights of `plain_model`, and that model."""
    engines = []

    def made(config, **options):
        engines.append(engine_of(config, **options))
        return engines[-1]

    yield made
    for engine, _ in engines:
        engine.close()


def shapes_of(engine):
    """The (rows, columns) of the tokens of each forward pass from now on."""
    shapes = []
    engine.model.register_forward_pre_hook(
        lambda model, args, kwargs: shapes.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )
    return shapes


@pytest.mark.parametrize("config", [LLAMA, GPT2], ids=["llama", "gpt2"])
def test_rows_join_and_leave_a_running_batch(make, monkeypatch, config):
    """Rows with their own length, sampling parameters and end, in a cache that is copied again and again."""
    monkeypatch.setattr(decoding, "ROOM", 5)
    monkeypatch.setattr(decoding, "WASTE", 8)
    engine, model = make(config, max_batch_size=5)
    how = [
        SamplingParams(9 + 4 * k, temperature=(1.0, 0.0, 0.7)[k % 3], top_k=(0, 6)[k % 2], top_p=(1.0, 0.9)[k % 2])
        for k in range(len(MANY))
    ]
    alone = [engine.generate([prompt], how[k], [k])[0] for k, prompt in enumerate(MANY)]
    shapes = shapes_of(engine)
    futures = []

    def submit(*_):
        """Each request is submitted when the one before has ended or has three tokens."""
        k = len(futures)
        if k < len(MANY) and (k == 0 or len(shapes) >= 3 * k):
            futures.append(engine.submit(MANY[k], how[k], f"request-{k}", seed=k))

    engine.model.register_forward_hook(submit)
    submit()
    while len(futures) < len(MANY):
        futures[-1].result(30)
    completions = [future.result(30) for future in futures]
    assert [one.token_ids for one in completions] == [one.token_ids for one in alone]
    for prompt, params, completion in zip(MANY, how, completions, strict=True):
        check_completion(model, prompt, completion, params.temperature)
    rows = [count for count, columns in shapes if columns == 1]
    assert max(rows) == 5 and rows[-1] == 1  # the last ones run alone, without the rows that have ended


def test_equal_prompts_are_computed_once_and_others_with_little_padding(make):
    engine, model = make(CONFIG)
    prompts = [[1 + k % 8] * (2 if k % 8 else 300) for k in range(16)]
    shapes = shapes_of(engine)
    completions = engine.generate(prompts, SamplingParams(3), range(16))
    for prompt, completion in zip(prompts, completions, strict=True):
        check_completion(model, prompt, completion)
    prompts_alone = [shape for shape in shapes if shape[1] > 1]
    assert (1, 300) in prompts_alone and (7, 2) in prompts_alone and shapes[-2:] == [(16, 1)] * 2


@pytest.mark.parametrize(
    "config",
    [
        pytest.param(MISTRAL, id="sliding"),
        pytest.param(
            MAMBA,
            id="recurrent",
            marks=pytest.mark.skipif(SIMULATED, reason="the simulated device has no depthwise convolution"),
        ),
    ],
)
def test_models_with_other_caches(make, config):
    engine, model = make(config)
    future = engine.submit([4, 5, 6], SamplingParams(12), "first", seed=0)
    completions = engine.generate(MANY, SamplingParams(12), range(len(MANY)))
    for prompt, completion in zip([[4, 5, 6], *MANY], [future.result(30), *completions], strict=True):
        assert len(completion.token_ids) == 12
        check_completion(model, prompt, completion, atol=5e-4)


def test_sleep_and_weights_without_an_update_in_the_middle_of_requests(make):
    config = type(TIED)(**{**CONFIG.to_diff_dict(), "tie_word_embeddings": True})
    engine, first = make(config)
    second = plain_model(config, 8)
    unbroken = engine.generate(MANY, SamplingParams(100), range(len(MANY)))
    for new in (first, second):
        futures = [engine.submit(p, SamplingParams(100), str(k), seed=k) for k, p in enumerate(MANY)]
        Subject(engine).until(lambda load: load.running == len(MANY))
        engine.sleep()
        counts = [len(engine._requests[str(k)].token_ids) for k in range(len(MANY))]
        assert all(counts) and engine._batch._cache is None  # keys and values were freed
        with pytest.raises(RolloutError, match="asleep"):
            engine.submit([1], SamplingParams(2), "refused", seed=0)
        engine.load_weights(new.state_dict().items())
        engine.wake_up()
        completions = [future.result(30) for future in futures]
        for prompt, count, completion in zip(MANY, counts, completions, strict=True):
            expected = torch.cat(
                [
                    plain_log_probs(first, prompt, completion.token_ids)[:count],
                    plain_log_probs(new, prompt, completion.token_ids)[count:],
                ]
            )
            torch.testing.assert_close(torch.tensor(completion.log_probs).double(), expected, atol=5e-5, rtol=0)
        same = [one.token_ids for one in completions] == [one.token_ids for one in unbroken]
        assert same == (new is first)


def test_keys_and_values_are_freed_when_the_last_request_is_aborted(make):
    engine, _ = make(CONFIG)
    future = engine.submit([4, 5, 6], SamplingParams(400), "first", seed=0)
    Subject(engine).until(lambda load: load.running == 1)
    with engine.parked("test", recompute=False):  # between two steps
        engine.abort()
    assert future.result(30).finish_reason == "abort"
    wait_until(lambda: engine._batch._cache is None, 5)


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
    check_completion(model, [5, 9, 2], completion)


def test_weight_of_one_token_that_is_not_finite_fails_its_requests_alone(make):
    engine, model = make(CONFIG)
    embeddings = {"model.embed_tokens.weight": model.get_input_embeddings().weight.clone()}
    with torch.no_grad():
        embeddings["model.embed_tokens.weight"][31] = torch.nan
    engine.load_weights(embeddings.items())
    # Greedy, and the other request must not generate the token itself.
    how = SamplingParams(8, temperature=0.0)
    (alone,) = engine.generate([[5, 9, 2]], how, [0])
    assert 31 not in alone.token_ids
    bad, good = (engine.submit(prompt, how, str(prompt), seed=0) for prompt in ([31], [5, 9, 2]))
    with pytest.raises(RolloutError, match="logits are not finite"):
        bad.result(30)
    assert good.result(30).token_ids == alone.token_ids


def test_script_may_end_in_the_middle_of_requests(pytestconfig, tmp_path):
    """An engine's thread that came back from torch while the interpreter ends would abort the process."""
    code = f"""
        import os, sys, time
        if child := os.fork():
            print("exit status", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        else:
            from workers import HFEngine, SamplingParams
            engine = HFEngine({CONFIG.to_dict()!r})
            futures = [engine.submit([1, k], SamplingParams(500), str(k), seed=k) for k in range(30)]
            while not engine.load().running:
                time.sleep(0.001)
            sys.kept = engine, futures  # until the interpreter ends
    """
    said = printed(pytestconfig, code, tmp_path)
    assert "exit status 0" in said and "terminate" not in said, said
