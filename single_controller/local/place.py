"""LocalPlace: where a worker in the driver's process stands."""

from __future__ import annotations

import functools
import socket

from single_controller.base.errors import LocalEngineError
from single_controller.base.worker import Place

ONE_PROCESS = (
    "the ranks of a LocalWorkerGroup are in one process, so there are no collectives between them: run what needs them "
    "on Ray (RayWorkerGroup), or make the LocalWorkerGroup with world_size=1, whose process groups work"
)


class LocalPlace(Place):
    """A rank's place. A group of several ranks has no rendezvous, and asking for its address is an error.

    Args:
        rank: 0 .. world_size - 1.
        world_size: number of workers in the group.
    """

    def __init__(self, rank: int, world_size: int) -> None:
        here = {"rank": rank, "world_size": world_size, "local_rank": rank, "local_world_size": world_size}
        for name, value in here.items():
            object.__setattr__(self, name, value)  # the class is frozen

    @property
    def master_addr(self) -> str:
        """This machine, for a group of one rank.

        Raises:
            LocalEngineError: there are several.
        """
        self._check_alone("master_addr")
        return "127.0.0.1"

    @property
    def master_port(self) -> int:
        """A port that is held, bound and not listening, for a group of one rank.

        Raises:
            LocalEngineError: there are several.
        """
        self._check_alone("master_port")
        port: int = self._held.getsockname()[1]
        return port

    def close(self) -> None:
        """Let go of the port."""
        held = vars(self).pop("_held", None)
        if held is not None:
            held.close()

    @functools.cached_property
    def _held(self) -> socket.socket:
        held = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        return held

    def _check_alone(self, what: str) -> None:
        if self.world_size > 1:
            raise LocalEngineError(f"{what}: {ONE_PROCESS}")

    def __eq__(self, other: object) -> bool:
        return self is other

    def __hash__(self) -> int:
        return id(self)

    def __repr__(self) -> str:
        return f"LocalPlace(rank={self.rank}, world_size={self.world_size})"
