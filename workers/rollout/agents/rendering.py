"""Rendering: from messages to tokens and back, in such a way that tokens which were sampled are never rendered again.

Messages are dicts as in OpenAI's chat completions: ``role``, ``content``, ``reasoning_content``, ``tool_calls``. A
`Renderer` has the methods of the package ``renderers`` (PyPI), which knows the formats of the published models.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import logging
import math
import re
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any, Protocol

from workers.extras import require
from workers.rollout.agents.tools import Tool
from workers.rollout.agents.trajectory import Trajectory
from workers.rollout.engines.rollout_engine import Completion
from workers.rollout.rollout_errors import RolloutError

logger = logging.getLogger(__name__)

Message = Mapping[str, Any]


class RenderError(RolloutError, ValueError):
    """Messages cannot be rendered: none, one without a role, or one that the renderer's format does not have."""


class PromptMismatchError(RolloutError):
    """An engine generated from other tokens than those of the session's tree.

    Attributes:
        session: name of the session.
        position: of the first token that differs.
    """

    def __init__(self, message: str, session: str = "", position: int = 0) -> None:
        super().__init__(message)
        self.session, self.position = session, position

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.args[0], self.session, self.position)


class HasTokens(Protocol):
    """What `Renderer.render` returns."""

    @property
    def token_ids(self) -> list[int]:
        """The tokens."""


class Renderer(Protocol):
    """The part of the protocol of ``renderers`` 0.1 that is used here."""

    def render(
        self, messages: list[Any], *, tools: list[Any] | None = None, add_generation_prompt: bool = False
    ) -> HasTokens:
        """Render a whole conversation."""

    def parse_response(
        self, token_ids: list[int], *, tools: list[Any] | None = None, prompt_ids: list[int] | None = None
    ) -> Any:
        """Return an object with ``content``, ``reasoning_content`` and ``tool_calls``; see `Parsed`."""

    def get_stop_token_ids(self) -> list[int]:
        """Return the tokens that end a completion."""

    def bridge_to_next_turn(
        self,
        previous_prompt_ids: list[int],
        previous_completion_ids: list[int],
        new_messages: list[Any],
        *,
        tools: list[Any] | None = None,
    ) -> HasTokens | None:
        """Return the next prompt, which begins with the previous prompt and completion; None if that cannot be proved
        to be what a rendering of the whole conversation means."""


@dataclass(frozen=True)
class Rendered:
    """What `TokenRenderer` and `TemplateRenderer` return."""

    token_ids: list[int]


@dataclass(frozen=True)
class ParsedCall:
    """A tool call in a completion. ``status`` is "ok", or why it is none."""

    raw: str
    name: str | None = None
    arguments: Any = None
    status: str = "ok"
    id: str | None = None


@dataclass(frozen=True)
class Parsed:
    """A completion as a message."""

    content: str
    reasoning_content: str | None = None
    tool_calls: list[ParsedCall] = field(default_factory=list)


def made_renderer(where: str, given: Any) -> Any:
    """Return the renderer that an argument is, or that it returns if it is a function.

    Raises:
        TypeError: it is no `Renderer`.
        RenderError: it applies a chat template, which its tokenizer does not have.
    """
    # Do not call everything that can be called: a tokenizer can, but must be refused.
    renderer: Any = given() if inspect.isroutine(given) or isinstance(given, (type, partial)) else given
    needed = ("render", "parse_response", "get_stop_token_ids", "bridge_to_next_turn")
    if not all(callable(getattr(renderer, one, None)) for one in needed):
        name = repr(renderer) if isinstance(renderer, str) else "'qwen3'"
        raise TypeError(
            f"{where}: renderer={renderer!r:.80} is no renderer; pass load_renderer(tokenizer, {name}), or a function "
            "that returns it"
        )
    applies = any(kind.__name__ in ("DefaultRenderer", "TemplateRenderer") for kind in type(renderer).__mro__)
    if applies and not getattr(renderer._tokenizer, "chat_template", None):
        raise _no_template(where, renderer._tokenizer)
    return renderer


def _no_template(where: str, tokenizer: Any) -> RenderError:
    path = getattr(tokenizer, "name_or_path", "")
    return RenderError(f"{where}: the tokenizer {path!r} has no chat template; name a renderer, or use TokenRenderer")


def render_prompt(
    renderer: Renderer, messages: Sequence[Message], tools: Sequence[Tool | Callable[..., Any]] = ()
) -> list[int]:
    """Return the tokens of a session's prompt, in which the policy is told of its tools.

    Args:
        renderer: of the `AgentEngine`.
        messages: of the user, and of the system if there is one.
        tools: those of the environment: functions or `Tool` objects, such as ``Environment.tools``.

    Raises:
        TypeError: the messages or the tools are no list.
    """
    if isinstance(messages, (str, Mapping)):
        raise TypeError(f"render_prompt(): messages={messages!r:.80}; pass a list, [{{'role': 'user', ...}}]")
    if isinstance(tools, Tool) or callable(tools):
        raise TypeError(f"render_prompt(): tools={tools!r:.80}; pass a list of functions")
    schemas = [one.schema if isinstance(one, Tool) else Tool(one).schema for one in tools]
    rendered = renderer.render(list(messages), tools=schemas or None, add_generation_prompt=True)
    return list(rendered.token_ids)


class TokenRenderer:
    """A format for tests, and for models without a chat template: ``<|role|>content`` and an end token for each
    message. Tools are listed in a message of their own, and called by ``<tool_call>{"name": ..., "arguments":
    {...}}</tool_call>`` in the text.

    Args:
        tokenizer: has ``encode(text)``, ``decode(ids)`` and ``eos_token_id``. If it knows ``<|user|>`` and so on as
            special tokens, text that a user or tool writes can contain them.
        end: the token that ends a message; the tokenizer's ``eos_token_id`` by default.

    Raises:
        ValueError: there is no end token.
    """

    def __init__(self, tokenizer: Any, end: int | None = None) -> None:
        self.tokenizer = tokenizer
        found = getattr(tokenizer, "eos_token_id", None) if end is None else end
        if found is None:
            raise ValueError("TokenRenderer: the tokenizer has no eos_token_id; pass the token that ends a message")
        self.end: int = found

    def _message(self, message: Message) -> list[int]:
        text = content_text(message)
        for call in message.get("tool_calls") or ():
            function = call["function"]
            said = {"name": function["name"], "arguments": _by_value(function.get("arguments"))}
            text += f"<tool_call>{json.dumps(said, ensure_ascii=False)}</tool_call>"
        return [*self.tokenizer.encode(f"<|{message['role']}|>"), *self.tokenizer.encode(text), self.end]

    def render(
        self, messages: list[Any], *, tools: list[Any] | None = None, add_generation_prompt: bool = False
    ) -> Rendered:
        """See `Renderer.render`."""
        listed = [{"role": "tools", "content": json.dumps(tools, ensure_ascii=False)}] if tools else []
        token_ids = [token for message in [*listed, *messages] for token in self._message(message)]
        if add_generation_prompt:
            token_ids += self.tokenizer.encode("<|assistant|>")
        return Rendered(token_ids)

    def parse_response(
        self, token_ids: list[int], *, tools: list[Any] | None = None, prompt_ids: list[int] | None = None
    ) -> Parsed:
        """See `Renderer.parse_response`."""
        ended = bool(token_ids) and token_ids[-1] == self.end
        text = self.tokenizer.decode(list(token_ids[:-1] if ended else token_ids))
        calls = [_tool_call(raw, closed == "</tool_call>") for raw, closed in _CALLS.findall(text)]
        return Parsed(_CALLS.sub("", text), None, calls)

    def get_stop_token_ids(self) -> list[int]:
        """See `Renderer.get_stop_token_ids`."""
        return [self.end]

    def bridge_to_next_turn(
        self,
        previous_prompt_ids: list[int],
        previous_completion_ids: list[int],
        new_messages: list[Any],
        *,
        tools: list[Any] | None = None,
    ) -> Rendered | None:
        """See `Renderer.bridge_to_next_turn`."""
        if any(message["role"] == "assistant" for message in new_messages):
            return None  # its tokens were sampled, or the client made it up
        before = [*previous_prompt_ids, *previous_completion_ids]
        if not before or before[-1] != self.end:
            before.append(self.end)
        return Rendered(before + self.render(new_messages, add_generation_prompt=True).token_ids)


_CALLS = re.compile(r"<tool_call>(.*?)(</tool_call>|\Z)", re.S)


def _tool_call(raw: str, closed: bool) -> ParsedCall:
    if not closed:
        return ParsedCall(raw, status="unclosed_block")
    try:
        said = json.loads(raw)
    except ValueError:
        return ParsedCall(raw, status="invalid_json")
    if not isinstance(said, dict) or not isinstance(said.get("name"), str):
        return ParsedCall(raw, status="missing_name")
    return ParsedCall(raw, said["name"], said.get("arguments") or {})


class TemplateRenderer:
    """``renderers.DefaultRenderer``, which applies a tokenizer's chat template, with a bridge: the text that the
    template appends to a conversation of two messages, the second of which is what was sampled. If the template
    changes that message, because it removes the reasoning from the history for example, there is no bridge.

    Args:
        inner: the ``DefaultRenderer``.
        tokenizer: a Hugging Face tokenizer with a chat template.
    """

    def __init__(self, inner: Any, tokenizer: Any) -> None:
        self._inner, self._tokenizer = inner, tokenizer
        self.parse_response = inner.parse_response
        self.get_stop_token_ids = inner.get_stop_token_ids

    def render(
        self, messages: list[Any], *, tools: list[Any] | None = None, add_generation_prompt: bool = False
    ) -> HasTokens:
        """See `Renderer.render`."""
        return Rendered(self._inner.render_ids(messages, tools=tools, add_generation_prompt=add_generation_prompt))

    def bridge_to_next_turn(
        self,
        previous_prompt_ids: list[int],
        previous_completion_ids: list[int],
        new_messages: list[Any],
        *,
        tools: list[Any] | None = None,
    ) -> Rendered | None:
        """See `Renderer.bridge_to_next_turn`."""
        stop = previous_completion_ids[-1] if previous_completion_ids else None
        if stop not in self.get_stop_token_ids() or any(one["role"] == "assistant" for one in new_messages):
            return None
        _, message, _ = read_response(self, previous_completion_ids, previous_prompt_ids, tools)
        history = [{"role": "user", "content": "?"}, message]
        before = self._text(history, tools)
        after = self._text([*history, *new_messages], tools, add_generation_prompt=True)
        _, ended, behind = before.rpartition(self._tokenizer.decode([stop]))
        reasoning = str(message.get("reasoning_content", "")).strip()
        in_content = {"role": "assistant", "content": f"<think>{reasoning}</think>"}
        # A template that shows it there knows nothing of reasoning, and so removes none.
        removed = reasoning not in before and reasoning not in self._text([history[0], in_content], tools)
        # Here, the template has changed the sampled text, or writes no stop token after it.
        if not ended or removed or not after.startswith(before):
            return None
        appended = self._tokenizer.encode(behind + after[len(before) :], add_special_tokens=False)
        return Rendered([*previous_prompt_ids, *previous_completion_ids, *appended])

    def _text(self, messages: list[Any], tools: list[Any] | None, **options: Any) -> str:
        decoded = [_arguments_by_value(message) for message in messages]
        options |= getattr(self._inner.config, "model_extra", None) or {}
        return str(self._tokenizer.apply_chat_template(decoded, tools=tools, tokenize=False, **options))


def load_renderer(tokenizer: Any, name: str = "auto", **options: Any) -> Renderer:
    """Return the renderer of a model. Needs ``pip install 'single-controller[agents]'``.

    Args:
        tokenizer: a Hugging Face tokenizer, or one with the methods that the renderer uses.
        name: of a renderer of the package ``renderers``, such as "qwen3"; "default" for the tokenizer's chat template.
            "auto" knows the published models by ``tokenizer.name_or_path`` and takes "default" for others, such as a
            checkpoint in a local folder: name the renderer for those.
        options: of the renderer's configuration, such as ``enable_thinking=False``, or ``tool_parser="qwen3"`` of
            "default", without which a chat template's tool calls are not parsed.

    Raises:
        ImportError: the package is not installed.
        ValueError: there is no such renderer or option, or the tokenizer lacks a token of the format.
    """
    require("renderers", "agents")
    from pydantic import TypeAdapter
    from renderers import create_renderer
    from renderers.base import MODEL_RENDERER_MAP
    from renderers.configs import RendererConfig

    path = getattr(tokenizer, "name_or_path", "")
    if name == "auto":
        name = MODEL_RENDERER_MAP.get(path, "default")
        if name == "default":
            logger.warning(
                "load_renderer: no renderer is known for %r; its chat template is used. Name the renderer if the model "
                "has the format of a published one: load_renderer(tokenizer, 'qwen3')",
                path or type(tokenizer).__name__,
            )
    if name == "default" and not getattr(tokenizer, "chat_template", None):
        raise _no_template("load_renderer", tokenizer)
    config = TypeAdapter(RendererConfig).validate_python({"name": name, **options})
    try:
        renderer = create_renderer(tokenizer if name == "default" else _Memoized(tokenizer), config)
    except AssertionError as error:  # how the package says that a token is missing
        raise ValueError(f"load_renderer: {name!r} does not fit the tokenizer {path!r}: {error}") from None
    own: Renderer = TemplateRenderer(renderer, tokenizer) if name == "default" else renderer
    return own


SHORT = 64
"""Texts of at most this many characters are remembered by `_Memoized`."""

REMEMBERED = 1024


class _Memoized:
    """A tokenizer that remembers the tokens of short texts. The package's renderers encode role names and line ends
    anew for each message, ten times per call of a gateway, and each costs a tenth of a millisecond."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._encode = lru_cache(REMEMBERED)(tokenizer.encode)
        self._call = lru_cache(REMEMBERED)(lambda *given, **options: tokenizer(*given, **options))

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._tokenizer,)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def encode(self, text: Any, *args: Any, **options: Any) -> list[int]:
        return list((self._encode if _is_short(text) else self._tokenizer.encode)(text, *args, **options))

    def __call__(self, text: Any, *args: Any, **options: Any) -> Any:
        return (self._call if _is_short(text) else self._tokenizer)(text, *args, **options)


def _is_short(text: Any) -> bool:
    return isinstance(text, str) and len(text) <= SHORT


# --- messages ---------------------------------------------------------------------------------------------------------


def content_text(message: Message) -> str:
    """The text of a message, a string or in parts; a `RenderError` if it has parts that are no text."""
    content = message.get("content")
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, Sequence):
        raise RenderError(f"a message's content is {content!r:.80}; expected a string or a list of parts")
    texts = []
    for part in content:
        text = part if isinstance(part, str) else part.get("text") if isinstance(part, Mapping) else None
        if not isinstance(text, str):
            raise RenderError(f"a message has a part {part!r:.80}; only parts with a text are supported")
        texts.append(text)
    return "".join(texts)


def _by_value(arguments: Any, read: Callable[[str], Any] = json.loads) -> Any:
    """Arguments of a tool call, which are a JSON text or what it means."""
    if not isinstance(arguments, str):
        return {} if arguments is None else arguments
    try:
        return read(arguments) if arguments.strip() else {}
    except ValueError:
        return arguments


def _finite(text: str) -> float:
    """Read a JSON number with a fraction or an exponent. Python's json also reads NaN, Infinity and 1e999, but writes
    them as text that is not JSON, and that clients in other languages cannot read.

    Raises:
        ValueError: the number is not finite.
    """
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text} is not a finite number")
    return number


_strict = json.JSONDecoder(parse_float=_finite, parse_constant=_finite).decode


def as_object(arguments: Any, read: Callable[[str], Any] = _strict) -> dict[str, Any]:
    """Arguments of a tool call as the object that they are in Anthropic's dialect."""
    value = _by_value(arguments, read)
    return value if isinstance(value, dict) else {"arguments": value}


def _arguments_by_value(message: Message) -> dict[str, Any]:
    """The message with decoded arguments, which many chat templates need."""
    calls = [
        {**call, "function": {**call["function"], "arguments": _by_value(call["function"].get("arguments"))}}
        for call in message.get("tool_calls") or ()
    ]
    return {**message, "tool_calls": calls} if calls else dict(message)


def digest(message: Message) -> str:
    """A digest of what a message says, for `Trajectory.find`: role, content (None is ""), tool calls with their
    arguments by value, and, behind a dot, the reasoning if there is any. The ids of tool calls don't count, because
    each client makes its own.

    Raises:
        RenderError: it is no message.
    """
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise RenderError(f"a message is {message!r:.80}; expected a dict with a role")
    try:
        calls = [
            [call["function"]["name"], as_object(call["function"].get("arguments"), _read)]
            for call in message.get("tool_calls") or ()
        ]
    except (AttributeError, KeyError, TypeError):
        raise RenderError(f"tool_calls={message['tool_calls']!r:.80}; expected functions with names") from None
    role, content = message["role"], content_text(message)
    # With lengths, so that no text looks like another's role, content or calls.
    said = _hash_text(f"{len(role)} {len(content)} {role}{content}{_in_order.encode(calls) if calls else ''}")
    reasoning = message.get("reasoning_content") or message.get("reasoning")
    return f"{said}.{_hash(reasoning)}" if reasoning else said


_in_order = json.JSONEncoder(sort_keys=True, ensure_ascii=False, default=str)


def _whole(text: str) -> float:
    """Like `_finite`, but return 1 for 1.0, because clients in JavaScript send 1.0 back as 1."""
    number = _finite(text)
    return int(number) if number.is_integer() else number


_read = json.JSONDecoder(parse_float=_whole, parse_constant=_finite).decode


def _hash(value: Any) -> str:
    return _hash_text(_in_order.encode(value))


def _hash_text(text: str) -> str:
    # A lone surrogate cannot be encoded. Replies contain a question mark instead, which the client sends back.
    return hashlib.blake2b(text.encode("utf-8", "replace"), digest_size=16).hexdigest()


def unreadable(call: Any) -> str | None:
    """Why a parsed tool call is none; None if it is one. The package ``renderers`` takes any JSON for a name."""
    if str(call.status) != "ok":
        return str(call.status)
    return None if isinstance(call.name, str) and call.name else "missing_name"


def assistant_message(parsed: Any, name: str = "call") -> dict[str, Any]:
    """A parsed completion as a message. Tool calls that could not be read stay in the content as they were written,
    and are listed under ``invalid_tool_calls``.

    Args:
        parsed: what `Renderer.parse_response` returned.
        name: how the ids of its tool calls begin, if the format has none: one for each turn of a session.
    """
    content: str = parsed.content or ""
    calls: list[dict[str, Any]] = []
    invalid: list[dict[str, str]] = []
    for call in parsed.tool_calls:
        if (why := unreadable(call)) is None:
            given = call.arguments
            text = given if isinstance(given, str) else json.dumps(given or {}, ensure_ascii=False)
            function = {"name": call.name, "arguments": text}
            calls.append({"id": call.id or f"{name}_{len(calls)}", "type": "function", "function": function})
        else:
            content += call.raw
            invalid.append({"raw": call.raw, "status": why})
    message: dict[str, Any] = {"role": "assistant", "content": content}
    if parsed.reasoning_content:
        message["reasoning_content"] = parsed.reasoning_content
    if calls:
        message["tool_calls"] = calls
    if invalid:
        message["invalid_tool_calls"] = invalid
    return message


def read_response(
    renderer: Renderer, token_ids: list[int], prompt: list[int], tools: list[Any] | None, name: str = "call"
) -> tuple[Any, dict[str, Any], str]:
    """Return what `Renderer.parse_response` makes of a completion, its message, and the message's `digest`. A tool call
    that is nested more deeply than Python can read is one that could not be parsed: the policy is to blame, and nothing
    has failed.

    Args:
        renderer: of the model.
        token_ids: of the completion.
        prompt: before it.
        tools: see `Renderer`.
        name: see `assistant_message`.
    """
    try:
        parsed = renderer.parse_response(token_ids, tools=tools, prompt_ids=prompt)
        message = assistant_message(parsed, name)
        return parsed, message, digest(message)
    except RecursionError:
        parsed = Parsed("", None, [ParsedCall("", status="nested too deeply")])
        message = assistant_message(parsed, name)
        return parsed, message, digest(message)


# --- the tree ---------------------------------------------------------------------------------------------------------


def extend(
    trajectory: Trajectory,
    renderer: Renderer,
    messages: Sequence[Message],
    tools: Sequence[Any] | None = None,
    counters: MutableMapping[str, int] | None = None,
    at: tuple[int, int] | None = None,
) -> int:
    """Find where a conversation continues, append what is new, and return the node whose path is the engine's prompt.

    Only the messages behind the last completion are rendered. If the renderer cannot say how they continue its tokens,
    the whole conversation is rendered: if that begins with the tokens so far, it continues them; otherwise it is a new
    root, counted as "rerenders" and logged once per session. A completion that the token limit cut off continues in the
    same way, with the end that the renderer gives it; if the renderer gives it none, it is left behind as a branch.

    Args:
        trajectory: of the session.
        renderer: of the model.
        messages: the whole conversation. A client that does not return the reasoning of a completion still continues
            that completion: what becomes of the reasoning in the prompt is up to the renderer.
        tools: as in OpenAI's ``tools``. They are part of the prompt: others begin a new root.
        counters: of the session.
        at: the node that the conversation continues, and how many messages its path stands for, if the client says so.
            By default, `Trajectory.find` finds it.

    Raises:
        RenderError: the messages cannot be rendered, or the last one is the assistant's.
    """
    if not messages or messages[-1].get("role") == "assistant":
        raise RenderError("the conversation is empty or ends with the assistant's message; there is nothing to answer")
    given, listed = list(messages), list(tools or ()) or None
    try:
        digests = ([_hash(listed)] if listed else []) + [digest(message) for message in given]
    except RecursionError:
        raise RenderError("the messages or tools are nested too deeply") from None
    found, count = trajectory.find(digests)
    if at is not None:
        found, count = at[0], at[1] + len(digests) - len(given)
    while found is not None and count < len(digests) and at is None:
        last = trajectory.nodes[found]
        if last.sampled or given[count - len(digests)]["role"] == "assistant":
            break
        # A prompt that was not answered ends with the beginning of an answer, which this conversation does not have.
        found, count = last.parent, count - len(last.messages)
    if found is None:
        return trajectory.give(None, _render(renderer, given, listed), digests)
    before = trajectory.token_ids(found)
    if count == len(digests):
        return found
    token_ids: list[int] | None = None
    if trajectory.nodes[found].sampled:
        own = len(trajectory.nodes[found].token_ids)
        rest = given[count - len(digests) :]
        try:
            bridged = renderer.bridge_to_next_turn(before[:-own], before[-own:], rest, tools=listed)
            token_ids = None if bridged is None else list(bridged.token_ids)
        except RolloutError:
            raise
        except Exception:
            token_ids = _render(renderer, given, listed)  # raises if the messages cannot be rendered at all
            logger.warning("bridge_to_next_turn() of a renderer has failed", exc_info=True)
    if token_ids is None or not _extends(token_ids, before):
        token_ids = _render(renderer, given, listed)
        last = trajectory.nodes[found]
        if not _extends(token_ids, before) and last.finish_reason == "length" and last.parent is not None:
            found, count = last.parent, count - len(last.messages)
            before = trajectory.token_ids(found)
        if not _extends(token_ids, before):
            _count_rerender(counters)
            return trajectory.give(None, token_ids, digests)
    return trajectory.give(found, token_ids[len(before) :], digests[count:])


def _extends(token_ids: list[int], before: list[int]) -> bool:
    return len(token_ids) > len(before) and token_ids[: len(before)] == before


def _render(renderer: Renderer, messages: list[Any], tools: list[Any] | None) -> list[int]:
    try:
        return list(renderer.render(messages, tools=tools, add_generation_prompt=True).token_ids)
    except RolloutError:
        raise
    except Exception as error:  # a template raises what it likes
        raise RenderError(f"the messages cannot be rendered: {type(error).__name__}: {error}") from error


def _count_rerender(counters: MutableMapping[str, int] | None) -> None:
    counters = {} if counters is None else counters
    counters["rerenders"] = counters.get("rerenders", 0) + 1
    if counters["rerenders"] == 1:
        logger.warning(
            "a session's next prompt does not begin with its tokens so far, because the client has changed its history "
            "or the chat template rewrites it; the session branches there, and rendered completions are not trained"
        )


def record(
    trajectory: Trajectory, renderer: Renderer, node: int, completion: Completion, tools: Sequence[Any] | None = None
) -> tuple[int, dict[str, Any]]:
    """Append a completion of the prompt that `extend` returned.

    Returns:
        The new node, and the assistant's message.

    Raises:
        RenderError: the renderer cannot parse it; nothing was appended.
    """
    prompt, listed, name = trajectory.token_ids(node), list(tools or ()) or None, f"call_{len(trajectory.nodes)}"
    try:
        _, message, said = read_response(renderer, completion.token_ids, prompt, listed, name)
    except Exception as error:
        raise RenderError(f"a completion cannot be parsed: {type(error).__name__}: {error}") from error
    return trajectory.sample(node, completion, [said]), message


def check_prompt(
    trajectory: Trajectory, node: int, prompt: Sequence[int], session: str, decode: Callable[[list[int]], str] = str
) -> None:
    """Raise if an engine's prompt is not the path to a node.

    Args:
        trajectory: of the session.
        node: the node whose path the engine should have got.
        prompt: what it got.
        session: its name, for the error.
        decode: from token ids to text, for the error.

    Raises:
        PromptMismatchError: a token differs.
    """
    path = trajectory.token_ids(node)
    if list(prompt) == path:
        return
    same = next((i for i, (one, other) in enumerate(zip(prompt, path, strict=False)) if one != other), None)
    position = min(len(prompt), len(path)) if same is None else same
    begin = max(0, position - 8)
    got, kept = (decode(list(ids[begin : position + 24])) for ids in (prompt, path))
    raise PromptMismatchError(
        f"session {session}: the engine's prompt of {len(prompt)} tokens differs from the tree's {len(path)} tokens at "
        f"position {position}: the engine has {got!r} there, and the tree {kept!r}",
        session,
        position,
    )
