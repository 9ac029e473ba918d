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

_LIBRARY = re.compile(r"site-packages|dist-packages|/lib/python3|^<|(^|/)(torch|ray|single_controller|dispatch)/")
_THREAD = re.compile(r"^ *(Current thread|Thread) ")


class Frame(NamedTuple):
    """One frame of a stack."""

    file: str
    line: int
    function: str
    text: str  # the source line; empty if the stack does not show it

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
        elif (match := _FRAME.match(line)) is not None:
            found = match.groupdict()
            text = lines[number + 1].strip() if number + 1 < len(lines) and not _FRAME.match(lines[number + 1]) else ""
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
    what: dict[int, str] = {}  # of the living ranks that run something, or do not answer
    where, method = {}, {}
    for one in ranks:
        stack = frames(stacks.get(one.rank, ""))
        users = [str(frame) for frame in stack if _is_users(frame)]
        where[one.rank] = users[-1] if users else str(stack[-1]) if stack else ""
        if one.alive and one.running != ():
            method[one.rank] = one.running[0].method if one.running else None
            deferred = one.running[-1].waits if one.running else ""
            name = collective(stack)
            what[one.rank] = f"for {deferred}" if deferred else f"in {name}" if name else ""
    found = {rank: Wait(text, (), where[rank]) for rank, text in what.items()}
    for rank, text in what.items():
        if text.startswith("in "):
            others = tuple(one.rank for one in ranks if one.rank != rank and _is_behind(one, method[rank], what))
            if not others:  # all that run it are in collectives: in the same one, or in different ones
                there = [one for one in what if what[one].startswith("in ") and method[one] in (method[rank], None)]
                others = _elsewhere(rank, there, what, where)
            if not others:  # the rest has ended the call, or has not begun it
                others = tuple(one.rank for one in ranks if one.alive and one.running == ())
            found[rank] = found[rank]._replace(ranks=others)
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


def _is_behind(one: RankStatus, method: str | None, what: Mapping[int, str]) -> bool:
    """Whether a rank has not come to a collective in which another one is: it is dead, does not answer from another
    place, or runs the same method elsewhere."""
    if not one.alive:
        return True
    if one.rank not in what or what[one.rank].startswith("in "):
        return False
    return one.running is None or method is None or any(call.method == method for call in one.running)


def _elsewhere(rank: int, others: Sequence[int], what: Mapping[int, str], where: Mapping[int, str]) -> tuple[int, ...]:
    """The ranks that wait in another collective than this one, or at another line; if more than half of all are where
    this one is, these are the ones to look at."""
    here = what[rank], where[rank]
    return tuple(one for one in others if (what[one], where[one]) != here)


def _is_users(frame: Frame) -> bool:
    # py-spy shortens the names of files; those of the standard library have no folder left.
    return not _LIBRARY.search(frame.file) and frame.file.removesuffix(".py") not in sys.stdlib_module_names
