"""TrainWorker: the abstract worker of one training rank, and what its group may call."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import ray

from dispatch.layout import Routing
from dispatch.modes import Cut, DispatchMode, Join, Mode, Ranks
from dispatch.rows import share_rows
from single_controller import Dispatch, Worker, register
from workers.train.balance import balanced_rows
from workers.train.rollout_data import rows_of


def _by_dp_all_answer(ranks: Ranks) -> Routing:
    by_dp = ranks.layout.by_dp
    return Routing(by_dp.shards, by_dp.shard_of, tuple(range(ranks.world_size)), by_dp.unit)


ROWS_BY_DP = DispatchMode("rows by dp, answers by rank", Mode(_by_dp_all_answer, Cut.ROWS, Join.LIST))
"""Batches are cut by the plain dp rank, and every rank answers: so there is a reference to each rank's answer, in which
the death of any of them shows."""


@dataclass(frozen=True)
class Referred:
    """All rows behind a Ray reference; each rank fetches them and takes its own.

    Attributes:
        ref: the reference.
        parts: how many parts the rows are put into order for, of about as many tokens each; None to leave their order.
    """

    ref: Any
    parts: int | None = None


def own_rows(given: Any, dp_rank: int, dp_size: int = 1) -> Any:
    """A rank's rows of what `TrainWorker.train` is given, fetched if they are behind a reference.

    Args:
        given: ``rollout_data_ref``.
        dp_rank: the rank's place among those that have rows of their own.
        dp_size: their number.
    """
    if isinstance(given, list) and len(given) == 1:  # one reference for each dp rank
        return ray.get(given[0])
    if not isinstance(given, Referred):
        return given
    whole = ray.get(given.ref)
    if given.parts is not None:
        whole = balanced_rows(whole, given.parts)
    share = share_rows(len(whole["input_ids"]), dp_size, "ragged")[dp_rank]
    return rows_of(whole, slice(*share.ranges[0]))


class TrainWorker(Worker, ABC):
    """One rank of a model that is trained. Subclass it, and give the class to a `RayTrainGroup` as ``actor_cls``.

    The methods below are the group's; the ``init`` of a subclass calls ``register_layout(dp=...)`` or is a
    `MegatronWorker`, so that the group knows how to cut rollout data. An override needs no decorator of its own.

    Attributes:
        critic: a handle of the critic's rank with this number (a Ray actor), after `connect_actor_critic`.
        rollout_manager: what `set_rollout_manager` was given.
        weight_version: of the weights that the rollout workers have; 0 before the first update.
    """

    critic: Any = None
    rollout_manager: Any = None
    weight_version: int = 0

    @classmethod
    def check_args(cls, args: Any, ranks: int, with_ref: bool) -> None:
        """Raise what a configuration has that this class cannot do. `RayTrainGroup.async_init` asks before it sends it;
        here nothing is ever wrong.

        Args:
            args: the configuration.
            ranks: of the group.
            with_ref: see `init`.
        """

    @classmethod
    def check_rows(cls, args: Any, rows: Any) -> None:
        """Raise what is wrong with rollout data. `RayTrainGroup.async_train` asks before it sends any, where the rows
        are in its own process; here nothing is ever wrong.

        Args:
            args: the configuration.
            rows: all rows, a TensorDict or a dict.
        """

    @register(Dispatch.ONE_TO_ALL, replay=True)
    @abstractmethod
    def init(self, args: Any, role: str, with_ref: bool = False) -> int:
        """Make the model, and load what ``args`` says.

        Args:
            args: the configuration, complete and checked (`workers.train.read_args`).
            role: "actor" or "critic".
            with_ref: whether a reference's weights are kept too.

        Returns:
            The rollout id to begin with: 0, or the one after the loaded checkpoint's.
        """

    @register(ROWS_BY_DP, uneven="ragged")
    @abstractmethod
    def train(self, rollout_id: int, rollout_data_ref: Any, **computed: Any) -> dict[str, float]:
        """Learn from a rollout.

        Args:
            rollout_id: its number, from 0.
            rollout_data_ref: this dp rank's rows, see `workers.train.rollout_data`; or what `own_rows` gets them from,
                where `RayTrainGroup.async_train` was given references.
            computed: entries of the rollout data that other ranks have computed: values, old_log_probs, ref_log_probs.

        Returns:
            Metrics of the whole step, the same on every rank.
        """

    @register(Dispatch.ONE_TO_ALL)
    @abstractmethod
    def save_model(self, step: int, force_sync: bool = False) -> str | None:
        """Write a checkpoint.

        Args:
            step: the rollout id after which it is.
            force_sync: return when it is on disk, whatever ``args.async_save`` says.

        Returns:
            Its folder; None if ``args.save`` is not set.
        """

    @register(Dispatch.ONE_TO_ALL)
    @abstractmethod
    def update_weights(self, version: int | None = None) -> int:
        """Send the weights to the rollout workers.

        Args:
            version: of these weights; by default one more than the last. A worker that needs none may leave the
                parameter away.

        Returns:
            The version.
        """

    @register(Dispatch.ONE_TO_ALL)
    @abstractmethod
    def sleep(self) -> int | None:
        """Give the device's memory away: weights, gradients and optimizer go to the host. Returns the bytes."""

    @register(Dispatch.ONE_TO_ALL)
    @abstractmethod
    def wake_up(self) -> int | None:
        """Take it back. Returns the bytes."""

    @register(Dispatch.ONE_TO_ALL)
    @abstractmethod
    def clear_memory(self) -> None:
        """Let go of caches: Python's garbage, and what the device's allocator keeps."""

    @register(Dispatch.ONE_TO_ALL)
    @abstractmethod
    def get_parallel_config(self) -> dict[str, int]:
        """The sizes of the axes: dp_size, and those of the backend."""

    @register(Dispatch.ALL_TO_ALL, replay=True)
    def connect_actor_critic(self, critic: Any) -> None:
        """Take note of the critic's rank with this number, as `critic`: a Ray actor, whose methods are called with
        ``.remote()``."""
        self.critic = critic

    @register(Dispatch.ONE_TO_ALL, replay=True)
    def set_rollout_manager(self, manager: Any) -> None:
        """Take note of the rollout workers' manager, for `update_weights`."""
        self.rollout_manager = manager

    @register(Dispatch.ONE_TO_ALL)
    def set_weight_version(self, version: int) -> None:
        """Go on counting weight versions from this one."""
        self.weight_version = version

    @register(Dispatch.ONE_TO_ALL)
    def wait_for_save(self) -> None:
        """Wait until a checkpoint that is written in the background is on disk; raise what went wrong with it. For
        workers that write in the background."""
        return None

    @register(Dispatch.ONE_TO_ALL)
    def get_master_addr_and_port(self) -> tuple[str, int]:
        """Where the ranks meet: rank 0 found it, and the others were told."""
        return self.master_addr, self.master_port
