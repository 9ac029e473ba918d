"""Shared by the rollout tests: small models, and a second engine that has no model at all."""

import random

import torch
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, Qwen2Config

from workers.rollout.engine import Completion, RolloutEngine

LLAMA = LlamaConfig(
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=32,
    max_position_embeddings=64,
)
TIED = Qwen2Config(**{**LLAMA.to_diff_dict(), "tie_word_embeddings": True, "num_key_value_heads": 4})
GPT2 = GPT2Config(n_embd=32, n_layer=2, n_head=2, vocab_size=32, n_positions=64)  # learned position embeddings


def plain_model(config, seed):
    """A transformers model with larger weights than usual, so that its logits are far from uniform."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(8)
    return model


@torch.no_grad()
def plain_log_probs(model, prompt, completion, temperature=1.0):
    """Log-probabilities of a completion from one forward pass, without padding or cache."""
    logits = model(torch.tensor([prompt + completion])).logits[0].double() / temperature
    return logits.log_softmax(-1)[range(len(prompt) - 1, len(prompt) + len(completion) - 1), completion]


class EchoEngine(RolloutEngine):
    """A toy engine: its completion is the reversed prompt, then random tokens. Its only weight is a number added to
    each token."""

    def __init__(self, vocabulary=100, *, mistake=None):
        self.vocabulary = vocabulary
        self.mistake = mistake
        self.shift = torch.zeros(1)
        self.asleep = False

    def generate(self, prompts, sampling_params, seeds):
        if self.mistake == "raises":
            raise RuntimeError("out of paper")
        completions = []
        for prompt, seed in zip(prompts, seeds, strict=True):
            draw = random.Random(seed)
            tokens = [
                *reversed(prompt),
                *(draw.randrange(self.vocabulary) for _ in range(sampling_params.max_new_tokens)),
            ]
            tokens = [(token + int(self.shift)) % self.vocabulary for token in tokens][: sampling_params.max_new_tokens]
            completions.append(Completion(tokens, [-0.5] * len(tokens), "length"))
        if callable(self.mistake):
            return self.mistake(completions)
        return completions[1:] if self.mistake == "short" else completions

    def load_weights(self, weights):
        for _, tensor in weights:
            self.shift.copy_(tensor)

    def weight_shapes(self):
        return {"shift": (1,)}

    def sleep(self):
        self.asleep = True

    def wake_up(self):
        self.asleep = False
