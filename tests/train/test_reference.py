"""The reference itself. The backends are compared with it in test_both_backends.py."""

import pytest
import torch
from reference import ReferenceGRPO, random_prompts, sample, small_llama

from workers.data.rollout_data import check_rollout_data


@pytest.fixture(scope="module")
def rollout():
    """24 completions of various lengths to prompts of various lengths."""
    prompts = random_prompts(6, (4, 2, 6))
    return sample(small_llama(), prompts, 4, 8, reward=lambda _, completion: completion.count(7) + len(completion) / 8,
                  stop_token_ids=(3, 4, 5))  # fmt: skip


def test_sampler_produces_rollout_data(rollout):
    check_rollout_data(rollout, vocab_size=32)
    assert rollout["input_ids"].shape == (24, 14)
    lengths = set(rollout["loss_mask"].sum(1).tolist())
    assert 8 in lengths and len(lengths) > 2  # some completions were stopped
    again = ReferenceGRPO(small_llama()).log_probs(rollout)
    torch.testing.assert_close(again * rollout["loss_mask"], rollout["rollout_log_probs"], rtol=1e-4, atol=1e-5)


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
