"""Which snapshots the ranks of a train group restore after a death, and where each rank keeps its copy. Pure functions,
for the driver and the ranks."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

REFERENCE = -1
"""Number of the snapshot of the reference model's weights, which never change. Those of the state count from 0."""

Versions = Mapping[int, Mapping[int, int]]
"""The complete snapshots that a rank has in its memory: rank whose shard it is -> number -> id of the rollout after
which it was taken, -1 before the first."""


@dataclass(frozen=True)
class Recovery:
    """What to restore.

    Attributes:
        number: of the snapshot. All ranks have taken the snapshots of one number after the same step, and the first
            one when they were initialized.
        rollout_id: of the rollout after which it was taken.
        sources: by rank whose shard it is, a rank that has it: that rank itself, if it has lived on.
        references: likewise for the reference model's weights; empty if there is no reference model.
    """

    number: int
    rollout_id: int
    sources: tuple[int, ...]
    references: tuple[int, ...] = ()


def choose_recovery(
    versions: Sequence[Versions], *, ranks: int | None = None, with_ref: bool = False, newest: int | None = None
) -> Recovery | None:
    """Choose the newest snapshot that every rank's shard can be restored from.

    Args:
        versions: by rank, what it has. A new rank has nothing.
        ranks: number of ranks whose shards there must be; by default as many as there are ranks.
        with_ref: whether the reference model's weights are needed too.
        newest: id of a rollout. Snapshots that were taken after a later one do not count.

    Returns:
        The choice; None if there is no such snapshot.
    """
    owners = range(len(versions) if ranks is None else ranks)
    references = _sources(versions, owners, REFERENCE) if with_ref else ()
    if references is None:
        return None
    numbers = {number for held in versions for of_owner in held.values() for number in of_owner} - {REFERENCE}
    for number in sorted(numbers, reverse=True):
        sources = _sources(versions, owners, number)
        if sources is not None and (newest is None or versions[sources[0]][0][number] <= newest):
            return Recovery(number, versions[sources[0]][0][number], sources, references)
    return None


def _sources(versions: Sequence[Versions], owners: Collection[int], number: int) -> tuple[int, ...] | None:
    """Return a rank for each owner, the owner itself if possible, else one that is a source for few others."""
    used = [0] * len(versions)
    found = []
    for owner in owners:
        have = [rank for rank, held in enumerate(versions) if number in held.get(owner, ())]
        if not have:
            return None
        source = owner if owner in have else min(have, key=lambda rank: (used[rank], rank))
        used[source] += source != owner
        found.append(source)
    return tuple(found)


def buddies(hosts: Sequence[int]) -> list[int]:
    """Return the rank that keeps the copies of each rank's snapshots. Each rank keeps those of one other rank. It is on
    another host for all ranks, unless one host has more than half of them.

    Args:
        hosts: by rank, a number of its host.
    """
    order = sorted(range(len(hosts)), key=lambda rank: (hosts[rank], rank))
    largest = max(map(list(hosts).count, set(hosts)))
    shift = 1 if largest == len(hosts) else largest
    by_rank = [0] * len(hosts)
    for place, rank in enumerate(order):
        by_rank[rank] = order[(place + shift) % len(order)]
    return by_rank


def is_covered_by_replicas(replicas: Sequence[int], hosts: Sequence[int]) -> bool:
    """Whether other ranks have the same state, on several hosts if there are several, so that no copy is needed.

    Args:
        replicas: the ranks with the same state.
        hosts: by rank, a number of its host.
    """
    return len(replicas) > 1 and (len({hosts[rank] for rank in replicas}) > 1 or len(set(hosts)) == 1)
