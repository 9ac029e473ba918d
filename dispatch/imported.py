"""Look up a library that may have been imported, without importing it."""

from __future__ import annotations

import sys
from typing import Any


def imported(name: str) -> Any:
    """Return a module if it was imported, else None. Also None while another thread imports it: its classes may not
    exist yet, and no value of theirs does."""
    module = sys.modules.get(name)
    if module is not None and getattr(getattr(module, "__spec__", None), "_initializing", False):
        return None
    return module
