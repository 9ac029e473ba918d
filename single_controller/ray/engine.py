"""RayEngine: one actor per rank."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import pickle
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, cast

import ray
from ray.exceptions import (
    ActorDiedError,
    ActorUnavailableError,
    NodeDiedError,
    OutOfMemoryError,
    RayError,
    TaskCancelledError,
    WorkerCrashedError,
)

from dispatch.errors import DispatchError
from dispatch.plan import CallPlan, DeferredArgument
from dispatch.register import MethodSpec
from single_controller.base.background import background
from single_controller.base.codec import BESIDE, Encoded, call_message, encode, encode_arguments
from single_controller.base.engine import MAX_STACK_SECONDS, Engine, PartlySentError, RankProcess, Sent, Token
from single_controller.base.executor import Asked, RunningCall
from single_controller.base.result import MAX_INLINE_BYTES, Failure, RankResult
from single_controller.ray.actor import CONCURRENT, FETCH, Location, StartMessage, running_calls
from single_controller.ray.contact import Contact
from single_controller.ray.control_server import Answer, ask
from single_controller.ray.internals import death_of, death_seconds, note_calls, ray_worker
from single_controller.ray.lane import Lane, LaneToken
from single_controller.ray.placement.plan import StandbyPlan
from single_controller.ray.placement.reservation import remove_pools_of
from single_controller.ray.placement.slots import Slot
from single_controller.ray.results import LocatedResults, RayResults, one_line, put, what_is_lost

logger = logging.getLogger(__name__)

_DEATHS = (ActorDiedError, WorkerCrashedError, NodeDiedError, OutOfMemoryError)

SUSPECT_SECONDS = 0.05
"""Pause between two looks at a call when nothing but suspects is left of it."""

WITHDRAW_SECONDS = 0.25
"""How long a task is left alone before it is cancelled. If Ray 2.60 cancels a task of an actor that it is just about to
send, the actor waits 30 s for the task's number, and then refuses all later tasks as lost."""

ABORT_SECONDS = 1.0
"""Pause between two commands to abort collectives."""

CALLS_AFTER_LARGE = 16
"""Calls of a method that go through Ray after one whose result was large. On the lane, a large result costs a second
call, which fetches it."""

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


@dataclass(frozen=True)
class Standby:
    """A process without a rank. It has imported the worker's class, and waits to replace a rank that dies.

    Attributes:
        actor: its handle, a ray.actor.ActorHandle.
        name: the actor's name.
        slot: its slot in the pool.
        prepared: a reference to its location and its resident memory in bytes, once it is ready.
    """

    actor: Any
    name: str
    slot: Slot
    prepared: Any

    def location(self) -> Location:
        """Where it runs. Waits until it is ready.

        Raises:
            RayError: it has died, or the worker's class could not be imported.
        """
        location: Location = ray.get(self.prepared)[0]
        return location

    def end(self) -> None:
        """End its process."""
        ray.kill(self.actor, no_restart=True)

    def plan(self, group: str) -> StandbyPlan | None:
        """Its place in the plan of a group; None if it is dead."""
        if death_of(self.actor) is not None:
            return None
        address, hostname, memory = "?", "?", None
        if ray.wait([self.prepared], timeout=0)[0]:
            try:
                location, memory = ray.get(self.prepared)
                address, hostname = location.address, location.hostname
            except RayError:  # the worker's class could not be imported
                return None
        return StandbyPlan(group, address, hostname, self.slot.entry, self.slot.bundle, memory)


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
        lane: the connections to them, if the group has a lane.

    Attributes:
        standbys: processes without a rank in the same pool.
        fresh: ranks with new processes, on which the calls to be repeated have not been repeated yet.
    """

    def __init__(self, ranks: Sequence[Rank], pool: object = None, lane: Lane | None = None) -> None:
        self.ranks = tuple(ranks)
        self.lane = lane
        self.peers = [] if lane is None else lane.peers([rank.actor._actor_id.binary() for rank in self.ranks])
        for rank, peer in zip(self.ranks, self.peers, strict=bool(self.peers)):
            note_calls(rank.actor, peer.sending_directly)
        self.world_size = len(self.ranks)
        self._pool = pool
        self._pid = os.getpid()
        self._ray = ray_worker()
        self._connection = self._ray.core_worker
        self._methods: dict[tuple[int, str, str, bool], Any] = {}
        self._deaths: dict[int, str] = {}
        self._probing = threading.Lock()
        self._suspects: dict[int, Contact] = {}
        self._large: dict[str, int] = {}
        """Method -> how many of its next calls go through Ray, because a result of it was large."""
        self.standbys: list[Standby] = []
        self.fresh: frozenset[int] = frozenset()

    @property
    def connected(self) -> bool:
        """See `Engine.connected`."""
        # Ray makes another core worker each time that this process connects, and drops it after it has disconnected.
        worker = self._ray
        return (
            worker.connected and getattr(worker, "core_worker", None) is self._connection and os.getpid() == self._pid
        )

    def host(self, rank: int) -> str:
        """The node's name and address."""
        location = self.ranks[rank].location
        return f"{location.hostname}, {location.address}"

    def send(self, spec: MethodSpec, plan: CallPlan, *, future: bool) -> Sent:
        """See `Engine.send`."""
        waiting = None
        if plan.deferred and spec.registration.materialize_futures and len(plan.ranks) > 1:
            plan, waiting = self._locate(spec, plan)
        # Encode everything before anything is sent: an argument that cannot be pickled must reach no rank.
        try:
            encoded = [encode_arguments(spec, shard.values) for shard in plan.shards]
            whole = encode_arguments(spec, plan.whole)
            largest = max((shard.nbytes for shard in encoded if shard is not None), default=0)
            room = MAX_INLINE_BYTES - (largest if largest <= MAX_INLINE_BYTES else 0)
            sendable_whole = _sendable(whole, room)
            shards = [_sendable(shard, MAX_INLINE_BYTES) for shard in encoded]
        except BaseException:
            self.withdraw([waiting] if waiting is not None else [])
            raise
        collecting = frozenset(plan.collecting)
        messages: dict[tuple[int, bool], bytes] = {}
        prepared: list[tuple[int, bytes, tuple[Any, ...]]] = []
        nbytes: dict[int, int] = {}
        for rank, number in enumerate(plan.shard_of):
            if number is None:
                continue
            shard, collects = shards[number], rank in collecting
            message = messages.get((number, collects))
            if message is None:
                about = call_message(spec, plan, plan.shards[number], collects=collects)
                # Ray carries bytes faster than objects.
                message = pickle.dumps((about, sendable_whole.inside, shard.inside), protocol=5)
                messages[number, collects] = message
            prepared.append((rank, message, (*sendable_whole.beside, *shard.beside)))
            nbytes[rank] = sendable_whole.nbytes + shard.nbytes
        concurrent = spec.registration.concurrent
        returns_much = self._large.get(spec.label, 0)
        if returns_much:
            self._large[spec.label] = returns_much - 1
        if (
            self.lane is not None
            and not (future or concurrent or returns_much)
            and all(
                not beside and (peer := self.peers[rank]).connection is not None and not peer.through_ray
                for rank, _, beside in prepared
            )
        ):
            calls = {rank: (self.peers[rank], message) for rank, message, _ in prepared}
            if on_lane := self.lane.send(spec.label, calls):
                return Sent({token: rank for token, rank in on_lane.items()}, None, nbytes)
        tokens: dict[Token, int] = {}
        values: dict[int, ray.ObjectRef] = {}
        for rank, message, beside in prepared:  # nothing but sending: an error here leaves the ranks divided
            kept = future and rank in collecting
            # A call without arguments needs no message, which costs Ray a tenth of it: see `RankActor._sc_call`.
            plain = not nbytes[rank] and rank in collecting and not concurrent
            try:
                method = self._method(rank, spec, kept=kept)
                after, place = 0, 0
                if self.peers and not concurrent:
                    after, place = self.peers[rank].last_unanswered(), next(self.peers[rank].numbers)
                sent = method.remote(*(() if plain else (message, *beside)), **({"after": after} if after else {}))
            except Exception as error:
                self.withdraw([waiting] if waiting is not None else [])
                if tokens:
                    raise PartlySentError(list(tokens.values()), rank) from error
                if isinstance(error, RayError):
                    raise _not_sent(spec.label, error) from error
                raise
            if kept:
                sent, values[rank] = sent
            tokens[sent] = rank
            if self.peers and not concurrent:
                self.peers[rank].sent_through_ray(sent.binary(), place)
        if not future:
            return Sent(tokens, None, nbytes, waiting)
        refs = {rank: cast(Any, ref) for ref, rank in tokens.items()}
        order = [*plan.collecting, *(rank for rank in refs if rank not in collecting)]
        results = RayResults(
            spec.label,
            order,
            [refs[rank] for rank in order],
            [values[rank] for rank in plan.collecting],
            [self.host(rank) for rank in order],
        )
        return Sent(tokens, results, nbytes, waiting)

    def collect(self, tokens: Mapping[Token, int], timeout: float, *, first: bool = False) -> dict[Token, RankResult]:
        """See `Engine.collect`."""
        on_lane = {token: rank for token, rank in tokens.items() if isinstance(token, LaneToken)}
        if not on_lane or self.lane is None:
            arrived = self._collect_refs(tokens, timeout, first=first)
            for token, result in arrived.items() if self.peers else ():
                failure = result.failure  # without a traceback it was made here, and the rank may not have the call
                ran = failure is None or bool(failure.remote_traceback)
                if failure is None or not failure.no_contact:
                    self.peers[tokens[token]].ended_through_ray(cast(Any, token).binary(), ran=ran)
            return arrived
        end = time.monotonic() + timeout
        self.lane.wait(on_lane, timeout)
        arrived = {
            token: RankResult.from_message(token.reply)
            for token in on_lane
            if token.reply  # empty: a large result
        }
        kept = {self._fetch(token, rank): token for token, rank in on_lane.items() if token.reply == b""}
        if kept:
            found = self._collect_refs({ref: on_lane[token] for ref, token in kept.items()}, end - time.monotonic())
            arrived |= {kept[ref]: result for ref, result in found.items()}
        if not self.connected:  # Ray was shut down, and asking it would start another one
            return arrived
        lost = {rank: token for token, rank in on_lane.items() if token.lost is not None and token.reply is None}
        late = {rank for token, rank in on_lane.items() if token.reply is None and token.lost is None}
        reasons: dict[int, str | None] = dict(self.deaths()) if late else {}
        reasons |= self.probe(lost) if lost else {}
        for token, rank in on_lane.items():
            if token.reply is None and (reason := reasons.get(rank)) is not None:
                arrived[token] = RankResult(rank, died=reason)
            elif rank in lost and rank in reasons:
                text = f"its connection for small calls was lost: {token.lost}"
                arrived[token] = RankResult(rank, failure=Failure.lost_contact(rank, self.host(rank), text))
        if lost and not late and not arrived:  # suspects alone, for which nothing waits
            time.sleep(min(timeout, SUSPECT_SECONDS))
        return arrived

    def _fetch(self, token: LaneToken, rank: int) -> Any:
        """Ray's reference to a large result, which the rank keeps: Ray must see who has references."""
        if token.ref is None:
            self._large[token.call.label] = CALLS_AFTER_LARGE
            key = (rank, FETCH, "", True)
            if key not in self._methods:
                self._methods[key] = self.ranks[rank].actor._sc_fetch.options(concurrency_group=FETCH)
            token.ref = self._methods[key].remote(token.number)
        return token.ref

    def _collect_refs(
        self, tokens: Mapping[Token, int], timeout: float, *, first: bool = False
    ) -> dict[Token, RankResult]:
        """`collect` for results that come through Ray."""
        refs: list[Any] = list(tokens)
        if first:  # most calls end here: one request to Ray instead of two
            try:
                messages = ray.get(refs, timeout=timeout)
                return {ref: _result_of(message) for ref, message in zip(refs, messages, strict=True)}
            except Exception:  # late, or lost: the next look tells which
                return {}
        # Without fetch_local, a large result is not moved here until it is read, so that waiting stays cheap. A mere
        # look must not wait for that move: it starts it, and a later look finds the result here.
        look = timeout <= 0
        ready = ray.wait(refs, num_returns=len(refs), timeout=max(timeout, 0.0), fetch_local=look)[0] if refs else []
        try:
            messages = ray.get(ready)
            return {ref: _result_of(message) for ref, message in zip(ready, messages, strict=True)}
        except Exception:  # one of them is lost; asking one by one tells which
            read = {ref: self._read_one(ref, tokens[ref]) for ref in ready}
        arrived: dict[Token, RankResult] = {ref: result for ref, result in read.items() if result is not None}
        if not arrived and len(ready) == len(refs):  # suspects alone, for which ray.wait does not wait
            time.sleep(max(0.0, min(timeout, SUSPECT_SECONDS)))
        return arrived

    def when_arrived(self, tokens: Sequence[Token], callback: Callable[[], None]) -> None:
        """See `Engine.when_arrived`. Ray calls back in a thread of its own."""
        arrived = itertools.count(1).__next__

        def count(_: Any) -> None:
            if arrived() == len(tokens):
                callback()

        for token in tokens:
            cast(Any, token).future().add_done_callback(count)

    def withdraw(self, tokens: Iterable[Token]) -> None:
        """See `Engine.withdraw`. Ray skips a task that has not begun, and flags one that has: see `is_cancelled`."""
        refs: list[Any] = list(tokens)

        def cancel() -> None:
            time.sleep(WITHDRAW_SECONDS)
            for ref in refs if self.connected else ():
                with contextlib.suppress(RayError):
                    ray.cancel(ref, recursive=False)

        if refs:
            background.run(cancel)

    def deaths(self) -> dict[int, str]:
        """See `Engine.deaths`. Needs no dashboard, and asks Ray's control store only about ranks that have died."""
        for number, rank in enumerate(self.ranks):
            if number not in self._deaths and (reason := death_of(rank.actor)) is not None:
                self._deaths[number] = reason  # for good: Ray restarts none of these actors
        return dict(self._deaths)

    def stacks(self, ranks: Sequence[int], seconds: float = MAX_STACK_SECONDS) -> dict[int, str]:
        """See `Engine.stacks`."""
        answers = self.ask("stacks", ranks, seconds)
        return {rank: answer.text if answer.ok else f"  {answer.text}" for rank, answer in answers.items()}

    @property
    def processes(self) -> tuple[RankProcess, ...]:
        """See `Engine.processes`."""
        return tuple(rank.location.process for rank in self.ranks)

    def running(self, ranks: Sequence[int], seconds: float) -> dict[int, tuple[RunningCall, ...] | str]:
        """See `Engine.running`."""
        return {rank: running_calls(answer) for rank, answer in self.ask("status", ranks, seconds).items()}

    def ask(self, command: str, ranks: Iterable[int], seconds: float) -> dict[int, Answer]:
        """Send a command to ranks that may be busy. See `control_server.ask`."""
        addresses = {rank: self.ranks[rank].location.control for rank in ranks}
        return ask({rank: address for rank, address in addresses.items() if address is not None}, command, seconds)

    @contextlib.contextmanager
    def leaving(self, ranks: Collection[int]) -> Iterator[None]:
        """Have ranks refuse calls until they join again, and abort their collectives as long as the context lasts: a
        method may begin another one after the first was aborted.

        Thread: a thread named "abort-collectives" repeats that. It has ended when the context ends, so that it cannot
        abort what the ranks begin afterwards.
        """
        self.ask("leave", ranks, MAX_STACK_SECONDS)
        ended = threading.Event()

        def repeat() -> None:
            while not ended.wait(ABORT_SECONDS):
                self.ask("abort", ranks, MAX_STACK_SECONDS)

        thread = threading.Thread(target=repeat, name="abort-collectives", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()

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
        if self.lane is not None:
            self.lane.close()
        if self.connected:
            processes: list[Rank | Standby] = [*self.ranks, *self.standbys]
            for process in processes:
                try:
                    ray.kill(process.actor, no_restart=True)
                except Exception:  # the cluster that it ran in is gone
                    logger.debug("%s could not be killed", process.name, exc_info=True)
            remove_pools_of(rank.actor for rank in self.ranks)

    def _locate(self, spec: MethodSpec, plan: CallPlan) -> tuple[CallPlan, Token | None]:
        """Have the first rank locate the deferred arguments for all ranks. See `Executor.locate_arguments`.

        Returns:
            The plan with references to what that rank finds, and the token to withdraw if it waits in vain.
        """
        first = plan.ranks[0]
        values = [plan.whole, *(shard.values for shard in plan.shards)]
        wanted = [
            (n, key, v) for n, of in enumerate(values) for key, v in of.items() if isinstance(v, DeferredArgument)
        ]
        if not wanted:  # the futures are inside lists, which are sent as they are
            return plan, None
        places = {n: place for place, n in enumerate(dict.fromkeys(n for n, _, _ in wanted))}
        asked: dict[tuple[Any, ...], Asked] = {}
        for n, key, value in wanted:
            same = (id(value.source), value.kind, value.count, value.uneven)
            asked.setdefault(same, (value, []))[1].append((places[n], key, value.index))
        try:
            encoded = encode((list(asked.values()), len(places)))
        except Exception:
            for _, key, value in wanted:
                encode_arguments(spec, {key: value})  # names the argument
            raise
        options: dict[str, Any] = {"name": f"{spec.label}.locate", "num_returns": len(places)}
        if spec.registration.concurrent:
            options["concurrency_group"] = CONCURRENT
        try:
            found = self.ranks[first].actor._sc_locate_arguments.options(**options).remote(encoded)
        except RayError as error:
            raise _not_sent(spec.label, error) from error
        refs = [found] if len(places) == 1 else found
        located = [dict(of) for of in values]
        for n, key, value in wanted:
            source = LocatedResults(value.source.label, refs[places[n]], key, first)
            located[n][key] = replace(value, source=source)
        shards = tuple(replace(shard, values=of) for shard, of in zip(plan.shards, located[1:], strict=True))
        return replace(plan, whole=located[0], shards=shards), refs[0]

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
            return _result_of(ray.get(cast(Any, token)))
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
        except TaskCancelledError as error:  # see `withdraw`
            text, kind = "the call that computes its deferred argument has failed", type(error).__name__
            return RankResult(rank, failure=Failure(rank, self.host(rank), "", kind, text, alike=True))
        except RayError as error:
            where, kind = self.host(rank), type(error).__name__
            return RankResult(rank, failure=Failure(rank, where, "", kind, what_is_lost(error), lost=True))


def _result_of(message: Any) -> RankResult:
    """Decode what a rank returned through Ray: its message, or the reference to it from `RankActor._sc_fetch`."""
    return RankResult.from_message(cast(Any, ray.get(message[0])) if isinstance(message, list) else message)


def _not_sent(label: str, error: RayError) -> DispatchError:
    """The error of a call that has reached no rank."""
    what = f"{type(error).__name__}: {one_line(error)}"
    return DispatchError(
        f"{label}() could not be sent: {what}. No rank received the call", method=label.rpartition(".")[2]
    )


def _sendable(encoded: Encoded | None, room: int) -> _Sendable:
    """Arguments travel inside the message if they are small enough, and otherwise are stored once in Ray's store."""
    if encoded is None:
        return _NOTHING
    nbytes = encoded.nbytes
    if nbytes > room:
        return _Sendable(BESIDE, (put(encoded),), nbytes)
    if encoded.references:  # Ray must see the references in it
        return _Sendable(BESIDE, (encoded,), nbytes)
    return _Sendable(encoded, (), nbytes)
