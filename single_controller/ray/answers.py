"""RayAnswers: the answers of one call, by reference, in whichever process asks for them."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Sequence
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError

from single_controller.base.errors import CallTimeoutError, WorkerDiedError
from single_controller.base.later import unpacked
from single_controller.base.receipt import Receipt
from single_controller.ray.frame import open_receipt
from single_controller.ray.runtime import exit_detail
from single_controller.ray.transport import Packet, kept_packed


class RayAnswers:
    """References to the collecting ranks' receipts and answers.

    Args:
        method: name of the method that answers.
        ranks: all called ranks, collecting ranks first, in the order of their answers.
        receipts: their receipts.
        answers: the collecting ranks' answers.
    """

    def __init__(
        self, method: str, ranks: list[int], receipts: list[ray.ObjectRef], answers: list[ray.ObjectRef]
    ) -> None:
        self.method = method
        self._ranks = ranks
        self._receipts = receipts
        self._answers = answers

    def refs(self) -> list[ray.ObjectRef]:
        """The answers' references, in order."""
        return list(self._answers)

    def failed_on(self, rank: int) -> None:
        """See `single_controller.base.later.Answers`. Ray tells of an error whose reference nobody has asked for."""
        place = self._ranks.index(rank)
        if place < len(self._answers):
            with contextlib.suppress(Exception):
                ray.get(self._answers[place])

    def receipts(self, timeout: float | None = None) -> list[Receipt]:
        """See `single_controller.base.later.Answers`."""
        self._wait(timeout)
        receipts = [open_receipt(receipt) for receipt in ray.get(self._receipts)]
        return receipts[: len(self._answers)]

    def values(self, which: Sequence[int], *, private: bool) -> list[Any]:
        """Some of the answers."""
        with kept_packed():
            packets: list[Packet] = ray.get([self._answers[k] for k in which])
        return [
            unpacked(self.method, self._ranks[k], functools.partial(packet.open, private=private))
            for k, packet in zip(which, packets, strict=True)
        ]

    def _wait(self, timeout: float | None) -> None:
        """Until all ranks have ended, one has failed or died, or the time is over; the last three raise.

        One failure must not be waited for until the other ranks have ended: they may sit in a collective.
        """
        end = None if timeout is None else time.monotonic() + timeout
        rank_of = dict(zip(self._receipts, self._ranks, strict=True))
        pending = list(self._receipts)
        while pending:
            left = None if end is None else max(0.0, end - time.monotonic())
            ready, pending = ray.wait(pending, num_returns=1, timeout=left, fetch_local=False)
            if not ready:
                late = sorted(rank_of[ref] for ref in pending)
                raise CallTimeoutError(
                    f"{self.method}() has not ended after a wait of {timeout:g} s; ranks {late} are under way",
                    method=self.method,
                    ranks=late,
                    call_goes_on=True,
                )
            self._raise_failure(rank_of[ready[0]], ready[0])

    def _raise_failure(self, rank: int, ref: ray.ObjectRef) -> None:
        try:
            failure = open_receipt(ray.get(ref)).failure
        except RayError as error:
            raise WorkerDiedError(
                f"rank {rank} died during {self.method}(), whose future is an argument here: {one_line(error)}",
                rank=rank,
                method=self.method,
                ranks=(rank,),
            ) from error
        if failure is not None:
            raise failure.error(open_cause(failure.cause))


def open_cause(packed: Packet | None) -> BaseException | None:
    """The exception that a rank packed, or None if it does not unpickle here."""
    if packed is None:
        return None
    try:
        cause = packed.open()
    except Exception:
        return None
    return cause if isinstance(cause, BaseException) else None


def one_line(error: BaseException) -> str:
    """What one of Ray's long messages says, in one line."""
    text = " ".join(str(error).split())
    detail = exit_detail(text)
    if detail:
        return detail
    if isinstance(error, RayTaskError):
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        return lines[-1][:500] if lines else type(error).__name__
    return text[:500] or type(error).__name__
