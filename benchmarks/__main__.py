"""The command: ``python -m benchmarks`` from the root of the repository.

It creates an environment for each peer, runs every case for every contender in turn, and writes ``table.md``,
``results.json`` and ``picture.png``. Run it on an idle machine. On two cores a full run takes over an hour and up to
20 GB of memory, which verl's default mode needs for 256 MB on eight ranks. A contender that leaves less than 1.5 GiB
of memory available is stopped, and the table says so. ``--quick`` takes a few minutes and does not measure speed.
"""

from __future__ import annotations

import argparse
import datetime
import logging
import os
import sys
import time
from pathlib import Path

from benchmarks.cases import MB, all_cases, host_cases
from benchmarks.contenders.local_ray import CLUSTER
from benchmarks.machine import machine
from benchmarks.picture import draw
from benchmarks.report import as_json, as_markdown
from benchmarks.roster import CONTENDERS
from benchmarks.rounds import Rounds
from benchmarks.two_hosts import on_two_hosts
from benchmarks.venvs import HERE, python_for

HOW = (
    "All contenders in one run, case by case, round after round: with large data each one is started for its turn and "
    "warmed up, with a Ray of its own, because all stores together would not fit; in the other cases all are alive and "
    "take turns. verl and Monarch each have a virtual environment of their own; plain Ray and this library share one. "
    "Small calls: with more ranks than cores, ranks take turns on the cores, so times compare the CPU time of all "
    "processes together rather than latencies. The driver's CPU time is user and system time of all its threads."
)
ON_HOSTS = " The two hosts are network namespaces of this machine, with one Ray cluster for all contenders."

logger = logging.getLogger("benchmarks")


def main(argv: list[str] | None = None) -> int:
    """Run the command. Returns 0 if every contender completed its cases, 1 if one failed, 2 if there is nothing to
    run."""
    options = _options(argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    if options.hosts and CLUSTER not in os.environ:
        arguments = sys.argv[1:] if argv is None else argv
        status = on_two_hosts("benchmarks", arguments, store=200 * MB, timeout=1800)
        return 2 if status is None else status
    possible = host_cases() if options.hosts else all_cases(options.quick)
    cases = [case for case in possible if _chosen(case.name, options.only)]
    contenders = [contender for contender in CONTENDERS if _chosen(contender.name, options.contenders)]
    if options.hosts:
        contenders = [contender for contender in contenders if contender.name in ("ours", "ray")]
    if not cases or not contenders:
        logger.error("nothing to run: cases are %s", ", ".join(case.name for case in possible))
        return 2
    out = options.out
    out.mkdir(parents=True, exist_ok=True)
    for contender in contenders:
        python_for(contender)
    run = {
        "machine": machine(),
        "date": datetime.date.today().isoformat(),
        "rounds": options.rounds,
        "quick": options.quick,
        "how": HOW + (ON_HOSTS if options.hosts else ""),
    }
    rounds = Rounds(contenders, options.rounds, warm=1.0 if options.quick else 3.0, budget=20.0, logs=out)
    start = time.monotonic()
    try:
        for case in cases:
            rounds.run(case)
            run |= {"versions": rounds.versions, "minutes": round((time.monotonic() - start) / 60, 1)}
            (out / "results.json").write_text(as_json(run, cases, rounds.results))
            (out / "table.md").write_text(as_markdown(run, cases, rounds.results))
    finally:
        rounds.close()
    draw(out / "picture.png", cases, rounds.results)
    sys.stdout.write((out / "table.md").read_text())
    return 1 if any(found.error for found in rounds.results) else 0


def _options(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=(__doc__ or "").strip().split("\n\n")[1])
    parser.add_argument("--quick", action="store_true", help="small sizes, one round: whether everything works")
    parser.add_argument("--only", metavar="CASE,...", help="these cases; 'chain' stands for all that begin so")
    parser.add_argument("--contenders", metavar="NAME,...", help=", ".join(contender.name for contender in CONTENDERS))
    parser.add_argument("--hosts", action="store_true", help="small calls on two hosts, ours and plain Ray; needs root")
    parser.add_argument("--rounds", type=int, help="rounds over all contenders (default: 3, with --quick 1)")
    parser.add_argument(
        "--out", type=Path, help="folder for the results (default: benchmarks/out; with --hosts its folder hosts)"
    )
    options = parser.parse_args(argv)
    options.rounds = options.rounds or (1 if options.quick else 3)
    options.out = options.out or HERE / ("out/hosts" if options.hosts else "out")
    options.only = options.only.split(",") if options.only else None
    options.contenders = options.contenders.split(",") if options.contenders else None
    return options


def _chosen(name: str, wanted: list[str] | None) -> bool:
    return wanted is None or any(name == each or (each in _GROUPS and name.startswith(each + "-")) for each in wanted)


_GROUPS = ("chain", "start", "empty")

if __name__ == "__main__":
    sys.exit(main())
