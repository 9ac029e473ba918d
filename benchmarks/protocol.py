"""The protocol between the command and a contender: one line of JSON per request and per response.

The command starts each adapter in its own process (`Session`); the adapter calls `serve`. Anything that a contender
prints goes to its log, so stdout carries only responses.

An adapter is an object with one generator method per kind of case. The method sets the case up, yields its variants
as a dict from name to `Call`, and cleans up when it is resumed.
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
"""Seconds between two runs, in which a contender frees the memory of the previous run."""
SPARE = 3 * 1024**3 // 2


class ContenderError(Exception):
    """A contender failed, exited, or did not respond in time."""


@dataclass(frozen=True)
class Call:
    """One variant of a case.

    Attributes:
        run: the timed function.
        finish: checks and releases the result of a run. Not timed.
        prove: a run before the timed ones that checks every byte. Not timed.
        times: number of repetitions inside ``run``; the measured seconds are divided by it.
        ranks: number of ranks; the CPU time is divided by it and by ``times``.
    """

    run: Callable[[], Any]
    finish: Callable[[Any], None]
    prove: Callable[[], None] | None = None
    times: int = 1
    ranks: int = 1


class Session:
    """A contender's process, on the command's side.

    Args:
        python: path of its interpreter.
        module: module of its adapter.
        env: environment variables, in addition to the command's own.
        log: file for its output.
        spare: bytes of memory that must stay available. A contender that leaves less is stopped.

    Attributes:
        pid: of the process.
    """

    def __init__(self, python: str, module: str, env: dict[str, str], log: Path, spare: int = SPARE) -> None:
        self._log, self._spare = log, spare
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
        self.pid = self._process.pid

    def ask(self, command: str, timeout: float, **arguments: Any) -> Any:
        """Send a command and wait for the response.

        Raises:
            ContenderError: the command failed, or the process exited or did not respond within ``timeout`` seconds.
                The process has ended then, unless only the command failed.
        """
        if self._process.stdin is None or self._process.stdout is None:
            raise ContenderError("the process has no pipes")
        try:
            self._process.stdin.write(json.dumps({"command": command, **arguments}) + "\n")
            self._process.stdin.flush()
        except OSError as error:
            raise ContenderError(f"the process has exited; last lines of its log: {self._last_lines()}") from error
        self._wait(command, timeout)
        line = self._process.stdout.readline()
        if not line:
            self._kill()
            raise ContenderError(f"the process exited during {command!r}; last lines of its log: {self._last_lines()}")
        response = json.loads(line)
        if "error" in response:
            raise ContenderError(response["error"])
        return response["value"]

    def _wait(self, command: str, timeout: float) -> None:
        deadline = time.monotonic() + timeout
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            while not selector.select(0.25):
                if time.monotonic() > deadline:
                    self._kill()
                    raise ContenderError(f"no response to {command!r} within {timeout:.0f} s")
                left = available_memory()
                if left is not None and left < self._spare:
                    self._kill()
                    raise ContenderError(
                        f"stopped, because it left less than {self._spare / 1024**3:.1f} GiB of memory available"
                    )

    @property
    def ended(self) -> bool:
        """Whether the process has exited."""
        return self._process.poll() is not None

    def close(self) -> None:
        """End the process: close its stdin, and kill it if it does not exit within 30 s."""
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

    def _last_lines(self) -> str:
        return " / ".join(self._log.read_text(errors="replace").strip().splitlines()[-3:])


def available_memory() -> int | None:
    """Return the available memory in bytes; None if the system does not report it."""
    try:
        with open("/proc/meminfo") as lines:
            return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable")), None)
    except OSError:
        return None


def serve(adapter: Any, probes: dict[str, Callable[[Callable[[], Any]], dict[str, Any]]] | None = None) -> None:
    """Handle commands until stdin is closed.

    Args:
        adapter: the contender.
        probes: measurements besides time: name -> function that runs a call and returns figures.
    """
    with os.fdopen(os.dup(1), "w") as responses:
        os.dup2(2, 1)
        server = _Server(adapter, probes or {})
        for line in sys.stdin:
            request = json.loads(line)
            try:
                response = {"value": getattr(server, request.pop("command"))(**request)}
            except Exception as error:
                traceback.print_exc()
                response = {"error": f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[-1]}"}
            responses.write(json.dumps(response) + "\n")
            responses.flush()
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
        """Set a case up. Returns the names of its variants, or None if the contender does not support it."""
        self.release()
        if not hasattr(self._adapter, kind):
            return None
        self._case = getattr(self._adapter, kind)(**parameters)
        self._calls = next(self._case)
        return list(self._calls)

    def warm(self, variant: str, least: int, seconds: float) -> int:
        """Check a variant's result, then run it at least ``least`` times, and up to 8 times within ``seconds``. Returns
        the number of runs."""
        call = self._calls[variant]
        if call.prove is not None:
            call.prove()
        start = time.monotonic()
        runs = 0
        while runs < least or (runs < 8 and time.monotonic() - start < seconds):
            timed(call)
            runs += 1
        return runs

    def measure(self, variant: str, runs: int, seconds: float) -> list[tuple[float, float]]:
        """Return the seconds and the CPU seconds of each run, see `timed`. Stops early, but not before two runs, after
        ``seconds`` in total."""
        taken: list[tuple[float, float]] = []
        while len(taken) < runs and (len(taken) < 2 or sum(one[0] for one in taken) < seconds):
            taken.append(timed(self._calls[variant]))
        return taken

    def probe(self, variant: str, probes: list[str]) -> dict[str, Any]:
        """Run probes on a variant and return their figures."""
        found: dict[str, Any] = {}
        call = self._calls[variant]
        for probe in probes:
            if probe in self._probes:
                for figure, value in self._probes[probe](lambda: timed(call)).items():
                    found[figure] = max(value, found.get(figure, value))
        return found

    def release(self) -> None:
        """Clean up the current case."""
        self._calls = {}
        if self._case is not None:
            for _ in self._case:
                pass
        self._case = None
        gc.collect()


def timed(call: Call) -> tuple[float, float]:
    """Run a call. Returns its seconds, and the CPU seconds of all threads of this process per rank."""
    gc.collect()
    time.sleep(SETTLE)
    start, busy = time.perf_counter(), time.process_time()
    result = call.run()
    seconds, busy = time.perf_counter() - start, time.process_time() - busy
    call.finish(result)
    return seconds / call.times, busy / call.times / call.ranks
