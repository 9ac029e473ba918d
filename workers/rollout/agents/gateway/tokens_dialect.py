"""vLLM's token endpoint: token ids in, token ids out."""

from __future__ import annotations

import io
import json
from base64 import b64encode
from collections.abc import Iterator
from typing import Any

from workers.rollout.agents.gateway.dialect import (
    Answer,
    Ask,
    Body,
    Dialect,
    GatewayError,
    check_supported,
    count,
    log_probs_of,
)
from workers.rollout.engines.rollout_engine import RoutedExperts


class TokensDialect(Dialect):
    """``POST /inference/v1/generate``. A prompt continues the session where it begins with its tokens."""

    def read(self, body: Body) -> Ask:
        given = body.get("sampling_params") or {}
        if not isinstance(given, dict):
            raise GatewayError("invalid", f"sampling_params={given!r:.80}; expected an object")
        check_supported(given)
        token_ids, stops = body.get("token_ids"), given.get("stop_token_ids")
        for name, value in (("token_ids", token_ids), ("stop_token_ids", stops or [])):
            if not isinstance(value, list) or not all(type(one) is int and 0 <= one < 2**31 for one in value):
                raise GatewayError("invalid", f"{name} is {value!r:.80}; expected a list of token ids")
        if not token_ids:
            raise GatewayError("invalid", "token_ids is empty; a prompt has at least one token")
        if body.get("stream"):
            raise GatewayError("invalid", "stream=true is not supported here; use chat completions")
        limit = count(given.get("max_tokens"), "max_tokens")
        return Ask([], None, limit, False, token_ids, tuple(stops) if stops else None, body=body)

    def reply(self, ask: Ask, answer: Answer) -> dict[str, Any]:
        done = answer.completion
        choice: dict[str, Any] = {
            "index": 0,
            "token_ids": list(done.token_ids),
            "logprobs": log_probs_of(answer),
            "finish_reason": done.finish_reason,
        }
        if (mask := done.sampling_mask) is not None:
            choice["sampling_mask"] = {"token_ids": list(mask.token_ids), "lengths": list(mask.lengths)}
        if (experts := done.routed_experts) is not None:
            choice["routed_experts"] = _npy(experts)
        return {"request_id": f"gen-{answer.id}", "choices": [choice], "prompt_logprobs": None}

    def events(self, ask: Ask, reply: dict[str, Any]) -> Iterator[tuple[str | None, Any]]:
        yield None, json.dumps(reply)


def _npy(experts: RoutedExperts) -> str:
    """vLLM's format: a file of numpy in base64, (tokens - 1, layers, k), without the last token, which was not
    computed. -1 stands for what is not known."""
    import numpy

    file = io.BytesIO()
    known = numpy.array(experts.ids[: (len(experts) - 1) * experts.layers * experts.k], dtype=numpy.int16)
    numpy.save(file, known.reshape(-1, experts.layers, experts.k))
    return b64encode(file.getvalue()).decode()
