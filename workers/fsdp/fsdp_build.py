"""Build a Hugging Face model for FSDP: load or initialize it on rank 0, then shard it over the ranks."""

from __future__ import annotations

import copy
import functools
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, debug

from workers.device import on_accelerator
from workers.distributed import all_or_none, new_rows
from workers.exact import make_exact
from workers.extras import require
from workers.hf_files import RANDOM, ModelFilesError
from workers.lora import LoraSettings

_cached_for: weakref.ref[dist.ProcessGroup] | None = None
"""The default process group since which DTensor's cache was not cleared. The cache takes meshes of the same ranks for
equal, but the process groups of a former mesh may have been destroyed."""


def mesh_of(device: torch.device, world_size: int, shard_size: int | None) -> DeviceMesh:
    """Create the device mesh: one dimension over all ranks, or, with ``shard_size``, replicas of that many ranks each
    (HSDP). It must divide the number of ranks."""
    global _cached_for
    if shard_size is None or shard_size == world_size:
        mesh = init_device_mesh(device.type, (world_size,), mesh_dim_names=("shard",))
        if _cached_for is None or _cached_for() is not mesh.get_group():
            _clear_cache()
            _cached_for = weakref.ref(mesh.get_group())
        return mesh
    _clear_cache()
    ranks = torch.arange(world_size).view(-1, shard_size)
    groups = [new_rows(rows.tolist()) for rows in (ranks.t(), ranks)]
    return DeviceMesh.from_group(groups, device.type, mesh=ranks, mesh_dim_names=("replicate", "shard"))


def _clear_cache() -> None:
    clear = getattr(debug, "_clear_sharding_prop_cache", None)
    if clear is None:  # torch before 2.9
        clear = DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding.cache.cache_clear
    clear()


def build(
    hf_config: Any, role: str, *, seed: int | None, folder: str | None, trust_remote_code: bool,
    lora: LoraSettings | None = None, exact: bool = False,
) -> Any:  # fmt: skip
    """Build the whole model in float32: with its weights on rank 0's CPU, on the meta device of the other ranks.

    Args:
        hf_config: the Hugging Face config.
        role: "critic" has a head with one value per token, other roles have the language model's head.
        seed: seed of random weights; None leaves the model on the meta device on rank 0 too.
        folder: Hugging Face folder of the weights; None for random weights. A critic's head is random if the folder has
            none.
        trust_remote_code: whether code in that folder may run.
        lora: the adapter to put into the model; None for none.
        exact: whether to compute exactly; see `workers.exact`.

    Raises:
        ModelFilesError: on all ranks, if transformers has no such model with that head, if its tokens see those after
            them, or if the folder lacks weights, has two that differ although its config ties them, or has some that
            cannot be dequantized.
    """
    transformers = require("transformers", extra="hf")
    kind = transformers.AutoModelForTokenClassification if role == "critic" else transformers.AutoModelForCausalLM
    options: dict[str, Any] = {"trust_remote_code": trust_remote_code, "dtype": torch.float32}
    if _sees_later_tokens(hf_config):
        raise ModelFilesError(
            f"in a {hf_config.model_type!r} of this config a token sees the tokens after it, so no log-probability is "
            "that of a token given those before it. Use a decoder"
        )
    hf_config = copy.deepcopy(hf_config)  # the model changes it
    if isinstance(quantized := getattr(hf_config, "quantization_config", None), dict):
        # On a device that computes with such weights, transformers would keep them, on rank 0 alone.
        hf_config.quantization_config = {**quantized, "dequantize": True}
    if role == "critic":
        own = getattr(hf_config, "auto_map", None) or {}
        if type(hf_config) not in kind._model_mapping and kind.__name__ not in own:
            raise ModelFilesError(
                f"{hf_config.model_type!r} cannot be a critic: transformers has no token classification model of this "
                "type for the value head. Use another model, or advantage_estimator='grpo', which needs no critic"
            )
        hf_config.num_labels, hf_config.classifier_dropout = 1, 0.0
    with all_or_none(ModelFilesError, "the model could not be built"):
        # The `return` below also enters the collective at the end of `all_or_none`, where this rank waits for rank 0.
        if dist.get_rank() or seed is None:
            with torch.device("meta"):
                model = kind.from_config(hf_config, **options)
                if lora is not None:
                    lora.inject(model)
            if exact:
                make_exact(model)
            return model.train()
        with RANDOM, torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            if folder is None:
                model = kind.from_config(hf_config, **options)
            else:
                model, loading = kind.from_pretrained(folder, config=hf_config, output_loading_info=True, **options)
                if getattr(model.config, "quantization_config", None) is not None:
                    raise ValueError(
                        f"{folder!r} has quantized weights, which transformers cannot dequantize when it reads them; "
                        "write a folder with plain ones"
                    )
                # A critic's head may be missing.
                own = model.base_model_prefix if role == "critic" else ""
                if missing := sorted(name for name in loading["missing_keys"] if name.startswith(own)):
                    raise ValueError(
                        f"{folder!r} lacks {len(missing)} of the model's weights, such as {missing[0]!r}: its files "
                        "are incomplete or do not match its config"
                    )
                # Loading makes all parameters trainable, such as the expert bias of some models, which is not on the
                # other ranks.
                with torch.device("meta"):
                    plain = kind.from_config(hf_config, **options)
                # Weights that differ in the files are not tied here, but they are on the other ranks.
                tied, found = (getattr(of, "all_tied_weights_keys", None) or {} for of in (plain, model))
                if untied := sorted(tied.keys() - found.keys()):
                    raise ValueError(
                        f"{folder!r} has different weights for {untied[0]!r} and {tied[untied[0]]!r}, which its config "
                        "ties; set tie_word_embeddings=false in its config.json"
                    )
                frozen = {name for name, parameter in plain.named_parameters() if not parameter.requires_grad}
                for name, parameter in model.named_parameters():
                    parameter.requires_grad_(name not in frozen)
            if lora is not None:
                lora.inject(model)
        if exact:
            make_exact(model)
    return model.train()


def _sees_later_tokens(hf_config: Any) -> bool:
    """Whether attention is bidirectional: in BERT and its like, which also have a head for causal language models, and
    where the config asks for it."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES

    if getattr(hf_config, "use_bidirectional_attention", None) is True:
        return True
    encoder = hf_config.model_type in MODEL_FOR_MASKED_LM_MAPPING_NAMES and not hf_config.is_encoder_decoder
    return encoder and getattr(hf_config, "is_decoder", None) is False


class _Rows(threading.local):
    of_one_sequence = False


_rows = _Rows()


@contextmanager
def one_sequence_per_row() -> Iterator[None]:
    """Tell transformers that no row has several packed sequences, in what this thread runs inside.

    transformers asks the position ids in each forward pass without an attention mask, and so waits for the device once
    per micro-batch: all its work has to end before the next micro-batch is begun.
    """
    _let_rows_be_of_one_sequence()
    before, _rows.of_one_sequence = _rows.of_one_sequence, True
    try:
        yield
    finally:
        _rows.of_one_sequence = before


@functools.cache
def _let_rows_be_of_one_sequence() -> None:
    """Replace transformers' function that asks; it asks as before outside of `one_sequence_per_row`."""
    from transformers import masking_utils

    find = getattr(masking_utils, "find_packed_sequence_indices", None)  # not in all versions
    if find is None:
        return

    @functools.wraps(find)
    def found(position_ids: torch.Tensor) -> torch.Tensor | None:
        return None if _rows.of_one_sequence else find(position_ids)

    masking_utils.find_packed_sequence_indices = found


def shard(
    model: Any, mesh: DeviceMesh, device: torch.device, param_dtype: torch.dtype, reduce_dtype: torch.dtype,
    cpu_offload: bool = False, empty: bool = False,
) -> None:  # fmt: skip
    """Shard a model that `build` returned over the ranks, layer by layer and in place, and distribute rank 0's weights.

    Args:
        model: the model; the same on all ranks.
        mesh: the result of `mesh_of`.
        device: device of this rank.
        param_dtype: dtype of the computation. Parameters stay float32, except frozen ones, which need no more precision
            than the computation.
        reduce_dtype: dtype in which gradients are reduced.
        cpu_offload: whether to keep shards in host memory while they are not used.
        empty: leave parameters and buffers uninitialized.
    """
    for parameter in model.parameters():
        if not parameter.requires_grad:
            parameter.data = parameter.data.to(param_dtype)
    # Read the weights now: sharding replaces the parameters, and `to_empty` discards their values.
    whole = dict(model.state_dict()) if not dist.get_rank() else {}
    mixed = MixedPrecisionPolicy(
        param_dtype=None if param_dtype is torch.float32 else param_dtype, reduce_dtype=reduce_dtype
    )
    offload = CPUOffloadPolicy(pin_memory=on_accelerator(device)) if cpu_offload else OffloadPolicy()
    layers = set(getattr(model, "_no_split_modules", None) or ())
    buffers = dict(model.named_buffers())
    sharded: list[str] = []
    for name, module in list(model.named_modules()):
        # Some models, such as Mamba, name a part of a layer too: it is sharded with its layer.
        if type(module).__name__ in layers and not name.startswith(tuple(f"{outer}." for outer in sharded)):
            fully_shard(module, mesh=mesh, mp_policy=mixed, offload_policy=offload)
            sharded.append(name)
    # Shard the whole model last: this call takes all parameters that the calls above have left.
    fully_shard(model, mesh=mesh, mp_policy=mixed, offload_policy=offload)
    model.to_empty(device="cpu" if cpu_offload else device)
    # `to_empty` has allocated a separate tensor for each module, so tie the parameters again.
    if hasattr(model, "tie_weights"):
        model.tie_weights()
    if empty:
        _same_buffers(model, None, device)
    else:
        take_weights(model, whole, buffers, device, cpu_offload)


def take_weights(
    model: Any, whole: dict[str, Any], buffers: dict[str, torch.Tensor], device: torch.device, cpu_offload: bool
) -> None:
    """Distribute rank 0's weights to the shards of all ranks, and its buffers to all ranks.

    Args:
        model: a model after `shard`.
        whole: on rank 0, the state dict of the whole model; ignored on other ranks.
        buffers: on rank 0, all buffers of the whole model; ignored on other ranks.
        device, cpu_offload: as for `shard`.
    """
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, cpu_offload=cpu_offload)
    if cpu_offload:  # torch refuses a model on two devices
        _same_buffers(model, None, torch.device("cpu"))
    set_model_state_dict(model, whole, options=options)
    _same_buffers(model, buffers, device)


def _same_buffers(model: Any, rank_0s: dict[str, torch.Tensor] | None, device: torch.device) -> None:
    """Broadcast the buffers from rank 0, or allocate them if there are none. Some, such as rotary frequencies, are in
    no state dict."""
    # All ranks have the same modules, so they broadcast the buffers in the same order.
    for name, buffer in list(model.named_buffers()):
        whole = torch.empty_like(buffer, device=device)
        if rank_0s is not None:
            whole = whole if dist.get_rank() else rank_0s[name].to(device)
            dist.broadcast(whole, src=0)
        owner, _, attribute = name.rpartition(".")
        model.get_submodule(owner)._buffers[attribute] = whole
