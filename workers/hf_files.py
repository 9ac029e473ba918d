"""Hugging Face models: their config, tokenizer and stop tokens, and the models of transformers themselves."""

from __future__ import annotations

import contextlib
import difflib
import logging
import socket
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from single_controller import SingleControllerError
from workers.extras import require

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

RANDOM = threading.Lock()
"""Protects torch's global generator while a model draws its random weights: other threads may do so as well."""

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "spiece.model",
    "vocab.json",
    "vocab.txt",
)


class ModelFilesError(SingleControllerError, ValueError):
    """The configuration names no model, or its settings contradict the model."""


def refuse_no_model(args: Any) -> None:
    """Raise a `ModelFilesError` if ``args`` names no model."""
    if args.hf_checkpoint is None and args.hf_config is None:
        raise ModelFilesError("args names no model: set hf_checkpoint (a folder or hub name) or hf_config (a dict)")


def read_config(args: Any, local_files_only: bool = False) -> Any:
    """Return the Hugging Face config of the model that ``args`` names.

    Args:
        args: the configuration.
        local_files_only: whether to look for a name on the hub in this host's cache alone.

    Raises:
        ModelFilesError: no model is named, or its type is not ``model_name``.
        ImportError: transformers is not installed.
    """
    refuse_no_model(args)
    model = args.hf_checkpoint
    if model is None:
        from omegaconf import OmegaConf

        model = OmegaConf.to_container(args.hf_config)
    config = config_of("hf_checkpoint", model, args.trust_remote_code, local_files_only)
    if args.model_name is not None and args.model_name != config.model_type:
        raise ModelFilesError(f"args.model_name={args.model_name!r}, but the model's type is {config.model_type!r}")
    return config


def check_ref(args: Any) -> None:
    """Check that the weights of ``args.ref_load`` are of the model that ``args`` names. Those of a deeper model would
    be loaded without its last layers, and other positions or heads would not show in any shape.

    Raises:
        ModelFilesError: they are of another model.
    """
    both = read_config(args), config_of("ref_load", args.ref_load, args.trust_remote_code)
    ours, theirs = (of.get_text_config() for of in both)
    for name in ("model_type", "num_hidden_layers", "num_attention_heads", "rope_parameters"):
        expected, found = (getattr(of, name, None) for of in (ours, theirs))
        if found != expected:
            raise ModelFilesError(f"{args.ref_load!r} has another model: its {name} is {found!r}, not {expected!r}")


def config_from(fields: Mapping[str, Any]) -> Any:
    """Build a Hugging Face config from its fields, which include ``model_type``.

    Raises:
        ModelFilesError: there is no ``model_type``, or a name looks like a misspelt field, which transformers would
            store and never read.
    """
    if "model_type" not in fields:
        raise ModelFilesError("the dict of a config has no 'model_type'; add it, such as 'llama'")
    auto = require("transformers", extra="hf").AutoConfig
    config = auto.for_model(**fields)
    plain = auto.for_model(fields["model_type"])
    known = {*plain.to_dict(), *type(plain).attribute_map, *vars(plain)}
    for name in fields.keys() - known:
        if close := difflib.get_close_matches(name, known, n=1, cutoff=0.85):
            raise ModelFilesError(f"a {fields['model_type']!r} config has no {name!r}; did you mean {close[0]!r}?")
    return config


def read_tokenizer(args: Any) -> Any:
    """Return the tokenizer of ``args.hf_checkpoint``, or None if it has none."""
    folder = args.hf_checkpoint
    if folder is None or (
        Path(folder).is_dir() and not any((Path(folder) / name).exists() for name in TOKENIZER_FILES)
    ):
        return None  # transformers would create an empty tokenizer from an empty folder
    auto = require("transformers", extra="hf").AutoTokenizer
    try:
        return auto.from_pretrained(args.hf_checkpoint, trust_remote_code=args.trust_remote_code)
    except (OSError, ValueError) as error:
        logger.info("the tokenizer of %s cannot be read: %s", args.hf_checkpoint, str(error).partition("\n")[0])
        return None


def vocab_size_of(args: Any, config: Any, tokenizer: Any) -> int:
    """Return the vocabulary size: ``args.vocab_size``, else the tokenizer's length, else the config's value.

    Raises:
        ModelFilesError: it exceeds the model's.
    """
    if args.vocab_size is not None:
        size = int(args.vocab_size)
    else:
        size = len(tokenizer) if tokenizer is not None else tokens_of(config)
    if size > tokens_of(config):
        raise ModelFilesError(f"vocab_size is {size}, but the model has only {tokens_of(config)} tokens")
    return size


def tokens_of(config: Any) -> int:
    """Return the vocabulary size of a Hugging Face config; for a multimodal model, that of its text model."""
    return int(config.get_text_config().vocab_size)


def known_config(args: Any) -> Any:
    """Return the config of the model that ``args`` name, as `read_config` does, from files on this host: a folder, or
    the hub's cache. None if there are none, or no transformers; nothing is downloaded."""
    model = args.hf_checkpoint
    is_here = args.hf_config is not None or (model is not None and Path(model, "config.json").is_file())
    try:
        if not is_here and not _in_hub_cache(model):
            return None
        return read_config(args, local_files_only=True)
    except ImportError:  # only the ranks need transformers
        return None
    except (OSError, ValueError) as error:
        if is_here or isinstance(error, ModelFilesError):
            raise
        return None  # the ranks download what is missing, or say what is wrong


def _in_hub_cache(model: str | None) -> bool:
    """Whether the config of a model on the hub was downloaded. transformers' own ``local_files_only`` would still ask
    the hub for other things if it was not."""
    if model is None or Path(model).is_dir():
        return False
    from huggingface_hub import try_to_load_from_cache

    return isinstance(try_to_load_from_cache(model, "config.json"), str)


def end_tokens(args: Any) -> list[int]:
    """Return the stop tokens of the model in ``args.hf_checkpoint``, from its ``generation_config`` or, if that names
    none, its config. Without an hf_checkpoint there are none."""
    if args.hf_checkpoint is None:
        return []
    transformers = require("transformers", extra="hf")
    token_ids = None
    with contextlib.suppress(OSError):  # there is no generation_config
        token_ids = transformers.GenerationConfig.from_pretrained(args.hf_checkpoint).eos_token_id
    if token_ids is None:
        token_ids = getattr(read_config(args).get_text_config(), "eos_token_id", None)
    return [] if token_ids is None else [token_ids] if isinstance(token_ids, int) else list(token_ids)


def config_of(name: str, model: Any, trust_remote_code: bool, local_files_only: bool = False) -> Any:
    """Return transformers' config object.

    Args:
        name: of the argument, for the error.
        model: such an object, the dict of one with ``model_type``, a folder, or a name on the hub.
        trust_remote_code: whether code that comes with the model may run.
        local_files_only: whether a name is looked for in this host's cache alone.

    Raises:
        ValueError: ``model`` is none of these.
        OSError: transformers did not find it.
    """
    transformers = require("transformers", extra="hf")
    transformers.utils.logging.disable_progress_bar()  # every rank would show its own
    if isinstance(model, (str, Path)):
        _check_folder(name, model)
        return transformers.AutoConfig.from_pretrained(
            str(model), trust_remote_code=trust_remote_code, local_files_only=local_files_only
        )
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
        model, trust_remote_code: see `config_of`.
        random_weights: read only the config. It is also all that there is if ``model`` is neither a folder nor a name.
        seed: of random weights.
    """
    import torch

    auto = require("transformers", extra="hf").AutoModelForCausalLM
    # As the trainer does: in another dtype, which the config may name, random numbers and buffers are others.
    options: dict[str, Any] = {"trust_remote_code": trust_remote_code, "dtype": torch.float32}
    if isinstance(model, (str, Path)) and not random_weights:
        _check_folder("HFEngine: model", model)
        return auto.from_pretrained(str(model), **options)
    config = config_of("HFEngine: model", model, trust_remote_code)
    with RANDOM, torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return auto.from_config(config, **options)


def compute_output_in_float32(model: Any) -> None:
    """Make a causal language model compute its output layer in float32, whatever its dtype, from the same weights: the
    logits are not rounded to bfloat16 (MiniMax 2025, arXiv 2506.13585; Khatri et al. 2025, arXiv 2510.13786). The
    weights stay in the dtype of the computation, so trainers and engines have the same.

    Raises:
        ValueError: the output layer is no plain linear layer, for example because it has an adapter.
    """
    import torch

    head = model.get_output_embeddings()
    if not isinstance(head, torch.nn.Linear):
        raise ValueError(
            f"fp32_lm_head=True: the output layer of {type(model).__name__} is a {type(head).__name__}; expected a "
            "torch.nn.Linear, without a LoRA adapter. Leave out fp32_lm_head"
        )
    _compute_in_float32(head)


def compute_values_in_float32(model: Any) -> None:
    """Make a model for token classification compute its head, the linear layer next to its base model, in float32. In
    bfloat16, a critic's values would be rounded to three digits. A model with another head is not changed."""
    import torch

    for layer in model.children():
        if isinstance(layer, torch.nn.Linear):
            _compute_in_float32(layer)


def _compute_in_float32(layer: Any) -> None:
    import torch.nn.functional as F

    def forward(hidden: torch.Tensor) -> torch.Tensor:
        bias = None if layer.bias is None else layer.bias.float()
        return F.linear(hidden.float(), layer.weight.float(), bias)

    layer.forward = forward


def meta_model(config: Any, trust_remote_code: bool) -> Any:
    """Return the model of a config object, without memory for its weights."""
    import torch

    auto = require("transformers", extra="hf").AutoModelForCausalLM
    with torch.device("meta"):
        return auto.from_config(config, trust_remote_code=trust_remote_code)


def checkpoint_shapes(config: Any, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """Return the names and shapes that checkpoints of a config's model have for its tensors: models of transformers 5
    have all experts of a layer in one, and their checkpoints three for each."""
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping

    from workers.weight_sync.expert_names import as_in_checkpoints

    rules = get_checkpoint_conversion_mapping(config.get_text_config().model_type) or []
    sources = [source for rule in rules for source in rule.source_patterns]
    if not any(".experts.*." in source for source in sources):
        return dict(shapes)
    renamed = [source for source in sources if ".experts.*." not in source and "bias" not in source]
    if renamed not in ([], [".block_sparse_moe."]):  # other modules have other names too
        return dict(shapes)
    return as_in_checkpoints(shapes, "block_sparse_moe" if renamed else "mlp")


def shapes_of(tensors: Mapping[str, torch.Tensor]) -> dict[str, tuple[int, ...]]:
    """Return the names and shapes of a model's tensors, of ``state_dict(keep_vars=True)``; see
    `RolloutEngine.weight_shapes`."""
    first: dict[int, tuple[str, tuple[int, ...]]] = {}
    for name, tensor in tensors.items():
        first.setdefault(id(tensor), (name, tuple(tensor.shape)))
    return dict(first.values())
