"""RayClassWithInitArgs: a worker class with its constructor's arguments and options for the actors. ProcessSpec: all
worker classes of one process."""

from __future__ import annotations

import inspect
import logging
import os
from collections.abc import Callable, Mapping
from typing import Any, ParamSpec, Protocol, overload

import ray

from dispatch.batch import user_batch_types
from dispatch.checks import check_amounts
from dispatch.register import method_spec
from single_controller.call.codec import MAX_TASK_BYTES, Encoded, encode
from single_controller.call.worker.worker import Worker
from single_controller.call.worker.worker_class import ClassWithInitArgs, Colocated, constructors
from single_controller.ray.compat import declared_class
from single_controller.ray.results import put

logger = logging.getLogger(__name__)

P = ParamSpec("P")


class _Remote(Protocol):
    """What type checkers know of a class that is decorated with ``@ray.remote``."""

    def remote(self, *args: Any, **kwargs: Any) -> Any: ...


class RayClassWithInitArgs(ClassWithInitArgs):
    """A worker class and its constructor's arguments, with options for the actors.

    Args:
        cls: a subclass of `Worker`, plain or decorated with ``@ray.remote``.
        args: positional arguments of its constructor.
        kwargs: keyword arguments of its constructor. See `ClassWithInitArgs` for a class without any arguments.
            ``python=`` is not one of them, unless the constructor has a parameter of that name: it is the Python that
            the workers run in, for example that of a virtual environment. See `set_python`.

    Raises:
        TypeError: ``cls`` is not a subclass of `Worker`, the arguments do not fit its constructor, or ``python`` is not
            a path.
        ValueError: ``python`` is empty, or the class is declared with another Python.
    """

    @overload
    def __init__(self, cls: Callable[P, Worker], *args: P.args, **kwargs: P.kwargs) -> None: ...

    @overload
    def __init__(self, cls: type[Worker]) -> None: ...

    @overload
    def __init__(
        self, cls: type[Worker] | _Remote, *args: Any, python: str | os.PathLike[str], **kwargs: Any
    ) -> None: ...

    @overload
    def __init__(self, cls: _Remote, *args: Any, **kwargs: Any) -> None: ...

    def __init__(self, cls: Any, *args: Any, **kwargs: Any) -> None:
        cls, declared = declared_class(cls)
        of_constructor = "python" in inspect.signature(getattr(cls, "__init__", cls)).parameters
        python = None if of_constructor else kwargs.pop("python", None)
        # The pool decides which share of a CPU and a GPU a worker gets.
        options = {key: value for key, value in declared.items() if key not in ("num_cpus", "num_gpus")}
        options = _settable(f"@ray.remote(...) on {getattr(cls, '__name__', cls)}", options)
        super().__init__(cls, *args, **kwargs)
        self._options = options
        self._additional_resource: dict[str, float] = {}
        self._python: str | None = None
        if python is not None:
            self.set_python(python)

    # Read-only, because the methods below check what they set.

    @property
    def options(self) -> dict[str, Any]:
        """Ray's actor options, besides those that the group sets; a copy."""
        return dict(self._options)

    @property
    def additional_resource(self) -> dict[str, float]:
        """Custom resources of each worker; a copy."""
        return dict(self._additional_resource)

    @property
    def python(self) -> str | None:
        """The Python that the workers run in; None for the driver's."""
        return self._python

    def update_options(self, options: Mapping[str, Any]) -> None:
        """Set Ray's actor options, such as ``{"num_cpus": 0.5}``. They override the group's.

        Raises:
            ValueError: Ray has no such option, the group sets it itself, or it chooses a Python beside `set_python`.
        """
        options = _settable("update_options()", options)
        ray.remote(_Probe).options(**options)  # Ray checks names and values
        check_one_python("update_options()", self._python, options.get("runtime_env"))
        self._options.update(options)

    def set_python(self, python: str | os.PathLike[str]) -> None:
        """Run the workers in another Python, such as that of a virtual environment, which has packages of its own.

        The file must exist on every node that the workers run on, with the driver's minor version of Python and version
        of Ray; workers use the driver's copy of this library. A group checks this before it creates workers.

        Args:
            python: its path; a relative one begins at the driver's current directory.

        Raises:
            TypeError, ValueError: it is not a path, it is empty, or the actor options choose a Python too.
        """
        if not isinstance(python, (str, os.PathLike)) or not isinstance(path := os.fspath(python), str):
            raise TypeError(f"python is the path of a Python interpreter ('venv/bin/python'), got {python!r}")
        if not path or "\0" in path:
            raise ValueError(f"python is the path of a Python interpreter ('venv/bin/python'), got {python!r}")
        check_one_python("set_python()", path, self._options.get("runtime_env"))
        # Links stay: the interpreter of a virtual environment is one, and knows its environment by the link's path.
        self._python = os.path.abspath(os.path.expanduser(path))

    def set_additional_resource(self, additional_resource: Mapping[str, float]) -> None:
        """Set custom resources that each worker takes, such as ``{"disk": 1}``.

        Raises:
            ValueError: an amount is not a positive number.
        """
        self._additional_resource = check_amounts("set_additional_resource()", additional_resource)


_SET_BY_GROUP = frozenset(
    {
        "concurrency_groups",
        "lifetime",
        "max_concurrency",
        "max_restarts",
        "max_task_retries",
        "name",
        "namespace",
        "placement_group",
        "scheduling_strategy",
    }
)
"""Ray options that only the group may set. An actor that Ray restarted, for example, would have no worker in it."""


def _settable(what: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options without those that only the group may set; a `ValueError` if one of these is not None."""
    taken = sorted(_SET_BY_GROUP & {key for key, value in options.items() if value is not None})
    if taken:
        raise ValueError(f"{what}: the group sets {taken} itself")
    return {key: value for key, value in options.items() if key not in _SET_BY_GROUP}


CHOOSE_PYTHON = ("py_executable", "pip", "uv", "conda", "container", "image_uri", "nsight", "rocprof_sys")
"""Keys of a runtime_env with which Ray chooses the command that starts a worker."""


def check_one_python(what: str, python: str | None, runtime_env: Mapping[str, Any] | None) -> None:
    """Raise a `ValueError` if a runtime_env chooses a Python although ``python`` does."""
    both = [key for key in CHOOSE_PYTHON if python is not None and (runtime_env or {}).get(key)]
    if both:
        raise ValueError(
            f"{what}: python={python!r} and runtime_env={{{both[0]!r}: ...}} both say how workers start Python; "
            "give one of them"
        )


class _Probe:
    pass


class ProcessSpec:
    """What runs in the process of a rank: one worker class, or one per role.

    Raises:
        TypeError: a class was not given as `RayClassWithInitArgs`.
        ValueError: the roles ask for different options, or a different Python, of the process that they share.
    """

    refers = False  # whether the constructors' arguments contain Ray references; known once they were encoded

    def __init__(self, made: RayClassWithInitArgs | Colocated) -> None:
        # Role -> class with arguments; the role of the group's own class is None
        self.roles: dict[str | None, RayClassWithInitArgs] = {}
        self.options: dict[str, Any] = {}  # Ray's actor options
        self.additional_resource: dict[str, float] = {}  # custom resources of each process
        # For the names of actors and groups
        self.name = made.name if isinstance(made, Colocated) else made.cls.__name__
        self.python: str | None = None  # the Python that the process runs; None for the driver's
        for role, member in constructors(made).items():
            if not isinstance(member, RayClassWithInitArgs):
                raise TypeError(f"a group on Ray is made of RayClassWithInitArgs(YourWorker, ...), got {member!r}")
            if self.roles and member.python != self.python:
                raise ValueError(
                    f"colocate(): the roles share a process, but {role!r} asks for python={member.python!r} and an "
                    f"earlier one for {self.python!r}. Give all of them the same, or put them into groups of their own"
                )
            self.roles[role], self.python = member, member.python
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
        check_one_python("colocate()", self.python, self.options.get("runtime_env"))

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

    def encode(self) -> Any:
        """Encode classes, constructor arguments and the user's batch types; a reference if they are large. A
        `DispatchError` if a class or an argument cannot be pickled."""
        constructors = {role: (made.cls, made.args, made.kwargs) for role, made in self.roles.items()}
        try:
            encoded = encode((constructors, _batch_types()))
        except Exception as error:
            for made in self.roles.values():
                made.check_encodable(error)
            raise
        self.refers = any(isinstance(one, ray.ObjectRef) for one in encoded.references)
        return encoded if encoded.nbytes <= MAX_TASK_BYTES else put(encoded)


def _batch_types() -> list[Encoded]:
    """The driver's batch types, each encoded by itself: one that cannot be pickled must not keep the others."""
    types = []
    for item in user_batch_types().items():
        try:
            types.append(encode(item))
        except Exception:
            logger.warning("the batch type %s cannot be pickled, so workers will not know it", item[0].__name__)
    return types
