"""The budgets of the test files: which exist, and when one fails a run."""

from pathlib import Path

import pytest
from budgets import BUDGETS, DEFAULT, HEADROOM, IN_FULL, over_budget

ROOT = Path(__file__).resolve().parent.parent
LARGE = [file for file, budget in BUDGETS.items() if budget > DEFAULT][:7]


def usual(factor=1.0):
    """Seconds by file."""
    return {file: factor * BUDGETS[file] / HEADROOM for file in LARGE}


def test_every_file_with_a_budget_exists():
    assert [file for file in (*BUDGETS, *IN_FULL) if not (ROOT / file).exists()] == []


@pytest.mark.parametrize("factor", [0.5, 1.0, 4.0, 10.0])
def test_only_a_file_that_has_grown_exceeds_its_budget_on_any_machine(factor):
    assert over_budget(usual(factor)) == []
    (told,) = over_budget({**usual(factor), LARGE[0]: max(factor, 1.0) * 1.2 * BUDGETS[LARGE[0]]})
    assert told.startswith(f"{LARGE[0]} took ") and f"its budget is {BUDGETS[LARGE[0]]} s" in told
    (told,) = over_budget({**usual(factor), "tests/test_new.py": max(factor, 1.0) * DEFAULT + 1})
    assert told.startswith("tests/test_new.py took")


def test_run_of_a_few_files_has_no_budgets():
    assert over_budget({LARGE[0]: 10 * BUDGETS[LARGE[0]]}) == []
