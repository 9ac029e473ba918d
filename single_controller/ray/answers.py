"""RayAnswers: the answers of one call, by reference, in whichever process asks for them."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any

import ray
from ray.exceptions import RayError

from single_controller.base.errors import WorkerDiedError
from single_controller.base.receipt import Receipt
from single_controller.ray.transport import Packet, kept_packed


class RayAnswers:
    """References to the collecting ranks' receipts and answers.

    Args:
        method: name of the method that answers.
        receipts: the receipts of all called ranks, collecting ranks first, in the order of their answers.
        answers: the collecting ranks' answers.
    """

    def __init__(self, method: str, receipts: list[ray.ObjectRef], answers: list[ray.ObjectRef]) -> None:
        self.method = method
        self._receipts = receipts
        self._answers = answers

    def refs(self) -> list[ray.ObjectRef]:
        """The answers' references, in order."""
        return list(self._answers)

    def receipts(self) -> list[Receipt]:
        """The collecting ranks' receipts; waits for all ranks. Raises the call's error."""
        try:
            receipts = [unframed(receipt) for receipt in ray.get(self._receipts)]
        except RayError as error:
            raise WorkerDiedError(
                f"{self.method}(), whose future is an argument here, lost a rank: {one_line(error)}",
                method=self.method,
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
        return [packet.open(private=private) for packet in packets]


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
    """The first telling line of one of Ray's long messages."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    telling = [line for line in lines if line.startswith(("The actor is dead", "The actor died", "Task was killed"))]
    return (telling or lines or [type(error).__name__])[-1 if telling else 0][:300]
