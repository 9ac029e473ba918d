"""``python -m single_controller``: look at runs, and at the groups of a Ray cluster from any process of the cluster.

python -m single_controller status [GROUP] [--watch | --once] [--json]
python -m single_controller stacks GROUP [--ranks 0,3] [--native]
python -m single_controller view RUN [RUN ...]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import shutil
import sys
import time
from collections.abc import Sequence
from typing import Any

import ray

from dispatch.errors import SingleControllerError
from single_controller.ray import inspect_groups
from single_controller.view.group_watch import LATE_SECONDS, NO_PROGRESS_SECONDS, GroupWatch
from single_controller.view.live import connect
from single_controller.view.run_reader import RunReader
from single_controller.view.server import ViewServer, finite

WATCH_SECONDS = 1.0
"""Time between two looks of ``status --watch``."""

ONCE_SECONDS = 1.0
"""How long the ranks may take to answer ``status --once``."""

_HOME, _REST, _BOLD, _PLAIN = "\x1b[H", "\x1b[J", "\x1b[1m", "\x1b[m"
"""What a terminal does at these: go to its corner, clear what follows, write in bold, and as usual."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command. Exits with code 1 if there is no cluster or no such group, or ``status --once`` finds problems."""
    parser = argparse.ArgumentParser(prog="python -m single_controller", description="Look at runs and groups.")
    commands = parser.add_subparsers(dest="command", required=True)
    status = commands.add_parser(
        "status",
        help="groups, ranks, what each rank runs now, and deaths",
        epilog="With --once, the exit code is 1 if a group is broken, or a rank is dead, does not answer, is late or "
        "makes no progress; 0 otherwise.",
    )
    status.add_argument("group", nargs="?", help="the group's name, or its beginning; all groups by default")
    often = status.add_mutually_exclusive_group()
    often.add_argument("--watch", action="store_true", help="show it again each second, until Ctrl-C")
    often.add_argument("--once", action="store_true", help="also say what is wrong; exit code 1 if something is")
    status.add_argument("--json", action="store_true", help="JSON instead of text; means --once")
    status.add_argument(
        "--run", metavar="FOLDER", help="also the last step and the alarms of a run; means --once without --watch"
    )
    status.add_argument(
        "--late", type=_seconds, default=LATE_SECONDS, metavar="S", help="seconds of a call after which a rank is late"
        " for which others wait (%(default)g)",
    )  # fmt: skip
    status.add_argument(
        "--no-progress", type=_seconds, default=NO_PROGRESS_SECONDS, metavar="S",
        help="seconds of one call, or of a run without a new step, that count as no progress (%(default)g)",
    )  # fmt: skip
    stacks = commands.add_parser("stacks", help="the Python stack of each rank now")
    stacks.add_argument("group", help="the group's name, or its beginning")
    stacks.add_argument("--ranks", type=_ranks, help="these ranks only, such as 0,3")
    stacks.add_argument("--native", action="store_true", help="also C functions, of ranks that do not answer")
    view = commands.add_parser(
        "view",
        help="serve a page with the curves, samples, events and ranks of runs to this host's browser",
        epilog="The page has a secret in its address, is served on 127.0.0.1 only, and changes nothing. From another "
        "host: ssh -L PORT:127.0.0.1:PORT HOST.",
    )
    view.add_argument("run", nargs="+", help="folder of a run, which may be running")
    view.add_argument("--port", type=int, default=0, help="of the page; by default a free one")
    for command in (status, stacks):
        command.add_argument("--address", help="of the Ray cluster; by default RAY_ADDRESS, or the one on this host")
    view.add_argument("--address", help="of the Ray cluster; by default what the run's folder says")
    given = parser.parse_args(arguments)
    try:
        if given.command == "view":
            _view(given)
            return
        connect(given.address)
        try:
            sys.exit(_look(given))
        finally:
            ray.shutdown()
    except (LookupError, ValueError, OSError, SingleControllerError) as error:
        parser.exit(1, _printable(f"{error}\n"))
    except KeyboardInterrupt:
        sys.exit(0 if getattr(given, "watch", False) else 130)


def _view(given: argparse.Namespace) -> None:
    with ViewServer(given.run, given.port, given.address) as server:
        sys.stdout.write(f"{server.url}\nCtrl-C ends it.\n")
        sys.stdout.flush()
        try:
            server.serve()
        except KeyboardInterrupt:
            sys.stdout.write("\n")


def _look(given: argparse.Namespace) -> int:
    """Run a command about groups. Returns the exit code."""
    if given.command == "stacks":
        sys.stdout.write(_printable(f"{inspect_groups.stacks(given.group, given.ranks, native=given.native)}\n"))
        return 0
    given.once = given.once or given.json or (given.run is not None and not given.watch)
    if not (given.watch or given.once):
        sys.stdout.write(_printable(f"{inspect_groups.status(given.group)}\n"))
        return 0
    run = None if given.run is None else RunReader(given.run)
    with GroupWatch(given.group) as watch:
        while True:
            seen = _seen(watch, run, given)
            if given.json:
                sys.stdout.write(f"{json.dumps(finite(seen), indent=1, allow_nan=False)}\n")
            elif given.once:
                sys.stdout.write(f"{_text(seen)}\n")
            else:
                _redraw(_text(seen, problems_first=True))  # the terminal shows the beginning
                time.sleep(WATCH_SECONDS)
                continue
            return 1 if seen["problems"] else 0


def _seen(watch: GroupWatch, run: RunReader | None, given: argparse.Namespace) -> dict[str, Any]:
    """What `status` shows, as plain data; "text" has what is for people alone."""
    looks = watch.look(ONCE_SECONDS if given.once else 0.4)
    problems = [problem for look in looks for problem in look.problems(given.late, given.no_progress)]
    about: dict[str, Any] | None = None
    if run is not None:
        run.refresh()
        about = run.summary()
        if (silent := run.silent(given.no_progress)) is not None:
            problems.append(silent)
    found = {"ok": not problems, "time": time.time(), "problems": problems, "run": about}
    if not given.json:
        return found | {"text": [str(look) for look in looks]}
    return found | {"groups": [look.as_json() for look in looks]}


def _text(seen: dict[str, Any], *, problems_first: bool = False) -> str:
    parts = list(seen["text"]) or ["no group is running in this cluster"]
    if seen["run"] is not None:
        about = seen["run"]
        step = "no step yet" if about["last_step"] is None else f"step {about['last_step']}"
        lines = [f"{about['name']}: {about['state']}, {step}"]
        for name, value in sorted(about["metrics"].items()):
            lines.append(f"  {name} {f'{value:.6g}' if math.isfinite(value) else 'not finite'}")
        lines += [f"  alarm at step {event.get('step')}: {event.get('text')}" for event in about["alarms"]]
        parts.append("\n".join(lines))
    if seen["problems"]:
        said = "\n".join(["Problems", *(f"  {problem}" for problem in seen["problems"])])
        parts.insert(0 if problems_first else len(parts), said)
    return _printable("\n\n".join(parts))


def _printable(text: str) -> str:
    """Text of ranks and runs without what moves a terminal's cursor, or worse."""
    return "".join(sign if sign.isprintable() or sign == "\n" else "?" for sign in text)


def _redraw(text: str) -> None:
    """Replace what the terminal shows; in a pipe, add it."""
    if not sys.stdout.isatty():
        sys.stdout.write(f"{time.strftime('%H:%M:%S')}\n{text}\n\n")
    else:
        size = shutil.get_terminal_size()
        lines = [f"{_BOLD}{time.strftime('%H:%M:%S')}{_PLAIN}   Ctrl-C ends it", *text.splitlines()]
        if len(lines) > size.lines - 1:
            lines = [*lines[: size.lines - 2], f"... {len(lines) - size.lines + 2} more lines"]
        plain = (line if number == 0 else line[: size.columns] for number, line in enumerate(lines))
        sys.stdout.write(_HOME + "".join(f"{line}\x1b[K\n" for line in plain) + _REST)
    sys.stdout.flush()


def _ranks(text: str) -> list[int]:
    try:
        return [int(number) for number in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected ranks such as 0,3, got {text!r}") from None


def _seconds(text: str) -> float:
    with contextlib.suppress(ValueError):
        if (value := float(text)) > 0:
            return value
    raise argparse.ArgumentTypeError(f"expected a positive number of seconds, got {text!r}")


if __name__ == "__main__":
    main()
