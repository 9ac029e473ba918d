"""Recipe: what a rank's process is made of, and how it is sent there."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import ray

from dispatch.batch import user_batch_types
from dispatch.register import method_spec, registered_methods
from single_controller.base.colocate import Colocated
from single_controller.base.pool import ClassWithInitArgs
from single_controller.base.worker import Worker
from single_controller.ray.carried import refuse_unpicklable
from single_controller.ray.class_with_args import RayClassWithInitArgs
from single_controller.ray.transport import Packet, pack

logger = logging.getLogger(__name__)


def _batch_types() -> list[Packet]:
    """What `register_batch_type` was told on the driver, for the workers; one that does not pickle stays here."""
    types = []
    for item in user_batch_types().items():
        try:
            types.append(pack(item))
        except Exception:
            logger.warning("the batch type %s does not pickle: the workers will not know it", item[0].__name__)
    return types


class Recipe:
    """What a rank's process is made of: one worker class, or one for each role.

    Args:
        made: the class with its arguments, or several of them colocated.

    Attributes:
        roles: role -> class with arguments; the role of a single class is None.
        name: for the names of actors and groups.
        options: Ray's actor options.
        additional_resource: custom resources of each process.

    Raises:
        TypeError: a class was not given as `RayClassWithInitArgs`.
        ValueError: the roles ask for different options of the process that they share.
    """

    def __init__(self, made: RayClassWithInitArgs | Colocated) -> None:
        self.roles: dict[str | None, RayClassWithInitArgs] = {}
        self.options: dict[str, Any] = {}
        self.additional_resource: dict[str, float] = {}
        self.name = made.name if isinstance(made, Colocated) else made.cls.__name__
        members: Mapping[Any, ClassWithInitArgs] = made.roles if isinstance(made, Colocated) else {None: made}
        for role, member in members.items():
            if not isinstance(member, RayClassWithInitArgs):
                raise TypeError(f"a group on Ray is made of RayClassWithInitArgs(YourWorker, ...), got {member!r}")
            self.roles[role] = member
            for asked, so_far in (
                (member.options, self.options),
                (member.additional_resource, self.additional_resource),
            ):
                for key, value in asked.items():
                    if so_far.setdefault(key, value) != value:
                        raise ValueError(
                            f"colocate(): the roles share a process, but {role!r} asks for {key}={value!r} and an "
                            f"earlier one for {so_far[key]!r}"
                        )

    @property
    def classes(self) -> dict[str | None, type[Worker]]:
        """role -> class."""
        return {role: made.cls for role, made in self.roles.items()}

    @property
    def methods(self) -> tuple[tuple[str | None, str], ...]:
        """Role and name of every public method."""
        return tuple(
            (role, name)
            for role, cls in self.classes.items()
            for name in dir(cls)
            if not name.startswith("_") and method_spec(cls, name) is not None
        )

    @property
    def concurrent(self) -> bool:
        """Whether a method is registered as concurrent."""
        classes = self.classes.values()
        return any(spec.registration.concurrent for cls in classes for spec in registered_methods(cls).values())

    def pack(self) -> Any:
        """Classes and constructors' arguments, packed for the workers.

        Raises:
            DispatchError: they cannot be pickled.
        """
        parts = {role: (made.cls, made.args, made.kwargs) for role, made in self.roles.items()}
        try:
            packet = pack((parts, _batch_types()))
        except Exception as error:
            for made in self.roles.values():
                refuse_unpicklable(made, error)
            raise
        return packet if packet.inline else ray.put(packet)
