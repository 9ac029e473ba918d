"""The demo, as a user runs it: it learns on both backends, colocated and not; and it goes on after it was killed."""

import json

import pytest
from demo_runs import WAYS, run, run_until_killed, scalars

pytestmark = [pytest.mark.timeout(300), pytest.mark.slow]


@pytest.mark.parametrize("way", WAYS)
def test_it_learns(way, tmp_path):
    rewards = run(tmp_path, *WAYS[way], "num_rollout=30")
    assert sorted(rewards) == list(range(30))
    assert rewards[0] < 0.1
    assert sum(rewards[step] for step in range(25, 30)) / 5 > 0.9
    for name in ("actor", "rollout"):
        calls = json.loads((tmp_path / "log" / f"calls_{name}.json").read_text())["traceEvents"]
        assert {"actor": "train", "rollout": "generate"}[name] in {call["name"] for call in calls}
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


def test_ppo_learns_with_a_critic(tmp_path):
    rewards = run(tmp_path, "advantage_estimator=gae", "actor_num_gpus_per_node=1", "num_rollout=34")
    assert sum(rewards[step] for step in range(29, 34)) / 5 > 0.9
    values = scalars(tmp_path, "critic/value_loss")
    assert values[33] < values[0]


def test_a_killed_run_goes_on_as_if_it_had_not_been(tmp_path):
    """On the same number of ranks, and on another."""
    folders = {name: tmp_path / name for name in ("whole", "killed", "again", "other")}
    for folder in folders.values():
        folder.mkdir()
    common = ("num_rollout=14", "save_interval=4", "lr_decay_style=cosine")
    whole = run(folders["whole"], *common, f"save={folders['whole']}/checkpoints")
    kept = f"{folders['killed']}/checkpoints"
    before = run_until_killed(folders["killed"], 9, *common, f"save={kept}")
    assert before == pytest.approx({step: whole[step] for step in before}, abs=1e-3)
    for name, ranks in (("again", 2), ("other", 1)):
        after = run(folders[name], *common, f"load={kept}", f"actor_num_gpus_per_node={ranks}")
        begin = min(after)
        assert begin in (8, 12)  # after the last checkpoint before it was killed
        # The same prompts and seeds; what another number of ranks changes in the last digit may change a token.
        assert after == pytest.approx({step: whole[step] for step in range(begin, 14)}, abs=0.02)
