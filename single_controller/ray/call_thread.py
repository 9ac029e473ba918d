"""CallThread: the thread of a rank that runs its methods, whether they were called through Ray or on the lane.

Ray runs an actor's methods on a thread of its own, which cannot wait for sockets too. With the lane, that thread hands
what it was told to run to the call thread, and waits. All methods of a rank therefore run on one thread, one after the
other. Calls of methods with ``concurrent=True`` do not come here.
"""

from __future__ import annotations

import logging
import select
import socket
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

from single_controller.ray.lane import LOST, Connection
from single_controller.ray.lane_handshake import Handshake, HandshakeError, LaneAddress

logger = logging.getLogger(__name__)

DIAL_SECONDS = 5.0
"""How long connecting to the driver may take."""

LOOK_SECONDS = 0.2
"""Time between two looks of Ray's thread whether the driver has cancelled what it waits for."""

_thread = threading.local()
"""``job``: what the call thread runs, if it came through Ray."""


class _Job:
    """What Ray's thread has handed over, and waits for."""

    __slots__ = ("after", "cancelled", "error", "run", "running", "value")

    def __init__(self, run: Callable[[], Any], after: int) -> None:
        self.run = run
        self.after = after
        self.running = threading.Lock()  # not an Event, which would cost as much as the rest
        self.running.acquire()
        self.cancelled = False
        self.value: Any = None
        self.error: BaseException | None = None


class CallThread:
    """Runs methods in the order in which the driver has sent the calls. See `single_controller.ray.lane`.

    Thread: a daemon thread named "worker-calls", which ends with the process, or when a method raises SystemExit.

    Args:
        run_message: runs a call from the lane; gets its number and its message, and returns the reply.
        end: ends the process with a SystemExit that such a call has raised.
        is_cancelled: whether the driver has cancelled what the calling thread of Ray was told to run.
    """

    def __init__(
        self,
        run_message: Callable[[int, bytes], bytes],
        end: Callable[[SystemExit], None],
        is_cancelled: Callable[[], bool],
    ) -> None:
        self._run_message = run_message
        self._end = end
        self._is_cancelled = is_cancelled
        self._jobs = deque[_Job]()
        self._poll = select.poll()  # selectors would take as long as the rest of a small call
        self._wake, self._woken = socket.socketpair()
        self._poll.register(self._woken, select.POLLIN)
        self._connection: Connection | None = None
        self._handshake: Handshake | None = None
        self._calls = deque[tuple[int, bytes]]()
        self._last = 0  # number of the last call from the lane that has ended
        self._ended: SystemExit | None = None
        threading.Thread(target=self._serve, name="worker-calls", daemon=True).start()

    def run(self, function: Callable[[], Any], after: int = 0) -> Any:
        """Run a function on the call thread, and wait for it. Called by Ray's thread.

        Args:
            function: what to run. What it raises is raised here.
            after: number of the call from the lane that comes before it; 0 for none; or `LOST`.
        """
        job = _Job(function, after)
        self._jobs.append(job)
        self._wake.send(b"\0")
        try:
            while not job.running.acquire(timeout=LOOK_SECONDS):
                job.cancelled = job.cancelled or self._is_cancelled()
                if self._ended is not None:
                    raise self._ended
            if job.error is not None:
                raise job.error
            return job.value
        finally:
            del job  # its error's traceback refers to this frame

    def dial(self, address: LaneAddress, key: bytes) -> None:
        """Connect to the driver, in place of any earlier connection. Called on the call thread. The handshake follows
        when the driver accepts, after the constructors, so they do not wait for it.

        Args:
            address: where the driver listens.
            key: Ray's id of this actor.
        """
        self._give_up()
        self._last = 0
        try:
            sock = socket.create_connection(address[:2], DIAL_SECONDS)
        except OSError as error:
            logger.warning(
                "no connection to the driver at port %d of %s: %s. Calls go through Ray, which takes longer",
                address.port,
                address.address,
                error,
            )
            return
        sock.settimeout(None)
        self._connection, self._handshake = Connection(sock), Handshake(address.token, key)
        self._poll.register(sock, select.POLLIN)

    def _serve(self) -> None:
        had_turn = False  # whether the last thing that ran was a job, although calls were here
        while self._ended is None:
            if self._jobs:
                # Calls on the lane that are here come first: a call takes the lane only when all earlier ones through
                # Ray have ended. A driver that has lost the connection no longer knows which calls are unanswered.
                self._take_what_arrives(0)
            if self._jobs and self._calls and not had_turn and self._may_overtake(self._jobs[0]):
                had_turn = True
                self._run_job(self._jobs.popleft())
                continue
            had_turn = False
            if not self._calls:
                if self._jobs and (self._connection is None or self._jobs[0].after <= self._last):
                    self._run_job(self._jobs.popleft())
                else:
                    self._take_what_arrives(None)
                continue
            number, message = self._calls.popleft()
            try:
                reply = self._run_message(number, message)
                if self._connection is not None:
                    # This may wait until the driver reads. It does so in the end: whoever waits for the call reads, or
                    # else the monitor's thread.
                    self._connection.send(number, reply)
            except SystemExit as error:
                self._ended = error
                self._end(error)
            except Exception as error:
                self._drop(error)
            self._last = number

    def _may_overtake(self, job: _Job) -> bool:
        """Whether a job may run before calls that have arrived. The group's driver sends none while a message of its
        own through Ray may be pending, so these were sent after the job has ended, or the job comes from another
        process, which would otherwise wait for as long as several threads of the driver keep calling."""
        return self._connection is not None and 0 <= job.after <= self._last

    def _run_job(self, job: _Job) -> None:
        if job.after == LOST:
            self._give_up()
        _thread.job = job
        try:
            job.value = job.run()
        except BaseException as error:
            job.error = error
        finally:
            _thread.job = None
            job.running.release()

    def _take_what_arrives(self, milliseconds: int | None) -> None:
        connection, handshake = self._connection, self._handshake
        for file, _ in self._poll.poll(milliseconds):
            if connection is None or handshake is None or file != connection.sock.fileno():
                self._woken.recv(4096)
                continue
            try:
                messages, connection.read = connection.receive()
                for number, message in messages:
                    if handshake.complete:
                        self._calls.append((number, message))
                    elif response := handshake.respond(message):
                        connection.send(0, response)
            except (OSError, HandshakeError) as error:
                self._drop(error)

    def _give_up(self) -> None:
        """Close the connection, so that nothing arrives on it any more: the driver has given up what was to come."""
        self._drop()
        self._calls.clear()

    def _drop(self, error: Exception | None = None) -> None:
        """Close the connection. Calls that have arrived are still run: the driver does not know that they are not."""
        connection, self._connection = self._connection, None
        if connection is not None:
            self._poll.unregister(connection.sock)
            connection.close()
            if error is not None:
                logger.debug("the connection to the driver is closed", exc_info=error)


def current_job_cancelled() -> bool | None:
    """Whether the driver has cancelled what this thread runs; None in any other thread than a `CallThread`."""
    job: _Job | None = getattr(_thread, "job", None)
    return None if job is None else job.cancelled
