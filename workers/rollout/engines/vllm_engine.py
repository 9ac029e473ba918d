"""VLLMEngine: generation with vLLM, in this process.

vLLM's public interfaces are used where they exist: `EngineArgs`, `LLMEngine` (``add_request``, ``step``,
``abort_request``, ``reset_prefix_cache``, ``collective_rpc``, ``sleep``, ``wake_up``, ``renderer``),
``worker_extension_cls`` and ``logits_processors``. These are not public, and are looked for when an engine starts:

| name, as of vLLM 0.32.0 | why |
|---|---|
| ``vllm.model_executor.model_loader.reload``: ``initialize_layerwise_reload``, ``finalize_layerwise_reload`` | the \
public ``reload_weights`` wants all tensors in one call, and the weight transfer engines bring their own transport |
| ``get_model`` and ``model_config`` of a worker | what to load the tensors into |
| ``vllm.v1.executor.*.get_file_store_init_method`` | to know the file that vLLM leaves behind; see `files_in` |
| ``vllm.logger.configure_logging_if_needed`` | it removes handlers, so it must come before `LastLines` |
| processes named ``VllmWorker-...`` | to say which of them has died, and to end them after a failed start |
| ``cpu_linear`` and ``quant_method`` of a layer | to repack tied weights on the CPU, after an update |
| ``quant_method.moe_kernel``, ``moe_config`` and ``expert_map`` of a layer of experts, and \
``vllm._custom_ops.cpu_prepack_moe_weight`` | to repack experts on the CPU after an update, which vLLM does not do, \
and to read them back |
| ``tp_rank``, ``tp_size``, ``output_partition_sizes``, ``shard_indices`` and ``params_dtype`` of a layer | to read \
weights back; a model without them is not read back |
| ``LLMEngine.engine_core.shutdown()`` | an `LLMEngine` has no method that ends it |
| ``LLMEngine.engine_core.engine_core.scheduler.kv_cache_manager.usage`` | the public way, a ``StatLogger``, turns on \
all of vLLM's statistics |
"""

from __future__ import annotations

import copy
import importlib
import itertools
import math
import multiprocessing
import operator
import random
import shutil
import signal
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TYPE_CHECKING, Any

from workers.device import current_device, dtype_of, on_accelerator, use_device
from workers.hf_files import config_of, make_model, meta_model, shapes_of
from workers.rollout.engines.request_engine import CLOSE_SECONDS, READING, Request, RequestEngine
from workers.rollout.engines.rollout_engine import (
    FinishReason,
    SamplingParams,
    check_min_p,
    check_tensor,
    largest_told,
    left_of_top,
    top_wanted,
)
from workers.rollout.engines.vllm_layout import joined
from workers.rollout.engines.vllm_options import EngineFolder, LastLines, arguments_for, files_in, import_vllm
from workers.rollout.rollout_errors import RolloutError, WeightsError

if TYPE_CHECKING:
    import torch

DEATH_SECONDS = 1.0
"""How much later than an error that the death of a process has caused, the death itself may be seen."""


class VLLMEngine(RequestEngine):
    """An engine on vLLM, with continuous batching. Needs vLLM, on CUDA or on the CPU; see ``docs/engines.md``.

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
            ``kv_cache_memory_bytes`` is 1 GiB and ``enforce_eager`` is set unless you say otherwise, and no prompt is
            computed in parts (``enable_chunked_prefill``). Sets of `SamplingMask` have fewer than ``max_logprobs``
            tokens, 528 unless you say otherwise.

    Raises:
        ImportError: vLLM or transformers is not installed.
        TypeError: vLLM has no such argument, or `VLLMEngine` sets it itself.
        ValueError: an option is out of range.
        RolloutError: this version of vLLM lacks something, or vLLM could not start.
    """

    any_rank = True
    keeps_weights = True  # vLLM moves them to host memory; on the CPU they stay where they are
    sampling_masks = True
    coldest = 0.01  # vLLM raises lower temperatures to this one

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
        self._dtypes: dict[str, torch.dtype] | None = None
        """Of the tensors in vLLM; None if it cannot be told."""
        self._parts: list[str] | None = None
        """Names of the tensors that the update in progress still needs; None if none has come."""
        self._raw = False
        """Whether the update in progress has come as `load_raw`."""
        self._given: dict[str, Request] = {}
        """vLLM's id -> the request. Used by the engine's thread alone."""
        self._failed = False
        """Whether `serve` has failed since the caches were reset. Used by the engine's thread alone."""
        self._stepped = True
        """Whether a step may have been taken since the caches were reset."""
        self._ids = itertools.count()
        self._processes: list[BaseProcess] = []
        """vLLM's processes, of a tensor-parallel engine."""
        self._folder: EngineFolder | None = None
        """For vLLM's files; None after `close`."""
        dtype = dtype_of(param_dtype)
        self._device = current_device()
        vllm = import_vllm(eager=bool(engine_args.get("enforce_eager", True)))
        self._named = f"vLLM {vllm.__version__}"
        arguments = {
            "dtype": str(dtype).removeprefix("torch."),
            "seed": seed,
            "trust_remote_code": trust_remote_code,
            **arguments_for(vllm, engine_args),
        }
        config = copy.deepcopy(config_of("VLLMEngine: model", model, trust_remote_code))
        plain = meta_model(config, trust_remote_code)
        self._shapes = shapes_of(plain.state_dict(keep_vars=True))
        self._log = LastLines()
        # `_deaths` and `close` find vLLM's processes by name, and could not distinguish those of two engines.
        if _vllm_processes():
            raise RolloutError("VLLMEngine: this process has another one; close it, or use a process for each")
        try:
            self._folder = EngineFolder()
            if random_weights or not isinstance(model, (str, Path)):
                model = self._folder.path / "model"  # vLLM reads folders only
                if engine_args.get("load_format") == "dummy":
                    config.architectures = [type(plain).__name__]
                    config.save_pretrained(model)
                else:
                    make_model(config, True, seed, trust_remote_code).save_pretrained(model)
            del plain
            with self._told("could not start"), files_in(self._folder.path):
                self._start(vllm, {"model": str(model), **arguments})
            shutil.rmtree(self._folder.path / "model", ignore_errors=True)  # it has been read
        except BaseException:
            self.close()
            raise
        # Other engines do this with their first request, but vLLM's processes are already running.
        self.close_at_exit()

    def _start(self, vllm: Any, arguments: Mapping[str, Any]) -> None:
        config = vllm.EngineArgs(**arguments).create_engine_config()
        importlib.import_module("vllm.logger").configure_logging_if_needed(config.logging_config)
        self._log.begin()
        self._engine = vllm.LLMEngine.from_vllm_config(config, disable_log_stats=True)
        self._processes = _vllm_processes()
        from workers.rollout.engines.vllm_worker import missing_names

        missing = [*missing_names(self._engine, "LLMEngine", _PRIVATE), *self._engine.collective_rpc("missing")[0]]
        if missing:
            raise RolloutError(
                f"VLLMEngine: {self._named} has no {', '.join(missing)}; use a version that docs/engines.md names"
            )
        dtypes = self._engine.collective_rpc("held_dtypes", args=(self._shapes,))
        self._dtypes = None if None in dtypes else dtypes[0]
        self.max_positions = int(self._engine.model_config.max_model_len)
        self.vocab_size = int(self._engine.model_config.get_vocab_size())
        most = int(self._engine.model_config.max_logprobs)
        self._most = self.vocab_size if most < 0 else min(most, self.vocab_size)
        self.largest_mask = largest_told(self._most, self.vocab_size)

    # --- requests -------------------------------------------------------------------------------------------------

    def check_request(self, number: int | None, prompt: Sequence[int], sampling_params: SamplingParams) -> None:
        """See `RequestEngine.check_request`.

        Raises:
            ValueError: also if ``min_p`` needs another ``top_k``.
        """
        super().check_request(number, prompt, sampling_params)
        check_min_p(sampling_params, self.largest_mask)

    def prepare_thread(self) -> None:
        """torch has one current device for each thread."""
        use_device(self._device)

    def serve(self) -> None:
        """See `RequestEngine.serve`. One step of vLLM computes one token of each running request."""
        with self._told("failed"):
            # These calls only use vLLM's scheduler. Its model may be in use by another thread: see `_hold`.
            self._discard(list(self._given))
            if self._failed:  # otherwise, the keys and values of earlier prompts are still of use
                self._reset_caches()
        try:
            while (changes := self.next_step()) is not None:
                with self._told("failed"):
                    # Discard these before new requests are added, to make room for them.
                    ended = set(map(id, changes.ended))
                    self._discard([id_ for id_, request in self._given.items() if id(request) in ended])
                    if changes.recompute:
                        self._reset_caches()
                    for request in changes.added:
                        try:
                            with self._told("refused a request"):
                                self._add(request)
                        except RolloutError as error:  # the others go on
                            self._fail([request], error)
                    self._stepped = True
                    outputs = self._engine.step()
                for output in outputs:
                    if (given := self._given.get(output.request_id)) is not None:
                        try:
                            self._take(given, output)
                        except RolloutError as error:
                            self._fail([given], error)
        except BaseException:
            self._failed = True
            raise

    def _reset_caches(self) -> None:
        """Have all keys and values computed anew, also those that a KV connector keeps, in host memory for example."""
        # A second reset without a step in between is an error of vLLM's OffloadingConnector.
        if not self._engine.reset_prefix_cache(reset_running_requests=True, reset_connector=self._stepped):
            raise RolloutError(f"{self._named} could not reset the cache of its KV connector{self._log}")
        self._failed = self._stepped = False

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
            min_p=0.0 if greedy else params.min_p,
            top_k=1 if greedy else min(params.top_k, self.vocab_size or params.top_k),  # vLLM's has 32 bits
            seed=_seed(request),
            stop_token_ids=list(params.stop_token_ids),
            ignore_eos=True,
            logprobs=self._top(request),  # besides that of the sampled token
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

    def _take(self, request: Request, output: Any) -> None:
        made = output.outputs[0]
        tokens = list(made.token_ids)
        log_probs = [at[token].logprob for token, at in zip(tokens, made.logprobs or (), strict=True)]
        kept: list[Sequence[int]] | None = None
        if wanted := self._top(request):
            tops = [{token: one.logprob for token, one in at.items()} for at in made.logprobs]
            left = [left_of_top(*one, wanted, self.vocab_size) for one in zip(log_probs, tops, strict=True)]
            kept, log_probs = [tokens for tokens, _ in left], [log_prob for _, log_prob in left]
        if not all(map(math.isfinite, log_probs)):
            raise RolloutError("the model's logits are not finite; check its weights, and whether its dtype overflows")
        ended: FinishReason | None = None
        if output.finished:
            del self._given[output.request_id]
            if made.finish_reason not in ("stop", "length"):
                raise RolloutError(f"{self._named} ended a request: {made.finish_reason}{self._log}")
            ended = made.finish_reason
        self.record(request, tokens, log_probs, ended, kept)

    def _top(self, request: Request) -> int:
        """How many of the most likely tokens vLLM returns for each token of a request."""
        return top_wanted(request.sampling_params, self._most)

    def cache_usage(self) -> float | None:
        """See `EngineLoad.cache_usage`. Blocks that are kept for prompts to come are not in use."""
        # Read the attribute once: any thread may call this, also during a step, and `close` may set it to None.
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
        self._check_updating("load_weights")
        # Use a copy, because a call that is refused halfway must not change `_parts`.
        left = dict.fromkeys(self._shapes if self._parts is None else self._parts)
        pairs = []
        for name, tensor in weights:
            check_tensor(name, tensor, self._shapes, "the model")
            if name not in left:
                raise WeightsError(f"the weight update has {name!r} twice")
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

    @property
    def _parallel(self) -> bool:
        return int(self._engine.vllm_config.parallel_config.world_size) > 1

    def begin_update(self) -> None:
        """See `RolloutEngine.begin_update`. Nothing happens to the weights before the first tensor comes."""
        super().begin_update()
        # End the reload of an update that was neither finished nor abandoned: vLLM allows one reload at a time.
        self._end_reload()
        self._raw = False

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
        if self._raw:
            with self._told("could not finish an update"):
                self._engine.collective_rpc("raw_finish")
        super().finish_update(version)

    def abandon_update(self) -> None:
        super().abandon_update()
        # End the reload after the hold "abandoned" has begun: no step may run with the mixed weights that it leaves.
        self._end_reload()

    def _end_reload(self) -> None:
        """Finish vLLM's reload, also one of some tensors: vLLM cannot begin another one before."""
        if self._parts is None:
            return
        with self._told("could not finish an update"):
            self._engine.collective_rpc("reload_finish")
        self._parts = None

    def weight_shapes(self) -> dict[str, tuple[int, ...]]:
        return dict(self._shapes)

    def weight_dtypes(self) -> dict[str, torch.dtype] | None:
        """See `RolloutEngine.weight_dtypes`. None for quantized weights, and for a model whose tensors vLLM has under
        other names or in another form: mixtures of experts with biases, and those for which vLLM has chosen a kernel
        that wants the weights in an order of its own, except on the CPU."""
        return None if self._dtypes is None else dict(self._dtypes)

    def read_weights(self, names: Sequence[str]) -> list[torch.Tensor]:
        """See `RolloutEngine.read_weights`. Fused tensors are cut out; with several processes, their parts are joined
        in host memory. On the CPU, the signs of zeros in linear layers are those that were loaded: vLLM's kernels do
        not tell them.

        Raises:
            RolloutError: also if an update's tensors have not all come, or if the processes differ in what all of them
                should have.
        """
        if self._dtypes is None:
            return super().read_weights(names)
        self._check_awake("read_weights")
        if unknown := [name for name in names if name not in self._shapes]:
            raise RolloutError(f"VLLMEngine.read_weights(): the model has no tensor {unknown[0]!r}")
        if self._parts:
            raise RolloutError(
                f"VLLMEngine.read_weights(): {len(self._parts)} tensors of the update have not come, such as "
                f"{self._parts[0]!r}; read the weights after the last of them"
            )
        # End the reload of a running update: tensors can be read only after the reload is finished.
        self._end_reload()
        with self._told("could not read weights"), self.parked(READING, recompute=False):
            by_rank = self._engine.collective_rpc("held_read", args=(list(names), self._parallel))
        return [joined(name, self._shapes[name], of_ranks) for name, *of_ranks in zip(names, *by_rank, strict=True)]

    def raw_weights(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """See `RolloutEngine.raw_weights`. They are the parameters and buffers of vLLM's model, in each of its
        processes. On the CPU, vLLM has other forms of some layers' weights; those of linear layers are turned back, and
        a model with others is not passed on correctly."""
        with self._told("could not tell its weights"), self.parked(READING, recompute=False):
            by_rank = self._engine.collective_rpc("raw_weights")
        return {name: kind for found in by_rank for name, kind in found.items()}

    def read_raw(self, names: Sequence[str]) -> list[torch.Tensor]:
        """See `RolloutEngine.read_raw`. The engine takes no step meanwhile."""
        self._check_awake("read_raw")
        with self._told("could not read weights"), self.parked(READING, recompute=False):
            by_rank = self._engine.collective_rpc("raw_read", args=(list(names), self._parallel))
        found = {name: tensor for pairs in by_rank for name, tensor in pairs}
        return [found[name] for name in names]

    def load_raw(self, weights: Sequence[tuple[str, torch.Tensor]]) -> None:
        self._check_updating("load_raw")
        with self._told("could not load weights"):
            self._raw = True
            # A tensor is sent to another process with all of the memory that it is a view of.
            pairs = [(name, tensor.clone() if self._parallel else tensor) for name, tensor in weights]
            self._engine.collective_rpc("raw_load", args=(pairs,))

    def _check_updating(self, method: str) -> None:
        if "update" not in self._holds:
            raise RolloutError(f"VLLMEngine.{method}(): no update has begun; call begin_update() first")
        self._check_awake(method)

    def _check_awake(self, method: str) -> None:
        if self._sleeps and "sleep" in self._holds:
            raise RolloutError(f"VLLMEngine.{method}(): the weights are not on the device; call wake_up() first")

    # --- device memory --------------------------------------------------------------------------------------------

    def sleep(self) -> None:
        """Move the weights to host memory and free the key/value cache. On the CPU this only stops generation."""
        # Hold first: vLLM must not free memory that a step is using.
        self._hold("sleep")
        if self._sleeps:
            with self._told("could not free device memory"):
                self._engine.sleep(level=1, mode="keep")
                self._stepped = False  # vLLM has reset its caches

    def wake_up(self) -> None:
        """Take the device memory back."""
        if self._sleeps:
            with self._told("could not take device memory back"):
                self._engine.wake_up()
        # Release the hold last, so that no step runs before the memory is back.
        self._release("sleep")

    @property
    def _sleeps(self) -> bool:
        return on_accelerator(self._device) and bool(self._engine.model_config.enable_sleep_mode)

    def close(self) -> None:
        """See `RolloutEngine.close`. Ends vLLM's processes."""
        super().close()
        engine, self._engine = self._engine, None
        folder, self._folder = self._folder, None
        if folder is None:
            return
        self._log.close()
        if engine is not None:
            engine.engine_core.shutdown()
        else:  # it did not start; the next engine must not find its process group
            importlib.import_module("vllm.distributed").cleanup_dist_env_and_memory()
        processes = {*self._processes, *_vllm_processes()}
        for process in processes:
            process.terminate()
        for process in processes:
            process.join(CLOSE_SECONDS)
            process.kill()  # if it has not ended
            process.join(CLOSE_SECONDS)
        folder.remove()

    @contextmanager
    def _told(self, what: str) -> Iterator[None]:
        """Raise vLLM's errors as a `RolloutError`, with the deaths of its processes and the last errors of its log."""
        try:
            yield
        except RolloutError:
            raise
        except Exception as error:
            message = f"{self._named} {what}: {type(error).__name__}: {error}{self._deaths()}{self._log}"
            raise RolloutError(message) from error

    def _deaths(self) -> str:
        """Which of vLLM's processes have died. vLLM then ends the others, by SIGTERM if it must."""
        end = time.monotonic() + DEATH_SECONDS
        while True:
            codes = {process: code for process in self._processes if (code := process.exitcode) is not None}
            dead = [one for one, code in codes.items() if code not in (0, -signal.SIGTERM)] or list(codes)
            if dead or not self._processes or time.monotonic() > end:
                break
            time.sleep(0.01)
        return "".join(
            f"\nvLLM's process {one.pid} ({one.name}) died unexpectedly (exit code: {_exit_code(codes[one])})"
            for one in dead
        )


_CACHE_USAGE = "engine_core.engine_core.scheduler.kv_cache_manager.usage"
_PRIVATE = (_CACHE_USAGE, "engine_core.shutdown")


def _vllm_processes() -> list[BaseProcess]:
    """Those processes of this one's that are vLLM's."""
    return [one for one in multiprocessing.active_children() if one.name.startswith("VllmWorker")]


def _exit_code(code: int) -> str:
    if code < 0:
        with suppress(ValueError):
            return f"{code}, by {signal.Signals(-code).name}"
    return str(code)


def _seed(request: Request) -> int:
    """A seed for vLLM, which takes -1 for none, and whose generators on the CPU read 32 bits. A continued request must
    not draw the random numbers of its first tokens again."""
    return random.Random(f"{request.seed} {len(request.token_ids)}").getrandbits(32)
