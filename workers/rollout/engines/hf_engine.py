"""HFEngine: generation with transformers, for any of its causal language models."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from dispatch.checks import check_count
from workers.device import current_device, dtype_of, empty_cache, use_device
from workers.extras import require
from workers.hf_files import RANDOM, compute_output_in_float32, make_model, shapes_of
from workers.lora import BASE_DIGEST, LoraSettings, adapter_tensors
from workers.rollout.engines.prefix_cache import PrefixCache
from workers.rollout.engines.request_engine import Request, RequestEngine
from workers.rollout.engines.rollout_engine import FinishReason, check_tensor
from workers.rollout.rollout_errors import RolloutError, WeightsError

if TYPE_CHECKING:
    import torch

    from workers.hf_routing import Routers
    from workers.rollout.engines.decoding import Batch


class HFEngine(RequestEngine):
    """An engine for tests, small models and machines without a GPU. Use vLLM for large models.

    The model's ``generation_config``, including its stop tokens, is ignored: only `SamplingParams` count. The same
    prompt, seed and weights give the same completion on one kind of device, up to rounding: logits differ by about 1e-6
    between batches, which changes about one token in a million.

    Requests of any length and sampling parameters share forward passes. New ones join at the next step; for a model
    whose key/value cache is not an ordinary one (sliding windows, recurrent states), they wait until the batch has
    ended. `pause`, `abort` and updates take effect after at most one step: a forward pass for each row's next token,
    and those for new prompts. After an update, the keys and values of running requests are computed again.

    Args:
        model: a Hugging Face config object, or the dict of one with ``model_type``, for random weights; or a folder
            written by ``save_pretrained``, or a model name on the hub.
        random_weights: read only the config of the folder.
        seed: of random weights.
        param_dtype: "fp32", "bf16" or "fp16".
        fp32_lm_head: compute the output layer in float32, as a trainer with ``args.fp32_lm_head`` does.
        max_batch_size: maximum number of requests that generate at the same time; others wait.
        trust_remote_code: whether code that comes with the model may run.
        lora: the trainer's `LoraSettings`, or their keyword arguments; None if it trains all weights. With an adapter,
            an update has the adapter's tensors alone, and the engine keeps them apart from the base model, which must
            be the trainer's: the same folder, or random weights of the same config and seed.
        exact: compute log-probabilities that equal those of a trainer with ``args.exact``, bit for bit, in any batch;
            see `workers.exact`. Rows of a model with sliding windows can then join a running batch as well.
        prefix_cache_bytes: memory on the model's device for keys and values of requests that have ended. A request that
            begins with the same tokens, as the next turn of a session does, does not compute them again. They are kept
            if `AgentEngine` or `Gateway` play sessions, or ``keep_prefixes`` is set; the least recently used ones are
            dropped first, and all with an update of the weights. 0 keeps none, nor does ``exact``, nor a model whose
            cache is not an ordinary one.
        return_routed_experts: whether completions have `Completion.routed_experts`, which a trainer with
            ``args.routing_replay="R3"`` needs.

    Raises:
        ImportError: transformers is not installed, or peft, with ``lora``.
        ValueError: an option is out of range, or ``fp32_lm_head`` is not possible with this model.
        OSError: transformers did not find the model.
        ExactError: ``exact`` is not possible with this model, or on this machine.
        RoutingError: ``return_routed_experts`` is not possible with this model.
    """

    keeps_weights = True
    any_rank = True
    partial_updates = True
    sampling_masks = True

    def __init__(
        self,
        model: Any,
        *,
        random_weights: bool = False,
        seed: int = 0,
        param_dtype: Any = "fp32",
        fp32_lm_head: bool = False,
        max_batch_size: int = 128,
        trust_remote_code: bool = False,
        lora: LoraSettings | Mapping[str, Any] | None = None,
        exact: bool = False,
        prefix_cache_bytes: int = 2**29,
        return_routed_experts: bool = False,
    ) -> None:
        super().__init__()
        check_count("HFEngine: prefix_cache_bytes", prefix_cache_bytes, least=0)
        import torch

        dtype = dtype_of(param_dtype)
        transformers = require("transformers", extra="hf")
        from workers.rollout.engines.decoding import Batch

        self.max_batch_size = check_count("HFEngine: max_batch_size", max_batch_size)
        self.device = current_device()
        made = make_model(copy.deepcopy(model) if exact else model, random_weights, seed, trust_remote_code)
        self.vocab_size = made.get_input_embeddings().num_embeddings  # first, because an adapter may wrap them
        self._adapter = LoraSettings.of(lora)
        if self._adapter is not None:
            with RANDOM, torch.random.fork_rng(devices=[]):
                self._adapter.inject(made)
        for parameter in made.parameters():  # made.to(dtype) would also cast the rotary frequencies
            parameter.data = parameter.data.to(dtype)
        if fp32_lm_head:
            compute_output_in_float32(made)
        made.generation_config = transformers.GenerationConfig()
        self.model = made.eval().requires_grad_(False).to(self.device)
        self.max_positions = getattr(self.model.config, "max_position_embeddings", None)
        self._prefixes = PrefixCache(0 if exact else prefix_cache_bytes)
        self._routers: Routers | None = None
        self.routed_experts = return_routed_experts
        if return_routed_experts:
            from workers.hf_routing import Routers

            self._routers = Routers(self.model)
        kind = Batch
        if exact:
            from workers.exact import make_exact
            from workers.rollout.engines.exact_decoding import ExactBatch, probe

            make_exact(self.model)
            self.exact_digest = probe(
                self.model.config,
                dtype,
                self.device,
                trust_remote_code=trust_remote_code,
                fp32_lm_head=fp32_lm_head,
            )
            kind = ExactBatch
        # Not in `serve`: an `ExactBatch` runs the model once, which another thread may be loading or moving then.
        self._batch = kind(self.model, self.device, self._routers)

    def prepare_thread(self) -> None:
        use_device(self.device)

    def serve(self) -> None:
        batch = self._batch
        batch.forget()  # what a step that failed has left
        waiting: list[Request] = []
        while (changes := self.next_step()) is not None:
            if changes.recompute:
                batch.forget()
                self._prefixes.clear()
            batch.prefixes = self._prefixes if self.keep_prefixes and self._prefixes.max_bytes else None
            waiting += sorted(changes.added, key=lambda request: len(request.prompt))
            waiting = [request for request in waiting if not request.ended]
            free = max(0, self.max_batch_size - len(batch)) if batch.open else 0
            batch.add(waiting[:free])
            del waiting[:free]
            if len(batch):
                self._step(batch)
            if not len(batch):
                batch.remove_ended()  # now: the next step may come much later
        with self._changed:
            if not self._serving:  # otherwise another thread has begun with the batch
                batch.forget()

    def _step(self, batch: Batch) -> None:
        requests, tokens, log_probs, kept, experts = batch.step()
        # Only those of which it is true: a weight that is NaN may be one token's.
        infinite = [one for one, log_prob in zip(requests, log_probs, strict=True) if not log_prob > -float("inf")]
        self._fail(
            infinite,
            RolloutError("the model's logits are not finite; check its weights, and whether its dtype overflows"),
        )
        made = zip(requests, tokens, log_probs, kept, experts, strict=True)
        for request, token, log_prob, of_token, of_row in made:
            ended: FinishReason | None = "length" if request.remaining == 1 else None
            if token in request.sampling_params.stop_token_ids:
                ended = "stop"
            self.record(request, [token], [log_prob], ended, [of_token], of_row)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """See `RolloutEngine.load_weights`. Tensors are cast to the model's dtype.

        Raises:
            WeightsError: the model has no tensor of that name, or has another shape; or with an adapter, the trainer
                has another base model. Tensors before it were loaded.
        """
        import torch

        own = self._tensors()
        shapes = {name: tuple(tensor.shape) for name, tensor in own.items()}
        # During an update, the engine's thread is already held. `parked` is for callers outside of an update.
        with self.parked("load_weights"), torch.no_grad():
            for name, tensor in weights:
                check_tensor(name, tensor, shapes, type(self.model).__name__)
                if name == BASE_DIGEST and not torch.equal(tensor.to(own[name].device), own[name]):
                    raise WeightsError(
                        "the base model under this engine's adapter has other weights than the trainer's; give "
                        "HFEngine the same folder, or for random weights the same config and seed"
                    )
                own[name].copy_(tensor)

    def weight_shapes(self) -> dict[str, tuple[int, ...]]:
        return shapes_of(self._tensors())

    def weight_dtypes(self) -> dict[str, torch.dtype]:
        own = self._tensors()
        return {name: own[name].dtype for name in self.weight_shapes()}

    def read_weights(self, names: Sequence[str]) -> list[torch.Tensor]:
        """See `RolloutEngine.read_weights`. The engine's thread only reads the weights too, so it goes on."""
        own = self._tensors()
        return [own[name].detach() for name in names]

    def raw_weights(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """See `RolloutEngine.raw_weights`. They are those of an update, in the model's dtype."""
        dtypes = self.weight_dtypes()
        return {name: (shape, dtypes[name]) for name, shape in self.weight_shapes().items()}

    def read_raw(self, names: Sequence[str]) -> list[torch.Tensor]:
        return self.read_weights(names)

    def _tensors(self) -> dict[str, torch.Tensor]:
        """The tensors of an update, by name."""
        if self._adapter is not None:
            return adapter_tensors(self.model)
        held: dict[str, torch.Tensor] = self.model.state_dict(keep_vars=True)
        return held

    def sleep(self) -> None:
        """Move the weights to host memory, where they can be updated, and free the device memory."""
        self._hold("sleep")
        # The engine's thread waits in `next_step`, so only this thread uses the batch and the model until `wake_up`.
        self._batch.forget()
        self._prefixes.clear()
        self._move("cpu")

    def wake_up(self) -> None:
        """Move the weights back to the device."""
        self._move(self.device)
        self._release("sleep")

    def _move(self, device: Any) -> None:
        self.model.to(device)
        empty_cache()
