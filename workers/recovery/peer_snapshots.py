"""PeerSnapshots: snapshots of a rank's state in its own host memory and in that of a buddy, another rank.

After a death, the shard of the dead rank is still in its buddy's memory, and the others have their own: all ranks
return to the same step without reading a disk.

Two versions are kept on both sides: the last one of which every rank knows that it is complete on all ranks, and the
one that was taken after it, which may be on its way. Before a rank writes over the older one, all ranks agree that the
newer one is complete everywhere. So there is a common complete version at any time.

Ranks with bit-identical state (the replicas of HSDP, or Megatron's dp ranks without a distributed optimizer) are each
other's copies. They send nothing, but compare checksums.

A group may continue with another number of ranks. Snapshots of both sizes then have different numbers, and those of the
former size are kept until the first one of the new size is complete.

Threads: a "snapshot-send" thread per snapshot sends it, or computes its checksum. It ends at its deadline at the
latest, and the next `PeerSnapshots.take` joins it. For the threads that receive, see `single_controller.wire.stream`.
The caller's thread and the receiving threads share ``_held`` and ``_generation``, under ``_lock``. No other lock is
taken under it. ``_sent`` and ``_checksums`` are written by the sending thread, and read after it was joined. After a
death it is not joined, because a lost host does not answer; it then has sets that nothing else reads.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from single_controller import SingleControllerError
from single_controller.wire.handshake import WireAddress
from workers.blocks import Block, checksum_of, receive_blocks, send_block
from workers.device import has_accelerator, host_memory
from workers.distributed import all_or_none, gathered
from workers.recovery.reshard import Move, moves
from workers.recovery.snapshot_choice import Recovery, Taken, buddies, is_covered_by_replicas, reference_number
from workers.recovery.weight_backup import Snapshot, empty_snapshot, live_tensors, take_snapshot

logger = logging.getLogger(__name__)

CHUNK_BYTES = 64 << 20
"""What is sent to a new rank at once."""

Shard = tuple[int, int]
"""Number of a shard, and how many there are. Ranks with the same shard have the same state, bit for bit."""


class SnapshotError(SingleControllerError, RuntimeError):
    """A snapshot could not be restored."""


class PeerSnapshots:
    """The snapshots that this rank has: its own, and those of the rank whose buddy it is.

    Call `join` before anything else, and again when ranks were replaced.

    Args:
        host: this host's address, for the connections of other ranks.
        seconds: how long sending a snapshot may take. If it takes longer, that snapshot is incomplete.
    """

    def __init__(self, host: str, seconds: float) -> None:
        self._seconds = seconds
        self._lock = threading.Lock()
        """Protects ``_held`` and ``_generation``. Held for moments only."""
        self._held: dict[int, dict[int, Block]] = {}
        self._generation = -1
        self._own: dict[int, Block] = {}
        self._latest: int | None = None
        self._committed: int | None = None
        self._sent: set[int] = set()
        self._checksums: dict[int, int] = {}
        self._sending: threading.Thread | None = None
        self._rank, self._ranks, self._shard = 0, 1, (0, 1)
        self._replicas: tuple[int, ...] = ()
        self._buddy: WireAddress | None = None
        self._wards: tuple[int, ...] = ()
        self._server = receive_blocks(host, self._allocate, self._keep, "snapshot")

    # --- life -------------------------------------------------------------------------------------------

    def join(self, rank: int, generation: int, host: int, shard: Shard, dp_rank: int) -> None:
        """Exchange addresses, and send to the buddy what it lacks. All ranks call it.

        Args:
            rank: of this process.
            generation: of the group.
            host: a number of this rank's host.
            shard: of this rank.
            dp_rank: data-parallel rank of this rank.
        """
        self._give_up_sending()
        # Set the generation before addresses are exchanged: after that, other ranks send, and `_allocate` refuses
        # snapshots of other generations.
        with self._lock:
            self._generation = generation
            held = {owner: set(blocks) for owner, blocks in self._held.items()}
        said = gathered((self._server.address, host, held, shard, dp_rank))
        hosts = [other for _, other, *_ in said]
        self._rank, self._ranks, self._shard = rank, len(said), shard
        buddy_of = buddies(hosts, [of for *_, of in said])
        self._wards = tuple(owner for owner, buddy in enumerate(buddy_of) if buddy == rank != owner)
        replicas = [other for other, (*_, of, _) in enumerate(said) if of == shard]
        covered = is_covered_by_replicas(replicas, hosts)
        self._replicas = tuple(replicas) if covered else (rank,)
        self._buddy = said[buddy_of[rank]][0] if buddy_of[rank] != rank else None
        self._sent = set() if covered else set(said[buddy_of[rank]][2].get(rank, ()))
        self._send()

    def close(self) -> None:
        """Stop receiving, and forget all snapshots. A snapshot that is being sent ends by itself."""
        self._server.close()
        with self._lock:
            # No snapshot has this generation, so those that are still arriving are refused.
            self._generation = -1
            self._held.clear()
        self._own.clear()

    @property
    def generation(self) -> int:
        """The generation of the group at the last `join`; -1 before."""
        return self._generation

    # --- taking -----------------------------------------------------------------------------------------

    def set_reference(self, snapshot: Snapshot) -> None:
        """Keep the reference model's weights, which must not change from now on, and send them with the next snapshot.
        They are not copied."""
        self._add(reference_number(self._ranks), snapshot, {})

    def take(self, state: Iterable[tuple[str, torch.Tensor]], about: Mapping[str, Any]) -> dict[str, float]:
        """Copy the state to host memory, and send it in the background. All ranks call it after the same step.

        If the snapshot before is still being sent, this waits until it has arrived, or its time is over.

        Args:
            state: (name, live tensor) pairs.
            about: what to keep with them, as JSON.

        Returns:
            Metrics, the same on every rank: the longest wait of a rank for the snapshot before.
        """
        number, waited = self._agree()
        old = None
        for stale in [known for known in self._own if known >= 0 and known != self._committed]:
            # Remove the snapshot first: if copying fails halfway, `_agree` must not count it as complete.
            block = self._own.pop(stale)
            old = Snapshot.of(block.memory, block.header["layout"])
        self._add(number, take_snapshot(live_tensors(state), old), about)
        self._latest = number
        self._send()
        return {"snapshot_wait_seconds": waited}

    def _agree(self) -> tuple[int, float]:
        """Find out whether the latest snapshot is complete on all ranks. If so, the one before is not needed any more.
        Returns the number of the next one, and the longest wait of a rank."""
        began = time.perf_counter()
        self.finish_sending()
        waited = time.perf_counter() - began
        number = -1 if self._latest is None else self._latest
        there = number in self._own and not self._unsent()  # `take` may have dropped it, and failed
        # This is also a barrier: no rank overwrites its older snapshot before all ranks have reported which of their
        # snapshots are complete.
        said = gathered((number, there, self._checksums.get(number), self._replicas, waited))
        numbers, sent, checksums, replicas, waits = zip(*said, strict=True)
        latest, longest = max(numbers), max(waits)
        if latest < 0:
            return 0, longest
        # A rank may have had no memory for its copy, and be a snapshot behind.
        late = [rank for rank, of in enumerate(numbers) if not sent[rank] or of != latest]
        differ = [rank for rank, of in enumerate(replicas) if any(checksums[one] != checksums[rank] for one in of)]
        if differ and not late:
            # Each rank comes to the same result. From now on all of them send their snapshots.
            self._replicas = (self._rank,)
            for one in self._own.values():
                one.header["owners"] = self._replicas
            self._sent.clear()
        if not self._rank and (late or differ):
            why = f"the ranks {late} have not sent theirs" if late else f"the replicas {differ} are not bit-identical"
            logger.warning("the last snapshot is incomplete, and a new one is taken instead: %s", why)
        if not late and not differ:
            # All ranks have gathered the same values, so either all ranks commit or none does.
            self._committed = self._latest
            with self._lock:
                for owner in self._held.keys() - set(self._wards):
                    del self._held[owner]
                for of_owner in (self._own, *self._held.values()):
                    for stale in [one for one in of_owner if one < 0 and one != reference_number(self._ranks)]:
                        del of_owner[stale]
        return latest + 1, longest

    def _add(self, number: int, snapshot: Snapshot, about: Mapping[str, Any]) -> None:
        header = {
            "owner": self._rank,
            "owners": self._replicas,
            "ranks": self._ranks,
            "shard": self._shard,
            "number": number,
            "nbytes": snapshot.memory.numel(),
            "layout": snapshot.layout,
            "about": dict(about),
        }
        self._own[number] = Block(header, snapshot.memory, None)
        self._sent.discard(number)
        self._checksums.pop(number, None)

    # --- sending ----------------------------------------------------------------------------------------

    def _unsent(self) -> list[int]:
        """The snapshots of the group's present size that are not at the buddy."""
        of_size = (number for number, one in self._own.items() if one.header["ranks"] == self._ranks)
        return sorted(number for number in of_size if number not in self._sent)

    def _send(self) -> None:
        """Send what is not at the buddy, in the background."""
        self.finish_sending()
        numbers = self._unsent()
        if not numbers:
            return
        # The buddy may overwrite all of this rank's snapshots except the committed one.
        now = {"generation": self._generation, "committed": self._committed}
        blocks = [(number, self._own[number].header | now, self._own[number].memory) for number in numbers]
        end = time.monotonic() + self._seconds
        # The thread has its own references: it may still run after `_give_up_sending`.
        buddy, sent, checksums = self._buddy, self._sent, self._checksums
        to_replicas = len(self._replicas) > 1

        def send() -> None:
            for number, header, memory in blocks:
                try:
                    # Send nothing to replicas: they hold the same bytes, and `_agree` compares their checksums.
                    if to_replicas or buddy is None:
                        checksums[number] = checksum_of(memory)
                    else:
                        checksums[number] = send_block(buddy, header, memory, end)
                    sent.add(number)
                except Exception as error:  # training goes on without this snapshot
                    logger.warning("rank %d: a snapshot was not sent: %s: %s", self._rank, type(error).__name__, error)

        self._sending = threading.Thread(target=send, name="snapshot-send", daemon=True)
        self._sending.start()

    def finish_sending(self) -> None:
        """Wait until this rank sends nothing."""
        if self._sending is not None:
            self._sending.join()
            self._sending = None

    def _give_up_sending(self) -> None:
        """Leave the sending thread to itself: the buddy may be dead, and not answer. What it sends from now on is of a
        former generation, and is refused."""
        self._sending = None
        self._sent, self._checksums = set(), {}

    # --- receiving, in other threads ---------------------------------------------------------------------

    def _allocate(self, header: dict[str, Any]) -> torch.Tensor | None:
        """Return memory for a block: that of a version which the sender does not need any more, if it fits."""
        with self._lock:
            if header["generation"] != self._generation:
                return None
            blocks = self._held.setdefault(header["owner"], {})
            for number in [known for known in blocks if known >= 0 and known != header["committed"]]:
                # Taken out first: while it is written over, nobody may take it for a complete snapshot.
                memory = blocks.pop(number).memory
                if memory.numel() == header["nbytes"]:
                    return memory
        return host_memory(header["nbytes"], pinned=False)

    def _keep(self, block: Block) -> None:
        with self._lock:
            # Again: ranks may have been replaced while it arrived. The sender counts it as kept all the same, but it is
            # of a former generation, whose records of what was sent nobody reads any more.
            if block.header["generation"] == self._generation:
                self._held.setdefault(block.header["owner"], {})[block.header["number"]] = block

    # --- restoring --------------------------------------------------------------------------------------

    def versions(self, usable: Callable[[Shard], bool]) -> dict[int, dict[int, Taken]]:
        """Return the complete snapshots that this rank has; see `workers.recovery.snapshot_choice.Versions`.

        Args:
            usable: whether the ranks can use a snapshot of a shard.
        """
        with self._lock:
            headers = [(owner, block.header) for owner, blocks in self._held.items() for block in blocks.values()]
        headers += [(owner, one.header) for one in self._own.values() for owner in one.header["owners"]]
        by_owner: dict[int, dict[int, Taken]] = {}
        for owner, header in headers:
            if usable(tuple(header["shard"])):
                taken = Taken(header["about"].get("rollout_id", -1), header["ranks"])
                by_owner.setdefault(owner, {})[header["number"]] = taken
        return by_owner

    def restore(
        self,
        recovery: Recovery,
        rank: int,
        shard: Shard,
        live: Callable[[Mapping[str, Any]], dict[str, torch.Tensor]],
        weights: Callable[[Mapping[str, Any]], dict[str, torch.Tensor]],
    ) -> tuple[Snapshot, dict[str, Any], Snapshot | None]:
        """Get this rank's shard of the snapshots from where they are. All ranks call it, in the new default process
        group, before `join`. Newer snapshots are forgotten.

        Args:
            recovery: what to restore.
            rank: of this process.
            shard: of this rank.
            live: returns the live tensors, by name, into which a snapshot of which this was kept will be written. It is
                only called if the state is sharded over another number of ranks now.
            weights: likewise for the reference model's weights.

        Returns:
            The state, what was kept with it, and the reference model's weights.

        Raises:
            SnapshotError: on all ranks: a snapshot has not arrived unchanged, or cannot be sharded like this.
        """
        self._give_up_sending()
        with self._lock:
            self._generation = -1  # what is still arriving may have a number that will be given again
        shards, latest = zip(*gathered((shard, self._latest)), strict=True)
        number = recovery.number
        resized = len(shards) != len(recovery.sources)
        with all_or_none(SnapshotError, "the snapshots could not be restored"):
            wrong: list[str] = []
            state, about = self._bring(number, recovery.sources, rank, shards, live, wrong)
            reference = None
            if recovery.references:
                of_size = reference_number(len(recovery.references))
                reference, _ = self._bring(of_size, recovery.references, rank, shards, weights, wrong)
            if wrong:
                raise SnapshotError("; ".join(wrong))
        with self._lock:
            for blocks in self._held.values():
                # Their numbers will be used again, for snapshots of other states.
                for useless in [known for known in blocks if known > number]:
                    del blocks[useless]
        for other in [known for known in self._own if known >= 0 and known != number]:
            del self._own[other]
        self._rank, self._ranks, self._shard = rank, len(shards), shard
        self._replicas = tuple(other for other, of in enumerate(shards) if of == shard)
        self._committed = number
        # The snapshots of another size are of use until the first one of this size is complete.
        self._latest = 1 + max(known for known in latest if known is not None) if resized else number
        restored = {self._latest: (state, about)}
        if reference is not None:
            restored[reference_number(len(shards))] = reference, {}
        for number, (snapshot, kept) in restored.items():
            # This rank may be new, or have had another number when it took its own.
            if number not in self._own or self._own[number].header["owner"] != rank:
                self._add(number, snapshot, kept)
        return state, about, reference

    def _bring(
        self,
        number: int,
        sources: Sequence[int],
        rank: int,
        shards: Sequence[Shard],
        live: Callable[[Mapping[str, Any]], dict[str, torch.Tensor]],
        wrong: list[str],
    ) -> tuple[Snapshot, dict[str, Any]]:
        """Bring each rank its shard of a snapshot. All ranks come to the same plan, and transfer in the same order, so
        that none waits in a circle. What went wrong is noted, and raised after all have transferred."""
        mine = {owner: self._find(owner, number) for owner, source in enumerate(sources) if source == rank}
        said = gathered({owner: tuple(one.header["shard"]) for owner, one in mine.items()})
        shard_of: dict[int, Shard] = {owner: shard for part in said for owner, shard in part.items()}
        if shard_of[0][1] != shards[0][1]:
            return self._reshard(sources, rank, shards, mine, shard_of, live, wrong)
        found: tuple[Snapshot, dict[str, Any]] | None = None
        owners: dict[Shard, list[int]] = {}
        for owner in range(len(sources)):
            owners.setdefault(shard_of[owner], []).append(owner)
        for to, shard in enumerate(shards):
            owner = to  # with the same number of ranks each gets what was its own; otherwise best what it has
            if len(sources) != len(shards):
                owner = next((one for one in owners[shard] if sources[one] == to), owners[shard][0])
            source = sources[owner]
            if rank == source:
                one = mine[owner]
                if rank == to:
                    kept = Snapshot.of(one.memory, one.header["layout"])
                    if len(sources) != len(shards) and number >= 0:
                        # It gets another number, and this memory, under the old one, is written over by a later one.
                        kept = take_snapshot(kept.parts, None)
                    found = kept, one.header["about"]
                else:
                    _send(one.memory, to, one.header, one.checksum)
            elif rank == to:
                memory, header = _receive(source, f"the snapshot of rank {owner}", wrong)
                found = Snapshot.of(memory, header["layout"]), header["about"]
        if found is None:
            raise SnapshotError(f"no rank has a snapshot for rank {rank}")
        return found

    def _reshard(
        self,
        sources: Sequence[int],
        rank: int,
        shards: Sequence[Shard],
        mine: Mapping[int, Block],
        shard_of: Mapping[int, Shard],
        live: Callable[[Mapping[str, Any]], dict[str, torch.Tensor]],
        wrong: list[str],
    ) -> tuple[Snapshot, dict[str, Any]]:
        """`_bring`, if there is another number of shards now."""
        # Reverse the order, so that the dict keeps the lowest owner of each shard, which is the same on all ranks.
        owner_of: dict[int, int] = {number: owner for owner, (number, _) in sorted(shard_of.items(), reverse=True)}
        said = gathered(
            {
                number: ({name: tuple(shape) for name, _, shape, _ in one.header["layout"]}, one.header["about"])
                for number, owner in owner_of.items()
                if (one := mine.get(owner)) is not None
            }
        )
        before = {number: known for part in said for number, known in part.items()}
        about: dict[str, Any] = before[0][1]
        # Allocate before the next collective, in which the other ranks would wait for a rank that has no memory.
        with all_or_none(SnapshotError, "the new shards could not be allocated"):
            tensors = live(about)
            snapshot = empty_snapshot(tensors)
        now = gathered({name: tuple(tensor.shape) for name, tensor in tensors.items()})
        shapes = {number: of_rank for (number, _), of_rank in zip(shards, now, strict=True)}
        try:
            plan: dict[tuple[int, int], list[Move]] = {}
            for move in moves([before[k][0] for k in sorted(before)], [shapes[k] for k in sorted(shapes)]):
                plan.setdefault((move.source, move.target), []).append(move)
        # All ranks have gathered the same shapes, so either all ranks raise or none does.
        except ValueError as error:
            raise SnapshotError(str(error)) from error
        for to, (target, _) in enumerate(shards):
            for number in sorted(before):
                part, owner = plan.get((number, target), ()), owner_of[number]
                source = sources[owner]
                if not part or rank not in (source, to):
                    continue
                if rank == source:
                    old = Snapshot.of(mine[owner].memory, mine[owner].header["layout"])
                    packed = torch.cat([_bytes(_rows(old.parts[one.name], one.source_row, one.rows)) for one in part])
                    if to != rank:
                        _send(packed, to, {"nbytes": packed.numel()})
                        continue
                else:
                    packed, _ = _receive(source, f"rows of the snapshot of rank {owner}", wrong)
                _unpack(packed, [_rows(snapshot.parts[one.name], one.target_row, one.rows) for one in part])
        return snapshot, about

    def _find(self, owner: int, number: int) -> Block:
        """A snapshot that this rank has: of another one, or its own."""
        with self._lock:
            held = self._held.get(owner, {}).get(number)
        # Look up this rank's own snapshots by number only: `versions` lists them under the rank of every replica.
        return held or self._own[number]


def _rows(tensor: torch.Tensor, begin: int, rows: int | None) -> torch.Tensor:
    return tensor if rows is None else tensor[begin : begin + rows]


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def _unpack(packed: torch.Tensor, into: Sequence[torch.Tensor]) -> None:
    targets = [_bytes(tensor) for tensor in into]  # views of a snapshot: contiguous
    for target, part in zip(targets, packed.split([target.numel() for target in targets]), strict=True):
        target.copy_(part)


def _send(memory: torch.Tensor, to: int, header: Mapping[str, Any], checksum: int | None = None) -> None:
    checksum = checksum_of(memory) if checksum is None else checksum
    dist.send_object_list([(dict(header), checksum)], dst=to, device=torch.device("cpu"))
    for part in memory.split(CHUNK_BYTES):
        dist.send(part, dst=to)


def _receive(source: int, what: str, wrong: list[str]) -> tuple[torch.Tensor, dict[str, Any]]:
    said: list[Any] = [None]
    dist.recv_object_list(said, src=source, device=torch.device("cpu"))
    header, checksum = said[0]
    memory = host_memory(header["nbytes"], pinned=has_accelerator())
    for part in memory.split(CHUNK_BYTES):
        dist.recv(part, src=source)
    if checksum_of(memory) != checksum:
        wrong.append(f"{what} has not arrived unchanged from rank {source}")
    return memory, header
