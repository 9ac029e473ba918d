"""Calls by a method's name, registered or not: the ``execute_*`` family."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from dispatch.plan import CallPlan, plan_execute, plan_rank_zero
from dispatch.register import MethodSpec
from single_controller.base.call import Call
from single_controller.base.future import WorkerFuture

PlanOf = Callable[[MethodSpec, Any, tuple[Any, ...], dict[str, Any]], CallPlan]
"""Plans a call of a method, on a group, with positional and keyword arguments."""


class CallsByName(ABC):
    """What a group can be asked to do with any method of its workers."""

    @abstractmethod
    def _execute(self, plan: PlanOf, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], *, future: bool) -> Call:
        """Send a call of the method of that name."""

    @abstractmethod
    def _wait(self, call: Call) -> Any:
        """Wait for a call that was just sent; its value."""

    def execute_all(self, method_name: str, *args: Any, **kwargs: Any) -> list[Any]:
        """`execute_all_async`."""
        return self.execute_all_async(method_name, *args, **kwargs)

    def execute_all_async(self, method_name: str, *args: Any, **kwargs: Any) -> list[Any]:
        """Call any method, registered or not, on all ranks, without waiting.

        Args:
            method_name: its name.
            args: when every argument is a list of world_size, rank i gets item i of each. When none is a
                list, every rank gets them as they are. ``Broadcast(x)`` always goes whole.
            kwargs: likewise.

        Returns:
            The engine's references, one per rank (ObjectRefs, on Ray).

        Raises:
            AttributeError: the worker has no such method.
            DispatchError: some arguments are lists and others are not, or a list has another length.
        """
        return WorkerFuture(self._execute(plan_execute, method_name, args, kwargs, future=True)).refs

    def execute_all_sync(self, method_name: str, *args: Any, **kwargs: Any) -> list[Any]:
        """`execute_all_async`, waited for: the answers by rank.

        Raises:
            SingleControllerError: a rank raised or died, besides what `execute_all_async` raises.
        """
        result: list[Any] = self._wait(self._execute(plan_execute, method_name, args, kwargs, future=False))
        return result

    def execute_rank_zero(self, method_name: str, *args: Any, **kwargs: Any) -> Any:
        """`execute_rank_zero_async`."""
        return self.execute_rank_zero_async(method_name, *args, **kwargs)

    def execute_rank_zero_async(self, method_name: str, *args: Any, **kwargs: Any) -> Any:
        """Call any method on rank 0 alone, with the arguments as they are, without waiting.

        Returns:
            The engine's reference to the answer (one ObjectRef, on Ray).

        Raises:
            AttributeError: the worker has no such method.
        """
        return WorkerFuture(self._execute(plan_rank_zero, method_name, args, kwargs, future=True)).refs[0]

    def execute_rank_zero_sync(self, method_name: str, *args: Any, **kwargs: Any) -> Any:
        """`execute_rank_zero_async`, waited for: the bare value.

        Raises:
            SingleControllerError: the rank raised or died, besides what `execute_rank_zero_async` raises.
        """
        return self._wait(self._execute(plan_rank_zero, method_name, args, kwargs, future=False))
