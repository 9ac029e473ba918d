"""The gradient of the rows is that of the trees: of each turn computed as a sequence of its own, behind exactly the
tokens that the engine saw, with the weight and the advantage of its rollout written out."""

import statistics
from types import SimpleNamespace

import pytest
import torch
from reference import small_llama
from trees import random_tree

from workers.algorithms.estimators import AdvantageRows
from workers.algorithms.losses import policy_loss, token_weights
from workers.algorithms.policy_losses import ppo_clip_loss
from workers.data import packing
from workers.data.collate import collate
from workers.data.micro_batches import cut_by_tokens
from workers.fsdp.fsdp_model import FSDPTrainModel
from workers.fsdp.packed_attention import use_packed_attention
from workers.rollout.agents.rows import completion_of, rows
from workers.train.args import read_args
from workers.train.args_checks import function_of

GROUPS, SAMPLES = 2, 4
PROMPTS = [[3, 9, 27, 4, 18, 2, 6, 11, 30], [8, 8, 1, 29, 14, 7]]


def sessions():
    """(group, reward, tree) of each rollout. Some are one row, some several, one has no turn."""
    made = [
        (group, (seed * 7 % 5) / 4, random_tree(seed, turns=4, vocab=32, prompt=PROMPTS[group]))
        for seed, group in enumerate(group for group in range(GROUPS) for _ in range(SAMPLES))
    ]
    counts = [len(rows(tree)) for *_, tree in made]
    assert 0 in counts and 1 in counts and max(counts) > 2
    return made


def of_trees(model, made, aggregation):
    """The gradients by loops over rollouts, nodes and tokens; without rows, padding and packing."""
    tokens = [sum(len(node.token_ids) for node in tree.nodes if node.sampled) for *_, tree in made]
    weight = {"token": lambda k: 1 / sum(tokens), "sequence": lambda k: 1 / tokens[k] / sum(n > 0 for n in tokens)}
    model.zero_grad()
    total = 0.0
    for k, (group, reward, tree) in enumerate(made):
        rewards = [other for its, other, _ in made if its == group]
        advantage = (reward - statistics.fmean(rewards)) / (statistics.stdev(rewards) + 1e-6)
        for number, node in enumerate(tree.nodes):
            if not node.sampled or not node.token_ids:
                continue
            ids = tree.token_ids(number)
            logits = model(input_ids=torch.tensor([ids])).logits[0]
            at = len(ids) - len(node.token_ids)
            sets = iter(node.sampling_mask.token_ids) if node.sampling_mask else iter(())
            for t, token in enumerate(node.token_ids):
                left = [next(sets) for _ in range(node.sampling_mask.lengths[t])] if node.sampling_mask else []
                of_next = logits[at + t - 1]
                log_prob = of_next[token] - torch.logsumexp(of_next[left] if left else of_next, 0)
                total = total - weight[aggregation](k) * advantage * log_prob
    total.backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def rollout_data(made):
    return collate(
        [PROMPTS[group] for group, *_ in made],
        [completion_of(tree, PROMPTS[group], "stop") for group, _, tree in made],
        group_ids=[group for group, *_ in made],
        rewards=[reward for _, reward, _ in made],
    )


def of_rows(model, made, aggregation, packed, most):
    """The gradients of rollout data, as a train worker computes them in micro-batches."""
    data = dict(rollout_data(made).items())
    args = read_args({})
    of_all = AdvantageRows(data, estimator="grpo")
    advantages = function_of(args, "advantage_estimator")(of_all, args)
    data["advantages"] = advantages[:, None] * (data["loss_mask"] != 0)
    totals = of_all.own(of_all.everywhere(data["loss_mask"].float().sum(1), "sum"))
    weights, count = token_weights(data["loss_mask"], aggregation, totals=totals)
    data["loss_weights"] = weights / count
    del data["rollout_log_probs"]
    parts = cut_by_tokens(data, most, at_least=9, packed=packed)
    assert parts[-1].is_filler or most < 100
    backend = SimpleNamespace(module=model, role="actor", device=torch.device("cpu"), _sequence=None)
    backend.options = SimpleNamespace(exact=False)
    backend._of_rows = lambda *arguments: FSDPTrainModel._of_rows(backend, *arguments)
    loss = policy_loss(lambda tokens: ppo_clip_loss(tokens, args))
    model.zero_grad()
    for part in parts:
        loss(FSDPTrainModel._outputs_of(backend, part, 1.0, False), part)[0].backward()
    computed, real = sum(part.computed for part in parts), sum(part.real for part in parts)
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}, computed, real


@pytest.mark.parametrize("aggregation", ["token", "sequence"])
def test_gradient_of_rows_is_that_of_the_trees(aggregation, monkeypatch):
    """With prefix trees and without, in small micro-batches and in one, to 1e-6. Sharing of short prefixes too."""
    made, model = sessions(), small_llama().double()
    expected = of_trees(model, made, aggregation)
    assert max(float(value.abs().max()) for value in expected.values()) > 1e-2
    for packed, least, most in ((False, 8, 40), (False, 8, 1000), (True, 8, 1000), (True, 2, 40), (True, 2, 1000)):
        monkeypatch.setattr(packing, "MIN_SHARED", least)
        use_packed_attention(model, on=packed)
        found, computed, real = of_rows(model, made, aggregation, packed, most)
        for name, value in expected.items():
            assert float((found[name] - value).abs().max()) < 1e-6, (name, packed, least, most)
        if packed and most == 1000:
            assert computed < 0.9 * real  # a token that several rows have is computed once
