"""Every tutorial notebook runs as it stands, on a Ray of its own, and prints what it is committed with."""

import os
import re
import sys
from pathlib import Path

import nbformat
import pytest
from jupyter_client.kernelspec import KernelSpec, KernelSpecManager
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient

TUTORIALS = Path(__file__).resolve().parent.parent / "tutorials"
NOTEBOOKS = sorted(TUTORIALS.glob("*.ipynb"))

PROMISED = {
    "1_ray_in_five_minutes": ["15", "[1, 2, 3, 4]"],
    "2_pools_and_groups": ["[1, 2, 3, 4]", "[3, 4, 5, 6, 7, 8, 9, 10]", "(4, 4, 8)"],
    "3_dispatch": [
        "[7, 8, 9, 10, 11, 12, 13, 14]",
        "[8, 10, 8, 10]",
        "5",
        "DispatchError: count(): argument 'rows' has 3 rows",
        "TypeError: foo() missing a required argument: 'y'",
        "AttributeError: Foo.plain() is not registered",
        "rank 3, check(), ValueError: thirteen is not allowed",
        "GroupClosedError: group Foo is closed",
    ],
    "4_megatron": [
        "(4, 4, 1, 1)",
        "* answers for its shard",
        "rank 3: {'gate_up_proj.weight': (688, 512), 'down_proj.weight': (512, 344)}",
        "torch.Size([128, 4, 512])",
        "distance from the dense layer below 1e-5: True",
        "and below 1e-5 of the largest value: True",
        "(False, False)",
        "run_layer(): argument 'x' is a list of length 2; Dispatch.MEGATRON_COMPUTE takes a list of 1 items",
    ],
    "5_where_workers_live": [
        "missing: 12 GPU (asked 16, there are 4)",
        "(['0', '1', '2', '3'], ['0', '1', '2', '3'])",
        "(['3'], ['2', '3'])",
        "([2, 4, 6, 8], [4, 8, 12, 16])",
        "critic fail ValueError",
        "dead: (2,) [True, True, False, True]",
        "([4, 5, 6, 7], [True, True, True, True])",
    ],
}

RAY_LOG_LINE = re.compile(r"^(\x1b\[\d+m)*\((raylet|autoscaler|\w+( rank \d+)? pid=)")
"""What Ray forwards from its processes. It may turn up under any cell, or nowhere."""


class ThisInterpreter(KernelSpecManager):
    """Finds one kernel, whatever is installed on the machine: this Python's."""

    def get_kernel_spec(self, kernel_name):
        return KernelSpec(
            argv=[sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"],
            display_name=kernel_name,
            language="python",
        )


def run(path):
    """The notebook, executed. Raises CellExecutionError at the first cell that does."""
    notebook = nbformat.read(path, as_version=4)
    manager = AsyncKernelManager(kernel_name="python3", kernel_spec_manager=ThisInterpreter())
    client = NotebookClient(notebook, km=manager, timeout=240, resources={"metadata": {"path": str(TUTORIALS)}})
    # PYTHONPATH is for the other tests' workers; a reader of the notebooks has none.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    client.execute(env={**environment, "RAY_ADDRESS": "local"})
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


def test_every_notebook_is_known():
    assert [path.stem for path in NOTEBOOKS] == list(PROMISED)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook(path):
    executed = run(path)
    lines = [line for cell in outputs(executed) for line in cell]
    for promise in PROMISED[path.stem]:
        assert any(line.startswith(promise) for line in lines), f"{promise!r} is nowhere in the outputs"
    assert outputs(executed) == outputs(nbformat.read(path, as_version=4)), "execute the notebook anew and commit it"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_committed_outputs_name_no_machine(path):
    for cell in nbformat.read(path, as_version=4).cells:
        assert not any(output.get("name") == "stderr" for output in cell.get("outputs", []))
        text = str(cell.get("outputs", ""))
        found = re.search(r"/home/|/tmp/|/root/|\(pid=|raylet|\b\d+\.\d+\.\d+\.\d+\b| at 0x", text)
        assert found is None, f"{found.group()!r} in an output of {path.name}"
