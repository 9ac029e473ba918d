"""tests/recovery kills processes and hosts in 280 rounds: its checks find mistakes, and find none there."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from rounds import Seen, shares
from training_kinds import BATCH, SAMPLES, TRAINERS, Training

STEPS = 3


def line(rollout_id, before, after, first):
    prompts = [number for number in range(first, first + BATCH) for _ in range(SAMPLES)]
    return {"rollout_id": rollout_id, "prompts": prompts, "before": before, "after": after}


@pytest.fixture
def run(tmp_path):
    """A run after three steps, of which it has repeated the second. The buffer has a fourth batch, and a group more.
    Each rank was given half of the samples."""
    run = Training.__new__(Training)
    run.folder, run.step = tmp_path, STEPS
    run.lines = [line(k, f"state {k}", f"state {k + 1}", k * BATCH) for k in (0, 1, 1, 2)]
    digest = [f"state {STEPS}"] * TRAINERS
    run.actor = SimpleNamespace(worker_group=SimpleNamespace(digest=lambda: digest))
    waiting = range(STEPS * BATCH, (STEPS + 1) * BATCH + 1)
    run.held = {"batches": STEPS, "cursor": waiting.stop, "groups": dict.fromkeys(waiting, "ready")}
    run.stream = SimpleNamespace(buffer=SimpleNamespace(state_dict=lambda: run.held))
    return run


def checked(run):
    for rank in range(TRAINERS):
        lines = [{**one, "prompts": one["prompts"][rank::TRAINERS]} for one in run.lines]
        text = "".join(json.dumps(one) + "\n" for one in lines)
        (run.folder / f"witness-{rank}.jsonl").write_text(text)
    return run.checked(Seen(0.0, 0.0, 1))


def test_steps_that_were_repeated_count_once(run):
    assert checked(run)[2:] == (1, 0, 0)


def test_prompts_that_are_nowhere_are_lost(run):
    del run.held["groups"][STEPS * BATCH]
    assert checked(run)[2:] == (1, 1, 0)


def test_prompts_that_were_trained_and_wait_are_twice(run):
    run.held["groups"][0] = "ready"
    assert checked(run)[2:] == (1, 0, 1)


def test_prompts_of_two_steps_are_twice_and_others_lost(run):
    run.lines[-1] = line(2, "state 2", "state 3", 0)
    assert checked(run)[2:] == (1, BATCH, BATCH)


@pytest.mark.parametrize("mistake", ["another state", "a step too few", "an unknown state"])
def test_states_that_are_wrong_are_found(run, mistake):
    if mistake == "another state":  # of the same step
        run.lines[2]["after"] = "state 2, but different"
    elif mistake == "a step too few":
        run.step += 1
    else:
        run.lines[-1]["before"] = "unknown"
    with pytest.raises(AssertionError):
        checked(run)


def test_rounds_are_divided_among_the_kinds():
    assert shares(200, {"a": 150, "b": 50}) == {"a": 150, "b": 50}
    assert shares(5, {"a": 10, "b": 9, "c": 1}) == {"a": 3, "b": 2, "c": 0}


@pytest.mark.alone
@pytest.mark.full("chaos: processes killed at random moments, many groups created and closed")
@pytest.mark.timeout(2200)
def test_280_rounds():
    command = [sys.executable, str(Path(__file__).parent), "--rounds", "280", "--seed", "1", "--fork"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=2100)
    print(done.stdout)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-3000:]
    left, kept = done.stdout.splitlines()[-2:]
    assert left == "processes left: none; shared memory left: none"
    assert kept.startswith("280 of 280 rounds kept what is promised")
