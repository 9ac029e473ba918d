"""Loggers: where a run's metrics go besides its folder. Each library is an optional extra, imported when it is used.

Their own settings hold: where W&B sends (``WANDB_MODE=offline`` for nowhere), ``MLFLOW_TRACKING_URI``,
``SWANLAB_MODE``, and so on. Each continues the run of a resumed folder.
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from single_controller import GroupMetrics, WorkerGroup
from workers.extras import require
from workers.tracking.run_folder import StepLines


@dataclass(frozen=True)
class RunAbout:
    """What a logger shows of a run.

    Attributes:
        project: what the run is grouped under.
        name: of the run.
        id: the same when the run is resumed.
        resumed: whether a run of before goes on; True for a folder outside that of the run, which may have any runs.
        folder: for the logger's files.
        config: the configuration.
    """

    project: str
    name: str
    id: str
    resumed: bool
    folder: Path
    config: Mapping[str, Any]


class Logger(ABC):
    """Sends metrics somewhere.

    Args:
        about: the run.

    Raises:
        ImportError: the library is not installed; the message names the extra.
    """

    extra: str | None = None
    """The extra to install, and the name of its module."""
    replaces = True
    """Whether a step that is sent again replaces what was sent before. If not, it is not sent again."""

    def __init__(self, about: RunAbout) -> None:
        self.about = about
        self.library: Any = None if self.extra is None else require(self.extra, extra=self.extra)

    @abstractmethod
    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Send the metrics of a step. A step smaller than before was repeated."""

    def watch(self, group: WorkerGroup) -> None:  # noqa: B027  (most loggers take no groups)
        """The run has this group. By default, nothing is sent of it."""

    def close(self) -> None:  # noqa: B027
        """Send what is left. By default, nothing is."""


class TensorBoardLogger(Logger):
    """Event files in the folder ``tensorboard``. Of a step that is repeated, TensorBoard shows the later values."""

    _writer: Any = None
    _last: int | None = None

    def __init__(self, about: RunAbout) -> None:
        super().__init__(about)
        require("tensorboard", extra="tracking")
        from torch.utils.tensorboard import SummaryWriter

        self._make = SummaryWriter
        # If there are old events, `log` creates the writer: only `log` knows the step from which they are purged.
        if not any(about.folder.glob("events.out.tfevents.*")):
            self._writer = SummaryWriter(str(about.folder))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        if self._writer is None or (self._last is not None and step <= self._last):
            if self._writer is not None:
                self._writer.close()
            another = self._last is None and not self.about.resumed
            # Of before, the steps from this one on are not shown any more; of another run, none is.
            self._writer = self._make(str(self.about.folder), purge_step=min(step, 0) if another else step)
        self._last = step
        try:
            for name, value in metrics.items():
                self._writer.add_scalar(name, value, step)
            self._writer.flush()  # a killed run keeps what it has logged
        except Exception:
            self._writer = None  # its thread has ended with the error: the next step gets another one
            raise

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


class WandbLogger(Logger):
    """Weights & Biases."""

    extra = "wandb"
    replaces = False
    folder_argument = "dir"
    """What the library calls the folder of its files."""

    def __init__(self, about: RunAbout) -> None:
        super().__init__(about)
        # Use the folder's id, so that a resumed run continues the same run of the service.
        self._run = self.library.init(project=about.project, resume="allow", **self._arguments(about))

    def _arguments(self, about: RunAbout) -> dict[str, Any]:
        about.folder.mkdir(parents=True, exist_ok=True)
        folder = {self.folder_argument: str(about.folder)}
        return {"name": about.name, "id": about.id, "config": dict(about.config), **folder}

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        self._run.finish()


class MlflowLogger(Logger):
    """MLflow: at ``MLFLOW_TRACKING_URI``, or else in a file of the folder ``mlflow``."""

    extra = "mlflow"
    replaces = False

    def __init__(self, about: RunAbout) -> None:
        super().__init__(about)
        uri = os.environ.get("MLFLOW_TRACKING_URI")
        artifacts = None
        if uri is None:
            about.folder.mkdir(parents=True, exist_ok=True)
            uri = f"sqlite:///{(about.folder / 'mlflow.db').resolve()}"
            artifacts = (about.folder / "artifacts").resolve().as_uri()
        self._client = self.library.MlflowClient(tracking_uri=uri)
        experiment = self._client.get_experiment_by_name(about.project)
        number = (
            self._client.create_experiment(about.project, artifacts) if experiment is None else experiment.experiment_id
        )
        # MLflow assigns its own run ids, so store the folder's id as a tag.
        found = self._client.search_runs([number], f"tags.run_folder = '{about.id}'", max_results=1)
        if found:
            self._run = found[0].info.run_id
            self._client.update_run(self._run, status="RUNNING")
            return
        self._run = self._client.create_run(number, tags={"run_folder": about.id}, run_name=about.name).info.run_id
        params = [self.library.entities.Param(_name(name), str(value)[:5000]) for name, value in about.config.items()]
        for begin in range(0, len(params), 100):  # what a server takes at once
            self._client.log_batch(self._run, params=params[begin : begin + 100])

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        now = int(1000 * time.time())
        made = [self.library.entities.Metric(_name(name), value, now, step) for name, value in metrics.items()]
        for begin in range(0, len(made), 1000):
            self._client.log_batch(self._run, metrics=made[begin : begin + 1000])

    def close(self) -> None:
        self._client.set_terminated(self._run)


def _name(name: str) -> str:
    """A name as MLflow takes it."""
    return re.sub(r"[^\w\-. /:]", "_", name)


class SwanLabLogger(WandbLogger):
    """SwanLab, whose functions are those of W&B. Its files are in the folder ``swanlab``."""

    extra = "swanlab"
    folder_argument = "log_dir"


class TrackioLogger(WandbLogger):
    """Trackio, whose functions are those of W&B. Its files are in ``TRACKIO_DIR``, or in the cache of Hugging Face."""

    extra = "trackio"

    def _arguments(self, about: RunAbout) -> dict[str, Any]:
        config = json.loads(json.dumps(dict(about.config), default=str))
        quiet = dict.fromkeys(("embed", "auto_log_gpu", "auto_log_cpu"), False)
        return {"name": f"{about.name}-{about.id}", "config": config, **quiet}


class JsonLogger(Logger):
    """``metrics.jsonl`` in the folder ``json``: a line ``{"step", "time", ...metrics}`` for each step, in the chosen
    names."""

    def __init__(self, about: RunAbout) -> None:
        super().__init__(about)
        about.folder.mkdir(parents=True, exist_ok=True)
        self._lines = StepLines(about.folder / "metrics.jsonl")
        self._first = True

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        if self._first or step in self._lines.offsets:
            another = self._first and not self.about.resumed
            self._lines.drop(min([step, *self._lines.offsets]) if another else step)
        self._first = False
        self._lines.add_step(step, metrics)

    def close(self) -> None:
        self._lines.close()


class ConsoleLogger(Logger):
    """A line for each step on stderr."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        said = (f"{name} {value:.4g}" for name, value in metrics.items())
        sys.stderr.write(f"step {step}: {', '.join(said)}\n")


class RayLogger(Logger):
    """Ray's metrics, which an existing Prometheus collects from its nodes: those of steps, and of the groups."""

    def __init__(self, about: RunAbout) -> None:
        super().__init__(about)
        self._metrics = GroupMetrics()

    def watch(self, group: WorkerGroup) -> None:
        self._metrics.add(group)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._metrics.log(step, metrics, self.about.name)

    def close(self) -> None:
        """Look at the groups for the last time."""
        self._metrics.close()


LOGGERS: dict[str, type[Logger]] = {
    "tensorboard": TensorBoardLogger,
    "wandb": WandbLogger,
    "mlflow": MlflowLogger,
    "swanlab": SwanLabLogger,
    "trackio": TrackioLogger,
    "json": JsonLogger,
    "console": ConsoleLogger,
    "ray": RayLogger,
}


def check_loggers(names: Any) -> list[str]:
    """Return the names of loggers, each once.

    Raises:
        ValueError: one is unknown.
        TypeError: it is no list of names.
    """
    if isinstance(names, str) or not all(isinstance(name, str) for name in names):
        raise TypeError(f"loggers={names!r}: pass a list of names, such as ['tensorboard', 'wandb']")
    for name in names:
        if name not in LOGGERS:
            raise ValueError(f"loggers has {name!r}: expected some of {', '.join(LOGGERS)}")
    return list(dict.fromkeys(names))
