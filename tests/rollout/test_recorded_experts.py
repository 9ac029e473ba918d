"""HFEngine with return_routed_experts: what it records is what a forward pass over the whole row chooses."""

import threading
from dataclasses import replace

import pytest
import torch

from workers.hf_routing import Routers, RoutingError
from workers.rollout.engines.hf_engine import HFEngine
from workers.rollout.engines.rollout_engine import RoutedExperts, SamplingParams

SIZES = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 24, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 2, "num_key_value_heads": 2, "num_experts_per_tok": 2, "bos_token_id": None}
SIZES |= {"eos_token_id": None, "pad_token_id": None}
QWEN = {**SIZES, "model_type": "qwen3_moe", "num_experts": 8, "moe_intermediate_size": 24, "head_dim": 16}
QWEN |= {"num_hidden_layers": 3, "mlp_only_layers": [1], "norm_topk_prob": True}
MODELS = [QWEN, {**SIZES, "model_type": "mixtral", "num_local_experts": 8}, {**SIZES, "model_type": "olmoe",
          "num_experts": 8, "num_experts_per_tok": 3}]  # fmt: skip
PROMPTS = [[1, 2, 3, 4, 5], [7, 8], [1, 2, 3, 4, 5], [9] * 12, [3]]


def named(models):
    return [pytest.param(model, id=model["model_type"]) for model in models]


def indices_of(model, token_ids):
    """The third output of each router in a pass over a row, without this library's hooks."""
    found = {}
    hooks = [
        module.register_forward_hook(lambda _, given, made, name=name: found.update({name: made[2]}))
        for name, module in model.named_modules()
        if type(module).__name__.endswith("TopKRouter")
    ]
    with torch.no_grad():
        model(torch.tensor([token_ids]))
    for hook in hooks:
        hook.remove()
    return {int(name.split(".")[2]): indices for name, indices in found.items()}


def assert_recorded(engine, prompt, completion, begin=0):
    """The experts from a token on are the router's; nothing is known of the last token."""
    found = completion.routed_experts
    ids = torch.tensor(found.ids).view(-1, found.layers, found.k)
    assert len(ids) == len(prompt) + len(completion.token_ids)
    chosen = indices_of(engine.model, prompt + completion.token_ids)
    for layer in range(found.layers):
        wanted = chosen[layer][begin:-1] if layer in chosen else torch.full_like(ids[begin:-1, layer], -1)
        assert torch.equal(ids[begin:-1, layer], wanted)
    assert (ids[-1] == -1).all()


@pytest.mark.parametrize("exact", [False, pytest.param(True, marks=pytest.mark.full("experts in exact mode"))])
@pytest.mark.parametrize("model", named(MODELS))
def test_batch_of_prompts(model, exact):
    engine = HFEngine(model, exact=exact, return_routed_experts=True, max_batch_size=3)  # the others join later
    done = engine.generate(PROMPTS, SamplingParams(9, stop_token_ids=(5, 17, 30)), range(5))
    assert len({len(one.token_ids) for one in done}) > 1
    for prompt, completion in zip(PROMPTS, done, strict=True):
        assert_recorded(engine, prompt, completion)


def test_request_continues_with_other_weights():
    """Tokens that were computed before keep their experts; the others have those of the new weights."""
    engine = HFEngine(QWEN, return_routed_experts=True)
    other = HFEngine(QWEN, return_routed_experts=True, seed=1)
    prompt, how = PROMPTS[3], SamplingParams(8)
    partial = engine.submit(prompt, replace(how, max_new_tokens=4), "first", seed=0).result()
    before = partial.routed_experts
    known = len(prompt) + 3
    for partial_of, first in ((partial, known), (replace(partial, routed_experts=None), 0)):
        later = other.submit(prompt, how, "second", seed=0, partial=partial_of).result()
        assert later.token_ids[:4] == partial.token_ids
        assert later.routed_experts.of_tokens(0, first) == before.of_tokens(0, first)
        assert_recorded(other, prompt, later, begin=first)
    assert len(before) == known + 1  # the caller's has not grown
    with pytest.raises(ValueError, match=r"partial has routed_experts of 3 tokens, but .* are 16"):
        wrong = replace(partial, routed_experts=RoutedExperts.unknown(3, 3, 2))
        other.submit(prompt, how, "third", seed=0, partial=wrong)


def test_running_request_survives_an_update():
    engine = HFEngine(QWEN, return_routed_experts=True)
    tokens, paused = [], threading.Event()
    record = engine.record

    def count(request, token_ids, *others):
        record(request, token_ids, *others)
        tokens.append(token_ids)
        if len(tokens) == 3:
            engine.pause()
            paused.set()

    engine.record = count
    future = engine.submit(PROMPTS[0], SamplingParams(7), "one", seed=0)
    assert paused.wait(30)
    engine.begin_update()
    with torch.no_grad():
        engine.load_weights([(name, tensor * 1.5) for name, tensor in engine._tensors().items()])
    engine.finish_update(1)
    engine.resume()
    done = future.result()
    assert done.weight_versions == [0] * 3 + [1] * 4
    assert_recorded(engine, PROMPTS[0], done, begin=len(PROMPTS[0]) + 2)


def test_tokens_whose_keys_and_values_were_kept_have_their_experts():
    """The next turn of a session does not compute its first tokens again, and still has all experts."""
    engine = HFEngine(QWEN, return_routed_experts=True)
    engine.keep_prefixes, computed = True, []
    engine.model.register_forward_pre_hook(
        lambda _, given, named: computed.append(named["input_ids"].shape) if named else None, with_kwargs=True
    )
    how, first = SamplingParams(9), list(range(20, 45))
    (one,) = engine.generate([first], how, [0])
    second = [*first, *one.token_ids, 3, 4]
    computed.clear()
    for prompts in ([second], [second, [5, 6], [*first[:18], 1], second]):
        for prompt, done in zip(prompts, engine.generate(prompts, how, range(len(prompts))), strict=True):
            assert_recorded(engine, prompt, done)
        assert max(tokens for _, tokens in computed) < 8
        second = [*second, *done.token_ids, 7]


def test_without_the_option_nothing_is_recorded():
    engine = HFEngine(QWEN)
    assert engine.routed_experts is False
    (done,) = engine.generate([[1]], SamplingParams(2), [0])
    assert done.routed_experts is None


def test_models_that_cannot_be_recorded():
    llama = {**SIZES, "model_type": "llama"}
    with pytest.raises(RoutingError, match="'llama' of this config has no experts"):
        HFEngine(llama, return_routed_experts=True)
    phi = {**SIZES, "model_type": "phimoe", "num_local_experts": 4}
    with pytest.raises(RoutingError, match="PhimoeTopKRouter: its scores are not a softmax"):
        HFEngine(phi, return_routed_experts=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("model", named(MODELS))
def test_replay_is_bitwise_what_was_recorded(model, dtype):
    engine = HFEngine(model)
    net, ids = engine.model.to(dtype), torch.tensor([PROMPTS[3]])
    with torch.no_grad():
        plain = net(ids).logits
        routers = Routers(net)
        routers.record()
        assert torch.equal(net(ids).logits, plain)
        routers.replayed = routers.recorded()
        assert torch.equal(net(ids).logits, plain)
        routers.replayed[3, 2 if model is QWEN else 1] = torch.tensor([7, 6, 5], dtype=torch.int16)[: routers.shape.k]
        changed = net(ids).logits
    assert torch.equal(changed[:, :3], plain[:, :3]) and not torch.equal(changed[:, 3], plain[:, 3])
