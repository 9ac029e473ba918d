"""MegatronWorker: a worker that stands where Megatron put it, on CUDA with nccl and on CPU with gloo."""

from __future__ import annotations

import difflib
import inspect
import random
import sys
import warnings
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any, Self

from single_controller import Worker
from workers.device import backend as default_backend
from workers.device import device, take_device, use_device
from workers.distributed import initialize_distributed
from workers.extras import require
from workers.megatron import cpu

if TYPE_CHECKING:
    import torch

PARALLEL_STATE = "megatron.core.parallel_state"
SAID_BY_HAND = object()


class MegatronWorker(Worker):
    """Subclass this for a model on megatron-core.

    The worker tells its group where it stands (dp, tp, pp, cp, ep, and how many virtual pipeline stages) as soon as
    megatron knows, by megatron's own getters, whichever way megatron was initialised: by `initialize_model_parallel`
    here, or by ``torch.distributed.init_process_group()`` and ``parallel_state.initialize_model_parallel(...)`` in the
    constructor or in any later method.

    Where there is no CUDA, "cuda" means the CPU and "nccl" means gloo for what the worker's methods call, so that code
    which is written for GPUs runs (see `workers.megatron.cpu`).

    Raises:
        ImportError: megatron-core is not installed; the message says what to install.
    """

    _reported: object
    _taken: torch.device | None

    def __new__(cls, *args: object, **kwargs: object) -> Self:
        cpu.quiet()
        require("megatron.core", extra="megatron")
        cpu.rewrite_thread()
        self = super().__new__(cls, *args, **kwargs)
        self._reported = None
        self._taken = None
        return self

    @cached_property  # a subclass may set its own
    def device(self) -> torch.device:
        """The device of this rank: its CUDA device, or the CPU where there is none."""
        return device(self.local_rank, self.device_ids)

    def register_layout(self, sizes: Mapping[str, int] | None = None, /, **axes: int) -> None:
        """As `Worker.register_layout`. What is said here counts from then on, whatever megatron says."""
        self._reported = SAID_BY_HAND
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
        """Take a device, initialise torch.distributed (unless it is) and megatron's model parallelism, and seed.

        Python's, numpy's and torch's generators get ``seed + 100 * pp rank``, and megatron's tracker of random states
        is derived from the same number: ranks that differ in dp alone start alike.

        Args:
            tensor_model_parallel_size: tp.
            pipeline_model_parallel_size: pp.
            seed: see above.
            backend: of torch.distributed; by default nccl with CUDA, gloo without.
            options: further keywords of ``megatron.core.parallel_state.initialize_model_parallel``, such as
                ``context_parallel_size`` and ``order``. One that this megatron-core does not have is left out, with
                a warning that names it.

        Returns:
            The device of this rank.

        Raises:
            RuntimeError: megatron is initialised already, or the sizes do not divide the number of ranks.
            TypeError: a keyword that is almost one of megatron's.
        """
        from megatron.core import parallel_state

        if parallel_state.is_initialized():
            raise RuntimeError("megatron's model parallelism is initialised already in this process")
        initialize: Callable[..., None] = parallel_state.initialize_model_parallel
        options = _known(initialize, options)
        mine = self._taken = take_device(self.local_rank, self.device_ids)
        initialize_distributed(self, backend or default_backend(), options.get("distributed_timeout_minutes", 30))
        initialize(tensor_model_parallel_size, pipeline_model_parallel_size, **options)
        seed_everything(seed + 100 * parallel_state.get_pipeline_model_parallel_rank())
        return mine

    def _prepare_thread(self) -> None:
        cpu.rewrite_thread()
        use_device(self._taken)

    def _leave_process(self) -> None:
        parallel_state: Any = sys.modules.get(PARALLEL_STATE)
        if parallel_state is not None and parallel_state.is_initialized():
            parallel_state.destroy_model_parallel()

    def _report(self) -> Any:
        if self._reported is SAID_BY_HAND:
            return super()._report()
        parallel_state: Any = sys.modules.get(PARALLEL_STATE)
        # The group of all model-parallel ranks is made anew with each initialisation, and None before and after.
        found = parallel_state.get_model_parallel_group(check_initialized=False) if parallel_state is not None else None
        if found is not self._reported and (found is None or parallel_state.is_initialized()):
            self._reported = found
            self._say_where(parallel_state)
        return super()._report()

    def _say_where(self, state: Any) -> None:
        if self._reported is None:
            self.forget_layout()
            return
        sizes = {
            "dp": state.get_data_parallel_world_size(),
            "cp": state.get_context_parallel_world_size(),
            "tp": state.get_tensor_model_parallel_world_size(),
            "pp": state.get_pipeline_model_parallel_world_size(),
        }
        ranks = {
            "dp": state.get_data_parallel_rank(),
            "cp": state.get_context_parallel_rank(),
            "tp": state.get_tensor_model_parallel_rank(),
            "pp": state.get_pipeline_model_parallel_rank(),
        }
        if state.get_expert_model_parallel_world_size() > 1:
            sizes["ep"] = state.get_expert_model_parallel_world_size()
            ranks["ep"] = state.get_expert_model_parallel_rank()
        virtual = state.get_virtual_pipeline_model_parallel_world_size()
        if virtual is not None:
            sizes["vpp"] = virtual
        super().register_layout(sizes, **ranks)


def seed_everything(seed: int) -> None:
    """Seed Python's, numpy's and torch's generators and megatron's tracker of random states, anew."""
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
    """The options that a function takes.

    Raises:
        TypeError: one that it does not take is almost one that it does: a misspelling.
    """
    accepted = inspect.signature(function).parameters
    unknown = [name for name in options if name not in accepted]
    for name in unknown:
        close = difflib.get_close_matches(name, accepted, n=1, cutoff=0.85)
        if close and name not in REMOVED:
            raise TypeError(f"initialize_model_parallel() has no keyword {name!r}; did you mean {close[0]!r}?")
    if unknown:
        warnings.warn(
            f"this megatron-core's initialize_model_parallel() has no {', '.join(map(repr, unknown))}: left out",
            stacklevel=3,
        )
    return {name: value for name, value in options.items() if name in accepted}
