"""Named meshes over the ranks of one group: torch device meshes, and explicit coordinates."""

import pytest
import torch
from group_workers import OnMeshes

from single_controller import (
    RayClassWithInitArgs,
    RayWorkerGroup,
    WorkerError,
    make_nd_compute_dataproto_dispatch_fn,
    register,
)
from single_controller import Worker as BaseWorker


@pytest.fixture(scope="module")
def group(pool):
    """Four ranks in one process group; every test joins the meshes that it needs."""
    with RayWorkerGroup(pool, RayClassWithInitArgs(OnMeshes)) as group:
        yield group


def rows_of(shards, rows):
    """Row numbers of each shard."""
    per_shard = rows // shards
    return [list(range(shard * per_shard, (shard + 1) * per_shard)) for shard in range(shards)]


def check(group, method, shard_of, collecting, rows=8):
    """Every rank received the rows of its shard, and the driver got the joined results of the collecting ranks."""
    shards = rows_of(len(collecting), rows)
    assert getattr(group, method)(torch.arange(rows)) == [
        (row, collecting[k]) for k, shard in enumerate(shards) for row in shard
    ]
    assert group.last_seen() == [shards[shard] for shard in shard_of]


def test_actor_mesh_and_rollout_mesh_at_once(group):
    """dp4 x tp1 and dp2 x tp2, from torch."""
    actor = group.join_device_mesh("actor", (4, 1), ("dp", "tp"))
    rollout = group.join_device_mesh("rollout", (2, 2), ("dp", "tp"))
    assert actor == [{"dp": rank, "tp": 0} for rank in range(4)]
    assert [(place["dp"], place["tp"]) for place in rollout] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    for _ in range(2):
        check(group, "on_actor", [0, 1, 2, 3], [0, 1, 2, 3])
        check(group, "on_rollout", [0, 0, 1, 1], [0, 2])
    assert {"actor", "rollout"} <= set(group.layout.meshes)


def test_meshes_from_explicit_coordinates(group):
    """The second rank of a pair collects, and the ranks of a pair are not adjacent."""
    group.join_places("actor", [3, 2, 1, 0], [True] * 4)
    group.join_places("rollout", [0, 1, 0, 1], [False, True, True, False])
    check(group, "on_actor", [3, 2, 1, 0], [3, 2, 1, 0])
    check(group, "on_rollout", [0, 1, 0, 1], [2, 1])


def test_results_of_one_mesh_are_resharded_for_the_other(group):
    group.join_device_mesh("actor", (4,), ("dp",))
    group.join_device_mesh("rollout", (2, 2), ("dp", "tp"))
    made = group.on_rollout.remote(torch.arange(8))
    kept = group.on_actor.remote(made)
    rows = [(row, 2 * (row // 4)) for row in range(8)]
    assert made.result() == rows
    assert [row for row, _ in kept.result()] == rows


@pytest.mark.parametrize(
    ("shape", "axes", "data_axes", "shard_of", "collecting"),
    [
        ((2, 2), ("tp", "dp"), "dp", [0, 1, 0, 1], [0, 1]),
        ((2, 2), ("dp", "pp"), "dp", [0, 0, 1, 1], [1, 3]),
        ((2, 2), ("dp_replicate", "dp_shard"), ("dp_shard", "dp_replicate"), [0, 2, 1, 3], [0, 2, 1, 3]),
        ((2, 1, 2), ("dp_replicate", "dp_shard", "tp"), ["dp_replicate", "dp_shard"], [0, 0, 1, 1], [0, 2]),
    ],
)
def test_torch_device_meshes(group, shape, axes, data_axes, shard_of, collecting):
    """A few of the shapes that tests/plans/test_device_mesh.py goes through, on torch's own class."""
    group.join_device_mesh("other", shape, axes, data_axes)
    check(group, "on_other", shard_of, collecting)


def test_one_unnamed_axis(group):
    group.join_device_mesh("other", (4,), None)
    check(group, "on_other", [0, 1, 2, 3], [0, 1, 2, 3])


def test_verl_and_mesh_spellings_are_one_mode():
    from single_controller import Dispatch

    assert make_nd_compute_dataproto_dispatch_fn(mesh_name="actor") == Dispatch.mesh("actor")

    class Mine(BaseWorker):
        @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="actor"), blocking=False)
        def work(self, batch):
            return batch

    assert Mine().work([1]) == [1]


class TestErrors:
    def test_invalid_axes_change_nothing(self, group):
        group.join_places("other", [0, 1, 2, 3], [True] * 4)
        told = r"data_axes='data': the device mesh has the axes dp, tp"
        with pytest.raises(WorkerError, match=told) as caught:
            group.join_device_mesh("other", (2, 2), ("dp", "tp"), "data")
        assert isinstance(caught.value.__cause__, ValueError)
        check(group, "on_other", [0, 1, 2, 3], [0, 1, 2, 3])

    def test_mesh_must_contain_every_rank(self, group):
        with pytest.raises(WorkerError, match="this rank is not in the device mesh"):
            group.join_part("part", [0, 1])
