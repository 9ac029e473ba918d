"""What docstrings refer to exists: `Class.name` in backticks, for every exported class."""

import ast
import functools
import importlib
import inspect
import re

import pytest
from import_graph import PACKAGES, ROOT, library_files

REFERENCE = re.compile(r"(?<!`)`([A-Z]\w+)\.(\w+)(?:\(\))?`(?!`)")


@pytest.fixture(scope="module")
def nodes():
    """File -> all nodes of its syntax tree."""
    return {file: [*ast.walk(ast.parse(file.read_text()))] for file in library_files()}


def references(nodes):
    """(class, name) -> the files whose docstrings name it."""
    found = {}
    for file in nodes:
        for node in nodes[file]:
            if (
                isinstance(node, ast.Expr)
                and isinstance(node.value, ast.Constant)
                and isinstance(node.value.value, str)
            ):
                for reference in REFERENCE.findall(node.value.value):
                    found.setdefault(reference, set()).add(str(file.relative_to(ROOT)))
    return found


source = functools.cache(inspect.getsource)


def has(cls, name):
    """Whether instances of a class have an attribute, as far as the source of the class and its bases says so."""
    return any(
        name in vars(base)
        or name in getattr(base, "__annotations__", {})
        or (base.__module__.partition(".")[0] in PACKAGES and f"self.{name}" in source(base))
        for base in cls.__mro__
    )


def test_attributes_that_docstrings_name_exist(nodes):
    exported = {}
    for package in PACKAGES:
        module = importlib.import_module(package)
        for name in module.__all__:
            try:
                exported[name] = getattr(module, name)
            except ImportError as error:  # an optional dependency is not installed
                pytest.skip(str(error))
    classes = {name: value for name, value in exported.items() if isinstance(value, type)}
    checked = {found: files for found, files in references(nodes).items() if found[0] in classes}
    assert len(checked) > 50
    assert {found: files for found, files in checked.items() if not has(classes[found[0]], found[1])} == {}


def test_functions_that_docstrings_name_exist(nodes):
    files = [file.read_text() for file in nodes]
    nodes = [node for found in nodes.values() for node in found]
    defined = {node.name for node in nodes if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)}
    texts = [ast.get_docstring(node) or "" for node in nodes if isinstance(node, ast.Module | ast.ClassDef)]
    texts += [ast.get_docstring(node) or "" for node in nodes if isinstance(node, ast.FunctionDef)]
    named = {name for text in texts for name in re.findall(r"(?<!`)`([a-z]\w+)\(\)`(?!`)", text)}
    assert named - defined == set()
    assert "collate_completions" not in "".join(files)  # named once by docstrings, where `collate` was meant
