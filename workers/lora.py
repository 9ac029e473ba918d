"""LoRA adapters of `peft` in Hugging Face models, the same in a trainer and in an engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from workers.extras import require

if TYPE_CHECKING:
    import torch

ALL_LINEAR = "all-linear"

PREFIX = "base_model.model."
"""Of names in peft's adapter files."""

BASE_DIGEST = "lora_base_digest"
"""Name of a buffer, int64 of shape (1,), with a digest of the base model's weights. It is sent with the adapter, so
that an engine notices that it has another base model than the trainer."""

_ADAPTER = "default"


@dataclass(frozen=True)
class LoraSettings:
    """Size and place of a LoRA adapter. A linear layer with the weight W computes W x + alpha / rank * B A x; W is
    frozen, and B is 0 at first.

    Attributes:
        rank: rows of A and columns of B.
        alpha: the adapter's output is multiplied by ``alpha / rank``.
        dropout: probability of dropout on the adapter's input in training.
        target_modules: names of the modules that get an adapter, or the ends of their names, such as "q_proj"; or
            "all-linear" for all linear layers except the output layer.

    Raises:
        ValueError: a value is out of range.
    """

    rank: int
    alpha: int = 16
    dropout: float = 0.0
    target_modules: tuple[str, ...] = (ALL_LINEAR,)

    def __post_init__(self) -> None:
        given = self.target_modules
        object.__setattr__(self, "target_modules", (given,) if isinstance(given, str) else tuple(given))
        if self.rank < 1 or self.alpha < 1 or not 0 <= self.dropout < 1 or not self.target_modules:
            raise ValueError(f"{self}: expected rank >= 1, alpha >= 1, 0 <= dropout < 1, and names of target_modules")
        if len(self.target_modules) > 1 and ALL_LINEAR in self.target_modules:
            raise ValueError(f"{self}: {ALL_LINEAR!r} stands alone in target_modules")

    @classmethod
    def from_args(cls, args: Any) -> LoraSettings | None:
        """Read the settings from a training run's configuration; see `workers.train.args`. None if ``lora_rank`` is 0.

        Raises:
            ValueError: a value is out of range.
        """
        if not args.lora_rank:
            return None
        return cls(args.lora_rank, args.lora_alpha, args.lora_dropout, tuple(args.lora_target_modules))

    @classmethod
    def of(cls, given: LoraSettings | Mapping[str, Any] | None) -> LoraSettings | None:
        """Return the settings that are given as an object, as keyword arguments, or not at all."""
        return cls(**given) if isinstance(given, Mapping) else given

    def inject(self, model: Any) -> None:
        """Put an adapter into a causal language model of transformers, in place. All other parameters are frozen. The
        model gets the attribute ``peft_config`` and the buffer `BASE_DIGEST`.

        The adapter's random numbers come from torch's global generator.

        Args:
            model: on the CPU, or on the meta device; then call this under ``torch.device("meta")``.

        Raises:
            ImportError: peft is not installed.
            ValueError: the model has none of the target modules, shares one with another layer, or has experts under
                that name, which are not modules.
        """
        import torch

        peft = require("peft", extra="lora")
        self._refuse_experts(model)
        base = _digest(model)
        names: Any = ALL_LINEAR if self.target_modules == (ALL_LINEAR,) else list(self.target_modules)
        config = peft.LoraConfig(
            r=self.rank,
            lora_alpha=self.alpha,
            lora_dropout=self.dropout,
            target_modules=names,
            task_type="CAUSAL_LM",
        )
        model.requires_grad_(False)
        peft.inject_adapter_in_model(config, model, _ADAPTER)
        ends = (model.get_input_embeddings(), model.get_output_embeddings())
        if model.config.tie_word_embeddings and any(hasattr(end, "base_layer") for end in ends):
            raise ValueError(
                f"lora_target_modules={list(self.target_modules)}: this model's output layer shares its weight with "
                "the embeddings, so neither can have an adapter"
            )
        model.register_buffer(BASE_DIGEST, torch.tensor([base], dtype=torch.int64))

    def _refuse_experts(self, model: Any) -> None:
        """Raise a `ValueError` for targets that are parts of experts: peft would leave them out without a word."""
        from workers.weight_sync.expert_names import PARTS, stack_of

        if not any(stack_of(name) for name, _ in model.named_parameters()):
            return
        modules = [name for name, _ in model.named_modules()]
        for target in self.target_modules:
            own, in_full = target.rpartition(".")[2], any(name.endswith(f".{target}") for name in modules)
            if own == "experts" or (own in PARTS and not (in_full and "." in target)):
                raise ValueError(
                    f"lora_target_modules has {target!r}: transformers has the experts of a layer of this "
                    f"{model.config.model_type!r} in one parameter, which cannot have an adapter. Name modules of "
                    "attention, such as q_proj, or more of a name, such as shared_expert.down_proj; or train all "
                    "weights with lora_rank=0"
                )


def adapter_config(model: Any, base: str | None) -> Any:
    """Return the peft config of a model with an adapter, as an adapter folder has it.

    Args:
        model: after `LoraSettings.inject`.
        base: folder or hub name of the base model.
    """
    import copy

    config = copy.copy(model.peft_config[_ADAPTER])
    config.inference_mode, config.base_model_name_or_path = True, base
    return config


def adapter_tensors(model: Any) -> dict[str, torch.Tensor]:
    """Return the parameters of a model's adapter under their names in peft's adapter files, and `BASE_DIGEST`.

    Args:
        model: after `LoraSettings.inject`.
    """
    found = {
        PREFIX + ".".join(part for part in name.split(".") if part != _ADAPTER): parameter
        for name, parameter in model.named_parameters()
        if ".lora_" in name
    }
    return {**found, BASE_DIGEST: getattr(model, BASE_DIGEST)}


def _digest(model: Any) -> int:
    """Return a digest of the model's parameters as float32, so that it does not depend on the dtype of the computation;
    0 on the meta device."""
    from workers.weight_sync.digest import combine, digest

    parameters = dict(model.named_parameters())
    if any(parameter.is_meta for parameter in parameters.values()):
        return 0
    return combine((name, (), digest(parameter.float())) for name, parameter in parameters.items())
