"""What `VLLMEngine` adds to vLLM's own worker processes. vLLM imports this module by name in each of them.

With ``tensor_parallel_size=1`` the only worker is the process of the engine itself.
"""

from __future__ import annotations

import functools
import logging
import operator
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from vllm.config import set_current_vllm_config
from vllm.v1.sample.logits_processor import LogitsProcessor

from workers.rollout.engines.vllm_layout import Part, find_parts, local_shape, packed_by, repacked, vllm_name
from workers.weight_sync.expert_names import one_by_one, stack_of
from workers.weight_sync.weight_plan import whole, within

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from workers.weight_sync.weight_plan import Box

# It warns at every update of layers that have no tensors, such as rotary embeddings. `VLLMEngine` itself checks that
# all tensors have come.
logging.getLogger("vllm.model_executor.model_loader.reload.layerwise").setLevel(logging.ERROR)


def missing_names(of: Any, called: str, names: Sequence[str]) -> list[str]:
    """Return those of the dotted names that an object does not have, in full."""
    found = []
    for name in names:
        try:
            operator.attrgetter(name)(of)
        except AttributeError:
            found.append(f"{called}.{name}")
    return found


class LayerwiseReload:
    """Methods for vLLM's workers (``worker_extension_cls``), to load new weights in any number of calls.

    vLLM merges tensors (q, k and v into one, for example) and may repack them. It therefore keeps the tensors of a
    layer until the last one has come, and then replaces the layer's weights in place.

    The methods ``raw_*`` pass on what vLLM has made of the weights. Each worker has the tensors of its own shard, with
    its rank before their names. The methods ``held_*`` return the same weights under the names of a checkpoint.
    """

    vllm_config: VllmConfig
    model_config: Any
    _parts: Mapping[str, tuple[Part, ...]]
    """Where the tensors of a checkpoint are; empty if that is not known."""
    _kernels: list[tuple[Any, Any]]
    """Of layers of experts that are being reloaded: vLLM's object that repacks their weights, and its kernel."""
    _negative_zeros: dict[tuple[str, int], torch.Tensor]
    """Name and first row of a part of a repacked weight -> where it has -0.0, of those that have any. Products with the
    weight do not tell it from 0.0, and a bitwise comparison would find a difference."""

    def missing(self) -> list[str]:
        """Return which of vLLM's private names are not there."""
        from vllm.model_executor.model_loader import reload

        functions = ("initialize_layerwise_reload", "finalize_layerwise_reload")
        own = ("get_model", "model_config", "vllm_config")
        return [*missing_names(reload, reload.__name__, functions), *missing_names(self, "Worker", own)]

    def reload_begin(self) -> None:
        """Replace the parameters of all layers by empty ones that collect tensors."""
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        model = self.get_model()  # type: ignore[attr-defined]
        # vLLM 0.32 repacks experts for the CPU only if they have no kernel yet. Otherwise it computes with weights that
        # are not in the order that the kernel expects.
        self._kernels = [
            (layer.quant_method, layer.quant_method.moe_kernel) for layer in model.modules() if packed_by(layer)
        ]
        for method, _ in self._kernels:
            method.moe_kernel = None
        # vLLM's layers read the configuration from a global, which vLLM sets only while it loads a model itself.
        with set_current_vllm_config(self.vllm_config):
            initialize_layerwise_reload(model)

    def reload_tensors(self, weights: Sequence[tuple[str, torch.Tensor]], keep: bool) -> None:
        """Load some of the weights.

        Args:
            weights: names as in a checkpoint, and whole tensors.
            keep: whether vLLM may keep the tensors. If not, they are cloned.
        """
        # Keep the signs before vLLM repacks the tensors: the signs of zeros cannot be read back afterwards.
        for name, tensor in weights:
            for part in self._parts.get(name, ()):
                rows = tensor[within(part.box, whole(tensor.shape))]
                self._keep_signs(part.parameter, part.begin[0] if part.begin else 0, rows, part.dtype)
        with set_current_vllm_config(self.vllm_config), torch.no_grad():
            model = self.get_model()  # type: ignore[attr-defined]
            model.load_weights(self._as_in_checkpoints(weights, keep))

    def _as_in_checkpoints(
        self, weights: Sequence[tuple[str, torch.Tensor]], keep: bool
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the tensors under the names that checkpoints have, which are those that all models of vLLM know."""
        state = self._state()
        for name, given in weights:
            tensor = given if keep else given.clone()
            own = name if name in state or not self._parts else vllm_name(name, state)
            if self._parts and stack_of(own) is not None:
                yield from one_by_one(own, tensor)
            else:
                yield own, tensor

    def reload_finish(self) -> None:
        """Put the weights of all layers in force. A layer of which no tensor has come keeps its weights."""
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        with set_current_vllm_config(self.vllm_config), torch.no_grad():
            model = self.get_model()  # type: ignore[attr-defined]
            finalize_layerwise_reload(model, self.model_config)
            for method, kernel in self._kernels:
                if method.moe_kernel is None:  # no tensor has come for it
                    method.moe_kernel = kernel
            self._kernels = []
            # On the CPU a linear layer has a second, repacked copy of its weights. The reload renews that of the layer
            # that the tensors came for, and not that of an output layer tied to it.
            sharing: dict[int, list[Any]] = {}
            for layer in model.modules():
                sharing.setdefault(id(layer._parameters.get("weight")), []).append(layer)
            sharing.pop(id(None), None)
            for layers in sharing.values():
                for layer in layers if len(layers) > 1 else ():
                    if hasattr(layer, "cpu_linear"):
                        layer.quant_method.process_weights_after_loading(layer)

    def held_dtypes(self, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, torch.dtype] | None:
        """Find the tensors of a checkpoint in the model, for `held_read`.

        Args:
            shapes: of all whole tensors, by name.

        Returns:
            Their dtypes in vLLM by name; None if they cannot be read back, because the weights are quantized, or in
            a form that `find_parts` does not understand.
        """
        quantized = self.vllm_config.quant_config is not None
        found = None if quantized else find_parts(self.get_model(), shapes)  # type: ignore[attr-defined]
        self._parts, self._negative_zeros = found or {}, {}
        return None if found is None else {name: part.dtype for name, (part, *_) in found.items()}

    def held_read(self, names: Sequence[str], copy: bool) -> list[list[tuple[Box, torch.Tensor]]]:
        """Return this worker's parts of each of some tensors, and which parts they are.

        Args:
            names: keys of `held_dtypes`.
            copy: see `raw_read`.
        """
        state, parts = self._state(), [self._parts[name] for name in names]
        # Once each: what was fused is mostly read together, and turning a weight back takes time.
        parameters = dict.fromkeys(part.parameter for of_name in parts for part in of_name)
        tensors = {name: self._read(name, state[name]) for name in parameters}

        def read(part: Part) -> torch.Tensor:
            begin = zip(part.begin, part.box, strict=True)
            index = tuple(slice(first, first + end - start) for first, (start, end) in begin)
            tensor = tensors[part.parameter][index].to(part.dtype)
            return tensor.to("cpu", copy=True) if copy else tensor  # a view would send all of it

        return [[(part.box, read(part)) for part in of_name] for of_name in parts]

    def raw_weights(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Return name -> (shape, dtype) of this worker's weights. Tied ones count once."""
        found: dict[int, tuple[str, tuple[tuple[int, ...], torch.dtype]]] = {}
        for name, tensor in self._state().items():
            shape = local_shape(self._layer(name), tensor)
            found.setdefault(id(tensor), (f"{self._rank}:{name}", (shape, tensor.dtype)))
        return dict(found.values())

    def raw_read(self, names: Sequence[str], copy: bool) -> list[tuple[str, torch.Tensor]]:
        """Return this worker's among some weights.

        Args:
            names: as in `raw_weights`, of all workers.
            copy: whether to return copies in host memory, for another process.
        """
        state, found = self._state(), []
        for name in names:
            rank, _, own = name.partition(":")
            if int(rank) != self._rank:
                continue
            tensor = self._read(own, state[own])
            found.append((name, tensor.cpu() if copy else tensor))
        return found

    def raw_load(self, weights: Sequence[tuple[str, torch.Tensor]]) -> None:
        """Load this worker's among some weights. `raw_finish` follows before they are used."""
        state = self._state()
        with set_current_vllm_config(self.vllm_config), torch.no_grad():
            for name, tensor in weights:
                rank, _, own = name.partition(":")
                if int(rank) != self._rank:
                    continue
                # The tensor replaces the whole parameter, so drop the signs of all its fused parts.
                for key in [key for key in self._negative_zeros if key[0] == own]:
                    del self._negative_zeros[key]
                self._keep_signs(own, 0, tensor, tensor.dtype)
                layer = self._layer(own)
                if repacked(layer, state[own]):
                    # vLLM has emptied this parameter, so there is nothing to copy into.
                    layer.weight = torch.nn.Parameter(tensor.clone(), requires_grad=False)
                elif (isa := packed_by(layer)) and tensor.ndim == 3:
                    state[own].copy_(_pack(tensor, isa))
                else:
                    state[own].copy_(tensor)
                if hasattr(layer, "cpu_linear") and own.endswith(".weight"):
                    layer.quant_method.process_weights_after_loading(layer)

    def raw_finish(self) -> None:
        """Compute anew what attention layers and tied layers derive from the weights: a reload of no tensor does."""
        self.reload_begin()
        self.reload_finish()

    @property
    def _rank(self) -> int:
        from vllm.distributed import get_tensor_model_parallel_rank

        return int(get_tensor_model_parallel_rank())

    def _state(self) -> dict[str, torch.Tensor]:
        state: dict[str, torch.Tensor] = self.get_model().state_dict(keep_vars=True)  # type: ignore[attr-defined]
        return state

    def _layer(self, name: str) -> Any:
        return self.get_model().get_submodule(name.rpartition(".")[0])  # type: ignore[attr-defined]

    def _read(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """A parameter, or a copy if it has to be turned back. Of a weight that was repacked, only products with it can
        be computed. Those with 1 are exact, except that -0.0 becomes 0.0."""
        layer = self._layer(name)
        if (isa := packed_by(layer)) and tensor.ndim == 3:
            unpacked = torch.empty_like(tensor).flatten(1)
            unpacked[:, _packed_order(tuple(tensor.shape[1:]), tensor.dtype, isa)] = tensor.detach().flatten(1)
            return unpacked.view_as(tensor)
        if not repacked(layer, tensor):
            return tensor.detach()
        identity = torch.eye(local_shape(layer, tensor)[1], dtype=tensor.dtype)
        product: torch.Tensor = layer.cpu_linear(identity, layer.weight, None).t()
        for (of, begin), zeros in self._negative_zeros.items():
            if of == name:
                rows = product.narrow(0, begin, len(zeros))
                rows[zeros & (rows == 0)] = -0.0
        return product

    def _keep_signs(self, name: str, begin: int, rows: torch.Tensor, dtype: torch.dtype) -> None:
        """Remember where new rows of a parameter have -0.0, if the layer repacks it."""
        if not hasattr(self._layer(name), "cpu_linear"):
            return
        rows = rows.to(dtype)
        zeros = (rows == 0) & rows.signbit()
        self._negative_zeros.pop((name, begin), None)
        if zeros.ndim == 2 and zeros.any():
            self._negative_zeros[name, begin] = zeros


def _pack(experts: torch.Tensor, isa: str) -> torch.Tensor:
    """Bring the weights of a layer of experts, (experts, rows, columns), into the order of a kernel for the CPU."""
    from vllm._custom_ops import cpu_prepack_moe_weight

    packed: torch.Tensor = cpu_prepack_moe_weight(experts.contiguous(), isa)
    return packed


@functools.lru_cache(maxsize=8)
def _packed_order(shape: tuple[int, int], dtype: torch.dtype, isa: str) -> torch.Tensor:
    """Return where each element of a packed expert was before, (rows * columns,) int64: what packing does to the
    positions themselves, in digits that all dtypes represent."""
    count, digit = shape[0] * shape[1], 7
    positions, order = torch.arange(count), torch.zeros(count, dtype=torch.int64)
    for shift in range(0, count.bit_length(), digit):
        digits = (positions >> shift) & ((1 << digit) - 1)
        order += _pack(digits.to(dtype).view(1, *shape), isa).flatten().long() << shift
    return order


class LogProbs(LogitsProcessor):  # type: ignore[misc, unused-ignore]  # Any where vLLM is not installed
    """Turns logits into log-probabilities, after the temperature and before top-k and top-p.

    Subtracting a constant from a row changes neither its maximum nor its softmax, so vLLM samples the same tokens.
    Top-k and top-p set other tokens to -inf and leave the sampled one alone, so that with
    ``logprobs_mode="processed_logits"`` vLLM reports the log-probability of the untruncated distribution. Its other
    modes report it before the temperature, or after top-k and top-p.
    """

    def __init__(self, vllm_config: VllmConfig, device: torch.device, is_pin_memory: bool) -> None:
        pass

    def is_argmax_invariant(self) -> bool:
        """True: vLLM calls it after the temperature, and not for requests that it samples greedily."""
        return True

    def update_state(self, batch_update: Any) -> None:
        """Nothing is kept per request."""

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Normalize the logits, (rows, vocabulary) float32, in place."""
        return logits.sub_(logits.logsumexp(dim=-1, keepdim=True))
