"""Looking at the groups of a cluster from a process that has none of them: ``python -m single_controller``."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from single_controller.call.errors import show_stacks
from single_controller.call.state import GroupStatus, rank_statuses
from single_controller.call.transport import MAX_STACK_SECONDS, Death
from single_controller.ray.group_records import GroupRecord, RankRecord, Records, read
from single_controller.ray.rank import frames
from single_controller.ray.rank.actor import running_calls
from single_controller.ray.results import one_line
from single_controller.wire.handshake import WireAddress
from single_controller.wire.link import Answer, ask_at

DUMP_SECONDS = 45.0
"""How long the hosts may take to show the frames of ranks that do not answer."""


def status(name: str | None) -> str:
    """The status of a group, by name as for `stacks`, or of all groups, as text."""
    records = read()
    tables = []
    for record in chosen(records, name):
        answers = ask_at(living_ranks(record, records), "status", MAX_STACK_SECONDS)
        tables.append(str(status_from(record, records, answers)))
    return "\n\n".join(tables) or "no group is running in this cluster"


def living_ranks(record: GroupRecord, records: Records) -> dict[int, WireAddress]:
    """rank -> where its process takes commands, of the living ranks of a group."""
    found = {}
    for number, rank in enumerate(record.ranks):
        actor, address = records.actors.get(rank.actor), rank.location.wire
        if actor is not None and actor.alive and address is not None:
            found[number] = address
    return found


def status_from(record: GroupRecord, records: Records, answers: Mapping[int, Answer]) -> GroupStatus:
    """The status of a group, from the answers of its ranks to the command "status"."""
    deaths, living = dict(record.deaths), living_ranks(record, records)
    for number, rank in enumerate(record.ranks):
        known = deaths.get(number)
        if number not in living and (known is None or known.generation != record.generation):
            deaths[number] = Death(*_end_of(rank, records), record.generation)
    note = f"driver: {record.driver}" + ("" if records.driver_runs(record) else ", which has ended")
    return GroupStatus(
        record.name,
        "open" if record.broken is None else "broken",
        record.broken or "",
        record.generation,
        rank_statuses(
            [rank.location.process for rank in record.ranks],
            living,
            {rank: running_calls(answer) for rank, answer in answers.items()},
            deaths,
        ),
        note,
    )


def _end_of(rank: RankRecord, records: Records) -> tuple[float, str]:
    """When a rank's process has ended, and why."""
    actor = records.actors.get(rank.actor)
    return (0.0, "Ray no longer knows it") if actor is None else (actor.ended, actor.reason)


def stacks(name: str, ranks: Collection[int] | None = None, *, native: bool = False) -> str:
    """Where the ranks of a group are now, as text. Ranks that do not answer are looked at from outside, on their hosts.

    Args:
        name: the group's name, with or without the word "group"; or its beginning, if no group has exactly that name.
        ranks: the ranks; all by default.
        native: whether to show C functions of ranks that do not answer.

    Raises:
        LookupError: there is no such group.
        ValueError: the group has no such ranks.
    """
    records = read()
    groups = chosen(records, name)
    shown = zip(distinct_names(groups), groups, strict=True)
    return "\n\n".join(_stacks_of(title, group, records, ranks, native) for title, group in shown)


def chosen(records: Records, name: str | None) -> list[GroupRecord]:
    """The groups of a name, or of a beginning of names; all of them for None. A `LookupError` if there is none."""
    found = sorted(records.groups.values(), key=lambda record: (record.name, record.driver, record.ranks[0].actor))
    if name is None:
        return found
    exactly = [record for record in found if name in record.names]
    named = exactly or [record for record in found if any(known.startswith(name) for known in record.names)]
    if not named:
        known = ", ".join(dict.fromkeys(record.names[1] for record in found)) or "none"
        raise LookupError(f"no group is called {name!r} in this cluster. Its groups: {known}")
    return named


def distinct_names(records: Sequence[GroupRecord]) -> list[str]:
    """The names of groups. Several of one name, of different drivers, are told apart by their drivers."""
    found: list[str] = []
    names = [record.name for record in records]
    for record in records:
        name = record.name if names.count(record.name) == 1 else f"{record.name} (driver: {record.driver})"
        found.append(name if name not in found else f"{name} #{sum(one.startswith(name) for one in found) + 1}")
    return found


def _stacks_of(name: str, record: GroupRecord, records: Records, ranks: Collection[int] | None, native: bool) -> str:
    asked = range(len(record.ranks)) if ranks is None else sorted(set(ranks))
    wrong = [rank for rank in asked if not 0 <= rank < len(record.ranks)]
    if wrong:
        raise ValueError(f"{record.name} has the ranks 0 to {len(record.ranks) - 1}, not {wrong}")
    living = {rank: address for rank, address in living_ranks(record, records).items() if rank in asked}
    answers = ask_at(living, "stacks", MAX_STACK_SECONDS)
    shown = {rank: answer.text for rank, answer in answers.items() if answer.ok}
    shown |= _dumped(record, {rank: address for rank, address in living.items() if rank not in shown}, native)
    for rank in asked:
        if rank not in living:
            shown[rank] = f"  dead: {_end_of(record.ranks[rank], records)[1]}"
    return f"{name}\n{show_stacks(shown, len(shown))}"


def _dumped(record: GroupRecord, addresses: Mapping[int, WireAddress], native: bool) -> dict[int, str]:
    """The frames of ranks that do not answer, read by a task on each of their hosts."""
    tasks = dump_tasks(record, addresses, native)
    found: dict[int, str] = {}
    ray.wait(list(tasks), num_returns=len(tasks), timeout=DUMP_SECONDS) if tasks else None
    for task, on_node in tasks.items():
        found.update(dumped(task, on_node))
    return found


def dump_tasks(record: GroupRecord, addresses: Mapping[int, WireAddress], native: bool) -> dict[Any, list[int]]:
    """Start a task on each host of these ranks that reads their frames. Returns task -> its ranks, for `dumped`."""
    by_node: dict[str, list[int]] = {}
    for rank in sorted(addresses):
        by_node.setdefault(record.ranks[rank].location.node_id, []).append(rank)
    tasks: dict[Any, list[int]] = {}
    for node, on_node in by_node.items():
        where = NodeAffinitySchedulingStrategy(node, soft=False)
        processes = [(addresses[rank].pid, addresses[rank].frames) for rank in on_node]
        dump = ray.remote(num_cpus=0, max_retries=0)(_dump).options(scheduling_strategy=where)
        tasks[dump.remote(processes, native)] = on_node
    return tasks


def dumped(task: Any, ranks: Sequence[int]) -> dict[int, str]:
    """rank -> the frames that a task has read, or why it has not. Does not wait."""
    try:
        return dict(zip(ranks, ray.get(task, timeout=0), strict=True))
    except GetTimeoutError:
        return dict.fromkeys(ranks, f"  unknown: its host did not respond within {DUMP_SECONDS:g} s")
    except RayError as error:
        return dict.fromkeys(ranks, f"  unknown: its host cannot be asked: {one_line(error)}")


def _dump(processes: list[tuple[int, int]], native: bool) -> list[str]:
    return [frames.frames_of(pid, file, native=native) for pid, file in processes]
