"""The model's config, tokenizer and vocabulary size, as the configuration determines them."""

import pytest
from reference import small_llama
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from workers.hf_files import (
    ModelFilesError,
    end_tokens,
    read_config,
    read_tokenizer,
    tokens_of,
    vocab_size_of,
)
from workers.rollout.engines.rollout_engine import SamplingParams
from workers.train.args import read_args

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


def test_multimodal_model_uses_the_tokens_of_its_text_config():
    from transformers import Gemma3Config

    assert tokens_of(Gemma3Config(text_config={"vocab_size": 77})) == 77


def test_end_of_sequence_tokens(tmp_path):
    from transformers import GenerationConfig, LlamaConfig

    assert end_tokens(read_args({"hf_config": {"model_type": "llama"}})) == []
    LlamaConfig(eos_token_id=5).save_pretrained(tmp_path)
    args = read_args({"hf_checkpoint": str(tmp_path)})
    assert end_tokens(args) == [5]
    GenerationConfig(eos_token_id=[6, 7]).save_pretrained(tmp_path)
    assert end_tokens(args) == [6, 7]
    assert SamplingParams.from_args(args).stop_token_ids == (6, 7)
    assert SamplingParams.from_args({"hf_checkpoint": str(tmp_path), "rollout_stop_token_ids": []}).stop_token_ids == ()
    assert SamplingParams.from_args({"rollout_max_response_len": 3, "rollout_stop_token_ids": [1]}) == SamplingParams(
        3, stop_token_ids=(1,)
    )
