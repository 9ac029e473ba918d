"""Replay: a call that a restart makes again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dispatch.register import MethodSpec
from single_controller.base.method import CallOptions


@dataclass(frozen=True)
class Replay:
    """One call of a method that was registered with ``replay=True``.

    Attributes:
        spec: the method.
        args: the positional arguments, as the driver gave them.
        kwargs: the keyword arguments.
        options: what held for that call.
    """

    spec: MethodSpec
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    options: CallOptions

    @property
    def key(self) -> tuple[str | None, str]:
        """Of calls with the same key only the latest counts."""
        return self.spec.role, self.spec.name
