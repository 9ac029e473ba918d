"""The sizes of a group's axes, under the names that users of Megatron know."""

from __future__ import annotations

from abc import ABC, abstractmethod


class AxisSizes(ABC):
    """The sizes of the axes on which a group's ranks stand, asked of the workers when first needed."""

    @abstractmethod
    def _axis_size(self, axis: str) -> int:
        """The size of an axis; 1 for one that the workers did not name."""

    @property
    def tp_size(self) -> int:
        """Size of the tensor-parallel axis, as the workers reported it; 1 for one that they did not name.

        Raises:
            DispatchError: the workers have not said where they stand yet. So for all of these sizes.
        """
        return self._axis_size("tp")

    @property
    def pp_size(self) -> int:
        """Size of the pipeline-parallel axis."""
        return self._axis_size("pp")

    @property
    def dp_size(self) -> int:
        """Size of the data-parallel axis, context parallelism not counted."""
        return self._axis_size("dp")

    @property
    def cp_size(self) -> int:
        """Size of the context-parallel axis."""
        return self._axis_size("cp")

    @property
    def ep_size(self) -> int:
        """Size of the expert-parallel axis; its ranks are data-parallel ranks too."""
        return self._axis_size("ep")

    @property
    def vpp_size(self) -> int:
        """Virtual pipeline stages that each rank holds; 1 without an interleaved pipeline."""
        return self._axis_size("vpp")
