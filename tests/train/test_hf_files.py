"""The model's config, tokenizer and vocabulary size, as the configuration determines them."""

import json
import socket
from types import SimpleNamespace

import pytest
import torch
from reference import small_llama
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from workers.data.rollout_data import RolloutDataError
from workers.fsdp.fsdp_build import build
from workers.fsdp.fsdp_worker import FSDPTrainWorker
from workers.hf_export import export_hf
from workers.hf_files import (
    RANDOM,
    ModelFilesError,
    end_tokens,
    known_config,
    read_config,
    read_tokenizer,
    tokens_of,
    vocab_size_of,
)
from workers.rollout.engines.rollout_engine import SamplingParams
from workers.train.args import read_args
from workers.weight_sync.weight_plan import Shard

LLAMA = {"model_type": "llama", "hidden_size": 8, "num_attention_heads": 2, "vocab_size": 32}


@pytest.fixture
def folder(tmp_path):
    small_llama().save_pretrained(tmp_path)
    return tmp_path


def test_config_from_a_folder_and_from_a_dict(folder):
    config = read_config(read_args({"hf_checkpoint": str(folder), "model_name": "llama"}))
    assert (config.model_type, config.vocab_size) == ("llama", 32)
    config = read_config(read_args({"hf_config": LLAMA}))
    assert (config.model_type, config.hidden_size) == ("llama", 8)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"hf_config": {**LLAMA, "num_hidden_layer": 3}},
            r"'llama' config has no 'num_hidden_layer'; did you mean 'num_h",
        ),
        ({}, r"args names no model: set hf_checkpoint \(a folder or hub name\) or hf_config"),
        ({"hf_config": LLAMA, "model_name": "qwen2"}, "model_name='qwen2', but the model's type is 'llama'"),
    ],
)
def test_invalid_model_config_is_an_error(given, message):
    with pytest.raises(ModelFilesError, match=message):
        read_config(read_args(given))


def test_tokenizer_that_cannot_be_read_and_does_not_say_why_is_none(folder, monkeypatch):
    def fails(*args, **kwargs):
        raise ValueError

    (folder / "tokenizer.json").write_text("{}")
    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", fails)
    assert read_tokenizer(read_args({"hf_checkpoint": str(folder)})) is None


def test_vocabulary_size_comes_from_the_tokenizer_unless_set(folder):
    args = read_args({"hf_checkpoint": str(folder)})
    config = read_config(args)
    assert read_tokenizer(args) is None
    assert vocab_size_of(args, config, None) == 32
    words = {"<unk>": 0, **{f"word{number}": number for number in range(1, 20)}}
    PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel(words, "<unk>")), unk_token="<unk>").save_pretrained(
        folder
    )
    tokenizer = read_tokenizer(args)
    assert tokenizer("word3")["input_ids"] == [3]
    assert vocab_size_of(args, config, tokenizer) == 20
    assert vocab_size_of(read_args({"vocab_size": 7}), config, tokenizer) == 7
    with pytest.raises(ModelFilesError, match="vocab_size is 33, but the model has only 32 tokens"):
        vocab_size_of(read_args({"vocab_size": 33}), config, tokenizer)


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A cache of the hub with the config of "me/tiny"; whoever connects to another host fails the test."""
    from huggingface_hub import constants

    snapshot = tmp_path / "models--me--tiny" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text(json.dumps(LLAMA))
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs" / "main").write_text("abc")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    asked = []
    monkeypatch.setattr(socket, "getaddrinfo", lambda host, *rest, **more: asked.append(host) or [])
    yield
    assert asked == []


@pytest.mark.parametrize(
    ("name", "size"), [("me/tiny", 32), ("me/not-downloaded", None), ("/no/such/folder", None), (None, None)]
)
def test_driver_knows_the_vocabulary_of_a_hub_model_in_the_cache(hub, name, size):
    config = known_config(read_args({"hf_checkpoint": name}))
    assert (config and tokens_of(config)) == size


def test_token_ids_beyond_the_vocabulary_of_a_hub_model_are_refused_on_the_driver(hub):
    args = read_args({"hf_checkpoint": "me/tiny", "advantage_estimator": "reinforce_plus_plus"})
    ones = torch.ones(2, 3, dtype=torch.int64)
    mask = torch.tensor([[0, 1, 1]] * 2)
    rows = {"input_ids": ones, "attention_mask": ones, "loss_mask": mask, "rewards": torch.ones(2)}
    FSDPTrainWorker.check_rows(args, rows, "actor", {"old_log_probs"})
    with pytest.raises(RolloutDataError, match="input_ids has token ids from 1 to 32, but vocab_size is 32"):
        FSDPTrainWorker.check_rows(args, {**rows, "input_ids": ones * 32 * mask + ones * (1 - mask)}, "actor", set())


def test_hub_model_of_another_type_than_model_name_is_refused(hub):
    with pytest.raises(ModelFilesError, match="model_name='qwen2', but the model's type is 'llama'"):
        known_config(read_args({"hf_checkpoint": "me/tiny", "model_name": "qwen2"}))


def test_multimodal_model_uses_the_tokens_of_its_text_config():
    from transformers import Gemma3Config

    assert tokens_of(Gemma3Config(text_config={"vocab_size": 77})) == 77


def test_end_of_sequence_tokens(tmp_path):
    from transformers import GenerationConfig, LlamaConfig

    assert end_tokens(read_args({"hf_config": {"model_type": "llama"}})) == []
    LlamaConfig(eos_token_id=5).save_pretrained(tmp_path)
    args = read_args({"hf_checkpoint": str(tmp_path)})
    assert end_tokens(args) == [5]
    GenerationConfig(temperature=0.6, do_sample=True).save_pretrained(tmp_path)  # names none
    assert end_tokens(args) == [5]
    GenerationConfig(eos_token_id=[6, 7]).save_pretrained(tmp_path)
    assert end_tokens(args) == [6, 7]
    assert SamplingParams.from_args(args).stop_token_ids == (6, 7)
    assert SamplingParams.from_args({"hf_checkpoint": str(tmp_path), "rollout_stop_token_ids": []}).stop_token_ids == ()
    assert SamplingParams.from_args({"rollout_max_response_len": 3, "rollout_stop_token_ids": [1]}) == SamplingParams(
        3, stop_token_ids=(1,)
    )


def test_random_weights_of_a_trainer_are_drawn_by_one_thread(monkeypatch):
    """In a script with local groups, an engine may draw its own at the same time, from the same generator."""
    alone, draw = [], AutoModelForCausalLM.from_config
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)
    monkeypatch.setattr(
        AutoModelForCausalLM,
        "from_config",
        lambda config, **options: alone.append(RANDOM.locked()) or draw(config, **options),
    )
    build(small_llama().config, "actor", seed=1, folder=None, trust_remote_code=False)
    assert alone == [True]


def test_quantized_weights_are_read_as_plain_ones_or_refused(tmp_path, monkeypatch):
    """Otherwise rank 0 alone would have them, on a device that computes with them."""
    config, made, asked = small_llama().config, small_llama(), []
    config.save_pretrained(tmp_path)
    config.quantization_config = {"quant_method": "fp8"}

    def read(folder, config, **options):
        asked.append(config.quantization_config)
        return made, {"missing_keys": []}

    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", read)
    build(config, "actor", seed=1, folder=str(tmp_path), trust_remote_code=False)
    assert asked == [{"quant_method": "fp8", "dequantize": True}]
    made.config.quantization_config = asked[0]  # of a method that transformers does not dequantize
    with pytest.raises(ModelFilesError, match="has quantized weights"):
        build(config, "actor", seed=1, folder=str(tmp_path), trust_remote_code=False)


def test_export_has_the_code_of_a_model_with_code_of_its_own_and_is_not_quantized(tmp_path):
    """Its config names that code, so it cannot be loaded without; nor could it if the config said how the files that
    training has read were quantized."""
    model, source, made = small_llama(), tmp_path / "source", tmp_path / "made"
    source.mkdir()
    (source / "modeling_own.py").write_text("code")
    model.config.name_or_path = str(source)
    model.config.auto_map = {"AutoModelForCausalLM": "modeling_own.OwnForCausalLM"}
    model.config.quantization_config = {"quant_method": "fp8"}
    shards = [Shard.whole(*pair) for pair in model.state_dict().items()]
    export_hf(
        SimpleNamespace(hf_shards=lambda: shards, adapter_config=None, hf_config=model.config, role="actor"), made
    )
    written = json.loads((made / "config.json").read_text())
    assert written["auto_map"] == model.config.auto_map and "quantization_config" not in written
    assert (made / "modeling_own.py").read_text() == "code"
