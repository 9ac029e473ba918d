"""What a driver has in a Ray cluster and on its machine: to be compared before and after."""

import os
import socket
import time
from dataclasses import dataclass

import ray


@dataclass(frozen=True)
class Footprint:
    """What is there now.

    Attributes:
        actors: ids of the actors that are not dead, with their names.
        processes: pids of the processes that Ray says run those actors, and that the operating system has.
        placement_groups: ids of those that are not removed.
        resources: what is free: CPU, GPU and custom resources.
        shared_memory: the files in /dev/shm.
    """

    actors: frozenset[tuple[str, str]]
    processes: frozenset[int]
    placement_groups: frozenset[str]
    resources: tuple[tuple[str, float], ...]
    shared_memory: frozenset[str]

    @classmethod
    def now(cls) -> "Footprint":
        from ray._private.state import actors

        living = {key: info for key, info in actors().items() if info["State"] != "DEAD"}
        groups = {key for key, table in ray.util.placement_group_table().items() if table["state"] != "REMOVED"}
        internal = ("memory", "object_store_memory", "node:", "bundle")
        free = {
            key: round(amount, 4)
            for key, amount in ray.available_resources().items()
            if not key.startswith(internal) and "_group_" not in key
        }
        return cls(
            frozenset((key, info["Name"]) for key, info in living.items()),
            frozenset(info["Pid"] for info in living.values() if info["Pid"] and runs(info["Pid"])),
            frozenset(groups),
            tuple(sorted(free.items())),
            frozenset(os.listdir("/dev/shm")),
        )

    def difference(self, other: "Footprint") -> str:
        """What is here and not there, and the other way round, in words; empty if they are the same."""
        parts = []
        for name in ("actors", "processes", "placement_groups", "shared_memory"):
            mine, others = getattr(self, name), getattr(other, name)
            if mine != others:
                parts.append(f"{name}: gone {sorted(mine - others)}, left behind {sorted(others - mine)}")
        if self.resources != other.resources:
            parts.append(f"resources: {self.resources} before, {other.resources} now")
        return "; ".join(parts)

    def wait_same(self, seconds: float = 15.0) -> None:
        """Wait until everything is as it was.

        Raises:
            AssertionError: it was not, in time; the message says what is left behind.
        """
        end = time.monotonic() + seconds
        while True:
            different = self.difference(Footprint.now())
            if not different:
                return
            if time.monotonic() > end:
                raise AssertionError(f"after {seconds:g} s it is not as it was: {different}")
            time.sleep(0.1)


def runs(pid: int) -> bool:
    """Whether a process of this number runs; a zombie does not."""
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def port_is_free(port: int) -> bool:
    """Whether nobody listens on the port. Connections that the kernel keeps for a while after their end don't count."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError:
            return False
        return True
