"""A user's own folder `workers` or `dispatch` beside the script: the error names both files, in every order of imports
in which code of this library runs."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


def run(folder, code):
    """Run a script in a folder. Returns its last line on stderr, or what it has printed."""
    (folder / "train.py").write_text(code)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "train.py"], cwd=folder, env=environment, capture_output=True, text=True)
    return done.stderr.strip().splitlines()[-1] if done.returncode else done.stdout.strip()


def own(folder, name, text=""):
    """A package of the user's own."""
    (folder / name).mkdir()
    (folder / name / "__init__.py").write_text(text)


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("workers", "import single_controller"),
        ("workers", "import single_controller; from workers import RayTrainGroup"),
        ("workers", "import dispatch; from single_controller import Worker"),
        ("workers", "import workers; import single_controller"),
        ("workers", "from workers import mine; from single_controller import Worker"),
        ("dispatch", "import single_controller"),
        ("dispatch", "from workers import RayTrainGroup"),
        ("dispatch", "import workers"),
        ("dispatch", "from dispatch import mine; from workers import RayTrainGroup"),
    ],
)
def test_both_files_are_named(tmp_path, name, code):
    own(tmp_path, name, "mine = 1")
    error = run(tmp_path, code)
    assert error.startswith(f"ImportError: 'import {name}' finds {tmp_path / name / '__init__.py'}, but"), error
    assert str(ROOT / name / "__init__.py") in error and f"Rename your '{name}'" in error


def test_own_package_that_uses_this_library_is_named_too(tmp_path):
    own(tmp_path, "workers", "from single_controller import Worker")
    error = run(tmp_path, "from workers import RayTrainGroup")
    assert f"'import workers' finds {tmp_path / 'workers' / '__init__.py'}, but" in error


def test_own_package_that_runs_none_of_this_librarys_code_is_named_by_python(tmp_path):
    """The most that Python allows: it has imported the user's package, and knows nothing of ours."""
    own(tmp_path, "workers")
    error = run(tmp_path, "from workers import RayTrainGroup")
    assert error.startswith("ImportError: cannot import name 'RayTrainGroup' from 'workers'")
    assert str(tmp_path / "workers" / "__init__.py") in error


def test_folder_that_is_no_package_is_in_nobodys_way(tmp_path):
    (tmp_path / "workers").mkdir()
    (tmp_path / "workers" / "mine.py").write_text("")
    assert run(tmp_path, "from workers import SamplingParams; print(SamplingParams(3).max_new_tokens)") == "3"
