"""Supervised fine-tuning and DPO: losses, configuration and data. `backends/test_gradients.py` has them on ranks."""

import math

import pytest
import torch
from rank_threads import on_ranks

from workers.algorithms.estimators import AdvantageRows
from workers.algorithms.policy_losses import PolicyTokens
from workers.algorithms.supervised import dpo_advantages, dpo_loss, pairs, sft_loss
from workers.data.rollout_data import RolloutDataError
from workers.train.args import read_args
from workers.train.args_checks import TrainArgsError
from workers.train.policy_worker import PolicyTrainWorker

ROWS = {
    "input_ids": torch.tensor([[1, 2, 3], [1, 4, 5], [2, 2, 3], [2, 1, 1]]),
    "attention_mask": torch.ones(4, 3, dtype=torch.int64),
    "loss_mask": torch.tensor([[0, 1, 1]] * 4),
}
PAIRS = {"rewards": torch.tensor([1.0, 0.0, -2.0, 3.0]), "group_ids": torch.tensor([7, 7, 3, 3])}


def checked(loss, rows, computed=("ref_log_probs",)):
    args = read_args({"policy_loss_type": loss, "vocab_size": 8})
    return PolicyTrainWorker.check_rows(args, rows, "actor", computed)


def test_rows_of_each_loss():
    """Supervised fine-tuning needs tokens and masks alone."""
    checked("sft", ROWS, computed=())
    checked("sft", {**ROWS, "advantages": torch.ones(4)})
    checked("dpo", {**ROWS, **PAIRS})


@pytest.mark.parametrize(
    ("changes", "computed", "message"),
    [
        ({"rewards": torch.tensor([1.0, 1.0, 0.0, 3.0])}, ("ref_log_probs",), "group 7 have the same reward"),
        ({"group_ids": torch.tensor([7, 7, 7, 3])}, ("ref_log_probs",), "1 rows have the group id 3; .* needs pairs"),
        ({"group_ids": torch.tensor([3, 3, 3, 7])}, ("ref_log_probs",), "3 rows have the group id 3; .* needs pairs"),
        ({"loss_mask": torch.tensor([[0, 1, 1]] * 3 + [[0, 0, 0]])}, ("ref_log_probs",), "row of group 3 has no token"),
        ({}, (), "no 'ref_log_probs'.*init\\(with_ref=True\\)"),
        ({"advantages": torch.ones(4)}, ("ref_log_probs",), "computes; leave them out"),
    ],
)
def test_wrong_pairs(changes, computed, message):
    with pytest.raises(RolloutDataError, match=message):
        checked("dpo", {**ROWS, **PAIRS, **changes}, computed)


def test_sft_is_the_cross_entropy_of_the_tokens():
    torch.manual_seed(0)
    logits, ids = torch.randn(3, 5, 7, requires_grad=True), torch.randint(7, (3, 5))
    advantages, mask = torch.rand(3, 5), torch.ones(3, 5, dtype=torch.bool)
    expected = advantages * torch.nn.functional.cross_entropy(logits.transpose(1, 2), ids, reduction="none")
    log_probs = logits.log_softmax(-1).gather(-1, ids[..., None])[..., 0]
    found, _ = sft_loss(PolicyTokens(log_probs, log_probs.detach(), advantages, mask, {}), None)
    torch.testing.assert_close(found, expected)
    gradients = [torch.autograd.grad(one.sum(), logits, retain_graph=True)[0] for one in (found, expected)]
    torch.testing.assert_close(*gradients)


def test_dpo_is_that_of_the_paper():
    """Rafailov et al. 2023 (arXiv 2305.18290), equation 7, in a loop over the pairs."""
    torch.manual_seed(0)
    args = read_args({"policy_loss_type": "dpo", "dpo_beta": 0.3})
    rewards, groups = torch.tensor([1.0, 5.0, 2.0, 3.0, 9.0, 0.0]), torch.tensor([7, 3, 7, 3, 1, 1])
    rejected_of = {2: 0, 1: 3, 4: 5}  # by the chosen row
    mask = torch.tensor([[0, 1, 1, 0], [1, 0, 1, 1], [0, 0, 1, 1], [0, 1, 0, 0], [0, 0, 0, 1], [1, 1, 1, 1]]) != 0
    log_probs, reference = -4 * torch.rand(6, 4), -4 * torch.rand(6, 4)
    policy = log_probs.clone().requires_grad_()
    losses, margins = [], []
    for chosen, rejected in rejected_of.items():
        ratios = [
            sum(policy[row, t] - reference[row, t] for t in range(4) if mask[row, t]) for row in (chosen, rejected)
        ]
        margins.append(0.3 * (ratios[0] - ratios[1]))
        losses.append((1 + (-margins[-1]).exp()).log())
    expected = sum(losses) / 3
    (gradient,) = torch.autograd.grad(expected, policy)

    hidden = lambda values: values.masked_fill(~mask, math.nan)  # noqa: E731
    data = {
        "old_log_probs": hidden(log_probs),
        "ref_log_probs": hidden(reference),
        "loss_mask": mask.long(),
        "input_ids": groups,
    }
    of_rows = dpo_advantages(AdvantageRows({**data, "group_ids": groups, "rewards": rewards}), args)
    ours = log_probs.clone().requires_grad_()
    values, metrics = dpo_loss(PolicyTokens(ours, log_probs, of_rows[:, None].expand(6, 4) * mask, mask, {}), args)
    total = values[mask].sum() / 6  # the mean over rows of their sums
    assert float(total) == pytest.approx(float(expected), rel=1e-5)
    torch.testing.assert_close(torch.autograd.grad(total, ours)[0], gradient)
    found = {name: float(value[mask].double().sum() / 6) for name, value in metrics.items()}
    positive = [float(margin) > 0 for margin in margins]
    assert len(set(positive)) == 2
    assert found == pytest.approx({"dpo_accuracy": sum(positive) / 3, "dpo_margin": float(sum(margins) / 3)}, rel=1e-4)


def test_pairs_are_found_by_their_number():
    rewards = torch.tensor([0.0, 2.0, 1.0, 1.0, 4.0, 3.0])
    chosen, rejected = pairs(torch.tensor([5, 9, 5, 9, 1, 1]), rewards, rewards >= 0)
    assert sorted(zip(chosen.tolist(), rejected.tolist(), strict=True)) == [(1, 3), (2, 0), (4, 5)]
    chosen, _ = pairs(torch.tensor([5, 9, 5, 9]), torch.tensor([False, True, True, False]), rewards[:4] >= 0)
    assert chosen.tolist() == [2, 1]
    none = torch.zeros(0)
    assert [len(of) for of in pairs(none.long(), none, none.bool())] == [0, 0]  # as of a batch without rows


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rewards": torch.tensor([1.0, 1.0, 0.0, 3.0])}, "group 7 have the same reward"),
        ({"group_ids": torch.tensor([7, 7, 7, 3])}, "3 rows have the group id 7|1 rows have the group id 3"),
        ({"loss_mask": torch.tensor([[0, 1, 1]] * 3 + [[0, 0, 0]])}, "row of group 3 has no token"),
    ],
)
def test_wrong_pairs_of_several_ranks_are_errors_on_each(changes, message):
    """The driver does not see rows behind references. No rank has both rows of a pair here, nor of them all."""
    log_probs = {"old_log_probs": torch.zeros(4, 3), "ref_log_probs": torch.zeros(4, 3)}
    data = {**ROWS, **PAIRS, **log_probs, **changes}
    ranks = [{name: entry[[rank, rank + 2]] for name, entry in data.items()} for rank in (0, 1)]
    args = read_args({"policy_loss_type": "dpo", "vocab_size": 8})

    def failed(rows, rank, gather):
        with pytest.raises(RolloutDataError, match=message):
            dpo_advantages(AdvantageRows(rows, gather=gather, rank=rank), args)
        return True

    assert all(on_ranks(failed, ranks))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"advantage_estimator": "sft"}, "comes with policy_loss_type='sft'"),
        ({"policy_loss_type": "sft", "advantage_estimator": "gae"}, "has no effect with policy_loss_type='sft'"),
        ({"policy_loss_type": "sft", "temperature": 0.5}, "args.temperature=0.5 does not go with"),
        ({"policy_loss_type": "sft", "kl_coef": 0.1}, "args.kl_coef=0.1 does not go with"),
        ({"policy_loss_type": "sft", "kl_loss_coef": 0.1, "use_unbiased_kl": True}, "use_unbiased_kl=True does not go"),
        ({"policy_loss_type": "sft", "dpo_beta": 0.1}, "dpo_beta=0.1 has no effect"),
        ({"policy_loss_type": "dpo", "keep_old_actor": True}, "args.keep_old_actor=True does not go with"),
        ({"policy_loss_type": "dpo", "overlong_filtering": True}, "args.overlong_filtering=True does not go with"),
        ({"policy_loss_type": "dpo", "ppo_epochs": 2}, "one optimizer step"),
        ({"policy_loss_type": "dpo", "num_steps_per_rollout": 2}, "one optimizer step"),
        ({"policy_loss_type": "dpo", "loss_aggregation": "token"}, "mean over pairs"),
    ],
)
def test_wrong_configurations(given, message):
    with pytest.raises(TrainArgsError, match=message):
        read_args(given)


def test_configuration_is_completed_once():
    args = read_args({"policy_loss_type": "dpo", "n_samples_per_prompt": 1})
    assert (args.advantage_estimator, args.loss_aggregation, args.loss_constant_length) == ("dpo", "constant", 1)
    assert args.dpo_beta == 0.1 and read_args(args) == args


def test_path_of_a_built_in_loss_is_its_name():
    path = "workers.algorithms.supervised.dpo_loss"
    assert read_args({"policy_loss_type": path}) == read_args({"policy_loss_type": "dpo"})
    with pytest.raises(TrainArgsError, match="cannot be imported"):
        read_args({"policy_loss_type": "workers.algorithms.supervised.no_such"})
