"""Ending collectives from outside: what a surviving rank does so that the group can have another rank replaced."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import sys
from collections.abc import Collection
from typing import Any

from single_controller.ray.compat import tcp_connections

logger = logging.getLogger(__name__)


def listening_ports() -> frozenset[int]:
    """The TCP ports at which this process listens."""
    return frozenset(one.laddr.port for one in tcp_connections() if one.status == "LISTEN")


def abort_collectives(known_ports: Collection[int]) -> None:
    """Make the collectives of this process fail, whichever thread waits in one. May be called in any thread.

    Communicators of a device are aborted (this has never been run). For gloo, `ProcessGroup.abort` of torch 2.13 ends
    nothing: a thread that waits for a peer goes on waiting. It stops when a connection to the peer breaks. So this
    shuts down the connections that other processes have opened to this one, except to ``known_ports``. One side of
    each connection between two ranks has accepted it, so all connections break once every rank has done this. The
    connections to torch's TCPStore, in which a rank may wait too, are among them.

    Args:
        known_ports: `listening_ports` before the user's code ran: those of Ray and of the rank's listener.
    """
    dist: Any = sys.modules.get("torch.distributed")
    if dist is None or not dist.is_available() or not dist.is_initialized():
        groups = []
    else:
        groups = list(dist.distributed_c10d._world.pg_map)
    for group in groups:
        try:
            group.abort()
        except Exception:  # the other groups must still be aborted
            logger.warning("a process group could not be aborted", exc_info=True)
    ports = listening_ports() - frozenset(known_ports)
    for one in tcp_connections():
        if one.fd >= 0 and one.raddr and one.laddr.port in ports:
            with contextlib.suppress(OSError):  # closed meanwhile
                # A duplicate, so that the socket itself stays open, and its owner finds it shut down.
                with socket.socket(fileno=os.dup(one.fd)) as connection:
                    connection.shutdown(socket.SHUT_RDWR)


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
