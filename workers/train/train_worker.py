"""TrainWorker: the abstract worker of one training rank, with the methods that its group calls; and `worker_class`, the
class of each backend."""

from __future__ import annotations

import importlib
import inspect
from abc import ABC, abstractmethod
from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dispatch.batch import share_rows
from dispatch.layout import Layout, Routing
from dispatch.modes import Cut, DispatchMode, Join, ListMode, Mode, has_axes
from single_controller import Dispatch, Worker, register
from single_controller.ray.results import fetch
from workers.data.balance import Balance, balanced_rows
from workers.data.rollout_data import require_entries, rows_of
from workers.recovery.snapshot_choice import Recovery, Versions

if TYPE_CHECKING:
    from workers.weight_sync.sync_protocol import SyncReport, Verify


def _by_dp_all_collect(layout: Layout) -> Routing:
    return Routing(layout.by_dp.shards, layout.by_dp.shard_of, tuple(range(layout.world_size)), layout.by_dp.unit)


ROWS_BY_DP: ListMode = DispatchMode(
    "rows by dp, results by rank", Mode(_by_dp_all_collect, Cut.ROWS, Join.LIST, in_layout=has_axes)
)
"""Batches are cut by dp rank, and every rank collects, so that there is a reference to each rank's result in which its
death shows."""


@dataclass(frozen=True)
class Referred:
    """All rows behind a Ray reference; each rank fetches them and takes its shard.

    Attributes:
        ref: the reference.
        balance: how to order the rows; None keeps the order.
    """

    ref: Any
    balance: Balance | None = None


def own_rows(given: Any, dp_rank: int, dp_size: int = 1) -> Any:
    """Return a rank's rows of the rollout data that `TrainWorker.train` was given. References are fetched.

    Args:
        given: ``rollout_data_ref``.
        dp_rank: the rank's data-parallel rank.
        dp_size: number of data-parallel ranks.
    """
    if isinstance(given, list) and len(given) == 1:  # one reference for each dp rank
        return fetch(given[0])
    if not isinstance(given, Referred):
        return given
    whole = fetch(given.ref)
    require_entries(whole, ("input_ids",))
    if given.balance is not None:
        whole = balanced_rows(whole, given.balance)
    share = share_rows(len(whole["input_ids"]), dp_size, "ragged")[dp_rank]
    return rows_of(whole, slice(*share.ranges[0]))


class TrainWorker(Worker, ABC):
    """One rank of a model in training. Subclass it, and pass the class to a `RayTrainGroup` as ``actor_cls``.

    The group calls the methods below; overrides need no decorator. The ``init`` of a subclass must call
    ``register_layout(dp=...)``, or the subclass must be a `MegatronWorker`, so that the group can shard rollout data.

    Attributes:
        critic: handle of the critic's worker of the same rank (a Ray actor), after `connect_actor_critic`.
        rollout_manager: the manager that was passed to `set_rollout_manager`.
        weight_version: version of the weights that the rollout workers have; 0 before the first update.
        next_rollout_id: id of the rollout to train on next. `init` and `train` of a subclass set it when they have
            succeeded, so that `RayTrainGroup.attach` continues there. None if they do not set it, and while a `train`
            changes the state: if it fails halfway, the state does not belong to any rollout.
    """

    next_rollout_id: int | None = None
    critic: Any = None
    rollout_manager: Any = None
    weight_version: int = 0
    sync_report: SyncReport | None = None

    @classmethod
    def check_args(cls, args: Any, ranks: int, with_ref: bool) -> None:
        """Raise if this class does not support a configuration. `RayTrainGroup.async_init` calls it on the driver,
        before it sends the configuration. The default accepts everything.

        Args:
            args: the configuration.
            ranks: number of ranks of the group.
            with_ref: see `init`.
        """

    @classmethod
    def check_rows(cls, args: Any, rows: Any, role: str, computed: Collection[str]) -> None:
        """Raise if rollout data is invalid. `RayTrainGroup.async_train` calls it before it sends rows that are in its
        process. The default accepts everything.

        Args:
            args: the configuration as the role sees it.
            rows: all rows, a TensorDict or a dict.
            role: "actor" or "critic".
            computed: entries that the rows need not have, because the ranks of this group or of a connected one
                compute them.
        """

    @register(Dispatch.ONE_TO_ALL)
    @abstractmethod
    def init(self, args: Any, role: str, with_ref: bool = False) -> int:
        """Create the model, and load the weights or the checkpoint that ``args`` names.

        Args:
            args: the configuration, complete and checked (`workers.train.args`).
            role: "actor" or "critic".
            with_ref: whether to keep a reference's weights too.

        Returns:
            The first rollout id: 0, or the one after the loaded checkpoint's.
        """

    @register(ROWS_BY_DP, uneven="ragged")
    @abstractmethod
    def train(self, rollout_id: int, rollout_data_ref: Any, **computed: Any) -> dict[str, float]:
        """Train on a rollout.

        Args:
            rollout_id: number of the rollout, from 0.
            rollout_data_ref: this dp rank's rows, see `workers.data.rollout_data`; or an argument for `own_rows`, if
                `RayTrainGroup.async_train` was given references.
            computed: entries of the rollout data that other ranks computed: values, old_log_probs, ref_log_probs.

        Returns:
            Metrics of the whole step, the same on every rank.
        """

    @register(Dispatch.MEGATRON_COMPUTE)
    def recorded_rows(self, step: int | None = None) -> dict[str, Any] | None:
        """Return what this dp rank has computed for the rows with ``record_rows``, as `RayTrainGroup.recorded_rows`
        needs it. The default is for workers that keep nothing.

        Args:
            step: the rows' entry ``record_step``, or else the id of the rollout: one of the last two; by default the
                last.
        """
        return None

    @register(Dispatch.ONE_TO_ALL)
    @abstractmethod
    def save_model(self, step: int, force_sync: bool = False, driver_state: list[Any] | None = None) -> str | None:
        """Write a checkpoint.

        Args:
            step: id of the last rollout that the model was trained on.
            force_sync: write in the foreground, even with ``args.async_save``.
            driver_state: a list with one Ray reference to bytes, to store with the checkpoint. An override may omit the
                parameter.

        Returns:
            The checkpoint's folder; None if ``args.save`` is not set.
        """

    @register(Dispatch.ONE_TO_ALL)
    @abstractmethod
    def update_weights(self, version: int | None = None, verify: Verify | None = None) -> int:
        """Send the weights to the rollout workers.

        Args:
            version: of these weights; by default one more than the last. An override may omit the parameter.
            verify: "fingerprint", "full" or "none", instead of ``update_weights_verify``. An override may omit it.

        Returns:
            The version.
        """

    @register(Dispatch.ONE_TO_ALL)
    @abstractmethod
    def sleep(self) -> int | None:
        """Move weights and optimizer state to host memory, and free gradients. Returns the freed device bytes."""

    @register(Dispatch.ONE_TO_ALL)
    @abstractmethod
    def wake_up(self) -> int | None:
        """Move them back to device memory. Returns the bytes."""

    @register(Dispatch.ONE_TO_ALL)
    @abstractmethod
    def clear_memory(self) -> None:
        """Free caches: Python garbage, and unused memory of the device allocator."""

    @register(Dispatch.ONE_TO_ALL)
    @abstractmethod
    def get_parallel_config(self) -> dict[str, int]:
        """Return the sizes of the parallel axes: dp_size, and those of the backend."""

    @register(Dispatch.ALL_TO_ALL)
    def connect_actor_critic(self, critic: Any) -> None:
        """Set `critic` to the critic's worker of the same rank. It is a Ray actor: call its methods with
        ``.remote()``."""
        self.critic = critic

    @register(Dispatch.ONE_TO_ALL)
    def set_rollout_manager(self, manager: Any) -> None:
        """Set the rollout workers' manager, for `update_weights`."""
        self.rollout_manager = manager

    @register(Dispatch.ONE_TO_ALL)
    def set_weight_version(self, version: int) -> None:
        """Continue counting weight versions from this one."""
        self.weight_version = version

    @register(Dispatch.RANK_ZERO)
    def last_sync(self) -> SyncReport | None:
        """Return what the last `update_weights` took on rank 0; None if there was none, or the worker does not tell."""
        return self.sync_report

    @register(Dispatch.ONE_TO_ALL)
    def position(self) -> tuple[int | None, int]:
        """Return `next_rollout_id` and `weight_version`."""
        return self.next_rollout_id, self.weight_version

    @register(Dispatch.ONE_TO_ALL)
    def load_driver_state(self) -> tuple[bytes | None, int]:
        """Return the ``driver_state`` of the checkpoint that `init` has loaded, on rank 0, and its weight version. The
        default is for workers that store none."""
        return None, self.weight_version

    @register(Dispatch.ONE_TO_ALL)
    def wait_for_save(self) -> None:
        """Wait until a checkpoint that is being written in the background is on disk, and raise its error. The default
        is for workers that write in the foreground."""

    @register(Dispatch.ONE_TO_ALL)
    def peer_snapshots(self) -> Versions:
        """Return the complete snapshots in this rank's memory. The default is for workers that take none. Not a
        collective."""
        return {}

    @register(Dispatch.ONE_TO_ALL)
    def take_peer_snapshot(self) -> bool:
        """Take a snapshot now, if a group with another number of ranks can restore it. Returns whether one can."""
        return False

    @register(Dispatch.ONE_TO_ALL)
    def recover(self, args: Any, role: str, with_ref: bool, recovery: Recovery, version: int, current: bool) -> int:
        """Create the model again after ranks were replaced, dropped or added, and restore snapshots instead of loading
        weights. Workers whose `peer_snapshots` returns something implement it.

        Args:
            args: see `init`.
            role: see `init`.
            with_ref: see `init`.
            recovery: what to restore.
            version: the weight version that the rollout workers have.
            current: whether these are the weights that are restored.

        Returns:
            The rollout id to continue with.
        """
        raise NotImplementedError(f"{type(self).__name__} has no recover()")

    @register(Dispatch.ONE_TO_ALL)
    def get_master_addr_and_port(self) -> tuple[str, int]:
        """Return the rendezvous address of the ranks, which rank 0 chose."""
        return self.master_addr, self.master_port


BACKENDS = {
    "fsdp": ("workers.fsdp.fsdp_worker", "FSDPTrainWorker"),
    "megatron": ("workers.megatron.megatron_train_worker", "MegatronTrainWorker"),
}
"""``args.train_backend`` -> module and worker class. Imported only when used: their libraries are heavy."""


def worker_class(backend: str, actor_cls: Any = None) -> type[TrainWorker]:
    """Return the worker class of a backend, or the user's own.

    Raises:
        TypeError: ``actor_cls`` is not a `TrainWorker`, or lacks one of its methods.
    """
    if actor_cls is None:
        module, name = BACKENDS[backend]
        actor_cls = getattr(importlib.import_module(module), name)
    if not isinstance(actor_cls, type) or not issubclass(actor_cls, TrainWorker):
        raise TypeError(f"actor_cls must be a subclass of TrainWorker, got {actor_cls!r}")
    if inspect.isabstract(actor_cls):
        missing = ", ".join(sorted(actor_cls.__abstractmethods__))
        raise TypeError(f"actor_cls {actor_cls.__name__} does not implement {missing}, which TrainWorker requires")
    return actor_cls


def takes_version(cls: type[TrainWorker]) -> bool:
    """Whether ``update_weights`` of a class takes the version."""
    try:
        arguments = inspect.signature(cls.update_weights).bind(None, 1).arguments
    except TypeError:
        return False
    return "verify" not in arguments  # the first parameter of an override that omits only the version
