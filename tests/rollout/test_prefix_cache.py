"""Keys and values that an HFEngine keeps for the next turns of sessions: found where they are, never wrong, bounded."""

import random

import depth
import pytest
import torch
from rollout_helpers import GPT2, LLAMA, check_completion, plain_model
from transformers import LlamaConfig, MistralConfig
from waits import wait_until

from workers.rollout.engines.hf_engine import HFEngine
from workers.rollout.engines.prefix_cache import BLOCK, KeysValues, PrefixCache
from workers.rollout.engines.rollout_engine import SamplingParams

LONG = LlamaConfig(**{**LLAMA.to_diff_dict(), "max_position_embeddings": 512})
LONG_GPT2 = type(GPT2)(**{**GPT2.to_diff_dict(), "n_positions": 512})
TURNS, NEW, SEEN = 8, 8, 28


class Counting(HFEngine):
    """Counts the tokens that its model computes, padding included."""

    def __init__(self, *args, keep=True, **options):
        super().__init__(*args, **options)
        self.keep_prefixes, self.computed = keep, 0
        self.model.register_forward_pre_hook(self.count, with_kwargs=True)

    def count(self, module, args, kwargs):
        self.computed += kwargs["input_ids"].numel()


def engine_of(config, **options):
    model = plain_model(config, 3)
    engine = Counting(config, **options)
    engine.load_weights(model.state_dict().items())
    return engine, model


def kept(engine):
    """How many prefixes the engine has, after the step that has ended the last request."""
    engine.pause()
    engine.resume()
    return len(engine._prefixes._kept)


def conversations(engine, seed=0, count=1, turns=TURNS):
    """Sessions that play in step, as AgentEngine's turns do: (prompt, completion) of each turn of each."""
    draw = random.Random(seed)
    paths = [[draw.randrange(32) for _ in range(16 + number)] for number in range(count)]
    played = [[] for _ in paths]
    for turn in range(turns):
        futures = [
            engine.submit(list(path), SamplingParams(NEW), f"{seed}-{number}-{turn}", seed=100 * number + turn)
            for number, path in enumerate(paths)
        ]
        for path, of, future in zip(paths, played, futures, strict=True):
            made = future.result(60)
            of.append((list(path), made))
            path += [*made.token_ids, *(draw.randrange(32) for _ in range(SEEN))]
    return played


@pytest.mark.parametrize(
    "config",
    [LONG, pytest.param(LONG_GPT2, marks=pytest.mark.full("kept keys and values of GPT-2"))],
    ids=["llama", "gpt2"],
)
def test_turns_compute_only_what_is_new(config):
    """Tokens and log-probabilities are those of an engine that computes each prompt from its beginning."""
    (engine, model), (plain, _) = engine_of(config), engine_of(config, keep=False)
    (found,), (expected,) = conversations(engine), conversations(plain)
    assert [made.token_ids for _, made in found] == [made.token_ids for _, made in expected]
    worst = max(
        abs(one - other)
        for (_, made), (_, of) in zip(found, expected, strict=True)
        for one, other in zip(made.log_probs, of.log_probs, strict=True)
    )
    length = len(found[-1][0]) + len(found[-1][1].token_ids)
    print(f"{length} tokens in {TURNS} turns: {engine.computed} computed, {plain.computed} without; {worst:.1e} apart")
    assert worst <= 1e-5
    # Each token once, except the last sampled one; the probe of the kind of cache is one more.
    assert engine.computed <= length and plain.computed > 4 * length
    prompt, made = found[-1]
    check_completion(model, prompt, made)


def test_sessions_of_all_lengths_share_forward_passes():
    (engine, _), (plain, _) = engine_of(LONG), engine_of(LONG, keep=False)
    found, expected = conversations(engine, 1, 7, 4), conversations(plain, 1, 7, 4)
    for one, other in zip(found, expected, strict=True):
        for (prompt, made), (same, of) in zip(one, other, strict=True):
            assert prompt == same and made.token_ids == of.token_ids
            torch.testing.assert_close(torch.tensor(made.log_probs), torch.tensor(of.log_probs), atol=1e-5, rtol=0)
    assert engine.computed < 0.6 * plain.computed


@pytest.mark.parametrize("late", [False, True], ids=["dropped", "kept late"])
def test_rows_that_end_before_others_of_their_batch_leave_what_is_theirs(late):
    """Three rows end while their batch goes on, and their next turns begin with what they have left: in a memory that
    has room for two of them, or in an engine that begins to keep it while they are in the batch."""
    engine, model = engine_of(LONG, keep=not late, prefix_cache_bytes=(1000 if late else 80) * 2 * 2 * 2 * 8 * 4)
    others = [engine.submit([*range(9, 29)], SamplingParams(480), f"{at}", seed=at) for at in range(13)]
    played = [([at, *range(19)], SamplingParams(10 + at)) for at in range(3)]
    ended = [engine.submit(prompt, how, f"begun {at}", seed=at) for at, (prompt, how) in enumerate(played)]
    prompts = [[*prompt, *one.result(60).token_ids, 4, 2] for (prompt, _), one in zip(played, ended, strict=True)]
    before = engine.computed
    wait_until(lambda: engine.computed > before + 16 * 5)
    engine.keep_prefixes = True
    again = [engine.submit(prompt, SamplingParams(10), f"next {at}", seed=3) for at, prompt in enumerate(prompts)]
    completions = [one.result(60) for one in again]
    assert not any(one.done() for one in others)
    engine.abort()
    for prompt, made in zip(prompts, completions, strict=True):
        check_completion(model, prompt, made, atol=2e-6)


def test_branches_retries_and_requests_that_go_on_use_what_they_share():
    engine, model = engine_of(LONG)
    prompt, how = [number % 31 for number in range(100)], SamplingParams(8)

    def computed(of, seed, partial=None):
        before = engine.computed
        made = engine.submit(of, how, f"r{before}", seed=seed, partial=partial).result(60)
        check_completion(model, of, made)
        return engine.computed - before

    computed(prompt, 0)
    assert computed(prompt, 1) == 1 + 7  # a retry: its last token, and those that it samples
    assert computed([*prompt[:60], 5, 6, 7], 2) in range(3 + 7, 5 + 7)  # an edited history
    made = engine.submit(prompt, how, "whole", seed=3).result(60)
    part = type(made)(made.token_ids[:4], made.log_probs[:4], "abort", made.weight_versions[:4])
    assert computed(prompt, 3, part) == 1 + 3


def test_weights_and_sleep_drop_them():
    engine, _ = engine_of(LONG)
    prompt = [number % 29 for number in range(64)]
    for change in ("update", "sleep", "load"):
        engine.generate([prompt], SamplingParams(4), [0])
        assert kept(engine) == 1
        if change == "sleep":
            engine.sleep()
            assert len(engine._prefixes._kept) == 0 and engine._prefixes.nbytes == 0
            engine.wake_up()
        model = plain_model(LONG, 5 if change == "update" else 6)
        engine.begin_update()
        engine.load_weights(model.state_dict().items())
        engine.finish_update(1)
        (made,) = engine.generate([prompt], SamplingParams(4), [0])
        check_completion(model, prompt, made)


def test_memory_is_bounded_and_zero_keeps_nothing():
    of_token = 2 * 2 * 2 * 8 * 4  # layers, keys and values, heads, size, bytes
    engine, _ = engine_of(LONG, prefix_cache_bytes=300 * of_token)
    for number in range(8):
        engine.generate([[number, *(k % 32 for k in range(45))]], SamplingParams(5), [number])
        assert engine._prefixes.nbytes <= 300 * of_token
    assert kept(engine) == 6  # of 50 tokens each, without the last one that was sampled
    for options in ({"prefix_cache_bytes": 0}, {"exact": True}, {"keep": False}):
        engine, _ = engine_of(LONG, **options)
        engine.generate([[*range(30)]], SamplingParams(10), [0])
        assert kept(engine) == 0
    engine = Counting(MistralConfig(**{**LLAMA.to_diff_dict(), "sliding_window": 8}))
    engine.weight_version = 0
    engine.generate([[*range(30)]], SamplingParams(10), [0])
    assert kept(engine) == 0
    for wrong in (-1, 1.5, None, True):
        for name, least in (("prefix_cache_bytes", 0), ("max_batch_size", 1)):
            with pytest.raises(ValueError, match=f"HFEngine: {name}=.* expected an integer of at least {least}"):
                HFEngine(LLAMA, **{name: wrong})


def entry(tokens):
    return [KeysValues(torch.tensor(tokens)[None, None, :, None], torch.tensor(tokens)[None, None, :, None])]


@pytest.mark.parametrize("seed", range(300 if depth.full else 30))
def test_finds_what_was_kept(seed):
    """Against a search of all entries: random trees of sequences, in a memory that is too small for them."""
    draw = random.Random(seed)
    most = draw.choice((600, 2000, 10_000))
    cache, kept = PrefixCache(most * 16), []
    begun = [[draw.randrange(3) for _ in range(draw.randrange(5, 60))] for _ in range(4)]
    for _ in range(60):
        tokens = draw.choice(begun)[: draw.randrange(1, 80)] + [draw.randrange(3) for _ in range(draw.randrange(40))]
        prefix, count = cache.find(tokens)
        common = [shared(tokens, other) for other in kept]
        best = max((min(one, len(tokens) - 1) for one in common if one >= BLOCK), default=0)  # found by whole blocks
        assert 0 <= best - count < BLOCK
        if prefix is not None:
            assert prefix.token_ids[:count].tolist() == tokens[:count]
            assert prefix.layers[0].first(count).keys.flatten().tolist() == tokens[:count]
        cache.add(tokens, entry(tokens))
        kept = [one.token_ids.tolist() for one in cache._kept]
        assert cache.nbytes == 16 * sum(map(len, kept)) <= most * 16
        assert len(tokens) < BLOCK or len(tokens) > most or any(one[: len(tokens)] == tokens for one in kept)
        begun.append(tokens)
    cache.clear()
    assert (len(cache._kept), cache.nbytes, cache._blocks) == (0, 0, {})


def shared(one, other):
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
