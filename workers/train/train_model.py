"""TrainModel: the interface between a train worker and the backend that runs its model."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from workers.data.balance import TOKENS, SequenceCost
from workers.data.micro_batches import MicroBatch
from workers.weight_sync.weight_plan import Shard


@dataclass(frozen=True)
class TokenOutputs:
    """Outputs of a model for the tokens of a micro-batch, each (b, s) float32; ignore position 0.

    Attributes:
        log_probs: log-probability of each token given those before it; None for a critic.
        entropy: of the distribution that the token was drawn from, in nats; None unless requested.
        values: a critic's expected return before the token was chosen; None for a policy.
        candidates: (b, s, k), log-probabilities of other tokens in its place, those of the entry ``candidate_ids``;
            None without it.
    """

    log_probs: torch.Tensor | None = None
    entropy: torch.Tensor | None = None
    values: torch.Tensor | None = None
    candidates: torch.Tensor | None = None


TokenLoss = Callable[[TokenOutputs, MicroBatch], tuple[torch.Tensor, dict[str, torch.Tensor]]]
"""(outputs, micro-batch) -> (the micro-batch's loss, sums to report). The loss of a step is the sum over all
micro-batches and all data-parallel ranks, so the function must do any normalization itself. Filler rows have weight
0."""


@dataclass(frozen=True)
class StepReport:
    """Result of an optimizer step, the same on every rank, except for the cost.

    Attributes:
        sums: what the loss function reported, and the loss itself as ``loss``, summed over micro-batches and dp ranks;
            with FSDP also ``computed_ratio``, how many tokens the model computed per token of the rows.
        grad_norm: of the whole model, before clipping. If it is not finite, the step was skipped.
        cost: of this rank's micro-batches, by `TrainModel.sequence_cost`; 0 if it is not known.
    """

    sums: dict[str, float]
    grad_norm: float
    cost: float = 0.0


class TrainModel(ABC):
    """This rank's shard of a model, and its optimizer. All ranks call every method together, except those that are
    "not a collective" and `tensors`.

    ``data`` is a mapping of tensors with B rows, in the schema of `workers.data.rollout_data`: this dp rank's rows,
    possibly none.
    """

    role: str
    """ "actor" returns log-probabilities, "critic" returns values."""

    hf_config: Any
    """The Hugging Face config."""

    sequence_cost: SequenceCost = TOKENS
    """What a row costs, by which micro-batches are ordered. `ModelWorker` sets it."""

    exact_digest: str | None = None
    """What `exact_decoding.probe` returned, in exact mode."""

    adapter_config: Any = None
    """peft's config of the adapter, if only that is trained, and therefore sent and exported; None if all weights
    are."""

    @abstractmethod
    def log_probs(self, data: Mapping[str, torch.Tensor], temperature: float) -> torch.Tensor | None:
        """Return (B, T) float32 on the CPU, without gradients, 0 at position 0 and at padding; None on a rank without
        outputs (a pipeline stage that is not the last)."""

    def log_probs_and_routes(
        self, data: Mapping[str, torch.Tensor], temperature: float
    ) -> tuple[torch.Tensor | None, torch.Tensor]:
        """As `log_probs`, and the column ``routed_experts`` with the experts that computed the tokens, on the CPU: all
        that this rank needs to replay them, whatever rows of the data are in a micro-batch. For
        ``routing_replay="R2"``."""
        raise NotImplementedError(f"{type(self).__name__} does not record experts, which routing_replay='R2' needs")

    @abstractmethod
    def values(self, data: Mapping[str, torch.Tensor]) -> torch.Tensor | None:
        """As `log_probs`, for a critic."""

    @abstractmethod
    def train_step(
        self,
        data: Mapping[str, torch.Tensor],
        loss: TokenLoss,
        *,
        lr: float,
        temperature: float = 1.0,
        entropy: bool = False,
    ) -> StepReport:
        """Take one optimizer step, over micro-batches of at most ``max_tokens_per_micro_batch`` tokens.

        Args:
            data: this dp rank's rows.
            loss: see `TokenLoss`.
            lr: learning rate of this step.
            temperature: divides the logits.
            entropy: whether the loss function needs `TokenOutputs.entropy`.
        """

    @abstractmethod
    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Return this rank's shards of the parameters as live tensors on the device, with names that are unique on this
        rank. For snapshots; not a collective."""

    @abstractmethod
    def weights_changed(self) -> None:
        """Update the backend's copies of the parameters. Called after `weights` were written to."""

    def state_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Return all that training on bit for bit needs, as live tensors with names that are unique on this rank: this
        rank's shards of parameters, buffers and optimizer state. Optimizer state that the first step would create is
        created. For snapshots of the whole state (``peer_snapshot_interval``); not a collective."""
        raise NotImplementedError(f"{type(self).__name__} has no state_tensors(), which peer_snapshot_interval needs")

    def counters(self) -> dict[str, Any]:
        """Return the part of that state which is not in tensors, such as a loss scale. It can be written as JSON."""
        return {}

    def set_counters(self, counters: Mapping[str, Any]) -> None:
        """Restore what `counters` returned."""
        if counters:
            raise NotImplementedError(f"{type(self).__name__} has counters(), but no set_counters()")

    @abstractmethod
    def tensors(self) -> Iterator[torch.Tensor]:
        """Return all tensors that this rank keeps on its device between steps, except `scratch`: parameters, optimizer
        state, and gradient buffers with gradients that the next step reads."""

    def scratch(self) -> Iterator[torch.Tensor]:
        """Return the tensors that this rank keeps on its device between steps, but whose contents the next step does
        not read, such as gradient buffers that it sets to 0. None by default."""
        return iter(())

    @abstractmethod
    def hf_shards(self) -> list[Shard]:
        """Return this rank's shards of the tensors of the Hugging Face model: named as in its ``state_dict()``, in
        parameter dtype, a tied output layer once, as the embedding. With an adapter, those of the adapter alone, under
        their names in peft's adapter files, and `workers.lora.BASE_DIGEST`. For weight sync and exports; not a
        collective.

        Every element of every tensor is in the shard of at least one rank. The boxes of two ranks of one tensor are
        identical or disjoint: each rank that has a replica returns it, with the same values. ``Shard.read`` gathers
        nothing, and converts when it is called, so that a rank needs memory for one converted shard at a time. A rank
        that has whole tensors returns `Shard.whole` of each.
        """

    @abstractmethod
    def save(self, folder: Path, *, background: bool) -> None:
        """Write model and optimizer state, sharded; `load` reads them on any number of ranks.

        Args:
            folder: of this checkpoint; every rank can write there.
            background: return as soon as the state is copied; `wait_for_save` waits for the rest.

        Raises:
            Exception: on all ranks, even if only one could not write its files. A rank that returned would wait for the
                others in its next collective.
        """

    @abstractmethod
    def wait_for_save(self) -> None:
        """Wait until a `save` in the background is on disk, and raise its error."""

    @abstractmethod
    def load(self, folder: Path, *, optimizer: bool) -> None:
        """Read what `save` wrote, with the optimizer state if ``optimizer``.

        Raises:
            FileNotFoundError: there is no such checkpoint.
        """

    @abstractmethod
    def load_hf(self, folder: str) -> None:
        """Load the weights of a folder written by ``save_pretrained``, or of a model on the hub."""
