"""``python -m single_controller``: what the groups of a Ray cluster are doing, from any process of the cluster.

python -m single_controller status [GROUP]
python -m single_controller stacks GROUP [--ranks 0,3] [--native]
"""

from __future__ import annotations

import argparse
import logging
import os
import socket
import sys
from collections.abc import Sequence

import ray

from single_controller.ray import inspect_groups

CONNECT_SECONDS = 5.0


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command. Exits with code 1 if there is no cluster or no such group."""
    parser = argparse.ArgumentParser(prog="python -m single_controller", description="Look at the groups of a cluster.")
    commands = parser.add_subparsers(dest="command", required=True)
    status = commands.add_parser("status", help="groups, ranks, what each rank runs now, and deaths")
    status.add_argument("group", nargs="?", help="the group's name, or its beginning; all groups by default")
    stacks = commands.add_parser("stacks", help="the Python stack of each rank now")
    stacks.add_argument("group", help="the group's name, or its beginning")
    stacks.add_argument("--ranks", type=_ranks, help="these ranks only, such as 0,3")
    stacks.add_argument("--native", action="store_true", help="also C functions, of ranks that do not answer")
    for command in (status, stacks):
        command.add_argument("--address", help="of the Ray cluster; by default RAY_ADDRESS, or the one on this host")
    given = parser.parse_args(arguments)
    address = given.address or os.environ.pop("RAY_ADDRESS", None) or "auto"
    if address == "local":  # for other commands this means a new cluster
        address = "auto"
    _check_reachable(parser, address)
    try:
        ray.init(address, log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, ValueError, RuntimeError) as error:
        parser.exit(1, f"no Ray cluster responds at {address!r}. Give its address with --address. ({error})\n")
    try:
        if given.command == "status":
            text = inspect_groups.status(given.group)
        else:
            text = inspect_groups.stacks(given.group, given.ranks, native=given.native)
    except (LookupError, ValueError) as error:
        parser.exit(1, f"{error}\n")
    finally:
        ray.shutdown()
    sys.stdout.write(f"{text}\n")


def _check_reachable(parser: argparse.ArgumentParser, address: str) -> None:
    """Exit if nothing listens at an address of the form host:port. Ray itself would try for a minute."""
    host, _, port = address.rpartition(":")
    if host and port.isdigit():
        try:
            socket.create_connection((host.strip("[]"), int(port)), CONNECT_SECONDS).close()
        except OSError as error:
            parser.exit(1, f"no Ray cluster responds at {address!r}: {error}. Give its address with --address\n")


def _ranks(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


if __name__ == "__main__":
    main()
