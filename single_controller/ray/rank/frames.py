"""Python frames of a process whose threads cannot answer, because C code holds the interpreter's lock or hangs.

py-spy reads them from the process's memory, with the names of C functions if asked to. Where it is not installed, or
not allowed to read other processes, the interpreter's own signal handler writes them, which needs no lock either.
Everything but `frames_file` runs on the rank's host, outside its process.
"""

from __future__ import annotations

import contextlib
import faulthandler
import fcntl
import os
import re
import shutil
import signal
import subprocess
import sys
import time

_SIGNAL = getattr(signal, "SIGRTMIN", 0) + 9
"""The real-time signal on which a worker writes its frames. Real-time signals have no other meaning by themselves."""

_FILE = "frames"
"""Name of the file in memory for them, by which a process shows that it handles the signal."""

_OUTERMOST = re.compile(r"Executor\.(run|start|call\w*) \(|worker/executor\.py\", line \d+ in (run|start|call\w*)$")
"""A frame from which on outwards all frames are the same in every call."""

MAX_LINE = 200
"""Characters of a line that are shown. Names of C++ functions are longer."""

PY_SPY_SECONDS = 20.0
WRITE_SECONDS = 2.0
"""How long a process may take to write its frames. A stopped one does not."""


def frames_file() -> int:
    """Let this process write its Python frames to a file in memory when it gets a signal. Returns the file's
    descriptor; -1 if this system has no such files, or the program uses the signal."""
    if not hasattr(os, "memfd_create") or signal.getsignal(_SIGNAL) is not signal.SIG_DFL:
        return -1
    file = os.memfd_create(_FILE)
    fcntl.fcntl(file, fcntl.F_SETFL, os.O_APPEND)  # because `_written_frames` empties it
    faulthandler.register(_SIGNAL, file=file, all_threads=True)
    return file


def frames_of(pid: int, file: int, *, native: bool = False, py_spy: str | None = None) -> str:
    """The Python frames of the threads of a process on this host, or why they cannot be read and what to do.

    Args:
        pid: the process.
        file: what `frames_file` returned there.
        native: whether to show C functions too, which only py-spy can.
        py_spy: path of py-spy; by default the one of this Python, or in PATH; empty for none.
    """
    if py_spy is None:
        beside = os.path.join(os.path.dirname(sys.executable), "py-spy")
        py_spy = beside if os.path.exists(beside) else shutil.which("py-spy") or ""
    if not py_spy:
        why = "py-spy is not installed on its host: pip install py-spy"
    else:
        command = [py_spy, "dump", *(["--native"] if native else []), "--pid", str(pid)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=PY_SPY_SECONDS)
        except (OSError, subprocess.TimeoutExpired) as error:
            why = f"{' '.join(command)}: {error}"
        else:
            if not done.returncode:
                return _indented(done.stdout[done.stdout.find("\nThread ") + 1 :])
            why = (done.stderr.strip().splitlines() or ["no output"])[0]
            if "ermission" in done.stderr:
                why = (
                    "py-spy may not read its memory: run it as root on its host, set kernel.yama.ptrace_scope=0 there, "
                    "or start the container with --cap-add=SYS_PTRACE"
                )
    frames = _written_frames(pid, file) if file >= 0 else ""
    if frames:
        return _indented(f"({why}; these are the interpreter's own frames)\n{frames}")
    return _indented(f"unknown: {why}. Nor did it write its frames itself: its process is stopped, or has ended")


def _written_frames(pid: int, file: int) -> str:
    """Have a process write its frames, and return them."""
    path, size = f"/proc/{pid}/fd/{file}", 0
    with contextlib.suppress(OSError):  # it has ended, or belongs to another user
        if not os.readlink(path).startswith(f"/memfd:{_FILE}"):
            return ""  # another process has got this pid, which the signal would end
        with open(path, "r+", encoding="utf-8", errors="replace") as written:
            fcntl.lockf(written, fcntl.LOCK_EX)  # against other readers. Unlike flock(), no fork keeps it
            written.truncate(0)  # or the frames of all readers would accumulate in memory
            os.kill(pid, _SIGNAL)
            end = time.monotonic() + WRITE_SECONDS
            while time.monotonic() < end:
                time.sleep(0.05)
                now = os.stat(path).st_size
                if now and now == size:  # it has stopped writing
                    return written.read()
                size = now
    return ""


def _indented(text: str) -> str:
    """Indent the frames, without those that all calls have in common: Ray's, and this library's."""
    lines, common = [], False
    for line in text.strip().splitlines():
        common = line[:1].isspace() and (common or bool(_OUTERMOST.search(line)))
        if not common:
            lines.append(f"  {line[:MAX_LINE]}")
    return "\n".join(lines)
