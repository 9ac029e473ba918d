"""Stages: this rank's part of a Llama or Qwen2 on megatron-core, its optimizer, and Megatron's schedules over them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from workers.extras import require
from workers.megatron.config import rope_parameters, transformer_config
from workers.megatron.optimizer import AdamOptions, finite_step, make_optimizer, reduced
from workers.megatron.padding_token import keep_padding_token
from workers.megatron.value_head import ValueHead
from workers.megatron.weights import load_hf, padded_vocab_size, tied, to_hf

if TYPE_CHECKING:
    from megatron.core.models.gpt import GPTModel

Part = TypeVar("Part")
"""A micro-batch, of whatever type."""


class Stages:
    """The pipeline stages of this rank (one, or with virtual pipeline parallelism several), cut over tp. Not a module:
    stages run only together, by `run` and `step`, which every rank of the group calls.

    Megatron's model parallelism must be initialised.

    Args:
        hf_config, param_dtype, optimizer, overrides: see `MegatronDecoder`.
        critic: whether a value head is where a language model has its output layer.

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
        critic: bool = False,
    ) -> None:
        require("megatron.core", extra="megatron")
        self.hf_config = hf_config
        self.critic = critic
        self.config = transformer_config(hf_config, param_dtype, overrides)
        # The parts of the loss are summed; whether anything divides them is said by the number of tokens.
        self.config.calculate_per_token_loss = True
        self.models = [self._build(stage) for stage in self._virtual_stages()]
        self.chunks = [self._wrapped(model) for model in self.models]
        self.options: AdamOptions | None = None
        self.optimizer: Any = None
        if optimizer is not None:
            self.options = AdamOptions.of(optimizer)
            self.chunks = reduced(self.config, self.chunks, self.options.distributed)
            self.optimizer = make_optimizer(self.options, self.config, self.chunks)

    @property
    def device(self) -> torch.device:
        """Where the parameters are."""
        return torch.device(torch.cuda.current_device())

    @property
    def interleaved(self) -> bool:
        """Whether this rank has several stages (virtual pipeline parallelism)."""
        return len(self.chunks) > 1

    @property
    def multiple_of(self) -> int:
        """The number of micro-batches of a run must be a multiple of this."""
        return int(self.config.microbatch_group_size_per_vp_stage) if self.interleaved else 1

    @property
    def last(self) -> bool:
        """Whether this rank has the last stage."""
        from megatron.core import parallel_state

        return bool(parallel_state.is_pipeline_last_stage(ignore_virtual=True))

    # --- weights ----------------------------------------------------------------------------------------

    def load_hf(self, state_dict: Mapping[str, torch.Tensor]) -> None:
        """Take the weights of the Hugging Face model; each rank keeps its part.

        Raises:
            ValueError: a name is missing or unknown, or a tensor has another shape. Nothing was changed then.
        """
        load_hf(self.models, self.hf_config, state_dict, critic=self.critic)
        self.weights_changed()

    def weights_changed(self) -> None:
        """The optimizer's copies of the parameters follow what was written into the parameters."""
        if self.optimizer is not None:
            self.optimizer.reload_model_params()

    def to_hf(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, whole tensor) of this rank's stages, as Hugging Face names it. The tensor-parallel ranks go through
        it together. A tied output layer comes once, as the embedding."""
        return to_hf(self.models, self.hf_config)

    # --- running ----------------------------------------------------------------------------------------

    @torch.no_grad()
    def run(
        self,
        parts: Sequence[Part],
        inputs: Callable[[Part], tuple[torch.Tensor, torch.Tensor, torch.Tensor]],
        keep: Callable[[Part, torch.Tensor], Any],
        shape: Sequence[int],
    ) -> list[Any]:
        """Send micro-batches through the pipeline, without gradients and in evaluation mode.

        Args:
            parts: the micro-batches, a multiple of `multiple_of`; one at least.
            inputs: (token ids, position ids, mask of what attention must not see) of a micro-batch.
            keep: called on the last stage with a micro-batch and what its output layer gave, (b, s, ...).
            shape: (rows, tokens) of every micro-batch; not looked at with ``variable_seq_lengths``.

        Returns:
            What `keep` gave, by micro-batch, on the last stage; nothing on the others.
        """
        for chunk in self.chunks:
            chunk.eval()

        def kept(part: Part) -> Callable[..., Any]:
            return lambda output, non_loss_data=True: keep(part, output)

        return self._through(parts, inputs, kept, shape, forward_only=True)

    def step(
        self,
        parts: Sequence[Part],
        inputs: Callable[[Part], tuple[torch.Tensor, torch.Tensor, torch.Tensor]],
        loss: Callable[[Part, torch.Tensor], tuple[torch.Tensor, torch.Tensor | None, Any]],
        shape: Sequence[int],
        lr: float | None = None,
    ) -> tuple[list[Any], float]:
        """One step of the optimizer on the sum of the losses of all micro-batches of all dp ranks, divided by their
        tokens if they say any.

        Args:
            parts: as for `run`.
            inputs: as for `run`.
            loss: called on the last stage with a micro-batch and what its output layer gave: its part of the loss,
                the number of its tokens (None or 0: nothing is divided), and something to keep.
            shape: as for `run`.
            lr: learning rate from now on; None leaves it.

        Returns:
            What `loss` gave to keep, by micro-batch, on the last stage; and the norm of the gradient of the whole model
            before clipping, on every rank. Where it is not finite, no step was made.

        Raises:
            RuntimeError: there is no optimizer.
        """
        if self.optimizer is None:
            raise RuntimeError("this model was made without an optimizer; give it optimizer={'lr': ...}")
        for chunk in self.chunks:
            chunk.train()
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        if lr is not None:
            for group in self.optimizer.param_groups:
                group["lr"] = lr

        def losses(part: Part) -> Callable[..., Any]:
            def of(output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, Any]:
                total, tokens, kept = loss(part, output)
                if not total.requires_grad:  # nothing counts here, but the other stages wait for gradients
                    total = total + output.flatten()[:0].sum()
                tokens = torch.zeros([]) if tokens is None else tokens
                # The schedule divides the loss that it is given in place: it gets one of its own.
                return total.clone(), tokens.to(output.device, torch.int), kept

            return of

        kept = self._through(parts, inputs, losses, shape, forward_only=False)
        return kept, finite_step(self.optimizer)

    def _through(
        self,
        parts: Sequence[Part],
        inputs: Callable[[Part], tuple[torch.Tensor, torch.Tensor, torch.Tensor]],
        finish: Callable[[Part], Callable[..., Any]],
        shape: Sequence[int],
        forward_only: bool,
    ) -> list[Any]:
        from megatron.core.pipeline_parallel import get_forward_backward_func

        def forward(iterator: Iterator[Part], chunk: Any) -> tuple[torch.Tensor, Callable[..., Any]]:
            part = next(iterator)
            return chunk(*inputs(part)), finish(part)

        kept: list[Any] = get_forward_backward_func()(
            forward_step_func=forward,
            data_iterator=[iter(parts) for _ in self.chunks],
            model=self.chunks,
            num_microbatches=len(parts),
            seq_length=shape[1],
            micro_batch_size=shape[0],
            forward_only=forward_only,
            collect_non_loss_data=forward_only,
        )
        return kept

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
            share_embeddings_and_output_weights=tied(self.hf_config) and not self.critic,
            position_embedding_type="rope",
            rotary_base=rope["rope_theta"],
            rope_scaling=rope["rope_type"] == "llama3",
            rope_scaling_factor=rope.get("factor", 8.0),
            vp_stage=stage,
        )
        if model.pre_process:
            keep_padding_token(model.embedding.word_embeddings, self.hf_config)
        if self.critic and model.post_process:
            model.output_layer = ValueHead(self.config)
        return model.cuda()

    def _wrapped(self, model: GPTModel) -> Any:
        """What the schedule runs: the model itself, or one whose inputs and outputs are cast."""
        from megatron.core.transformer.module import Float16Module

        return Float16Module(self.config, model) if self.config.bf16 or self.config.fp16 else model
