"""The budgets of the test files: which exist, and when one fails a run."""

from pathlib import Path
from types import SimpleNamespace

import pytest
from budgets import BUDGETS, DEFAULT, HEADROOM, Durations

ROOT = Path(__file__).resolve().parent.parent
LARGE = [file for file, budget in BUDGETS.items() if budget > DEFAULT][:7]


def run(seconds):
    """The durations of a run: file -> seconds, in two tests."""
    durations = Durations()
    for file, took in seconds.items():
        for test, share in (("test_long", 0.75), ("test_short", 0.25)):
            durations.add(SimpleNamespace(nodeid=f"{file}::{test}", duration=took * share))
    return durations


def usual(factor=1.0):
    return {file: factor * BUDGETS[file] / HEADROOM for file in LARGE}


def test_every_file_with_a_budget_exists():
    assert [file for file in BUDGETS if not (ROOT / file).exists()] == []


@pytest.mark.parametrize("factor", [0.5, 1.0, 4.0, 10.0])
def test_no_file_exceeds_its_budget_on_an_idle_or_a_loaded_machine(factor):
    assert run(usual(factor)).over_budget() == []


@pytest.mark.parametrize("factor", [1.0, 4.0])
def test_slow_file_is_reported_with_its_slowest_tests(factor):
    seconds = usual(factor)
    seconds[LARGE[0]] *= 1.2 * HEADROOM
    (told,) = run(seconds).over_budget()
    assert told.startswith(f"{LARGE[0]} took {seconds[LARGE[0]]:.0f} s; its budget is {BUDGETS[LARGE[0]]} s")
    assert told.index("::test_long") < told.index("::test_short")


def test_file_without_a_budget_has_the_default():
    (told,) = run({**usual(), "tests/test_new.py": DEFAULT + 1}).over_budget()
    assert told.startswith("tests/test_new.py took")


def test_run_of_a_few_files_has_no_budgets():
    assert run({LARGE[0]: 10 * BUDGETS[LARGE[0]]}).over_budget() == []
