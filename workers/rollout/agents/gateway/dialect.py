"""Dialect: a wire format of the gateway. It makes messages of a request, and a reply of a completion."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from workers.rollout.engines.rollout_engine import Completion
from workers.rollout.rollout_errors import RolloutError


class GatewayError(RolloutError):
    """What a client gets instead of a completion, in the shape of its dialect.

    Args:
        kind: a key of `STATUS`.
        message: what was wrong, and what to do.
    """

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.kind, self.args[0])

    @property
    def status(self) -> int:
        return STATUS[self.kind]


STATUS = {
    "invalid": 400,
    "context": 400,
    "budget": 400,
    "token": 401,
    "path": 404,
    "method": 405,
    "slow": 408,
    "large": 413,
    "limit": 429,
    "failed": 500,
    "unavailable": 503,
    "late": 504,
}
"""The HTTP status of each kind of error."""

NOT_SUPPORTED = ["logit_bias", "stop", "stop_sequences", "response_format", "previous_response_id", "conversation"]
NOT_SUPPORTED += ["prompt", "functions", "top_logprobs", "chat_template", "chat_template_kwargs", "documents"]
NOT_SUPPORTED += ["continue_final_message", "structured_outputs", "text", "output_config", "web_search_options"]
NOT_SUPPORTED += ["min_tokens", "ignore_eos", "bad_words", "allowed_token_ids", "truncate_prompt_tokens"]
"""Fields of requests, of all dialects, that would change the prompt or what is generated, and that nothing here has.
How prompts are rendered is an option of `load_renderer`."""

SAMPLING = ("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "seed")
"""Fields that a client may send and that have no effect: how to sample is the trainer's decision."""

Body = Mapping[str, Any]


@dataclass
class Ask:
    """A request, whatever its dialect.

    Attributes:
        messages: as in OpenAI's chat completions.
        tools: the same.
        max_tokens: None for the session's.
        stream: whether the reply is a stream of events.
        token_ids: the prompt, instead of messages.
        stop_token_ids: instead of the session's.
        ids_wanted: whether the reply has token ids and log-probabilities: the fields of NeMo-Gym.
        body: the request.
    """

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    max_tokens: int | None = None
    stream: bool = False
    token_ids: list[int] | None = None
    stop_token_ids: tuple[int, ...] | None = None
    ids_wanted: bool = False
    body: Body = field(default_factory=dict)


@dataclass(frozen=True)
class Answer:
    """A completion, for a dialect to write.

    Attributes:
        id: of the call; unique in the session.
        created: seconds since 1970.
        model: as the request named it.
        prompt: token ids.
        completion: what was generated.
        message: the same as a message; empty if the request had token ids.
    """

    id: str
    created: int
    model: str
    prompt: Sequence[int]
    completion: Completion
    message: Mapping[str, Any]

    @property
    def training_ids(self) -> dict[str, Any]:
        """NeMo-Gym's three fields."""
        return {
            "prompt_token_ids": list(self.prompt),
            "generation_token_ids": list(self.completion.token_ids),
            "generation_log_probs": list(self.completion.log_probs),
        }


class Dialect(ABC):
    """A wire format."""

    @abstractmethod
    def read(self, body: Body) -> Ask:
        """Read a request; a `GatewayError` if it is not valid, or wants what engines cannot do."""

    @abstractmethod
    def reply(self, ask: Ask, answer: Answer) -> dict[str, Any]:
        """Write a reply."""

    @abstractmethod
    def events(self, ask: Ask, reply: dict[str, Any]) -> Iterator[tuple[str | None, Any]]:
        """Write a reply as a stream: pairs of an event's name, if it has one, and its data."""

    def error(self, error: GatewayError) -> dict[str, Any]:
        """Write an error, by default in OpenAI's shape."""
        code = {"context": "context_length_exceeded", "token": "invalid_api_key"}.get(error.kind, error.kind)
        kind = "invalid_request_error" if error.status < 500 else "server_error"
        return {"error": {"message": str(error), "type": kind, "param": None, "code": code}}

    def error_event(self, body: Any) -> tuple[str | None, Any]:
        """Write an error, as `error` has returned it, in the middle of a stream."""
        return None, body


def stream_of(events: Iterator[tuple[str | None, Any]]) -> bytes:
    """Server-sent events."""
    parts = []
    for name, data in events:
        text = data if isinstance(data, str) else json.dumps(data, ensure_ascii=False)
        parts.append(f"event: {name}\ndata: {text}\n\n" if name else f"data: {text}\n\n")
    return "".join(parts).encode("utf-8", "replace")


def log_probs_of(answer: Answer) -> dict[str, Any]:
    """The log-probabilities of an answer in OpenAI's shape. Tokens are named by their ids, as by vLLM's
    ``return_tokens_as_token_ids``."""
    done = answer.completion
    each = zip(done.token_ids, done.log_probs, strict=True)
    return {
        "content": [{"token": f"token_id:{id_}", "logprob": of, "bytes": None, "top_logprobs": []} for id_, of in each]
    }


def check_supported(body: Body) -> None:
    """Raise a `GatewayError` if a request wants what would be silently left out."""
    for field_ in NOT_SUPPORTED:
        wanted = asks = body.get(field_)
        if field_ in ("text", "output_config") and isinstance(wanted, Mapping):
            asks = wanted.get("format")  # their other entries have no effect, as those in SAMPLING
        if field_ == "web_search_options":
            asks = wanted is not None  # an empty object asks for it too
        if asks and asks != {"type": "text"}:
            raise GatewayError("invalid", f"{field_}={wanted!r:.80} is not supported; leave it out")
    if body.get("n", 1) not in (1, None):
        raise GatewayError("invalid", f"n={body['n']!r:.80} is not supported; send one request for each completion")
    choice = body.get("tool_choice")
    name = choice.get("type") if isinstance(choice, Mapping) else choice
    if name not in (None, "auto") and not (name == "none" and not body.get("tools")):
        raise GatewayError(
            "invalid",
            f"tool_choice={choice!r:.80} is not supported; the policy decides: use 'auto', or leave out the tools",
        )


def asked(body: Body, messages: list[dict[str, Any]], tools: list[dict[str, Any]], limit: Any, limit_name: str) -> Ask:
    """A request with messages; what follows them is the same in all dialects.

    Args:
        body: the request.
        messages: as for `Ask`.
        tools: the same; an empty list is None.
        limit: largest number of new tokens, as the client says it.
        limit_name: how the client calls it.

    Raises:
        GatewayError: the limit is no number of tokens.
    """
    return Ask(
        messages,
        tools or None,
        count(limit, limit_name),
        bool(body.get("stream")),
        ids_wanted=bool(body.get("return_token_ids")),
        body=body,
    )


def items(value: Any, what: str) -> list[dict[str, Any]]:
    """A list of objects; a `GatewayError` if it is none."""
    if not isinstance(value, list) or not set(map(type, value)) <= {dict}:
        raise GatewayError("invalid", f"{what} is {value!r:.80}; expected a list of objects")
    return value


def count(value: Any, what: str) -> int | None:
    """A number of tokens, or None; a `GatewayError` if it is neither."""
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
        raise GatewayError("invalid", f"{what} is {value!r:.80}; expected an integer of at least 1")
    return value


def text_of(content: Any, what: str, kinds: Sequence[str] = ("text",)) -> str:
    """The text of a content that is a string or a list of parts.

    Args:
        content: the content; None is "".
        what: it belongs to, for the error.
        kinds: the types of parts that have a text.

    Raises:
        GatewayError: there are other parts, such as images.
    """
    if content is None or isinstance(content, str):
        return content or ""
    texts = []
    for part in items(content, f"{what}'s content"):
        if part.get("type", "text") not in kinds or not isinstance(part.get("text"), str):
            raise GatewayError("invalid", f"{what} has a part of type {part.get('type')!r:.40}; only text is supported")
        texts.append(part["text"])
    return "".join(texts)


def tool_call(id_: Any, name: Any, arguments: Any) -> dict[str, Any]:
    """A tool call of the history, as in chat completions; a `GatewayError` if it has no name."""
    if not isinstance(name, str) or not name:
        raise GatewayError("invalid", f"a tool call's name is {name!r:.80}; expected a string")
    text = arguments if isinstance(arguments, str) else json.dumps({} if arguments is None else arguments)
    return {"id": str(id_ or ""), "type": "function", "function": {"name": name, "arguments": text}}


def tool(name: Any, description: Any, parameters: Any) -> dict[str, Any]:
    """A tool as in chat completions, the same in all dialects; a `GatewayError` if it has no name."""
    if not isinstance(name, str) or not name:
        raise GatewayError("invalid", f"a tool's name is {name!r:.80}; expected a string")
    function = {"name": name, "description": description or "", "parameters": parameters or {"type": "object"}}
    return {"type": "function", "function": function}
