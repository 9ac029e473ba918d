"""code_tests and run_python: what passes, the limits one by one, and what programs leave behind."""

import os
import time
from pathlib import Path

import pytest
from waits import wait_until

from workers.rollout.rewards.code_process import CodeLimits, run_python
from workers.rollout.rewards.code_reward import code_tests

ADD = "def add(a, b):\n    return a + b\n"
RIGHT = ["assert add(1, 2) == 3", "assert add(-1, 1) == 0"]
ECHO = "for _ in range(int(input())):\n    print(sum(map(int, input().split())))\n"


def fenced(program, language="python"):
    return f"Here it is:\n```{language}\n{program}```\nThat is all."


# --- what passes ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "completion",
    [
        ADD,
        fenced(ADD),
        fenced(ADD, ""),
        fenced(ADD, "py"),
        fenced("add = None\n") + fenced(ADD),
        fenced(ADD) + fenced("add(1, 2)\n", "bash"),
        f"cut off:\n```python\n{ADD}",
        fenced(ADD + "if __name__ == '__main__':\n    print(add(1, 2))\n"),
    ],
)
def test_program_is_found(completion):
    assert code_tests(completion, RIGHT) == 1.0


@pytest.mark.parametrize(
    "program",
    [
        "",
        "def add(a, b):\n    return a - b\n",
        "def add(a, b)\n",
        "import no_such_module\n" + ADD,
        "def add(a, b):\n    raise SystemExit(0)\n",
        "import sys\nsys.exit(0)\n",
        "import os\nos._exit(0)\n",
        "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)\n",
        "import os\nfor name in os.listdir():\n    open(name, 'w').close()\nprint('[true, true]')\nos._exit(0)\n",
        "print('\\x00\\xff' * 10)\nraise KeyboardInterrupt\n",
        "import shutil\nshutil.rmtree('..', ignore_errors=True)\n",
        "import os\nos.remove('../out')\nos.mkfifo('../out')\n",
        ADD.replace("a + b", "add(a, b)"),
    ],
)
def test_program_that_fails_does_not_pass_both_tests(program):
    """Without `partial`, that is 0: see the next test."""
    assert code_tests(fenced(program), RIGHT, partial=True) <= 0.5


def test_partial_is_the_share_of_tests():
    wrong = "def add(a, b):\n    return abs(a) + b\n"
    tests = [*RIGHT, "assert add(1, 1) == 2", "import sys; sys.exit(1)"]
    assert code_tests(wrong, tests, partial=True) == 0.5
    assert code_tests(wrong, tests) == 0.0
    assert code_tests(ADD, "assert add(1, 2) == 3\nassert add(2, 2) == 4") == 1.0
    assert code_tests(ADD, "assert add(1, 2) == 3\nassert add(2, 2) == 5", partial=True) == 0.0


def test_input_and_output():
    label = {"inputs": ["1\n2 3\n", "2\n1 1\n5 5\n", "0\n"], "outputs": ["5\n", "2 \n10", ""]}
    assert code_tests(fenced(ECHO), label) == 1.0
    label["outputs"][1] = "2 10"
    assert code_tests(fenced(ECHO), label) == 0.0
    assert code_tests(fenced(ECHO), label, partial=True) == pytest.approx(2 / 3)
    null = {"inputs": None, "outputs": None}  # as in Parquet, where another row has them
    assert code_tests(fenced(ECHO), {"input": "1\n2 3", "output": "5", **null}) == 1.0
    assert code_tests("print(5)\nraise SystemExit(1)", {"input": [""], "output": ["5"]}) == 0.0


@pytest.mark.parametrize(
    "label, said",
    [
        (7, "expected tests"),
        (None, "expected tests"),
        ([1, 2], "expected tests"),
        ([], "has no tests"),
        ("  ", "has no tests"),
        ({}, "has no keys"),
        ({"inputs": ["1"]}, "expected inputs and outputs"),
        ({"inputs": ["1"], "outputs": None}, "the label has inputs; expected inputs and outputs"),
        ({"inputs": ["1"], "outputs": []}, "1 inputs and 0 outputs"),
        ({"inputs": [], "outputs": []}, "0 inputs"),
    ],
)
def test_labels_that_are_no_tests_are_errors(label, said):
    with pytest.raises(ValueError, match=said):
        code_tests(ADD, label)


# --- limits -----------------------------------------------------------------------------------------------------------


@pytest.fixture(params=[True, False], ids=["namespaces", "no-namespaces"])
def isolate(request):
    return request.param


def test_cpu_time_is_limited(isolate):
    began = time.monotonic()
    result = run_python("while True: pass", limits=CodeLimits(cpu_seconds=1, isolate=isolate))
    assert result.status == -24 and time.monotonic() - began < 8  # SIGXCPU


def test_wall_clock_is_limited(isolate):
    began = time.monotonic()
    result = run_python("import time\nprint(1, flush=True)\ntime.sleep(60)", limits=CodeLimits(0.5, isolate=isolate))
    assert (result.status, result.output) == (None, "1\n") and time.monotonic() - began < 8


def test_program_without_time_is_no_error(isolate):
    result = run_python("import time\ntime.sleep(60)", limits=CodeLimits(1e-6, isolate=isolate))
    assert (result.status, result.output, result.errors) == (None, "", "")


@pytest.mark.parametrize("number", [2, 9])
def test_program_that_signals_its_process_group_has_failed(isolate, number):
    """Without namespaces, the launcher is in that group."""
    program = f"import os, signal\nsignal.signal(2, signal.SIG_DFL)\nos.kill(0, {number})"
    assert run_python(program, limits=CodeLimits(isolate=isolate)).status == -number


def test_memory_is_limited():
    result = run_python("kept = bytearray(500 << 20)", limits=CodeLimits(memory_bytes=256 << 20))
    assert result.status == 1 and "MemoryError" in result.errors
    assert run_python("kept = bytearray(500 << 20)").status == 0


def test_output_is_limited():
    result = run_python("while True: print('x' * 999)", limits=CodeLimits(output_bytes=5000))
    assert result.status and len(result.output) == 5000 and "File too large" in result.errors
    result = run_python("with open('a', 'wb') as file: file.write(bytes(6000))", limits=CodeLimits(output_bytes=5000))
    assert result.status == 1


def test_environment_and_folder_are_its_own(monkeypatch):
    monkeypatch.setenv("SECRET", "7")
    result = run_python("import os\nprint(sorted(os.environ), os.listdir())")
    assert result.output == "['HOME', 'LANG', 'OMP_NUM_THREADS', 'PATH'] ['program.py']\n"
    folder = run_python("import os\nprint(os.getcwd())").output.strip()
    assert not Path(folder).exists() and not Path(folder).parent.exists()


def test_file_descriptors_are_not_inherited():
    inside, outside = os.pipe()
    os.set_inheritable(outside, True)
    result = run_python("import os\nprint(sorted(map(int, os.listdir('/proc/self/fd')))[:-1])")
    os.close(inside), os.close(outside)
    assert result.output == "[0, 1, 2]\n"


def test_network_is_not_there():
    import socket

    with socket.create_server(("127.0.0.1", 0)) as server:
        program = f"import socket\nsocket.create_connection(('127.0.0.1', {server.getsockname()[1]}), 5)"
        result = run_python(program)
        if not result.isolated:
            pytest.skip("the system does not allow namespaces")
        assert result.status == 1 and "Network is unreachable" in result.errors
        assert run_python(program, limits=CodeLimits(isolate=False)).status == 0


def test_other_processes_are_not_seen():
    program = f"""
import os
print([name for name in os.listdir("/proc") if name.isdigit() and int(name) > 2])
print(os.path.exists("/proc/{os.getpid()}/environ") and open("/proc/{os.getpid()}/cmdline").read())
"""
    result = run_python(program)
    if not result.isolated:
        pytest.skip("the system does not allow namespaces")
    assert result.output == "[]\nFalse\n"
    assert str(os.getpid()) in run_python(program, limits=CodeLimits(isolate=False)).output


DAEMON = """
import os, sys, time
if not os.fork():
    os.setsid()
    if not os.fork():
        for number in range(3, 20):
            os.fork()
            break
        time.sleep({seconds} + 600)
time.sleep({seconds})
"""


def marked():
    """The processes that run a program."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if b"program.py" in (folder / "cmdline").read_bytes():
                found.append(int(folder.name))
        except OSError:
            continue
    return found


@pytest.mark.parametrize("seconds", [0, 600], ids=["ends", "is-ended"])
def test_processes_that_it_starts_end_with_it(isolate, seconds):
    before = set(marked())
    limits = CodeLimits(seconds=0.5 if seconds else 10.0, isolate=isolate)
    result = run_python(DAEMON.format(seconds=seconds), limits=limits)
    assert result.status == (None if seconds else 0)
    wait_until(lambda: not set(marked()) - before, 5)


def test_undecodable_and_surrogate_texts():
    result = run_python("import sys\nsys.stdout.buffer.write(b'\\xff\\n')\nprint(input())", "\ud800\n")
    assert result.output == "\ufffd\n?\n"
    assert code_tests("x = '\ud800'", ["assert x"]) in (0.0, 1.0)


def test_program_cannot_forge_its_tests():
    """It would need the name of the file and the key in it, which it is not told."""
    program = """
import json, os, sys
seen = os.listdir() + [sys.stdin.read(), str(sys.argv)]
for name in seen:
    with open(name.replace("/", "")[:50] or "x", "w") as file:
        json.dump(["key", [True, True]], file)
os._exit(0)
"""
    assert code_tests(program, RIGHT, partial=True) == 0.0


@pytest.mark.parametrize("limits", [{"memory_bytes": 2e9}, {"cpu_seconds": 2.5}, {"output_bytes": 0}, {"seconds": 0}])
def test_limit_that_cannot_be_set_is_refused(limits):
    with pytest.raises(ValueError, match=f"CodeLimits: {next(iter(limits))}="):
        CodeLimits(**limits)
