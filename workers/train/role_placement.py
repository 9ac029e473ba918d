"""The pools of actor, critic and rollout, on separate or shared devices; and a group's slots of a pool."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from single_controller import RayResourcePool
from single_controller.call.closing import Closing
from single_controller.ray.runtime import ensure_ray
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
        whole: the pool that the others are slices of.
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
    """Create the pools for a run's groups, as slices of one pool. The first group reserves all slots;
    call ``plan()`` of ``whole`` to check before that whether the cluster has room.

    Args:
        args: the configuration. There is a critic if ``advantage_estimator`` is "gae". With ``colocate`` all roles
            share the same slots, from the first on; otherwise each role has its own.
        use_gpu: whether slots are GPUs; by default whether the cluster has any. Otherwise they are logical CPUs.
        max_colocate_count: worker processes that may share a slot; by default the number of roles on it.
        detached: whether the slots outlive the driver, for groups that do.
        standby: slots for standbys of the actor, and as many for those of the critic; see `RayTrainGroup`.

    Raises:
        TrainArgsError: the configuration is invalid.
    """
    args = read_args(args)
    use_gpu = cluster_has_gpus() if use_gpu is None else use_gpu
    sizes = {"actor": math.prod(actor_size(args)) + standby}
    if args.advantage_estimator == "gae":
        sizes["critic"] = math.prod(critic_size(args)) + standby
    sizes["rollout"] = args.rollout_num_workers
    total = max(sizes.values()) if args.colocate else sum(sizes.values())
    if max_colocate_count is None:
        max_colocate_count = len(sizes) if args.colocate else 1
    whole = RayResourcePool(
        [total],
        use_gpu=use_gpu,
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
        pg = RayResourcePool.from_placement_group(pg)
    if pg.world_size < ranks:
        raise TrainArgsError(f"{pg!r} has {pg.world_size} slots for {ranks} ranks; each rank needs a slot")
    return pg if pg.world_size == ranks else pg[:ranks]


def share_of_slot(pool: RayResourcePool, share: float) -> dict[str, float]:
    """Return Ray options for an actor that takes a share of a slot's CPUs and GPUs."""
    slot: Mapping[str, float] = pool.bundle
    options = {"num_cpus": _share(slot.get("CPU", 0), share)}
    if pool.use_gpu:
        options["num_gpus"] = _share(slot.get("GPU", 0), share)
    return options


def _share(amount: float, share: float) -> float:
    """Return a share of a resource. Ray counts in units of 0.0001; rounding down makes all shares fit into the slot."""
    part = amount * share
    return part if part == int(part) else math.floor(part * 10_000 + 1e-6) / 10_000


def cluster_has_gpus() -> bool:
    """Whether the Ray cluster has GPUs. Starts a local Ray if none is running."""
    import ray

    ensure_ray()
    return bool(ray.cluster_resources().get("GPU", 0) > 0)
