"""FSDPTrainModel: any Hugging Face causal language model, or a critic built on one, trained with FSDP2."""

from __future__ import annotations

import dataclasses
import logging
import math
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor import Shard as SplitAlong
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from workers.algorithms.token_log_probs import (
    candidate_log_probs,
    next_candidate_log_probs,
    next_token_log_probs,
    token_log_probs,
)
from workers.data.micro_batches import MicroBatch, cut_by_tokens, fillers, restore, restore_routes, sum_reports
from workers.data.packing import PackedRows, pack_rows
from workers.data.rollout_data import inputs_of
from workers.data.routed_experts import NATIVE, RoutingMeter, RoutingShape
from workers.device import to_device
from workers.distributed import all_or_none, gathered, new_rows
from workers.exact import ExactError, exact_logits
from workers.fsdp.fsdp_build import build, mesh_of, one_sequence_per_row, shard, take_weights
from workers.fsdp.fsdp_checkpoint import FSDPCheckpoints
from workers.fsdp.load_balancing import LoadBalancing
from workers.fsdp.packed_attention import run_packed, use_packed_attention, why_not_packed
from workers.fsdp.sequence_parallel import check_sliceable, forget_lengths, gather_slices
from workers.hf_files import ModelFilesError, compute_output_in_float32, compute_values_in_float32
from workers.hf_routing import Routers, RoutingError
from workers.lora import BASE_DIGEST, LoraSettings, adapter_config, adapter_tensors
from workers.train.train_model import StepReport, TokenLoss, TokenOutputs, TrainModel
from workers.weight_sync.weight_plan import Shard

_T = TypeVar("_T")

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class FSDPOptions:
    """How a model is sharded and trained.

    Attributes:
        param_dtype: dtype of the computation, float32 or bfloat16.
        reduce_dtype: dtype in which gradients are reduced. In float64, each rank adds those of all micro-batches and
            reduces once, see `FSDPTrainModel.train_step`. That takes 8 bytes per parameter of the whole model.
        shard_size: number of ranks that share one replica of the model; None for all.
        sequence_parallel_size: number of consecutive ranks that share the sequence of a micro-batch, see
            `workers.fsdp.sequence_parallel`. They get the same rows.
        cpu_offload: whether to keep parameters and optimizer state in host memory.
        gradient_checkpointing: whether to recompute activations in the backward pass.
        max_tokens_per_micro_batch: maximum number of tokens per forward pass and rank, see `cut_by_tokens`.
        sequence_packing: whether to pack rows, see `workers.data.packing`; None for models that can be packed.
        betas, eps, weight_decay: of AdamW.
        clip_grad: maximum norm of the whole gradient; 0 disables clipping.
        seed: seed of random weights.
        trust_remote_code: whether code that comes with the weights may run.
        lora: the adapter to train instead of all weights; None for none.
        fp32_lm_head: whether to compute an actor's output layer in float32, see `compute_output_in_float32`. A critic's
            value head is always computed in float32.
        exact: whether log-probabilities equal those of an exact engine, bit for bit; see `workers.exact`.
        moe_aux_loss_coeff, moe_z_loss_coeff: coefficients of the auxiliary losses of a mixture of experts, see
            `workers.fsdp.load_balancing`.
        moe_balance_rows: whether the first of these losses balances the experts in each row, or in each micro-batch.
        routing_replay: whether data may have ``routed_experts``, or experts are to be recorded.

    Raises:
        ValueError: ``param_dtype`` is float16, or ``reduce_dtype`` is float64 and torch older than 2.13.
    """

    param_dtype: torch.dtype = torch.float32
    reduce_dtype: torch.dtype = torch.float32
    shard_size: int | None = None
    sequence_parallel_size: int = 1
    cpu_offload: bool = False
    gradient_checkpointing: bool = False
    max_tokens_per_micro_batch: int = 8192
    sequence_packing: bool | None = None
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    clip_grad: float = 1.0
    seed: int = 1234
    trust_remote_code: bool = False
    lora: LoraSettings | None = None
    fp32_lm_head: bool = False
    exact: bool = False
    moe_aux_loss_coeff: float = 0.0
    moe_z_loss_coeff: float = 0.0
    moe_balance_rows: bool = True
    routing_replay: bool = False

    def __post_init__(self) -> None:
        if self.param_dtype is torch.float16:
            raise ValueError(
                "param_dtype='fp16' needs loss scaling, which the FSDP backend does not support; use 'bf16'"
            )
        if self.reduce_dtype is torch.float64 and not hasattr(FSDPModule, "reset_iter_state"):
            raise ValueError(
                f"fsdp_reduce_dtype='fp64' needs torch 2.13 or newer, but this is {torch.__version__}; use 'fp32'"
            )


class FSDPTrainModel(TrainModel):
    """A Hugging Face model, sharded by FSDP2. Every rank, or group of ranks that share a sequence, is a data-parallel
    rank.

    torch.distributed must be initialized, with a backend for the CPU too: see `workers.device.every_backend`.

    Args:
        hf_config: the Hugging Face config.
        role: "actor" or "critic".
        device: device of this rank.
        options: see `FSDPOptions`.
        folder: Hugging Face folder, or model name on the hub, of the initial weights; None for random weights.
        empty: leave the weights uninitialized, and do not read ``folder``.

    Attributes:
        module: the sharded model. With an adapter, all other parameters are frozen; they are in no optimizer state, no
            snapshot and no checkpoint.
    """

    def __init__(
        self,
        hf_config: Any,
        role: str,
        device: torch.device,
        options: FSDPOptions,
        folder: str | None = None,
        *,
        empty: bool = False,
    ) -> None:
        # The warning concerns writes to the model's outputs, and there are none.
        warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
        self.hf_config, self.role, self.options, self.device = hf_config, role, options, device
        mesh = mesh_of(device, dist.get_world_size(), options.shard_size)
        ranks = options.sequence_parallel_size
        self._sequence: dist.ProcessGroup | None = None
        if ranks > 1:
            check_sliceable(hf_config, ranks)
            self._sequence = new_rows(torch.arange(dist.get_world_size()).view(-1, ranks).tolist())
        trust = options.trust_remote_code
        seed = None if empty else options.seed
        if options.exact:
            from workers.rollout.engines.exact_decoding import probe  # imports transformers

            with all_or_none(ExactError, "the ranks cannot train exactly"):
                self.exact_digest = probe(
                    hf_config,
                    options.param_dtype,
                    device,
                    trust_remote_code=trust,
                    fp32_lm_head=options.fp32_lm_head,
                )
        self.module: Any = build(
            hf_config, role, seed=seed, folder=folder, trust_remote_code=trust, lora=options.lora, exact=options.exact
        )
        if options.lora is not None:
            self.adapter_config = adapter_config(self.module, folder)
        if role == "critic":
            compute_values_in_float32(self.module)
        elif options.fp32_lm_head:
            compute_output_in_float32(self.module)
        self._routers = self._hook_routers()
        self._balancing: LoadBalancing | None = None
        if options.moe_aux_loss_coeff or options.moe_z_loss_coeff:
            self._balancing = LoadBalancing(
                _present(self._routers),
                options.moe_aux_loss_coeff,
                options.moe_z_loss_coeff,
                by_row=options.moe_balance_rows,
            )
        if options.gradient_checkpointing:
            self.module.gradient_checkpointing_enable({"use_reentrant": False})
        shard(self.module, mesh, device, options.param_dtype, options.reduce_dtype, options.cpu_offload, empty)
        # Create the optimizer after `shard`, which replaces the parameters.
        self._optimizer = torch.optim.AdamW(
            [parameter for parameter in self.module.parameters() if parameter.requires_grad],
            lr=0.0,
            betas=options.betas,
            eps=options.eps,
            weight_decay=options.weight_decay,
            foreach=True,
        )
        self._checkpoints = FSDPCheckpoints(self.module, self._optimizer)
        self._in_float64 = options.reduce_dtype is torch.float64
        if self._in_float64:
            for module in self.module.modules():
                if isinstance(module, FSDPModule):
                    module.set_gradient_divide_factor(1.0)  # the sum: to scale float32 by 3 and back would round
        # Whether the model can be packed is found out when it has its weights.
        self._packed = False if options.exact or (options.sequence_packing is False and ranks == 1) else None
        # Sequence parallelism needs packing. If packing is not possible, raise now instead of in the first step.
        if ranks > 1 and not empty:
            self._is_packed()

    def _hook_routers(self) -> Routers | None:
        """Return the model's routers; None if it has none, or none that can be recorded.

        Raises:
            RoutingError: on all ranks, if ``routing_replay`` or an auxiliary loss needs them.
        """
        options = self.options
        needed = options.routing_replay or options.moe_aux_loss_coeff or options.moe_z_loss_coeff
        if RoutingShape.of(self.hf_config) is None and not needed:
            return None
        try:
            return Routers(self.module)
        except RoutingError as error:
            if needed:
                raise
            logger.info("there are no metrics of the experts' load: %s", error)
            return None

    # --- running ----------------------------------------------------------------------------------------

    def log_probs(self, data: Mapping[str, torch.Tensor], temperature: float) -> torch.Tensor:
        return self._every_token(data, lambda part: _present(self._outputs(part, temperature, False).log_probs))

    def values(self, data: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return self._every_token(data, lambda part: _present(self._outputs(part, 1.0, False).values))

    def log_probs_and_routes(
        self, data: Mapping[str, torch.Tensor], temperature: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        routers, recorded = self._routers, list[torch.Tensor]()
        if routers is None:
            raise RuntimeError("log_probs_and_routes() needs FSDPOptions(routing_replay=True)")

        def run(part: MicroBatch) -> torch.Tensor:
            routers.record()
            outputs = self._outputs(part, temperature, False)
            experts = routers.recorded()
            if self._sequence is not None:  # gloo has no int16
                experts = gather_slices(experts.int(), self._sequence).short()
            recorded.append(experts.cpu())
            return _present(outputs.log_probs)

        log_probs = self._every_token(data, run)
        lengths = data["attention_mask"].bool().sum(1).tolist()
        return log_probs, restore_routes(recorded, self._cut(inputs_of(data), sliced=False), lengths)

    @torch.no_grad()
    def _every_token(self, data: Mapping[str, torch.Tensor], run: Any) -> torch.Tensor:
        self.module.eval()
        parts = self._cut(inputs_of(data))
        with self._running():
            outputs = [run(part.to(self.device)).float() for part in parts]
        rows, tokens = data["input_ids"].shape
        return restore(outputs, parts, (rows, tokens))

    def train_step(
        self,
        data: Mapping[str, torch.Tensor],
        loss: TokenLoss,
        *,
        lr: float,
        temperature: float = 1.0,
        entropy: bool = False,
    ) -> StepReport:
        """As in `TrainModel`. With ``reduce_dtype`` float64, gradients are added in it over micro-batches and ranks,
        and rounded to float32 once. Its 29 more bits make such a sum exact in any order, or nearly so; but a
        micro-batch's own gradient depends on the rows in it, unless it has one row."""
        self.module.train()
        self._drop_gradients()
        reports: list[dict[str, torch.Tensor]] = []
        parts = self._cut(data)
        ranks = self.options.sequence_parallel_size
        # Multiply by `ranks`, because `computed` counts only this rank's slice, and `_summed` divides by `ranks`.
        counts = {"computed": sum(part.computed for part in parts) * ranks, "real": sum(part.real for part in parts)}
        reports.append(
            {name: torch.full((), count, dtype=torch.float64, device=self.device) for name, count in counts.items()}
        )
        sums: dict[torch.nn.Parameter, torch.Tensor] = {}
        balancing = self._balancing
        if balancing is not None:
            balancing.begin_step(counts["real"], self.device)
        meter = None if self._routers is None else RoutingMeter(self._routers.shape, self.device)
        with self._running():
            for k, part in enumerate(parts, 1):
                here = part.to(self.device)
                if self._in_float64:
                    self.module.set_requires_gradient_sync(k == len(parts))
                with nullcontext() if balancing is None else balancing.watching():
                    outputs = self._outputs(here, temperature, entropy, meter)
                total, reported = loss(outputs, here)
                whole = total if balancing is None else total + balancing.loss(here)
                # FSDP averages gradients over the ranks, but the loss of a step is the sum over the dp ranks. Ranks of
                # one sequence compute the same loss, and each has the gradient by its own outputs.
                (whole if self._in_float64 else whole * dist.get_world_size()).backward()
                if self.options.cpu_offload and len(parts) > 1:
                    self._take_gradients(sums)
                # Numbers stay on the device until the step's end: reading one waits for all work before it.
                named = {"loss": total, **reported}
                reports.append({name: value.detach().to(self.device, torch.float64) for name, value in named.items()})
        for parameter, gradient in sums.items():
            parameter.grad = gradient
        norm = self._clip()
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        # The norm covers the gradients of all ranks, so either all ranks skip the step or none does.
        if math.isfinite(norm):
            self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        numbers = self._summed(reports)
        numbers["computed_ratio"] = numbers.pop("computed") / max(numbers.pop("real"), 1.0)
        if balancing is not None:
            numbers |= balancing.end_step()
        if meter is not None and self._routers is not None:
            counted = meter.sums()
            dist.all_reduce(counted)
            numbers |= RoutingMeter.metrics(counted, self._routers.shape)
        return StepReport(numbers, norm, sum(part.cost for part in parts))

    def _drop_gradients(self) -> None:
        """Drop what a failed step left. FSDP keeps gradients that were not reduced yet, although torch 2.13's
        `reset_iter_state` says otherwise, and would add them to those of the next step."""
        self._optimizer.zero_grad(set_to_none=True)
        for moments in self._optimizer.state.values():
            if "exp_avg_sq" not in moments:  # AdamW creates them one by one, and its first step ran out of memory
                moments.clear()
        for state in (module._get_fsdp_state() for module in self.module.modules() if isinstance(module, FSDPModule)):
            # One group, or none, before torch 2.13.
            groups = getattr(state, "_fsdp_param_groups", None) or [getattr(state, "_fsdp_param_group", None)]
            for parameter in chain.from_iterable(group.fsdp_params for group in groups if group is not None):
                parameter.unsharded_accumulated_grad = None
                if hasattr(parameter, "_unsharded_param"):
                    parameter._unsharded_param.grad = None

    def _take_gradients(self, sums: dict[torch.nn.Parameter, torch.Tensor]) -> None:
        """Move gradients in host memory from the parameters to ``sums``. To a gradient that a parameter has, FSDP adds
        in the middle of the backward pass, for which it waits for the device once per parameter. Without one it only
        waits at the pass's end."""
        added: list[tuple[torch.Tensor, torch.Tensor]] = []
        for parameter in self.module.parameters():
            gradient, parameter.grad = parameter.grad, None
            if gradient is None:
                continue
            if parameter in sums:
                added.append((_local(sums[parameter]), _local(gradient)))
            else:
                sums[parameter] = gradient
        if added:
            torch._foreach_add_([total for total, _ in added], [gradient for _, gradient in added])

    def _outputs(
        self, part: MicroBatch, temperature: float, entropy: bool, meter: RoutingMeter | None = None
    ) -> TokenOutputs:
        if self._routers is None:
            return self._outputs_of(part, temperature, entropy)
        if meter is not None:
            real = part.attention_mask.flatten() if part.packed is None else None
            meter.real = torch.zeros(part.computed, dtype=torch.bool, device=self.device) if part.is_filler else real
        # They stay for the backward pass, which may compute the layers again. That does not count again.
        self._routers.replayed, self._routers.meter = part.routed_experts, meter
        try:
            return self._outputs_of(part, temperature, entropy)
        finally:
            self._routers.meter = None

    def _outputs_of(self, part: MicroBatch, temperature: float, entropy: bool) -> TokenOutputs:
        options: dict[str, Any] = {"temperature": temperature, "entropy": entropy}
        ids, mask = part.others.get("candidate_ids"), part.sampling_mask
        rows = part.packed
        of_tokens: Any
        of_others: Any
        if rows is not None:
            logits = run_packed(self.module, rows, self.role, rows.predictors, self._sequence)
            if self.role == "critic":
                return TokenOutputs(values=self._of_rows(rows, logits[:, 0].float()))
            owners = to_device(rows.owners, self.device)  # torch would wait for the copy of an index on the CPU
            tokens = part.input_ids.flatten()[owners]
            if mask is not None:
                drawn, lengths = mask[0], mask[1].flatten()
                if self._sequence is not None:  # without those of other ranks' tokens
                    own = torch.zeros_like(lengths, dtype=torch.bool).index_fill_(0, rows.owners, True)
                    at = own.repeat_interleave(lengths).nonzero()[:, 0]
                    drawn = drawn[to_device(at, self.device)]
                mask = drawn, lengths[rows.owners]
            of_tokens, of_others = token_log_probs, candidate_log_probs
            ids = None if ids is None else ids.flatten(0, 1)[owners]
        else:
            forget_lengths(self.module)
            # Padding is on the right, so the model's own causal mask hides it from real tokens.
            padded = {"input_ids": part.input_ids, "position_ids": part.position_ids}
            with one_sequence_per_row():
                if self.options.exact:
                    logits = exact_logits(self.module, **padded)
                else:
                    logits = self.module(**padded, use_cache=False).logits
            if self.role == "critic":
                return TokenOutputs(values=F.pad(logits[:, :-1].float().squeeze(-1), (1, 0)))
            tokens, of_tokens, of_others = part.input_ids, next_token_log_probs, next_candidate_log_probs
        log_probs, entropies = of_tokens(logits, tokens, sampling_mask=mask, **options)
        outputs = [log_probs, entropies]
        if ids is not None:
            # Candidates are of a teacher, which knows nothing of the sampler: over the whole vocabulary.
            of_all = log_probs if mask is None else of_tokens(logits, tokens, temperature=temperature)[0]
            outputs.append(of_others(logits, tokens, of_all, ids, temperature))
        if rows is not None:
            outputs = [None if of is None else self._of_rows(rows, of) for of in outputs]
        return TokenOutputs(outputs[0], outputs[1], candidates=outputs[2] if ids is not None else None)

    def _of_rows(self, rows: PackedRows, of_tokens: torch.Tensor) -> torch.Tensor:
        """Return (b, s, ...) from the outputs for the tokens of packed rows, which ranks may have parts of."""
        if self._sequence is not None:
            of_tokens = gather_slices(of_tokens, self._sequence)
        return rows.of_rows(of_tokens)

    @contextmanager
    def _running(self) -> Iterator[None]:
        """Reshard the model after a pass that raised: it leaves parameters unsharded, and they must not be read or
        written in that state."""
        try:
            yield
        except BaseException:
            with suppress(AttributeError):  # torch before 2.13, or before the first pass
                self.module.reset_iter_state()
            raise
        finally:
            if self._routers is not None:
                self._routers.forget()

    def _cut(self, data: Mapping[str, torch.Tensor], *, sliced: bool = True) -> list[MicroBatch]:
        """Return the micro-batches, the same number on every rank, because each pass is a collective."""
        ranks = self.options.sequence_parallel_size
        most = self.options.max_tokens_per_micro_batch * ranks
        packed = self._is_packed() and self.options.sequence_packing is not False
        parts = cut_by_tokens(data, most, packed=packed, cost=self.sequence_cost)
        count = torch.tensor(len(parts), device=self.device)
        dist.all_reduce(count, dist.ReduceOp.MAX)
        parts += fillers(data, max(int(count), 1) - len(parts), packed=packed)
        if self._sequence is None:
            return parts
        return [self._slice_of(part, self._sequence if sliced else None) for part in parts]

    def _slice_of(self, part: MicroBatch, group: dist.ProcessGroup | None) -> MicroBatch:
        """Return a micro-batch with this rank's slice of its rows as one sequence, with padding if they are padded; or
        with all of them, if there is no group."""
        rows, width = part.input_ids.shape
        whole = part.packed or pack_rows(part.input_ids.cpu(), [width] * rows, [0] * rows)
        if group is None:
            return dataclasses.replace(part, packed=whole)
        experts = part.routed_experts
        if experts is not None:
            each = -(-len(experts) // group.size())
            more = experts.new_full((each * group.size() - len(experts), *experts.shape[1:]), NATIVE)
            experts = torch.cat([experts, more])[group.rank() * each : (group.rank() + 1) * each]
        return dataclasses.replace(part, packed=whole.slice_of(group.rank(), group.size()), routed_experts=experts)

    def _is_packed(self) -> bool:
        """Whether rows are packed. The first call finds out whether the model can, on all ranks together."""
        if self._packed is None:
            # Restore the mode below, because `train_step` sets it before it calls `_cut`.
            training = self.module.training
            with self._running():
                why = why_not_packed(
                    self.module.eval(), self.role, self.device, self.options.param_dtype, self._sequence
                )
            self.module.train(training)
            first: str | None = next(filter(None, gathered(why)), None)
            self._packed = first is None
            if first is not None:
                # If another rank cannot pack its rows, no rank packs: all ranks must run the same collectives.
                if why is None:
                    use_packed_attention(self.module, on=False)
                sliced = self._sequence is not None
                what = "sequence parallelism" if sliced else "sequence packing"
                named = f"{what} is not possible with {self.hf_config.model_type!r}: {first}"
                if self.options.sequence_packing or sliced:
                    raise ModelFilesError(named)
                logger.info("rows are padded, because %s", named)
        return self._packed

    def _clip(self) -> float:
        parameters = list(self.module.parameters())
        gradients = [p.grad for p in parameters if p.grad is not None]
        if self._in_float64:  # so that it is the same however they are sharded
            norms = [torch.linalg.vector_norm(gradient, dtype=torch.float64) for gradient in gradients]
            norm = torch.linalg.vector_norm(torch.stack(norms))
        else:
            norm = torch.nn.utils.get_total_norm(gradients)
        whole = (norm.full_tensor() if isinstance(norm, DTensor) else norm).float()
        if self.options.clip_grad:
            torch.nn.utils.clip_grads_with_norm_(parameters, self.options.clip_grad, whole)
        return float(whole)

    def _summed(self, reports: list[dict[str, torch.Tensor]]) -> dict[str, float]:
        names, sums = sum_reports(reports)
        dist.all_reduce(sums)
        sums /= self.options.sequence_parallel_size  # ranks of one sequence report the same
        return dict(zip(names, sums.tolist(), strict=True))

    # --- weights ----------------------------------------------------------------------------------------

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        self._reshard()
        saved = self.module.state_dict().keys()
        for name, parameter in self.module.named_parameters():
            # Frozen ones too, such as the expert bias of some models: a snapshot is restored into an empty model. The
            # base of an adapter is read again instead.
            if parameter.requires_grad or self.options.lora is None:
                yield name, _local(parameter.detach())
        for name, buffer in self.module.named_buffers():
            if name in saved:  # for example a router's bias
                yield name, buffer

    def weights_changed(self) -> None:
        pass  # there are no copies

    def state_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        forget_lengths(self.module)  # replicas have had other rows
        yield from self.weights()
        saved = self.module.state_dict().keys()
        yield from ((name, buffer) for name, buffer in self.module.named_buffers() if name not in saved)
        for name, parameter in self.module.named_parameters():
            if not parameter.requires_grad:
                continue
            state = self._optimizer.state[parameter]
            if not state:  # as AdamW does in its first step
                moments = {key: torch.zeros_like(parameter.detach()) for key in ("exp_avg", "exp_avg_sq")}
                state.update(step=torch.tensor(0.0), **moments)
            for key, value in state.items():
                yield f"optimizer.{key}.{name}", _local(value)

    def tensors(self) -> Iterator[torch.Tensor]:
        for _, tensor in self.weights():
            yield tensor
        if self.options.lora is not None:
            frozen = (parameter for parameter in self.module.parameters() if not parameter.requires_grad)
            yield from (_local(parameter.detach()) for parameter in frozen)
        for state in self._optimizer.state.values():
            for value in state.values():
                # Leave out AdamW's step counts, which are scalars in host memory.
                if isinstance(value, torch.Tensor) and value.dim():
                    yield _local(value)

    def hf_shards(self) -> list[Shard]:
        """A rank has its chunk of every parameter, and all of every buffer. With ``cpu_offload``,
        ``read`` returns tensors in host memory."""
        self._reshard()
        tied = set(getattr(self.module, "all_tied_weights_keys", None) or {})
        adapter = self.options.lora is not None
        # With `keep_vars`, parameters are not detached, so their type distinguishes them from buffers.
        held = adapter_tensors(self.module) if adapter else self.module.state_dict(keep_vars=True)
        shards = [
            local_shard(name, value, self.options.param_dtype if isinstance(value, torch.nn.Parameter) else value.dtype)
            for name, value in held.items()
            if name not in tied
        ]
        # FSDP may leave some ranks without any rows of a small parameter.
        return [shard for shard in shards if 0 not in shard.size]

    def _reshard(self) -> None:
        # After a forward pass the outermost module stays unsharded, and changes to its shards would have no effect.
        self.module.reshard()

    # --- files ------------------------------------------------------------------------------------------

    def save(self, folder: Path, *, background: bool) -> None:
        self._reshard()
        self._checkpoints.save(folder, background=background)

    def wait_for_save(self) -> None:
        self._checkpoints.wait()

    def load(self, folder: Path, *, optimizer: bool) -> None:
        """As in `TrainModel`.

        Raises:
            FileNotFoundError: there is no such checkpoint.
            ValueError: it has an adapter of another base model.
        """
        self._reshard()
        base = self._base_digest
        self._checkpoints.load(folder, optimizer=optimizer)
        if self._base_digest != base:
            raise ValueError(
                f"{str(folder)!r} has a LoRA adapter of another base model than hf_checkpoint, or than the random "
                "weights from seed; train on with the same base model"
            )

    @property
    def _base_digest(self) -> int | None:
        return int(getattr(self.module, BASE_DIGEST)) if self.options.lora is not None else None

    def load_hf(self, folder: str) -> None:
        """As in `TrainModel`.

        Raises:
            ValueError: only an adapter is trained.
        """
        options = self.options
        if options.lora is not None:
            raise ValueError("load_hf(): with lora_rank only the adapter can change, not the base model")
        trust = options.trust_remote_code
        other = build(self.hf_config, self.role, seed=options.seed, folder=folder, trust_remote_code=trust)
        whole = dict(other.state_dict()) if not dist.get_rank() else {}
        self._reshard()
        take_weights(self.module, whole, dict(other.named_buffers()), self.device, options.cpu_offload)


def local_shard(name: str, tensor: torch.Tensor, dtype: torch.dtype) -> Shard:
    """Return this rank's shard of a parameter or buffer; its ``size`` has a 0 if the rank has no element.

    Args:
        name: of the tensor.
        tensor: whole, or a DTensor on a mesh of any number of dims. ``Shard.read`` reads it when it is called.
        dtype: to convert to.

    Raises:
        ValueError: what the rank has of the DTensor may not be a box of the tensor's values.
    """
    shape = tuple(tensor.shape)
    begin, size = (0,) * len(shape), shape
    if isinstance(tensor, DTensor):
        if not all(isinstance(placement, (SplitAlong, Replicate)) for placement in tensor.placements):
            raise ValueError(
                f"{name!r} has the placements {tensor.placements}, of which a rank's shard is not a box of the tensor; "
                "only Shard(dim) and Replicate() are supported"
            )
        size, begin = compute_local_shape_and_global_offset(shape, tensor.device_mesh, tensor.placements)
    return Shard(name, shape, tuple(begin), tuple(size), dtype, lambda: _local(tensor.detach()).to(dtype))


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _present(tensor: _T | None) -> _T:
    if tensor is None:
        raise TypeError("the model has another role: log_probs() needs an actor, values() needs a critic")
    return tensor
