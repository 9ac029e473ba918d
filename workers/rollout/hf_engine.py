"""HFEngine: generation with transformers' ``generate``, for any causal language model in transformers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from workers.device import current_device
from workers.dtypes import dtype_of
from workers.extras import require
from workers.rollout.engine import Completion, RolloutEngine, SamplingParams
from workers.rollout.errors import PromptError, RolloutError, WeightsError
from workers.train.hf_files import config_from

if TYPE_CHECKING:
    import torch


class HFEngine(RolloutEngine):
    """An engine for tests, small models and machines without a GPU. Use vLLM or SGLang for large models.

    The model's ``generation_config``, including its stop tokens, is ignored: only `SamplingParams` count. The same
    prompt, seed and weights give the same completion on one kind of device, up to rounding: logits differ by about 1e-6
    between batches, which changes about one token in a million.

    Args:
        model: a Hugging Face config object, or the dict of one with ``model_type``, for random weights; or a folder
            written by ``save_pretrained``, or a model name on the hub.
        random_weights: read only the config of the folder.
        seed: of random weights.
        param_dtype: "fp32", "bf16" or "fp16".
        max_batch_size: maximum number of prompts per forward pass.
        trust_remote_code: whether code that comes with the model may run.

    Raises:
        ImportError: transformers is not installed.
        ValueError: an option is out of range.
        OSError: transformers did not find the model.
    """

    keeps_weights = True

    def __init__(
        self,
        model: Any,
        *,
        random_weights: bool = False,
        seed: int = 0,
        param_dtype: Any = "fp32",
        max_batch_size: int = 64,
        trust_remote_code: bool = False,
    ) -> None:
        if max_batch_size < 1:
            raise ValueError(f"HFEngine: max_batch_size={max_batch_size!r}; expected at least 1")
        dtype = dtype_of(param_dtype)
        transformers = require("transformers", extra="hf")
        self.max_batch_size = max_batch_size
        self.device = current_device()
        made = make_model(model, random_weights, seed, trust_remote_code)
        for parameter in made.parameters():  # made.to(dtype) would also cast the rotary frequencies
            parameter.data = parameter.data.to(dtype)
        made.generation_config = transformers.GenerationConfig()
        self.model = made.eval().requires_grad_(False).to(self.device)
        self._asleep = False

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling_params: SamplingParams, seeds: Sequence[int]
    ) -> list[Completion]:
        """See `RolloutEngine.generate`.

        Raises:
            PromptError: a prompt is empty or too long, or has a token outside the vocabulary.
            RolloutError: the engine sleeps, or its logits are not finite.
            ValueError: there is not one seed per prompt, or a stop token is outside the vocabulary.
        """
        if self._asleep:
            raise RolloutError(
                "generate(): the engine is asleep; call the worker's wake_up() or the manager's onload() first"
            )
        if len(seeds) != len(prompts):
            raise ValueError(f"generate(): {len(prompts)} prompts and {len(seeds)} seeds; expected one seed per prompt")
        vocabulary = self.model.get_input_embeddings().num_embeddings
        if unknown := [token for token in sampling_params.stop_token_ids if token >= vocabulary]:
            raise ValueError(
                f"SamplingParams: stop_token_ids {unknown} are outside the model's vocabulary of {vocabulary}"
            )
        for number, prompt in enumerate(prompts):
            self._check(number, prompt, sampling_params.max_new_tokens)
        completions: dict[int, Completion] = {}
        by_length = sorted(range(len(prompts)), key=lambda number: len(prompts[number]))
        for start in range(0, len(by_length), self.max_batch_size):
            batch = by_length[start : start + self.max_batch_size]
            made = self._generate([prompts[k] for k in batch], sampling_params, [seeds[k] for k in batch])
            completions.update(zip(batch, made, strict=True))
        return [completions[number] for number in range(len(prompts))]

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """See `RolloutEngine.load_weights`. Tensors are cast to the model's dtype.

        Raises:
            WeightsError: the model has no tensor of that name, or has another shape. Tensors before it were loaded.
        """
        import torch

        own = self.model.state_dict(keep_vars=True)
        with torch.no_grad():
            for name, tensor in weights:
                target = own.get(name)
                if target is None:
                    raise WeightsError(
                        f"the weight update has a tensor {name!r}, but {type(self.model).__name__} has none of this "
                        f"name; use the names of its state_dict(), such as {next(iter(own))!r}"
                    )
                if target.shape != tensor.shape:
                    raise WeightsError(
                        f"the weight update has {name!r} with shape {tuple(tensor.shape)}, but the model's has shape "
                        f"{tuple(target.shape)}"
                    )
                target.copy_(tensor)

    def weight_shapes(self) -> dict[str, tuple[int, ...]]:
        """See `RolloutEngine.weight_shapes`."""
        first: dict[int, tuple[str, tuple[int, ...]]] = {}
        for name, tensor in self.model.state_dict(keep_vars=True).items():
            first.setdefault(id(tensor), (name, tuple(tensor.shape)))
        return dict(first.values())

    def sleep(self) -> None:
        """Move the weights to host memory, where they can be updated, and free the device memory."""
        self._asleep = True
        self._move("cpu")

    def wake_up(self) -> None:
        """Move the weights back to the device."""
        self._move(self.device)
        self._asleep = False

    def _move(self, device: Any) -> None:
        import torch

        self.model.to(device)
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def _check(self, number: int, prompt: Sequence[int], new_tokens: int) -> None:
        if not len(prompt):
            raise PromptError("is empty; it must have at least one token", number)
        vocabulary = self.model.get_input_embeddings().num_embeddings
        if not 0 <= min(prompt) <= max(prompt) < vocabulary:
            raise PromptError(
                f"has token ids from {min(prompt)} to {max(prompt)}, but the model's vocab_size is {vocabulary}",
                number,
            )
        longest = getattr(self.model.config, "max_position_embeddings", None)
        if longest is not None and len(prompt) + new_tokens > longest:
            raise PromptError(
                f"has {len(prompt)} tokens, which with max_new_tokens={new_tokens} exceeds the model's {longest} "
                "positions; shorten it, or lower max_new_tokens",
                number,
            )

    def _generate(
        self, prompts: Sequence[Sequence[int]], sampling_params: SamplingParams, seeds: Sequence[int]
    ) -> list[Completion]:
        import torch
        from transformers import GenerationConfig, LogitsProcessorList

        from workers.rollout.sampler import SeededSampler

        width = max(map(len, prompts))
        input_ids = torch.tensor([[0] * (width - len(prompt)) + list(prompt) for prompt in prompts])
        lengths = torch.tensor([[len(prompt)] for prompt in prompts])
        sampler = SeededSampler(sampling_params, seeds, self.device)
        # The sampler draws, transformers takes the argmax, and positions count from the attention mask.
        how = GenerationConfig(
            do_sample=False,
            max_new_tokens=sampling_params.max_new_tokens,
            eos_token_id=list(sampling_params.stop_token_ids) or None,
            pad_token_id=0,
        )
        self.model.generate(
            inputs=input_ids.to(self.device),
            attention_mask=(torch.arange(width) >= width - lengths).long().to(self.device),
            generation_config=how,
            logits_processor=LogitsProcessorList([sampler]),
        )
        tokens, log_probs = (drawn[:, : sampling_params.max_new_tokens].tolist() for drawn in sampler.drawn())
        return [_completion(*row, sampling_params.stop_token_ids) for row in zip(tokens, log_probs, strict=True)]


def _completion(tokens: list[int], log_probs: list[float], stop_token_ids: Sequence[int]) -> Completion:
    stop = next((place for place, token in enumerate(tokens) if token in stop_token_ids), None)
    end = len(tokens) if stop is None else stop + 1
    if not all(log_prob > -float("inf") for log_prob in log_probs[:end]):
        raise RolloutError("the model's logits are not finite; check its weights, and whether its dtype overflows")
    return Completion(tokens[:end], log_probs[:end], "length" if stop is None else "stop")


def make_model(model: Any, random_weights: bool, seed: int, trust_remote_code: bool) -> Any:
    """Return the transformers model of an engine's arguments, on the CPU; see `HFEngine`."""
    import torch

    transformers = require("transformers", extra="hf")
    named = isinstance(model, (str, Path))
    if named and not random_weights:
        return transformers.AutoModelForCausalLM.from_pretrained(str(model), trust_remote_code=trust_remote_code)
    config = model
    if named:
        config = transformers.AutoConfig.from_pretrained(str(model), trust_remote_code=trust_remote_code)
    elif isinstance(model, Mapping):
        config = config_from(model)
    elif not isinstance(model, transformers.PretrainedConfig):
        raise ValueError(
            f"HFEngine: model={model!r}; expected a Hugging Face config, a dict of one, a folder or a model name"
        )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return transformers.AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
