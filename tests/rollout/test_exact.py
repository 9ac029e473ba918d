"""Exact mode without Ray: what an engine generates has the log-probabilities of a plain forward pass, bit for bit."""

import random

import pytest
import torch
from rollout_helpers import LLAMA
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    BloomConfig,
    DeepseekV3Config,
    Gemma2Config,
    GPT2Config,
    LlamaConfig,
    MambaConfig,
    MistralConfig,
    MixtralConfig,
    OPTConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    Starcoder2Config,
)
from waits import wait_until

from workers.algorithms.token_log_probs import next_token_log_probs
from workers.data.collate import collate
from workers.data.micro_batches import cut_by_tokens, restore
from workers.data.rollout_data import SAMPLING_MASK, inputs_of
from workers.exact import ExactError, exact_logits, make_exact
from workers.rollout.engines.exact_decoding import probe
from workers.rollout.engines.hf_engine import HFEngine
from workers.rollout.engines.rollout_engine import SamplingParams

SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 100, "max_position_embeddings": 256}  # fmt: skip
CONFIGS = {
    "llama": LlamaConfig(**SIZES),
    "mistral": MistralConfig(**SIZES, sliding_window=20),
    "qwen3": Qwen3Config(**SIZES),
    "gemma2": Gemma2Config(**SIZES, sliding_window=24),
    "qwen3_moe": Qwen3MoeConfig(**SIZES, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=16),
    "deepseek_v3": DeepseekV3Config(**SIZES | {"num_key_value_heads": 4}, n_routed_experts=64, num_experts_per_tok=4,
                                    moe_intermediate_size=16, n_group=1, topk_group=1, q_lora_rank=8, kv_lora_rank=8,
                                    qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=16, first_k_dense_replace=1),
    "gpt2": GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=100, n_positions=256, resid_pdrop=0.0,
                       embd_pdrop=0.0, attn_pdrop=0.0),
}  # fmt: skip
CPU = torch.device("cpu")
threads = pytest.mark.full("exact mode with several threads, in bf16 and with experts")
IN_BF16 = ("llama", "qwen3_moe")
"""In float32, each of the models shows more than where results are rounded."""


def prompts(count, seed=0, longest=70):
    draw = random.Random(seed)
    return [[draw.randrange(100) for _ in range(draw.choice([1, 2, 3, 9, longest]))] for _ in range(count)]


@pytest.mark.parametrize(
    ("name", "dtype", "fp32_lm_head"),
    [
        *((name, "fp32", False) for name in CONFIGS),
        *(pytest.param(name, "bf16", False, marks=() if name in IN_BF16 else threads) for name in CONFIGS),
        ("llama", "bf16", True),
    ],
)
def test_decoding_equals_forward_passes_over_any_rows(name, dtype, fp32_lm_head):
    torch.manual_seed(1)
    engine = HFEngine(CONFIGS[name], seed=4, max_batch_size=5, param_dtype=dtype, exact=True, fp32_lm_head=fp32_lm_head)
    given = prompts(13)
    how = [SamplingParams(count, temperature=0.7) for count in (1, 3, 12)]
    futures = [engine.submit(one, how[at % 3], str(at), seed=at) for at, one in enumerate(given)]
    completions = [future.result(60) for future in futures]
    assert not any(differences_of_passes(engine, given, completions))


def differences_of_passes(engine, given, completions):
    """Of the engine's log-probabilities from `next_token_log_probs` in passes over one, two and all rows."""
    rows = [prompt + made.token_ids for prompt, made in zip(given, completions, strict=True)]
    found = []
    for together in (1, 2, len(rows)):
        for begin in range(0, len(rows), together):
            part = slice(begin, begin + together)
            ids = torch.nn.utils.rnn.pad_sequence([torch.tensor(row) for row in rows[part]], batch_first=True)
            with torch.no_grad():
                logits = exact_logits(engine.model, ids, torch.arange(ids.shape[1]).expand(ids.shape))
            log_probs, _ = next_token_log_probs(logits, ids, temperature=0.7)
            for prompt, made, of_row in zip(given[part], completions[part], log_probs, strict=True):
                own = of_row[len(prompt) : len(prompt) + len(made.token_ids)].tolist()
                found += [abs(one - other) for one, other in zip(made.log_probs, own, strict=True)]
    return found


def test_many_tokens_equal():
    """What only some values show: the ends of activations' inputs differ in one token of a thousand."""
    engine = HFEngine(CONFIGS["llama"], seed=4, max_batch_size=5, exact=True)
    given = prompts(150, longest=4)
    completions = engine.generate(given, SamplingParams(20, temperature=0.7), range(150))
    assert not any(differences_of_passes(engine, given, completions))


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("llama", torch.float32),
        pytest.param("llama", torch.bfloat16, marks=threads),
        pytest.param("qwen3_moe", torch.float32, marks=threads),
        pytest.param("qwen3_moe", torch.bfloat16, marks=threads),
    ],
    ids=str,
)
def test_the_number_of_threads_changes_no_bit(name, dtype):
    """The probe compares decoding and forward passes, and its digest is of the log-probabilities."""
    one = probe(CONFIGS[name], dtype, CPU)
    try:
        for count in (2, 3):
            torch.set_num_threads(count)
            assert probe(CONFIGS[name], dtype, CPU) == one
    finally:
        torch.set_num_threads(1)


@pytest.mark.full("exact mode with a model of 8 layers x 512")
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("how", [{}, {"top_p": 0.9}, {"top_k": 50}], ids=str)
def test_a_larger_model_is_exact(dtype, how):
    torch.manual_seed(1)
    config = LlamaConfig(hidden_size=512, intermediate_size=1408, num_hidden_layers=8, num_attention_heads=8,
                         vocab_size=4000, max_position_embeddings=128)  # fmt: skip
    engine = HFEngine(config, seed=4, max_batch_size=6, param_dtype=dtype, exact=True)
    given = prompts(10)
    data = collate(given, engine.generate(given, SamplingParams(24, **how), range(10)))
    for most in (1, 300, 10**6):
        assert differences(engine.model, data, most).max() == 0.0
    engine.close()  # its thread would keep the model for some seconds


@pytest.mark.parametrize("name", ["llama", "qwen3_moe"])
def test_without_it_they_differ(name):
    """So that the tests above can fail."""
    engine = HFEngine(CONFIGS[name], seed=4)
    given = prompts(13)
    completions = engine.generate(given, SamplingParams(12, temperature=0.7), range(13))
    assert 0 < max(differences_of_passes(engine, given, completions)) < 1e-4


@pytest.mark.parametrize("name", CONFIGS)
def test_it_is_the_same_model(name):
    """Against transformers' own attention and experts, in float64."""
    torch.manual_seed(2)
    plain = AutoModelForCausalLM.from_config(AutoConfig.for_model(**CONFIGS[name].to_dict()), dtype=torch.float64)
    if plain._can_set_experts_implementation():
        plain.set_experts_implementation("eager")  # the others take no float64
    ids = torch.randint(0, 100, (3, 90))
    positions = torch.arange(90).expand(3, 90)
    with torch.no_grad():
        expected = plain.eval()(ids).logits
        exact = AutoModelForCausalLM.from_config(AutoConfig.for_model(**CONFIGS[name].to_dict())).eval()
        exact.load_state_dict(plain.state_dict())
        make_exact(exact)
        torch.testing.assert_close(exact_logits(exact, ids, positions).double(), expected, atol=2e-5, rtol=1e-4)


def test_gradients_are_those_of_the_plain_model():
    torch.manual_seed(2)
    plain = AutoModelForCausalLM.from_config(LlamaConfig(**SIZES))
    exact = AutoModelForCausalLM.from_config(LlamaConfig(**SIZES))
    exact.load_state_dict(plain.state_dict())
    make_exact(exact)
    ids = torch.randint(0, 100, (3, 70))
    for model in (plain, exact):
        model(ids, position_ids=torch.arange(70).expand(3, 70), use_cache=False).logits.logsumexp(-1).sum().backward()
    for one, other in zip(plain.parameters(), exact.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, atol=1e-4, rtol=1e-3)


def test_completions_do_not_depend_on_the_batch():
    engine = HFEngine(CONFIGS["llama"], seed=4, exact=True)
    given, how = prompts(9), SamplingParams(20)
    together = engine.generate(given, how, range(9))
    for size in (1, 2, 5):
        engine.max_batch_size = size
        assert engine.generate(given, how, range(9)) == together
    engine.max_batch_size = 128
    aborted = [engine.submit(one, SamplingParams(60), f"a{at}", seed=at) for at, one in enumerate(given[:4])]
    wait_until(lambda: engine.load().running)
    engine.abort([f"a{at}" for at in range(4)])
    for at, future in enumerate(aborted):
        partial = future.result(60)
        whole = engine.submit(given[at], SamplingParams(60), f"b{at}", seed=at, partial=partial).result(60)
        assert whole == engine.generate([given[at]], SamplingParams(60), [at])[0]


def test_the_model_runs_in_steps_alone():
    """Between them, another thread may be loading or moving the weights."""
    engine = HFEngine(CONFIGS["llama"], seed=4, exact=True)
    in_step = []
    engine.model.register_forward_pre_hook(lambda *given: in_step.append(engine._stepping))
    engine.generate(prompts(3), SamplingParams(2), range(3))
    assert in_step and all(in_step)


def test_a_given_config_is_not_changed():
    config = LlamaConfig(**SIZES)
    HFEngine(config, exact=True)
    assert config._attn_implementation != "exact"
    assert HFEngine(config).model.config._attn_implementation != "exact"


def test_the_probe_finds_what_differs(monkeypatch):
    """An attention whose sums depend on the number of queries, a hair off."""
    from workers import exact

    one = probe(LLAMA, torch.float32, CPU)
    in_bfloat16 = probe(LLAMA, torch.bfloat16, CPU)
    assert one == probe(LLAMA, torch.float32, CPU) != in_bfloat16
    assert in_bfloat16 != probe(LLAMA, torch.bfloat16, CPU, fp32_lm_head=True)  # trainer and engine must both have it
    exactly = exact.exact_attention

    def rough(module, query, *others, **more):
        made, _ = exactly(module, query, *others, **more)
        return made * (1 + 1e-6 * (query.shape[2] == 1)), None

    monkeypatch.setattr(exact, "exact_attention", rough)
    with pytest.raises(ExactError, match=r"'llama' model of this size in torch.float32 and 1 threads, \d+ of \d+ log-"):
        HFEngine(LLAMA, exact=True)


@pytest.mark.parametrize(
    ("config", "why"),
    [
        (MambaConfig(vocab_size=32, hidden_size=32, num_hidden_layers=2, state_size=8), "ordinary key/value cache"),
        (BloomConfig(vocab_size=32, hidden_size=32, n_layer=2, n_head=4), "cannot replace the attention of Bloom"),
        (GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=32), "dropout of this 'gpt2' config"),
        (LlamaConfig(**SIZES, attention_dropout=0.1), "dropout of this 'llama' config"),
        # None of these has a module for it.
        (OPTConfig(hidden_size=32, ffn_dim=48, num_hidden_layers=2, num_attention_heads=4, vocab_size=32), "'opt'"),
        (Starcoder2Config(**SIZES, residual_dropout=0.1), "'starcoder2'"),
        (MixtralConfig(**SIZES, num_local_experts=4, router_jitter_noise=0.1), "'mixtral' config, or jitter"),
    ],
    ids=["mamba", "bloom", "dropout", "attention dropout", "functional dropout", "of residuals", "jitter"],
)
def test_what_cannot_be_exact_is_refused(config, why):
    with pytest.raises(ExactError, match=why):
        HFEngine(config, exact=True)


@pytest.mark.parametrize(
    "how", [{"top_p": 0.9}, {"top_k": 50}, {"top_k": 50, "min_p": 0.2, "temperature": 0.7}], ids=str
)
def test_sets_that_the_sampler_left_are_exact_too(how):
    """Over the sets, engine and trainer differ by nothing; over the vocabulary, by the log of what was kept."""
    torch.manual_seed(1)
    engine = HFEngine(CONFIGS["llama"], seed=4, max_batch_size=5, exact=True)
    given, temperature = prompts(13), how.get("temperature", 1.0)
    data = collate(given, engine.generate(given, SamplingParams(12, **how), range(13)))
    for most in (1, 150, 10**6):
        assert differences(engine.model, data, most, temperature).max() == 0.0
        assert differences(engine.model, inputs_of(data.exclude(*SAMPLING_MASK)), most, temperature, data).min() > 0.05


def differences(model, data, most, temperature=1.0, generated=None):
    """Of the log-probabilities of engine and trainer, over micro-batches of at most so many tokens.

    Args:
        generated: the rollout data, if ``data`` is not all of it.
    """
    generated = data if generated is None else generated
    parts, found = cut_by_tokens(data, most), []
    for part in parts:
        with torch.no_grad():
            logits = exact_logits(model, part.input_ids, part.position_ids)
        options = {"temperature": temperature, "sampling_mask": part.sampling_mask}
        found.append(next_token_log_probs(logits, part.input_ids, **options)[0])
    off = restore(found, parts, generated["input_ids"].shape) - generated["rollout_log_probs"]
    return off[generated["loss_mask"].bool()].abs()
