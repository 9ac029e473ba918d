"""The configuration and the data of supervised fine-tuning and DPO. Gradients are in backends/test_gradients.py."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from workers.algorithms.estimators import AdvantageRows
from workers.algorithms.supervised import dpo_advantages, pairs
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
        ({"loss_mask": torch.tensor([[0, 1, 1]] * 3 + [[0, 0, 0]])}, ("ref_log_probs",), "row of group 3 has no token"),
        ({}, (), "no 'ref_log_probs'.*init\\(with_ref=True\\)"),
        ({"advantages": torch.ones(4)}, ("ref_log_probs",), "computes; leave them out"),
    ],
)
def test_wrong_pairs(changes, computed, message):
    with pytest.raises(RolloutDataError, match=message):
        checked("dpo", {**ROWS, **PAIRS, **changes}, computed)


def test_pairs_are_found_by_their_number():
    rewards = torch.tensor([0.0, 2.0, 1.0, 1.0, 4.0, 3.0])
    chosen, rejected = pairs(torch.tensor([5, 9, 5, 9, 1, 1]), rewards, rewards >= 0)
    assert sorted(zip(chosen.tolist(), rejected.tolist(), strict=True)) == [(1, 3), (2, 0), (4, 5)]


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

    def failed(rank, barrier, parts):
        def gather(entry):
            parts[rank] = entry
            barrier.wait(10)
            found = list(parts)
            barrier.wait(10)
            return found

        with pytest.raises(RolloutDataError, match=message):
            dpo_advantages(AdvantageRows(ranks[rank], gather=gather, rank=rank), args)
        return True

    barrier, parts = threading.Barrier(2), [None, None]
    with ThreadPoolExecutor(2) as threads:
        assert all(threads.map(lambda rank: failed(rank, barrier, parts), (0, 1)))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"advantage_estimator": "sft"}, "comes with policy_loss_type='sft'"),
        ({"policy_loss_type": "sft", "advantage_estimator": "gae"}, "has no effect with policy_loss_type='sft'"),
        ({"policy_loss_type": "sft", "temperature": 0.5}, "args.temperature=0.5 does not go with"),
        ({"policy_loss_type": "sft", "kl_coef": 0.1}, "args.kl_coef=0.1 does not go with"),
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
