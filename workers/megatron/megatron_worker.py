"""MegatronWorker: a worker that reports megatron's layout, on CUDA with nccl.

This project has never run Megatron on a GPU. The tests run it on the CPU, see `workers.megatron.cpu`, and on a
simulated CUDA device.
"""

from __future__ import annotations

import difflib
import inspect
import random
import sys
import warnings
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, Self

from single_controller import Worker
from workers.device import DeviceError, device, has_accelerator, has_cuda, take_device, use_device
from workers.device import backend as default_backend
from workers.distributed import initialize_distributed
from workers.extras import require

if TYPE_CHECKING:
    import torch

PARALLEL_STATE = "megatron.core.parallel_state"
REGISTERED_BY_HAND = object()
AXES = {"dp": "data", "cp": "context", "tp": "tensor_model", "pp": "pipeline_model"}
"""Axis of the layout -> its name in megatron's getters."""


class MegatronWorker(Worker):
    """Subclass this for a model on megatron-core.

    As soon as megatron is initialized, the worker registers its layout with the group: its coordinates on dp, tp, pp,
    cp and ep, and the number of virtual pipeline stages, all from megatron's own getters. You may initialize megatron
    with `initialize_model_parallel`, or with ``torch.distributed.init_process_group()`` and
    ``parallel_state.initialize_model_parallel(...)``, in the constructor or in any later method.

    Megatron needs CUDA. To test your worker without it, derive it from `workers.megatron.cpu.CpuMegatronWorker`.

    Raises:
        ImportError: megatron-core is not installed.
        DeviceError: this process has no CUDA device.
    """

    needs_cuda: ClassVar[bool] = True
    """Whether a worker of this class is refused where there is no CUDA."""

    _reported: object
    _taken: torch.device | None
    _parallel: dict[str, Any] | None = None
    """The arguments of `initialize_model_parallel`, for the next membership."""

    def __new__(cls, *args: object, **kwargs: object) -> Self:
        require("megatron.core", extra="megatron")
        if not has_cuda() and (cls.needs_cuda or has_accelerator()):
            raise DeviceError(
                f"{cls.__name__}: megatron needs CUDA, and this process has no CUDA device. For tests and demos on the "
                "CPU, use the classes of workers.megatron.cpu: derive yours from CpuMegatronWorker, or pass "
                "actor_cls=CpuMegatronTrainWorker to RayTrainGroup"
            )
        self = super().__new__(cls, *args, **kwargs)
        self._reported = None
        self._taken = None
        return self

    @cached_property  # a subclass may set its own
    def device(self) -> torch.device:
        """The device of this rank."""
        return device(self.local_rank, self.device_ids)

    def register_layout(self, sizes: Mapping[str, int] | None = None, /, **axes: int) -> None:
        """As `Worker.register_layout`. From then on megatron's own layout is ignored."""
        self._reported = REGISTERED_BY_HAND
        super().register_layout(sizes, **axes)

    def initialize_model_parallel(
        self,
        tensor_model_parallel_size: int = 1,
        pipeline_model_parallel_size: int = 1,
        *,
        seed: int = 1234,
        backend: str | None = None,
        **options: Any,
    ) -> torch.device:
        """Select the device, initialize torch.distributed (if needed) and megatron's model parallelism, and seed.

        Python's, numpy's and torch's generators are seeded with ``seed + 100 * pp rank``, and megatron's tracker of
        random states from the same number. So data-parallel replicas draw the same numbers.

        Args:
            tensor_model_parallel_size: tp.
            pipeline_model_parallel_size: pp.
            seed: see above.
            backend: of torch.distributed; by default nccl with CUDA, gloo without.
            options: further keyword arguments of ``megatron.core.parallel_state.initialize_model_parallel``, such as
                ``context_parallel_size`` and ``order``. Those that this megatron-core does not have are ignored with
                a warning.

        On a worker that replaces one that has died (`Worker.is_replacement`) the arguments are only noted:
        `on_membership_change` initialises megatron on all ranks.

        Returns:
            The device of this rank.

        Raises:
            RuntimeError: megatron is already initialized, or the sizes do not divide the number of ranks.
            TypeError: a keyword looks like a misspelling of one of megatron's.
        """
        from megatron.core import parallel_state

        if parallel_state.is_initialized():
            raise RuntimeError(
                "megatron's model parallelism is already initialised in this process; call "
                "parallel_state.destroy_model_parallel() first"
            )
        initialize: Callable[..., None] = parallel_state.initialize_model_parallel
        options = _known(initialize, options)
        self._parallel = {
            "tensor_model_parallel_size": tensor_model_parallel_size,
            "pipeline_model_parallel_size": pipeline_model_parallel_size,
            "seed": seed,
            "backend": backend,
            **options,
        }
        if self.is_replacement:
            return device(self.local_rank, self.device_ids)
        mine = self._taken = take_device(self.local_rank, self.device_ids)
        initialize_distributed(self, backend or default_backend(), options.get("distributed_timeout_minutes", 30))
        initialize(tensor_model_parallel_size, pipeline_model_parallel_size, **options)
        seed_everything(seed + 100 * parallel_state.get_pipeline_model_parallel_rank())
        return mine

    def on_membership_change(self, generation: int) -> None:
        """Initialize megatron's model parallelism with the arguments of the last time, unless another role has done so.
        Models, which keep the process groups that they were created with, have to be created again: do that in an
        override, after this."""
        from megatron.core import parallel_state

        if self._parallel is not None and not parallel_state.is_initialized():
            self.initialize_model_parallel(**self._parallel)

    def _prepare_thread(self) -> None:
        use_device(self._taken)

    def _leave_process(self) -> None:
        # Look the module up instead of importing it: a process that has not used megatron has nothing to end.
        parallel_state: Any = sys.modules.get(PARALLEL_STATE)
        if parallel_state is not None and parallel_state.is_initialized():
            parallel_state.destroy_model_parallel()

    def _report(self) -> Any:
        if self._reported is REGISTERED_BY_HAND:
            return super()._report()
        parallel_state: Any = sys.modules.get(PARALLEL_STATE)
        # Each initialization makes a new group object of all model-parallel ranks; without one it is None.
        mp_group = (
            parallel_state.get_model_parallel_group(check_initialized=False) if parallel_state is not None else None
        )
        # A method that runs beside another one may end while that one creates megatron's groups, of which
        # `is_initialized` knows one alone. Of those that are asked for here, this is the last.
        if mp_group is not self._reported and (
            mp_group is None or parallel_state.get_expert_model_parallel_group(check_initialized=False) is not None
        ):
            self._reported = mp_group
            self._register(parallel_state)
        return super()._report()

    def _register(self, state: Any) -> None:
        if self._reported is None:
            self.forget_layout()
            return
        names = {axis: f"get_{name}_parallel" for axis, name in AXES.items()}
        sizes = {axis: getattr(state, f"{name}_world_size")() for axis, name in names.items()}
        ranks = {axis: getattr(state, f"{name}_rank")() for axis, name in names.items()}
        if state.get_expert_model_parallel_world_size() > 1:
            sizes["ep"] = state.get_expert_model_parallel_world_size()
            ranks["ep"] = state.get_expert_model_parallel_rank()
        virtual = state.get_virtual_pipeline_model_parallel_world_size()
        if virtual is not None:
            sizes["vpp"] = virtual
        super().register_layout(sizes, **ranks)


def seed_everything(seed: int) -> None:
    """Seed Python's, numpy's and torch's generators, and reset megatron's tracker of random states."""
    import numpy
    import torch
    from megatron.core import tensor_parallel

    random.seed(seed)
    numpy.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    tensor_parallel.model_parallel_cuda_manual_seed(seed, force_reset_rng=True)


REMOVED = frozenset(
    {
        "default_order",
        "encoder_context_parallel_size",
        "encoder_pipeline_model_parallel_size",
        "encoder_tensor_model_parallel_size",
        "expert_model_parallel_split_rank",
        "pipeline_model_parallel_split_rank",
        "use_fp8",
        "use_tp_pp_dp_mapping",
    }
)
"""Keywords that earlier releases of megatron-core had."""


def _known(function: Callable[..., Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """The options that a function accepts; the others are dropped with a warning.

    Raises:
        TypeError: an option looks like a misspelling of an accepted one.
    """
    accepted = inspect.signature(function).parameters
    unknown = [name for name in options if name not in accepted]
    for name in unknown:
        close = difflib.get_close_matches(name, accepted, n=1, cutoff=0.85)
        if close and name not in REMOVED:
            raise TypeError(f"initialize_model_parallel() has no keyword {name!r}; did you mean {close[0]!r}?")
    if unknown:
        warnings.warn(
            "initialize_model_parallel() of this megatron-core does not accept the keywords "
            f"{', '.join(map(repr, unknown))}; they are ignored",
            stacklevel=3,
        )
    return {name: value for name, value in options.items() if name in accepted}
