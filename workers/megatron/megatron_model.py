"""MegatronTrainModel: a Hugging Face decoder on megatron-core as a TrainModel, sharded over tp and pp, replicated over
dp."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from workers.algorithms.token_log_probs import next_candidate_log_probs, next_token_log_probs
from workers.data.micro_batches import MicroBatch, cut_by_tokens, fillers, restore, restore_routes, sum_reports
from workers.data.rollout_data import inputs_of
from workers.data.routed_experts import NATIVE, RoutingShape
from workers.device import current_device, to_device
from workers.distributed import all_or_none, gathered
from workers.extras import require
from workers.hf_files import ModelFilesError
from workers.megatron.config import transformer_config
from workers.megatron.gpt import build_models, compute_output_in_float32
from workers.megatron.hf_weights import distinct_weights, draw_weights, gather, hf_shapes, load_hf, read_hf
from workers.megatron.megatron_checkpoint import Checkpoints
from workers.megatron.megatron_optimizer import (
    AdamOptions,
    allocate_state,
    data_parallel,
    finite_step,
    inner_optimizers,
    make_optimizer,
    scalers,
)
from workers.train.train_model import StepReport, TokenLoss, TokenOutputs, TrainModel
from workers.weight_sync.weight_plan import Shard


class MegatronTrainModel(TrainModel):
    """A decoder of `SUPPORTED_MODELS` on megatron-core, whose model parallelism must be initialized in the process.

    Each dp rank gets rows of its own; the tp and pp ranks of one dp rank get the same rows.

    With one pipeline stage per rank, micro-batches keep their own shapes, which the stages send to each other
    (``variable_seq_lengths``). With virtual pipeline parallelism all micro-batches are padded to the largest, because
    megatron confuses the shapes at pp=2.

    Megatron applies no weight decay to biases and norms.

    Args:
        hf_config: the Hugging Face config of a model in `SUPPORTED_MODELS`.
        role: "actor", or "critic" with a value head: a linear layer from hidden to 1 with a bias, as in Hugging Face's
            ``...ForTokenClassification``.
        param_dtype: "fp32", "bf16" or "fp16".
        optimizer: `AdamOptions` or a mapping of them; None for a model that is not trained.
        max_tokens_per_micro_batch: see `cut_by_tokens`.
        overrides: fields of megatron's ``TransformerConfig`` to set, see `transformer_config`.
        fp32_lm_head: whether to compute an actor's output layer in float32, see `compute_output_in_float32`. A critic's
            value head always does.

    Attributes:
        config: megatron's ``TransformerConfig``.
        models: this rank's GPTModels; several with virtual pipeline parallelism.
        max_tokens: tokens of a micro-batch; may be changed between calls.

    Raises:
        ValueError: the model is not supported or not divisible by the parallel sizes; the message has the reason.
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
        fp32_lm_head: bool = False,
    ) -> None:
        require("megatron.core", extra="megatron")
        if role not in ("actor", "critic"):
            raise ValueError(f"MegatronTrainModel: role={role!r}; use 'actor' or 'critic'")
        options = None if optimizer is None else AdamOptions.of(optimizer)
        self.role = role
        self.hf_config = hf_config
        self.max_tokens = max_tokens_per_micro_batch
        self.config = transformer_config(hf_config, param_dtype, overrides)
        # Loss functions return their share of a sum: the schedule must not divide by the number of micro-batches.
        self.config.calculate_per_token_loss = True
        self.models = build_models(hf_config, self.config, critic=role == "critic")
        if self.config.use_cpu_initialization:
            draw_weights(self.models, hf_config, self.config)
        if fp32_lm_head and role == "actor":
            for model in self.models:
                if model.post_process:
                    compute_output_in_float32(model.output_layer)
        # Here and not before a load: all ranks create the model together, but one alone may fail to read a file.
        self._hf_shapes = hf_shapes(self.models, hf_config)
        self._interleaved = len(self.models) > 1
        self._routing: Any = None
        if (shape := RoutingShape.of(hf_config)) is not None:
            from workers.megatron.moe import ExpertRouting

            self._routing = ExpertRouting(self.models, self.config, shape)
        self.config.variable_seq_lengths = not self._interleaved
        # What the schedule runs: the models themselves, or modules that cast their inputs and outputs.
        self._chunks: list[Any] = list(self.models)
        self._uncast: dict[str, bool] = {}
        if self.config.bf16 or self.config.fp16:
            from megatron.core.transformer.module import Float16Module

            self._chunks = [Float16Module(self.config, model) for model in self.models]
            # It would make a float32 copy of the logits. `next_token_log_probs` reads them in any dtype.
            self._uncast = {"fp32_output": False}
        self._optimizer: Any = None
        if options is not None:
            # Keep Megatron's order: DistributedDataParallel wraps Float16Module.
            self._chunks = data_parallel(self.config, self._chunks, options.distributed)
            self._optimizer = make_optimizer(options, self.config, self._chunks)
        distributed = options is not None and options.distributed
        self._checkpoints = Checkpoints(role, self.models, self._optimizer, distributed, int(hf_config.vocab_size))

    @property
    def device(self) -> torch.device:
        """The device of the parameters."""
        return current_device()

    # --- running ----------------------------------------------------------------------------------------

    def log_probs(self, data: Mapping[str, torch.Tensor], temperature: float) -> torch.Tensor | None:
        self._require_role("actor", "log_probs")
        return self._evaluate(data, lambda batch, output: self._outputs(batch, output, temperature, False).log_probs)

    def log_probs_and_routes(
        self, data: Mapping[str, torch.Tensor], temperature: float
    ) -> tuple[torch.Tensor | None, torch.Tensor]:
        """As in `TrainModel`; the column has `NATIVE` in the layers of other pipeline stages.

        Raises:
            ValueError: the model has no experts.
        """
        if self._routing is None:
            raise ValueError(f"log_probs_and_routes(): a {self.hf_config.model_type!r} has no experts")
        # Keep a reference here, because `forget` drops the one of the routing.
        recorded = self._routing.recorded = {}
        try:
            log_probs = self.log_probs(data, temperature)
        finally:
            self._routing.forget()
        micro_batches = self._cut(inputs_of(data))
        found = []
        for number, batch in enumerate(micro_batches):
            routes = recorded[number]
            if self.config.sequence_parallel:
                routes = gather(routes.int(), 0).short()  # gloo has no int16
            # Remove the padding that `_shapes` has added.
            rows, tokens = batch.input_ids.shape
            found.append(routes[:tokens, :rows].transpose(0, 1).flatten(0, 1).cpu())
        return log_probs, restore_routes(found, micro_batches, data["attention_mask"].bool().sum(1).tolist())

    def values(self, data: Mapping[str, torch.Tensor]) -> torch.Tensor | None:
        self._require_role("critic", "values")
        return self._evaluate(data, lambda batch, output: self._outputs(batch, output, 1.0, False).values)

    def train_step(
        self,
        data: Mapping[str, torch.Tensor],
        loss: TokenLoss,
        *,
        lr: float,
        temperature: float = 1.0,
        entropy: bool = False,
    ) -> StepReport:
        """As in `TrainModel`.

        Raises:
            RuntimeError: the model was made without an optimizer.
            ValueError: a token is not in the vocabulary.
        """
        micro_batches = self._cut(data)
        if self._optimizer is None:
            raise RuntimeError("this model was created without an optimizer; pass optimizer={'lr': ...} to train it")
        for chunk in self._chunks:
            chunk.train()
            # Megatron's gradients are in its buffers, which the optimizer's `zero_grad` does not clear.
            chunk.zero_grad_buffer()
        self._optimizer.zero_grad()
        for group in self._optimizer.param_groups:
            group["lr"] = lr

        def finish(batch: MicroBatch, output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, Any]:
            batch = batch.to(output.device)
            total, sums = loss(self._outputs(batch, output, temperature, entropy), batch)
            if not total.requires_grad:  # no token counts here, but the other stages wait for gradients
                total = total + output.flatten()[:0].sum()
            # Numbers stay on the device until the step's end: reading one waits for all work before it.
            named = {**sums, "loss": total}
            report = {name: value.detach().to(output.device, torch.float64) for name, value in named.items()}
            # The schedule divides the loss it is given in place, so it gets a copy; 0 tokens means "do not divide".
            return total.clone(), torch.zeros([], dtype=torch.int, device=output.device), report

        if self._routing is not None:
            (tokens,) = self._over_dp([sum(batch.real for batch in micro_batches)], dist.ReduceOp.SUM)
            self._routing.begin_step(tokens, self.device)
        try:
            reports = self._run_pipeline(micro_batches, finish, forward_only=False)
            found = {} if self._routing is None else self._routing.end_step()
        finally:
            if self._routing is not None:
                self._routing.forget()
        grad_norm = finite_step(self._optimizer)
        return StepReport(
            {**self._sum_over_ranks(reports), **found}, grad_norm, sum(batch.cost for batch in micro_batches)
        )

    @torch.no_grad()
    def _evaluate(
        self, data: Mapping[str, torch.Tensor], compute: Callable[[MicroBatch, torch.Tensor], Any]
    ) -> torch.Tensor | None:
        micro_batches = self._cut(inputs_of(data))
        for chunk in self._chunks:
            chunk.eval()

        def finish(batch: MicroBatch, output: torch.Tensor, non_loss_data: bool = True) -> Any:
            return compute(batch.to(output.device), output)

        outputs = self._run_pipeline(micro_batches, finish, forward_only=True)
        if not _is_last_stage():
            return None
        rows, tokens = data["input_ids"].shape
        return restore(outputs, micro_batches, (rows, tokens))

    def check_token_ids(self, input_ids: torch.Tensor) -> None:
        """Raise a ValueError if a token is not in the vocabulary. Megatron's embedding would treat it as another rank's
        and return zeros."""
        vocab_size = int(self.hf_config.vocab_size)
        if input_ids.numel() and not 0 <= int(input_ids.min()) <= int(input_ids.max()) < vocab_size:
            raise ValueError(
                f"input_ids has token ids from {int(input_ids.min())} to {int(input_ids.max())}, but vocab_size is "
                f"{vocab_size}"
            )

    def _cut(self, data: Mapping[str, torch.Tensor]) -> list[MicroBatch]:
        self.check_token_ids(data["input_ids"])
        multiple_of = int(self.config.microbatch_group_size_per_vp_stage) if self._interleaved else 1
        parts = cut_by_tokens(data, self.max_tokens, at_least=1, multiple_of=multiple_of, cost=self.sequence_cost)
        if self._shares_experts:
            # Each micro-batch exchanges tokens among these ranks, so all ranks must run the same number of them.
            (most,) = self._over_dp([len(parts)], dist.ReduceOp.MAX)
            parts += fillers(data, most - len(parts))
        return parts

    @property
    def _shares_experts(self) -> bool:
        """Whether ranks with different rows run each micro-batch together, because they have each other's experts."""
        together = self.config.expert_model_parallel_size * (self.config.expert_tensor_parallel_size or 1)
        return self._routing is not None and bool(self.config.tensor_model_parallel_size % together)

    def _shapes(self, micro_batches: Sequence[MicroBatch]) -> list[tuple[int, int]]:
        """The shapes that micro-batches are padded to: by default their own."""
        shapes = [(rows, tokens) for rows, tokens in (batch.input_ids.shape for batch in micro_batches)]
        if self._interleaved:
            shapes = [(max(rows for rows, _ in shapes), max(tokens for _, tokens in shapes))] * len(shapes)
        if self.config.sequence_parallel:
            tp = self.config.tensor_model_parallel_size
            shapes = [(rows, -(-tokens // tp) * tp) for rows, tokens in shapes]
        if self._shares_experts and self.config.moe_token_dispatcher_type == "allgather":  # it needs equal shapes
            most = self._over_dp([size for shape in shapes for size in shape], dist.ReduceOp.MAX)
            shapes = list(zip(most[::2], most[1::2], strict=True))
        return shapes

    def _over_dp(self, numbers: list[int], operation: Any) -> list[int]:
        """Reduce integers over the dp ranks."""
        from megatron.core import parallel_state

        group = parallel_state.get_data_parallel_group(with_context_parallel=True)
        reduced = torch.tensor(numbers, device=self.device)
        dist.all_reduce(reduced, operation, group=group)
        return [int(number) for number in reduced.tolist()]

    def _run_pipeline(
        self, micro_batches: Sequence[MicroBatch], finish: Callable[..., Any], *, forward_only: bool
    ) -> list[Any]:
        """Run micro-batches through megatron's schedule.

        Args:
            micro_batches: one at least.
            finish: called on the last stage with a micro-batch and the output layer's output, (b, s, ...). Returns
                what the schedule expects: with ``forward_only`` any value, else (loss, number of tokens, any value).
            forward_only: whether there is no backward pass.

        Returns:
            The values by micro-batch on the last stage; an empty list on the others.
        """
        from megatron.core.pipeline_parallel import get_forward_backward_func

        shapes = self._shapes(micro_batches)
        numbered = list(zip(range(len(shapes)), micro_batches, shapes, strict=True))

        def forward(
            iterator: Iterator[tuple[int, MicroBatch, tuple[int, int]]], chunk: Any
        ) -> tuple[torch.Tensor, Callable[..., Any]]:
            number, batch, (rows, tokens) = next(iterator)
            ids = _padded(to_device(batch.input_ids, self.device), rows, tokens)
            positions = torch.arange(tokens, device=ids.device).expand(rows, tokens)
            # Padding is on the right, so the causal mask hides it from real tokens.
            hidden = torch.ones(1, 1, tokens, tokens, dtype=torch.bool, device=ids.device).triu(1)
            with self._routed(number, batch, rows, tokens):
                return chunk(ids, positions, hidden, **self._uncast), partial(finish, batch)

        results: list[Any] = get_forward_backward_func()(
            forward_step_func=forward,
            data_iterator=[iter(numbered) for _ in self._chunks],
            model=self._chunks,
            num_microbatches=len(micro_batches),
            # Ignored if the stages send each other the shapes; see `variable_seq_lengths`.
            seq_length=max(tokens for _, tokens in shapes),
            micro_batch_size=max(rows for rows, _ in shapes),
            forward_only=forward_only,
            # With `forward_only`, `finish` returns no loss, and the schedule must not treat its result as one.
            collect_non_loss_data=forward_only,
        )
        return results

    def _routed(self, number: int, batch: MicroBatch, rows: int, tokens: int) -> AbstractContextManager[None]:
        """Tell the routers about a micro-batch, padded to this shape."""
        if self._routing is None:
            return nullcontext()
        from workers.megatron.moe import RoutedTokens

        real = torch.zeros_like(batch.attention_mask) if batch.is_filler else batch.attention_mask
        real, routes = _padded(real, rows, tokens), batch.routed_experts
        if routes is not None:
            routes = routes.unflatten(0, batch.input_ids.shape).permute(2, 3, 0, 1)
            routes = to_device(_padded(routes, rows, tokens, NATIVE).permute(3, 2, 0, 1).contiguous(), self.device)
        given: AbstractContextManager[None] = self._routing.forward(
            RoutedTokens(number, to_device(real.t().contiguous(), self.device), routes)
        )
        return given

    def _outputs(self, batch: MicroBatch, output: torch.Tensor, temperature: float, entropy: bool) -> TokenOutputs:
        """The model's output, moved to the token it is about: the output after token t - 1 goes to position t.

        Args:
            batch: on the output's device.
            output: (b, s, ...), perhaps with rows and tokens of padding after the batch's own.
            temperature: divides the logits.
            entropy: whether to compute entropies.
        """
        from megatron.core import parallel_state

        rows, tokens = batch.input_ids.shape
        output = output[:rows, :tokens]
        if self.role == "critic":
            return TokenOutputs(values=torch.nn.functional.pad(output[:, :-1, 0].float(), (1, 0)))
        group = parallel_state.get_tensor_model_parallel_group()
        options: dict[str, Any] = {
            "temperature": temperature,
            "vocab_size": int(self.hf_config.vocab_size),
            "group": group,
        }
        mask = batch.sampling_mask
        log_probs, entropies = next_token_log_probs(
            output, batch.input_ids, entropy=entropy, sampling_mask=mask, **options
        )
        candidates = None
        if (ids := batch.others.get("candidate_ids")) is not None:
            # Candidates are of a teacher, which knows nothing of the sampler: over the whole vocabulary.
            of_all = log_probs if mask is None else next_token_log_probs(output, batch.input_ids, **options)[0]
            candidates = next_candidate_log_probs(output, batch.input_ids, of_all, ids, temperature, group)
        return TokenOutputs(log_probs=log_probs, entropy=entropies, candidates=candidates)

    def _sum_over_ranks(self, reports: list[dict[str, torch.Tensor]]) -> dict[str, float]:
        """Sums over all micro-batches and dp ranks, broadcast to every stage."""
        from megatron.core import parallel_state as state

        total: dict[str, float] = {}
        if _is_last_stage():
            group = state.get_data_parallel_group(with_context_parallel=True)
            names, totals = sum_reports(reports)
            # Sum by name: a loss may report a number for some rows only, so reducing tensors could mix metrics.
            by_rank = gathered(dict(zip(names, totals.tolist(), strict=True)), group)
            total = {name: sum(one.get(name, 0.0) for one in by_rank) for name in sorted(set().union(*by_rank))}
        summed: dict[str, float] = of_last_stage(total)
        return summed

    def _require_role(self, role: str, method: str) -> None:
        if self.role != role:
            raise ValueError(f"{method}() needs a model with the role {role!r}; this model has the role {self.role!r}")

    # --- weights ----------------------------------------------------------------------------------------

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        for number, model in enumerate(self.models):
            for name, parameter in model.named_parameters():
                yield f"{number}.{name}", parameter.detach()

    def weights_changed(self) -> None:
        if self._optimizer is not None:
            self._optimizer.reload_model_params()

    def tensors(self) -> Iterator[torch.Tensor]:
        """As in `TrainModel`: parameters, Megatron's buffers of parameters, the optimizer's float32 parameters and its
        state."""
        for model in self.models:
            yield from model.parameters()
            yield from model.buffers()
        if self._optimizer is None:
            return
        yield from (buffer.param_data for buffer in self._buffers() if buffer.param_data is not None)
        for group in self._optimizer.param_groups:
            yield from group["params"]
        for inner in inner_optimizers(self._optimizer):
            for state in inner.state.values():  # without counts of steps, which are in host memory
                yield from (value for value in state.values() if isinstance(value, torch.Tensor) and value.dim())

    def state_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self.weights()
        for number, model in enumerate(self.models):
            yield from ((f"{number}.{name}", buffer) for name, buffer in model.named_buffers())
        if self._optimizer is None:
            return
        # Snapshots taken before and after the first step must have the same tensors.
        allocate_state(self._optimizer)
        for number, inner in enumerate(inner_optimizers(self._optimizer)):
            parameters = (parameter for group in inner.param_groups for parameter in group["params"])
            for place, parameter in enumerate(parameters):
                # For bf16 and fp16, and with the distributed optimizer, a float32 copy of a parameter or of its shard.
                yield f"optimizer.{number}.{place}", parameter.detach()
                for key, value in inner.state[parameter].items():
                    if isinstance(value, torch.Tensor):
                        yield f"optimizer.{number}.{place}.{key}", value

    def counters(self) -> dict[str, Any]:
        states = [scaler.state_dict() for scaler in scalers(self._optimizer)]
        return {
            "scalers": [{name: float(value) for name, value in state.items()} for state in states],
            # Optimizers other than torch's count a group's steps, not a parameter's.
            "steps": [int(group.get("step", 0)) for group in self._parameter_groups()],
        }

    def set_counters(self, counters: Mapping[str, Any]) -> None:
        for scaler, values in zip(scalers(self._optimizer), counters["scalers"], strict=True):
            state = scaler.state_dict()
            for name, value in values.items():
                old = state[name]
                state[name] = torch.full_like(old, value) if isinstance(old, torch.Tensor) else int(value)
            scaler.load_state_dict(state)
        for group, step in zip(self._parameter_groups(), counters["steps"], strict=True):
            if step:
                group["step"] = step

    def _parameter_groups(self) -> list[dict[str, Any]]:
        optimizers = [] if self._optimizer is None else inner_optimizers(self._optimizer)
        return [group for inner in optimizers for group in inner.param_groups]

    def scratch(self) -> Iterator[torch.Tensor]:
        """As in `TrainModel`: Megatron's buffers of gradients, which `train_step` sets to 0 first."""
        yield from (buffer.grad_data for buffer in self._buffers())

    def _buffers(self) -> Iterator[Any]:
        """Megatron's buffers, which its DistributedDataParallel creates: none without an optimizer."""
        if self._optimizer is not None:
            for chunk in self._chunks:
                yield from (*chunk.buffers, *chunk.expert_parallel_buffers)

    def hf_shards(self) -> list[Shard]:
        shards = [shard for weight in distinct_weights(self.models, self.hf_config) for shard in weight.shards()]
        return [shard for shard in shards if 0 not in shard.size]

    def load_hf(self, folder: str) -> None:
        # What follows is a collective. A rank may see another disk.
        with all_or_none(ModelFilesError, f"the weights of {folder!r} could not be loaded"):
            self.load_hf_state_dict(read_hf(folder))

    def load_hf_state_dict(self, state_dict: Mapping[str, torch.Tensor]) -> None:
        """Load the whole Hugging Face model's weights, as `workers.megatron.hf_weights.load_hf` does."""
        load_hf(self.models, self.hf_config, self._hf_shapes, state_dict)
        self.weights_changed()

    # --- checkpoints ------------------------------------------------------------------------------------

    def save(self, folder: Path, *, background: bool) -> None:
        """As in `TrainModel`, by torch.distributed.checkpoint in the layout of megatron's distributed checkpoints.

        In the background a thread of each rank writes copies in host memory, and the threads synchronize in a process
        group of their own. The checkpoint is complete when they end, whether or not anything waits for it.
        """
        self._checkpoints.save(Path(folder), background=background)

    def wait_for_save(self) -> None:
        self._checkpoints.wait()

    def load(self, folder: Path, *, optimizer: bool) -> None:
        """As in `TrainModel`, at any tp, pp and dp.

        Raises:
            FileNotFoundError: there is no complete checkpoint.
            ValueError: the checkpoint is of the other role, has no optimizer, or its optimizer was distributed and
                this one is not, or the reverse, or it has the state of another param_dtype.
        """
        self._checkpoints.load(Path(folder), optimizer=optimizer)


def _padded(value: torch.Tensor, rows: int, tokens: int, padding: int = 0) -> torch.Tensor:
    """Append padding to (..., b, s)."""
    more = (0, tokens - value.shape[-1], 0, rows - value.shape[-2])
    return torch.nn.functional.pad(value, more, value=padding)


def _is_last_stage() -> bool:
    from megatron.core import parallel_state

    return bool(parallel_state.is_pipeline_last_stage(ignore_virtual=True))


def of_last_stage(value: Any) -> Any:
    """Return the value of the rank of this pipeline that is its last stage. All its ranks call it."""
    from megatron.core import parallel_state as state

    values = [value]
    dist.broadcast_object_list(
        values, state.get_pipeline_model_parallel_last_rank(), state.get_pipeline_model_parallel_group()
    )
    return values[0]
