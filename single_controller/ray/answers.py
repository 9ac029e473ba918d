"""RayAnswers: the answers of one call, by reference, in whichever process asks for them."""

from __future__ import annotations

import functools
import pickle
from collections.abc import Sequence
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError

from single_controller.base.errors import WorkerDiedError
from single_controller.base.later import unpacked
from single_controller.base.receipt import Receipt
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

    def receipts(self) -> list[Receipt]:
        """The collecting ranks' receipts; waits for all ranks. Raises the call's error."""
        try:
            receipts = [unframed(receipt) for receipt in ray.get(self._receipts)]
        except RayError:
            rank, error = self._lost()
            raise WorkerDiedError(
                f"rank {rank} died during {self.method}(), whose future is an argument here: {one_line(error)}",
                rank=rank,
                method=self.method,
                ranks=(rank,),
            ) from error
        failures = [receipt.failure for receipt in receipts if receipt.failure is not None]
        if failures:
            first = min(failures, key=lambda failure: (failure.may_be_echo, failure.when))
            raise first.error(open_cause(first.cause))
        return receipts[: len(self._answers)]

    def values(self, which: Sequence[int], *, private: bool) -> list[Any]:
        """Some of the answers."""
        with kept_packed():
            packets: list[Packet] = ray.get([self._answers[k] for k in which])
        return [
            unpacked(self.method, self._ranks[k], functools.partial(packet.open, private=private))
            for k, packet in zip(which, packets, strict=True)
        ]

    def _lost(self) -> tuple[int, RayError]:
        """The first rank whose receipt does not come, and why."""
        for rank, receipt in zip(self._ranks, self._receipts, strict=True):
            try:
                ray.get(receipt)
            except RayError as error:
                return rank, error
        raise RuntimeError(f"{self.method}(): a receipt was lost and found again")


def unframed(receipt: bytes | Receipt) -> Receipt:
    """A receipt as it was before `single_controller.ray.actor.framed`."""
    return pickle.loads(receipt) if isinstance(receipt, bytes) else receipt


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
    detail = text.partition("Worker exit detail: ")[2] or text.partition("The actor is dead because ")[2]
    if detail:
        return detail.partition(" Some common causes")[0][:500]
    if isinstance(error, RayTaskError):
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        return lines[-1][:500] if lines else type(error).__name__
    return text[:500] or type(error).__name__
