"""Live: what the groups of a running run do now, for the page. It connects to the run's Ray cluster when it is asked.

Lock: ``_looking`` makes requests take turns; all but the first of several get what that one saw. It is held while Ray
and the ranks are asked, so it has the order 3 (docs/internals.md).
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from typing import Any

import ray

from single_controller.call.state import Closing
from single_controller.ray.compat import deserted_address, interface_of, use_token_of_this_host
from single_controller.view.group_watch import GroupWatch

CONNECT_SECONDS = 5.0
"""How long a cluster may take to accept a connection."""

FRESH_SECONDS = 0.5
"""What was seen is shown again for so long, however many pages ask."""

RETRY_SECONDS = 10.0
"""How long the page says why there is no connection before it is tried again."""

IDLE_SECONDS = 20.0
"""Seconds after which a connection that no page uses is closed. One minute after a cluster has ended, Ray's C++ code
ends the processes that are still connected to it. The cluster ends with the script if the script has started it."""


def connect(address: str | None) -> None:
    """Connect this process to a Ray cluster, as a driver without workers.

    Args:
        address: of the cluster; by default ``RAY_ADDRESS``, or the cluster on this host.

    Raises:
        ConnectionError: no cluster responds there.
    """
    address = address or os.environ.pop("RAY_ADDRESS", None) or "auto"
    if address in ("auto", "local"):  # for other commands the latter means a new cluster
        address = deserted_address() or "auto"
    if check_responds(address) and is_own(address):  # another host gets a token only if RAY_AUTH_MODE is set
        use_token_of_this_host()
    try:
        ray.init(address, log_to_driver=False, logging_level=logging.ERROR)
    except (OSError, ValueError, RuntimeError) as error:
        raise ConnectionError(
            f"no Ray cluster responds at {address!r}. Give its address with --address. ({error})"
        ) from error


def check_responds(address: str) -> bool:
    """Raise a `ConnectionError` if nothing listens at an address of the form host:port. Ray itself would try for a
    minute. Returns whether the address has this form; other addresses are not checked."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        return False
    try:
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_SECONDS).close()
    except OSError as error:
        raise ConnectionError(
            f"no Ray cluster responds at {address!r}: {error}. Give its address with --address"
        ) from None
    return True


def is_own(address: str) -> bool:
    """Whether an address of the form host:port is on this host."""
    host = address.rpartition(":")[0].strip("[]")
    return host in ("localhost", "127.0.0.1", "::1") or interface_of(host) is not None


class Live(Closing):
    """The groups of clusters, as the page asks for them. A process has one connection to Ray, so looking at another
    cluster ends the connection to the former one. A connection that others have made is used as it is, and stays."""

    def __init__(self) -> None:
        self._looking = threading.Lock()
        self._watch: GroupWatch | None = None
        self._address: str | None = None  # of the cluster of the watch
        self._connected = False  # whether this object has connected the process to Ray
        self._looked = 0.0  # when the last look at that cluster ended, by the monotonic clock
        self._seen: dict[str, tuple[float, dict[str, Any]]] = {}  # address -> until when it is shown, and what

    def look(self, address: str) -> dict[str, Any]:
        """What the groups of a cluster do now.

        Returns:
            ``time``, ``groups`` (`GroupLook.as_json`) and ``problems``; or ``error``, why the cluster cannot be asked.
        """
        with self._looking:
            until, seen = self._seen.get(address, (0.0, {}))
            if time.monotonic() < until:
                return seen
            wait = FRESH_SECONDS
            try:
                if self._watch is None or self._address != address:
                    check_responds(address)  # before the current connection is closed for a cluster that has ended
                    self.disconnect()
                    self._address = address
                    if not ray.is_initialized():
                        connect(address)
                        self._connected = True
                    self._watch = GroupWatch()
                looks = self._watch.look()
                self._looked = time.monotonic()
                seen = {
                    "time": time.time(),
                    "groups": [look.as_json() for look in looks],
                    "problems": [problem for look in looks for problem in look.problems()],
                }
            except Exception as error:  # whatever Ray raises, the page continues to show the files
                if self._address == address:
                    self.disconnect()
                seen = {"time": time.time(), "error": f"{error}", "groups": [], "problems": []}
                wait = RETRY_SECONDS
            self._seen[address] = time.monotonic() + wait, seen
            return seen

    def disconnect(self) -> None:
        """Close the connections. A later look opens them again."""
        if self._watch is not None:
            self._watch.close()
            self._watch = None
        if self._connected:
            self._connected = False
            ray.shutdown()

    def disconnect_if_idle(self) -> None:
        """Close the connection if no page has used it for `IDLE_SECONDS`. Returns at once if `look` is running."""
        if self._looking.acquire(blocking=False):
            try:
                if self._watch is not None and time.monotonic() - self._looked > IDLE_SECONDS:
                    self.disconnect()
            finally:
                self._looking.release()

    def close(self) -> None:
        """Close the connections, if there are any. One that is being opened ends with the process."""
        if self._looking.acquire(timeout=CONNECT_SECONDS):
            try:
                self.disconnect()
            finally:
                self._looking.release()
