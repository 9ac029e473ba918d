"""OpenAI's chat completions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from workers.rollout.agents.gateway.dialect import (
    Answer,
    Ask,
    Body,
    Dialect,
    GatewayError,
    asked,
    check_supported,
    items,
    log_probs_of,
    text_of,
    tool,
    tool_call,
)

IDS = ("prompt_token_ids", "generation_token_ids")


class ChatDialect(Dialect):
    """``POST /v1/chat/completions``."""

    def read(self, body: Body) -> Ask:
        check_supported(body)
        limit, options = body.get("max_completion_tokens"), body.get("stream_options")
        if not isinstance(options, dict | None):
            raise GatewayError("invalid", f"stream_options={options!r:.80}; expected an object")
        limit = body.get("max_tokens") if limit is None else limit
        messages = [_message(one) for one in items(body.get("messages"), "messages")]
        given = items(body.get("tools") or [], "tools")
        functions = items([one.get("function") for one in given], "the tools' functions")
        tools = [tool(one.get("name"), one.get("description"), one.get("parameters")) for one in functions]
        return asked(body, messages, tools, limit, "max_tokens")

    def reply(self, ask: Ask, answer: Answer) -> dict[str, Any]:
        calls = answer.message.get("tool_calls")
        message: dict[str, Any] = {"role": "assistant", "content": answer.message["content"] or (None if calls else "")}
        if reasoning := answer.message.get("reasoning_content"):
            message["reasoning_content"] = reasoning
        if calls:
            message["tool_calls"] = calls
        if ask.ids_wanted:
            message |= answer.training_ids
        ended = answer.completion.finish_reason
        prompt, new = len(answer.prompt), len(answer.completion.token_ids)
        return {
            "id": f"chatcmpl-{answer.id}",
            "object": "chat.completion",
            "created": answer.created,
            "model": answer.model,
            "choices": [
                {
                    "index": 0,
                    "message": message,
                    "finish_reason": "tool_calls" if calls and ended == "stop" else ended,
                    "logprobs": log_probs_of(answer) if ask.body.get("logprobs") else None,
                }
            ],
            "usage": {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new},
        }

    def events(self, ask: Ask, reply: dict[str, Any]) -> Iterator[tuple[str | None, Any]]:
        choice = reply["choices"][0]
        head = {key: reply[key] for key in ("id", "created", "model")} | {"object": "chat.completion.chunk"}

        def chunk(delta: dict[str, Any], finish_reason: str | None = None, **more: Any) -> tuple[None, Any]:
            return None, {**head, "choices": [{"index": 0, "delta": delta, "finish_reason": finish_reason, **more}]}

        delta = {key: value for key, value in choice["message"].items() if value is not None and key != "tool_calls"}
        yield chunk({"role": "assistant", "content": "", **delta}, logprobs=choice["logprobs"])
        for index, call in enumerate(choice["message"].get("tool_calls") or ()):
            yield chunk({"tool_calls": [{"index": index, **call}]})
        yield chunk({}, choice["finish_reason"])
        if (ask.body.get("stream_options") or {}).get("include_usage"):
            yield None, {**head, "choices": [], "usage": reply["usage"]}
        yield None, "[DONE]"


def _message(given: dict[str, Any]) -> dict[str, Any]:
    role = given.get("role")
    if role == "developer":
        role = "system"
    if role not in ("system", "user", "assistant", "tool"):
        raise GatewayError("invalid", f"a message's role is {role!r:.80}; expected system, user, assistant or tool")
    message: dict[str, Any] = {"role": role, "content": text_of(given.get("content"), f"the {role}'s message")}
    if role == "tool":
        message["tool_call_id"] = str(given.get("tool_call_id") or "")
    if role == "assistant":
        if reasoning := given.get("reasoning_content") or given.get("reasoning"):
            message["reasoning_content"] = str(reasoning)
        if calls := given.get("tool_calls"):
            message["tool_calls"] = [_call(one) for one in items(calls, "tool_calls")]
        message |= {name: given[name] for name in IDS if name in given}
    return message


def _call(given: dict[str, Any]) -> dict[str, Any]:
    function = given.get("function")
    if not isinstance(function, dict):
        raise GatewayError("invalid", f"a tool call is {given!r:.80}; expected one with a function")
    return tool_call(given.get("id"), function.get("name"), function.get("arguments"))
