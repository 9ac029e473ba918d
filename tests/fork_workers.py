"""Ray workers that are forked from a process with everything imported.

Python needs a second of CPU to start a Ray worker, three with torch and eight with Megatron, and the suite starts about
a thousand. `forked_workers` puts a small program in the place of the Python interpreter in Ray's command for a worker.
It asks a server for a fork, which runs Ray's own worker script with the arguments and the environment of the command.
Nothing else differs. With ``--full``, workers are started as Ray does, and so are those of a test that starts a Ray of
its own.
"""

import contextlib
import gc
import importlib
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
from pathlib import Path

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

PRESTART = "RAY_prestart_worker_first_driver"
"""Ray's own setting, as a variable of the environment."""

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
server.sendall(marshal.dumps((sys.argv[2:], posix.environ, posix.getcwd())))
server.shutdown(_socket.SHUT_WR)
server.recv(1)  # returns when the worker has ended
"""


@contextlib.contextmanager
def forked_workers(modules=PRELOADED):
    """Start Ray inside, and then call what this yields. Keep the context open until Ray is shut down.

    It yields a function that starts a server and returns its address, for `fork_script`. With ``every_job=True`` the
    server forks the workers of all drivers that connect to this Ray, otherwise only those of this driver. There may be
    both. Workers of every job import Ray after the fork.

    Args:
        modules: what the server of this driver imports.
    """
    python = sys.executable
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
            command = [python, __file__, str(address), *(WITHOUT_RAY if every_job else modules)]
            environment = {**({} if every_job else read_when_loaded), **os.environ}
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
            server = stack.enter_context(subprocess.Popen(command, env=environment, **pipes))
            if server.stdout.readline() != b"ready\n":
                raise RuntimeError("the server that forks Ray's workers has not started; its error is above")
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


def fork_script(address, *arguments, environment):
    """Run a Python script as a fork of the server.

    Returns:
        A socket, which reads as closed when the process has ended.
    """
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(str(address))
    encoded = {os.fsencode(name): os.fsencode(value) for name, value in environment.items()}
    connection.sendall(marshal.dumps((arguments, encoded, os.getcwd())))
    connection.shutdown(socket.SHUT_WR)
    return connection


def serve(address, *modules):
    """Fork a worker for each request, until stdin is closed."""
    gc.disable()  # looking for garbage among modules takes a quarter of the time
    for name in modules:
        importlib.import_module(name)
    gc.enable()
    gc.freeze()  # no worker needs to look at these objects
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # no zombies
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(f"{address}.new")
    listening.listen(64)
    os.rename(f"{address}.new", address)
    print("ready", flush=True)
    while sys.stdin not in select.select([listening, sys.stdin], [], [])[0]:
        connection, _ = listening.accept()
        if os.fork():
            connection.close()
            continue
        listening.close()
        with connection.makefile("rb") as stream:
            arguments, environment, folder = marshal.loads(stream.read())
        become_worker(list(arguments), environment, folder)


def become_worker(arguments, environment, folder):
    """Run the script of a command. The connection to the client stays open until this process ends."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.setsid()
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(null, 1)
    os.environb.clear()
    os.environb.update(environment)
    os.chdir(folder)
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
    run_script(arguments)


def run_script(arguments):
    sys.path[0] = os.path.dirname(arguments[0])
    sys.argv = arguments
    runpy.run_path(arguments[0], run_name="__main__")


if __name__ == "__main__":
    serve(*sys.argv[1:])
