"""Which part of each tensor of a Hugging Face model a process of vLLM has, and where. Runs without vLLM."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from workers.rollout.rollout_errors import RolloutError
from workers.weight_sync.weight_plan import whole, within

if TYPE_CHECKING:
    import torch

    from workers.weight_sync.weight_plan import Box


class Part(NamedTuple):
    """What a process has of one tensor.

    Attributes:
        parameter: name of the parameter in vLLM's model.
        begin: its first row in the parameter. It has as many rows as ``box``.
        box: the part of the whole tensor.
        dtype: in which vLLM was given the parameter.
    """

    parameter: str
    begin: int
    box: Box
    dtype: torch.dtype


def find_parts(model: Any, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Part] | None:
    """Find the tensors in vLLM's model.

    The model's ``packed_modules_mapping`` says which modules vLLM has fused, and the attributes of its layers what the
    process has of them. A tensor that is fused in the checkpoint too is not found in vLLM's fused layer: models differ
    in how they order its rows.

    Args:
        model: the model of this process.
        shapes: of all tensors, whole, by the names of the Hugging Face model.

    Returns:
        The parts by name; None if one of the tensors is not there, or not in a form that is understood.
    """
    tensors: dict[str, torch.Tensor] = model.state_dict(keep_vars=True)
    fused = getattr(model, "packed_modules_mapping", {})
    found = {}
    for name, shape in shapes.items():
        part = _find(name, shape, model, tensors, fused)
        if part is None:
            return None
        found[name] = part
    return found


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
        return Part(parameter, 0, ((begin, end), *whole(shape[1:])), dtype) if tuple(sizes) == shape else None
    outputs = [int(size) for size in getattr(layer, "output_partition_sizes", ())]
    offset = 0
    if index is not None:
        if len(outputs) != len(fused[parameter.split(".")[-2]]) or sum(outputs) != sizes[0]:
            return None
        offset, sizes[0] = sum(outputs[:index]), outputs[index]
    elif len(outputs) > 1:
        return None
    ranks, rank = int(getattr(layer, "tp_size", 1)), int(getattr(layer, "tp_rank", 0))
    box = []
    for dim, (size, total) in enumerate(zip(sizes, shape, strict=True)):
        count = total // size if size else 1  # of different parts; key-value heads may be in several processes each
        if count < 1 or count * size != total or ranks % count or (count not in (1, ranks) and (dim or index is None)):
            return None
        begin = rank // (ranks // count) * size
        box.append((begin, begin + size))
    return Part(parameter, offset, tuple(box), dtype)


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


def joined(name: str, shape: tuple[int, ...], parts: Sequence[tuple[Box, torch.Tensor]]) -> torch.Tensor:
    """Join the processes' parts of a tensor.

    Raises:
        RolloutError: two processes have different bytes for the same part.
    """
    import torch

    if len(parts) == 1:
        return parts[0][1]
    joined = torch.empty(shape, dtype=parts[0][1].dtype)
    first: dict[Box, tuple[int, torch.Tensor]] = {}
    for rank, (box, tensor) in enumerate(parts):
        other, same = first.setdefault(box, (rank, tensor))
        if other == rank:
            joined[within(box, whole(shape))] = tensor
        elif not torch.equal(same.reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8)):
            raise RolloutError(f"vLLM's processes {other} and {rank} hold different bytes of {name!r}")
    return joined
