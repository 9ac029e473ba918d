"""Compute rewards with the user's function, sync or async, per completion or for all of them at once.

Threads: `_run` runs awaitables in a thread with its own event loop and joins it before it returns. It is a daemon:
if an exception such as KeyboardInterrupt ends the join, the thread goes on until the reward function returns, and does
not keep the process alive. `_logged` has a thread that logs while the reward function runs, and joins it at the end.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import math
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from workers.rollout.errors import RewardError

logger = logging.getLogger(__name__)

LOG_SECONDS = 30.0

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


def compute_rewards(
    function: RewardFunction,
    samples: Sequence[Sample],
    extras: Mapping[str, Sequence[Any]],
    *,
    batched: bool = False,
    concurrency: int | None = None,
) -> list[float]:
    """Compute one reward per sample. An ``async`` function runs for several samples concurrently.

    Args:
        function: see `RewardFunction`. If ``batched``, it takes lists over all samples and returns as many numbers.
        samples: what to reward.
        extras: name -> one value per prompt, passed to the function by keyword.
        batched: whether the function takes all samples at once.
        concurrency: maximum number of samples for which an ``async`` function runs at once; None for all of them.

    Raises:
        RewardError: the function raised, or did not return a finite number; the message names the sample.
    """
    if not samples:
        return []
    with _logged(len(samples)):
        values = _values(function, samples, extras, batched, concurrency)
    return [_number(value, row, samples[row]) for row, value in enumerate(values)]


@contextlib.contextmanager
def _logged(count: int) -> Iterator[None]:
    """Inside, log at intervals that the reward function is still running: it has no time limit."""
    begun, ended = time.monotonic(), threading.Event()

    def log() -> None:
        while not ended.wait(LOG_SECONDS):
            running = time.monotonic() - begun
            logger.warning("the reward function has been running for %.0f s, for %d completions", running, count)

    thread = threading.Thread(target=log, name="rewards-log", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _values(
    function: RewardFunction,
    samples: Sequence[Sample],
    extras: Mapping[str, Sequence[Any]],
    batched: bool,
    concurrency: int | None,
) -> list[Any]:
    values = []
    if batched:
        values = _all(function, samples, extras)
    else:
        for row, sample in enumerate(samples):
            value = _one(function, row, sample, extras)
            if inspect.isawaitable(value):
                # Only now is it known that the function is async. Call it for the others when it is their turn: it may
                # do work, or start some, before it is awaited.
                values += _run(_concurrently(value, row, function, samples, extras, concurrency))
                break
            values.append(value)
    return values


async def _concurrently(
    first: Awaitable[Any],
    begin: int,
    function: RewardFunction,
    samples: Sequence[Sample],
    extras: Mapping[str, Sequence[Any]],
    concurrency: int | None,
) -> list[Any]:
    """Compute the values of the rows from ``begin`` on, whose awaitable is there already."""
    values: list[Any] = [None] * len(samples)
    rows = iter(range(begin, len(samples)))

    async def work() -> None:
        for row in rows:  # shared by all: each takes the next row when it is done with one
            value = first if row == begin else _one(function, row, samples[row], extras)
            values[row] = await _named(value, row, samples[row]) if inspect.isawaitable(value) else value

    count = len(samples) - begin
    await asyncio.gather(*(work() for _ in range(min(concurrency or count, count))))
    return values[begin:]


def _all(function: RewardFunction, samples: Sequence[Sample], extras: Mapping[str, Sequence[Any]]) -> list[Any]:
    given = {name: [values[sample.prompt] for sample in samples] for name, values in extras.items()}
    prompts, completions = [list(s.prompt_ids) for s in samples], [list(s.completion_ids) for s in samples]
    try:
        values = function(prompts, completions, **given)
        if inspect.isawaitable(values):
            values = _run(_value_of(values))
    except (Exception, asyncio.CancelledError) as error:  # asyncio's is not a subclass of Exception
        raise RewardError(f"the reward function raised {_text(error)} for {len(samples)} samples") from error
    values = values.tolist() if hasattr(values, "tolist") else values
    if not isinstance(values, (list, tuple)) or len(values) != len(samples):
        raise RewardError(
            f"the reward function returned {str(values)[:200]} for {len(samples)} samples; expected one number each"
        )
    return list(values)


def _one(function: RewardFunction, row: int, sample: Sample, extras: Mapping[str, Sequence[Any]]) -> Any:
    given = {name: values[sample.prompt] for name, values in extras.items()}
    try:
        return function(list(sample.prompt_ids), list(sample.completion_ids), **given)
    except (Exception, asyncio.CancelledError) as error:
        raise _raised(error, row, sample) from error


async def _named(value: Awaitable[Any], row: int, sample: Sample) -> Any:
    try:
        return await value
    except (Exception, asyncio.CancelledError) as error:
        task = asyncio.current_task()
        if task is not None and task.cancelling():  # by asyncio.run, because another sample has failed
            raise
        raise _raised(error, row, sample) from error


async def _value_of(value: Awaitable[Any]) -> Any:
    return await value


def _run(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Run a coroutine and return its value. `asyncio.run` needs a thread without a running event loop, and the caller's
    may have one, as in a notebook."""
    outcome: list[Any] = []

    def run() -> None:
        try:
            outcome.append((asyncio.run(coroutine), None))
        except BaseException as error:  # raised in the caller's thread; asyncio.run has cancelled the other tasks
            outcome.append((None, error))

    # Not a thread pool: the interpreter joins those at exit, and a reward function that hangs would keep the process.
    thread = threading.Thread(target=run, name="rewards", daemon=True)
    thread.start()
    thread.join()
    value, error = outcome[0]  # written before the thread ended, so it needs no lock
    if error is not None:
        raise error
    return value


def _number(value: Any, row: int, sample: Sample) -> float:
    try:
        number = math.nan if isinstance(value, str) else float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise RewardError(
            f"the reward function returned {value!r} for {_which(row, sample)}; expected a finite number",
            row=row,
            prompt=sample.prompt,
            sample=sample.sample,
        )
    return number


def _raised(error: BaseException, row: int, sample: Sample) -> RewardError:
    message = f"the reward function raised {_text(error)} for {_which(row, sample)}"
    return RewardError(message, row=row, prompt=sample.prompt, sample=sample.sample)


def _which(row: int, sample: Sample) -> str:
    tokens = len(sample.completion_ids)
    return f"row {row}: prompt {sample.prompt}, sample {sample.sample}, a completion of {tokens} tokens"


def _text(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
