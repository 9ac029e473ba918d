"""The path of one call matches docs/internals.md."""

import re

import pytest
import torch
from hops import ROOT, Traced, Tracer

from single_controller import RayClassWithInitArgs, RayWorkerGroup

MOST_FUNCTIONS = 35
MOST_FILES = 10

FINALIZERS = {"_Mapped.__del__", "BufferPool.count_mapped", "_Lease.__del__", "BufferPool.give_back"}
NOT_EACH_TIME = {"Monitor.watch"}
"""What a call passes only if no other one of its group ran in the last tenth of a second."""


@pytest.fixture(scope="module")
def hops(pool):
    """(hops on the driver, hops on rank 0) of ``group.score(batch)``."""
    batch = torch.ones(8, 4)
    with RayWorkerGroup(pool, RayClassWithInitArgs(Traced)) as group:
        group.start_tracing()
        for _ in range(3):  # the first calls import modules and fill caches
            with Tracer() as tracer:
                group.score(batch)
        # The hops traced between two calls are the first one's return and the second one's arrival: one whole call.
        return tracer.take(), group.stop_tracing()[0]


def documented():
    """(file, function) from the table "One call"."""
    text = (ROOT / "docs/internals.md").read_text()
    table = text[text.index("## One call") : text.index("## Where")]
    rows = re.findall(r"^\| (?:driver|worker) \| `([^`]+)` \| (.*?) \|", table, flags=re.MULTILINE)
    return {(file, function) for file, functions in rows for function in re.findall(r"`([^`]+)`", functions)}


def test_documented_path_is_the_real_one(hops):
    driver, worker = hops
    for side, passed in (("driver", driver), ("worker", worker)):
        print(f"\n{side}: {len(passed)} functions in {len({file for file, _ in passed})} files")
        print("\n".join(f"    {file}  {function}" for file, function in passed))
    traced = {(file, function) for file, function in (*driver, *worker) if function not in FINALIZERS | NOT_EACH_TIME}
    assert traced - documented() == set()
    assert documented() - traced == set()


def test_path_stays_short():
    passed = documented()
    assert len(passed) <= MOST_FUNCTIONS and len({file for file, _ in passed}) <= MOST_FILES
