"""What the tests of other libraries expect of routing replay (NeMo-RL, miles, SkyRL, slime, verl), as cases of our own.
The table in docs/routing-replay.md says which hold."""

from array import array

import pytest
import torch
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM

from workers.data.routed_experts import RoutingShape, missing_routes, wrong_routes
from workers.hf_files import config_from
from workers.hf_routing import Routers, RoutingError
from workers.rollout.agents.rows import rows
from workers.rollout.agents.trajectory import Trajectory
from workers.rollout.engines.rollout_engine import Completion, RoutedExperts

SIZES = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 8, "moe_intermediate_size": 8, "head_dim": 8}
SIZES |= {"num_attention_heads": 2, "num_key_value_heads": 2, "num_experts": 5, "num_experts_per_tok": 2}
SIZES |= {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None, "initializer_range": 0.3}
QWEN = {**SIZES, "model_type": "qwen3_moe", "num_hidden_layers": 4, "mlp_only_layers": [0, 3], "norm_topk_prob": True}
IDS = torch.arange(6)[None] * 7 % 64


def make(seed=0, **fields):
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(config_from({**QWEN, **fields}))


def used(model, run):
    """(layer, experts) in the order in which the modules behind the routers got them."""
    seen = []
    layers = [(int(name.split(".")[-3]), of) for name, of in model.named_modules() if name.endswith("mlp.experts")]
    hooks = [
        module.register_forward_pre_hook(lambda _, given, at=at: seen.append((at, given[1]))) for at, module in layers
    ]
    run()
    for hook in hooks:
        hook.remove()
    return seen


def payload():
    """Experts for six tokens and all four layers; those of dense layers stand for nothing."""
    return torch.stack([torch.tensor([[at, at], [at % 5, (at + 1) % 5], [(at + 3) % 5, at % 5], [9, 9]]) for at in
                        range(6)]).short()  # fmt: skip


def test_layers_are_named_by_their_number_in_the_whole_model():
    """NeMo-RL: a payload with all layers; miles: dense layers are skipped."""
    model = make()
    routers = Routers(model)
    routers.replayed = payload()
    assert routers.shape == RoutingShape(4, 5, 2, (1, 2))
    seen = used(model, lambda: model(IDS))
    assert [layer for layer, _ in seen] == [1, 2]
    for layer, experts in seen:
        assert torch.equal(experts, payload()[:, layer].long())


def test_routers_behind_a_wrapper_are_found():
    """miles, verl: also where the decoder is a part of another model, such as one with an adapter."""
    outer = torch.nn.Module()
    outer.config, outer.language_model = make().config, make()
    assert Routers(outer).shape.sparse == (1, 2)


def test_missing_rows_are_routed_natively():
    """NeMo-RL: two tokens, one of which has -1."""
    model = make()
    native = dict(used(model, lambda: model(IDS)))
    routers, wanted = Routers(model), payload()
    wanted[2:, 1] = -1  # one layer alone
    routers.replayed = wanted
    first = dict(used(model, lambda: model(IDS)))[1]
    assert torch.equal(first[:2], wanted[:2, 1].long()) and torch.equal(first[2:], native[1][2:])


def test_recomputed_gradients_are_those_of_a_pass_that_is_not():
    """NeMo-RL: record, then replay under activation checkpointing."""
    plain, replayed = make(), make()
    recorder, routers = Routers(plain), Routers(replayed)
    recorder.record()
    plain(IDS).logits.square().sum().backward()
    routers.replayed = recorder.recorded()
    replayed.gradient_checkpointing_enable({"use_reentrant": False})
    calls = used(replayed.train(), lambda: replayed(IDS).logits.square().sum().backward())
    assert len(calls) == 4  # twice for each of two layers
    for (name, one), other in zip(plain.named_parameters(), replayed.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad), name


def test_experts_of_two_micro_batches_are_told_apart():
    """NeMo-RL, SkyRL: with recomputation, a queue must be first in, first out. Here each backward pass follows its own
    forward pass, and the experts stay in between."""
    model = make()
    routers, seen = Routers(model), []

    def run(ids, experts):
        routers.replayed = experts
        checkpoint(lambda x: model(inputs_embeds=x).logits, model.get_input_embeddings()(ids), use_reentrant=True).sum(
        ).backward()  # fmt: skip

    first, second = payload(), payload().flip(0)
    seen = used(model, lambda: (run(IDS, first), run(IDS.flip(1), second)))
    assert [layer for layer, _ in seen] == [1, 2] * 4
    for at, (layer, experts) in enumerate(seen):
        assert torch.equal(experts, (first if at < 4 else second)[:, layer].long())


def test_replay_of_one_model_leaves_others_alone():
    """NeMo-RL, verl: no registry of all routers of the process, which a reference or a temporary model would enter."""
    active, other = make(), make()
    native = used(other, lambda: other(IDS))
    Routers(active).replayed = payload()
    idle = Routers(other)
    active(IDS)
    assert all(torch.equal(a, b) for (_, a), (_, b) in zip(native, used(other, lambda: other(IDS)), strict=True))
    assert idle.replayed is None


def test_nothing_is_left_after_a_pass_that_failed():
    """miles, SkyRL: neither the experts to replay nor a recording."""
    model = make()
    native, routers = used(model, lambda: model(IDS)), Routers(model)
    routers.replayed = payload()[:, :1]  # of too few layers
    routers.record()
    with pytest.raises(IndexError):
        model(IDS)
    routers.forget()
    again = used(model, lambda: model(IDS))
    assert all(torch.equal(a, b) for (_, a), (_, b) in zip(native, again, strict=True))
    with pytest.raises(RuntimeError, match="nothing was recorded"):
        routers.recorded()


def test_scores_are_of_all_logits():
    """ISEEKYAN/Megatron-LM #79: an expert that the router would not choose has its score and a gradient, not 0."""
    model = make()
    gate = model.model.layers[1].mlp.gate
    routers, kept = Routers(model), {}
    worst = used(
        model, lambda: gate.register_forward_hook(lambda _, given, made: kept.update(made=made)) and model(IDS)
    )
    logits = kept["made"][0]
    experts = payload()
    experts[:, 1] = logits.topk(2, largest=False).indices.short()
    routers.replayed = experts
    model(IDS).logits.square().sum().backward()
    probs = kept["made"][0].softmax(-1).gather(1, experts[:, 1].long())
    assert (kept["made"][1] - probs / probs.sum(-1, keepdim=True)).abs().max() < 1e-7
    assert (kept["made"][1] > 0).all() and bool(gate.weight.grad.any()) and worst


def test_models_without_routers_are_refused():
    """miles: no adapter for the model, or no layers with experts in it."""
    with pytest.raises(RoutingError, match="'llama' of this config has no experts"):
        llama = {"model_type": "llama", "num_hidden_layers": 1, "vocab_size": 8, "hidden_size": 8}
        Routers(AutoModelForCausalLM.from_config(config_from({**llama, "num_attention_heads": 1})))
    model = make()
    model.model.layers[1].mlp.gate = torch.nn.Identity()
    with pytest.raises(RoutingError, match=r"experts in the layers \[1, 2\], and its model routers in \[2\]"):
        Routers(model)


def test_zeros_are_experts_in_layers_that_have_some():
    """slime: an engine's pipeline stage that was not asked leaves zeros. They are refused in a layer with experts, and
    ignored in a dense one."""
    shape, real = RoutingShape(6, 8, 2, (3, 4, 5)), torch.ones(1, 4, dtype=torch.bool)
    experts = torch.zeros(4, 6, 2, dtype=torch.int16)
    experts[:, 3:, 1] = 7

    def wrong():
        return wrong_routes(torch.nested.as_nested_tensor([experts], layout=torch.jagged), real, shape)

    assert wrong() is None
    experts[:, 4:] = 0
    assert "the experts [0, 0] at its token 0 in layer 4" in wrong()


def test_experts_above_255_survive():
    """verl: numbers that one byte cannot hold, through recording and replay."""
    model = make(num_experts=600)
    routers, wanted = Routers(model), payload()
    wanted[:3, 1] = torch.tensor([[0, 255], [256, 511], [599, 300]], dtype=torch.int16)
    routers.replayed = wanted
    routers.record()
    model(IDS)
    assert torch.equal(routers.recorded()[:, 1:3], wanted[:, 1:3])


def test_a_continued_request_adds_the_experts_of_new_tokens_only():
    """verl: each attempt computes the prompt and all tokens so far again."""
    experts = RoutedExperts(array("h"), 1, 1)
    for seen in (range(10, 15), range(20, 26), range(30, 38)):
        experts.extend(array("h", seen), len(seen))
    assert experts.ids.tolist() == [*range(10, 15), 25, 36, 37]


def test_ranks_of_a_shared_sequence_have_their_slice_of_the_experts():
    """miles: eight tokens for two tensor-parallel ranks."""
    moe = pytest.importorskip("workers.megatron.moe")
    routes = torch.arange(8).view(8, 1, 1, 1)
    whole = moe.RoutedTokens(0, torch.arange(8).view(8, 1) < 7, routes)
    slices = [whole.slice_of(rank, 2) for rank in range(2)]
    assert [one.routes.flatten().tolist() for one in slices] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert [one.real.flatten().tolist() for one in slices] == [[True] * 4, [True] * 3 + [False]]


def test_turns_have_the_rows_that_were_captured():
    """SkyRL: a prompt of 3 and 2 sampled tokens have 4 rows; the next turn, a prompt of 7 and 2 more, adds 4. The last
    token has none, which does not count as missing; one that was trained and has none does."""

    def turn(known, count):
        ids = array("h", [at % 5 for at in range(4 * (count - 1))] + [-1] * 4)
        return Completion([9, 9], [0.0, 0.0], "stop", routed_experts=RoutedExperts(ids, 2, 2))

    tree = Trajectory()
    node = tree.sample(tree.give(None, [1, 2, 3]), turn(0, 5))
    node = tree.sample(tree.give(node, [4, 5]), turn(5, 9))
    ((row,), shape) = rows(tree), RoutingShape(2, 5, 2, (0, 1))
    experts = torch.tensor(row.completion.routed_experts.ids, dtype=torch.int16).view(9, 2, 2)
    assert (experts[:8] >= 0).all() and (experts[8] == -1).all()
    column = torch.nested.as_nested_tensor([experts, experts[:4]], layout=torch.jagged)
    assert missing_routes(column, shape) == (0, 8 + 3)
    experts[5, 1] = -1
    assert missing_routes(torch.nested.as_nested_tensor([experts], layout=torch.jagged), shape) == (1, 8)
