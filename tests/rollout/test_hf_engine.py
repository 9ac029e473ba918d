"""HFEngine beside plain forward passes of the same model."""

import math

import pytest
import torch
from rollout_kit import GPT2, LLAMA, TIED, plain_log_probs, plain_model

from workers.rollout.engine import Sampling
from workers.rollout.errors import PromptError, RolloutError, WeightsError
from workers.rollout.hf_engine import HFEngine

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
def test_log_probs_are_those_of_a_forward_pass_without_padding(config, temperature):
    engine, model = engine_of(config)
    answers = engine.generate(PROMPTS, Sampling(12, temperature, top_p=0.9, top_k=20), SEEDS)
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        assert len(answer.token_ids) == 12 and answer.finish_reason == "length"
        expected = plain_log_probs(model, prompt, answer.token_ids, temperature)
        torch.testing.assert_close(torch.tensor(answer.log_probs).double(), expected, atol=2e-5, rtol=0)


@pytest.mark.parametrize("config", [LLAMA, GPT2], ids=["llama", "gpt2"])
def test_temperature_0_is_the_argmax_of_forward_passes(config):
    engine, model = engine_of(config)
    for prompt, answer in zip(PROMPTS, engine.generate(PROMPTS, Sampling(8, temperature=0), SEEDS), strict=True):
        tokens = list(prompt)
        for _ in range(8):
            with torch.no_grad():
                tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
        assert answer.token_ids == tokens[len(prompt) :]
        expected = plain_log_probs(model, prompt, answer.token_ids)
        torch.testing.assert_close(torch.tensor(answer.log_probs).double(), expected, atol=2e-5, rtol=0)


def test_an_answer_does_not_depend_on_what_else_is_in_the_batch(llama):
    engine, _ = llama
    how = Sampling(10)
    together = [answer.token_ids for answer in engine.generate(PROMPTS, how, SEEDS)]
    alone = [engine.generate([p], how, [s])[0].token_ids for p, s in zip(PROMPTS, SEEDS, strict=True)]
    backwards = [answer.token_ids for answer in engine.generate(PROMPTS[::-1], how, SEEDS[::-1])][::-1]
    engine.max_batch_size = 2
    in_twos = [answer.token_ids for answer in engine.generate(PROMPTS, how, SEEDS)]
    engine.max_batch_size = 64
    assert together == alone == backwards == in_twos
    others = [answer.token_ids for answer in engine.generate(PROMPTS, how, [seed + 1 for seed in SEEDS])]
    assert all(a != b for a, b in zip(together, others, strict=True))


def drawn_first(engine, prompt, how, times=4000):
    engine.max_batch_size = 1000
    answers = engine.generate([prompt] * times, how, range(times))
    engine.max_batch_size = 64
    return torch.bincount(torch.tensor([answer.token_ids[0] for answer in answers]), minlength=32)


def chi_square(counts, probs):
    """And the largest that it is expected to be: four standard deviations above its mean."""
    expected = probs * counts.sum()
    often = expected > 5
    pooled = torch.cat([expected[often], expected[~often].sum()[None]])
    found = torch.cat([counts[often], counts[~often].sum()[None]]).double()
    kept = pooled > 0
    freedom = int(kept.sum()) - 1
    return float(((found - pooled)[kept] ** 2 / pooled[kept]).sum()), freedom + 4 * math.sqrt(2 * freedom)


@pytest.mark.parametrize(
    "how",
    [Sampling(1), Sampling(1, temperature=0.5), Sampling(1, top_k=5), Sampling(1, top_p=0.7), Sampling(1, 2.0, 0.8, 9)],
    ids=str,
)
def test_frequencies_are_those_of_the_softmax(llama, how):
    engine, model = llama
    with torch.no_grad():
        probs = (model(torch.tensor([[5, 9, 2]])).logits[0, -1].double() / how.temperature).softmax(-1)
    ranked = sorted(range(32), key=lambda token: -probs[token])
    left = ranked[: how.top_k or 32]
    total = sum(float(probs[token]) for token in left)
    kept, mass = [], 0.0
    for token in left:  # the likeliest, until they reach top_p
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


def test_the_bound_on_frequencies_can_fail(llama):
    engine, model = llama
    with torch.no_grad():
        probs = (model(torch.tensor([[5, 9, 2]])).logits[0, -1].double() / 1.2).softmax(-1)
    statistic, bound = chi_square(drawn_first(engine, [5, 9, 2], Sampling(1)), probs)
    assert statistic > bound


def test_stop_tokens_end_an_answer_and_belong_to_it(llama):
    engine, _ = llama
    free = engine.generate(PROMPTS, Sampling(16), SEEDS)
    stops = (free[0].token_ids[3], free[2].token_ids[5])
    for whole, answer in zip(free, engine.generate(PROMPTS, Sampling(16, stop_token_ids=stops), SEEDS), strict=True):
        end = next((k + 1 for k, token in enumerate(whole.token_ids) if token in stops), None)
        assert answer.token_ids == whole.token_ids[:end]
        assert answer.log_probs == pytest.approx(whole.log_probs[:end], abs=1e-5)
        assert answer.finish_reason == ("length" if end is None else "stop")


def test_what_the_models_folder_says_of_generation_does_not_count(tmp_path):
    model = plain_model(LLAMA, 3)
    model.generation_config.update(eos_token_id=list(range(16)), repetition_penalty=5.0, max_new_tokens=2)
    model.save_pretrained(tmp_path)
    from_folder = HFEngine(str(tmp_path)).generate(PROMPTS, Sampling(9), SEEDS)
    assert from_folder == engine_of(LLAMA)[0].generate(PROMPTS, Sampling(9), SEEDS)


def test_no_prompt_no_answer(llama):
    assert llama[0].generate([], Sampling(), []) == []


def test_random_weights_by_seed(tmp_path):
    plain_model(LLAMA, 3).save_pretrained(tmp_path)
    first, same = HFEngine(LLAMA, seed=1), HFEngine(LLAMA.to_dict(), seed=1)
    from_folder, other = HFEngine(tmp_path, random_weights=True, seed=1), HFEngine(LLAMA, seed=2)
    before = torch.get_rng_state()
    for name, tensor in first.model.state_dict().items():
        assert torch.equal(tensor, same.model.state_dict()[name])
        assert torch.equal(tensor, from_folder.model.state_dict()[name])
    assert not torch.equal(first.model.lm_head.weight, other.model.lm_head.weight)
    assert torch.equal(before, torch.get_rng_state())


def test_param_dtype_leaves_rotary_frequencies_exact():
    engine = HFEngine(LLAMA, param_dtype="bf16")
    assert engine.model.lm_head.weight.dtype is torch.bfloat16
    assert engine.model.model.rotary_emb.inv_freq.dtype is torch.float32
    (answer,) = engine.generate([[1, 2]], Sampling(3), [0])
    assert len(answer.token_ids) == 3


@pytest.mark.parametrize("config", [LLAMA, TIED], ids=["untied", "tied"])
def test_weights_are_taken_in_place(config):
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
    (answer,) = engine.generate([[5, 9, 2]], Sampling(12), [1])
    expected = plain_log_probs(new, [5, 9, 2], answer.token_ids)
    torch.testing.assert_close(torch.tensor(answer.log_probs).double(), expected, atol=2e-5, rtol=0)


def test_weights_that_do_not_fit_are_named():
    engine = HFEngine(LLAMA)
    with pytest.raises(WeightsError, match=r"'model.layer.0.w', which LlamaForCausalLM does not have"):
        engine.load_weights([("model.layer.0.w", torch.zeros(1))])
    with pytest.raises(WeightsError, match=r"'lm_head.weight' as \(3, 32\); the model has \(32, 32\)"):
        engine.load_weights([("lm_head.weight", torch.zeros(3, 32))])


def test_sleep_and_wake_up():
    engine, _ = engine_of(TIED)
    before = engine.generate(PROMPTS, Sampling(6), SEEDS)
    engine.sleep()
    with pytest.raises(RolloutError, match="sleeps"):
        engine.generate(PROMPTS, Sampling(6), SEEDS)
    engine.wake_up()
    assert engine.generate(PROMPTS, Sampling(6), SEEDS) == before
    engine.sleep()
    new = plain_model(TIED, 8)
    engine.load_weights(new.state_dict().items())  # an update may come while it sleeps
    engine.wake_up()
    (answer,) = engine.generate([[1, 2]], Sampling(6), [0])
    expected = plain_log_probs(new, [1, 2], answer.token_ids)
    torch.testing.assert_close(torch.tensor(answer.log_probs).double(), expected, atol=2e-5, rtol=0)


@pytest.mark.gpu
def test_sleep_frees_the_devices_memory():
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device here")
    HFEngine(LLAMA).generate(PROMPTS, Sampling(6), SEEDS)  # cuBLAS takes memory of its own, once
    before = torch.cuda.memory_allocated()
    engine = HFEngine(LLAMA)
    answers = engine.generate(PROMPTS, Sampling(6), SEEDS)
    taken = torch.cuda.memory_allocated() - before
    assert taken >= sum(p.numel() * 4 for p in engine.model.parameters())
    engine.sleep()
    assert torch.cuda.memory_allocated() - before < taken / 10
    engine.wake_up()
    assert engine.generate(PROMPTS, Sampling(6), SEEDS) == answers


def test_bad_prompts_are_refused(llama):
    engine, _ = llama
    with pytest.raises(PromptError, match="prompt 1 is empty"):
        engine.generate([[1], []], Sampling(), [0, 0])
    with pytest.raises(PromptError, match="prompt 0 has tokens from 1 to 32; the model's vocabulary is 32"):
        engine.generate([[1, 32]], Sampling(), [0])
    with pytest.raises(PromptError, match=r"60 tokens, and with max_new_tokens=16 it is longer than the model's 64"):
        engine.generate([[1] * 60], Sampling(), [0])
    with pytest.raises(ValueError, match="2 prompts and 1 seeds"):
        engine.generate([[1], [2]], Sampling(), [0])


def test_broken_weights_are_noticed():
    engine = HFEngine(LLAMA)
    engine.load_weights([("lm_head.weight", torch.full((32, 32), torch.nan))])
    with pytest.raises(RolloutError, match="not finite"):
        engine.generate([[1, 2]], Sampling(), [0])


def test_options_that_make_no_sense():
    with pytest.raises(ValueError, match="max_batch_size=0"):
        HFEngine(LLAMA, max_batch_size=0)
    with pytest.raises(ValueError, match="param_dtype='fp8'"):
        HFEngine(LLAMA, param_dtype="fp8")
    with pytest.raises(ValueError, match="no Hugging Face config"):
        HFEngine(17)
    with pytest.raises(ValueError, match="temperature"):
        Sampling(temperature=-1)
