"""Traces a real call: which library functions it passes through on the driver and on a worker, in order."""

from __future__ import annotations

import sys
from pathlib import Path

import dispatch
import single_controller
from single_controller import Dispatch, Worker, register

ROOT = Path(dispatch.__file__).resolve().parent.parent
PACKAGES = tuple(str(Path(package.__file__).resolve().parent) for package in (dispatch, single_controller))


class Tracer:
    """Records the library functions that this thread calls, each once, in the order of the first call."""

    def __init__(self):
        self.hops = {}

    def __call__(self, frame, event, argument):
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(PACKAGES) and not code.co_name.startswith("<"):
            self.hops.setdefault((str(Path(code.co_filename).relative_to(ROOT)), code.co_qualname))

    def __enter__(self):
        sys.setprofile(self)
        return self

    def __exit__(self, *exception):
        sys.setprofile(None)

    def take(self):
        """Return the hops so far as (file, function), and start over."""
        hops, self.hops = list(self.hops), {}
        return hops


class Traced(Worker):
    """All its calls run in one thread, so a profiler set in one call stays active in the next."""

    @register(Dispatch.ONE_TO_ALL)
    def start_tracing(self):
        self.tracer = Tracer()
        self.tracer.__enter__()

    @register(Dispatch.DP_COMPUTE_PROTO)
    def score(self, batch):
        """Later hops are those of this call's return and of the next call's arrival."""
        self.before = self.tracer.take()
        return batch.sum(dim=1)

    @register(Dispatch.ONE_TO_ALL)
    def stop_tracing(self):
        self.tracer.__exit__()
        return self.before
