"""RemoteMethod: ``group.m``, the driver's side of one registered method."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from dispatch.move import check_device
from dispatch.register import MethodSpec
from dispatch.rows import UNEVEN, Uneven
from single_controller.base.checks import check_seconds
from single_controller.base.future import WorkerFuture


@dataclass(frozen=True)
class CallOptions:
    """What holds for one call. None leaves what the method declared.

    Attributes:
        timeout: seconds until the call is late and the group broken.
        blocking: whether the call waits for its result.
        uneven: what to do with rows that do not divide.
        device: where the tensors of the result are wanted.
    """

    timeout: float | None = None
    blocking: bool | None = None
    uneven: Uneven | None = None
    device: str | None = None

    def __post_init__(self) -> None:
        if self.timeout is not None:
            check_seconds("timeout", self.timeout)
        if self.blocking is not None and not isinstance(self.blocking, bool):
            raise ValueError(f"blocking is True or False, got {self.blocking!r}")
        if self.uneven is not None and self.uneven not in UNEVEN:
            raise ValueError(f"uneven={self.uneven!r}: known are {', '.join(map(repr, UNEVEN))}")
        check_device("device", self.device)


class RemoteMethod:
    """A registered method of a group's workers.

    ``group.m(x)`` calls it, ``group.m.remote(x)`` returns a future, ``group.m.options(timeout=60)(x)`` sets what
    holds for one call. It has the worker method's name, signature and docstring.
    """

    def __init__(
        self,
        spec: MethodSpec,
        invoke: Callable[[MethodSpec, tuple[Any, ...], dict[str, Any], CallOptions], Any],
        options: CallOptions | None = None,
    ) -> None:
        self._spec = spec
        self._invoke = invoke
        self._options = options or CallOptions()
        self.__name__ = spec.name
        self.__qualname__ = f"{spec.owner}.{spec.name}"
        self.__module__ = spec.function.__module__
        self.__doc__ = spec.function.__doc__

    @property
    def __signature__(self) -> Any:
        return self._spec.signature

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the method on the group's workers."""
        return self._invoke(self._spec, args, kwargs, self._options)

    def remote(self, *args: Any, **kwargs: Any) -> WorkerFuture:
        """Call the method and return a future at once."""
        future: WorkerFuture = self._invoke(self._spec, args, kwargs, replace(self._options, blocking=False))
        return future

    def options(
        self,
        *,
        timeout: float | None = None,
        blocking: bool | None = None,
        uneven: Uneven | None = None,
        device: str | None = None,
    ) -> RemoteMethod:
        """The same method with options for the calls made through what is returned.

        Args:
            timeout: seconds until the call is late: `CallTimeoutError`, and the group is broken.
            blocking: whether the call waits for its result, or returns a future.
            uneven: ``"error"``, ``"pad"`` or ``"ragged"``, as in `register`.
            device: where the result's tensors are put, ``"cuda"`` for example; they come back as CPU tensors by
                default, wherever the method had them.

        Raises:
            ValueError: an option has a value that is not possible.
        """
        set_before = self._options
        options = CallOptions(
            set_before.timeout if timeout is None else timeout,
            set_before.blocking if blocking is None else blocking,
            set_before.uneven if uneven is None else uneven,
            set_before.device if device is None else device,
        )
        return RemoteMethod(self._spec, self._invoke, options)

    def __get__(self, instance: object, owner: type | None = None) -> RemoteMethod:
        # Having this makes inspect.isroutine() true, so that help(group.m) shows the method's own page.
        return self

    def __repr__(self) -> str:
        return f"<remote method {self.__qualname__}{self._spec.signature}, {self._spec.registration.mode!r}>"
