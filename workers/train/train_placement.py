"""Where train workers run, and with which environment: the pools of actor, critic and rollout, on separate or shared
devices; a group's slots of a pool; and environment variables."""

from __future__ import annotations

import importlib.util
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup

from single_controller import RayResourcePool
from single_controller.call.state import Closing
from single_controller.ray.compat import ask_store
from single_controller.ray.rank.devices import NOSET
from single_controller.ray.runtime import ensure_ray
from workers.device import ACCELERATORS, CUMEM, device_runtime
from workers.train.args import TrainArgsError, read_args
from workers.train.args_checks import actor_size, critic_size


@dataclass(frozen=True)
class RolePlacement(Closing):
    """The pools of a run's roles. A context manager: closing it ends the groups and frees the slots.

    Slots are ordered by (node, device), compared as numbers; the actor's come first.

    Attributes:
        actor: slots of the actor, and of its standbys.
        critic: slots of the critic, and of its standbys; None without a critic.
        rollout: slots of the rollout workers.
        whole: the pool of which the others are slices.
        share: share of a slot for each role's workers: ``num_gpus_per_actor`` of `RayTrainGroup`.
    """

    actor: RayResourcePool
    critic: RayResourcePool | None
    rollout: RayResourcePool
    whole: RayResourcePool
    share: float = 1.0

    def close(self) -> None:
        """End the groups in the pools, and free the slots."""
        self.whole.close()


def place(
    args: Any,
    *,
    use_gpu: bool | None = None,
    max_colocate_count: int | None = None,
    detached: bool = False,
    standby: int = 0,
) -> RolePlacement:
    """Create the pools for a run's groups, as slices of one pool. The first group reserves all slots. To check before
    that whether the cluster has room, call ``plan()`` of ``whole``.

    Args:
        args: the configuration. There is a critic if ``advantage_estimator`` is "gae". With ``colocate``, all roles
            share the same slots, beginning with the first one; otherwise each role has its own.
        use_gpu: whether slots are GPUs (or what the cluster has instead, such as NPUs); by default whether the cluster
            has any. Otherwise they are logical CPUs.
        max_colocate_count: worker processes that may share a slot; by default the number of roles on it.
        detached: whether the slots outlive the driver, for detached groups.
        standby: number of slots for standbys of the actor, and as many for those of the critic; see `RayTrainGroup`.

    Raises:
        TrainArgsError: the configuration is invalid.
    """
    args = read_args(args)
    sizes = {"actor": math.prod(actor_size(args)) + standby}
    if args.advantage_estimator == "gae":
        sizes["critic"] = math.prod(critic_size(args)) + standby
    sizes["rollout"] = args.rollout_num_workers
    total = max(sizes.values()) if args.colocate else sum(sizes.values())
    if max_colocate_count is None:
        max_colocate_count = len(sizes) if args.colocate else 1
    whole = RayResourcePool(
        [total],
        **slot_devices(use_gpu),
        name_prefix="train_",
        max_colocate_count=max_colocate_count,
        across_nodes=True,
        detached=detached,
    )
    pools: dict[str, RayResourcePool] = {}
    begin = 0
    for role, size in sizes.items():
        pools[role] = whole[begin : begin + size]
        begin += 0 if args.colocate else size
    return RolePlacement(pools["actor"], pools.get("critic"), pools["rollout"], whole, 1 / max_colocate_count)


def first_slots(pg: RayResourcePool | Sequence[Any], ranks: int) -> RayResourcePool:
    """Return the first slots of a pool, as many as a group has ranks.

    Args:
        pg: a pool, or an argument for `RayResourcePool.from_placement_group`.
        ranks: number of ranks.

    Raises:
        TrainArgsError: there are fewer slots.
    """
    if isinstance(pg, (list, tuple)) and len(pg) in (2, 3) and pg[1] is not None:
        if len(pg[1]) < ranks:
            raise TrainArgsError(f"pg has {len(pg[1])} bundle indices for {ranks} ranks; pass one for each rank")
        pg = (pg[0], *(part if part is None else list(part)[:ranks] for part in pg[1:]))
    if not isinstance(pg, RayResourcePool):
        if not isinstance(pg, (PlacementGroup, list, tuple)):
            raise TypeError(
                f"pg is {pg!r:.80}; pass a RayResourcePool, (placement_group, bundle_indices), or None for a new pool"
            )
        pg = RayResourcePool.from_placement_group(pg)
    if pg.world_size < ranks:
        raise TrainArgsError(f"{pg!r} has {pg.world_size} slots for {ranks} ranks; each rank needs a slot")
    return pg if pg.world_size == ranks else pg[:ranks]


def share_of_slot(pool: RayResourcePool, share: float) -> dict[str, float]:
    """Return Ray options for an actor that takes a share of a slot's CPUs and GPUs. Ray counts in units of 0.0001;
    rounding down makes all shares fit into the slot."""
    amounts = {"num_cpus": pool.bundle.get("CPU", 0), "num_gpus": pool.bundle.get("GPU", 0)}
    return {name: math.floor(amount * share * 10_000 + 1e-6) / 10_000 for name, amount in amounts.items()}


def slot_devices(use_gpu: bool | None = None) -> dict[str, Any]:
    """Return the arguments of `RayResourcePool` for slots with one device each, of the kind that the cluster has: a
    GPU, or a unit of another resource of `ACCELERATORS`. Starts a local Ray if none is running.

    Args:
        use_gpu: False for slots without a device; by default whether the cluster has any.
    """
    ensure_ray()
    there = ask_store(ray.cluster_resources)
    kinds = dict.fromkeys(each.resource for each in ACCELERATORS.values())
    kind = next((name for name in kinds if there.get(name, 0) > 0), None)
    wanted = kind is not None if use_gpu is None else use_gpu
    other = {kind: 1.0} if wanted and kind not in (None, "GPU") else {}
    return {"use_gpu": wanted and not other, "resources": other}


def train_environment(args: Any, use_gpu: bool) -> dict[str, str]:
    """Return the environment variables of the train workers.

    Args:
        args: the configuration; its ``train_env_vars`` take precedence.
        use_gpu: whether the workers have GPUs.

    Raises:
        TrainArgsError: torch_memory_saver is installed without its preload library.
    """
    variables = {
        CUMEM: os.environ.get(CUMEM, "0"),
        "NVTE_FP8_BLOCK_SCALING_FP32_SCALES": "1",
        # The processes of a node see each other's devices, and can exchange weights without the host. `workers.device`
        # finds the process's own device.
        **dict.fromkeys(NOSET, "1"),
    }
    # Other processes cannot open memory that torch_memory_saver manages.
    by_saver = args.offload_train and args.update_weights_transport != "device"
    if use_gpu and by_saver and args.train_backend == "megatron":
        variables |= _memory_saver()
    return variables | {str(name): str(value) for name, value in args.train_env_vars.items()}


def _memory_saver() -> dict[str, str]:
    """Variables that make torch_memory_saver hook the allocations of a process; none if it is not installed."""
    spec = importlib.util.find_spec("torch_memory_saver")
    if spec is None or spec.origin is None:
        return {}
    # The libraries are beside the package; their names have the hook mode and the version of the device's runtime. A
    # library that does not find its runtime ends the process before Python starts.
    stem = "torch_memory_saver_hook_mode_preload"
    folder = Path(spec.origin).parent.parent
    major, runtime = device_runtime(folder)
    found = sorted(folder.glob(f"{stem}_cu{major}*.so")) if major else []
    found = found or sorted(folder.glob(f"{stem}.*so"))
    if not found:
        raise TrainArgsError(
            "args.offload_train: torch_memory_saver is installed without its preload library for CUDA "
            f"{major or 'of any version'} ({folder}); reinstall it, or uninstall it to offload by copying instead"
        )
    variables = {"LD_PRELOAD": str(found[0]), "TMS_INIT_ENABLE": "1", "TMS_INIT_ENABLE_CPU_BACKUP": "1"}
    if runtime:  # the library links to it, and the dynamic loader does not find it where pip installs it
        known = os.environ.get("LD_LIBRARY_PATH")
        variables["LD_LIBRARY_PATH"] = f"{runtime[0].parent}:{known}" if known else str(runtime[0].parent)
    return variables
