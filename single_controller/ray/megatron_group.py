"""NVMegatronRayWorkerGroup: a worker group with the questions that verl's Megatron group answers."""

from __future__ import annotations

from dataclasses import dataclass

from single_controller.ray.group import RayWorkerGroup


@dataclass(frozen=True)
class MegatronRankInfo:
    """The coordinates of one rank, each from 0.

    Attributes:
        tp_rank: on the tensor-parallel axis.
        dp_rank: on the data-parallel axis, without context parallelism.
        pp_rank: on the pipeline-parallel axis.
        cp_rank: on the context-parallel axis.
    """

    tp_rank: int
    dp_rank: int
    pp_rank: int
    cp_rank: int


@dataclass(frozen=True)
class MegatronGlobalInfo:
    """The sizes of Megatron's axes.

    Attributes:
        tp_size: tensor parallelism.
        dp_size: data parallelism, without context parallelism.
        pp_size: pipeline parallelism.
        cp_size: context parallelism.
    """

    tp_size: int
    dp_size: int
    pp_size: int
    cp_size: int


class NVMegatronRayWorkerGroup(RayWorkerGroup):
    """A `RayWorkerGroup` of `workers.MegatronWorker`s with the two methods of verl's group of this name.

    It takes the same arguments. Workers may initialize Megatron in their constructor or in a method that runs later.
    Before that, both methods raise a `DispatchError`.
    """

    def get_megatron_rank_info(self, rank: int) -> MegatronRankInfo:
        """The coordinates of a rank.

        Raises:
            IndexError: the group has no such rank.
            DispatchError: the workers have not initialized Megatron yet.
        """
        if not isinstance(rank, int) or not 0 <= rank < self.world_size:
            raise IndexError(f"rank {rank!r}: the group has the ranks 0 to {self.world_size - 1}")
        self.get_megatron_global_info()
        layout = self.layout
        return MegatronRankInfo(**{f"{axis}_rank": layout.coordinate(axis, rank) for axis in ("tp", "dp", "pp", "cp")})

    def get_megatron_global_info(self) -> MegatronGlobalInfo:
        """The sizes of the axes.

        Raises:
            DispatchError: the workers have not initialized Megatron yet.
        """
        return MegatronGlobalInfo(self.tp_size, self.dp_size, self.pp_size, self.cp_size)
