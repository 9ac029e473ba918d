"""Every tutorial notebook runs unmodified, on its own Ray, and reproduces its committed outputs."""

import os
import re
import sys
from pathlib import Path

import nbformat
import pytest
from jupyter_client.kernelspec import KernelSpec, KernelSpecManager
from jupyter_client.manager import AsyncKernelManager
from jupyter_core.utils import run_sync
from nbclient import NotebookClient

TUTORIALS = Path(__file__).resolve().parent.parent / "tutorials"
NOTEBOOKS = sorted(TUTORIALS.glob("*.ipynb"))

RAY_LOG_LINE = re.compile(r"^(\x1b\[\d+m)*\((raylet|autoscaler|\w+( rank \d+)? pid=)")
"""What Ray forwards from its processes. It may appear below any cell, or nowhere."""


class ThisInterpreter(KernelSpecManager):
    """Finds only one kernel, this Python's, whatever is installed on the machine."""

    def get_kernel_spec(self, kernel_name):
        return KernelSpec(
            argv=[sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"],
            display_name=kernel_name,
            language="python",
        )


def run(path):
    """The executed notebook. Raises CellExecutionError at the first cell that fails."""
    notebook = nbformat.read(path, as_version=4)
    manager = AsyncKernelManager(kernel_name="python3", kernel_spec_manager=ThisInterpreter())
    client = NotebookClient(notebook, km=manager, timeout=240, resources={"metadata": {"path": str(TUTORIALS)}})
    # PYTHONPATH is for the other tests' workers; readers of the notebooks do not set it.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    try:
        client.execute(env={**environment, "RAY_ADDRESS": "local"})
    finally:
        run_sync(manager.shutdown_kernel)(now=True)  # the client ends only a kernel of its own making
    return notebook


def outputs(notebook):
    """By code cell, what a reader sees below it: printed lines and the value of the last expression."""
    return [cell_lines(cell) for cell in notebook.cells if cell.cell_type == "code"]


def cell_lines(cell):
    text = ""
    for output in cell.outputs:
        if output.output_type == "stream" and output.name == "stdout":
            text += output.text
        elif output.output_type == "execute_result":
            text += output.data["text/plain"] + "\n"
    return [line for line in text.splitlines() if line and not RAY_LOG_LINE.match(line)]


@pytest.mark.full("the notebooks, executed")
@pytest.mark.timeout(300)
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook(path):
    assert outputs(run(path)) == outputs(nbformat.read(path, as_version=4)), "execute the notebook again and commit it"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_committed_outputs_do_not_name_a_machine(path):
    for cell in nbformat.read(path, as_version=4).cells:
        assert not any(output.get("name") == "stderr" for output in cell.get("outputs", []))
        text = str(cell.get("outputs", ""))
        found = re.search(r"/home/|/tmp/|/root/|\(pid=|raylet|\b\d+\.\d+\.\d+\.\d+\b| at 0x", text)
        assert found is None, f"{found.group()!r} in an output of {path.name}"


def test_register_comes_before_calls_by_name():
    text = [cell.source for path in NOTEBOOKS for cell in nbformat.read(path, as_version=4).cells]
    first = {word: next(i for i, one in enumerate(text) if word in one) for word in ("@register", "execute_all")}
    assert first["@register"] < first["execute_all"]
