"""RewardProcesses: processes that run a reward function and can be killed. They are Ray actors, so they run on all
hosts of the cluster, and end with the driver.

Everything here runs in the event loop of the `RewardRunner`, so nothing needs a lock. This process is connected to Ray.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable
from typing import Any

import ray

from single_controller.ray.runtime import session


class _RewardProcess:
    """The actor. Ray runs its methods on the main thread, where a reward function may use signals."""

    def __init__(self, function: bytes) -> None:
        self.function: Callable[..., Any] = ray.cloudpickle.loads(function)

    def ready(self) -> None:
        """Return when the process has started."""

    def call(self, args: tuple[Any, ...], given: dict[str, Any]) -> Any:
        value = self.function(*args, **given)
        return asyncio.run(_value_of(value)) if inspect.isawaitable(value) else value


async def _value_of(value: Awaitable[Any]) -> Any:
    return await value


class RewardProcesses:
    """Processes that are started when they are needed, and kept. The caller limits how many are in use.

    Args:
        function: the reward function, pickled with Ray's cloudpickle.
    """

    def __init__(self, function: bytes) -> None:
        self._function = function
        self._idle: list[Any] = []
        self._session: str | None = None

    async def take(self) -> Any:
        """Reserve a process. Give it back with `give_back` when it has returned; otherwise kill it.

        Raises:
            ray.exceptions.RayError: the process cannot start; for example, the function's module is not available.
        """
        if self._session != session():
            self._session, self._idle = session(), []  # the actors of another connection to Ray have ended with it
        if self._idle:
            return self._idle.pop()
        # It reserves no CPU: training and rollout may have reserved them all, and then it would never start.
        remote: Any = ray.remote(num_cpus=0, scheduling_strategy="SPREAD")
        process = remote(_RewardProcess).remote(self._function)
        await process.ready.remote()
        return process

    def give_back(self, process: Any) -> None:
        self._idle.append(process)

    def close(self) -> None:
        """Kill the processes that are not in use."""
        while self._idle:
            ray.kill(self._idle.pop())
