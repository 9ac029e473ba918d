"""Which checkpoint is complete; in this process alone, with a model that only says whether it could be written."""

import pytest
import torch.distributed as dist

from workers.train.checkpoints import CheckpointError, RolloutCheckpoints


class Model:
    """Writing it fails where it is told to."""

    fails = False

    def save(self, folder, *, background):
        if self.fails:
            raise OSError("disk full")


@pytest.fixture
def alone():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_one_that_was_written_over_and_not_to_its_end_is_not_complete(alone, tmp_path):
    model = Model()
    writing = RolloutCheckpoints(None, str(tmp_path), 0)
    for step in (3, 4):
        writing.save(model, step, optimizer_step=step, weight_version=0, background=False)
    assert RolloutCheckpoints(str(tmp_path), None, 0, step=3).find().optimizer_step == 3
    model.fails = True
    with pytest.raises(CheckpointError, match="a checkpoint could not be written: OSError: disk full"):
        writing.save(model, 3, optimizer_step=9, weight_version=0, background=False)
    with pytest.raises(CheckpointError, match="no complete one of ckpt_step=3; there are rollout_0000004"):
        RolloutCheckpoints(str(tmp_path), None, 0, step=3).find()
    assert RolloutCheckpoints(str(tmp_path), None, 0).find().rollout_id == 4


def test_folders_of_another_run_and_folders_without_any_are_told_of(alone, tmp_path, caplog):
    assert RolloutCheckpoints(str(tmp_path / "misspelt"), str(tmp_path), 0).find() is None
    assert "misspelt has no complete checkpoint: the run begins with rollout 0" in caplog.text
    caplog.clear()
    RolloutCheckpoints(None, str(tmp_path), 0).save(Model(), 7, optimizer_step=1, weight_version=0, background=False)
    assert RolloutCheckpoints(str(tmp_path), str(tmp_path), 0).find().rollout_id == 7 and not caplog.text
    assert RolloutCheckpoints(None, str(tmp_path), 0).find() is None
    assert "has checkpoints of another run, up to rollout_0000007" in caplog.text
