"""A run as JSON and as Markdown tables."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict
from statistics import median
from typing import Any

from benchmarks.cases import Case
from benchmarks.roster import CONTENDERS
from benchmarks.rounds import Measured
from benchmarks.targets import MB, fastest, verdicts

TITLES = {contender.name: contender.title for contender in CONTENDERS}
_FIGURES = {"store_peak": "in the store at most", "driver_growth": "the driver grew by"}


def as_json(run: dict[str, Any], cases: Iterable[Case], results: list[Measured]) -> str:
    """Return all measurements as JSON."""
    return json.dumps(
        {
            **run,
            "cases": [asdict(case) for case in cases],
            "results": [
                {**asdict(found), "median": median(found.seconds) if found.seconds else None, "n": len(found.seconds)}
                for found in results
            ],
            "targets": [asdict(verdict) for verdict in verdicts(results)],
        },
        indent=1,
    )


def as_markdown(run: dict[str, Any], cases: list[Case], results: list[Measured]) -> str:
    """Return two tables: the measurements, and the targets, which apply only to the full sizes."""
    machine = run["machine"]
    lines = [
        f"{machine['cores']} cores ({machine['processor']}), {machine['memory_gib']} GiB, {machine['system']}, "
        f"{run['date']}, {run['rounds']} rounds: medians of n warm runs, with the fastest and the slowest. "
        f"{run['how']}",
        "",
        "Versions: "
        + "; ".join(f"{TITLES[name]}: {_versions(found)}" for name, found in run["versions"].items())
        + ".",
        "",
        "| case | | median | fastest - slowest | n | against | |",
        "|---|---|--:|--:|--:|--:|---|",
    ]
    for case in cases:
        of_case = [found for found in results if found.case == case.name]
        lines += [_row(case, found, results, found is of_case[0]) for found in of_case]
    if run["quick"]:
        return "\n".join(lines) + "\n"
    lines += ["", "| aim | | aimed at | got | |", "|---|---|---|---|---|"]
    titles = {case.name: case.title for case in cases}
    lines += [
        f"| {titles[v.case]} | {v.variant} | {v.aim} | {v.got} | {'reached' if v.reached else '**not reached**'} |"
        for v in verdicts(results)
    ]
    return "\n".join(lines) + "\n"


def ratio(case: Case, found: Measured, results: list[Measured]) -> float | None:
    """Return a variant's median time as a multiple of the case's reference."""
    contender, variant = case.reference
    if case.by_variant:
        variant = found.variant.split(",")[0]
    reference = fastest(results, case.name, contender, variant)
    return median(found.seconds) / reference if reference and found.seconds else None


def _row(case: Case, found: Measured, results: list[Measured], first: bool) -> str:
    name = TITLES[found.contender] + (f": {found.variant}" if found.variant else "")
    notes = [f"{words} {found.figures[key] / MB:.0f} MB" for key, words in _FIGURES.items() if key in found.figures]
    if case.kind == "small_calls" and found.seconds:
        notes.append(f"{1 / median(found.seconds):,.0f} calls/s, driver CPU {_seconds(median(found.cpu))} per rank")
    if found.error:
        notes.append(found.error)
    title = f"**{case.title}**" if first else ""
    if not found.seconds:
        return f"| {title} | {name} | - | - | 0 | | {'; '.join(notes)} |"
    times = ratio(case, found, results)
    against = "" if times is None else f"{times:.3g} x {case.reference[1] or case.reference[0]}"
    return (
        f"| {title} | {name} | {_seconds(median(found.seconds))} | {_seconds(min(found.seconds))} - "
        f"{_seconds(max(found.seconds))} | {len(found.seconds)} | {against} | {'; '.join(notes)} |"
    )


def _seconds(value: float) -> str:
    return f"{value:.2f} s" if value >= 1 else f"{value * 1000:.3g} ms"


def _versions(found: dict[str, str]) -> str:
    return ", ".join(f"{package} {version}" for package, version in found.items())
