"""Session: one multi-turn play of the policy with its environment. Everything here runs in the event loop of an
`AgentEngine`."""

from __future__ import annotations

import asyncio
import logging
import pickle
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeVar

from workers.rollout.agents.environment import (
    Action,
    Columns,
    Environment,
    Observation,
    SessionLimits,
    check_observation,
    checked_step,
)
from workers.rollout.agents.program import ProgramEnvironment
from workers.rollout.agents.rendering import check_prompt, read_response, unreadable
from workers.rollout.agents.rows import completion_of
from workers.rollout.agents.tools import ToolCall
from workers.rollout.agents.trajectory import Node, Trajectory
from workers.rollout.engines.request_engine import RequestEngine
from workers.rollout.engines.rollout_engine import Completion, FinishReason, SamplingParams
from workers.rollout.rollout_errors import PromptError, RolloutError
from workers.seeds import mixed_seed

if TYPE_CHECKING:
    from workers.rollout.agents.rendering import Renderer

logger = logging.getLogger(__name__)

T = TypeVar("T")

CANCEL_SECONDS = 2.0
"""How long a call of an environment that was cancelled may take to end. After that nobody waits for it."""

RETRY_SECONDS = 0.05
"""How often a session looks whether its engine has weights again."""

FAILED = ("error", "silence")
"""End reasons that are no fault of the policy: such a session is not trained."""

CUT_OFF = ("turns", "tokens", "seconds", "length")
"""End reasons of sessions that might have gone on: they count as truncated."""


@dataclass(frozen=True)
class SessionState:
    """What another `AgentEngine` needs to continue a session. It pickles. The tokens and the state of the environment
    are of one moment: between two turns, or between what was sampled and the environment's reaction to it.

    Attributes:
        number: grows with each state of a session.
        nodes: of its `Trajectory`, without the first ``base``; see `onto`.
        node: where the path ends.
        messages: of the conversation behind the row's, each with the number of nodes that there were before it. Without
            those that belong to the first ``base`` nodes.
        environment: pickled `Environment.state_dict`; None if it has none. Then the session begins again.
        acting: the environment has not reacted to the last sampled node yet.
        partial: a turn that has begun.
        turns, invalid, counts, info: so far.
        rewards: sampled node -> reward of its turn.
        seconds: that were used.
    """

    number: int = 0
    nodes: Sequence[Node] = ()
    base: int = 0
    node: int = 0
    messages: Sequence[tuple[int, Mapping[str, Any]]] = ()
    environment: bytes | None = None
    acting: bool = False
    partial: Completion | None = None
    turns: int = 0
    rewards: Mapping[int, float] = field(default_factory=dict)
    invalid: int = 0
    counts: Mapping[str, int] = field(default_factory=dict)
    info: Mapping[str, Any] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def tokens(self) -> int:
        """How many tokens were sampled."""
        sampled = sum(len(node.token_ids) for node in self.nodes if node.sampled)
        return sampled + (len(self.partial.token_ids) if self.partial else 0)

    def after(self, nodes: int) -> SessionState:
        """The state without its first nodes, for someone who has them."""
        messages = tuple(one for one in self.messages if one[0] >= nodes)
        return replace(self, nodes=tuple(self.nodes[nodes - self.base :]), base=nodes, messages=messages)

    def onto(self, earlier: SessionState | None) -> SessionState:
        """The whole state, from one without its first nodes and an earlier one that has them."""
        if not self.base or earlier is None:
            return self
        nodes = (*earlier.nodes[: self.base - earlier.base], *self.nodes)
        messages = (*(one for one in earlier.messages if one[0] < self.base), *self.messages)
        return replace(self, nodes=nodes, base=earlier.base, messages=messages)


class _Ended(Exception):
    """The session ends, for this reason."""

    def __init__(self, reason: str, error: BaseException | None = None, told: str = "") -> None:
        super().__init__(reason)
        self.reason, self.error, self.told = reason, error, told


class Session:
    """See the module's docstring.

    Args:
        name: of the session; its requests at the engine are named after it.
        prompt: where the path begins.
        sampling_params: of each turn.
        seed: of the session.
        row: for the environment.
        engine: for the turns.
        unavailable: whether the engine has no weights at the moment, but may have them again.
        environment: makes the environment.
        renderer: None if observations are token ids.
        limits: see `SessionLimits`.
        turn_discount: of the rewards of turns, for `Completion.token_rewards`; None for one reward.
        train_failed: see `AgentEngine`.
        report: logs (name, what happened, error or None) of a session that failed.
        state: to continue from.

    Attributes:
        saved: the last state between two turns; None before the first one.
        future: of the completion.
        turn: name of the request at the engine that it began last.
        aborting: whether it will end before its next turn. Any thread may set it.
    """

    def __init__(
        self,
        name: str,
        prompt: Sequence[int],
        sampling_params: SamplingParams,
        seed: int,
        row: Mapping[str, Any],
        *,
        engine: RequestEngine,
        unavailable: Callable[[], bool],
        environment: Callable[[], Environment],
        renderer: Renderer | None,
        limits: SessionLimits,
        turn_discount: float | None,
        train_failed: bool,
        report: Callable[[str, str, BaseException | None], None],
        state: SessionState | None = None,
    ) -> None:
        self.name, self.future = name, Future[Completion]()
        self.saved: SessionState | None = None
        self.turn, self._has_turn, self.aborting = "", False, False
        self._prompt, self._row, self._seed = list(prompt), Columns(row), seed
        self._engine, self._unavailable = engine, unavailable
        self._make, self._renderer, self._limits = environment, renderer, limits
        self._turn_discount, self._train_failed, self._report = turn_discount, train_failed, report
        if renderer is not None:
            stops = dict.fromkeys((*sampling_params.stop_token_ids, *renderer.get_stop_token_ids()))
            sampling_params = replace(sampling_params, stop_token_ids=tuple(stops))
        self._how = sampling_params
        self._environment: Environment | None = None
        self._aborted: asyncio.Future[None] | None = None
        self._began = time.monotonic()
        self._begin(state or SessionState())

    def _begin(self, state: SessionState) -> None:
        if state.environment is None and (state.nodes or state.number):  # a program may not have asked anything yet
            state = SessionState(counts={"restarts": state.counts.get("restarts", 0) + 1})
        self._number, self._turns, self._invalid = state.number, state.turns, state.invalid
        self._rewards, self._info = dict(state.rewards), dict(state.info)
        self._counts = {"rerenders": 0, "restarts": 0, **state.counts}
        self._reward_of_nothing = 0.0  # of a program that has sampled nothing
        self._used, self._acting, self._partial = state.seconds, state.acting, state.partial
        self._state_of_environment = state.environment
        self._trajectory = Trajectory(state.nodes)
        self._node = state.node if state.nodes else self._trajectory.give(None, self._prompt)
        self._messages = list(state.messages)

    # --- from outside ---------------------------------------------------------------------------------------------

    @property
    def begun(self) -> bool:
        """Whether a turn of it has ended here. Any thread may ask."""
        environment = self._environment
        played = environment.tree.nodes if isinstance(environment, ProgramEnvironment) else ()
        return self._has_turn or any(node.sampled for node in played)

    def abort(self) -> None:
        """End the session; its completion has the tokens so far, and the finish reason "abort". In the event loop."""
        self.aborting = True
        if self._aborted is not None and not self._aborted.done():
            self._aborted.set_result(None)

    async def run(self, ended: Callable[[Session], None]) -> None:
        """Play the session, call ``ended``, and set the future."""
        self._aborted = asyncio.get_running_loop().create_future()
        # `abort` may have been called before there was a future to set.
        if self.aborting:
            self._aborted.set_result(None)
        error: BaseException | None = None
        try:
            completion = await self._completion()
        except asyncio.CancelledError:
            error = RolloutError("the engine was closed before the session ended")
        except BaseException as raised:
            error = raised
        self._aborted.cancel()
        # Call this before the future is set: code that waits for it may immediately reuse the request id.
        ended(self)
        if error is None:
            self.future.set_result(completion)
        else:
            self.future.set_exception(error)
        if self._environment is not None:  # afterwards: nobody has to wait for it
            await self._close(self._environment)

    async def _close(self, environment: Environment) -> None:
        async def close() -> None:
            await environment.close()

        # Use a separate task, so that a close() that hangs can be cancelled, and this session still ends.
        closing, silence = asyncio.ensure_future(close()), self._limits.silence
        await asyncio.wait({closing}, timeout=silence)
        where = f"{type(environment).__name__}.close()"
        if not closing.done():
            self._report(self.name, f"{where} took longer than SessionLimits.silence, {silence:g} s", None)
        elif not closing.cancelled() and (error := closing.exception()) is not None:
            self._report(self.name, f"{where} raised {type(error).__name__}: {error}", error)
        await self._cancelled(closing)

    # --- the play -------------------------------------------------------------------------------------------------

    async def _completion(self) -> Completion:
        error: BaseException | None = None
        told = ""
        try:
            reason = await self._play()
        except _Ended as ended:
            if ended.reason == "abort":
                return self._so_far()
            reason, error, told = ended.reason, ended.error, ended.told
        except (RolloutError, asyncio.CancelledError, GeneratorExit):  # the run ends, or the engine
            raise
        except BaseException as raised:
            reason, error = "error", raised
        if error is not None or told:
            self._info["error"] = f"{type(error).__name__}: {error}" if error is not None else told
            self._report(self.name, self._info["error"], error)
        info = {
            **self._info,
            "reward": float(sum(self._rewards.values())) + self._reward_of_nothing,
            "turn_rewards": list(self._rewards.values()),
            "turns": self._turns,
            "end_reason": reason,
            **self._counts,
        }
        finish: FinishReason = "length" if reason in CUT_OFF else "stop"
        if reason in FAILED and not self._train_failed:
            finish = "error"
        return completion_of(
            self._trajectory,
            self._prompt,
            finish,
            info=info,
            rewards=self._rewards if self._turn_discount is not None else None,
            turn_discount=self._turn_discount or 0.0,
        )

    def _so_far(self) -> Completion:
        """The completion of a session that was aborted."""
        tree = self._trajectory
        if self._partial is not None:
            tree = Trajectory(tree.nodes)
            tree.sample(self._node, self._partial)
        return replace(completion_of(tree, self._prompt, "abort"), session=self._state())

    async def _play(self) -> str:
        environment = self._environment = self._make()
        if not isinstance(environment, Environment):
            raise RolloutError(f"AgentEngine: the environment is {environment!r:.80}, which is no Environment")
        if isinstance(environment, ProgramEnvironment):
            self._save()  # for the driver, which counts the sessions that begin again
            return await self._play_program(environment)
        if self._state_of_environment is not None:
            environment.load_state_dict(pickle.loads(self._state_of_environment))
        else:
            self._see(await self._call(environment.reset, self._row), "reset")
            self._save()
        while True:
            if not self._acting:
                if self._limits.turns is not None and self._turns >= self._limits.turns:
                    return "turns"
                await self._generate()
            action = self._action(environment)
            step = await self._call(environment.step, action)
            reward = checked_step(f"{type(environment).__name__}.step()", step)
            self._acting = False
            self._note(action.message)
            self._rewards[self._node] = reward
            self._info |= step.info or {}
            self._invalid = self._invalid + 1 if step.invalid else 0
            # A session that ends with a truncated turn ends with "length", even if the environment says "done".
            if step.done:
                return "length" if step.reason == "done" and self._finish_reason == "length" else step.reason
            if self._limits.invalid is not None and self._invalid >= self._limits.invalid:
                return "invalid"
            # No turn follows the last one, so its observation would not be part of any row.
            if self._limits.turns is None or self._turns < self._limits.turns:
                self._see(step.observation)
            self._save()

    async def _play_program(self, environment: ProgramEnvironment) -> str:
        """The whole session is played by a program, through the gateway."""
        try:
            told = await self._call(environment.play, self._row, self.name, self._seed, self._how, self._limits)
        except _Ended as ended:
            if ended.reason != "error" or not (environment.end_reason or environment.full):
                raise
            environment.end_reason = environment.end_reason or "tokens"  # the context or the tree is full
            told = {"reward": 0.0}  # the program raises the error that a call beyond a limit got
        finally:
            environment.end()  # a program that was cancelled may still be running
            if environment.mismatch is not None:  # whatever the program has made of it
                raise environment.mismatch
            self._trajectory = environment.tree
            self._counts |= environment.counters
            sampled = [number for number, node in enumerate(self._trajectory.nodes) if node.sampled]
            self._turns = len(sampled)
        self._info |= told
        if not sampled:
            self._reward_of_nothing = float(told["reward"])
        else:
            self._node = sampled[-1]
            self._rewards[self._node] = float(told["reward"])
        if environment.end_reason is not None:
            return environment.end_reason
        return "length" if sampled and self._finish_reason == "length" else "done"

    @property
    def _finish_reason(self) -> FinishReason:
        return self._trajectory.nodes[self._node].finish_reason or "stop"

    async def _generate(self) -> None:
        """One turn of the policy."""
        left = self._tokens_left()
        most = self._how.max_new_tokens if left is None else min(self._how.max_new_tokens, left)
        if most < 1:
            raise _Ended("tokens")
        name, prompt = f"{self.name}/{self._turns}", self._trajectory.token_ids(self._node)
        how, seed = replace(self._how, max_new_tokens=most), mixed_seed(self._seed, self._turns)
        # Set this before the turn is submitted: `AgentEngine.abort` reads it in another thread.
        self.turn = name
        while True:
            unavailable = self._unavailable()  # now: it may be available again when its error arrives
            try:
                turn = asyncio.wrap_future(self._engine.submit(prompt, how, name, seed=seed, partial=self._partial))
                # Abort the request in the engine instead of cancelling it here: the completion has the tokens so far.
                if not await self._waited(turn, self._seconds_left()):
                    self._engine.abort([name])
                completion = await turn
                if completion.finish_reason != "abort" or self.aborting or self._seconds_left() == 0.0:
                    break
                self._partial = completion if completion.token_ids else None  # somebody else has ended it: it goes on
                continue
            except PromptError as error:  # an observation with tokens that the model does not have
                raise _Ended("error", error) from error
            except RolloutError:  # some engines learn in the turn that they have no weights
                if not (unavailable or self._unavailable()):
                    raise
            if not await self._waited(asyncio.sleep(RETRY_SECONDS), self._seconds_left()):
                raise _Ended("abort" if self._is_aborted else "seconds")
        self._has_turn = True
        if completion.finish_reason == "abort" and self.aborting:
            self._partial = completion if completion.token_ids else None
            raise _Ended("abort")
        self._partial = None
        if completion.prompt_ids is not None:
            check_prompt(self._trajectory, self._node, completion.prompt_ids, self.name)
        if completion.token_ids:
            self._node = self._trajectory.sample(self._node, completion)
        if completion.finish_reason == "abort":
            raise _Ended("seconds")
        self._turns += 1
        if completion.finish_reason == "length" and most < self._how.max_new_tokens:
            raise _Ended("tokens")
        self._acting = True
        # The environment has not processed this turn yet, so save its state from before the turn.
        self._save(self._state_of_environment)

    def _action(self, environment: Environment) -> Action:
        node = self._trajectory.nodes[self._node]
        ids, reason = node.token_ids.tolist(), self._finish_reason
        if self._renderer is None:
            return Action(ids, reason)
        prompt = self._trajectory.token_ids(node.parent) if node.parent is not None else []
        specs = self._specs(environment)
        parsed, message, _ = read_response(self._renderer, ids, prompt, specs, f"call_{self._turns}")
        calls, named = [], iter(message.get("tool_calls", ()))
        for one in parsed.tool_calls:
            if (why := unreadable(one)) is None:
                of = next(named)
                calls.append(ToolCall(one.name, of["function"]["arguments"], of["id"]))
            else:
                name = one.name if isinstance(one.name, str) else None
                calls.append(ToolCall(name, "", one.id or "", f"{why}: {one.raw}"[:200]))
        return Action(ids, reason, message, calls)

    # --- observations ---------------------------------------------------------------------------------------------

    def _see(self, observation: Observation, method: str = "step") -> None:
        """Append an observation to the path."""
        check_observation(f"{type(self._environment).__name__}.{method}()", observation)
        if observation is None or not len(observation):
            return
        if not isinstance(observation[0], Mapping):
            self._give(self._node, [int(token) for token in observation])  # type: ignore[arg-type]
            return
        messages = [dict(message) for message in observation]  # type: ignore[arg-type]
        if self._renderer is None or self._environment is None:
            raise RolloutError("the environment's observation has messages: pass a renderer to the AgentEngine")
        tools = self._specs(self._environment)
        self._note(*messages)
        node = self._trajectory.nodes[self._node]
        if not node.sampled or node.parent is None:  # from `reset`
            made = self._renderer.render(messages, tools=tools, add_generation_prompt=True)
            self._give(self._node, list(made.token_ids))
            return
        prompt, sampled = self._trajectory.token_ids(node.parent), node.token_ids.tolist()
        bridged = self._renderer.bridge_to_next_turn(prompt, sampled, messages, tools=tools)
        before = len(prompt) + len(sampled)
        # If this is false, the renderer has changed the sampled tokens, and the next turn would follow other tokens.
        if bridged is not None and list(bridged.token_ids[:before]) == prompt + sampled:
            self._give(self._node, list(bridged.token_ids[before:]))
            return
        begin = self._row.get("messages")
        if not isinstance(begin, (list, tuple)):
            if node.finish_reason == "length":  # a renderer may not continue what was cut off, whatever the model
                raise _Ended("length")
            raise RolloutError(
                "the renderer cannot show that the next prompt extends this one, and there are no messages to render "
                "it anew: give the rows a column 'messages' (engine_extras), or use another renderer"
            )
        if not self._counts["rerenders"]:
            logger.warning("session %s: the conversation is rendered anew, as a new branch", self.name)
        self._counts["rerenders"] += 1
        whole = [*begin, *(message for _, message in self._messages)]
        made = self._renderer.render(whole, tools=tools, add_generation_prompt=True)
        self._give(None, list(made.token_ids))

    def _note(self, *messages: Mapping[str, Any] | None) -> None:
        """Note messages of the conversation, for the case that it is rendered anew."""
        if "messages" in self._row:
            count = len(self._trajectory.nodes)
            self._messages += [(count, message) for message in messages if message is not None]

    def _give(self, parent: int | None, token_ids: list[int]) -> None:
        if not token_ids:
            return
        left = self._tokens_left()
        if left is not None and parent is not None and len(token_ids) >= left:
            raise _Ended("tokens")  # no sampled token could follow it
        self._node = self._trajectory.give(parent, token_ids)

    @staticmethod
    def _specs(environment: Environment) -> list[dict[str, Any]] | None:
        return [tool.schema for tool in environment.tools] or None

    def _tokens_left(self) -> int | None:
        length = self._trajectory.length(self._node)
        left = []
        if self._limits.tokens is not None:
            left.append(self._limits.tokens - (length - len(self._prompt)))
        if self._engine.max_positions is not None:
            left.append(self._engine.max_positions - length)
        return min(left, default=None)

    # --- time, and states -----------------------------------------------------------------------------------------

    @property
    def _is_aborted(self) -> bool:
        return self._aborted is not None and self._aborted.done()

    @property
    def _seconds(self) -> float:
        return self._used + time.monotonic() - self._began

    def _seconds_left(self) -> float | None:
        return None if self._limits.seconds is None else max(0.0, self._limits.seconds - self._seconds)

    async def _waited(self, what: Awaitable[Any], seconds: float | None) -> bool:
        """Wait for something. False: the time is over, or the session was aborted."""
        task, aborted = asyncio.ensure_future(what), self._aborted
        if aborted is None:
            raise RuntimeError("a session that does not run waits for nothing")
        await asyncio.wait({task, aborted}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        return task.done()

    async def _call(self, method: Callable[..., Coroutine[Any, Any, T]], *args: Any) -> T:
        """Wait for one call of the environment. It may not take longer than the limits say, and ends with the session.

        Raises:
            _Ended: it has raised, or taken too long, or the session was aborted.
            RolloutError: it has raised this, or is no ``async`` function.
        """
        silence = self._limits.silence
        if not asyncio.iscoroutine(coroutine := method(*args)):
            raise RolloutError(f"{method.__qualname__} must be an `async def`")
        task = asyncio.ensure_future(coroutine)
        busy = False  # whether it was at the last look: what began since has a whole silence
        try:
            while True:
                left = self._seconds_left()
                last = left is not None and (silence is None or left < silence)
                ended = await self._waited(task, left if last else silence)
                before, busy = busy, getattr(self._environment, "busy", False)
                if ended or last or self._is_aborted or not (busy or before):
                    break
        except asyncio.CancelledError:
            await self._cancelled(task)
            raise
        if not ended:
            await self._cancelled(task)
            if self._is_aborted:
                raise _Ended("abort")
            if last:
                raise _Ended("seconds")
            where = f"{type(self._environment).__name__}.{method.__name__}()"
            raise _Ended("silence", told=f"{where} took longer than SessionLimits.silence, {silence:g} s")
        try:
            return task.result()
        except RolloutError:
            raise
        except BaseException as error:  # CancelledError if it has cancelled itself
            raise _Ended("error", error) from error

    async def _cancelled(self, task: asyncio.Future[Any]) -> None:
        if task.cancelled() or (task.done() and task.exception() is None):
            return
        task.cancel()
        await asyncio.wait({task}, timeout=CANCEL_SECONDS)
        if not task.done():
            logger.warning("session %s: a call of its environment does not end, though it was cancelled", self.name)
        elif not task.cancelled() and task.exception() is not None:
            logger.debug("session %s: its environment raised when it was cancelled", self.name, exc_info=True)

    def _save(self, environment: bytes | None = None) -> None:
        """Note the state, from which the session can continue elsewhere, with the environment's if that is known."""
        if environment is None and self._environment is not None:
            state = self._environment.state_dict()
            environment = None if state is None else pickle.dumps(state)
        self._state_of_environment = environment
        self._number += 1
        self.saved = self._state()

    def _state(self) -> SessionState:
        kept = self._state_of_environment is not None
        return SessionState(
            number=self._number,
            nodes=tuple(self._trajectory.nodes if kept else self._trajectory.nodes[:1]),
            node=self._node if kept else 0,
            messages=tuple(self._messages) if kept else (),
            environment=self._state_of_environment,
            acting=self._acting,
            partial=self._partial,
            turns=self._turns,
            rewards=dict(self._rewards),
            invalid=self._invalid,
            counts=dict(self._counts),
            info=dict(self._info),
            seconds=self._seconds,
        )
