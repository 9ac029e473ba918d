"""tests/rollout/nothing_lost.py kills asynchronous training runs at random moments and resumes them: its checks find
mistakes, and find none in fifty runs."""

import json
import pickle
import random
import subprocess
import sys
from pathlib import Path

import pytest
from nothing_lost import BATCH, ROLLOUTS, SAMPLES, Run

SCRIPT = Path(__file__).parent / "nothing_lost.py"


def batch(rollout_id, before, after, first=None):
    first = BATCH * rollout_id if first is None else first
    prompts = [number for number in range(first, first + BATCH) for _ in range(SAMPLES)]
    line = {"rollout_id": rollout_id, "prompts": prompts, "group_ids": prompts, "staleness": 1}
    return line | {"before": before, "after": after}


@pytest.fixture
def run(tmp_path):
    """A run that has ended: batch 2 was trained, lost, and trained again on the weights of a checkpoint."""
    run = Run(tmp_path / "run", "address", "server", random.Random(0), 0)
    run.lines = [batch(0, "w0", "w1"), batch(1, "w1", "w2"), batch(2, "w2", "lost")]
    run.lines += [batch(k, f"w{k}", f"w{k + 1}") for k in range(2, ROLLOUTS)]
    run.state = {"batches": 2, "cursor": 2 * BATCH + 2, "groups": {2 * BATCH: "ready", 2 * BATCH + 1: "pending"}}
    return run


def check(run):
    (run.folder / "witness.jsonl").write_text("".join(json.dumps(line) + "\n" for line in run.lines))
    (run.folder / "ended").write_text(f"w{ROLLOUTS}")
    checkpoint = run.folder / "checkpoints" / "rollout_0000001"
    checkpoint.mkdir(parents=True)
    (checkpoint / "position.json").write_text(json.dumps({"rollout_id": 1}))
    (checkpoint / "driver_state.pkl").write_bytes(pickle.dumps({"stream": run.state, "weights": "w2"}))
    run.check()


def test_what_was_trained_and_lost_does_not_count(run):
    check(run)
    assert run.lost == 1


@pytest.mark.parametrize(
    "mistake", ["trained twice", "never trained", "other weights", "held and trained", "forgotten"]
)
def test_mistakes_are_found(run, mistake):
    if mistake == "trained twice":
        run.lines[-1] = batch(ROLLOUTS - 1, f"w{ROLLOUTS - 1}", f"w{ROLLOUTS}", first=0)
    elif mistake == "never trained":  # the driver went on with batch 3 after the loss of batch 2
        run.lines[3]["before"] = "unknown"
    elif mistake == "other weights":  # the resumed run had weights that no run has trained
        run.lines[3]["before"] = "w1"
    elif mistake == "held and trained":
        run.state["groups"][0] = "ready"
    else:
        del run.state["groups"][2 * BATCH]
    with pytest.raises(AssertionError):
        check(run)


@pytest.mark.full("chaos: processes killed at random moments, many groups created and closed")
@pytest.mark.timeout(2500)
def test_killed_runs_train_each_prompt_once():
    command = [sys.executable, str(SCRIPT), "--runs", "50", "--seed", "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=2400)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-3000:]
    assert done.stdout.splitlines()[-1].startswith("50 of 50 runs trained each prompt exactly once")
