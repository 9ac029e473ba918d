"""RayTransport: one actor per rank."""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import os
import pickle
import socket
import threading
import time
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, NamedTuple, cast

import ray
from ray.exceptions import RayError

from dispatch.errors import DispatchError
from dispatch.plan import CallPlan, DeferredArgument
from dispatch.register import MethodSpec
from single_controller.call.codec import BESIDE as SEPARATE
from single_controller.call.codec import Encoded, call_message, encode, encode_arguments
from single_controller.call.errors import StartError
from single_controller.call.executor import Asked, RunningCall
from single_controller.call.result import MAX_INLINE_BYTES, Failure, RankResult
from single_controller.call.transport import MAX_STACK_SECONDS, PartlySentError, RankProcess, Sent, Token, Transport
from single_controller.ray.compat import death_of, death_seconds, node_service, ray_worker
from single_controller.ray.placement.plan import StandbyPlan
from single_controller.ray.placement.reservation import remove_pools_of
from single_controller.ray.placement.slots import Slot
from single_controller.ray.rank.actor import LOCATE, TAKE, Location, StartMessage, running_calls
from single_controller.ray.results import RESULT, LocatedResults, RayResults, ReplyTasks, one_line, put, what_is_lost
from single_controller.wire.connection import hub
from single_controller.wire.handshake import BESIDE, CALL, CANCEL, CONCURRENT, JOIN
from single_controller.wire.link import CONNECT_SECONDS, GONE_SECONDS, Answer, Arrivals, Link, Reply, ask, wait_open

logger = logging.getLogger(__name__)

LOCATE_NUMBERS = 1 << 63
"""Added to the numbers by which a driver cancels the search for deferred arguments."""

OPEN_SECONDS = 20.0
"""How long the first connection to a rank may take, whose host may be busy with starting other ranks."""

DEATH_SECONDS = 15.0
"""The most that it takes to know of a death, whatever Ray's health checks: a silent host shows on the links."""

ABORT_SECONDS = 1.0
"""Pause between two commands to abort collectives."""

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


class RayTransport(Transport):
    """Sends calls to actors.

    A rank is *suspect* when an error on another one may be the echo of its death.

    Lock: ``_asking`` protects ``_suspects``. Under it, links are asked, whose locks are leaves.

    Args:
        ranks: the actors, in order of rank.
        pool: the pool that they run in. Kept alive as long as a call of theirs is.
        links: links of an earlier transport. Those of ranks that are left are used again, and the others closed.

    Attributes:
        links: by Ray's id of the actor.
        standbys: processes without a rank in the same pool.
        fresh: ranks with new processes, on which the calls to be repeated have not been repeated yet.
    """

    def __init__(
        self, ranks: Sequence[Rank], pool: object = None, links: Mapping[bytes, Link] = MappingProxyType({})
    ) -> None:
        self.ranks = tuple(ranks)
        self.world_size = len(self.ranks)
        self.links = {_key(rank): links.get(_key(rank)) or _link(rank) for rank in self.ranks}
        for key in links.keys() - self.links.keys():
            links[key].close()
        for link in self.links.values():
            link.use()
        # The hub keeps open connections, so a group that is dropped without being closed must give them up.
        weakref.finalize(self, _release, list(self.links.values())).atexit = False
        self._hosts = [f"{rank.location.hostname}, {rank.location.address}" for rank in self.ranks]
        self._links = [self.links[_key(rank)] for rank in self.ranks]
        self._tasks = ReplyTasks([rank.actor for rank in self.ranks])
        self._pool = pool
        self._pid = os.getpid()
        self._ray = ray_worker()
        self._connection = self._ray.core_worker
        self._deaths: dict[int, str] = {}
        self._asking = threading.Lock()
        self._suspects: dict[int, _Suspect] = {}
        self._located = itertools.count()
        self.standbys: list[Standby] = []
        self.fresh: frozenset[int] = frozenset()

    @property
    def connected(self) -> bool:
        """See `Transport.connected`."""
        # Ray makes another core worker each time that this process connects, and drops it after it has disconnected.
        worker = self._ray
        return (
            worker.connected and getattr(worker, "core_worker", None) is self._connection and os.getpid() == self._pid
        )

    def host(self, rank: int) -> str:
        """The node's name and address."""
        return self._hosts[rank]

    def send(self, spec: MethodSpec, plan: CallPlan, *, future: bool) -> Sent:
        """See `Transport.send`."""
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
                message = pickle.dumps((about, sendable_whole.inside, shard.inside), protocol=5)
                messages[number, collects] = message
            prepared.append((rank, message, (*sendable_whole.beside, *shard.beside)))
            nbytes[rank] = sendable_whole.nbytes + shard.nbytes
        kind = CONCURRENT if spec.registration.concurrent else CALL
        try:
            replies = self._send(kind, prepared, spec.label)
        except BaseException:
            self.withdraw([waiting] if waiting is not None else [])
            raise
        order = [*plan.collecting, *(rank for rank, _, _ in prepared if rank not in collecting)]
        of_ranks = order, [replies[rank] for rank in order], len(plan.collecting)
        results = functools.partial(
            RayResults, spec.label, *of_ranks, [self._hosts[rank] for rank in order], self._tasks
        )
        return Sent({reply: rank for rank, reply in replies.items()}, results, nbytes, waiting)

    def check_reachable(self, ranks: Sequence[int]) -> None:
        """Wait until connections to ranks are open.

        Raises:
            StartError: one cannot be opened although its process is alive.
        """
        closed = set(map(id, wait_open([self._links[rank] for rank in ranks], OPEN_SECONDS)))
        for rank in ranks if closed else ():
            if id(self._links[rank]) in closed and rank not in self.deaths():
                address = self._links[rank].address
                raise StartError(
                    f"the driver cannot connect to rank {rank} at port {address.port} of {address.host} within "
                    f"{OPEN_SECONDS:g} s, although its process is alive. Open the ports of the workers' hosts to the "
                    "driver's host"
                )

    def send_join(self, chosen: Sequence[int], made: Encoded, rendezvous: Any, *, leave: bool) -> Sent:
        """Have ranks join a rendezvous: see `RankActor._join`.

        Args:
            chosen: the ranks.
            made: the constructors, encoded.
            rendezvous: Ray's reference to the address and port.
            leave: whether processes that have workers leave their process groups.
        """
        prepared = [
            (rank, pickle.dumps((self.ranks[rank].message, leave), protocol=5), (made, rendezvous)) for rank in chosen
        ]
        return Sent({reply: rank for rank, reply in self._send(JOIN, prepared, "__init__").items()})

    def _send(self, kind: int, prepared: Sequence[tuple[int, bytes, tuple[Any, ...]]], label: str) -> dict[int, Reply]:
        """Send a call to ranks, each with its message and what goes beside it."""
        replies: dict[int, Reply] = {}
        arrivals = Arrivals(len(prepared))
        for rank, message, beside in prepared:
            link = self._links[rank]
            reply = Reply(rank, link, arrivals)
            try:
                link.send(kind, message, reply, functools.partial(self._give, rank, beside) if beside else None)
            except Exception as error:
                if replies:
                    raise PartlySentError(list(replies), rank) from error
                if isinstance(error, RayError):
                    raise _not_sent(label, error) from error
                raise
            replies[rank] = reply
        return replies

    def _give(self, rank: int, beside: tuple[Any, ...], session: bytes, number: int) -> None:
        """Send what goes beside a call: through Ray, which counts the references in it."""
        link = self._links[rank]
        take = self.ranks[rank].actor._sc_take.options(concurrency_group=TAKE)
        taken = take.remote(session, number, *beside)

        def when_taken(done: Future[Any]) -> None:
            if done.exception() is not None:  # it is lost, for example; if the rank has died, others tell
                logger.debug(
                    "the arguments of call %d have not reached rank %d", number, rank, exc_info=done.exception()
                )
                link.note(CANCEL, number)

        taken.future().add_done_callback(when_taken)

    def collect(self, tokens: Mapping[Token, int], timeout: float) -> dict[Token, RankResult]:
        """See `Transport.collect`."""
        replies = cast("Mapping[Reply, int]", tokens)
        arrivals = next(iter(replies)).arrivals if replies else None
        if arrivals is not None and timeout > 0:
            arrivals.all.wait(timeout)
        arrived: dict[Token, RankResult] = {}
        late: dict[Reply, int] = {}
        for reply, rank in replies.items():
            if reply.kind and reply.kind != BESIDE:
                arrived[reply] = reply.result = RankResult.from_message(reply.payload)
            elif reply.kind and reply.read is not None:
                arrived[reply] = self._read(reply)
            else:
                late[reply] = rank
        if late and self.connected:  # Ray may have been shut down, and asking it would start another one
            deaths = self.deaths()
            for reply, rank in late.items():
                if rank in deaths:
                    arrived[reply] = RankResult(rank, died=deaths[rank])
                elif reply.lost is not None:
                    arrived[reply] = RankResult(rank, failure=Failure.lost_contact(rank, self.host(rank), reply.lost))
        return arrived

    def _read(self, reply: Reply) -> RankResult:
        """The result of a rank that is kept there as a whole."""
        try:
            _, refs = self._tasks.fetch(reply)
            result: RankResult = ray.get(refs or [])[0]
            return result
        except RayError as error:
            where, kind = self.host(reply.rank), type(error).__name__
            return RankResult(reply.rank, failure=Failure(reply.rank, where, "", kind, what_is_lost(error), lost=True))

    def when_arrived(self, tokens: Sequence[Token], callback: Callable[[], None]) -> None:
        """See `Transport.when_arrived`. Called back in the hub's thread."""
        if tokens:
            cast(Reply, tokens[0]).arrivals.when_all(callback)
        else:
            callback()

    def withdraw(self, tokens: Iterable[Token]) -> None:
        """See `Transport.withdraw`."""
        for token in tokens:
            if isinstance(token, Reply):
                token.link.note(CANCEL, token.number)
            else:
                rank, number = cast("tuple[int, int]", token)
                self._links[rank].note(CANCEL, number)

    def deaths(self) -> dict[int, str]:
        """See `Transport.deaths`. Needs no dashboard, and asks Ray's control store only about ranks that have died."""
        for number, rank in enumerate(self.ranks):
            if number not in self._deaths and (reason := death_of(rank.actor) or self._gone(number)) is not None:
                self._deaths[number] = reason  # for good: Ray restarts none of these actors
                self._links[number].close()  # Ray may say so a moment before the process ends
        return dict(self._deaths)

    def _gone(self, rank: int) -> str | None:
        """Why a rank is dead although Ray has not reported it yet: Ray itself takes a minute to miss a host."""
        kind = self._links[rank].gone()
        if kind is None:
            return None
        node = node_service(self.ranks[rank].location.node_id)
        responds = node is not None and _responds(node)
        if kind == "refused" and responds:
            return "its process no longer listens on its port"
        if responds or (node is None and kind != "refused"):
            return None  # its host lives, and only this process cannot reach it
        return "its host is gone: neither its process nor its Ray node responds"

    def stacks(self, ranks: Sequence[int], seconds: float = MAX_STACK_SECONDS) -> dict[int, str]:
        """See `Transport.stacks`."""
        answers = self.ask("stacks", ranks, seconds)
        return {rank: answer.text if answer.ok else f"  {answer.text}" for rank, answer in answers.items()}

    @property
    def processes(self) -> tuple[RankProcess, ...]:
        """See `Transport.processes`."""
        return tuple(rank.location.process for rank in self.ranks)

    def running(self, ranks: Sequence[int], seconds: float) -> dict[int, tuple[RunningCall, ...] | str]:
        """See `Transport.running`."""
        return {rank: running_calls(answer) for rank, answer in self.ask("status", ranks, seconds).items()}

    def ask(self, command: str, ranks: Iterable[int], seconds: float) -> dict[int, Answer]:
        """Send a command to ranks that may be busy. See `single_controller.wire.link.ask`."""
        return ask({rank: self._links[rank] for rank in ranks}, command, seconds)

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
        """See `Transport.death_seconds`."""
        return min(death_seconds(), DEATH_SECONDS)

    def probe(self, ranks: Collection[int]) -> dict[int, str | None]:
        """See `Transport.probe`. A rank that answers is alive, and so is one whose connection outlives the time after
        which a silent host would have lost it: C code that holds the GIL keeps a rank from answering."""
        deaths, known = self.deaths(), dict[int, str | None]()
        with self._asking:
            for rank in ranks:
                now, suspect = time.monotonic(), self._suspects.get(rank)
                if rank in deaths:
                    known[rank] = deaths[rank]
                elif suspect is None or now - suspect.looked > FORGET_SECONDS:
                    self._suspects[rank] = suspect = _Suspect(now)
                    if self._links[rank].connected:
                        self._links[rank].ask("alive", suspect.take)
                elif suspect.answer is not None and suspect.answer.told:
                    known[rank] = None
                elif suspect.answer is not None and self._links[rank].connected:  # it has been dialled again
                    suspect.answer = None
                    self._links[rank].ask("alive", suspect.take)
                elif now - suspect.since > (GONE_SECONDS if suspect.answer is None else self.death_seconds):
                    known[rank] = None
                if suspect is not None:
                    suspect.looked = now
                if rank in known:
                    self._suspects.pop(rank, None)  # the next loss of contact is another one
        return known

    def kill(self) -> None:
        """See `Transport.kill`."""
        self.ended = True
        for link in self._links:
            link.close()
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
        link = self._links[first]
        number = LOCATE_NUMBERS | next(self._located)
        locating = self.ranks[first].actor._sc_locate_arguments.options(
            name=f"{spec.label}.locate", num_returns=len(places), concurrency_group=LOCATE
        )
        try:
            found = locating.remote(link.session, number, encoded)
        except RayError as error:
            raise _not_sent(spec.label, error) from error
        refs = [found] if len(places) == 1 else found
        located = [dict(of) for of in values]
        for n, key, value in wanted:
            source = LocatedResults(value.source.label, refs[places[n]], key, first)
            located[n][key] = replace(value, source=source)
        shards = tuple(replace(shard, values=of) for shard, of in zip(plan.shards, located[1:], strict=True))
        return replace(plan, whole=located[0], shards=shards), (first, number)


class _Suspect:
    """A rank that may be dead.

    Attributes:
        since: when the first question about it was asked, by the monotonic clock.
        looked: when the last one was.
        answer: what it has answered; None while it has not.
    """

    def __init__(self, now: float) -> None:
        self.since = self.looked = now
        self.answer: Answer | None = None

    def take(self, answer: Answer) -> None:
        """Take its answer, in the hub's thread."""
        self.answer = answer


def _release(links: Sequence[Link]) -> None:
    for link in links:
        hub.soon(link.release)  # not here: the garbage collector may have interrupted whoever holds its lock


def _key(rank: Rank) -> bytes:
    key: bytes = rank.actor._actor_id.binary()
    return key


def _link(rank: Rank) -> Link:
    if rank.location.wire is None:
        raise ValueError(f"{rank.name} does not say where it listens")
    actor = weakref.ref(rank.actor)  # Ray ends an actor when its last handle is gone, and the hub keeps the link

    def keep(reply: Reply) -> None:
        # At once, so that what the rank keeps is the driver's to drop.
        this = actor()
        if this is not None:
            with contextlib.suppress(Exception), reply.link.lock:  # Ray was shut down, or whoever reads it is told
                if reply.kept is None:
                    task = this._sc_result.options(concurrency_group=RESULT)
                    reply.kept = task.remote(reply.link.session, reply.number)
                if reply.kind == BESIDE:
                    cast(Any, reply.kept).future().add_done_callback(lambda done: _read_beside(reply, done))

    return Link(rank.location.wire, keep)


def _read_beside(reply: Reply, done: Future[Any]) -> None:
    reply.read = (None, []) if done.exception() is not None else done.result()
    reply.arrivals.one()


def _responds(address: tuple[str, int]) -> bool:
    try:
        with socket.create_connection(address, CONNECT_SECONDS / 2):
            return True
    except OSError:
        return False


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
        return _Sendable(SEPARATE, (put(encoded),), nbytes)
    if encoded.references:  # Ray must see the references in it
        return _Sendable(SEPARATE, (encoded,), nbytes)
    return _Sendable(encoded, (), nbytes)
