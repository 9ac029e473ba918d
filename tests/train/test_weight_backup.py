"""Named snapshots of weights: restoring copies them back bit for bit into the same memory."""

import pytest
import torch

from workers.recovery.weight_backup import BackupError, WeightBackup

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.bool, torch.float8_e4m3fn]


def bits(tensor):
    """The tensor's bytes, so that NaNs compare equal."""
    return bytes(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy())


def random_bits(shape, dtype):
    if dtype is torch.bool:
        return torch.rand(shape) > 0.5
    size = torch.empty(0, dtype=dtype).element_size()
    count = torch.Size(shape).numel()
    return torch.randint(0, 256, (count * size,), dtype=torch.uint8).view(dtype).view(shape)


@pytest.fixture
def weights():
    torch.manual_seed(0)
    found = {str(dtype): torch.nn.Parameter(random_bits((5, 3), dtype), False) for dtype in DTYPES}
    whole = torch.randn(4, 6)
    found |= {"transposed": whole.t(), "stripe": torch.randn(6, 8)[:, ::2], "middle": torch.randn(100)[20:30]}
    found |= {"tied": found["stripe"], "empty": torch.empty(0, 7), "scalar": torch.tensor(3.5)}
    found["trained"] = torch.nn.Parameter(torch.randn(3, 3))
    return found


@torch.no_grad()
def scribble(weights):
    for tensor in weights.values():
        tensor.copy_(torch.ones(tensor.shape, dtype=tensor.dtype))


def test_restore_is_bit_for_bit_into_the_same_memory(weights):
    told = []
    backup = WeightBackup(weights.items, after=lambda: told.append(1))
    before = {name: (bits(t), t.data_ptr(), t.untyped_storage().data_ptr()) for name, t in weights.items()}
    backup.copy("actor")
    assert not told
    scribble(weights)
    backup.restore("actor")
    assert before == {name: (bits(t), t.data_ptr(), t.untyped_storage().data_ptr()) for name, t in weights.items()}
    assert told == [1]
    with backup.swapped("actor"):
        pass
    assert told == [1], "the optimizer must not be notified: it keeps float32 copies of these weights"


def test_gaps_between_elements_are_not_written(weights):
    backing = weights["stripe"].untyped_storage()
    whole = torch.empty(0).set_(backing).view(6, 8)
    backup = WeightBackup(weights.items)
    backup.copy("actor")
    whole.fill_(7.0)
    backup.restore("actor")
    assert bool((whole[:, 1::2] == 7.0).all()) and not bool((whole[:, ::2] == 7.0).any())


def test_snapshots_are_independent_and_clone_copies():
    live = torch.zeros(1000)
    backup = WeightBackup(lambda: [("w", live)])
    backup.copy("ref")
    live.fill_(1.0)
    backup.copy("actor")
    backup.clone("actor", "old_actor")
    live.fill_(2.0)
    backup.copy("actor")
    assert backup.names == ("ref", "actor", "old_actor") and "ref" in backup
    for name, value in (("ref", 0.0), ("old_actor", 1.0), ("actor", 2.0)):
        backup.restore(name)
        assert bool((live == value).all())
    backup.clone("ref", "ref")
    backup.drop("old_actor")
    assert backup.names == ("ref", "actor")


def test_new_snapshot_reuses_its_memory():
    live = torch.randn(1000)
    backup = WeightBackup(lambda: [("w", live)])
    backup.copy("actor")
    memory = backup._snapshots["actor"].memory.data_ptr()
    live.mul_(2)
    backup.copy("actor")
    assert backup._snapshots["actor"].memory.data_ptr() == memory
    assert bool((backup._snapshots["actor"].parts["w"] == live).all())


def test_tied_weights_are_stored_once():
    embedding = torch.randn(1024)
    tied = WeightBackup(lambda: [("embed", embedding), ("head", embedding)])
    tied.copy("actor")
    assert tied.nbytes == 4096


def test_swapped_restores_the_live_weights_even_after_an_error(weights):
    backup = WeightBackup(weights.items)
    scribble(weights)
    backup.copy("ref")
    for name in DTYPES[:4]:
        weights[str(name)].copy_(random_bits((5, 3), name))
    before = {name: bits(tensor) for name, tensor in weights.items()}
    reference = bits(torch.ones(5, 3))
    with pytest.raises(ZeroDivisionError):
        with backup.swapped("ref"):
            assert bits(weights["torch.float32"]) == reference
            raise ZeroDivisionError
    assert before == {name: bits(tensor) for name, tensor in weights.items()}
    room = backup.nbytes
    backup.copy("old")
    with backup.swapped("ref"), backup.swapped("old"):
        assert before == {name: bits(tensor) for name, tensor in weights.items()}
    assert before == {name: bits(tensor) for name, tensor in weights.items()}
    assert backup.nbytes == room * 2  # "old", and what the inner of the two contexts needed
    assert backup.names == ("ref", "old")


@pytest.mark.parametrize("what", ["restore", "drop", "swapped"])
def test_unknown_snapshot_error_lists_the_known_names(what):
    live = torch.zeros(3)
    backup = WeightBackup(lambda: [("w", live)])
    backup.copy("actor")
    with pytest.raises(BackupError, match=r"no weight snapshot 'actr'.*'actor'"):
        made = getattr(backup, what)("actr")
        with made:
            pass
    with pytest.raises(BackupError, match="no weight snapshot 'old'"):
        backup.clone("old", "older")


def test_changed_shapes_are_rejected_before_anything_is_written():
    live = {"a": torch.zeros(3), "b": torch.zeros(4)}
    backup = WeightBackup(live.items)
    backup.copy("actor")
    live["a"].fill_(1.0)
    live["b"] = torch.zeros(5)
    with pytest.raises(BackupError, match=r"'b' is .* \(4,\) in the snapshot, and now .* \(5,\)"):
        backup.restore("actor")
    assert bool((live["a"] == 1.0).all())
    live["c"] = live.pop("b")
    with pytest.raises(BackupError, match=r"\['b'\].*\['c'\]"):
        backup.restore("actor")


def test_offloaded_weights_are_rejected():
    live = torch.zeros(3)
    backup = WeightBackup(lambda: [("w", live)])
    backup.copy("actor")
    live.untyped_storage().resize_(0)
    with pytest.raises(BackupError, match="offloaded"):
        backup.copy("actor")
    with pytest.raises(BackupError, match="offloaded"):
        backup.restore("actor")
