"""HFEngine: generation by transformers' ``generate``, for any causal language model that transformers has."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from workers.device import current_device
from workers.dtypes import dtype_of
from workers.extras import require
from workers.rollout.engine import Answer, RolloutEngine, Sampling
from workers.rollout.errors import PromptError, RolloutError, WeightsError
from workers.train.hf_files import config_from

if TYPE_CHECKING:
    import torch


class HFEngine(RolloutEngine):
    """An engine for tests, small models and machines without a GPU; a large model wants vLLM or SGLang.

    The model's own defaults of generation (its ``generation_config``) do not count, only `Sampling`: not its stop
    tokens either. The same prompt, seed and weights give the same answer on one kind of device, up to rounding: logits
    differ by about 1e-6 from one batch to the next, which changes a token once in about as many.

    Args:
        model: a Hugging Face config object, or the dict of one with ``model_type``, for random weights; or a folder
            that ``save_pretrained`` wrote, or a name on the hub, for its weights.
        random_weights: take the folder's config alone.
        seed: of random weights.
        param_dtype: "fp32", "bf16" or "fp16".
        max_batch_size: prompts that go through the model at once.
        trust_remote_code: whether code that comes with the model may run.

    Raises:
        ImportError: transformers is not installed.
        ValueError: an option that makes no sense.
        OSError: there is no such model; the message is transformers'.
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
            raise ValueError(f"HFEngine: max_batch_size={max_batch_size!r} is not from 1")
        dtype = dtype_of(param_dtype)
        transformers = require("transformers", extra="hf")
        self.max_batch_size = max_batch_size
        self.device = current_device()
        made = _make(transformers, model, random_weights, seed, trust_remote_code)
        for parameter in made.parameters():  # not made.to(dtype): rotary frequencies keep their precision
            parameter.data = parameter.data.to(dtype)
        made.generation_config = transformers.GenerationConfig()
        self.model = made.eval().requires_grad_(False).to(self.device)
        self._asleep = False

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling, seeds: Sequence[int]) -> list[Answer]:
        """See `RolloutEngine.generate`.

        Raises:
            PromptError: a prompt is empty, has a token that the model does not know, or is too long for the answer.
            RolloutError: the engine sleeps, or the model's logits are not finite.
            ValueError: not one seed for each prompt, or a stop token that the model does not have.
        """
        if self._asleep:
            raise RolloutError("the engine sleeps: call wake_up() (the worker's, or the manager's) before generate()")
        if len(seeds) != len(prompts):
            raise ValueError(f"generate(): {len(prompts)} prompts and {len(seeds)} seeds; each prompt has one")
        vocabulary = self.model.get_input_embeddings().num_embeddings
        if unknown := [token for token in sampling.stop_token_ids if token >= vocabulary]:
            raise ValueError(f"sampling: the stop tokens {unknown} are not among the model's {vocabulary} tokens")
        for number, prompt in enumerate(prompts):
            self._check(number, prompt, sampling.max_new_tokens)
        answers: dict[int, Answer] = {}
        by_length = sorted(range(len(prompts)), key=lambda number: len(prompts[number]))
        for start in range(0, len(by_length), self.max_batch_size):
            batch = by_length[start : start + self.max_batch_size]
            made = self._generate([prompts[k] for k in batch], sampling, [seeds[k] for k in batch])
            answers.update(zip(batch, made, strict=True))
        return [answers[number] for number in range(len(prompts))]

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """See `RolloutEngine.load_weights`. Tensors are cast to the model's dtype.

        Raises:
            WeightsError: a name that the model does not have, or another shape. What came before it was taken.
        """
        import torch

        own = self.model.state_dict(keep_vars=True)
        with torch.no_grad():
            for name, tensor in weights:
                target = own.get(name)
                if target is None:
                    raise WeightsError(
                        f"an update brings {name!r}, which {type(self.model).__name__} does not have; names are those "
                        f"of its state_dict(), {next(iter(own))!r} for example"
                    )
                if target.shape != tensor.shape:
                    raise WeightsError(
                        f"an update brings {name!r} as {tuple(tensor.shape)}; the model has {tuple(target.shape)}"
                    )
                target.copy_(tensor)

    def weight_shapes(self) -> dict[str, tuple[int, ...]]:
        """See `RolloutEngine.weight_shapes`."""
        first: dict[int, tuple[str, tuple[int, ...]]] = {}
        for name, tensor in self.model.state_dict(keep_vars=True).items():
            first.setdefault(id(tensor), (name, tuple(tensor.shape)))
        return dict(first.values())

    def sleep(self) -> None:
        """Move the weights to the host, and give the device's memory back. They are not lost, and can be updated."""
        self._asleep = True
        self._move("cpu")

    def wake_up(self) -> None:
        """Move the weights to the device again."""
        self._move(self.device)
        self._asleep = False

    def _move(self, device: Any) -> None:
        import torch

        self.model.to(device)
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def _check(self, number: int, prompt: Sequence[int], new_tokens: int) -> None:
        if not len(prompt):
            raise PromptError("is empty; it has one token at least", number)
        vocabulary = self.model.get_input_embeddings().num_embeddings
        if not 0 <= min(prompt) <= max(prompt) < vocabulary:
            raise PromptError(
                f"has tokens from {min(prompt)} to {max(prompt)}; the model's vocabulary is {vocabulary}", number
            )
        longest = getattr(self.model.config, "max_position_embeddings", None)
        if longest is not None and len(prompt) + new_tokens > longest:
            raise PromptError(
                f"has {len(prompt)} tokens, and with max_new_tokens={new_tokens} it is longer than the model's "
                f"{longest} positions: shorten it, or ask for fewer tokens",
                number,
            )

    def _generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling, seeds: Sequence[int]) -> list[Answer]:
        import torch
        from transformers import GenerationConfig, LogitsProcessorList

        from workers.rollout.sampler import SeededSampler

        width = max(map(len, prompts))
        input_ids = torch.tensor([[0] * (width - len(prompt)) + list(prompt) for prompt in prompts])
        lengths = torch.tensor([[len(prompt)] for prompt in prompts])
        sampler = SeededSampler(sampling, seeds, self.device)
        # The sampler draws; transformers takes the argmax, and counts positions from the mask.
        how = GenerationConfig(
            do_sample=False,
            max_new_tokens=sampling.max_new_tokens,
            eos_token_id=list(sampling.stop_token_ids) or None,
            pad_token_id=0,
        )
        self.model.generate(
            inputs=input_ids.to(self.device),
            attention_mask=(torch.arange(width) >= width - lengths).long().to(self.device),
            generation_config=how,
            logits_processor=LogitsProcessorList([sampler]),
        )
        tokens, log_probs = (drawn[:, : sampling.max_new_tokens].tolist() for drawn in sampler.drawn())
        return [_answer(*row, sampling.stop_token_ids) for row in zip(tokens, log_probs, strict=True)]


def _answer(tokens: list[int], log_probs: list[float], stop_token_ids: Sequence[int]) -> Answer:
    stop = next((place for place, token in enumerate(tokens) if token in stop_token_ids), None)
    end = len(tokens) if stop is None else stop + 1
    if not all(log_prob > -float("inf") for log_prob in log_probs[:end]):
        raise RolloutError("the model's logits are not finite: its weights are broken, or its dtype is too small")
    return Answer(tokens[:end], log_probs[:end], "length" if stop is None else "stop")


def _make(transformers: Any, model: Any, random_weights: bool, seed: int, trust_remote_code: bool) -> Any:
    import torch

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
            f"HFEngine: model={model!r} is no Hugging Face config, no dict of one, and neither folder nor name"
        )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return transformers.AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
