"""RewardProcesses: processes that run a reward function and can be killed. They are Ray actors, so they run on all
hosts of the cluster, and end with the driver.

Everything here runs in the event loop of the `RewardRunner`, so nothing needs a lock. This process is connected to Ray.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError

from single_controller.ray.runtime import session
from workers.rollout.rewards.reward_calls import RewardCall
from workers.rollout.rollout_errors import RewardError

ANSWER_SECONDS = 10.0
"""How long an idle process may take to answer."""


class _RewardProcess:
    """The actor. Ray runs its methods on the main thread, where a reward function may use signals."""

    def __init__(self, function: bytes) -> None:
        self.function: Callable[..., Any] = ray.cloudpickle.loads(function)
        # For all calls: what an `async` function keeps, such as the client of a server, belongs to its event loop.
        self.loop = asyncio.new_event_loop()

    def ready(self) -> None:
        """Return when the process has started."""

    def call(self, args: tuple[Any, ...], given: dict[str, Any]) -> Any:
        value = self.function(*args, **given)
        return self.loop.run_until_complete(value) if inspect.isawaitable(value) else value


class RewardProcesses:
    """Processes that are started when they are needed, and kept. The caller limits how many are in use.

    Args:
        function: the reward function, pickled with Ray's cloudpickle.
    """

    def __init__(self, function: bytes) -> None:
        self._function = function
        self._idle: list[Any] = []
        self._session: str | None = None

    @asynccontextmanager
    async def reserve(self, call: RewardCall) -> AsyncIterator[Any]:
        """Inside, a process is there for one call, which is awaited there. It is killed unless the function returns or
        raises, and another one takes its place when it is needed.

        Raises:
            RewardError: the process cannot start, for example because the function's module is not available there; or
                it has died during the call.
            Exception: what the function has raised.
        """
        if self._session != session():
            self._session, self._idle = session(), []  # the actors of another connection to Ray have ended with it
        process = await self._idle_process() or await self._start()
        has_returned = False
        try:
            yield process
            has_returned = True
        except RayTaskError as error:
            has_returned = True
            cause = error.cause if isinstance(error.cause, Exception) else error
            cause.add_note(str(error))  # the traceback in the process
            raise cause from None
        except RayError as error:
            raise call.error(f"lost its process for {call.where()}: {error}") from error
        finally:
            if has_returned:
                self._idle.append(process)
            else:
                self._kill(process)  # it has died, or is busy with a value that nobody waits for

    async def _idle_process(self) -> Any:
        """An idle process that is alive, or None. One that died while idle had no call: another can take its place."""
        while self._idle:
            process = self._idle.pop()
            try:
                await asyncio.wait_for(asyncio.wrap_future(process.ready.remote().future()), ANSWER_SECONDS)
                return process
            except (RayError, TimeoutError):
                self._kill(process)
        return None

    async def _start(self) -> Any:
        # It reserves no CPU: training and rollout may have reserved them all, and then it would never start.
        remote: Any = ray.remote(num_cpus=0, scheduling_strategy="SPREAD")
        process = remote(_RewardProcess).remote(self._function)
        try:
            await process.ready.remote()
        except RayError as error:
            raise RewardError(f"a process of reward_workers cannot start: {error}") from error
        return process

    def close(self) -> None:
        """Kill the processes that are not in use."""
        while self._idle:
            self._kill(self._idle.pop())

    def _kill(self, process: Any) -> None:
        """Kill a process, unless it has ended with its connection to Ray: Ray would make another one for that."""
        if self._session == session():
            ray.kill(process)
