"""Detects a user's own module that shadows one of this library's packages."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

_ROOT = Path(__file__).resolve().parent.parent


def check_shadowing() -> None:
    """Raise an ImportError, which names both files, unless ``dispatch`` and ``workers`` are this library's packages."""
    for name in ("dispatch", "workers"):
        ours = _ROOT / name / "__init__.py"
        stand_in = _ROOT / "single_controller" / "ray" / "pythonpath" / f"{name}.py"
        found = _found(name)
        if found is None or Path(found).resolve() in (ours, stand_in) or not ours.exists():
            continue
        raise ImportError(
            f"'import {name}' finds {found}, but single_controller needs its own package {ours}. "
            f"Rename your {name!r}, or move it out of the directory of your script",
            name=name,
            path=found,
        )


def _found(name: str) -> str | None:
    module = sys.modules.get(name)
    if module is not None:
        return getattr(module, "__file__", None) or next(iter(getattr(module, "__path__", [])), None)
    spec = importlib.util.find_spec(name)
    if spec is None:
        return None
    return spec.origin or next(iter(spec.submodule_search_locations or []), None)
