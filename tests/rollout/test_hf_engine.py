"""HFEngine compared with plain forward passes of the same model."""

import math

import pytest
import torch
from rollout_helpers import GPT2, LLAMA, TIED, plain_log_probs, plain_model

from workers.rollout.engines.hf_engine import HFEngine
from workers.rollout.engines.rollout_engine import SamplingParams
from workers.rollout.rollout_errors import PromptError, RolloutError, WeightsError

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


@pytest.mark.parametrize("config", [LLAMA, TIED, GPT2], ids=["llama", "tied", "gpt2"])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_log_probs_match_an_unpadded_forward_pass(config, temperature):
    engine, model = engine_of(config)
    completions = engine.generate(PROMPTS, SamplingParams(12, temperature, top_p=0.9, top_k=20), SEEDS)
    for prompt, completion in zip(PROMPTS, completions, strict=True):
        assert len(completion.token_ids) == 12 and completion.finish_reason == "length"
        expected = plain_log_probs(model, prompt, completion.token_ids, temperature)
        torch.testing.assert_close(torch.tensor(completion.log_probs).double(), expected, atol=2e-5, rtol=0)


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
        expected = plain_log_probs(model, prompt, completion.token_ids)
        torch.testing.assert_close(torch.tensor(completion.log_probs).double(), expected, atol=2e-5, rtol=0)


def test_completion_does_not_depend_on_the_rest_of_the_batch(llama):
    engine, _ = llama
    how = SamplingParams(10)
    together = [completion.token_ids for completion in engine.generate(PROMPTS, how, SEEDS)]
    alone = [engine.generate([p], how, [s])[0].token_ids for p, s in zip(PROMPTS, SEEDS, strict=True)]
    backwards = [completion.token_ids for completion in engine.generate(PROMPTS[::-1], how, SEEDS[::-1])][::-1]
    engine.max_batch_size = 2
    in_twos = [completion.token_ids for completion in engine.generate(PROMPTS, how, SEEDS)]
    engine.max_batch_size = 64
    assert together == alone == backwards == in_twos
    others = [completion.token_ids for completion in engine.generate(PROMPTS, how, [seed + 1 for seed in SEEDS])]
    assert all(a != b for a, b in zip(together, others, strict=True))


def drawn_first(engine, prompt, how, times=4000):
    engine.max_batch_size = 1000
    completions = engine.generate([prompt] * times, how, range(times))
    engine.max_batch_size = 64
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


@pytest.mark.parametrize(
    "how",
    [
        SamplingParams(1),
        SamplingParams(1, temperature=0.5),
        SamplingParams(1, top_k=5),
        SamplingParams(1, top_p=0.7),
        SamplingParams(1, 2.0, 0.8, 9),
    ],
    ids=str,
)
def test_sampled_frequencies_match_the_softmax(llama, how):
    engine, model = llama
    with torch.no_grad():
        probs = (model(torch.tensor([[5, 9, 2]])).logits[0, -1].double() / how.temperature).softmax(-1)
    ranked = sorted(range(32), key=lambda token: -probs[token])
    left = ranked[: how.top_k or 32]
    total = sum(float(probs[token]) for token in left)
    kept, mass = [], 0.0
    for token in left:  # the most likely tokens, until they reach top_p
        kept.append(token)
        mass += float(probs[token]) / total
        if mass >= how.top_p:
            break
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


def test_stop_tokens_end_a_completion_and_belong_to_it(llama):
    engine, _ = llama
    free = engine.generate(PROMPTS, SamplingParams(16), SEEDS)
    stops = (free[0].token_ids[3], free[2].token_ids[5])
    for whole, completion in zip(
        free, engine.generate(PROMPTS, SamplingParams(16, stop_token_ids=stops), SEEDS), strict=True
    ):
        end = next((k + 1 for k, token in enumerate(whole.token_ids) if token in stops), None)
        assert completion.token_ids == whole.token_ids[:end]
        assert completion.log_probs == pytest.approx(whole.log_probs[:end], abs=1e-5)
        assert completion.finish_reason == ("length" if end is None else "stop")


def test_generation_config_in_the_folder_is_ignored(tmp_path):
    model = plain_model(LLAMA, 3)
    model.generation_config.update(eos_token_id=list(range(16)), repetition_penalty=5.0, max_new_tokens=2)
    model.save_pretrained(tmp_path)
    from_folder = HFEngine(str(tmp_path)).generate(PROMPTS, SamplingParams(9), SEEDS)
    assert from_folder == engine_of(LLAMA)[0].generate(PROMPTS, SamplingParams(9), SEEDS)


def test_no_prompts_give_no_completions(llama):
    assert llama[0].generate([], SamplingParams(), []) == []


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


def test_param_dtype_keeps_rotary_frequencies_in_float32():
    engine = HFEngine(LLAMA, param_dtype="bf16")
    assert engine.model.lm_head.weight.dtype is torch.bfloat16
    assert engine.model.model.rotary_emb.inv_freq.dtype is torch.float32
    (completion,) = engine.generate([[1, 2]], SamplingParams(3), [0])
    assert len(completion.token_ids) == 3


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
    expected = plain_log_probs(new, [5, 9, 2], completion.token_ids)
    torch.testing.assert_close(torch.tensor(completion.log_probs).double(), expected, atol=2e-5, rtol=0)


def test_error_names_weights_that_do_not_fit():
    engine = HFEngine(LLAMA)
    with pytest.raises(WeightsError, match=r"'model.layer.0.w', but LlamaForCausalLM has none of this name"):
        engine.load_weights([("model.layer.0.w", torch.zeros(1))])
    with pytest.raises(
        WeightsError, match=r"'lm_head.weight' with shape \(3, 32\), but the model's has shape \(32, 32\)"
    ):
        engine.load_weights([("lm_head.weight", torch.zeros(3, 32))])


def test_sleep_and_wake_up():
    engine, _ = engine_of(TIED)
    before = engine.generate(PROMPTS, SamplingParams(6), SEEDS)
    engine.sleep()
    with pytest.raises(RolloutError, match="the engine is asleep"):
        engine.generate(PROMPTS, SamplingParams(6), SEEDS)
    engine.wake_up()
    assert engine.generate(PROMPTS, SamplingParams(6), SEEDS) == before
    engine.sleep()
    new = plain_model(TIED, 8)
    engine.load_weights(new.state_dict().items())  # weights may be updated while the engine sleeps
    engine.wake_up()
    (completion,) = engine.generate([[1, 2]], SamplingParams(6), [0])
    expected = plain_log_probs(new, [1, 2], completion.token_ids)
    torch.testing.assert_close(torch.tensor(completion.log_probs).double(), expected, atol=2e-5, rtol=0)


@pytest.mark.gpu
def test_sleep_frees_device_memory():
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    HFEngine(LLAMA).generate(PROMPTS, SamplingParams(6), SEEDS)  # cuBLAS allocates its own memory once
    before = torch.cuda.memory_allocated()
    engine = HFEngine(LLAMA)
    completions = engine.generate(PROMPTS, SamplingParams(6), SEEDS)
    taken = torch.cuda.memory_allocated() - before
    assert taken >= sum(p.numel() * 4 for p in engine.model.parameters())
    engine.sleep()
    assert torch.cuda.memory_allocated() - before < taken / 10
    engine.wake_up()
    assert engine.generate(PROMPTS, SamplingParams(6), SEEDS) == completions


def test_invalid_prompts_are_rejected(llama):
    engine, _ = llama
    with pytest.raises(PromptError, match="prompt 1 is empty"):
        engine.generate([[1], []], SamplingParams(), [0, 0])
    with pytest.raises(PromptError, match="prompt 0 has token ids from 1 to 32, but the model's vocab_size is 32"):
        engine.generate([[1, 32]], SamplingParams(), [0])
    with pytest.raises(PromptError, match=r"60 tokens, which with max_new_tokens=16 exceeds the model's 64"):
        engine.generate([[1] * 60], SamplingParams(), [0])
    with pytest.raises(ValueError, match="2 prompts and 1 seeds"):
        engine.generate([[1], [2]], SamplingParams(), [0])


def test_non_finite_weights_are_detected():
    engine = HFEngine(LLAMA)
    engine.load_weights([("lm_head.weight", torch.full((32, 32), torch.nan))])
    with pytest.raises(RolloutError, match="not finite"):
        engine.generate([[1, 2]], SamplingParams(), [0])


def test_invalid_options():
    with pytest.raises(ValueError, match="max_batch_size=0"):
        HFEngine(LLAMA, max_batch_size=0)
    with pytest.raises(ValueError, match="param_dtype='fp8'"):
        HFEngine(LLAMA, param_dtype="fp8")
    with pytest.raises(ValueError, match="expected a Hugging Face config"):
        HFEngine(17)
    with pytest.raises(ValueError, match="temperature"):
        SamplingParams(temperature=-1)
