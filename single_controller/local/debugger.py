"""A debugger that steps from the driver's line into the worker's method, and not through what lies between them."""

from __future__ import annotations

import pdb
import sys

PLUMBING = sys.stdlib_module_names | {"single_controller", "dispatch", "ray", "numpy", "torch", "tensordict"}
"""Modules that ``step`` does not stop in: this library's own, and those that they call on the way."""


class WorkerDebugger(pdb.Pdb):
    """pdb, to which the way from a driver's call to the worker's method is one step. Break points count everywhere."""

    def __init__(self) -> None:
        super().__init__(skip=["single_controller.*"])

    def is_skipped_module(self, module_name: str | None) -> bool:
        """See `bdb.Bdb`."""
        if module_name is None:
            return False
        # A named tuple's constructor has a module of its own.
        return module_name.startswith("namedtuple_") or module_name.partition(".")[0] in PLUMBING


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
