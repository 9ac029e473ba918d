"""A run's metrics, read back with TensorBoard's own reader."""

import time

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from workers.tracking.run_log import RunLog


def test_metrics_are_written_immediately(tmp_path):
    with RunLog(tmp_path) as log:
        for step in range(3):
            with log.timed("rollout"):
                time.sleep(0.02)
            with log.timed("train"):
                time.sleep(0.01)
            with log.timed("rollout"):
                time.sleep(0.02)
            noted = log.log(step, {"reward": step / 2, "tokens": 100})
            events = EventAccumulator(str(tmp_path))
            events.Reload()
            assert [event.value for event in events.Scalars("reward")] == [k / 2 for k in range(step + 1)]
        assert 0.04 <= noted["seconds/rollout"] < 0.5 and 0.01 <= noted["seconds/train"] < 0.5
        assert noted["tokens_per_second"] == pytest.approx(100 / (noted["seconds/rollout"] + noted["seconds/train"]))
    assert {event.step for event in events.Scalars("seconds/train")} == {0, 1, 2}


def test_nothing_is_written_without_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with RunLog() as log:
        assert log.log(4, {"reward": 1}) == {"reward": 1.0}
        log.log(2, {"reward": 3, "kl": 2})
    assert (log.column("reward"), log.column("kl"), log.column("no such")) == ([3.0, 1.0], [2.0], [])
    assert list(tmp_path.iterdir()) == []


def test_seconds_are_recorded_even_if_the_block_raises():
    log = RunLog()
    with pytest.raises(ZeroDivisionError), log.timed("train"):
        raise ZeroDivisionError
    assert "seconds/train" in log.log(0, {})
