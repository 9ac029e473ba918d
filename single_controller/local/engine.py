"""LocalEngine: ranks in the driver's own process."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

from dispatch.plan import CallPlan, Slot
from dispatch.register import MethodSpec
from single_controller.base.engine import Engine, RankLost, Sent, Token
from single_controller.base.future import WorkerFuture
from single_controller.base.host import Order
from single_controller.base.monitor import monitor
from single_controller.base.receipt import Receipt
from single_controller.base.worker import Worker
from single_controller.local.answers import LocalAnswers
from single_controller.local.parcel import Parcel
from single_controller.local.rank import WHERE, LocalRank
from single_controller.local.slip import Slip, all_filled, wait_until
from single_controller.ray.carried import pack_arguments


class LocalEngine(Engine):
    """Carries calls to ranks that share the process.

    Args:
        ranks: in order.
        threads: whether each has a thread; else `send` runs them one after the other.
    """

    def __init__(self, ranks: Sequence[LocalRank], threads: bool) -> None:
        self.ranks = tuple(ranks)
        self._threads = threads

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return len(self.ranks)

    @property
    def connected(self) -> bool:
        """See `Engine.connected`. The process is there as long as somebody asks."""
        return True

    @property
    def in_turn(self) -> bool:
        """See `Engine.in_turn`."""
        return not self._threads

    def host(self, rank: int) -> str:
        """This machine."""
        return WHERE

    def start(self, classes: Mapping[str | None, type[Worker]], made: Parcel, ranks: Sequence[int]) -> Sent:
        """Run the constructors on some ranks.

        Args:
            classes: role -> class.
            made: role -> the arguments of its constructor.
            ranks: which.
        """
        return _sent({rank: self.ranks[rank].start(classes, made) for rank in ranks})

    def send(self, spec: MethodSpec, plan: CallPlan, *, future: bool) -> Sent:
        """See `Engine.send`. Every distinct shard is packed once, and opened by each rank that reads it."""
        whole = _parcel(spec, plan.whole)
        shards = [_parcel(spec, shard.values) for shard in plan.shards]
        lost = None if self._threads else _lost_input(plan)
        slips: dict[int, Slip] = {}
        nbytes: dict[int, int] = {}
        for rank in plan.ranks:
            number, collects = plan.shard_of[rank] or 0, rank in plan.answers
            parcels = whole, shards[number]
            nbytes[rank] = sum(parcel.nbytes for parcel in parcels if parcel is not None)
            if lost is not None:
                slips[rank] = self.ranks[rank].fail(lost, spec.name, spec.role)
                continue
            order = Order.of(spec, plan, plan.shards[number], collects=collects)
            slips[rank] = self.ranks[rank].call(
                order, *parcels, kept=future and collects, concurrent=spec.registration.concurrent
            )
        return _sent(slips, LocalAnswers(spec.label, slips, plan.answers) if future else None, nbytes)

    def ask_standings(self, role: str | None) -> Sent:
        """See `Engine.ask_standings`."""
        return _sent({number: rank.standing(role) for number, rank in enumerate(self.ranks)})

    def wait(self, tokens: Sequence[Token], timeout: float) -> list[Token]:
        """See `Engine.wait`."""
        slips = [token for token in tokens if isinstance(token, Slip)]
        wait_until(lambda: all_filled(slips), timeout)
        return [slip for slip in slips if slip.outcome is not None]

    def read(self, tokens: Sequence[Token]) -> list[Receipt | RankLost]:
        """See `Engine.read`."""
        return [token.outcome for token in tokens if isinstance(token, Slip) and token.outcome is not None]

    def unpack(self, packed: Parcel | None, private: bool) -> Any:
        """See `Engine.unpack`. The parcel of a call that was waited for is nobody else's, so it is not copied again."""
        return None if packed is None else packed.open(private=False)

    def open_cause(self, packed: BaseException) -> BaseException:
        """See `Engine.open_cause`. It is the very exception that the method raised, traceback and all."""
        return packed

    def deaths(self) -> dict[int, str]:
        """See `Engine.deaths`."""
        return {number: rank.died for number, rank in enumerate(self.ranks) if rank.died is not None}

    def kill(self) -> None:
        """See `Engine.kill`. A method that is running in a thread cannot be stopped: the thread ends with it."""
        self.ended = True
        for rank in self.ranks:
            rank.end("its group was closed or restarted")


def _sent(slips: dict[int, Slip], answers: LocalAnswers | None = None, nbytes: dict[int, int] | None = None) -> Sent:
    return Sent({slip: rank for rank, slip in slips.items()}, answers, nbytes or {})


def _parcel(spec: MethodSpec, values: dict[Slot, Any]) -> Parcel | None:
    return Parcel.of(functools.partial(pack_arguments, spec, values)) if values else None


def _lost_input(plan: CallPlan) -> Exception | None:
    """The error of a future among the arguments. Who runs the ranks one after the other must know it before: a rank
    would wait for an answer that never comes, and nobody could end that wait."""
    for later in plan.later:
        if isinstance(later, WorkerFuture):
            monitor.wait(later._call)
        if later.failed is not None:
            return later.failed
    return None
