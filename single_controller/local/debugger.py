"""A debugger that steps from the driver's line into the worker's method, without stopping in the library."""

from __future__ import annotations

import pdb
import sys

SKIPPED = sys.stdlib_module_names | {
    "cloudpickle",
    "dispatch",
    "numpy",
    "ray",
    "single_controller",
    "tensordict",
    "torch",
}
"""Packages in which ``step`` does not stop: this library, and those that it calls on the way to the method."""


class WorkerDebugger(pdb.Pdb):
    """A pdb that goes from the driver's call to the worker's method in one step. Breakpoints work everywhere."""

    def __init__(self) -> None:
        super().__init__(skip=["single_controller.*"])

    def is_skipped_module(self, module_name: str | None) -> bool:
        if module_name is None:
            return False
        # The generated constructor of a named tuple has a module of its own.
        return module_name.startswith("namedtuple_") or module_name.partition(".")[0] in SKIPPED


def set_trace(*, header: str | None = None) -> None:
    """Stop here, in a debugger whose ``step`` goes from a driver's line straight into the worker's method.

    For a `LocalWorkerGroup` with ``threads=False``. With PYTHONBREAKPOINT=single_controller.local.set_trace in the
    environment, ``breakpoint()`` does this.

    Args:
        header: printed before the prompt.
    """
    debugger = WorkerDebugger()
    if header is not None:
        debugger.message(header)
    debugger.set_trace(sys._getframe().f_back)
