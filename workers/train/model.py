"""TrainModel: the interface between what a train worker does with a model and the backend that runs it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from workers.train.micro_batches import MicroBatch


@dataclass(frozen=True)
class TokenOutputs:
    """What a model says of the tokens of a micro-batch, each (b, s) float32; at position 0 it means nothing.

    Attributes:
        log_probs: log-probability of each token given those before it; None for a critic.
        entropy: of the distribution that the token was drawn from, in nats; None where nobody asked.
        values: what a critic expects before the token was chosen; None for a policy.
    """

    log_probs: torch.Tensor | None = None
    entropy: torch.Tensor | None = None
    values: torch.Tensor | None = None


TokenLoss = Callable[[TokenOutputs, MicroBatch], tuple[torch.Tensor, dict[str, torch.Tensor]]]
"""(outputs, their micro-batch) -> (this micro-batch's part of the loss, sums to report). The loss of a step is the sum
of these parts over all micro-batches and all data-parallel ranks; whoever makes the function has divided by what is to
be divided by. Filling rows have weight 0 there."""


@dataclass(frozen=True)
class StepReport:
    """What one step of the optimizer did; the same on every rank.

    Attributes:
        sums: what the loss function reported, and the loss itself as ``loss``, summed over micro-batches and dp ranks.
        grad_norm: of the whole model, before clipping. Where it is not finite, the weights were left as they were.
    """

    sums: dict[str, float]
    grad_norm: float


class TrainModel(ABC):
    """A model of which this rank has a part, and its optimizer. All ranks call every method together, but `tensors`.

    ``data`` is a mapping of (B, T) tensors and others with B rows, as `workers.train.rollout_data` has it: this dp
    rank's rows, which may be none.
    """

    role: str
    """ "actor" has log-probabilities, "critic" has values."""

    hf_config: Any
    """The Hugging Face config."""

    @abstractmethod
    def log_probs(self, data: Mapping[str, torch.Tensor], temperature: float) -> torch.Tensor | None:
        """(B, T) float32 on the CPU, without gradients, 0 at position 0 and at padding; None on a rank that does not
        have it (a pipeline stage that is not the last)."""

    @abstractmethod
    def values(self, data: Mapping[str, torch.Tensor]) -> torch.Tensor | None:
        """As `log_probs`, of a critic."""

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
        """One step of the optimizer, over micro-batches of at most ``max_tokens_per_micro_batch`` tokens.

        Args:
            data: this dp rank's rows.
            loss: see `TokenLoss`.
            lr: learning rate of this step.
            temperature: the logits are divided by it.
            entropy: whether the loss function needs `TokenOutputs.entropy`.
        """

    @abstractmethod
    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """This rank's own parts of the parameters, by a name that is unique on this rank: the live tensors, on the
        device. For snapshots; not a collective."""

    @abstractmethod
    def weights_changed(self) -> None:
        """Called after somebody has written into `weights`: copies of them that the backend keeps must follow."""

    @abstractmethod
    def tensors(self) -> Iterator[torch.Tensor]:
        """All that this rank keeps on its device between steps: parameters, buffers of gradients, optimizer state."""

    @abstractmethod
    def hf_weights(self, *, everywhere: bool = False) -> Iterator[tuple[str, torch.Tensor]]:
        """(name as the Hugging Face model's ``state_dict()`` has it, whole tensor), in parameter dtype, on the device.
        Every rank goes through it to its end. A tied output layer comes once, as the embedding.

        Args:
            everywhere: each pair comes on every rank, in the same order; else on exactly one: the others get nothing.
        """

    @abstractmethod
    def save(self, folder: Path, *, background: bool) -> None:
        """Write model and optimizer, sharded; `load` reads them on any number of ranks.

        Args:
            folder: of this checkpoint; every rank can write there.
            background: return when the state is copied, and write meanwhile; `wait_for_save` waits.
        """

    @abstractmethod
    def wait_for_save(self) -> None:
        """Wait until a `save` in the background is on disk; raise what it raised."""

    @abstractmethod
    def load(self, folder: Path, *, optimizer: bool) -> None:
        """Read what `save` wrote; the optimizer's state too if asked for.

        Raises:
            FileNotFoundError: there is no such checkpoint.
        """

    @abstractmethod
    def load_hf(self, folder: str) -> None:
        """Take the weights of a folder that ``save_pretrained`` wrote, or of a name on the hub."""
