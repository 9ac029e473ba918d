"""Checkpoints of an FSDP model and its optimizer: sharded, and readable on any number of ranks. Frozen parameters are
not in them."""

from __future__ import annotations

from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn, optim
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from workers.background import in_thread
from workers.distributed import all_or_none, new_cpu_group
from workers.train.checkpoints import own_settings

_OPTIONS = StateDictOptions(ignore_frozen_params=True, strict=False)  # not strict: frozen parameters are missing


class FSDPCheckpoints:
    """Saves and loads with torch.distributed.checkpoint.

    Thread: each background save writes in a thread "checkpoint", which `wait` joins.

    Args:
        model: a model sharded by FSDP.
        optimizer: the optimizer of its parameters.
    """

    def __init__(self, model: nn.Module, optimizer: optim.Optimizer) -> None:
        self._model, self._optimizer = model, optimizer
        self._writing: Future[Any] | None = None
        self._group: dist.ProcessGroup | None = None

    def save(self, folder: Path, *, background: bool) -> None:
        """Write model and optimizer state. All ranks call it. With ``background``, return once the state is copied.

        Raises:
            RuntimeError: on all ranks: one has no memory for its state, or for a copy.
            CheckpointException: on all ranks: one could not write. In the background, `wait` raises it.
        """
        # Allow one save at a time: the threads of two saves would interleave their collectives in `_group`.
        self.wait()
        with all_or_none(RuntimeError, f"{str(folder)!r} could not be written"):
            state = self._state(optimizer=bool(self._optimizer.state))
        if not background:
            dcp.save(state, checkpoint_id=folder)
            return
        if self._group is None:
            # The save runs collectives while training runs its own, so it needs a separate process group.
            self._group = new_cpu_group()
        writer = dcp.FileSystemWriter(folder)
        # Not `dcp.async_save`: a rank without memory for its copy would leave the others waiting in their threads.
        with all_or_none(RuntimeError, f"{str(folder)!r} could not be written"):
            copied = writer.stage(state)
        write = partial(dcp.save, copied, storage_writer=writer, process_group=self._group)
        # Do not use a daemon thread: Python waits for other threads at exit, so the last checkpoint is complete.
        self._writing = in_thread("checkpoint", write, daemon=False)

    def wait(self) -> None:
        """Wait until a background save is on disk."""
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    def load(self, folder: Path, *, optimizer: bool) -> None:
        """Read what `save` wrote, on any number of ranks. All ranks call it.

        Raises:
            FileNotFoundError: there is no complete checkpoint, for one of the ranks.
        """
        # What follows is a collective. A rank may see another disk.
        with all_or_none(FileNotFoundError, f"{str(folder)!r} could not be read"):
            if not (folder / ".metadata").exists():
                raise FileNotFoundError(f"{str(folder)!r} is not a complete checkpoint: it has no .metadata")
            written = _with_optimizer_state(folder) if optimizer else set()
        state = self._state(optimizer=bool(written))
        if written:
            # A parameter that has never had a gradient has no state in the file.
            of_parameters = state["optimizer"]["state"]
            for name in of_parameters.keys() - written:
                del of_parameters[name]
        dcp.load(state, checkpoint_id=folder)
        set_model_state_dict(self._model, state["model"], options=_OPTIONS)
        if written:
            with own_settings(self._optimizer):
                set_optimizer_state_dict(self._model, self._optimizer, state["optimizer"], options=_OPTIONS)
        elif optimizer:
            self._optimizer.state.clear()

    def _state(self, *, optimizer: bool) -> dict[str, Any]:
        """Return what is saved, and loaded in place. Optimizer state that does not exist is created."""
        state: dict[str, Any] = {"model": get_model_state_dict(self._model, options=_OPTIONS)}
        if optimizer:
            state["optimizer"] = get_optimizer_state_dict(self._model, self._optimizer, options=_OPTIONS)
        return state


def _with_optimizer_state(folder: Path) -> set[str]:
    """Return the parameters of which the checkpoint has optimizer state; none before the optimizer's first step."""
    names = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    begin, end = "optimizer.state.", ".step"
    return {name[len(begin) : -len(end)] for name in names if name.startswith(begin) and name.endswith(end)}
