"""Stacks: where the calls of a process are at this moment, and how the stacks of many ranks are shown."""

from __future__ import annotations

import asyncio
import sys
import traceback
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from types import CodeType, FrameType
from typing import Any

from single_controller.call.errors import ranks_text

MAX_FRAMES = 20
"""Innermost frames of one stack that are shown."""

MAX_TASKS = 8
MAX_STACKS = 8
"""Distinct stacks that one message shows."""

MAX_TEXT = 4_000
"""Characters of one rank's stacks."""


def stacks_under(
    roots: Collection[CodeType], waiting: CodeType, owner: object, loop: asyncio.AbstractEventLoop | None
) -> str:
    """The stacks of all threads that run a method of an object.

    Any thread may ask. The other threads are not stopped, and need not cooperate. A thread that waits does not change
    while its stack is read. One that runs may go on in between, so its stack may mix frames of several moments.

    Args:
        roots: the methods. Shown are the frames inside the innermost of them.
        waiting: a function inside them that only waits for the event loop. The stacks of the loop's tasks are shown in
            place of its own.
        owner: the object.
        loop: its event loop.

    Returns:
        The text; empty if no thread runs such a method.
    """
    stacks, tasks = [], False
    for innermost in sys._current_frames().values():
        inside: list[tuple[FrameType, int]] = []
        for frame, line in traceback.walk_stack(innermost):
            if frame.f_code in roots and frame.f_locals.get("self") is owner:
                if any(function.f_code is waiting for function, _ in inside):
                    tasks = True
                else:
                    stacks.append(_text(inside[::-1] or [(frame, line)]))
                break
            inside.append((frame, line))
    if tasks and loop is not None:
        stacks += sorted(f"  task:\n{_text(list(_frames_of(task)))}" for task in asyncio.all_tasks(loop))[:MAX_TASKS]
    text = "\n".join(stacks)
    return text if len(text) <= MAX_TEXT else f"{text[: MAX_TEXT // 2]}\n  ...\n{text[-MAX_TEXT // 2 :]}"


def _frames_of(task: asyncio.Task[Any]) -> Iterator[tuple[FrameType, int]]:
    """The frames of a suspended task's coroutine and of those that it awaits, outermost first."""
    coroutine: Any = task.get_coro()
    while coroutine is not None:
        frame = getattr(coroutine, "cr_frame", None) or getattr(coroutine, "gi_frame", None)
        if frame is not None:
            yield frame, frame.f_lineno
        coroutine = getattr(coroutine, "cr_await", None) or getattr(coroutine, "gi_yieldfrom", None)


def _text(frames: Sequence[tuple[FrameType, int]]) -> str:
    left_out = len(frames) - MAX_FRAMES
    lines = traceback.StackSummary.extract(iter(frames[-MAX_FRAMES:])).format()
    return (f"  ... {left_out} frames ...\n" if left_out > 0 else "") + "".join(lines).rstrip()


def show_stacks(stacks: Mapping[int, str], most: int = MAX_STACKS) -> str:
    """The stacks of many ranks as text, equal ones once. The rarest come first: the one rank for which all others wait
    in a collective is among them.

    Args:
        stacks: rank -> its stack.
        most: number of distinct stacks to show.
    """
    by_text: dict[str, list[int]] = {}
    for rank in sorted(stacks):
        by_text.setdefault(stacks[rank], []).append(rank)
    ordered = sorted(by_text.items(), key=lambda item: (len(item[1]), item[1]))
    parts = [f"{_sentence(ranks)}:\n{text}" for text, ranks in ordered[:most]]
    rest = [rank for _, ranks in ordered[most:] for rank in ranks]
    if rest:
        parts.append(f"other stacks, not shown: {len(ordered) - most}, of {ranks_text(sorted(rest))}")
    return "\n".join(parts)


def _sentence(ranks: Iterable[int]) -> str:
    text = ranks_text(list(ranks))
    return f"{text} {'is' if text.startswith('rank ') else 'are'} at"
