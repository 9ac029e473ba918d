"""The Ray that everything runs on: joined if there is one, started if not; and what its nodes have."""

from __future__ import annotations

import ipaddress
import logging
import os
from dataclasses import dataclass
from typing import Any, NamedTuple

import ray

logger = logging.getLogger(__name__)

LOCAL_CPUS = 16
"""Logical CPUs of a Ray that we start, at least, so that every tutorial runs on a laptop."""

_HEALTH_CHECKS = {
    "health_check_initial_delay_ms": 1000,
    "health_check_period_ms": 1000,
    "health_check_timeout_ms": 1000,
    "health_check_failure_threshold": 3,
}
"""For a Ray that we start: a dead node is noticed within 5 seconds."""


def ensure_ray() -> None:
    """Join the running Ray (``RAY_ADDRESS``, or one of this machine), or start a local one.

    ``RAY_ADDRESS=local`` starts one of our own in any case.

    Raises:
        ConnectionError: ``RAY_ADDRESS`` names a Ray that does not answer.
    """
    if ray.is_initialized():
        return
    address = os.environ.get("RAY_ADDRESS", "auto")
    if address != "local":
        try:
            ray.init(address=address)
            return
        except ConnectionError:
            if address != "auto":
                raise
    cpus = max(LOCAL_CPUS, os.cpu_count() or 1)
    logger.info("no Ray is running: starting a local one with %d logical CPUs", cpus)
    ray.init("local", num_cpus=cpus, include_dashboard=False, _system_config=_HEALTH_CHECKS)


def session() -> str | None:
    """Tells one connection to Ray from the next; None without one. What lived in one is gone in the next."""
    if not ray.is_initialized():
        return None
    context = ray.get_runtime_context()
    return f"{context.get_node_id()}:{context.get_job_id()}"


def death_of(actor: Any) -> str | None:
    """Why an actor does not live, in a few words; None if it lives."""
    from ray._private.state import actors

    info = actors(actor_id=actor._actor_id.hex())
    if not info:
        return "Ray does not know it any more"
    if info["State"] != "DEAD":
        return None
    return exit_detail(info["DeathCause"].actor_died_error_context.error_message) or "its process has ended"


class DetachedActor(NamedTuple):
    """An actor that outlives its driver.

    Attributes:
        name: its name.
        namespace: the name's namespace.
        placement_group: id of the placement group that it is in, in hex; empty without one.
        alive: whether it has not ended.
    """

    name: str
    namespace: str
    placement_group: str
    alive: bool


def detached_actors() -> list[DetachedActor]:
    """All detached actors that Ray remembers, started or not. Asks Ray's control store; needs no dashboard."""
    from ray._private.state import state
    from ray.core.generated import gcs_pb2

    data: Any = getattr(gcs_pb2, "ActorTableData")  # noqa: B009  (made at run time, which type checkers do not see)
    tables = [data.FromString(table) for table in state._connect_and_get_accessor().get_actor_table(None, None)]
    return [
        DetachedActor(table.name, table.ray_namespace, table.placement_group_id.hex(), table.state != data.DEAD)
        for table in tables
        if table.is_detached
    ]


def exit_detail(text: str) -> str:
    """How a process ended, out of one of Ray's long messages; empty if the message does not say it."""
    text = " ".join(text.split())
    detail = text.partition("Worker exit detail: ")[2] or text.partition("The actor is dead because ")[2]
    return detail.partition(" Some common causes")[0][:500].rstrip(". ")


@dataclass(frozen=True)
class Node:
    """What one node has.

    Attributes:
        node_id: Ray's id of it.
        address: its address.
        hostname: its name.
        total: resource -> amount.
        free: resource -> amount that nothing has reserved.
    """

    node_id: str
    address: str
    hostname: str
    total: dict[str, float]
    free: dict[str, float]


def nodes() -> list[Node]:
    """The living nodes, in order of their addresses as numbers. Asks Ray's control store; needs no dashboard."""
    from ray._private.state import available_resources_per_node

    free = available_resources_per_node()
    alive = [
        Node(
            node["NodeID"],
            node["NodeManagerAddress"],
            node["NodeManagerHostname"],
            dict(node["Resources"]),
            dict(free.get(node["NodeID"], {})),
        )
        for node in ray.nodes()
        if node["Alive"]
    ]
    return sorted(alive, key=lambda node: (address_key(node.address), node.node_id))


def address_key(address: str) -> tuple[int, int, str]:
    """Sorts addresses as numbers: 10.0.0.2 before 10.0.0.10. What is no address sorts by text, after them."""
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return (99, 0, address)
    return (parsed.version, int(parsed), "")
