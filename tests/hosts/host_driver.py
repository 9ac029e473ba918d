"""A driver script on a host: it runs the code that a test sends, and returns what came of it.

Run as a script, it is the driver's side: one JSON message per line from stdin, one to stdout.
"""

from __future__ import annotations

import json
import os
import select
import sys
import textwrap
import time
import traceback
from dataclasses import dataclass, field


@dataclass
class Outcome:
    """What came of a piece of code.

    Attributes:
        value: the value of its last expression, if JSON can hold it.
        error: name of the exception's type, or None.
        text: the exception's message.
        bases: names of its other types.
        facts: its plain attributes, such as ``rank``.
        seconds: how long it took.
        trace: the traceback, for failed tests.
    """

    value: object = None
    error: str | None = None
    text: str = ""
    bases: list[str] = field(default_factory=list)
    facts: dict = field(default_factory=dict)
    seconds: float = 0.0
    trace: str = ""

    def __str__(self) -> str:
        said = f"{self.error}: {self.text.splitlines()[0] if self.text else ''}" if self.error else repr(self.value)
        return f"{self.seconds:6.2f} s  {said}"


class Driver:
    """A driver on a host. Close it, or it ends with the host.

    Args:
        host: the host.
        setup: the code that it runs first.
    """

    def __init__(self, host, setup: str = "") -> None:
        self.process = host.popen([sys.executable, "-u", __file__], stdin=-1, stdout=-1, bufsize=0)
        if setup:
            self.do(setup, 120)

    def tell(self, code: str) -> None:
        """Send code without waiting."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(textwrap.dedent(code)).encode() + b"\n")

    def hear(self, seconds: float = 60) -> Outcome:
        """Wait for the outcome of the code that was sent."""
        line, end = b"", time.monotonic() + seconds
        while not line.endswith(b"\n"):
            assert self.process.stdout is not None
            assert select.select([self.process.stdout], [], [], max(0.0, end - time.monotonic()))[0], (
                f"the driver has not responded within {seconds} s"
            )
            part = os.read(self.process.stdout.fileno(), 1 << 16)
            assert part, f"the driver has ended with status {self.process.wait(10)}"
            line += part
        return Outcome(**json.loads(line))

    def outcome(self, code: str, seconds: float = 60) -> Outcome:
        """Send code and wait for its outcome."""
        self.tell(code)
        return self.hear(seconds)

    def do(self, code: str, seconds: float = 60) -> object:
        """Send code that must not raise, and wait for its value."""
        outcome = self.outcome(code, seconds)
        assert outcome.error is None, outcome.trace
        return outcome.value

    def close(self) -> None:
        """End it."""
        self.process.kill()
        self.process.wait(10)
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                stream.close()


def run(code: str, names: dict) -> Outcome:
    """Run code. If its last statement is an expression, its value is the outcome's."""
    import ast

    begun, outcome = time.monotonic(), Outcome()
    try:
        tree = ast.parse(code)
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, "<test>", "exec"), names)
        if last is not None:
            value = eval(compile(ast.Expression(last.value), "<test>", "eval"), names)
            outcome.value = value if _fits_json(value) else repr(value)
    except Exception as error:
        outcome.error, outcome.text = type(error).__name__, str(error)
        outcome.bases = [base.__name__ for base in type(error).__mro__]
        outcome.facts = {name: value for name, value in vars(error).items() if _fits_json(value)}
        outcome.trace = traceback.format_exc()
    outcome.seconds = time.monotonic() - begun
    return outcome


def _fits_json(value: object) -> bool:
    try:
        json.dumps(value)
    except (TypeError, ValueError):
        return False
    return True


def serve() -> None:
    """Run the code that arrives, until stdin ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is not an outcome
    names: dict = {"__name__": "__main__"}
    for line in sys.stdin:
        print(json.dumps(vars(run(json.loads(line), names))), file=answers, flush=True)


if __name__ == "__main__":
    serve()
