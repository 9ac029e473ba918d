"""The task of `benchmarks.rl_step`, and a contender's side of its commands. It imports no contender."""

from __future__ import annotations

import json
import os
import random
import sys
import time
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Task:
    """One step: ``samples`` completions of each of ``prompts`` prompts, then one optimizer step on all of them.

    Attributes:
        model: folder of the model and its tokenizer, whose token k is the word "k", from 3 on.
        vocabulary: number of tokens.
        prompt_tokens: length of each prompt.
        new_tokens: length of each completion.
        lr: AdamW's learning rate.
        variant: how the contender runs, if it has several ways.
    """

    model: str
    vocabulary: int
    prompts: int
    samples: int
    prompt_tokens: int
    new_tokens: int
    lr: float
    variant: str

    @property
    def tokens(self) -> int:
        """How many are generated in a step."""
        return self.prompts * self.samples * self.new_tokens

    def prompts_of(self, step: int) -> list[list[int]]:
        """The prompts of a step, the same for all contenders."""
        rng = random.Random(step)
        return [[rng.randrange(3, self.vocabulary) for _ in range(self.prompt_tokens)] for _ in range(self.prompts)]

    def reward(self, completion: list[int]) -> float:
        """The share of even tokens."""
        return sum(token % 2 == 0 for token in completion) / len(completion)


TASK = "BENCHMARKS_TASK"
"""Environment variable with a `Task` as JSON."""


class Commands:
    """The contender's side of a `Session`, for contenders with a loop of their own. What else it prints goes to the
    log."""

    def __init__(self) -> None:
        self._out = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)
        self.task = Task(**json.loads(os.environ[TASK]))
        self.began = 0.0

    def next(self) -> bool:
        """Wait until another step is wanted. Returns False at the end of the run."""
        wanted = bool(sys.stdin.readline())
        self.began = time.monotonic()
        return wanted

    def done(self, **report: Any) -> None:
        """Report a step."""
        self._out.write(json.dumps({"value": {"seconds": time.monotonic() - self.began, **report}}) + "\n")
        self._out.flush()
