"""The tasks of `train_grpo.py`: prompts, a reward that can be checked by eye, and what suits each."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

VOCABULARY = 32
LUCKY = 7


@dataclass(frozen=True)
class Task:
    """What is to be learnt.

    Attributes:
        reward: (prompt's tokens, answer's tokens) -> from 0 to 1.
        prompt_tokens: prompts are made of the tokens below this.
        goal: the mean reward that says it is learnt.
        args: the training arguments that suit it.
    """

    reward: Callable[[list[int], list[int]], float]
    prompt_tokens: int
    goal: float
    args: dict[str, Any] = field(default_factory=dict)

    def prompts(self, rollout_id: int, count: int, seed: int) -> list[list[int]]:
        """Prompts of four tokens, others in each rollout, and the same whenever this rollout is made."""
        generator = torch.Generator().manual_seed(seed * 1_000_003 + rollout_id)
        return torch.randint(0, self.prompt_tokens, (count, 4), generator=generator).tolist()


def lucky(prompt: list[int], answer: list[int]) -> float:
    """The share of 7s in the answer. It can be had by repeating one token: it shows that everything is connected."""
    return answer.count(LUCKY) / len(answer)


def in_order(prompt: list[int], answer: list[int]) -> float:
    """The share of places at which the answer is the prompt in ascending order."""
    return sum(a == b for a, b in zip(answer, sorted(prompt), strict=False)) / len(prompt)


TASKS = {
    "lucky": Task(
        lucky,
        VOCABULARY,
        0.9,
        {"num_rollout": 40, "rollout_batch_size": 8, "n_samples_per_prompt": 8, "rollout_max_response_len": 16},
    ),
    "sort": Task(
        in_order,
        10,
        0.9,
        {"num_rollout": 400, "rollout_batch_size": 16, "n_samples_per_prompt": 16, "rollout_max_response_len": 4},
    ),
}
