"""MegatronLMWorker: a Llama or Qwen2 language model over tp, pp and dp ranks, to call from a driver as it is."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from single_controller import Dispatch, register
from workers.extras import require
from workers.megatron.worker import MegatronWorker

if TYPE_CHECKING:
    import torch

    from workers.megatron.micro_batches import MicroBatch
    from workers.megatron.optimizer import AdamOptions


def _every_rank(group: Any, *args: Any, **kwargs: Any) -> Any:
    return args, kwargs


def _merged(group: Any, parts: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {name: tensor for part in parts for name, tensor in part.items()}


class MegatronLMWorker(MegatronWorker):
    """One rank of a Hugging Face Llama or Qwen2 on megatron-core: log-probabilities, training, weights in and out.

    The model begins with random weights; load some to have known ones.

    Args:
        hf_config: a ``LlamaConfig`` or ``Qwen2Config``, the dict of one, or a folder with its config.json.
        parallel: keywords of `MegatronWorker.initialize_model_parallel`, such as
            ``{"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2}``.
        optimizer: `AdamOptions` or a mapping of them; None for a model that does not train.
        param_dtype: "fp32", "bf16" or "fp16".
        micro_batch_size: rows that go through the pipeline at once.
        overrides: fields of megatron's ``TransformerConfig`` to set, see `transformer_config`.

    Raises:
        ValueError: a model that cannot be built or cut like this; the message has the reason.
        ImportError: megatron-core or transformers is not installed.
    """

    def __init__(
        self,
        hf_config: Any,
        parallel: Mapping[str, Any] | None = None,
        optimizer: AdamOptions | Mapping[str, Any] | None = None,
        *,
        param_dtype: str = "fp32",
        micro_batch_size: int = 1,
        overrides: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        from workers.megatron.decoder import MegatronDecoder

        self.initialize_model_parallel(**dict(parallel or {}))
        self.micro_batch_size = micro_batch_size
        self.decoder = MegatronDecoder(
            _hf_config(hf_config), param_dtype=param_dtype, optimizer=optimizer, overrides=overrides
        )

    @register(Dispatch.MEGATRON_COMPUTE_PROTO, uneven="ragged")
    def compute_log_prob(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        temperature: float = 1.0,
    ) -> torch.Tensor | None:
        """Log-probability of every token but the first, given those before it.

        Args:
            input_ids: (rows, tokens), integers, tokens at least 2.
            attention_mask: (rows, tokens), 1 for real tokens; padding may be on either side. What comes out where the
                token or the one before it is padding means nothing.
            temperature: the logits are divided by it, unless it is 0.

        Returns:
            (rows, tokens - 1), float32.
        """
        batch = _batch(input_ids=input_ids, attention_mask=attention_mask)
        log_probs = self.decoder.log_probs(batch, self.micro_batch_size, temperature)
        return log_probs.cpu() if log_probs is not None else None

    @register(Dispatch.MEGATRON_COMPUTE_METRIC, uneven="ragged")
    def train_step(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        loss_mask: torch.Tensor | None = None,
    ) -> dict[str, float]:
        """One step of Adam on the next-token loss, its mean over all tokens of the whole batch.

        Args:
            input_ids: (rows, tokens), integers, tokens at least 2.
            attention_mask: (rows, tokens), 1 for real tokens; padding may be on either side.
            loss_mask: (rows, tokens), 1 for tokens whose prediction counts; by default all real ones but the first of
                each row, which is never predicted.

        Returns:
            loss (nats per token), tokens, grad_norm (before clipping), lr; of the whole batch, and so the same on every
            rank. The driver gets a list of it by dp rank.

        Raises:
            ValueError: ``loss_mask`` counts padding or the first real token of a row, or a shape or a token is wrong.
        """
        batch = _batch(input_ids=input_ids, attention_mask=attention_mask, loss_mask=loss_mask)
        return self.decoder.train_step(batch, next_token_loss, self.micro_batch_size)

    @register(Dispatch.ONE_TO_ALL, inputs="view")
    def load_hf_state_dict(self, state_dict: Mapping[str, torch.Tensor]) -> None:
        """Take the weights of the Hugging Face model, whole; each rank keeps its part.

        Raises:
            ValueError: a name is missing or unknown, or a tensor has another shape. Nothing was changed then.
        """
        self.decoder.load_hf(state_dict)

    @register(Dispatch.ONE_TO_ALL)
    def load_hf(self, folder: str) -> None:
        """Take the weights from a folder that ``save_pretrained`` wrote, which every rank can read; a rank reads only
        what it needs.

        Raises:
            FileNotFoundError: the folder has no ``.safetensors`` files.
            ValueError: as `load_hf_state_dict`.
        """
        from workers.megatron.weights import read_folder

        self.decoder.load_hf(read_folder(folder))

    @register({"dispatch_fn": _every_rank, "collect_fn": _merged})
    def hf_state_dict(self) -> dict[str, torch.Tensor]:
        """The weights as the Hugging Face model's ``state_dict()`` has them, whole, on the CPU. The driver gets one
        dict; each pipeline stage sends its own part of it, once."""
        from megatron.core import parallel_state as state

        mine = (
            state.get_tensor_model_parallel_rank() == 0
            and state.get_data_parallel_rank(with_context_parallel=True) == 0
        )
        return {name: tensor.cpu() for name, tensor in self.decoder.to_hf() if mine}


def next_token_loss(log_probs: torch.Tensor, micro_batch: MicroBatch) -> tuple[torch.Tensor, torch.Tensor]:
    """Sum of the negative log-probabilities of the tokens that count, and their number."""
    return -(log_probs * micro_batch.loss_mask).sum(), micro_batch.loss_mask.sum()


def _batch(**tensors: torch.Tensor | None) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in tensors.items() if tensor is not None}


def _hf_config(given: Any) -> Any:
    """A Hugging Face config from one, from its dict, or from its folder."""
    if not isinstance(given, (str, Path, Mapping)):
        return given
    require("transformers", extra="hf")
    from transformers import AutoConfig

    if isinstance(given, Mapping):
        return AutoConfig.for_model(**dict(given))
    return AutoConfig.from_pretrained(given)
