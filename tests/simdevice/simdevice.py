"""Make a CPU build of torch have simulated CUDA devices, on which code for CUDA runs unchanged.

`hook` is called before torch is imported, by ``boot/sitecustomize.py`` in every process that has that folder on
PYTHONPATH and ``SIMDEVICE=1``: torch asks for its CUDA hooks once, while it is imported. `simdevice.cpp` has the device
itself: memory that the host cannot read, streams whose copies and collectives happen as late as is legal, random
numbers, IPC, and "nccl" over gloo. This file puts it in the place of what `torch.cuda` takes from a build with CUDA.

Kernels happen at once. That two streams use the same memory in no order is found all the same: vector clocks tell what
each stream, and the host, has waited for, and each block of memory knows its last uses. It is a *fault*, as is pinned
memory that is freed under a copy: ``torch._simdevice.faults()`` has those of the process, and the file `faults` in the
session's folder those of all.

Environment: ``SIMDEVICE_DEVICES``, the number of devices (16); ``SIMDEVICE_BYTES``, the memory of each (8 GiB);
``SIMDEVICE_SESSION``, a folder that the processes of a run have in common, by which they share that memory: the first
one sets it; ``CUDA_VISIBLE_DEVICES`` as usual: it is read when a process first uses a device, which may be after torch
was imported.

Not simulated: the order of uses of host memory by the kernels of two streams, and of device memory by two processes
(their copies are late all the same); CUDA graphs, triton and flash kernels, the device's side of profiles, speed.
"""

import atexit
import contextlib
import ctypes
import datetime
import importlib.util
import os
import shutil
import sys
import time
import types
import uuid

from build import device_type, library

DEFAULT_BYTES = 8 << 30
KIND = device_type()


def hook():
    """Have the device installed when torch is imported."""
    if "SIMDEVICE_SESSION" not in os.environ:
        folder = f"/dev/shm/simdevice-{os.getpid()}-{time.time_ns()}"  # made when it is needed
        os.environ["SIMDEVICE_SESSION"] = folder
        atexit.register(_end_session, folder, os.getpid())
    sys.meta_path.insert(0, _Finder())


def _end_session(folder, process):
    if os.getpid() == process:  # not in a fork
        shutil.rmtree(folder, ignore_errors=True)


class _Finder:
    """Finds torch, and installs the device around its import."""

    def find_spec(self, name, path=None, target=None):
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec("torch")
        run = spec.loader.exec_module

        def exec_module(module):
            _preload(os.path.dirname(spec.origin))
            run(module)
            install()

        spec.loader.exec_module = exec_module
        return spec


def _preload(folder):
    """Register the hooks before torch asks for them."""
    for name in ("libtorch_global_deps.so", "libtorch_cpu.so", "libtorch_python.so"):
        ctypes.CDLL(os.path.join(folder, "lib", name), ctypes.RTLD_GLOBAL)
    ctypes.CDLL(str(library()))


def install():
    """Replace the parts of torch that a build with CUDA has in C++."""
    import torch

    spec = importlib.util.spec_from_file_location("simdevice", library())
    device = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(device)
    if not device.installed():
        raise RuntimeError("torch did not take the hooks of the simulated device")
    torch._simdevice = device
    if KIND != "cuda":
        _install_npu(torch, device)
        return
    _install_cuda(torch, device, torch.cuda)
    _install_storages(torch, device)
    _install_nccl(torch, device)
    _install_profiler(torch)
    torch.version.cuda = "12.8"
    torch.backends.cuda.is_built = lambda: True


class _Generators:
    """`torch.cuda.default_generators`."""

    def __init__(self, device):
        self._device = device

    def __len__(self):
        return len(self._device.ids())

    def __getitem__(self, number):
        if not 0 <= number < len(self):
            raise IndexError(number)
        return self._device.generator(number)


def _install_npu(torch, device):
    """As an extension does: it names torch's PrivateUse1, and registers a module and a backend. torch has no handles to
    such memory for other processes."""
    import torch.distributed as dist

    def hccl(wanted, _):
        options = device.Options()
        options._timeout = wanted.timeout
        return device.ProcessGroupNCCL(wanted.store, wanted.group_rank, wanted.group_size, options)

    device.ProcessGroupNCCL.abort = lambda self: self._abort()
    torch.utils.rename_privateuse1_backend(KIND)
    module = types.ModuleType(f"torch.{KIND}")
    module.memory, module.random, module.streams = (types.SimpleNamespace() for _ in range(3))
    torch._register_device_module(KIND, module)
    _install_cuda(torch, device, module)
    torch.utils.generate_methods_for_privateuse1_backend()
    dist.Backend.register_backend("hccl", hccl, extended_api=True, devices=[KIND])


def _install_cuda(torch, device, cuda):
    def index(given=None, optional=True):
        if given is None:
            return device.device()
        given = torch.device(given) if isinstance(given, str) else given
        if isinstance(given, torch.device):
            if given.type != KIND:
                raise ValueError(f"Expected a {KIND} device, but got: {given}")
            return device.device() if given.index is None else given.index
        if hasattr(given, "idx"):  # torch.cuda.device
            return given.idx
        return device.device() if given < 0 else int(given)

    class Stream(torch.Stream):
        def __new__(cls, device=None, priority=0, **known):
            if known:
                return torch.Stream.__new__(cls, **known)
            return torch.Stream.__new__(cls, device=torch.device(KIND, index(device)), priority=priority)

        cuda_stream = property(lambda self: self.stream_id)

        def __enter__(self):
            self._before = current_stream(self.device)
            set_stream(self)
            return self

        def __exit__(self, *_):
            set_stream(self._before)

    class Event(torch.Event):
        def __new__(cls, enable_timing=False, blocking=False, interprocess=False, external=False):
            options = {"enable_timing": enable_timing, "blocking": blocking, "interprocess": interprocess}
            return torch.Event.__new__(cls, torch.device(KIND), **options)

    def stream_of(number, at):
        return Stream(stream_id=number, device_index=at, device_type=20 if KIND == "npu" else 1)

    def current_stream(given=None):
        return stream_of(*device.stream(index(given)))

    def set_stream(stream):
        if stream is not None:
            device.set_stream(stream.stream_id, stream.device_index)

    @contextlib.contextmanager
    def in_stream(stream):
        if stream is None:
            yield
            return
        old, before = current_stream(stream.device), device.exchange_device(stream.device_index)
        set_stream(stream)
        try:
            yield
        finally:
            set_stream(old)
            device.exchange_device(before)

    def init():
        if not device.ids():
            raise RuntimeError("No CUDA GPUs are available")
        device.init()

    def cudart():
        init()  # as torch's does
        return runtime

    def properties(given=None):
        return types.SimpleNamespace(
            name="Simulated GPU",
            major=9,
            minor=0,
            total_memory=int(os.environ.get("SIMDEVICE_BYTES", DEFAULT_BYTES)),
            multi_processor_count=16,
            uuid=uuid.uuid5(uuid.NAMESPACE_OID, f"simdevice-{device.ids()[index(given)]}"),
            gcnArchName="",
            is_integrated=0,
            warp_size=32,
            regs_per_multiprocessor=65536,
            shared_memory_per_block_optin=232448,
            L2_cache_size=1 << 25,
            max_threads_per_multi_processor=2048,
        )

    def memory(what):
        return lambda given=None: device.memory(index(given))[what]

    def mem_get_info(given=None):
        of_device = device.memory(index(given))
        return of_device["free"], of_device["total"]

    def memory_stats(given=None):
        of_device = device.memory(index(given))
        return {
            "num_alloc_retries": 0,
            "allocated_bytes.all.current": of_device["allocated"],
            "allocated_bytes.all.peak": of_device["peak"],
        }

    generator = device.generator  # torch's functions below have a parameter of the name "device"

    def manual_seed_all(seed):
        for number in range(len(device.ids())):
            device.generator(number).manual_seed(int(seed))

    def get_rng_state(device=KIND):
        return generator(index(device)).get_state()

    def set_rng_state(new_state, device=KIND):
        generator(index(device)).set_state(new_state.cpu())

    def set_rng_state_all(states):
        for number, state in enumerate(states):
            device.generator(number).set_state(state)

    runtime = types.SimpleNamespace(
        cudaHostRegister=lambda begin, nbytes, flags=0: device.pin(begin, nbytes),
        cudaHostUnregister=device.unpin,
        cudaMemGetInfo=mem_get_info,
        cudaError=types.SimpleNamespace(success=0),
        cudaGetErrorString=lambda code: f"error {code}",
        cudaProfilerStart=lambda: 0,
        cudaProfilerStop=lambda: 0,
    )
    of_memory = {
        "mem_get_info": mem_get_info,
        "memory_allocated": memory("allocated"),
        "memory_reserved": memory("reserved"),
        "max_memory_allocated": memory("peak"),
        "max_memory_reserved": memory("peak_reserved"),
        "memory_stats": memory_stats,
        "reset_peak_memory_stats": lambda given=None: device.reset_peak(index(given)),
        "empty_cache": device.empty_cache,
    }
    of_random = {
        "manual_seed": lambda seed: device.generator(device.device()).manual_seed(int(seed)),
        "manual_seed_all": manual_seed_all,
        "initial_seed": lambda: device.generator(device.device()).initial_seed(),
        "get_rng_state": get_rng_state,
        "set_rng_state": set_rng_state,
        "get_rng_state_all": lambda: [device.generator(number).get_state() for number in range(len(device.ids()))],
        "set_rng_state_all": set_rng_state_all,
    }
    replaced = {
        **of_memory,
        **of_random,
        "is_available": lambda: bool(device.ids()),
        "is_initialized": lambda: bool(device.ids()),
        "_is_compiled": lambda: True,
        "_lazy_init": init,
        "init": init,
        "device_count": lambda: len(device.ids()),
        "current_device": device.device,
        "set_device": lambda given: device.set_device(index(given)),
        "_exchange_device": device.exchange_device,
        "_maybe_exchange_device": device.exchange_device,
        "_get_device": lambda given: torch.device(KIND, index(given)),
        "synchronize": lambda given=None: device.synchronize(index(given)),
        "Stream": Stream,
        "Event": Event,
        "current_stream": current_stream,
        "default_stream": lambda given=None: stream_of(0, index(given)),
        "set_stream": set_stream,
        "stream": in_stream,
        "StreamContext": in_stream,
        "get_device_properties": properties,
        "get_device_name": lambda given=None: "Simulated GPU",
        "get_device_capability": lambda given=None: (9, 0),
        "get_arch_list": lambda: ["sm_90"],
        "ipc_collect": lambda: None,
        "cudart": cudart,
        "is_bf16_supported": lambda including_emulation=True: True,
        "default_generators": _Generators(device),
        "is_current_stream_capturing": lambda: False,
        "_is_in_bad_fork": lambda: False,
        "can_device_access_peer": lambda one, other: True,
        "_sleep": lambda cycles: None,
    }
    for module, names in ((cuda, replaced), (cuda.memory, of_memory), (cuda.random, of_random)):
        for name, value in names.items():
            setattr(module, name, value)
    cuda.streams.Stream, cuda.streams.Event = Stream, Event
    if cuda is torch.cuda:
        torch._C._cuda_getCurrentRawStream = lambda number: device.stream(number)[0]
        torch._C._cuda_isInBadFork = lambda: False
        torch._C._cuda_getDevice = device.device
        torch._C._cuda_getDeviceCount = lambda: len(device.ids())
        torch._C._cuda_init = lambda: None


def _install_storages(torch, device):
    storages = torch.UntypedStorage
    resize_of_host = torch._C.StorageBase.resize_

    def resize_(self, nbytes):
        if self.device.type != "cuda":
            return resize_of_host(self, nbytes)
        device.resize_storage(self, nbytes)
        return self

    def share_cuda(self):
        number, process, file, begin, nbytes = device.share(self)
        return number, f"{process}:{file}:{device.ids()[number]}".encode(), nbytes, begin, b"", 0, b"", False

    def new_shared(cls, number, handle, nbytes, begin, counter, counter_at, event, synchronizes):
        process, file, made_on = handle.decode().split(":")
        if device.ids()[number] != made_on:
            raise RuntimeError(f"CUDA error: the memory is on device {made_on}, opened on {device.ids()[number]}")
        if int(process) == os.getpid():
            raise RuntimeError("CUDA error: invalid device context (memory opened in the process that made it)")
        return device.open(int(process), int(file), begin, nbytes, number, None).untyped_storage()

    to_host = torch._utils._to

    def to(self, target, non_blocking=False):
        if target.type != "cuda" or self.device == target:
            return to_host(self, target, non_blocking)
        new = torch.empty(self.nbytes(), dtype=torch.uint8, device=target).untyped_storage()
        source = torch.empty(0, dtype=torch.uint8).set_(self)
        torch.empty(0, dtype=torch.uint8, device=target).set_(new).copy_(source, non_blocking)
        return new

    storages.resize_ = resize_
    storages._share_cuda_ = share_cuda
    storages._new_shared_cuda = classmethod(new_shared)
    storages._release_ipc_counter_cuda = classmethod(lambda cls, *args, **kwargs: None)
    torch._utils._to = torch.storage._to = to


def _install_nccl(torch, device):
    import torch.distributed as dist
    import torch.distributed.constants as constants
    import torch.distributed.distributed_c10d as c10d

    group = device.ProcessGroupNCCL
    group.Options = device.Options
    group.eager_connect_single_device = lambda self, at: None
    group.abort = lambda self: self._abort()
    group.get_error = lambda self: types.SimpleNamespace(name="REMOTE_ERROR" if self._failed() else "SUCCESS")
    group.perform_nocolor_split = lambda self, at: None
    group._set_default_timeout = lambda self, timeout: None
    c10d.ProcessGroupNCCL = dist.ProcessGroupNCCL = torch._C._distributed_c10d.ProcessGroupNCCL = group
    c10d._NCCL_AVAILABLE = True
    constants.default_pg_nccl_timeout = c10d.default_pg_nccl_timeout = datetime.timedelta(minutes=10)


def _install_profiler(torch):
    """Record the host's side only: without CUPTI, torch fails to record each operator, and takes long for that."""
    from torch.profiler import ProfilerActivity
    from torch.profiler.profiler import _KinetoProfile

    begin = _KinetoProfile.__init__

    def __init__(self, *args, **kwargs):
        begin(self, *args, **kwargs)
        self.activities.discard(ProfilerActivity.CUDA)
        self.use_device = None

    _KinetoProfile.__init__ = __init__
