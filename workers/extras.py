"""Import optional dependencies, and name the extra to install if one is missing."""

from __future__ import annotations

import importlib
from types import ModuleType


def require(module: str, extra: str) -> ModuleType:
    """Import a module of one of this project's extras.

    Raises:
        ImportError: the module is not installed; the message names the extra.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise  # the package is installed, but one of its own dependencies is not
        raise ImportError(
            f"{error.name!r} is not installed: pip install 'single-controller[{extra}]'", name=error.name
        ) from None
