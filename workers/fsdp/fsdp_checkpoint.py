"""Checkpoints of an FSDP model and its optimizer: sharded, and readable on any number of ranks. Frozen parameters are
not in them."""

from __future__ import annotations

from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn, optim
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)

from workers.distributed import new_cpu_group
from workers.train.checkpoints import own_settings

_OPTIONS = StateDictOptions(ignore_frozen_params=True, strict=False)  # not strict: frozen parameters are missing


class FSDPCheckpoints:
    """Saves and loads with torch.distributed.checkpoint.

    Args:
        model: a model sharded by FSDP.
        optimizer: the optimizer of its parameters.
    """

    def __init__(self, model: nn.Module, optimizer: optim.Optimizer) -> None:
        self._model, self._optimizer = model, optimizer
        self._writing: Future[Any] | None = None
        self._group: dist.ProcessGroup | None = None

    def save(self, folder: Path, *, background: bool) -> None:
        """Write model and optimizer state. All ranks call it. With ``background``, return once the state is copied."""
        self.wait()
        fresh = not self._optimizer.state
        model, optimizer = get_state_dict(self._model, self._optimizer, options=_OPTIONS)
        state = {"model": model, "optimizer": optimizer}
        # Without optimizer state, `get_state_dict` takes a step with zero gradients to create some. That step would
        # count, so drop the state.
        if fresh:
            self._optimizer.state.clear()
            del state["optimizer"]
        if not background:
            dcp.save(state, checkpoint_id=folder)
            return
        if self._group is None:
            # The save runs collectives while training runs its own, so it needs a separate process group.
            self._group = new_cpu_group()
        # The state is already in host memory, so the writing thread needs no copies from the device.
        writer = dcp.FileSystemWriter(folder, per_thread_copy_ahead=0)
        writing: Any = dcp.async_save(state, storage_writer=writer, process_group=self._group)
        self._writing = getattr(writing, "upload_completion", writing)

    def wait(self) -> None:
        """Wait until a background save is on disk."""
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    def load(self, folder: Path, *, optimizer: bool) -> None:
        """Read what `save` wrote, on any number of ranks. All ranks call it.

        Raises:
            FileNotFoundError: there is no complete checkpoint.
        """
        if not (folder / ".metadata").exists():
            raise FileNotFoundError(f"{str(folder)!r} is not a complete checkpoint: it has no .metadata")
        if optimizer and not _has_optimizer(folder):
            optimizer = False
            self._optimizer.state.clear()
        if optimizer:
            model_state, optimizer_state = get_state_dict(self._model, self._optimizer, options=_OPTIONS)
            state: dict[str, Any] = {"model": model_state, "optimizer": optimizer_state}
            dcp.load(state, checkpoint_id=folder)
            with own_settings(self._optimizer):
                set_state_dict(
                    self._model,
                    self._optimizer,
                    model_state_dict=state["model"],
                    optim_state_dict=state["optimizer"],
                    options=_OPTIONS,
                )
        else:
            state = {"model": get_model_state_dict(self._model, options=_OPTIONS)}
            dcp.load(state, checkpoint_id=folder)
            set_model_state_dict(self._model, state["model"], options=_OPTIONS)


def _has_optimizer(folder: Path) -> bool:
    """Whether the checkpoint's optimizer had taken a step."""
    names = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    return any(name.startswith("optimizer.") for name in names)
