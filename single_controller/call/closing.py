"""Base class of everything that has a ``close`` method."""

from __future__ import annotations

from abc import abstractmethod
from types import TracebackType
from typing import Self


class Closing:
    """A context manager that closes itself."""

    @abstractmethod
    def close(self) -> None:
        """Release what is held. A second close does nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
