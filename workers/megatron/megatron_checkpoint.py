"""Checkpoints of a model and its optimizer: sharded, in megatron's layout, optionally written in the background.

Thread: ``save(background=True)`` starts one writer thread per rank. It ends by itself when the files are written;
`Checkpoints.wait` waits for it, and every `save` and `load` waits first, so there is never more than one. It is not a
daemon: a process that exits normally does so after the checkpoint is complete. A process that is killed leaves a folder
without `COMPLETE`. There is no lock: the thread reads only the copies that `save` made for it. `RolloutCheckpoints`
calls `wait` in a thread of its own, for which it waits before its next `save`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch

from workers.background import in_thread
from workers.distributed import all_or_none, new_cpu_group
from workers.megatron.megatron_optimizer import allocate_state, inner_optimizers, load_state, share_steps

COMPLETE = "metadata.json"
"""Megatron's file that is written last; a folder without it is not a complete checkpoint."""

FORMAT = ("torch_dist", 1)
"""Megatron's name and version of the layout."""

NO_STATE = ("none", "new")
"""Values of "optimizer" in a checkpoint's metadata for one without optimizer state: the model has no optimizer, or the
optimizer has not made a step. The other values are "whole" and "distributed"."""


class Checkpoints:
    """Saves and loads one model. All ranks call each method together.

    Megatron determines which shard of which tensor a rank holds, and reads a checkpoint at other sizes of tp, pp and
    dp. The files are not written by megatron's own writers: those fork processes, which is unsafe with the threads of
    CUDA, nccl and Ray, and finish a checkpoint only when it is waited for. A thread writes copies instead.

    Args:
        role: "actor" or "critic"; a checkpoint of one is refused by the other.
        models: this rank's GPTModels.
        optimizer: Megatron's, or None.
        distributed: whether the optimizer's state is sharded over the dp ranks.
        vocab_size: of the Hugging Face config, without padding.
    """

    def __init__(self, role: str, models: Sequence[Any], optimizer: Any, distributed: bool, vocab_size: int) -> None:
        self._role = role
        self._models = models
        self._optimizer = optimizer
        self._distributed = distributed
        self._vocab = vocab_size
        self._half = models[0].config.params_dtype is not torch.float32
        self._writing: Future[None] | None = None
        self._group: Any = None

    def save(self, folder: Path, *, background: bool) -> None:
        """Write this rank's state into a folder that all ranks share; in the background, a copy of it.

        Raises:
            RuntimeError: on all ranks: one could not create the folder, or write what the ranks have in common.
            Exception: on all ranks: another step failed. In the background, `wait` raises it.
        """
        from megatron.core import dist_checkpointing

        self.wait()
        if self._group is None:
            # The writer threads synchronize here. In the default group their collectives would mix with training's. It
            # is a gloo group also on CUDA, so that the threads use no device.
            self._group = new_cpu_group()
        with all_or_none(RuntimeError, f"{str(folder)!r} could not be written"):
            if torch.distributed.get_rank() == 0:
                folder.mkdir(parents=True, exist_ok=True)
                # Before any rank writes: a folder that is being written over must not pass for complete.
                (folder / COMPLETE).unlink(missing_ok=True)
        content = {"role": self._role, "optimizer": self._optimizer_kind(), "half": self._half, "vocab": self._vocab}
        state = self._state(optimizer=content["optimizer"] not in NO_STATE)
        # After megatron's own collectives, rank 0 alone writes the common state here. If that fails, no other rank may
        # start to write the shards: it would wait for rank 0 there.
        with all_or_none(RuntimeError, f"{str(folder)!r} could not be written"):
            request = dist_checkpointing.save(
                state,
                str(folder),
                sharded_strategy=_strategy(self._group, copy=background),
                async_sharded_save=True,
                content_metadata=content,
            )
        # The request's finalize functions are not called: they have a barrier in the default group.
        if not background:
            request.async_fn()
            return
        self._writing = in_thread("checkpoint", request.async_fn, daemon=False)

    def wait(self) -> None:
        """Wait until the writer thread has ended, and raise its error."""
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    def load(self, folder: Path, *, optimizer: bool) -> None:
        """Load a checkpoint into the model, and into the optimizer if requested.

        Raises:
            FileNotFoundError: there is no checkpoint, or it is not complete.
            ValueError: it does not fit this model.
        """
        from megatron.core import dist_checkpointing

        self.wait()
        # What follows is a collective. A rank may see another disk.
        with all_or_none(FileNotFoundError, f"{str(folder)!r} could not be read"):
            if not (folder / COMPLETE).exists():
                raise FileNotFoundError(f"{str(folder)!r} is not a complete checkpoint: it has no {COMPLETE}")
            content = dist_checkpointing.load_content_metadata(str(folder)) or {}
        self._check(folder, content, optimizer)
        with_state = optimizer and content["optimizer"] not in NO_STATE
        loaded = dist_checkpointing.load(self._state(optimizer=with_state, loading=True), str(folder))
        for number, model in enumerate(self._models):
            model.load_state_dict(loaded[f"model{number}"])
        if with_state:
            load_state(self._optimizer, loaded["optimizer"])
            return
        if optimizer:
            for inner in inner_optimizers(self._optimizer):
                inner.state.clear()
        if self._optimizer is not None:
            # Otherwise, the next step would overwrite the weights with the optimizer's old float32 copies.
            self._optimizer.reload_model_params()

    def _check(self, folder: Path, content: Mapping[str, Any], optimizer: bool) -> None:
        if content.get("role") != self._role:
            raise ValueError(
                f"{str(folder)!r} is a checkpoint of the role {content.get('role')!r}; this model has the role "
                f"{self._role!r}"
            )
        # Megatron loads the embedding and the output layer in any size, because their padding depends on tp.
        if (size := content.get("vocab", self._vocab)) != self._vocab:  # older ones do not say it
            raise ValueError(
                f"{str(folder)!r} is a checkpoint of a model with vocab_size={size}; this model has "
                f"vocab_size={self._vocab}"
            )
        if not optimizer:
            return
        if self._optimizer is None:
            raise ValueError("load(optimizer=True): this model was created without an optimizer; use optimizer=False")
        if content["optimizer"] == "none":
            raise ValueError(f"{str(folder)!r} has no optimizer state; load it with optimizer=False")
        if content["optimizer"] != "new" and (content["optimizer"] == "distributed") != self._distributed:
            raise ValueError(
                f"{str(folder)!r} has the state of an optimizer with distributed={not self._distributed}, but this "
                f"optimizer has distributed={self._distributed}, which megatron stores in another format. Use the same "
                "value, or load with optimizer=False"
            )
        half = content.get("half", self._half)  # older checkpoints do not say it
        if content["optimizer"] == "whole" and half != self._half:
            raise ValueError(
                f"{str(folder)!r} has the state of an optimizer of another param_dtype: with fp32, there are no "
                "float32 copies of the weights. Use the same param_dtype, or load with optimizer=False"
            )

    def _optimizer_kind(self) -> str:
        if self._optimizer is None:
            return "none"
        # Snapshots create the state before the first step. Megatron would store it without the number of steps, 0.
        # Optimizers other than torch's count a group's steps, not a parameter's.
        inners = [inner for inner in inner_optimizers(self._optimizer) if inner.state]
        if not any(one.get("step") for inner in inners for one in (*inner.state.values(), *inner.param_groups)):
            return "new"
        return "distributed" if self._distributed else "whole"

    def _state(self, optimizer: bool, loading: bool = False) -> dict[str, Any]:
        """This rank's shards, described by megatron."""
        metadata = {"distrib_optim_sharding_type": "fully_reshardable", "chained_optim_avoid_prefix": True}
        state: dict[str, Any] = {
            f"model{number}": model.sharded_state_dict(metadata=dict(metadata))
            for number, model in enumerate(self._models)
        }
        if optimizer:
            if loading:
                allocate_state(self._optimizer)
            if self._distributed:
                share_steps(self._optimizer)
            state["optimizer"] = self._optimizer.sharded_state_dict(dict(state), is_loading=loading, metadata=metadata)
        return state


def _strategy(group: Any, copy: bool) -> Any:
    """A megatron save strategy that writes with torch.distributed.checkpoint, in the format of megatron's loader.

    Args:
        group: process group of all ranks that nothing else uses.
        copy: whether to copy the tensors to host memory first.
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
    from torch.distributed.checkpoint import save as save_shards

    class WriteInProcess(AsyncSaveShardedStrategy):
        def async_save(self, sharded_state_dict: Any, checkpoint_dir: Any) -> AsyncRequest:
            shards, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded_state_dict, keep_only_main_replica=True)
            if copy:
                for tensor in (one for named in shards.values() for one in named if isinstance(one, ShardedTensor)):
                    tensor.data = tensor.data.detach().to("cpu", copy=True)
            state = mcore_to_pyt_state_dict(shards)

            def write() -> None:
                save_shards(
                    state,
                    # 0 keeps the writer off CUDA streams: the copies are in host memory.
                    storage_writer=FileSystemWriter(checkpoint_dir, per_thread_copy_ahead=0 if copy else 10_000_000),
                    planner=MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False),
                    process_group=group,
                )
                # All ranks have written their shards. No rank returns before the checkpoint is complete, and if rank 0
                # fails to complete it, all raise: a rank that did not would go on to its next collective.
                with all_or_none(RuntimeError, f"{str(checkpoint_dir)!r} could not be completed", group):
                    if torch.distributed.get_rank() == 0:
                        save_config(CheckpointingConfig(*FORMAT), str(checkpoint_dir))

            return AsyncRequest(write, (), [])

        def can_handle_sharded_objects(self) -> bool:
            return True

    return WriteInProcess(*FORMAT)
