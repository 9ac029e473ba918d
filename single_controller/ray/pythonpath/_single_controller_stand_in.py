"""What the modules beside this one do: stand in for this library's packages of the same names."""

import importlib.util
import sys
from pathlib import Path


def load(name: str) -> None:
    """Import one of this library's packages from where it is, instead of the module of the same name.

    Raises:
        ImportError: it is not there.
    """
    folder = Path(__file__).resolve().parents[3] / name
    spec = importlib.util.spec_from_file_location(name, folder / "__init__.py")
    if spec is None or spec.loader is None:
        raise ImportError(f"{folder} is not a package", name=name)
    sys.modules[name] = package = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(package)
