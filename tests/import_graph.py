"""Which file of the library imports which, parsed from the sources, including functions and `if TYPE_CHECKING`."""

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

PACKAGES = ("dispatch", "single_controller", "workers")
ROOT = Path(__file__).resolve().parent.parent


def library_files() -> list[Path]:
    return [file for package in PACKAGES for file in sorted((ROOT / package).rglob("*.py"))]


@functools.cache
def import_graph() -> dict[str, set[str]]:
    """module -> the library's modules that it imports."""
    files = {_module(file): file for file in library_files()}
    graph: dict[str, set[str]] = {}
    for module, file in files.items():
        imported = set(_imports(file, module, files))
        graph[module] = {name for name in imported if name in files and name != module}
    return graph


def _module(file: Path) -> str:
    parts = file.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _imports(file: Path, module: str, files: dict[str, Path]) -> Iterator[str]:
    package = module.split(".") if file.name == "__init__.py" else module.split(".")[:-1]
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            source = ".".join([*above, *([node.module] if node.module else [])])
            # `from package import module` needs the module; `from module import name` needs the module of the name.
            for alias in node.names:
                yield f"{source}.{alias.name}" if f"{source}.{alias.name}" in files else source


def cycles(graph: dict[str, set[str]]) -> list[frozenset[str]]:
    """The largest sets of modules in which each imports all the others, directly or indirectly."""
    reached = {module: _reachable(graph, module) for module in graph}
    return sorted(
        {
            frozenset(other for other in reached[module] if module in reached[other])
            for module in graph
            if module in reached[module]
        },
        key=sorted,
    )


def _reachable(graph: dict[str, set[str]], start: str) -> set[str]:
    found: set[str] = set()
    left = [*graph[start]]
    while left:
        module = left.pop()
        if module not in found:
            found.add(module)
            left.extend(graph[module])
    return found
