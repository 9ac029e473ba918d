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
    ("shape", "axes", "data_axes"),
    [
        ((4,), ("dp",), "dp"),
        ((4,), ("tp",), "tp"),
        ((2, 2), ("dp", "tp"), "dp"),
        ((2, 2), ("tp", "dp"), "dp"),
        ((1, 4), ("dp", "tp"), "dp"),
        ((2, 2), ("dp", "pp"), "dp"),
        ((2, 2), ("pp", "dp"), ("dp",)),
        ((2, 2), ("dp_replicate", "dp_shard"), ("dp_replicate", "dp_shard")),
        ((2, 2), ("dp_replicate", "dp_shard"), ("dp_shard", "dp_replicate")),
        ((2, 1, 2), ("dp", "pp", "tp"), "dp"),
        ((1, 2, 2), ("dp", "pp", "tp"), "dp"),
        ((2, 2, 1), ("pp", "dp", "tp"), "dp"),
        ((2, 1, 2), ("dp_replicate", "dp_shard", "tp"), ["dp_replicate", "dp_shard"]),
        ((2, 2, 1), ("dp_replicate", "dp_shard", "tp"), ["dp_replicate", "dp_shard"]),
    ],
)
def test_torch_device_meshes(group, shape, axes, data_axes):
    """Compared with each rank's coordinates from torch's `get_local_rank`."""
    places = group.join_device_mesh("other", shape, axes, data_axes)
    wanted = [data_axes] if isinstance(data_axes, str) else list(data_axes)
    sizes = dict(zip(axes, shape, strict=True))
    coordinates = sorted({tuple(place[axis] for axis in wanted) for place in places})
    shard_of = [coordinates.index(tuple(place[axis] for axis in wanted)) for place in places]
    collecting = [
        next(
            rank
            for rank, place in enumerate(places)
            if shard_of[rank] == shard
            and all(place[a] == (sizes[a] - 1 if a == "pp" else 0) for a in axes if a not in wanted)
        )
        for shard in range(len(coordinates))
    ]
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
    @pytest.mark.parametrize(
        ("shape", "axes", "data_axes", "told"),
        [
            ((2, 2), ("dp", "tp"), "data", r"data_axes='data': the device mesh has the axes dp, tp"),
            ((2, 2), ("x", "y"), "dp", r"data_axes='dp': the device mesh has the axes x, y"),
            ((2, 2), ("dp", "tp"), ["dp", "sp"], r"data_axes=\['dp', 'sp'\]"),
            ((2, 2), ("dp", "tp"), [], r"data_axes=\[\]"),
            ((2, 2), None, "dp", r"shape \(2, 2\) needs names.*mesh_dim_names"),
        ],
    )
    def test_invalid_axes(self, group, shape, axes, data_axes, told):
        group.join_places("other", [0, 1, 2, 3], [True] * 4)
        with pytest.raises(WorkerError, match=told) as caught:
            group.join_device_mesh("other", shape, axes, data_axes)
        assert isinstance(caught.value.__cause__, ValueError)
        check(group, "on_other", [0, 1, 2, 3], [0, 1, 2, 3])  # unchanged

    def test_mesh_must_contain_every_rank(self, group):
        with pytest.raises(WorkerError, match="this rank is not in the device mesh"):
            group.join_part("part", [0, 1])
