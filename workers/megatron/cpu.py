"""Megatron on a machine without CUDA: everything that is needed for it, in this file.

Megatron asks `torch.cuda` for the current device and for random states, and writes ``device="cuda"`` in its schedules
and its optimizer. Where there is no CUDA, `install` lets those questions be answered for the CPU, and `rewrite_thread`
puts a mode on a thread under which "cuda" means "cpu". No source of megatron is changed. Where there is CUDA, both do
nothing.
"""

from __future__ import annotations

import logging
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

from workers.device import has_cuda

logger = logging.getLogger(__name__)

_thread = threading.local()

_WARNINGS_ABOUT_GPUS = (
    "Transformer Engine and Apex are not installed",
    "When using async grad allreduce",
    "Apex is not installed. Falling back to Torch Norm",
    "full scope is deprecated",
)
"""Megatron's advice that helps nobody without CUDA."""


@cache
def quiet() -> None:
    """Leave out megatron's advice about GPUs where there is none. Most of it comes while megatron is imported: call
    this before."""
    if not has_cuda():
        for about_gpus in _WARNINGS_ABOUT_GPUS:
            warnings.filterwarnings("ignore", message=about_gpus)


@cache
def install() -> bool:
    """Let Megatron find a CPU where it looks for its CUDA device. Once in a process.

    Returns:
        Whether anything was done, which is whether there is no CUDA.
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
    }
    for name, answer in answers.items():
        setattr(torch.cuda, name, answer)
    random._get_cuda_rng_state = lambda device="cpu", clone=False, graph_safe=False: torch.get_rng_state()
    random._set_cuda_rng_state = lambda new_state, device=-1, graph_safe=False: torch.set_rng_state(new_state)
    random.CudaRNGStatesTracker = _cpu_tracker(random)
    random.initialize_rng_tracker(force_reset=True)
    _use_gloo_for_nccl()
    return True


def rewrite_thread() -> None:
    """From here on, "cuda" means "cpu" for the torch functions that this thread calls. Only after `install`.

    torch keeps such modes for each thread, and so does ``torch.set_default_device``, which works the same way.
    """
    if getattr(_thread, "rewritten", False) or not install():
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
    """Megatron's optimizers take parameters of torch.cuda types only, and ask for the name; nobody else is told so."""
    return name.replace("torch.", "torch.cuda.", 1) if asked_by.startswith("megatron.") else name


def _cpu_tracker(random: Any) -> type[Any]:
    """Megatron's tracker of random states, on the CPU's generator. The original warns when that one moves."""
    import torch

    class CpuRNGStatesTracker(random.CudaRNGStatesTracker):
        @contextmanager
        def fork(self, name: str = random._MODEL_PARALLEL_RNG_TRACKER_NAME) -> Iterator[None]:
            if name not in self.states_:
                raise RuntimeError(
                    f"the random state {name!r} is not known: call "
                    "tensor_parallel.model_parallel_cuda_manual_seed(seed) after initialising megatron"
                )
            outside = torch.get_rng_state()
            torch.set_rng_state(self.states_[name])
            try:
                yield
            finally:
                self.states_[name] = torch.get_rng_state()
                torch.set_rng_state(outside)

    return CpuRNGStatesTracker


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
            logger.warning("no CUDA device here: torch.distributed uses gloo where nccl was asked for")
            kwargs.pop("device_id", None)
            return make(*arguments, **kwargs)

        return made

    dist.init_process_group = on_cpu(dist.init_process_group, position=0)
    dist.new_group = on_cpu(dist.new_group, position=2)
