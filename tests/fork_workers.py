"""Ray workers that are forked from a process with everything imported.

Python needs a second of CPU to start a Ray worker, three with torch and eight with Megatron, and the suite starts about
a thousand. `forked_workers` puts a small program in the place of the Python interpreter in Ray's command for a worker.
It asks a server for a fork, which runs Ray's own worker script with the arguments and the environment of the command.
Nothing else differs. Workers on several hosts, of notebooks and of other Pythons are started as Ray does.

The servers of pytest-xdist's processes are themselves forks of one server, which has imported what does not import Ray.
"""

import contextlib
import gc
import importlib
import importlib.util
import marshal
import os
import random
import runpy
import select
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path

from waits import wait_until

PRELOADED = (
    "ray._private.workers.default_worker",
    "ray._private.workers.setup_worker",
    "ray._private.arrow_serialization",
    "ray._common.usage.usage_lib",
    "ray._common.pydantic_compat",
    "pydantic.v1",
    "pyarrow.json",
    "single_controller.ray.rank.actor",
    "numpy",
    "omegaconf",
    "tensordict",
    "transformers.modeling_utils",
    "transformers.models.llama.modeling_llama",
    "transformers.models.qwen2.modeling_qwen2",
    "peft",
    "workers.fsdp.fsdp_worker",
    "workers.megatron.megatron_train_worker",
    "workers.megatron.lm_worker",
    "workers.megatron.mlp",
    "workers.rollout.rollout_worker",
    "workers.train.train_group",
    "workers.weight_sync.arrivals",
    "megatron.core.models.gpt.gpt_layer_specs",
    "megatron.core.optimizer",
    "megatron.core.dist_checkpointing",
)
"""What the server imports."""

RANKS_ONLY = (*PRELOADED[: PRELOADED.index("omegaconf")], "torch")
"""Enough for workers that use torch and this library's groups only; importing it takes a quarter of the time."""

WITHOUT_RAY = (
    "pydantic.v1",
    "pyarrow.json",
    "numpy",
    "omegaconf",
    "tensordict",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
    "transformers.modeling_utils",
    "transformers.models.llama.modeling_llama",
)
"""What it imports for workers of several jobs."""

FOR_SERVERS = (*WITHOUT_RAY, *(name for name in PRELOADED if name.startswith(("transformers.", "peft", "megatron."))))
"""What the server imports that servers are forked from."""

CAN_FORK = all(map(importlib.util.find_spec, {name.partition(".")[0] for name in PRELOADED}))
"""vLLM's environment has not all that the servers import. There workers are started as Ray does."""

PRESTART = "RAY_prestart_worker_first_driver"
"""Ray's own setting, as a variable of the environment."""

ORIGIN = "TESTS_ORIGIN"
"""The variable that tells scripts with a Ray of their own the address of the server to fork from."""

STARTING = """#!/bin/sh
exec {python} "$@"
"""
FORKING = """#!/bin/sh
case "$1" in
*/default_worker.py | */setup_worker.py)
    if [ "$RAY_JOB_ID" = {job} ] && [ -S {folder}/own ]; then exec {python} -IS {client} {folder}/own "$@"; fi
    if [ -S {folder}/all ]; then exec {python} -IS {client} {folder}/all "$@"; fi ;;
esac
exec {python} "$@"
"""
"""Ray's native library reads the job when it is loaded: a server that has loaded it forks workers of one job only."""

CLIENT = """
import _socket, marshal, posix, sys  # socket, json and os would take twice as long as the interpreter itself
server = _socket.socket(_socket.AF_UNIX)
server.connect(sys.argv[1])
server.sendall(marshal.dumps((sys.argv[2:], posix.environ, posix.getcwd(), None)))
server.shutdown(_socket.SHUT_WR)
server.recv(1)  # returns when the worker has ended
"""


@contextlib.contextmanager
def forked_workers(modules=PRELOADED, origin=None):
    """Start Ray inside, and then call what this yields. Keep the context open until Ray is shut down.

    It yields a function that starts a server and returns its address, for `fork_script`. With ``every_job=True`` the
    server forks the workers of all drivers that connect to this Ray, otherwise only those of this driver. There may be
    both. Workers of every job import Ray after the fork.

    Args:
        modules: what the server of this driver imports.
        origin: the address of the server that the servers are forked from; None takes it from the environment, and
            starts them as programs if it is not there.
    """
    python = sys.executable
    if origin is None and ORIGIN in os.environ:
        origin = Path(os.environ[ORIGIN])
    with tempfile.TemporaryDirectory(prefix="fork-") as folder, contextlib.ExitStack() as stack:
        client, program = (Path(folder) / name for name in ("client.py", "python"))
        client.write_text(CLIENT)
        program.write_text(STARTING.format(python=python))
        program.chmod(0o755)

        def start_server(*, every_job=False):
            import ray

            sys.executable = python
            raylet = ray._private.worker._global_node.all_processes["raylet"][0].process.pid
            job = ray.get_runtime_context().get_job_id()
            read_when_loaded = {"RAY_AUTH_MODE": "token", "RAY_JOB_ID": job, "RAY_RAYLET_PID": str(raylet)}
            forking = program.with_suffix(".new")
            forking.write_text(FORKING.format(python=python, client=client, folder=folder, job=job))
            forking.chmod(0o755)
            forking.replace(program)
            address = Path(folder) / ("all" if every_job else "own")
            environment = {**({} if every_job else read_when_loaded), **os.environ}
            imported = WITHOUT_RAY if every_job else modules
            stack.enter_context(server(address, imported, environment=environment, origin=origin))
            return address

        sys.executable = str(program)
        prestart = os.environ.get(PRESTART)
        os.environ[PRESTART] = "0"  # or Ray would start workers before there is a server that forks them
        try:
            yield start_server
        finally:
            sys.executable = python
            os.environ.pop(PRESTART)
            if prestart is not None:
                os.environ[PRESTART] = prestart


@contextlib.contextmanager
def server(address, modules, *, environment=None, origin=None, wait=True):
    """A server at the address that has imported the modules. It ends with the context, or with this process."""
    arguments = (__file__, str(address), *modules)
    log = address.with_suffix(".log")  # of a fork; a program writes where this process does
    with contextlib.ExitStack() as stack:
        if origin is None:
            command = [sys.executable, *arguments]
            process = stack.enter_context(subprocess.Popen(command, env=environment, stdin=subprocess.PIPE))
            ended = lambda: process.poll() is not None  # noqa: E731
        else:
            wait_until(origin.exists, 100, "the server to fork from")
            connection = stack.enter_context(fork_script(origin, *arguments, environment=environment, output=log))
            ended = lambda: select.select([connection], [], [], 0)[0]  # noqa: E731
        if wait:
            wait_until(lambda: address.exists() or ended(), 100, "the server that forks Ray's workers")
            if not address.exists():
                error = log.read_text() if log.exists() else "its error is above"
                raise RuntimeError(f"the server that forks Ray's workers has not started: {error}")
        yield


def origin(config):
    """The server to fork those of Ray's workers from; None where pytest runs in one process, or none can be."""
    shared = CAN_FORK and getattr(config, "workerinput", {}).get("shared")
    return shared and Path(shared) / "server"


def fork_script(address, *arguments, environment, output=None, folder=None):
    """Run a Python script as a fork of the server.

    Args:
        address: of the server.
        arguments: the script and its arguments.
        environment: that of the process. What PYTHONPATH names is imported before what the server can import.
        output: the file that receives what the script prints.
        folder: where it runs, if not in this process's folder.

    Returns:
        A socket, which reads as closed when the process has ended; ``b"done"`` before, if it has raised nothing.
    """
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(str(address))
    encoded = {os.fsencode(name): os.fsencode(value) for name, value in environment.items()}
    given = arguments, encoded, str(folder or os.getcwd()), output and str(output)
    connection.sendall(marshal.dumps(given))
    return connection


def serve(address, *modules):
    """Fork a worker for each request, until stdin is closed."""
    gc.disable()  # looking for garbage among modules takes a quarter of the time
    show, warnings.showwarning = warnings.showwarning, lambda *_: None  # they would be among the tests' own lines
    for name in modules:
        importlib.import_module(name)
    warnings.showwarning = show
    gc.enable()
    gc.freeze()  # no worker needs to look at these objects
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # no zombies
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(f"{address}.new")
    listening.listen(64)
    os.rename(f"{address}.new", address)
    while sys.stdin not in select.select([listening, sys.stdin], [], [])[0]:
        connection, _ = listening.accept()
        if os.fork():
            connection.close()
            continue
        listening.close()
        with connection.makefile("rb") as stream:
            given = marshal.load(stream)
        become_worker(connection, *given)
        with contextlib.suppress(OSError):  # nobody may read it
            connection.sendall(b"done")
        sys.exit()


def become_worker(connection, arguments, environment, folder, output):
    """Run the script of a command. The connection to the client stays open until this process ends."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.setsid()
    null = os.open(os.devnull, os.O_RDWR)
    # A server ends when the other end closes the connection.
    os.dup2(connection.fileno() if os.path.samefile(arguments[0], __file__) else null, 0)
    os.dup2(null, 1)
    if output is not None:
        printed = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(printed, 1)
        os.dup2(printed, 2)
        # A line of print() is one write, and so whole, with PYTHONUNBUFFERED, too. A log line may come at any time.
        sys.stdout.reconfigure(line_buffering=True, write_through=False)
    os.environb.clear()
    os.environb.update(environment)
    os.chdir(folder)
    named = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[1:1] = [path for path in named if path and path not in sys.path]
    random.seed()  # or all forks would draw the same
    execute = os.execvp

    def run(file, args):
        """Run the command that the script for a runtime_env executes, unless the loader has to read its environment, or
        it is for another Python."""
        words = shlex.split(args[-1])
        if "LD_PRELOAD" in os.environ or words[:2] != ["exec", sys.executable]:
            execute(file, args)
        run_script(words[2:])

    os.execvp = run
    run_script(list(arguments))


def run_script(arguments):
    sys.path[0] = os.path.dirname(arguments[0])
    sys.argv = arguments
    runpy.run_path(arguments[0], run_name="__main__")


if __name__ == "__main__":
    serve(*sys.argv[1:])
