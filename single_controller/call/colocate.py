"""colocate: several worker classes in one process per rank."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from single_controller.call.pool import ClassWithInitArgs
from single_controller.call.worker import Worker


class Colocated:
    """What `colocate` returns. A group takes it in place of one class."""

    def __init__(self, roles: Mapping[str, ClassWithInitArgs]) -> None:
        if not isinstance(roles, Mapping) or not all(isinstance(made, ClassWithInitArgs) for made in roles.values()):
            raise TypeError(f"colocate() takes a dict {{'actor': RayClassWithInitArgs(Actor), ...}}, got {roles!r}")
        if not roles:
            raise ValueError("colocate() takes at least one role")
        for role in roles:
            if not isinstance(role, str) or not role.isidentifier() or role.startswith("_"):
                raise ValueError(f"a role is reached as group.<role>, so its name must be an identifier; got {role!r}")
        self.roles: dict[str, ClassWithInitArgs] = dict(roles)

    @property
    def name(self) -> str:
        """The roles' names, for the names of actors and groups."""
        return "_".join(self.roles)

    def __repr__(self) -> str:
        return f"colocate({{{', '.join(f'{role!r}: {made.cls.__name__}' for role, made in self.roles.items())}}})"


def colocate(roles: Mapping[str, ClassWithInitArgs]) -> Colocated:
    """Put several worker classes into one process per rank, so that they share its device and memory.

    The group has a group for each role: ``group.actor.m(x)``, ``group.critic.m(x)``. A worker reaches the others of its
    process with ``self.role_worker("critic")``. A process runs one call at a time, in the order in which the driver
    sent them, whichever role they are for.

    Args:
        roles: role -> its class with the constructor's arguments: ``{"actor": RayClassWithInitArgs(Actor, config)}``.
            The workers of a process are created in this order.

    Raises:
        TypeError: it is not such a dict.
        ValueError: it is empty, or the name of a role cannot be an attribute.
    """
    return Colocated(roles)


def create_colocated_worker_cls(class_dict: Mapping[str, ClassWithInitArgs]) -> Colocated:
    """`colocate` under the name that verl uses; ``group.spawn(...)`` returns the roles' groups. Verl's other name is
    create_colocated_worker_cls_fused; ``group.fuse(...)``, then ``group.<role>``."""
    return colocate(class_dict)


create_colocated_worker_cls_fused = create_colocated_worker_cls


def create_colocated_worker_raw_cls(class_dict: Mapping[str, ClassWithInitArgs]) -> type[Worker]:
    """Return a base class for a worker beside colocated ones, under the name that verl uses.

    A group of a subclass has the subclass's own methods and ``group.<role>``. In the worker, ``self.<role>`` is the
    role's worker, which is created first.

    Args:
        class_dict: as for `colocate`.

    Raises:
        TypeError, ValueError: as for `colocate`, or a worker uses the name of a role itself.
    """
    inner = colocate(class_dict)
    taken = [role for role in inner.roles if hasattr(Worker, role)]
    if taken:
        raise ValueError(f"self.{taken[0]} is an attribute of every worker: rename the role")
    members: dict[str, Any] = {role: property(partial(Worker.role_worker, role=role)) for role in inner.roles}
    return type(f"Fused_{inner.name}", (Worker,), {**members, _INNER: inner, "__module__": __name__})


_INNER = "_colocated"
"""Where a class made by `create_colocated_worker_raw_cls` has its roles."""


def constructors(made: ClassWithInitArgs | Colocated) -> dict[str | None, ClassWithInitArgs]:
    """role -> class with arguments, in the order of creation. The role of the group's own class is None."""
    colocated: Colocated | None = made if isinstance(made, Colocated) else getattr(made.cls, _INNER, None)
    roles: dict[str | None, ClassWithInitArgs] = dict(() if colocated is None else colocated.roles.items())
    if not isinstance(made, Colocated):
        roles[None] = made
    return roles
