"""Advantage estimators compared with loops over completions and tokens, on any number of ranks. Most numbers that the
code of other libraries returned are in test_peers.py."""

import itertools
import logging
import math
import statistics
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from plain_losses import advantages, counted
from rank_threads import on_ranks

from workers.algorithms.advantages import pass_at_k_advantages
from workers.algorithms.estimators import AdvantageRows, value_targets
from workers.data.rollout_data import RolloutDataError
from workers.train.args import read_args
from workers.train.args_checks import TrainArgsError, function_of
from workers.train.policy_worker import PolicyTrainWorker, check_entries

ROWS, TOKENS = 11, 9
SPLITS = [[11], [4, 7], [1, 0, 5, 5]]


def made(seed=0):
    """Ragged rows with padding on either side, one without a token that counts, and one with a tool's output between;
    groups of 4, 3, 3 and 1, not in order. What does not count is NaN."""
    g = torch.Generator().manual_seed(seed)
    at, first = torch.arange(TOKENS), torch.tensor([0, 3, 1, 2, 0, 4, 1, 0, 0, 2, 5])[:, None]
    real = (at >= first) & (at < first + torch.tensor([9, 4, 6, 2, 7, 5, 8, 3, 9, 6, 3])[:, None])
    mask = real & (at > first + 1)  # none in row 3
    mask[0, 4:6] = False
    data = {"attention_mask": real.long(), "loss_mask": mask.long(), "input_ids": real.long()}
    for name in ("old_log_probs", "ref_log_probs"):
        data[name] = -(torch.rand(ROWS, TOKENS, generator=g) * 2 + 0.05)
    data["sum_pi_squared"] = data["old_log_probs"].exp().square() + 0.1 * torch.rand(ROWS, TOKENS, generator=g)
    data["values"] = torch.randn(ROWS, TOKENS, generator=g)
    data = {
        name: value.masked_fill(~mask, math.nan) if value.is_floating_point() else value for name, value in data.items()
    }
    data["group_ids"] = torch.tensor([5, 2**40, 9, 5, 9, 2**40, 9, 7, 5, 2**40, 5])
    data["rewards"] = torch.randint(0, 4, (ROWS,), generator=g) / 4.0
    data["rewards/right"] = torch.randint(0, 2, (ROWS,), generator=g).float()
    data["rewards/short"] = 10 * torch.rand(ROWS, generator=g)
    data["reward_baselines"] = torch.rand(ROWS, generator=g)
    data["left_out"] = torch.zeros(ROWS, dtype=torch.bool)
    return data


# --- loops -----------------------------------------------------------------------------------------------------


def plain(data, args):
    return advantages(data, args, data["left_out"].tolist())


def of_ranks(function, data, args, split):
    """What a function of rows returns on each dp rank, or its error."""

    def of_rank(part, rank, gather):
        try:
            return function(AdvantageRows(part, rank, gather, args.advantage_estimator), args)
        except RolloutDataError as error:
            return error

    begins = [sum(split[:rank]) for rank in range(len(split))]
    parts = [
        {name: value[begin : begin + size] for name, value in data.items()}
        for begin, size in zip(begins, split, strict=True)
    ]
    return on_ranks(of_rank, parts)


def check(data, given, split=(ROWS,)):
    args = read_args(given)
    of_rows = torch.cat(of_ranks(function_of(args, "advantage_estimator"), data, args, split))
    expected = plain(data, given)
    for row in range(ROWS):
        counts = data["loss_mask"][row] != 0
        if data["left_out"][row] and of_rows.dim() == 2:
            assert not of_rows[row].isnan().any()  # not trained
            continue
        found = of_rows[row].expand(int(counts.sum())) if of_rows.dim() == 1 else of_rows[row][counts]
        assert found.tolist() == pytest.approx(expected[row], abs=2e-5), (row, given)
        assert of_rows.dim() == 1 or not of_rows[row][~counts].any()
    assert any(abs(value) > 0.01 for row in expected for value in row)


ESTIMATORS = ["grpo", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "opo", "remax", "grpo_passk",
              "maxrl", "gdpo", "optimal_token_baseline"]  # fmt: skip


@pytest.mark.parametrize("split", SPLITS, ids=str)
@pytest.mark.parametrize("kl_coef", [0.0, 0.2])
@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_estimator_matches_a_loop_on_any_number_of_ranks(estimator, kl_coef, split):
    for seed in range(2):
        check(made(seed), {"advantage_estimator": estimator, "kl_coef": kl_coef}, split)


@pytest.mark.parametrize("split", SPLITS, ids=str)
def test_options_of_estimators(split):
    data = made(3)
    data["correction_weights"] = (0.5 + torch.rand(ROWS, TOKENS)).masked_fill(data["loss_mask"] == 0, math.nan)
    check(data, {"advantage_estimator": "optimal_token_baseline", "kl_coef": 0.1}, split)
    check(data, {"advantage_estimator": "grpo", "grpo_std_normalization": False}, split)
    check(data, {"advantage_estimator": "reinforce_plus_plus", "gamma": 0.9, "kl_coef": 0.3}, split)
    check(data, {"advantage_estimator": "gdpo", "gdpo_weights": {"short": 0.25}}, split)
    check(data, {"advantage_estimator": "grpo_passk", "grpo_std_normalization": False}, split)
    for k in (2, 3, 4):
        check(data, {"advantage_estimator": "grpo_passk", "passk_k": k}, split)


@pytest.mark.parametrize("split", SPLITS, ids=str)
@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_left_out_completions_are_in_their_groups_but_not_in_the_whitening(estimator, split):
    data = made(1)
    data["left_out"][torch.tensor([0, 5, 6])] = True
    check(data, {"advantage_estimator": estimator, "kl_coef": 0.1}, split)


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("split", SPLITS, ids=str)
def test_decoupled_and_length_adaptive_lambda(split, normalize):
    """VAPO (2504.05118): the policy's lambda is 1 - 1 / (alpha l), the critic's is 1."""
    data = made(2)
    data["left_out"][4] = True
    given = {"advantage_estimator": "gae", "gamma": 0.97, "kl_coef": 0.1, "normalize_advantages": normalize}
    args = read_args({**given, "gae_length_adaptive_alpha": 0.4, "gae_lambda_value": 1.0})
    advantages = torch.cat(of_ranks(function_of(args, "advantage_estimator"), data, args, split))
    targets = torch.cat(of_ranks(value_targets, data, args, split))
    old, ref, values = (counted(data, name) for name in ("old_log_probs", "ref_log_probs", "values"))
    expected = []
    for row in range(ROWS):
        length = len(old[row])
        lam = max(0.0, 1 - 1 / (0.4 * length)) if length else 0.0
        rewards = [-0.1 * (a - b) for a, b in zip(old[row], ref[row], strict=True)]
        if rewards:
            rewards[-1] += float(data["rewards"][row])
        following = [*values[row][1:], 0.0]
        deltas = [rewards[t] + 0.97 * following[t] - values[row][t] for t in range(length)]
        expected.append([sum((0.97 * lam) ** (j - t) * deltas[j] for j in range(t, length)) for t in range(length)])
        of_row = [sum(0.97 ** (j - t) * rewards[j] for j in range(t, length)) for t in range(length)]
        assert targets[row][data["loss_mask"][row] != 0].tolist() == pytest.approx(of_row, abs=1e-5)
    if normalize:
        every = [value for row in range(ROWS) if row != 4 for value in expected[row]]
        mean, deviation = statistics.fmean(every), math.sqrt(statistics.pvariance(every) + 1e-8)
        expected = [[(value - mean) / deviation for value in row] for row in expected]
    for row in set(range(ROWS)) - ({4} if normalize else set()):
        assert advantages[row][data["loss_mask"][row] != 0].tolist() == pytest.approx(expected[row], abs=1e-5)
    # By default both are gae_lambda.
    plain_args = read_args({**given, "gae_lambda": 1.0})
    torch.testing.assert_close(torch.cat(of_ranks(value_targets, data, plain_args, split)), targets)


def test_long_completions_keep_their_lambda():
    """1 - 1 / (0.05 * 20,000) = 0.999 to the power of 20,000, in float32, would be wrong in the fourth digit."""
    length = 20_000
    data = {name: torch.zeros(1, length) for name in ("input_ids", "values")}
    data |= {"loss_mask": torch.ones(1, length), "rewards": torch.ones(1)}
    given = {"advantage_estimator": "gae", "gae_length_adaptive_alpha": 0.05, "normalize_advantages": False}
    args = read_args(given)
    advantages = function_of(args, "advantage_estimator")(AdvantageRows(data), args)
    assert float(advantages[0, 0]) == pytest.approx(0.999**19_999, rel=5e-6, abs=0)


def test_pass_at_k_is_the_gradient_of_pass_at_k():
    """Two answers, one of which is right with probability s(x): the expected sum of k * advantage * d log p / dx over a
    group of k, and its mean over larger groups, is d pass@k / dx, where pass@k = 1 - (1 - s)^k."""
    x = torch.tensor(0.3, dtype=torch.float64, requires_grad=True)
    k, size = 3, 4
    expected = torch.autograd.grad(1 - (1 - x.sigmoid()) ** k, x)[0]
    total = 0.0
    for answers in itertools.product([0.0, 1.0], repeat=size):
        right = torch.tensor(answers)
        advantages = pass_at_k_advantages(right, torch.zeros(size, dtype=torch.int64), k, divide_by_std=False)
        s = float(x.detach().sigmoid())
        probability = math.prod(s if one else 1 - s for one in answers)
        scores = torch.where(right > 0, 1 - s, -s)  # d log p / dx
        total += probability * float((k * advantages * scores).mean())
    assert total == pytest.approx(float(expected), abs=1e-6)


def test_energies_are_of_the_weights_before_the_step():
    """Also where the old log-probabilities are of other weights: an energy of both may be negative, and the sum of
    energies that is divided by may be 0. The first token is nearly certain."""
    logits = 3 * torch.randn(4, 6, 5, generator=torch.Generator().manual_seed(0))
    logits[:, 0, 0] = 20.0
    mask = torch.ones(4, 6, dtype=torch.int64)
    data = {"input_ids": mask, "loss_mask": mask, "group_ids": torch.zeros(4, dtype=torch.int64)}
    data |= {"rewards": torch.tensor([1.0, 0.0, 0.0, 1.0]), "old_log_probs": torch.full((4, 6), -0.01)}
    worker = SimpleNamespace(
        args=read_args({"temperature": 0.7}),
        model=SimpleNamespace(log_probs=lambda rows, temperature: (logits / temperature).log_softmax(-1)[..., 0]),
        _set=partial(PolicyTrainWorker._set, None),
    )
    PolicyTrainWorker._sum_pi_squared(worker, data, computed=False)
    args = read_args({"advantage_estimator": "optimal_token_baseline"})
    found = function_of(args, "advantage_estimator")(AdvantageRows(data), args)
    p = (logits.double() / 0.7).softmax(-1)
    energies = (1 - 2 * p[..., 0] + p.square().sum(-1)).cumsum(1)
    baselines = (data["rewards"][:, None] * energies).sum(0) / (energies.sum(0) + 1e-8)
    torch.testing.assert_close(found.double(), data["rewards"][:, None] - baselines, atol=1e-4, rtol=1e-4)


# --- other libraries -------------------------------------------------------------------------------------------


LENGTHS = [5, 3, 4, 2, 4, 3, 1]


def cell(a, b, m):
    return torch.tensor([[((a * i + b * t + i * t) % m) / m for t in range(5)] for i in range(7)])


# What verl's core_algos.py returned (verl-project/verl at 1dda039b9c63) where test_peers.py has no case: the first
# token of each row, with a KL penalty of .2 in token_level_rewards.
VERL_WITH_KL = {
    "grpo_passk": [0.461468, 0, 0, 0, 0, 0.449031, 0],
    "optimal_token_baseline": [1.081565, -0.138175, 0.681705, 0.824682, -0.852062, 1.152354, 0.219357],
}
# All tokens of row 0 and of row 2, whose tails are beyond those of the others, or not. With rollout_is_weights
# 1 + cell(1, 2, 3).
VERL_WITH_WEIGHTS = [[0.897326, 0.332362, 0.445118, 1.0, 1.0], [0.212823, -0.084762, 0.068145, 0.124687]]


def test_numbers_of_verl():
    mask = (torch.arange(5) < torch.tensor(LENGTHS)[:, None]).long()
    data = {"input_ids": mask, "loss_mask": mask, "group_ids": torch.tensor([3, 3, 8, 3, 8, 8, 3])}
    data["rewards"] = torch.tensor([1.0, 0.0, 0.5, 1.0, 0.0, 2.0, 0.25])
    data |= {"old_log_probs": -(0.1 + 2 * cell(3, 5, 7)), "ref_log_probs": -(0.2 + 2 * cell(5, 2, 11))}
    data["sum_pi_squared"] = 0.3 + 0.6 * cell(4, 3, 5)

    def computed(**given):
        args = read_args(given)
        made = function_of(args, "advantage_estimator")(AdvantageRows(data), args)
        return made[:, None] * mask if made.dim() == 1 else made

    for estimator, expected in VERL_WITH_KL.items():
        found = computed(advantage_estimator=estimator, kl_coef=0.2)
        assert found[:, 0].tolist() == pytest.approx(expected, abs=2e-6)
    data["correction_weights"] = 1 + cell(1, 2, 3)
    found = computed(advantage_estimator="optimal_token_baseline")
    assert [found[0].tolist(), found[2, :4].tolist()] == [pytest.approx(row, abs=2e-6) for row in VERL_WITH_WEIGHTS]


# --- what is refused ---------------------------------------------------------------------------------------------


COMPARE = ["grpo", "rloo", "reinforce_plus_plus_baseline", "opo", "grpo_passk", "maxrl", "gdpo"]


@pytest.mark.parametrize("estimator", COMPARE)
def test_groups_of_one_are_an_error_and_single_ones_a_warning(estimator, caplog):
    with pytest.raises(TrainArgsError, match=rf"n_samples_per_prompt=1: advantage_estimator='{estimator}' compares"):
        read_args({"advantage_estimator": estimator, "n_samples_per_prompt": 1})
    args, data = read_args({"advantage_estimator": estimator}), made()
    alone = {**data, "group_ids": torch.arange(ROWS)}
    message = rf"each of the 11 completions is alone in its group.*'{estimator}' would give .*samples_per_prompt"
    # On the driver, before anything is sent; and on all ranks, where a user's function may have dropped rows.
    tokens = {"input_ids": torch.ones(ROWS, TOKENS, dtype=torch.int64)}
    kept = ("attention_mask", "loss_mask", "rewards", "rewards/right", "group_ids")
    rows = {name: alone[name] for name in kept} | tokens
    with pytest.raises(RolloutDataError, match=message):
        PolicyTrainWorker.check_rows(args, rows, "actor", ())
    PolicyTrainWorker.check_rows(args, rows | {"group_ids": data["group_ids"]}, "actor", ())
    PolicyTrainWorker.check_rows(args, rows | {"advantages": torch.zeros(ROWS)}, "actor", ())
    function = function_of(args, "advantage_estimator")
    for error in of_ranks(function, alone, args, [4, 0, 7]):
        with pytest.raises(RolloutDataError, match=message):
            raise error
    with caplog.at_level(logging.WARNING):
        of_ranks(function, data, args, [4, 7])
    (record,) = caplog.records
    assert "1 of 11 completions are alone in their groups" in record.getMessage()


def test_estimators_without_groups_take_one_completion_per_prompt():
    for estimator in ("reinforce_plus_plus", "remax", "gae", "optimal_token_baseline"):
        read_args({"advantage_estimator": estimator, "n_samples_per_prompt": 1})


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"passk_k": 2}, "passk_k=2 needs advantage_estimator='grpo_passk'"),
        ({"advantage_estimator": "grpo_passk", "passk_k": 9}, "passk_k=9 is more than n_samples_per_prompt=8"),
        ({"advantage_estimator": "grpo_passk", "passk_k": 1}, "passk_k=1: expected a number of at least 2"),
        ({"gdpo_weights": {"right": 1}}, "gdpo_weights=.* needs advantage_estimator='gdpo'"),
        ({"gae_lambda_value": 1}, "gae_lambda_value=1.0 needs advantage_estimator='gae'"),
        ({"gae_length_adaptive_alpha": 0.05}, "gae_length_adaptive_alpha=0.05 needs advantage_estimator='gae'"),
        ({"advantage_estimator": "maxrl", "overlong_buffer_len": 4}, "which divides by the mean reward.*overlong_filt"),
        ({"advantage_estimator": "gdpo", "overlong_buffer_len": 4}, "normalizes each reward by itself"),
    ],
)
def test_options_that_an_estimator_does_not_have(given, message):
    with pytest.raises(TrainArgsError, match=message):
        read_args(given)


def test_negative_rewards_of_maxrl_are_an_error_on_all_ranks():
    args, data = read_args({"advantage_estimator": "maxrl"}), made()
    data["rewards"][9] = -0.5
    for error in of_ranks(function_of(args, "advantage_estimator"), data, args, [4, 7]):
        with pytest.raises(RolloutDataError, match=r"rewards go down to -0\.5; MaxRL divides by their mean"):
            raise error


@pytest.mark.parametrize(
    ("given", "names", "message"),
    [
        (
            {"advantage_estimator": "remax"},
            "rewards",
            r"no 'reward_baselines'.*RolloutManager\(greedy_baselines=True\)",
        ),
        ({"advantage_estimator": "gdpo"}, "rewards group_ids", "no entry 'rewards/NAME'"),
        (
            {"advantage_estimator": "gdpo", "gdpo_weights": {"format": 2}},
            "rewards group_ids rewards/right",
            "gdpo_weights has 'format', but the rewards in the rollout data are right",
        ),
        ({"kl_coef": 0.1}, "rewards group_ids", "no 'ref_log_probs'"),
        ({"overlong_filtering": True}, "rewards group_ids", "overlong_filtering=True needs 'truncated'"),
        (
            {"advantage_estimator": "gae", "rollout_correction": "geo_rs", "role": "critic"},
            "rewards values rollout_log_probs",
            r"no 'old_log_probs', by which the critic leaves out.*connect\(\) with the actor's group",
        ),
    ],
)
def test_entries_that_estimators_need(given, names, message):
    role = given.pop("role", "actor")
    with pytest.raises(RolloutDataError, match=message):
        check_entries(names.split(), read_args(given), role)
