"""The tasks of `train_grpo.py`: prompts, a reward that can be checked by eye, and what suits each."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

LUCKY = 7
SEPARATOR = 10


@dataclass(frozen=True)
class Task:
    """What is to be learnt.

    Attributes:
        reward: (prompt's tokens, answer's tokens) -> from 0 to 1.
        vocab_size: tokens of the model.
        digits: prompts are four tokens below this.
        ending: tokens at the end of every prompt.
        goal: the mean reward that says it is learnt.
        args: the training arguments that suit it.
    """

    reward: Callable[[list[int], list[int]], float]
    vocab_size: int
    digits: int
    ending: list[int]
    goal: float
    args: dict[str, Any]

    def prompts(self, rollout_id: int, count: int, seed: int) -> list[list[int]]:
        """Prompts, others in each rollout, and the same whenever this rollout is made."""
        generator = torch.Generator().manual_seed(seed * 1_000_003 + rollout_id)
        drawn: list[list[int]] = torch.randint(0, self.digits, (count, 4), generator=generator).tolist()
        return [prompt + self.ending for prompt in drawn]


def lucky(prompt: list[int], answer: list[int]) -> float:
    """The share of 7s in the answer. It can be had by repeating one token: it shows that everything is connected."""
    return answer.count(LUCKY) / len(answer)


def in_order(prompt: list[int], answer: list[int]) -> float:
    """The share of places at which the answer is the prompt's digits in ascending order."""
    digits = sorted(token for token in prompt if token != SEPARATOR)
    return sum(a == b for a, b in zip(answer, digits, strict=False)) / len(digits)


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
            "entropy_coef": 0.05,  # without it the policy settles before it can sort
        },
    ),
}
