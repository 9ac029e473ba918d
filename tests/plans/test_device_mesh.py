"""The data-parallel rank of a rank on a torch device mesh, for every shape and choice of data axes."""

from itertools import permutations, product

import pytest
import torch
from plan_helpers import factorizations, plan_of

from dispatch import Dispatch, Layout
from dispatch.layout import Mesh, mesh_coordinates


class DeviceMesh:
    """The part of torch's DeviceMesh that is used, for one rank: its position in the tensor of ranks."""

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
    places = [mesh_coordinates(DeviceMesh(ranks, names, rank), data_axes) for rank in range(ranks.numel())]
    return Mesh("m", tuple(dp for dp, _ in places), tuple(collects for _, collects in places))


@pytest.mark.parametrize("names", [("dp",), ("dp", "tp"), ("pp", "dp", "tp"), ("dp_replicate", "dp_shard", "tp")])
@pytest.mark.parametrize("world_size", [1, 4, 8, 24])
def test_each_shard_reaches_its_mesh_slice_and_one_rank_of_it_collects(names, world_size):
    """The reference indexes the mesh's own tensor of ranks."""
    for shape, order in product(factorizations(world_size, len(names)), permutations(names)):
        ranks = ranks_in(shape)
        data_axes = [axis for axis in names if axis.startswith("dp")]  # the first is the slowest, wherever it is
        mesh = mesh_of(ranks, order, data_axes)
        plan = plan_of(Dispatch.mesh("m"), Layout({}, {"m": mesh}), list(range(len(mesh.routing.collecting))))
        sizes = dict(zip(order, shape, strict=True))
        collecting = []
        for shard, place in enumerate(product(*(range(sizes[axis]) for axis in data_axes))):
            at = dict(zip(data_axes, place, strict=True))
            slice_ = ranks[tuple(at.get(axis, slice(None)) for axis in order)].flatten().tolist()
            assert [rank for rank in range(world_size) if plan.shard_of[rank] == shard] == sorted(slice_)
            first = {axis: -1 if axis == "pp" else 0 for axis in order}
            collecting.append(int(ranks[tuple({**first, **at}[axis] for axis in order)]))
        assert list(plan.collecting) == collecting


def test_ranks_in_nonsequential_order():
    mesh = mesh_of(torch.tensor([[3, 1], [0, 2]]), ("dp", "tp"), "dp")
    assert mesh.dp_rank == (1, 0, 1, 0)
    assert mesh.routing.collecting == (3, 0)


class TestErrors:
    def test_unknown_axis(self):
        with pytest.raises(ValueError, match=r"data_axes='data'.*axes dp, tp"):
            mesh_of(ranks_in((2, 2)), ("dp", "tp"), "data")

    def test_one_of_several_axes_is_unknown(self):
        with pytest.raises(ValueError, match=r"data_axes=\('dp_replicate', 'dp'\).*axes dp_replicate, dp_shard"):
            mesh_of(ranks_in((2, 2)), ("dp_replicate", "dp_shard"), ("dp_replicate", "dp"))

    def test_no_axis(self):
        with pytest.raises(ValueError, match=r"data_axes=\(\).*axes dp, tp"):
            mesh_of(ranks_in((2, 2)), ("dp", "tp"), ())

    def test_repeated_axis(self):
        with pytest.raises(ValueError, match=r"dp.*twice"):
            mesh_of(ranks_in((2, 2)), ("dp", "tp"), ("dp", "dp"))

    def test_several_unnamed_axes(self):
        with pytest.raises(ValueError, match=r"shape \(2, 2\).*mesh_dim_names"):
            mesh_of(ranks_in((2, 2)), None, "dp")

    def test_no_axis_of_an_unnamed_mesh(self):
        with pytest.raises(ValueError, match=r"data_axes=\(\)"):
            mesh_of(ranks_in((4,)), None, ())

    def test_rank_outside_the_mesh(self):
        with pytest.raises(ValueError, match="not in the device mesh"):
            mesh_coordinates(DeviceMesh(ranks_in((2,)), ("dp",), 2), "dp")
