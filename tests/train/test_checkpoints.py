"""Which checkpoint counts as complete. Runs in this process, with a model whose save succeeds or fails on demand."""

import pytest
import torch.distributed as dist

from workers.train.checkpoints import CheckpointError, RolloutCheckpoints


class Model:
    """Its save fails when told to."""

    fails = False

    def save(self, folder, *, background):
        if self.fails:
            raise OSError("disk full")


@pytest.fixture
def alone():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_partially_overwritten_checkpoint_is_not_complete(alone, tmp_path):
    model = Model()
    writing = RolloutCheckpoints(None, str(tmp_path), 0)
    for step in (3, 4):
        writing.save(model, step, optimizer_step=step, weight_version=0, background=False)
    assert RolloutCheckpoints(str(tmp_path), None, 0, step=3).find().optimizer_step == 3
    model.fails = True
    with pytest.raises(CheckpointError, match="a checkpoint could not be written: OSError: disk full"):
        writing.save(model, 3, optimizer_step=9, weight_version=0, background=False)
    with pytest.raises(CheckpointError, match="no complete checkpoint of ckpt_step=3; found: rollout_0000004"):
        RolloutCheckpoints(str(tmp_path), None, 0, step=3).find()
    assert RolloutCheckpoints(str(tmp_path), None, 0).find().rollout_id == 4


def test_folders_of_another_run_and_empty_folders_are_logged(alone, tmp_path, caplog):
    assert RolloutCheckpoints(str(tmp_path / "misspelt"), str(tmp_path), 0).find() is None
    assert "misspelt has no complete checkpoint; the run starts with rollout 0" in caplog.text
    caplog.clear()
    RolloutCheckpoints(None, str(tmp_path), 0).save(Model(), 7, optimizer_step=1, weight_version=0, background=False)
    assert RolloutCheckpoints(str(tmp_path), str(tmp_path), 0).find().rollout_id == 7 and not caplog.text
    assert RolloutCheckpoints(None, str(tmp_path), 0).find() is None
    assert "has checkpoints of another run, up to rollout_0000007" in caplog.text
