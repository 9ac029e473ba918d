"""Workers in a Python of their own: `RayClassWithInitArgs(..., python=...)`.

Ray starts the process of such a worker with the command that `command` returns. A process that cannot start, or not
connect to Ray, Ray starts again and again without an error. So `check` runs the same command once on each node before
any worker is created there.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from single_controller.call.errors import StartError
from single_controller.ray.rank.actor import Location
from single_controller.ray.results import one_line
from single_controller.ray.runtime import session

CHECK_SECONDS = 60.0
"""How long a Python may take to import this library. On a network file system the first import can be slow."""

TASK_SECONDS = 60.0
"""How long another node may take besides, to start the process that runs the check."""

_OURS = "single-controller"
_MARK = "python of a worker: "

_PROBE = f"""
import json, sys
del sys.path[0]
needed = json.loads(sys.argv[1])
found = {{"python": "%d.%d" % sys.version_info[:2]}}
try:
    from importlib.metadata import distributions
    for name in ("ray", "{_OURS}"):
        versions = [one.version for one in distributions(name=name)]
        if versions:
            found[name] = versions[0]
    # The driver's own copy may be found first, and a child process then finds the other one.
    found.update({{"{_OURS}": one for one in versions if one != needed.get("{_OURS}", one)}})
    if "ray" in found and all(needed.get(name, found[name]) == found[name] for name in found):
        import single_controller.ray.rank.actor
except BaseException as error:
    found["error"] = "%s: %s" % (type(error).__name__, error)
sys.stdout.write("\\n{_MARK}" + json.dumps(found) + "\\n")
"""
"""What the other Python runs. Any version of Python must be able to run it. The first entry of sys.path is the current
directory."""

_checked: set[tuple[Any, ...]] = set()
"""(connection to Ray, node, Python, environment) of what was found right. Failures are not kept: a user may repair the
environment and try again."""


def command(python: str) -> str:
    """The shell command with which Ray starts a Python, for ``py_executable`` of a runtime_env.

    It puts a folder that has this library, but not the packages installed beside it, before the rest of PYTHONPATH.
    Only a shell can do that: what else is in PYTHONPATH is not known before Ray starts the worker.
    """
    folder = Path(__file__).resolve().parent / "pythonpath"
    return f'env PYTHONPATH={shlex.quote(str(folder))}"${{PYTHONPATH:+:$PYTHONPATH}}" {shlex.quote(python)}'


def check(python: str, env_vars: Mapping[str, str], nodes: Iterable[Location], name: str) -> None:
    """Raise a `StartError` that says why, and what to do, unless workers can run in a Python: tried once on each node,
    on all at the same time. ``env_vars`` are what the workers' runtime_env adds to the environment."""
    here = ray.get_runtime_context().get_node_id()
    environment = [f"{key}={value}" for key, value in sorted(env_vars.items())]
    unknown = {}
    for node in nodes:
        key = (session(), node.node_id, python, *environment)
        deleted = node.node_id == here and not os.access(python, os.X_OK)
        if deleted or key not in _checked:
            unknown[key] = node
    if not unknown:
        return
    needed = _needed()
    # As in Ray, ${NAME} in a variable stands for the value that NAME has on the node.
    expand = (
        r"while [[ $one =~ \$\{([A-Za-z_][A-Za-z0-9_]*)\} ]]; do "
        'all+=${one%%"$BASH_REMATCH"*}${!BASH_REMATCH[1]}; one=${one#*"$BASH_REMATCH"}; done'
    )
    read = f'while IFS= read -r -d "" one; do all=; {expand}; export "$all$one"; done'
    words = ["bash", "-c", f'{read}; exec {command(python)} -c "$0" "$1"', _PROBE, json.dumps(needed)]
    options: dict[str, Any] = {"capture_output": True, "text": True, "errors": "replace", "timeout": CHECK_SECONDS}
    options["input"] = "".join(f"{one}\0" for one in environment)  # not as words, which all users of the node see
    # subprocess.run itself is the task, because a node's own Python need not have this library.
    task = ray.remote(num_cpus=0, max_retries=0)(subprocess.run)
    end = time.monotonic() + CHECK_SECONDS + TASK_SECONDS
    asked = {
        key: task.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node.node_id, soft=False)).remote(
            words, **options
        )
        for key, node in unknown.items()
        if node.node_id != here
    }
    wrong: list[tuple[Location, str]] = []
    for key, node in sorted(unknown.items(), key=lambda item: item[0] in asked):  # this node while others are at work
        try:
            if key in asked:
                done = ray.get(asked[key], timeout=max(0.0, end - time.monotonic()))
            else:
                done = subprocess.run(words, **options)
            problem = _problem(python, needed, done)
        except (subprocess.TimeoutExpired, GetTimeoutError):
            problem = f"it has not imported this library within {CHECK_SECONDS:g} s. Run it there to see what it does"
        except (RayError, OSError) as error:
            problem = f"the node could not be asked: {type(error).__name__}: {one_line(error)}"
        if problem is None:
            _checked.add(key)
        else:
            wrong.append((node, problem))
    if wrong:
        node, problem = wrong[0]
        host = f"{node.hostname}, {node.address}"
        others = len(wrong) - 1
        more = f" (and on {others} more node{'s' if others > 1 else ''})" if others else ""
        raise StartError(f"{name}: workers cannot run in python={python!r} on {host}{more}: {problem}", host=host)


def _needed() -> dict[str, str]:
    needed = {"python": f"{sys.version_info[0]}.{sys.version_info[1]}", "ray": ray.__version__}
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):  # imported from its sources
        needed[_OURS] = importlib.metadata.version(_OURS)
    return needed


def _problem(python: str, needed: Mapping[str, str], done: subprocess.CompletedProcess[str]) -> str | None:
    """Why workers cannot run in a Python, and what to do; None if they can."""
    answers = [line.removeprefix(_MARK) for line in done.stdout.splitlines() if line.startswith(_MARK)]
    if not answers:
        said = (done.stderr.strip() or done.stdout.strip() or "no output").splitlines()[-1][:500]
        return (
            f"it cannot be run there as Python (exit code {done.returncode}: {said}). Give the path of an interpreter "
            "that exists on every node that the workers run on"
        )
    found: dict[str, str] = json.loads(answers[-1])
    problems = []
    if found["python"] != needed["python"]:
        problems.append(
            f"it is Python {found['python']}, and the driver runs Python {needed['python']}. Create the environment "
            f"with Python {needed['python']}"
        )
    if found.get("ray") != needed["ray"]:
        has = f"Ray {found['ray']}" if "ray" in found else "no Ray"
        problems.append(
            f"it has {has}, and the driver has Ray {needed['ray']}. Run there: "
            f"{python} -m pip install ray=={needed['ray']}"
        )
    if found.get(_OURS, needed.get(_OURS)) != needed.get(_OURS, found.get(_OURS)):
        problems.append(
            f"it has {_OURS} {found[_OURS]}, and the driver has {_OURS} {needed[_OURS]}. Uninstall it there, because "
            "workers use the driver's copy, or install the driver's version"
        )
    if not problems and "error" in found:
        problems.append(
            f"importing this library there raised {found['error']}. Install there what is missing; if that is "
            f"single_controller, this node does not have the driver's folder {Path(__file__).resolve().parents[2]}"
        )
    return "; ".join(problems) or None
