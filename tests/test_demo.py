"""The demo, with the options of a user: it learns on both backends, colocated and separate, with both engines, and
resumes after being killed. `test_demo_page.py` runs it with a Ray of its own."""

import functools
import json

import demo_runs
import numpy as np
import pytest
from demo_runs import ROOT, WAYS, run, run_resumed, run_with_kills, scalars

from single_controller.view.run_files import read_lines, read_run, sample_files, sample_steps

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.full("the demo on both backends, colocated and separate, with a critic, and killed and resumed"),
]


@pytest.fixture(autouse=True)
def ray_of_the_tests(request, other_drivers, monkeypatch):
    """Runs are on the tests' Ray, whose workers start quickly. Those with vLLM start their own Ray, as a user's do."""
    if "vllm" not in request.node.name:
        plain = demo_runs.environment()
        monkeypatch.setattr(demo_runs, "environment", lambda: plain | other_drivers)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """``whole(how)``: the rewards of a run of `LONGER` in which nothing is killed."""

    @functools.cache
    def of(how):
        folder = tmp_path_factory.mktemp("whole")
        return run(folder, *LONGER, how, f"save={folder}/checkpoints")

    return of


LONGER = ("num_rollout=16", "save_interval=4", "lr_decay_style=cosine")


@pytest.mark.parametrize("way", WAYS)
def test_demo_learns(way, tmp_path):
    if "vllm" in way and not (ROOT / ".venv-vllm" / ".ready").exists():
        pytest.skip("needs .venv-vllm: run make test-vllm")
    rewards = run(tmp_path, *WAYS[way], "num_rollout=30")
    assert sorted(rewards) == list(range(30))
    assert rewards[0] < 0.1
    assert sum(rewards[step] for step in range(25, 30)) / 5 > 0.9
    for name in ("actor", "rollout"):
        calls = json.loads((tmp_path / "log" / f"calls_{name}.json").read_text())["traceEvents"]
        assert {"actor": "train", "rollout": "exchange" if way == "async" else "generate"}[name] in {
            call["name"] for call in calls
        }
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")
    for name in (
        "kl",
        "entropy",
        "loss",
        "grad_norm",
        "tokens_per_second",
        "seconds/rollout",
        "seconds/train",
        "seconds/sync",
    ):
        assert sorted(scalars(tmp_path, name)) == list(range(30)), name
    # Trainer and engine compute the same log-probabilities, in every step whose completions are of the same weights.
    differences = scalars(tmp_path, "rollout_log_prob_diff")
    if way == "async":
        staleness = scalars(tmp_path, "staleness/max")
        assert staleness[0] == 0 < max(staleness.values()) <= 1
        differences = {step: value for step, value in differences.items() if staleness[step] == 0}
    assert max(differences.values()) < 1e-4
    check_run_folder(tmp_path / "curve", rewards, way)


def check_run_folder(folder, rewards, way):
    """The run folder beside the plot has what TensorBoard has, the updates, the calls, and samples of each step."""
    run = read_run(folder)
    assert run["ended"]["reason"] == "finished" and len(run["groups"]) == 2 and run["ray_address"]
    metrics = {line["step"]: line["metrics"] for line in read_lines(folder / "metrics.jsonl")}
    assert {step: of["reward"] for step, of in metrics.items()} == pytest.approx(rewards)
    updates = [line for line in read_lines(folder / "events.jsonl") if line["kind"] == "update"]
    assert [line["version"] for line in updates] == list(range(1, 31))
    assert sample_steps(folder) == list(range(30))
    for step in (0, 29):
        data, text = sample_files(folder, step)
        arrays, about = np.load(data), json.loads(text.read_bytes())
        trained = arrays["loss_mask"] != 0
        assert np.isfinite(arrays["log_probs"][trained]).all() and np.isfinite(arrays["advantages"][trained]).all()
        if way != "async":
            assert np.abs(arrays["log_probs"] - arrays["rollout_log_probs"])[trained].max() < 1e-3
            # From a token to its version, and to the digest of the update that made it.
            (version,) = set(arrays["versions"][trained].tolist())
            digest = next(line["digest"] for line in updates if line["version"] == version)
            assert all(row["fingerprints"] in ({}, {str(version): digest}) for row in about["rows"])
        assert {row["finish"] for row in about["rows"]} <= {"stop", "length"}
    calls = {(line["method"], line["rank"]) for line in read_lines(folder / "timeline.jsonl")}
    assert {("train", None), ("train", 0), ("sync", None), ("rollout", None)} <= calls


@pytest.mark.parametrize("how", ["async_rollout=false", "async_rollout=true", "rollout_top_p=0.9"])
def test_exact_demo_has_no_difference_in_any_step(tmp_path, how):
    rewards = run(tmp_path, "exact=true", "num_rollout=20", "max_staleness=0", how)
    assert rewards[19] > 0.5
    assert scalars(tmp_path, "rollout_log_prob_diff") == dict.fromkeys(range(20), 0.0)


def test_ppo_learns_with_a_critic(tmp_path):
    rewards = run(tmp_path, "advantage_estimator=gae", "actor_num_gpus_per_node=1", "num_rollout=34")
    assert sum(rewards[step] for step in range(29, 34)) / 5 > 0.9
    values = scalars(tmp_path, "critic/value_loss")
    assert values[33] < values[0]


@pytest.mark.parametrize("how", ["async_rollout=false", "async_rollout=true"])
def test_resumed_run_matches_an_uninterrupted_one(tmp_path, whole, how):
    """On the same number of ranks, and on another."""
    expected = whole(how)
    before, after = run_resumed(tmp_path, 9, *LONGER, how)
    assert before == pytest.approx({step: expected[step] for step in before}, abs=1e-3)
    for rewards in after.values():
        begin = min(rewards)
        assert begin in (8, 12)  # after the last checkpoint before it was killed
        # The prompts and seeds are the same, but another number of ranks changes rounding, which may change a token.
        assert rewards == pytest.approx({step: expected[step] for step in range(begin, 16)}, abs=0.02)


@pytest.mark.parametrize("how", ["async_rollout=false", "async_rollout=true"])
def test_run_whose_trainers_are_killed_matches_one_without_kills(tmp_path, whole, how):
    """Both original trainers are killed, one after the other. The standby takes the first one's rank."""
    expected = whole(how)
    rewards, said = run_with_kills(tmp_path, (3, 10), *LONGER, how)
    assert said.count("A trainer was replaced; training goes on with rollout") == 2
    assert rewards == pytest.approx(expected, abs=1e-3)


@pytest.mark.timeout(500)
@pytest.mark.parametrize("engine", ["hf", "vllm"])
def test_calculator_demo_learns(engine, tmp_path):
    """Its goal is .9 (tutorials/rl_tasks.py). Every turn is of the tokens that the trainer computes."""
    if engine == "vllm" and not (ROOT / ".venv-vllm" / ".ready").exists():
        pytest.skip("needs .venv-vllm: run make test-vllm")
    rewards = run(tmp_path, "task=calculator", f"engine={engine}", timeout=480)
    assert sorted(rewards) == list(range(160))
    assert rewards[0] < 0.2 and sum(rewards[step] for step in range(155, 160)) / 5 > 0.85
    # The metric is a mean over three epochs, in which the policy moves. The samples have the numbers before the first.
    for step in range(160):
        arrays = np.load(sample_files(tmp_path / "curve", step)[0])
        trained = arrays["loss_mask"] != 0
        assert np.abs(arrays["log_probs"] - arrays["rollout_log_probs"])[trained].max() < 1e-5
