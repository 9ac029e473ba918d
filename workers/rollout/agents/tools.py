"""Tools: functions that the policy may call, described by their signatures and docstrings.

Threads: "tool" runs one call of a plain function, and ends with it. It is a daemon: a tool that never returns does not
keep the process alive. `Tool.call` stops waiting for it, and nothing can end the thread itself.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import re
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Union

from workers.background import in_thread

THREADS = 256
"""How many calls of plain functions run at once in a process, those that do not return left out; see `call_plain`."""

MAX_DEPTH = 100
"""How deeply the arguments of a call may be nested. What is deeper is more than Python's recursion can take, here or in
the function."""

_JSON = {str: "string", int: "integer", float: "number", bool: "boolean", type(None): "null"}

# One semaphore per loop, because asyncio binds a semaphore to the loop in which a task first waits for it.
_places: dict[asyncio.AbstractEventLoop, asyncio.Semaphore] = {}


class ToolCallError(ValueError):
    """The policy's call is not valid: there is no such tool, or its arguments are wrong. The message is for the policy,
    which may correct itself."""


@dataclass(frozen=True)
class ToolCall:
    """A call that was parsed from what the policy has generated.

    Attributes:
        name: of the tool; None if the policy has not named one.
        arguments: by name. A text if it is no valid JSON.
        id: names the call in its result; "" if the dialect has no names.
        error: why the call could not be parsed; None if it could.
    """

    name: str | None
    arguments: Mapping[str, Any] | str
    id: str = ""
    error: str | None = None


class Tool:
    """A function that the policy may call.

    Args:
        function: plain or ``async def``, with a type annotation for each parameter: str, int, float, bool, None, Any,
            ``list[...]``, ``dict[str, ...]``, ``Literal[...]``, or unions of them. Its docstring is the description;
            the lines of a section "Args:" describe the parameters. A plain function runs in a thread.

    Attributes:
        name, function: of the tool.
        schema: its description, as an entry of ``tools`` of OpenAI's API.

    Raises:
        TypeError: a parameter has no annotation, one that has no JSON schema, or takes a variable number of arguments;
            or the function has no docstring.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        if not callable(function):
            raise TypeError(f"Tool({function!r:.80}): pass a function with a docstring")
        self.function = function
        self.name = getattr(function, "__name__", type(function).__name__)
        described = inspect.getdoc(function)
        if not described:
            raise TypeError(f"the tool {self.name} needs a docstring: it tells the policy what the tool does")
        self._parameters = dict(inspect.signature(function).parameters)
        self._types = typing.get_type_hints(function)
        about, of_parameters = _described(described)
        properties: dict[str, Any] = {}
        for name, parameter in self._parameters.items():
            if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
                raise TypeError(f"the tool {self.name} has the parameter {parameter}; name each parameter of a tool")
            if name not in self._types:
                raise TypeError(f"the parameter {name} of the tool {self.name} needs a type annotation")
            properties[name] = json_schema(self._types[name], f"the parameter {name} of the tool {self.name}")
            if name in of_parameters:
                properties[name]["description"] = of_parameters[name]
        self._required = [name for name, one in self._parameters.items() if one.default is one.empty]
        self.schema: dict[str, Any] = {
            "type": "function",
            "function": {
                "name": self.name,
                "description": about,
                "parameters": {"type": "object", "properties": properties, "required": self._required},
            },
        }

    def checked(self, arguments: Mapping[str, Any] | str) -> dict[str, Any]:
        """Return the arguments of a call, as the function's types say.

        Args:
            arguments: by name, or as the text of a JSON object.

        Raises:
            ToolCallError: they do not fit.
        """
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments)
            except ValueError as error:
                raise ToolCallError(f"the arguments of {self.name} are no valid JSON: {error}") from None
            except RecursionError:
                raise ToolCallError(f"the arguments of {self.name} are nested too deeply") from None
        if _deeper(arguments, MAX_DEPTH):
            raise ToolCallError(f"the arguments of {self.name} are nested too deeply")
        if not isinstance(arguments, Mapping):
            raise ToolCallError(f"the arguments of {self.name} are no JSON object")
        if unknown := [name for name in arguments if name not in self._parameters]:
            raise ToolCallError(f"{self.name} has no parameter {unknown[0]!r}; it has {_names(self._parameters)}")
        if missing := [name for name in self._required if name not in arguments]:
            raise ToolCallError(f"{self.name} needs the argument {missing[0]!r}")
        taken = {}
        for name, value in arguments.items():
            if not _fits(value, self._types[name]):
                expected = json.dumps(json_schema(self._types[name], name))
                raise ToolCallError(f"{self.name}: {name}={value!r:.80} does not fit {expected}")
            try:
                taken[name] = float(value) if self._types[name] is float else value
            except OverflowError:
                raise ToolCallError(f"{self.name}: {name} is too large for a number") from None
        return taken

    async def call(self, arguments: Mapping[str, Any]) -> Any:
        """Call the function with `checked` arguments. Cancelling this cancels an ``async`` function; a plain one goes
        on in its thread, and nobody waits for it.

        Raises:
            Exception: whatever the function raises.
        """
        if inspect.iscoroutinefunction(self.function):
            return await self.function(**arguments)
        result = await call_plain(lambda: self.function(**arguments))
        return await result if inspect.isawaitable(result) else result  # of an ``async`` function in a plain one


async def call_plain(function: Callable[[], Any]) -> Any:
    """Run a function that may block in a thread of its own. At most `THREADS` run at once; those that nobody waits for
    any more do not count, so that tools that hang do not stop the others."""
    loop = asyncio.get_running_loop()
    if loop not in _places:
        for closed in [one for one in list(_places) if one.is_closed()]:  # a copy: other loops run in other threads
            _places.pop(closed, None)
        _places[loop] = asyncio.Semaphore(THREADS)
    async with _places[loop]:
        return await asyncio.wrap_future(in_thread("tool", function))


def json_schema(annotation: Any, where: str = "the type") -> dict[str, Any]:
    """Return the JSON schema of a type.

    Args:
        annotation: see `Tool`.
        where: for the error.

    Raises:
        TypeError: it has none.
    """
    origin, inner = typing.get_origin(annotation), typing.get_args(annotation)
    if annotation is Any:
        return {}
    if annotation in _JSON:
        return {"type": _JSON[annotation]}
    if origin is Literal and all(type(value) in _JSON for value in inner):
        kinds = {_JSON[type(value)] for value in inner}
        return {"enum": list(inner)} | ({"type": kinds.pop()} if len(kinds) == 1 else {})
    if origin in (Union, types.UnionType):
        return {"anyOf": [json_schema(one, where) for one in inner]}
    if annotation is list or (origin is list and len(inner) == 1):
        return {"type": "array", "items": json_schema(inner[0], where) if inner else {}}
    if annotation is dict or (origin is dict and inner[0] is str):
        return {"type": "object"} | ({"additionalProperties": json_schema(inner[1], where)} if inner else {})
    raise TypeError(
        f"{where} is {annotation!r}, which has no JSON schema; use str, int, float, bool, list[...], dict[str, ...], "
        "Literal[...] or a union of these"
    )


def _fits(value: Any, annotation: Any) -> bool:
    origin, inner = typing.get_origin(annotation), typing.get_args(annotation)
    if annotation is Any:
        return True
    if annotation is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    if annotation is int:
        return isinstance(value, int) and not isinstance(value, bool)
    if annotation in _JSON:
        return isinstance(value, annotation)
    if origin is Literal:
        return any(value == one and type(value) is type(one) for one in inner)
    if origin in (Union, types.UnionType):
        return any(_fits(value, one) for one in inner)
    if annotation is list or origin is list:
        return isinstance(value, list) and all(_fits(one, inner[0]) for one in value if inner)
    return isinstance(value, dict) and all(_fits(one, inner[1]) for one in value.values() if inner)


def _deeper(value: Any, levels: int) -> bool:
    inner = value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ()
    return any(levels == 0 or _deeper(one, levels - 1) for one in inner)


def _described(doc: str) -> tuple[str, dict[str, str]]:
    """The description in a docstring of Google's style, and that of each parameter."""
    found = re.search(r"^(?:Args|Arguments|Parameters):\s*$", doc, re.MULTILINE)
    about = re.split(r"^(?:Args|Arguments|Parameters|Returns|Raises|Yields):\s*$", doc, flags=re.MULTILINE)[0].strip()
    parameters: dict[str, str] = {}
    name = ""
    for line in doc[found.end() :].strip("\n").splitlines() if found else ():
        if line and not line[0].isspace():
            break
        if entry := re.match(r"\s{1,4}(\w+)(?:\s*\([^)]*\))?:\s*(.*)", line):
            name = entry[1]
            parameters[name] = entry[2]
        elif name and line.strip():
            parameters[name] += " " + line.strip()
    return about, parameters


def _names(of: Sequence[str] | Mapping[str, Any]) -> str:
    return ", ".join(map(repr, of)) or "none"


def find_tool(tools: Mapping[str, Tool], call: ToolCall) -> tuple[Tool, dict[str, Any]]:
    """Return the tool of a call, and its arguments; a `ToolCallError` if the call is not valid."""
    if call.error is not None:
        raise ToolCallError(f"the tool call could not be read: {call.error}")
    if call.name is None or call.name not in tools:
        raise ToolCallError(f"there is no tool {call.name!r}; there are {_names(tools)}")
    return tools[call.name], tools[call.name].checked(call.arguments)
