"""ResourcePool: how many processes on how many nodes. ClassWithInitArgs: a worker class and constructor arguments."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Hashable, Sequence
from typing import Any

from dispatch.checks import check_count, is_count
from dispatch.register import check_arguments, plain_signature
from single_controller.call.worker import Worker


class ResourcePool:
    """Processes per node, as numbers only. A subclass reserves resources for them.

    Args:
        process_on_nodes: processes of each entry, for example ``[8, 8]``. An entry is on one node.
        max_colocate_count: worker processes that may share one slot.

    Raises:
        ValueError: no entry, or a count that is not a positive integer.
    """

    def __init__(self, process_on_nodes: Sequence[int], max_colocate_count: int = 10) -> None:
        entries = list(process_on_nodes) if isinstance(process_on_nodes, Sequence) else []
        if not entries or not all(map(is_count, entries)):
            raise ValueError(
                f"process_on_nodes is a list of positive integers, one per node ([8, 8]), got {process_on_nodes!r}"
            )
        self._store = [int(entry) for entry in entries]
        self.max_colocate_count = check_count("max_colocate_count", max_colocate_count)

    @property
    def store(self) -> list[int]:
        """Processes of each entry."""
        return list(self._store)

    @property
    def world_size(self) -> int:
        """Processes in all."""
        return sum(self._store)

    def local_world_sizes(self) -> list[int]:
        """By rank, the number of processes of its entry (on its node): ``[2, 1]`` gives 2, 2, 1."""
        return [size for _, size in local_ranks(self._homes())]

    def local_ranks(self) -> list[int]:
        """By rank, its rank within its entry (on its node): ``[2, 1]`` gives 0, 1, 0."""
        return [rank for rank, _ in local_ranks(self._homes())]

    def _homes(self) -> Sequence[Hashable]:
        """By rank, what it has in common with the ranks that are local to it: here its entry."""
        return [entry for entry, size in enumerate(self._store) for _ in range(size)]

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.store})"


def local_ranks(homes: Sequence[Hashable]) -> list[tuple[int, int]]:
    """By rank, its rank among those of the same home, and how many these are."""
    sizes, seen = Counter(homes), Counter[Hashable]()
    found = []
    for home in homes:
        found.append((seen[home], sizes[home]))
        seen[home] += 1
    return found


class ClassWithInitArgs:
    """A worker class and the arguments of its constructor, which runs on every rank.

    Args:
        cls: a subclass of `Worker`.
        args: positional arguments of its constructor.
        kwargs: keyword arguments of its constructor. Without any arguments, the object may also say of which class
            running workers are; whether the constructor needs some is then checked when a group starts workers.

    Raises:
        TypeError: ``cls`` is not a subclass of `Worker`, or the arguments do not fit its constructor.
    """

    def __init__(self, cls: type[Worker], *args: Any, **kwargs: Any) -> None:
        if not (isinstance(cls, type) and issubclass(cls, Worker)):
            raise TypeError(f"a group's class is a subclass of single_controller.Worker, got {cls!r}")
        self.cls: type[Worker] = cls
        self.args = args
        self.kwargs = kwargs
        if args or kwargs:
            self.check_arguments()

    def __call__(self) -> Worker:
        """Construct the worker in this process, for a unit test of it."""
        return self.cls(*self.args, **self.kwargs)

    def check_arguments(self) -> None:
        """Check that the arguments fit the constructor.

        Raises:
            TypeError: they do not.
        """
        constructor = self.cls.__init__
        # Worker's own parameter is for constructors that pass it on, see there.
        own = constructor is not Worker.__init__
        signature = plain_signature(constructor, skip_first=True) if own else inspect.Signature()
        check_arguments(self.cls.__name__, signature, self.args, self.kwargs)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.cls.__name__})"
