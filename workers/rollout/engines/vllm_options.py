"""What `VLLMEngine` starts vLLM with: environment variables, engine arguments, a folder for its files, and
a handler for its log."""

from __future__ import annotations

import dataclasses
import difflib
import fcntl
import functools
import importlib
import logging
import os
import shutil
import tempfile
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from workers.data.rollout_data import LARGEST_SET
from workers.device import has_accelerator
from workers.rollout.engines.rollout_engine import TIES
from workers.rollout.rollout_errors import RolloutError

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine's thread takes vLLM's steps in this process
    "VLLM_USE_V2_MODEL_RUNNER": "0",  # its sampler has no logits processors between the temperature and top-k
}
"""What `VLLMEngine` needs in the environment of its process, whatever was there."""

DEFAULTS = {
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
}
"""What `VLLMEngine` sets in the environment of its process unless it is there."""

FIXED = {
    "generation_config": "vllm",  # only SamplingParams count
    "logprobs_mode": "processed_logits",  # see `LogProbs`
    "logits_processors": ["workers.rollout.engines.vllm_worker:LogProbs"],
    "worker_extension_cls": "workers.rollout.engines.vllm_worker.LayerwiseReload",
    "async_scheduling": False,  # a step that is still running after step() would read weights that are being updated
    "stream_interval": 1,  # tokens that are reported later would get a later weight version
    "pipeline_parallel_size": 1,  # as with async_scheduling
    "data_parallel_size": 1,  # each rollout worker has an engine
    "skip_tokenizer_init": True,
    "disable_log_stats": True,  # they are of no use here, and cost time in each step
}
"""vLLM's arguments that `VLLMEngine` sets itself, because its guarantees depend on them."""

FIXED_ON_CPU = {
    "enable_chunked_prefill": False,
    "long_prefill_token_threshold": 0,
    "enable_expert_parallel": False,
}
"""More of them on the CPU. After a step in which a prompt was computed in part, vLLM takes back what its sampler has
drawn of the request's random numbers; generators on the CPU cannot do this ("CPU Generator does not use offset"). With
expert parallelism, the processes of vLLM 0.32 die by SIGSEGV in the kernels for experts."""

KV_CACHE_BYTES = 1 << 30
"""Default size of the key/value cache on the CPU. vLLM's own is most of the machine's memory."""

SOCKETS = "VLLM_RPC_BASE_PATH"
"""vLLM's variable for the folder of its sockets."""

PREFIX = "vllm-engine-"
"""How the names of the engines' folders begin."""

UNLOCKED_SECONDS = 60.0
"""How old a folder may be that its process has not locked yet."""

_EXPERTS = {"return_routed_experts", "enable_return_routed_experts"}
"""HFEngine's argument and vLLM's for `Completion.routed_experts`."""

_OWN = {"model": "model", "dtype": "param_dtype"}
"""vLLM's arguments that `VLLMEngine` has under another name."""


def import_vllm(eager: bool) -> Any:
    """Set the environment variables and return the module.

    Args:
        eager: whether the model will run without torch.compile.

    Raises:
        ImportError: vLLM is not installed.
        RolloutError: the process has a process group.
    """
    import torch

    # Set these before the import, during which vLLM reads some of them.
    os.environ.update(ENVIRONMENT)
    for name, value in DEFAULTS.items():
        os.environ.setdefault(name, value)
    if not has_accelerator():
        if eager:
            os.environ.setdefault("TORCH_COMPILE_DISABLE", "1")  # a function of vLLM's sampler needs a C++ compiler
        if "OMP_NUM_THREADS" in os.environ:
            os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # or vLLM sets the number by itself
    try:
        vllm = importlib.import_module("vllm")
    except ModuleNotFoundError as error:
        if error.name != "vllm":
            raise
        raise ImportError(
            "VLLMEngine: vLLM is not installed in this environment. For the CPU, make one with `make setup-vllm`; for "
            "CUDA, pip install 'single-controller[vllm]'. See docs/engines.md",
            name="vllm",
        ) from None
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        raise RolloutError(
            "VLLMEngine: this process has a default process group of torch.distributed, of another engine or of a "
            "trainer; run the engine in a process of its own"
        )
    return vllm


def arguments_for(vllm: Any, engine_args: Mapping[str, Any]) -> dict[str, Any]:
    """Return the caller's arguments and `VLLMEngine`'s own.

    Raises:
        TypeError: vLLM has no such argument, or `VLLMEngine` sets it itself or cannot have it.
    """
    fixed = FIXED if has_accelerator() else FIXED | FIXED_ON_CPU
    known = {field.name for field in dataclasses.fields(vllm.EngineArgs) if not field.name.startswith("_")}
    for name, value in engine_args.items():
        if name in _EXPERTS and value:
            raise TypeError(
                f"VLLMEngine: {name}=True is not possible: vLLM returns routed experts with its Model Runner V2 alone, "
                "which needs Triton, and whose sampler cannot tell log-probabilities before top-k and top-p. Use "
                "HFEngine, or train with routing_replay='R2', which needs none of the rollout"
            )
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            raise TypeError(f"VLLMEngine: vLLM {vllm.__version__} has no engine argument {name!r}{hint}")
        if name in _OWN:
            raise TypeError(f"VLLMEngine: {name!r} is set by VLLMEngine's own argument {_OWN[name]!r}")
        if name in fixed and value != fixed[name]:
            where = " on the CPU" if name in FIXED_ON_CPU else ""
            raise TypeError(f"VLLMEngine: {name!r} is always {fixed[name]!r}{where}, got {value!r}; leave it out")
    return {**_defaults(engine_args), **engine_args, **fixed}


def _defaults(engine_args: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of vLLM whose defaults differ here."""
    chosen: dict[str, Any] = {"max_logprobs": LARGEST_SET + TIES}
    if engine_args.get("tensor_parallel_size", 1) > 1:
        chosen["distributed_executor_backend"] = "mp"  # else Ray, where it runs: its actors could outlive the worker
    if has_accelerator():
        chosen["enable_sleep_mode"] = True
    else:
        chosen["enforce_eager"] = True
        if "VLLM_CPU_KVCACHE_SPACE" not in os.environ and "gpu_memory_utilization" not in engine_args:
            chosen["kv_cache_memory_bytes"] = KV_CACHE_BYTES
    return chosen


class EngineFolder:
    """A folder for the files of an engine and of vLLM. What killed processes have left of theirs is removed.

    It has the same name for all engines of a process, because vLLM reads the variable `SOCKETS` only once.

    Attributes:
        path: of the folder.

    Raises:
        RolloutError: another user has created the folder since an earlier engine of this process removed it.
    """

    def __init__(self) -> None:
        self.path, owner = _folder_of(os.getpid())
        self.path.mkdir(mode=0o700, exist_ok=True)
        if self.path.lstat().st_uid != owner:
            raise RolloutError(f"VLLMEngine: another user has created {self.path}; start the engine in a new process")
        self._lock = os.open(self.path, os.O_RDONLY)
        # Use a shared lock, because an engine that is being closed may hold it too. The kernel always releases it.
        fcntl.flock(self._lock, fcntl.LOCK_SH)  # until this process ends
        _remove_abandoned(self.path.parent)

    def remove(self) -> None:
        """Delete the folder."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


@functools.cache
def _folder_of(pid: int) -> tuple[Path, int]:
    path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=os.environ.get(SOCKETS)))
    return path, path.lstat().st_uid


def _remove_abandoned(parent: Path) -> None:
    for folder in parent.glob(f"{PREFIX}*"):
        with suppress(OSError):  # another process has locked it, or it is another user's
            if time.time() - folder.stat().st_mtime > UNLOCKED_SECONDS:
                lock = os.open(folder, os.O_RDONLY)
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(folder)
                finally:
                    os.close(lock)


@contextmanager
def files_in(folder: Path) -> Iterator[None]:
    """Have vLLM make its files in a folder while it starts: its sockets, and the file by which its processes find each
    other. It would leave them behind in the folder for temporary files, where nobody knows whose they are."""
    modules = [importlib.import_module(f"vllm.v1.executor.{name}_executor") for name in ("uniproc", "multiproc")]
    (vllms,) = {module.get_file_store_init_method for module in modules}
    sockets = os.environ.get(SOCKETS)

    def here() -> str:
        return f"file://{folder / Path(vllms()).name}"

    try:
        os.environ[SOCKETS] = str(folder)
        for module in modules:
            module.get_file_store_init_method = here  # type: ignore[attr-defined]
        yield
    finally:
        for module in modules:
            module.get_file_store_init_method = vllms  # type: ignore[attr-defined]
        # Other child processes of this one must not inherit the folder.
        del os.environ[SOCKETS]
        if sockets is not None:
            os.environ[SOCKETS] = sockets


LINE = 500
"""How much of each of vLLM's errors is kept. When a step fails, it logs its whole configuration as one."""


class LastLines(logging.Handler):
    """Keeps the last errors that vLLM has logged in this process."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self._lines: deque[str] = deque(maxlen=10)

    def begin(self) -> None:
        """Listen, until `close`."""
        logging.getLogger("vllm").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self._lines.append(record.getMessage()[:LINE])

    def close(self) -> None:
        logging.getLogger("vllm").removeHandler(self)
        super().close()

    def __str__(self) -> str:
        return "\nvLLM's last lines:\n" + "\n".join(self._lines) if self._lines else ""
