"""OpenEnvClient: plays the environments of an OpenEnv server (openenv-core 0.3) over its WebSocket ``/ws``."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from workers.extras import require
from workers.rollout.agents.environment import Action, Environment, Observation, Step

MESSAGE_BYTES = 16 << 20
"""A larger message of the server is an error."""

CLOSE_SECONDS = 2.0
"""How long telling the server that the session ends may take."""


class OpenEnvError(RuntimeError):
    """The server has answered with an error.

    Attributes:
        code: such as "CAPACITY_REACHED"; "" if the answer makes no sense.
    """

    def __init__(self, message: str, code: str = "") -> None:
        super().__init__(message)
        self.code = code


class OpenEnvClient(Environment):
    """One session of an OpenEnv server. Needs ``pip install 'single-controller[agents]'``.

    It has no `Environment.state_dict`: a session whose worker dies begins again. Make it with a function::

        AgentEngine(..., environment=lambda: OpenEnvClient("http://host:8000", to_action=lambda a: {"message": a.text}))

    Args:
        url: of the server.
        to_action: makes the fields of the server's action.
        to_observation: makes messages or tokens of the fields of the server's observation, and None if there are none.
            By default, a user message with them as JSON.
        headers: of the request that opens the socket.
        connect_seconds: how long opening it may take. Later calls have `SessionLimits.silence`.
    """

    def __init__(
        self,
        url: str,
        *,
        to_action: Callable[[Action], Mapping[str, Any]],
        to_observation: Callable[[Mapping[str, Any]], Observation] | None = None,
        headers: Mapping[str, str] | None = None,
        connect_seconds: float = 30.0,
    ) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https", "ws", "wss") or not parts.netloc:
            raise ValueError(f"OpenEnvClient: url={url!r}; expected one such as http://host:8000")
        scheme = {"http": "ws", "https": "wss"}.get(parts.scheme, parts.scheme)
        path = parts.path.rstrip("/").removesuffix("/ws") + "/ws"
        self.url = urlunsplit((scheme, parts.netloc, path, parts.query, ""))
        self._to_action, self._to_observation = to_action, to_observation or _as_message
        self._headers, self._connect_seconds = headers, connect_seconds
        self._socket: Any = None

    async def reset(self, row: Mapping[str, Any]) -> Observation:
        """Open the socket and begin an episode. The columns ``seed`` and ``episode_id`` of the row, and the entries of
        its column ``reset``, are what the server's ``reset`` gets."""
        await self.close()  # the socket of an episode before
        client = require("websockets.asyncio.client", "agents")
        self._socket = await client.connect(
            self.url,
            additional_headers=self._headers,
            open_timeout=self._connect_seconds,
            ping_timeout=None,  # a server that is busy may answer late: `SessionLimits.silence` says how late
            max_size=MESSAGE_BYTES,
            proxy=None,
        )
        given = {name: row[name] for name in ("seed", "episode_id") if row.get(name) is not None}
        answer = await self._ask("reset", {**given, **(row.get("reset") or {})})
        return self._to_observation(answer.get("observation") or {})

    async def step(self, action: Action) -> Step:
        try:
            answer = await self._ask("step", dict(self._to_action(action)))
        except OpenEnvError as error:
            if error.code != "VALIDATION_ERROR":
                raise
            return Step(self._to_observation({"error": str(error)}), invalid=True)
        reward = answer.get("reward")
        return Step(
            self._to_observation(answer.get("observation") or {}),
            None if reward is None else float(reward),
            done=bool(answer.get("done")),
        )

    async def state(self) -> Mapping[str, Any]:
        """Return the server's state of the episode, such as its ``step_count``."""
        return await self._ask("state", None, "state")

    async def close(self) -> None:
        # Clear the socket first, so that a second close(), or one after an error, does nothing.
        socket, self._socket = self._socket, None
        if socket is None:
            return
        closed = require("websockets.exceptions", "agents").ConnectionClosed
        with contextlib.suppress(closed, TimeoutError):  # the server is gone, or hangs
            async with asyncio.timeout(CLOSE_SECONDS):
                await socket.send(json.dumps({"type": "close"}))
        await socket.close()

    async def _ask(self, kind: str, data: Mapping[str, Any] | None, expected: str = "observation") -> Mapping[str, Any]:
        message = {"type": kind} if data is None else {"type": kind, "data": data}
        await self._socket.send(json.dumps(message))
        try:
            answer = json.loads(await self._socket.recv())
            found, content = answer["type"], answer.get("data") or {}
        except (ValueError, KeyError, TypeError, AttributeError):
            raise OpenEnvError(f"{self.url}: the answer to {kind!r} is no message of OpenEnv") from None
        if found == "error":
            raise OpenEnvError(f"{self.url}: {kind}: {content.get('message')}", str(content.get("code", "")))
        if found != expected or not isinstance(content, Mapping):
            raise OpenEnvError(f"{self.url}: the answer to {kind!r} is {found!r}; expected {expected!r}")
        return content


def _as_message(observation: Mapping[str, Any]) -> Observation:
    return [{"role": "user", "content": json.dumps(observation)}] if observation else None
