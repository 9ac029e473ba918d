"""Which checkpoint counts as complete. Runs in this process, with a model whose save succeeds or fails on demand."""

import os
import pickle
import shutil
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from workers.train.checkpoints import (
    POSITION,
    CheckpointError,
    LastCheckpoint,
    RolloutCheckpoints,
    complete_checkpoints,
)


class Model:
    """Its save fails when told to."""

    fails = False

    def save(self, folder, *, background):
        (folder / "shard").write_text("weights")
        if self.fails:
            raise OSError("disk full")

    def wait_for_save(self):
        pass


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


def test_rank_on_another_disk_fails_the_save(alone, tmp_path):
    with pytest.raises(CheckpointError, match=r"there is no /.*/rollout_0000003\.unfinished, .* not on a shared disk"):
        RolloutCheckpoints(None, str(tmp_path), 1).save(
            Model(), 3, optimizer_step=3, weight_version=0, background=False
        )


def test_files_of_more_ranks_do_not_stay_in_a_checkpoint(alone, tmp_path):
    writing, model, folder = RolloutCheckpoints(None, str(tmp_path), 0), Model(), tmp_path / "rollout_0000003"
    model.fails = True
    with pytest.raises(CheckpointError):
        writing.save(model, 3, optimizer_step=3, weight_version=0, background=False)
    (folder / "__7_0.distcp").write_text("of rank 7")
    model.fails = False
    assert writing.save(model, 3, optimizer_step=3, weight_version=0, background=False) == str(folder)
    assert sorted(path.name for path in folder.iterdir()) == [POSITION, "shard"]


@pytest.mark.parametrize("damaged", ["{}", "[]", '{"folder": "rollout_0000003", "colour": 1}', "{"])
def test_damaged_note_of_the_position_is_an_error(alone, tmp_path, damaged):
    RolloutCheckpoints(None, str(tmp_path), 0).save(Model(), 3, optimizer_step=3, weight_version=0, background=False)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / POSITION).write_text(damaged)
    assert list(complete_checkpoints(str(tmp_path))) == [3]
    (tmp_path / "latest.json").write_text(damaged)
    with pytest.raises(CheckpointError, match="cannot determine which checkpoint to load"):
        RolloutCheckpoints(str(tmp_path), None, 0).find()
    # A run that only saves there goes on: rank 0, which alone reads it, must not leave the others waiting.
    writing = RolloutCheckpoints(None, str(tmp_path), 0)
    assert writing.find() is None
    writing.save(Model(), 4, optimizer_step=4, weight_version=0, background=False)
    assert RolloutCheckpoints(str(tmp_path), None, 0).find().rollout_id == 4


def test_folders_of_another_run_and_empty_folders_are_logged(alone, tmp_path, caplog):
    assert RolloutCheckpoints(str(tmp_path / "misspelt"), str(tmp_path), 0).find() is None
    assert "misspelt has no complete checkpoint; the run starts with rollout 0" in caplog.text
    caplog.clear()
    RolloutCheckpoints(None, str(tmp_path), 0).save(Model(), 7, optimizer_step=1, weight_version=0, background=False)
    assert RolloutCheckpoints(str(tmp_path), str(tmp_path), 0).find().rollout_id == 7 and not caplog.text
    assert RolloutCheckpoints(None, str(tmp_path), 0).find() is None
    assert "has checkpoints of another run, up to rollout_0000007" in caplog.text


def run(folder, steps, background=False, **keep):
    """Save after each of the steps. Returns the complete checkpoints after each save, and all folders at the end."""
    writing = RolloutCheckpoints(None, str(folder), 0, **keep)
    seen = []
    for step in steps:
        writing.save(Model(), step, optimizer_step=step, weight_version=0, background=background)
        writing.wait()
        writing.wait_for_deletion()
        older(folder)
        assert RolloutCheckpoints(str(folder), None, 0).find().rollout_id == step
        seen.append(complete(folder))
    return seen


def complete(folder):
    return sorted(int(path.parent.name[8:15]) for path in folder.glob("rollout_*/position.json"))


def older(folder):
    """Let a minute pass: file systems may have coarse times."""
    for path in folder.glob("rollout_*/position.json"):
        at = path.stat().st_mtime - 60
        os.utime(path, (at, at))


@pytest.mark.parametrize("background", [False, True])
def test_latest_checkpoints_are_kept(alone, tmp_path, background):
    (tmp_path / "mine").mkdir()
    (tmp_path / "rollout_0000001_unfinished").mkdir()
    assert run(tmp_path, (1, 3, 5, 7), background, keep=2) == [[1], [1, 3], [3, 5], [5, 7]]
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_dir()) == [
        "mine", "rollout_0000001_unfinished", "rollout_0000005", "rollout_0000007",
    ]  # fmt: skip
    assert run(tmp_path / "all", range(5))[-1] == [0, 1, 2, 3, 4]


def test_every_mth_checkpoint_is_kept_besides_the_latest(alone, tmp_path):
    """After 10 and 20 rollouts: the rollout ids count from 0."""
    assert run(tmp_path, range(1, 24, 2), keep=1, keep_every=10)[-1] == [9, 19, 23]


def test_run_that_went_back_keeps_what_it_writes(alone, tmp_path):
    run(tmp_path, (10, 20, 30))
    assert run(tmp_path, (15, 25), keep=2) == [[15, 30], [15, 25]]


def test_checkpoint_of_the_same_step_again_is_kept(alone, tmp_path):
    assert run(tmp_path, (3, 3, 3), keep=1)[-1] == [3]


def test_failed_save_deletes_nothing_and_its_rest_is_deleted_later(alone, tmp_path):
    run(tmp_path, (1, 2))
    writing, model = RolloutCheckpoints(None, str(tmp_path), 0, keep=1), Model()
    model.fails = True
    with pytest.raises(CheckpointError):
        writing.save(model, 3, optimizer_step=3, weight_version=0, background=False)
    assert complete(tmp_path) == [1, 2] and (tmp_path / "rollout_0000003" / "shard").exists()
    assert run(tmp_path, (4,), keep=1) == [[4]]
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == ["rollout_0000004"]


def test_rest_of_an_interrupted_save_is_deleted_before_the_next_one_is_written(alone, tmp_path):
    """Otherwise a disk with room for one more checkpoint than are kept would stay too full for any other one."""
    run(tmp_path, (1,))
    writing, model, seen = RolloutCheckpoints(None, str(tmp_path), 0, keep=1), Model(), []
    model.fails = True
    with pytest.raises(CheckpointError):
        writing.save(model, 2, optimizer_step=2, weight_version=0, background=False)
    model.save = lambda folder, background: seen.extend(path.name for path in tmp_path.glob("rollout_*[0-9]"))
    writing.save(model, 3, optimizer_step=3, weight_version=0, background=False)
    writing.wait_for_deletion()
    assert sorted(seen) == ["rollout_0000001", "rollout_0000003"] and complete(tmp_path) == [3]


def test_driver_state_of_a_checkpoint_that_was_deleted_is_an_error(alone, tmp_path):
    """`save_keep` may delete the one that was loaded. None would mean that it had no state."""
    writing, reading = RolloutCheckpoints(None, str(tmp_path), 0, keep=1), RolloutCheckpoints(str(tmp_path), None, 0)
    for step, state in ((3, b"state"), (4, None)):
        writing.save(Model(), step, optimizer_step=3, weight_version=0, background=False, driver_state=state)
        if state is not None:
            reading.find()
            assert reading.driver_state() == state
    writing.wait_for_deletion()
    with pytest.raises(CheckpointError, match=r"rollout_0000003' was deleted after it was loaded"):
        reading.driver_state()
    reading.find()
    assert reading.driver_state() is None


def test_checkpoint_is_on_the_disk_before_it_is_named(alone, tmp_path, monkeypatch):
    """The host may lose its power right afterwards."""
    done, sync, replace = [], os.fsync, os.replace

    def synced(file):
        done.append(Path(os.readlink(f"/proc/self/fd/{file}")).name)
        sync(file)

    def replaced(old, new):
        done.append(Path(new).name)
        replace(old, new)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", replaced)
    RolloutCheckpoints(None, str(tmp_path), 0).save(
        Model(), 3, optimizer_step=3, weight_version=0, background=False, driver_state=b"state"
    )
    assert sorted(done[:2]) == ["driver_state.pkl", "shard"]
    assert done[2:] == ["position.json.new", "position.json", "latest.json.new", "latest.json"]


def test_disk_that_is_full_at_the_last_line_leaves_no_complete_checkpoint(alone, tmp_path, monkeypatch):
    run(tmp_path, (4,))
    written = Path.write_text

    def fails(path, text):
        written(path, "" if path.name.startswith("position.json") else text)
        if path.name.startswith("position.json"):
            raise OSError("disk full")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", fails)
        with pytest.raises(CheckpointError, match="disk full"):
            RolloutCheckpoints(None, str(tmp_path), 0).save(
                Model(), 5, optimizer_step=5, weight_version=0, background=False
            )
    assert list(complete_checkpoints(tmp_path)) == [4]
    assert run(tmp_path, (6,), keep=2) == [[4, 6]]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("error", [SystemExit, PermissionError])  # the first ends the thread silently
def test_interrupted_deletion_leaves_a_checkpoint_to_continue_from(alone, tmp_path, monkeypatch, caplog, error):
    run(tmp_path, (1, 2, 3))

    def interrupted(folder, **options):
        raise error("in the middle")

    with monkeypatch.context() as patched:
        patched.setattr(shutil, "rmtree", interrupted)
        writing = RolloutCheckpoints(None, str(tmp_path), 0, keep=2)
        writing.save(Model(), 4, optimizer_step=4, weight_version=0, background=False)
        writing.wait_for_deletion()
        logged = "rollout_0000002_deleted could not be deleted: PermissionError: in the middle" in caplog.text
        assert logged is (error is PermissionError)
    assert RolloutCheckpoints(str(tmp_path), None, 0).find().rollout_id == 4
    with pytest.raises(CheckpointError, match=r"found: .*rollout_0000003, rollout_0000004"):
        RolloutCheckpoints(str(tmp_path), None, 0, step=1).find()
    older(tmp_path)
    assert run(tmp_path, (5,), keep=2) == [[4, 5]]
    assert len([path for path in tmp_path.iterdir() if path.is_dir()]) == 2


def test_folders_of_the_user_are_never_deleted(alone, tmp_path):
    """Even if their names look like those of checkpoints: exports, and copies without the note."""
    names = ["rollout_19", "rollout_1", "rollout_0000019", "rollout_0000001_again"]
    for name in names:
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").touch()
    run(tmp_path, (20, 21, 22), keep=1)
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_dir()) == sorted([*names, "rollout_0000022"])
    assert all((tmp_path / name / "model.safetensors").exists() for name in names)


@pytest.mark.parametrize("background", [False, True])
def test_no_rank_waits_for_the_deletion_in_a_collective(alone, tmp_path, monkeypatch, background):
    """Neither `save` nor `wait`, after which ranks go on to collectives; deletions are done one at a time."""
    delete, may_delete, running, most = shutil.rmtree, threading.Event(), [], []

    def slow(folder, **options):
        running.append(folder)
        most.append(len(running))
        assert may_delete.wait(30)
        delete(folder, **options)
        running.remove(folder)

    monkeypatch.setattr(shutil, "rmtree", slow)
    writing, ended = RolloutCheckpoints(None, str(tmp_path), 0, keep=1), threading.Event()

    def save_all():
        for step in (1, 2, 3, 3):
            writing.save(Model(), step, optimizer_step=step, weight_version=0, background=background)
            writing.wait()
        ended.set()

    threading.Thread(target=save_all, daemon=True).start()
    in_time = ended.wait(10)
    may_delete.set()
    assert in_time and complete(tmp_path) == [3]
    writing.wait_for_deletion()
    assert set(most) == {1}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest.json", "rollout_0000003_again"]


def test_folder_that_disappears_does_not_fail_a_complete_checkpoint(alone, tmp_path, monkeypatch, caplog):
    run(tmp_path, (1, 2))
    stat = Path.stat

    def gone(path, **options):
        if path.parent.name == "rollout_0000001" and options.get("follow_symlinks", True):
            raise PermissionError("as when another process has deleted it")
        return stat(path, **options)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "stat", gone)
        writing = RolloutCheckpoints(None, str(tmp_path), 0, keep=1)
        writing.save(Model(), 3, optimizer_step=3, weight_version=0, background=False)
    writing.wait_for_deletion()
    assert "could not be searched for old checkpoints: PermissionError" in caplog.text
    assert run(tmp_path, (4,), keep=1) == [[4]]


def test_newer_of_two_checkpoints_of_a_step_is_read(alone, tmp_path, monkeypatch):
    def denied(path, target):
        raise PermissionError("denied")

    monkeypatch.setattr(Path, "rename", denied)
    writing = RolloutCheckpoints(None, str(tmp_path), 0)
    for number, name in ((1, "rollout_0000003"), (2, "rollout_0000003_again"), (3, "rollout_0000003")):
        writing.save(Model(), 3, optimizer_step=number, weight_version=0, background=False)
        os.utime(tmp_path / name / POSITION, (number, number))  # the clock of files is coarse
        found = RolloutCheckpoints(str(tmp_path), None, 0, step=3).find()
        assert (found.folder.name, found.optimizer_step) == (name, number)
        assert complete_checkpoints(str(tmp_path))[3].name == name


def test_checkpoint_of_a_call_that_was_left_is_waited_for():
    """The driver was interrupted or killed while `save_model` ran."""
    waited = []
    wait = SimpleNamespace(options=lambda timeout: lambda: waited.append(timeout))
    state = {"execute_with_func_generator": lambda *_: [None], "closed": False, "broken": None}
    workers, saved = SimpleNamespace(wait_for_save=wait, **state), LastCheckpoint()
    for folder in (None, "checkpoints"):
        saved.begin(workers, folder)
        pickle.loads(pickle.dumps(saved)).wait(workers, 60, "actor")  # by the driver that takes the workers over
    assert waited == [60]
