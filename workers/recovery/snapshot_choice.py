"""Which snapshots the ranks of a train group restore after a death, and where each rank keeps its copy. Pure functions,
for the driver and the ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple


class Taken(NamedTuple):
    """What is known of a complete snapshot.

    Attributes:
        rollout_id: of the rollout after which it was taken; -1 before the first.
        ranks: how many ranks took it. The group may have had another size than now. A number is never used for two
            sizes.
    """

    rollout_id: int
    ranks: int


Versions = Mapping[int, Mapping[int, Taken]]
"""The complete snapshots that a rank has in its memory: rank whose shard it was -> number of the snapshot -> more."""


@dataclass(frozen=True)
class Recovery:
    """What to restore.

    Attributes:
        number: of the snapshot. All ranks have taken the snapshots of one number after the same step, and the first
            one when they were initialized.
        rollout_id: of the rollout after which it was taken.
        sources: by rank whose shard it was, a rank that has it now.
        references: likewise for the reference model's weights; empty if there is no reference model.
    """

    number: int
    rollout_id: int
    sources: tuple[int, ...]
    references: tuple[int, ...] = ()


def reference_number(ranks: int) -> int:
    """Return the number of the snapshot of the reference model's weights, which never change: one for each size of the
    group. Those of the state count from 0."""
    return -ranks


def choose_recovery(
    versions: Sequence[Versions], *, with_ref: bool = False, newest: int | None = None
) -> Recovery | None:
    """Choose the newest snapshot that every rank's shard can be restored from.

    Args:
        versions: by rank, what it has. A new rank has nothing.
        with_ref: whether the reference model's weights are needed too.
        newest: id of a rollout. Snapshots that were taken after a later one do not count.

    Returns:
        The choice; None if there is no such snapshot.
    """
    taken = {number: taken for held in versions for of in held.values() for number, taken in of.items()}
    # Those of the present size first: most ranks then have their own, and no other copy is made.
    sizes = sorted((ranks != len(versions), number, ranks) for number, (_, ranks) in taken.items() if number < 0)
    of_sizes = (_sources(versions, ranks, number) for _, number, ranks in sizes)
    references = next((sources for sources in of_sizes if sources is not None), None) if with_ref else ()
    if references is None:
        return None
    for number, (rollout_id, ranks) in sorted(taken.items(), reverse=True):
        if number < 0 or (newest is not None and rollout_id > newest):
            continue
        sources = _sources(versions, ranks, number)
        if sources is not None:
            return Recovery(number, rollout_id, sources, references)
    return None


def _sources(versions: Sequence[Versions], ranks: int, number: int) -> tuple[int, ...] | None:
    """Return a rank for each owner of a snapshot that so many ranks took: the owner itself if possible, else one that
    is a source for few others."""
    holders: dict[int, list[int]] = {}
    for rank, held in enumerate(versions):
        for owner, of in held.items():
            if number in of and of[number].ranks == ranks:
                holders.setdefault(owner, []).append(rank)
    used = [0] * len(versions)
    sources = []
    for owner in range(ranks):
        have = holders.get(owner)
        if have is None:
            return None
        source = owner if owner in have else min(have, key=lambda rank: (used[rank], rank))
        used[source] += source != owner
        sources.append(source)
    return tuple(sources)


def buddies(hosts: Sequence[int], dp_ranks: Sequence[int] | None = None) -> list[int]:
    """Return the rank that keeps the copies of each rank's snapshots. Each rank keeps those of one other rank. It is on
    another host for all ranks, unless one host has more than half of them. If that leaves a choice, it is of another
    data-parallel rank: when a group shrinks, the ranks of one leave together.

    Args:
        hosts: by rank, a number of its host.
        dp_ranks: by rank, its data-parallel rank; None if each rank is one.
    """
    order = sorted(range(len(hosts)), key=lambda rank: (hosts[rank], rank))
    largest = max(map(list(hosts).count, set(hosts)))
    least = 1 if largest == len(hosts) else largest
    of = range(len(hosts)) if dp_ranks is None else dp_ranks
    shifted = ((shift, [*order[shift:], *order[:shift]]) for shift in range(least, len(order) - least + 1))
    apart = (shift for shift, to in shifted if all(of[one] != of[other] for one, other in zip(order, to, strict=True)))
    shift = next(apart, least)
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
