"""Lazy exports of a package: a module is imported when one of its names is first used."""

from __future__ import annotations

import ast
import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dispatch.register import check_keywords


def lazy_exports(package: str, file: str) -> tuple[list[str], Callable[[str], Any], Callable[[], list[str]]]:
    """Return a package's ``__all__``, ``__getattr__`` and ``__dir__``. The imports in the first ``if`` statement of its
    ``__init__.py``, ``file``, which Python itself never runs (``if TYPE_CHECKING``), say what it exports and from which
    modules."""
    table = next(node for node in ast.parse(Path(file).read_text("utf-8")).body if isinstance(node, ast.If))
    homes = {
        alias.name: str(node.module) for node in table.body if isinstance(node, ast.ImportFrom) for alias in node.names
    }

    def __getattr__(name: str) -> Any:
        home = homes.get(name)
        if home is None:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(home), name)
        if isinstance(value, type):
            check_keywords(value)
        setattr(sys.modules[package], name, value)
        return value

    def __dir__() -> list[str]:
        return sorted({*vars(sys.modules[package]), *homes})

    return sorted(homes), __getattr__, __dir__
