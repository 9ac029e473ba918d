"""Hosts on one machine, for tests of failures between hosts: network namespaces joined by a bridge.

    with Network(3) as network:
        network.start_ray()
        network.hosts[1].cut()  # hosts[1] has the address 10.77.0.2

Each `Host` has its own network, process ids, host name, /etc/hosts, /dev/shm and /tmp/ray, so a Ray node on it has its
own address and object store. Files, CPUs and memory are shared. Needs root, and the tools of util-linux and iproute2.

What ends it: everything on a host is a child of the first process of its PID namespace, and the kernel kills that
process when the thread that created the `Network` ends (``pdeathsig``), however it ends. Namespaces and devices go with
their last process, so nothing remains, also after ``kill -9`` of the tests. Create a `Network` in the main thread.
"""

from __future__ import annotations

import functools
import json
import os
import shutil
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

HERE = Path(__file__).parent
REAP = "import signal; signal.signal(signal.SIGCHLD, signal.SIG_IGN); print('up', flush=True); signal.pause()"
"""The first process of a host: it reaps orphans, as the kernel then does for it, and waits to be killed."""

SPACES = ("--net", "--uts", "--ipc", "--mount", "--pid", "--mount-proc")
TOOLS = ("unshare", "nsenter", "setpriv", "ip", "ss", "mount")
ALONE = {
    "RAY_AUTH_MODE": "disabled",  # tokens are files of one host; nobody else reaches this network
    "RAY_ADDRESS": "",
    "RAY_raylet_start_wait_time_s": "120",  # `ray start` would give up after 30 s on a loaded machine
}


@functools.cache
def missing() -> str | None:
    """Why hosts cannot be created here, or None."""
    if os.geteuid() != 0:
        return "hosts are network namespaces, which only root can create"
    lacking = [tool for tool in TOOLS if shutil.which(tool) is None]
    if lacking:
        return f"hosts are network namespaces, which need {', '.join(lacking)}"
    needed = (
        "mount -t tmpfs tmpfs /dev/shm; ip link add name bridge type bridge; ip link add name a type veth peer name b"
    )
    command = ["unshare", *SPACES, "--fork", "sh", "-ec", needed]
    tried = subprocess.run(command, capture_output=True, text=True, timeout=30)
    return f"namespaces are not available: {tried.stderr.strip()}" if tried.returncode else None


class Host:
    """One host, or the switch between them.

    Args:
        name: its host name.
        address: its IPv4 address; None for the switch.
        names: text of its /etc/hosts.
    """

    def __init__(self, name: str, address: str | None, names: str) -> None:
        self.name, self.address = name, address
        prepare = [
            "mount -t sysfs sysfs /sys",
            "mount -t tmpfs tmpfs /dev/shm",
            "mkdir -p /tmp/ray && mount -t tmpfs tmpfs /tmp/ray",
            'printf %s "$NAMES" > /tmp/ray/hosts && mount --bind /tmp/ray/hosts /etc/hosts',
            f"hostname {name}",
            "ip link set lo up",
            f'exec {sys.executable} -ISc "{REAP}"',
        ]
        unshare = ["unshare", *SPACES, "--fork", "--kill-child", "sh", "-ec", "\n".join(prepare)]
        self._outer = subprocess.Popen(
            ["setpriv", "--pdeathsig", "KILL", *unshare],
            env={**os.environ, "NAMES": names},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self._outer.stdout is not None and self._outer.stderr is not None
        if self._outer.stdout.readline() != "up\n":
            raise RuntimeError(f"{name} did not start: {self._outer.stderr.read()}")
        children = Path(f"/proc/{self._outer.pid}/task/{self._outer.pid}/children")
        self.first = int(children.read_text())
        self._space = os.readlink(f"/proc/{self.first}/ns/pid")

    def popen(self, command: list, env: dict | None = None, **options) -> subprocess.Popen:
        """Start a command on this host, in this process's folder. Killing the returned process kills it."""
        inside = ["nsenter", "-n", "-u", "-i", "-m", "-p", "-t", str(self.first), "setpriv", "--pdeathsig", "KILL"]
        paths = [str(HERE), os.environ.get("PYTHONPATH", "")]  # of the tests' worker classes
        given = {**os.environ, **ALONE, "PYTHONPATH": os.pathsep.join(paths), **(env or {})}
        return subprocess.Popen([*inside, *map(str, command)], env=given, **options)

    def run(self, *command, env: dict | None = None, timeout: float = 60) -> str:
        """Run a command on this host and return its output.

        Raises:
            RuntimeError: it failed; the message has its output.
            subprocess.TimeoutExpired: it took longer.
        """
        process = self.popen(list(command), env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        with process:
            try:
                output = process.communicate(timeout=timeout)[0]
            finally:
                process.kill()
        if process.returncode:
            raise RuntimeError(f"{self.name}: {' '.join(map(str, command))}: status {process.returncode}\n{output}")
        return output

    def pids(self, having: str = "") -> list[int]:
        """The processes on this host whose command line has that text, by the ids that this process sees."""
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit() and int(entry.name) != self.first:
                with suppress(OSError):
                    line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                    if line and having in line and os.readlink(entry / "ns/pid") == self._space:
                        found.append(int(entry.name))
        return found

    def kill(self, having: str = "", number: int = signal.SIGKILL) -> None:
        """Send a signal to those processes."""
        for pid in self.pids(having):
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def end(self) -> None:
        """Kill everything on this host, and wait until it is gone."""
        if self._outer.poll() is None:
            with suppress(ProcessLookupError):
                os.kill(self.first, signal.SIGKILL)
            self._outer.wait(30)
        for stream in (self._outer.stdout, self._outer.stderr):
            if stream is not None:
                stream.close()


class Network:
    """Hosts h1, h2, ... on one switch.

    Args:
        count: number of hosts.
        resolve: what a host's name stands for on the hosts: "address", its address; "nothing"; or "loopback",
            127.0.1.1 as in Debian's default /etc/hosts.

    Attributes:
        hosts: the hosts. The head of the Ray cluster, if there is one, is on the first.
    """

    def __init__(self, count: int, *, resolve: str = "address") -> None:
        self.hosts: list[Host] = []
        self._everything: list[Host] = []
        addresses = {f"h{number}": f"10.77.0.{number}" for number in range(1, count + 1)}
        try:
            self._switch = self._add("switch", None, "127.0.0.1 localhost\n")
            self._ip("link", "add", "bridge", "up", "type", "bridge", "forward_delay", "0")
            for name, address in addresses.items():
                lines = {
                    "address": [f"{where} {known}" for known, where in addresses.items()],
                    "nothing": [],
                    "loopback": [f"127.0.1.1 {name}"],
                }[resolve]
                host = self._add(name, address, "\n".join(["127.0.0.1 localhost", *lines, ""]))
                self.hosts.append(host)
                # The name of the switch's end of the cable is that of the host.
                self._ip("link", "add", name, "type", "veth", "peer", "name", "eth0", "netns", str(host.first))
                self.heal(name)
                self._ip("link", "set", name, "up")
                host.run("ip", "address", "add", f"{address}/24", "dev", "eth0")
                host.run("ip", "link", "set", "eth0", "up")
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Network:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """End all hosts."""
        for host in self._everything:
            host.end()

    def cut(self, name: str) -> None:
        """Lose every packet from and to a host. Neither side is told: its cable stays plugged in."""
        self._ip("link", "set", name, "nomaster")

    def heal(self, name: str) -> None:
        """Undo `cut`."""
        self._ip("link", "set", name, "master", "bridge")

    def reset(self, one: str, other: str) -> None:
        """Reset all TCP connections between two hosts, as a firewall or a proxy does that forgot them."""
        by_name = {host.name: host for host in self.hosts}
        for here, there in ((one, other), (other, one)):
            by_name[here].run("ss", "-K", "-t", "dst", by_name[there].address)

    def degrade(self, name: str, *, delay: float, loss: float) -> None:
        """From now on, deliver each packet from and to a host after ``delay`` seconds, or lose it with probability
        ``loss``."""
        self.cut(name)
        self._ip("link", "add", "slow", "type", "veth", "peer", "name", "slow-end")
        self._ip("link", "set", "slow-end", "up", "master", "bridge")
        self._ip("link", "set", "slow", "up")
        self._switch.popen([sys.executable, HERE / "relay.py", name, "slow", delay, loss])

    def start_ray(
        self, *, cpus: int = 2, config: dict | None = None, env: dict | None = None, store: int = 200 << 20
    ) -> None:
        """Start a Ray node on every host.

        Args:
            cpus: logical CPUs of each.
            config: Ray's ``--system-config``.
            env: environment of ``ray start``.
            store: bytes of each node's object store.
        """
        head, *others = self.hosts
        self._ray(head, cpus, env, store, "--head", "--port=6379", "--include-dashboard=false",
                  f"--system-config={json.dumps(config or {})}")  # fmt: skip
        with ThreadPoolExecutor() as threads:
            list(threads.map(lambda host: self.start_node(host, cpus=cpus, env=env, store=store), others))

    def start_node(self, host: Host, *, cpus: int = 2, env: dict | None = None, store: int = 200 << 20) -> None:
        """Start a Ray node on a host that has none, beside that of the first host. See `start_ray`."""
        self._ray(host, cpus, env, store, f"--address={self.hosts[0].address}:6379")

    def _ray(self, host: Host, cpus: int, env: dict | None, store: int, *where: str) -> None:
        size = [f"--num-cpus={cpus}", f"--object-store-memory={store}", "--disable-usage-stats"]
        command = [Path(sys.executable).parent / "ray", "start", *where, f"--node-ip-address={host.address}", *size]
        host.run(*command, env=env, timeout=150)

    def _add(self, name: str, address: str | None, names: str) -> Host:
        host = Host(name, address, names)
        self._everything.append(host)
        return host

    def _ip(self, *command: str) -> None:
        enter = ["nsenter", "-t", str(self._switch.first), "-n"]  # not its pids: arguments name ours
        subprocess.run([*enter, "ip", *command], check=True, timeout=30)
