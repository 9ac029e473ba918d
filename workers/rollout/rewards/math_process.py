"""A process that compares mathematics, because nothing else can end a comparison that does not end by itself:
math-verify's own time limits are signals, which need the main thread and do not interrupt compiled code.

This file is also the program of that process. It reads a JSON object per line, and writes one.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from contextlib import suppress
from typing import Any

MEMORY_BYTES = 4 * 2**30
"""Address space of the process."""


class _MathProcess:
    """The process, which is started again when it has ended."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        """Held by the thread that waits for an answer: the process compares one pair at a time."""
        self._process: subprocess.Popen[str] | None = None
        self._of_parents: list[subprocess.Popen[str] | None] = []
        """Of the processes that this one is a fork of. Kept, because closing their pipes could write what a thread of
        the parent has in a buffer."""

    def ask(self, question: dict[str, Any]) -> dict[str, Any]:
        """Return the answer to a question; without ``equal`` if the process has ended over it."""
        with self._lock:
            if self._process is None or self._process.poll() is not None:
                self._process = subprocess.Popen(
                    [sys.executable, "-P", __file__],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                    text=True,
                    start_new_session=True,  # or Ctrl-C would end it, and with it a comparison in another thread
                )
            process = self._process
            if process.stdin is None or process.stdout is None:
                raise RuntimeError("the process for mathematics has no pipes")
            line = ""
            try:
                with suppress(BrokenPipeError):
                    process.stdin.write(json.dumps(question) + "\n")
                    process.stdin.flush()
                    line = process.stdout.readline()
            finally:
                if not line:  # or, as after Ctrl-C, its answer would be read as that of the next question
                    process.kill()
                    process.wait()
            answer: dict[str, Any] = json.loads(line) if line else {}
            return answer

    def leave_to_parent(self) -> None:
        """In a fork: begin anew. A thread that only the parent has may hold the lock."""
        self._lock = threading.Lock()
        self._of_parents.append(self._process)
        self._process = None


_PROCESS = _MathProcess()

os.register_at_fork(after_in_child=lambda: _PROCESS.leave_to_parent())


def equal_mathematics(completion: str, label: str, timeout: float) -> bool:
    """See `workers.rollout.rewards.answers.math_match`."""
    if not 0 < timeout <= 1e9:  # a timer of 0 seconds would be none, and one of more cannot be set
        raise ValueError(f"math_match: timeout={timeout!r}; expected seconds above 0, and at most 1e9")
    answer = _PROCESS.ask({"completion": completion, "label": label, "timeout": timeout})
    if "missing" in answer:
        raise ImportError(f"{answer['missing']!r} is not installed: pip install 'single-controller[math]'")
    return bool(answer.get("equal"))


def _compare(question: dict[str, Any]) -> bool:
    from math_verify import parse, verify

    label = question["label"]
    if "\\boxed" not in label and "$" not in label:
        label = f"$\\boxed{{{label}}}$"
    expected = parse(label, parsing_timeout=None)
    found = parse(question["completion"], parsing_timeout=None)
    return bool(verify(expected, found, timeout_seconds=None))


def _serve() -> None:
    import resource
    import signal

    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    try:
        import math_verify  # noqa: F401
    except ModuleNotFoundError as error:
        for _ in sys.stdin:
            sys.stdout.write(json.dumps({"missing": error.name}) + "\n")
            sys.stdout.flush()
        return
    for line in sys.stdin:
        question = json.loads(line)
        # Without a handler, the signal ends the process, also in the middle of a computation, and without its parent.
        signal.setitimer(signal.ITIMER_REAL, question["timeout"])
        try:
            equal = _compare(question)
        except Exception:  # what cannot be read is not equal; sympy raises errors of all kinds
            equal = False
        signal.setitimer(signal.ITIMER_REAL, 0)
        sys.stdout.write(json.dumps({"equal": equal}) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    _serve()
