"""AgentProgram: a program that plays sessions over HTTP, in the place of an `Environment`."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any

from workers.rollout.agents.environment import Action, Environment, SessionLimits, Step, as_reward, check_call
from workers.rollout.agents.trajectory import Trajectory
from workers.rollout.engines.request_engine import RequestEngine
from workers.rollout.engines.rollout_engine import SamplingParams
from workers.rollout.rollout_errors import RolloutError

if TYPE_CHECKING:
    from workers.rollout.agents.gateway.gateway import Gateway
    from workers.rollout.agents.gateway.http_front import GatewayLimits
    from workers.rollout.agents.rendering import PromptMismatchError, Renderer

Agent = Callable[[Mapping[str, Any], str, str], Awaitable[Any]]


class AgentProgram:
    """The ``environment`` of an `AgentEngine` whose sessions are played by a program of yours::

        async def agent(row, base_url, api_key):
            async with AsyncOpenAI(base_url=f"{base_url}/v1", api_key=api_key) as client:
                ...  # as many calls as it likes; tools, subagents, retries
            return reward

        AgentEngine(HFEngine, config, environment=AgentProgram(agent), renderer=make_renderer)

    The worker's process has one `Gateway`, which the first session starts. A session's rows are made of the tree of its
    calls: the prompt that the rollout is named after is not in it, unless the program asks it. A program that raises
    ends its session with the reason "error", and one that takes longer than `SessionLimits.seconds` is cancelled. A
    call beyond `SessionLimits.turns` or ``tokens`` gets an error, which clients do not retry, and the session ends with
    that reason: with the reward that the program returns then, or with 0 if it raises. If the program raises because
    the prompt of its last call filled the model's context, or because its tree has reached `GatewayLimits.nodes`, the
    session also ends with "tokens". Turns are the calls that were answered, including those of subagents; see
    `Gateway.open`. The other limits do not apply. If its worker dies, the session begins again.

    Args:
        agent: gets the row of `Environment.reset`, an address and a token. It returns the reward; or a dict with
            "reward" and what else becomes part of `Completion.info`; or None for no reward. It runs on the event loop
            of all sessions: what blocks belongs into ``await asyncio.to_thread(...)``, or into a process.
        host: where the gateway listens; another address than the default for programs in containers.
        limits: of the gateway.
        verify: see `Gateway`.

    Raises:
        TypeError: ``agent`` does not take three arguments, or ``limits`` is not a `GatewayLimits`.
    """

    def __init__(
        self, agent: Agent, *, host: str = "127.0.0.1", limits: GatewayLimits | None = None, verify: bool = False
    ) -> None:
        expected = "`async def agent(row, base_url, api_key)`"
        check_call("AgentProgram", "agent", agent, ({}, "", ""), expected)
        if limits is not None:
            from workers.rollout.agents.gateway.http_front import check_limits

            check_limits("AgentProgram", limits)
        self.agent, self.host, self.limits, self.verify = agent, host, limits, verify

    def __call__(self) -> Environment:
        raise RolloutError("AgentProgram: pass it as environment=... of an AgentEngine, which knows the engine")


class Programs:
    """Makes the environments of the sessions of one engine, which share a gateway. ``_lock`` protects its start."""

    def __init__(self, program: AgentProgram, engine: RequestEngine, renderer: Renderer) -> None:
        self.program, self._engine, self._renderer = program, engine, renderer
        self._lock = threading.Lock()
        self._gateway: Gateway | None = None
        self._closed = False

    def __call__(self) -> ProgramEnvironment:
        return ProgramEnvironment(self)

    def gateway(self) -> Gateway:
        """The gateway, started.

        Raises:
            RolloutError: the engine was closed.
        """
        from workers.rollout.agents.gateway.gateway import Gateway

        # Sessions ask from threads of their own: the first one starts it, and the others wait for its address.
        with self._lock:
            if self._closed:  # while this waited: nobody would end another one
                raise RolloutError("AgentProgram: the engine was closed")
            if self._gateway is None:
                own = self.program
                made = Gateway(self._engine, self._renderer, limits=own.limits, host=own.host, verify=own.verify)
                made.start()
                self._gateway = made
            return self._gateway

    def close(self) -> None:
        """End the gateway, for good."""
        with self._lock:
            self._closed = True
            if self._gateway is not None:
                self._gateway.stop()
                self._gateway = None


class ProgramEnvironment(Environment):
    """A session of a program.

    Attributes:
        tree: what the program has asked and got. It grows in the gateway's thread.
        counters, end_reason, full, mismatch: see `GatewaySession`; of a program that has ended.
    """

    end_reason: str | None = None
    full = False
    mismatch: PromptMismatchError | None = None

    def __init__(self, programs: Programs) -> None:
        self._programs = programs
        self._opened: tuple[Gateway, str] | None = None  # where its session is open, and the session's token
        self.tree, self.counters = Trajectory(), dict[str, int]()

    async def play(
        self, row: Mapping[str, Any], name: str, seed: int, how: SamplingParams, limits: SessionLimits
    ) -> dict[str, Any]:
        """Run the program. Returns what it has told, with "reward"."""
        gateway = self._programs._gateway
        if gateway is None:  # the start blocks, and so may the lock. Later sessions need no thread: others may have all
            gateway = await asyncio.to_thread(self._programs.gateway)
        base_url, token = gateway.open(
            name, seed=seed, sampling_params=how, trajectory=self.tree, limits=limits, expires=False
        )
        self._opened = gateway, token
        try:
            told = self._programs.program.agent(row, base_url, token)
            if not inspect.isawaitable(told):
                raise RolloutError("AgentProgram: the agent must be an `async def`")
            told = await told
        finally:  # also when it raised or was cancelled: what it has sampled stays, and running calls end
            self.end()
        info = dict(told) if isinstance(told, Mapping) else {"reward": told}
        return {**info, "reward": as_reward("AgentProgram: the agent has returned a result", info.get("reward"))}

    def end(self) -> None:
        """Close the session, also of a program that does not end. It keeps what it has sampled; running calls end."""
        # Both `play` and the session call this, the latter for a program that ignores its cancellation.
        if self._opened is not None:
            (gateway, token), self._opened = self._opened, None
            closed = gateway.close_session(token)
            self.counters, self.end_reason, self.full = closed.counters, closed.end_reason, closed.full
            self.mismatch = closed.mismatch

    async def step(self, action: Action) -> Step:
        """Not called: the program plays the whole session."""
        raise RolloutError("ProgramEnvironment.step(): a program plays whole sessions")
