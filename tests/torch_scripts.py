"""Scripts in a process of their own that import torch and what is made of it, which takes seconds."""

import os
import subprocess
import sys
import textwrap

from fork_workers import fork_script, origin
from waits import wait_until


def printed(config, code, folder, environment=None):
    """Run code as a script in a folder, and return all that it prints.

    In `make test` the script is a fork of a process that has imported torch, transformers and megatron already.
    """
    script, output = folder / "script.py", folder / "printed"
    script.write_text(textwrap.dedent(code))
    environment = dict(os.environ if environment is None else environment)
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
