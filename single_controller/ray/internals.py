"""Every use of Ray's internals, which is why `pyproject.toml` admits only the minor release of Ray that is tested.

- `death_of` (``ray._private.state.actors``): liveness without the dashboard, which ``ray.util.state`` needs. Replace it
   by
  a public query of one actor's state in the control store.
- `process_of` (``ray._private.state.actors``) and `node_service` (fields of ``ray.nodes()``): where the process of an
  actor, and that of its node, listen. Replace them by public access to the addresses.
- `death_seconds` (``ray._raylet.Config``): the settings of the health checks. Replace it when Ray has a public query.
- `interface_of` (psutil, which Ray brings along): which network interface has an address.
- `detached_actors` (the control store's actor table): dead detached actors and their placement groups. Replace it when
  ``ray.util.list_named_actors`` returns both.
- `free_resources` (``available_resources_per_node``): what is missing on which node, for `PlacementError`. Replace it
   by
  a public function of that kind.
- `accelerator_names` (``ray._private.accelerators``): the resources whose units have ids. Replace it by a public list.
- `name_lines` (the log monitor's marker): log lines with class and rank. Replace it when the log name of an actor can
   be
  set after its creation.
- `declared_class` (attributes of ``ActorClass``): the class and the options under ``@ray.remote``. Replace it by public
  accessors.
- `exit_detail` (the text of Ray's errors): why a process has ended, in one line. Replace it when `RayActorError` has
   the
  reason as an attribute.
"""

from __future__ import annotations

import sys
from typing import Any, NamedTuple, cast

import ray
from ray.actor import ActorClass

_KNOWN_ACCELERATORS = frozenset({"NPU", "TPU", "HPU", "neuron_cores"})


def death_of(actor: Any) -> str | None:
    """Why an actor is dead, in a few words; None if it is alive."""
    from ray._private.state import actors

    info = actors(actor_id=actor._actor_id.hex())
    if not info:
        return "Ray no longer knows it"
    if info["State"] != "DEAD":
        return None
    return exit_detail(info["DeathCause"].actor_died_error_context.error_message) or "its process has ended"


class Process(NamedTuple):
    """The process of an actor.

    Attributes:
        address: address and port on which it takes calls.
        node_id: the node that it is on, in hex.
    """

    address: tuple[str, int]
    node_id: str


def process_of(actor: Any) -> Process | None:
    """The process of an actor; None if it has none. Asks the control store; needs no dashboard."""
    from ray._private.state import actors

    where = (actors(actor_id=actor._actor_id.hex()) or {}).get("Address", {})
    return Process((where["IPAddress"], where["Port"]), where["NodeID"]) if where.get("Port") else None


def node_service(node_id: str) -> tuple[str, int] | None:
    """Address and port of the Ray process of a node; None if Ray does not know the node."""
    found = [node for node in ray.nodes() if node["NodeID"] == node_id]
    return (found[0]["NodeManagerAddress"], found[0]["NodeManagerPort"]) if found else None


def death_seconds() -> float:
    """How long the control store of this cluster takes to notice that a node is gone, at most.

    Known are Ray's defaults and what ``ray start --head`` was given with ``--system-config``. Settings in the
    environment of the control store's process (``RAY_health_check_*``) are not.
    """
    import ray._raylet as raylet

    config: Any = getattr(raylet, "Config")  # noqa: B009  (Ray fills it in C++ when this process connects to a cluster)
    once: int = config.health_check_period_ms() + config.health_check_timeout_ms()
    return config.health_check_failure_threshold() * once / 1000


class DetachedActor(NamedTuple):
    """An actor that outlives its driver.

    Attributes:
        name: its name.
        namespace: namespace of the name.
        placement_group: id of its placement group, in hex; empty without one.
        alive: whether its process is running or starting.
    """

    name: str
    namespace: str
    placement_group: str
    alive: bool


def detached_actors() -> list[DetachedActor]:
    """All detached actors that Ray knows, dead ones too. Asks the control store; needs no dashboard."""
    from ray._private.state import state
    from ray.core.generated import gcs_pb2

    data: Any = getattr(gcs_pb2, "ActorTableData")  # noqa: B009  (generated at run time, invisible to type checkers)
    tables = [data.FromString(table) for table in state._connect_and_get_accessor().get_actor_table(None, None)]
    return [
        DetachedActor(table.name, table.ray_namespace, table.placement_group_id.hex(), table.state != data.DEAD)
        for table in tables
        if table.is_detached
    ]


def free_resources() -> dict[str, dict[str, float]]:
    """Ray's node id -> resource -> amount that is not reserved. Asks the control store; needs no dashboard."""
    from ray._private.state import available_resources_per_node

    free: dict[str, dict[str, float]] = available_resources_per_node()
    return free


def accelerator_names() -> frozenset[str]:
    """The resources besides GPU whose units are devices with ids. A worker gets an id only for what it takes."""
    try:
        from ray._private.accelerators import get_all_accelerator_resource_names

        return frozenset(get_all_accelerator_resource_names()) - {"GPU"}
    except ImportError:
        return _KNOWN_ACCELERATORS


def name_lines(name: str) -> None:
    """Make further output of this process reach the driver as ``(<name> pid=...) ...``.

    Ray's log monitor reads a name from the process's output. Ray writes the actor's class there when it creates the
    actor; a worker learns its rank later, so the name is written again, to both streams. Output of C++ code and of
    subprocesses gets the name too. Ray shows a line that several workers print only once, with their number, unless
    ``RAY_DEDUP_LOGS=0``.
    """
    try:
        from ray._private.ray_constants import LOG_PREFIX_ACTOR_NAME
    except ImportError:  # Ray's own prefix stays
        return
    for stream in (sys.stdout, sys.stderr):
        stream.write(f"{LOG_PREFIX_ACTOR_NAME}{name}\n")
        stream.flush()


def interface_of(address: str) -> str | None:
    """The network interface of this host that carries an address; None if none does, as behind address translation."""
    import psutil  # part of Ray, which makes it importable

    for name, entries in psutil.net_if_addrs().items():
        if any(entry.address.partition("%")[0] == address for entry in entries):
            return str(name)
    return None


def declared_class(cls: Any) -> tuple[Any, dict[str, Any]]:
    """(plain class, options given to ``@ray.remote``) of an actor class; any other object unchanged, without
    options."""
    if not isinstance(cls, ActorClass):
        return cls, {}
    options = dict(getattr(cls, "_default_options", None) or {})
    return cast(Any, cls).__ray_metadata__.modified_class.__ray_actor_class__, options


def exit_detail(text: str) -> str:
    """Extract from one of Ray's long messages how a process ended; empty if the message does not say."""
    text = " ".join(text.split())
    node = text.partition("The actor died because its node has died. ")[2]
    if node:
        reason = node.partition("the actor's node was ")[2] or node
        return f"its host is gone: its Ray node was {reason}"[:500].rstrip(". ")
    detail = text.partition("Worker exit detail: ")[2] or text.partition("The actor is dead because ")[2]
    return detail.partition(" Some common causes")[0][:500].rstrip(". ")
