"""Scripts in a process of their own; most import torch and what is made of it, which takes seconds."""

import contextlib
import os
import select
import subprocess
import sys
import textwrap

from fork_workers import fork_script, origin
from waits import wait_until


def python(code, timeout=60, **environment):
    """Run code in a Python of its own, with variables beside those of this process."""
    command = [sys.executable, "-c", textwrap.dedent(code)]
    variables = {**os.environ, **environment}
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, env=variables)


def printed(config, code, folder, environment=None):
    """Run code as a script in a folder, and return all that it prints.

    In `make test` the script is a fork of a process that has imported torch, transformers and megatron already.
    """
    script, output = folder / "script.py", folder / "printed"
    script.write_text(textwrap.dedent(code))
    environment = dict(os.environ if environment is None else environment)
    environment.pop("PYTHONUNBUFFERED", None)  # print() would write each of its arguments by itself, between log lines
    if not (server := origin(config)):
        command = [sys.executable, "-W", "ignore", str(script)]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        return subprocess.run(command, cwd=folder, env=environment, text=True, timeout=100, **pipes).stdout
    wait_until(server.exists, 100, "the server to fork from")
    with fork_script(server, str(script), environment=environment, output=output, folder=folder) as process:
        process.settimeout(100)
        while process.recv(64):  # until it and all that it has forked have ended
            pass
    return output.read_text()


@contextlib.contextmanager
def driver(config, script, *arguments, environment, said):
    """Start a script as a driver, which writes what it prints to the file ``said``. Yields a function that returns
    whether it has ended.

    In `make test` it is a fork, as in `printed`.
    """
    command = str(script), *map(str, arguments)
    if server := origin(config):
        wait_until(server.exists, 100, "the server to fork from")
        with fork_script(server, *command, environment=environment, output=said) as process:
            yield lambda: select.select([process], [], [], 0)[0]
    else:
        with (
            open(said, "a") as file,
            subprocess.Popen([sys.executable, *command], env=environment, stdout=file, stderr=file) as process,
        ):
            yield lambda: process.poll() is not None
