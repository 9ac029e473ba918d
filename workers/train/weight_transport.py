"""Transport: one way in which buckets of weights reach rollout workers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from workers.train.weight_buckets import Pair, WeightSyncError
from workers.train.weight_receivers import Receivers

if TYPE_CHECKING:
    from workers.rollout.weight_receiver import ReceiverInfo


class OutOfStepError(WeightSyncError):
    """The ranks that send cannot go on together. No rank tells the others any more."""


class Ranks:
    """The train ranks that send together, and what they tell each other.

    Args:
        rank: this one's.
        ranks: how many.
        group: the process group that they are, in that order; the default one if None.
    """

    def __init__(self, rank: int, ranks: int, group: dist.ProcessGroup | None = None) -> None:
        self.rank = rank
        self.ranks = ranks
        self.group = group

    def global_rank(self, rank: int) -> int:
        """A rank's number in the default process group."""
        return rank if self.group is None else dist.get_global_rank(self.group, rank)

    def all(self, step: str, value: Any) -> list[Any]:
        """What everybody says, by rank. All ranks call it together.

        Args:
            step: what this is about.
            value: what this rank says.

        Raises:
            OutOfStepError: another rank is at another step.
        """
        if self.ranks == 1:
            return [value]
        said: list[Any] = [None] * self.ranks
        dist.all_gather_object(said, (step, value), self.group)
        steps = [here for here, _ in said]
        if len(set(steps)) > 1:
            raise OutOfStepError(
                f"the train ranks are not at the same place of an update: {', '.join(steps)} (by rank). All of them "
                "call send(), and with a transport that wants the weights everywhere all have the same pairs"
            )
        return [value for _, value in said]


@dataclass
class Update:
    """One update on its way.

    Attributes:
        key: its name, unlike that of any other.
        version: of the weights.
        ranks: who sends.
        receivers: calls to those who receive.
        infos: who receives, in order of group and rank.
        shared: what `Transport.prepare` of rank 0 said.
    """

    key: str
    version: int
    ranks: Ranks
    receivers: Receivers
    infos: list[ReceiverInfo] = field(default_factory=list)
    shared: Any = None


class Transport:
    """How buckets travel. One object lives on every train rank, for all updates.

    Attributes:
        everywhere: whether every rank is to have every pair.
    """

    everywhere = False

    def prepare(self, update: Update) -> Any:
        """On rank 0, before anything is sent: what all ranks must know of this update."""
        return None

    def begin(self, update: Update) -> None:
        """On every rank, after that."""

    def send(self, update: Update, bucket: Sequence[Pair]) -> None:
        """Send a bucket; it may be on its way when this returns, but its tensors are not needed any more.

        Raises:
            Exception: it did not arrive, or an earlier one did not.
        """
        raise NotImplementedError

    def flush(self, update: Update) -> Any:
        """Wait until all that this rank sent has arrived.

        Returns:
            What `finish` needs to know of this rank.
        """
        return None

    def finish(self, update: Update, flushed: list[Any]) -> None:
        """On rank 0, after all ranks have flushed, and before the receivers are told that it is over.

        Args:
            update: the update.
            flushed: what `flush` returned, by rank.
        """

    def settle(self, update: Update) -> None:
        """On rank 0, after the receivers have the new version: tidy up."""

    def failed(self, update: Update) -> None:
        """On every rank: the update did not come to its end; give up what is half done."""

    def close(self) -> None:
        """Free what is kept between updates."""
