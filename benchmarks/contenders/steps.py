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

    def prompts_of(self, step: int) -> list[list[int]]:
        """The prompts of a step, the same for all contenders."""
        rng = random.Random(step)
        return [[rng.randrange(3, self.vocabulary) for _ in range(self.prompt_tokens)] for _ in range(self.prompts)]

    def reward(self, completion: list[int]) -> float:
        """The share of even tokens."""
        return sum(token % 2 == 0 for token in completion) / len(completion)


class Commands:
    """The contender's side. What else it prints goes to the log."""

    def __init__(self) -> None:
        self._out = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)
        self.task = Task(**json.loads(sys.stdin.readline()))
        self._left, self._reports, self._began = 0, [], 0.0

    def next(self) -> bool:
        """Wait until another step is wanted. Returns False at the end of the run."""
        if not self._left:
            line = sys.stdin.readline()
            if not line:
                return False
            self._left = int(line)
        self._began = time.monotonic()
        return True

    def done(self, **report: Any) -> None:
        """Report a step."""
        self._reports.append({"seconds": time.monotonic() - self._began, **report})
        self._left -= 1
        if not self._left:
            self._out.write(json.dumps(self._reports) + "\n")
            self._out.flush()
            self._reports = []
