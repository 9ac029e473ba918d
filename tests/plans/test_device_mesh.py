"""Where a rank stands on a device mesh, in terms of data: every axis may carry data, in every shape."""

from itertools import permutations, product

import pytest
import torch
from plan_helpers import FakeGroup, factorizations, plan_of

from dispatch import Dispatch, Layout
from dispatch.layout import Mesh
from single_controller.base.device_mesh import place_on


class DeviceMesh:
    """What torch's has, for one of its ranks: `get_coordinate` is the position of the rank in the mesh's tensor."""

    def __init__(self, ranks, names, rank):
        self.mesh, self.mesh_dim_names, self.shape, self.rank = ranks, names, tuple(ranks.shape), rank

    def get_coordinate(self):
        found = (self.mesh == self.rank).nonzero()
        return found[0].tolist() if len(found) else None


def ranks_in(shape):
    world_size = torch.Size(shape).numel()
    return torch.arange(world_size).reshape(shape)


def mesh_of(ranks, names, data_axes):
    """The named mesh of all ranks."""
    places = [place_on(DeviceMesh(ranks, names, rank), data_axes) for rank in range(ranks.numel())]
    return Mesh("m", tuple(dp for dp, _ in places), tuple(collects for _, collects in places))


@pytest.mark.parametrize("names", [("dp",), ("dp", "tp"), ("pp", "dp", "tp"), ("dp_replicate", "dp_shard", "tp")])
@pytest.mark.parametrize("world_size", [1, 4, 8, 24])
def test_each_shard_reaches_its_slice_of_the_mesh_and_one_of_it_answers(names, world_size):
    """The reference indexes the mesh's own tensor of ranks."""
    for shape, order in product(factorizations(world_size, len(names)), permutations(names)):
        ranks = ranks_in(shape)
        data_axes = [axis for axis in names if axis.startswith("dp")]  # the first is the slowest, wherever it lies
        mesh = mesh_of(ranks, order, data_axes)
        plan = plan_of(
            Dispatch.mesh("m"),
            FakeGroup(world_size, Layout({}, {"m": mesh})),
            list(range(len(mesh.routing.answers))),
        )
        sizes = dict(zip(order, shape, strict=True))
        answers = []
        for shard, place in enumerate(product(*(range(sizes[axis]) for axis in data_axes))):
            at = dict(zip(data_axes, place, strict=True))
            slice_ = ranks[tuple(at.get(axis, slice(None)) for axis in order)].flatten().tolist()
            assert [rank for rank in range(world_size) if plan.shard_of[rank] == shard] == sorted(slice_)
            first = {axis: -1 if axis == "pp" else 0 for axis in order}
            answers.append(int(ranks[tuple({**first, **at}[axis] for axis in order)]))
        assert list(plan.answers) == answers


def test_ranks_in_another_order_than_the_meshs():
    mesh = mesh_of(torch.tensor([[3, 1], [0, 2]]), ("dp", "tp"), "dp")
    assert mesh.dp_rank == (1, 0, 1, 0)
    assert mesh.routing.answers == (3, 0)


def test_the_one_axis_of_a_mesh_without_names_carries_data():
    assert mesh_of(ranks_in((4,)), None, "dp").routing.answers == (0, 1, 2, 3)


class TestErrors:
    def test_an_axis_that_the_mesh_does_not_have(self):
        with pytest.raises(ValueError, match=r"data_axes='data'.*axes dp, tp"):
            mesh_of(ranks_in((2, 2)), ("dp", "tp"), "data")

    def test_one_of_several(self):
        with pytest.raises(ValueError, match=r"data_axes=\('dp_replicate', 'dp'\).*axes dp_replicate, dp_shard"):
            mesh_of(ranks_in((2, 2)), ("dp_replicate", "dp_shard"), ("dp_replicate", "dp"))

    def test_no_axis(self):
        with pytest.raises(ValueError, match=r"data_axes=\(\).*axes dp, tp"):
            mesh_of(ranks_in((2, 2)), ("dp", "tp"), ())

    def test_the_same_axis_twice(self):
        with pytest.raises(ValueError, match=r"dp.*twice"):
            mesh_of(ranks_in((2, 2)), ("dp", "tp"), ("dp", "dp"))

    def test_several_axes_without_names(self):
        with pytest.raises(ValueError, match=r"shape \(2, 2\).*mesh_dim_names"):
            mesh_of(ranks_in((2, 2)), None, "dp")

    def test_no_axis_of_a_mesh_without_names(self):
        with pytest.raises(ValueError, match=r"data_axes=\(\)"):
            mesh_of(ranks_in((4,)), None, ())

    def test_a_rank_that_is_not_in_the_mesh(self):
        with pytest.raises(ValueError, match="not in the device mesh"):
            place_on(DeviceMesh(ranks_in((2,)), ("dp",), 2), "dp")
