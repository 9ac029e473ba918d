"""What the host waits for while it trains: a loop over micro-batches must add nothing to it."""

from types import SimpleNamespace

import torch

BLOCKING = (
    *("host read", "copy:d2h sync", "copy:h2d sync", "copy:h2d staged", "copy:d2h non_blocking"),
    *("sync:device", "sync:stream"),
)
"""What the simulated device counts whenever the host waits for it. ``sync:event`` is not among them: FSDP waits at the
end of each backward pass for the gradients that it copies to host memory."""


def simulated():
    """The simulated device. Real ones show no faults and count nothing."""
    return getattr(torch, "_simdevice", SimpleNamespace(faults=list, counts=lambda reset: {}, opened=int))


def waits(worker=None):
    """What this process has waited for since the last time."""
    return {kind: count for kind, count in simulated().counts(True).items() if kind.startswith(BLOCKING)}


def waits_of_any_number_of_micro_batches(start, waits=waits):
    """Assert that the host waits as often for many micro-batches as for one.

    Args:
        start: called with the most tokens of a micro-batch; a context manager of functions that each have a loop.
        waits: as the function above, wherever it is counted.

    Returns:
        The waits of each function.
    """
    found = []
    for most in (10_000, 64):  # all rows at once; four to eight at a time
        with start(most) as calls:
            of_calls = []
            for call in calls:
                call()  # the first one creates the optimizer's state
                waits()
                call()
                of_calls.append(waits())
        found.append(of_calls)
    assert found[0] == found[1]
    return found[0]
