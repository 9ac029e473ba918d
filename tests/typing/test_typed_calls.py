"""Typed calls, ``group.on(Scorer.score)``: what mypy and pyright infer, and what the calls do at run time."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import right
from scorer import Other, Quieter, Scorer

from single_controller import Broadcast, ClassWithInitArgs, DispatchError, LocalWorkerGroup
from single_controller.call.worker.worker_class import colocate

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
FILES = ["right.py", "wrong.py"]

Errors = dict[tuple[str, int], set[str]]
"""(file, line) -> the error codes there."""


def expected(checker: int) -> Errors:
    """The marks in the files: ``# E: mypy's code | pyright's code``."""
    return {
        (name, number): {mark[1].split(" | ")[checker]}
        for name in FILES
        for number, line in enumerate((HERE / name).read_text().splitlines(), 1)
        if (mark := re.search(r"# E: (.*)$", line))
    }


def run(*command: str) -> str:
    done = subprocess.run([sys.executable, "-m", *command], capture_output=True, text=True, cwd=HERE, timeout=110)
    assert done.returncode in (0, 1), done.stdout + done.stderr
    return done.stdout


def mypy() -> Errors:
    found: Errors = {}
    cache = ROOT / ".mypy_cache" / "typed_calls"
    for line in run("mypy", "--config-file", "mypy.ini", "--cache-dir", str(cache), *FILES).splitlines():
        if match := re.match(r"(\S+):(\d+): error: .*\[([\w-]+)\]$", line):
            found.setdefault((Path(match[1]).name, int(match[2])), set()).add(match[3])
    return found


def pyright() -> Errors:
    found: Errors = {}
    output = run("basedpyright", "--outputjson", "--pythonpath", sys.executable)
    for error in json.loads(output)["generalDiagnostics"]:
        if error["severity"] == "error":
            at = (Path(error["file"]).name, error["range"]["start"]["line"] + 1)
            found.setdefault(at, set()).add(error.get("rule", "?"))
    return found


@pytest.mark.parametrize("checker", [mypy, pyright])
def test_checker_finds_exactly_the_marked_errors(checker):
    found = checker()
    marked = expected([mypy, pyright].index(checker))
    assert set(found) == set(marked), found
    assert {at: codes for at, codes in found.items() if not marked[at] <= codes} == {}


def test_accepted_calls_run():
    right.main()


@pytest.fixture
def group():
    with LocalWorkerGroup(1, ClassWithInitArgs(Quieter)) as group:
        yield group


def test_on_returns_the_method_of_the_groups_class(group):
    assert group.on(Scorer.add)(4) == group.on(Quieter.add)(4) == group.add(4) == [2.0]
    assert repr(group.on(Scorer.score)) == repr(group.score)


def test_typed_call_accepts_a_future_and_a_broadcast(group):
    future = group.on(Scorer.generate)({"x": [1, 2]})
    assert group.on(Scorer.offset)(future.as_argument(), Broadcast([10]).as_argument()) == {"x": [11, 12]}


def test_on_rejects_a_method_of_another_class(group):
    with pytest.raises(
        DispatchError, match=r"Other\.add\(\) is not a method of .* Quieter, which registers .*add, load, score"
    ):
        group.on(Other.add)


def test_on_rejects_an_unregistered_method(group):
    with pytest.raises(AttributeError, match=r"plain\(\) is not registered"):
        group.on(Scorer.plain)


@pytest.mark.parametrize("given", ["add", len, Quieter().add])
def test_on_rejects_anything_but_a_method_of_a_class(group, given):
    with pytest.raises(TypeError, match=r"group\.on\(Scorer\.score\); got"):
        group.on(given)


def test_on_for_a_group_with_roles_names_the_roles():
    roles = {"scorer": ClassWithInitArgs(Scorer), "other": ClassWithInitArgs(Other)}
    with LocalWorkerGroup(1, colocate(roles)) as group:
        assert group.other.on(Other.add)(1) == [1]
        with pytest.raises(DispatchError, match=r"group\.scorer\.on\(\.\.\.\) or group\.other\.on\(\.\.\.\)"):
            group.on(Other.add)
