"""code_tests: whether the program in a completion passes tests. A function of texts, as those of `answers`."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from workers.rollout.rewards.code_process import CodeLimits, run_python

_FENCE = re.compile(r"^ {0,3}```(\w*)[^\n]*\n(.*?)(?:^ {0,3}```|\Z)", re.MULTILINE | re.DOTALL)

# Tests run in the program's process, one after the other. What they found is written to a file whose name and key the
# program is not told, so that one that ends early, or prints what it likes, passes nothing.
_HARNESS = """
import json, os, sys
def harness():
    key, name = sys.stdin.readline().split()
    with open("tests.json") as file:
        tests = json.load(file)
    with open("solution.py") as file:
        source = file.read()
    os.remove("tests.json")
    sys.stdin = open(os.devnull)
    names = {"__name__": "__main__"}
    passed = []
    try:
        exec(compile(source, "solution.py", "exec"), names)
    except BaseException as error:
        sys.stderr.write(f"{type(error).__name__}: {error}")
    else:
        for test in tests:
            try:
                exec(compile(test, "test", "exec"), names)
                passed.append(True)
            except BaseException as error:
                sys.stderr.write(f"{type(error).__name__}: {error}\\n")
                passed.append(False)
    with open(name, "w") as file:
        json.dump([key, passed], file)
    sys.stdout.flush()
    os._exit(0)
harness()
"""


def code_tests(completion: str, label: Any, *, partial: bool = False, limits: CodeLimits | None = None) -> float:
    """Whether the Python program in a completion passes the label's tests: 1.0 if it passes all, otherwise 0.0.

    The program is the last fenced block (the last ``python`` block, if there is one), or the whole completion if there
    is no block. It runs in processes with limits and, where the system allows it, without network; `run_python` also
    says what these processes do not protect from. A program that fails, exceeds a limit, or ends by itself before its
    tests passes none.

    Args:
        completion: what was generated.
        label: the tests. A text is a Python program that runs after the completion's and raises if that is wrong; a
            list of texts is as many tests, each of which may fail. A dict with lists ``inputs`` and ``outputs`` (or
            ``input`` and ``output``) runs the program once for each input, on its standard input, and compares what it
            prints, line by line, without white space at the ends of lines and of the whole.
        partial: return the share of the tests that pass.
        limits: of each run; by default `CodeLimits`.

    Raises:
        ValueError: the label is none of these, or has no tests.
        RuntimeError: no process could be started.
    """
    program = _program(completion)
    if isinstance(label, Mapping):
        passed = [_printed(program, str(given), str(expected), limits) for given, expected in _pairs(label)]
    elif isinstance(label, str) or (isinstance(label, Sequence) and all(isinstance(one, str) for one in label)):
        tests = [label] if isinstance(label, str) else list(label)
        if not any(one.strip() for one in tests):
            raise ValueError("the label has no tests")
        passed = _asserted(program, tests, limits)
    else:
        raise ValueError(f"the label is {label!r:.80}; expected tests: a text, a list of texts, or inputs and outputs")
    return sum(passed) / len(passed) if partial else float(all(passed))


def _program(completion: str) -> str:
    blocks = _FENCE.findall(completion)
    of_python = [text for language, text in blocks if language.lower() in ("python", "py", "python3")]
    return (of_python or [text for _, text in blocks] or [completion])[-1]


def _pairs(label: Mapping[str, Any]) -> list[tuple[Any, Any]]:
    label = {name: value for name, value in label.items() if value is not None}  # Parquet has the keys of all rows
    for given, expected in (("inputs", "outputs"), ("input", "output")):
        if given in label and expected in label:
            both = [[one] if isinstance(one, str) else one for one in (label[given], label[expected])]
            if not both[0] or len(both[0]) != len(both[1]):
                raise ValueError(f"the label has {len(both[0])} {given} and {len(both[1])} {expected}")
            return list(zip(*both, strict=True))
    raise ValueError(f"the label has {', '.join(map(str, label)) or 'no keys'}; expected inputs and outputs")


def _printed(program: str, given: str, expected: str, limits: CodeLimits | None) -> bool:
    result = run_python(program, given, limits)
    return result.status == 0 and _lines(result.output) == _lines(expected)


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.strip().splitlines()]


def _asserted(program: str, tests: list[str], limits: CodeLimits | None) -> list[bool]:
    key, name = secrets.token_hex(), secrets.token_hex()
    files = {"solution.py": program, "tests.json": json.dumps(tests)}
    result = run_python(_HARNESS, f"{key} {name}\n", limits, files, back=name)
    try:
        said, passed = json.loads(result.back)
    except (ValueError, TypeError):
        return [False] * len(tests)
    return passed if said == key and len(passed) == len(tests) else [False] * len(tests)
