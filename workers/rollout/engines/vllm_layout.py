"""Which part of each tensor of a Hugging Face model a process of vLLM has, and where. Runs without vLLM."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from workers.rollout.rollout_errors import RolloutError
from workers.weight_sync.expert_names import stack_of
from workers.weight_sync.weight_plan import whole, within

if TYPE_CHECKING:
    import torch

    from workers.weight_sync.weight_plan import Box


class Part(NamedTuple):
    """What a process has of one tensor.

    Attributes:
        parameter: name of the parameter in vLLM's model.
        begin: index of its first element in the parameter, by dim. It has the size of ``box``.
        box: the part of the whole tensor.
        dtype: in which vLLM was given the parameter.
    """

    parameter: str
    begin: tuple[int, ...]
    box: Box
    dtype: torch.dtype


def find_parts(model: Any, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[Part, ...]] | None:
    """Find the tensors in vLLM's model.

    The model's ``packed_modules_mapping`` says which modules vLLM has fused, and the attributes of its layers what the
    process has of them. A tensor that is fused in the checkpoint too is not found in vLLM's fused layer: models differ
    in how they order its rows. The experts of a layer are found if they have no biases and vLLM computes with weights
    in the order of the checkpoint, or in one that can be turned back: see `packed_by`.

    Args:
        model: the model of this process.
        shapes: of all tensors, whole, by the names of the Hugging Face model.

    Returns:
        The parts by name, several for tensors of experts; None if one of the tensors is not there, or not in a form
        that is understood.
    """
    tensors: dict[str, torch.Tensor] = model.state_dict(keep_vars=True)
    fused = getattr(model, "packed_modules_mapping", {})
    found: dict[str, tuple[Part, ...]] = {}
    for name, shape in shapes.items():
        own = name if name in tensors else vllm_name(name, tensors)
        if (experts := stack_of(own)) is not None:
            found[name] = tuple(_find_experts(own, experts, shape, model, tensors))
        elif (part := _find(own, shape, model, tensors, fused)) is not None:
            found[name] = (part,)
        if not found.get(name):
            return None
    return found


def vllm_name(name: str, tensors: Mapping[str, Any]) -> str:
    """Return a tensor's name with vLLM's name for the module of a mixture. transformers 5 calls it ``mlp`` in all
    models; Mixtral's checkpoints, and vLLM, ``block_sparse_moe``."""
    module, rest = name.partition(".mlp.")[::2]
    sparse = f"{module}.block_sparse_moe."
    return sparse + rest if rest and any(one.startswith(sparse) for one in tensors) else name


def _find_experts(
    name: str,
    experts: str,
    shape: tuple[int, ...],
    model: Any,
    tensors: Mapping[str, torch.Tensor],
) -> Iterator[Part]:
    """Find the parts of a tensor with the matrices of all experts of a layer."""
    is_down = name.endswith("down_proj")
    parameter = f"{experts}.routed_experts.{'w2' if is_down else 'w13'}_weight"
    if parameter not in tensors or len(shape) != 3:
        return
    tensor, layer = tensors[parameter], model.get_submodule(f"{experts}.routed_experts")
    config, dtype = layer.moe_config, getattr(layer, "params_dtype", None) or tensor.dtype
    parallel, rows = config.moe_parallel_config, config.intermediate_size_per_partition_unpadded
    total = shape[2] if is_down else shape[1] // 2
    hidden = shape[1] if is_down else shape[2]
    if (
        not keeps_order(layer)
        or layer.is_fused_checkpoint_transposed
        or config.has_bias
        or dtype.itemsize < 2
        or (hidden, hidden) != (config.hidden_dim, config.hidden_dim_unpadded)
        or (config.num_experts, rows * parallel.tp_size) != (shape[0], total)
    ):
        return
    here = _own_experts(layer, shape[0])
    if here is None or here[1] - here[0] != tensor.shape[0]:
        return
    begin = parallel.tp_rank * rows
    if is_down:
        yield Part(parameter, (0, 0, 0), (here, (0, hidden), (begin, begin + rows)), dtype)
    elif parallel.tp_size == 1 and 2 * rows == tensor.shape[1]:
        yield Part(parameter, (0, 0, 0), (here, (0, 2 * rows), (0, hidden)), dtype)
    else:  # the parameter may be padded, after the rows of each half
        for half in (0, 1):
            box = (here, (half * total + begin, half * total + begin + rows), (0, hidden))
            yield Part(parameter, (0, half * (tensor.shape[1] // 2), 0), box, dtype)


def _own_experts(layer: Any, count: int) -> tuple[int, int] | None:
    """Return which experts a process has, (first, end); None if they do not follow each other."""
    if layer.expert_map is None:
        return 0, count
    local: list[int] = layer.expert_map.tolist()  # -1 for those of other processes
    own = [number for number, place in enumerate(local) if place >= 0]
    in_order = bool(own) and [local[number] for number in own] == list(range(len(own)))
    return (own[0], own[-1] + 1) if in_order and own[-1] - own[0] == len(own) - 1 else None


def keeps_order(layer: Any) -> bool:
    """Whether the weights of a layer of experts are in the order of the checkpoint, or `packed_by` says how they are
    not."""
    backend = getattr(getattr(layer.quant_method, "unquantized_backend", None), "value", None)
    return backend in ("TRITON", "BATCHED_TRITON", "CPU")


def packed_by(layer: Any) -> str | None:
    """Return for which instructions of the CPU vLLM has reordered a layer's experts (``isa``); None if it has not."""
    kernel = getattr(getattr(layer, "quant_method", None), "moe_kernel", None)
    experts = getattr(kernel, "fused_experts", None)
    return None if getattr(experts, "_use_zentorch", False) else getattr(experts, "isa", None)


def _find(
    name: str,
    shape: tuple[int, ...],
    model: Any,
    tensors: Mapping[str, torch.Tensor],
    fused: Mapping[str, list[str]],
) -> Part | None:
    module, _, attribute = name.rpartition(".")
    parent, _, own = module.rpartition(".")
    if name in tensors:
        parameter, index = name, None
    else:
        prefix = f"{parent}." if parent else ""
        targets = ((f"{prefix}{into}.{attribute}", of.index(own)) for into, of in fused.items() if own in of)
        parameter, index = next((one for one in targets if one[0] in tensors), ("", None))
        if not parameter:
            return None
    tensor, layer = tensors[parameter], model.get_submodule(parameter.rpartition(".")[0])
    sizes = list(local_shape(layer, tensor))
    dtype = getattr(layer, "params_dtype", None) or tensor.dtype  # on the CPU, vLLM may keep a bias in float32
    if not dtype.is_floating_point or dtype.itemsize < 2 or len(sizes) != len(shape):
        return None
    vocabulary = getattr(layer, "shard_indices", None)
    if vocabulary is not None:  # padded rows follow those of the vocabulary
        begin, end = int(vocabulary.org_vocab_start_index), int(vocabulary.org_vocab_end_index)
        sizes[0] = int(layer.org_vocab_size)
        box = ((begin, end), *whole(shape[1:]))
        return Part(parameter, (0,) * len(shape), box, dtype) if tuple(sizes) == shape else None
    outputs = [int(size) for size in getattr(layer, "output_partition_sizes", ())]
    offset = 0
    if index is not None:
        if len(outputs) != len(fused[parameter.split(".")[-2]]) or sum(outputs) != sizes[0]:
            return None
        offset, sizes[0] = sum(outputs[:index]), outputs[index]
    elif len(outputs) > 1:
        return None
    ranks, rank = int(getattr(layer, "tp_size", 1)), int(getattr(layer, "tp_rank", 0))
    parts = []
    for dim, (size, total) in enumerate(zip(sizes, shape, strict=True)):
        count = total // size if size else 1  # of different parts; key-value heads may be in several processes each
        if count < 1 or count * size != total or ranks % count or (count not in (1, ranks) and (dim or index is None)):
            return None
        # Ranks with the same part, such as the same key-value heads, are consecutive.
        begin = rank // (ranks // count) * size
        parts.append((begin, begin + size))
    return Part(parameter, tuple(offset * (dim == 0) for dim in range(len(shape))), tuple(parts), dtype)


def local_shape(layer: Any, tensor: torch.Tensor) -> tuple[int, ...]:
    """Return the shape of a parameter in this process, also if it is empty because vLLM has repacked it; see
    `repacked`."""
    if not repacked(layer, tensor):
        return tuple(tensor.shape)
    outputs = getattr(layer, "output_size_per_partition", layer.output_size)
    return int(outputs), int(getattr(layer, "input_size_per_partition", layer.input_size))


def repacked(layer: Any, tensor: torch.Tensor) -> bool:
    """Whether a layer has its weight in another form only, as linear layers on the CPU do."""
    return hasattr(layer, "cpu_linear") and tensor is layer.weight and not tensor.numel()


def joined(name: str, shape: tuple[int, ...], by_rank: Sequence[Sequence[tuple[Box, torch.Tensor]]]) -> torch.Tensor:
    """Join the processes' parts of a tensor; a `RolloutError` if two have different bytes for the same part."""
    import torch

    parts = [(rank, *part) for rank, of_rank in enumerate(by_rank) for part in of_rank]
    if len(parts) == 1:
        return parts[0][2]
    joined = torch.empty(shape, dtype=parts[0][2].dtype)
    first: dict[Box, tuple[int, torch.Tensor]] = {}
    for rank, box, tensor in parts:
        other, same = first.setdefault(box, (rank, tensor))
        if other == rank:
            joined[within(box, whole(shape))] = tensor
        elif not torch.equal(same.reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8)):
            raise RolloutError(f"vLLM's processes {other} and {rank} hold different bytes of {name!r}")
    return joined
