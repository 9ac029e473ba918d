"""Shared by the tests of agents: tokenizers that are built here, and engines without a model."""

import time
import zlib
from array import array
from functools import cache

from workers.rollout.engines.request_engine import RequestEngine


class Characters:
    """A tokenizer with a token for each character, one for each role's header, and one for the end of a message."""

    HEADERS = ("<|system|>", "<|user|>", "<|assistant|>", "<|tool|>", "<|tools|>")
    eos_token_id = 1

    def encode(self, text):
        if text in self.HEADERS:
            return [2 + self.HEADERS.index(text)]
        return [ord(character) + 16 for character in text]

    def decode(self, token_ids):
        return "".join(
            chr(token - 16) if token >= 16 else {1: "<end>", **dict(enumerate(self.HEADERS, 2))}.get(token, "?")
            for token in token_ids
        )


QWEN_TOKENS = [
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>", "<tool_response>",
    "</tool_response>", "<think>", "</think>",
]  # fmt: skip

TEMPLATE = (
    "{% if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.reasoning_content and KEEP %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ {'name': c.function.name, 'arguments': c.function.arguments} "
    "| tojson }}</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Of a model that keeps its reasoning; with KEEP replaced by a condition, of one that removes it from the history."""


@cache
def merging_tokenizer(keep="true"):
    """A Hugging Face tokenizer with byte-pair merges, so that a text has several spellings in tokens, and the special
    tokens of Qwen3."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    pairs = [("a", "b"), ("ab", "c"), ("t", "h"), ("th", "e"), ("1", "2"), ("12", "3")]
    vocab = {piece: number for number, piece in enumerate(alphabet + ["".join(pair) for pair in pairs])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=pairs))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(QWEN_TOKENS)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=TEMPLATE.replace("KEEP", keep),
        clean_up_tokenization_spaces=False,
    )


class ScriptEngine(RequestEngine):
    """An engine without a model: a function says what follows a prompt.

    Args:
        script: (text of the prompt, seed) -> the completion's text, without its end; None for no end. It may raise.
        tokens: of one step.
        delay: seconds of a step.
    """

    any_rank = True
    max_positions = 100_000
    log_probs = True

    def __init__(self, script=lambda prompt, seed: f"{seed % 1000}", tokens=1000, delay=0.0, tokenizer=None):
        super().__init__()
        self.script, self.tokens, self.delay = script, tokens, delay
        self.tokenizer = tokenizer or Characters()
        self.seen = []

    def serve(self):
        running = {}
        while (changes := self.next_step()) is not None:
            time.sleep(self.delay)
            for request in changes.added:
                self.seen.append(list(request.prompt))
                running[request] = None
            for request in [one for one in running if not one.ended]:
                if running[request] is None:
                    text = self.script(self.tokenizer.decode(request.prompt), request.seed)
                    end = [] if text is None else [self.tokenizer.eos_token_id]
                    running[request] = [*self.tokenizer.encode(text or ""), *end]
                whole = running[request][: request.sampling_params.max_new_tokens]
                done = len(request.token_ids)
                new = whole[done : done + self.tokens]
                last = done + len(new) == len(whole)
                ended = None if not last else "stop" if whole and whole[-1] == self.tokenizer.eos_token_id else "length"
                tell = log_prob if self.log_probs else lambda *_: -1.0
                self.record(request, new, [tell(request.prompt, whole, done + i) for i in range(len(new))], ended)
            running = {one: whole for one, whole in running.items() if not one.ended}

    def load_weights(self, weights):
        pass

    def weight_shapes(self):
        return {}


def user(text):
    return {"role": "user", "content": text}


def log_prob(prompt, completion, place):
    """The log-probability that `ScriptEngine` gives a token: it tells whether it was sampled there."""
    return -(zlib.crc32(array("i", completion[: place + 1]), zlib.crc32(array("i", prompt))) % 10_000) / 1000
