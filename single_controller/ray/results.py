"""RayResults: the results of one call, by reference, in any process."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Sequence
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, RayError, RayTaskError

from single_controller.base.codec import KeptResult, decoded, keep_encoded
from single_controller.base.errors import CallTimeoutError, ResultLostError, WorkerDiedError
from single_controller.base.result import RankResult
from single_controller.ray.internals import exit_detail


class RayResults:
    """References to the `RankResult`s and values of a call. Implements `single_controller.base.joining.CallResults`.

    Args:
        label: the call's method, for messages.
        ranks: all called ranks: the collecting ranks in the order of their results, then the others.
        results: references to their `RankResult`s.
        values: references to the collecting ranks' values.
    """

    def __init__(self, label: str, ranks: list[int], results: list[ray.ObjectRef], values: list[ray.ObjectRef]) -> None:
        self.label = label
        self._ranks = ranks
        self._results = results
        self._values = values

    def refs(self) -> list[ray.ObjectRef]:
        """See `CallResults.refs`."""
        return list(self._values)

    def mark_reported(self, rank: int) -> None:
        """See `CallResults.mark_reported`. Ray logs an error whose reference is dropped without ray.get."""
        position = self._ranks.index(rank)
        if position < len(self._values):
            with contextlib.suppress(Exception):
                ray.get(self._values[position])

    def wait(self, timeout: float | None = None) -> list[RankResult]:
        """See `CallResults.wait`."""
        end = None if timeout is None else time.monotonic() + timeout
        rank_of = dict(zip(self._results, self._ranks, strict=True))
        pending = list(self._results)
        while pending:
            left = None if end is None else max(0.0, end - time.monotonic())
            # One at a time: after a failure, the other ranks may wait in a collective and never end.
            ready, pending = ray.wait(pending, num_returns=1, timeout=left, fetch_local=False)
            if not ready:
                late = sorted(rank_of[ref] for ref in pending)
                raise CallTimeoutError(
                    f"{self.label}() has not ended after a wait of {timeout:g} s; ranks {late} are running",
                    method=self.label,
                    ranks=late,
                    call_goes_on=True,
                )
            self._raise_failure(rank_of[ready[0]], ready[0])
        return [RankResult.from_message(message) for message in ray.get(self._results[: len(self._values)])]

    def values(self, which: Sequence[int], *, private: bool) -> list[Any]:
        """See `CallResults.values`."""
        with keep_encoded():
            kept: list[KeptResult] = ray.get([self._values[k] for k in which])
        return [
            decoded(self.label, self._ranks[k], functools.partial(encoded.decode, private=private))
            for k, encoded in zip(which, kept, strict=True)
        ]

    def _raise_failure(self, rank: int, ref: ray.ObjectRef) -> None:
        try:
            failure = RankResult.from_message(ray.get(ref)).failure
        except ActorUnavailableError as error:  # the driver that made the call finds out whether the rank is dead
            raise ResultLostError(
                f"the result of {self.label}() on rank {rank}, whose future is an argument here, was lost, because "
                f"contact with the rank was lost: {one_line(error)}",
                rank=rank,
                method=self.label,
            ) from error
        except RayError as error:
            raise WorkerDiedError(
                f"rank {rank} died during {self.label}(), whose future is an argument here: {one_line(error)}",
                rank=rank,
                method=self.label,
                ranks=(rank,),
            ) from error
        if failure is not None:
            raise failure.error()


def one_line(error: BaseException) -> str:
    """The content of one of Ray's long messages, in one line."""
    text = " ".join(str(error).split())
    detail = exit_detail(text)
    if detail:
        return detail
    if isinstance(error, RayTaskError):
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        return lines[-1][:500] if lines else type(error).__name__
    return text[:500] or type(error).__name__
