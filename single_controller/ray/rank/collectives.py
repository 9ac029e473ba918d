"""Ending collectives from outside: what a surviving rank does so that the group can have another rank replaced."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import sys
from collections.abc import Collection, Iterator
from typing import Any

logger = logging.getLogger(__name__)

_TCP = {(family, socket.SOCK_STREAM) for family in (socket.AF_INET, socket.AF_INET6)}


def _tcp_sockets() -> Iterator[socket.socket]:
    """The TCP sockets of this process, as duplicates that are closed when the next one is asked for. /proc/net/tcp has
    them too, but to read it costs 10 ms: the kernel looks through its table of all connections."""
    for name in os.listdir("/dev/fd"):
        with contextlib.suppress(OSError):  # closed meanwhile, or no socket
            duplicate = os.dup(int(name))
            blocking = os.get_blocking(duplicate)
            try:
                one = socket.socket(fileno=duplicate)
            except OSError:
                os.close(duplicate)
                continue
            with one:
                os.set_blocking(duplicate, blocking)  # socket.setdefaulttimeout() changes it, for the original too
                if (one.family, one.type) in _TCP:
                    yield one


def _listens(one: socket.socket) -> bool:
    return bool(one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


def listening_ports() -> frozenset[int]:
    """The TCP ports at which this process listens."""
    return frozenset(one.getsockname()[1] for one in _tcp_sockets() if _listens(one))


def abort_collectives(known_ports: Collection[int]) -> None:
    """Make the collectives of this process fail, whichever thread waits in one. May be called in any thread.

    Communicators of a device are aborted (this has never been run). For gloo, `ProcessGroup.abort` of torch 2.13 ends
    nothing: a thread that waits for a peer goes on waiting. It stops when a connection to the peer breaks. So this
    shuts down the connections that other processes have opened to this one, except to ``known_ports``: those of
    `listening_ports` before the user's code ran, of Ray and of the rank's listener. One side of each connection between
    two ranks has accepted it, so all connections break once every rank has done this. The connections to torch's
    TCPStore, in which a rank may wait too, are among them.
    """
    dist: Any = sys.modules.get("torch.distributed")
    if dist is not None and dist.is_available() and dist.is_initialized():
        for group in list(dist.distributed_c10d._world.pg_map):
            try:
                group.abort()
            except Exception:  # the other groups must still be aborted
                logger.warning("a process group could not be aborted", exc_info=True)
    ports = listening_ports() - frozenset(known_ports)
    for one in _tcp_sockets():
        if one.getsockname()[1] in ports and not _listens(one):
            with contextlib.suppress(OSError):  # closed meanwhile
                one.shutdown(socket.SHUT_RDWR)  # the original stays open, and its owner finds it shut down


def end_collectives() -> None:
    """Destroy all process groups of torch.distributed, so that the process can initialize it again."""
    dist: Any = sys.modules.get("torch.distributed")
    if dist is None or not dist.is_available():
        return
    if dist.is_initialized():
        dist.destroy_process_group()
    else:
        # An initialization that failed has counted its process group. torch derives the groups' names from the count,
        # so ranks with different counts would wait for each other under different names.
        dist.distributed_c10d._world.group_count = 0
