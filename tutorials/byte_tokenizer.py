"""A tokenizer for small models: a token for each byte, and no file to download."""

from typing import Any

CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def byte_tokenizer() -> Any:
    """Return a Hugging Face tokenizer with 261 tokens: the 256 bytes, whose token is their value, then the padding
    token, the end of a message, and the roles user, assistant and system of its chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))  # the characters that stand for the bytes that have none of their own
    bytes_ = {chr(byte if byte in printable else next(others)): byte for byte in range(256)}
    tokenizer = Tokenizer(models.BPE(vocab=bytes_, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|pad|>", "<|end|>", "<|user|>", "<|assistant|>", "<|system|>"]
    tokenizer.add_special_tokens(special)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=special[0],
        eos_token=special[1],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )
