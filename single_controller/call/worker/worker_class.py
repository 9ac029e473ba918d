"""Worker classes as a group takes them: with the arguments of the constructor, colocated, and their methods by name."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, cast

from dispatch.batch import described
from dispatch.checks import suggestion
from dispatch.errors import DispatchError
from dispatch.layout import Layout
from dispatch.register import MethodSpec, check_arguments, method_spec, plain_signature, registered_methods
from single_controller.call.codec import can_encode, cannot_send
from single_controller.call.stats import CallStats
from single_controller.call.worker.worker import Worker


class ClassWithInitArgs:
    """A worker class and the arguments of its constructor, which runs on every rank.

    Args:
        cls: a subclass of `Worker`.
        args: positional arguments of its constructor.
        kwargs: keyword arguments of its constructor. Without any arguments, the object may also say of which class
            running workers are; whether the constructor needs some is then checked when a group starts workers.

    Raises:
        TypeError: ``cls`` is not a subclass of `Worker`, or the arguments do not fit its constructor.
    """

    def __init__(self, cls: type[Worker], *args: Any, **kwargs: Any) -> None:
        if not (isinstance(cls, type) and issubclass(cls, Worker)):
            raise TypeError(f"a group's class is a subclass of single_controller.Worker, got {cls!r}")
        self.cls: type[Worker] = cls
        self.args = args
        self.kwargs = kwargs
        if args or kwargs:
            self.check_arguments()

    def __call__(self) -> Worker:
        """Construct the worker in this process, for a unit test of it."""
        return self.cls(*self.args, **self.kwargs)

    def check_arguments(self) -> None:
        """Raise a `TypeError` unless the arguments fit the constructor."""
        constructor = self.cls.__init__
        # Worker's own parameter is for constructors that pass it on, see there.
        own = constructor is not Worker.__init__
        signature = plain_signature(constructor, skip_first=True) if own else inspect.Signature()
        check_arguments(self.cls.__name__, signature, self.args, self.kwargs)

    def check_encodable(self, error: Exception) -> None:
        """Raise a `DispatchError` that names what cannot be pickled, if it is the class or one of the arguments."""
        given = {**{f"argument {k}": value for k, value in enumerate(self.args)}, **self.kwargs}
        name = next((name for name, value in given.items() if not can_encode(value)), None)
        if name is not None or not can_encode(self.cls):
            what = "the class itself" if name is None else f"{name!r}, {described(given[name])},"
            raise cannot_send(f"{self.cls.__name__}(): {what}", error, "__init__", name) from error

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.cls.__name__})"


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

    def update_options(self, options: Mapping[str, Any]) -> None:
        """Set Ray's actor options of the shared process: `RayClassWithInitArgs.update_options` of every role."""
        for made in self.roles.values():
            cast(Any, made).update_options(options)

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
        TypeError, ValueError: it is not such a dict, it is empty, or the name of a role cannot be an attribute.
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
    role's worker, which is created first. Arguments and errors are those of `colocate`; no role may have the name of an
    attribute of workers.
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


class WorkerClass:
    """One worker class of a group, with its role if several share a process: its methods by name, what their calls
    cost, and the layout of its workers."""

    def __init__(self, cls: type[Worker], role: str | None = None) -> None:
        self.cls = cls
        self.role = role
        self.stats = CallStats()
        # With the version of each rank's report; None until somebody asks for it
        self.layout: tuple[dict[int, int], Layout] | None = None
        # Name -> method, of those under @register
        self.registered = {name: replace(spec, role=role) for name, spec in registered_methods(cls).items()}

    def check_names(self, reserved: Iterable[str]) -> None:
        """Raise a `DispatchError` if a registered method has a reserved name."""
        clashes = sorted(self.registered.keys() & set(reserved))
        if clashes:
            raise DispatchError(
                f"{self.cls.__name__} registers {', '.join(f'{name}()' for name in clashes)}, but the worker "
                "group uses this name itself; rename the method",
                method=clashes[0],
            )

    def any(self, name: str) -> MethodSpec:
        """A method, registered or not; an `AttributeError` if the class has none of that name."""
        spec = self.registered.get(name) or method_spec(self.cls, name)
        if spec is None:
            raise AttributeError(f"{self.cls.__name__} has no method {name!r}{suggestion(name, dir(self.cls))}")
        return replace(spec, role=self.role)

    def name_of(self, method: object) -> str:
        """The name of a method that was passed as a function, such as ``Scorer.score``. If the function is not one of
        the class's own, compare module and qualified name, because a class that another process returns is a copy."""
        if not inspect.isfunction(method):
            raise TypeError(
                f"group.on() takes a method of the worker class, as in group.on(Scorer.score); got {method!r}"
            )
        name, wanted = method.__name__, (method.__module__, method.__qualname__)
        # A decorator without functools.wraps gives all functions the name of its wrapper.
        members = (member for base in self.cls.__mro__ for member in vars(base).items())
        names = [key for key, value in members if getattr(value, "__func__", value) is method]
        if names:
            return name if name in names else names[0]
        for base in self.cls.__mro__:
            found = vars(base).get(name)
            function = getattr(found, "__func__", found)
            if inspect.isfunction(function) and (function.__module__, function.__qualname__) == wanted:
                return name
        raise DispatchError(
            f"{method.__qualname__}() is not a method of the group's worker class {self.cls.__name__}, which registers "
            f"{', '.join(self.registered) or 'no methods'}",
            method=name,
        )

    def missing(self, name: str, others: Iterable[str]) -> AttributeError:
        """The error for a name that is not a registered method. ``others`` are the group's names."""
        owner = self.cls.__name__
        if method_spec(self.cls, name) is not None:
            return AttributeError(
                f"{owner}.{name}() is not registered: put @register(...) on it, or call "
                f"group.execute_all_sync({name!r}, ...)"
            )
        return AttributeError(f"the group has no method {name!r}, and neither has {owner}{suggestion(name, others)}")
