"""NemoGymClient: plays the tasks of a NeMo-Gym resources server over HTTP."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from workers.extras import require
from workers.rollout.agents.environment import Action, Environment, Observation, Step
from workers.rollout.agents.gateway.dialect import Answer, Ask
from workers.rollout.agents.gateway.responses_dialect import ResponsesDialect
from workers.rollout.agents.tools import ToolCall
from workers.rollout.engines.rollout_engine import Completion

_DIALECT = ResponsesDialect()


class NemoGymError(RuntimeError):
    """The server has refused to begin or to verify a session."""


class NemoGymClient(Environment):
    """One session of a resources server: ``/seed_session``, a route for each tool, and ``/verify`` at the end. Needs
    ``pip install 'single-controller[agents]'``.

    The row is one of NeMo-Gym's: ``responses_create_params``, with ``input`` and ``tools``, and whatever else the
    server wants; pass ``RolloutManager(engine_extras=...)`` the names of these columns. What a tool's route answers is
    what the policy sees, errors included. A turn without a call is the answer, and is verified, with all turns before.
    The session is the server's cookie. It has no `Environment.state_dict`: a session whose worker dies begins again.

    Args:
        url: of the server, such as ``http://host:8000``. The environment's proxies are not used.
        shows_input: whether `reset` returns the messages of ``input``; False if the prompt has them already.
        headers: of all requests.
        verify_seconds: how long ``/verify`` may take, in the place of `SessionLimits.silence`.
    """

    def __init__(
        self,
        url: str,
        *,
        shows_input: bool = True,
        headers: Mapping[str, str] | None = None,
        verify_seconds: float = 600.0,
    ) -> None:
        self.url, self._shows_input = url.rstrip("/"), shows_input
        self._headers, self._verify_seconds = dict(headers or {}), verify_seconds
        self._client: Any = None
        self._row: dict[str, Any] = {}
        self._ask = Ask([])
        self._output: list[dict[str, Any]] = []

    async def reset(self, row: Mapping[str, Any]) -> Observation:
        """See `Environment.reset`.

        Raises:
            GatewayError: ``responses_create_params`` has what no renderer can render.
            KeyError: the row has none.
            NemoGymError: the server has answered with an error.
        """
        httpx = require("httpx", "agents")
        self._row, self._output = dict(row), []
        self._ask = _DIALECT.read(self._row["responses_create_params"])
        # What the renderer needs of a `Tool`; the functions are the server's.
        self.tools = [SimpleNamespace(schema=schema) for schema in self._ask.tools or ()]  # type: ignore[misc]
        # No limit of its own: tools have that of the session, and `step` has one for /verify.
        self._client = httpx.AsyncClient(base_url=self.url, headers=self._headers, timeout=None, trust_env=False)
        await self._post("/seed_session", self._row)
        return self._ask.messages if self._shows_input else None

    async def step(self, action: Action) -> Step:
        """See `Environment.step`.

        Raises:
            NemoGymError: the server has answered ``/verify`` with an error.
        """
        if action.message is None:
            raise TypeError("NemoGymClient needs messages: pass a renderer to the AgentEngine")
        done = Completion(list(action.token_ids), [0.0] * len(action.token_ids), action.finish_reason)
        answer = Answer(f"{len(self._output)}", int(time.time()), "policy", (), done, action.message)
        response = _DIALECT.reply(self._ask, answer)
        self._output += response["output"]
        if action.tool_calls and action.finish_reason != "length":
            # One after the other: a server's session is not made for several at once.
            results = [(call, await self._call(call)) for call in action.tool_calls]
            self._output += [
                {"type": "function_call_output", "call_id": call.id, "output": text} for call, (text, _) in results
            ]
            observation = [
                {"role": "tool", "content": text, "name": call.name or "", "tool_call_id": call.id}
                for call, (text, _) in results
            ]
            return Step(observation, invalid=not any(valid for _, (_, valid) in results))
        # Exempt this request from `SessionLimits.silence`: /verify has a separate time limit.
        self.busy = True
        async with asyncio.timeout(self._verify_seconds):
            verified = await self._post("/verify", {**self._row, "response": {**response, "output": self._output}})
        told = {name: value for name, value in verified.items() if name not in self._row and name != "response"}
        if not isinstance(told.get("reward"), (int, float)):
            raise NemoGymError(f"{self.url}/verify: {told!r:.200} has no reward")
        reason = "length" if action.finish_reason == "length" else "done"
        return Step(reward=float(told.pop("reward")), done=True, info=told, reason=reason)

    async def close(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            await client.aclose()

    async def _call(self, call: ToolCall) -> tuple[str, bool]:
        """The result of a call of a tool, and whether it was one."""
        name, arguments, error = call.name, call.arguments, call.error
        named = {tool.schema["function"]["name"] for tool in self.tools}
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments or "{}")
            except ValueError:
                error = error or f"the arguments are no JSON: {arguments!r:.200}"
        if error is not None or name not in named or not isinstance(arguments, Mapping):
            return f"Error: {error or f'there is no tool {name!r}; there are {sorted(named)}'}", False
        reply = await self._send(f"/{name}", dict(arguments))
        return reply.text, not 400 <= reply.status_code < 500  # an error of the server's is not the policy's

    async def _send(self, path: str, body: Mapping[str, Any]) -> Any:
        """Post JSON. httpx would refuse NaN and half of an emoji, which the policy may write."""
        return await self._client.post(path, content=json.dumps(body), headers={"content-type": "application/json"})

    async def _post(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        try:
            reply = await self._send(path, body)
            if reply.status_code >= 400:
                raise NemoGymError(f"{self.url}{path}: {reply.status_code} {reply.text[:500]}")
            value = reply.json()
        except (OSError, ValueError, require("httpx", "agents").HTTPError) as error:
            raise NemoGymError(f"{self.url}{path}: {type(error).__name__}: {error}") from error
        return value if isinstance(value, dict) else {}
