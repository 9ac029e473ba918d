"""Offload frees device memory, and onload restores it."""

import multiprocessing
from concurrent.futures import ProcessPoolExecutor

import pytest
import torch

from single_controller.call import codec
from workers.device import has_accelerator
from workers.device_memory import DeviceMemory, saver_preloaded
from workers.weight_files import WeightFiles
from workers.weight_sync import delta
from workers.weight_sync.digest import digest

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def on(device):
    if device == "cuda" and not has_accelerator():
        pytest.skip("needs a CUDA device")
    return torch.device(device, 0) if device == "cuda" else torch.device(device)


def read_digest(weight, _):
    digest(weight)


def read_encoded(weight, _):
    codec.encode(weight)


def read_changes(weight, _):
    delta.encode(weight, weight.clone())


def write_changes(weight, _):
    changed = weight.clone()
    changed[::100] = 2.0
    delta.apply(delta.encode(changed, weight.clone()), weight)


def export(weight, folder):
    files = WeightFiles({"w": ((1000,), torch.float32)})
    files.create(folder)
    files.write(folder, [("w", ((0, 1000),), weight)])


@pytest.mark.parametrize("use", [read_digest, read_encoded, read_changes, write_changes, export])
def test_weights_that_were_in_use_can_be_offloaded(use, tmp_path):
    """`Tensor.numpy` would make their storage one that cannot be resized: that memory would not be freed."""
    if has_accelerator():
        pytest.skip("CPU tensors are not offloaded where CUDA is available")
    weight = torch.ones(1000)
    use(weight, tmp_path)
    assert DeviceMemory(lambda: [weight]).sleep() == 4000


@pytest.mark.parametrize("device", DEVICES)
def test_offload_frees_memory_and_onload_restores_it(device):
    device = on(device)
    if device.type == "cpu" and has_accelerator():
        pytest.skip("CPU tensors are not offloaded where CUDA is available")
    layer = torch.nn.Linear(100, 50, device=device)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=0.1, foreach=True)
    layer(torch.ones(2, 100, device=device)).sum().backward()
    optimizer.step()
    flat = torch.randn(1000, device=device)
    views = [flat[:10], flat[500:].view(50, 10).t()]
    moments = [value for state in optimizer.state.values() for value in state.values()]
    tensors = [*layer.parameters(), *moments, *views, torch.empty(0, device=device)]
    before = [tensor.detach().clone() for tensor in tensors]
    expected = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors if t.device == device}
    memory = DeviceMemory(lambda: iter(tensors))
    for _ in range(2):
        assert memory.sleep() == sum(expected.values())
        assert memory.asleep and memory.sleep() == 0
        assert all(t.untyped_storage().nbytes() == 0 for t in tensors if t.device == device)
        assert memory.wake_up() == sum(expected.values())
        assert not memory.asleep and memory.wake_up() == 0
        assert all(torch.equal(now, then) for now, then in zip(tensors, before, strict=True))
    assert views[0].untyped_storage()._cdata == flat.untyped_storage()._cdata
    views[0].zero_()
    assert not bool(flat[:10].any())
    layer(torch.ones(2, 100, device=device)).sum().backward()  # training continues with the same objects
    optimizer.step()
    assert not torch.equal(layer.weight, before[0])


def test_offloaded_memory_is_returned_to_the_system():
    """The resident size falls by the size that was offloaded, except for the copy.

    Runs in a process of its own: in this one, malloc could reuse memory that earlier tests freed, and such memory never
    returns to the system.
    """
    if has_accelerator():
        pytest.skip("CPU tensors are not offloaded where CUDA is available")
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        before, asleep = pool.submit(resident_before_and_asleep).result()
    assert asleep < before + (32 << 20)  # the copies exist, the tensors' own memory does not


def resident_before_and_asleep():
    tensors = [torch.ones(8 << 20) for _ in range(4)]
    memory = DeviceMemory(lambda: tensors)
    before = resident()
    assert memory.sleep() == 4 * (32 << 20)
    return before, resident()


def test_host_memory_is_reused():
    tensor = torch.ones(1000)
    if has_accelerator():
        tensor = tensor.cuda()
    memory = DeviceMemory(lambda: [tensor])
    memory.sleep()
    first = memory._moved[0][1]
    memory.wake_up()
    memory.sleep()
    assert memory._moved[0][1] is first
    memory.wake_up()
    assert bool((tensor == 1).all())


def test_memory_not_owned_by_the_tensors_stays():
    import numpy

    if has_accelerator():
        pytest.skip("CPU tensors are not offloaded where CUDA is available")
    borrowed, own = torch.from_numpy(numpy.ones(10)), torch.ones(10)
    memory = DeviceMemory(lambda: [borrowed, own])
    assert memory.sleep() == 40
    assert bool((borrowed == 1).all())
    memory.wake_up()
    assert bool((own == 1).all())


def test_failed_offload_leaves_everything_on_the_device(monkeypatch):
    tensors = [torch.ones(10), torch.ones(20)]
    if has_accelerator():
        tensors = [tensor.cuda() for tensor in tensors]
    memory = DeviceMemory(lambda: tensors)

    def host_memory(nbytes, *, pinned):
        if nbytes == 80:
            raise MemoryError("no room")
        return torch.empty(nbytes, dtype=torch.uint8)

    monkeypatch.setattr("workers.device_memory.host_memory", host_memory)
    with pytest.raises(MemoryError):
        memory.sleep()
    monkeypatch.undo()
    assert not memory.asleep and all(bool((tensor == 1).all()) for tensor in tensors)
    assert memory.sleep() == 120


@pytest.mark.parametrize("saver", [False, True], ids=["by copies", "by torch_memory_saver"])
def test_scratch_is_freed_without_a_copy_and_comes_back_as_zeros(saver, monkeypatch):
    """Also where torch_memory_saver copies everything that is allocated when it pauses."""
    device = on("cuda" if has_accelerator() else "cpu")
    kept, gradients = torch.ones(1000, device=device), torch.ones(5000, device=device)
    view, both = gradients[10:], kept[5:]  # `both` is in memory that has to be kept
    allocated = []
    monkeypatch.setattr("workers.device_memory.saver_preloaded", lambda: saver)
    for name, result in (("_pause", 4000), ("_resume", 4000)):
        allocate = lambda result=result: allocated.append(gradients.untyped_storage().nbytes()) or result  # noqa: E731
        monkeypatch.setattr(f"workers.device_memory.{name}", allocate)
    memory = DeviceMemory(lambda: [kept], lambda: [gradients, view, both])
    for _ in range(2):
        assert memory.sleep() == 4000 + 20000 and gradients.untyped_storage().nbytes() == 0
        assert memory.nbytes == (0 if saver else 4000)
        assert memory.paused is saver
        assert memory.wake_up() == 4000 + 20000 and not memory.paused
        assert bool((kept == 1).all()) and gradients.shape == (5000,)
        assert not bool(gradients.any()) and view.data_ptr() == gradients[10:].data_ptr()
        gradients.fill_(3.0)
    assert allocated == ([0] * 4 if saver else [])


def test_failed_pause_brings_the_scratch_back(monkeypatch):
    kept, gradients = torch.ones(10), torch.ones(20)
    if has_accelerator():
        kept, gradients = kept.cuda(), gradients.cuda()

    def fails():
        raise MemoryError("no room")

    monkeypatch.setattr("workers.device_memory.saver_preloaded", lambda: True)
    monkeypatch.setattr("workers.device_memory._pause", fails)
    memory = DeviceMemory(lambda: [kept], lambda: [gradients])
    with pytest.raises(MemoryError):
        memory.sleep()
    assert not memory.asleep and not memory.paused and gradients.untyped_storage().nbytes() == 80


@pytest.mark.parametrize("failing", ["scratch", "empty_cache"])
def test_failed_offload_keeps_the_contents(monkeypatch, failing):
    kept, gradients = torch.ones(10), torch.ones(20)
    if has_accelerator():
        kept, gradients = kept.cuda(), gradients.cuda()

    def fails():
        raise MemoryError("no room")

    with monkeypatch.context() as patched:
        if failing == "empty_cache":
            patched.setattr("workers.device_memory.empty_cache", fails)
        memory = DeviceMemory(lambda: [kept], fails if failing == "scratch" else lambda: [gradients])
        for _ in range(2):
            with pytest.raises(MemoryError):
                memory.sleep()
            sizes = [tensor.untyped_storage().nbytes() for tensor in (kept, gradients)]
            assert sizes == [40, 80]  # first: to show an emptied tensor would end the process
            assert not memory.asleep and bool((kept == 1).all())


def test_memory_saver_is_not_used_without_cuda(monkeypatch):
    for name in ("TMS_INIT_ENABLE", "TMS_INIT_ENABLE_CPU_BACKUP"):
        monkeypatch.setenv(name, "1")
    if not has_accelerator():
        assert not saver_preloaded()


def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096
