"""RewardCall: one call of a reward function, its arguments, what it returned, and what the errors say about it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from workers.rollout.rollout_errors import RewardError

RewardFunction = Callable[..., Any]
"""``reward(prompt_ids, completion_ids, **extras) -> float``, plain or ``async def``."""


@dataclass(frozen=True)
class Sample:
    """One completion, as a reward function sees it.

    Attributes:
        prompt: index of the prompt in the call.
        sample: index of the completion among those for the same prompt.
        prompt_ids: tokens of the prompt.
        completion_ids: tokens of the completion, including its stop token.
    """

    prompt: int
    sample: int
    prompt_ids: list[int]
    completion_ids: list[int]


@dataclass(frozen=True, eq=False)
class RewardCall:
    """One call of the reward function: for one sample or, if ``batched``, for those of a group."""

    samples: Sequence[Sample]
    extras: Mapping[str, Any]
    row: int
    batched: bool

    def made_by(self, function: RewardFunction) -> Any:
        if not self.batched:
            (one,) = self.samples
            given = {name: values[one.prompt] for name, values in self.extras.items()}
            return function(list(one.prompt_ids), list(one.completion_ids), **given)
        given = {name: [values[one.prompt] for one in self.samples] for name, values in self.extras.items()}
        prompts = [list(one.prompt_ids) for one in self.samples]
        return function(prompts, [list(one.completion_ids) for one in self.samples], **given)

    def rewards(self, value: Any) -> list[float]:
        """Return one finite number per sample."""
        if not self.batched:
            return [_number(value, self.row, self.samples[0])]
        values = value.tolist() if hasattr(value, "tolist") else value
        if not isinstance(values, (list, tuple)) or len(values) != len(self.samples):
            raise self.error(f"returned {str(values)[:200]} for {self.where()}; expected one number each")
        return [_number(one, self.row + k, self.samples[k]) for k, one in enumerate(values)]

    def where(self) -> str:
        return f"{len(self.samples)} samples" if self.batched else _which(self.row, self.samples[0])

    def raised(self, error: BaseException) -> RewardError:
        return self.error(f"raised {type(error).__name__}: {error} for {self.where()}")

    def error(self, what: str) -> RewardError:
        if self.batched:
            return RewardError(f"the reward function {what}")
        return _error(what, self.row, self.samples[0])


def _number(value: Any, row: int, sample: Sample) -> float:
    try:
        number = math.nan if isinstance(value, str) else float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise _error(f"returned {value!r} for {_which(row, sample)}; expected a finite number", row, sample)
    return number


def _error(what: str, row: int, sample: Sample) -> RewardError:
    return RewardError(f"the reward function {what}", row=row, prompt=sample.prompt, sample=sample.sample)


def _which(row: int, sample: Sample) -> str:
    tokens = len(sample.completion_ids)
    return f"row {row}: prompt {sample.prompt}, sample {sample.sample}, a completion of {tokens} tokens"
