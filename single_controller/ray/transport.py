"""RayTransport: one actor per rank, and one `Link` to each."""

from __future__ import annotations

import contextlib
import errno
import functools
import hashlib
import logging
import os
import pickle
import selectors
import socket
import threading
import time
import weakref
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, cast

import ray
from ray.exceptions import RayError

from dispatch.errors import DispatchError
from dispatch.plan import CallPlan
from dispatch.register import MethodSpec
from single_controller.call.codec import MAX_INLINE_BYTES, MAX_TASK_BYTES, SEPARATE, Encoded, encode_call
from single_controller.call.errors import ControlStoreError, StartError, ranks_text, start_thread
from single_controller.call.transport import (
    MAX_STACK_SECONDS,
    PartlySentError,
    RankProcess,
    Receiver,
    RunningCall,
    Sent,
    Transport,
)
from single_controller.ray.compat import death_of, death_seconds, node_services, ray_worker, state_is_unknown
from single_controller.ray.placement.plan import StandbyPlan
from single_controller.ray.placement.reservation import remove_pools_of
from single_controller.ray.placement.slots import Slot
from single_controller.ray.rank.actor import TAKE, Location, StartMessage, running_calls
from single_controller.ray.results import RankReply, RayResults, one_line, put
from single_controller.wire.connection import hub
from single_controller.wire.handshake import Kind
from single_controller.wire.link import CONNECT_SECONDS, GONE_SECONDS, INPUTS_OF, Answer, Link, ask, wait_open

logger = logging.getLogger(__name__)

OPEN_SECONDS = 20.0
"""How long the first connection to a rank may take, whose host may be busy with starting other ranks."""

DEATH_POLL_SECONDS = 0.5
"""How often a start that waits for connections looks for deaths: nobody else does before the constructors run."""

DEATH_SECONDS = 15.0
"""The most that it takes to know of a death, whatever Ray's health checks: a silent host shows on the links."""

SILENT_SECONDS = 2.0
"""How long all groups take a host for silent after it did not answer one of them."""

_silent: dict[tuple[str, int], float] = {}
"""Address of a node's Ray process -> when it did not answer, by the monotonic clock. It has no lock, because each use
is one operation of the dict."""

ABORT_SECONDS = 1.0
"""Pause between two commands to abort collectives."""

FORGET_SECONDS = 10.0
"""A suspect that nobody has asked about for this long, because its call was abandoned, is a new suspect next time."""


@dataclass(frozen=True)
class Rank:
    """One rank's actor."""

    actor: Any  # its handle, a ray.actor.ActorHandle
    name: str  # the actor's name
    location: Location  # where it runs
    slot: Slot | None = None  # its slot in the pool; None in a group that did not start its workers
    message: StartMessage | None = None  # what it was told at its start; likewise


@dataclass(frozen=True)
class Standby:
    """A process without a rank. It has imported the worker's class, and waits to replace a rank that dies."""

    actor: Any  # its handle, a ray.actor.ActorHandle
    name: str  # the actor's name
    slot: Slot  # its slot in the pool
    prepared: Any  # a reference to its location and its resident memory in bytes, once it is ready

    def location(self) -> Location:
        """Where it runs. Waits until it is ready; a `RayError` if it has died, or cannot import the worker's class."""
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


class RayTransport(Transport):
    """Sends calls over one `Link` per rank, and what is too large for a frame in a task of its actor.

    A rank is *suspect* when an error on another one may be the echo of its death.

    Lock: ``_asking`` protects ``_suspects``. Under it, links are asked, which acquires ``Link.lock``.

    Args:
        ranks: the actors, in order of rank.
        pool: the pool that they run in. Kept alive as long as a call of theirs is.
        links: links of an earlier transport. Those of ranks that are left are used again, and the others closed.
    """

    def __init__(
        self, ranks: Sequence[Rank], pool: object = None, links: Mapping[bytes, _HeldLink] = MappingProxyType({})
    ) -> None:
        self.ranks = tuple(ranks)
        self.world_size = len(self.ranks)
        start_thread(hub.start, "reads connections")  # here, because `Link` knows no `StartError`
        self._members = members_of(self.ranks)
        self.links = {_key(rank): links.get(_key(rank)) or _HeldLink(rank) for rank in self.ranks}  # by the actor's id
        for key in links.keys() - self.links.keys():
            links[key].link.close()
        self._hosts = [f"{rank.location.hostname}, {rank.location.address}" for rank in self.ranks]
        self._links = [self.links[_key(rank)].link for rank in self.ranks]
        self._pool = pool
        self._pid = os.getpid()
        self._ray = ray_worker()
        self._connection = self._ray.core_worker
        self._deaths: dict[int, str] = {}
        self._asking = threading.Lock()
        self._suspects: dict[int, _Suspect] = {}
        self.standbys: list[Standby] = []  # processes without a rank in the same pool
        self.recruits: list[Standby] = []  # further ones, of which `RayWorkerGroup.grow` makes ranks
        # Ranks with new processes, on which the calls to be repeated have not been repeated yet
        self.fresh: frozenset[int] = frozenset()
        for rank in self.ranks:
            if state_is_unknown(rank.actor):  # in a copy of a group: looks would ask the control store about each rank
                # Its future counts as somebody who waits for the result: Ray does not log it if the rank has died.
                rank.actor._sc_locate.options(concurrency_group=TAKE).remote().future()

    @property
    def everyone(self) -> list[Rank | Standby]:
        """All processes of the group."""
        return [*self.ranks, *self.standbys, *self.recruits]

    def started(self, ranks: Iterable[int]) -> list[int]:
        """Those of some ranks whose processes have workers."""
        return [rank for rank in ranks if self.links[_key(self.ranks[rank])].started]

    def note_started(self, ranks: Iterable[int]) -> None:
        """The constructors have returned on these ranks."""
        for rank in ranks:
            self.links[_key(self.ranks[rank])].started = True

    @property
    def connected(self) -> bool:
        # Ray makes another core worker each time that this process connects, and drops it after it has disconnected.
        worker = self._ray
        return (
            worker.connected and getattr(worker, "core_worker", None) is self._connection and os.getpid() == self._pid
        )

    def host(self, rank: int) -> str:
        return self._hosts[rank]

    def send(self, spec: MethodSpec, plan: CallPlan, call: Receiver) -> Sent:
        """Send a call: to each rank one frame, and beside it, in a Ray task, what is large or holds references."""
        # Encode and store everything before anything is sent: an argument that fails must reach no rank.
        messages, nbytes = _messages(spec, plan, self._members)
        kind = Kind.CONCURRENT if spec.registration.concurrent else Kind.CALL
        replies = self._send(kind, messages, spec.label, call)
        give = None
        if plan.deferred:
            # Not the replies: this outlives the call whose future is an argument.
            give = functools.partial(self._give_inputs, spec, {rank: reply.number for rank, reply in replies.items()})
        collecting = frozenset(plan.collecting)
        order = [*plan.collecting, *(rank for rank in replies if rank not in collecting)]
        results = functools.partial(
            RayResults,
            spec.label,
            order,
            [replies[rank] for rank in order],
            len(plan.collecting),
            [self._hosts[rank] for rank in order],
            call.outcome,
        )
        return Sent(results, nbytes, give)

    def check_reachable(self, ranks: Sequence[int]) -> None:
        """Wait until connections to ranks are open, or one of the ranks has died: the next call raises that. A
        `StartError` if a connection does not open although no rank has died."""
        links = [self._links[rank] for rank in ranks]
        end = time.monotonic() + OPEN_SECONDS
        while closed := wait_open(links, DEATH_POLL_SECONDS):
            if not self.deaths().keys().isdisjoint(ranks):
                return
            if time.monotonic() > end:
                address = closed[0].address
                rank = ranks[links.index(closed[0])]
                raise StartError(
                    f"the driver cannot connect to rank {rank} at port {address.port} of {address.host} within "
                    f"{OPEN_SECONDS:g} s, although its process is alive: {closed[0].last_error}. If a firewall is "
                    "between them, open the ports of the workers' hosts to the driver's host"
                )

    def send_join(self, chosen: Sequence[int], made: Encoded, rendezvous: Any, call: Receiver, *, leave: bool) -> Sent:
        """Have ranks join a rendezvous: see `RankActor._join`.

        Args:
            chosen: the ranks.
            made: the constructors, encoded.
            rendezvous: Ray's reference to the address and port.
            call: told when they have.
            leave: whether processes that have workers leave their process groups.
        """
        messages = [
            (rank, pickle.dumps((self.ranks[rank].message, leave), protocol=5), [made, rendezvous]) for rank in chosen
        ]
        try:
            replies = list(self._send(Kind.JOIN, messages, "__init__", call).values())
        except PartlySentError as error:
            cause = error.__cause__
            raise StartError(
                f"the start message was sent to {ranks_text(error.reached)}, but not to rank {error.failed}: "
                f"{type(cause).__name__}: {cause}"
            ) from cause
        return Sent(functools.partial(RayResults, "__init__", chosen, replies, 0, self._hosts, call.outcome), {})

    def _send(
        self, kind: int, messages: Sequence[tuple[int, bytes, list[Any]]], label: str, call: Receiver
    ) -> dict[int, RankReply]:
        """Send a call to ranks, each with its message and what goes beside it."""
        replies: dict[int, RankReply] = {}
        weak = weakref.ref(call)
        for rank, message, beside in messages:
            link = self._links[rank]
            reply = RankReply(link, rank, self._hosts[rank], self.ranks[rank].actor, weak)
            try:
                link.send(kind, message, reply, functools.partial(self._give, rank, beside) if beside else None)
            except Exception as error:
                if replies:
                    raise PartlySentError(list(replies), rank) from error
                if isinstance(error, RayError):
                    raise DispatchError(
                        f"{label}() could not be sent: {type(error).__name__}: {one_line(error)}. No rank received "
                        "the call",
                        method=label.rpartition(".")[2],
                    ) from error
                raise
            replies[rank] = reply
        return replies

    def _give(self, rank: int, beside: list[Any], session: bytes, number: int) -> None:
        """Send what goes beside a call, or its deferred arguments: through Ray, which counts the references in it."""
        link = self._links[rank]
        take = self.ranks[rank].actor._sc_take.options(concurrency_group=TAKE)
        taken = take.remote(session, number, *beside)

        def when_taken(done: Future[Any]) -> None:
            if done.exception() is not None:  # it is lost, for example; if the rank has died, others tell
                logger.debug(
                    "the arguments of call %d have not reached rank %d", number, rank, exc_info=done.exception()
                )
                link.tell(Kind.CANCEL, number % INPUTS_OF)

        taken.future().add_done_callback(when_taken)

    def _give_inputs(self, spec: MethodSpec, numbers: Mapping[int, int], plan: CallPlan | None) -> None:
        """Tell the ranks of a call what to fetch of its deferred arguments; without ``plan``, that they will not come.
        See `Sent.give`. ``numbers``: rank -> number of the call."""
        if plan is None:
            for rank, number in numbers.items():
                self._links[rank].tell(Kind.INPUTS, number)
            return
        for rank, message, beside in _messages(spec, plan)[0]:
            link, number = self._links[rank], numbers[rank]
            try:
                if beside:
                    self._give(rank, [message, *beside], link.session, number + INPUTS_OF)
                else:
                    link.tell(Kind.INPUTS, number, message)
            except Exception as error:  # Ray takes no more tasks, for example. The others may wait for this rank
                logger.warning("the deferred arguments of %s() cannot be sent to rank %d: %s", spec.label, rank, error)
                link.tell(Kind.CANCEL, number)

    def deaths(self) -> dict[int, str]:
        """Needs no dashboard, and asks Ray's control store only about ranks that have died."""
        found, gone = dict[int, str](), dict[int, str]()
        for number, rank in enumerate(self.ranks):
            if number in self._deaths:
                continue
            reason = self._links[number].dead  # another transport of the group may know of it already
            try:
                reason = reason or death_of(rank.actor)
            except ControlStoreError:  # a later look asks again; what else is due, such as timeouts, must not wait
                logger.debug("nothing is known of rank %d", number, exc_info=True)
            if reason is not None:
                found[number] = reason
            elif (kind := self._links[number].gone()) is not None:
                gone[number] = kind
        try:
            found |= self._dead_of(gone)
        except ControlStoreError:
            logger.debug("hosts that cannot be reached: the control store has not answered", exc_info=True)
        for number, reason in found.items():
            self._deaths[number] = reason  # for good: Ray restarts none of these actors
            self._links[number].close(reason)  # Ray may say so a moment before the process ends
        return dict(self._deaths)

    def _dead_of(self, gone: Mapping[int, str]) -> dict[int, str]:
        """Why ranks are dead, of those whose links say that they are gone, although Ray has not reported it yet: Ray
        itself takes a minute to miss a host."""
        if not gone:
            return {}
        services = node_services()
        nodes = {number: services.get(self.ranks[number].location.node_id) for number in gone}
        responding = _responding({node for node in nodes.values() if node is not None})
        dead = {}
        for number, node in nodes.items():
            if gone[number] == "refused" and node in responding:
                dead[number] = "its process no longer listens on its port"
            elif node not in responding and (node is not None or gone[number] == "refused"):
                dead[number] = "its host is gone: neither its process nor its Ray node responds"
            # Otherwise its host lives, and only this process cannot reach it.
        return dead

    def stacks(self, ranks: Sequence[int], seconds: float = MAX_STACK_SECONDS) -> dict[int, str]:
        answers = self.ask("stacks", ranks, seconds)
        return {rank: answer.text if answer.ok else f"  {answer.text}" for rank, answer in answers.items()}

    @property
    def processes(self) -> tuple[RankProcess, ...]:
        return tuple(rank.location.process for rank in self.ranks)

    def running(self, ranks: Sequence[int], seconds: float) -> dict[int, tuple[RunningCall, ...] | str]:
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
        try:
            start_thread(thread.start, "aborts collectives")  # in here: Ctrl-C may come when the thread runs already
            yield
        finally:
            ended.set()
            if thread.is_alive():  # otherwise it could not be started, or is about to see that it has ended
                thread.join()

    @property
    def death_seconds(self) -> float:  # type: ignore[override]
        return min(death_seconds(), DEATH_SECONDS)

    def probe(self, ranks: Collection[int]) -> dict[int, str | None]:
        """Counts a rank as alive if it answers, or if its connection outlives the time after which a silent host would
        have lost it: C code that holds the GIL keeps a rank from answering. Until then it is not in the result."""
        deaths, known = self.deaths(), dict[int, str | None]()
        with self._asking:
            for rank in ranks:
                now, suspect, link = time.monotonic(), self._suspects.get(rank), self._links[rank]
                if suspect is None or now - suspect.looked > FORGET_SECONDS:
                    suspect = self._suspects[rank] = _Suspect(now)
                suspect.looked = now
                if rank in deaths:
                    known[rank] = deaths[rank]
                elif suspect.answered or now - suspect.since > (GONE_SECONDS if suspect.asked else self.death_seconds):
                    known[rank] = None
                elif not suspect.asked and link.connected:  # again after each loss of the connection
                    suspect.asked = True
                    link.ask("alive").add_done_callback(suspect.take)
                if rank in known:
                    del self._suspects[rank]  # the next loss of contact is another one
        return known

    def kill(self) -> None:
        self.ended = True
        for link in self._links:
            link.close()
        if self.connected:
            for process in self.everyone:
                try:
                    ray.kill(process.actor, no_restart=True)
                except Exception:  # the cluster that it ran in is gone
                    logger.debug("%s could not be killed", process.name, exc_info=True)
            remove_pools_of(process.actor for process in self.everyone)


class _HeldLink:
    """The link to a rank, for the transports that share it. It is closed with the last of them: the hub keeps open
    connections, also of a group that is dropped without being closed."""

    def __init__(self, rank: Rank) -> None:
        if rank.location.wire is None:
            raise ValueError(f"{rank.name} does not say where it listens")
        self.link = Link(rank.location.wire)
        # Whether the process has workers. One that another driver has started has; others say so when they have joined.
        self.started = rank.message is None
        # In the hub's thread: the garbage collector may have interrupted whoever holds the link's lock.
        weakref.finalize(self, hub.soon, self.link.close).atexit = False


class _Suspect:
    """A rank that may be dead."""

    def __init__(self, now: float) -> None:
        self.since = now  # when the first question about it was asked, by the monotonic clock
        self.looked = now  # when the last one was
        self.asked = False  # whether it has been asked over a connection that has not been lost since
        self.answered = False

    def take(self, answer: Future[Answer]) -> None:
        """Take its answer, in the hub's thread, or that there will be none."""
        self.asked = self.answered = answer.result().told


def _key(rank: Rank) -> bytes:
    key: bytes = rank.actor._actor_id.binary()
    return key


def members_of(ranks: Iterable[Rank]) -> bytes:
    """`RankInfo.members`: a hash of the actors, in order of rank."""
    return hashlib.blake2b(b"".join(map(_key, ranks)), digest_size=8).digest()


def _messages(
    spec: MethodSpec, plan: CallPlan, members: bytes | None = None
) -> tuple[list[tuple[int, bytes, list[Any]]], dict[int, int]]:
    """For each rank of a call its message, and what goes beside that: what is too large for a frame, and stored, and
    what has references. Also rank -> bytes of its arguments."""
    encoded = encode_call(spec, plan, members)
    # What the largest inline shard leaves for the common arguments, so that no frame exceeds MAX_INLINE_BYTES.
    sizes = (shard.nbytes for _, _, _, shard in encoded if shard is not None)
    room = MAX_INLINE_BYTES - max((size for size in sizes if size <= MAX_INLINE_BYTES), default=0)
    stored: dict[int, Any] = {}
    frames: dict[int, tuple[bytes, list[Any]]] = {}
    messages, nbytes = [], {}
    for rank, message, whole, shard in encoded:
        nbytes[rank] = (whole.nbytes if whole else 0) + (shard.nbytes if shard else 0)
        if id(message) not in frames:  # ranks with the same message have the same shard
            inside: list[Any] = [tuple(message)]
            beside = []
            for part, most in ((whole, room), (shard, MAX_INLINE_BYTES)):
                if part is not None and (part.nbytes > most or part.references):
                    if id(part) not in stored:  # Ray must see the references in small arguments too
                        stored[id(part)] = put(part) if part.nbytes > MAX_TASK_BYTES else part
                    beside.append(stored[id(part)])
                    inside.append(SEPARATE)
                else:
                    inside.append(part)
            frames[id(message)] = pickle.dumps(inside, protocol=5), beside
        messages.append((rank, *frames[id(message)]))
    return messages, nbytes


def _responding(addresses: set[tuple[str, int]]) -> set[tuple[str, int]]:
    """Those of some addresses that accept a connection. All are tried at once: hosts that are lost are silent, and the
    deaths of many ranks, and of several groups, must be told in time."""
    now = time.monotonic()
    silent = {address for address, when in list(_silent.items()) if now - when < SILENT_SECONDS}
    found, end = set(), now + CONNECT_SECONDS / 2
    with selectors.DefaultSelector() as selector, contextlib.ExitStack() as stack:
        for address in addresses - silent:
            family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
            attempt = stack.enter_context(socket.socket(family, socket.SOCK_STREAM))
            attempt.setblocking(False)
            if attempt.connect_ex(address) in (0, errno.EINPROGRESS):
                selector.register(attempt, selectors.EVENT_WRITE, address)
        left = CONNECT_SECONDS / 2
        while selector.get_map() and left > 0:
            left = end - time.monotonic()  # at least one look, however long this thread was not running
            for key, _ in selector.select(max(0.0, left)):
                selector.unregister(key.fileobj)
                if not cast(socket.socket, key.fileobj).getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                    found.add(key.data)
        _silent.update((key.data, time.monotonic()) for key in selector.get_map().values())
    return found
