"""MegatronDecoder: a Llama or Qwen2 model on megatron-core, cut over tp and pp, run by megatron's own schedules."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import torch

from workers.extras import require
from workers.megatron.checks import check_names
from workers.megatron.config import rope_parameters, transformer_config
from workers.megatron.micro_batches import MicroBatch, micro_batches
from workers.megatron.weights import load_hf, padded_vocab_size, tied, to_hf

if TYPE_CHECKING:
    from megatron.core.models.gpt import GPTModel

LossFunction = Callable[[torch.Tensor, MicroBatch], tuple[torch.Tensor, torch.Tensor]]
"""(log-probabilities of the tokens, their micro-batch) -> (sum of the losses of its tokens, number of those tokens)."""


@dataclass(frozen=True)
class AdamOptions:
    """Adam with decoupled weight decay, as Megatron's optimizer runs it.

    Attributes:
        lr: learning rate.
        betas: decay of the two moments.
        eps: added to the denominator.
        weight_decay: decoupled; Megatron leaves biases and norms out of it.
        clip_grad: largest norm of the gradient of the whole model; 0 for no clipping.
        distributed: whether optimizer states are cut over the dp ranks.

    Raises:
        ValueError: a number that makes no sense.
    """

    lr: float = 1e-5
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    clip_grad: float = 1.0
    distributed: bool = False

    def __post_init__(self) -> None:
        for name in ("lr", "eps", "weight_decay", "clip_grad"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"optimizer: {name}={getattr(self, name)!r} is not a number from 0")
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"optimizer: betas={self.betas!r} are not two numbers from 0 to below 1")

    @classmethod
    def of(cls, given: AdamOptions | Mapping[str, Any] | None) -> AdamOptions:
        """From a mapping of the attributes.

        Raises:
            ValueError: one that does not exist.
        """
        if isinstance(given, AdamOptions):
            return given
        options = dict(given or {})
        check_names("optimizer", options, [field.name for field in fields(cls)])
        if "betas" in options:
            options["betas"] = tuple(options["betas"])
        return cls(**options)


class MegatronDecoder:
    """This rank's part of a Llama or Qwen2 model, and what it takes to run and train it. Not a module: the parts of a
    pipeline run only together, through `log_probs` and `train_step`, which every rank of the group calls.

    Megatron's model parallelism must be initialised.

    Args:
        hf_config: a Hugging Face ``LlamaConfig`` or ``Qwen2Config``.
        param_dtype: "fp32", "bf16" or "fp16".
        optimizer: `AdamOptions` or a mapping of them; None for a model that does not train.
        overrides: fields of megatron's ``TransformerConfig`` to set.

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
        require("megatron.core", extra="megatron")
        self.hf_config = hf_config
        self.config = transformer_config(hf_config, param_dtype, overrides)
        self.config.calculate_per_token_loss = True
        self.models = [self._build(stage) for stage in self._virtual_stages()]
        self._chunks = [self._wrapped(model) for model in self.models]
        self._optimizer: Any = None
        if optimizer is not None:
            self._make_optimizer(AdamOptions.of(optimizer))

    # --- weights ----------------------------------------------------------------------------------------

    def load_hf(self, state_dict: Mapping[str, torch.Tensor]) -> None:
        """Take the weights of the Hugging Face model; each rank keeps its part.

        Raises:
            ValueError: a name is missing or unknown, or a tensor has another shape. Nothing was changed then.
        """
        load_hf(self.models, self.hf_config, state_dict)
        if self._optimizer is not None:
            self._optimizer.reload_model_params()

    def to_hf(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, whole tensor) of this rank's pipeline stage, as Hugging Face names it. The tensor-parallel ranks go
        through it together."""
        return to_hf(self.models, self.hf_config)

    # --- running ----------------------------------------------------------------------------------------

    @torch.no_grad()
    def log_probs(
        self, batch: Mapping[str, torch.Tensor], micro_batch_size: int, temperature: float = 1.0
    ) -> torch.Tensor | None:
        """Log-probability of every token but the first, given those before it.

        Args:
            batch: see `MicroBatch`; its rows may be none.
            micro_batch_size: rows that go through the pipeline at once.
            temperature: the logits are divided by it.

        Returns:
            (rows, tokens - 1), float32, on the last stage; None on the others.
        """
        for chunk in self._chunks:
            chunk.eval()

        def keep(log_probs: torch.Tensor, non_loss_data: bool = True) -> torch.Tensor:
            return log_probs

        kept = self._run(batch, micro_batch_size, lambda _: keep, temperature, forward_only=True)
        if not self._last_stage():
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
        if self._optimizer is None:
            raise RuntimeError("this model was made without an optimizer; give it optimizer={'lr': ...}")
        for chunk in self._chunks:
            chunk.train()
            chunk.zero_grad_buffer()
        self._optimizer.zero_grad()

        def step(micro_batch: MicroBatch) -> Callable[..., Any]:
            def of(log_probs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
                total, tokens = loss(log_probs, micro_batch)
                # The schedule divides the loss that it is given in place: it gets one of its own.
                return total.clone(), tokens.to(torch.int), torch.stack([total.detach().double(), tokens.double()])

            return of

        kept = self._run(batch, micro_batch_size, step, 1.0, forward_only=False)
        done, grad_norm, _ = self._optimizer.step()
        if not done:
            grad_norm = float("nan")
        total, tokens = self._over_ranks(torch.stack(kept).sum(0) if self._last_stage() else None)
        lr = self._optimizer.param_groups[0]["lr"]
        return {"loss": total / max(tokens, 1.0), "tokens": tokens, "grad_norm": float(grad_norm or 0.0), "lr": lr}

    def _run(
        self,
        batch: Mapping[str, torch.Tensor],
        size: int,
        loss_of: Callable[[MicroBatch], Callable[..., Any]],
        temperature: float,
        forward_only: bool,
    ) -> list[torch.Tensor]:
        """Send a batch through the pipeline. What the loss functions left, by micro-batch, on the last stage."""
        from megatron.core.pipeline_parallel import get_forward_backward_func

        group = self.config.microbatch_group_size_per_vp_stage if len(self._chunks) > 1 else 1
        device = torch.device(torch.cuda.current_device())
        parts = micro_batches(batch, size, group, int(self.hf_config.vocab_size), device)

        def forward(iterator: Iterator[MicroBatch], chunk: Any) -> tuple[torch.Tensor, Callable[..., Any]]:
            part = next(iterator)
            output = chunk(part.input_ids, part.position_ids, part.attention_mask)
            if self._is_last(chunk):
                output = self._token_log_probs(output, part.input_ids, temperature)
            return output, loss_of(part)

        kept: list[torch.Tensor] = get_forward_backward_func()(
            forward_step_func=forward,
            data_iterator=[iter(parts) for _ in self._chunks],
            model=self._chunks,
            num_microbatches=len(parts),
            seq_length=parts[0].input_ids.shape[1],
            micro_batch_size=size,
            forward_only=forward_only,
            collect_non_loss_data=forward_only,
        )
        return kept

    def _token_log_probs(self, logits: torch.Tensor, input_ids: torch.Tensor, temperature: float) -> torch.Tensor:
        """Log-probabilities of the tokens after the first, (rows, tokens - 1), from the logits of this rank's part of
        the vocabulary, (rows, tokens, part)."""
        from megatron.core import parallel_state
        from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

        logits = logits[:, :-1].float() / temperature
        part = logits.shape[-1]
        own = self.hf_config.vocab_size - part * parallel_state.get_tensor_model_parallel_rank()
        if own < part:  # the vocabulary was padded: nothing falls on what is not in it
            padding = torch.arange(part, device=logits.device) >= own
            logits = logits.masked_fill(padding, float("-inf"))
        by_token = vocab_parallel_cross_entropy(logits.transpose(0, 1).contiguous(), input_ids[:, 1:].t().contiguous())
        log_probs: torch.Tensor = -by_token.transpose(0, 1)
        return log_probs

    # --- the inside -------------------------------------------------------------------------------------

    def _virtual_stages(self) -> Sequence[int | None]:
        virtual = self.config.virtual_pipeline_model_parallel_size
        return [None] if virtual is None else range(virtual)

    def _build(self, stage: int | None) -> GPTModel:
        from megatron.core import parallel_state
        from megatron.core.models.gpt import GPTModel
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

        rope = rope_parameters(self.hf_config)
        model: GPTModel = GPTModel(
            self.config,
            get_gpt_layer_local_spec(normalization=self.config.normalization),
            vocab_size=padded_vocab_size(self.hf_config),
            max_sequence_length=self.hf_config.max_position_embeddings,
            pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=stage),
            post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=stage),
            share_embeddings_and_output_weights=tied(self.hf_config),
            position_embedding_type="rope",
            rotary_base=rope["rope_theta"],
            rope_scaling=rope["rope_type"] == "llama3",
            rope_scaling_factor=rope.get("factor", 8.0),
            vp_stage=stage,
        )
        return model.cuda()

    def _wrapped(self, model: GPTModel) -> Any:
        """What the schedule runs: the model itself, or one whose inputs and outputs are cast."""
        from megatron.core.transformer.module import Float16Module

        return Float16Module(self.config, model) if self.config.bf16 or self.config.fp16 else model

    def _make_optimizer(self, options: AdamOptions) -> None:
        from megatron.core.distributed import (
            DistributedDataParallel,
            DistributedDataParallelConfig,
            finalize_model_grads,
        )
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

        # Gradients are kept in float32 and summed over the ranks; `finalize_model_grads` divides by the tokens of all.
        reducing = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True, use_distributed_optimizer=options.distributed, overlap_grad_reduce=False
        )
        self._chunks = [
            DistributedDataParallel(self.config, reducing, chunk, disable_bucketing=number > 0)
            for number, chunk in enumerate(self._chunks)
        ]
        for chunk in self._chunks:
            chunk.broadcast_params()
        adam = OptimizerConfig(
            optimizer="adam",
            lr=options.lr,
            adam_beta1=options.betas[0],
            adam_beta2=options.betas[1],
            adam_eps=options.eps,
            weight_decay=options.weight_decay,
            clip_grad=options.clip_grad,
            use_distributed_optimizer=options.distributed,
            bf16=self.config.bf16,
            fp16=self.config.fp16,
            params_dtype=self.config.params_dtype,
        )
        self._optimizer = get_megatron_optimizer(adam, self._chunks)
        self.config.finalize_model_grads_func = finalize_model_grads
        self.config.grad_scale_func = self._optimizer.scale_loss
        no_sync = [chunk.no_sync for chunk in self._chunks]
        self.config.no_sync_func = no_sync[0] if len(no_sync) == 1 else no_sync

    def _last_stage(self) -> bool:
        from megatron.core import parallel_state

        return bool(parallel_state.is_pipeline_last_stage(ignore_virtual=True))

    @staticmethod
    def _is_last(chunk: Any) -> bool:
        from megatron.core.utils import unwrap_model

        return bool(unwrap_model(chunk).post_process)

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
