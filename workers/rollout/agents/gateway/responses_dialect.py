"""OpenAI's responses."""

from __future__ import annotations

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

TEXTS = ("text", "input_text", "output_text")


class ResponsesDialect(Dialect):
    """``POST /v1/responses``. Responses are not stored: send the whole ``input`` each time."""

    def read(self, body: Body) -> Ask:
        check_supported(body)
        messages: list[dict[str, Any]] = []
        if instructions := text_of(body.get("instructions"), "instructions"):
            messages.append({"role": "system", "content": instructions})
        given = body.get("input")
        if isinstance(given, str):
            messages.append({"role": "user", "content": given})
        else:
            for item in items(given, "input"):
                _add(messages, item)
        tools = []
        for one in items(body.get("tools") or [], "tools"):
            if one.get("type") != "function":
                raise GatewayError("invalid", f"a tool's type is {one.get('type')!r:.40}; only functions are supported")
            tools.append(tool(one.get("name"), one.get("description"), one.get("parameters")))
        return asked(body, messages, tools, body.get("max_output_tokens"), "max_output_tokens")

    def reply(self, ask: Ask, answer: Answer) -> dict[str, Any]:
        message, id_ = answer.message, answer.id
        cut = answer.completion.finish_reason == "length"
        status = "incomplete" if cut else "completed"
        output: list[dict[str, Any]] = []
        if reasoning := message.get("reasoning_content"):
            content = [{"type": "reasoning_text", "text": reasoning}]
            output.append({"type": "reasoning", "id": f"rs_{id_}", "summary": [], "content": content})
        if message["content"] or not message.get("tool_calls"):
            part = {"type": "output_text", "text": message["content"], "annotations": [], "logprobs": []}
            whole = {"type": "message", "id": f"msg_{id_}", "role": "assistant", "status": status, "content": [part]}
            output.append(whole)
        for index, call in enumerate(message.get("tool_calls") or ()):
            item = {"type": "function_call", "id": f"fc_{id_}_{index}", "call_id": call["id"], "status": status}
            output.append(item | call["function"])
        if ask.ids_wanted:
            output[-1] |= answer.training_ids
        prompt, new = len(answer.prompt), len(answer.completion.token_ids)
        return {
            "id": f"resp_{id_}",
            "object": "response",
            "created_at": answer.created,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "instructions": ask.body.get("instructions"),
            "max_output_tokens": ask.max_tokens,
            "model": answer.model,
            "output": output,
            "parallel_tool_calls": True,
            "previous_response_id": None,
            "temperature": ask.body.get("temperature"),
            "text": {"format": {"type": "text"}},
            "tool_choice": ask.body.get("tool_choice") or "auto",
            "tools": ask.body.get("tools") or [],
            "top_p": ask.body.get("top_p"),
            "truncation": "disabled",
            "metadata": ask.body.get("metadata") or {},
            "usage": {
                "input_tokens": prompt,
                "input_tokens_details": {"cached_tokens": 0},
                "output_tokens": new,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": prompt + new,
            },
        }

    def events(self, ask: Ask, reply: dict[str, Any]) -> Iterator[tuple[str | None, Any]]:
        numbers = iter(range(1_000_000))

        def event(kind: str, **data: Any) -> tuple[str, Any]:
            return kind, {"type": kind, "sequence_number": next(numbers), **data}

        begun = {**reply, "status": "in_progress", "output": [], "usage": None, "incomplete_details": None}
        yield event("response.created", response=begun)
        yield event("response.in_progress", response=begun)
        for index, item in enumerate(reply["output"]):
            at: dict[str, Any] = {"output_index": index, "item_id": item["id"]}
            written = "arguments" if item["type"] == "function_call" else "content"
            empty = {**item, written: "" if written == "arguments" else [], "status": "in_progress"}
            yield event("response.output_item.added", output_index=index, item=empty)
            if item["type"] == "function_call":
                yield event("response.function_call_arguments.delta", **at, delta=item["arguments"])
                yield event(
                    "response.function_call_arguments.done", **at, name=item["name"], arguments=item["arguments"]
                )
            for number, part in enumerate(item.get("content") or ()):
                at["content_index"] = number
                kind = "output_text" if item["type"] == "message" else "reasoning_text"
                extra: dict[str, Any] = {"logprobs": []} if item["type"] == "message" else {}
                yield event("response.content_part.added", **at, part={**part, "text": ""})
                yield event(f"response.{kind}.delta", **at, delta=part["text"], **extra)
                yield event(f"response.{kind}.done", **at, text=part["text"], **extra)
                yield event("response.content_part.done", **at, part=part)
            yield event("response.output_item.done", output_index=index, item=item)
        name = "response.incomplete" if reply["status"] == "incomplete" else "response.completed"
        yield event(name, response=reply)

    def error_event(self, body: Any) -> tuple[str | None, Any]:
        said = body.get("error", {})
        event = {"code": said.get("code"), "message": said.get("message"), "param": None}
        return "error", {"type": "error", "sequence_number": 0, **event}


def _add(messages: list[dict[str, Any]], item: dict[str, Any]) -> None:
    """Append an item to the messages. Items of the assistant that follow each other are one message."""
    kind, role = item.get("type", "message"), item.get("role")
    if kind == "function_call_output":
        output = text_of(item.get("output"), "a tool's output", TEXTS)
        messages.append({"role": "tool", "content": output, "tool_call_id": str(item.get("call_id") or "")})
        return
    if kind == "message" and role in ("system", "developer", "user"):
        content = text_of(item.get("content"), f"the {role}'s message", TEXTS)
        messages.append({"role": "user" if role == "user" else "system", "content": content})
        return
    if not (kind in ("reasoning", "function_call") or (kind == "message" and role == "assistant")):
        raise GatewayError("invalid", f"an item has type {kind!r:.40} and role {role!r:.40}, which is not supported")
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": ""})
    own = messages[-1]
    if kind == "message":
        own["content"] += text_of(item.get("content"), "the assistant's message", TEXTS)
    elif kind == "function_call":
        call = tool_call(item.get("call_id"), item.get("name"), item.get("arguments"))
        own.setdefault("tool_calls", []).append(call)
    elif said := text_of(item.get("content"), "the reasoning", ("reasoning_text",)):
        own["reasoning_content"] = own.get("reasoning_content", "") + said
    own |= {name: item[name] for name in IDS if name in item}
