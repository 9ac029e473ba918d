"""What mypy and pyright infer of typed calls, ``group.on(Scorer.score)``, in a user's folder, where the library is an
editable install as in the README. `test_typed_calls.py` has what the calls do at run time."""

import json
import os
import re
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import pytest

setuptools = pytest.importorskip("setuptools", reason="pip builds the library with it")

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
MARKED = ["right.py", "wrong.py", "scorer.py"]
TUTORIALS = ["score.py", "distill.py"]
"""Checked too. They have no errors, and import the other files of their names."""

Errors = dict[tuple[str, int], set[str]]
"""(file, line) -> the error codes there."""


@pytest.fixture(scope="module")
def python(tmp_path_factory):
    """The Python of an environment in which only this library is installed. The dependencies are of this one."""
    source = tmp_path_factory.mktemp("source")
    for name in ("dispatch", "single_controller", "workers"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE", "constraints.txt"):
        shutil.copy(ROOT / name, source)
    folder = tmp_path_factory.mktemp("fresh")
    venv.create(folder, symlinks=True, with_pip=False)
    (packages,) = (folder / "lib").glob("python3*/site-packages")
    (packages / "dependencies.pth").write_text(str(Path(setuptools.__file__).parents[1]))
    python = folder / "bin" / "python"
    offline = ["--no-deps", "--no-index", "--no-build-isolation"]
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "--disable-pip-version-check", *offline]
    done = subprocess.run([*pip, "-e", source], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    return python


def expected(checker: int) -> Errors:
    """The marks in the files: ``# E: mypy's code | pyright's code``."""
    return {
        (name, number): {mark[1].split(" | ")[checker]}
        for name in MARKED
        for number, line in enumerate((HERE / name).read_text().splitlines(), 1)
        if (mark := re.search(r"# E: (.*)$", line))
    }


def run(folder: Path, *command: str | Path) -> str:
    files = [*MARKED, *TUTORIALS]
    done = subprocess.run(
        [sys.executable, "-m", *command, *files], capture_output=True, text=True, cwd=folder, timeout=110
    )
    assert done.returncode in (0, 1), done.stdout + done.stderr
    return done.stdout


def mypy(python: Path, folder: Path) -> tuple[Errors, str]:
    found: Errors = {}
    output = run(folder, "mypy", "--python-executable", python, "--config-file", "mypy.ini", "--cache-dir", os.devnull)
    for line in output.splitlines():
        if match := re.match(r"(\S+):(\d+): error: .*\[([\w-]+)\]$", line):
            found.setdefault((match[1], int(match[2])), set()).add(match[3])
    return found, output


def pyright(python: Path, folder: Path) -> tuple[Errors, str]:
    found: Errors = {}
    output = run(folder, "basedpyright", "--outputjson", "--pythonpath", python)
    for error in json.loads(output)["generalDiagnostics"]:
        if error["severity"] == "error":
            at = (Path(error["file"]).name, error["range"]["start"]["line"] + 1)
            found.setdefault(at, set()).add(error.get("rule", "?"))
    return found, output


@pytest.mark.parametrize("checker", [mypy, pyright])
def test_checker_finds_exactly_the_marked_errors(python, tmp_path, checker):
    for file in (*MARKED, "mypy.ini", "pyrightconfig.json"):
        shutil.copy(HERE / file, tmp_path)
    for script in TUTORIALS:
        for file in (ROOT / "tutorials").glob(f"{Path(script).stem}*.py"):
            shutil.copy(file, tmp_path)
    found, output = checker(python, tmp_path)
    marked = expected([mypy, pyright].index(checker))
    assert set(found) == set(marked), output
    assert {at: codes for at, codes in found.items() if not marked[at] <= codes} == {}
