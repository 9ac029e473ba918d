"""Weights by a process group of their own, beside the default one: gloo, or nccl where everybody has a CUDA device.

Every sender has a group with all receivers, made when it first has something to send. A bucket is announced by a call
to the receivers, and then broadcast. Two senders must not broadcast at once: one receiver might hear the one first and
another the other, and both would wait for ever. So senders take turns, by tickets in the store that all groups meet in.
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
from single_controller.base.worker import Worker
from workers.device import device
from workers.train.weight_buckets import FlatMemory, Lies, Pair, WeightSyncError, fill, side_by_side, views
from workers.train.weight_receivers import all_results, first_error
from workers.train.weight_transport import Transport, Update

T = TypeVar("T")

MEET_SECONDS = 60.0
"""How long members may take to meet."""

OPERATION_SECONDS = 60.0
"""How long the broadcast of a bucket may take once it was announced."""

CUMEM = "NCCL_CUMEM_ENABLE"

_POLL = 0.0005
_LOOK = 0.05


@dataclass(frozen=True)
class Invitation:
    """What a receiver must know to join a group.

    Attributes:
        sender: rank of the sender among the train ranks; in the group it is rank 0.
        key: the group's name in the store.
        address: host and port of the store.
        lives: the receivers in order; the first one is rank 1 of the group.
        backend: "gloo" or "nccl".
        cumem: the sender's NCCL_CUMEM_ENABLE: both ends of a connection take memory by the same calls.
    """

    sender: int
    key: str
    address: tuple[str, int]
    lives: tuple[str, ...]
    backend: str
    cumem: str | None = None


class Member:
    """A receiver in a sender's group.

    Args:
        invitation: to the group.
        worker: the receiver.
    """

    def __init__(self, invitation: Invitation, worker: Worker) -> None:
        if invitation.backend == "nccl" and invitation.cumem is not None:
            own = os.environ.setdefault(CUMEM, invitation.cumem)
            if own != invitation.cumem:
                raise WeightSyncError(
                    f"{CUMEM} is {own} here and {invitation.cumem} on the train ranks, and nccl connects no such two: "
                    "set it alike (worker_env=..., train_env_vars)"
                )
        rank = 1 + invitation.lives.index(worker._life)  # type: ignore[attr-defined]
        where = device(worker.local_rank, worker.device_ids) if invitation.backend == "nccl" else torch.device("cpu")
        self._channel = Channel(invitation, rank, where)

    def let_go(self) -> None:
        """See `Channel.let_go`."""
        self._channel.let_go()

    def leave(self) -> None:
        """See `Channel.leave`."""
        self._channel.leave()

    def receive(self, lies: Sequence[Lies]) -> list[Pair]:
        """Take part in the broadcast of a bucket: its tensors, until the next one."""
        flat = self._channel.memory.take(_length(lies))
        if len(flat):
            self._channel.broadcast(flat, ())
        return views(flat, lies)


class Channel:
    """A process group of a sender and all receivers.

    Args:
        invitation: to it.
        rank: of this process in it.
        where: the device of what is broadcast.
    """

    def __init__(self, invitation: Invitation, rank: int, where: torch.device) -> None:
        self.memory = FlatMemory(where)
        self._group: Any
        # A client of its own: a meeting may hold it until its time is over, long after everybody has given up.
        store = _client(invitation.address)
        meeting = dist.PrefixStore(invitation.key, store)
        size = 1 + len(invitation.lives)
        if invitation.backend == "nccl":
            torch.cuda.set_device(where)
            options = dist.ProcessGroupNCCL.Options()
            # `broadcast` counts the seconds itself; torch's watchdog, which ends the process, is not to come first.
            options._timeout = _seconds(10 * OPERATION_SECONDS)
            with _errors_stay_here():
                self._group = dist.ProcessGroupNCCL(meeting, rank, size, options)
            self._group.eager_connect_single_device(where)  # now, while whoever does not come is noticed
        else:
            self._group = dist.ProcessGroupGloo(meeting, rank, size, _seconds(MEET_SECONDS))
        self._store = store
        self._where = where

    def broadcast(self, flat: torch.Tensor, futures: Sequence[WorkerFuture]) -> None:
        """Take part in a broadcast from rank 0.

        A member that fails leaves the group by dropping it, which closes its connections: the others then fail at once
        instead of at the end of their time.

        Args:
            flat: what is sent, or room for it.
            futures: calls without which it cannot succeed.

        Raises:
            WeightSyncError: it failed, or took too long.
            Exception: what a future raised.
        """
        options = dist.BroadcastOptions()
        options.rootRank = options.rootTensor = 0
        options.timeout = _seconds(OPERATION_SECONDS)
        work: Any = None
        raised: Exception
        try:
            work = self._group.broadcast([flat], options)
            _wait_for(work, futures)
            if self._where.type == "cuda":
                torch.cuda.synchronize(self._where)
                said = self._group.get_error().name if hasattr(self._group, "get_error") else "SUCCESS"
                if said != "SUCCESS":
                    raise WeightSyncError(f"a broadcast of weights failed: nccl says {said}")
            return
        except RuntimeError as error:  # gloo's and nccl's
            raised = WeightSyncError(f"a broadcast of weights failed: {str(error).partition(chr(10))[0]}")
        except Exception as error:
            raised = error
        finally:
            work = None  # it holds the group, and a traceback holds it
        self.leave()
        raise raised

    def let_go(self) -> None:
        """Give a device's memory back until the next update; the connections stay."""
        if self._where.type == "cuda":
            self.memory = FlatMemory(self._where)

    def leave(self) -> None:
        """Drop the connections. gloo ends what is under way first, up to its time: nobody waits for that."""
        group, self._group = self._group, None
        if group is not None and self._where.type == "cuda":
            group.abort()
        elif group is not None:
            left = [group]
            del group
            threading.Thread(target=left.clear, name="weights-leave", daemon=True).start()


@contextlib.contextmanager
def _errors_stay_here() -> Iterator[None]:
    """A group that is made inside has its watchdog tell of errors instead of ending the process for them."""
    name = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
    before = os.environ.get(name)
    os.environ[name] = "2"  # the communicator is cleaned up, and no more
    try:
        yield
    finally:
        os.environ.pop(name)
        if before is not None:
            os.environ[name] = before


def _wait_for(work: Any, futures: Sequence[WorkerFuture]) -> None:
    """Wait for an operation, but no longer than the calls without which it cannot succeed."""
    begun = looked = time.monotonic()
    while not work.is_completed():
        now = time.monotonic()
        if now - looked > _LOOK:
            looked = now
            failed = first_error(futures)
            if failed is not None:
                raise failed
        if now - begun > OPERATION_SECONDS:
            raise WeightSyncError(f"a broadcast of weights took more than {OPERATION_SECONDS:g} s")
        time.sleep(_POLL)
    work.wait()


class GroupTransport(Transport):
    """See this file's docstring.

    Args:
        timeout: seconds that a sender waits for its turn.
    """

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout
        self._host: dist.TCPStore | None = None
        self._store: dist.TCPStore | None = None
        self._address: tuple[str, int] | None = None
        self._lives: tuple[str, ...] = ()
        self._channel: Channel | None = None
        self._groups_made = 0

    def prepare(self, update: Update) -> tuple[str, int]:
        """The store that all groups meet in; rank 0 has it, and keeps it."""
        address = ray.util.get_node_ip_address() if ray.is_initialized() else "127.0.0.1"
        if self._host is None:
            self._host = dist.TCPStore(
                address, 0, is_master=True, wait_for_workers=False, timeout=_seconds(MEET_SECONDS)
            )
        return address, self._host.port

    def begin(self, update: Update) -> None:
        """Keep the group that is there, unless the receivers are not those that are in it."""
        lives = tuple(info.life for info in update.infos)
        if (self._address, self._lives) != (update.shared, lives):
            self._leave()
        if self._address != update.shared:
            self._address, self._store = update.shared, None
        self._lives = lives

    def send(self, update: Update, bucket: Sequence[Pair]) -> None:
        """See `Transport.send`."""
        lies, _ = side_by_side(bucket)
        with self._turn(update):
            channel = self._met(update, bucket)
            flat = channel.memory.take(_length(lies))
            fill(flat, lies, bucket)
            futures = update.receivers.start("take_broadcast_weights", update.key, update.ranks.rank, lies)
            if len(flat):
                channel.broadcast(flat, futures)
            all_results(futures)

    def flush(self, update: Update) -> None:
        """See `Transport.flush`: every bucket was waited for."""
        if self._channel is not None:
            self._channel.let_go()

    def failed(self, update: Update) -> None:
        """See `Transport.failed`."""
        self._leave()

    def close(self) -> None:
        """See `Transport.close`."""
        self._leave()
        self._host = self._store = self._address = None

    def _leave(self) -> None:
        if self._channel is not None:
            self._channel.leave()
        self._channel = None

    def _met(self, update: Update, bucket: Sequence[Pair]) -> Channel:
        """This sender's group, made if it is not there."""
        if self._channel is not None:
            return self._channel
        self._groups_made += 1
        backend = _backend(update, bucket[0][1].device)
        key = f"{update.key}/{update.ranks.rank}"
        invitation = Invitation(update.ranks.rank, key, update.shared, self._lives, backend, os.environ.get(CUMEM))
        futures = update.receivers.start("join_weight_group", update.key, invitation)
        where = bucket[0][1].device if backend == "nccl" else torch.device("cpu")
        self._channel = unless_failed(lambda: Channel(invitation, 0, where), futures)
        all_results(futures)
        return self._channel

    def _known_store(self) -> dist.TCPStore:
        if self._store is None:
            if self._address is None:
                raise WeightSyncError("the update has not begun")
            self._store = _client(self._address)
        return self._store

    @contextlib.contextmanager
    def _turn(self, update: Update) -> Iterator[None]:
        """Inside, no other sender of this update is."""
        if update.ranks.ranks == 1:
            yield
            return
        store = self._known_store()
        mine = store.add(f"{update.key}/tickets", 1) - 1
        if mine > 0:
            turn = f"{update.key}/turn/{mine}"
            try:
                store.wait([turn], _seconds(self._timeout))
            except dist.DistStoreError as error:
                raise WeightSyncError(
                    f"train rank {update.ranks.rank} has waited {self._timeout:g} s for its turn to send weights: "
                    "another rank has not ended its own; where that is no fault, give WeightSender a longer timeout"
                ) from error
            store.delete_key(turn)
        try:
            yield
        finally:
            store.set(f"{update.key}/turn/{mine + 1}", "")


def unless_failed(do: Callable[[], T], futures: Sequence[WorkerFuture]) -> T:
    """Do something that waits for others, but stop waiting when one of their calls fails.

    Raises:
        Exception: what it raised, or the call's error.
    """
    done: list[T] = []
    raised: list[BaseException] = []

    def run() -> None:
        try:
            done.append(do())
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run, name="weights-meet", daemon=True)
    thread.start()
    while thread.is_alive():
        thread.join(0.01)
        failed = first_error(futures)
        if failed is not None:
            raise failed
    if raised:
        raise raised[0]
    return done[0]


def _backend(update: Update, here: torch.device) -> str:
    devices = [info.device for info in update.infos]
    if here.type != "cuda" or not all(name.startswith("cuda:") for name in devices):
        return "gloo"
    from workers.train.sync_on_device import name_of

    devices.append(name_of(here))
    if len(set(devices)) < len(devices):
        raise WeightSyncError(
            "nccl has no group in which two processes share a device, and here some do: "
            f"{', '.join(sorted(devices))}; use transport='device'"
        )
    return "nccl"


def _client(address: tuple[str, int]) -> dist.TCPStore:
    return dist.TCPStore(*address, is_master=False, timeout=_seconds(MEET_SECONDS))


def _length(lies: Sequence[Lies]) -> int:
    return max((one.begin + one.nbytes for one in lies), default=0)


def _seconds(number: float) -> datetime.timedelta:
    return datetime.timedelta(seconds=number)
