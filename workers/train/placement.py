"""Placement: the pools of actor, critic and rollout, side by side or on the same devices; and what of a pool one group
takes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from single_controller import RayResourcePool
from single_controller.base.closing import Closing
from single_controller.ray.runtime import ensure_ray
from workers.train.read_args import TrainArgsError, actor_size, critic_size, read_args


@dataclass(frozen=True)
class Placement(Closing):
    """Where the groups of a run live. A context manager: closing it ends them and frees their place.

    Slots stand by (node, device), compared as numbers, the actor's first.

    Attributes:
        actor: the actor's slots.
        critic: the critic's; None without a critic.
        rollout: the rollout workers'.
        whole: all of them; the others are parts of it.
        share: of a slot, for the workers of each role: `RayTrainGroup`'s ``num_gpus_per_actor``.
    """

    actor: RayResourcePool
    critic: RayResourcePool | None
    rollout: RayResourcePool
    whole: RayResourcePool
    share: float = 1.0

    def close(self) -> None:
        """End what runs there, and free the slots."""
        self.whole.close()


def place(args: Any, *, use_gpu: bool | None = None, max_colocate_count: int | None = None) -> Placement:
    """What a run's groups need, as parts of one placement group. All of it is reserved when the first group is made;
    ``plan()`` of the whole says before that whether there is room.

    Args:
        args: the configuration. There is a critic where ``advantage_estimator`` is "gae". With ``colocate`` all roles
            share the same slots, from the first on; else each role has its own.
        use_gpu: whether slots are GPUs; by default whether the cluster has any. Without, they are logical CPUs.
        max_colocate_count: worker processes that may share a slot; by default as many as there are roles on it.

    Raises:
        TrainArgsError: the configuration is not right.
    """
    args = read_args(args)
    use_gpu = cluster_has_gpus() if use_gpu is None else use_gpu
    sizes = {"actor": math.prod(actor_size(args))}
    if args.advantage_estimator == "gae":
        sizes["critic"] = math.prod(critic_size(args))
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
    )
    parts: dict[str, RayResourcePool] = {}
    begin = 0
    for role, size in sizes.items():
        parts[role] = whole[begin : begin + size]
        begin += 0 if args.colocate else size
    return Placement(parts["actor"], parts.get("critic"), parts["rollout"], whole, 1 / max_colocate_count)


def first_slots(pg: RayResourcePool | Sequence[Any], ranks: int) -> RayResourcePool:
    """As many slots as a group has ranks.

    Args:
        pg: a pool, or what `RayResourcePool.from_placement_group` takes.
        ranks: how many.

    Raises:
        TrainArgsError: it has fewer.
    """
    if isinstance(pg, (list, tuple)) and len(pg) in (2, 3) and pg[1] is not None:
        if len(pg[1]) < ranks:
            raise TrainArgsError(f"pg has {len(pg[1])} bundle indices for {ranks} ranks")
        pg = (pg[0], *(part if part is None else list(part)[:ranks] for part in pg[1:]))
    if not isinstance(pg, RayResourcePool):
        pg = RayResourcePool.from_placement_group(pg)
    if pg.world_size < ranks:
        raise TrainArgsError(f"{pg!r} has {pg.world_size} slots for {ranks} ranks")
    return pg if pg.world_size == ranks else pg[:ranks]


def share_of_slot(pool: RayResourcePool, share: float) -> dict[str, float]:
    """Options of an actor that takes a share of a slot's CPUs, and of its GPUs where it has any."""
    slot: Mapping[str, float] = pool.bundle
    options = {"num_cpus": _part(slot.get("CPU", 0), share)}
    if pool.use_gpu:
        options["num_gpus"] = _part(slot.get("GPU", 0), share)
    return options


def _part(amount: float, share: float) -> float:
    """A share of a resource. Ray counts ten-thousandths; rounded down, so that all shares of a slot fit into it."""
    part = amount * share
    return part if part == int(part) else math.floor(part * 10_000 + 1e-6) / 10_000


def cluster_has_gpus() -> bool:
    """Whether Ray has GPUs here. Starts a local Ray if none is running."""
    import ray

    ensure_ray()
    return bool(ray.cluster_resources().get("GPU", 0) > 0)
