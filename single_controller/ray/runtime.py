"""The Ray cluster: joining or starting it, and what its nodes have."""

from __future__ import annotations

import ipaddress
import logging
import os
from dataclasses import dataclass

import ray
from ray.util.client import ray as ray_client

from single_controller.call.errors import ForkedProcessError
from single_controller.ray.compat import ask_store, deserted_address, free_resources

logger = logging.getLogger(__name__)

LOCAL_CPUS = 16
"""Minimum of logical CPUs of a Ray that this library starts, so that every tutorial runs on a laptop."""

HEALTH_CHECKS = {
    "health_check_initial_delay_ms": 1000,
    "health_check_period_ms": 500,
    "health_check_timeout_ms": 1000,
    "health_check_failure_threshold": 3,
}
"""Settings of a Ray that this library starts: a node that is gone is noticed within 5 seconds."""

_forked = False
"""Whether this process is a fork of one that was connected to Ray. A fork has none of Ray's threads, so a request to
Ray would never return."""


def _note_fork() -> None:
    global _forked
    _forked = ray.is_initialized()


os.register_at_fork(after_in_child=_note_fork)


def forked() -> bool:
    """Whether this process is a fork of one that was connected to Ray, and cannot use Ray."""
    return _forked


def ensure_ray() -> None:
    """Join the running Ray (``RAY_ADDRESS``, or one on this machine), or start a local one.

    ``RAY_ADDRESS=local`` always starts a new one.

    Raises:
        ConnectionError: the Ray at ``RAY_ADDRESS`` does not respond or refuses this host's token, or this process uses
            Ray Client.
        ForkedProcessError: this process is a fork of one that is connected to Ray.
    """
    if _forked:
        raise ForkedProcessError.of("the connection to Ray")
    address = os.environ.get("RAY_ADDRESS") or "auto"
    connected = ray.is_initialized()
    if ray_client.is_connected() if connected else address.startswith("ray://"):
        raise ConnectionError(
            "Ray Client (ray://...) is not supported, because it gives access neither to the addresses of the workers "
            "nor to Ray's control store. Run the script on a host of the cluster, for example with `ray job submit`"
        )
    if connected:
        return
    if address == "auto" and (deserted := deserted_address()) is not None:
        logger.warning("no Ray cluster runs any more at %s, the address that `ray start` has left here", deserted)
        address = "local"
    if address != "local":
        try:
            ray.init(address=address)
            return
        except (ConnectionError, PermissionError) as error:  # the latter of Ray's folder, which may be another user's
            if address != "auto":
                # Ray says so in its C++ log alone if the reason is the token.
                raise ConnectionError(
                    f"no connection to the Ray cluster at {address!r}: no cluster responds at this address, or its "
                    "token is not that of this host. Set RAY_AUTH_TOKEN to the token of the cluster's head on this "
                    "host and on all hosts of the cluster, or set RAY_AUTH_MODE=disabled on all of them. See 'Several "
                    "hosts' in docs/hosts.md"
                ) from error
    cpus = max(LOCAL_CPUS, os.cpu_count() or 1)
    logger.info("no Ray cluster is running; starting a local one with %d logical CPUs", cpus)
    ray.init("local", num_cpus=cpus, include_dashboard=False, _system_config=HEALTH_CHECKS)


def session() -> str | None:
    """Identifies the connection to Ray; None without one. Actors of one session do not exist in the next."""
    if _forked or not ray.is_initialized():
        return None
    context = ray.get_runtime_context()
    return f"{context.get_node_id()}:{context.get_job_id()}"


@dataclass(frozen=True)
class Node:
    """One node."""

    node_id: str  # Ray's id
    address: str
    hostname: str
    total: dict[str, float]  # resource -> amount
    free: dict[str, float]  # resource -> amount that is not reserved


def nodes() -> list[Node]:
    """The nodes that are alive, in numeric order of their addresses. Asks Ray's control store; needs no dashboard."""
    free = free_resources()
    alive = [
        Node(
            node["NodeID"],
            node["NodeManagerAddress"],
            node["NodeManagerHostname"],
            dict(node["Resources"]),
            dict(free.get(node["NodeID"], {})),
        )
        for node in ask_store(ray.nodes)
        if node["Alive"]
    ]
    return sorted(alive, key=lambda node: (address_key(node.address), node.node_id))


def address_key(address: str) -> tuple[int, int, str]:
    """Sort key that compares addresses as numbers: 10.0.0.2 before 10.0.0.10. Other names follow, by text."""
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return (99, 0, address)
    return (parsed.version, int(parsed), "")
