"""RayEngine: one actor per rank."""

from __future__ import annotations

import logging
import pickle
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import ray
from ray.exceptions import (
    ActorDiedError,
    ActorUnavailableError,
    NodeDiedError,
    OutOfMemoryError,
    RayError,
    WorkerCrashedError,
)

from dispatch.plan import CallPlan
from dispatch.register import MethodSpec
from single_controller.base.codec import BESIDE, Encoded, call_message, encode_arguments
from single_controller.base.engine import Engine, Sent, Token
from single_controller.base.result import MAX_INLINE_BYTES, Failure, RankResult
from single_controller.ray.actor import CONCURRENT, Location, StartMessage
from single_controller.ray.contact import Contact
from single_controller.ray.internals import death_of, death_seconds
from single_controller.ray.results import RayResults, one_line
from single_controller.ray.runtime import session
from single_controller.ray.slots import Slot

logger = logging.getLogger(__name__)

_DEATHS = (ActorDiedError, WorkerCrashedError, NodeDiedError, OutOfMemoryError)

SUSPECT_SECONDS = 0.05
"""Pause between two looks at a call when nothing but suspects is left of it."""

FORGET_SECONDS = 10.0
"""A suspect that nobody has asked about for this long, because its call was abandoned, is a new suspect next time."""


@dataclass(frozen=True)
class Rank:
    """One rank's actor.

    Attributes:
        actor: its handle, a ray.actor.ActorHandle.
        name: the actor's name.
        location: where it runs.
        slot: its slot in the pool; None in a group that did not start its workers.
        message: what it was told at its start; likewise.
    """

    actor: Any
    name: str
    location: Location
    slot: Slot | None = None
    message: StartMessage | None = None


class _Sendable(NamedTuple):
    """Encoded arguments as they are sent: inside the call message, or beside it as an argument of the Ray call."""

    inside: Encoded | int | None
    beside: tuple[Any, ...]
    nbytes: int


_NOTHING = _Sendable(None, (), 0)


class RayEngine(Engine):
    """Sends calls to actors.

    A rank is *suspect* when Ray has lost contact with it, which may be a death or may pass. It has no result then until
    `probe` knows.

    Lock: ``_probing`` protects ``_suspects``. It is a leaf, and held while Ray's control store is asked.

    Args:
        ranks: the actors, in order of rank.
        pool: the pool that they run in. Kept alive as long as a call of theirs is.
    """

    def __init__(self, ranks: Sequence[Rank], pool: object = None) -> None:
        self.ranks = tuple(ranks)
        self.world_size = len(self.ranks)
        self._pool = pool
        self._session = session()
        self._methods: dict[tuple[int, str, str, bool], Any] = {}
        self._probing = threading.Lock()
        self._suspects: dict[int, Contact] = {}

    @property
    def connected(self) -> bool:
        """See `Engine.connected`."""
        return session() == self._session

    def host(self, rank: int) -> str:
        """The node's name and address."""
        location = self.ranks[rank].location
        return f"{location.hostname}, {location.address}"

    def send(self, spec: MethodSpec, plan: CallPlan, *, future: bool) -> Sent:
        """See `Engine.send`."""
        # Encode everything before anything is sent: an argument that cannot be pickled must reach no rank.
        encoded = [encode_arguments(spec, shard.values) for shard in plan.shards]
        whole = encode_arguments(spec, plan.whole)
        largest = max((shard.nbytes for shard in encoded if shard is not None), default=0)
        room = MAX_INLINE_BYTES - (largest if largest <= MAX_INLINE_BYTES else 0)
        sendable_whole = _sendable(whole, room)
        shards = [_sendable(shard, MAX_INLINE_BYTES) for shard in encoded]
        collecting = frozenset(plan.collecting)
        messages: dict[tuple[int, bool], bytes] = {}
        tokens: dict[Token, int] = {}
        values: dict[int, ray.ObjectRef] = {}
        nbytes: dict[int, int] = {}
        for rank, number in enumerate(plan.shard_of):
            if number is None:
                continue
            shard, collects = shards[number], rank in collecting
            arguments: tuple[Any, ...] = ()
            if not collects or sendable_whole is not _NOTHING or shard is not _NOTHING:
                message = messages.get((number, collects))
                if message is None:
                    about = call_message(spec, plan, plan.shards[number], collects=collects)
                    # Ray carries bytes faster than objects.
                    message = pickle.dumps((about, sendable_whole.inside, shard.inside), protocol=5)
                    messages[number, collects] = message
                arguments = (message, *sendable_whole.beside, *shard.beside)
            sent = self._method(rank, spec, kept=future and collects).remote(*arguments)
            if future and collects:
                sent, values[rank] = sent
            tokens[sent] = rank
            nbytes[rank] = sendable_whole.nbytes + shard.nbytes
        if not future:
            return Sent(tokens, None, nbytes)
        refs = {rank: cast(Any, ref) for ref, rank in tokens.items()}
        order = [*plan.collecting, *(rank for rank in refs if rank not in collecting)]
        results = RayResults(
            spec.label, order, [refs[rank] for rank in order], [values[rank] for rank in plan.collecting]
        )
        return Sent(tokens, results, nbytes)

    def collect(self, tokens: Mapping[Token, int], timeout: float, *, first: bool = False) -> dict[Token, RankResult]:
        """See `Engine.collect`."""
        refs: list[Any] = list(tokens)
        if first:  # most calls end here: one request to Ray instead of two
            try:
                messages = ray.get(refs, timeout=timeout)
                return {ref: RankResult.from_message(message) for ref, message in zip(refs, messages, strict=True)}
            except Exception:  # late, or lost: the next look tells which
                return {}
        # Without fetch_local, a large result is not moved here until it is read, so that waiting stays cheap.
        ready = ray.wait(refs, num_returns=len(refs), timeout=timeout, fetch_local=False)[0] if refs else []
        try:
            messages = ray.get(ready)
            return {ref: RankResult.from_message(message) for ref, message in zip(ready, messages, strict=True)}
        except Exception:  # one of them is lost; asking one by one tells which
            read = {ref: self._read_one(ref, tokens[ref]) for ref in ready}
        arrived: dict[Token, RankResult] = {ref: result for ref, result in read.items() if result is not None}
        if not arrived and len(ready) == len(refs):  # suspects alone, for which ray.wait does not wait
            time.sleep(min(timeout, SUSPECT_SECONDS))
        return arrived

    def deaths(self) -> dict[int, str]:
        """See `Engine.deaths`. Asks Ray's control store; needs no dashboard."""
        return {
            number: reason for number, rank in enumerate(self.ranks) if (reason := death_of(rank.actor)) is not None
        }

    @property
    def death_seconds(self) -> float:  # type: ignore[override]
        """See `Engine.death_seconds`."""
        return death_seconds()

    def probe(self, ranks: Collection[int]) -> dict[int, str | None]:
        """See `Engine.probe`."""
        known: dict[int, str | None] = {}
        with self._probing:
            for rank in ranks:
                suspect = self._suspects.get(rank)
                if suspect is None or time.monotonic() - suspect.asked > FORGET_SECONDS:
                    suspect = self._suspects[rank] = Contact(self.ranks[rank].actor, death_seconds())
                suspect.ask()
                if suspect.alive is not None:
                    known[rank] = None if suspect.alive else suspect.reason
                    del self._suspects[rank]  # the next loss of contact is another one
        return known

    def kill(self) -> None:
        """See `Engine.kill`."""
        self.ended = True
        if self.connected:
            for rank in self.ranks:
                try:
                    ray.kill(rank.actor, no_restart=True)
                except Exception:  # the cluster that it ran in is gone
                    logger.debug("%s could not be killed", rank.name, exc_info=True)

    def _method(self, rank: int, spec: MethodSpec, *, kept: bool) -> Any:
        """The actor method that runs a call, named after the worker's method.

        Making such an object costs more than calling it, so they are kept. The name is what Ray's dashboard shows, and
        all that a call without arguments needs: see `RankActor._sc_call`.
        """
        key = (rank, spec.label, "kept" if kept else "", spec.registration.concurrent)
        method = self._methods.get(key)
        if method is None:
            actor = self.ranks[rank].actor
            options: dict[str, Any] = {"name": spec.label}
            if spec.registration.concurrent:
                options["concurrency_group"] = CONCURRENT
            method = (actor._sc_call_kept if kept else actor._sc_call).options(**options)
            self._methods[key] = method
        return method

    def _read_one(self, token: Token, rank: int) -> RankResult | None:
        """The result of one rank; None while it is unknown whether the rank is dead."""
        try:
            return RankResult.from_message(ray.get(cast(Any, token)))
        except _DEATHS as error:
            return RankResult(rank, died=one_line(error))
        except ActorUnavailableError as error:  # the rank is suspect; its result is lost in any case
            known = self.probe([rank])
            if rank not in known:
                return None
            died = known[rank]
            if died is not None:
                return RankResult(rank, died=died)
            return RankResult(rank, failure=Failure.lost_contact(rank, self.host(rank), one_line(error)))
        except RayError as error:  # the call itself was not delivered: its arguments were lost, for example
            text, kind = f"its result was lost: {one_line(error)}", type(error).__name__
            return RankResult(rank, failure=Failure(rank, self.host(rank), "", kind, text))


def _sendable(encoded: Encoded | None, room: int) -> _Sendable:
    """Arguments travel inside the message if they are small enough, and otherwise are stored once in Ray's store."""
    if encoded is None:
        return _NOTHING
    nbytes = encoded.nbytes
    if nbytes > room:
        return _Sendable(BESIDE, (ray.put(encoded),), nbytes)
    if encoded.references:  # Ray must see the references in it
        return _Sendable(BESIDE, (encoded,), nbytes)
    return _Sendable(encoded, (), nbytes)
