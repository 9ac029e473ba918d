"""Named meshes over the ranks of one group: torch's own device meshes, and coordinates written out."""

import pytest
import torch
from group_workers import Grid, OnMeshes

from single_controller import (
    DispatchError,
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


def check(group, method, shard_of, answers, rows=8):
    """Every rank saw the rows of its shard, and the driver got them joined, from the ranks that answer."""
    cut = rows_of(len(answers), rows)
    assert getattr(group, method)(torch.arange(rows)) == [
        (row, answers[k]) for k, part in enumerate(cut) for row in part
    ]
    assert group.last_seen() == [cut[shard] for shard in shard_of]


def test_an_actor_mesh_and_a_rollout_mesh_at_once(group):
    """dp4 x tp1 and dp2 x tp2, from torch."""
    actor = group.join_device_mesh("actor", (4, 1), ("dp", "tp"))
    rollout = group.join_device_mesh("rollout", (2, 2), ("dp", "tp"))
    assert actor == [{"dp": rank, "tp": 0} for rank in range(4)]
    assert [(place["dp"], place["tp"]) for place in rollout] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    for _ in range(2):
        check(group, "on_actor", [0, 1, 2, 3], [0, 1, 2, 3])
        check(group, "on_rollout", [0, 0, 1, 1], [0, 2])
    assert {"actor", "rollout"} <= set(group.layout.meshes)


def test_the_same_two_from_coordinates_written_out(group):
    """Here another rank of each pair answers, and the ranks of a pair lie apart."""
    group.join_places("actor", [3, 2, 1, 0], [True] * 4)
    group.join_places("rollout", [0, 1, 0, 1], [False, True, True, False])
    check(group, "on_actor", [3, 2, 1, 0], [3, 2, 1, 0])
    check(group, "on_rollout", [0, 1, 0, 1], [2, 1])


def test_what_one_mesh_computed_goes_to_the_other(group):
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
def test_torchs_meshes(group, shape, axes, data_axes):
    """Against each rank's place as torch's `get_local_rank` says it."""
    places = group.join_device_mesh("other", shape, axes, data_axes)
    wanted = [data_axes] if isinstance(data_axes, str) else list(data_axes)
    sizes = dict(zip(axes, shape, strict=True))
    stands = sorted({tuple(place[axis] for axis in wanted) for place in places})
    shard_of = [stands.index(tuple(place[axis] for axis in wanted)) for place in places]
    answers = [
        next(
            rank
            for rank, place in enumerate(places)
            if shard_of[rank] == shard
            and all(place[a] == (sizes[a] - 1 if a == "pp" else 0) for a in axes if a not in wanted)
        )
        for shard in range(len(stands))
    ]
    check(group, "on_other", shard_of, answers)


def test_one_axis_without_a_name(group):
    group.join_device_mesh("other", (4,), None)
    check(group, "on_other", [0, 1, 2, 3], [0, 1, 2, 3])


def test_verls_spelling_and_ours_are_one_mode():
    from single_controller import Dispatch

    assert make_nd_compute_dataproto_dispatch_fn(mesh_name="actor") == Dispatch.mesh("actor")

    class Mine(BaseWorker):
        @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="actor"), blocking=False)
        def work(self, batch):
            return batch

    assert Mine().work([1]) == [1]


class TestErrors:
    def test_rows_that_do_not_divide_name_the_mesh(self, group):
        group.join_device_mesh("rollout", (2, 2), ("dp", "tp"))
        with pytest.raises(DispatchError, match=r"on_rollout\(\).*5 rows.*dp_size of mesh 'rollout' = 2"):
            group.on_rollout(torch.arange(5))

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
    def test_axes_that_cannot_be(self, group, shape, axes, data_axes, told):
        group.join_places("other", [0, 1, 2, 3], [True] * 4)
        with pytest.raises(WorkerError, match=told) as caught:
            group.join_device_mesh("other", shape, axes, data_axes)
        assert isinstance(caught.value.__cause__, ValueError)
        check(group, "on_other", [0, 1, 2, 3], [0, 1, 2, 3])  # as before

    def test_a_mesh_of_some_of_the_ranks(self, group):
        with pytest.raises(WorkerError, match="this rank is not in the device mesh"):
            group.join_part("part", [0, 1])

    @pytest.mark.engines("ray", "local", "local-threads")
    def test_a_mesh_that_nobody_joined(self, make_group):
        group = make_group(Grid)
        with pytest.raises(DispatchError, match=r"no mesh 'rollout'.*known: none.*register_mesh"):
            group.on_rollout(torch.arange(4))
        group.join_mesh("actor", [0, 1, 2, 3], [True] * 4)
        with pytest.raises(DispatchError, match=r"no mesh 'rollout'.*known: actor"):
            group.on_rollout(torch.arange(4))
