"""Resources shared by the tests of a folder, closed after the last of them.

pytest's own package scope needs packages, and a package named like one of these folders would hide a library. Closing
early matters: each idle gloo process group has a thread that wakes a hundred times a second.
"""

from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any


class _Folder:
    def __init__(self) -> None:
        self.stack = ExitStack()
        self.values: dict[Hashable, Any] = {}


_open: dict[Path, _Folder] = {}


def shared(conftest: str, name: Hashable, make: Callable[[], AbstractContextManager[Any]]) -> Any:
    """The value of the context manager from ``make``, which exits after the last test in the folder of ``conftest``."""
    folder = _open.setdefault(Path(conftest).parent, _Folder())
    if name not in folder.values:
        folder.values[name] = folder.stack.enter_context(make())
    return folder.values[name]


def leave_folders(next_test: Path | None) -> None:
    """Close the resources of every folder that does not contain the next test."""
    for folder in [folder for folder in _open if next_test is None or folder not in next_test.parents]:
        _open.pop(folder).stack.close()
