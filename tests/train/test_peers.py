"""Our formulas give the numbers that the code of other libraries gives for the same inputs: see peers.py."""

import peers
import pytest
import torch

ROWS = peers.table_rows()


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row[0]}, {row[1]}")
def test_ours_equals_theirs(row):
    for case in ROWS[row]:
        largest = peers.error(case, peers.ours(case))
        assert largest <= case["error"], f"{case['source']} with {case['ours']}: {largest:.1e}"


def test_largest_error():
    """The errors are those of float32: ours compute in it, theirs were run in float64 where they can."""
    errors = {f"{case['formula']}, {case['peer']}": peers.error(case, peers.ours(case)) for case in peers.DATA["cases"]}
    worst = max(errors, key=errors.__getitem__)
    print(f"{len(peers.DATA['cases'])} comparisons in {len(ROWS)} rows, largest error {errors[worst]:.1e}: {worst}")
    assert len(ROWS) >= 60
    assert errors[worst] < 1e-5


def test_the_page_has_what_the_test_has():
    page = peers.DOCS / "formulas.md"
    assert page.read_text() == peers.page(page.read_text()), "run python tests/train/peers.py"


def test_inputs_reach_what_the_formulas_are_for():
    """A clip that no token reaches, or a bound that nothing is beyond, would compare nothing."""
    has = {name: values for name, values in peers.INPUTS.items()}
    counts = has["mask"] != 0
    ratio = (has["log_probs"] - has["old_log_probs"]).exp()
    for sign in (1, -1):
        of_sign = counts & (has["advantages"].sign() == sign)
        for beyond in (ratio < 0.8, ratio > 1.28, (ratio >= 0.8) & (ratio <= 1.28)):
            assert (of_sign & beyond).any()
    assert (counts & (has["advantages"] < 0) & (ratio > 3)).any()  # dual clip
    drift = (has["old_log_probs"] - has["rollout_log_probs"]).exp()
    assert (counts & (drift > 2)).any() and (counts & (drift < 0.5)).any()
    assert (torch.expm1(has["far_ref_log_probs"] - has["log_probs"]) > 20).any()  # k3's bound
    assert not has["gaps"].any(1).all() and (has["gaps"] != has["mask"]).any()
    assert len(set(has["group_ids"].bincount().tolist()) - {0}) > 1  # groups of several sizes


def test_what_is_compared_is_not_zero_everywhere():
    """A rejection must reject some and keep some, and a sequence mask likewise."""
    for case in peers.DATA["cases"]:
        where = f"{case['formula']}, {case['peer']}"
        expected = {name: torch.tensor(values, dtype=torch.float64) for name, values in case["expected"].items()}
        assert all(bool(values.any()) for values in expected.values()), where
        if case["ours"]["run"] == "kept_by_opsm":
            assert not expected["value"][peers.counted(case["ours"]) != 0].all(), where
        if "rejected" in expected:
            assert not expected["rejected"].all(), where
