"""An editable install, as in the README, is visible to type checkers: they check a user's file in another folder."""

import json
import os
import re
import shutil
import subprocess
import sys
import textwrap
import venv
from pathlib import Path

import pytest

setuptools = pytest.importorskip("setuptools", reason="pip builds the library with it")

ROOT = Path(__file__).resolve().parents[2]

FILE = """
    from typing import assert_type

    from single_controller import Dispatch, Worker, WorkerGroup, register
    from workers import SamplingParams


    class Scorer(Worker):
        def __init__(self) -> None:
            super().__init__()
            self.offset = 0.5

        @register(Dispatch.ONE_TO_ALL)
        def add(self, x: int) -> float:
            return x + self.offset


    def calls(group: WorkerGroup) -> None:
        assert_type(group.on(Scorer.add)(1), list[float])
        assert_type(SamplingParams().temperature, float)
        group.on(Scorer.add)("1")  # wrong
        SamplingParams(top_q=1)  # wrong
"""

MYPY_INI = """
[mypy]
[mypy-cloudpickle.*,httpx.*,megatron.*,numpy.*,omegaconf.*,ray.*,tensordict.*,torch.*,tqdm.*,transformers.*,vllm.*]
ignore_missing_imports = True
follow_imports = skip
"""


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


def mypy(python, folder, names):
    options = ["--python-executable", python, "--config-file", "mypy.ini", "--cache-dir", os.devnull]
    command = [sys.executable, "-m", "mypy", *options, *names]
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, timeout=100)
    assert done.returncode in (0, 1), done.stdout + done.stderr
    errors = [re.match(r"(.+?):(\d+): error: ", line) for line in done.stdout.splitlines()]
    return [(error[1], int(error[2])) for error in errors if error and error[1] in names], done.stdout + done.stderr


def pyright(python, folder, names):
    command = [sys.executable, "-m", "basedpyright", "--outputjson", "--pythonpath", python, *names]
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, timeout=100)
    assert done.returncode in (0, 1), done.stdout + done.stderr
    errors = [one for one in json.loads(done.stdout)["generalDiagnostics"] if one["severity"] == "error"]
    return [(Path(one["file"]).name, one["range"]["start"]["line"] + 1) for one in errors], done.stdout


@pytest.mark.parametrize("checker", [mypy, pyright])
def test_checker_knows_the_types_of_an_editable_install(python, tmp_path, checker):
    """It finds what is wrong in a user's file, and nothing in the tutorials."""
    (tmp_path / "mypy.ini").write_text(MYPY_INI)
    (tmp_path / "pyrightconfig.json").write_text('{"typeCheckingMode": "standard"}')
    (tmp_path / "train.py").write_text(textwrap.dedent(FILE))
    for script in ("score", "distill"):
        for file in (ROOT / "tutorials").glob(f"{script}*.py"):
            shutil.copy(file, tmp_path)
    wrong = [("train.py", at) for at, line in enumerate(textwrap.dedent(FILE).splitlines(), 1) if "# wrong" in line]
    found, output = checker(python, tmp_path, ["train.py", "score.py", "distill.py"])
    assert found == wrong, output
