"""Where a rank stands on a torch DeviceMesh, in the terms of a named mesh: its dp rank, and whether it answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

LAST_ANSWERS = "pp"
"""The axis on which the last rank answers, not the first."""


class DeviceMesh(Protocol):
    """What is asked of ``torch.distributed.device_mesh.DeviceMesh``; torch itself is not imported here."""

    @property
    def mesh_dim_names(self) -> tuple[str, ...] | None: ...

    @property
    def shape(self) -> tuple[int, ...]: ...

    def get_coordinate(self) -> Sequence[int] | None: ...


def place_on(device_mesh: DeviceMesh, data_axes: str | Sequence[str]) -> tuple[int, bool]:
    """(dp rank, whether it answers) of this process; see `Worker.register_device_mesh`.

    Raises:
        ValueError: a name that the mesh does not have, or this rank is not in the mesh.
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
        raise ValueError("this rank is not in the device mesh; every rank of a group stands on its meshes")
    place = dict(zip(names, coordinates, strict=True))
    size = dict(zip(names, shape, strict=True))
    dp_rank = 0
    for axis in wanted:
        dp_rank = dp_rank * size[axis] + place[axis]
    collects = all(place[a] == (size[a] - 1 if a == LAST_ANSWERS else 0) for a in names if a not in wanted)
    return dp_rank, collects
