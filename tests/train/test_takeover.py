"""A train group whose driver was killed continues in another driver."""

import os
import re
import signal
import textwrap

import numpy as np
import pytest
import ray
from plain_train_workers import Manager
from torch_scripts import driver
from waits import wait_until

from single_controller import CallTimeoutError, WorkerError, attach
from workers.train.args import read_args
from workers.train.train_group import RayTrainGroup

pytestmark = pytest.mark.timeout(120)


def rows(step):
    return {"x": np.arange(4) + step}


def killed(config, folder, code):
    """Run a script as another driver of this Ray, kill it when it prints "ready", and return what it printed there."""
    context = ray.get_runtime_context()
    script, said = folder / "driver.py", folder / "said"
    where = f"{context.gcs_address!r}, namespace='trainers', log_to_driver=False"
    script.write_text(f"import os, ray, time\nray.init({where})\n" + textwrap.dedent(code) + "\ntime.sleep(60)\n")

    def ready():
        return re.search(r"^ready (.*)\n", said.read_text(), re.M) if said.exists() else None

    with driver(config, script, environment=dict(os.environ), said=said) as ended:
        wait_until(lambda: ready() or ended(), 100)
        assert ready(), said.read_text()
        pid, *found = ready()[1].split()
        os.kill(int(pid), signal.SIGKILL)
        wait_until(ended)
    return found


@pytest.fixture(scope="module")
def killed_driver(pytestconfig, other_drivers, tmp_path_factory):
    """Kill a driver after three steps of two groups, "going_" and "losing_". Returns the pids of the latter's ranks."""
    folder = tmp_path_factory.mktemp("killed")
    said = killed(
        pytestconfig,
        folder,
        f"""
        import numpy as np
        from plain_train_workers import Manager, Plain
        from workers.train.train_group import RayTrainGroup
        groups = []
        for name in ("going_", "losing_"):
            args = {{"save": {str(folder)!r}, "load": None}}
            group = RayTrainGroup(args, 1, 2, None, 0.5, actor_cls=Plain, detached=True, name_prefix=name)
            ray.get(group.async_init(with_ref=True))
            group.set_rollout_manager(Manager())
            groups.append(group)
            for step in range(3):
                ray.get(group.async_train(step, {{"x": np.arange(4) + step}}))
                group.update_weights()
                if step == 1:
                    group.save_model(step)
        print("ready", os.getpid(), *(said["pid"] for said in group.worker_group.said()), flush=True)
        """,
    )
    return [int(pid) for pid in said]


def states():
    return {table["state"] for table in ray.util.placement_group_table().values() if "actor_" in table["name"]}


def test_training_goes_on_where_it_was(killed_driver, monkeypatch):
    group = RayTrainGroup.attach("going_")
    with group:
        assert (group.next_rollout_id, group.weight_version, group.role, group.world_size) == (3, 3, "actor", 2)
        assert group.last_checkpoint == group.args.save is not None
        before = group.worker_group.said()
        assert [said["with_ref"] for said in before] == [True, True]
        for step in (3, 4):
            metrics = ray.get(group.async_train(step, rows(step)))
            assert [rank["rollout_id"] for rank in metrics] == [step, step]
        said = group.worker_group.said()
        assert [rank["pid"] for rank in said] == [rank["pid"] for rank in before]
        # Each rank has trained on its half of five rollouts, as if the driver had lived.
        expected = [sum(rows(step)["x"][half].sum() for step in range(5)) for half in (slice(2), slice(2, None))]
        assert [rank["weight"] for rank in said] == expected
        group.set_rollout_manager(Manager())
        assert group.update_weights() == 4
        left, again = [], group._init_again
        monkeypatch.setattr(group, "_init_again", lambda: left.append(group.worker_group.takeover_data) or again())
        assert group.restart() == [2, 2]  # from the checkpoint that the former driver saved after step 1
        assert group.worker_group.said()[0]["version"] == 5  # the manager's workers had lost weights
        assert left[0]["weight_version"] == 4  # for the next driver, if this one had been killed while they loaded
        with attach("going_", "trainers") as found:  # in the namespace of the former driver
            assert found.world_size == 2
    with pytest.raises(ValueError, match="no actor's name begins with"):
        RayTrainGroup.attach("going_")


def hangs(group):
    raise CallTimeoutError("rank 0 does not leave the call that it is in", ranks=[0])


def test_dead_rank_means_the_last_checkpoint(killed_driver, monkeypatch):
    os.kill(killed_driver[1], signal.SIGKILL)
    with RayTrainGroup.attach("losing_") as group:
        assert (group.next_rollout_id, group.weight_version) == (2, 3)
        ray.get(group.async_train(2, rows(2)))
        assert not {rank["pid"] for rank in group.worker_group.said()} & set(killed_driver)
        # A worker hangs, and the next driver cannot start it again, but may try once more.
        group.args = read_args({"user": {"fail_in_init": 0}, "peer_snapshot_interval": 1})
        group.onload()  # leaves them
        monkeypatch.setattr("workers.train.train_group.common_position", lambda workers, timeout: None)
        monkeypatch.setattr(RayTrainGroup, "replace", hangs)
        with pytest.raises(WorkerError, match="no disk"):
            RayTrainGroup.attach("losing_")
        assert attach("losing_").world_size == 2
    wait_until(lambda: not states() - {"REMOVED"}, 10, "the end of all placement groups")


@pytest.mark.full("models of a killed driver that another driver trains on")
@pytest.mark.parametrize(
    ("way", "rank_dies"),
    [
        ({"train_backend": "fsdp"}, False),
        ({"train_backend": "fsdp", "peer_snapshot_interval": 1}, True),
        ({"train_backend": "megatron", "tensor_model_parallel_size": 2}, False),
    ],
    ids=["fsdp", "fsdp and a rank", "megatron"],
)
def test_model_goes_on_bit_for_bit(pytestconfig, ray_cluster, tmp_path, way, rank_dies):
    """Two ranks train three steps, the last one after their driver was killed, and possibly a rank too, which continues
    from memory. Weights and optimizer are those of a run that nobody disturbed."""
    from reference import small_llama
    from train_helpers import actor_class, begin, distance, learn, rollout, saved, whole_weights

    args = {**way, "hf_checkpoint": saved(small_llama(), tmp_path), "lr": 1e-2}
    (pid,) = killed(
        pytestconfig,
        tmp_path,
        f"""
        from reference import small_llama
        from train_helpers import actor_class, learn, rollout
        from workers.train.train_group import RayTrainGroup
        group = RayTrainGroup({args!r}, 1, 2, actor_cls=actor_class({args!r}), detached=True, name_prefix="model_")
        ray.get(group.async_init())
        for step in range(2):
            learn(group, step, rollout(small_llama(), seed=step))
        print("ready", os.getpid(), group.worker_group.status().ranks[1].process.pid, flush=True)
        """,
    )
    if rank_dies:
        os.kill(int(pid), signal.SIGKILL)
    found = []
    with RayTrainGroup.attach("model_") as group:
        # The last snapshot may have been on its way.
        assert group.next_rollout_id in ((1, 2) if rank_dies else (2,))
        for step in range(group.next_rollout_id, 3):
            learn(group, step, rollout(small_llama(), seed=step))
        found.append(whole_weights(group))
    with RayTrainGroup(args, 1, 2, actor_cls=actor_class(args)) as group:
        begin(group, args)
        for step in range(3):
            learn(group, step, rollout(small_llama(), seed=step))
        found.append(whole_weights(group))
    assert distance(*found) == 0.0
