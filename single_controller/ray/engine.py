"""RayEngine: one actor per rank."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import ray
from ray.exceptions import NodeDiedError, OutOfMemoryError, RayActorError, RayError, WorkerCrashedError

from dispatch.plan import CallPlan
from dispatch.register import MethodSpec
from single_controller.base.engine import Engine, RankLost, Sent, Token
from single_controller.base.host import Order
from single_controller.base.receipt import Receipt
from single_controller.ray.actor import CONCURRENT, Location, StartOrder, bare
from single_controller.ray.answers import RayAnswers, one_line, open_cause
from single_controller.ray.carried import pack_arguments
from single_controller.ray.frame import BESIDE, open_receipt, order_frame
from single_controller.ray.order import Slot as PoolSlot
from single_controller.ray.runtime import death_of, session
from single_controller.ray.transport import INLINE_BYTES, Packet

logger = logging.getLogger(__name__)

_LOST = (RayActorError, WorkerCrashedError, NodeDiedError, OutOfMemoryError)


@dataclass(frozen=True)
class Rank:
    """One rank's actor.

    Attributes:
        actor: the handle, a ray.actor.ActorHandle.
        name: the actor's name.
        location: where it is.
        slot: its room in the pool; None in a group that did not start its workers.
        order: what it was told at its start; likewise.
    """

    actor: Any
    name: str
    location: Location
    slot: PoolSlot | None = None
    order: StartOrder | None = None


class _Carried(NamedTuple):
    inside: Packet | int | None
    beside: tuple[Any, ...]
    nbytes: int


_NOTHING = _Carried(None, (), 0)


class RayEngine(Engine):
    """Carries calls to actors.

    Args:
        ranks: the actors, in order of rank.
        pool: what they live in, which must not be forgotten as long as a call of theirs is not.
    """

    def __init__(self, ranks: Sequence[Rank], pool: object = None) -> None:
        self.ranks = tuple(ranks)
        self._pool = pool
        self._session = session()

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return len(self.ranks)

    @property
    def connected(self) -> bool:
        """See `Engine.connected`."""
        return session() == self._session

    def host(self, rank: int) -> str:
        """The node's name and address."""
        location = self.ranks[rank].location
        return f"{location.hostname}, {location.address}"

    def send(self, spec: MethodSpec, plan: CallPlan, *, future: bool) -> Sent:
        """See `Engine.send`. Every distinct shard is stored once, however many ranks read it."""
        packed = [pack_arguments(spec, shard.values) for shard in plan.shards]
        inside = max((packet.nbytes for packet in packed if packet is not None and packet.inline), default=0)
        whole = _carry(pack_arguments(spec, plan.whole), INLINE_BYTES - inside)
        shards = [_carry(packet) for packet in packed]
        collecting = frozenset(plan.answers)
        frames: dict[tuple[int, bool], bytes] = {}
        receipts: dict[int, ray.ObjectRef] = {}
        answers: dict[int, ray.ObjectRef] = {}
        for rank in plan.ranks:
            number, collects = plan.shard_of[rank] or 0, rank in collecting
            keeps = future and collects
            method = None
            arguments: tuple[Any, ...] = ()
            if spec.role is None and collects and not keeps and whole is _NOTHING and shards[number] is _NOTHING:
                method = getattr(self.ranks[rank].actor, bare(spec.name), None)  # none for a private method
            if method is None:
                frame = frames.get((number, collects))
                if frame is None:
                    order = Order.of(spec, plan, plan.shards[number], collects=collects)
                    frame = order_frame(order, whole.inside, shards[number].inside)
                    frames[number, collects] = frame
                method = self.ranks[rank].actor._sc_call_kept if keeps else self.ranks[rank].actor._sc_call
                arguments = (frame, *whole.beside, *shards[number].beside)
            if spec.registration.concurrent:
                method = method.options(concurrency_group=CONCURRENT)
            sent = method.remote(*arguments)
            if keeps:
                receipts[rank], answers[rank] = sent
            else:
                receipts[rank] = sent
        tokens: dict[Token, int] = {ref: rank for rank, ref in receipts.items()}
        nbytes = {rank: whole.nbytes + shards[plan.shard_of[rank] or 0].nbytes for rank in receipts}
        if not future:
            return Sent(tokens, None, nbytes)
        in_order = [*plan.answers, *(rank for rank in receipts if rank not in collecting)]
        return Sent(
            tokens,
            RayAnswers(
                spec.label,
                in_order,
                [receipts[rank] for rank in in_order],
                [answers[rank] for rank in plan.answers],
            ),
            nbytes,
        )

    def ask_standings(self, role: str | None) -> Sent:
        """See `Engine.ask_standings`."""
        refs = [rank.actor._sc_standing.remote(role) for rank in self.ranks]
        return Sent({ref: rank for rank, ref in enumerate(refs)})

    def wait(self, tokens: Sequence[Token], timeout: float) -> list[Token]:
        """See `Engine.wait`."""
        if not tokens:
            return []
        ready, _ = ray.wait(list(tokens), num_returns=len(tokens), timeout=timeout, fetch_local=False)
        return list(ready)

    def read(self, tokens: Sequence[Token]) -> list[Receipt | RankLost]:
        """See `Engine.read`."""
        try:
            return [open_receipt(receipt) for receipt in ray.get(list(cast(Any, tokens)))]
        except Exception:  # one of them is lost: which one, asking singly tells
            return [_read_one(token) for token in tokens]

    def read_soon(self, tokens: Sequence[Token], timeout: float) -> list[Receipt | RankLost] | None:
        """See `Engine.read_soon`."""
        try:
            return [open_receipt(receipt) for receipt in ray.get(list(cast(Any, tokens)), timeout=timeout)]
        except Exception:  # late or lost: `wait` and `read` tell which
            return None

    def unpack(self, packed: Packet | None, private: bool) -> Any:
        """See `Engine.unpack`. The answer of a call that was waited for is nobody else's."""
        if packed is None:
            return None
        return packed.open_own() if private else packed.open(private=False)

    def open_cause(self, packed: Packet | None) -> BaseException | None:
        """See `Engine.open_cause`."""
        return open_cause(packed)

    def deaths(self) -> dict[int, str]:
        """See `Engine.deaths`. Asks Ray's control store; needs no dashboard."""
        return {
            number: reason for number, rank in enumerate(self.ranks) if (reason := death_of(rank.actor)) is not None
        }

    def kill(self) -> None:
        """See `Engine.kill`."""
        self.ended = True
        if self.connected:
            for rank in self.ranks:
                try:
                    ray.kill(rank.actor, no_restart=True)
                except Exception:  # the Ray that it lived in is gone
                    logger.debug("%s could not be killed", rank.name, exc_info=True)


def _read_one(token: Token) -> Receipt | RankLost:
    try:
        return open_receipt(ray.get(cast(Any, token)))
    except _LOST as error:
        return RankLost(one_line(error))
    except RayError as error:  # the call itself could not be delivered: its arguments were lost, say
        return RankLost(f"its receipt was lost: {one_line(error)}", died=False, kind=type(error).__name__)


def _carry(packet: Packet | None, room: int = INLINE_BYTES) -> _Carried:
    """How a packet travels: inside the call's frame if it is small and there is room, else once in Ray's store, beside
    the frame."""
    if packet is None:
        return _NOTHING
    if packet.nbytes > room:
        return _Carried(BESIDE, (ray.put(packet),), packet.nbytes)
    if packet.refs:
        return _Carried(BESIDE, (packet,), packet.nbytes)
    return _Carried(packet, (), packet.nbytes)
