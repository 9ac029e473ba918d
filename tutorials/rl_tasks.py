"""The tasks of `train_grpo.py`: prompts, a reward that is easy to check by eye, and training arguments; or data."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from byte_tokenizer import byte_tokenizer
from calculator import ALPHABET, Calculator, CalculatorFormat, decode, encode

from workers import PromptData, reward_of, session_reward
from workers.hf_files import read_tokenizer

LUCKY = 7
SEPARATOR = 10


@dataclass(frozen=True)
class Task:
    """A task for the model to learn.

    Attributes:
        reward: (prompt tokens, completion tokens) -> a number from 0 to 1; for sessions, also of their ``info``.
        vocab_size: size of the model's vocabulary.
        digits: prompts are four tokens below this number.
        ending: tokens at the end of every prompt.
        goal: the mean reward at which the task counts as learned.
        args: training arguments for it.
        agent: keyword arguments of an `AgentEngine`, for a task of several turns.
        config: entries of the model's config.
        decode: turns tokens into text, for the run's samples; None for tokens that are numbers.
    """

    reward: Callable[..., float]
    vocab_size: int
    digits: int
    ending: list[int]
    goal: float
    args: dict[str, Any]
    agent: dict[str, Any] | None = None
    config: dict[str, Any] = field(default_factory=dict)
    decode: Callable[[list[int]], str] | None = None

    def columns(self, prompts: list[list[int]]) -> dict[str, list[Any]]:
        """Return what the environments get of each prompt."""
        return {} if self.agent is None else {"expression": [decode(prompt)[:-1] for prompt in prompts]}

    def held_out(self, count: int = 64) -> list[list[int]]:
        """Draw the prompts of evaluations, always the same. There are so few possible prompts that training may meet
        some of them."""
        return self.prompts(0, count, -1)

    def prompts(self, rollout_id: int, count: int, seed: int) -> list[list[int]]:
        """Draw the prompts of a rollout; the same rollout always has the same prompts."""
        generator = torch.Generator().manual_seed(seed * 1_000_003 + rollout_id)
        drawn: list[list[int]] = torch.randint(0, self.digits, (count, 4), generator=generator).tolist()
        return [prompt + self.ending for prompt in drawn]


def lucky(prompt: list[int], completion: list[int]) -> float:
    """Return the share of 7s in the completion. Repeating one token suffices: this tests that the pipeline works."""
    return completion.count(LUCKY) / len(completion)


def in_order(prompt: list[int], completion: list[int]) -> float:
    """Return the share of positions at which the completion has the prompt's digits in ascending order."""
    digits = sorted(token for token in prompt if token != SEPARATOR)
    return sum(a == b for a, b in zip(completion, digits, strict=False)) / len(digits)


class CalculatorTask(Task):
    """Prompts are sums and products of two numbers from 1 to 9."""

    def prompts(self, rollout_id: int, count: int, seed: int) -> list[list[int]]:
        drawn = super().prompts(rollout_id, count, seed)
        return [encode(f"{left + 1}{'+*'[other % 2]}{right + 1}=") for left, right, other, _ in drawn]


TASKS = {
    "lucky": Task(
        lucky,
        vocab_size=32,
        digits=32,
        ending=[],
        goal=0.9,
        args={
            "num_rollout": 40,
            "rollout_batch_size": 8,
            "n_samples_per_prompt": 8,
            "rollout_max_response_len": 16,
            "lr": 3e-3,
            "kl_loss_coef": 0.01,
        },
    ),
    "sort": Task(
        in_order,
        vocab_size=12,
        digits=10,
        ending=[SEPARATOR],
        goal=0.9,
        args={
            "num_rollout": 400,
            "rollout_batch_size": 32,
            "n_samples_per_prompt": 16,
            "rollout_max_response_len": 4,
            "lr": 1e-3,
            "lr_decay_style": "cosine",
            "min_lr": 1e-4,
            "entropy_coef": 0.05,  # without it the policy collapses before it learns to sort
        },
    ),
    "calculator": CalculatorTask(
        session_reward,
        vocab_size=len(ALPHABET),
        digits=9,
        ending=[],
        goal=0.9,  # calls and answers of the right form, with the same digits each time, have 0.8 at most
        args={
            "num_rollout": 160,
            "rollout_batch_size": 16,
            "n_samples_per_prompt": 16,
            "rollout_max_response_len": 3,
            "ppo_epochs": 3,
            "lr": 2e-3,
            "lr_decay_style": "cosine",
            "min_lr": 2e-4,
            "entropy_coef": 0.1,  # with half of it, two of five seeds collapse before they learn to copy
        },
        config={"initializer_range": 0.05},  # attention has to find the characters to copy
        agent={"environment": Calculator, "renderer": CalculatorFormat, "limits": Calculator.limits},
        decode=decode,
    ),
}

# Of a run on files. The model is larger than those of the tasks in one way: it has a token for each byte.
DATA_MODEL = {"vocab_size": 261, "max_position_embeddings": 1024}
DATA_ARGS = {
    "reward_function": "exact_match",
    "num_rollout": 40,
    "rollout_batch_size": 8,
    "n_samples_per_prompt": 8,
    "rollout_max_response_len": 16,
    "lr": 3e-3,
}


def open_data(args: Any) -> tuple[PromptData, Callable[..., Any], tuple[list[list[int]], dict[str, list[Any]]] | None]:
    """Return the prompts of ``rollout_data``, the reward function, and the prompts of ``eval_data`` with their columns.
    Without an ``hf_checkpoint`` that has a tokenizer, tokens are bytes."""
    tokenizer = read_tokenizer(args) or byte_tokenizer()
    held_out = None
    if args.eval_data is not None:
        held_out = PromptData.from_args(args, tokenizer, key="eval_data").all()
    return PromptData.from_args(args, tokenizer), reward_of(args, tokenizer), held_out
