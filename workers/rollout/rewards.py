"""Rewards by a user's function, sync or async, for one answer or for all at once."""

from __future__ import annotations

import asyncio
import inspect
import math
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from workers.rollout.errors import RewardError

RewardFunction = Callable[..., Any]
"""``reward(prompt_ids, answer_ids, **extras) -> float``, or an ``async def`` of the same."""


@dataclass(frozen=True)
class Sample:
    """One answer, as a reward function sees it.

    Attributes:
        prompt: number of the prompt in the call.
        sample: number of the answer among those to the same prompt.
        prompt_ids: the prompt's tokens.
        answer_ids: the answer's, with its stop token.
    """

    prompt: int
    sample: int
    prompt_ids: list[int]
    answer_ids: list[int]


def compute_rewards(
    function: RewardFunction, samples: Sequence[Sample], extras: Mapping[str, Sequence[Any]], *, batched: bool = False
) -> list[float]:
    """A reward for each sample.

    A function that is ``async`` is under way for all samples at once, in an event loop and a thread of its own.

    Args:
        function: see `RewardFunction`; ``batched``: of lists of all samples, and returns as many numbers.
        samples: what is rewarded.
        extras: name -> a value for each prompt, given to the function by keyword.
        batched: whether the function takes all samples at once.

    Raises:
        RewardError: the function raised, or returned what is no finite number; the message names the sample.
    """
    if not samples:
        return []
    if batched:
        values = _all(function, samples, extras)
    else:
        values = [_one(function, row, sample, extras) for row, sample in enumerate(samples)]
        later = [row for row, value in enumerate(values) if inspect.isawaitable(value)]
        for row, value in zip(later, _finish([_named(values[row], row, samples[row]) for row in later]), strict=True):
            values[row] = value
    return [_number(value, row, samples[row]) for row, value in enumerate(values)]


def _all(function: RewardFunction, samples: Sequence[Sample], extras: Mapping[str, Sequence[Any]]) -> list[Any]:
    given = {name: [values[sample.prompt] for sample in samples] for name, values in extras.items()}
    prompts, answers = [list(s.prompt_ids) for s in samples], [list(s.answer_ids) for s in samples]
    try:
        values = function(prompts, answers, **given)
        if inspect.isawaitable(values):
            (values,) = _finish([values])
    except Exception as error:
        raise RewardError(f"the reward function raised {_text(error)} for {len(samples)} samples") from error
    values = values.tolist() if hasattr(values, "tolist") else values
    if not isinstance(values, (list, tuple)) or len(values) != len(samples):
        raise RewardError(
            f"the reward function returned {str(values)[:200]} for {len(samples)} samples; a number for each"
        )
    return list(values)


def _one(function: RewardFunction, row: int, sample: Sample, extras: Mapping[str, Sequence[Any]]) -> Any:
    given = {name: values[sample.prompt] for name, values in extras.items()}
    try:
        return function(list(sample.prompt_ids), list(sample.answer_ids), **given)
    except Exception as error:
        raise _raised(error, row, sample) from error


async def _named(value: Awaitable[Any], row: int, sample: Sample) -> Any:
    try:
        return await value
    except Exception as error:
        raise _raised(error, row, sample) from error


def _finish(awaitables: Sequence[Awaitable[Any]]) -> list[Any]:
    """Wait for all of them. The thread is needed where the caller's has a running loop, as in a notebook."""
    if not awaitables:
        return []
    outcome: list[Any] = []

    async def all_of_them() -> list[Any]:
        return await asyncio.gather(*awaitables)

    def run() -> None:
        try:
            outcome.append((asyncio.run(all_of_them()), None))
        except BaseException as error:
            outcome.append(([], error))

    thread = threading.Thread(target=run, name="rewards", daemon=True)
    thread.start()
    thread.join()
    values, error = outcome[0]
    if error is not None:
        raise error
    return list(values)


def _number(value: Any, row: int, sample: Sample) -> float:
    try:
        number = math.nan if isinstance(value, str) else float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise RewardError(
            f"the reward function returned {value!r} for {_which(row, sample)}; a reward is a finite number",
            row=row,
            prompt=sample.prompt,
            sample=sample.sample,
        )
    return number


def _raised(error: Exception, row: int, sample: Sample) -> RewardError:
    message = f"the reward function raised {_text(error)} for {_which(row, sample)}"
    return RewardError(message, row=row, prompt=sample.prompt, sample=sample.sample)


def _which(row: int, sample: Sample) -> str:
    return f"row {row}: prompt {sample.prompt}, sample {sample.sample}, {len(sample.answer_ids)} tokens of answer"


def _text(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
