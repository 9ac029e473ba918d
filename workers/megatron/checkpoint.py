"""Checkpoints of a model and its optimizer: sharded, in megatron's layout, written in the background if asked."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from workers.distributed import new_cpu_group
from workers.megatron.optimizer import allocate_state, inner_optimizers, load_state

if TYPE_CHECKING:
    from workers.megatron.stages import Stages

COMPLETE = "metadata.json"
"""Megatron's file that is written when everything else is."""

FORMAT = ("torch_dist", 1)
"""Megatron's name and version of the layout."""


class Checkpoints:
    """What saves and loads one model. All ranks call each method together.

    Megatron says what a rank holds of which whole tensor, and reads a checkpoint on other sizes of tp, pp and dp.
    Writing is done here: megatron's own writers fork processes, which a process with CUDA, nccl and Ray's
    threads had better not do, and finish a checkpoint only when somebody waits for it. Here a thread writes copies.

    Args:
        stages: this rank's part.
        role: "actor" or "critic"; a checkpoint of the one is not read for the other.
    """

    def __init__(self, stages: Stages, role: str) -> None:
        self._stages = stages
        self._role = role
        self._writing: threading.Thread | None = None
        self._error: BaseException | None = None
        self._group: Any = None

    def save(self, folder: Path, *, background: bool) -> None:
        """Copy this rank's state, and write it into a folder that all ranks have."""
        from megatron.core import dist_checkpointing

        self.wait()
        if self._group is None:
            self._group = new_cpu_group()
        if torch.distributed.get_rank() == 0:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / COMPLETE).unlink(missing_ok=True)
        torch.distributed.barrier(self._group)
        content = {"role": self._role, "optimizer": self._optimizer_kind()}
        request = dist_checkpointing.save(
            self._state(optimizer=content["optimizer"] not in ("none", "new")),
            str(folder),
            sharded_strategy=_strategy(self._group, copy=background),
            async_sharded_save=True,
            content_metadata=content,
        )
        if not background:
            request.async_fn()
            return

        def write() -> None:
            try:
                request.async_fn()
            except BaseException as error:  # raised by `wait`
                self._error = error

        self._writing = threading.Thread(target=write, name="checkpoint", daemon=False)
        self._writing.start()

    def wait(self) -> None:
        """Wait for what is being written, and raise what went wrong there."""
        if self._writing is not None:
            self._writing.join()
            self._writing = None
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def load(self, folder: Path, *, optimizer: bool) -> None:
        """Read a checkpoint into the live model.

        Raises:
            FileNotFoundError: there is none, or it was not written to its end.
            ValueError: it is of something else.
        """
        from megatron.core import dist_checkpointing

        self.wait()
        if not (folder / COMPLETE).exists():
            raise FileNotFoundError(f"{str(folder)!r} is no checkpoint, or one that was not finished: no {COMPLETE}")
        content = dist_checkpointing.load_content_metadata(str(folder)) or {}
        self._check(folder, content, optimizer)
        with_state = optimizer and content["optimizer"] not in ("none", "new")
        loaded = dist_checkpointing.load(self._state(optimizer=with_state, loading=True), str(folder))
        for number, model in enumerate(self._stages.models):
            model.load_state_dict(loaded[f"model{number}"])
        if with_state:
            load_state(self._stages.optimizer, loaded["optimizer"])
        elif optimizer:
            for one in inner_optimizers(self._stages.optimizer):
                one.state.clear()
        if not with_state:
            self._stages.weights_changed()

    def _check(self, folder: Path, content: Mapping[str, Any], optimizer: bool) -> None:
        if content.get("role") != self._role:
            raise ValueError(f"{str(folder)!r} is of the role {content.get('role')!r}, this model has {self._role!r}")
        if not optimizer:
            return
        if self._stages.optimizer is None:
            raise ValueError("load(optimizer=True): this model was made without an optimizer")
        distributed = bool(self._stages.options and self._stages.options.distributed)
        if content["optimizer"] == "none":
            raise ValueError(f"{str(folder)!r} is of a model without an optimizer; load it with optimizer=False")
        if content["optimizer"] != "new" and (content["optimizer"] == "distributed") != distributed:
            raise ValueError(
                f"{str(folder)!r} has the state of an optimizer with distributed={not distributed}, this one has "
                f"distributed={distributed}: megatron keeps them differently; set it as it was, or load with "
                "optimizer=False"
            )

    def _optimizer_kind(self) -> str:
        optimizer = self._stages.optimizer
        if optimizer is None:
            return "none"
        if not any(one.state for one in inner_optimizers(optimizer)):
            return "new"  # before its first step
        return "distributed" if self._stages.options and self._stages.options.distributed else "whole"

    def _state(self, optimizer: bool, loading: bool = False) -> dict[str, Any]:
        """What this rank has of which whole tensor, as megatron says it."""
        metadata = {"distrib_optim_sharding_type": "fully_reshardable", "chained_optim_avoid_prefix": True}
        state: dict[str, Any] = {
            f"model{number}": model.sharded_state_dict(metadata=dict(metadata))
            for number, model in enumerate(self._stages.models)
        }
        if optimizer:
            if loading:
                allocate_state(self._stages.optimizer)
            state["optimizer"] = self._stages.optimizer.sharded_state_dict(
                dict(state), is_loading=loading, metadata=metadata
            )
        return state


def _strategy(group: Any, copy: bool) -> Any:
    """How a rank's tensors come into files: by torch.distributed.checkpoint, into what megatron's loader reads.

    Args:
        group: process group in which the ranks agree, and no one else speaks.
        copy: whether what is written is a copy.
    """
    from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
    from megatron.core.dist_checkpointing.mapping import ShardedTensor
    from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
    from megatron.core.dist_checkpointing.strategies.base import AsyncSaveShardedStrategy
    from megatron.core.dist_checkpointing.strategies.torch import (
        MCoreSavePlanner,
        _replace_state_dict_keys_with_sharded_keys,
        mcore_to_pyt_state_dict,
    )
    from torch.distributed.checkpoint import FileSystemWriter
    from torch.distributed.checkpoint import save as save_parts

    class ByThreads(AsyncSaveShardedStrategy):
        def async_save(self, sharded_state_dict: Any, checkpoint_dir: Any) -> AsyncRequest:
            parts, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded_state_dict, keep_only_main_replica=True)
            if copy:
                for tensor in (part for named in parts.values() for part in named if isinstance(part, ShardedTensor)):
                    tensor.data = tensor.data.detach().to("cpu", copy=True)
            state = mcore_to_pyt_state_dict(parts)

            def write() -> None:
                save_parts(
                    state,
                    # Copies are on the host: the thread that writes them has no business with a device.
                    storage_writer=FileSystemWriter(checkpoint_dir, per_thread_copy_ahead=0 if copy else 10_000_000),
                    planner=MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False),
                    process_group=group,
                )
                if torch.distributed.get_rank() == 0:
                    save_config(CheckpointingConfig(*FORMAT), str(checkpoint_dir))
                torch.distributed.barrier(group)

            return AsyncRequest(write, (), [])

        def can_handle_sharded_objects(self) -> bool:
            return True

    return ByThreads(*FORMAT)
