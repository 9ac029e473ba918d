"""Gateway: sessions that programs play over HTTP, in front of the `RequestEngine` of a rollout worker's process.

A program gets an address and a token, and uses them as those of OpenAI's or Anthropic's API. Each of its calls extends
the session's `Trajectory`.

Lock: ``Gateway._lock`` protects the sessions and their trees. It is held while messages are rendered, and never while
the engine is called.
"""

from __future__ import annotations

import asyncio
import functools
import hmac
import json
import logging
import math
import secrets
import threading
import time
from array import array
from base64 import b64decode, b64encode
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

from workers.rollout.agents.environment import SessionLimits
from workers.rollout.agents.gateway.dialect import SAMPLING, Answer, Ask, Dialect, GatewayError, stream_of
from workers.rollout.agents.gateway.http_front import (
    KEY_HEADER,
    MODELS,
    Call,
    GatewayLimits,
    HTTPFront,
    Reply,
    Use,
    json_reply,
)
from workers.rollout.agents.rendering import (
    PromptMismatchError,
    Renderer,
    RenderError,
    check_prompt,
    extend,
    made_renderer,
    record,
)
from workers.rollout.agents.trajectory import Node, Trajectory
from workers.rollout.engines.request_engine import RequestEngine
from workers.rollout.engines.rollout_engine import Completion, RoutedExperts, SamplingMask, SamplingParams
from workers.rollout.rollout_errors import PromptError, RolloutError
from workers.seeds import mixed_seed

logger = logging.getLogger(__name__)

JOURNAL_HEADER, NODES_HEADER = "x-gateway-journal", "x-gateway-nodes"
"""How many nodes a `GatewayRouter` has, and how many bytes of a reply are nodes that it has not."""

PRIVATE_BYTES = 2**30
"""How large the body of such a request may be: it may have a whole session."""

RETRY_SECONDS = 0.2

MODEL = "policy"
"""The model's name for requests without one."""

UNLIMITED = SessionLimits(turns=None)


@dataclass(eq=False)
class GatewaySession:
    """A session.

    Attributes:
        row_id: what the session was opened for; it names the session in errors.
        seed: of its completions.
        sampling_params: of its completions.
        token_ids: whether replies have NeMo-Gym's three fields, also if the request does not ask for them.
        tree: its tokens.
        counters: "calls", "failed", "overruled", "rerenders" and "truncated", replies that the token limit cut off.
        running: ids of the engine's requests.
        closed: whether it was closed.
        limits: of its turns and tokens; see `Gateway.open`.
        end_reason: "turns" or "tokens" once that limit is used up: then each call gets an error.
        full: whether the last call failed because the model's context or the tree was full.
        mismatch: what ``verify`` has found.
        expires: whether it is closed when it is idle for too long.
        use: its calls.
        id: of its calls, with a number.
    """

    row_id: str
    seed: int
    sampling_params: SamplingParams
    token_ids: bool = False
    tree: Trajectory = field(default_factory=Trajectory)
    counters: dict[str, int] = field(default_factory=dict)
    running: set[str] = field(default_factory=set)
    closed: bool = False
    limits: SessionLimits = UNLIMITED
    end_reason: str | None = None
    full: bool = False
    mismatch: PromptMismatchError | None = None
    expires: bool = True
    use: Use = field(default_factory=Use)
    id: str = field(default_factory=lambda: secrets.token_hex(6))

    def count(self, name: str) -> int:
        """Count one more, and return how many there are."""
        self.counters[name] = self.counters.get(name, 0) + 1
        return self.counters[name]

    def check_open(self) -> None:
        """Raise a `GatewayError` if it was closed: its tree is somebody else's then."""
        if self.closed:
            raise GatewayError("token", "the session was closed")

    @property
    def turns_left(self) -> float:
        """How many more calls may be answered; infinity without a limit."""
        if self.limits.turns is None:
            return math.inf
        return self.limits.turns - sum(node.sampled for node in self.tree.nodes)

    @property
    def tokens_left(self) -> int | None:
        """How many tokens the tree may still get; None for any number."""
        if self.limits.tokens is None:
            return None
        # The first node is the prompt of the first call.
        return self.limits.tokens - sum(len(node.token_ids) for node in self.tree.nodes[1:])


class Gateway:
    """An HTTP server for programs that play sessions: OpenAI's chat completions and responses, Anthropic's messages,
    and vLLM's token endpoint, all in front of one engine.

    A reply is sent when its completion has ended. A client that asks for a stream gets it then, in one piece: tool
    calls and reasoning can only be told from text at the end. How to sample is the session's decision: a client's
    ``max_tokens`` can only lower the limit, and its ``temperature`` and the like have no effect, which is counted as
    "overruled" and logged once per session.

    Args:
        engine: generates. It may be updated and paused as without a gateway.
        renderer: of the model, or a function that returns it.
        sampling_params: of sessions that are opened without. The renderer's stop tokens are added.
        limits: what clients can take.
        host: address to listen at.
        port: 0 for any.
        verify: compare the prompt that each completion was generated from with the session's tree.
        tag: adds to a completion what the worker knows of it, such as the fingerprints of the weights.

    Attributes:
        key: what a `GatewayRouter` shows.

    Raises:
        TypeError: the engine generates batches only, or ``renderer`` or ``limits`` is not of its type.
        RenderError: the renderer applies a chat template, which its tokenizer does not have.
    """

    def __init__(
        self,
        engine: RequestEngine,
        renderer: Renderer | Callable[[], Renderer],
        sampling_params: SamplingParams | None = None,
        *,
        limits: GatewayLimits | None = None,
        host: str = "127.0.0.1",
        port: int = 0,
        verify: bool = False,
        tag: Callable[[Completion], Completion] | None = None,
    ) -> None:
        if not isinstance(engine, RequestEngine):
            raise TypeError(f"Gateway: the engine is a {type(engine).__name__}; requests need a RequestEngine")
        self.renderer: Renderer = made_renderer("Gateway", renderer)
        self.engine, self.limits = engine, limits or GatewayLimits()
        self.sampling_params = sampling_params or SamplingParams(max_new_tokens=4096)
        self.key = secrets.token_urlsafe(24)
        self._tag = tag
        engine.keep_prefixes = True
        if verify:
            engine.echo_prompts = True
        self._lock = threading.Lock()
        self._sessions: dict[str, GatewaySession] = {}
        self._front = HTTPFront(self, self.limits, host, port)

    @property
    def address(self) -> str:
        """``http://host:port``."""
        return self._front.address

    @property
    def endpoint(self) -> tuple[str, str]:
        """The address and the key, for a `GatewayRouter`."""
        return self.address, self.key

    def start(self) -> str:
        """Start the server, and return its address; see `HTTPFront.start`."""
        return self._front.start()

    def stop(self) -> None:
        """End all calls, and the server. Sessions can still be closed."""
        self._front.stop()

    # --- sessions -------------------------------------------------------------------------------------------------

    def open(
        self,
        row_id: str = "",
        *,
        seed: int | None = None,
        sampling_params: SamplingParams | None = None,
        token_ids: bool = False,
        token: str | None = None,
        trajectory: Trajectory | None = None,
        limits: SessionLimits | None = None,
        expires: bool = True,
    ) -> tuple[str, str]:
        """Open a session. Any thread may call this.

        Args:
            row_id: names the session in errors and logs.
            seed: of its completions; a random one by default.
            sampling_params: of its completions; those of the gateway by default.
            token_ids: see `GatewaySession`.
            token: a new one by default.
            trajectory: of a session that continues.
            limits: by default none. ``turns`` and ``tokens`` apply: a turn is a call that was answered, and tokens are
                those of the tree without the prompt of the first call. Once one is used up, calls get an error, and
                `GatewaySession.end_reason` is its name. Calls that run at once may each take all tokens that are left;
                a call for which they may leave no turn waits for their end.
            expires: whether `GatewayLimits.idle_seconds` and ``sessions`` hold. They are for sessions that others open,
                and those of a rollout are its own.

        Returns:
            The address, and the session's token. ``OpenAI(base_url=f"{address}/v1", api_key=token)`` and
            ``Anthropic(base_url=address, api_key=token)`` play the session.

        Raises:
            GatewayError: too many sessions are open.
            ValueError: the token is in use.
        """
        how = sampling_params or self.sampling_params
        stops = tuple(dict.fromkeys((*how.stop_token_ids, *self.renderer.get_stop_token_ids())))
        token = token or f"sk-{secrets.token_urlsafe(24)}"
        session = GatewaySession(
            row_id or token[:8],
            secrets.randbits(62) if seed is None else seed,
            replace(how, stop_token_ids=stops),
            token_ids,
            trajectory or Trajectory(),
            limits=limits or UNLIMITED,
            expires=expires,
        )
        with self._lock:
            if token in self._sessions:
                raise ValueError("Gateway.open(): the token is in use")
            if expires and (others := sum(one.expires for one in self._sessions.values())) >= self.limits.sessions:
                raise GatewayError("limit", f"{others} sessions are open, which is the limit; close some")
            self._sessions[token] = session
        return self.address, token

    def close(self, token: str) -> Trajectory:
        """Close a session, and return its tokens. Its calls end with an error. Any thread may call this.

        Raises:
            KeyError: there is no such session.
        """
        return self.close_session(token).tree

    def close_session(self, token: str) -> GatewaySession:
        """`close`, with the session's counters and the reason of its end."""
        with self._lock:
            session = self._sessions.pop(token, None)
            if session is None:
                raise KeyError("Gateway.close(): there is no session with this token; was it closed, or did it expire?")
            # Set this before the copy below: a call that submits its request later sees it, and aborts the request.
            session.closed = True
            running = list(session.running)
        self.engine.abort(running)  # not under the lock: the engine may end requests in this very thread
        return session

    @property
    def sessions(self) -> int:
        """How many sessions are open."""
        return len(self._sessions)

    def expire(self) -> None:
        """See `Player.expire`."""
        seconds = self.limits.idle_seconds
        with self._lock:
            for token, session in list(self._sessions.items()):
                if session.expires and session.use.idle(seconds):
                    session.closed = True
                    del self._sessions[token]
                    logger.warning("session %s has expired: it had no call for %g s", session.row_id, seconds)

    # --- calls ----------------------------------------------------------------------------------------------------

    def admit(self, call: Call) -> int:
        """See `Player.admit`."""
        if KEY_HEADER in call.headers:
            if not hmac.compare_digest(call.headers[KEY_HEADER].encode(), self.key.encode()):
                raise GatewayError("token", "the gateway's key is wrong")
            return PRIVATE_BYTES
        if call.token not in self._sessions:
            raise GatewayError("token", "no session has this token; it is not open, was closed, or has expired")
        return self.limits.body_bytes

    def play(self, call: Call) -> Coroutine[Any, Any, Reply]:
        """See `Player.play`."""
        return self._play_for_router(call) if KEY_HEADER in call.headers else self._play(call)

    async def _play_for_router(self, call: Call) -> Reply:
        if call.path == "/private/sessions":
            return self._of_router(call)
        known = int(call.headers.get(JOURNAL_HEADER, "0"))
        session = self._sessions.get(call.token)
        if session is None:
            return json_reply({}, 410)  # the router opens it here
        try:
            reply = await self._play(call)
        except GatewayError as error:
            shape = call.dialect
            reply = json_reply(shape.error(error) if shape else {}, error.status)
        # Send nodes after an error too: other calls may have added nodes to the session, which the router needs.
        with self._lock:
            nodes = b"".join(write_node(node) + b"\n" for node in session.tree.nodes[known:])
        return reply._replace(body=nodes + reply.body, headers=(*reply.headers, (NODES_HEADER, str(len(nodes)))))

    def _of_router(self, call: Call) -> Reply:
        """Open or close a session for the router."""
        with suppress(KeyError):  # before it is opened, an older copy, from before the router took this worker for dead
            self.close(call.token)
        if call.method == "DELETE":
            return json_reply({})
        head, _, nodes = call.body.partition(b"\n")
        given = json.loads(head)
        how = given.get("sampling_params")
        self.open(
            given["row_id"],
            seed=given["seed"],
            sampling_params=None if how is None else SamplingParams(**how),
            token_ids=given["token_ids"],
            token=call.token,
            trajectory=Trajectory(list(map(read_node, nodes.splitlines()))),
        )
        return json_reply({})

    async def _play(self, call: Call) -> Reply:
        if call.path == MODELS:
            return json_reply({"object": "list", "data": [{"id": MODEL, "object": "model"}]})
        dialect = call.dialect
        if dialect is None:
            raise no_path(call)
        session = self._sessions.get(call.token)
        if session is None:
            raise GatewayError("token", "the session was closed")
        with session.use:
            return await self._turn(session, dialect, self._read(call.body, dialect, session))

    async def _turn(self, session: GatewaySession, dialect: Dialect, ask: Ask) -> Reply:
        tree, others = session.tree, session.use.calls - 1
        if others >= self.limits.calls:
            raise GatewayError("limit", f"the session has {others} calls, which is the limit")
        # Those that run may fail, and leave their turns to this call.
        while session.end_reason is None and 0 < session.turns_left <= len(session.running):
            await asyncio.sleep(RETRY_SECONDS)
        # Hold the lock for the whole section, including rendering: other calls add nodes, and share the limits.
        with self._lock:
            session.check_open()
            if session.end_reason is not None:
                _end(session, session.end_reason)
            if session.turns_left <= 0:
                _end(session, "turns")
            if len(tree.nodes) + 2 > self.limits.nodes:
                session.full = True
                raise GatewayError("invalid", f"the session's tree has {len(tree.nodes)} nodes, which is the limit")
            before = len(tree.nodes)
            try:
                node, prompt = self._prompt(session, ask)
                how, left = self._how(session, ask, len(prompt)), session.tokens_left
                cut = left is not None and left < how.max_new_tokens
                if left is not None and cut:
                    if left < 1:
                        _end(session, "tokens")
                    how = replace(how, max_new_tokens=left)
            except GatewayError:
                # The lock is held, so no other call has added nodes after these.
                while len(tree.nodes) > before:  # a prompt that is refused, however long, takes no memory
                    tree.drop()
                raise
        completion = await self._generate(session, prompt, how)
        # The session may have been closed, and its other calls may have grown the tree. Nodes are only ever added, so
        # `node` is still the prompt's.
        with self._lock:
            session.check_open()
            if cut and completion.finish_reason == "length":
                session.end_reason = "tokens"
            if completion.prompt_ids is not None:
                try:
                    check_prompt(tree, node, completion.prompt_ids, session.row_id, self._text)
                except PromptMismatchError as error:
                    session.mismatch = error
                    raise
            if completion.finish_reason == "length":
                session.count("truncated")
            message: dict[str, Any] = {}
            if ask.token_ids is not None:
                node = tree.sample(node, completion)
            else:
                try:
                    node, message = record(tree, self.renderer, node, completion, ask.tools)
                except RenderError as error:
                    raise GatewayError("failed", str(error)) from error
        model = ask.body.get("model")
        answer = Answer(
            f"{session.id}{node}",
            int(time.time()),
            model if isinstance(model, str) else MODEL,
            prompt,
            completion,
            message,
        )
        reply = dialect.reply(ask, answer)
        if ask.stream:
            return Reply(200, stream_of(dialect.events(ask, reply)), "text/event-stream")
        return json_reply(reply)

    def _read(self, text: bytes, dialect: Dialect, session: GatewaySession) -> Ask:
        try:
            body = json.loads(text)
        except (ValueError, RecursionError):
            raise GatewayError("invalid", f"the body is no JSON: {text[:80]!r}") from None
        if not isinstance(body, dict):
            raise GatewayError("invalid", f"the body is {body!r:.80}; expected an object")
        ask = dialect.read(body)
        ask.ids_wanted |= session.token_ids
        given = body.get("sampling_params") if ask.token_ids is not None else body
        ours = session.sampling_params
        overruled = [
            name
            for name in SAMPLING
            if (value := (given or {}).get(name)) is not None and value != getattr(ours, name, 0)
        ]
        if overruled and session.count("overruled") == 1:
            logger.info(
                "session %s: its client sets %s, which have no effect: how to sample is the trainer's decision",
                session.row_id,
                ", ".join(overruled),
            )
        return ask

    def _prompt(self, session: GatewaySession, ask: Ask) -> tuple[int, Sequence[int]]:
        """Return the node whose path is the prompt. The caller holds the lock."""
        tree = session.tree
        if ask.token_ids is not None:
            tokens = array("i", ask.token_ids)
            here, length = _longest_path(tree, tokens)
            if here is None or length < len(tokens):
                here = tree.give(here, tokens[length:])
            return here, ask.token_ids
        at: tuple[int, int] | None = None
        for number, message in enumerate(ask.messages):
            prompt, generated = message.pop("prompt_token_ids", None), message.pop("generation_token_ids", None)
            if isinstance(prompt, list) and isinstance(generated, list):
                try:
                    tokens = array("i", [*prompt, *generated])
                except (TypeError, OverflowError):
                    raise GatewayError("invalid", f"message {number} has token ids that are no token ids") from None
                found, length = _longest_path(tree, tokens)
                if found is not None and length == len(tokens):
                    at = found, number + 1
        try:
            node = extend(tree, self.renderer, ask.messages, ask.tools, session.counters, at)
        except RenderError as error:
            raise GatewayError("invalid", str(error)) from error
        return node, tree.token_array(node)

    def _how(self, session: GatewaySession, ask: Ask, length: int) -> SamplingParams:
        how, most = session.sampling_params, self.engine.max_positions
        new = min(how.max_new_tokens, ask.max_tokens or how.max_new_tokens)
        session.full = most is not None and length >= most
        if session.full:
            raise GatewayError("context", f"the prompt has {length} tokens, and the model {most} positions")
        if most is not None:
            new = min(new, most - length)
        if new == how.max_new_tokens and not ask.stop_token_ids:
            return how
        return replace(how, max_new_tokens=new, stop_token_ids=ask.stop_token_ids or how.stop_token_ids)

    async def _generate(self, session: GatewaySession, prompt: Sequence[int], how: SamplingParams) -> Completion:
        """Generate. If somebody else aborts the request, for an update of the weights for example, it continues."""
        number = session.count("calls")
        seed = mixed_seed(session.seed, len(session.tree.nodes), number)
        partial: Completion | None = None
        deadline: float | None = None  # for the engine to take it, also when it continues
        attempt = 0
        while True:
            session.check_open()
            id_ = f"gateway-{session.id}-{number}-{attempt}"
            attempt += 1
            deadline = deadline or time.monotonic() + self.limits.wait_seconds
            # Add the id before submitting: `close_session` aborts the requests in this set. Later calls see `closed`.
            session.running.add(id_)
            try:
                future = self._submit(prompt, how, id_, seed, partial, deadline)
                if future is None:
                    await asyncio.sleep(RETRY_SECONDS)
                    continue
                deadline = None
                if session.closed:  # just before, and so the engine did not know the request
                    self.engine.abort([id_])
                ended = asyncio.get_running_loop().create_future()
                future.add_done_callback(functools.partial(_wake, ended))
                await ended
                completion = future.result()
            except asyncio.CancelledError:  # the client has left; nobody waits for the rest
                self.engine.abort([id_])
                raise
            except RolloutError as error:
                if not isinstance(error, GatewayError) and self.engine.weight_version is None:
                    continue  # the engine has learnt in this turn that its weights are gone; _submit waits for others
                session.count("failed")
                if isinstance(error, GatewayError):
                    raise
                raise GatewayError("failed", str(error)) from error
            finally:
                session.running.discard(id_)
            if completion.finish_reason != "abort":
                return completion if self._tag is None else self._tag(completion)
            partial = completion

    def _submit(
        self,
        prompt: Sequence[int],
        how: SamplingParams,
        id_: str,
        seed: int,
        partial: Completion | None,
        deadline: float,
    ) -> Future[Completion] | None:
        """Submit; None if the engine takes no requests now, and may do so before the deadline."""
        try:
            return self.engine.submit(prompt, how, id_, seed=seed, partial=partial)
        except ValueError as error:  # PromptError is one
            what = f"the prompt {error}" if isinstance(error, PromptError) else str(error)
            raise GatewayError("invalid", what) from error
        except RolloutError as error:
            if time.monotonic() >= deadline:
                raise GatewayError("unavailable", str(error)) from error
            return None

    def _text(self, token_ids: list[int]) -> str:
        tokenizer = getattr(self.renderer, "tokenizer", None) or getattr(self.renderer, "_tokenizer", None)
        return str(token_ids) if tokenizer is None else str(tokenizer.decode(token_ids))


def _wake(ended: asyncio.Future[None], _: Future[Completion]) -> None:
    """Tell a call, from the engine's thread, that its completion has ended. ``asyncio.wrap_future`` does so too, but
    keeps a dozen objects alive as long as the engine takes, and the garbage collector visits them."""
    with suppress(RuntimeError):  # the server's loop has ended
        ended.get_loop().call_soon_threadsafe(_set, ended)


def _set(ended: asyncio.Future[None]) -> None:
    if not ended.done():
        ended.set_result(None)


def no_path(call: Call) -> GatewayError:
    """The error of a path that sessions do not have."""
    return GatewayError("path", f"there is no {call.path!r:.80}; see docs/gateway.md for those that there are")


def _end(session: GatewaySession, reason: str) -> NoReturn:
    """A limit of the session is used up: all its calls from now on get this error."""
    session.end_reason = reason
    most = getattr(session.limits, reason)
    raise GatewayError("budget", f"the session has ended: it has used its {most} {reason} (SessionLimits.{reason})")


# --- tokens in the tree -----------------------------------------------------------------------------------------------


def _longest_path(tree: Trajectory, token_ids: array[int]) -> tuple[int | None, int]:
    """The newest node of the longest path with which the tokens begin, and its length; (None, 0) if there is none."""
    ends: dict[int | None, int] = {None: 0}  # node whose path they begin with -> its length
    for number, node in enumerate(tree.nodes):
        begin, own = ends.get(node.parent), node.token_ids
        if begin is not None and own and token_ids[begin : begin + len(own)] == own:
            ends[number] = begin + len(own)
    return max(ends.items(), key=lambda one: (one[1], -1 if one[0] is None else one[0]))


# --- nodes as JSON ----------------------------------------------------------------------------------------------------


def write_node(node: Node) -> bytes:
    """A node as one line of JSON. Python writes floats so that they are read back exactly."""
    mask, experts = node.sampling_mask, node.routed_experts
    value = [
        node.parent,
        node.token_ids.tolist(),
        node.messages,
        node.finish_reason,
        node.log_probs,
        node.weight_versions,
        None if mask is None else [mask.token_ids.tolist(), mask.lengths.tolist()],
        None if node.fingerprints is None else list(node.fingerprints.items()),
        None if experts is None else [b64encode(experts.ids.tobytes()).decode(), experts.layers, experts.k],
    ]
    return json.dumps(value, separators=(",", ":")).encode()


def read_node(line: bytes | str) -> Node:
    """The reverse of `write_node`."""
    parent, token_ids, messages, reason, log_probs, versions, mask, fingerprints, experts = json.loads(line)
    return Node(
        parent,
        array("i", token_ids),
        tuple(messages),
        reason,
        tuple(log_probs),
        tuple(versions),
        None if mask is None else SamplingMask(*(array("i", values) for values in mask)),
        None if fingerprints is None else {version: fingerprint for version, fingerprint in fingerprints},
        None if experts is None else RoutedExperts(array("h", b64decode(experts[0])), *experts[1:]),
    )
