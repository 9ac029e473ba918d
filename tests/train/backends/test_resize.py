"""Train groups that go on with fewer data-parallel ranks, and take ranks back, from snapshots in memory."""

import depth
import pytest
from test_replace_ranks import EP2, kill, same, states, wait_for_snapshots
from train_helpers import begin, learn, llamas_rollout

from workers.train.args import TrainArgsError

pytestmark = pytest.mark.timeout(180)

FSDP = {"train_backend": "fsdp"}
MEGATRON = {"train_backend": "megatron"}

# name -> ranks, ranks after a death, arguments
WAYS = {
    "fsdp2": (2, 1, FSDP),
    "fsdp4": (4, 3, FSDP),
    "hsdp4": (4, 2, {**FSDP, "fsdp_shard_size": 2}),
    "sp2-dp2": (4, 2, {**FSDP, "sequence_parallel_size": 2}),
    "dp2": (2, 1, MEGATRON),
    "tp2-dp2": (4, 2, {**MEGATRON, "tensor_model_parallel_size": 2}),
    "ep2-dp4": (4, 2, {**MEGATRON, **EP2}),
    "pp2-dp2": (4, 2, {**MEGATRON, "pipeline_model_parallel_size": 2}),
}
FAST = {"fsdp2"}
rare = pytest.mark.full("rare ways to resize")


@pytest.mark.parametrize("way", [name if name in FAST else pytest.param(name, marks=rare) for name in WAYS])
def test_training_goes_on_with_fewer_ranks_and_with_all_again(way, group_of, llama_folder, mixture_folder, monkeypatch):
    ranks, fewer, args = WAYS[way]
    group = group_of(args["train_backend"], ranks)
    monkeypatch.setattr(group, "_on_death", "shrink")
    folder = mixture_folder if args.keys() & EP2.keys() else llama_folder
    args = {**args, "hf_checkpoint": folder, "lr": 3e-3, "kl_loss_coef": 0.01, "weight_decay": 0.1,
            "lr_decay_style": "linear", "num_rollout": 8}  # fmt: skip
    rollouts = [llamas_rollout(prompts=5, samples=3, seed=seed) for seed in range(5 if depth.full else 4)]
    begin(group, args, with_ref=True)
    expected = [learn(group, step, rows) for step, rows in enumerate(rollouts)]
    begin(group, {**args, "peer_snapshot_interval": 1}, with_ref=True)

    def check(step):
        found = learn(group, step, rollouts[step])
        for name in expected[step].keys() - {"seconds", "cost_spread"}:  # the spread is that over these ranks
            # The sums over rows are taken in another order with fewer ranks.
            assert found[name] == pytest.approx(expected[step][name], rel=1e-4, abs=1e-6), (step, name)

    check(0)
    check(1)
    wait_for_snapshots(group)
    before = states(group)
    kill(group, ranks - 1)
    assert group.replace() == [2] * fewer and group.world_size == fewer
    assert group.grow() == [2] * ranks and group.world_size == ranks
    assert same(states(group), before), "nothing is lost on the way to fewer ranks and back"
    check(2)
    wait_for_snapshots(group)
    kill(group, 0)
    assert group.replace() == [3] * fewer
    check(3)
    if depth.full:  # else with the group below, which grows after a step on fewer ranks too
        assert group.grow() == [4] * ranks
        check(4)
        wait_for_snapshots(group)
        kill(group, 0)
        assert group.replace() == [5] * fewer
    begin(group, {**args, "peer_snapshot_interval": 1}, with_ref=True)  # a single rank takes no snapshots by itself
    check(0)
    assert group.grow() == [1] * ranks
    check(1)


@rare
def test_state_that_cannot_be_resharded_comes_from_the_checkpoint(
    megatron_groups, llama_folder, data, tmp_path, monkeypatch, caplog
):
    group = megatron_groups(2)
    monkeypatch.setattr(group, "_on_death", "shrink")
    args = {**MEGATRON, "use_distributed_optimizer": True, "hf_checkpoint": llama_folder, "lr": 3e-3}
    begin(group, {**args, "peer_snapshot_interval": 1, "save": str(tmp_path)})
    learn(group, 0, data)
    group.save_model(0)
    learn(group, 1, data)
    kill(group, 1)
    assert group.replace() == [1]
    assert "do not have a complete set of snapshots" in caplog.text
    learn(group, 1, data)
    expected = states(group)
    with pytest.raises(TrainArgsError, match=r"another number of ranks .*Call save_model\(\)"):
        group.grow()
    assert group.world_size == 1 and same(states(group), expected), "nothing is lost"
    assert group.worker_group.execute_with_func_generator(lambda worker: worker._peers is None) == [True]
    group.save_model(1)
    assert group.restart() == [2, 2]


def test_group_without_snapshots_does_not_grow(fsdp_groups, llama_folder):
    group = fsdp_groups(2)
    begin(group, {**FSDP, "hf_checkpoint": llama_folder})
    with pytest.raises(TrainArgsError, match="peer_snapshot_interval"):
        group.grow()
