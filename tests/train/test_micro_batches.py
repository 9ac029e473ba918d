"""Micro-batches hold every token once, stay within the budget, and restore the original order."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict

from dispatch.batch import share_rows
from workers.data import micro_batches
from workers.data.balance import SequenceCost, balanced_order
from workers.data.micro_batches import cut_by_tokens, restore


def batch(spans, tokens):
    """Rows with real tokens in [start, start + length); real entries are nonzero, and padding holds junk."""
    rows = len(spans)
    mask = torch.zeros(rows, tokens, dtype=torch.int64)
    for row, (start, length) in enumerate(spans):
        mask[row, start : start + length] = 1
    ids = torch.arange(rows * tokens).reshape(rows, tokens) + 1
    return {
        "input_ids": ids,
        "attention_mask": mask,
        "old_log_probs": torch.where(mask.bool(), -ids.float(), math.nan),
        "loss_mask": mask.bool(),
        "rewards": torch.arange(rows).float() + 0.5,
        "features": torch.arange(rows * 3 * 2).reshape(rows, 3, 2),
    }


@st.composite
def batches(draw):
    tokens = draw(st.integers(1, 9))
    rows = draw(st.integers(0, 8))
    spans = []
    for _ in range(rows):
        length = draw(st.integers(1, tokens))
        spans.append((draw(st.integers(0, tokens - length)), length))
    return spans, tokens


@given(batches(), st.integers(1, 30), st.integers(0, 5), st.integers(1, 4))
def test_every_token_once_within_the_budget(spans_tokens, max_tokens, at_least, multiple_of):
    spans, tokens = spans_tokens
    data = batch(spans, tokens)
    cut = cut_by_tokens(data, max_tokens, at_least=at_least, multiple_of=multiple_of)
    assert len(cut) >= at_least and len(cut) % multiple_of == 0
    real = [part for part in cut if len(part.rows)]
    assert cut[: len(real)] == real  # fillers are last
    costs = [part.input_ids.numel() for part in real]
    assert (
        [part.cost for part in cut]
        == costs + [0] * (len(cut) - len(real))
        == sorted(costs, reverse=True) + [0] * (len(cut) - len(real))
    )
    if len(cut) > len(real):
        assert len(cut) - multiple_of < max(at_least, len(real))  # no more of them than needed
    assert sorted(row for part in real for row in part.rows.tolist()) == list(range(len(spans)))
    for part in real:
        b, s = part.input_ids.shape
        assert b * s <= max_tokens or b == 1
        assert s == int(part.lengths.max())
        for k, row in enumerate(part.rows.tolist()):
            start, length = spans[row]
            assert (int(part.starts[k]), int(part.lengths[k])) == (start, length)
            for name in ("input_ids", "old_log_probs", "loss_mask"):
                got = part.input_ids if name == "input_ids" else part.others[name]
                assert got[k, :length].tolist() == data[name][row, start : start + length].tolist()
                assert not got[k, length:].any()  # the padding is gone
                assert got.dtype == data[name].dtype
            assert part.others["rewards"][k] == data["rewards"][row]
            assert torch.equal(part.others["features"][k], data["features"][row])
            assert part.attention_mask[k].tolist() == [t < length for t in range(s)]
            assert part.position_ids[k].tolist() == list(range(s))
        assert set(part.others) == {"old_log_probs", "loss_mask", "rewards", "features"}
    outputs = [part.input_ids.float() + 1000 * ~part.attention_mask for part in cut]
    back = restore(outputs, cut, (len(spans), tokens))
    assert torch.equal(back, data["input_ids"] * data["attention_mask"].float())
    again = cut_by_tokens(data, max_tokens)
    assert [part.rows.tolist() for part in again] == [part.rows.tolist() for part in real]


@given(st.lists(st.integers(1, 6), min_size=1, max_size=6), st.integers(6, 20))
def test_no_partition_needs_fewer_micro_batches(lengths, max_tokens):
    """Compared with a search over all partitions of the rows."""

    def fewest(rest):
        if not rest:
            return 0
        best = len(rest)
        first, others = rest[0], rest[1:]
        for chosen in range(2 ** len(others)):
            group = [first] + [length for k, length in enumerate(others) if chosen >> k & 1]
            if len(group) * max(group) <= max_tokens:
                best = min(best, 1 + fewest([length for k, length in enumerate(others) if not chosen >> k & 1]))
        return best

    data = batch([(0, length) for length in lengths], 6)
    assert len(cut_by_tokens(data, max_tokens)) == fewest(lengths)


def test_filler_is_all_zero():
    data = batch([(0, 3)], 3)  # features are (1, 3, 2), and T is 3
    real, filler = cut_by_tokens(data, 100, at_least=2)
    assert not real.is_filler and filler.is_filler
    assert filler.input_ids.tolist() == [[0, 0]] and filler.lengths.tolist() == [2]
    assert filler.attention_mask.tolist() == [[True, True]]
    assert {name: tuple(value.shape) for name, value in filler.others.items()} == {
        "old_log_probs": (1, 2),
        "loss_mask": (1, 2),
        "rewards": (1,),
        "features": (1, 3, 2),
    }
    assert all(value.dtype == data[name].dtype and not value.any() for name, value in filler.others.items())


def test_rank_without_rows_participates():
    data = {name: value[:0] for name, value in batch([(0, 2)], 4).items()}
    assert cut_by_tokens(data, 8) == []
    fillers = cut_by_tokens(data, 8, at_least=3, multiple_of=2)
    assert len(fillers) == 4 and all(part.is_filler for part in fillers)
    assert restore([torch.ones(1, 2)] * 4, fillers, (0, 4)).shape == (0, 4)
    assert restore([], [], (0, 4)).shape == (0, 4)


@pytest.mark.parametrize("packed", [False, True])
def test_long_row_gets_its_own_micro_batch_with_one_warning(packed, caplog, monkeypatch):
    monkeypatch.setattr(micro_batches, "_warned", set())
    data = batch([(0, 2), (0, 9), (0, 2)], 9)
    cut = cut_by_tokens(data, 9, packed=packed)
    assert [part.rows.tolist() for part in cut] == [[1], [0, 2]] and not caplog.records
    for _ in range(3):
        cut = cut_by_tokens(data, 4, packed=packed)
        assert [part.rows.tolist() for part in cut] == [[1], [0, 2]]
    assert (
        "a row has 9 tokens, but a micro-batch at most 4 (max_tokens_per_micro_batch" in caplog.text
        and len(caplog.records) == 1
    )


def test_most_expensive_micro_batch_is_first():
    """By tokens the two short rows together cost more, by the squares of the lengths the long one does."""
    data = batch([(0, 3), (0, 3), (0, 5)], 5)
    for cost, order in ((SequenceCost(), [[0, 1], [2]]), (SequenceCost(0.0, 1.0), [[2], [0, 1]])):
        for packed in (False, True):
            cut = cut_by_tokens(data, 6, packed=packed, cost=cost)
            assert [part.rows.tolist() for part in cut] == order
            assert [part.cost for part in cut] == [sum(cost(data["attention_mask"][row].sum().item()) for row in rows)
                                                   for rows in order]  # fmt: skip


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    ("lengths", "most", "ranks", "multiple_of"),
    [
        ([5] * 8, 10, 2, 1),
        ([15, 3, 3, 3, 3, 3, 3, 3], 10, 2, 1),  # one row is above the limit
        ([4] * 32, 8, 2, 2),
        ([4] * 33, 8, 4, 3),
        ([1, 2, 3, 4, 5, 7, 9, 10], 10, 2, 1),
        ([3], 10, 4, 1),  # fewer rows than ranks
        ([20, 20, 20, 1, 1, 1], 10, 3, 1),
    ],
)
def test_all_ranks_have_as_many_micro_batches(lengths, most, ranks, multiple_of, packed):
    """The cases of slime's schedule: each row once, none above the limit unless it is alone, equal numbers of
    micro-batches on all ranks, in multiples of what an interleaved pipeline needs."""
    order = balanced_order(lengths, ranks)
    shares = [order[slice(*share.ranges[0])] for share in share_rows(len(order), ranks, "ragged")]
    batches = [batch([(0, lengths[row]) for row in rows], max(lengths)) for rows in shares]
    options = {"multiple_of": multiple_of, "packed": packed}
    wanted = max(len(cut_by_tokens(data, most, **options)) for data in batches)
    seen = []
    for rows, data in zip(shares, batches, strict=True):
        cut = cut_by_tokens(data, most, at_least=wanted, **options)
        assert len(cut) == wanted and wanted % multiple_of == 0
        for part in cut:
            own = [rows[row] for row in part.rows.tolist()]
            seen += own
            assert len(own) <= 1 or sum(lengths[row] for row in own) <= most
    assert sorted(seen) == list(range(len(lengths)))


def test_tensordict_is_accepted_and_non_tensors_are_left_out():
    data = batch([(2, 2), (0, 4)], 4)
    whole = TensorDict({**data, "note": ["a", "b"]}, batch_size=[2])
    cut = cut_by_tokens(whole, 8)
    assert "note" not in cut[0].others and cut[0].rows.tolist() == [1, 0]
    assert torch.equal(cut[0].others["rewards"], data["rewards"][[1, 0]])


def test_budget_holds_for_bool_masks_and_to_moves_everything_but_the_rows():
    data = batch([(0, 2)], 3)
    data["attention_mask"] = data["attention_mask"].bool()
    (part,) = cut_by_tokens(data, 3)
    there = part.to(torch.device("meta"))
    assert {there.input_ids.device.type, there.lengths.device.type} == {"meta"}
    assert {value.device.type for value in there.others.values()} == {"meta"}
    assert {there.rows.device.type, there.starts.device.type} == {"cpu"}


def test_max_tokens_out_of_range():
    with pytest.raises(ValueError, match="max_tokens=0; expected at least 1"):
        cut_by_tokens(batch([(0, 2)], 3), 0)


@pytest.mark.parametrize("mask", [[0, 0, 0], [1, 0, 1]])
def test_invalid_masks(mask):
    data = batch([(0, 2), (0, 3)], 3)
    data["attention_mask"][1] = torch.tensor(mask)
    with pytest.raises(ValueError, match="attention_mask of row 1"):
        cut_by_tokens(data, 8)


def test_candidates_are_aligned_with_their_tokens():
    data = batch([(0, 3), (2, 2), (1, 3)], 4)
    data["candidate_ids"] = data["input_ids"][..., None] * torch.tensor([1, 10])
    for part in cut_by_tokens(data, 6, at_least=4):
        assert torch.equal(part.others["candidate_ids"], part.input_ids[..., None] * torch.tensor([1, 10]))
        assert part.others["features"].shape[1:] == (3, 2)
