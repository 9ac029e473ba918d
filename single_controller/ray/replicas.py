"""Data-parallel replicas: which ranks a group can go on with, and how many it can take. Ranks say where they belong."""

from __future__ import annotations

import json
import math
import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence

from dispatch.checks import is_count
from single_controller.call.errors import CallTimeoutError, GroupBrokenError, PlacementError, ranks_text
from single_controller.call.state import GroupState
from single_controller.call.transport import MAX_STACK_SECONDS
from single_controller.ray.transport import RayTransport

Replicas = dict[int, list[tuple[int, int]]]
"""rank -> by role, number of its replica and how many there are. Empty for a process without workers."""


def ranks_to_keep(state: GroupState, transport: RayTransport, living: Collection[int], end: float) -> list[int]:
    """The living ranks whose replicas have lost no rank. ``end`` is when ranks must have answered, by the monotonic
    clock. Raises as `RayWorkerGroup.shrink` does."""
    kept = complete_replicas(_replicas(state, transport, living, end), transport.world_size)
    if not kept:
        raise GroupBrokenError(
            f"{state.name} cannot go on without the ranks that have died: each of its data-parallel replicas has lost "
            "a rank. Call replace() or restart()"
        )
    return kept


def number_to_add(state: GroupState, transport: RayTransport, count: int | None, vacant: int, end: float) -> int:
    """The number of ranks to add: ``count``, or as many whole replicas as fit. Raises as `RayWorkerGroup.grow` does."""
    first = _replicas(state, transport, [0], end).get(0)
    if first is None:
        raise GroupBrokenError(f"{state.name} cannot grow: rank 0 has died. {state.advice}")
    size = math.lcm(*(transport.world_size // replicas for _, replicas in first))  # of whole replicas in all roles
    if count is None:
        return vacant - vacant % size
    if not is_count(count) or count % size:
        raise ValueError(f"grow(count={count!r}): expected a positive multiple of {size}, the size of a replica")
    if count > vacant:
        raise PlacementError(f"{state.name} has room for {vacant} ranks in its pool, not for {count}")
    return count


def _replicas(state: GroupState, transport: RayTransport, ranks: Collection[int], end: float) -> Replicas:
    """`Worker.dp_replica` of each rank. Ranks that have died meanwhile are missing. A rank that does not answer is
    asked again until ``end``: its host may be busy, and to take it for dead would end it."""
    found: Replicas = {}
    while unknown := sorted(set(ranks) - found.keys() - transport.deaths().keys()):
        text = "there was no time to ask it"
        for rank, answer in transport.ask("replicas", unknown, MAX_STACK_SECONDS).items():
            if answer.ok:
                found[rank] = [(number, count) for number, count in json.loads(answer.text)]
            elif answer.told:
                raise GroupBrokenError(f"{state.name} cannot change its size: rank {rank}: {answer.text}")
            else:
                text = answer.text
        late = [rank for rank in unknown if rank not in found]
        if late and time.monotonic() >= end:
            raise CallTimeoutError(
                f"{state.name} cannot change its size: {ranks_text(late)} did not say to which data-parallel replica "
                f"they belong: {text}. Pass a longer timeout, or these ranks as the ones to drop",
                ranks=late,
            )
    return found


def complete_replicas(replicas: Mapping[int, Sequence[tuple[int, int]]], world_size: int) -> list[int]:
    """The ranks whose replicas have lost no rank, in any role. ``world_size`` is the number of ranks before."""
    kept = {rank: of for rank, of in replicas.items() if of}
    while True:
        members = Counter((role, number) for of in kept.values() for role, (number, _) in enumerate(of))
        complete = {
            rank: of
            for rank, of in kept.items()
            if all(members[role, number] * count == world_size for role, (number, count) in enumerate(of))
        }
        if len(complete) == len(kept):
            return sorted(kept)
        kept = complete
