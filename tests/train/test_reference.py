"""The reference itself, and the shared math against it: the same steps, split into micro-batches and over ranks."""

import copy
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from reference import ReferenceGRPO, random_prompts, sample, small_llama

from workers.algorithms.advantages import group_advantages
from workers.algorithms.losses import policy_loss, ppo_clip_loss, token_weights
from workers.data.micro_batches import cut_by_tokens, restore
from workers.data.rollout_data import check_rollout_data
from workers.train.train_model import TokenOutputs


@pytest.fixture(scope="module")
def rollout():
    """24 completions of various lengths to prompts of various lengths."""
    prompts = random_prompts(6, (4, 2, 6))
    return sample(small_llama(), prompts, 4, 8, reward=lambda _, completion: completion.count(7) + len(completion) / 8,
                  stop_token_ids=(3, 4, 5))  # fmt: skip


def outputs(model, part):
    log_probs = (
        model(input_ids=part.input_ids, attention_mask=part.attention_mask.long()).logits[:, :-1].log_softmax(-1)
    )
    of_tokens = log_probs.gather(-1, part.input_ids[:, 1:, None])[..., 0]
    entropy = -(log_probs.exp() * log_probs).sum(-1)
    first = torch.zeros(len(of_tokens), 1)
    return TokenOutputs(log_probs=torch.cat([first, of_tokens], 1), entropy=torch.cat([first, entropy], 1))


def test_sampler_produces_rollout_data(rollout):
    check_rollout_data(rollout, vocab_size=32)
    assert rollout["input_ids"].shape == (24, 14)
    lengths = set(rollout["loss_mask"].sum(1).tolist())
    assert 8 in lengths and len(lengths) > 2  # some completions were stopped
    again = ReferenceGRPO(small_llama()).log_probs(rollout)
    torch.testing.assert_close(again * rollout["loss_mask"], rollout["rollout_log_probs"], rtol=1e-4, atol=1e-5)


def test_log_probs_through_micro_batches(rollout):
    model = small_llama()
    cut = cut_by_tokens(rollout, 40)
    with torch.no_grad():
        got = restore([outputs(model, part).log_probs for part in cut], cut, rollout["input_ids"].shape)
    torch.testing.assert_close(got, ReferenceGRPO(model).log_probs(rollout), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("aggregation", ["token", "sequence"])
@pytest.mark.parametrize("ranks", [1, 3])
def test_three_steps_match_the_reference_weights(rollout, ranks, aggregation):
    options = {"kl_coef": 0.05, "entropy_coef": 0.01}
    reference = ReferenceGRPO(small_llama(), lr=3e-3, eps_clip=0.05, aggregation=aggregation, **options)
    old_model, model = small_llama(), small_llama()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
    clip = SimpleNamespace(eps_clip=0.05, eps_clip_high=None, eps_clip_dual=None)
    loss_of = policy_loss(partial(ppo_clip_loss, args=clip), **options)

    data = dict(rollout)
    weights, count = token_weights(data["loss_mask"], aggregation)
    advantages = group_advantages(data["rewards"], data["group_ids"])
    data["loss_weights"] = weights / count.float()
    data["advantages"] = advantages[:, None].expand_as(weights)
    data["old_log_probs"] = data["ref_log_probs"] = ReferenceGRPO(copy.deepcopy(old_model)).log_probs(data)
    for step in range(3):
        total, sums = 0.0, {}
        optimizer.zero_grad()
        for rank in range(ranks):
            rows = torch.arange(len(weights)).tensor_split(ranks)[rank]
            cut = cut_by_tokens({name: value[rows] for name, value in data.items()}, 60, multiple_of=4)
            for part in cut:
                loss, report = loss_of(outputs(model, part), part)
                loss.backward()
                total += float(loss.detach())
                for name, value in report.items():
                    sums[name] = sums.get(name, 0.0) + float(value)
        norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0))
        optimizer.step()
        expected = reference.step({**rollout, "old_log_probs": data["old_log_probs"]})
        got = {**sums, "loss": total, "grad_norm": norm}
        assert got == pytest.approx({name: expected[name] for name in got}, rel=1e-3, abs=1e-5), step
    assert expected["clip_fraction"] > 0 and expected["kl"] > 0
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, reference.weights()[name], rtol=0, atol=1e-4)


def test_reference_learns():
    """Within a few steps, token 7 becomes more frequent."""
    trainer = ReferenceGRPO(small_llama(num_hidden_layers=1), lr=1e-2, kl_coef=0.01)
    rewards = []
    for step in range(12):
        prompts = random_prompts(3, (3,), seed=step)
        data = sample(trainer.model, prompts, 6, 4, reward=lambda _, completion: completion.count(7) / 4, seed=step)
        trainer.step(data)
        rewards.append(float(data["rewards"].mean()))
    assert sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3 + 0.2, rewards
