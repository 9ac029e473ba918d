"""How the command talks to a contender: one line of JSON there, one back.

The command starts each adapter as a process of its own (`Session`); the adapter calls `serve`. What a contender
prints itself goes to its log, so only answers are on the line.

An adapter is an object with one generator method per kind of case. It sets the case up, yields its variants as a
dict from name to `Call`, and clears away when it is resumed.
"""

from __future__ import annotations

import gc
import json
import os
import selectors
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
SETTLE = 0.05
"""Seconds between two runs, in which a contender frees what the last one left behind."""
SPARE = 3 * 1024**3 // 2
"""Bytes of memory that the machine keeps: a contender that takes them is stopped."""


class ContenderError(Exception):
    """A contender failed, ended, or did not answer in time."""


@dataclass(frozen=True)
class Call:
    """One way of doing a case.

    Attributes:
        run: what is timed.
        finish: takes the result of every run: checks it and clears it away. Not timed.
        prove: a run in which every byte is checked, before the timed ones. Not timed.
        times: how often ``run`` does its work; seconds are divided by it.
    """

    run: Callable[[], Any]
    finish: Callable[[Any], None]
    prove: Callable[[], None] | None = None
    times: int = 1


class Session:
    """A contender's process, as the command sees it.

    Args:
        python: its interpreter.
        module: its adapter.
        env: environment variables besides the command's own.
        log: where to write what it prints.
    """

    def __init__(self, python: str, module: str, env: dict[str, str], log: Path) -> None:
        self._log = log
        with log.open("ab") as errors:
            self._process = subprocess.Popen(
                [python, "-m", module],
                cwd=ROOT,
                env={**os.environ, "PYTHONPATH": str(ROOT), **env},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                start_new_session=True,
            )

    def ask(self, command: str, timeout: float, **arguments: Any) -> Any:
        """Give a command and wait for its answer.

        Raises:
            ContenderError: it failed, ended, or did not answer within ``timeout`` seconds; it is gone then, except
                after a failure.
        """
        if self._process.stdin is None or self._process.stdout is None:
            raise ContenderError("the process has no pipes")
        try:
            self._process.stdin.write(json.dumps({"command": command, **arguments}) + "\n")
            self._process.stdin.flush()
        except OSError as error:
            raise ContenderError(f"it has ended; its last words: {self._last_words()}") from error
        self._wait(command, timeout)
        line = self._process.stdout.readline()
        if not line:
            self._kill()
            raise ContenderError(f"it ended during {command!r}; its last words: {self._last_words()}")
        answer = json.loads(line)
        if "error" in answer:
            raise ContenderError(answer["error"])
        return answer["value"]

    def _wait(self, command: str, timeout: float) -> None:
        deadline = time.monotonic() + timeout
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            while not selector.select(0.25):
                if time.monotonic() > deadline:
                    self._kill()
                    raise ContenderError(f"no answer to {command!r} within {timeout:.0f} s")
                left = available_memory()
                if left is not None and left < SPARE:
                    self._kill()
                    raise ContenderError(
                        f"stopped: it left less than {SPARE / 1024**3:.1f} GiB of memory to the machine"
                    )

    @property
    def ended(self) -> bool:
        """Whether the process is gone."""
        return self._process.poll() is not None

    def close(self) -> None:
        """End the process: by asking first."""
        if self._process.stdin is not None:
            with suppress(OSError):
                self._process.stdin.close()
        try:
            self._process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self._kill()
        if self._process.stdout is not None:
            self._process.stdout.close()

    def _kill(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _last_words(self) -> str:
        return " / ".join(self._log.read_text(errors="replace").strip().splitlines()[-3:])


def available_memory() -> int | None:
    """Bytes of memory that processes may still take; None where the system does not say."""
    try:
        with open("/proc/meminfo") as lines:
            return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable")), None)
    except OSError:
        return None


def serve(adapter: Any, probes: dict[str, Callable[[Callable[[], Any]], dict[str, Any]]] | None = None) -> None:
    """Answer the command until it closes the line.

    Args:
        adapter: the contender.
        probes: what can be measured besides time: name -> function that runs a call and gives figures.
    """
    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)
        server = _Server(adapter, probes or {})
        for line in sys.stdin:
            request = json.loads(line)
            try:
                answer = {"value": getattr(server, request.pop("command"))(**request)}
            except Exception as error:
                traceback.print_exc()
                answer = {"error": f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[-1]}"}
            answers.write(json.dumps(answer) + "\n")
            answers.flush()
        server.release()


class _Server:
    def __init__(self, adapter: Any, probes: dict[str, Callable[[Callable[[], Any]], dict[str, Any]]]) -> None:
        self._adapter = adapter
        self._probes = probes
        self._case: Any = None
        self._calls: dict[str, Call] = {}

    def versions(self) -> dict[str, str]:
        return self._adapter.versions()

    def prepare(self, kind: str, parameters: dict[str, Any]) -> list[str] | None:
        """Set a case up: the names of its variants, or None if the contender does not have it."""
        self.release()
        if not hasattr(self._adapter, kind):
            return None
        self._case = getattr(self._adapter, kind)(**parameters)
        self._calls = next(self._case)
        return list(self._calls)

    def warm(self, variant: str, least: int, seconds: float) -> int:
        """Prove a variant's result, then run it at least so often and so long: how often."""
        call = self._calls[variant]
        if call.prove is not None:
            call.prove()
        start = time.monotonic()
        runs = 0
        while runs < least or (runs < 8 and time.monotonic() - start < seconds):
            _timed(call)
            runs += 1
        return runs

    def measure(self, variant: str, runs: int, seconds: float) -> list[float]:
        """Seconds of each of so many runs; of fewer, but at least two, when they take longer than ``seconds``."""
        taken: list[float] = []
        while len(taken) < runs and (len(taken) < 2 or sum(taken) < seconds):
            taken.append(_timed(self._calls[variant]))
        return taken

    def probe(self, variant: str, probes: list[str]) -> dict[str, Any]:
        """What else is known about a variant."""
        found: dict[str, Any] = {}
        call = self._calls[variant]
        for probe in probes:
            if probe in self._probes:
                for figure, value in self._probes[probe](lambda: _timed(call)).items():
                    found[figure] = max(value, found.get(figure, value))
        return found

    def release(self) -> None:
        """Clear the case away."""
        self._calls = {}
        if self._case is not None:
            for _ in self._case:
                pass
        self._case = None
        gc.collect()


def _timed(call: Call) -> float:
    gc.collect()
    time.sleep(SETTLE)
    start = time.perf_counter()
    result = call.run()
    seconds = time.perf_counter() - start
    call.finish(result)
    return seconds / call.times
