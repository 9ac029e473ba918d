"""Device memory, copies and weights of the library, on the simulated device."""

import gc
from unittest import mock

import pytest
import torch

from workers import device_memory
from workers.device import backend, current_device, every_backend, host_memory, to_device
from workers.device_memory import DeviceMemory
from workers.recovery.weight_backup import take_snapshot, write_snapshot
from workers.weight_sync import delta
from workers.weight_sync.buckets import FlatBuffer, copy_into, tensor_specs, views
from workers.weight_sync.digest import digest

DEVICE = f"cuda:{min(1, torch.cuda.device_count() - 1)}"
simulated = torch._simdevice


@pytest.fixture(autouse=True)
def no_new_faults():
    torch.cuda.set_device(DEVICE)
    before = simulated.faults()
    yield
    gc.collect()
    for number in range(torch.cuda.device_count()):
        torch.cuda.synchronize(number)
    assert simulated.faults() == before


def failing(function, call):
    """The function, which raises in one call."""
    calls = []

    def made(*args, **kwargs):
        calls.append(args)
        if len(calls) == call:
            raise MemoryError("none left")
        return function(*args, **kwargs)

    return made


def test_what_is_chosen():
    assert (backend(), every_backend(), str(current_device())) == ("nccl", "cpu:gloo,cuda:nccl", DEVICE)


def test_copy_to_the_device_keeps_its_source():
    source = torch.arange(10.0)
    copy = to_device(source, torch.device(DEVICE))
    source.fill_(7)
    assert copy.tolist() == list(range(10))


class TestDeviceMemory:
    def tensors(self):
        return [torch.full((1 << 12,), float(k), device=DEVICE) for k in (1, 2)]

    def test_sleep_and_wake_up(self):
        tensors, scratch = self.tensors(), torch.ones(1000, device=DEVICE)
        before, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
        memory = DeviceMemory(lambda: tensors, lambda: [scratch])
        freed = memory.sleep()
        assert freed == 2 * 4 * (1 << 12) + 4000 and before - torch.cuda.memory_allocated() >= freed
        assert reserved - torch.cuda.memory_reserved() >= freed  # other processes can have it
        memory.wake_up()
        assert [one.unique().tolist() for one in (*tensors, scratch)] == [[1.0], [2.0], [0.0]]

    def test_allocation_that_fails_midway_frees_nothing_under_a_copy(self):
        tensors = self.tensors()
        memory = DeviceMemory(lambda: tensors)
        with mock.patch.object(device_memory, "host_memory", failing(host_memory, 2)), pytest.raises(MemoryError):
            memory.sleep()
        assert not memory.asleep and [one.unique().tolist() for one in tensors] == [[1.0], [2.0]]


class TestSnapshots:
    def tensors(self):
        made = {
            "a": torch.randn(100, device=DEVICE),
            "transposed": torch.randn(3, 5, device=DEVICE).t(),
            "empty": torch.empty(0, 4, device=DEVICE),
            "scalar": torch.tensor(3.0, device=DEVICE),
        }
        return made, {name: tensor.cpu().clone() for name, tensor in made.items()}

    def test_taken_and_written_back(self):
        live, expected = self.tensors()
        snapshot = take_snapshot(live, None)
        assert snapshot.memory.is_pinned()
        assert {part.device.type for part in snapshot.parts.values()} == {"cpu"}
        assert all(torch.equal(snapshot.parts[name], expected[name]) for name in live)
        for tensor in live.values():
            tensor.zero_()
        write_snapshot(snapshot, live, "the first")
        assert all(torch.equal(live[name].cpu(), expected[name]) for name in live)

    def test_copy_that_fails_midway_frees_nothing_under_another(self):
        live, _ = self.tensors()
        with mock.patch.object(torch.Tensor, "copy_", failing(torch.Tensor.copy_, 2)), pytest.raises(MemoryError):
            take_snapshot(live, None)


@pytest.mark.parametrize("source", ["cuda", "pinned", "plain"])
@pytest.mark.parametrize("target", ["cuda", "pinned", "plain"])
def test_bucket_is_copied_when_copy_into_returns(source, target):
    tensor = torch.arange(10.0)
    tensor = tensor.to(DEVICE) if source == "cuda" else tensor.pin_memory() if source == "pinned" else tensor
    flat = FlatBuffer(DEVICE if target == "cuda" else "cpu", pinned=target == "pinned").take(64)
    specs, _ = tensor_specs([("a", tensor)])
    copy_into(flat, specs, [tensor])
    tensor.zero_()
    ((_, copy),) = views(flat, specs)
    assert copy.tolist() == list(range(10))


def test_deltas_and_digests():
    old = torch.randn(1000, device=DEVICE).bfloat16()
    new = old.clone()
    new[::17] += 1
    delta.apply(delta.encode(new, old), old)
    assert torch.equal(old, new) and digest(old) == digest(new.cpu())
