"""What to install when a package of an extra is missing."""

from __future__ import annotations

import importlib
from types import ModuleType


def require(module: str, extra: str) -> ModuleType:
    """Import a module that belongs to one of this project's extras.

    Raises:
        ImportError: it is not installed; the message names the extra.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise  # the package is there, something that it needs is not
        raise ImportError(
            f"{error.name!r} is not installed: pip install 'single-controller[{extra}]'", name=error.name
        ) from None
