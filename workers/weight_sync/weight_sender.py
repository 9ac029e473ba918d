"""WeightSender: the train side of weight sync. `workers.weight_sync.sync_protocol` says how an update proceeds."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
import pickle
import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist

from dispatch.checks import check_count, check_seconds
from workers.distributed import gathered
from workers.weight_sync.buckets import BUCKET_BYTES
from workers.weight_sync.digest import combine
from workers.weight_sync.expert_names import ExpertNames
from workers.weight_sync.pieces import Header, Packer, Payload
from workers.weight_sync.receiver_calls import Receivers, Rollout, check_rollout
from workers.weight_sync.sync_protocol import (
    UPDATE_SECONDS,
    Budget,
    Finished,
    ReceiverClass,
    ReceiverInfo,
    SyncReport,
    Verify,
    WeightSyncError,
    some,
    sync_error,
)
from workers.weight_sync.transports.disk import DiskTransport
from workers.weight_sync.transports.object_store import ObjectStoreTransport
from workers.weight_sync.transports.process_group import ProcessGroupTransport
from workers.weight_sync.transports.same_device import DeviceTransport
from workers.weight_sync.transports.weight_transport import Transport, Update, call_all
from workers.weight_sync.weight_plan import Box, Held, Round, Shard, divide_among_ranks, make_plan, volume

TransportName = Literal["store", "group", "disk", "device"]

_TRANSPORTS: dict[TransportName, type[Transport]] = {
    "store": ObjectStoreTransport,
    "group": ProcessGroupTransport,
    "device": DeviceTransport,
}
"""Those without arguments."""

_MAX_TIMEOUT = 1e7  # seconds, 116 days: neither Ray nor torch accepts infinity


Layout = dict[str, tuple[tuple[int, ...], torch.dtype, list[Box]]]
"""What a train rank has: name -> shape and dtype of the whole tensor, and the rank's boxes of it."""


class WeightSender:
    """Sends weights to rollout workers. Every train rank has one, and all ranks call `send` together.

    Args:
        transport: "store": Ray's object store. "group": process groups of train and rollout workers, gloo or nccl.
            "disk": safetensors files. "device": from memory to memory, for rollout workers on the train ranks' own
            devices, in the same process or not.
        rollout: the group of rollout workers (as an argument of a call it arrives attached), a list of groups, a
            function that returns them, or a manager with a ``group``. It is looked up again for each update.
        bucket_bytes: size of a bucket, in bytes, of the weights that are sent at a time. Each train rank and each
            receiver needs memory for about two buckets. A row of a tensor is never divided.
        folder: for "disk": a folder that train and rollout workers can access under this path, used for nothing else.
        timeout: seconds that an update may take, with all its phases, and including earlier calls on the receivers.
            Keep it well below the timeout of the train ranks' collectives.
        neighbour: for "device": the rollout worker in the same process, ``self.role_worker("rollout")``. ``rollout``
            is not needed then.
        process_group: of the train ranks; the default group if None.
        verify: what the receivers compare before they accept the version. "fingerprint": the digests of the tensors
            that the update has changed, read back from the engine, with those that the trainer has computed. "full":
            the same for all tensors. "none": nothing.
        delta: send only the elements that have changed since the last update, bit for bit, to receivers that have
            exactly the weights of that update. Each rank then keeps a copy of its shards in host memory. Not for
            "disk".
        full_every: with ``delta``, n sends whole tensors in every n-th update; 0 only to receivers that need them.
        double_buffer: whether receivers keep the previous version, and generate with it, until the update is complete.
            They need host memory for another copy of the weights. None: those that have the memory. A receiver without
            a double buffer has no version during an update, and gets no deltas.
        exact: the trainer's digest in exact mode, see `exact_decoding.probe`; an update to an engine with another one,
            or with none, fails before anything is sent. None for any engine.

    Raises:
        ValueError: an unknown transport, or an option that is invalid or missing.
        TypeError: weights cannot be sent to ``rollout``, or it is None without a ``neighbour``.
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
        verify: Verify = "none",
        delta: bool = False,
        full_every: int = 0,
        double_buffer: bool | None = None,
        exact: str | None = None,
    ) -> None:
        if transport not in get_args(TransportName):
            raise ValueError(f"transport={transport!r}: use one of {', '.join(map(repr, get_args(TransportName)))}")
        check_count("bucket_bytes", bucket_bytes)
        if (folder is not None) is not (transport == "disk"):
            raise ValueError(
                f"transport={transport!r}, folder={folder!r}: 'disk' needs a folder; other transports do not use one"
            )
        if neighbour is not None and transport != "device":
            raise ValueError(
                f"transport={transport!r} sends to other processes; use 'device' for a rollout worker in this process"
            )
        if neighbour is None:
            check_rollout(rollout)
        _check_verify(verify)
        if delta and (transport == "disk" or double_buffer is False):
            raise ValueError(
                f"delta=True with transport={transport!r} and double_buffer={double_buffer!r}: use another transport "
                "than 'disk', whose files have whole tensors, and receivers that keep the version before"
            )
        check_count("full_every", full_every, 0)
        self._timeout = min(check_seconds("timeout", timeout), _MAX_TIMEOUT)
        self._bucket_bytes = bucket_bytes
        self._process_group = process_group
        self._verify = verify
        self._full_every = full_every
        self._double_buffer = double_buffer
        self._exact = exact
        self._transport = _TRANSPORTS[transport]() if folder is None else DiskTransport(folder)
        self._name = transport
        self._id = uuid.uuid4().hex
        self._receivers = Receivers(rollout, neighbour)
        self._delta, self._packer = delta, Packer(delta=delta)
        self._updates = 0
        self._previous: Update | None = None
        self._layouts: list[Layout] = []
        """On rank 0, of all ranks. They travel only when they change, and so does the plan."""
        self._merged_from: tuple[list[str], dict[str, tuple[int, ...]]] | None = None
        self._merged: tuple[dict[str, Held], dict[str, tuple[tuple[int, ...], torch.dtype]]] = {}, {}
        """On rank 0, what `merge_layouts` has returned for these layouts, by id, and shapes of the receivers."""
        self._layout_id = self._plan_id = self._leader = ""
        self._plan: tuple[dict[str, tuple[tuple[int, ...], torch.dtype]], list[Round]] = {}, []

    def connect(self, rollout: Rollout) -> None:
        """Send to these rollout workers from now on. Call it after the workers were created again."""
        check_rollout(rollout)
        self._receivers = Receivers(rollout)

    def versions(self) -> list[int | None]:
        """Return the weight version of each rollout worker, in order of group and rank. It is None for a worker that
        has no complete weights, and 0 for a `RolloutWorker` that was restarted, or was added later. The next `send`
        brings them up to date.

        Raises:
            WeightSyncError: a receiver does not respond.
        """
        try:
            self._receivers.look_up(Budget(self._timeout))
            return self._receivers.call("current_weight_version")
        except Exception as error:
            raise sync_error("the rollout workers' weight versions are not available", error) from error

    def send(
        self,
        version: int,
        weights: Iterable[Shard | tuple[str, torch.Tensor]],
        *,
        rank: int = 0,
        ranks: int = 1,
        verify: Verify | None = None,
    ) -> SyncReport:
        """Send weights to all rollout workers. All ranks call it together.

        Args:
            version: of the weights, from 1. Version 0 is what the rollout workers' engines start with, also after a
                restart.
            weights: what this rank has: `TrainModel.hf_shards`, or pairs of a name, as in the Hugging Face model's
                ``state_dict()``, and a whole tensor. Together the ranks have each element of each tensor. Several ranks
                may have the same shard; one of them sends it. Tied weights come once.
            rank: of this process among the train ranks.
            ranks: number of train ranks.
            verify: instead of the sender's, in this update.

        Raises:
            WeightSyncError: on all ranks alike, within seconds of the first rank or receiver that fails. See there for
                what the rollout workers have. If ``weights`` raised on some of the ranks while others wait for them in
                a collective, those do not learn of it.
            ValueError: the version is not an integer of at least 1.
        """
        if not isinstance(version, int) or isinstance(version, bool) or version < 1:
            raise ValueError(
                f"version={version!r}: expected an integer of at least 1; version 0 means that a rollout worker has "
                "received no weights since it was started"
            )
        verify = self._verify if verify is None else _check_verify(verify)
        begun = time.monotonic()
        key = self._common_key(ranks)
        leader = key.partition(" ")[0]
        if leader != self._leader:  # another rank 0 than before, which knows no layouts
            self._leader, self._layout_id, self._plan_id = leader, "", ""
        update = Update(version, self._name, rank, ranks, self._receivers, Budget(self._timeout), key)
        update.process_group = self._process_group
        update.verify = None if verify == "none" else verify
        # `_common_key` was a collective, so all ranks have returned from the last update and no longer read its keys.
        if self._previous is not None:
            self._previous.forget()
        self._previous = update
        self._updates += 1
        try:
            self._begin(update, weights)
            nbytes, fingerprint = self._send_all(update)
            finished = self._finish(update, fingerprint)
        except BaseException as failed:  # KeyboardInterrupt too: what is left in progress would disturb the next update
            self._abandon(update, failed)
            raise
        # Every receiver has this version now, so the next deltas can be based on it.
        self._packer.end(key)
        proofs = [one.proved for one in finished]
        return SyncReport(
            version,
            time.monotonic() - begun,
            nbytes,
            len(update.rounds),
            len(update.infos),
            sum(len(one.members) for one in update.classes if one.patched),
            max((one.pause for one in finished), default=0.0),
            fingerprint,
            next((proof for proof in proofs if proof != "engine"), "engine") if proofs else None,
        )

    def close(self) -> None:
        """Free what is kept between updates: buffers, copies and process groups."""
        self._transport.close()
        self._packer = Packer(delta=self._delta)

    def _common_key(self, ranks: int) -> str:
        """Return the key of an update. All ranks begin it together, so this is the one step that is a collective: it
        waits no longer than any other collective, and what follows needs a name that all ranks know."""
        key = f"{self._id} {uuid.uuid4().hex}"
        return key if ranks == 1 else str(gathered(key, self._process_group)[0])

    # --- begin ------------------------------------------------------------------------------------------

    def _begin(self, update: Update, weights: Iterable[Shard | tuple[str, torch.Tensor]]) -> None:
        with update.attempt(f"train rank {update.rank} could not begin to send version {update.version}"):
            shards = [one if isinstance(one, Shard) else Shard.whole(*one) for one in weights]
            layout = layout_of(shards)
            layout_id = hashlib.sha256(pickle.dumps(layout)).hexdigest()
            base = self._packer.base
            # No other rank: a manager that is an actor would be asked by each, and each would connect to all workers.
            if not update.rank or self._transport.every_rank_calls:
                self._receivers.look_up(update.budget)
            # Begin as late as possible: a receiver without a double buffer stops generating when its update begins.
            own = [] if self._receivers.neighbour is None else self._begin_receivers(update)
            # Rank 0 keeps the layouts, so that they travel only when they change.
            about = None if layout_id == self._layout_id else layout, layout_id, self._plan_id, base, own
            self._layout_id = layout_id

        own_plan: list[Any] = []  # on rank 0, if there is a new one

        def begin(values: list[Any]) -> Any:
            # For the same reason, begin only here: `decide` runs when all ranks have arrived.
            infos = [info for *_, infos in values for info in infos] or self._begin_receivers(update)
            known = self._layouts or [{}] * update.ranks
            self._layouts = layouts = [known[rank] if new is None else new for rank, (new, *_) in enumerate(values)]
            bases = {base for *_, base, _ in values}
            # The bases differ after a rank was restarted, or if only some ranks noticed that the last update failed.
            base = bases.pop() if len(bases) == 1 else None
            if self._full_every and not self._updates % self._full_every:
                base = None
            classes = _classes(infos, base)
            merged_from = [layout_id for _, layout_id, *_ in values], infos[0].shapes
            if self._merged_from != merged_from:  # not in each update: thousands of ranks have millions of shards
                names = ExpertNames(infos[0].shapes)
                self._merged = merge_layouts([names.layout(layout) for layout in layouts])
                self._merged_from = merged_from
            held, update.tensors = self._merged
            for one in classes:
                first = infos[one.members[0]]
                _check_names(first, held, update.version)
                for member in one.members:
                    _check_exact(infos[member], self._exact)
                    # Shared objects travel to the train ranks once, and not once for each member.
                    infos[member] = replace(infos[member], shapes=first.shapes, slices=one.slices, dtypes=one.dtypes)
            made_from = merged_from[0], [one.slices for one in classes], list(held)
            plan_id = hashlib.sha256(repr(made_from).encode()).hexdigest()
            if any(known != plan_id for _, _, known, *_ in values):
                try:
                    rounds = make_plan(held, [one.slices for one in classes], self._bucket_bytes)
                except ValueError as failed:
                    raise WeightSyncError(f"weight version {update.version} was not sent: {failed}") from failed
                # To each rank its part: the whole for each would take the square of the number of ranks.
                plans = [(update.tensors, part) for part in divide_among_ranks(rounds, update.ranks)]
                update.give_each(plans)
                own_plan.append(plans[0])
            return infos, classes, plan_id, bool(own_plan), self._transport.prepare(update)

        infos, classes, self._plan_id, is_new, shared = update.agree("begin", about, begin)
        if is_new:
            self._plan = own_plan[0] if own_plan else update.take_own()
        update.infos, update.classes, update.shared = infos, classes, shared
        update.tensors, update.rounds = self._plan
        with update.attempt():
            self._packer.begin(ExpertNames(infos[0].shapes).shards(shards))
            self._transport.begin(update)
        # Without this, ranks would wait in the first transfer for a rank that could not begin.
        update.agree("begun")

    def _begin_receivers(self, update: Update) -> list[ReceiverInfo]:
        update.begun = True
        try:
            return call_all(update, "begin_weights", update.key, update.version, self._id, self._double_buffer)
        except Exception as failed:
            raise update.error(failed) from failed

    # --- rounds -----------------------------------------------------------------------------------------

    def _send_all(self, update: Update) -> tuple[int, int | None]:
        """Send this rank's pieces of all rounds. Returns their bytes, and the fingerprint of all ranks' weights."""
        nbytes = 0
        digests: list[tuple[str, tuple[int, ...], int]] = []
        for number, pieces in enumerate(update.rounds):
            payloads: dict[int, Payload] = {}
            headers: dict[int, Header] = {}
            with update.attempt():
                for index, receivers in enumerate(update.classes):
                    if (update.rank, index) in pieces:
                        made = pieces[update.rank, index]
                        payloads[index] = self._packer.pack(made, receivers, digests=update.verify is not None)
                        headers[index] = payloads[index].header()
                self._packer.next_round()
                update.budget.left()
            # Transfer only after all ranks have packed. Otherwise, ranks would wait for one that has failed.
            # Their headers come to rank 0. From there to all ranks, they would take the square of the number of ranks.
            of_ranks: list[dict[int, Header]] = []
            keep = of_ranks.extend  # on rank 0; returns nothing to tell
            share: Callable[[list[Any]], Any] = list if self._transport.needs_all_headers else keep
            known: list[dict[int, Header]] = update.agree(f"round {number}", headers, share) or of_ranks
            known = known or [{}] * update.rank + [headers]
            nbytes += sum(tensor.nbytes for payload in payloads.values() for tensor in payload.tensors)
            for piece in payloads[0].pieces if 0 in payloads else ():
                # Experts are stacked along the first dim, and each expert has a separate digest.
                for expert, one in enumerate(piece.digests or ()):
                    begin = [begin for begin, _ in piece.box]
                    if expert:
                        begin[0] += expert
                    digests.append((piece.name, tuple(begin), one))
            with update.attempt():  # others may be waiting for what this rank did not send
                self._transport.transfer(update, number, payloads, known)
        with update.attempt():
            self._transport.flush(update)
        fingerprint = update.agree("sent", digests, lambda of_ranks: combine(itertools.chain(*of_ranks)))
        return nbytes, None if update.verify is None else fingerprint

    def _finish(self, update: Update, fingerprint: int | None) -> list[Finished]:
        """Have the receivers take the version. Returns what they say."""
        said: list[Finished] = []
        # Each rank's own receiver, or rank 0 for all.
        if not update.rank or self._receivers.neighbour is not None:
            with update.attempt():
                self._transport.finish(update)
                said = call_all(update, "finish_weights", update.key, update.verify, fingerprint)
        # Ranks that called no receiver wait here too: success means that every receiver has the version.
        of_ranks: list[list[Finished]] = update.agree("finish", said, list)
        return [one for finished in of_ranks for one in finished]

    def _abandon(self, update: Update, failed: BaseException) -> None:
        """Tell everyone, and drop what is unfinished."""
        error = failed if isinstance(failed, WeightSyncError) else update.error(failed)
        # Tell the train ranks first: they wait for this rank, and the receivers may respond late.
        with contextlib.suppress(dist.DistError):  # the store's process has died
            update.give_up(error)
        if update.begun:
            self._receivers.abandon(update.key, str(error).partition("\n")[0])
        self._packer.end(None)
        self._layout_id = self._plan_id = ""  # rank 0 may not have got them, or this rank not the plan
        self._transport.failed(update)


def _check_verify(verify: Verify) -> Verify:
    if verify not in get_args(Verify):
        raise ValueError(f"verify={verify!r}: use one of {', '.join(map(repr, get_args(Verify)))}")
    return verify


def layout_of(shards: Iterable[Shard]) -> Layout:
    """Return what a train rank has.

    Raises:
        WeightSyncError: shards of one tensor differ in its shape or dtype, come twice, or are not real numbers.
    """
    layout: Layout = {}
    for shard in shards:
        shape, dtype, boxes = layout.setdefault(shard.name, (shard.shape, shard.dtype, []))
        if (shape, dtype) != (shard.shape, shard.dtype):
            raise WeightSyncError(f"{shard.name!r} has shards of {dtype} {shape} and of {shard.dtype} {shard.shape}")
        if not torch.can_cast(dtype, torch.float32):
            raise WeightSyncError(f"{shard.name!r} has dtype {dtype}; expected real numbers")
        if shard.box in boxes:
            raise WeightSyncError(f"{shard.name!r} {shard.box} comes twice from one rank")
        boxes.append(shard.box)
    return layout


def merge_layouts(layouts: Sequence[Layout]) -> tuple[dict[str, Held], dict[str, tuple[tuple[int, ...], torch.dtype]]]:
    """Return what all train ranks have together, and the shape and dtype of each tensor.

    Args:
        layouts: by rank.

    Raises:
        WeightSyncError: the shape or dtype of a tensor is another one on another rank.
    """
    tensors: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
    boxes: dict[str, dict[Box, list[int]]] = {}
    for rank, layout in enumerate(layouts):
        for name, (shape, dtype, own) in layout.items():
            known = tensors.setdefault(name, (shape, dtype))
            if known != (shape, dtype):
                raise WeightSyncError(
                    f"train rank {rank} has {name!r} with shape and dtype {(shape, dtype)}, and another rank {known}"
                )
            of_name = boxes.setdefault(name, {})
            for box in filter(volume, own):
                of_name.setdefault(box, []).append(rank)
    return {name: Held(shape, dtype.itemsize, boxes[name]) for name, (shape, dtype) in tensors.items()}, tensors


def _classes(infos: Sequence[ReceiverInfo], base: str | None) -> list[ReceiverClass]:
    """Divide the receivers into classes."""
    divided: list[tuple[ReceiverInfo, list[int]]] = []
    for number, info in enumerate(infos):
        for first, members in divided:
            if (first.shapes, first.slices, first.dtypes) == (info.shapes, info.slices, info.dtypes):
                members.append(number)
                break
        else:
            divided.append((info, [number]))
    return [
        ReceiverClass(
            tuple(members),
            first.slices,
            first.dtypes,
            base is not None and all(infos[member].base == base for member in members),
        )
        for first, members in divided
    ]


def _check_exact(info: ReceiverInfo, digest: str | None) -> None:
    if digest is None or info.exact == digest:
        return
    if info.exact is None:
        why = "its engine is not exact, or cannot be; use HFEngine(..., exact=True), or set args.exact=False"
    else:
        why = (
            "its CPU or its libraries compute other bits than the trainer's (in the same test, the digests of the "
            f"log-probabilities are {info.exact} and {digest}); run both on machines of one kind, and with one "
            "param_dtype and fp32_lm_head, or set args.exact=False"
        )
    raise WeightSyncError(f"args.exact=True, but rollout worker {info.rank} does not agree with the trainer: {why}")


def _check_names(info: ReceiverInfo, held: dict[str, Held], version: int) -> None:
    """Check before anything is sent that a receiver gets all that its engine needs, and nothing else."""
    which = f"rollout rank {info.rank}, version {version}"
    missing = [name for name, shape in info.shapes.items() if name not in held and 0 not in shape]
    unknown = [name for name in held if name not in info.shapes]
    if unknown:
        takes = ". HFEngine takes it with lora=LoraSettings.from_args(args); VLLMEngine and HTTPEngine need lora_rank=0"
        lora = takes if ".lora_" in unknown[0] else ""
        raise WeightSyncError(f"{which}: the engine has no weight {unknown[0]!r}; it needs also: {some(missing)}{lora}")
    if missing:
        raise WeightSyncError(f"{which}: no train rank has tensors that the engine needs: {some(missing)}")
    for name, shape in info.shapes.items():
        if name in held and tuple(shape) != tuple(held[name].shape):
            raise WeightSyncError(f"{which}: {name!r} has shape {held[name].shape}; the engine expects {tuple(shape)}")
