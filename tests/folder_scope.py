"""What the tests of a folder share, for as long as they run.

pytest's own scope for that needs packages, and a package called like one of these folders would hide a library. Idle
processes are no small matter here: each process group of gloo has a thread that wakes up a hundred times a second.
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
    """What ``make`` gives, entered once and left after the last test in the folder of a ``conftest.py``."""
    folder = _open.setdefault(Path(conftest).parent, _Folder())
    if name not in folder.values:
        folder.values[name] = folder.stack.enter_context(make())
    return folder.values[name]


def leave_folders(next_test: Path | None) -> None:
    """Close what belongs to folders that the next test is not in."""
    for folder in [folder for folder in _open if next_test is None or folder not in next_test.parents]:
        _open.pop(folder).stack.close()
