"""MegatronDecoder: a Llama or Qwen2 model on megatron-core, cut over tp and pp, run by megatron's own schedules."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from workers.megatron.micro_batches import MicroBatch, micro_batches
from workers.megatron.optimizer import AdamOptions
from workers.megatron.stages import Stages
from workers.megatron.weights import EMBEDDING, HEAD, tied
from workers.train.token_log_probs import token_log_probs

LossFunction = Callable[[torch.Tensor, MicroBatch], tuple[torch.Tensor, torch.Tensor]]
"""(log-probabilities of the tokens, their micro-batch) -> (sum of the losses of its tokens, number of those tokens)."""


class MegatronDecoder:
    """This rank's part of a Llama or Qwen2 model, and what it takes to run and train it. Not a module: the parts of a
    pipeline run only together, through `log_probs` and `train_step`, which every rank of the group calls.

    Megatron's model parallelism must be initialised.

    Args:
        hf_config: a Hugging Face ``LlamaConfig`` or ``Qwen2Config``.
        param_dtype: "fp32", "bf16" or "fp16".
        optimizer: `AdamOptions` or a mapping of them; None for a model that does not train.
        overrides: fields of megatron's ``TransformerConfig`` to set, see `transformer_config`.

    Raises:
        ValueError: what cannot be built or cut like this; the message has the reason.
    """

    def __init__(
        self,
        hf_config: Any,
        *,
        param_dtype: Any = "fp32",
        optimizer: AdamOptions | Mapping[str, Any] | None = None,
        overrides: Mapping[str, Any] | None = None,
    ) -> None:
        self.stages = Stages(hf_config, param_dtype=param_dtype, optimizer=optimizer, overrides=overrides)
        self.hf_config = hf_config
        self.config = self.stages.config
        self.models = self.stages.models

    # --- weights ----------------------------------------------------------------------------------------

    def load_hf(self, state_dict: Mapping[str, torch.Tensor]) -> None:
        """Take the weights of the Hugging Face model; each rank keeps its part.

        Raises:
            ValueError: a name is missing or unknown, or a tensor has another shape. Nothing was changed then.
        """
        self.stages.load_hf(state_dict)

    def to_hf(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, whole tensor) of this rank's pipeline stage, as Hugging Face's ``state_dict()`` has it: a tied output
        layer comes under both names. The tensor-parallel ranks go through it together."""
        for name, tensor in self.stages.to_hf():
            yield name, tensor
            if name == EMBEDDING and tied(self.hf_config):
                yield HEAD, tensor

    # --- running ----------------------------------------------------------------------------------------

    @torch.no_grad()
    def log_probs(
        self, batch: Mapping[str, torch.Tensor], micro_batch_size: int, temperature: float = 1.0
    ) -> torch.Tensor | None:
        """Log-probability of every token but the first, given those before it.

        Args:
            batch: see `MicroBatch`; its rows may be none.
            micro_batch_size: rows that go through the pipeline at once.
            temperature: the logits are divided by it, unless it is 0.

        Returns:
            (rows, tokens - 1), float32, on the last stage; None on the others.
        """
        parts = self._cut(batch, micro_batch_size)

        def keep(part: MicroBatch, logits: torch.Tensor) -> torch.Tensor:
            return self._token_log_probs(part, logits, temperature)

        kept = self.stages.run(parts, _inputs, keep, parts[0].input_ids.shape)
        if not self.stages.last:
            return None
        rows, tokens = batch["input_ids"].shape
        return torch.cat(kept)[:rows].reshape(rows, max(tokens - 1, 0))

    def train_step(
        self, batch: Mapping[str, torch.Tensor], loss: LossFunction, micro_batch_size: int
    ) -> dict[str, float]:
        """One step of the optimizer on the mean loss over all tokens of all dp ranks' batches.

        Args:
            batch: this dp rank's rows, see `MicroBatch`; may be none as long as another dp rank has some.
            loss: the loss of a micro-batch, called on the last stage.
            micro_batch_size: rows that go through the pipeline at once.

        Returns:
            loss (mean over the tokens of all dp ranks), tokens (their number), grad_norm (of the whole model, before
            clipping) and lr; the same on every rank.

        Raises:
            RuntimeError: the decoder was made without an optimizer.
        """
        parts = self._cut(batch, micro_batch_size)

        def losses(part: MicroBatch, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
            total, tokens = loss(self._token_log_probs(part, logits, 1.0), part)
            return total, tokens, torch.stack([total.detach().double(), tokens.double()])

        kept, grad_norm = self.stages.step(parts, _inputs, losses, parts[0].input_ids.shape)
        total, tokens = self._over_ranks(torch.stack(kept).sum(0) if self.stages.last else None)
        lr = self.stages.optimizer.param_groups[0]["lr"]
        return {"loss": total / max(tokens, 1.0), "tokens": tokens, "grad_norm": grad_norm, "lr": lr}

    def _cut(self, batch: Mapping[str, torch.Tensor], size: int) -> list[MicroBatch]:
        return micro_batches(batch, size, self.stages.multiple_of, int(self.hf_config.vocab_size), self.stages.device)

    def _token_log_probs(self, part: MicroBatch, logits: torch.Tensor, temperature: float) -> torch.Tensor:
        """Log-probabilities of the tokens after the first, (rows, tokens - 1)."""
        from megatron.core import parallel_state

        group = parallel_state.get_tensor_model_parallel_group()
        vocab_size = int(self.hf_config.vocab_size)
        return token_log_probs(
            logits[:, :-1], part.input_ids[:, 1:], temperature=temperature, vocab_size=vocab_size, group=group
        )[0]

    @staticmethod
    def _over_ranks(sums: torch.Tensor | None) -> tuple[float, float]:
        """(loss, tokens), added up over the dp ranks and told to every stage."""
        from megatron.core import parallel_state

        device = torch.device(torch.cuda.current_device())
        sums = torch.zeros(2, dtype=torch.float64, device=device) if sums is None else sums.to(device)
        torch.distributed.all_reduce(sums, group=parallel_state.get_data_parallel_group(with_context_parallel=True))
        torch.distributed.broadcast(
            sums,
            src=parallel_state.get_pipeline_model_parallel_last_rank(),
            group=parallel_state.get_pipeline_model_parallel_group(),
        )
        total, tokens = sums.tolist()
        return total, tokens


def _inputs(part: MicroBatch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return part.input_ids, part.position_ids, part.attention_mask
