"""ModelWorker: the life of a train worker's model: creating, loading, saving, sending and offloading it."""

from __future__ import annotations

import gc
import logging
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from single_controller.ray.results import fetch
from workers.data.balance import sequence_cost
from workers.device import empty_cache, free_device_memory, has_accelerator, use_device
from workers.device_memory import DeviceMemory
from workers.distributed import all_or_none, end_process_groups, gathered, node_address, process_groups, rank_by_rank
from workers.extras import require
from workers.hf_export import export_hf
from workers.hf_files import ModelFilesError, check_ref, read_config, read_tokenizer, refuse_no_model, vocab_size_of
from workers.recovery.peer_snapshots import PeerSnapshots
from workers.recovery.snapshot_choice import Recovery, Versions
from workers.recovery.weight_backup import BackupError, WeightBackup, live_tensors, write_snapshot
from workers.train.args import TrainArgsError, read_args, update_seconds
from workers.train.args_checks import ROLES, role_args
from workers.train.checkpoints import UNWRITTEN, CheckpointError, RolloutCheckpoints
from workers.train.train_model import TrainModel
from workers.train.train_worker import TrainWorker
from workers.weight_sync import WeightSender
from workers.weight_sync.sync_protocol import Verify

logger = logging.getLogger(__name__)


class ModelWorker(TrainWorker):
    """A train worker with a `TrainModel`. A backend implements `begin`, `dp_group` and `make_model`; a subclass
    implements training.

    Attributes:
        args: the configuration as its role sees it. With ``kl_target``, its ``kl_coef`` is that of the next rollout.
        role: "actor" or "critic".
        device: of this rank.
        model: the `TrainModel`.
        tokenizer: of ``args.hf_checkpoint``; None if there is none.
        vocab_size: see `vocab_size_of`.
        optimizer_step: number of optimizer steps so far.
    """

    args: Any
    role: str
    device: torch.device
    model: TrainModel
    optimizer_step: int = 0

    @classmethod
    def check_args(cls, args: Any, ranks: int, with_ref: bool) -> None:
        if args.debug_rollout_only:
            return
        refuse_no_model(args)
        if with_ref and not args.enable_weights_backuper:
            raise TrainArgsError(
                "init(with_ref=True) needs enable_weights_backuper=True, which keeps the reference's weights"
            )

    # --- what a backend implements ----------------------------------------------------------------------------

    @abstractmethod
    def begin(self) -> None:
        """Initialize torch.distributed, and register the layout."""

    @abstractmethod
    def make_model(self, hf_config: Any) -> TrainModel:
        """Create the model of `args` and `role`, with the weights of hf_checkpoint or random weights."""

    def make_empty_model(self, hf_config: Any) -> TrainModel:
        """Create the model as `make_model` does, but with any weights, because a snapshot replaces them. By default
        `make_model` creates it."""
        return self.make_model(hf_config)

    @property
    def shard(self) -> int:
        """Number of this rank's shard of the state, of `shards`. Ranks with the same shard have the same
        `TrainModel.state_tensors`, bit for bit."""
        return self.rank

    @property
    def shards(self) -> int:
        """Number of shards of the state over all ranks, in a group of the present size."""
        return self.world_size

    @property
    def reshards(self) -> bool:
        """Whether snapshots can be restored on another number of ranks: `shards` does not depend on that number, or
        each of `TrainModel.state_tensors` is sharded along dim 0, in order of the shards, or equal on all ranks."""
        return False

    def seed(self, number: int) -> None:
        """Seed the random generators that the model uses in training, for dropout.

        Args:
            number: the seed, equal on all ranks of one dp rank.
        """
        torch.manual_seed(number)

    @property
    @abstractmethod
    def dp_group(self) -> Any:
        """Process group of the data-parallel ranks that hold the same shard of the model as this rank."""

    def of_last_stage(self, value: Any) -> Any:
        """Return the value of the rank of this pipeline that has the model's outputs. All its ranks call this. By
        default there is only one stage."""
        return value

    # --- life -------------------------------------------------------------------------------------------

    def init(self, args: Any, role: str, with_ref: bool = False) -> int:
        if role not in ROLES:
            raise ValueError(f"init(role={role!r}): expected one of {', '.join(map(repr, ROLES))}")
        # Close the snapshots: none of the earlier model may be restored into the new one.
        if self._peers is not None:
            self._peers.close()
            self._peers = None
        self.weight_version = self.optimizer_step = 0
        self.sync_report = None
        return self._anew(args, role, lambda: self._make(with_ref))

    def _anew(self, args: Any, role: str, make: Callable[[], int]) -> int:
        self._forget()
        self.args, self.role = role_args(read_args(args), role), role
        self.next_rollout_id = None
        before = process_groups()
        try:
            self.next_rollout_id = make()
            return self.next_rollout_id
        except BaseException:
            self._drop_model()  # whatever weights it has so far, nobody may train them
            raise
        finally:
            # Set this after a failure too, because the next `init` must end the groups that were created.
            self._groups = [group for group in process_groups() if group not in before]

    _groups: Sequence[Any] = ()
    _peers: PeerSnapshots | None = None

    def _forget(self) -> None:
        """Free the model of an earlier `init`, its memory, and the process groups that were created for it."""
        # Wait for the checkpoint first: a background save uses the model and its process groups.
        if "checkpoints" in vars(self):
            try:
                self.checkpoints.wait()
            except CheckpointError as error:
                logger.error("rank %d: init() drops the previous model, whose last save failed: %s", self.rank, error)
        # torch_memory_saver must not be paused while memory is freed below.
        if "memory" in vars(self) and self.memory.paused:
            self.memory.wake_up()
        self._drop_model()
        if self._sender is not None:
            self._sender.close()
            self._sender = None
        if self._groups:
            self.clear_memory()
        groups, self._groups = self._groups, ()
        end_process_groups(groups)

    def _drop_model(self) -> None:
        for name in ("model", "memory", "backup", "checkpoints"):
            vars(self).pop(name, None)

    def _make(self, with_ref: bool) -> int:
        self.check_args(self.args, self.world_size, with_ref)
        self.begin()
        if self.args.debug_rollout_only:
            return 0
        self._build(self.make_model)
        # Copy the reference before the checkpoint is loaded: it has the weights with which training began.
        if with_ref:
            # Load both into one model in turn, because there is device memory for only one.
            if self.args.ref_load is not None:
                with all_or_none(ModelFilesError, "the reference cannot be loaded"):
                    if not self.rank:  # the only one that reads the folder with FSDP
                        check_ref(self.args)
                self.backup.copy("actor")
                self.model.load_hf(self.args.ref_load)
                self.backup.copy("ref")
                self.backup.restore("actor")
                self.backup.drop("actor")
            else:
                self.backup.copy("ref")
        position = self.checkpoints.find()
        if position is not None:
            try:
                self.model.load(position.folder, optimizer=not self.args.no_load_optim)
            except (OSError, CheckpointException) as error:  # on all ranks; the latter is not an Exception
                raise CheckpointError(
                    f"{str(position.folder)!r} cannot be read. It may be damaged, or of another model; to load another "
                    f"checkpoint, set ckpt_step: {error}"
                ) from error
            if not self.args.no_load_optim:
                self.optimizer_step = position.optimizer_step
                if position.kl_coef is not None and self.args.kl_target is not None:
                    self.args.kl_coef = position.kl_coef
            self.weight_version = position.weight_version
        self._versions, self._failed = {}, set()
        self._lost_until = -1 if position is None else self.weight_version
        if self._keeps_versions and position is None:  # a checkpoint's weights are newer than its weight version
            self._keep_version(self.weight_version)
        if has_accelerator():
            self.clear_memory()
        if self.args.peer_snapshot_interval and self.world_size == 1:
            logger.warning("peer_snapshot_interval has no effect on a single rank: no other rank could keep snapshots")
        elif self.args.peer_snapshot_interval:
            self._first_snapshot(-1 if position is None else position.rollout_id)
        return 0 if position is None else position.rollout_id + 1

    def _build(self, make_model: Callable[[Any], TrainModel]) -> None:
        with rank_by_rank(self):
            hf_config = read_config(self.args)
            self.tokenizer = read_tokenizer(self.args)
        self.vocab_size = vocab_size_of(self.args, hf_config, self.tokenizer)
        self.model = make_model(hf_config)
        self.model.sequence_cost = cost = sequence_cost(self.args, hf_config)
        if not self.rank:
            logger.info("%s: a sequence of L tokens costs %.3g L + %.3g L^2", self.role, cost.linear, cost.quadratic)
        self.memory = DeviceMemory(self.model.tensors, self.model.scratch)
        self.backup = WeightBackup(self.model.weights, after=self.model.weights_changed)
        self.checkpoints = RolloutCheckpoints(
            self.args.load,
            self.args.save,
            self.rank,
            self.args.ckpt_step,
            keep=self.args.save_keep,
            keep_every=self.args.save_keep_every,
        )

    # --- snapshots --------------------------------------------------------------------------------------

    def _new_peers(self) -> PeerSnapshots:
        # Other ranks wait for the slowest one in a collective.
        return PeerSnapshots(node_address(), seconds=30 * self.args.distributed_timeout_minutes)

    def _first_snapshot(self, rollout_id: int) -> None:
        self._peers = self._new_peers()
        self._peers.join(self.rank, self.generation, self.node_rank, (self.shard, self.shards), self._dp_rank)
        if "ref" in self.backup:
            self._peers.set_reference(self.backup.snapshot("ref"))
        self._snapshot(rollout_id)

    def snapshot_after(self, rollout_id: int) -> dict[str, float]:
        """Take a snapshot after this rollout, if ``args.peer_snapshot_interval`` says so. All ranks call it. Returns
        metrics, the same on every rank."""
        if self._peers is None or (rollout_id + 1) % self.args.peer_snapshot_interval:
            return {}
        return self._snapshot(rollout_id)

    def _snapshot(self, rollout_id: int) -> dict[str, float]:
        if self._peers is None:
            return {}
        about = {
            "rollout_id": rollout_id,
            "optimizer_step": self.optimizer_step,
            "weight_version": self.weight_version,
            "versions": {kept: list(of) for kept, of in self._versions.items()},  # as they are now
            "kept_at": self._kept_at,
            "kl_coef": self.args.kl_coef,
            "counters": self.model.counters(),
        }
        return self._peers.take(self._state(), about)

    def _state(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield all tensors that training on bit for bit needs, with the kept weights of older versions."""
        yield from self.model.state_tensors()
        for kept in self._versions:
            yield from ((f"{kept}/{name}", part) for name, part in self.backup.snapshot(kept).parts.items())

    def _to_restore(self, about: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        """The live tensors into which a snapshot is written with which this was kept."""
        self._versions = {kept: list(of) for kept, of in about["versions"].items()}
        self._kept_at = about["kept_at"]
        for kept in self._versions:
            if kept not in self.backup:
                self.backup.copy(kept)  # for its memory
        return live_tensors(self._state())

    def peer_snapshots(self) -> Versions:
        if self._peers is None:
            return {}
        return self._peers.versions(lambda shard: self.reshards or shard[1] == self.shards)

    def take_peer_snapshot(self) -> bool:
        takes = self.args.peer_snapshot_interval and not self.args.debug_rollout_only
        # Not if a rollout has failed halfway, perhaps on some ranks only.
        at = set(gathered(self.next_rollout_id)) if self.reshards and takes else set()
        if len(at) == 1 and self.next_rollout_id is not None:
            if self._peers is None:  # a single rank, which takes none after a rollout
                self._first_snapshot(self.next_rollout_id - 1)
            else:
                self._snapshot(self.next_rollout_id - 1)
        return self.reshards

    def recover(self, args: Any, role: str, with_ref: bool, recovery: Recovery, version: int, current: bool) -> int:
        return self._anew(args, role, lambda: self._restore(with_ref, recovery, version, current))

    def _restore(self, with_ref: bool, recovery: Recovery, version: int, current: bool) -> int:
        self.check_args(self.args, self.world_size, with_ref)
        self.begin()
        self._build(self.make_empty_model)
        if self._peers is None:
            self._peers = self._new_peers()
        if self._peers.generation == self.generation:  # no rank was replaced, so what arrives late would be accepted
            self._peers.finish_sending()
        shard = self.shard, self.shards
        snapshot, about, reference = self._peers.restore(
            recovery, self.rank, shard, self._to_restore, lambda about: live_tensors(self.model.weights())
        )
        with all_or_none(BackupError, "the snapshots could not be restored"):
            if with_ref and reference is not None:
                self.backup.put("ref", reference)
            write_snapshot(snapshot, self._to_restore(about), f"after rollout {recovery.rollout_id}")
        self.model.set_counters(about["counters"])
        self.optimizer_step, self.weight_version = about["optimizer_step"], about["weight_version"]
        self.args.kl_coef = about["kl_coef"]
        if self._keeps_versions and current and version > self.weight_version:
            self._keep_version(version)  # as `update_weights` did with these very weights
        self.weight_version = self._lost_until = version
        self._failed = set()
        # Join last: from here on, snapshots of this generation are sent and accepted.
        self._peers.join(self.rank, self.generation, self.node_rank, (self.shard, self.shards), self._dp_rank)
        self.clear_memory()
        return recovery.rollout_id + 1

    def get_parallel_config(self) -> dict[str, int]:
        return {"dp_size": dist.get_world_size(self.dp_group)}

    @classmethod
    def prepare_standby(cls) -> None:
        """Import what creating a model imports."""
        transformers: Any = require("transformers", extra="hf")
        with torch.device("meta"):  # creating a model of one architecture imports most of what any other needs
            transformers.AutoModelForCausalLM.from_config(transformers.LlamaConfig(num_hidden_layers=1))

    def on_membership_change(self, generation: int) -> None:
        """Nothing: the train group calls `recover` or `init` on all ranks, which creates process groups and model."""

    # --- weights ----------------------------------------------------------------------------------------

    def update_weights(self, version: int | None = None, verify: Verify | None = None) -> int:
        if self.args.debug_rollout_only:
            return self.weight_version
        version = self.weight_version + 1 if version is None else version
        self._refuse_asleep("update_weights")
        if self._sender is None:
            raise RuntimeError("update_weights(): there is no rollout manager; call set_rollout_manager() first")
        model = self.model

        def shards() -> Iterator[Any]:  # runs in `send`, which tells all ranks of an error
            yield from model.hf_shards()

        try:
            self.sync_report = self._sender.send(
                version, shards(), rank=self.rank, ranks=self.world_size, verify=verify
            )
        except BaseException:
            self._failed.add(version)  # some rollout workers may have these weights
            raise
        self.weight_version = version
        self._failed.discard(version)
        if self._keeps_versions:
            self._keep_version(version)
        return version

    _sender: WeightSender | None = None
    _versions: dict[str, list[int]]
    """Kept weights -> the weight versions that they were sent as."""
    _kept_at = 0
    """`optimizer_step` of the weights that were kept last."""
    _lost_until = -1
    """Highest weight version of which the weights may be gone: of the checkpoint or snapshot that was loaded."""
    _failed: set[int]
    """Versions since then whose update has failed: of these alone, too."""

    def set_weight_version(self, version: int) -> None:
        """As in `TrainWorker`. Kept weights are dropped: their versions are no longer known."""
        super().set_weight_version(version)
        self._lost_until, self._failed = version, set()
        if "backup" in vars(self):
            self._versions.clear()
            for name in {"rollout_actor", "old_actor"} & set(self.backup.names):
                self.backup.drop(name)

    def set_rollout_manager(self, manager: Any) -> None:
        super().set_rollout_manager(manager)
        if self.args.debug_rollout_only:
            return
        if self._sender is not None:
            self._sender.close()
            self._sender = None
        if manager is None:
            return
        self._refuse_no_model("set_rollout_manager")
        by = self.args.update_weights_transport
        self._sender = WeightSender(
            by,
            manager,
            bucket_bytes=self.args.update_weights_bucket_bytes,
            folder=self.args.update_weights_disk_dir if by == "disk" else None,
            timeout=update_seconds(self.args),
            verify=self.args.update_weights_verify,
            delta=self.args.update_weights_delta,
            full_every=self.args.update_weights_full_every,
            double_buffer=self.args.update_weights_double_buffer,
            exact=self.model.exact_digest,
        )

    @property
    def _keeps_versions(self) -> bool:
        return bool(self.args.keep_old_actor) and self.role == "actor"

    def _keep_version(self, version: int) -> None:
        """Keep a copy of the weights of this version, and of those that were sent before. Whoever changes weights
        otherwise than by optimizer steps must change `optimizer_step`, which tells new weights from the same ones."""
        if "rollout_actor" in self.backup.names:
            if self._kept_at == self.optimizer_step:  # the same weights again, for rollout workers that had lost them
                self._versions["rollout_actor"].append(version)
                return
            self.backup.clone("rollout_actor", "old_actor")
            self._versions["old_actor"] = self._versions["rollout_actor"]
        self.backup.copy("rollout_actor")
        self._versions["rollout_actor"], self._kept_at = [version], self.optimizer_step

    # --- checkpoints ------------------------------------------------------------------------------------

    def save_model(self, step: int, force_sync: bool = False, driver_state: list[Any] | None = None) -> str | None:
        if self.args.debug_rollout_only:
            return None
        self._refuse_asleep("save_model")
        before = process_groups()
        of_driver = None
        # Only rank 0 fetches it, but all ranks must know if that fails, because saving has collectives.
        with all_or_none(CheckpointError, UNWRITTEN):
            if driver_state and not self.rank:
                of_driver = fetch(driver_state[0])
        try:
            folder = self.checkpoints.save(
                self.model,
                step,
                optimizer_step=self.optimizer_step,
                # A run that continues must not use the number of a failed update again: there may be tokens of it.
                weight_version=max({self.weight_version, *self._failed}),
                kl_coef=None if self.args.kl_target is None else self.args.kl_coef,
                background=self.args.async_save and not force_sync,
                driver_state=of_driver,
            )
        finally:  # groups that saving created are destroyed with the model
            self._groups = [*self._groups, *(group for group in process_groups() if group not in before)]
        if self.args.save_hf is not None:
            exported = self.args.save_hf.format(rollout_id=step)
            export_hf(self.model, exported)
            if self.tokenizer is not None and not self.rank:
                self.tokenizer.save_pretrained(exported)
        if folder is not None and (force_sync or not self.args.async_save):
            self.checkpoints.wait_for_deletion()  # last: the other ranks must not wait for it in a collective
        return folder

    def load_driver_state(self) -> tuple[bytes | None, int]:
        if self.args.debug_rollout_only:
            return None, self.weight_version
        self._refuse_no_model("load_driver_state")
        return None if self.rank else self.checkpoints.driver_state(), self.weight_version

    def wait_for_save(self) -> None:
        if "checkpoints" in vars(self):
            self.checkpoints.wait()
            self.checkpoints.wait_for_deletion()

    # --- memory -----------------------------------------------------------------------------------------

    def sleep(self) -> int:
        if self.args.debug_rollout_only:
            return 0
        self._refuse_no_model("sleep")
        self.clear_memory()
        return self.memory.sleep()

    def wake_up(self) -> int:
        if self.args.debug_rollout_only:
            return 0
        self._refuse_no_model("wake_up")
        taken = self.memory.wake_up()
        if has_accelerator():
            free = free_device_memory()
            if free < self.args.train_memory_margin_bytes:
                logger.warning(
                    "rank %d: only %.2f GB of device memory are free after onload(), below train_memory_margin_bytes",
                    self.rank,
                    free / 1e9,
                )
        return taken

    def clear_memory(self) -> None:
        gc.collect()
        if not ("memory" in vars(self) and self.memory.paused):
            empty_cache()

    def _refuse_no_model(self, method: str) -> None:
        if self.args.debug_rollout_only:
            raise RuntimeError(f"{method}(): with debug_rollout_only=True this worker has no model")
        if "memory" not in vars(self):
            raise RuntimeError(f"{method}(): this worker has no model: init() was not called, or it failed")

    def _refuse_asleep(self, method: str) -> None:
        self._refuse_no_model(method)
        if self.memory.asleep:
            raise RuntimeError(f"{method}(): this worker is offloaded; call onload() (wake_up()) first")

    def _prepare_thread(self) -> None:
        super()._prepare_thread()
        use_device(vars(self).get("device"))

    # --- the inside -------------------------------------------------------------------------------------

    @property
    def _dp_rank(self) -> int:
        return dist.get_rank(self.dp_group)

    def _over_dp(self, value: Any) -> list[Any]:
        """Gather a value from every data-parallel rank, by dp rank."""
        return gathered(value, self.dp_group)
