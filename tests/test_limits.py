"""docs/limits.md names the functions that do something else on CUDA than on the CPU: none has run on a GPU."""

import ast
import re

from import_graph import ROOT, library_files

PAGE = ROOT / "docs" / "limits.md"


def test_every_function_with_lines_for_cuda_is_listed():
    rows = [line for line in PAGE.read_text().splitlines() if line.startswith("| `")]
    listed = set()
    for row in rows:
        file, *functions = re.findall("`([^`]+)`", "|".join(row.split("|")[:3]))
        listed |= {f"{file}: {function}" for function in functions}
    found = {f"{path.relative_to(ROOT)}: {name}" for path in library_files() for name in functions_for_cuda(path)}
    assert found - listed == set(), "add them to the table of docs/limits.md"
    assert listed - found == set(), "remove them from the table of docs/limits.md"


def functions_for_cuda(path):
    """Names of the functions whose own lines ask whether there is CUDA, or call it."""

    def visit(node, prefix):
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.ClassDef):
                yield from visit(child, f"{prefix}{child.name}.")
            elif isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef) and any(map(is_for_cuda, child.body)):
                yield prefix + child.name

    text = path.read_text()
    return visit(ast.parse(text), "") if HAS_ONE.search(text) else ()


NAMES = ("cuda", "accelerator", "has_cuda", "has_accelerator", "on_accelerator", "pin_memory", "nccl")
"""What such lines have as a name, an attribute or a string, unless they compare a device's type."""
HAS_ONE = re.compile("|".join([r"\.type\b", *NAMES]))


def is_for_cuda(statement):
    return any(
        (isinstance(node, ast.Compare) and getattr(node.left, "attr", "") == "type")
        or any(getattr(node, field, None) in NAMES for field in ("attr", "id", "value"))
        for node in ast.walk(statement)
    )


def test_what_is_included_is_not_named_as_a_limit():
    text = PAGE.read_text().lower()
    assert [name for name in ("dynamic sampling", "group.map", "compute_log_prob") if name in text] == []
