"""What a server's log-probabilities are, and for which sampling parameters they are those of `Completion`."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping
from typing import Any, Literal

from workers.rollout.engines.http_client import run
from workers.rollout.engines.http_dialects import OpenAI
from workers.rollout.engines.rollout_engine import SamplingParams
from workers.rollout.rollout_errors import RolloutError

Meaning = Literal["raw", "tempered", "processed"]
"""At temperature 1; at the sampling temperature, as engines promise; or at the sampling temperature after ``top_p`` and
``top_k``."""


def probe(dialect: OpenAI, fields: Mapping[str, Any]) -> Meaning:
    """Find out what a server's log-probabilities are, from those of the two most likely tokens.

    Args:
        dialect: of the server.
        fields: further fields of each request.

    Raises:
        RolloutError: they are logits, or the server returns none.
    """

    def best_two(token: int, **how: Any) -> tuple[float, float]:
        return _best_two(dialect, fields, SamplingParams(1, **how), token)

    for token in range(1, 4):
        first, second = best_two(token)
        warm_first, warm_second = best_two(token, temperature=2.0)
        if first - second < 1e-2:
            continue  # the model does not know what it wants
        if abs(warm_first - warm_second - (first - second)) < (first - second) / 4:
            return "raw"  # the temperature does not bring the tokens closer together
        if abs(2 * warm_first - first) < 1e-4 and abs(2 * warm_second - second) < 1e-4:
            raise RolloutError(
                f"the server at {dialect.server.url} returns logits instead of log-probabilities; {dialect.modes}"
            )
        only, _ = best_two(token, temperature=2.0, top_k=1)
        return "tempered" if abs(only - warm_first) < 1e-3 else "processed"
    return "raw"  # not known; what allows the least


def _best_two(dialect: OpenAI, fields: Mapping[str, Any], how: SamplingParams, token: int) -> tuple[float, float]:
    """Generate a token after ``token``. Return the log-probabilities of the two most likely ones, which the server may
    say are minus infinity."""
    server = dialect.server
    found: list[float | None] = []
    tokens = 0

    async def read() -> None:
        nonlocal tokens
        async with asyncio.timeout(server.timeout):
            async for part in dialect.parts([token], how, 1, 0, 2, fields):
                tokens += len(part.token_ids)
                found.extend(part.top[0] if part.top else [])

    try:
        run(read()).result()
    except TimeoutError as error:
        raise server.broken("a request for one token", error) from error
    if tokens != 1 or len(found) < 2:
        raise RolloutError(
            f"the server at {server.url} returned {tokens} tokens and {len(found)} log-probabilities for a request "
            "of one token and the two most likely ones; an engine needs token ids and log-probabilities"
        )
    first, second, *_ = sorted((-math.inf if one is None else one for one in found), reverse=True)
    return first, second


def check(log_probs: Meaning, dialect: OpenAI, how: SamplingParams) -> None:
    """Check that a server's log-probabilities would be those of `Completion`.

    Raises:
        RolloutError: they would not.
    """
    url = dialect.server.url
    truncated = how.temperature > 0 and (how.top_p < 1 or how.top_k > 0)
    if log_probs == "raw" and how.temperature not in (0, 1):
        is_, wanted = "at temperature 1", f"temperature={how.temperature}"
    elif log_probs == "processed" and truncated:
        is_, wanted = "after top_p and top_k", f"top_p={how.top_p}, top_k={how.top_k}"
    else:
        return
    raise RolloutError(
        f"the server at {url} returns log-probabilities {is_}; with {wanted} they are not those that a trainer "
        f"computes. Change SamplingParams, or {dialect.modes}"
    )
