"""Stands in for this library's package of the same name: imports it and leaves it in its own place."""

import importlib.util
import sys
from pathlib import Path

_folder = Path(__file__).resolve().parents[3] / __name__
_spec = importlib.util.spec_from_file_location(__name__, _folder / "__init__.py")
if _spec is None or _spec.loader is None:
    raise ImportError(f"{_folder} is not a package", name=__name__)
sys.modules[__name__] = _package = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_package)
