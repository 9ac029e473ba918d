"""RunLog: what a run leaves behind: its folder (docs/runs.md), and what other loggers get.

Thread: a `RunLog` with a folder has a daemon thread named "run-log", which writes what happens between two steps:
checkpoints, deaths, calls that have ended, alarms. It ends when the log is closed or garbage collected.
Lock: ``_lock`` protects the folder's files and what is remembered of the groups, which that thread, the watchers of the
groups and the caller's thread use. No worker is called under it: one that hangs must not stop that thread.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from operator import index
from pathlib import Path
from typing import Any, Self

import numpy as np

from dispatch.checks import check_count
from single_controller import GroupClosedError, SingleControllerError
from single_controller.call.state import Closing
from workers.tracking.alarms import Alarm, Alarms
from workers.tracking.loggers import LOGGERS, Logger, RunAbout, check_loggers
from workers.tracking.metric_names import NAMES, BatchNumbers, renamed
from workers.tracking.run_about import about_process, without_secrets
from workers.tracking.run_folder import RunFolder
from workers.tracking.samples import RowNote, hexadecimal, step_samples, with_record_rows
from workers.tracking.timeline import CallLines

logger = logging.getLogger(__name__)

TICK_SECONDS = 2.0
"""How often the thread looks."""


class RunLog(Closing):
    """Metrics by step, and the run's folder. Use it in the driver's script, which has the metrics of all ranks. A
    context manager.

    Opening the folder of a killed run continues the run: the first step that is logged replaces the entries of that
    step and of all later steps. If ``args`` load no checkpoint, a new run begins, which replaces the old one. Set
    ``load`` after `RayTrainGroup.attach` too, to continue the run. A step that is logged again also replaces itself and
    all later steps.

    Args:
        folder: for TensorBoard event files; None writes none, unless ``loggers`` names tensorboard.
        run_dir: the run's folder; "auto" for a new one in ``runs/``. None writes no folder.
        loggers: where the metrics are also sent: any of tensorboard, wandb, mlflow, swanlab, trackio, json, console,
            ray. Their files are written into the run's folder, except those of trackio.
        metric_names: names that the loggers get: "own", "verl" or "slime"; see `workers.tracking.metric_names`. The
            folder has those of this library.
        name: of the run; by default that of its folder.
        project: the name under which loggers group runs.
        args: the configuration to record.
        tokenizer: its method ``decode`` turns token ids into the text of the samples; with None, only ids are recorded.
        record_rows: how many rows of each step are recorded; None for all, which `replay` needs, and 0 for none.
        keep_steps: how many of the latest steps keep their samples.
        keep_bytes: size of all samples, in bytes, above which the oldest are dropped.

    Attributes:
        steps: step -> logged metrics, of this process.
        run_dir: the run's folder; None without one.

    Raises:
        ImportError: a logger's library is not installed; the message names the extra.
        TypeError, ValueError: an argument is invalid.
        RunFolderInUse: another process writes the folder.
        RunFolderError: the folder has a run of another format.
    """

    def __init__(
        self,
        folder: str | Path | None = None,
        *,
        run_dir: str | Path | None = "auto",
        loggers: Sequence[str] = (),
        metric_names: str = "own",
        name: str | None = None,
        project: str = "single-controller",
        args: Any = None,
        tokenizer: Any = None,
        record_rows: int | None = 64,
        keep_steps: int = 200,
        keep_bytes: int = 1 << 30,
    ) -> None:
        for what, path in (("folder", folder), ("run_dir", run_dir)):
            if path is not None and not isinstance(path, (str, Path)):
                raise TypeError(f"RunLog: {what} is {path!r:.80}; pass a path, or None to write no files")
        if metric_names not in NAMES:
            raise ValueError(f"metric_names={metric_names!r}: expected one of {', '.join(NAMES)}")
        chosen = check_loggers(loggers)
        if folder is not None and "tensorboard" not in chosen:
            chosen.append("tensorboard")
        needy = [
            one for one in chosen if one not in ("console", "ray") and not (one == "tensorboard" and folder is not None)
        ]
        if run_dir is None and needy:
            raise ValueError(f"loggers has {needy[0]!r}, whose files go into the run's folder, but run_dir is None")
        self.steps: dict[int, dict[str, float]] = {}
        self._seconds: dict[str, float] = {}
        self._parts: list[dict[str, Any]] = []
        self._names, self._name = metric_names, name
        self._config = without_secrets(_plain(args))
        self._decode: Callable[[Sequence[int]], str] | None = None if tokenizer is None else tokenizer.decode
        self._limit = None if record_rows is None else check_count("record_rows", record_rows, 0)
        self._lock = threading.RLock()
        # Each group with its calls and its generation. Weak, because workers end when nobody has their group
        self._groups: list[tuple[weakref.ref[Any], CallLines, int | None]] = []
        self._watchers: list[Closing] = []
        self._actor: Any = None
        self._train_groups: list[Any] = []
        self._managers: list[Any] = []
        self._version, self._checkpoint = 0, None  # of the actor, that events are written of
        self._marked: dict[int, int | None] = {}  # step -> the actor's weight version when its rows were marked
        self._known_tokens = np.zeros(0, bool)
        self._failed: set[str] = set()
        bound = int(self._config.get("max_staleness") or 0) if self._config.get("async_rollout") else 0
        self._alarms = Alarms(bound)
        self._folder: RunFolder | None = None
        self.run_dir: Path | None = None
        if run_dir is not None:
            about = about_process(self._config, name)
            about["vocabulary"] = None if tokenizer is None else {"file": "vocabulary.jsonl"}
            self._folder = RunFolder(
                about=about,
                resume=args is None or self._config.get("load") is not None,
                keep_steps=check_count("keep_steps", keep_steps),
                keep_bytes=check_count("keep_bytes", keep_bytes),
                path=_new_folder() if run_dir == "auto" else Path(run_dir),  # last, because it creates the folder
            )
            self.run_dir = self._folder.path
            self._known_tokens = np.bincount(np.array(self._folder.tokens(), int)) > 0
        self._loggers: dict[str, Logger] = {}
        self._told = None if self._folder is None else self._folder.last_step  # the last step that loggers have
        try:
            for one in chosen:
                self._loggers[one] = LOGGERS[one](self._about(one, folder, project))
        except BaseException:
            self._end("a logger could not be opened")
            raise
        self._stop = threading.Event()
        _open_logs.add(self)
        if self._folder is not None:
            # Pass a weak reference. Otherwise, the thread would keep an unclosed log alive, and its folder locked.
            threading.Thread(target=_run, args=(weakref.ref(self), self._stop), name="run-log", daemon=True).start()

    @classmethod
    def from_args(cls, args: Any, *, run_dir: str | Path | None = "auto", tokenizer: Any = None) -> Self:
        """Open the log that a configuration asks for: ``tensorboard_dir``, ``run_dir``, ``loggers``, ``metric_names``,
        ``record_rows`` and ``record_steps``.

        Args:
            args: the configuration.
            run_dir: the folder if the configuration says "auto".
            tokenizer: see the class.

        Raises:
            TrainArgsError: the configuration is invalid.
        """
        from workers.train.args import read_args

        args = read_args(args)
        return cls(
            args.tensorboard_dir,
            run_dir=run_dir if args.run_dir == "auto" else args.run_dir,
            loggers=list(args.loggers),
            metric_names=args.metric_names,
            args=args,
            tokenizer=tokenizer,
            record_rows=args.record_rows,
            keep_steps=args.record_steps,
        )

    # --- for the driver's script --------------------------------------------------------------------------

    def watch(self, *watched: Any) -> None:
        """Record what these do: calls, deaths, updates of the weights, checkpoints, and what is known of samples.

        Args:
            watched: train groups, rollout managers, and worker groups.
        """
        if self._folder is None and not self._loggers:
            return
        ranks: dict[str, Any] | None = None if self._folder is None else self._folder.run.get("ranks")
        for one in watched:
            if hasattr(one, "async_train"):
                self._train_groups.append(one)
                if one.role == "actor":
                    ranks = _ranks_of(one)
                    with self._lock:  # set these together: the thread compares the actor's checkpoint with the last one
                        self._actor, self._version, self._checkpoint = one, one.weight_version, one.last_checkpoint
                self._watch_group(one.worker_group)
            elif hasattr(one, "row_notes"):
                self._managers.append(one)
                self._watch_group(one.group)
            else:
                self._watch_group(one)
        with self._lock, self._saving():
            if self._folder is not None:
                self._folder.update(groups=list(dict.fromkeys(lines.name for _, lines, _ in self._groups)), ranks=ranks)

    @contextmanager
    def timed(self, part: str) -> Iterator[None]:
        """Add the time spent inside to ``seconds/<part>`` of the next logged step."""
        began, at = time.perf_counter(), time.time()
        try:
            yield
        finally:
            self._seconds[part] = self._seconds.get(part, 0.0) + time.perf_counter() - began
            if self._folder is not None:
                self._parts.append({"group": None, "rank": None, "method": part, "start": at, "end": time.time()})

    def mark(self, step: int, batch: Any) -> Any:
        """Choose the rows of a batch that will be recorded, so that the trainer keeps what it computes for them.

        Args:
            step: of the run. For a `replay`, it must be the id of the rollout that is trained on.
            batch: rollout data.

        Returns:
            The batch to train on, and to pass to `log`: with the entries ``record_rows`` and ``record_step``, if
            rows are recorded.
        """
        if self._folder is None or self._limit == 0:
            return batch
        step = index(step)
        marked = with_record_rows(batch, self._limit, step)
        self._marked[step] = self._weight_version
        for manager in self._managers:
            manager.row_notes.same(batch, marked)
        return marked

    def log(self, step: int, metrics: Mapping[str, float], batch: Any = None) -> dict[str, float]:
        """Log a step.

        Args:
            step: number of the step; with a batch, that of `mark`. Log it before you send the second rollout after it:
                the ranks keep what they have computed for two.
            metrics: by name. If they have ``tokens`` and something was `timed`, ``tokens_per_second`` is added.
            batch: what was trained on, from `mark`: its rows are recorded, and metrics of lengths and rewards added.

        Returns:
            The metrics, including the seconds of each part.

        Raises:
            TypeError: the step or a metric is no number.
        """
        if isinstance(step, bool) or not hasattr(step, "__index__"):
            raise TypeError(f"RunLog.log: step is {step!r:.80}; pass a whole number")
        step = index(step)
        numbers = None if batch is None else BatchNumbers.of(batch)
        noted = {} if numbers is None else numbers.metrics()
        noted |= {name: _number(name, value) for name, value in metrics.items()}
        noted |= {f"seconds/{part}": seconds for part, seconds in self._seconds.items()}
        whole = sum(self._seconds.values())
        if whole and "tokens" in noted:
            noted["tokens_per_second"] = noted["tokens"] / whole
        self._seconds = {}
        folder = self._folder  # it may have steps of an earlier process
        if step in self.steps or (folder is not None and folder.has(step)):
            for later in [one for one in self.steps if one >= step]:
                del self.steps[later]
        self.steps[step] = noted
        self._watch_new_workers()
        ranks: dict[str, Any] | None = None
        samples: tuple[dict[str, np.ndarray], dict[str, Any]] | None = None
        # Do not hold the lock here: `_ranks_of`, `_samples` and `_of_actor` call the ranks.
        with suppress(SingleControllerError, RuntimeError):  # the next call of the actor raises it too
            ranks = None if self._actor is None else _ranks_of(self._actor)  # it may have shrunk or grown
        with self._saving(None if batch is None else "samples"):
            samples = self._samples(step, batch, self._marked.pop(step, self._weight_version))
        events = self._of_actor()
        with self._lock, self._saving("folder"):
            if self._folder is not None:
                self._write(self._folder, step, noted, samples, events)
                if ranks not in (None, self._folder.run["ranks"]):
                    self._folder.update(ranks=ranks)
        # Raise alarms without the lock, because a logging handler may take long.
        with self._lock:
            alarms = self._alarms.step(noted, time.monotonic())
        for alarm in alarms:
            self._raise(alarm, step)
        if self._loggers:
            told = renamed(self._names, noted, numbers, self._config)
            again = self._told is not None and step <= self._told
            self._told = step if self._told is None else max(step, self._told)
            for name, one in self._loggers.items():
                if one.replaces or not again:
                    self._tell(name, partial(one.log, step, told))
        return noted

    def event(self, kind: str, text: str, step: int | None = None, **fields: Any) -> None:
        """Write an event into the folder.

        Args:
            kind: of the event.
            text: a line for people.
            step: of the run, if it belongs to one.
            fields: further entries, as JSON writes them.
        """
        with self._lock, self._saving():
            if self._folder is not None:
                self._folder.event(kind, text, step, **fields)

    def column(self, name: str) -> list[float]:
        """Return the values of a metric, in order of the steps that have it."""
        return [metrics[name] for _, metrics in sorted(self.steps.items()) if name in metrics]

    def close(self) -> None:
        """Close the files."""
        self._end("finished")

    def __exit__(self, *error: Any) -> None:
        finished = error[1] is None or (isinstance(error[1], SystemExit) and error[1].code in (None, 0))
        self._end("finished" if finished else f"{type(error[1]).__name__}: {error[1]}"[:2000])

    # --- the inside -----------------------------------------------------------------------------------------

    def _about(self, logger_name: str, folder: str | Path | None, project: str) -> RunAbout:
        run: Mapping[str, Any] = {"name": self._name} if self._folder is None else self._folder.run
        where = Path(folder) if logger_name == "tensorboard" and folder is not None else None
        return RunAbout(
            project,
            run["name"] or "run",
            run.get("id", "run"),
            where is not None or (self._folder is not None and self._folder.resumed),
            (where or (self.run_dir or Path()) / logger_name).absolute(),
            self._config,
        )

    def _watch_group(self, group: Any) -> None:
        # Watch the whole group: a role's group is a new object on each access, and a death affects all roles.
        group = getattr(group, "_whole", group)
        with self._lock:
            if any(known() is group for known, _, _ in self._groups):
                return
            with self._saving():
                self._look()  # or the last calls of a group that is forgotten here would be lost
            # A closed or collected group of this name is the one that this one replaces: its calls are counted on.
            ended = [one for one in self._groups if one[1].name == group.name and getattr(one[0](), "closed", True)]
            first = max((lines.count for _, lines, _ in ended), default=0)
            self._groups = [one for one in self._groups if one not in ended]
            generation = None if ended else group.generation  # with None, `_look` writes that it was replaced
            self._groups.append((weakref.ref(group), CallLines(group, first), generation))
        # A rank takes 400 bytes of each call.
        group.record_ranks(max(4, min(100, 6400 // max(group.world_size, 1))), at_least=True)
        log, watched = weakref.ref(self), group.name

        def died(error: Any) -> None:  # weak, or the watcher's thread would keep the log, and with it all of its groups
            if (one := log()) is not None:
                one._died(watched, error)

        self._watchers.append(group.watch(died))
        for name, one in self._loggers.items():
            self._tell(name, partial(one.watch, group))

    def _watch_new_workers(self) -> None:
        """Watch the groups that train groups have created again, as `RayTrainGroup.restart` does."""
        for one in self._train_groups:
            with suppress(GroupClosedError):
                self._watch_group(one.worker_group)

    def _died(self, group: str, error: Any) -> None:
        host = getattr(error, "host", None)
        for rank in getattr(error, "ranks", ()):
            self.event("death", str(error), group=group, rank=rank, host=host, error=type(error).__name__)

    @property
    def _weight_version(self) -> int | None:
        version: int | None = None if self._actor is None else self._actor.weight_version
        return version

    def _samples(
        self, step: int, batch: Any, version: int | None
    ) -> tuple[dict[str, np.ndarray], dict[str, Any]] | None:
        """Return the samples of a batch, with what the ranks have computed. Not under the lock: it calls the ranks."""
        if self._folder is None or batch is None or "record_rows" not in batch.keys():  # noqa: SIM118  (a TensorDict)
            return None
        computed: Mapping[int, Mapping[str, np.ndarray]] = {}
        if self._actor is not None:
            with suppress(SingleControllerError):  # the next call of the group raises it too
                computed = self._actor.recorded_rows(step)
        notes: Sequence[RowNote] | None = None
        for manager in self._managers:
            notes = manager.row_notes.of(batch) or notes
        arrays, about = step_samples(batch, computed, notes, self._decode)
        about["weight_version"] = version  # not that of now: the script may have sent the trained weights already
        return arrays, about

    def _of_actor(self) -> list[dict[str, Any]]:
        """Return the actor's update since the last call, as an event. Call it without the lock: it calls a rank."""
        actor = self._actor
        if self._folder is None or actor is None or actor.weight_version == self._version:
            return []
        self._version = actor.weight_version
        report = None
        with suppress(SingleControllerError):  # the next call of the group raises it too
            report = actor.last_sync()
        if report is None:
            return []
        said = f"weights of version {report.version}: {report.nbytes} bytes in {report.seconds:.2f} s"
        digest = None if report.fingerprint is None else hexadecimal(report.fingerprint)
        event = {"kind": "update", "text": said, "version": report.version, "bytes": report.nbytes}
        event |= {name: getattr(report, name) for name in ("seconds", "pause_seconds", "receivers", "patched")}
        return [{**event, "proof": report.proved, "digest": digest}]

    def _write(
        self,
        folder: RunFolder,
        step: int,
        metrics: Mapping[str, float],
        samples: tuple[dict[str, np.ndarray], dict[str, Any]] | None,
        events: Sequence[dict[str, Any]],
    ) -> None:
        """Write a step. Under the lock."""
        parts, self._parts = self._parts, []  # also if the disk is full, so that they do not accumulate
        try:
            folder.step(step, metrics, samples)
            if samples is not None and self._decode is not None:
                tokens = samples[0]["tokens"]
                known = self._known_tokens  # by id: a set of a step's tokens would take longer than all their arrays
                known = np.pad(known, (0, max(0, int(tokens.max(initial=0)) + 1 - len(known))))
                new = np.unique(tokens[~known[tokens]])
                folder.words({token: self._decode([token]) for token in new.tolist()})
                known[new] = True
                self._known_tokens = known
        finally:  # these lines may fit where the samples do not
            for event in events:
                folder.event(step=step, **event)
            folder.timeline.add([{**part, "step": step} for part in parts])
            self._look(step)

    def _look(self, step: int | None = None) -> None:
        """Write what has happened to the groups, and the actor's checkpoint. The caller holds the lock."""
        folder = self._folder
        if folder is None:
            return
        for number, (known, lines, generation) in enumerate(self._groups):
            folder.timeline.add(lines.new())
            if (group := known()) is not None and group.generation != generation:
                self._groups[number] = known, lines, group.generation
                said = f"workers of {group.name} were replaced or restarted"
                folder.event("replace", said, step, group=group.name, rank=None)
        if self._actor is not None and (saved := self._actor.last_checkpoint) != self._checkpoint:
            folder.event("checkpoint", f"checkpoint {saved}", step, folder=saved)
            self._checkpoint = saved

    def _tick(self) -> None:
        """What the thread does."""
        free, size = 0, 0  # unknown
        with self._lock, self._saving():
            self._look()
            if self._folder is not None:  # it may have been closed meanwhile
                disk = os.statvfs(self._folder.path)
                free, size = disk.f_bavail * disk.f_frsize, disk.f_blocks * disk.f_frsize
        with self._lock:
            alarms = self._alarms.tick(time.monotonic(), free, size)
        for alarm in alarms:
            self._raise(alarm, None)

    def _raise(self, alarm: Alarm, step: int | None) -> None:
        at = "" if step is None else f"step {step}: "
        logger.warning("%s%s. Look at: %s", at, alarm.text, alarm.advice)
        self.event("alarm", alarm.text, step, alarm=alarm.name, advice=alarm.advice)

    @contextmanager
    def _saving(self, whole: str | None = None) -> Iterator[None]:
        """Inside, no error ends the training. It is logged once, until all of a step was recorded again.

        Args:
            whole: "folder" or "samples", of a step. What is written between two steps says nothing about the next one.
        """
        what = whole or "folder"
        try:
            yield
        except Exception as error:
            if what not in self._failed:
                self._failed.add(what)
                said = "recording has failed and is tried again each step; training goes on"
                logger.exception("the run's folder %s cannot be written: %s (%s)", self.run_dir, error, said)
        else:
            if whole in self._failed:
                self._failed.discard(whole)
                logger.warning("the run's folder %s is written again", self.run_dir)

    def _tell(self, name: str, send: Callable[[], object]) -> None:
        try:
            send()
        except Exception as error:
            if name not in self._failed:
                self._failed.add(name)
                logger.exception("the logger %s has failed; training goes on", name)
                self.event("logger", f"the logger {name} has failed: {error}", logger=name)

    def _end(self, reason: str) -> None:
        # If a logger cannot be opened, the constructor calls this before there is a thread.
        if hasattr(self, "_stop"):
            # The thread may be in `_tick`, which finds no folder when it gets the lock.
            self._stop.set()
        # Do not hold the lock here: close() waits for the watcher's thread, which needs the lock to report a death.
        for watcher in self._watchers:
            watcher.close()
        self._watchers = []
        # Close loggers without the lock too, because a logger may wait for its server.
        loggers, self._loggers = self._loggers, {}
        for name, one in loggers.items():
            self._tell(name, one.close)
        with self._lock:
            folder = self._folder
            if folder is not None:
                with self._saving():
                    folder.timeline.add(self._parts)
                    self._look()
                with self._saving():
                    folder.close(reason)
            self._folder = None

    def _leave_to_parent(self) -> None:
        """In a fork: what is open is the parent's. A lock that a fork holds would outlive the parent."""
        self._lock = threading.RLock()  # the parent's may be held by a thread that the fork has not
        if self._folder is not None:
            self._folder.leave()
        self._of_parent = self._watchers, self._loggers  # kept: they may do something when they are deleted
        self._folder, self._watchers, self._loggers = None, [], {}


_open_logs: weakref.WeakSet[RunLog] = weakref.WeakSet()


def _leave_all_to_parent() -> None:
    for one in _open_logs:
        one._leave_to_parent()


os.register_at_fork(after_in_child=_leave_all_to_parent)


def _run(log: weakref.ref[RunLog], stop: threading.Event) -> None:
    while not stop.wait(TICK_SECONDS):
        one = log()
        if one is None:
            return
        try:
            one._tick()
        except Exception:
            logger.exception("recording the run has failed; training goes on")
        del one  # this thread must not keep it while it waits


def _ranks_of(actor: Any) -> dict[str, Any]:
    """Return what ``run.json`` says of the ranks of an actor, which may be called."""
    workers, cls = actor.ready_workers("watch"), f"{actor.actor_cls.__module__}:{actor.actor_cls.__qualname__}"
    sizes = {"world_size": workers.world_size, "dp_size": workers.dp_size}
    return {**sizes, "with_ref": actor.with_ref, "worker_class": cls}


def _new_folder() -> Path:
    """Create a folder in ``runs/``. Two runs may begin in one second, and on hosts that share a disk with one pid."""
    stem, number = time.strftime("runs/%Y%m%d-%H%M%S") + f"-{os.getpid()}", 0
    while True:
        path = Path(f"{stem}-{number}" if number else stem)
        try:
            path.mkdir(parents=True)
            return path
        except OSError:
            if not os.path.exists(path):  # `RunFolder` says why
                return path
        number += 1


def _number(name: Any, value: Any) -> float:
    if type(value) is float and type(name) is str:  # nearly always
        return value
    if isinstance(name, str) and not isinstance(value, (str, bytes, bytearray)):
        with suppress(TypeError, ValueError, RuntimeError, OverflowError):  # a tensor of several raises RuntimeError
            return float(value)
    raise TypeError(f"RunLog.log: metric {name!r} is {value!r:.80}; pass a number")


def _plain(args: Any) -> dict[str, Any]:
    if args is None:
        return {}
    from omegaconf import DictConfig, OmegaConf

    if isinstance(args, DictConfig):
        made = OmegaConf.to_container(args, resolve=True)
        return {str(name): value for name, value in made.items()} if isinstance(made, dict) else {}
    with suppress(TypeError):
        return dict(args)
    return dict(vars(args))
