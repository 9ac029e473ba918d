"""Weights through process groups of their own, beside the default one: gloo, or nccl (hccl, ...) if everyone has
a device for it.

One group has all train ranks and the first receiver of each class. Each class of more than one receiver has another
group. In a round, each train rank sends what it has for a class to the first receiver of it, which then broadcasts all
of it to the others. So each byte leaves its train rank once, and a rank is in two groups at most.

Train rank 0 alone announces rounds, to all receivers, so everyone goes through the same transfers in the same order,
and no two wait for each other. The groups are kept until the receivers change or an update fails.

Times: whatever waits here waits at most until the update's budget is used up. Messages tell the receivers how much of
it is left, because hosts do not share a clock. A member that fails leaves its groups. That closes its connections, and
the others fail at once.

Threads: ``weights-rendezvous`` (`_interruptible`) ends when the rendezvous succeeds or the budget is used up;
``weights-leave`` (`Channel.leave`) ends when gloo has closed the group's connections. Both are daemons, so neither
keeps a process alive.
"""

from __future__ import annotations

import datetime
import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import wait
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from single_controller.call.future import WorkerFuture
from workers.background import in_thread
from workers.device import CUMEM, backend, current_device, device, name_of, new_backend, on_accelerator, synchronize
from workers.distributed import node_address
from workers.weight_sync.buckets import FlatBuffer
from workers.weight_sync.pieces import Header, Payload
from workers.weight_sync.sync_protocol import Budget, Message, WeightSyncError
from workers.weight_sync.transports.weight_transport import Transport, Update, raise_failed, wait_all

T = TypeVar("T")

# Times between polls of an operation, between checks for failures elsewhere, and before a receiver's first check.
_POLL_SECONDS = 0.0005
_CHECK_SECONDS = 0.05
_PATIENT_SECONDS = 1.0
_CONNECT_SECONDS = 30.0
_SENDERS, _CLASS = "senders", "class"


class ProcessGroupTransport(Transport):
    """See the module's docstring."""

    def __init__(self) -> None:
        self._server: dist.TCPStore | None = None  # on rank 0
        self._members: Any = None
        self._channel: Channel | None = None

    def prepare(self, update: Update) -> tuple[str, int]:
        """Start the store in which all groups rendezvous. Rank 0 keeps it between updates."""
        if update.receivers.synchronous:
            raise WeightSyncError(
                f"weight version {update.version} was not sent: transport 'group' needs receivers that run beside the "
                "sender; create the LocalWorkerGroup with threads=True, or use transport='store'"
            )
        address = node_address()
        if self._server is None:
            timeout = _delta(update.budget.left())
            self._server = dist.TCPStore(address, 0, is_master=True, wait_for_workers=False, timeout=timeout)
        return address, self._server.port

    def begin(self, update: Update) -> None:
        """Keep the groups, unless the receivers, their classes or the store have changed."""
        ids = tuple(info.id for info in update.infos)
        # A new store means that rank 0 is new, and not a member of these groups.
        members = (update.shared, ids, tuple(one.members for one in update.classes))
        if self._members != members:
            self._leave()
            self._members = members
        # All ranks have a group, or all have to make one: one that has left it must not wait for the others in it.
        if update.agree("groups", self._channel is not None, decide=all):
            return
        self._leave()
        here = current_device()
        through = _backend(update, here)
        invitation = Invitation(
            update.key,
            update.shared,
            update.ranks,
            tuple(tuple(ids[member] for member in one.members) for one in update.classes),
            through,
            update.budget.left(),
            update.budget.seconds,
            os.environ.get(CUMEM),
        )
        futures: list[WorkerFuture] = []
        where = torch.device("cpu") if through == "gloo" else here
        size = update.ranks + len(update.classes)

        try:
            if not update.rank:
                # Do not wait yet: these calls return when the receivers have joined, for which this rank must join too.
                futures.extend(update.receivers.start("receive_weights", update.key, invitation))
            self._channel = _interruptible(
                lambda: Channel(invitation, _SENDERS, update.rank, size, where),
                lambda: _check(update, futures),
                invitation.seconds,
            )
            # Also wait for receivers in groups without this rank: all must join before the first round.
            wait_all(futures, update)
        except BaseException:
            # Receivers that wait for a missing one in the rendezvous would miss the next update, too. Rank 0 learns of
            # every failure, so it is enough that it tells them.
            if self._server is not None:
                self._server.set(invitation.given_up, "")
            raise

    def transfer(
        self, update: Update, number: int, payloads: dict[int, Payload], headers: list[dict[int, Header]]
    ) -> None:
        """As in `Transport`. Returns when the round has arrived."""
        if self._channel is None:
            raise WeightSyncError(f"train rank {update.rank} has left the process group")
        announced = AnnouncedRound(headers, update.budget.left())
        # Announce the round before this rank takes part: the exchange ends only when the receivers have taken part too.
        futures = [] if update.rank else update.receivers.start("receive_weights", update.key, announced)
        own = headers[update.rank]
        to_class = [own[index].nbytes if index in own else 0 for index in range(len(update.classes))]
        memory = self._channel.memory.take(sum(to_class))
        flats = memory.split(to_class)
        for index, payload in payloads.items():
            payload.copy_to(flats[index], own[index])

        self._channel.exchange(
            memory, [0] * update.ranks + to_class, announced.seconds, lambda: _check(update, futures)
        )
        wait_all(futures, update)

    def flush(self, update: Update) -> None:
        """Nothing to wait for: `transfer` has waited for every round."""
        if self._channel is not None:
            self._channel.release_memory()

    def failed(self, update: Update) -> None:
        self._leave()

    def close(self) -> None:
        self._leave()
        self._server = self._members = None

    def _leave(self) -> None:
        if self._channel is not None:
            self._channel.leave()
        self._channel = None


@dataclass(frozen=True)
class Invitation(Message):
    """Join the process groups of an update.

    Attributes:
        key: name of the groups in the store.
        address: host and port of the store.
        senders: number of train ranks, the first ranks of their group with the first receivers.
        classes: ids of the receivers of each class.
        backend: "gloo", or that of the devices.
        seconds: time left for the rendezvous.
        budget: time for a whole update.
        cumem: the senders' variable `workers.device.CUMEM`. Both ends must allocate memory in the same way.
    """

    key: str
    address: tuple[str, int]
    senders: int
    classes: tuple[tuple[str, ...], ...]
    backend: str
    seconds: float
    budget: float
    cumem: str | None = None

    @property
    def given_up(self) -> str:
        """A key of the store that exists if the senders no longer take part in the rendezvous."""
        return f"{self.key}/given up"

    def receive(self, receiver: Any, key: str) -> None:
        """Join, and leave the groups before."""
        receiver.check_update(key)
        # Leave all earlier groups: their senders have left them, or were replaced.
        while receiver.channels:
            receiver.channels.popitem()[1].leave()
        try:
            self._join(receiver)
        except Exception as error:
            receiver.fail_update(
                key,
                f"rollout rank {receiver.rank} could not join the process group of the train ranks: "
                f"{type(error).__name__}: {error}",
                error,
            )

    def _join(self, receiver: Any) -> None:
        if self.backend != "gloo" and self.cumem is not None:
            own = os.environ.setdefault(CUMEM, self.cumem)
            if own != self.cumem:
                raise WeightSyncError(
                    f"{CUMEM} is {own} on this rollout worker and {self.cumem} on the train ranks. Processes "
                    "that differ in it cannot connect. Set the same value with worker_env= and train_env_vars"
                )
        index = next(index for index, ids in enumerate(self.classes) if receiver.receiver_id in ids)
        ids = self.classes[index]
        rank = ids.index(receiver.receiver_id)
        cpu = torch.device("cpu")
        where = cpu if self.backend == "gloo" else device(receiver.local_rank, receiver.device_ids)
        budget = Budget(self.seconds)
        store: dist.TCPStore | None = None

        def check() -> None:
            nonlocal store
            if store is None:
                # A connection of its own, because the rendezvous occupies the other one. Most rendezvous end before
                # they need it, and connecting can be slow: see `_client`.
                if budget.left() > self.seconds - _PATIENT_SECONDS:
                    return
                store = _client(self.address, budget.left())
            if store.check([self.given_up]):
                raise WeightSyncError("the train ranks have given up, because one of them or a rollout worker failed")

        def join(name: str, rank: int, size: int) -> None:
            named = f"{name} {index}" if name == _CLASS else name
            receiver.channels[name] = _interruptible(
                lambda: Channel(self, named, rank, size, where, index), check, budget.left()
            )

        if not rank:
            join(_SENDERS, self.senders + index, self.senders + len(self.classes))
        if len(ids) > 1:
            join(_CLASS, rank, len(ids))


@dataclass(frozen=True)
class AnnouncedRound(Message):
    """Take part in the transfers of a round.

    Attributes:
        headers: of the payloads, by train rank and class.
        seconds: time left for the round.
    """

    headers: list[dict[int, Header]]
    seconds: float

    def receive(self, receiver: Any, key: str) -> None:
        """As in `Message`. If a transfer fails, the receiver leaves the groups."""
        if not receiver.channels:
            # Check the update first: this raises the cause if the update has already failed here.
            receiver.check_update(key)
            raise WeightSyncError(f"rollout rank {receiver.rank} is not in a process group of the train ranks")
        # The key is checked only after the transfers: even if this receiver has given the update up, the others would
        # wait for it.
        try:
            payloads = self._receive(receiver)
        except BaseException:
            while receiver.channels:
                receiver.channels.popitem()[1].leave()
            raise
        for payload in payloads:
            receiver.take(key, payload)

    def _receive(self, receiver: Any) -> list[Payload]:
        first, others = receiver.channels.get(_SENDERS), receiver.channels.get(_CLASS)
        channel = first or others
        of_ranks = [of_rank.get(channel.index) for of_rank in self.headers]
        sizes = [0 if header is None else header.nbytes for header in of_ranks]
        memory = channel.memory.take(sum(sizes))
        if first is not None:
            first.exchange(memory, sizes + [0] * (first.size - len(sizes)), self.seconds, receive=True)
        # All members have the same headers, so either all members skip an empty broadcast or none does.
        if others is not None and memory.numel():
            others.broadcast(memory, self.seconds)
        flats = memory.split(sizes)
        return [Payload.of(header, flat) for header, flat in zip(of_ranks, flats, strict=True) if header is not None]


class Channel:
    """A process group, and memory for what travels through it.

    Args:
        invitation: to the group.
        name: of the group.
        rank: of this process in it.
        size: of the group.
        where: device of the memory.
        index: of the class that a receiver is in.
    """

    def __init__(
        self, invitation: Invitation, name: str, rank: int, size: int, where: torch.device, index: int = 0
    ) -> None:
        self.memory = FlatBuffer(where)
        self.size, self.index = size, index
        # A store client of its own: a failed rendezvous occupies the client until its timeout, long after everyone
        # has given up.
        store = _client(invitation.address, invitation.seconds)
        prefixed = dist.PrefixStore(f"{invitation.key}/{name}", store)
        # `_run` has its own timeout. The watchdog of torch's nccl, which ends the process, must not fire before it.
        timeout = invitation.seconds if invitation.backend == "gloo" else 2 * invitation.budget
        self._group: Any = new_backend(invitation.backend, prefixed, rank, size, _delta(timeout), where)
        self._where = where

    def exchange(
        self,
        flat: torch.Tensor,
        sizes: list[int],
        seconds: float,
        check: Callable[[], None] = lambda: None,
        *,
        receive: bool = False,
    ) -> None:
        """Send parts of a buffer to the members of the group, or receive them. All members call it together.

        Args:
            flat: the parts, by member.
            sizes: of the parts in bytes, by member.
            seconds: how long it may take.
            check: called again and again; what it raises ends the wait.
            receive: whether to receive.

        Raises:
            WeightSyncError: it failed or timed out.
            Exception: what ``check`` raised.
        """
        nothing, none = flat.new_empty(0), [0] * self.size
        options = dist.AllToAllOptions()
        options.timeout = _delta(seconds)
        # One operation instead of single sends, because gloo's cannot be polled, and others run them side by side.
        arguments = (flat, nothing, sizes, none) if receive else (nothing, flat, none, sizes)
        self._run(lambda: self._group.alltoall_base(*arguments, options), seconds, check)

    def broadcast(self, flat: torch.Tensor, seconds: float) -> None:
        """Take part in a broadcast of a buffer from rank 0 of the group; a `WeightSyncError` if it fails or is late."""
        options = dist.BroadcastOptions()
        options.rootRank = options.rootTensor = 0
        options.timeout = _delta(seconds)
        self._run(lambda: self._group.broadcast([flat], options), seconds, lambda: None)

    def _run(self, begin: Callable[[], Any], seconds: float, check: Callable[[], None]) -> None:
        """Run an operation.

        A member that fails leaves the group by dropping it. That closes its connections, and the others fail at once
        instead of after their timeout.
        """
        work: Any = None
        raised: Exception
        try:
            work = begin()
            _wait_for(work, seconds, check)
            if on_accelerator(self._where):
                # nccl's work completes on failure as well; only the group knows of the error.
                synchronize([self._where])
                status = self._group.get_error().name if hasattr(self._group, "get_error") else "SUCCESS"
                if status != "SUCCESS":
                    raise WeightSyncError(f"a transfer of weights failed: the process group reports {status}")
            return
        except RuntimeError as error:  # the process group's
            raised = WeightSyncError(f"a transfer of weights failed: {str(error).partition(chr(10))[0]}")
        except Exception as error:
            raised = error
        finally:
            work = None  # it keeps the group alive, and an exception's traceback keeps this frame alive
        self.leave()
        raise raised

    def release_memory(self) -> None:
        """Free device memory until the next update. The connections stay."""
        if on_accelerator(self._where):
            self.memory.free()

    def leave(self) -> None:
        """Close the connections. gloo first finishes what is in progress, up to its timeout, so a thread waits for
        it."""
        group, self._group = self._group, None
        if group is not None and on_accelerator(self._where):
            group.abort()
        elif group is not None:
            left = [group]
            del group  # the list has the only reference; clearing it destroys the group in the thread
            threading.Thread(target=left.clear, name="weights-leave", daemon=True).start()


def _wait_for(work: Any, seconds: float, check: Callable[[], None]) -> None:
    """Wait for an operation, but stop if ``check`` raises."""
    begun = checked = time.monotonic()
    try:
        while not work.is_completed():
            now = time.monotonic()
            if now - checked > _CHECK_SECONDS:
                checked = now
                check()
            if now - begun > seconds:
                raise WeightSyncError(f"a transfer of weights took more than {seconds:g} s")
            # `work.wait()` would block until gloo's own timeout, whatever happens to the receivers.
            time.sleep(_POLL_SECONDS)
        work.wait()  # raises the operation's error
    finally:
        del work  # see `Channel._run`


def _interruptible(do: Callable[[], T], check: Callable[[], None], seconds: float) -> T:
    """Run a rendezvous, but stop waiting for it if ``check`` raises, or after ``seconds``. It cannot be interrupted, so
    it runs in a thread, which is left behind then. What it returns after that is dropped.

    Raises:
        WeightSyncError: it took too long.
        Exception: what it raised, or what ``check`` raised.
    """
    end = time.monotonic() + seconds
    joining = in_thread("weights-rendezvous", do)
    while not joining.done():
        wait([joining], 0.01)
        check()
        if time.monotonic() > end:
            raise WeightSyncError(f"not all members of the process group connected within {seconds:g} s")
    return joining.result()


def _check(update: Update, futures: Sequence[WorkerFuture]) -> None:
    """Raise the error of another rank that has given up, or of a call that has already failed, without waiting."""
    update.check_now_and_then()
    raise_failed(futures)


def _backend(update: Update, here: torch.device) -> str:
    devices = [info.device for info in update.infos]
    if not on_accelerator(here) or not all(name.startswith(f"{here.type}:") for name in devices):
        return "gloo"
    devices.append(name_of(here))
    if len(set(devices)) < len(devices):
        raise WeightSyncError(
            f"{backend()} does not support two processes on one device in a process group, but these are shared: "
            f"{', '.join(sorted(devices))}; use transport='device'"
        )
    return backend()


def _client(address: tuple[str, int], seconds: float) -> dist.TCPStore:
    """Connect to a store. torch looks up the host's name from its address here, and again in the store's only thread,
    where everyone else waits meanwhile. A name server that does not answer costs seconds, so open few connections.

    If the store's process has died, torch tries for as long as the timeout says, and nothing can interrupt it. So a
    receiver that was invited by a rank 0 that has died since would not be free for the next one.
    """
    store = dist.TCPStore(*address, is_master=False, timeout=_delta(min(seconds, _CONNECT_SECONDS)))
    store.set_timeout(_delta(seconds))
    return store


def _delta(seconds: float) -> datetime.timedelta:
    return datetime.timedelta(seconds=seconds)
