"""Environment: what the policy acts upon over several turns. Subclass it, or `ToolEnvironment`."""

from __future__ import annotations

import asyncio
import inspect
import json
import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, fields
from typing import Any, Literal

from workers.rollout.agents.tools import Tool, ToolCall, ToolCallError, find_tool
from workers.rollout.engines.rollout_engine import FinishReason, as_integer
from workers.rollout.rollout_errors import RolloutError

Observation = Sequence[Mapping[str, Any]] | Sequence[int] | None
"""What the policy sees next: messages as in OpenAI's API, ``[{"role": "user", "content": "higher"}]``, for which the
`AgentEngine` needs a renderer; or token ids, which are appended as they are; or nothing."""


@dataclass(frozen=True)
class Action:
    """What the policy has generated in one turn.

    Attributes:
        token_ids: the tokens, with the stop token.
        finish_reason: "length" if the turn was cut off by ``max_new_tokens``.
        message: ``{"role": "assistant", "content": ...}``, as the renderer parsed it, with ``reasoning_content`` and
            ``tool_calls`` if there are any; None without a renderer.
        tool_calls: all calls in it, those that could not be parsed included.
    """

    token_ids: list[int]
    finish_reason: FinishReason
    message: Mapping[str, Any] | None = None
    tool_calls: Sequence[ToolCall] = ()

    @property
    def text(self) -> str:
        """The content of the message.

        Raises:
            RolloutError: there is no renderer, and so no message.
        """
        if self.message is None:
            raise RolloutError("Action.text: there is no message; pass a renderer to the AgentEngine, or use token_ids")
        return str(self.message.get("content") or "")


@dataclass(frozen=True)
class Step:
    """How an environment reacts to an action.

    Attributes:
        observation: what is appended for the next turn. Not used if the session is done.
        reward: of this turn, or None for no reward. The reward of a session is the sum of those of its turns.
        done: whether the session ends.
        invalid: whether the action was not valid, such as a call of a tool that does not exist;
            `SessionLimits.invalid` counts those in a row.
        info: becomes part of `Completion.info`; later entries replace earlier ones of the same name.
        reason: why the session ends, if it is done: the ``end_reason`` of `Completion.info`.
    """

    observation: Observation = None
    reward: float | None = None
    _: KW_ONLY
    done: bool = False
    invalid: bool = False
    info: Mapping[str, Any] | None = None
    reason: str = "done"


def check_observation(where: str, observation: Any) -> None:
    """Raise if something is no `Observation`.

    Args:
        where: for the error.

    Raises:
        RolloutError: the environment is wrong.
    """
    if observation is None:
        return
    single = isinstance(observation, (str, bytes, Mapping)) or not hasattr(observation, "__getitem__")
    entries = [observation] if single else list(observation)
    tokens = all(as_integer(one) is not None for one in entries)
    wrong = [one for one in entries if not (isinstance(one, Mapping) and isinstance(one.get("role"), str))]
    if single or (wrong and not tokens):
        raise RolloutError(
            f"{where} returned the observation {(wrong or entries)[0]!r:.80}; expected token ids, [5, 9], or messages, "
            "[{'role': 'user', 'content': 'higher'}]"
        )


def checked_step(where: str, step: Any) -> float:
    """Return the reward of what `Environment.step` has returned.

    Args:
        where: for the error.

    Raises:
        RolloutError: it is no `Step`, or a field has a wrong type.
        ValueError: the reward is no finite number.
    """
    if not isinstance(step, Step):
        raise RolloutError(f"{where} returned {step!r:.80}; expected a Step")
    for name, ok, expected in (
        ("done", not isinstance(step.done, str) and step.done in (True, False), "True or False"),
        ("invalid", not isinstance(step.invalid, str) and step.invalid in (True, False), "True or False"),
        ("reason", isinstance(step.reason, str) and step.reason, "a text"),
        ("info", step.info is None or isinstance(step.info, Mapping), "a dict or None"),
    ):
        if not ok:
            raise RolloutError(f"{where} returned Step({name}={getattr(step, name)!r:.80}); expected {expected}")
    return as_reward(f"{where} returned Step(reward=...)", step.reward)


def as_reward(where: str, reward: Any) -> float:
    """Return a reward as a number, 0 for None; a `ValueError` if it is no finite number."""
    try:
        number = math.nan if isinstance(reward, (str, bytes)) else 0.0 if reward is None else float(reward)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise ValueError(f"{where}: the reward is {reward!r:.80}; expected a finite number or None")
    return number


def check_call(where: str, name: str, function: Any, args: Sequence[Any], expected: str) -> None:
    """Raise a `TypeError` if a function that was passed as an argument does not take ``args``."""
    if not callable(function):
        raise TypeError(f"{where}: {name}={function!r:.80}; pass {expected}")
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # of a builtin
        return
    try:
        signature.bind(*args)
    except TypeError as error:
        raise TypeError(f"{where}: {name}={function!r:.80}: {error}; pass {expected}") from None


class MissingColumnError(RolloutError, KeyError):
    """An environment reads a column that the rows do not have."""

    __str__ = Exception.__str__  # KeyError's shows the repr


class Columns(dict[str, Any]):
    """A row of `Environment.reset`."""

    def __missing__(self, name: str) -> Any:
        raise MissingColumnError(
            f"the row has no column {name!r}, only {', '.join(map(repr, self)) or 'none'}; name it in "
            "RolloutManager(engine_extras=[...]) and pass it in generate(extras=...)"
        )


@dataclass(frozen=True)
class SessionLimits:
    """Limits of one session; None for no limit. A session that reaches a limit ends, and keeps its tokens and rewards.
    Its ``end_reason`` is the name of the limit.

    Attributes:
        turns: how many times the engine generates.
        tokens: number of tokens after the prompt, including those of observations. The engine's
            `RequestEngine.max_positions` is a limit too.
        invalid: how many actions in a row may be invalid; see `Step.invalid`.
        silence: seconds that one call of the environment may take, unless it is `Environment.busy`.
        seconds: duration of the session, including the time for which it waits for the engine.

    Raises:
        ValueError: a limit is not above 0.
    """

    turns: int | None = 32
    tokens: int | None = None
    invalid: int | None = 3
    silence: float | None = 60.0
    seconds: float | None = None

    def __post_init__(self) -> None:
        for one in fields(self):
            value = getattr(self, one.name)
            whole = one.name in ("turns", "tokens", "invalid")
            number = isinstance(value, int if whole else (int, float)) and not isinstance(value, bool)
            if value is not None and not (number and 0 < value < math.inf):
                raise ValueError(
                    f"SessionLimits: {one.name}={value!r}; expected {'an integer' if whole else 'seconds'} above 0, or "
                    "None for no limit"
                )


class Environment(ABC):
    """The environment of one session. Each session has one of its own, in the process of its rollout worker.

    All methods of a worker's sessions run on one event loop: wrap blocking calls in ``await asyncio.to_thread(...)``.
    An exception ends only this session, with the ``end_reason`` "error". When a call takes too long, or the session is
    aborted, the call is cancelled: it gets `asyncio.CancelledError`.

    If the environment has a `state_dict`, a session can be stored in a checkpoint, and continues on another worker when
    its own dies. Without it, the session begins again.

    Attributes:
        tools: the tools that the renderer describes to the policy, and whose calls it parses.
        busy: whether a call waits for something that has a time limit of its own. If so, `SessionLimits.silence` does
            not end the session.
    """

    tools: Sequence[Tool] = ()
    busy: bool = False

    async def reset(self, row: Mapping[str, Any]) -> Observation:
        """Begin.

        Args:
            row: the columns of the prompt that ``RolloutManager(engine_extras=...)`` names. Their values are objects
                that other sessions of the prompt have too: copy what you change.

        Returns:
            What follows the prompt. By default nothing.
        """
        return None

    @abstractmethod
    async def step(self, action: Action) -> Step:
        """React to what the policy has generated."""

    async def close(self) -> None:  # noqa: B027  (optional)
        """Free what the environment holds. Called once, after `reset` was, however the session has ended."""

    def state_dict(self) -> Any:
        """Return what another environment needs to continue, between two calls of `step`. It must pickle. None, which
        is the default, if that is not possible."""
        return None

    def load_state_dict(self, state: Any) -> None:
        """Continue from what `state_dict` has returned: called instead of `reset`."""
        raise NotImplementedError(f"{type(self).__name__} has a state_dict, but no load_state_dict")


class ToolEnvironment(Environment):
    """Runs the tools that the policy calls, all calls of one turn at once. A turn without a call is the answer: it ends
    the session, and `score` is its reward. A turn that was cut off ends the session with the reason "length".

    Args:
        tools: functions, see `Tool`. By default those of the attribute ``functions``: a subclass may name its own
            methods there.
        result_chars: results of tools that are longer are cut.
        cut: which part is left out.

    Attributes:
        row: what `reset` got.
    """

    functions: Sequence[Callable[..., Any] | str] = ()

    def __init__(
        self,
        tools: Sequence[Callable[..., Any] | Tool] = (),
        *,
        result_chars: int = 8192,
        cut: Literal["left", "middle", "right"] = "right",
    ) -> None:
        name = type(self).__name__
        if cut not in ("left", "middle", "right"):
            raise ValueError(f"{name}: cut={cut!r}; expected 'left', 'middle' or 'right'")
        if as_integer(result_chars) is None or result_chars < 1:
            raise ValueError(f"{name}: result_chars={result_chars!r}; expected an integer above 0")
        if type(self).tools is not Environment.tools:
            raise TypeError(f"{name}: the class has an attribute `tools`; name it `functions`")
        for attribute, given in (("functions", self.functions), ("tools", tools)):
            if isinstance(given, str) or not isinstance(given, Sequence):
                raise TypeError(
                    f"{name}: {attribute}={given!r:.80}; expected a tuple, with a comma behind a single one"
                )
        if unknown := [one for one in self.functions if isinstance(one, str) and not hasattr(self, one)]:
            raise TypeError(f"{name}: functions names {unknown[0]!r}, but the class has no such method")
        for one in (*self.functions, *tools):
            if inspect.isfunction(one) and next(iter(inspect.signature(one).parameters), "") == "self":
                raise TypeError(f"{name}: the tool {one.__name__} is a method; give its name, ({one.__name__!r},)")
        named = [getattr(self, one) if isinstance(one, str) else one for one in self.functions]
        self.tools = [one if isinstance(one, Tool) else Tool(one) for one in (*named, *tools)]
        self._by_name = {tool.name: tool for tool in self.tools}
        if len(self._by_name) < len(self.tools):
            raise ValueError(f"{name}: two tools have one name: {[tool.name for tool in self.tools]}")
        self._result_chars, self._cut = result_chars, cut
        self.row: Mapping[str, Any] = {}

    async def reset(self, row: Mapping[str, Any]) -> Observation:
        self.row = row
        return None

    async def step(self, action: Action) -> Step:
        if action.message is None:
            raise TypeError("a ToolEnvironment needs messages: pass a renderer to the AgentEngine")
        if action.finish_reason == "length":
            return Step(done=True, reason="length")
        if not action.tool_calls:
            score = self.score(action)
            if not inspect.isawaitable(score):
                raise RolloutError(f"{type(self).__name__}.score() must be an `async def`")
            return Step(reward=await score, done=True)
        results = await asyncio.gather(*(self._result(call) for call in action.tool_calls))
        observation = [
            {"role": "tool", "content": text, "name": call.name or "", "tool_call_id": call.id}
            for call, (text, _) in zip(action.tool_calls, results, strict=True)
        ]
        failed = sum(not valid for _, valid in results)
        return Step(observation, invalid=failed == len(results))

    async def score(self, action: Action) -> float | None:
        """Return the reward of an answer. By default there is none."""
        return None

    async def _result(self, call: ToolCall) -> tuple[str, bool]:
        """The result of a call, and whether the call was valid."""
        try:
            tool, arguments = find_tool(self._by_name, call)
        except ToolCallError as error:
            return self._shortened(f"Error: {error}"), False
        try:
            result = await tool.call(arguments)
            text = result if isinstance(result, str) else json.dumps(result, default=str)
        except (RolloutError, asyncio.CancelledError):  # not the policy's fault, or nobody waits any more
            raise
        except BaseException as error:
            # The policy's arguments may be the reason: it sees the error, as it would see the one of a real tool.
            return self._shortened(f"Error: {type(error).__name__}: {error}"), True
        return self._shortened(text), True

    def _shortened(self, text: str) -> str:
        text = text.encode("utf-8", "replace").decode()  # half of an emoji, which the policy has written, is no text
        most = self._result_chars
        if len(text) <= most:
            return text
        end = {"left": most, "middle": most // 2, "right": 0}[self._cut]  # how much is kept there
        return f"{text[: most - end]}[...]{text[len(text) - end :]}"


def session_reward(
    prompt_ids: Sequence[int], completion_ids: Sequence[int], info: Mapping[str, Any], **columns: Any
) -> float:
    """The reward function of sessions: the sum of what `Environment.step` has returned. Pass it to `RolloutManager`."""
    if not isinstance(info, Mapping) or "reward" not in info:
        raise RolloutError(
            "session_reward: info has no 'reward'. The engine has no sessions, or a column 'info' of the data replaces "
            "Completion.info: rename the column, or leave it out with PromptData(columns=...)"
        )
    return float(info["reward"])


COUNTED = ("turns", "end_reason", "restarts", "rerenders")
"""What `session_metrics` reads of a session."""


def session_metrics(infos: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return what became of sessions.

    Args:
        infos: `Completion.info` of each, or the entries `COUNTED` of it.

    Returns:
        ``sessions/turns``, the mean; ``sessions/ended/REASON``, the share of each end reason, that of "error" always;
        ``sessions/restarts`` and ``sessions/rerenders``, the number of sessions that began again and of prompts that
        were rendered again. Empty if there are no sessions.
    """
    if not infos:
        return {}
    reasons = Counter({"error": 0})
    reasons.update(str(info["end_reason"]) for info in infos)
    found = {"sessions/turns": sum(info["turns"] for info in infos) / len(infos)}
    found |= {f"sessions/ended/{reason}": count / len(infos) for reason, count in sorted(reasons.items())}
    return found | {
        f"sessions/{name}": float(sum(info.get(name, 0) for info in infos)) for name in ("restarts", "rerenders")
    }
