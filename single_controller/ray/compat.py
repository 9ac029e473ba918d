"""The functions that use Ray's internals, which is why `pyproject.toml` admits only the minor release of Ray that is
tested. Replace a function when Ray offers a public way to the same thing.

Elsewhere are only an actor's ``_actor_id``; ``core_worker`` and ``connected`` of `ray_worker` (`ray/transport.py`);
``_soft_target_node_id`` of placement groups (`ray/placement/reservation.py`); ``_system_config`` of ``ray.init``
(`ray/runtime.py`); the argument ``_ray_trace_ctx`` of traced methods (`dispatch/register.py`); and that a shell runs
the ``py_executable`` of a runtime_env, so that `python_env.command` can extend PYTHONPATH on the node.
"""

from __future__ import annotations

import logging
import os
import re
import socket
import sys
from collections.abc import Callable, Collection
from functools import partial
from typing import Any, NamedTuple, ParamSpec, TypeVar, cast

import ray
import ray._raylet
from ray._private import accelerators, services, state, utils
from ray._private.ray_constants import LOG_PREFIX_ACTOR_NAME
from ray._private.worker import global_worker
from ray.actor import ActorClass
from ray.core.generated import gcs_pb2
from ray.exceptions import RpcError

from single_controller.call.errors import ControlStoreError, StartError
from single_controller.call.future import in_own_thread

logger = logging.getLogger(__name__)

P = ParamSpec("P")
R = TypeVar("R")

# Type checkers know neither what is generated at run time, nor what is written in Cython.
_tables: Any = gcs_pb2
_raylet: Any = ray._raylet

DIAL_SECONDS = 5.0
"""How long the control store may take to accept a connection, before nothing is known of it."""

STORE_SECONDS = 30.0
"""How long the control store may take to answer. Ray's own functions wait without a limit, and one was seen to wait for
ever while the control store answered others."""


def ask_store(question: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R:
    """Call a function of Ray that asks the control store; a `ControlStoreError` if it has not answered within
    `STORE_SECONDS`.

    Thread: the function runs in a thread "future-wait", where it remains if there is no answer.
    """
    try:
        answer = in_own_thread(partial(question, *args, **kwargs))
    except StartError:  # no thread can be started: the process has too many, or is ending
        return question(*args, **kwargs)
    try:
        return answer.result(STORE_SECONDS)
    except TimeoutError:
        if answer.done():  # by now, or it is the error of the question
            return answer.result()
        raise ControlStoreError(f"Ray's control store has not answered within {STORE_SECONDS:g} s") from None


def deserted_address() -> str | None:
    """The address of the cluster that Ray's folder names, if nothing listens there: the cluster was killed, or the host
    was. `ray.init` would wait for it. Not needed if ``ray.init(address="auto")`` fails at once then."""
    try:
        address: str | None = utils.read_ray_address()
    except PermissionError:  # another user's
        return None
    if address is None or services.find_gcs_addresses():  # `ray.init` joins what runs here
        return None
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), DIAL_SECONDS).close()
    except ConnectionRefusedError:
        return address
    except (OSError, ValueError):
        logger.debug("whether a cluster is at %s is not known", address, exc_info=True)
    return None


def death_of(actor: Any) -> str | None:
    """Why an actor is dead, in a few words; None if it is alive.

    Ray's control store sends every change of an actor's state to the processes that have called the actor. Reading the
    state that was last received asks nobody, so a look at thousands of living actors costs the control store nothing.
    It is asked about an actor that this process has not called yet, and for the cause of a death.

    Raises:
        ControlStoreError: it has not answered, and the actor is not known to be dead.
    """
    if actor._get_local_state() == _tables.ActorTableData.ALIVE:
        return None
    try:
        info = ask_store(state.actors, actor_id=actor._actor_id.hex())
    except ControlStoreError:
        if actor._get_local_state() == _tables.ActorTableData.DEAD:
            return "its process has ended"
        raise
    if not info:
        return "Ray no longer knows it"
    if info["State"] != "DEAD":
        return None
    return exit_detail(info["DeathCause"].actor_died_error_context.error_message) or "its process has ended"


def state_is_unknown(actor: Any) -> bool:
    """Whether the control store does not tell this process what becomes of an actor, which it does after a first call
    of its methods: `death_of` then has to ask."""
    return actor._get_local_state() not in (_tables.ActorTableData.ALIVE, _tables.ActorTableData.DEAD)


def node_services() -> dict[str, tuple[str, int]]:
    """Id -> address and port of the Ray process, of each node that Ray knows."""
    return {node["NodeID"]: (node["NodeManagerAddress"], node["NodeManagerPort"]) for node in ask_store(ray.nodes)}


def death_seconds() -> float:
    """How long the control store of this cluster takes to notice that a node is gone, at most, by its settings.

    Known are Ray's defaults and what ``ray start --head`` was given with ``--system-config``. Settings in the
    environment of the control store's process (``RAY_health_check_*``) are not.
    """
    config = _raylet.Config  # Ray fills it in C++ when this process connects to a cluster
    once: int = config.health_check_period_ms() + config.health_check_timeout_ms()
    return config.health_check_failure_threshold() * once / 1000


class ActorInfo(NamedTuple):
    """An actor, dead or alive."""

    name: str
    namespace: str  # of the name
    detached: bool  # whether it outlives its driver
    placement_group: str  # id of its placement group, in hex; empty without one
    alive: bool  # whether its process is running or starting
    ended: float  # when it died, in seconds since the epoch
    reason: str  # why it died
    ended_on_purpose: bool  # whether it was killed through Ray, or ended with the last reference to it

    @property
    def group(self) -> tuple[str, str]:
        """The namespace of a worker's name, and what the names of its group have in common."""
        return self.namespace, self.name.rpartition("_")[0]


def all_actors() -> dict[str, ActorInfo]:
    """id -> actor, of all that Ray knows, dead ones too. Asks the control store; needs no dashboard."""
    found = {}
    for binary in ask_store(lambda: state.state._connect_and_get_accessor().get_actor_table(None, None)):
        table = _tables.ActorTableData.FromString(binary)
        death = table.death_cause.actor_died_error_context
        found[table.actor_id.hex()] = ActorInfo(
            table.name,
            table.ray_namespace,
            table.is_detached,
            table.placement_group_id.hex(),
            table.state != _tables.ActorTableData.DEAD,
            table.end_time / 1000,
            exit_detail(death.error_message) or "its process has ended",
            death.reason in (death.RAY_KILL, death.OUT_OF_SCOPE, death.REF_DELETED),
        )
    return found


def own_actor() -> str:
    """Id, in hex, of the actor whose process this is; empty in others. Ray's public function warns in a driver."""
    actor = global_worker.actor_id
    return "" if actor.is_nil() else str(actor.hex())


def living_jobs() -> frozenset[str]:
    """Ids, in hex, of the jobs whose driver is running. Asks the control store; needs no dashboard."""
    return frozenset(job["JobID"] for job in ask_store(state.jobs) if not job["IsDead"])


_RECORDS = b"single_controller"
"""Namespace of our keys in the control store."""

RECORD_SECONDS = 5.0
"""How long the control store may take to read or write a record."""


def write_record(key: str, value: bytes) -> None:
    """Write a value to the control store."""
    ray_worker().gcs_client.internal_kv_put(key.encode(), value, True, _RECORDS, RECORD_SECONDS)


def delete_record(key: str) -> None:
    """Remove a value from the control store, if it is there."""
    ray_worker().gcs_client.internal_kv_del(key.encode(), False, _RECORDS, RECORD_SECONDS)


def read_records(prefix: str) -> dict[str, bytes]:
    """key -> value of all keys with a prefix. A `ControlStoreError` if there is no answer."""
    try:
        store = ray_worker().gcs_client
        keys = store.internal_kv_keys(prefix.encode(), _RECORDS, RECORD_SECONDS)
        found = {key: store.internal_kv_get(key, _RECORDS, RECORD_SECONDS) for key in keys}
    except RpcError as error:
        text = f"Ray's control store has not answered within {RECORD_SECONDS:g} s: {error}"
        raise ControlStoreError(text) from error
    return {key.decode(): value for key, value in found.items() if value is not None}  # None: removed meanwhile


_POOL_NAME = re.compile(r"[0-9a-f]{8}_[0-9]+$")
"""How the name of a pool's placement group ends: see `single_controller.ray.placement`."""


def worker_pools(creators: Collection[str]) -> list[str]:
    """Ids, in hex, of the placement groups that workers of this job have made for pools, and that have lost them.

    Ray removes a placement group that an actor has created only when the actor *and* its job have ended. One is
    returned if it is not detached and its creator is dead, or is among ``creators``: ids, in hex, of actors that are
    being ended.
    """
    data = _tables.PlacementGroupTableData
    tables = [
        data.FromString(table)
        for table in ask_store(lambda: state.state._connect_and_get_accessor().get_placement_group_table())
    ]
    job = ray.get_runtime_context().get_job_id()
    return [
        table.placement_group_id.hex()
        for table in tables
        if table.state != data.REMOVED
        and not table.is_detached
        and _POOL_NAME.search(table.name)
        and (
            table.creator_actor_id.hex() in creators
            # The driver's placement groups have no creating actor, which Ray marks as dead.
            or (table.creator_actor_dead and table.creator_job_id.hex() == job and _is_actor(table.creator_actor_id))
        )
    ]


def _is_actor(binary: bytes) -> bool:
    return bool(binary) and not ray.ActorID(binary).is_nil()


def free_resources() -> dict[str, dict[str, float]]:
    """Ray's node id -> resource -> amount that is not reserved. Asks the control store; needs no dashboard."""
    free: dict[str, dict[str, float]] = ask_store(state.available_resources_per_node)
    return free


def accelerator_names() -> frozenset[str]:
    """The resources besides GPU whose units are devices with ids. A worker gets an id only for what it takes."""
    return frozenset(accelerators.get_all_accelerator_resource_names()) - {"GPU"}


def device_lists_before() -> dict[str, str | None]:
    """Variable -> the list of visible devices with which this process started; None if it was not set. Not needed if an
    actor can have RAY_EXPERIMENTAL_NOSET_* without a runtime_env."""
    before = {}
    for kind, ids in global_worker.original_visible_accelerator_ids.items():
        manager = accelerators.get_accelerator_manager_for_resource(kind)
        name = None if manager is None else manager.get_visible_accelerator_ids_env_var()
        if name is not None:
            before[name] = None if ids is None else ",".join(ids)
    return before


def name_lines(name: str) -> None:
    """Make further output of this process reach the driver as ``(<name> pid=...) ...``.

    Ray's log monitor reads a name from the process's output. Ray writes the actor's class there when it creates the
    actor; a worker learns its rank later, so the name is written again, to both streams. Output of C++ code and of
    subprocesses gets the name too. Ray shows a line that several workers print only once, with their number, unless
    ``RAY_DEDUP_LOGS=0``.
    """
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


def resident_memory() -> int:
    """The memory of this process in bytes."""
    import psutil

    return int(psutil.Process().memory_info().rss)


def ray_worker() -> Any:
    """Ray's state in this process. Its ``core_worker`` is the connection to a cluster, and missing without one."""
    return global_worker


def use_token_of_this_host() -> None:
    """Authenticate connections with the token of this host, if there is one, unless ``RAY_AUTH_MODE`` is set.

    Ray does that for clusters that it starts or finds itself, but not for an explicit address.
    """
    loader = _raylet.AuthenticationTokenLoader
    if "RAY_AUTH_MODE" not in os.environ and loader.instance().has_token(ignore_auth_mode=True):
        os.environ["RAY_AUTH_MODE"] = "token"
        _raylet.Config.initialize("")


def exit_process(error: SystemExit) -> None:
    """End this actor's process as Ray does after a task that has raised this. The calling thread runs no task of Ray.

    The actor must not call itself instead, for a task that raises this: Ray waits for the calls that a process has sent
    before it lets it end, for 1.5 s or, if another thread of Ray has begun to end it meanwhile, for ever.
    """
    worker = ray_worker().core_worker
    if worker.get_current_actor_should_exit():
        return  # `ray.actor.exit_actor` was called, and Ray's main loop looks for that many times per second
    kind, words = ("intentional_system_exit", "by an user request") if error.code == 0 else ("system", "unexpectedly")
    worker.drain_and_exit_worker(kind, f"Worker exits {words}. Worker exits with an exit code {error.code}.".encode())


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
