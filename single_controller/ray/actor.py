"""The Ray actor behind a rank, in the worker's process.

An actor is created in a bundle before its rank is known, so its constructor does nothing. It first reports where it
runs. The start message then brings its rank and environment, and only after that the user's class is loaded and
constructed. The actor class has the user's method names, so that ``group.workers[i].m.remote()`` works.
"""

from __future__ import annotations

import functools
import json
import logging
import os
import socket
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any, NamedTuple

import ray
from ray.exceptions import RayError, RayTaskError

from dispatch.batch import register_batch_type, user_batch_types
from single_controller.base.codec import CallMessage, Encoded, decode_message, encode
from single_controller.base.engine import RankProcess
from single_controller.base.executor import Executor, RunningCall
from single_controller.base.result import RankResult, remote_traceback
from single_controller.base.worker import RankInfo
from single_controller.ray.call_thread import CallThread
from single_controller.ray.collectives import abort_collectives, end_collectives, listening_ports
from single_controller.ray.control_server import Answer, ControlAddress, ControlServer
from single_controller.ray.devices import own_devices
from single_controller.ray.internals import AFTER, exit_process, interface_of, name_lines, own_actor_id, resident_memory
from single_controller.ray.lane_handshake import LaneAddress
from single_controller.ray.results import fetch, is_cancelled, what_is_lost
from single_controller.ray.worker_env import set_environment

logger = logging.getLogger(__name__)

CONCURRENT = "concurrent"
"""Ray's concurrency group for methods registered with ``concurrent=True``."""

CONCURRENT_CALLS = 64

FETCH = "fetch"
"""Ray's concurrency group for `RankActor._sc_fetch`, which must not wait for the calls that came later."""


class Location(NamedTuple):
    """Where an actor runs.

    Attributes:
        address: the node's address.
        hostname: the node's name.
        pid: the process.
        devices: ids of the accelerators that Ray assigned to it.
        node_id: Ray's id of the node.
        control: where its process takes commands while it is busy.
    """

    address: str
    hostname: str
    pid: int
    devices: tuple[str, ...]
    node_id: str = ""
    control: ControlAddress | None = None

    @property
    def process(self) -> RankProcess:
        """What `GroupStatus` shows of it."""
        return RankProcess(self.hostname, self.address, self.pid, self.node_id)


class StartMessage(NamedTuple):
    """What a rank is told before user code runs.

    Attributes:
        rank: its rank.
        world_size: number of ranks in the group.
        local_rank: rank within its entry of the pool.
        local_world_size: number of ranks of that entry.
        environment: variables of ``worker_env``.
        node_rank: number of its node, in the order of the nodes' first ranks.
        generation: how often the group was restarted or had ranks replaced before.
        replacement: see `RankInfo`.
        lane: where the driver accepts a connection for small calls; None if it does not, or has one.
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    environment: dict[str, str]
    node_rank: int = 0
    generation: int = 0
    replacement: bool = False
    lane: LaneAddress | None = None


class Identity(NamedTuple):
    """Who a started worker is, for a process that did not start it.

    Attributes:
        info: its rank.
        location: where it runs.
        name: the actor's name.
        placement_group: Ray's id of its placement group, in hex.
        classes: role -> class, encoded.
    """

    info: RankInfo
    location: Location
    name: str
    placement_group: str | None
    classes: Encoded


class RankActor:
    """One rank's process. Its own methods begin with ``_sc_``; a subclass adds the user's method names.

    Methods of workers run on Ray's thread, or, in a group with a lane, on the `CallThread`.
    """

    _has_lane = False

    def __init__(self) -> None:
        self._hostname, self._address = socket.gethostname(), ray.util.get_node_ip_address()
        self._executor = Executor(f"{self._hostname}, {self._address}", fetch)
        self._control = ControlServer(
            self._address,
            {
                "stacks": self._executor.stacks,
                "status": self._status,
                "leave": self._leave,
                "abort": self._abort,
                "replicas": self._replicas,
            },
        )
        self._calls = CallThread(self._run_message, exit_process, is_cancelled) if self._has_lane else None
        self._kept: dict[int, ray.ObjectRef] = {}
        self._held_port: socket.socket | None = None
        self._own_ports = listening_ports()  # of Ray and of the control server

    def _status(self) -> str:
        """The answer to the command "status", for `running_calls`."""
        return json.dumps(self._executor.running())

    def _replicas(self) -> str:
        """The answer to the command "replicas": by role, `Worker.dp_replica`; empty without workers."""
        return json.dumps([worker.dp_replica for worker in self._executor.workers.values()])

    def _sc_locate(self) -> Location:
        node_id = ray.get_runtime_context().get_node_id()
        return Location(self._address, self._hostname, os.getpid(), own_devices(), node_id, self._control.address)

    def _sc_rendezvous(self, address: str | None, port: int | None) -> tuple[str, int]:
        """The group's master address and port, on rank 0. The port stays bound, but not listening, as long as this
        process lives: torch can bind it all the same, and no other process is given it."""
        if port is None:
            self._held_port = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
            self._held_port.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._held_port.bind(("", 0))
            port = self._held_port.getsockname()[1]
        return address or self._address, port

    def _sc_prepare(self, environment: dict[str, str], made: Encoded) -> tuple[Location, int]:
        """Import the user's classes without taking a rank; see `Standby`.

        Returns:
            Where this process runs, and its resident memory in bytes.
        """
        for cls, _, _ in self._load(environment, made).values():
            cls.prepare_standby()
        return self._sc_locate(), resident_memory()

    def _load(self, environment: dict[str, str], made: Encoded) -> Any:
        """Set the environment, and return the constructors."""
        for variable, interface in interface_variables(self._address).items():
            os.environ.setdefault(variable, interface)
        set_environment(environment)
        try:
            constructors, batch_types = made.decode()
        except Exception as error:
            error.add_note(
                "The worker's class, or an argument of its constructor, cannot be unpickled on this rank. Make its "
                f"module importable for {sys.executable} on the rank's host, or pass plain data"
            )
            raise
        _add_batch_types(batch_types)
        return constructors

    def _sc_join(
        self, message: StartMessage, made: Encoded, master: tuple[str, int], leave: bool = True
    ) -> bytes | RankResult:
        """Take a rank. A new process then loads the user's classes and creates the workers. A process that has workers
        keeps them, and leaves its former process groups if ``leave``."""
        return self._in_order(lambda: self._join(message, made, master, leave))

    def _join(self, message: StartMessage, made: Encoded, master: tuple[str, int], leave: bool) -> bytes | RankResult:
        self._kept.clear()  # the driver has ended all calls of which results are left
        if self._calls is not None and message.lane is not None:
            self._calls.dial(message.lane, own_actor_id())
        name_lines(f"{type(self).__name__} rank {message.rank}")
        numbers = (message.rank, message.world_size, message.local_rank, message.local_world_size)
        info = RankInfo(
            *numbers, *master, message.node_rank, own_devices(), False, message.generation, message.replacement
        )
        if self._executor.workers:
            os.environ.update(info.environment())
            return self._executor.rejoin(info, end_collectives if leave else None).to_message()

        def load() -> Any:
            os.environ.update(info.environment())  # before the import, which may read it
            return self._load(message.environment, made)

        return self._executor.start(info, load).to_message()

    def _leave(self) -> str:
        """Refuse calls until `_sc_join`, and make the collectives fail in which a method may wait."""
        self._executor.refuse_calls()
        return self._abort()

    def _abort(self) -> str:
        abort_collectives(self._own_ports)
        return ""

    def _sc_identity(self) -> Identity | None:
        """Who this worker is; None for a standby."""
        if self._executor.info is None:
            return None
        context = ray.get_runtime_context()
        classes = encode({role: type(worker) for role, worker in self._executor.workers.items()})
        group = context.get_placement_group_id()
        return Identity(self._executor.info, self._sc_locate(), context.get_actor_name() or "", group, classes)

    def _in_order(self, function: Callable[[], Any], after: int = 0) -> Any:
        """Run a function where methods run. ``after``: see `CallThread.run`."""
        return function() if self._calls is None else self._calls.run(function, after)

    def _sc_call(self, message: bytes | None = None, *beside: Encoded, after: int = 0) -> bytes | RankResult:
        """Run a call. The result comes inside the `RankResult`.

        A call without arguments has no message: handling an argument costs Ray a tenth of an empty call. The name of
        the Ray task, which is the method's label, then says what to run.
        """
        returned: bytes | RankResult = self._run(message, beside, after, keep=False)
        return returned

    @ray.method(num_returns=2)
    def _sc_call_kept(
        self, message: bytes | None = None, *beside: Encoded, after: int = 0
    ) -> tuple[bytes | RankResult, Any]:
        """Run a call. The result stays in the store of this node until somebody asks for it."""
        result, kept = self._run(message, beside, after, keep=True)
        if isinstance(kept, BaseException) and result.failure is not None:  # what ray.get(future.refs[0]) then raises
            kept = RayTaskError(result.failure.method, remote_traceback(kept), _picklable(kept))
        return result.to_message(), kept

    def _run(self, message: bytes | None, beside: tuple[Encoded, ...], after: int, *, keep: bool) -> Any:
        received = time.time()
        if message is not None:
            call = decode_message(message, beside)
        else:
            role, _, method = str(ray.get_runtime_context().get_task_name()).rpartition(".")
            call = CallMessage(method, role or None), None, None

        def run() -> Any:
            found = self._executor.run(*call, received, keep=keep)
            return found if keep else found[0].to_message()

        return run() if call[0].concurrent else self._in_order(run, after)

    def _run_message(self, number: int, message: bytes) -> bytes:
        """Run a call from the lane. Returns the encoded `RankResult`, or b"" if it is large: `_sc_fetch` gives it."""
        call = decode_message(message, ())
        result = self._executor.run(*call, time.time())[0].to_message()
        if isinstance(result, bytes):
            return result
        try:
            # Now, because the next call may change the memory that the result refers to.
            self._kept[number] = ray.put(result)
            return b""
        except RayError as error:  # the store and the disk are full, for example
            failed = self._executor.failed(error, call[0].method, call[0].role, lost=what_is_lost(error)).to_message()
            if isinstance(failed, bytes):
                return failed
            raise

    def _sc_fetch(self, number: int) -> list[ray.ObjectRef]:
        """The reference to a large result of a call from the lane, in a list, so that Ray does not resolve it."""
        return [self._kept.pop(number)]

    def _sc_locate_arguments(self, encoded: Encoded) -> Any:
        """Locate the deferred arguments of a call for all its ranks. See `Executor.locate_arguments`."""
        asked, count = encoded.decode()
        places = self._executor.locate_arguments(asked, count)
        return places[0] if count == 1 else tuple(places)

    def _sc_direct(self, role: str | None, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        after = kwargs.pop(AFTER, 0)
        return self._in_order(lambda: self._executor.call_directly(role, method, args, kwargs), after)


def running_calls(answer: Answer) -> tuple[RunningCall, ...] | str:
    """The calls that a rank runs, from its answer to the command "status", or why they are unknown."""
    return tuple(RunningCall(*call) for call in json.loads(answer.text)) if answer.ok else answer.text


def interface_variables(address: str) -> dict[str, str]:
    """The variables that make gloo, NCCL and TensorPipe use the network interface with this node's Ray address.

    Without them, gloo uses the address that the host's name stands for: 127.0.0.1 if the name does not resolve, and
    127.0.1.1 with Debian's default /etc/hosts. Other hosts cannot connect to either.
    """
    interface = interface_of(address)
    if interface is None:
        return {}
    # "=": NCCL would otherwise also take every interface whose name begins with this one.
    return {
        "GLOO_SOCKET_IFNAME": interface,
        "NCCL_SOCKET_IFNAME": f"={interface}",
        "TP_SOCKET_IFNAME": interface,
    }


def _add_batch_types(encoded: list[Encoded]) -> None:
    """Register the driver's batch types, unless this process has registered them itself."""
    for item in encoded:
        try:
            cls, how = item.decode()
        except Exception:
            logger.debug("a batch type of the driver cannot be unpickled here", exc_info=True)
            continue
        if cls not in user_batch_types():
            register_batch_type(cls, length=how.length, cut=how.cut, join=how.join)


def _picklable(error: BaseException) -> Exception:
    """The exception, or one with the same message if it cannot be pickled."""
    try:
        ray.cloudpickle.loads(ray.cloudpickle.dumps(error))
        if isinstance(error, Exception):
            return error
    except Exception:
        logger.debug("an exception cannot be pickled", exc_info=True)
    return RuntimeError("".join(traceback.format_exception_only(type(error), error)).strip())


@functools.lru_cache(maxsize=256)
def actor_class(name: str, methods: tuple[tuple[str | None, str], ...], concurrent: bool, lane: bool) -> Any:
    """The Ray actor class for workers of a class. Cached, so that it is exported to the cluster once.

    Args:
        name: name of the worker class, for Ray's logs.
        methods: role and name of the workers' public methods.
        concurrent: whether a method is registered with ``concurrent=True``.
        lane: whether the group has a lane.
    """
    members: dict[str, Any] = {direct_name(role, method): _direct(role, method) for role, method in methods}
    cls = type(name, (RankActor,), {**members, "_has_lane": lane, "__module__": __name__, "__qualname__": name})
    remote: Any = ray.remote
    # With any group, Ray runs all methods on threads of its own, where user code may not set signal handlers.
    groups = {**({CONCURRENT: CONCURRENT_CALLS} if concurrent else {}), **({FETCH: 1} if lane else {})}
    return remote(concurrency_groups=groups)(cls) if groups else remote(cls)


def direct_name(role: str | None, method: str) -> str:
    """Name of the actor method that calls a worker's method directly; ``<role>_<method>`` with roles."""
    return method if role is None else f"{role}_{method}"


def _direct(role: str | None, method: str) -> Callable[..., Any]:
    def call(self: RankActor, *args: Any, **kwargs: Any) -> Any:
        return self._sc_direct(role, method, args, kwargs)

    call.__name__ = call.__qualname__ = direct_name(role, method)
    return call
