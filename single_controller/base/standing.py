"""From what each worker said of its coordinates to the group's Layout."""

from __future__ import annotations

from collections.abc import Sequence

from dispatch.errors import DispatchError
from dispatch.layout import Layout, Mesh
from single_controller.base.worker import Standing


def layout_of(standings: Sequence[Standing]) -> Layout:
    """The layout that the workers, in order of rank, have reported.

    Raises:
        DispatchError: some ranks reported an axis or a mesh and others did not, or another size of an axis.
    """
    _complete("register_layout", "axis", [set(standing.axes) for standing in standings])
    _complete("register_mesh", "mesh", [set(standing.meshes) for standing in standings])
    first = standings[0]
    axes = {axis: tuple(standing.axes[axis] for standing in standings) for axis in first.axes}
    meshes = {}
    for name in first.meshes:
        places = [standing.meshes[name] for standing in standings]
        meshes[name] = Mesh(name, tuple(dp for dp, _ in places), tuple(collects for _, collects in places))
    for rank, standing in enumerate(standings):
        if standing.sizes != first.sizes:
            raise DispatchError(
                f"rank {rank} reported the sizes {standing.sizes} of its axes, rank 0 reported {first.sizes}; "
                "all ranks of a group stand on the same axes"
            )
    return Layout(axes, meshes, dict(first.sizes))


def _complete(function: str, what: str, said: list[set[str]]) -> None:
    for name in sorted(set().union(*said)):
        silent = [rank for rank, names in enumerate(said) if name not in names]
        if silent:
            raise DispatchError(
                f"ranks {silent} have not called {function}() for the {what} {name!r}, the others have; "
                "every rank of the group says where it stands"
            )
