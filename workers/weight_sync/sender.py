"""WeightSender: the train side of weight sync. `workers.weight_sync.protocol` says how an update proceeds."""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch.distributed as dist

from single_controller.base.checks import check_seconds
from workers.weight_sync.protocol import (
    BUCKET_BYTES,
    OutOfStepError,
    Pair,
    Receivers,
    Rollout,
    Transport,
    Update,
    WeightSyncError,
    iter_buckets,
    sync_error,
)

TransportName = Literal["store", "group", "disk", "device"]

_MAX_TIMEOUT = 1e7  # seconds, 116 days: neither Ray nor torch accepts infinity


@dataclass(frozen=True)
class SyncReport:
    """What an update took.

    Attributes:
        version: of the weights.
        seconds: duration of the update.
        nbytes: bytes that this rank sent; each byte counts once, however many workers received it.
        buckets: buckets that this rank sent.
        receivers: rollout workers that have the version now.
    """

    version: int
    seconds: float
    nbytes: int
    buckets: int
    receivers: int


class WeightSender:
    """Sends weights to rollout workers. Every train rank has one, and all ranks call `send` together.

    Args:
        transport: "store": Ray's object store. "group": a process group of train and rollout workers, gloo or nccl.
            "disk": safetensors files. "device": from memory to memory, for rollout workers on the train ranks' own
            devices, in the same process or not.
        rollout: the group of rollout workers (as an argument of a call it arrives attached), a list of groups, a
            function that returns them, or a manager with a ``group``. It is looked up again for each update.
        bucket_bytes: size of a bucket; a larger tensor is sent alone.
        folder: for "disk": a folder that train and rollout workers see under this path, and nobody else uses.
        timeout: seconds that one call to the receivers, or to a manager that is a Ray actor, may take. This includes
            the time for calls that were sent to them before.
        neighbour: for "device": the rollout worker in the same process, ``self.role_worker("rollout")``. ``rollout``
            is not needed then.
        process_group: of the train ranks; the default group if None.

    Attributes:
        everywhere: whether `send` needs all pairs on all ranks, rather than each pair on one rank.

    Raises:
        ValueError: an unknown transport, or an option that is invalid or missing.
    """

    def __init__(
        self,
        transport: TransportName = "store",
        rollout: Rollout = None,
        *,
        bucket_bytes: int = BUCKET_BYTES,
        folder: str | os.PathLike[str] | None = None,
        timeout: float = 600.0,
        neighbour: Any = None,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        if transport not in get_args(TransportName):
            raise ValueError(f"transport={transport!r}: use one of {', '.join(map(repr, get_args(TransportName)))}")
        if not isinstance(bucket_bytes, int) or bucket_bytes < 1:
            raise ValueError(f"bucket_bytes={bucket_bytes!r}: expected an integer of at least 1")
        if (folder is not None) is not (transport == "disk"):
            raise ValueError(
                f"transport={transport!r}, folder={folder!r}: 'disk' needs a folder, other transports take none"
            )
        if neighbour is not None and transport != "device":
            raise ValueError(
                f"transport={transport!r} sends to other processes; use 'device' for a rollout worker in this process"
            )
        self._timeout = min(check_seconds("timeout", timeout), _MAX_TIMEOUT)
        self._bucket_bytes = bucket_bytes
        self._process_group = process_group
        self._transport = _transport(transport, folder, self._timeout)
        self._name = transport
        self._id = uuid.uuid4().hex
        self._receivers = Receivers(rollout, self._timeout, neighbour)
        self.everywhere = self._transport.everywhere

    def connect(self, rollout: Rollout) -> None:
        """Send to these rollout workers from now on. Call it after the workers were created again."""
        self._receivers = Receivers(rollout, self._timeout)

    def versions(self) -> list[int | None]:
        """Return the weight version of each rollout worker, in order of group and rank. It is None for a worker that
        was restarted, was added later, or is in the middle of an update; the next `send` brings it up to date.

        Raises:
            WeightSyncError: a receiver does not respond.
        """
        try:
            self._receivers.look_up()
            return self._receivers.call("current_weight_version")
        except Exception as error:
            raise sync_error("the rollout workers' weight versions are not available", error) from error

    def send(self, version: int, pairs: Iterable[Pair], *, rank: int = 0, ranks: int = 1) -> SyncReport:
        """Send weights to all rollout workers. All ranks call it together.

        Args:
            version: of the weights, from 1. Version 0 is what the rollout workers' engines start with, also after a
                restart.
            pairs: name as in the Hugging Face model's ``state_dict()``, and whole tensor:
                ``TrainModel.hf_weights(everywhere=sender.everywhere)``. Each pair comes from one rank or, if
                `everywhere`, from every rank in the same order. Tied weights come once.
            rank: of this process among the train ranks.
            ranks: number of train ranks.

        Raises:
            WeightSyncError: on all ranks alike. The rollout workers have no weight version until the next `send`.
            ValueError: the version is not an integer of at least 1.
        """
        if not isinstance(version, int) or isinstance(version, bool) or version < 1:
            raise ValueError(
                f"version={version!r}: expected an integer of at least 1; version 0 means that a rollout worker has "
                "received no weights since it was started"
            )
        begun = time.monotonic()
        update = Update(version, rank, ranks, self._receivers, self._process_group)
        try:
            self._begin(update)
            nbytes, buckets, flushed = self._send_all(update, pairs)
            self._finish(update, flushed)
        except BaseException:  # KeyboardInterrupt too: what the update left in progress would disturb the next one
            self._transport.failed(update)
            raise
        return SyncReport(version, time.monotonic() - begun, nbytes, buckets, len(update.infos))

    def close(self) -> None:
        """Free what is kept between updates: buffers and process groups."""
        self._transport.close()

    def _begin(self, update: Update) -> None:
        def begin() -> tuple[Any, ...]:
            # Each rank begins the update for the receiver in its own process, so all ranks use a fixed key. It need not
            # be unique: these calls are direct, and none is left over from another update.
            update.key = "neighbour" if self._receivers.neighbour is not None else uuid.uuid4().hex
            infos = self._receivers.call("begin_weights", update.key, update.version, self._id)
            return update.key, infos, self._transport.prepare(update)

        error: WeightSyncError | None = None
        try:
            self._receivers.look_up()
        except Exception as failed:  # not raised here, where the other ranks would wait for this one in `gather`
            error = self._error(update, failed)
        update.key, update.infos, update.shared = self._on_rank_0(update, "begin", begin, error)
        self._transport.begin(update)

    def _send_all(self, update: Update, pairs: Iterable[Pair]) -> tuple[int, int, list[Any]]:
        """Send this rank's pairs. After a failure, still iterate over the rest: producing them involves collectives, in
        which other ranks would wait."""
        nbytes = buckets = 0
        error: WeightSyncError | None = None
        for bucket in iter_buckets(pairs, self._bucket_bytes):
            if error is None:
                try:
                    self._transport.send(update, bucket)
                except OutOfStepError:  # the other ranks raise too; the `gather` below would find nobody
                    raise
                except Exception as failed:
                    error = self._error(update, failed)
                nbytes += sum(tensor.nbytes for _, tensor in bucket)
                buckets += 1
        flushed = None
        if error is None:
            try:
                flushed = self._transport.flush(update)
            except Exception as failed:
                error = self._error(update, failed)
        # A rank whose send failed gets here too. After it, all buckets of all ranks are loaded, or all ranks raise.
        gathered = update.gather("sent", (error, flushed))
        _raise_first([one for one, _ in gathered], error)
        return nbytes, buckets, [one for _, one in gathered]

    def _finish(self, update: Update, flushed: list[Any]) -> None:
        def finish() -> None:
            self._transport.finish(update, flushed)
            self._receivers.call("finish_weights", update.key)

        self._on_rank_0(update, "finish", finish)

    def _on_rank_0(self, update: Update, step: str, do: Callable[[], Any], error: WeightSyncError | None = None) -> Any:
        """Run something on rank 0, or on every rank if the receivers are in the ranks' own processes.

        Args:
            update: the update.
            step: name of the step.
            do: what to run.
            error: what went wrong on this rank before.

        Returns:
            Rank 0's result, on every rank.

        Raises:
            WeightSyncError: it failed on any rank.
        """
        value: Any = None
        if error is None and (update.rank == 0 or self._receivers.neighbour is not None):
            try:
                value = do()
            except Exception as failed:
                error = self._error(update, failed)
        gathered = update.gather(step, (error, value))
        _raise_first([one for one, _ in gathered], error)
        return gathered[0][1]

    def _error(self, update: Update, failed: Exception) -> WeightSyncError:
        return sync_error(f"weight version {update.version} was not sent by transport {self._name!r}", failed)


def _raise_first(errors: list[WeightSyncError | None], own: WeightSyncError | None) -> None:
    """Raise the first error by rank. If it is this rank's own, raise that object, which has its cause."""
    first = next((one for one in errors if one is not None), None)
    if first is not None:
        raise own if own is not None and str(own) == str(first) else first


def _transport(name: TransportName, folder: str | os.PathLike[str] | None, timeout: float) -> Transport:
    # Each transport is imported only when it is used: a transport may need libraries that the others do not.
    if name == "store":
        from workers.weight_sync.object_store import ObjectStoreTransport

        return ObjectStoreTransport()
    if name == "group":
        from workers.weight_sync.process_group import ProcessGroupTransport

        return ProcessGroupTransport(timeout)
    if name == "disk":
        from workers.weight_sync.disk import DiskTransport

        return DiskTransport(folder or "")
    from workers.weight_sync.device import DeviceTransport

    return DeviceTransport()
