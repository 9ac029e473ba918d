"""RunLog: a run's metrics by step, in TensorBoard event files and in memory."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from single_controller.call.state import Closing
from workers.extras import require


class RunLog(Closing):
    """Metrics by step. Use it in the driver's script, which has the metrics of all ranks. A context manager.

    Args:
        folder: for TensorBoard event files; None writes none.

    Attributes:
        steps: step -> logged metrics.

    Raises:
        ImportError: ``folder`` is set and tensorboard is not installed.
    """

    def __init__(self, folder: str | Path | None = None) -> None:
        self.steps: dict[int, dict[str, float]] = {}
        self._seconds: dict[str, float] = {}
        self._writer: Any = None
        if folder is not None and not isinstance(folder, (str, Path)):
            raise TypeError(f"RunLog: folder is {folder!r:.80}; pass a path, or None to write no files")
        if folder is not None:
            require("tensorboard", extra="tracking")
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(str(folder))

    @contextmanager
    def timed(self, part: str) -> Iterator[None]:
        """Add the time spent inside to ``seconds/<part>`` of the next logged step."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self._seconds[part] = self._seconds.get(part, 0.0) + time.perf_counter() - began

    def log(self, step: int, metrics: Mapping[str, float]) -> dict[str, float]:
        """Log a step.

        Args:
            step: number of the step.
            metrics: by name. If they have ``tokens`` and something was `timed`, ``tokens_per_second`` is added.

        Returns:
            The metrics, including the seconds of each part.
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
            self._writer.flush()  # a killed run keeps what it has logged
        return noted

    def column(self, name: str) -> list[float]:
        """Return the values of a metric, in order of the steps that have it."""
        return [metrics[name] for _, metrics in sorted(self.steps.items()) if name in metrics]

    def close(self) -> None:
        """Close the files."""
        if self._writer is not None:
            self._writer.close()
