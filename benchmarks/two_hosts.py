"""Run a benchmark on the first of two hosts: network namespaces joined by a bridge, with a Ray node on each."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from benchmarks.contenders.local_ray import CLUSTER
from benchmarks.protocol import ROOT

PORT = 6379


def on_two_hosts(
    module: str, arguments: Sequence[str], *, store: int, timeout: float, link: Sequence[str] = ()
) -> int | None:
    """Run a module on the first host, with the address of the Ray cluster in the environment variable `CLUSTER`.

    Args:
        module: the module to run.
        arguments: its arguments.
        store: bytes of each node's object store.
        timeout: seconds that it may take.
        link: arguments of ``tc qdisc`` that limit what a host sends.

    Returns:
        The exit status, or None if namespaces are not available here, which is printed.
    """
    sys.path[:0] = [str(ROOT / "tests/hosts")]
    from host_network import Network, missing

    if (reason := missing()) is not None:
        print(f"\nhosts: left out; {reason}")
        return None
    env = {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    with Network(2) as network:
        for host in network.hosts if link else ():
            host.run("tc", "qdisc", "replace", "dev", "eth0", "root", *link)
        network.start_ray(cpus=16, env=env, store=store)
        head = network.hosts[0]
        process = head.popen([sys.executable, "-m", module, *arguments], {**env, CLUSTER: f"{head.address}:{PORT}"})
        try:
            return process.wait(timeout)
        finally:
            process.kill()
