"""Megatron on a machine without CUDA, for tests and demos. Nothing else in the library imports this module.

Megatron asks `torch.cuda` for the current device and for random states, and has ``device="cuda"`` in its schedules and
its optimizer. In a worker of one of the classes below, those functions answer for the CPU where there is no CUDA: they
are patched once in the process, and each thread that runs the worker's methods enters a mode in which "cuda" means
"cpu". Megatron's sources are not changed. With CUDA, the classes are those that they extend.

This module starts no thread and has no lock: the patches are made while a worker is constructed, before other threads
run its methods, and `_thread` is local to each thread.
"""

from __future__ import annotations

import logging
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import cache
from typing import Any, Self

from workers.device import has_cuda
from workers.extras import require
from workers.megatron.lm_worker import MegatronLMWorker
from workers.megatron.megatron_train_worker import MegatronTrainWorker
from workers.megatron.megatron_worker import MegatronWorker

logger = logging.getLogger(__name__)

_thread = threading.local()

_WARNINGS_ABOUT_GPUS = (
    "Transformer Engine and Apex are not installed",
    "When using async grad allreduce",
    "Apex is not installed. Falling back to Torch Norm",
    "full scope is deprecated",
)
"""Beginnings of megatron's warnings that only concern GPUs."""


class CpuMegatronWorker(MegatronWorker):
    """A `MegatronWorker` that also runs without CUDA: "cuda" means the CPU and "nccl" means gloo in its methods, so
    code written for GPUs runs unchanged. To use it with a class that is a `MegatronWorker` already, put it first among
    the bases."""

    needs_cuda = False

    def __new__(cls, *args: object, **kwargs: object) -> Self:
        if not has_cuda():
            for about_gpus in _WARNINGS_ABOUT_GPUS:  # megatron emits most of them when it is imported
                warnings.filterwarnings("ignore", message=about_gpus)
            require("megatron.core", extra="megatron")
            rewrite_thread()
        return super().__new__(cls, *args, **kwargs)

    def _prepare_thread(self) -> None:
        rewrite_thread()
        super()._prepare_thread()


class CpuMegatronLMWorker(CpuMegatronWorker, MegatronLMWorker):
    """A `MegatronLMWorker` that also runs without CUDA."""


class CpuMegatronTrainWorker(CpuMegatronWorker, MegatronTrainWorker):
    """A `MegatronTrainWorker` that also runs without CUDA, for `RayTrainGroup`'s ``actor_cls``."""


@cache
def _install() -> bool:
    """Patch `torch.cuda` and megatron's random states for the CPU, once per process.

    Returns:
        Whether the patches are needed, which is whether there is no CUDA.
    """
    if has_cuda():
        return False
    import torch
    from megatron.core.tensor_parallel import random

    cpu = torch.device("cpu")
    answers: dict[str, Callable[..., Any]] = {
        "current_device": lambda: cpu,
        "set_device": lambda device: None,
        "synchronize": lambda device=None: None,
        "get_rng_state": lambda device=None: torch.get_rng_state(),
        "set_rng_state": lambda new_state, device=None: torch.set_rng_state(new_state),
        "manual_seed": lambda seed: torch.manual_seed(seed),
        "Stream": _NoStream,
        "current_stream": lambda device=None: _NoStream(),
        "stream": lambda stream: nullcontext(),
    }
    for name, answer in answers.items():
        setattr(torch.cuda, name, answer)
    random._get_cuda_rng_state = lambda device="cpu", clone=False, graph_safe=False: torch.get_rng_state()
    random._set_cuda_rng_state = lambda new_state, device=-1, graph_safe=False: torch.set_rng_state(new_state)
    random.CudaRNGStatesTracker = _cpu_tracker(random)
    # Replace a tracker that Megatron may already have created.
    random.initialize_rng_tracker(force_reset=True)
    _rewrite_recomputation(random.CheckpointFunction)
    _use_gloo_for_nccl()
    _dispatch_tokens_on_cpu()
    return True


def rewrite_thread() -> None:
    """From now on, "cuda" means "cpu" in the torch functions that this thread calls; patches the process too.

    torch's function modes are per thread, so every thread that runs a worker's methods calls this. The mode is never
    exited: it ends with the thread.
    """
    if getattr(_thread, "rewritten", False) or not _install():
        return
    _thread.rewritten = True
    _thread.mode = _mode_class()()
    _thread.mode.__enter__()


@cache
def _mode_class() -> type[Any]:
    import torch
    from torch.overrides import TorchFunctionMode

    def is_cuda(value: Any) -> bool:
        if isinstance(value, str):
            return value == "cuda" or value.startswith("cuda:")
        return isinstance(value, torch.device) and value.type == "cuda"

    cpu = torch.device("cpu")

    class CudaMeansCpu(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs = kwargs or {}
            if func is torch.Tensor.cuda:
                return args[0]
            if func is torch.device and args and is_cuda(args[0]):
                return cpu
            if func is torch.Tensor.type and len(args) == 1 and not kwargs:
                return _type_name(func(*args), sys._getframe(1).f_globals.get("__name__", ""))
            if is_cuda(kwargs.get("device")):
                kwargs = {**kwargs, "device": "cpu"}
            if func is torch.Tensor.to and any(map(is_cuda, args)):
                args = tuple("cpu" if is_cuda(arg) else arg for arg in args)
            return func(*args, **kwargs)

    return CudaMeansCpu


def _type_name(name: str, asked_by: str) -> str:
    """Megatron's optimizers accept only parameters whose type name begins with torch.cuda; other callers get the real
    name."""
    return name.replace("torch.", "torch.cuda.", 1) if asked_by.startswith("megatron.") else name


def _cpu_tracker(random: Any) -> type[Any]:
    """Megatron's tracker of random states on the CPU's generator. The original warns when that generator advances."""
    import torch

    class CpuRNGStatesTracker(random.CudaRNGStatesTracker):
        @contextmanager
        def fork(self, name: str = random._MODEL_PARALLEL_RNG_TRACKER_NAME) -> Iterator[None]:
            if name not in self.states_:
                raise RuntimeError(
                    f"there is no random state {name!r}; call tensor_parallel.model_parallel_cuda_manual_seed(seed) "
                    "after initialising megatron"
                )
            outside = torch.get_rng_state()
            torch.set_rng_state(self.states_[name])
            try:
                yield
            finally:
                self.states_[name] = torch.get_rng_state()
                torch.set_rng_state(outside)

    return CpuRNGStatesTracker


def _rewrite_recomputation(function: Any) -> None:
    """Let activations be computed again in the mode: torch runs backward passes outside the mode that called them."""
    backward = function.backward

    def in_mode(*args: Any) -> Any:
        with _mode_class()():
            return backward(*args)

    function.backward = staticmethod(in_mode)


class _NoStream:
    """A stream or an event of the CPU, where everything is done when a call returns. The dispatcher of tokens by
    all-to-all copies sizes on a stream of its own."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def wait_stream(self, stream: Any) -> None: ...

    def synchronize(self) -> None: ...

    def record_event(self) -> _NoStream:
        return self


def _dispatch_tokens_on_cpu() -> None:
    """Let the all-to-all dispatcher run on the CPU. It makes numpy arrays of the sizes of its splits on a device only,
    and gloo gathers and reduces equal splits only."""
    import torch
    import torch.distributed as dist
    from megatron.core.tensor_parallel import mappings
    from megatron.core.transformer.moe import token_dispatcher

    def to_host(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor

    gather_equal, reduce_equal = mappings._gather_along_first_dim, mappings._reduce_scatter_along_first_dim

    def gather(own: Any, group: Any = None, output_split_sizes: Any = None, use_global_buffer: bool = False) -> Any:
        if output_split_sizes is None:
            return gather_equal(own, group, None, use_global_buffer)
        padded = own.new_zeros(max(output_split_sizes), *own.shape[1:])
        padded[: len(own)] = own
        parts = [torch.empty_like(padded) for _ in output_split_sizes]
        dist.all_gather(parts, padded, group=group)
        return torch.cat([part[:size] for part, size in zip(parts, output_split_sizes, strict=True)])

    def reduce(whole: Any, group: Any = None, input_split_sizes: Any = None, use_global_buffer: bool = False) -> Any:
        if input_split_sizes is None:
            return reduce_equal(whole, group, None, use_global_buffer)
        total = whole.clone()
        dist.all_reduce(total, group=group)
        return total.split(list(input_split_sizes))[group.rank()].clone()

    token_dispatcher.maybe_move_tensor_to_cpu = to_host
    mappings._gather_along_first_dim, mappings._reduce_scatter_along_first_dim = gather, reduce


def _use_gloo_for_nccl() -> None:
    import torch.distributed as dist

    def on_cpu(make: Callable[..., Any], position: int) -> Callable[..., Any]:
        def made(*args: Any, **kwargs: Any) -> Any:
            arguments = list(args)
            if len(arguments) > position and arguments[position] == "nccl":
                arguments[position] = "gloo"
            elif kwargs.get("backend") == "nccl":
                kwargs["backend"] = "gloo"
            else:
                return make(*args, **kwargs)
            logger.warning("no CUDA device is available: torch.distributed uses gloo instead of nccl")
            kwargs.pop("device_id", None)
            return make(*arguments, **kwargs)

        return made

    dist.init_process_group = on_cpu(dist.init_process_group, position=0)
    dist.new_group = on_cpu(dist.new_group, position=2)
