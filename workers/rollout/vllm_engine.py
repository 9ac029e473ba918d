"""VLLMEngine: generation with vLLM, in this process.

vLLM's public interfaces are used where they exist: `EngineArgs`, `LLMEngine` (``add_request``, ``step``,
``abort_request``, ``reset_prefix_cache``, ``collective_rpc``, ``sleep``, ``wake_up``, ``renderer``),
``worker_extension_cls`` and ``logits_processors``. These are not public, and are looked for when an engine starts:

| name, as of vLLM 0.32.0 | why |
|---|---|
| ``vllm.model_executor.model_loader.reload``: ``initialize_layerwise_reload``, ``finalize_layerwise_reload`` | the \
public ``reload_weights`` wants all tensors in one call, and the weight transfer engines bring their own transport |
| ``get_model``, ``model_config`` and ``distributed_init_method`` of a worker | what to load the tensors into, and a \
file that vLLM leaves behind |
| ``cpu_linear`` and ``quant_method`` of a layer | to repack tied weights on the CPU, after an update |
| ``LLMEngine.engine_core.shutdown()`` | an `LLMEngine` has no method that ends it |
| ``LLMEngine.engine_core.engine_core.scheduler.kv_cache_manager.usage`` | the public way, a ``StatLogger``, turns on \
all of vLLM's statistics |
"""

from __future__ import annotations

import copy
import dataclasses
import difflib
import importlib
import itertools
import logging
import math
import operator
import os
import random
import tempfile
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from workers.device import current_device, has_cuda, use_device
from workers.dtypes import dtype_of
from workers.extras import require
from workers.rollout.engine import FinishReason, SamplingParams
from workers.rollout.errors import PromptError, RolloutError, WeightsError
from workers.rollout.hf_engine import make_model
from workers.rollout.requests import Request, RequestEngine
from workers.train.hf_files import config_from

if TYPE_CHECKING:
    import torch

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
    "logits_processors": ["workers.rollout.vllm_worker:LogProbs"],
    "worker_extension_cls": "workers.rollout.vllm_worker.LayerwiseReload",
    "async_scheduling": False,  # a step that is still running after step() would read weights that are being updated
    "stream_interval": 1,  # tokens that are reported later would get a later weight version
    "pipeline_parallel_size": 1,  # as with async_scheduling
    "data_parallel_size": 1,  # each rollout worker has an engine
    "skip_tokenizer_init": True,
    "disable_log_stats": True,
}
"""vLLM's arguments that `VLLMEngine` sets itself, because its guarantees depend on them."""

KV_CACHE_BYTES = 1 << 30
"""Default size of the key/value cache on the CPU. vLLM's own is most of the machine's memory."""

COLDEST = 0.01
"""vLLM raises lower temperatures to this one, except 0."""


class VLLMEngine(RequestEngine):
    """An engine on vLLM, with continuous batching. Needs vLLM, on CUDA or on the CPU; see ``docs/rollout.md``.

    The model's ``generation_config``, including its stop tokens, is ignored: only `SamplingParams` count. The same
    prompt, seed and weights give the same completion, up to rounding, also in another batch. A completion that is
    continued from a ``partial`` one draws other random numbers than one that was not interrupted.

    A process can have one `VLLMEngine`, and no other default process group of ``torch.distributed``.

    Args:
        model: a Hugging Face config object, or the dict of one with ``model_type``, for random weights; or a folder
            written by ``save_pretrained``, or a model name on the hub.
        random_weights: read only the config of the folder. The weights are those of an `HFEngine` with the same seed.
            With ``load_format="dummy"`` vLLM makes them, without a copy on disk.
        seed: of random weights.
        param_dtype: "fp32", "bf16" or "fp16".
        trust_remote_code: whether code that comes with the model may run.
        engine_args: arguments of vLLM, by the names of ``vllm.EngineArgs``, such as ``tensor_parallel_size``,
            ``max_model_len``, ``max_num_seqs``, ``gpu_memory_utilization`` or ``kv_cache_memory_bytes``. On the CPU
            ``kv_cache_memory_bytes`` is 1 GiB and ``enforce_eager`` is set unless you say otherwise.

    Raises:
        ImportError: vLLM or transformers is not installed.
        TypeError: vLLM has no such argument, or `VLLMEngine` sets it itself.
        ValueError: an option is out of range.
        RolloutError: this version of vLLM lacks something, or vLLM could not start.
    """

    def __init__(
        self,
        model: Any,
        *,
        random_weights: bool = False,
        seed: int = 0,
        param_dtype: Any = "fp32",
        trust_remote_code: bool = False,
        **engine_args: Any,
    ) -> None:
        super().__init__()
        self._engine: Any = None  # vLLM's
        self._parts: list[str] | None = None
        """Names of the tensors that the update in progress still needs; None if none has come."""
        self._given: dict[str, Request] = {}
        """vLLM's id -> the request. Used by the engine's thread alone."""
        self._ids = itertools.count()
        self._rendezvous = Path()
        """File by which vLLM's processes have found each other. vLLM leaves it behind."""
        dtype = dtype_of(param_dtype)
        self._device = current_device()
        vllm = _import_vllm(eager=bool(engine_args.get("enforce_eager", True)))
        self._named = f"vLLM {vllm.__version__}"
        arguments = {
            "dtype": str(dtype).removeprefix("torch."),
            "seed": seed,
            "trust_remote_code": trust_remote_code,
            **_defaults(engine_args),
            **_checked(vllm, engine_args),
            **FIXED,
        }
        config = copy.deepcopy(_config(model, trust_remote_code))
        plain = _meta_model(config, trust_remote_code)
        self._shapes = _shapes(plain)
        self._log = _LastLines()
        # vLLM reads folders only, and only when it starts.
        with tempfile.TemporaryDirectory(prefix="vllm-engine-") as folder:
            if random_weights or not isinstance(model, (str, Path)):
                if "load_format" in engine_args:
                    config.architectures = [type(plain).__name__]
                    config.save_pretrained(folder)
                else:
                    made = make_model(config, True, seed, trust_remote_code)
                    made.save_pretrained(folder)
                    del made
                model = folder
            del plain
            try:
                with self._told("could not start"):
                    self._engine = vllm.LLMEngine.from_engine_args(vllm.EngineArgs(model=str(model), **arguments))
            except BaseException:
                self._log.close()
                vllm.distributed.cleanup_dist_env_and_memory()  # else the next engine would find a process group
                raise
        try:
            from workers.rollout.vllm_worker import missing_names

            missing = [*missing_names(self._engine, "LLMEngine", _PRIVATE), *self._engine.collective_rpc("missing")[0]]
            if missing:
                raise RolloutError(
                    f"VLLMEngine: {self._named} has no {', '.join(missing)}; use a version that docs/rollout.md names"
                )
            self._rendezvous = Path(self._engine.collective_rpc("rendezvous")[0].removeprefix("file://"))
            self._max_len = int(self._engine.model_config.max_model_len)
            self._vocabulary = int(self._engine.model_config.get_vocab_size())
        except BaseException:
            self.close()
            raise

    # --- requests -------------------------------------------------------------------------------------------------

    def check_request(self, number: int | None, prompt: Sequence[int], sampling_params: SamplingParams) -> None:
        """See `RequestEngine.check_request`.

        Raises:
            ValueError: also for a temperature that vLLM does not have.
        """
        if unknown := [token for token in sampling_params.stop_token_ids if token >= self._vocabulary]:
            raise ValueError(
                f"SamplingParams: stop_token_ids {unknown} are outside the model's vocabulary of {self._vocabulary}"
            )
        if 0 < sampling_params.temperature < COLDEST:
            raise ValueError(
                f"SamplingParams: temperature={sampling_params.temperature!r}; vLLM has 0, and from {COLDEST} on"
            )
        if not len(prompt):
            raise PromptError("is empty; it must have at least one token", number)
        if not 0 <= min(prompt) <= max(prompt) < self._vocabulary:
            raise PromptError(
                f"has token ids from {min(prompt)} to {max(prompt)}, but the model's vocab_size is {self._vocabulary}",
                number,
            )
        if len(prompt) + sampling_params.max_new_tokens > self._max_len:
            raise PromptError(
                f"has {len(prompt)} tokens, which with max_new_tokens={sampling_params.max_new_tokens} exceeds the "
                f"model's {self._max_len} positions; shorten it, or lower max_new_tokens",
                number,
            )

    def prepare_thread(self) -> None:
        """CUDA's current device is per thread."""
        use_device(self._device)

    def serve(self) -> None:
        """See `RequestEngine.serve`. One step of vLLM computes one token of each running request."""
        with self._told("failed"):  # what a step that failed has left
            self._discard(list(self._given))
            self._engine.reset_prefix_cache(reset_running_requests=True)
        while (changes := self.next_step()) is not None:
            with self._told("failed"):
                ended = set(map(id, changes.ended))
                self._discard([id_ for id_, request in self._given.items() if id(request) in ended])
                if changes.recompute:
                    self._engine.reset_prefix_cache(reset_running_requests=True)
                for request in changes.added:
                    self._add(request)
                outputs = self._engine.step()
            for output in outputs:
                self._take(output)

    def _add(self, request: Request) -> None:
        from vllm import SamplingParams as VLLMSamplingParams
        from vllm.sampling_params import RequestOutputKind

        params = request.sampling_params
        # A greedy request would skip `LogProbs`. Of one token, the most likely one is drawn.
        greedy = params.temperature == 0
        how = VLLMSamplingParams(
            max_tokens=request.remaining,
            temperature=1.0 if greedy else params.temperature,
            top_p=1.0 if greedy else params.top_p,
            top_k=1 if greedy else params.top_k,
            seed=_seed(request),
            stop_token_ids=list(params.stop_token_ids),
            ignore_eos=True,
            logprobs=0,  # of the sampled token
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        name = str(next(self._ids))
        self._given[name] = request
        (prompt,) = self._engine.renderer.render_cmpl([{"prompt_token_ids": [*request.prompt, *request.token_ids]}])
        self._engine.add_request(name, prompt, how)

    def _discard(self, names: list[str]) -> None:
        for name in names:
            del self._given[name]
        if names:
            self._engine.abort_request(names)

    def _take(self, output: Any) -> None:
        request = self._given.get(output.request_id)
        if request is None:
            return
        made = output.outputs[0]
        tokens = list(made.token_ids)
        log_probs = [at[token].logprob for token, at in zip(tokens, made.logprobs or (), strict=True)]
        if not all(map(math.isfinite, log_probs)):
            raise RolloutError("the model's logits are not finite; check its weights, and whether its dtype overflows")
        ended: FinishReason | None = None
        if output.finished:
            del self._given[output.request_id]
            if made.finish_reason not in ("stop", "length"):
                raise RolloutError(f"{self._named} ended a request: {made.finish_reason}{self._log}")
            ended = made.finish_reason
        self.record(request, tokens, log_probs, ended)

    def cache_usage(self) -> float | None:
        """See `EngineLoad.cache_usage`. Blocks that are kept for prompts to come are not in use."""
        engine = self._engine
        return None if engine is None else float(operator.attrgetter(_CACHE_USAGE)(engine))

    # --- weights --------------------------------------------------------------------------------------------------

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """See `RolloutEngine.load_weights`. Tensors are cast to the model's dtype.

        Raises:
            WeightsError: the model has no tensor of that name, or has another shape, or it came before. No tensor of
                the call was loaded.
            RolloutError: no update has begun, the engine sleeps, or vLLM failed.
        """
        if "update" not in self._holds:
            raise RolloutError("VLLMEngine.load_weights(): no update has begun; call begin_update() first")
        if self._sleeps and "sleep" in self._holds:
            raise RolloutError("VLLMEngine.load_weights(): the weights are not on the device; call wake_up() first")
        left = dict.fromkeys(self._shapes if self._parts is None else self._parts)
        pairs = []
        for name, tensor in weights:
            self._check_tensor(name, tensor, left)
            del left[name]
            # vLLM's processes get a copy: a tensor of this process's GPU would arrive on the same one in all of them.
            pairs.append((name, tensor.detach().cpu() if self._parallel else tensor.detach()))
        if not pairs:
            return
        with self._told("could not load weights"):
            if self._parts is None:
                self._parts = list(left)  # first: whatever fails from here on, the reload must be finished
                self._engine.collective_rpc("reload_begin")
            self._engine.collective_rpc("reload_tensors", args=(pairs, self._parallel))
        self._parts = list(left)

    def _check_tensor(self, name: str, tensor: torch.Tensor, left: Mapping[str, Any]) -> None:
        shape = self._shapes.get(name)
        if shape is None:
            raise WeightsError(
                f"the weight update has a tensor {name!r}, but the model has none of this name; use the names of its "
                f"state_dict() in transformers, such as {next(iter(self._shapes))!r}"
            )
        if shape != tuple(tensor.shape):
            raise WeightsError(
                f"the weight update has {name!r} with shape {tuple(tensor.shape)}, but the model's has shape {shape}"
            )
        if name not in left:
            raise WeightsError(f"the weight update has {name!r} twice")

    @property
    def _parallel(self) -> bool:
        return int(self._engine.vllm_config.parallel_config.world_size) > 1

    def begin_update(self) -> None:
        """See `RolloutEngine.begin_update`. Nothing happens to the weights before the first tensor comes."""
        super().begin_update()
        self._end_reload()

    def finish_update(self, version: int) -> None:
        """See `RolloutEngine.finish_update`.

        Raises:
            WeightsError: some tensors have come, and others are missing.
            RolloutError: vLLM failed.
        """
        if self._parts:
            raise WeightsError(
                f"{len(self._parts)} of {len(self._shapes)} tensors of the update are missing, such as "
                f"{self._parts[0]!r}"
            )
        self._end_reload()
        super().finish_update(version)

    def abandon_update(self) -> None:
        """See `RolloutEngine.abandon_update`."""
        super().abandon_update()
        self._end_reload()

    def _end_reload(self) -> None:
        """Finish vLLM's reload, also one of some tensors: vLLM cannot begin another one before."""
        if self._parts is None:
            return
        with self._told("could not finish an update"):
            self._engine.collective_rpc("reload_finish")
        self._parts = None

    def weight_shapes(self) -> dict[str, tuple[int, ...]]:
        """See `RolloutEngine.weight_shapes`."""
        return dict(self._shapes)

    # --- device memory --------------------------------------------------------------------------------------------

    @property
    def keeps_weights(self) -> bool:
        """True: vLLM moves the weights to host memory, and on the CPU they stay where they are."""
        return True

    def sleep(self) -> None:
        """Move the weights to host memory and free the key/value cache. On the CPU this only stops generation."""
        self._hold("sleep")
        if self._sleeps:
            with self._told("could not free device memory"):
                self._engine.sleep(level=1, mode="keep")

    def wake_up(self) -> None:
        """Take the device memory back."""
        if self._sleeps:
            with self._told("could not take device memory back"):
                self._engine.wake_up()
        self._release("sleep")

    @property
    def _sleeps(self) -> bool:
        return self._device.type == "cuda" and bool(self._engine.model_config.enable_sleep_mode)

    def close(self) -> None:
        """See `RolloutEngine.close`. Ends vLLM's processes."""
        super().close()
        engine, self._engine = self._engine, None
        if engine is not None:
            self._given.clear()
            self._log.close()
            engine.engine_core.shutdown()
            self._rendezvous.unlink(missing_ok=True)

    @contextmanager
    def _told(self, what: str) -> Iterator[None]:
        """Raise vLLM's errors as a `RolloutError`, with the last ones that it has logged."""
        try:
            yield
        except RolloutError:
            raise
        except Exception as error:
            raise RolloutError(f"{self._named} {what}: {type(error).__name__}: {error}{self._log}") from error


_CACHE_USAGE = "engine_core.engine_core.scheduler.kv_cache_manager.usage"
_PRIVATE = (_CACHE_USAGE, "engine_core.shutdown")


def _import_vllm(eager: bool) -> Any:
    import torch

    os.environ.update(ENVIRONMENT)
    for name, value in DEFAULTS.items():
        os.environ.setdefault(name, value)
    if not has_cuda():
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
            "CUDA, pip install 'single-controller[vllm]'. See docs/rollout.md",
            name="vllm",
        ) from None
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        raise RolloutError(
            "VLLMEngine: this process has a default process group of torch.distributed, of another engine or of a "
            "trainer; run the engine in a process of its own"
        )
    return vllm


def _checked(vllm: Any, engine_args: Mapping[str, Any]) -> dict[str, Any]:
    """The caller's arguments, if vLLM has them and `VLLMEngine` does not set them itself."""
    known = {field.name for field in dataclasses.fields(vllm.EngineArgs) if not field.name.startswith("_")}
    for name, value in engine_args.items():
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            raise TypeError(f"VLLMEngine: vLLM {vllm.__version__} has no engine argument {name!r}{hint}")
        if name in ("model", "dtype"):
            raise TypeError(f"VLLMEngine: {name!r} is set by VLLMEngine's own argument {_OWN[name]!r}")
        if name in FIXED and value != FIXED[name]:
            raise TypeError(f"VLLMEngine: {name!r} is always {FIXED[name]!r}, got {value!r}; leave it out")
    return dict(engine_args)


_OWN = {"model": "model", "dtype": "param_dtype"}


def _defaults(engine_args: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of vLLM whose defaults differ here."""
    chosen: dict[str, Any] = {}
    if engine_args.get("tensor_parallel_size", 1) > 1:
        chosen["distributed_executor_backend"] = "mp"  # else Ray, where it runs: its actors could outlive the worker
    if has_cuda():
        chosen["enable_sleep_mode"] = True
    else:
        chosen["enforce_eager"] = True
        if "VLLM_CPU_KVCACHE_SPACE" not in os.environ and "gpu_memory_utilization" not in engine_args:
            chosen["kv_cache_memory_bytes"] = KV_CACHE_BYTES
    return chosen


def _config(model: Any, trust_remote_code: bool) -> Any:
    transformers = require("transformers", extra="hf")
    transformers.utils.logging.disable_progress_bar()  # every rank would show its own
    if isinstance(model, (str, Path)):
        return transformers.AutoConfig.from_pretrained(str(model), trust_remote_code=trust_remote_code)
    if isinstance(model, Mapping):
        return config_from(model)
    if not isinstance(model, transformers.PretrainedConfig):
        raise ValueError(
            f"VLLMEngine: model={model!r}; expected a Hugging Face config, a dict of one, a folder or a model name"
        )
    return model


def _meta_model(config: Any, trust_remote_code: bool) -> Any:
    """The model in transformers, without memory for its weights."""
    import torch

    transformers = require("transformers", extra="hf")
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)


def _shapes(model: Any) -> dict[str, tuple[int, ...]]:
    first: dict[int, tuple[str, tuple[int, ...]]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        first.setdefault(id(tensor), (name, tuple(tensor.shape)))
    return dict(first.values())


def _seed(request: Request) -> int:
    """A seed for vLLM, which takes -1 for none, and whose generators on the CPU read 32 bits. A continued request must
    not draw the random numbers of its first tokens again."""
    return random.Random(f"{request.seed} {len(request.token_ids)}").getrandbits(32)


LINE = 500
"""How much of each of vLLM's errors is kept. When a step fails, it logs its whole configuration as one."""


class _LastLines(logging.Handler):
    """Keeps the last errors that vLLM has logged in this process."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self._lines: deque[str] = deque(maxlen=10)
        self._logger = logging.getLogger("vllm")
        self._logger.addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self._lines.append(record.getMessage()[:300])  # some are dumps of the whole state

    def close(self) -> None:
        self._logger.removeHandler(self)
        super().close()

    def __str__(self) -> str:
        return "\nvLLM's last lines:\n" + "\n".join(self._lines) if self._lines else ""
