"""MegatronTrainModel: a Llama or Qwen2 on megatron-core as a TrainModel, cut over tp, pp and dp."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from workers.megatron.checkpoint import Checkpoints
from workers.megatron.optimizer import AdamOptions, inner_optimizers
from workers.megatron.stages import Stages
from workers.megatron.weights import read_hf
from workers.train.micro_batches import MicroBatch, cut_by_tokens, restore
from workers.train.model import StepReport, TokenLoss, TokenOutputs, TrainModel
from workers.train.token_log_probs import token_log_probs

NEEDED = ("input_ids", "attention_mask")


class MegatronTrainModel(TrainModel):
    """See `TrainModel`. Made in a process where megatron's model parallelism is initialised; dp ranks are given rows of
    their own, the tp and pp ranks of one dp rank the same.

    Where a rank has one pipeline stage, micro-batches go through the pipeline in the shapes that they have, and
    the stages tell each other (``variable_seq_lengths``). With virtual pipeline parallelism they do not, since
    megatron confuses the shapes at pp=2: there the model runs on micro-batches padded to the largest.

    Megatron leaves biases and norms out of weight decay.

    Args:
        hf_config: a Hugging Face ``LlamaConfig`` or ``Qwen2Config``.
        role: "actor", or "critic" with a value head: a linear layer from hidden to 1, with a bias, as in Hugging Face's
            ``...ForTokenClassification``.
        param_dtype: "fp32", "bf16" or "fp16".
        optimizer: `AdamOptions` or a mapping of them; None for a model that does not train.
        max_tokens_per_micro_batch: see `cut_by_tokens`.
        overrides: fields of megatron's ``TransformerConfig`` to set.

    Raises:
        ValueError: what cannot be built or cut like this; the message has the reason.
    """

    def __init__(
        self,
        hf_config: Any,
        *,
        role: str = "actor",
        param_dtype: Any = "fp32",
        optimizer: AdamOptions | Mapping[str, Any] | None = None,
        max_tokens_per_micro_batch: int,
        overrides: Mapping[str, Any] | None = None,
    ) -> None:
        if role not in ("actor", "critic"):
            raise ValueError(f"MegatronTrainModel: role={role!r}; it is 'actor' or 'critic'")
        self.role = role
        self.hf_config = hf_config
        self.max_tokens = max_tokens_per_micro_batch
        self.stages = Stages(
            hf_config, param_dtype=param_dtype, optimizer=optimizer, overrides=overrides, critic=role == "critic"
        )
        self.stages.config.variable_seq_lengths = not self.stages.interleaved
        self._checkpoints = Checkpoints(self.stages, role)

    # --- running ----------------------------------------------------------------------------------------

    def log_probs(self, data: Mapping[str, torch.Tensor], temperature: float) -> torch.Tensor | None:
        self._must_be("actor", "log_probs")
        return self._evaluate(data, lambda part, output: self._outputs(part, output, temperature, False).log_probs)

    def values(self, data: Mapping[str, torch.Tensor]) -> torch.Tensor | None:
        self._must_be("critic", "values")
        return self._evaluate(data, lambda part, output: self._outputs(part, output, 1.0, False).values)

    def train_step(
        self,
        data: Mapping[str, torch.Tensor],
        loss: TokenLoss,
        *,
        lr: float,
        temperature: float = 1.0,
        entropy: bool = False,
    ) -> StepReport:
        def losses(part: MicroBatch, output: torch.Tensor) -> tuple[torch.Tensor, None, dict[str, torch.Tensor]]:
            part = part.to(output.device)
            total, sums = loss(self._outputs(part, output, temperature, entropy), part)
            kept = {**sums, "loss": total}
            return total, None, {name: value.detach().double() for name, value in kept.items()}

        parts, inputs, shape = self._cut(data)
        kept, grad_norm = self.stages.step(parts, inputs, losses, shape, lr)
        return StepReport(self._over_ranks(kept), grad_norm)

    def _evaluate(
        self, data: Mapping[str, torch.Tensor], keep: Callable[[MicroBatch, torch.Tensor], Any]
    ) -> torch.Tensor | None:
        parts, inputs, shape = self._cut({name: data[name] for name in NEEDED})
        kept = self.stages.run(parts, inputs, keep, shape)
        if not self.stages.last:
            return None
        rows, tokens = data["input_ids"].shape
        return restore([tensor.cpu() for tensor in kept], parts, (rows, tokens))

    def _cut(self, data: Mapping[str, torch.Tensor]) -> tuple[list[MicroBatch], Callable[..., Any], tuple[int, int]]:
        """The micro-batches, what the model takes of one, and the shape in which they go through the pipeline."""
        ids, vocab_size = data["input_ids"], int(self.hf_config.vocab_size)
        if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < vocab_size:
            # Megatron's embedding would take them for tokens of another rank, and give zeros.
            raise ValueError(
                f"input_ids has tokens from {int(ids.min())} to {int(ids.max())}; vocab_size is {vocab_size}"
            )
        parts = cut_by_tokens(data, self.max_tokens, at_least=1, multiple_of=self.stages.multiple_of)
        shapes = [part.input_ids.shape for part in parts]
        shape = (max(rows for rows, _ in shapes), max(tokens for _, tokens in shapes))

        def inputs(part: MicroBatch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
            ids = part.input_ids.to(self.stages.device)
            if self.stages.interleaved:
                rows, tokens = ids.shape
                ids = torch.nn.functional.pad(ids, (0, shape[1] - tokens, 0, shape[0] - rows))
            rows, tokens = ids.shape
            positions = torch.arange(tokens, device=ids.device).expand(rows, tokens)
            later = torch.ones(1, 1, tokens, tokens, dtype=torch.bool, device=ids.device).triu(1)
            return ids, positions, later  # padding is on the right: real tokens never see it

        return parts, inputs, shape

    def _outputs(self, part: MicroBatch, output: torch.Tensor, temperature: float, entropy: bool) -> TokenOutputs:
        """What the output layer gave, of the tokens that it is about: what follows token t - 1 stands at t."""
        from megatron.core import parallel_state

        rows, tokens = part.input_ids.shape
        before = output[:rows, : tokens - 1]

        def placed(values: torch.Tensor | None) -> torch.Tensor | None:
            return None if values is None else torch.nn.functional.pad(values, (1, 0))

        if self.role == "critic":
            return TokenOutputs(values=placed(before[..., 0].float()))
        ids = part.input_ids[:, 1:].to(output.device)
        found = token_log_probs(
            before,
            ids,
            temperature=temperature,
            entropy=entropy,
            vocab_size=int(self.hf_config.vocab_size),
            group=parallel_state.get_tensor_model_parallel_group(),
        )
        return TokenOutputs(log_probs=placed(found[0]), entropy=placed(found[1]))

    def _over_ranks(self, kept: list[dict[str, torch.Tensor]]) -> dict[str, float]:
        """Sums of all micro-batches and dp ranks, told to every stage."""
        from megatron.core import parallel_state as state

        told: list[Any] = [None]
        if self.stages.last:
            group = state.get_data_parallel_group(with_context_parallel=True)
            of_ranks: list[Any] = [None] * group.size()
            mine = _sum([{name: value.item() for name, value in one.items()} for one in kept])
            torch.distributed.all_gather_object(of_ranks, mine, group)
            told = [_sum(of_ranks)]
        torch.distributed.broadcast_object_list(
            told, state.get_pipeline_model_parallel_last_rank(), state.get_pipeline_model_parallel_group()
        )
        sums: dict[str, float] = told[0]
        return sums

    def _must_be(self, role: str, what: str) -> None:
        if self.role != role:
            raise ValueError(f"{what}(): this model has the role {self.role!r}; only the role {role!r} has {what}")

    # --- weights ----------------------------------------------------------------------------------------

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        for number, model in enumerate(self.stages.models):
            for name, parameter in model.named_parameters():
                yield f"{number}.{name}", parameter.detach()

    def weights_changed(self) -> None:
        self.stages.weights_changed()

    def tensors(self) -> Iterator[torch.Tensor]:
        """One flat tensor for each storage, over all of it: parameters, Megatron's buffers of parameters and gradients,
        the optimizer's float32 parameters and its state."""
        seen = set()
        for tensor in self._held():
            storage = tensor.untyped_storage()
            if tensor.device.type == self.stages.device.type and storage._cdata not in seen:
                seen.add(storage._cdata)
                yield torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(storage)

    def _held(self) -> Iterator[torch.Tensor]:
        for model in self.stages.models:
            yield from model.parameters()
            yield from model.buffers()
        if self.stages.optimizer is None:
            return
        for chunk in self.stages.chunks:
            for buffer in [*chunk.buffers, *chunk.expert_parallel_buffers]:
                yield from (tensor for tensor in (buffer.param_data, buffer.grad_data) if tensor is not None)
        for group in self.stages.optimizer.param_groups:
            yield from group["params"]
        for one in inner_optimizers(self.stages.optimizer):
            for state in one.state.values():
                yield from (value for value in state.values() if isinstance(value, torch.Tensor))

    def hf_weights(self, *, everywhere: bool = False) -> Iterator[tuple[str, torch.Tensor]]:
        from megatron.core import parallel_state as state

        if everywhere:
            yield from self._from_every_stage()
            return
        if state.get_data_parallel_rank(with_context_parallel=True):
            return
        for name, tensor in self.stages.to_hf():
            if not state.get_tensor_model_parallel_rank():
                yield name, tensor

    def _from_every_stage(self) -> Iterator[tuple[str, torch.Tensor]]:
        """All weights, on every rank: each pipeline stage in turn tells the others its own."""
        from megatron.core import parallel_state as state

        group = state.get_pipeline_model_parallel_group()
        for source in dist.get_process_group_ranks(group):
            own = source == dist.get_rank()
            pairs = self.stages.to_hf() if own else iter(())
            while True:
                name, tensor = next(pairs, ("", None))
                about: list[Any] = [None if tensor is None else (name, tensor.shape, tensor.dtype)]
                dist.broadcast_object_list(about, src=source, group=group)
                if about[0] is None:
                    break
                name, shape, dtype = about[0]
                device = torch.device(torch.cuda.current_device())
                whole = torch.empty(shape, dtype=dtype, device=device) if tensor is None else tensor.contiguous()
                dist.broadcast(whole, src=source, group=group)
                yield name, whole

    def load_hf(self, folder: str) -> None:
        self.stages.load_hf(read_hf(folder))

    # --- checkpoints ------------------------------------------------------------------------------------

    def save(self, folder: Path, *, background: bool) -> None:
        """As in `TrainModel`; the ranks' states are written by torch.distributed.checkpoint in the layout of megatron's
        distributed checkpoints. In the background a thread of each rank writes copies in host memory, and the threads
        agree in a process group of their own; the checkpoint is complete when they end, whether anybody waits or
        not."""
        self._checkpoints.save(Path(folder), background=background)

    def wait_for_save(self) -> None:
        self._checkpoints.wait()

    def load(self, folder: Path, *, optimizer: bool) -> None:
        """As in `TrainModel`, on any tp, pp and dp.

        Raises:
            ValueError: the checkpoint is of the other role, or of a model without an optimizer, or its optimizer
                was distributed and this one is not, or the other way round.
        """
        self._checkpoints.load(Path(folder), optimizer=optimizer)


def _sum(of: list[dict[str, float]]) -> dict[str, float]:
    total: dict[str, float] = {}
    for one in of:
        for name, value in one.items():
            total[name] = total.get(name, 0.0) + value
    return total
