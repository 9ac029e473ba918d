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
    ALONE_SECONDS,
    BUCKET_BYTES,
    UPDATE_SECONDS,
    Budget,
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
        timeout: seconds that an update may take, with all its phases. This includes the time for calls that were sent
            to the receivers before. Keep it well below the timeout of the train ranks' collectives.
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
        timeout: float = UPDATE_SECONDS,
        neighbour: Any = None,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        if transport not in get_args(TransportName):
            raise ValueError(f"transport={transport!r}: use one of {', '.join(map(repr, get_args(TransportName)))}")
        if not isinstance(bucket_bytes, int) or bucket_bytes < 1:
            raise ValueError(f"bucket_bytes={bucket_bytes!r}: expected an integer of at least 1")
        if (folder is not None) is not (transport == "disk"):
            raise ValueError(
                f"transport={transport!r}, folder={folder!r}: 'disk' needs a folder; other transports do not use one"
            )
        if neighbour is not None and transport != "device":
            raise ValueError(
                f"transport={transport!r} sends to other processes; use 'device' for a rollout worker in this process"
            )
        self._timeout = min(check_seconds("timeout", timeout), _MAX_TIMEOUT)
        self._bucket_bytes = bucket_bytes
        self._process_group = process_group
        self._transport = _transport(transport, folder)
        self._name = transport
        self._id = uuid.uuid4().hex
        self._receivers = Receivers(rollout, neighbour)
        self._previous: Update | None = None
        self.everywhere = self._transport.everywhere

    def connect(self, rollout: Rollout) -> None:
        """Send to these rollout workers from now on. Call it after the workers were created again."""
        self._receivers = Receivers(rollout)

    def versions(self) -> list[int | None]:
        """Return the weight version of each rollout worker, in order of group and rank. It is None for a worker that
        was restarted, was added later, or is in the middle of an update; the next `send` brings it up to date.

        Raises:
            WeightSyncError: a receiver does not respond.
        """
        try:
            self._receivers.look_up(Budget(self._timeout))
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
            WeightSyncError: on all ranks alike. The rollout workers have no weight version until the next `send`. If
                ``pairs`` raised on some of the ranks, the others learn of it only if they are not waiting for those
                ranks in a collective.
            ValueError: the version is not an integer of at least 1.
        """
        if not isinstance(version, int) or isinstance(version, bool) or version < 1:
            raise ValueError(
                f"version={version!r}: expected an integer of at least 1; version 0 means that a rollout worker has "
                "received no weights since it was started"
            )
        begun = time.monotonic()
        key = self._common_key(ranks)
        update = Update(version, rank, ranks, self._receivers, Budget(self._timeout), key)
        if self._previous is not None:
            self._previous.forget()
        self._previous = update
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

    def _common_key(self, ranks: int) -> str:
        """Return the key of an update. All ranks begin it together, so this is the one step that is a collective: it
        waits no longer than any other collective, and what follows needs a name that all ranks know."""
        key = uuid.uuid4().hex
        if ranks == 1:
            return key
        keys: list[Any] = [None] * ranks
        dist.all_gather_object(keys, key, self._process_group)
        return str(keys[0])

    def _begin(self, update: Update) -> None:
        def begin() -> tuple[Any, ...]:
            infos = self._receivers.call("begin_weights", update.key, update.version, self._id)
            return infos, self._transport.prepare(update)

        error: WeightSyncError | None = None
        try:
            self._receivers.look_up(update.budget)
        except Exception as failed:  # not raised here, where the other ranks would wait for this one
            error = self._error(update, failed)
        update.infos, update.shared = self._on_rank_0(update, "begin", begin, error)
        try:
            self._transport.begin(update)
        except Exception as failed:
            error = self._error(update, failed)
        update.agree("begun", error=error)  # before the pairs, whose collectives need every rank

    def _send_all(self, update: Update, pairs: Iterable[Pair]) -> tuple[int, int, list[Any]]:
        """Send this rank's pairs. After a failure, still iterate over the rest: producing them involves collectives, in
        which other ranks would wait."""
        nbytes = buckets = 0
        error: WeightSyncError | None = None
        produced = iter_buckets(pairs, self._bucket_bytes)
        while True:
            try:
                bucket = next(produced, None)
            except Exception as failed:
                what = f"train rank {update.rank} could not produce its weights of version {update.version}"
                error = sync_error(what, failed, OutOfStepError)
                # Not for long: the other ranks may be in a collective of their pairs, which this rank will not join.
                update.agree("sent", error=error, seconds=ALONE_SECONDS)
                raise  # for type checkers: `agree` has raised
            if bucket is None:
                break
            if error is None:
                try:
                    update.budget.left()
                    self._transport.send(update, bucket)
                except OutOfStepError:  # the other ranks raise too; none of them gets to the end
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
        gathered: list[Any] = []  # on rank 0
        update.agree("sent", flushed, error, gathered.extend)
        return nbytes, buckets, gathered

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
        return update.agree(step, value, error, lambda values: values[0])

    def _error(self, update: Update, failed: Exception) -> WeightSyncError:
        what = f"weight version {update.version} was not sent by transport {self._name!r}"
        if update.budget.used_up:
            what += (
                f" within {update.budget.seconds:g} s, the time limit of an update "
                "(update_weights_timeout_minutes, or timeout= of WeightSender)"
            )
        return sync_error(what, failed)


def _transport(name: TransportName, folder: str | os.PathLike[str] | None) -> Transport:
    # Each transport is imported only when it is used: a transport may need libraries that the others do not.
    if name == "store":
        from workers.weight_sync.object_store import ObjectStoreTransport

        return ObjectStoreTransport()
    if name == "group":
        from workers.weight_sync.process_group import ProcessGroupTransport

        return ProcessGroupTransport()
    if name == "disk":
        from workers.weight_sync.disk import DiskTransport

        return DiskTransport(folder or "")
    from workers.weight_sync.device import DeviceTransport

    return DeviceTransport()
