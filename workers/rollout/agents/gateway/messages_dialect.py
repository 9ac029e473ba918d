"""Anthropic's messages."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from workers.rollout.agents.gateway.chat_dialect import IDS
from workers.rollout.agents.gateway.dialect import (
    Answer,
    Ask,
    Body,
    Dialect,
    GatewayError,
    asked,
    check_supported,
    items,
    text_of,
    tool,
    tool_call,
)
from workers.rollout.agents.rendering import as_object

TYPES = {
    "token": "authentication_error",
    "path": "not_found_error",
    "large": "request_too_large",
    "limit": "rate_limit_error",
    "failed": "api_error",
    "unavailable": "overloaded_error",
    "late": "timeout_error",
}


class MessagesDialect(Dialect):
    """``POST /v1/messages``."""

    def read(self, body: Body) -> Ask:
        check_supported(body)
        messages: list[dict[str, Any]] = []
        if system := text_of(body.get("system"), "system"):
            messages.append({"role": "system", "content": system})
        for one in items(body.get("messages"), "messages"):
            messages += _messages(one)
        given = items(body.get("tools") or [], "tools")
        for one in given:
            if (kind := one.get("type")) not in (None, "custom"):
                raise GatewayError("invalid", f"a tool's type is {kind!r:.40}; only those of type custom are supported")
        tools = [tool(one.get("name"), one.get("description"), one.get("input_schema")) for one in given]
        return asked(body, messages, tools, body.get("max_tokens"), "max_tokens")

    def reply(self, ask: Ask, answer: Answer) -> dict[str, Any]:
        message = answer.message
        content: list[dict[str, Any]] = []
        if reasoning := message.get("reasoning_content"):
            content.append({"type": "thinking", "thinking": reasoning, "signature": ""})
        if message["content"]:
            content.append({"type": "text", "text": message["content"]})
        for call in message.get("tool_calls") or ():
            name, given = call["function"]["name"], as_object(call["function"]["arguments"])
            content.append({"type": "tool_use", "id": call["id"], "name": name, "input": given})
        ended = "tool_use" if message.get("tool_calls") else "end_turn"
        return {
            "id": f"msg_{answer.id}",
            "type": "message",
            "role": "assistant",
            "model": answer.model,
            "content": content,
            "stop_reason": "max_tokens" if answer.completion.finish_reason == "length" else ended,
            "stop_sequence": None,
            "usage": {"input_tokens": len(answer.prompt), "output_tokens": len(answer.completion.token_ids)},
        } | (answer.training_ids if ask.ids_wanted else {})

    def events(self, ask: Ask, reply: dict[str, Any]) -> Iterator[tuple[str | None, Any]]:
        def event(name: str, **data: Any) -> tuple[str, Any]:
            return name, {"type": name, **data}

        begun = {**reply, "content": [], "stop_reason": None, "usage": {**reply["usage"], "output_tokens": 0}}
        yield event("message_start", message=begun)
        for index, block in enumerate(reply["content"]):
            if block["type"] == "text":
                empty, deltas = {**block, "text": ""}, [{"type": "text_delta", "text": block["text"]}]
            elif block["type"] == "thinking":
                empty = {**block, "thinking": ""}
                deltas = [{"type": "thinking_delta", "thinking": block["thinking"]}]
                deltas.append({"type": "signature_delta", "signature": ""})
            else:
                written = json.dumps(block["input"], ensure_ascii=False)
                empty, deltas = {**block, "input": {}}, [{"type": "input_json_delta", "partial_json": written}]
            yield event("content_block_start", index=index, content_block=empty)
            for delta in deltas:
                yield event("content_block_delta", index=index, delta=delta)
            yield event("content_block_stop", index=index)
        ended = {"stop_reason": reply["stop_reason"], "stop_sequence": None}
        yield event("message_delta", delta=ended, usage=reply["usage"])
        yield event("message_stop")

    def error(self, error: GatewayError) -> dict[str, Any]:
        kind = TYPES.get(error.kind, "invalid_request_error")
        said = f"prompt is too long: {error}" if error.kind == "context" else str(error)
        return {"type": "error", "error": {"type": kind, "message": said}}

    def error_event(self, body: Any) -> tuple[str | None, Any]:
        return "error", body


def _messages(given: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """A message of the assistant is one; a user's message with results of tools is one for each, and one for the
    rest."""
    role, content = given.get("role"), given.get("content")
    if role not in ("system", "user", "assistant"):
        raise GatewayError("invalid", f"a message's role is {role!r:.80}; expected user or assistant")
    ids = {name: given[name] for name in IDS if name in given} if role == "assistant" else {}
    if content is None or isinstance(content, str):
        yield {"role": role, "content": content or "", **ids}
        return
    texts: list[dict[str, Any]] = []
    reasoning, calls = "", []
    for block in items(content, f"the {role}'s content"):
        kind = block.get("type")
        if kind == "tool_result" and role == "user":
            result = text_of(block.get("content"), "a tool's result")
            yield {"role": "tool", "content": result, "tool_call_id": str(block.get("tool_use_id") or "")}
        elif kind == "tool_use" and role == "assistant":
            calls.append(tool_call(block.get("id"), block.get("name"), block.get("input")))
        elif kind == "thinking" and role == "assistant":
            reasoning += str(block.get("thinking") or "")
        else:
            texts.append(block)
    text = text_of(texts, f"the {role}'s message")
    if role == "assistant":
        message: dict[str, Any] = {"role": role, "content": text, **ids}
        if reasoning:
            message["reasoning_content"] = reasoning
        if calls:
            message["tool_calls"] = calls
        yield message
    elif texts or not content:
        yield {"role": role, "content": text}
