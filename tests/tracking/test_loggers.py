"""All loggers get the same numbers of one run. Each is read back with its library's own reader, without a network."""

import contextlib
import importlib
import json
import math
import sqlite3
import struct
import sys
from unittest.mock import Mock

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from waits import wait_until

from single_controller.view.run_files import EVENTS, METRICS, read_lines
from workers import RunLog
from workers.tracking.loggers import LOGGERS, Logger

STEPS = [
    {"reward": 0.125, "grad_norm": 3.0, "eval/pass@4": 0.25, "rollout/limit": 3e-9},
    {"reward": 0.5, "grad_norm": 2.5, "lr": 1e-6},
    {"reward": 2.0, "grad_norm": 1.25, "eval/pass@4": 0.5},
]


def have(library):
    """Skip where a library is missing, with the extra that brings it."""
    try:
        importlib.import_module(library)
    except ImportError:
        pytest.skip(f"{library} is not installed: pip install 'single-controller[{library}]'")


def write(folder, loggers, steps=STEPS, first=0, **options):
    with RunLog(run_dir=folder, loggers=loggers, **options) as log:
        for step, metrics in enumerate(steps, first):
            log.log(step, metrics)
    return folder


def table(steps=STEPS):
    """name -> [(step, value)]."""
    found = {}
    for step, metrics in enumerate(steps):
        for name, value in metrics.items():
            found.setdefault(name, []).append((step, pytest.approx(value, rel=1e-6, abs=0)))
    return found


def of_tensorboard(folder):
    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    return {name: [(one.step, one.value) for one in events.Scalars(name)] for name in events.Tags()["scalars"]}


def of_json(folder):
    found = {}
    for line in (folder / "json" / "metrics.jsonl").read_text().splitlines():
        metrics = json.loads(line)
        step = metrics.pop("step")
        del metrics["time"]
        for name, value in metrics.items():
            found.setdefault(name, []).append((step, value))
    return found


def of_mlflow(folder):
    import mlflow

    client = mlflow.MlflowClient(f"sqlite:///{folder / 'mlflow' / 'mlflow.db'}")
    (run,) = client.search_runs([client.get_experiment_by_name("single-controller").experiment_id])
    assert run.info.status == "FINISHED" and run.info.run_name == folder.name
    return {
        name: [(one.step, one.value) for one in client.get_metric_history(run.info.run_id, name)]
        for name in run.data.metrics
    }


def records(file):
    """The records of a file of W&B or SwanLab: LevelDB's log format, behind a header of 7 bytes."""
    data, at, found = file.read_bytes(), 7, b""
    while at + 7 <= len(data):
        left = 2**15 - at % 2**15
        if left < 7:  # padding
            at += left
            continue
        _, length, kind = struct.unpack("<LHB", data[at : at + 7])
        found += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or its last part
            yield found
            found = b""


def of_wandb(folder):
    from wandb.proto import wandb_internal_pb2

    found = {}
    (file,) = folder.glob("wandb/wandb/offline-run-*/*.wandb")
    for data in records(file):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        if record.WhichOneof("record_type") == "history":
            items = {"".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
            for name, value in items.items():
                if not name.startswith("_"):
                    found.setdefault(name, []).append((items["_step"], value))
    return found


def of_swanlab(folder):
    from swanlab.proto.swanlab.record.v1 import record_pb2

    found = {}
    (file,) = folder.glob("swanlab/run-*/*.swanlab")
    for data in records(file):
        record = record_pb2.Record()
        record.ParseFromString(data)
        if record.HasField("scalar"):
            found.setdefault(record.scalar.key, []).append((record.scalar.step, record.scalar.value.number))
    return found


def of_trackio(folder):
    found = {}
    (file,) = folder.glob("*.db")
    with contextlib.closing(sqlite3.connect(file)) as base:
        for step, metrics in base.execute("select step, metrics from metrics order by id"):
            for name, value in json.loads(metrics).items():
                found.setdefault(name, []).append((step, value))
    return found


def test_tensorboard_and_json_are_equal(tmp_path, capsys):
    folder = write(tmp_path / "run", ["tensorboard", "json", "console"])
    assert of_tensorboard(folder) == table() == of_json(folder)
    said = capsys.readouterr().err.splitlines()
    assert said[1] == "step 1: reward 0.5, grad_norm 2.5, lr 1e-06" and len(said) == 3


def test_mlflow_in_a_folder(tmp_path, monkeypatch):
    have("mlflow")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    folder = write(tmp_path / "run", ["mlflow", "tensorboard"])
    as_mlflow = {name.replace("@", "_"): values for name, values in table().items()}  # a name that it does not take
    assert of_mlflow(folder) == as_mlflow
    write(folder, ["mlflow"], [{"reward": 9.0}], first=3)  # resumed: the same run
    assert of_mlflow(folder)["reward"] == [*as_mlflow["reward"], (3, 9.0)]


@pytest.fixture
def offline(tmp_path, monkeypatch):
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))  # read when it is imported
    for name, value in (("WANDB_MODE", "offline"), ("WANDB_SILENT", "true"), ("SWANLAB_MODE", "offline")):
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize(
    ("name", "read", "folder"),
    [("wandb", of_wandb, "run"), ("swanlab", of_swanlab, "run"), ("trackio", of_trackio, "trackio")],
)
def test_one_logger_offline(tmp_path, offline, name, read, folder):
    have(name)
    write(tmp_path / "run", [name])
    wait_until(lambda: read(tmp_path / folder) == table())  # the service of W&B writes a little later


def test_one_run_gives_all_loggers_the_same(tmp_path, monkeypatch, offline):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    for library in ("wandb", "mlflow", "swanlab", "trackio"):
        have(library)
    monkeypatch.setattr("trackio.utils.TRACKIO_DIR", tmp_path / "trackio")  # where it was imported before
    monkeypatch.setattr("trackio.sqlite_storage.TRACKIO_DIR", tmp_path / "trackio")
    folder = write(tmp_path / "run", list(LOGGERS))
    told = of_json(folder)
    assert told == table() and of_tensorboard(folder) == table() and of_swanlab(folder) == told
    assert of_mlflow(folder) == {name.replace("@", "_"): values for name, values in told.items()}
    wait_until(lambda: of_wandb(folder) == told)
    assert of_trackio(tmp_path / "trackio") == told
    own = {line["step"]: line["metrics"] for line in read_lines(folder / METRICS)}
    assert own == dict(enumerate(STEPS))


def test_resumed_run_has_no_step_twice(tmp_path, monkeypatch):
    """A step that was logged before the kill is replaced where a logger can, and otherwise not sent again."""
    sent = []

    class Appends(Logger):
        replaces = False

        def log(self, step, metrics):
            sent.append((step, metrics["reward"]))

    monkeypatch.setitem(LOGGERS, "wandb", Appends)
    folder, loggers = tmp_path / "run", ["tensorboard", "json", "wandb"]
    write(folder, loggers)
    with open(folder / "json" / "metrics.jsonl", "ab") as torn:
        torn.write(b'{"step": 3, "time": 17')
    write(folder, loggers, [{"reward": 7.0}, {"reward": 8.0}, {"reward": 9.0}], first=1)
    assert of_json(folder)["reward"] == of_tensorboard(folder)["reward"] == [(0, 0.125), (1, 7), (2, 8), (3, 9)]
    assert sent == [(0, 0.125), (1, 0.5), (2, 2.0), (3, 9.0)]
    with RunLog(run_dir=folder, loggers=loggers) as log:
        for step in (4, 5, 4, 5, 6):
            log.log(step, {"reward": step})
    assert [step for step, _ in of_json(folder)["reward"]] == list(range(7)) == [step for step, _ in sent]
    write(folder, loggers, [{"reward": 1.0}], first=2, args={"load": None})  # another run
    assert of_json(folder) == {"reward": [(2, 1.0)]} and sent[-1] == (2, 1.0)
    assert {name: values for name, values in of_tensorboard(folder).items() if values} == {"reward": [(2, 1.0)]}


def test_tensorboard_alone_has_no_step_twice(tmp_path):
    for first in (0, 2):
        with RunLog(tmp_path / "tensorboard", run_dir=None) as log:
            for step in range(first, 4):
                log.log(step, {"value": step + first})
    assert of_tensorboard(tmp_path) == {"value": [(0, 0), (1, 1), (2, 4), (3, 5)]}


@pytest.mark.parametrize("name", sorted(name for name, logger in LOGGERS.items() if logger.extra))
def test_missing_library_names_the_extra(tmp_path, monkeypatch, name):
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ImportError, match=rf"'{name}' is not installed: pip install 'single-controller\[{name}\]'"):
        RunLog(run_dir=tmp_path, loggers=[name])


def test_logger_that_fails_does_not_end_the_training(tmp_path, monkeypatch, caplog):
    class Broken(Logger):
        def log(self, step, metrics):
            raise ConnectionError("no route")

    monkeypatch.setitem(LOGGERS, "console", Broken)
    folder = write(tmp_path / "run", ["console", "json"])
    assert of_json(folder) == table()
    assert [record.getMessage() for record in caplog.records if record.levelname == "ERROR"] == [
        "the logger console has failed; training goes on"
    ]
    (told,) = [line for line in read_lines(folder / EVENTS) if line["kind"] == "logger"]
    assert told["text"] == "the logger console has failed: no route"


def test_tensorboard_goes_on_after_an_error_of_the_disk(tmp_path, monkeypatch):
    with RunLog(run_dir=tmp_path, loggers=["tensorboard"]) as log:
        log.log(0, {"value": 0})
        writer = log._loggers["tensorboard"]._writer
        monkeypatch.setattr(writer, "flush", Mock(side_effect=OSError(28, "No space left on device")))
        log.log(1, {"value": 1})
        log.log(2, {"value": 2})
        writer.close()
    steps = [step for step, _ in of_tensorboard(tmp_path)["value"]]
    assert {0, 2} <= set(steps) and len(set(steps)) == len(steps)


def test_numbers_that_are_not_finite(tmp_path):
    folder = write(tmp_path / "run", ["tensorboard", "json"], [{"grad_norm": math.inf}])
    assert of_tensorboard(folder) == {"grad_norm": [(0, math.inf)]} == of_json(folder)
