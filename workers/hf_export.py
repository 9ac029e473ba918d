"""Export a TrainModel to a folder that Hugging Face's from_pretrained loads."""

from __future__ import annotations

import copy
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from workers.distributed import all_or_none, gathered
from workers.hf_files import checkpoint_shapes
from workers.lora import BASE_DIGEST
from workers.train.checkpoints import CheckpointError
from workers.weight_files import FILE_BYTES, INDEX, WeightFiles
from workers.weight_sync.expert_names import ExpertNames
from workers.weight_sync.weight_plan import check_cover
from workers.weight_sync.weight_sender import layout_of, merge_layouts

if TYPE_CHECKING:
    import torch

    from workers.train.train_model import TrainModel


def export_hf(model: TrainModel, folder: str | Path, *, max_file_bytes: int = FILE_BYTES) -> None:
    """Write config and weights as ``save_pretrained`` does. All ranks call it together. The tokenizer is not written.

    ``generation_config.json``, which has the stop tokens, is that of the checkpoint that training started from. If
    its model has code of its own (``trust_remote_code``), the folder has the code too.

    Each rank writes the shards that `TrainModel.hf_shards` returns there to their places in the files, so no tensor is
    gathered; of ranks with the same shard, the first one writes it. Weights that the folder already has are removed
    first.

    A critic is exported as a token classification model with one label. Of a model with an adapter, the adapter alone
    is exported, as a folder that peft's ``PeftModel.from_pretrained`` loads; it has one file of weights. Experts have
    the names of checkpoints, see `workers.weight_sync.expert_names`.

    Args:
        model: the model to export.
        folder: folder to write to, on a disk that all ranks see. It is created if needed.
        max_file_bytes: maximum size of a file in bytes; a larger tensor gets a file of its own.

    Raises:
        CheckpointError: on all ranks, if a file could not be written on any rank.
    """
    if not hasattr(model, "hf_shards"):
        raise TypeError(f"export_hf(): model is {model!r:.80}; pass a TrainModel, such as the worker's self.model")
    folder = Path(folder)
    rank = dist.get_rank() if dist.is_initialized() else 0
    adapter = model.adapter_config
    what = f"the Hugging Face model could not be written to {str(folder)!r}"
    shards = [shard for shard in model.hf_shards() if shard.name != BASE_DIGEST]
    with all_or_none(CheckpointError, what):
        if adapter is None:
            shards = ExpertNames(
                checkpoint_shapes(model.hf_config, {shard.name: shard.shape for shard in shards})
            ).shards(shards)
        layout = layout_of(shards)
    # The files have other names until all ranks have written: an interrupted export must not pass for a model.
    unfinished = folder / ".unfinished"
    with all_or_none(CheckpointError, what):
        held, tensors = merge_layouts(gathered(layout))
        for name, parts in held.items():
            check_cover(name, parts)
        files = WeightFiles(tensors, max_file_bytes if adapter is None else sys.maxsize)  # peft reads one file
        if not rank:
            unfinished.mkdir(parents=True, exist_ok=True)
            for kind in ("model*", ".unfinished/*", "adapter_model"):
                for old in folder.glob(f"{kind}.safetensors"):
                    old.unlink()
            for name in (INDEX, "adapter_config.json", "generation_config.json"):
                (folder / name).unlink(missing_ok=True)
            files.create(unfinished)
    with all_or_none(CheckpointError, what):
        mine = (shard for shard in shards if held[shard.name].boxes[shard.box][0] == rank)
        files.write(unfinished, ((shard.name, shard.box, shard.read()) for shard in mine))
    with all_or_none(CheckpointError, what):
        if not rank:
            for name in files.names:
                (unfinished / name).rename(folder / (name if adapter is None else "adapter_model.safetensors"))
            unfinished.rmdir()
            if adapter is None:
                _save_config(model, folder, next((dtype for _, dtype in tensors.values()), None))
            else:
                adapter.save_pretrained(folder)
            if len(files.names) > 1:
                files.write_index(folder)


def _save_config(model: TrainModel, folder: Path, dtype: torch.dtype | None) -> None:
    import transformers
    from transformers.models.auto import modeling_auto as auto

    config = copy.deepcopy(model.hf_config)
    names: Any = auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    if model.role == "critic":
        names = auto.MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES
        config.num_labels = 1
    config.dtype = dtype
    vars(config).pop("quantization_config", None)  # of the files that training has read; these are not quantized
    if config.model_type in names:
        config.architectures = [names[config.model_type]]
    config.save_pretrained(folder)
    if getattr(config, "auto_map", None) and config.name_or_path:
        # transformers has copied the code of the config alone. Code on the hub is found there.
        for code in Path(config.name_or_path).glob("*.py"):
            shutil.copyfile(code, folder / code.name)
    if model.role != "critic" and config.name_or_path:
        try:
            # No download: the other ranks wait, and what training has read is in the cache.
            found = transformers.GenerationConfig.from_pretrained(config.name_or_path, local_files_only=True)
        except OSError:  # it has none
            return
        found.to_json_file(folder / "generation_config.json")
