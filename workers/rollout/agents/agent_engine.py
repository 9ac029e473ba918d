"""AgentEngine: plays sessions of several turns, with an engine for the turns and an environment for each session.

Threads: "agents" runs the event loop of all sessions of an engine. The first session starts it; `AgentEngine.close`
ends it. It is a daemon.
Lock: ``_lock`` protects ``_sessions``, ``_loop`` and ``_closed``, and what waits for them. It is a leaf: nothing
of the inner engine that needs a lock is called while it is held, and futures get their results in the event loop.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from workers.rollout.agents.environment import Environment, SessionLimits, ToolEnvironment, check_call
from workers.rollout.agents.program import AgentProgram, Programs
from workers.rollout.agents.rendering import made_renderer
from workers.rollout.agents.session import RETRY_SECONDS, Session, SessionState
from workers.rollout.agents.tools import Tool
from workers.rollout.engines.request_engine import RequestEngine, check_seeds
from workers.rollout.engines.rollout_engine import Completion, EngineLoad, PauseMode, RolloutEngine, SamplingParams
from workers.rollout.rollout_errors import RolloutError

if TYPE_CHECKING:
    from workers.rollout.agents.rendering import Renderer

logger = logging.getLogger(__name__)

CLOSE_SECONDS = 5.0
"""How long `AgentEngine.close` waits for environments to close."""

PROGRAM_SECONDS = 3600.0
"""`SessionLimits.seconds` of an `AgentProgram` without one."""

LAG_SECONDS = 1.0
"""An event loop that is blocked for longer is reported, once: some environment blocks."""


def _inner(name: str) -> Any:
    """An attribute or a method that is the inner engine's."""
    return property(lambda self: getattr(self.engine, name))


class AgentEngine(RolloutEngine):
    """Plays a session for each prompt: the policy generates a turn, the environment reacts, and so on, until the
    environment or a limit ends the session. A session is one completion: the tokens of all turns and observations after
    the prompt, with a ``loss_mask`` of 0 for tokens that the policy has not sampled. ``Completion.info`` has ``reward``
    (the sum over the turns), ``turn_rewards``, ``turns``, ``end_reason`` and the environment's `Step.info`.

    ``max_new_tokens`` of the sampling parameters applies to each turn. Turn k of a session is sampled with the seed
    ``mixed_seed(seed, k)``. Thousands of sessions run at once, in one thread. The weights are those of the inner
    engine, and may be updated in the middle of a turn.

    Args:
        engine: a subclass of `RequestEngine`, a function that returns an engine, or an engine.
        *args: positional arguments of the engine.
        **kwargs: keyword arguments of the engine.
        environment: creates the environment of a session: a subclass of `Environment`, or a function.
        renderer: converts between messages and tokens: a `Renderer`, or a function that returns one; None if
            observations are token ids.
        limits: limits of each session; by default `SessionLimits`.
        turn_discount: credit each turn with its own reward and those of later turns, each discounted once more per
            turn: `Completion.token_rewards`. None: the session has one reward.
        train_failed: also train sessions that end with "error" or "silence", with the rewards of their turns. By
            default, they have the finish reason "error": `collate` gives them a ``loss_mask`` of 0 and leaves them out
            of the statistics of their group, so that the policy is not penalized for an outage.
        verify: compare the prompt from which each turn was generated, as reported by the engine, with the session's
            tree. A difference makes the rollout fail with a `PromptMismatchError`.

    Raises:
        TypeError: an argument has the wrong type, or the engine has no requests.
        RenderError: the renderer applies a chat template, which its tokenizer does not have.
        ValueError: ``turn_discount`` is out of range. What making the first environment raises is passed on.
    """

    journals = True

    def __init__(
        self,
        engine: Callable[..., RequestEngine] | RequestEngine,
        *args: Any,
        environment: Callable[[], Environment],
        renderer: Renderer | Callable[[], Renderer] | None = None,
        limits: SessionLimits | None = None,
        turn_discount: float | None = None,
        train_failed: bool = False,
        verify: bool = False,
        **kwargs: Any,
    ) -> None:
        if not isinstance(environment, AgentProgram):
            check_call("AgentEngine", "environment", environment, (), "a class or a function that makes an Environment")
        elif renderer is None:
            raise TypeError("AgentEngine: an AgentProgram sends messages: pass a renderer")
        if limits is not None and not isinstance(limits, SessionLimits):
            raise TypeError(f"AgentEngine: limits={limits!r:.80}; expected SessionLimits(...)")
        number = isinstance(turn_discount, (int, float)) and not isinstance(turn_discount, bool)
        if turn_discount is not None and not (number and 0 <= turn_discount <= 1):
            raise ValueError(f"AgentEngine: turn_discount={turn_discount!r}; expected a number from 0 to 1, or None")
        if isinstance(engine, RequestEngine) and (args or kwargs):
            given = [*map(repr, args), *kwargs]
            raise TypeError(f"AgentEngine: the engine exists already, so nothing takes the argument {given[0]:.80}")
        self.limits = limits or SessionLimits()
        own: Any = None if renderer is None else made_renderer("AgentEngine", renderer)
        self.renderer: Renderer | None = own
        self.turn_discount, self.train_failed = turn_discount, train_failed
        if not (isinstance(engine, RequestEngine) or callable(engine)):
            raise TypeError(f"AgentEngine: engine={engine!r:.80}; pass the class of the engine, such as HFEngine")
        self._spare: Environment | None = None  # of the first session: a mistake in it is an error at start
        if not isinstance(environment, AgentProgram):  # before the engine, which nobody could close then
            self._spare = environment()
            _check_environment(self._spare, environment, own)
        made = engine if isinstance(engine, RequestEngine) else engine(*args, **kwargs)
        if not isinstance(made, RequestEngine):
            raise TypeError(f"AgentEngine: {engine!r:.80} made a {type(made).__name__}, which is no RequestEngine")
        self.engine = made
        made.keep_prefixes = True
        if verify:
            made.echo_prompts = True
        self.environment = environment
        if isinstance(environment, AgentProgram):
            self.environment = Programs(environment, made, own)
            # Its one call is the whole session.
            self.limits = replace(self.limits, silence=None, seconds=self.limits.seconds or PROGRAM_SECONDS)
        self._lock = threading.Condition()
        self._sessions: dict[str, Session] = {}
        """By request id, those that have not ended."""
        self._blocking: set[str] = set()
        """Request ids of calls of `generate`. A set's operations are atomic; no lock."""
        self._tasks: dict[asyncio.Task[None], Session] = {}
        """Of the event loop's thread: those of sessions whose environments are not closed."""
        self._waiting: list[Session] = []
        """Sessions that begin when `pause` with "wait" has ended."""
        self._draining = self._closed = self._lagged = False
        self._failure: BaseException | None = None  # that has ended the event loop
        self._failures: Counter[tuple[Any, ...]] = Counter()
        """How often sessions have ended with each error. Of the event loop's thread."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    # --- sessions -------------------------------------------------------------------------------------------------

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling_params: SamplingParams,
        seeds: Sequence[int],
        extras: Mapping[str, Sequence[Any]] | None = None,
    ) -> list[Completion]:
        """See `RolloutEngine.generate`. A row of ``extras`` is what `Environment.reset` gets.

        Raises:
            RolloutError: also if the engine loses its weights meanwhile.
        """
        check_seeds(prompts, seeds)
        # Check all prompts before the first session begins, so that a refused batch leaves no sessions behind.
        for number, (prompt, seed) in enumerate(zip(prompts, seeds, strict=True)):
            self.engine.check_submit(prompt, sampling_params, seed, number=number)
        # Add the time to the names, because an earlier call's list of seeds may have had the same id.
        names = [f"generate-{id(seeds)}-{number}-{time.monotonic_ns()}" for number in range(len(prompts))]
        futures = []
        self._blocking.update(names)
        try:
            for number, (prompt, seed) in enumerate(zip(prompts, seeds, strict=True)):
                row = {name: of[number] for name, of in (extras or {}).items()}
                futures.append(self.submit(prompt, sampling_params, names[number], seed=seed, extras=row))
            done = [future.result() for future in futures]
            failed = any((one.info or {}).get("failed") for one in done)  # calls of programs, which only got an error
            if failed and self.engine.weight_version is None and isinstance(self.environment, Programs):
                why = self.engine.lost_because
                raise RolloutError(f"AgentEngine.generate(): the engine has lost its weights meanwhile: {why}")
            return done
        finally:
            self._blocking.difference_update(names)
            self.abort(names)  # those that are left when one fails, or after Ctrl-C

    def submit(
        self,
        prompt: Sequence[int],
        sampling_params: SamplingParams,
        request_id: str,
        *,
        seed: int,
        partial: Completion | None = None,
        extras: Mapping[str, Any] | None = None,
    ) -> Future[Completion]:
        """See `RolloutEngine.submit`.

        Args:
            partial: a session that was aborted, here or by another engine, continues if its environment has a
                `Environment.state_dict`, and begins again otherwise.
            extras: the row for `Environment.reset`.
        """
        state = None
        if partial is not None:
            state = getattr(partial, "session", None)
            if not isinstance(state, SessionState | None):
                raise ValueError(f"submit(): partial has session={state!r:.80}; expected that of another AgentEngine")
            if state is None:
                state = SessionState(partial=partial)  # the first turn, of an engine without sessions
        begun = state.partial if state else None
        if begun is not None:
            begun = replace(begun, routed_experts=None)  # they are of the prompt of its turn, which may be a later one
        self.engine.check_submit(prompt, sampling_params, seed, request_id, begun)
        session = Session(
            request_id,
            prompt,
            sampling_params,
            int(seed),
            extras or {},
            engine=self.engine,
            unavailable=lambda: self._unavailable(request_id),
            environment=self._make,
            renderer=self.renderer,
            limits=self.limits,
            turn_discount=self.turn_discount,
            train_failed=self.train_failed,
            report=self._report,
            state=state,
        )
        session.future.set_running_or_notify_cancel()
        with self._lock:
            # As long as this is False, the loop is open: `close` and `_fail` set it under the lock, then end the loop.
            if self._closed:
                raise RolloutError("AgentEngine.submit(): the engine was closed") from self._failure
            if request_id in self._sessions:
                raise ValueError(f"submit(): request_id {request_id!r} is in use; choose another one")
            loop = self._running_loop()  # first: if no thread can be started, there is no session
            self._sessions[request_id] = session
            if self._draining:
                self._waiting.append(session)
            else:
                loop.call_soon_threadsafe(self._start, session)
        return session.future

    def _make(self) -> Environment:
        """The environment of a session."""
        with self._lock:
            made, self._spare = self._spare, None
        return self.environment() if made is None else made

    def _unavailable(self, name: str) -> bool:
        """Whether a session waits for weights. In `generate` it would wait for ever, because a worker takes no update
        before that returns."""
        lost = self.engine.weight_version is None and name not in self._blocking
        return not self._closed and (self.engine.is_held("sleep") or lost)

    def _running_loop(self) -> asyncio.AbstractEventLoop:
        """The event loop. The caller holds the lock."""
        if self._loop is None:
            loop = asyncio.new_event_loop()
            thread = threading.Thread(target=self._serve, args=(loop,), name="agents", daemon=True)
            thread.start()
            self._loop, self._thread = loop, thread  # only now: without a thread, it would run nothing
        return self._loop

    def _serve(self, loop: asyncio.AbstractEventLoop) -> None:
        asyncio.set_event_loop(loop)
        try:
            # Environments may use the device, and torch has a current device per thread.
            self.engine.prepare_thread()
            loop.call_soon(self._watch, loop, loop.time())
            while True:
                try:
                    loop.run_forever()
                    break
                except (SystemExit, KeyboardInterrupt):
                    # asyncio lets these of any task end the loop. The task has them as its result, and its session
                    # ends with it, so the loop goes on.
                    logger.debug("a task of an environment has tried to end the process", exc_info=True)
        except BaseException as error:
            self._fail(error)
        finally:
            loop.close()

    def _fail(self, error: BaseException) -> None:
        """End all sessions: their event loop has ended."""
        logger.error("the event loop of the sessions has ended", exc_info=error)
        with self._lock:
            self._closed, self._failure = True, error
            sessions, self._waiting = list(self._sessions.values()), []
            self._sessions.clear()
            self._lock.notify_all()
        # Do not hold the lock here: callbacks of these futures may call the engine.
        for session in sessions:
            if not session.future.done():
                failed = RolloutError(f"the event loop of the sessions has ended: {type(error).__name__}: {error}")
                failed.__cause__ = error
                session.future.set_exception(failed)

    def _report(self, session: str, told: str, error: BaseException | None) -> None:
        """Log what failed in a session: each place once, with its traceback, and then at 10, 100, ... times."""
        frames = traceback.extract_tb(error.__traceback__) if error is not None else ()
        key = (type(error), frames[-1].filename, frames[-1].lineno) if frames else (told,)
        self._failures[key] += 1
        count = self._failures[key]
        if count == 1:
            logger.warning("session %s: %s", session, told, exc_info=error)
        elif str(count).strip("0") == "1":
            logger.warning("%d sessions failed like this: %s", count, told)

    def _watch(self, loop: asyncio.AbstractEventLoop, due: float) -> None:
        """Report a loop that was blocked: all sessions of this worker wait then."""
        lag = loop.time() - due
        if lag > LAG_SECONDS and not self._lagged:
            self._lagged = True
            logger.warning(
                "an environment has blocked the event loop for %.1f s, and with it all sessions of this worker; use "
                "`await`, or `await asyncio.to_thread(...)` for what blocks",
                lag,
            )
        loop.call_later(0.5, self._watch, loop, loop.time() + 0.5)

    def _start(self, session: Session) -> None:
        """Play a session. In the event loop's thread."""
        task = asyncio.get_running_loop().create_task(session.run(self._forget), name=session.name)
        # Keep a reference, because asyncio keeps only weak references to tasks.
        self._tasks[task] = session
        task.add_done_callback(self._tasks.pop)

    def _forget(self, session: Session) -> None:
        with self._lock:
            if self._sessions.get(session.name) is session:
                del self._sessions[session.name]
            self._lock.notify_all()

    def abort(self, request_ids: Iterable[str] | None = None) -> None:
        """See `RolloutEngine.abort`. The calls of their environments are cancelled, and the sessions end soon after
        this has returned. ``Completion.session`` is what another engine needs to continue."""
        if isinstance(request_ids, str):
            raise TypeError(f"abort(): request_ids={request_ids!r}; pass a list of ids, [{request_ids!r}]")
        with self._lock:
            chosen = list(self._sessions) if request_ids is None else list(request_ids)
            sessions = [self._sessions[name] for name in chosen if name in self._sessions]
            for session in sessions:
                # Set this before the turn is aborted below. Otherwise, the session would submit the turn again.
                session.aborting = True
                if session in self._waiting:  # it ends as soon as it begins, and keeps what it has from elsewhere
                    self._waiting.remove(session)
                    self._running_loop().call_soon_threadsafe(self._start, session)
                with suppress(RuntimeError):  # the loop was closed meanwhile, and has ended its sessions
                    self._running_loop().call_soon_threadsafe(session.abort)
        self.engine.abort([one.turn for one in sessions if one.turn])  # now, and not when the event loop has time

    def progress(self, known: Mapping[str, tuple[int, int]]) -> dict[str, SessionState]:
        with self._lock:
            # The loop's thread replaces a state as a whole and never modifies one, so a reference is enough.
            states = {name: session.saved for name, session in self._sessions.items()}
        found = {}
        for name, state in states.items():
            number, nodes = known.get(name, (0, 0))
            if state is not None and state.number > number:
                found[name] = state.after(nodes) if nodes <= len(state.nodes) else state
        return found

    def pause(self, mode: PauseMode = "keep") -> None:
        """See `RolloutEngine.pause`. Environments continue until their next turns; with "wait", sessions end
        first.

        Raises:
            RolloutError: with "wait", sessions are running that cannot end, because of a weight update or `sleep`.
            ValueError: there is no such mode.
        """
        if mode not in ("keep", "abort", "wait"):
            raise ValueError(f"pause(): mode={mode!r}; expected 'keep', 'abort' or 'wait'")
        with self._lock:
            self._draining = mode != "keep"
        try:
            if mode == "abort":
                self.abort()
            if mode != "keep":
                with self._lock:
                    while len(self._sessions) > len(self._waiting):
                        if mode == "wait":
                            self.engine.check_ends()
                        self._lock.wait(RETRY_SECONDS)  # the engine may fall asleep meanwhile, and tells nobody
            self.engine.pause()
        finally:
            with self._lock:
                self._draining = False
                waiting, self._waiting = self._waiting, []
                # The first turns of these sessions wait in the engine for `resume`.
                for session in waiting:
                    self._running_loop().call_soon_threadsafe(self._start, session)

    def load(self) -> EngineLoad:
        """See `RolloutEngine.load`. A session is waiting if its first turn here is."""
        # Do not hold the lock here: neither this lock nor the engine's may be held while the other one is acquired.
        inner = self.engine.load()
        with self._lock:
            # Not if its next one is: each turn waits for a step of the engine, so that some session always would.
            new = sum(not session.begun for session in self._sessions.values())
            waiting = min(inner.waiting + len(self._waiting), new)
            return EngineLoad(max(0, len(self._sessions) - waiting), waiting, inner.cache_usage)

    def close(self) -> None:
        """End all sessions, and close their environments and the inner engine."""
        with self._lock:
            first, self._closed = not self._closed, True
            loop, thread = self._loop, self._thread
            waiting, self._waiting = self._waiting, []
        for session in waiting:
            self._forget(session)  # for `pause`, which waits until no session is left
            session.future.set_exception(RolloutError("the engine was closed before the session ended"))
        # Do not hold the lock here: sessions that end in the loop's thread acquire it in `_forget`.
        if loop is not None and thread is not None and thread.is_alive():
            if first:  # in a later call, the loop may be closed although its thread has not ended yet
                asyncio.run_coroutine_threadsafe(self._end(loop), loop)
            # A session's callback may call this in the loop's own thread, which cannot wait for itself.
            if threading.current_thread() is not thread:
                thread.join(CLOSE_SECONDS)
        if isinstance(self.environment, Programs):
            self.environment.close()
        # Close the engine last: the sessions and the gateway use it.
        self.engine.close()

    async def _end(self, loop: asyncio.AbstractEventLoop) -> None:
        tasks = dict(self._tasks)
        for task, session in tasks.items():
            if not session.future.done():  # or its environment is being closed, and that goes on to its end
                task.cancel()
        if tasks:
            # Wait for less time than `close` does, because the thread ends only after this.
            await asyncio.wait(tasks, timeout=0.8 * CLOSE_SECONDS)
        loop.stop()

    # --- of the inner engine --------------------------------------------------------------------------------------

    @property
    def weight_version(self) -> int | None:
        return self.engine.weight_version

    @weight_version.setter
    def weight_version(self, version: int | None) -> None:
        self.engine.weight_version = version

    any_rank = _inner("any_rank")
    partial_updates = _inner("partial_updates")
    sampling_masks = _inner("sampling_masks")
    largest_mask = _inner("largest_mask")
    routed_experts = _inner("routed_experts")
    exact_digest = _inner("exact_digest")
    keeps_weights = _inner("keeps_weights")
    weights_id = _inner("weights_id")
    resume = _inner("resume")
    sleep = _inner("sleep")
    wake_up = _inner("wake_up")
    begin_update = _inner("begin_update")
    load_weights = _inner("load_weights")
    finish_update = _inner("finish_update")
    abandon_update = _inner("abandon_update")
    weight_shapes = _inner("weight_shapes")
    weight_dtypes = _inner("weight_dtypes")
    weight_slices = _inner("weight_slices")
    read_weights = _inner("read_weights")
    raw_weights = _inner("raw_weights")
    read_raw = _inner("read_raw")
    load_raw = _inner("load_raw")


def _check_environment(made: Any, by: Any, renderer: Renderer | None) -> None:
    """Check the first environment, before anything runs."""
    if not isinstance(made, Environment):
        raise TypeError(f"AgentEngine: environment={by!r:.80} returned {made!r:.80}; expected an Environment")
    name = type(made).__name__
    if isinstance(made, ToolEnvironment):
        if not hasattr(made, "_by_name"):
            raise TypeError(f"AgentEngine: {name}.__init__() does not call super().__init__()")
        if renderer is None:
            raise TypeError(f"AgentEngine: {name} is a ToolEnvironment, which needs messages: pass a renderer")
    if wrong := [one for one in made.tools if not isinstance(one, Tool)]:
        raise TypeError(f"AgentEngine: {name}.tools has {wrong[0]!r:.80}; expected a Tool: Tool(function)")
