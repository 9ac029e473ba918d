"""RewardCall: one call of a reward function, its arguments, what it returned, and what the errors say about it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from workers.rollout.rollout_errors import RewardError

RewardFunction = Callable[..., Any]
"""``reward(prompt_ids, completion_ids, **columns) -> float``, plain or ``async def``. It gets the columns of ``extras``
that its parameters name, all with ``**columns``, and with a parameter ``info`` `Completion.info`, {} if there is none,
unless there is a column of that name. Instead of a number it may return several by name, as a dict: see `Reward`."""


class Reward(float):
    """The sum of several rewards of a completion. As ``rewards/NAME`` the single ones are columns of the rollout data.

    Attributes:
        parts: name -> reward.
    """

    parts: dict[str, float]

    def __new__(cls, parts: Mapping[str, float]) -> Reward:
        made = super().__new__(cls, sum(parts.values()))
        made.parts = dict(parts)
        return made

    def __reduce__(self) -> tuple[type[Reward], tuple[dict[str, float]]]:
        return Reward, (self.parts,)


@dataclass(frozen=True)
class Sample:
    """One completion, as a reward function sees it.

    Attributes:
        prompt: index of the prompt in the call.
        sample: index of the completion among those for the same prompt.
        prompt_ids: tokens of the prompt.
        completion_ids: tokens of the completion, including its stop token.
        info: `Completion.info`.
    """

    prompt: int
    sample: int
    prompt_ids: list[int]
    completion_ids: list[int]
    info: Mapping[str, Any] | None = None


@dataclass(frozen=True, eq=False)
class RewardCall:
    """One call of the reward function: for one sample or, if ``batched``, for those of a group. ``row``: of the first
    sample; None if it is not known. ``with_info``: the function has a parameter ``info``."""

    samples: Sequence[Sample]
    extras: Mapping[str, Any]
    row: int | None
    batched: bool
    with_info: bool = False

    def arguments(self) -> tuple[tuple[Any, Any], dict[str, Any]]:
        """What the function is called with, by position and by keyword."""
        prompts = [list(one.prompt_ids) for one in self.samples]
        completions = [list(one.completion_ids) for one in self.samples]
        given = {"info": [dict(one.info or {}) for one in self.samples]} if self.with_info else {}
        given |= {name: [values[one.prompt] for one in self.samples] for name, values in self.extras.items()}
        if self.batched:
            return (prompts, completions), given
        return (prompts[0], completions[0]), {name: values[0] for name, values in given.items()}

    def rewards(self, value: Any) -> list[float]:
        """Return one finite number per sample, a `Reward` for a dict; a `RewardError` for anything else."""
        if not self.batched:
            return [self._number(value, 0)]
        values = value.tolist() if hasattr(value, "tolist") else value
        if not isinstance(values, (list, tuple)) or len(values) != len(self.samples):
            raise self.error(f"returned {str(values)[:200]} for {self.where()}; expected one number each")
        return [self._number(one, number) for number, one in enumerate(values)]

    def _number(self, value: Any, number: int) -> float:
        if isinstance(value, Mapping) and value:
            return Reward({str(name): self._number(one, number) for name, one in value.items()})
        try:
            reward = math.nan if isinstance(value, str) else float(value)
        except (TypeError, ValueError):
            reward = math.nan
        except OverflowError:
            value = reward = math.inf  # Python refuses to write an integer of more than 4300 digits
        if not math.isfinite(reward):
            what = f"returned {value!r} for {self._which(number)}; expected a finite number"
            raise self.error(what, number)
        return reward

    def where(self) -> str:
        if not self.batched:
            return self._which(0)
        return f"{len(self.samples)} samples" + ("" if self._prompt is None else f" of prompt {self._prompt}")

    @property
    def _prompt(self) -> int | None:
        """That of all samples of a batched call in a stream."""
        prompts = {one.prompt for one in self.samples} if self.row is None else set()
        return prompts.pop() if len(prompts) == 1 else None

    def _row(self, number: int) -> int | None:
        return None if self.row is None else self.row + number

    def _which(self, number: int) -> str:
        one = self.samples[number]
        row, tokens = self._row(number), len(one.completion_ids)
        where = "" if row is None else f"row {row}: "
        return f"{where}prompt {one.prompt}, sample {one.sample}, a completion of {tokens} tokens"

    def raised(self, error: BaseException) -> RewardError:
        hint = ""
        if isinstance(error, TypeError):  # such as a parameter that the function lacks
            entries = "".join(f", {name}=..." for name in self.extras)
            ids = "prompts, completions" if self.batched else "prompt_ids, completion_ids"
            hint = f"; it is called as function({ids}{entries})"
        return self.error(f"raised {type(error).__name__}: {error} for {self.where()}{hint}")

    def error(self, what: str, number: int | None = None) -> RewardError:
        """The error for the sample of this number; by default for all samples of the call."""
        message = f"the reward function {what}"
        if number is None and self.batched:
            return RewardError(message, prompt=self._prompt)
        number = number or 0
        one = self.samples[number]
        return RewardError(message, row=self._row(number), prompt=one.prompt, sample=one.sample)
