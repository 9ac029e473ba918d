"""What a rank waits for, and for which other ranks: concluded from the calls that ranks run and from their stacks.

`waits` is pure. It takes stacks as `Executor.stacks` shows them, or as py-spy or the interpreter's signal handler do.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from single_controller.call.errors import ranks_text
from single_controller.call.state import RankStatus

_FRAME = re.compile(
    r'^ *File "(?P<file>[^"]+)", line (?P<line>\d+),? in (?P<name>\S+)'  # Python, and its signal handler
    r"|^ +(?P<name2>[^\s(][^(]*) \((?P<file2>[^():]+):(?P<line2>\d+)\)$"  # py-spy
)
_CALL = re.compile(r"\b(?:dist|distributed)\.(\w+)\(|\b(?:work|handle|req)\w*\.(wait)\(\)")
"""A source line that waits for other ranks in C++, which has no frame of its own."""

# Of ray only as py-spy shortens it: a job's own files may be below /tmp/ray or /home/ray.
_LIBRARY = re.compile(r"site-packages|dist-packages|/lib/python3|^<|(^|/)(torch|single_controller|dispatch)/|^ray/")
_THREAD = re.compile(r"^ *(Current thread|Thread) ")
_RANGE = r"\d{1,7}(?:-\d{1,7}(?::[1-9]\d{0,6})?)?"
_GROUP = re.compile(rf"^ *in process group (?P<name>'.*'|\".*\")(?:, ranks (?P<ranks>{_RANGE}(?:, {_RANGE})*))?$")


class ProcessGroup(NamedTuple):
    """A process group of torch.distributed.

    Attributes:
        name: its description, or its name.
        ranks: its ranks, as ranks of the worker group; empty if they are not known.
    """

    name: str
    ranks: tuple[int, ...]

    def __str__(self) -> str:
        of = f" ({ranks_text(self.ranks)})" if self.ranks else ""
        return "" if self.name == "default_pg" else f" of process group {self.name}{of}"


class Frame(NamedTuple):
    """One frame of a stack."""

    file: str
    line: int
    function: str
    text: str  # the source line; empty if the stack does not show it
    group: ProcessGroup | None = None  # in which the stack waits; of the innermost frame

    def __str__(self) -> str:
        return f"{self.file.rpartition('/')[2]}:{self.line}, in {self.function}"


class Wait(NamedTuple):
    """What a rank does.

    Attributes:
        what: what it waits for, in words; empty if it does not wait.
        ranks: the ranks of its group for which it waits, as far as known.
        where: the innermost frame that belongs neither to a library nor to Python; empty if there is none.
        awaited: the ranks of its group that wait for it.
    """

    what: str = ""
    ranks: tuple[int, ...] = ()
    where: str = ""
    awaited: tuple[int, ...] = ()

    def __str__(self) -> str:
        parts = []
        if self.what:
            parts.append(f"waits {self.what}" + (f", for {ranks_text(self.ranks)}" if self.ranks else ""))
        if self.where:
            parts.append(f"at {self.where}")
        if self.awaited:
            parts.append(self.awaited_by)
        return "; ".join(parts)

    @property
    def awaited_by(self) -> str:
        """Who waits for it, in words."""
        return f"{ranks_text(self.awaited)} {'waits' if len(self.awaited) == 1 else 'wait'} for it"


def frames(stack: str) -> list[Frame]:
    """The frames of the thread that runs a call, the outermost first; [] if the text has none."""
    threads: list[list[Frame]] = [[]]
    inward = True  # whether the text shows the innermost frame last
    lines = stack.splitlines()
    for number, line in enumerate(lines):
        if _THREAD.match(line):
            threads.append([])
            inward = False
        elif line.strip() == "task:":  # of an event loop
            threads.append([])
        elif (match := _GROUP.match(line)) is not None and threads[-1]:
            group = ProcessGroup(match["name"][1:-1], _numbers(match["ranks"] or ""))
            threads[-1][-1] = threads[-1][-1]._replace(group=group)
        elif (match := _FRAME.match(line)) is not None:
            found = match.groupdict()
            follows = lines[number + 1] if number + 1 < len(lines) else ""
            text = "" if _FRAME.match(follows) or _GROUP.match(follows) else follows.strip()
            name, file, at = (found[key] or found[f"{key}2"] for key in ("name", "file", "line"))
            threads[-1].append(Frame(file, int(at), name.strip(), text if inward else ""))
    if not inward:
        threads = [thread[::-1] for thread in threads]
    # Methods do not run on the main thread, in which Ray waits for tasks.
    threads = [one for one in threads if not any(frame.function.endswith("main_loop") for frame in one)] or [[]]
    return next((one for one in threads if any(map(_is_users, one))), max(threads, key=len))


def waits(ranks: Sequence[RankStatus], stacks: Mapping[int, str]) -> dict[int, Wait]:
    """Say of each rank that runs a call what it waits for, and of all who waits for them.

    Args:
        ranks: the ranks of a group, by rank.
        stacks: rank -> its stack, of those that run something.
    """
    places: dict[int, _Place] = {}  # of the living ranks that run something, or do not answer
    where = {}
    for one in ranks:
        stack = frames(stacks.get(one.rank, ""))
        users = [str(frame) for frame in stack if _is_users(frame)]
        where[one.rank] = users[-1] if users else str(stack[-1]) if stack else ""
        if one.alive and one.running != ():
            method = one.running[0].method if one.running else None
            deferred = one.running[-1].waits if one.running else ""
            name = "" if deferred else collective(stack)
            group = stack[-1].group if name else None
            places[one.rank] = _Place(method, deferred, name, group, where[one.rank])
    known: dict[_Place, tuple[int, ...]] = {}  # ranks in the same place wait for the same ones
    found = {}
    for rank, place in places.items():
        if place not in known:
            known[place] = _missing(ranks, place, places) if place.collective else ()
        found[rank] = Wait(str(place), known[place], where[rank])
    awaited: dict[int, list[int]] = {}
    for rank, wait in found.items():
        for other in wait.ranks:
            awaited.setdefault(other, []).append(rank)
    for rank, by in awaited.items():
        found[rank] = found.get(rank, Wait())._replace(awaited=tuple(by))
    return found


def collective(stack: Sequence[Frame]) -> str:
    """The name of the torch.distributed function in which a stack waits; empty if it is in none."""
    for frame in stack:
        if "torch/distributed/" in frame.file and frame.function != "wrapper":
            return frame.function.rpartition(".")[2]
    match = _CALL.search(stack[-1].text) if stack else None
    return match[1] or match[2] if match else ""


class _Place(NamedTuple):
    """Where a rank is that runs something, or does not answer."""

    method: str | None  # None if it does not answer
    deferred: str  # the result for which it waits
    collective: str  # the function of torch.distributed in which it waits
    group: ProcessGroup | None  # the process group of that function, if it is known
    where: str

    def __str__(self) -> str:
        if self.deferred:
            return f"for {self.deferred}"
        return f"in {self.collective}{self.group or ''}" if self.collective else ""


def _missing(ranks: Sequence[RankStatus], place: _Place, places: Mapping[int, _Place]) -> tuple[int, ...]:
    """The ranks for which those in a collective wait. Only ranks of its process group count, if they are known."""
    inside = frozenset(place.group.ranks) if place.group else ()
    members = [one for one in ranks if not inside or one.rank in inside]
    found = tuple(one.rank for one in members if _is_behind(one, place, places.get(one.rank)))
    if not found:  # all that run it are in collectives of the group: in the same one, or in different ones
        there = [one.rank for one in members if one.rank in places and places[one.rank].collective]
        found = tuple(
            one
            for one in there
            if places[one].method in (place.method, None)
            and (places[one].collective, places[one].where) != (place.collective, place.where)
        )
    # Otherwise, the rest has ended the call, or has not begun it.
    return found or tuple(one.rank for one in members if one.alive and one.running == ())


def _is_behind(one: RankStatus, place: _Place, its: _Place | None) -> bool:
    """Whether a rank has not come to a collective in which another one is: it is dead, does not answer from another
    place, runs the same method elsewhere, or is in a collective of another process group."""
    if its is None:
        return not one.alive
    if its.collective:
        return None not in (its.group, place.group) and its.group != place.group
    return one.running is None or place.method is None or any(call.method == place.method for call in one.running)


def _numbers(text: str) -> tuple[int, ...]:
    """The numbers of ranges such as ``0-3, 8-24:8``."""
    found: list[int] = []
    for part in filter(None, text.split(", ")):
        ends, _, step = part.partition(":")
        first, _, last = ends.partition("-")
        found += range(int(first), int(last or first) + 1, int(step or 1))
    return tuple(found)


def _is_users(frame: Frame) -> bool:
    # py-spy shortens the names of files; those of the standard library have no folder left.
    return not _LIBRARY.search(frame.file) and frame.file.removesuffix(".py") not in sys.stdlib_module_names
