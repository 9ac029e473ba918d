"""Advantages compared with loops over rows and tokens."""

import math
import statistics

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from plain_losses import naive_gae

from workers.algorithms.advantages import gae, group_advantages, moments, token_rewards, whiten


@given(st.lists(st.tuples(st.sampled_from([-3, 0, 7, 10**12]), st.floats(-5, 5, width=32)), max_size=20), st.booleans())
def test_group_advantages_match_a_loop(rows, divide):
    rewards = torch.tensor([reward for _, reward in rows], dtype=torch.float32)
    ids = torch.tensor([group for group, _ in rows], dtype=torch.int64)
    expected = []
    for group, reward in rows:
        members = [other for name, other in rows if name == group]
        advantage = reward - statistics.fmean(members)
        if divide:
            advantage /= (statistics.stdev(members) if len(members) > 1 else 0.0) + 1e-6
        expected.append(advantage if len(members) > 1 else 0.0)
    got = group_advantages(rewards, ids, divide_by_std=divide)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, torch.tensor(expected, dtype=torch.float32), rtol=1e-4, atol=1e-6)


def test_equal_rewards_give_no_signal():
    rewards = torch.full((7,), 0.1)
    assert group_advantages(rewards, torch.zeros(7, dtype=torch.int64)).abs().max() < 1e-6


def test_rewards_and_group_ids_must_have_equal_lengths():
    with pytest.raises(ValueError, match=r"rewards is \(2,\) and group_ids \(3,\)"):
        group_advantages(torch.zeros(2), torch.zeros(3, dtype=torch.int64))


@given(st.integers(1, 4), st.integers(1, 11), st.integers(0, 10**6), st.sampled_from([0.0, 0.9, 1.0]), st.booleans())
def test_gae_matches_its_definition(rows, tokens, seed, gamma, holes):
    g = torch.Generator().manual_seed(seed)
    if holes:
        mask = torch.randint(0, 2, (rows, tokens), generator=g)
    else:
        first = torch.randint(0, tokens, (rows, 1), generator=g)
        length = torch.randint(0, tokens + 1, (rows, 1), generator=g)
        at = torch.arange(tokens)
        mask = ((at >= first) & (at < first + length)).long()
    values = torch.randn(rows, tokens, generator=g).masked_fill(mask == 0, math.nan)
    rewards = torch.randn(rows, generator=g)
    kl = torch.randn(rows, tokens, generator=g).masked_fill(mask == 0, math.nan)
    each = token_rewards(rewards, mask, kl=kl, kl_coef=0.3)
    for b in range(rows):
        counted = mask[b].nonzero()[:, 0].tolist()
        for t in range(tokens):
            expected = 0.0
            if t in counted:
                expected = (float(rewards[b]) if t == counted[-1] else 0.0) - 0.3 * float(kl[b, t])
            assert math.isclose(float(each[b, t]), expected, abs_tol=1e-6)
    expected = torch.tensor(naive_gae(each.tolist(), values.tolist(), mask.tolist(), gamma, 0.8))
    advantages, returns = gae(each, values, mask, gamma=gamma, lam=0.8)
    torch.testing.assert_close(advantages, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(returns, torch.where(mask != 0, expected + values, 0.0), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("keep_mean", [False, True])
def test_whitening_over_ranks_equals_whitening_over_all_rows(keep_mean):
    x = torch.randn(6, 5, generator=torch.Generator().manual_seed(1)) * 3 + 100
    mask = torch.rand(6, 5, generator=torch.Generator().manual_seed(2)) > 0.4
    x = x.masked_fill(~mask, math.nan)
    ranks = [slice(0, 1), slice(1, 1), slice(1, 6)]
    sums = sum(moments(x[rank], mask[rank]) for rank in ranks)
    got = torch.cat([whiten(x[rank], mask[rank], sums, keep_mean=keep_mean) for rank in ranks])
    counted = x[mask].double()
    expected = (counted - counted.mean()) / counted.std(unbiased=False) + keep_mean * counted.mean()
    torch.testing.assert_close(got[mask].double(), expected, rtol=1e-5, atol=1e-5)
    assert not got[~mask].any()


def test_whitening_zero_and_one_entries():
    for counted in (0, 1):
        mask = torch.arange(3)[None] < counted
        x = torch.tensor([[4.0, 5.0, 6.0]])
        assert whiten(x, mask, moments(x, mask)).tolist() == [[0.0, 0.0, 0.0]]
