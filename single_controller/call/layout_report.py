"""LayoutReport: the coordinates that a worker reports, and the group's Layout made from all reports."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from dispatch.errors import DispatchError
from dispatch.layout import Layout, Mesh

COLLECTS_LAST = "pp"
"""The mesh axis on which the last rank collects, because the last pipeline stage has the output."""


@dataclass
class LayoutReport:
    """What one worker reported.

    Attributes:
        axes: axis -> coordinate.
        sizes: axis -> number of coordinates, where the worker reported it.
        meshes: mesh name -> (dp rank, whether the rank collects).
        version: increases with every change, so that a group notices one.
    """

    axes: dict[str, int] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)
    meshes: dict[str, tuple[int, bool]] = field(default_factory=dict)
    version: int = 0


def layout_from(reports: Sequence[LayoutReport]) -> Layout:
    """The layout that the workers, in order of rank, have reported.

    Raises:
        DispatchError: only some ranks reported an axis or a mesh, or the reported sizes differ.
    """
    _check_complete("register_layout", "axis", [set(report.axes) for report in reports])
    _check_complete("register_mesh", "mesh", [set(report.meshes) for report in reports])
    first = reports[0]
    for rank, report in enumerate(reports):
        if report.sizes != first.sizes:
            raise DispatchError(
                f"rank {rank} reported the axis sizes {report.sizes}, but rank 0 reported {first.sizes}; "
                "all ranks of a group share the same axes"
            )
    axes = {axis: tuple(report.axes[axis] for report in reports) for axis in first.axes}
    meshes = {}
    for name in first.meshes:
        coordinates = [report.meshes[name] for report in reports]
        meshes[name] = Mesh(name, tuple(dp for dp, _ in coordinates), tuple(collects for _, collects in coordinates))
    return Layout(axes, meshes, dict(first.sizes), len(reports))


def _check_complete(function: str, what: str, reported: list[set[str]]) -> None:
    for name in sorted(set().union(*reported)):
        missing = [rank for rank, names in enumerate(reported) if name not in names]
        if missing:
            raise DispatchError(
                f"ranks {missing} have not called {function}() for the {what} {name!r}, but the other ranks have; "
                "every rank of the group must call it"
            )


class DeviceMesh(Protocol):
    """The part of ``torch.distributed.device_mesh.DeviceMesh`` that is used; torch itself is not imported here."""

    @property
    def mesh_dim_names(self) -> tuple[str, ...] | None: ...

    @property
    def shape(self) -> tuple[int, ...]: ...

    def get_coordinate(self) -> Sequence[int] | None: ...


def mesh_coordinates(device_mesh: DeviceMesh, data_axes: str | Sequence[str]) -> tuple[int, bool]:
    """(dp rank, whether it collects) of this process on a device mesh; see `Worker.register_device_mesh`.

    Raises:
        ValueError: the mesh has no such axis, or does not contain this rank.
    """
    shape = tuple(device_mesh.shape)
    wanted = (data_axes,) if isinstance(data_axes, str) else tuple(data_axes)
    names = device_mesh.mesh_dim_names
    if names is None:
        if len(shape) != 1:
            raise ValueError(f"a device mesh of shape {shape} needs names: give init_device_mesh() mesh_dim_names=")
        names = wanted = (*wanted[:1],)
    missing = [axis for axis in wanted if axis not in names]
    if len(set(wanted)) < len(wanted):
        raise ValueError(f"data_axes={data_axes!r} names an axis twice")
    if missing or not wanted:
        raise ValueError(f"data_axes={data_axes!r}: the device mesh has the axes {', '.join(names)}")
    coordinates = device_mesh.get_coordinate()
    if coordinates is None:
        raise ValueError("this rank is not in the device mesh; every rank of a group must be in its meshes")
    coordinate = dict(zip(names, coordinates, strict=True))
    size = dict(zip(names, shape, strict=True))
    dp_rank = 0
    for axis in wanted:
        dp_rank = dp_rank * size[axis] + coordinate[axis]
    collects = all(coordinate[a] == (size[a] - 1 if a == COLLECTS_LAST else 0) for a in names if a not in wanted)
    return dp_rank, collects
