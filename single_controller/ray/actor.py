"""The Ray actor behind a rank, in the worker's process.

An actor is made in a bundle before anybody knows its rank: its constructor is deferred. It first says where it
is; the start message then gives it rank and environment, and only after that the user's class is loaded and
made. The actor class carries the user's method names, so that ``group.workers[i].m.remote()`` works.
"""

from __future__ import annotations

import functools
import logging
import os
import socket
import time
import traceback
from collections.abc import Callable
from typing import Any, NamedTuple

import ray
from ray.exceptions import RayTaskError

from dispatch.batch import register_batch_type, user_batch_types
from dispatch.plan import Slot
from single_controller.base.host import Answer, Crew, Order
from single_controller.base.receipt import Failure, Receipt, remote_traceback
from single_controller.base.stats import Clock
from single_controller.base.worker import Place
from single_controller.ray.carried import pack_answer
from single_controller.ray.devices import hide_other_devices, own_devices
from single_controller.ray.frame import open_order, receipt_frame
from single_controller.ray.log_names import name_lines
from single_controller.ray.transport import AnswerPacket, Packet, pack

logger = logging.getLogger(__name__)

CONCURRENT = "concurrent"
"""Ray's concurrency group for the calls of methods registered as concurrent."""

CONCURRENT_CALLS = 64


class Location(NamedTuple):
    """Where an actor found itself.

    Attributes:
        address: the node's address.
        hostname: the node's name.
        pid: the process.
        devices: ids of the accelerators that Ray gave it.
        node_id: Ray's id of the node.
    """

    address: str
    hostname: str
    pid: int
    devices: tuple[str, ...]
    node_id: str = ""


class StartOrder(NamedTuple):
    """What a rank is told before user code runs.

    Attributes:
        rank: its rank.
        world_size: ranks in the group.
        local_rank: rank within its entry of the pool.
        local_world_size: ranks of that entry.
        environment: variables of the group's own, ``worker_env``.
        node_rank: number of its node, in order of the nodes' first ranks.
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    environment: dict[str, str]
    node_rank: int = 0


class Identity(NamedTuple):
    """Who a started worker is, for somebody who did not start it.

    Attributes:
        place: its place in its group.
        location: where it runs.
        name: the actor's name.
        placement_group: Ray's id of the placement group that it sits in, in hex.
        classes: role -> class, packed.
    """

    place: Place
    location: Location
    name: str
    placement_group: str | None
    classes: Packet


class RankActor:
    """One rank's process. Its own methods begin with ``_sc_``; a subclass adds the user's names."""

    def __init__(self) -> None:
        self._crew = Crew()
        self._place: Place | None = None
        self._rank = -1
        self._hostname, self._address = socket.gethostname(), ray.util.get_node_ip_address()
        self._where = f"{self._hostname}, {self._address}"
        self._held_port: socket.socket | None = None

    def _sc_locate(self) -> Location:
        node_id = ray.get_runtime_context().get_node_id()
        return Location(self._address, self._hostname, os.getpid(), own_devices(), node_id)

    def _sc_rendezvous(self, address: str | None, port: int | None) -> tuple[str, int]:
        """The group's master address and port, on rank 0. The port is held, bound and not listening, as long as
        this process lives: torch binds it all the same, and nobody else is given it."""
        if port is None:
            self._held_port = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
            self._held_port.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._held_port.bind(("", 0))
            port = self._held_port.getsockname()[1]
        return address or self._address, port

    def _sc_start(self, order: StartOrder, made: Packet, master: tuple[str, int]) -> bytes | Receipt:
        """Stand at a rank, load the user's classes and make the workers."""
        self._rank = order.rank
        name_lines(f"{type(self).__name__} rank {order.rank}")
        numbers = (order.rank, order.world_size, order.local_rank, order.local_world_size)
        self._place = place = Place(*numbers, *master, order.node_rank, own_devices())
        try:
            hide_other_devices(place.device_ids, order.environment)
            os.environ.update(order.environment)
            os.environ.update(place.environment())
            roles, batch_types = made.open()
            _know_batch_types(batch_types)
            self._crew.make(place, roles)
        except SystemExit:
            raise
        except BaseException as error:
            return receipt_frame(self._failed(error, "__init__", self._crew.making))
        return receipt_frame(Receipt(order.rank))

    def _sc_identity(self) -> Identity:
        """Who this is."""
        if self._place is None:
            raise RuntimeError("this worker has not been started")
        context = ray.get_runtime_context()
        classes = pack({role: type(host.worker) for role, host in self._crew.hosts.items()})
        group = context.get_placement_group_id()
        return Identity(self._place, self._sc_locate(), context.get_actor_name() or "", group, classes)

    def _sc_standing(self, role: str | None) -> Receipt:
        standing = self._crew[role].standing
        return Receipt(self._rank, standing.version, value=standing)

    def _sc_call(self, frame: bytes, *beside: Packet) -> bytes | Receipt:
        """Carry out an order; the answer, if it is wanted, comes with the receipt."""
        received = time.time()
        return self._answered(received, *open_order(frame, beside))

    def _answered(self, received: float, order: Order, whole: Packet | None, shard: Packet | None) -> bytes | Receipt:
        try:
            answer = self._run(order, whole, shard)
            # No packet stands for None, as it does for a rank that does not collect.
            value = pack_answer(order.method, answer.value, Packet) if answer.value is not None else None
        except SystemExit:
            raise
        except BaseException as error:
            return receipt_frame(self._failed(error, order.method, order.role))
        return receipt_frame(self._receipt(order, answer, value, value, received))

    @ray.method(num_returns=2)
    def _sc_call_kept(self, frame: bytes, *beside: Packet) -> tuple[bytes | Receipt, Any]:
        """Carry out an order; the answer stays in the store of this node until somebody asks for it."""
        received = time.time()
        order, whole, shard = open_order(frame, beside)
        try:
            answer = self._run(order, whole, shard)
            kept = pack_answer(order.method, answer.value, AnswerPacket)
            return receipt_frame(self._receipt(order, answer, None, kept, received)), kept
        except SystemExit:
            raise
        except BaseException as error:
            failed = receipt_frame(self._failed(error, order.method, order.role))
            return failed, RayTaskError(order.method, remote_traceback(error), _carried(error))

    def _sc_direct(self, role: str | None, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self._crew[role].call(method, *args, **kwargs)

    def _run(self, order: Order, whole: Packet | None, shard: Packet | None) -> Answer:
        slots: dict[Slot, Any] = {} if whole is None else whole.open(private=order.private)
        pieces: dict[Slot, Any] = {} if shard is None else shard.open(private=order.private)
        for part in (slots, pieces):
            for slot, value in part.items():
                if isinstance(value, ray.ObjectRef):  # as in Ray: a reference given as an argument is its value
                    part[slot] = ray.get(value)
        return self._crew[order.role].run(order, slots, pieces)

    def _receipt(
        self, order: Order, answer: Answer, value: Packet | None, packed: Packet | None, received: float
    ) -> Receipt:
        """The receipt of a call that went well; ``value`` goes with it, ``packed`` may go another way."""
        version = self._crew[order.role].standing.version
        clock = Clock(received, answer.began, answer.ended, time.time())
        size = packed.nbytes if packed is not None else 0
        return Receipt(self._rank, version, None, value, answer.rows, answer.not_rows, answer.empty, size, clock)

    def _failed(self, error: BaseException, method: str, role: str | None) -> Receipt:
        try:
            cause: Packet | None = pack(error)
        except Exception:
            cause = None
        failure = Failure.of(error, self._rank, self._where, method, cause, role)
        return Receipt(self._rank, self._crew.standing(role), failure)


def _know_batch_types(packed: list[Packet]) -> None:
    """Register the driver's batch types here, unless this process has registered them itself."""
    for packet in packed:
        try:
            cls, how = packet.open()
        except Exception:
            logger.debug("a batch type of the driver does not open here", exc_info=True)
            continue
        if cls not in user_batch_types():
            register_batch_type(cls, length=how.length, cut=how.cut, join=how.join)


def _carried(error: BaseException) -> Exception:
    """The exception, or one that says the same if it does not pickle."""
    try:
        ray.cloudpickle.loads(ray.cloudpickle.dumps(error))
        if isinstance(error, Exception):
            return error
    except Exception:
        logger.debug("an exception does not pickle", exc_info=True)
    return RuntimeError("".join(traceback.format_exception_only(type(error), error)).strip())


@functools.lru_cache(maxsize=256)
def actor_class(name: str, methods: tuple[tuple[str | None, str], ...], concurrent: bool) -> Any:
    """The Ray actor class for workers of a class, made once: it is exported once to the cluster.

    Args:
        name: the class's name, for Ray's logs.
        methods: role and name of its workers' public methods.
        concurrent: whether one of them is registered as concurrent, so that calls may overlap.
    """
    members: dict[str, Any] = {direct(role, method): _delegate(role, method) for role, method in methods}
    members |= {bare(method): _bare_call(method) for role, method in methods if role is None}
    cls = type(name, (RankActor,), {**members, "__module__": __name__, "__qualname__": name})
    remote: Any = ray.remote
    return remote(concurrency_groups={CONCURRENT: CONCURRENT_CALLS})(cls) if concurrent else remote(cls)


def direct(role: str | None, method: str) -> str:
    """Name of the actor's method for callers of its handle: the worker's own; ``<role>_<method>`` with roles."""
    return method if role is None else f"{role}_{method}"


def bare(method: str) -> str:
    """Name of the actor's method that stands for an order without arguments whose answer is wanted: Ray carries no
    argument for it, which saves a tenth of the call."""
    return f"_sc_bare_{method}"


def _bare_call(method: str) -> Callable[..., Any]:
    order = Order(method, collects=True, joins=False, private=True)

    def call(self: RankActor) -> bytes | Receipt:
        return self._answered(time.time(), order, None, None)

    call.__name__ = call.__qualname__ = bare(method)
    return call


def _delegate(role: str | None, method: str) -> Callable[..., Any]:
    def call(self: RankActor, *args: Any, **kwargs: Any) -> Any:
        return self._sc_direct(role, method, args, kwargs)

    call.__name__ = call.__qualname__ = direct(role, method)
    return call
