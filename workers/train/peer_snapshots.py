"""PeerSnapshots: snapshots of a rank's state in its own host memory and in that of a buddy, another rank.

After a death, the shard of the dead rank is still in its buddy's memory, and the others have their own: all ranks
return to the same step without reading a disk.

Two versions are kept on both sides: the last one of which every rank knows that it is complete on all ranks, and the
one that was taken after it, which may be on its way. Before a rank writes over the older one, all ranks agree that the
newer one is complete everywhere. So there is a common complete version at any time.

Ranks with bit-identical state (the replicas of HSDP, or Megatron's dp ranks without a distributed optimizer) are each
other's copies. They send nothing, but compare checksums.

Threads: a "snapshot-send" thread per snapshot sends it, or computes its checksum. It ends at its deadline at the
latest, and the next `PeerSnapshots.take` joins it. For the threads that receive, see `workers.train.block_transport`.
The caller's thread and the receiving threads share ``_held`` and ``_generation``, under ``_lock``. No other lock is
taken under it. ``_sent`` and ``_checksums`` are written by the sending thread, and read after it was joined. After a
death it is not joined, because a lost host does not answer; it then has sets that nothing else reads.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from single_controller import SingleControllerError
from workers.device import has_cuda, host_memory
from workers.distributed import all_or_none, gathered
from workers.train.block_transport import Block, BlockAddress, BlockServer, checksum_of, send_block
from workers.train.recovery import REFERENCE, Recovery, buddies, is_covered_by_replicas
from workers.train.weight_backup import Snapshot, live_tensors, take_snapshot

logger = logging.getLogger(__name__)

CHUNK_BYTES = 64 << 20
"""What is sent to a new rank at once."""


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
        self._own: dict[int, Snapshot] = {}
        self._headers: dict[int, dict[str, Any]] = {}
        self._latest: int | None = None
        self._committed: int | None = None
        self._sent: set[int] = set()
        self._checksums: dict[int, int] = {}
        self._sending: threading.Thread | None = None
        self._rank = 0
        self._replicas: tuple[int, ...] = ()
        self._buddy: BlockAddress | None = None
        self._wards: tuple[int, ...] = ()
        self._server = BlockServer(host, self._allocate, self._keep)

    # --- life -------------------------------------------------------------------------------------------

    def join(self, rank: int, generation: int, host: int, replicas: Sequence[int]) -> None:
        """Exchange addresses, and send to the buddy what it lacks. All ranks call it.

        Args:
            rank: of this process.
            generation: of the group.
            host: a number of this rank's host.
            replicas: the ranks with bit-identical state, this one included.
        """
        self._give_up_sending()
        with self._lock:
            self._generation = generation
            held = {owner: set(blocks) for owner, blocks in self._held.items()}
        said = gathered((self._server.address, host, held))
        hosts = [other for _, other, _ in said]
        self._rank = rank
        buddy_of = buddies(hosts)
        self._wards = tuple(owner for owner, buddy in enumerate(buddy_of) if buddy == rank)
        covered = is_covered_by_replicas(replicas, hosts)
        self._replicas = tuple(replicas) if covered else (rank,)
        self._buddy = said[buddy_of[rank]][0]
        self._sent = set() if covered else set(said[buddy_of[rank]][2].get(rank, ()))
        self._send([number for number in sorted(self._own) if number not in self._sent])

    def close(self) -> None:
        """Stop receiving, and forget all snapshots. A snapshot that is being sent ends by itself."""
        self._server.close()
        with self._lock:
            self._generation = -1
            self._held.clear()
        self._own.clear()

    @property
    def generation(self) -> int:
        """The generation of the group at the last `join`; -1 before."""
        return self._generation

    @property
    def nbytes(self) -> int:
        """Host memory in bytes."""
        with self._lock:
            held = sum(block.memory.numel() for blocks in self._held.values() for block in blocks.values())
        return held + sum(own.memory.numel() for number, own in self._own.items() if number != REFERENCE)

    # --- taking -----------------------------------------------------------------------------------------

    def set_reference(self, snapshot: Snapshot) -> None:
        """Send the reference model's weights, which must not change from now on. The snapshot is not copied."""
        self._add(REFERENCE, snapshot, {})
        self._send([REFERENCE])

    def take(self, state: Iterable[tuple[str, torch.Tensor]], about: Mapping[str, Any]) -> dict[str, float]:
        """Copy the state to host memory, and send it in the background. All ranks call it after the same step.

        If the snapshot before is still being sent, this waits until it has arrived, or its time is over.

        Args:
            state: (name, live tensor) pairs.
            about: what to keep with them, as JSON.

        Returns:
            Metrics, the same on every rank: the longest wait of a rank for the snapshot before.
        """
        waited = self._agree()
        number = 0 if self._latest is None else self._latest + 1
        old = None
        for stale in [known for known in self._own if known not in (REFERENCE, self._committed)]:
            old = self._own.pop(stale)
            del self._headers[stale]
        self._add(number, take_snapshot(live_tensors(state), old), about)
        self._latest = number
        self._send([one for one in sorted(self._own) if one not in self._sent])
        return {"snapshot_wait_seconds": waited}

    def _agree(self) -> float:
        """Find out whether the latest snapshot is complete on all ranks. If so, the one before is not needed any
        more."""
        began = time.perf_counter()
        self.finish_sending()
        waited = time.perf_counter() - began
        if self._latest is None:
            return waited
        said = gathered((self._latest in self._sent, self._checksums.get(self._latest), self._replicas, waited))
        late = [rank for rank, (sent, *_) in enumerate(said) if not sent]
        differ = [rank for rank, (_, own, others, _) in enumerate(said) if any(said[one][1] != own for one in others)]
        if differ and not late:
            # Each rank comes to the same result. From now on all of them send their snapshots.
            self._replicas = (self._rank,)
            self._sent.clear()
        if not self._rank and (late or differ):
            why = f"the ranks {late} have not sent theirs" if late else f"the replicas {differ} are not bit-identical"
            logger.warning("the last snapshot is incomplete, and a new one is taken instead: %s", why)
        if not late and not differ:
            self._committed = self._latest
            with self._lock:
                for owner in self._held.keys() - set(self._wards):
                    del self._held[owner]
        return max(seconds for *_, seconds in said)

    def _add(self, number: int, snapshot: Snapshot, about: Mapping[str, Any]) -> None:
        self._own[number] = snapshot
        self._headers[number] = {
            "owner": self._rank,
            "number": number,
            "nbytes": snapshot.memory.numel(),
            "layout": snapshot.layout,
            "about": dict(about),
        }
        self._sent.discard(number)
        self._checksums.pop(number, None)

    # --- sending ----------------------------------------------------------------------------------------

    def _send(self, numbers: Sequence[int]) -> None:
        self.finish_sending()
        if not numbers:
            return
        blocks = [(number, self._header(number), self._own[number].memory) for number in numbers]
        end = time.monotonic() + self._seconds
        # The thread has its own references: it may still run after `_give_up_sending`.
        buddy, sent, checksums = self._buddy, self._sent, self._checksums
        to_replicas = len(self._replicas) > 1

        def send() -> None:
            for number, header, memory in blocks:
                try:
                    if to_replicas or buddy is None:
                        checksums[number] = checksum_of(memory)
                    else:
                        checksums[number] = send_block(buddy, header, memory, end)
                    sent.add(number)
                except Exception as error:  # training goes on without this snapshot
                    logger.warning("rank %d: a snapshot was not sent: %s: %s", self._rank, type(error).__name__, error)

        self._sending = threading.Thread(target=send, name="snapshot-send", daemon=True)
        self._sending.start()

    def _header(self, number: int) -> dict[str, Any]:
        return {**self._headers[number], "generation": self._generation, "committed": self._committed}

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
            needed = {header["committed"], REFERENCE} if header["number"] != REFERENCE else set(blocks) - {REFERENCE}
            for number in blocks.keys() - needed:
                memory = blocks.pop(number).memory
                if memory.numel() == header["nbytes"]:
                    return memory
        return host_memory(header["nbytes"], pinned=False)

    def _keep(self, block: Block) -> None:
        with self._lock:
            if block.header["generation"] == self._generation:
                self._held.setdefault(block.header["owner"], {})[block.header["number"]] = block

    # --- restoring --------------------------------------------------------------------------------------

    def versions(self) -> dict[int, dict[int, int]]:
        """Return the complete snapshots that this rank has; see `workers.train.recovery.Versions`."""
        with self._lock:
            headers = {
                owner: {number: block.header for number, block in blocks.items()}
                for owner, blocks in self._held.items()
            }
        headers.update(dict.fromkeys(self._replicas, self._headers))
        return {
            owner: {number: header["about"].get("rollout_id", -1) for number, header in of_owner.items()}
            for owner, of_owner in headers.items()
        }

    def restore(self, recovery: Recovery, rank: int) -> tuple[Snapshot, dict[str, Any], Snapshot | None]:
        """Get this rank's own snapshots back from where they are. All ranks call it, in the new default process group,
        before `join`. Newer snapshots are forgotten.

        Args:
            recovery: what to restore.
            rank: of this process.

        Returns:
            The state, what was kept with it, and the reference model's weights.

        Raises:
            SnapshotError: on all ranks: a snapshot has not arrived unchanged.
        """
        self._give_up_sending()
        with self._lock:
            self._generation = -1  # what is still arriving may have a number that will be given again
        with all_or_none(SnapshotError, "the snapshots could not be restored"):
            wrong = self._exchange(rank, recovery.number, recovery.sources)
            wrong += self._exchange(rank, REFERENCE, recovery.references)
            if wrong:
                raise SnapshotError("; ".join(wrong))
        number = recovery.number
        with self._lock:
            for blocks in self._held.values():
                for newer in [known for known in blocks if known > number]:
                    del blocks[newer]
        for other in [known for known in self._own if known not in (number, REFERENCE)]:
            del self._own[other], self._headers[other]
        self._latest = self._committed = number
        return self._own[number], self._headers[number]["about"], self._own.get(REFERENCE)

    def _exchange(self, rank: int, number: int, sources: Sequence[int]) -> list[str]:
        """Send snapshots to the ranks that lack theirs. Returns what went wrong, after all have sent."""
        wrong = []
        for owner, source in enumerate(sources):  # in the same order on all ranks, so that none waits in a circle
            if source == owner:
                continue
            if rank == source:
                self._give(self._block(owner, number), owner)
            elif rank == owner:
                header, memory, checksum = _receive(source)
                if checksum_of(memory) != checksum:
                    wrong.append(f"the snapshot of rank {owner} has not arrived unchanged from rank {source}")
                self._own[number] = Snapshot.of(memory, header["layout"])
                self._headers[number] = {**header, "owner": rank}
        return wrong

    def _block(self, owner: int, number: int) -> Block:
        with self._lock:
            held = self._held.get(owner, {}).get(number)
        if held is not None:
            return held
        memory = self._own[number].memory
        return Block(self._headers[number], memory, checksum_of(memory))

    def _give(self, block: Block, to: int) -> None:
        dist.send_object_list([(block.header, block.checksum)], dst=to, device=torch.device("cpu"))
        for part in block.memory.split(CHUNK_BYTES):
            dist.send(part, dst=to)


def _receive(source: int) -> tuple[dict[str, Any], torch.Tensor, int]:
    said: list[Any] = [None]
    dist.recv_object_list(said, src=source, device=torch.device("cpu"))
    header, checksum = said[0]
    memory = host_memory(header["nbytes"], pinned=has_cuda())
    for part in memory.split(CHUNK_BYTES):
        dist.recv(part, src=source)
    return header, memory, checksum
