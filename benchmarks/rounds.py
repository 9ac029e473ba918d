"""Schedule the runs: each round measures every contender, so that a drift of the machine affects all of them.

In small cases all contenders stay alive and take turns, run by run. In large cases (``together=False``) each contender
is started for its turn, with its own Ray, because all object stores together would not fit into memory.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.cases import Case
from benchmarks.protocol import ContenderError, Session
from benchmarks.roster import Contender
from benchmarks.venvs import python_for

START_TIMEOUT = 180.0
CALL_TIMEOUT = 600.0
ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ADDRESS": "local",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "PYTHONWARNINGS": "ignore",
}
PROBING = {"BENCHMARKS_PROBING": "1"}

logger = logging.getLogger(__name__)


@dataclass
class Measured:
    """The measurements of one variant of one contender in one case.

    Attributes:
        seconds: seconds of each timed run, in the order of the rounds.
        cpu: CPU seconds of the contender's own process, the driver, in each timed run, per rank.
        figures: results of the probes, in bytes.
        error: why measurements are missing.
    """

    case: str
    contender: str
    variant: str
    seconds: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    figures: dict[str, Any] = field(default_factory=dict)
    error: str | None = None


class Rounds:
    """One run of all cases.

    Args:
        contenders: the contenders to measure.
        rounds: number of rounds over all contenders in each case.
        warm: maximum seconds of warm-up for a variant; it runs at least twice.
        budget: seconds after which a contender's turn ends, but not before two runs.
        logs: folder for the contenders' output.
    """

    def __init__(self, contenders: Iterable[Contender], rounds: int, warm: float, budget: float, logs: Path) -> None:
        self.contenders = list(contenders)
        self.versions: dict[str, dict[str, str]] = {}
        self._rounds = rounds
        self._warm = warm
        self._budget = budget
        self._logs = logs
        self._cases: list[str] = []
        self._alive: dict[str, Session] = {}
        self._found: dict[tuple[str, str, str], Measured] = {}

    @property
    def results(self) -> list[Measured]:
        """The measurements so far, sorted by case and contender."""
        order = [contender.name for contender in self.contenders]
        return sorted(
            self._found.values(), key=lambda found: (self._cases.index(found.case), order.index(found.contender))
        )

    def run(self, case: Case) -> None:
        """Measure one case."""
        self._cases.append(case.name)
        if case.together:
            self._together(case)
        else:
            self.close()
            self._in_turn(case)

    def close(self) -> None:
        """End all contenders."""
        for name in list(self._alive):
            self._end(name)

    def _together(self, case: Case) -> None:
        turns = [(contender, self._prepare(contender, case)) for contender in self._who(case)]
        for contender, variants in turns:
            for variant in variants:
                self._ask(contender, case, variant, "warm", least=1, seconds=0.0)
        logger.info("%s: %d rounds", case.name, self._rounds * case.repeats)
        for _ in range(self._rounds * case.repeats):
            for contender, variants in turns:
                for variant in variants:
                    self._measure(contender, case, variant, runs=1)
        for contender, variants in turns:
            self._probe(contender, case, variants)
            self._ask(contender, case, "", "release")

    def _in_turn(self, case: Case) -> None:
        for number in range(self._rounds):
            logger.info("%s: round %d", case.name, number + 1)
            for contender in self._who(case):
                for variant in self._prepare(contender, case):
                    self._ask(contender, case, variant, "warm", least=2, seconds=self._warm)
                    self._measure(contender, case, variant, runs=case.repeats)
                self._end(contender.name)
        if case.probes:
            logger.info("%s: memory", case.name)
            for contender in self._who(case):
                variants = self._prepare(contender, case, PROBING)
                for variant in variants:
                    self._ask(contender, case, variant, "warm", least=2, seconds=0.0)
                self._probe(contender, case, variants)
                self._end(contender.name)

    def _who(self, case: Case) -> list[Contender]:
        return [contender for contender in self.contenders if case.moves_data or not contender.data_only]

    def _probe(self, contender: Contender, case: Case, variants: Iterable[str]) -> None:
        for variant in variants if case.probes else ():
            figures = self._ask(contender, case, variant, "probe", probes=list(case.probes))
            self._measured(case, contender, variant).figures.update(figures or {})

    def _prepare(self, contender: Contender, case: Case, env: dict[str, str] | None = None) -> list[str]:
        """Set a case up in a contender, starting it if needed. Returns the names of its variants."""
        try:
            if contender.name not in self._alive:
                self._start(contender, env or {})
        except (ContenderError, RuntimeError) as error:
            self._failed(contender, case, "", error)
            return []
        return self._ask(contender, case, "", "prepare", kind=case.kind, parameters=case.parameters) or []

    def _measure(self, contender: Contender, case: Case, variant: str, runs: int) -> None:
        taken = self._ask(contender, case, variant, "measure", runs=runs, seconds=self._budget)
        found = self._measured(case, contender, variant)
        for seconds, cpu in taken or []:
            found.seconds.append(seconds)
            found.cpu.append(cpu)

    def _measured(self, case: Case, contender: Contender, variant: str) -> Measured:
        key = (case.name, contender.name, variant)
        return self._found.setdefault(key, Measured(*key))

    def _ask(self, contender: Contender, case: Case, variant: str, command: str, **given: Any) -> Any:
        """Return the contender's response. If it is not alive, or fails, record the error and return None."""
        session = self._alive.get(contender.name)
        if session is None:
            return None
        if command in ("warm", "measure", "probe"):
            given["variant"] = variant
        try:
            return session.ask(command, CALL_TIMEOUT, **given)
        except ContenderError as error:
            self._failed(contender, case, variant, error)
            return None

    def _failed(self, contender: Contender, case: Case, variant: str, error: Exception) -> None:
        logger.warning("%s, %s %s: %s", case.name, contender.name, variant, error)
        self._measured(case, contender, variant).error = str(error)
        session = self._alive.get(contender.name)
        if session is not None and session.ended:
            self._end(contender.name)

    def _start(self, contender: Contender, env: dict[str, str]) -> None:
        log = self._logs / f"{contender.name}.log"
        session = Session(python_for(contender), contender.module, {**ENVIRONMENT, **contender.env, **env}, log)
        self._alive[contender.name] = session
        self.versions.setdefault(contender.name, session.ask("versions", START_TIMEOUT))

    def _end(self, name: str) -> None:
        session = self._alive.pop(name, None)
        if session is not None:
            session.close()
