"""The checks of rollout data on the driver: what is missing, and what a train group would not use."""

import numpy as np
import pytest
import torch

from workers.data.balance import Balance
from workers.data.rollout_data import RolloutDataError, check_rollout_data, rows_of
from workers.train.args import read_args
from workers.train.policy_worker import PolicyTrainWorker, check_entries
from workers.train.train_worker import Referred, own_rows

MODEL = {"model_type": "llama", "vocab_size": 32, "hidden_size": 8, "num_attention_heads": 2}


def rows():
    """Two rows of three tokens; the first is padded on the left."""
    mask = torch.tensor([[0, 1, 1], [1, 1, 1]])
    return {
        "input_ids": torch.tensor([[0, 4, 5], [6, 7, 8]]),
        "attention_mask": mask,
        "loss_mask": torch.tensor([[0, 0, 1], [0, 1, 1]]),
        "rewards": torch.tensor([1.0, 0.0]),
        "group_ids": torch.tensor([0, 0]),
    }


@pytest.mark.parametrize("name", ["input_ids", "loss_mask", "rewards"])
def test_jagged_entry_is_refused_with_the_way_to_pad_it(name):
    jagged = torch.nested.as_nested_tensor([torch.tensor([4, 5]), torch.tensor([6, 7, 8])], layout=torch.jagged)
    with pytest.raises(RolloutDataError, match=rf"{name} is a jagged tensor.*to_padded_tensor\(data\['{name}'\], 0\)"):
        check_rollout_data({**rows(), name: jagged})
    padded = torch.nested.to_padded_tensor(jagged, 0)
    assert padded.tolist() == [[4, 5, 0], [6, 7, 8]]


def test_rows_without_columns():
    data = {name: value[:, :0] if value.dim() == 2 else value for name, value in rows().items()}
    with pytest.raises(RolloutDataError, match="row 0 has no real token"):
        check_rollout_data(data, vocab_size=32)


@pytest.mark.parametrize("wrong", [-1.0, -100.0, float("nan"), float("inf")])
def test_loss_mask_is_a_weight(wrong):
    data = rows()
    check_rollout_data({**data, "loss_mask": data["loss_mask"] * 0.5})
    mask = data["loss_mask"].float()
    mask[1, 1] = wrong
    with pytest.raises(RolloutDataError, match=rf"the loss_mask of row 1 has {wrong}, by which the loss"):
        check_rollout_data({**data, "loss_mask": mask})


def test_position_ids_must_be_those_that_are_computed():
    data = rows()
    check_rollout_data({**data, "position_ids": torch.tensor([[9, 0, 1], [0, 1, 2]])})  # 9 is at padding
    for wrong, row in (([[0, 1, 2], [0, 1, 2]], 0), ([[0, 0, 1], [0, 1, 0]], 1)):
        with pytest.raises(RolloutDataError, match=rf"position_ids of row {row} .*leave position_ids out"):
            check_rollout_data({**data, "position_ids": torch.tensor(wrong)})
    with pytest.raises(RolloutDataError, match=r"position_ids is .*expected the shape of input_ids"):
        check_rollout_data({**data, "position_ids": torch.zeros(3, 2, 3)})


@pytest.mark.parametrize("name", ["rewards", "rewards/right", "reward_baselines", "group_ids", "truncated"])
def test_entries_of_whole_completions_have_one_number_per_row(name):
    with pytest.raises(RolloutDataError, match=rf"{name} is .*expected one number per row, \(2,\)"):
        check_rollout_data({**rows(), name: torch.zeros(2, 3)})


def test_driver_knows_the_vocabulary_of_a_config(tmp_path):
    data = {**rows(), "input_ids": torch.full((2, 3), 32)}
    with pytest.raises(RolloutDataError, match="vocab_size is 32"):
        PolicyTrainWorker.check_rows(read_args({"hf_config": MODEL}), data, "actor", ())
    (tmp_path / "config.json").write_text('{"model_type": "llama", "vocab_size": 32}')
    with pytest.raises(RolloutDataError, match="vocab_size is 32"):
        PolicyTrainWorker.check_rows(read_args({"hf_checkpoint": str(tmp_path)}), data, "actor", ())
    PolicyTrainWorker.check_rows(read_args({"hf_checkpoint": "some/name"}), data, "actor", ())  # the ranks check it


@pytest.mark.parametrize(
    ("args", "role", "has", "message"),
    [
        ({}, "actor", "rewards", "no 'group_ids', which advantage_estimator='grpo' needs"),
        ({}, "actor", "group_ids", "no 'rewards', which .* or the advantages themselves"),
        ({"policy_loss_type": "dpo"}, "actor", "group_ids", "no 'rewards', which .* needs; add it$"),
        ({}, "actor", "advantages", None),
        ({"advantage_estimator": "reinforce_plus_plus"}, "actor", "rewards", None),
        ({"advantage_estimator": "reinforce_plus_plus", "kl_coef": 0.1}, "actor", "rewards", "no 'ref_log_probs'"),
        ({"advantage_estimator": "gae"}, "actor", "rewards", r"no 'values'.*call connect\(\)"),
        ({"advantage_estimator": "gae"}, "critic", "rewards", None),
        ({"advantage_estimator": "gae"}, "critic", "advantages", "no 'rewards'"),
        ({"kl_loss_coef": 0.1}, "actor", "advantages", r"'ref_log_probs'.*init\(with_ref=True\)"),
        ({"kl_loss_coef": 0.1}, "actor", "advantages ref_log_probs", None),
        ({"use_rollout_logprobs": True}, "actor", "advantages", "needs 'rollout_log_probs'"),
        ({"rollout_correction": "token_tis"}, "actor", "advantages", "needs 'rollout_log_probs'"),
    ],
)
def test_entries_that_the_configuration_needs(args, role, has, message):
    if message is None:
        check_entries(has.split(), read_args(args), role)
        return
    with pytest.raises(RolloutDataError, match=message):
        check_entries(has.split(), read_args(args), role)


@pytest.mark.parametrize("name", ["rewards", "group_ids", "loss_mask", "truncated", "weight_versions", "rewards/a"])
def test_arrays_are_refused(name):
    """They would be left out on the ranks, which keep tensors."""
    array = rows()["loss_mask"].numpy() if name == "loss_mask" else np.zeros(2)
    with pytest.raises(RolloutDataError, match=f"{name} is of type ndarray"):
        check_rollout_data({**rows(), name: array})


def test_rows_of_an_entry_with_another_number_of_rows_are_an_error():
    """Behind a reference, nobody has looked at the whole entry before each rank takes its rows of it."""
    for name, value in (("rewards", torch.zeros(3)), ("texts", ["a"])):
        with pytest.raises(RolloutDataError, match=f"{name} has {len(value)} rows, but input_ids has 2"):
            rows_of({**rows(), name: value}, [1, 0])


def test_rows_behind_a_reference_lack_an_entry():
    whole = {name: value for name, value in rows().items() if name != "attention_mask"}
    for given, message in (
        (Referred(None), "got NoneType"),
        (Referred({"rewards": torch.zeros(2)}), "no 'input_ids'; it has rewards"),
        (Referred(whole, Balance(2)), "no 'attention_mask'"),
    ):
        with pytest.raises(RolloutDataError, match=message):
            own_rows(given, 0)


def test_rows_of_several_entries_move_with_the_others():
    """As a teacher's method returns them. The ranks cut them by row, wherever `balance_data` has moved the others."""
    teacher = {"ref_log_probs": torch.tensor([[0.0] * 3, [1.0] * 3]), "names": ["a", "b"]}
    found = rows_of({**rows(), "teacher": teacher}, [1, 0])["teacher"]
    assert (found["ref_log_probs"][:, 0].tolist(), found["names"]) == ([1.0, 0.0], ["b", "a"])
    assert rows_of({**rows(), "numbers": range(2)}, [1, 0])["numbers"] == [1, 0]


def test_driver_knows_the_entries_of_a_dict():
    """As a teacher's method returns them."""
    args = read_args({"hf_config": MODEL, "kl_loss_coef": 0.1})
    PolicyTrainWorker.check_rows(args, {**rows(), "teacher": {"ref_log_probs": torch.zeros(2, 3)}}, "actor", ())
    with pytest.raises(RolloutDataError, match=r"ref_log_probs is .*expected the shape of input_ids"):
        PolicyTrainWorker.check_rows(args, {**rows(), "teacher": {"ref_log_probs": torch.zeros(2, 2)}}, "actor", ())
    with pytest.raises(RolloutDataError, match="rewards twice: also in 'teacher'"):
        PolicyTrainWorker.check_rows(args, {**rows(), "teacher": {"rewards": torch.zeros(2)}}, "actor", ())
