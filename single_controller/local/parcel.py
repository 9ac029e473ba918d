"""Parcel: an argument or an answer on its way from one part of the process to another.

It is packed as it would be for Ray. So every reader gets a value of its own, a value that could not travel to another
process does not travel here either, and what the sender does to its own afterwards reaches nobody.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from dispatch.warm import warm
from single_controller.base.errors import LocalEngineError
from single_controller.ray.transport import Packet

_passing = threading.local()


class StaysHere:
    """What can be in a parcel, and nowhere else: it means something in this process alone."""

    stays_because = "it is in the driver's process"
    """Why it cannot leave the process, for the error."""

    def __reduce__(self) -> Any:
        packing = getattr(_passing, "packing", None)
        if packing is None:
            raise LocalEngineError(self.stays_because)
        packing.append(self)
        return _nth_passed, (len(packing) - 1,)


class Parcel:
    """A packed value, in memory of its own.

    Args:
        packet: the value, as `pack` made it; its buffers are copied.
        passed: the `StaysHere` in it.
    """

    __slots__ = ("_packet", "_passed", "nbytes")

    def __init__(self, packet: Packet, passed: list[StaysHere]) -> None:
        self._packet = Packet(packet.header, tuple(map(_copied, packet.buffers)), packet.refs)
        self._passed = passed
        self.nbytes = packet.nbytes

    @classmethod
    def of(cls, make: Callable[[], Packet | None]) -> Parcel | None:
        """A parcel of what ``make`` packs; None if that is nothing."""
        before = getattr(_passing, "packing", None)
        passed: list[StaysHere] = []
        _passing.packing = passed
        try:
            packet = make()
        finally:
            _passing.packing = before
        return None if packet is None else cls(packet, passed)

    def open(self, *, private: bool) -> Any:
        """The value.

        Args:
            private: tensors and arrays are the reader's own; else they are in the parcel's memory, which all its
                readers share.
        """
        before = getattr(_passing, "opening", None)
        _passing.opening = self._passed
        try:
            return self._packet.open(private=private)
        finally:
            _passing.opening = before


def _nth_passed(position: int) -> StaysHere:
    found: StaysHere = _passing.opening[position]
    return found


def _copied(buffer: Any) -> Any:
    import numpy

    raw = numpy.frombuffer(buffer.raw(), numpy.uint8)
    copy = warm.take(raw.nbytes)
    numpy.copyto(copy, raw)
    return copy
