"""A Hugging Face model for FSDP: read or drawn on rank 0, cut over the ranks, and the same everywhere."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from workers.distributed import all_or_none, new_rows
from workers.extras import require
from workers.train.hf_files import ModelFilesError


def mesh_of(device: torch.device, world_size: int, shard_size: int | None) -> DeviceMesh:
    """The ranks as FSDP needs them: all in one row that shares a model; or rows of ``shard_size`` that each share a
    copy of it (HSDP).

    Raises:
        ValueError: the ranks cannot be put into such rows.
    """
    if shard_size is None or shard_size == world_size:
        return init_device_mesh(device.type, (world_size,), mesh_dim_names=("shard",))
    if world_size % shard_size:
        raise ValueError(f"fsdp_shard_size={shard_size} does not divide the {world_size} ranks")
    ranks = torch.arange(world_size).view(-1, shard_size)
    groups = [new_rows(rows.tolist()) for rows in (ranks.t(), ranks)]
    return DeviceMesh.from_group(groups, device.type, mesh=ranks, mesh_dim_names=("replicate", "shard"))


def build(hf_config: Any, role: str, *, seed: int, folder: str | None, trust_remote_code: bool) -> Any:
    """The whole model, in float32: on rank 0's CPU with its weights, on the other ranks without memory.

    Args:
        hf_config: the Hugging Face config.
        role: "critic" has a head that gives one number for each token, other roles the language model's.
        seed: of random weights.
        folder: Hugging Face folder of the weights; None for random ones. A critic's head is random if it has none.
        trust_remote_code: whether code in that folder may run.

    Raises:
        ModelFilesError: on all ranks: transformers has no model with such a head, or the folder has no such model or
            not all of its weights.
    """
    transformers = require("transformers", extra="hf")
    kind = transformers.AutoModelForTokenClassification if role == "critic" else transformers.AutoModelForCausalLM
    options: dict[str, Any] = {"trust_remote_code": trust_remote_code, "dtype": torch.float32}
    if role == "critic":
        own = getattr(hf_config, "auto_map", None) or {}
        if type(hf_config) not in kind._model_mapping and kind.__name__ not in own:
            raise ModelFilesError(
                f"a critic of {hf_config.model_type!r}: transformers has no token classification for that kind of "
                "model, and so no place for a value head; take another model, or advantage_estimator='grpo', which "
                "needs no critic"
            )
        hf_config = copy.deepcopy(hf_config)
        hf_config.num_labels, hf_config.classifier_dropout = 1, 0.0
    with all_or_none(ModelFilesError, "the model could not be made"):
        if dist.get_rank():
            with torch.device("meta"):
                return kind.from_config(hf_config, **options).train()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            if folder is None:
                return kind.from_config(hf_config, **options).train()
            model, found = kind.from_pretrained(folder, config=hf_config, output_loading_info=True, **options)
            # Of a critic's head there need not be any.
            own = model.base_model_prefix if role == "critic" else ""
            if missing := sorted(name for name in found["missing_keys"] if name.startswith(own)):
                raise ValueError(
                    f"{folder!r} lacks {len(missing)} of the model's weights, {missing[0]!r} for one: its files are "
                    "not complete, or are of another model than its config"
                )
    return model.train()


def shard(
    model: Any, mesh: DeviceMesh, device: torch.device, param_dtype: torch.dtype, reduce_dtype: torch.dtype,
    cpu_offload: bool = False,
) -> None:  # fmt: skip
    """Cut a model that `build` made over the ranks, layer by layer, in place, and give every rank its part of rank 0's
    weights.

    Args:
        model: the same on all ranks.
        mesh: what `mesh_of` gave.
        device: of this rank.
        param_dtype: what it computes in; parameters themselves stay float32.
        reduce_dtype: what gradients are summed in.
        cpu_offload: whether parts lie on the host while they are not computed with.
    """
    whole = dict(model.state_dict()) if not dist.get_rank() else {}
    mixed = MixedPrecisionPolicy(
        param_dtype=None if param_dtype is torch.float32 else param_dtype, reduce_dtype=reduce_dtype
    )
    pinned = device.type == "cuda"
    offload = CPUOffloadPolicy(pin_memory=pinned) if cpu_offload else OffloadPolicy()
    layers = set(getattr(model, "_no_split_modules", None) or ())
    buffers = {name: buffer.to(device) for name, buffer in model.named_buffers() if not buffer.is_meta}
    for module in list(model.modules()):
        if type(module).__name__ in layers:
            fully_shard(module, mesh=mesh, mp_policy=mixed, offload_policy=offload)
    fully_shard(model, mesh=mesh, mp_policy=mixed, offload_policy=offload)
    model.to_empty(device="cpu" if cpu_offload else device)
    if hasattr(model, "tie_weights"):
        model.tie_weights()
    take_weights(model, whole, cpu_offload)
    _same_buffers(model, buffers, device)


def take_weights(model: Any, whole: dict[str, Any], cpu_offload: bool = False) -> None:
    """Give every rank its part of rank 0's weights.

    Args:
        model: what `shard` has cut.
        whole: on rank 0 the state dict of the whole model; on the others it is not looked at.
        cpu_offload: as for `shard`.
    """
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, cpu_offload=cpu_offload)
    set_model_state_dict(model, whole, options=options)


def _same_buffers(model: Any, rank_0s: dict[str, torch.Tensor], device: torch.device) -> None:
    """Buffers that no state dict has (the frequencies of rotary embeddings) come from rank 0."""
    for name, buffer in list(model.named_buffers()):
        whole = rank_0s[name] if not dist.get_rank() else torch.empty_like(buffer, device=device)
        dist.broadcast(whole, src=0)
        owner, _, attribute = name.rpartition(".")
        model.get_submodule(owner)._buffers[attribute] = whole
