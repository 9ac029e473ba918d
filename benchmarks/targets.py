"""Performance targets, case by case: the maximum time relative to another contender, and absolute limits."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median

from benchmarks.rounds import Measured

MB = 1024**2
_TIMES = ("seconds", "cpu")


@dataclass(frozen=True)
class Target:
    """A limit relative to another contender.

    Attributes:
        case: name of the case; a name that ends in ``-`` is a prefix that selects several cases.
        variant: variant of this library.
        factor: maximum ratio of this library's median to the other contender's.
        against: the other contender.
        theirs: its variant; None for its fastest.
    """

    case: str
    variant: str
    factor: float
    against: str
    theirs: str | None = None


@dataclass(frozen=True)
class Limit:
    """An absolute limit: bytes of a probe's figure, or seconds if ``figure`` is "seconds" or "cpu" (see `Measured`)."""

    case: str
    variant: str
    figure: str
    most: float


TARGETS = (
    Target("broadcast", "views", 2, "memcpy"),
    Target("broadcast", "private copies", 1 / 3, "verl"),
    Target("echo", "views, a list", 4, "memcpy"),
    Target("echo", "views, joined", 12, "memcpy"),
    Target("echo", "private copies, joined", 1 / 4, "verl"),
    Target("echo", "private copies, joined", 1 / 1.2, "verl-numpy"),
    *(
        target
        for form in ("views", "private copies")
        for target in (
            Target("types-", f"{form}, a TensorDict", 1.1, "ours", f"{form}, a dict"),
            Target("types-", f"{form}, a jagged tensor", 1.3, "ours", f"{form}, a tensor"),
        )
    ),
    Target("mesh", "views", 1 / 15, "verl"),
    Target("mesh", "views", 1 / 4, "verl-numpy"),
    Target("mesh", "private copies", 1 / 6, "verl"),
    Target("mesh", "private copies", 1 / 2, "verl-numpy"),
    Target("chain-", "views", 1 / 10, "verl"),
    Target("chain-", "private copies", 1 / 10, "verl"),
    *(
        target
        for ranks in (2, 4, 8)
        for target in (
            Target(f"start-{ranks}", "", 1 / 6, "verl"),
            Target(f"start-{ranks}", "", 1.5, "ray", "bare actors"),
            Target(f"start-{ranks}-torch", "", 1 / 2.2, "verl"),
        )
    ),
    Target("empty-", "empty", 0.2, "ray", "empty"),
    Target("empty-", "empty", 0.5, "monarch", "empty"),
    Target("empty-", "16 kB", 0.4, "ray", "16 kB"),
    Target("plan", "4,096 ranks", 4.4, "ours", "1,024 ranks"),  # linear, with a tolerance of 10%
)

LIMITS = (
    Limit("mesh", "views", "store_peak", 512 * MB),
    Limit("mesh", "private copies", "store_peak", 512 * MB),
    Limit("chain-", "views", "driver_growth", 5 * MB),
    Limit("chain-", "private copies", "driver_growth", 5 * MB),
    Limit("empty-", "empty", "cpu", 0.15e-3),
    Limit("plan", "4,096 ranks", "seconds", 0.05),
)


@dataclass(frozen=True)
class Verdict:
    """A target, the measured value, and whether it was reached."""

    case: str
    variant: str
    aim: str
    got: str
    reached: bool


def fastest(results: list[Measured], case: str, contender: str, variant: str | None = None) -> float | None:
    """Return the median seconds of a contender's variant, or of its fastest variant; None if there are none."""
    medians = [
        median(found.seconds)
        for found in results
        if found.case == case
        and found.contender == contender
        and found.seconds
        and (variant is None or found.variant == variant)
    ]
    return min(medians, default=None)


def verdicts(results: list[Measured]) -> list[Verdict]:
    """Return a verdict for every target for which both sides were measured."""
    found: list[Verdict] = []
    for case in dict.fromkeys(result.case for result in results):
        for target in TARGETS:
            ours = fastest(results, case, "ours", target.variant)
            theirs = fastest(results, case, target.against, target.theirs)
            if _applies(target.case, case) and ours is not None and theirs is not None:
                ratio, other = ours / theirs, f"{target.against} {target.theirs or ''}".strip()
                aim, got = _said(target.factor, other), _said(ratio, other)
                found.append(Verdict(case, target.variant, "<= " + aim, got, ratio <= target.factor))
        for limit in LIMITS:
            value = _figure(results, case, limit)
            if _applies(limit.case, case) and value is not None:
                aim, got = _shown(limit.figure, limit.most), _shown(limit.figure, value)
                found.append(Verdict(case, limit.variant, f"{limit.figure} <= {aim}", got, _within(limit, value)))
    return found


def _applies(pattern: str, case: str) -> bool:
    return case.startswith(pattern) if pattern.endswith("-") else case == pattern


def _said(ratio: float, other: str) -> str:
    return f"{other} / {1 / ratio:.3g}" if ratio < 1 else f"{ratio:.3g} x {other}"


def _figure(results: list[Measured], case: str, limit: Limit) -> float | None:
    wanted = (case, "ours", limit.variant)
    found = next((result for result in results if (result.case, result.contender, result.variant) == wanted), None)
    if found is None or limit.figure not in _TIMES:
        return found and found.figures.get(limit.figure)
    return median(getattr(found, limit.figure)) if found.seconds else None


def _within(limit: Limit, value: float) -> bool:
    # Rounded to megabytes, because the store adds a few bytes of metadata to every object.
    return value <= limit.most if limit.figure in _TIMES else round(value / MB) <= limit.most / MB


def _shown(figure: str, value: float) -> str:
    return f"{value * 1000:.3g} ms" if figure in _TIMES else f"{value / MB:.0f} MB"
