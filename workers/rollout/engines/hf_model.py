"""Models of transformers, for engines: their configs, and the names and shapes of their weights."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from workers.extras import require
from workers.hf_files import config_from
from workers.rollout.rollout_errors import WeightsError

if TYPE_CHECKING:
    import torch


def read_config(name: str, model: Any, trust_remote_code: bool) -> Any:
    """Return transformers' config object.

    Args:
        name: of the argument, for the error.
        model: such an object, the dict of one with ``model_type``, a folder, or a name on the hub.
        trust_remote_code: whether code that comes with the model may run.

    Raises:
        ValueError: ``model`` is none of these.
        OSError: transformers did not find it.
    """
    transformers = require("transformers", extra="hf")
    transformers.utils.logging.disable_progress_bar()  # every rank would show its own
    if isinstance(model, (str, Path)):
        _check_folder(name, model)
        return transformers.AutoConfig.from_pretrained(str(model), trust_remote_code=trust_remote_code)
    if isinstance(model, Mapping):
        return config_from(model)
    if not isinstance(model, transformers.PretrainedConfig):
        raise ValueError(f"{name}={model!r}; expected a Hugging Face config, a dict of one, a folder or a model name")
    return model


def _check_folder(name: str, model: str | Path) -> None:
    """Refuse a path to a folder that does not exist, which transformers would take for a malformed name on the hub."""
    is_path = isinstance(model, Path) or model.startswith(("/", "./", "../", "~"))
    if is_path and not Path(model).is_dir():
        raise FileNotFoundError(f"{name}={str(model)!r}: there is no such folder on {socket.gethostname()}; pass one")


def make_model(model: Any, random_weights: bool, seed: int, trust_remote_code: bool) -> Any:
    """Return a causal language model of transformers, on the CPU.

    Args:
        model, trust_remote_code: see `read_config`.
        random_weights: read only the config. It is also all that there is if ``model`` is neither a folder nor a name.
        seed: of random weights.
    """
    import torch

    auto = require("transformers", extra="hf").AutoModelForCausalLM
    if isinstance(model, (str, Path)) and not random_weights:
        _check_folder("HFEngine: model", model)
        return auto.from_pretrained(str(model), trust_remote_code=trust_remote_code)
    config = read_config("HFEngine: model", model, trust_remote_code)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        # As the trainer does: a config may name another dtype, in which random numbers are others.
        return auto.from_config(config, trust_remote_code=trust_remote_code, dtype=torch.float32)


def meta_model(config: Any, trust_remote_code: bool) -> Any:
    """Return the model of a config object, without memory for its weights."""
    import torch

    auto = require("transformers", extra="hf").AutoModelForCausalLM
    with torch.device("meta"):
        return auto.from_config(config, trust_remote_code=trust_remote_code)


def shapes_of(tensors: Mapping[str, torch.Tensor]) -> dict[str, tuple[int, ...]]:
    """Return the names and shapes of a model's tensors, of ``state_dict(keep_vars=True)``; see
    `RolloutEngine.weight_shapes`."""
    first: dict[int, tuple[str, tuple[int, ...]]] = {}
    for name, tensor in tensors.items():
        first.setdefault(id(tensor), (name, tuple(tensor.shape)))
    return dict(first.values())


def check_tensor(name: str, tensor: torch.Tensor, shapes: Mapping[str, tuple[int, ...]], model: str) -> None:
    """Check a tensor of an update.

    Args:
        name: of the tensor.
        tensor: the tensor.
        shapes: of all tensors that the model has.
        model: what to call it.

    Raises:
        WeightsError: the model has none of this name, or of another shape.
    """
    shape = shapes.get(name)
    if shape is None:
        raise WeightsError(
            f"the weight update has a tensor {name!r}, but {model} has none of this name; use the names of its "
            f"state_dict() in transformers, such as {next(iter(shapes))!r}"
        )
    if shape != tuple(tensor.shape):
        raise WeightsError(
            f"the weight update has {name!r} with shape {tuple(tensor.shape)}, but the model's has shape {shape}"
        )
