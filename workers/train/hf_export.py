"""Export a TrainModel to a folder that Hugging Face's from_pretrained loads. Each rank writes the weights it yields."""

from __future__ import annotations

import copy
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from workers.distributed import all_or_none, gathered
from workers.extras import require
from workers.train.checkpoints import CheckpointError

if TYPE_CHECKING:
    from workers.train.train_model import TrainModel

INDEX = "model.safetensors.index.json"


def export_hf(model: TrainModel, folder: str | Path, *, max_file_bytes: int = 4 * 1024**3) -> None:
    """Write config and weights as ``save_pretrained`` does. All ranks call it together. The tokenizer is not written.

    Each rank writes the tensors that `TrainModel.hf_weights` yields there into files of its own, so the weights of a
    pipeline stage are not moved to another rank. Weights that the folder already has are removed first.

    A critic is exported as a token classification model with one label. Of a model with an adapter, the adapter alone
    is exported, as a folder that peft's ``PeftModel.from_pretrained`` loads; it has one file of weights.

    Args:
        model: the model to export.
        folder: folder to write to, on a disk that all ranks see. It is created if needed.
        max_file_bytes: maximum size of a file in bytes; a larger tensor gets a file of its own. It also limits the host
            memory that a rank uses at once.

    Raises:
        CheckpointError: on all ranks, if a file could not be written on any rank.
    """
    require("safetensors", extra="hf")
    folder = Path(folder)
    main = _rank() == 0
    what = f"the Hugging Face model could not be written to {str(folder)!r}"
    with all_or_none(CheckpointError, what):
        if main:
            folder.mkdir(parents=True, exist_ok=True)
            weights = [file for kind in ("model*", "unfinished-*", "adapter_model") for file in
                       folder.glob(f"{kind}.safetensors")]  # fmt: skip
            for old in (*weights, folder / INDEX, folder / "adapter_config.json"):
                old.unlink(missing_ok=True)
    # peft reads one file.
    writing = _Files(folder, max_file_bytes if model.adapter_config is None else sys.maxsize)
    for name, tensor in model.hf_weights():
        writing.add(name, tensor)
    with all_or_none(CheckpointError, what):
        mine = writing.finish()
    files = [(rank, *file) for rank, found in enumerate(gathered(mine)) for file in found]
    where: dict[str, str] = {}
    with all_or_none(CheckpointError, what):
        for number, (rank, unfinished, names, *_) in enumerate(files, 1):
            name = "model.safetensors" if len(files) == 1 else f"model-{number:05d}-of-{len(files):05d}.safetensors"
            if model.adapter_config is not None:
                name = "adapter_model.safetensors"
            where |= dict.fromkeys(names, name)
            if rank == _rank():
                (folder / unfinished).rename(folder / name)
        if main and model.adapter_config is not None:
            model.adapter_config.save_pretrained(folder)
        elif main:
            _save_config(model, folder, next((dtype for *_, dtype in files), None))
            if len(files) > 1:
                total = sum(size for _, _, _, size, _ in files)
                index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(where.items()))}
                (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")


class _Files:
    """The files that this rank writes. An error is raised only by `finish`: until then, this rank must take part in the
    collectives that produce the other ranks' tensors.

    Args:
        folder: folder to write to.
        max_file_bytes: see `export_hf`.
    """

    def __init__(self, folder: Path, max_file_bytes: int) -> None:
        self._folder = folder
        self._max_file_bytes = max_file_bytes
        self._held: dict[str, torch.Tensor] = {}
        self._size = 0
        self._done: list[tuple[str, list[str], int, torch.dtype]] = []
        self._error: Exception | None = None

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Copy a tensor to host memory. If the file would become too large, write the tensors before it first."""
        if self._error is not None:
            return
        try:
            if self._held and self._size + tensor.nbytes > self._max_file_bytes:
                self._flush()
            self._held[name] = tensor.detach().to("cpu", copy=True).contiguous()
            self._size += tensor.nbytes
        except Exception as error:
            self._error, self._held = error, {}

    def finish(self) -> list[tuple[str, list[str], int, torch.dtype]]:
        """Write what is left, and return (file, names of its tensors, bytes, dtype of the first) for each file."""
        if self._error is not None:
            raise self._error
        if self._held:
            self._flush()
        return self._done

    def _flush(self) -> None:
        from safetensors.torch import save_file

        file = f"unfinished-{_rank()}-{len(self._done)}.safetensors"
        save_file(self._held, self._folder / file, metadata={"format": "pt"})
        self._done.append((file, list(self._held), self._size, next(iter(self._held.values())).dtype))
        self._held, self._size = {}, 0


def _save_config(model: TrainModel, folder: Path, dtype: torch.dtype | None) -> None:
    from transformers.models.auto import modeling_auto as auto

    config = copy.deepcopy(model.hf_config)
    names: Any = auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    if model.role == "critic":
        names = auto.MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES
        config.num_labels = 1
    # transformers has called it dtype since release 4.56.
    setattr(config, "dtype" if hasattr(config, "dtype") else "torch_dtype", dtype)
    if config.model_type in names:
        config.architectures = [names[config.model_type]]
    config.save_pretrained(folder)


def _rank() -> int:
    return torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
