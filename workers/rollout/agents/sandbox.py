"""PythonSandbox: an environment in which the policy writes Python programs."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from functools import cache
from typing import Any

from workers.rollout.agents.environment import ToolEnvironment
from workers.rollout.agents.tools import ToolCall
from workers.rollout.rewards.code_process import CodeLimits, run_python
from workers.rollout.rollout_errors import RolloutError


class PythonSandbox(ToolEnvironment):
    """One tool, ``python``, which runs a program with limits of time and memory, without network, and in a folder of
    its own that is deleted afterwards; see `run_python`. `CodeLimits` bound its time, and `SessionLimits.silence` does
    not. Programs may read and write all files that the worker's user may, such as those that another program has left:
    run the workers in a container if the policy must not.

    Subclass it and override `score` to reward the answer.

    Args:
        limits: by default `CodeLimits`. Without its ``isolate``, programs have a network, and see other processes.
        result_chars: see `ToolEnvironment`.

    Raises:
        RolloutError: at the first call, if the system allows no namespaces, so that programs would have a network.
    """

    functions = ("python",)

    def __init__(self, limits: CodeLimits | None = None, *, result_chars: int = 8192) -> None:
        super().__init__(result_chars=result_chars, cut="middle")
        self.code_limits = limits or CodeLimits()
        self._running = 0

    def python(self, program: str) -> str:
        """Run a Python program, and return what it prints.

        Args:
            program: its source.
        """
        if self.code_limits.isolate:
            _check_isolation()
        done = run_python(program, limits=self.code_limits)
        said = done.output
        if done.status is None:
            said += f"\nError: not finished after {self.code_limits.seconds:g} s"
        elif done.status == -signal.SIGXCPU:
            said += f"\nError: exceeded {self.code_limits.cpu_seconds:g} s of CPU time"
        elif done.status:
            said += f"\nError: {done.errors.strip() or f'ended with status {done.status}'}"
        return said

    @property
    def busy(self) -> bool:  # type: ignore[override]
        """See `Environment`: a program runs, or waits for others to end."""
        return self._running > 0

    async def _result(self, call: ToolCall) -> tuple[str, bool]:
        own = call.name == "python"
        self._running += own
        try:
            return await super()._result(call)
        finally:
            self._running -= own

    def state_dict(self) -> Any:
        return {"row": dict(self.row)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.row = state["row"]


@cache
def _check_isolation() -> None:
    if not run_python("").isolated:
        raise RolloutError(
            "PythonSandbox: this system allows no namespaces, so programs would have a network and see other "
            "processes. Run as root, allow unprivileged user namespaces, or "
            "pass CodeLimits(isolate=False) if the workers run in a container without network"
        )
