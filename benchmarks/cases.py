"""The cases, at full size and at a small one for smoke tests."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

MB = 1024**2


@dataclass(frozen=True)
class Case:
    """One case.

    Attributes:
        name: its short name, for ``--only``.
        title: its name in the table.
        kind: the adapters' method that sets it up; contenders without that method are left out.
        parameters: keyword arguments of that method.
        reference: contender (and variant) that ratios refer to.
        by_variant: whether ratios refer to the reference's variant of the same name, up to the first comma.
        together: whether all contenders are alive at the same time. With large data they are not: each round starts,
            warms up, measures and ends one contender after the other.
        repeats: timed runs per round; with ``together``, the number of short rounds per round.
        probes: "store" for bytes in Ray's object store, "driver" for the driver's own memory.
    """

    name: str
    title: str
    kind: str
    parameters: dict[str, Any]
    reference: tuple[str, str | None] = ("memcpy", None)
    by_variant: bool = False
    together: bool = False
    repeats: int = 5
    probes: tuple[str, ...] = ()

    @property
    def moves_data(self) -> bool:
        """Whether the case moves data between processes."""
        return "nbytes" in self.parameters


def all_cases(quick: bool = False) -> list[Case]:
    """Return the cases, in the order of the table.

    Args:
        quick: smoke test: a sixteenth of the bytes, fewer workers, and most contenders alive together.
    """
    quarter = 16 * MB if quick else 256 * MB
    sizes = (2,) if quick else (4, 8)
    bare = ("ray", "bare actors")
    cases = [
        Case(
            "broadcast",
            f"broadcast of {quarter // MB} MB to 4 ranks",
            "broadcast",
            {"nbytes": quarter, "ranks": 4},
            together=quick,
        ),
        Case(
            "echo",
            f"echo of {2 * quarter // MB} MB over dp 4",
            "echo",
            {"nbytes": 2 * quarter, "ranks": 4},
            together=quick,
        ),
        *(
            Case(
                f"types-{size // MB}",
                f"echo of {size // MB} MB over dp 4, by type",
                "types",
                {"nbytes": size, "ranks": 4},
                reference=("ours", "views, a tensor"),
                together=True,
            )
            for size in ((4 * MB,) if quick else (4 * MB, 64 * MB))
        ),
        Case(
            "mesh",
            f"dp2 x tp2 x pp2, {quarter // MB} MB in and out",
            "mesh",
            {"nbytes": quarter, "dp": 2, "tp": 2, "pp": 2},
            probes=("store",),
        ),
    ]
    cases += [
        Case(
            f"chain-{first}-{second}",
            f"chain of {quarter // MB} MB, {first} -> {second} ranks",
            "chain",
            {"nbytes": quarter, "first": first, "second": second},
            probes=("driver",),
            together=quick,
        )
        for first, second in ((4, 4), (4, 2), (2, 4))
    ]
    cases += [
        Case(
            f"start-{ranks}" + ("-torch" if torch else ""),
            f"start-up of {ranks} workers, {'torch imported' if torch else 'no torch'}",
            "start",
            {"ranks": ranks, "torch": torch},
            reference=bare,
            together=True,
            repeats=2,
        )
        for torch in (False, True)
        for ranks in sizes
    ]
    cases += [_small_calls(ranks) for ranks in ((1, 4) if quick else (1, 2, 4, 8, 16, 32))]
    cases.append(
        Case(
            "plan",
            "plan and cut, no processes",
            "plan",
            {"sizes": [1024, 4096]},
            reference=("ours", "1,024 ranks"),
            together=True,
        )
    )
    return cases


def host_cases() -> list[Case]:
    """Return the cases on two hosts."""
    return [_small_calls(ranks, " on two hosts") for ranks in (2, 4)]


def _small_calls(ranks: int, where: str = "") -> Case:
    return Case(
        f"empty-{ranks}",
        f"small calls, N = {ranks}{where}",
        "small_calls",
        {"ranks": ranks},
        reference=("ray", None),
        by_variant=True,
        together=True,
    )
