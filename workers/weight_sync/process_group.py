"""Weights through a process group of their own, beside the default one: gloo, or nccl if everyone has a CUDA device.

Every sender has a group with all receivers, created when it first has something to send. A bucket is announced by a
call to the receivers and then broadcast.

Turns: two senders must not broadcast at once. One receiver might handle sender A's call first and another sender B's,
and both would wait forever. So a sender takes a ticket for each bucket, in the TCPStore in which all groups rendezvous,
and waits until the holder of the ticket before has finished (`ProcessGroupTransport._turn`). This is the only lock of
the module. A sender holds nothing else while it waits for its turn, and it passes the turn on if it fails. A sender
that gives up waiting gives its ticket back, and the turn goes to the sender behind it.

Times: whatever waits here waits at most until the update's budget is used up. Messages tell the receivers how much of
it is left, because hosts do not share a clock.

Threads: ``weights-rendezvous`` (`_interruptible`) ends when the rendezvous succeeds or the budget is used up;
``weights-leave`` (`Channel.leave`) ends when gloo has closed the group's connections. Both are daemons, so neither
keeps a process alive.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import ray.util
import torch
import torch.distributed as dist

from single_controller.base.future import WorkerFuture
from workers.device import device
from workers.weight_sync.device import name_of
from workers.weight_sync.protocol import (
    Budget,
    FlatBuffer,
    Message,
    Pair,
    TensorSpec,
    Transport,
    Update,
    WeightSyncError,
    copy_into,
    tensor_specs,
    views,
    wait_all,
)

T = TypeVar("T")

CUMEM = "NCCL_CUMEM_ENABLE"

_POLL_SECONDS = 0.0005
_CHECK_SECONDS = 0.05
_PATIENT_SECONDS = 1.0


class ProcessGroupTransport(Transport):
    """See the module's docstring.

    Attributes:
        groups_made: process groups that this rank has created so far.
    """

    def __init__(self) -> None:
        self._server: dist.TCPStore | None = None  # on rank 0
        self._store: dist.TCPStore | None = None
        self._address: tuple[str, int] | None = None
        self._receivers: tuple[str, ...] = ()
        self._channel: Channel | None = None
        self.groups_made = 0

    def prepare(self, update: Update) -> tuple[str, int]:
        """Start the store in which all groups rendezvous. Rank 0 keeps it between updates."""
        address = ray.util.get_node_ip_address() if ray.is_initialized() else "127.0.0.1"
        if self._server is None:
            timeout = _delta(update.budget.left())
            self._server = dist.TCPStore(address, 0, is_master=True, wait_for_workers=False, timeout=timeout)
        return address, self._server.port

    def begin(self, update: Update) -> None:
        """Keep the group, unless the receivers or the store have changed."""
        receivers = tuple(info.id for info in update.infos)
        if (self._address, self._receivers) != (update.shared, receivers):
            self._leave()
        if self._address != update.shared:
            self._address, self._store = update.shared, None
        self._receivers = receivers

    def send(self, update: Update, bucket: Sequence[Pair]) -> None:
        """See `Transport.send`."""
        specs, nbytes = tensor_specs(bucket)
        with self._turn(update):
            channel = self._channel or self._connect(update, bucket[0][1].device)
            flat = channel.memory.take(nbytes)
            copy_into(flat, specs, bucket)
            # Announced first: the broadcast below ends only when every receiver takes part in it.
            announced = AnnouncedBucket(update.rank, nbytes, specs, update.budget.left())
            futures = update.receivers.start("receive_weights", update.key, announced)
            if nbytes:
                channel.broadcast(flat, announced.seconds, futures)
            wait_all(futures)  # inside the turn: a receiver must be done with this call before the next sender's

    def flush(self, update: Update) -> None:
        """See `Transport.flush`: `send` has waited for every bucket."""
        if self._channel is not None:
            self._channel.release_memory()

    def failed(self, update: Update) -> None:
        """See `Transport.failed`."""
        self._leave()

    def close(self) -> None:
        """See `Transport.close`."""
        self._leave()
        self._server = self._store = self._address = None

    def _leave(self) -> None:
        if self._channel is not None:
            self._channel.leave()
        self._channel = None

    def _connect(self, update: Update, here: torch.device) -> Channel:
        """Create this sender's group, together with all receivers."""
        self.groups_made += 1
        backend = _backend(update, here)
        key = f"{update.key}/{update.rank}"
        cumem = os.environ.get(CUMEM)
        budget = update.budget
        invitation = Invitation(
            update.rank, key, update.shared, self._receivers, backend, budget.left(), budget.seconds, cumem
        )
        futures = update.receivers.start("receive_weights", update.key, invitation)
        where = here if backend == "nccl" else torch.device("cpu")
        try:
            # Kept at once: if a receiver has failed all the same, `failed` leaves the group.
            channel = self._channel = _interruptible(
                lambda: Channel(invitation, 0, where), lambda: _raise_failed(futures), invitation.seconds
            )
            wait_all(futures)
        except BaseException:
            # Receivers that wait for a missing one in the rendezvous would miss the next update, too.
            with contextlib.suppress(dist.DistError):
                (self._store or _client(update.shared, 1.0)).set(invitation.given_up, "")
            raise
        return channel

    @contextlib.contextmanager
    def _turn(self, update: Update) -> Iterator[None]:
        """Hold the turn: inside, no other sender of this update is sending a bucket."""
        if update.ranks == 1:
            yield
            return
        if self._store is None:
            self._store = _client(update.shared, update.budget.left())
        turns = _Turns(self._store, update.key)
        left = update.budget.left()
        mine = turns.ticket()
        try:
            turns.wait(mine, left)
        except BaseException as error:
            turns.give_back(mine)
            if not isinstance(error, dist.DistStoreError):
                raise
            raise WeightSyncError(
                f"train rank {update.rank} waited for its turn to send weights, because another train rank was sending"
            ) from error
        try:
            yield
        finally:
            turns.give(mine + 1)


class _Turns:
    """Tickets of an update, in a store that all senders share. The holder of ticket 0 has the first turn.

    Whoever gives ticket t its turn and whoever gives ticket t back may meet: the first of them to add to ``claims/t``
    decides, because the store adds for one client after the other.

    Args:
        store: the store.
        key: of the update.
    """

    def __init__(self, store: dist.Store, key: str) -> None:
        self._store = store
        self._key = key

    def ticket(self) -> int:
        """Take a ticket. Its holder must `wait` and then `give` the next one its turn, or `give_back`."""
        return self._store.add(f"{self._key}/tickets", 1) - 1

    def wait(self, ticket: int, seconds: float) -> None:
        """Wait for a ticket's turn.

        Raises:
            DistStoreError: it did not come in time.
        """
        if ticket > 0:
            self._store.wait([self._turn(ticket)], _delta(seconds))
            self._delete(ticket)

    def give(self, ticket: int) -> None:
        """Give a ticket its turn, taken or not; if it was given back, the one behind it."""
        while self._store.add(self._claims(ticket), 1) > 1:
            self._delete(ticket)
            ticket += 1
        self._store.set(self._turn(ticket), "")

    def give_back(self, ticket: int) -> None:
        """Stop waiting. If the turn came after all, the next one gets it."""
        if ticket == 0 or self._store.add(self._claims(ticket), 1) > 1:
            self._delete(ticket)
            self.give(ticket + 1)

    def _delete(self, ticket: int) -> None:
        for key in (self._turn(ticket), self._claims(ticket)):
            self._store.delete_key(key)

    def _turn(self, ticket: int) -> str:
        return f"{self._key}/turn/{ticket}"

    def _claims(self, ticket: int) -> str:
        return f"{self._key}/claims/{ticket}"


@dataclass(frozen=True)
class Invitation(Message):
    """Join a sender's process group.

    Attributes:
        sender: rank of the sender among the train ranks; it has rank 0 in the group.
        key: name of the group in the store.
        address: host and port of the store.
        receivers: ids of the receivers in order; the first one has rank 1 in the group.
        backend: "gloo" or "nccl".
        seconds: time left for the rendezvous.
        budget: time for a whole update.
        cumem: the sender's NCCL_CUMEM_ENABLE. Both ends must allocate memory in the same way.
    """

    sender: int
    key: str
    address: tuple[str, int]
    receivers: tuple[str, ...]
    backend: str
    seconds: float
    budget: float
    cumem: str | None = None

    @property
    def given_up(self) -> str:
        """A key of the store that exists if the sender no longer takes part in the rendezvous."""
        return f"{self.key}/given up"

    def receive(self, receiver: Any, key: str) -> None:
        """Join the group, and leave the previous one of the same sender."""
        receiver.check_update(key)
        before = receiver.channels.pop(self.sender, None)
        if before is not None:
            before.leave()
        try:
            receiver.channels[self.sender] = self._channel(receiver)
        except Exception as error:
            receiver.fail_update(
                key,
                f"rollout rank {receiver.rank} could not join the process group of train rank {self.sender}: "
                f"{type(error).__name__}: {error}",
                error,
            )

    def _channel(self, receiver: Any) -> Channel:
        if self.backend == "nccl" and self.cumem is not None:
            own = os.environ.setdefault(CUMEM, self.cumem)
            if own != self.cumem:
                raise WeightSyncError(
                    f"{CUMEM} is {own} on this rollout worker and {self.cumem} on the train ranks. NCCL cannot connect "
                    "processes that differ in it. Set the same value with worker_env= and train_env_vars"
                )
        rank = 1 + self.receivers.index(receiver.receiver_id)
        where = device(receiver.local_rank, receiver.device_ids) if self.backend == "nccl" else torch.device("cpu")
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
                raise WeightSyncError("the train rank has given up, because another rollout worker failed or was late")

        return _interruptible(lambda: Channel(self, rank, where), check, self.seconds)


@dataclass(frozen=True)
class AnnouncedBucket(Message):
    """Take part in the broadcast of a bucket, and load it.

    Attributes:
        sender: rank of the sender among the train ranks.
        nbytes: length of the buffer.
        specs: the tensors in it.
        seconds: time left for the broadcast.
    """

    sender: int
    nbytes: int
    specs: list[TensorSpec]
    seconds: float

    def receive(self, receiver: Any, key: str) -> None:
        """See `Message.receive`. If the broadcast fails, the receiver leaves the group."""
        channel = receiver.channels.get(self.sender)
        if channel is None:
            receiver.check_update(key)
            raise WeightSyncError(
                f"rollout rank {receiver.rank} is not in the process group of train rank {self.sender}"
            )
        # The key is checked only after the broadcast: even if this receiver has given the update up, the sender and the
        # other receivers are in the broadcast and would wait for it.
        try:
            flat = channel.memory.take(self.nbytes)
            if self.nbytes:
                channel.broadcast(flat, self.seconds)
        except BaseException:
            # `broadcast` has left the group if it failed, but `take` has not. Without this, the group would be
            # destroyed in this thread, which would wait for gloo.
            receiver.channels.pop(self.sender).leave()
            raise
        receiver.load_bucket(key, views(flat, self.specs))


class Channel:
    """A process group of one sender and all receivers.

    Args:
        invitation: to the group.
        rank: of this process in the group.
        where: device of the broadcast buffers.
    """

    def __init__(self, invitation: Invitation, rank: int, where: torch.device) -> None:
        self.memory = FlatBuffer(where)
        self._group: Any
        # A store client of its own: a failed rendezvous occupies the client until its timeout, long after everyone
        # has given up.
        store = _client(invitation.address, invitation.seconds)
        prefixed = dist.PrefixStore(invitation.key, store)
        size = 1 + len(invitation.receivers)
        if invitation.backend == "nccl":
            torch.cuda.set_device(where)  # torch keeps it per thread, and this is "weights-rendezvous"
            options = dist.ProcessGroupNCCL.Options()
            # `broadcast` has its own timeout. torch's watchdog, which ends the process, must not fire before it.
            options._timeout = _delta(2 * invitation.budget)
            with _watchdog_reports_errors():
                self._group = dist.ProcessGroupNCCL(prefixed, rank, size, options)
            # Connect now, while a missing member is still noticed by `_interruptible`; nccl would connect lazily.
            self._group.eager_connect_single_device(where)
        else:
            self._group = dist.ProcessGroupGloo(prefixed, rank, size, _delta(invitation.seconds))
        self._store = store
        self._where = where

    def broadcast(self, flat: torch.Tensor, seconds: float, futures: Sequence[WorkerFuture] = ()) -> None:
        """Take part in a broadcast from rank 0.

        A member that fails leaves the group by dropping it. That closes its connections, and the others fail at once
        instead of after their timeout.

        Args:
            flat: the buffer to send, or to receive into.
            seconds: how long it may take.
            futures: calls that must not fail for the broadcast to succeed.

        Raises:
            WeightSyncError: it failed or timed out.
            Exception: a future's error.
        """
        options = dist.BroadcastOptions()
        options.rootRank = options.rootTensor = 0
        options.timeout = _delta(seconds)
        work: Any = None
        raised: Exception
        try:
            work = self._group.broadcast([flat], options)
            _wait_for(work, seconds, futures)
            if self._where.type == "cuda":
                # nccl's work completes on failure as well; only the group knows of the error.
                torch.cuda.synchronize(self._where)
                status = self._group.get_error().name if hasattr(self._group, "get_error") else "SUCCESS"
                if status != "SUCCESS":
                    raise WeightSyncError(f"a broadcast of weights failed: nccl reports {status}")
            return
        except RuntimeError as error:  # gloo's and nccl's
            raised = WeightSyncError(f"a broadcast of weights failed: {str(error).partition(chr(10))[0]}")
        except Exception as error:
            raised = error
        finally:
            work = None  # it keeps the group alive, and an exception's traceback keeps this frame alive
        self.leave()
        raise raised

    def release_memory(self) -> None:
        """Free device memory until the next update. The connections stay."""
        if self._where.type == "cuda":
            self.memory.free()

    def leave(self) -> None:
        """Close the connections. gloo first finishes what is in progress, up to its timeout, so a thread waits for
        it."""
        group, self._group = self._group, None
        if group is not None and self._where.type == "cuda":
            group.abort()
        elif group is not None:
            left = [group]
            del group  # the list has the only reference; clearing it destroys the group in the thread
            threading.Thread(target=left.clear, name="weights-leave", daemon=True).start()


@contextlib.contextmanager
def _watchdog_reports_errors() -> Iterator[None]:
    """Inside, an nccl group is created with a watchdog that reports errors instead of ending the process.

    torch reads the setting from the environment, which all threads of the process share. This library creates no other
    group meanwhile: the thread that runs the update waits in `_interruptible`.
    """
    name = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
    before = os.environ.get(name)
    os.environ[name] = "2"  # clean up the communicator only
    try:
        yield
    finally:
        os.environ.pop(name)
        if before is not None:
            os.environ[name] = before


def _wait_for(work: Any, seconds: float, futures: Sequence[WorkerFuture]) -> None:
    """Wait for an operation, but stop if one of the calls that it depends on fails."""
    begun = checked = time.monotonic()
    try:
        while not work.is_completed():
            now = time.monotonic()
            if now - checked > _CHECK_SECONDS:
                checked = now
                _raise_failed(futures)
            if now - begun > seconds:
                raise WeightSyncError(f"a broadcast of weights took more than {seconds:g} s")
            # `work.wait()` would block until gloo's own timeout, whatever happens to the receivers.
            time.sleep(_POLL_SECONDS)
        work.wait()  # raises the operation's error
    finally:
        del work  # see `Channel.broadcast`


def _interruptible(do: Callable[[], T], check: Callable[[], None], seconds: float) -> T:
    """Run a rendezvous, but stop waiting for it if ``check`` raises, or after ``seconds``. It cannot be interrupted, so
    it runs in a thread, which is left behind then. What it returns after that is dropped.

    Raises:
        WeightSyncError: it took too long.
        Exception: what it raised, or what ``check`` raised.
    """
    done: list[T] = []
    raised: list[BaseException] = []

    def run() -> None:
        try:
            done.append(do())
        except BaseException as error:
            raised.append(error)

    end = time.monotonic() + seconds
    thread = threading.Thread(target=run, name="weights-rendezvous", daemon=True)
    thread.start()
    while thread.is_alive():
        thread.join(0.01)
        check()
        if time.monotonic() > end:
            raise WeightSyncError(f"not all members of the process group connected within {seconds:g} s")
    if raised:
        raise raised[0]
    return done[0]


def _raise_failed(futures: Sequence[WorkerFuture]) -> None:
    """Raise the error of a call that has already failed, without waiting."""
    for future in futures:
        error = future.exception() if future.done() else None
        if error is not None:
            raise error


def _backend(update: Update, here: torch.device) -> str:
    devices = [info.device for info in update.infos]
    if here.type != "cuda" or not all(name.startswith("cuda:") for name in devices):
        return "gloo"
    devices.append(name_of(here))
    if len(set(devices)) < len(devices):
        raise WeightSyncError(
            "nccl does not support two processes on one device in a process group, but these are shared: "
            f"{', '.join(sorted(devices))}; use transport='device'"
        )
    return "nccl"


def _client(address: tuple[str, int], seconds: float) -> dist.TCPStore:
    """Connect to a store. torch looks up the host's name from its address here, and again in the store's only thread,
    where everyone else waits meanwhile. A name server that does not answer costs seconds, so open few connections."""
    return dist.TCPStore(*address, is_master=False, timeout=_delta(seconds))


def _delta(seconds: float) -> datetime.timedelta:
    return datetime.timedelta(seconds=seconds)
