"""The README's Python blocks run as they are written, in order, in one script on a Ray of its own."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import single_controller
import workers
from single_controller import Dispatch
from single_controller.base.engine import Engine

README = Path(__file__).resolve().parent.parent / "README.md"
CONTRIBUTING = README.parent / "CONTRIBUTING.md"

BLOCK = re.compile(r"(?P<skip><!-- no-run -->\s*)?^```python\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL)

STATED = re.compile(r"^(?P<call>\w\S*\(.*\)) +# (?P<answer>\[.*\])$", re.MULTILINE)
"""A call with its answer beside it: ``group.add(10)   # [10, 11, 12, 13]``."""


def blocks():
    return [match["code"] for match in BLOCK.finditer(README.read_text()) if not match["skip"]]


@pytest.mark.timeout(180)
def test_every_python_block_runs_and_gives_what_it_says(tmp_path):
    code, stated = STATED.subn(r"assert \g<call> == \g<answer>, 'not \g<answer>'", "\n".join(blocks()))
    assert stated >= 1
    script = tmp_path / "readme.py"
    script.write_text(code)
    # PYTHONPATH is for the other tests' workers; a reader of the README has none.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, str(script)],
        cwd=tmp_path,
        env={**environment, "RAY_ADDRESS": "local"},
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert done.returncode == 0, done.stderr[-4000:]


@pytest.mark.parametrize("page", [README, CONTRIBUTING], ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    targets = re.findall(r"\]\((?!https?://|#)([^)#]+)\)", page.read_text())
    assert [target for target in targets if not (page.parent / target).exists()] == []


def test_every_mode_and_error_is_in_the_readme():
    modes = [name for name in Dispatch.__annotations__ if not name.startswith("_")]  # other tests add to Dispatch
    text = README.read_text()
    errors = [name for package in (single_controller, workers) for name in package.__all__ if name.endswith("Error")]
    assert [name for name in [*modes, *errors] if f"`{name}`" not in text] == []


def test_the_table_of_an_engines_methods_is_complete():
    table = re.findall(r"^\| `(\w+)", CONTRIBUTING.read_text(), re.MULTILINE)
    assert set(table) == set(Engine.__abstractmethods__)
