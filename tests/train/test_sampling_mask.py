"""The column of sampling masks: from completions to micro-batches, every token keeps its own set."""

import pickle
from array import array
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dispatch.batch import cut, join, shard, share_rows
from workers.data.balance import Balance, balanced_rows
from workers.data.collate import collate
from workers.data.micro_batches import cut_by_tokens
from workers.data.rollout_data import RolloutDataError, check_rollout_data, inputs_of, rows_of
from workers.rollout.engines.rollout_engine import Completion, SamplingMask

VOCABULARY = 30
sets = st.lists(st.integers(0, VOCABULARY - 1), max_size=5, unique=True)
completions = st.lists(st.one_of(st.none(), st.lists(sets, max_size=6)), min_size=1, max_size=7)


def made(of_rows):
    """Rollout data: row r has the sets `of_rows[r]`, one per token of its completion; None is a row without a mask."""
    found = []
    for row, kept in enumerate(of_rows):
        mask, tokens = SamplingMask.whole(0), []
        for place, one in enumerate([[]] * 3 if kept is None else kept):
            mask.append(one)
            tokens.append(one[place % len(one)] if one else (row + place) % VOCABULARY)
        found.append(Completion(tokens, [-1.0] * len(tokens), "stop", sampling_mask=None if kept is None else mask))
    prompts = [[row] * (1 + row % 3) for row in range(len(of_rows))]
    return collate(prompts, found, group_ids=list(range(len(of_rows))), rewards=[0.0] * len(of_rows))


def sets_in(data):
    """group id -> the set of each token that is not empty, by its place in the row without padding."""
    found = {}
    if "sampling_mask" not in data.keys():  # noqa: SIM118
        return {int(group): [] for group in data["group_ids"]}
    for row, values in enumerate(data["sampling_mask"].unbind()):
        left, of_row = iter(values.tolist()), []
        for place, length in enumerate(data["sampling_mask_lengths"][row][data["attention_mask"][row].bool()].tolist()):
            if length:
                of_row.append((place, [next(left) for _ in range(length)]))
        assert not list(left)
        found[int(data["group_ids"][row])] = of_row
    return found


def expected(of_rows):
    return {
        row: [(1 + row % 3 + place, one) for place, one in enumerate(kept or []) if one]
        for row, kept in enumerate(of_rows)
    }


@given(completions)
def test_collated_rows_have_the_sets_of_their_tokens(of_rows):
    data = made(of_rows)
    assert ("sampling_mask" in data.keys()) == any(kept is not None for kept in of_rows)  # noqa: SIM118
    assert sets_in(data) == expected(of_rows)
    check_rollout_data(data, VOCABULARY)
    assert sets_in(pickle.loads(pickle.dumps(data))) == expected(of_rows)
    if "sampling_mask" in data.keys():  # noqa: SIM118
        kept = sum(len(one) for of_row in of_rows if of_row for one in of_row)
        assert data["sampling_mask"].values().nbytes == 4 * kept
        assert data["sampling_mask_lengths"].nbytes == 4 * data["input_ids"].numel()


@given(completions, st.integers(1, 3), st.randoms())
def test_sets_follow_their_rows_through_dispatch_and_balance(of_rows, parts, random):
    data, wanted = made(of_rows), expected(of_rows)
    shards = shard(data, share_rows(len(of_rows), parts, "ragged"))
    assert {group: one for part in shards for group, one in sets_in(part).items()} == wanted
    assert sets_in(join(shards)) == wanted
    assert sets_in(cut(data, 1, len(of_rows))) == {row: one for row, one in wanted.items() if row >= 1}
    assert sets_in(balanced_rows(data, Balance(parts))) == wanted
    order = random.sample(range(len(of_rows)), len(of_rows))
    for of in (data, dict(data.items())):
        assert list(sets_in(rows_of(of, order)).items()) == [(row, wanted[row]) for row in order]
        assert list(sets_in(rows_of(of, slice(1, None))).items()) == list(wanted.items())[1:]
        assert sets_in(rows_of(of, slice(0, 0))) == {}
    assert sets_in(data) == wanted  # the caller's rows are as they were


@given(completions, st.integers(1, 30), st.integers(0, 4))
def test_micro_batches_have_the_sets_of_their_rows(of_rows, most, at_least):
    data, wanted = made(of_rows), expected(of_rows)
    found = {}
    for part in cut_by_tokens(data, most, at_least=at_least):
        if (mask := part.sampling_mask) is None:
            assert all(kept is None for kept in of_rows)
            continue
        left, lengths = iter(mask[0].tolist()), mask[1]
        assert lengths.shape == part.input_ids.shape and mask[0].dtype == torch.int32
        for number, row in enumerate(part.rows.tolist()):
            places = enumerate(lengths[number].tolist())
            found[row] = [(place, [next(left) for _ in range(length)]) for place, length in places if length]
        assert not list(left) and not (part.is_filler and bool(lengths.any()))
    assert found in ({}, wanted)
    assert set(inputs_of(data)) - {"sampling_mask", "sampling_mask_lengths"} == {"input_ids", "attention_mask"}


GOOD = [[[5, 6], [7], []], None, [[1, 2, 3]]]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: data.exclude("sampling_mask"), r"'sampling_mask_lengths' alone; .* come together"),
        (lambda data: data.set("sampling_mask", torch.zeros(3, 4)), r"is torch.float32.*expected a jagged tensor"),
        (lambda data: data["sampling_mask_lengths"][2, 3].fill_(2),
         r"sampling_mask of row 2 has 3 tokens, .* are 0 to 2 and sum to 2"),
        (lambda data: data["sampling_mask_lengths"][0].copy_(torch.tensor([0, 0, 2, 1, 0, 0]).roll(-2)),
         r"row 0 has a sampling_mask at padding or at its first token"),
        (lambda data: data["sampling_mask"].values().fill_(30), r"token ids from 30 to 30; expected 0 to below 30"),
        (lambda data: data["input_ids"][0, 3].fill_(9),
         r"position 3 of row 0, 9, is not in its own sampling_mask"),
    ],
)  # fmt: skip
def test_mask_that_cannot_be_is_refused(change, message):
    data = made(GOOD)
    check_rollout_data(data, VOCABULARY)
    changed = change(data)
    with pytest.raises(RolloutDataError, match=message):
        check_rollout_data(changed if hasattr(changed, "keys") else data, VOCABULARY)


def test_completion_whose_mask_does_not_fit_is_refused():
    good = Completion([5, 7], [-1.0] * 2, "stop", sampling_mask=SamplingMask(array("i", [5, 6]), array("i", [2, 0])))
    collate([[1]], [good])
    for lengths in ([2], [1, 0]):
        wrong = replace(good, sampling_mask=SamplingMask(array("i", [5, 6]), array("i", lengths)))
        with pytest.raises(ValueError, match=r"row 0 has 2 token_ids and a sampling_mask of .* of its 2 tokens"):
            collate([[1]], [wrong])
