"""NVMegatronRayWorkerGroup: a group whose workers stand where Megatron put them."""

from __future__ import annotations

from dataclasses import dataclass

from single_controller.ray.group import RayWorkerGroup


@dataclass(frozen=True)
class MegatronRankInfo:
    """Where one rank stands, each from 0.

    Attributes:
        tp_rank: on the tensor-parallel axis.
        dp_rank: on the data-parallel axis, context parallelism not counted.
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
        dp_size: data parallelism, context parallelism not counted.
        pp_size: pipeline parallelism.
        cp_size: context parallelism.
    """

    tp_size: int
    dp_size: int
    pp_size: int
    cp_size: int


class NVMegatronRayWorkerGroup(RayWorkerGroup):
    """A `RayWorkerGroup` of `workers.MegatronWorker`s, with the two questions that verl's group of this name answers.

    It takes the same arguments. Workers may initialise megatron in their constructor or in a method that runs later;
    what is asked before that raises a `DispatchError` that says so.
    """

    def get_megatron_rank_info(self, rank: int) -> MegatronRankInfo:
        """Where a rank stands.

        Raises:
            IndexError: there is no such rank.
            DispatchError: the workers have not initialised megatron yet.
        """
        if not isinstance(rank, int) or not 0 <= rank < self.world_size:
            raise IndexError(f"rank {rank!r}: the group has the ranks 0 to {self.world_size - 1}")
        self.get_megatron_global_info()
        layout = self.layout
        return MegatronRankInfo(**{f"{axis}_rank": layout.coordinate(axis, rank) for axis in ("tp", "dp", "pp", "cp")})

    def get_megatron_global_info(self) -> MegatronGlobalInfo:
        """The sizes of the axes.

        Raises:
            DispatchError: the workers have not initialised megatron yet.
        """
        return MegatronGlobalInfo(self.tp_size, self.dp_size, self.pp_size, self.cp_size)
