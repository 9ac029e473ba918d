"""WeightReceiver: the rollout worker's side of weight sync. `workers.train.weight_sync` is the other one."""

from __future__ import annotations

import socket
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from dispatch.modes import Dispatch
from dispatch.register import register
from single_controller.base.worker import Worker
from workers.rollout.engine import RolloutEngine

if TYPE_CHECKING:
    import torch

    from workers.train.sync_by_group import Invitation, Member
    from workers.train.sync_on_device import Handle
    from workers.train.weight_buckets import Lies


@dataclass(frozen=True)
class ReceiverInfo:
    """Who receives.

    Attributes:
        rank: in its group.
        life: another one after each restart, and when others send than before: it is then in no process group.
        host: name of the machine.
        device: where it can open other processes' memory: ``cuda:<uuid>``, or ``cpu:<host>``.
    """

    rank: int
    life: str
    host: str
    device: str


@dataclass
class _Update:
    key: str
    version: int
    missing: dict[str, tuple[int, ...]]
    came: set[str] = field(default_factory=set)
    failed: str = ""


class WeightReceiver(Worker):
    """A worker whose ``engine`` takes weights. A subclass calls ``super().__init__()`` and sets ``engine``.

    An update begins, brings buckets in any order and from any number of senders, and is finished. The version is that
    of the last update that was finished; while one is under way, or after one that failed, there is none.
    """

    engine: RolloutEngine

    def __init__(self) -> None:
        super().__init__()
        self._life = uuid.uuid4().hex
        self._version: int | None = None
        self._update: _Update | None = None
        self._sender = ""
        self._members: dict[int, Member] = {}

    @property
    def weight_version(self) -> int | None:
        """Version of the weights; None while an update is under way, after one that failed, and before the first."""
        return self._version

    @weight_version.setter
    def weight_version(self, version: int | None) -> None:
        self._version, self._update = version, None

    @register(Dispatch.ONE_TO_ALL)
    def set_weight_version(self, version: int | None) -> None:
        """Say which version the weights are that the engine has got some other way, from a checkpoint say; None for
        weights that are not to generate with."""
        self.weight_version = version

    @register(Dispatch.ONE_TO_ALL)
    def current_weight_version(self) -> int | None:
        """`weight_version`, for a driver: a list by rank."""
        return self._version

    @register(Dispatch.ONE_TO_ALL)
    def begin_weights(self, key: str, version: int, sender: str) -> ReceiverInfo:
        """Begin an update. One that was under way is given up, and so are process groups with others than who sends.

        Args:
            key: of the update; whatever comes later for another one is refused.
            version: of its weights.
            sender: name of those who send, the same in all their updates.
        """
        self._version = None
        if sender != self._sender:
            self._sender, self._life = sender, uuid.uuid4().hex
            while self._members:
                self._members.popitem()[1].leave()
        self._update = _Update(key, version, dict(self.engine.weight_shapes()))
        return ReceiverInfo(self.rank, self._life, socket.gethostname(), _device_name(self))

    @register(Dispatch.ONE_TO_ALL, inputs="view")
    def take_weights(self, key: str, bucket: dict[str, torch.Tensor]) -> None:
        """Load a bucket that came through the object store; it is read where it lies.

        Raises:
            WeightSyncError: see `load_bucket`.
        """
        self.load_bucket(key, list(bucket.items()))

    @register(Dispatch.ONE_TO_ALL)
    def join_weight_group(self, key: str, invitation: Invitation) -> None:
        """Join a sender's process group; that of the same sender before is left.

        Raises:
            WeightSyncError: not all came together. The update is given up then.
        """
        from workers.train.sync_by_group import Member

        update = self._checked(key)
        before = self._members.pop(invitation.sender, None)
        if before is not None:
            before.leave()
        try:
            self._members[invitation.sender] = Member(invitation, self)
        except Exception as error:
            self._give_up(
                update,
                f"rollout rank {self.rank} did not meet sender {invitation.sender} in a process group: "
                f"{type(error).__name__}: {error}",
                error,
            )

    @register(Dispatch.ONE_TO_ALL)
    def take_broadcast_weights(self, key: str, sender: int, lies: list[Lies]) -> None:
        """Load a bucket that a sender broadcasts in its process group.

        Raises:
            WeightSyncError: see `load_bucket`; or the broadcast failed, and the group is left.
        """
        from workers.train.weight_buckets import WeightSyncError

        member = self._members.get(sender)
        if member is None:
            self._checked(key)
            raise WeightSyncError(f"rollout rank {self.rank} is not in the process group of sender {sender}")
        try:
            # Also of an update that was given up: the sender and the other receivers are at it, and would wait.
            bucket = member.receive(lies)
        except BaseException:
            del member, self._members[sender]
            raise
        self.load_bucket(key, bucket)

    @register(Dispatch.ONE_TO_ALL)
    def load_weight_folder(self, key: str, folder: str) -> None:
        """Load a folder of safetensors files.

        Raises:
            WeightSyncError: see `load_bucket`; or there is no such folder here.
        """
        from workers.train.sync_by_disk import read_folder

        self._checked(key)
        for bucket in read_folder(Path(folder)):
            self.load_bucket(key, bucket)

    @register(Dispatch.ALL_TO_ALL)
    def take_weight_handle(self, key: str, handle: Handle, lies: list[Lies]) -> None:
        """Load a bucket that lies in the memory of another process of this device.

        Raises:
            WeightSyncError: see `load_bucket`.
        """
        from workers.train.sync_on_device import opened

        self._checked(key)
        with opened(handle, lies) as bucket:
            self.load_bucket(key, bucket)

    @register(Dispatch.ONE_TO_ALL)
    def finish_weights(self, key: str) -> None:
        """End an update: from here on the weights have its version.

        Raises:
            WeightSyncError: some of the weights did not come.
        """
        update = self._checked(key)
        if update.missing:
            self._give_up(
                update,
                f"rollout rank {self.rank} has not got {len(update.missing)} of "
                f"{len(update.missing) + len(update.came)} tensors of version {update.version}: "
                f"{_some(update.missing)}",
            )
        self._version, self._update = update.version, None
        for member in self._members.values():
            member.let_go()

    def load_bucket(self, key: str, bucket: Sequence[tuple[str, Any]]) -> None:
        """Hand tensors to the engine, which copies them.

        Args:
            key: of the update that they belong to.
            bucket: name and whole tensor.

        Raises:
            WeightSyncError: they belong to another update, the engine has no such tensor or has it in another shape,
                one comes a second time, or the engine failed. The update is given up then.
        """
        update = self._checked(key)
        for name, tensor in bucket:
            why = _fault(update, name, tensor)
            if why is not None:
                self._give_up(update, f"rollout rank {self.rank}, version {update.version}: {why}")
            del update.missing[name]
            update.came.add(name)
        try:
            self.engine.load_weights(bucket)
        except Exception as error:
            self._give_up(
                update,
                f"rollout rank {self.rank}: {type(self.engine).__name__} did not take weights of version "
                f"{update.version} ({_some(name for name, _ in bucket)}): {type(error).__name__}: {error}",
                error,
            )

    def _give_up(self, update: _Update, why: str, cause: Exception | None = None) -> NoReturn:
        from workers.train.weight_buckets import WeightSyncError

        update.failed = why
        raise WeightSyncError(why) from cause

    def _checked(self, key: str) -> _Update:
        from workers.train.weight_buckets import WeightSyncError

        if self._update is None or self._update.key != key:
            now = "no update is under way" if self._update is None else "another update has begun since"
            raise WeightSyncError(
                f"rollout rank {self.rank} got a part of an update that it is not in: {now} (it was restarted, or the "
                "weights were set otherwise)"
            )
        if self._update.failed:  # other senders come to hear of the cause, too
            raise WeightSyncError(self._update.failed)
        return self._update


def _fault(update: _Update, name: str, tensor: torch.Tensor) -> str | None:
    import torch

    if name in update.came:
        return f"{name!r} came twice; each tensor comes from exactly one rank, once"
    shape = update.missing.get(name)
    if shape is None:
        return f"{name!r} is no weight of the engine; its weight_shapes() still waits for {_some(update.missing)}"
    if tuple(tensor.shape) != tuple(shape):
        return f"{name!r} came as {tuple(tensor.shape)}; the engine has {tuple(shape)}"
    if not torch.can_cast(tensor.dtype, torch.float32):
        return f"{name!r} came as {tensor.dtype}, which is no kind of real number"
    return None


def _device_name(worker: Worker) -> str:
    from workers.train.sync_on_device import device_name

    return device_name(worker.local_rank, worker.device_ids)


def _some(names: Iterable[str]) -> str:
    listed = list(names)
    return ", ".join(listed[:5]) + (f" and {len(listed) - 5} more" if len(listed) > 5 else "") or "nothing"
