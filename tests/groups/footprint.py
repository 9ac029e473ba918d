"""What a driver holds in a Ray cluster and on its machine, to compare before and after a test."""

import os
import socket
import time
from dataclasses import dataclass

import ray
from waits import runs


@dataclass(frozen=True)
class Footprint:
    """What exists now.

    Attributes:
        actors: ids of the actors that are not dead, with their names.
        processes: pids of the processes that Ray lists for those actors and that still run.
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
    def now(cls, *, shared_memory: bool = True) -> "Footprint":
        """What exists now, without the files in /dev/shm if others on this machine write some too."""
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
            frozenset(os.listdir("/dev/shm") if shared_memory else ()),
        )

    def left_behind(self, later: "Footprint") -> str:
        """Describe what is new in `later`, or no longer free; empty if nothing. What has disappeared since belongs to
        somebody else and is ignored."""
        parts = []
        for name in ("actors", "processes", "placement_groups", "shared_memory"):
            new = getattr(later, name) - getattr(self, name)
            if new:
                parts.append(f"{name}: {sorted(new)}")
        free = dict(later.resources)
        taken = {name: amount - free.get(name, 0.0) for name, amount in self.resources}
        taken = {name: amount for name, amount in taken.items() if amount > 1e-3}
        return "; ".join([*parts, *([f"not free: {taken}"] if taken else [])])

    def wait_same(self, seconds: float = 15.0, *, shared_memory: bool = True) -> None:
        """Wait until nothing is left behind; see `now` for shared memory.

        Raises:
            AssertionError: something was left behind; the message says what.
        """
        end = time.monotonic() + seconds
        while True:
            left = self.left_behind(Footprint.now(shared_memory=shared_memory))
            if not left:
                return
            if time.monotonic() > end:
                raise AssertionError(f"after {seconds:g} s there is left behind: {left}")
            time.sleep(0.1)


def port_is_free(port: int) -> bool:
    """Whether nothing listens on the port. Connections in TIME_WAIT do not count."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError:
            return False
        return True
