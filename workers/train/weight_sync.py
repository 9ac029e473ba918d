"""WeightSender: brings a train group's weights to rollout workers. `workers.rollout.weight_receiver` is the other side.

How an update goes. Rank 0 tells all receivers that it begins: from then on they have no version. Every train rank goes
through its (name, whole tensor) pairs and sends them in buckets. When all have said that theirs arrived, rank 0 has the
receivers check that they have everything; only then do they have the new version.

The train ranks speak to each other through their own process group, at the beginning and the end. They do so rather
than have receivers count, because they must agree anyway: going through the pairs takes collectives, so a rank whose
receiver died goes on to the end of its pairs without sending, and then all ranks raise the same error.
"""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch.distributed as dist

from single_controller.base.checks import check_seconds
from workers.train.weight_buckets import BUCKET_BYTES, Pair, WeightSyncError, cut_buckets
from workers.train.weight_receivers import Neighbour, Receivers, Rollout, sync_error
from workers.train.weight_transport import OutOfStepError, Ranks, Transport, Update

TransportName = Literal["store", "group", "disk", "device"]

_LONGEST = 1e7  # seconds, which is 116 days: Ray and torch count no endless ones


@dataclass(frozen=True)
class SyncReport:
    """What an update took.

    Attributes:
        version: of the weights.
        seconds: from its beginning to its end.
        nbytes: that this rank sent; each counts once, however many received it.
        buckets: that this rank sent.
        receivers: rollout workers that have the version now; of this process, where the receiver is a neighbour.
    """

    version: int
    seconds: float
    nbytes: int
    buckets: int
    receivers: int


class WeightSender:
    """One on every train rank. All ranks call `send` together.

    Args:
        transport: "store": Ray's object store. "group": a process group of train and rollout workers, gloo or nccl.
            "disk": safetensors files. "device": from memory to memory, for rollout workers on the train ranks' own
            devices, in the same process or not.
        rollout: the group of rollout workers (as it comes with a call: attached), a list of such groups, a function
            that gives them, or a manager that has them as ``group``. Looked at anew for each update.
        bucket_bytes: how much travels at once; a larger tensor travels alone.
        folder: for "disk": seen by train and rollout workers under this name, and used by nobody else.
        timeout: seconds that one call to the receivers, or to a manager that is a Ray actor, may take; they answer
            after what they are at.
        neighbour: the rollout worker in this very process, ``self.neighbour("rollout")``, for "device"; then
            ``rollout`` is not needed.
        process_group: of the train ranks; the default one if None.

    Attributes:
        everywhere: whether `send` must be given all pairs on all ranks, rather than each on one.

    Raises:
        ValueError: a transport that does not exist, an option that is not possible or that is missing.
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
            raise ValueError(f"transport={transport!r}: known are {', '.join(map(repr, get_args(TransportName)))}")
        if not isinstance(bucket_bytes, int) or bucket_bytes < 1:
            raise ValueError(f"bucket_bytes is a number of bytes from 1, got {bucket_bytes!r}")
        if (folder is not None) is not (transport == "disk"):
            raise ValueError(f"transport={transport!r}, folder={folder!r}: 'disk' needs a folder, the others none")
        if neighbour is not None and transport != "device":
            raise ValueError(f"transport={transport!r} goes to other processes; a neighbour is served by 'device'")
        self._timeout = min(check_seconds("timeout", timeout), _LONGEST)
        self._bucket_bytes = bucket_bytes
        self._process_group = process_group
        self._transport = _transport(transport, folder, self._timeout)
        self._name = transport
        self._id = uuid.uuid4().hex
        self._receivers = Receivers(rollout, self._timeout) if neighbour is None else Neighbour(neighbour)
        self.everywhere = self._transport.everywhere

    def connect(self, rollout: Rollout) -> None:
        """Send to these from now on; for rollout workers that were made anew since."""
        self._receivers = Receivers(rollout, self._timeout)

    def versions(self) -> list[int | None]:
        """The version that each rollout worker has, in order of group and rank. One that was restarted, came late or
        is amid an update has None; the next `send` brings it up to date with the others.

        Raises:
            WeightSyncError: a receiver does not answer.
        """
        try:
            self._receivers.look_up()
            return self._receivers.call("current_weight_version")
        except Exception as error:
            raise sync_error("the versions of the weights could not be asked for", error) from error

    def send(self, version: int, pairs: Iterable[Pair], *, rank: int = 0, ranks: int = 1) -> SyncReport:
        """Bring weights to all rollout workers. All ranks call it together.

        Args:
            version: of the weights, from 1: rollout workers call those 0 that their engine began with, and would
                come back with them as that version after a restart.
            pairs: name as the Hugging Face model's ``state_dict()`` has it, and whole tensor:
                ``TrainModel.hf_weights(everywhere=sender.everywhere)``. Each pair comes from one rank, or from every
                rank in the same order where `everywhere` says so. Tied weights come once.
            rank: of this process among the train ranks.
            ranks: how many train ranks there are.

        Raises:
            WeightSyncError: on all ranks alike. The rollout workers have no version then, until the next `send`.
            ValueError: a version that is no number from 1.
        """
        if not isinstance(version, int) or isinstance(version, bool) or version < 1:
            raise ValueError(
                f"a version of weights is an integer from 1, got {version!r}; 0 are the weights that the engine of a "
                "rollout worker begins with, also after a restart"
            )
        begun = time.monotonic()
        update = Update("", version, Ranks(rank, ranks, self._process_group), self._receivers)
        try:
            self._begin(update)
            nbytes, buckets = self._send_all(update, pairs)
            self._finish(update)
        except BaseException:
            self._transport.failed(update)
            raise
        return SyncReport(version, time.monotonic() - begun, nbytes, buckets, len(update.infos))

    def close(self) -> None:
        """Free what is kept between updates: buffers, process groups."""
        self._transport.close()

    def _begin(self, update: Update) -> None:
        def begin() -> tuple[Any, ...]:
            update.key = "neighbour" if isinstance(self._receivers, Neighbour) else uuid.uuid4().hex
            infos = self._receivers.call("begin_weights", update.key, update.version, self._id)
            return update.key, infos, self._transport.prepare(update)

        error: WeightSyncError | None = None
        try:
            self._receivers.look_up()
        except Exception as failed:
            error = self._error(update, failed)
        said = self._by_coordinator(update, "begin", begin, error)
        update.key, update.infos, update.shared = said
        self._transport.begin(update)

    def _send_all(self, update: Update, pairs: Iterable[Pair]) -> tuple[int, int]:
        """Send this rank's pairs; when that fails, go through the rest all the same, as other ranks may be waiting."""
        nbytes = buckets = 0
        error: WeightSyncError | None = None
        for bucket in cut_buckets(pairs, self._bucket_bytes):
            if error is None:
                try:
                    self._transport.send(update, bucket)
                except OutOfStepError:
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
        said = update.ranks.all("sent", (error, flushed))
        _raise_first([one for one, _ in said], error)
        self._flushed = [one for _, one in said]
        return nbytes, buckets

    def _finish(self, update: Update) -> None:
        def finish() -> None:
            self._transport.finish(update, self._flushed)
            self._receivers.call("finish_weights", update.key)
            self._transport.settle(update)

        self._by_coordinator(update, "finish", finish)

    def _by_coordinator(
        self, update: Update, step: str, do: Callable[[], Any], error: WeightSyncError | None = None
    ) -> Any:
        """Rank 0 does something for all; every rank does, where its receiver is its neighbour.

        Args:
            update: the update.
            step: what this is about.
            do: what is to be done.
            error: what went wrong on this rank before.

        Returns:
            What it returned, on every rank.
        """
        value: Any = None
        if error is None and (update.ranks.rank == 0 or isinstance(self._receivers, Neighbour)):
            try:
                value = do()
            except Exception as failed:
                error = self._error(update, failed)
        said = update.ranks.all(step, (error, value))
        _raise_first([one for one, _ in said], error)
        return said[0][1]

    def _error(self, update: Update, failed: Exception) -> WeightSyncError:
        return sync_error(f"weights of version {update.version} were not brought by {self._name!r}", failed)


def _raise_first(errors: list[WeightSyncError | None], own: WeightSyncError | None) -> None:
    """Raise what went wrong first by rank; this rank's own with its cause, if it is the same."""
    first = next((one for one in errors if one is not None), None)
    if first is not None:
        raise own if own is not None and str(own) == str(first) else first


def _transport(name: TransportName, folder: str | os.PathLike[str] | None, timeout: float) -> Transport:
    if name == "store":
        from workers.train.sync_by_store import StoreTransport

        return StoreTransport()
    if name == "group":
        from workers.train.sync_by_group import GroupTransport

        return GroupTransport(timeout)
    if name == "disk":
        from workers.train.sync_by_disk import DiskTransport

        return DiskTransport(folder or "")
    from workers.train.sync_on_device import DeviceTransport

    return DeviceTransport()
