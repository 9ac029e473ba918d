"""The groups of a `SampleBuffer`, and the batches that they make."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple


class Begun(NamedTuple):
    """A group to generate: its number, and the partial completions to continue; None begins with the prompt alone."""

    number: int
    partial: Any


class Taken(NamedTuple):
    """A group to train on: its number, and what `SampleBuffer.put` got."""

    number: int
    payload: Any


@dataclass(slots=True)
class Group:
    """A group that has begun, and is neither taken nor filtered.

    Attributes:
        state: "pending" waits to begin again.
        update: number of the update whose weights generated its oldest token, or, in flight, that was in force when it
            began; None while it has no tokens.
        data: the payload of a ready group, the partial completions of a pending one.
        tokens: generated tokens in ``data``.
    """

    state: Literal["pending", "in flight", "ready"] = "pending"
    update: int | None = None
    data: Any = None
    tokens: int = 0


@dataclass(slots=True)
class Batch:
    """A batch that was taken.

    Attributes:
        numbers: of its groups.
        groups: by number; empty if they are not kept.
        update: number of the update that was in force.
    """

    numbers: list[int]
    groups: dict[int, Group]
    update: int
