"""Calls by method name, registered or not: the ``execute_*`` family."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from dispatch.layout import Layout
from dispatch.plan import CallPlan, plan_execute, plan_rank_zero
from dispatch.register import MethodSpec

Planner = Callable[[MethodSpec, Layout, tuple[Any, ...], dict[str, Any]], CallPlan]


class CallsByName(ABC):
    """Calls any method of the workers by its name."""

    @abstractmethod
    def _execute(self, plan: Planner, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], *, wait: bool) -> Any:
        """Call a method; return its value, or, without ``wait``, the references to its results."""

    def execute_all(self, method_name: str, *args: Any, **kwargs: Any) -> list[Any]:
        """Same as `execute_all_async`."""
        return self.execute_all_async(method_name, *args, **kwargs)

    def execute_all_async(self, method_name: str, *args: Any, **kwargs: Any) -> list[Any]:
        """Call any method, registered or not, on all ranks without waiting.

        Args:
            method_name: name of the method.
            args: if every argument is a list of length world_size, rank i gets item i of each. If none is a list, every
                rank gets them unchanged. ``Broadcast(x)`` is always sent whole.
            kwargs: likewise.

        Returns:
            The transport's references, one per rank; ObjectRefs on Ray.

        Raises:
            AttributeError: the worker has no such method.
            DispatchError: only some arguments are lists, or a list has another length.
        """
        refs: list[Any] = self._execute(plan_execute, method_name, args, kwargs, wait=False)
        return refs

    def execute_all_sync(self, method_name: str, *args: Any, **kwargs: Any) -> list[Any]:
        """`execute_all_async`, but wait and return the results by rank.

        Raises:
            SingleControllerError: a rank raised or died, besides what `execute_all_async` raises.
        """
        results: list[Any] = self._execute(plan_execute, method_name, args, kwargs, wait=True)
        return results

    def execute_rank_zero(self, method_name: str, *args: Any, **kwargs: Any) -> Any:
        """Same as `execute_rank_zero_async`."""
        return self.execute_rank_zero_async(method_name, *args, **kwargs)

    def execute_rank_zero_async(self, method_name: str, *args: Any, **kwargs: Any) -> Any:
        """Call any method on rank 0 alone, with unchanged arguments, without waiting.

        Returns:
            The transport's reference to the result; an ObjectRef on Ray.

        Raises:
            AttributeError: the worker has no such method.
        """
        return self._execute(plan_rank_zero, method_name, args, kwargs, wait=False)[0]

    def execute_rank_zero_sync(self, method_name: str, *args: Any, **kwargs: Any) -> Any:
        """`execute_rank_zero_async`, but wait and return the value.

        Raises:
            SingleControllerError: the rank raised or died, besides what `execute_rank_zero_async` raises.
        """
        return self._execute(plan_rank_zero, method_name, args, kwargs, wait=True)
