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
import pickle
import socket
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, cast

import ray
from ray.exceptions import RayError

from dispatch.batch import register_batch_type, user_batch_types
from single_controller.call.codec import MAX_INLINE_BYTES, SEPARATE, CallMessage, Encoded, encode, keep_encoded
from single_controller.call.joining import RankResult
from single_controller.call.transport import RankProcess, RunningCall
from single_controller.call.worker.executor import Executor
from single_controller.call.worker.worker import RankInfo
from single_controller.ray.compat import exit_process, interface_of, name_lines, resident_memory
from single_controller.ray.rank.call_thread import CallThread, current
from single_controller.ray.rank.collectives import abort_collectives, end_collectives, listening_ports
from single_controller.ray.rank.devices import SOCKET_INTERFACES, own_devices, set_environment
from single_controller.ray.rank.frames import frames_file
from single_controller.ray.results import ENDED, RESULT, Kept, fetch, what_is_lost
from single_controller.wire.handshake import Kind, WireAddress
from single_controller.wire.link import INPUTS_OF, Answer, Session
from single_controller.wire.listener import Listener

logger = logging.getLogger(__name__)

TAKE = "take"
"""Ray's concurrency group for arguments, which must not wait for calls."""

CONCURRENCY_GROUPS = {TAKE: 1, RESULT: 16, ENDED: 2}


class Location(NamedTuple):
    """Where a slot of a pool is, or an actor in it."""

    address: str  # the node's address
    hostname: str  # the node's name
    node_id: str  # Ray's id of the node
    # Ids of the accelerators that Ray assigned; () without any, None while they are unknown
    devices: tuple[str, ...] | None = None
    pid: int = 0  # the actor's process; 0 for a slot
    wire: WireAddress | None = None  # where that process takes calls, and commands while it is busy

    @property
    def process(self) -> RankProcess:
        """What `GroupStatus` shows of it."""
        return RankProcess(self.hostname, self.address, self.pid, self.node_id)


StartMessage = tuple[RankInfo, dict[str, str]]
"""What a rank is told before user code runs: its rank, without rendezvous and devices; and ``worker_env``."""


class Identity(NamedTuple):
    """Who a started worker is, for a process that did not start it."""

    info: RankInfo  # its rank
    location: Location  # where it runs
    name: str  # the actor's name
    classes: Encoded  # role -> class, encoded


class RankActor:
    """One rank's process. Its own methods begin with ``_sc_``; a subclass adds the user's method names.

    Threads: methods run on the `CallThread`, frames are read by the hub's, and Ray's own run what begins with ``_sc_``.
    """

    def __init__(self) -> None:
        self._hostname, self._address = socket.gethostname(), ray.util.get_node_ip_address()
        self._executor = Executor(f"{self._hostname}, {self._address}", fetch)
        self._calls = CallThread(exit_process)
        commands = {
            "alive": lambda: "",
            "stacks": self._executor.stacks,
            "status": lambda: json.dumps(self._executor.running()),  # for `running_calls`
            "leave": self._leave,
            "abort": self._abort,
            # By role, `Worker.dp_replica`; empty without workers
            "replicas": lambda: json.dumps([worker.dp_replica for worker in self._executor.workers.values()]),
        }
        self._listener = Listener(self._address, self._take_call, commands, frames_file())
        self._held_port: socket.socket | None = None
        self._constructed = False  # whether all constructors have returned
        self._own_ports = listening_ports()  # of Ray and of the listener

    def _sc_locate(self) -> Location:
        node_id = ray.get_runtime_context().get_node_id()
        return Location(self._address, self._hostname, node_id, own_devices(), os.getpid(), self._listener.address)

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
        """Import the user's classes without taking a rank; see `Standby`. Returns where this process runs, and its
        resident memory in bytes."""
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

    def _join(self, message: StartMessage, made: Encoded, master: tuple[str, int], leave: bool) -> RankResult:
        """Take a rank. A new process then loads the user's classes and creates the workers. A process that has workers
        keeps them, and leaves its former process groups if ``leave``."""
        info = replace(message[0], master_addr=master[0], master_port=master[1], device_ids=own_devices())
        name_lines(f"{type(self).__name__} rank {info.rank}")
        if self._executor.workers:
            os.environ.update(info.environment())
            return self._executor.rejoin(info, end_collectives if leave else None)

        def load() -> Any:
            os.environ.update(info.environment())  # before the import, which may read it
            return self._load(message[1], made)

        result = self._executor.start(info, load)
        self._constructed = result.failure is None
        return result

    def _leave(self) -> str:
        """Refuse calls until the next `_join`, and make the collectives fail in which a method may wait."""
        self._executor.refuse_calls()
        return self._abort()

    def _abort(self) -> str:
        abort_collectives(self._own_ports)
        return ""

    def _sc_identity(self) -> Identity | None:
        """Who this worker is; None for a standby, and until all constructors have returned: another driver would get a
        group without their classes."""
        if self._executor.info is None or not self._constructed:
            return None
        context = ray.get_runtime_context()
        classes = encode({role: type(worker) for role, worker in self._executor.workers.items()})
        return Identity(self._executor.info, self._sc_locate(), context.get_actor_name() or "", classes)

    # --- one call -----------------------------------------------------------------------------------------------------

    def _take_call(self, kind: int, session: Session, number: int, payload: bytes) -> None:
        """A call has arrived. Called in the hub's thread."""
        submit = self._calls.submit_concurrent if kind == Kind.CONCURRENT else self._calls.submit
        submit(lambda: self._run(kind, session, number, payload))

    def _run(self, kind: int, session: Session, number: int, payload: bytes) -> None:
        """Run a call, and send its reply. A large value stays here, and so does one with references, which Ray must
        see."""
        received = time.time()
        current.set((session, number))  # for `call_cancelled`
        call = CallMessage("__init__")  # what errors name until the message is read; a JOIN runs the constructors
        try:
            if kind == Kind.JOIN:
                message, leave = pickle.loads(payload)
                made = session.take_parts(number)
                if made is None:
                    lost = ConnectionError(
                        "the constructors' arguments, or rank 0's address, have been lost on the way"
                    )
                    result = self._executor.failed(lost, call.method, call.role, alike=True)
                else:
                    result = self._join(message, made[0], made[1], leave)
            else:
                about, *arguments = pickle.loads(payload)
                call = CallMessage(*about)
                beside = session.take_parts(number) if SEPARATE in arguments else ()
                if beside is None:  # the other ranks may have theirs, and wait for this one in a collective
                    lost = ConnectionError("its arguments have been lost on the way")
                    result = self._executor.failed(lost, call.method, call.role)
                else:
                    whole, shard = _with_parts(arguments, beside) if beside else arguments
                    inputs = functools.partial(_take_inputs, session, number, lambda: self._executor.refusing)
                    result = self._executor.run(call, whole, shard, received, inputs)
                    del arguments, beside, whole, shard
            value, failure = result.value, result.failure
            if failure is not None and session.withdrawn(number):
                failure.alike = True  # the driver knows more: the call that computes an argument has failed
            cause = None if failure is None else failure.cause
            try:
                if value is not None and (value.references or value.nbytes > MAX_INLINE_BYTES):
                    # Now, because the next call may change the memory that the value refers to.
                    ref, result = ray.put(value.as_kept()), result._replace(value=None, kept=True)
                    session.reply(Kind.KEPT, number, pickle.dumps(tuple(result), protocol=5), (result, ref))
                    return
                if isinstance(cause, Encoded) and (cause.references or cause.nbytes > MAX_INLINE_BYTES):
                    session.reply(Kind.BESIDE, number, b"", (result, None))
                    return
            except RayError as error:  # the store and the disk are full, for example
                result = self._executor.failed(error, call.method, call.role, lost=what_is_lost(error))
            reply = pickle.dumps(tuple(result), protocol=5)
        except Exception as error:  # of this library or of Ray: without a reply, the driver would wait for ever
            logger.exception("call %d has failed outside of its method", number)
            reply = pickle.dumps(tuple(self._executor.failed(error, "", None)), protocol=5)
        session.reply(Kind.REPLY, number, reply)

    def _sc_take(self, session: bytes, number: int, *parts: Any) -> None:
        """Take what comes beside a call: large arguments, and those with references."""
        self._listener.session(session).give_parts(number, parts)

    def _sc_result(self, session: bytes, number: int) -> Kept:
        """The result of a call, once it has ended, and the reference to what the rank keeps of it: in a list, so that
        Ray does not resolve it."""
        kept, ref = self._listener.session(session).take_kept(number)
        result = RankResult(*pickle.loads(kept)) if isinstance(kept, bytes) else kept
        return result, None if ref is None else [ref]

    def _sc_value(self, kept: list[ray.ObjectRef] | Kept) -> Any:
        """The value of a call, or its exception: what ``ray.get(future.refs[0])`` gives. ``kept`` is what `_sc_result`
        has returned, or the reference to it, in a list."""
        result, refs = cast(Kept, ray.get(kept[0]) if isinstance(kept, list) else kept)
        if result.failure is not None:
            error = result.failure.exception() or result.failure.error()
            raise _picklable(error)
        if refs is None:
            return None if result.value is None else result.value.as_kept()
        with keep_encoded():
            return ray.get(refs[0])


def _with_parts(arguments: Sequence[Any], beside: Sequence[Any]) -> list[Any]:
    """The arguments of a message, with those that came beside it."""
    parts = iter(beside)
    return [next(parts) if argument == SEPARATE else argument for argument in arguments]


def _take_inputs(session: Session, number: int, given_up: Callable[[], bool]) -> list[Any]:
    """Wait for the deferred arguments of a call. See `Executor.run`."""
    parts = session.take_parts(number, INPUTS_OF, given_up)
    if parts is None:  # the other ranks may have theirs
        raise ConnectionError("its deferred arguments have been lost on the way")
    payload, *beside = parts or (pickle.dumps(((), None, None)),)
    return _with_parts(pickle.loads(payload)[1:], beside)


def running_calls(answer: Answer) -> tuple[RunningCall, ...] | str:
    """The calls that a rank runs, from its answer to the command "status", or why they are unknown."""
    return tuple(RunningCall(*call) for call in json.loads(answer.text)) if answer.ok else answer.text


def interface_variables(address: str) -> dict[str, str]:
    """The variables that make `SOCKET_INTERFACES` use the network interface with this node's Ray address.

    Without them, gloo uses the address that the host's name stands for: 127.0.0.1 if the name does not resolve, and
    127.0.1.1 with Debian's default /etc/hosts. Other hosts cannot connect to either.
    """
    interface = interface_of(address)
    if interface is None:
        return {}
    return {f"{name}_SOCKET_IFNAME": sign + interface for name, sign in SOCKET_INTERFACES.items()}


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
def actor_class(name: str, methods: tuple[tuple[str | None, str], ...]) -> Any:
    """The Ray actor class for workers of a class of this name, whose public methods are given by role and name. Cached,
    so that it is exported to the cluster once."""
    members: dict[str, Any] = {direct_name(role, method): _direct(role, method) for role, method in methods}
    cls = type(name, (RankActor,), {**members, "__module__": __name__, "__qualname__": name})
    remote: Any = ray.remote
    return remote(concurrency_groups=CONCURRENCY_GROUPS)(cls)


def direct_name(role: str | None, method: str) -> str:
    """Name of the actor method that calls a worker's method directly; ``<role>_<method>`` with roles."""
    return method if role is None else f"{role}_{method}"


def _direct(role: str | None, method: str) -> Callable[..., Any]:
    def call(self: RankActor, *args: Any, **kwargs: Any) -> Any:
        return self._calls.run(lambda: self._executor.call_directly(role, method, args, kwargs))

    call.__name__ = call.__qualname__ = direct_name(role, method)
    return call
