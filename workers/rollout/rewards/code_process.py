"""run_python: runs a program in a process with limits. This file is also the program that sets them.

The limits are for programs that are wrong, not for ones that attack: a program runs as this process's user, and reads
and writes what that user may. Run rollouts with programs that you do not trust in a container.

Processes: the launcher (this file) starts `_supervise`, which starts the program, so that it is not process 1 of its
namespace, which signals do not end.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

_START_SECONDS = 10.0
"""How much longer than its own limit the launcher may take."""

_PDEATHSIG, _SUBREAPER = 1, 36  # prctl
_NEWUSER, _NEWPID, _NEWNET, _NEWIPC, _NEWNS = 0x10000000, 0x20000000, 0x40000000, 0x08000000, 0x00020000  # unshare
_REC, _PRIVATE = 0x4000, 0x40000  # mount


@dataclass(frozen=True)
class CodeLimits:
    """Limits of a program.

    Attributes:
        seconds: of wall clock.
        cpu_seconds: of each of its processes.
        memory_bytes: of address space of each of its processes.
        output_bytes: of each file that it writes, its standard output and error included.
        isolate: use namespaces, if the system allows them; see `run_python`.

    Raises:
        ValueError: a limit is out of range, so that no program could run.
    """

    seconds: float = 10.0
    cpu_seconds: int = 5
    memory_bytes: int = 1 << 30
    output_bytes: int = 1 << 20
    isolate: bool = True

    def __post_init__(self) -> None:
        for name in ("cpu_seconds", "memory_bytes", "output_bytes"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"CodeLimits: {name}={value!r}; expected an integer of at least 1")
        if not 0 < self.seconds < float("inf"):
            raise ValueError(f"CodeLimits: seconds={self.seconds!r}; expected a finite number above 0")


class CodeResult(NamedTuple):
    """What a program did.

    Attributes:
        status: its exit status; minus the signal that ended it; None if it exceeded `CodeLimits.seconds`.
        output: its standard output.
        errors: the last 4,000 characters of its standard error.
        isolated: whether it had no network, and could see and signal no other processes.
        back: content of the file that was asked for; empty if the program has not written it.
    """

    status: int | None
    output: str
    errors: str
    isolated: bool
    back: str = ""


def run_python(
    program: str,
    stdin: str = "",
    limits: CodeLimits | None = None,
    files: Mapping[str, str] | None = None,
    *,
    back: str | None = None,
) -> CodeResult:
    """Run a Python program with this interpreter and its packages, in a folder of its own and without this process's
    environment variables. When this returns, all its processes have ended, and the folder is deleted.

    Where the system allows namespaces (as root, or with unprivileged user namespaces), the program has no network, and
    can see and signal no other processes. Sockets that are files it can still connect to.

    Args:
        program: the source.
        stdin: its standard input.
        limits: by default `CodeLimits`.
        files: name -> content, of further files in the folder.
        back: name of a file in the folder to return.

    Raises:
        RuntimeError: the launcher has failed.
        subprocess.TimeoutExpired: the launcher has not ended in time.
    """
    limits = limits or CodeLimits()
    with tempfile.TemporaryDirectory(prefix="code-", ignore_cleanup_errors=True) as folder:
        work = Path(folder, "work")
        work.mkdir()
        for name, content in {**(files or {}), "program.py": program}.items():
            (work / name).write_text(content, errors="replace")
        for name, content in (("in", stdin), ("out", ""), ("err", "")):  # a program that has no time may open none
            Path(folder, name).write_text(content, errors="replace")
        command = [sys.executable, "-I", "-S", __file__, folder, json.dumps(asdict(limits))]
        # Start a new session: Ctrl-C in a terminal does not reach it, and killpg below also kills its children.
        launcher = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
        )
        try:
            said, errors = launcher.communicate(timeout=limits.seconds + _START_SECONDS)
        except BaseException:  # such as Ctrl-C
            os.killpg(launcher.pid, signal.SIGKILL)
            launcher.communicate()
            raise
        if launcher.returncode < 0:  # without namespaces, a program may have signalled its whole process group
            with suppress(ProcessLookupError):
                os.killpg(launcher.pid, signal.SIGKILL)  # a program that ignores that signal
            said = json.dumps({"status": launcher.returncode, "isolated": False}).encode()
        try:
            report = json.loads(said)
        except ValueError:
            raise RuntimeError(
                f"the launcher of a program has failed: {errors.decode(errors='replace')[-2000:]}"
            ) from None
        output, errors_of = (_text(Path(folder, name), limits.output_bytes) for name in ("out", "err"))
        content = _text(work / back, limits.output_bytes) if back else ""
        return CodeResult(report["status"], output, errors_of[-4000:], report["isolated"], content)


def _text(path: Path, most: int) -> str:
    """The beginning of a file; empty if the program has deleted it, or put a link or a named pipe in its place."""
    flags = os.O_NOFOLLOW | os.O_NONBLOCK
    with suppress(OSError), open(path, "rb", opener=lambda name, how: os.open(name, how | flags)) as file:
        return file.read(most).decode(errors="replace")
    return ""


# --- the launcher -----------------------------------------------------------------------------------------------------


def _launch(folder: str, limits: CodeLimits) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    alone = _NEWPID | _NEWNET | _NEWIPC | _NEWNS
    separate = limits.isolate and hasattr(libc, "unshare")
    separate = separate and any(libc.unshare(flags) == 0 for flags in (alone, alone | _NEWUSER))
    inside, outside = os.pipe()
    # A PID namespace begins with the next child, so the launcher itself stays outside.
    pid = os.fork()
    if not pid:
        os.close(inside)
        if hasattr(libc, "prctl"):
            # Set this after the fork, which clears it. The supervisor dies with the launcher, and the namespace with
            # the supervisor.
            libc.prctl(_PDEATHSIG, signal.SIGKILL)
            libc.prctl(_SUBREAPER, 1)
        # Otherwise /proc would show all processes, with their environment and, to root, their memory.
        hidden = separate and not libc.mount(b"none", b"/", None, _REC | _PRIVATE, None)
        hidden = hidden and not libc.mount(b"proc", b"/proc", b"proc", 0, None)
        _supervise(folder, limits, outside, separate, hidden)
    os.close(outside)
    with os.fdopen(inside) as pipe:
        said = pipe.read()
    os.waitpid(pid, 0)
    sys.stdout.write(said)


def _supervise(folder: str, limits: CodeLimits, report: int, separate: bool, hidden: bool) -> None:
    """Run the program, and end all processes that it leaves. In a namespace of processes this is process 1, whose end
    ends all others; without one it is the new parent of those whose parents have ended."""
    end = time.monotonic() + limits.seconds
    program = os.fork()
    if not program:
        # The launcher reads until all writers have closed the pipe, so the program must not inherit it.
        os.close(report)
        if separate:
            # A signal to its process group then reaches neither this process nor the launcher. Without namespaces, the
            # program stays in the group of the launcher, which `run_python` can kill.
            os.setsid()
        _become(folder, limits)
    status: int | None = None
    while time.monotonic() < end:
        done, how = os.waitpid(program, os.WNOHANG)
        if done == program:
            status = os.waitstatus_to_exitcode(how)
            break
        time.sleep(0.005)
    if not separate:
        _kill_children()
    os.write(report, json.dumps({"status": status, "isolated": hidden}).encode())
    os._exit(0)


def _kill_children() -> None:
    """Kill the children of this process and wait for them, until their children, which become its own, are gone too."""
    me = os.getpid()
    while True:
        for child in Path(f"/proc/{me}/task/{me}/children").read_text().split():
            # A child that has ended keeps its PID until this process waits for it, so no other process is killed.
            os.kill(int(child), signal.SIGKILL)
        try:
            os.waitpid(-1, 0)  # one of those; then there may be others
        except ChildProcessError:
            return


def _become(folder: str, limits: CodeLimits) -> None:
    import resource

    for name, number, flags in (
        ("in", 0, os.O_RDONLY),
        ("out", 1, os.O_WRONLY),
        ("err", 2, os.O_WRONLY),
    ):
        os.dup2(os.open(Path(folder, name), flags), number)
    # The program must not inherit any other file of the launcher.
    os.closerange(3, 256)
    os.chdir(Path(folder, "work"))
    for what, most in (
        (resource.RLIMIT_AS, limits.memory_bytes),
        (resource.RLIMIT_FSIZE, limits.output_bytes),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_NOFILE, 256),
    ):
        resource.setrlimit(what, (most, most))
    resource.setrlimit(resource.RLIMIT_CPU, (limits.cpu_seconds, limits.cpu_seconds + 1))  # SIGXCPU, then SIGKILL
    # One thread, because each reserves address space.
    environment = {"HOME": os.getcwd(), "LANG": "C.UTF-8", "PATH": os.defpath, "OMP_NUM_THREADS": "1"}
    os.execve(sys.executable, [sys.executable, "-I", "program.py"], environment)


if __name__ == "__main__":
    _launch(sys.argv[1], CodeLimits(**json.loads(sys.argv[2])))
