"""Export of a TrainModel to a folder that Hugging Face's from_pretrained loads, each rank writing what it sends."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from workers.extras import require

if TYPE_CHECKING:
    from workers.train.model import TrainModel

INDEX = "model.safetensors.index.json"


def export_hf(model: TrainModel, folder: str | Path, *, max_file_bytes: int = 4 * 1024**3) -> None:
    """Write config and weights as ``save_pretrained`` does. All ranks call it together; the tokenizer is not written.

    Every rank writes the tensors that `TrainModel.hf_weights` gives it, into files of its own, so that a pipeline
    stage's weights go to disk from where they are. What the folder had of weights before is removed.

    A critic becomes a model of one label for token classification.

    Args:
        model: what is exported.
        folder: to write into, made if need be; all ranks see the same one.
        max_file_bytes: a file has one tensor at least, and no more than this if it has several. It is also what a rank
            copies into host memory at once.
    """
    require("safetensors", extra="hf")
    folder = Path(folder)
    main = _rank() == 0
    if main:
        folder.mkdir(parents=True, exist_ok=True)
        for old in [*folder.glob("model*.safetensors"), *folder.glob("unfinished-*.safetensors"), folder / INDEX]:
            old.unlink(missing_ok=True)
    _barrier()
    mine = list(_write(model, folder, max_file_bytes))
    files = [(rank, *file) for rank, found in enumerate(_gather(mine)) for file in found]
    where: dict[str, str] = {}
    for number, (rank, unfinished, names, *_) in enumerate(files, 1):
        name = "model.safetensors" if len(files) == 1 else f"model-{number:05d}-of-{len(files):05d}.safetensors"
        where |= dict.fromkeys(names, name)
        if rank == _rank():
            (folder / unfinished).rename(folder / name)
    if main:
        _save_config(model, folder, next((dtype for *_, dtype in files), None))
        if len(files) > 1:
            total = sum(size for _, _, _, size, _ in files)
            index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(where.items()))}
            (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")
    _barrier()


def _write(model: TrainModel, folder: Path, max_file_bytes: int) -> Iterator[tuple[str, list[str], int, torch.dtype]]:
    """(file, names of its tensors, bytes, dtype of the first) of what this rank has written."""
    from safetensors.torch import save_file

    held: dict[str, torch.Tensor] = {}
    size = number = 0

    def flush() -> tuple[str, list[str], int, torch.dtype]:
        nonlocal held, size, number
        file = f"unfinished-{_rank()}-{number}.safetensors"
        save_file(held, folder / file, metadata={"format": "pt"})
        done = file, list(held), size, next(iter(held.values())).dtype
        held, size, number = {}, 0, number + 1
        return done

    for name, tensor in model.hf_weights():
        if held and size + tensor.nbytes > max_file_bytes:
            yield flush()
        held[name] = tensor.detach().to("cpu", copy=True).contiguous()
        size += tensor.nbytes
    if held:
        yield flush()


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


def _barrier() -> None:
    if torch.distributed.is_initialized():
        torch.distributed.barrier()


def _gather(mine: Any) -> list[Any]:
    """What every rank has, by rank."""
    if not torch.distributed.is_initialized():
        return [mine]
    found: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(found, mine)
    return found
