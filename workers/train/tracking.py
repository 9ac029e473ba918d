"""RunLog: a run's metrics by step, as TensorBoard's event files and as a table that a script can draw from."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from single_controller.base.closing import Closing
from workers.extras import require


class RunLog(Closing):
    """Metrics by step. It belongs into the driver's script, which alone has those of all ranks. A context manager.

    Args:
        folder: for TensorBoard's event files; None writes none.

    Attributes:
        steps: what was logged: step -> metrics.

    Raises:
        ImportError: a folder is given and tensorboard is not installed.
    """

    def __init__(self, folder: str | Path | None = None) -> None:
        self.steps: dict[int, dict[str, float]] = {}
        self._seconds: dict[str, float] = {}
        self._writer: Any = None
        if folder is not None:
            require("tensorboard", extra="tracking")
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(str(folder))

    @contextmanager
    def timed(self, part: str) -> Iterator[None]:
        """Count the seconds that run inside towards ``seconds/<part>`` of the step that is logged next."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self._seconds[part] = self._seconds.get(part, 0.0) + time.perf_counter() - began

    def log(self, step: int, metrics: Mapping[str, float]) -> dict[str, float]:
        """Note a step.

        Args:
            step: its number.
            metrics: by name. With ``tokens`` among them, and something `timed`, ``tokens_per_second`` is added.

        Returns:
            The metrics, with the seconds of each part.
        """
        noted = {name: float(value) for name, value in metrics.items()}
        noted |= {f"seconds/{part}": seconds for part, seconds in self._seconds.items()}
        whole = sum(self._seconds.values())
        if whole and "tokens" in noted:
            noted["tokens_per_second"] = noted["tokens"] / whole
        self._seconds = {}
        self.steps[step] = noted
        if self._writer is not None:
            for name, value in noted.items():
                self._writer.add_scalar(name, value, step)
            self._writer.flush()  # a run that is killed has logged what it has done
        return noted

    def column(self, name: str) -> list[float]:
        """A metric by step, in the order of the steps that have it."""
        return [metrics[name] for _, metrics in sorted(self.steps.items()) if name in metrics]

    def close(self) -> None:
        """Finish the files."""
        if self._writer is not None:
            self._writer.close()
