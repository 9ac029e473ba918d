"""HTTPEngine: an engine that runs elsewhere, as a server that speaks HTTP.

Threads: the engine's (see `workers.rollout.engines.request_engine`), and one for the streams of all requests (see
`http_client`). The latter puts what it has read into a queue, which the engine's thread empties in its steps.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import os
import queue
import shutil
import tempfile
import time
import uuid
import weakref
from collections import deque
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from dispatch.checks import check_count, check_seconds
from workers.extras import require
from workers.hf_files import checkpoint_shapes, config_of, meta_model, shapes_of
from workers.rollout.engines.http_client import Server, ServerError, run
from workers.rollout.engines.http_dialects import DIALECTS, OpenAI, Part, check_log_probs, probe_log_probs, token_of
from workers.rollout.engines.request_engine import Request, RequestEngine
from workers.rollout.engines.rollout_engine import (
    FinishReason,
    PauseMode,
    SamplingParams,
    check_min_p,
    check_tensor,
    largest_told,
    left_of_top,
    top_wanted,
)
from workers.rollout.rollout_errors import RolloutError, WeightsError
from workers.seeds import mixed_seed

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

STEP_SECONDS = 0.02
"""How long a step waits for tokens."""

ASK_SECONDS = 1.0
"""How old the server's weight version and load may be that the engine relies on."""

ABORT_SECONDS = 0.1
"""How long the engine waits before it sends a request again that the server has ended without a reason."""

STARTING = (502, 503, 504)
"""Status codes of a server that is being restarted, or of a proxy before it."""

UNKNOWN = (None, "default")
"""What a server calls the weights that it began with; None if it does not tell."""

_Arrived = tuple["_Reader", "Part | Exception"]


class _Reader:
    """A request in progress at the server.

    Attributes:
        had: how many tokens the request had before.
        heard: when the server last sent something.
        begun: whether anything of it was accepted.
        closed: whether `close` was called, after which nothing that has come counts.
    """

    def __init__(self, request: Request, parts: AsyncIterator[Part], into: queue.SimpleQueue[_Arrived]) -> None:
        self.request, self.had = request, len(request.token_ids)
        self.heard = time.monotonic()
        self.begun = self.closed = False
        # Start reading last: the other thread begins immediately, and puts this object into the queue.
        self._reading = run(self._read(parts, into))

    async def _read(self, parts: AsyncIterator[Part], into: queue.SimpleQueue[_Arrived]) -> None:
        part: Part | None = None
        try:
            async for part in parts:
                into.put((self, part))
            if part is None or part.ended is None:  # so ends a request that vLLM aborts before its first token
                await asyncio.sleep(ABORT_SECONDS)
                into.put((self, Part([], [], [], "abort")))
        # CancelledError is not an Exception, so closing a stream puts no error into the queue.
        except Exception as error:
            into.put((self, error))

    def close(self) -> None:
        """End the stream, from any thread. The server notices that nobody listens."""
        self.closed = True
        self._reading.cancel()


class HTTPEngine(RequestEngine):
    """An engine behind a server that already runs. You start and end the server.

    Weight updates go through a folder that this worker and the server can both access, and vLLM's server must run with
    ``VLLM_SERVER_DEV_MODE=1``. Each rollout worker needs a server of its own.

    Requests are streams, and all of them run on the server at the same time. An update interrupts them; afterwards, the
    engine requests the rest of each completion. An interrupted request gets other tokens than it would have got without
    the update, because the server restarts its random numbers.

    Args:
        url: ``http://host:port`` of the server.
        dialect: "vllm", or "openai" for any other server with ``/v1/completions`` that takes and returns token ids,
            which cannot take weights.
        model: name of the model in requests; by default the first that the server has.
        config: of the model: a Hugging Face config, the dict of one, a folder with ``config.json``, or a name on the
            hub. By default the folder that the server names, if it exists on this host. Needed for updates, and to
            refuse prompts with tokens outside the vocabulary.
        weights_dir: a folder that the server sees under the same path. By default the one for temporary files, if
            ``url`` is of this host. The files of an update are deleted when the server has read them.
        api_key: of the server.
        timeout: seconds that the server may take for an answer, that a request may get no token, and that an update
            waits for a server that is being restarted.
        max_running: how many requests may be at the server at once; each has a connection.
        max_logprobs: how many log-probabilities the server returns for a token at most, as its ``--max-logprobs`` says,
            20 by default in vLLM. Sets of `SamplingMask` have fewer tokens; others are not returned.
        request_fields: further fields of each request, such as ``{"stream_interval": 8}``, by which vLLM sends eight
            tokens at a time.
        trust_remote_code: whether code that comes with the model may run, when the names of its weights are found.

    Raises:
        ServerError: the server could not be reached, or does not return what an engine needs.
        ValueError: an argument is out of range.
    """

    positions_are = "the server's"
    keeps_weights = True

    def __init__(
        self,
        url: str,
        *,
        dialect: str = "vllm",
        model: str | None = None,
        config: Any = None,
        weights_dir: str | os.PathLike[str] | None = None,
        api_key: str | None = None,
        timeout: float = 300.0,
        max_running: int = 256,
        max_logprobs: int = 20,
        request_fields: Mapping[str, Any] | None = None,
        trust_remote_code: bool = False,
    ) -> None:
        super().__init__()
        if dialect not in DIALECTS:
            raise ValueError(f"HTTPEngine: dialect={dialect!r}; expected one of {', '.join(map(repr, DIALECTS))}")
        check_count("HTTPEngine: max_running", max_running)
        check_seconds("HTTPEngine: timeout", timeout)
        check_count("HTTPEngine: max_logprobs", max_logprobs, 0)
        self.url = url
        self.max_running = max_running
        self._server = Server(url, api_key, timeout)
        self._dialect: OpenAI = DIALECTS[dialect](self._server, model)
        self.coldest = self._dialect.coldest
        self._fields = dict(request_fields or {})
        self._trust = trust_remote_code
        folder = self._dialect.folder
        if config is None and folder is not None and Path(folder, "config.json").is_file():
            config = folder
        self._config = config
        fields = _fields_of(config, trust_remote_code)
        text = fields.get("text_config") or fields
        self.vocab_size = text.get("vocab_size")
        if self.vocab_size is None:
            logger.warning(
                "the vocabulary of the model at %s is not known; a prompt with a token outside it may end the server, "
                "as it ends vLLM's with --skip-tokenizer-init. Pass config=",
                url,
            )
        self._most = max_logprobs if self.vocab_size is None else min(max_logprobs, self.vocab_size)
        self.max_positions = self._dialect.positions or text.get("max_position_embeddings")
        self._weights_dir = None if weights_dir is None else Path(weights_dir).absolute()
        if weights_dir is None and self._server.host in ("localhost", "127.0.0.1", "::1"):
            self._weights_dir = Path(tempfile.gettempdir())
        self._shapes: dict[str, tuple[int, ...]] | None = None
        self._folder: Path | None = None
        """Of the update in progress; None before its first tensors."""
        self._file_of: dict[str, str] = {}
        self._readers: dict[Request, _Reader] = {}
        """The requests that are at the server. Only the engine's thread changes it."""
        self._waiting: deque[Request] = deque()
        """Those that are not there yet, or no longer. Used by the engine's thread alone."""
        self._aborted: weakref.WeakKeyDictionary[Request, float] = weakref.WeakKeyDictionary()
        """Since when the server has only aborted a request. Used by the engine's thread alone."""
        self._looked = 0.0
        """When the engine's thread last looked for streams that are silent."""
        self._stamp = self._dialect.version()
        """What the server says that its version is, while its weights are those that this engine knows of."""
        if self._stamp not in UNKNOWN:
            logger.warning("the server at %s has weights %r of an earlier update; update them again", url, self._stamp)
        self._asked = time.monotonic()
        """When the server was last asked for it."""
        self._unsure: float | None = None
        """Since when it has not answered that; None if it has."""
        self._log_probs = probe_log_probs(self._dialect, self._fields)
        # Only there do the log-probabilities tell what the truncation has left, and are those before it.
        self.sampling_masks = self._log_probs == "tempered" and max_logprobs > 0
        self.largest_mask = largest_told(self._most, self.vocab_size)

    # --- generating -----------------------------------------------------------------------------------------------

    def check_request(self, number: int | None, prompt: Sequence[int], sampling_params: SamplingParams) -> None:
        """See `RequestEngine.check_request`.

        Raises:
            SamplingParamsError: also if the server's log-probabilities would not be those of `Completion`.
            ValueError: also if ``min_p`` needs another ``top_k``.
        """
        super().check_request(number, prompt, sampling_params)
        check_log_probs(self._log_probs, self._dialect, sampling_params)
        if self._log_probs == "tempered":
            check_min_p(sampling_params, self.largest_mask)

    def serve(self) -> None:
        arrived: queue.SimpleQueue[_Arrived] = queue.SimpleQueue()
        waiting = self._waiting
        waiting.clear()  # what a step that failed has left
        try:
            while (changes := self.next_step()) is not None:
                waiting += changes.added
                if changes.recompute:  # their streams were closed, or are of old weights
                    # Put them first, in the same order, because their callers have waited longest.
                    waiting.extendleft(reversed([self._close(reader) for reader in list(self._readers.values())]))
                for request in changes.ended:
                    if (reader := self._readers.get(request)) is not None:
                        self._close(reader)
                # Here, and not in `submit`: that is called by event loops, which must not wait for the server.
                while waiting and len(self._readers) < self.max_running and self._version_is_known():
                    request = waiting.popleft()
                    if not request.ended:
                        # If the request is aborted now, `_disconnect` misses this reader. The next step closes it.
                        self._readers[request] = _Reader(request, self._parts_of(request), arrived)
                self._take(arrived)
        finally:
            for reader in list(self._readers.values()):
                self._close(reader)

    def _take(self, arrived: queue.SimpleQueue[_Arrived]) -> None:
        """One step: record what has come."""
        wait = STEP_SECONDS
        for _ in range(2 * self.max_running):  # not for ever, so that others get their turn
            try:
                reader, part = arrived.get(timeout=wait) if wait else arrived.get_nowait()
            except queue.Empty:
                break
            wait = 0.0
            # Ignore parts of an old reader: a request that was sent again has a new one.
            if self._readers.get(reader.request) is reader and not reader.closed:
                reader.heard = time.monotonic()
                if self._must_wait(reader, part):
                    self._waiting.appendleft(self._close(reader))
                    continue
                reader.begun = True
                try:
                    self._add(reader, part)
                except Exception as error:
                    self._close(reader)
                    self._fail([reader.request], error)
        now = time.monotonic()
        if now > self._looked + min(1.0, self._server.timeout / 4):
            self._looked, late = now, now - self._server.timeout
            for reader in [reader for reader in self._readers.values() if reader.heard < late]:
                self._close(reader)
                self._fail([reader.request], self._server.broken("a request for tokens", TimeoutError()))

    def _must_wait(self, reader: _Reader, part: Part | Exception) -> bool:
        """Whether a request must be sent again, with the tokens that it has, because the server may have been restarted
        or only the connection was lost.

        Raises:
            RolloutError: the server has lost its weights. This fails all requests.
        """
        if not isinstance(part, Exception):
            # One that was turned away was sent again, perhaps to a server that was restarted meanwhile.
            return not (reader.begun or self._version_is_known())
        if not isinstance(part, ServerError) or not (part.gone or (part.status or 0) >= 500):
            return False
        if self._unsure is None:  # otherwise it was asked just now: many may fail at the same time
            self._asked = -math.inf
        # Without a token in between it would be sent again for ever to a server that always fails.
        return not self._version_is_known() or (part.gone and len(reader.request.token_ids) > reader.had)

    def _add(self, reader: _Reader, part: Part | Exception) -> None:
        """Record what has come."""
        if isinstance(part, Exception):
            raise part
        request, how = reader.request, reader.request.sampling_params
        token_ids, log_probs = part.token_ids, part.log_probs
        if len(token_ids) != len(log_probs):
            raise RolloutError(
                f"the server at {self.url} sent {len(token_ids)} tokens and {len(log_probs)} log-probabilities"
            )
        if not all(-9000.0 < log_prob < 1e-3 for log_prob in log_probs):  # -9999 is vLLM's minus infinity
            raise RolloutError(
                f"the server at {self.url} sent log-probabilities {min(log_probs)} to {max(log_probs)}: the logits are "
                "not finite, or they are not log-probabilities (vLLM's --logprobs-mode)"
            )
        end = next((k + 1 for k, token in enumerate(token_ids) if token in how.stop_token_ids), None)
        end = min(len(token_ids) if end is None else end, request.remaining)
        ended: FinishReason | None = None
        if end and token_ids[end - 1] in how.stop_token_ids:
            ended = "stop"
        elif end == request.remaining:
            ended = "length"
        if ended is None and part.ended not in (None, "abort"):
            raise RolloutError(
                f"the server at {self.url} ended a completion after {len(request.token_ids) + end} of "
                f"{how.max_new_tokens} tokens (finish_reason {part.ended!r}) at a token that is not in stop_token_ids. "
                "It must not stop at tokens of its own: it ignores ignore_eos, or has a shorter limit"
            )
        kept: list[Sequence[int]] | None = None
        if wanted := self._top(how):
            if len(part.top) != len(token_ids):
                raise RolloutError(
                    f"the server at {self.url} sent {len(token_ids)} tokens and {len(part.top)} times the most likely "
                    "ones, which were asked for"
                )
            tops = [
                {token_of(token): -math.inf if one is None else one for token, one in of.items()} for of in part.top
            ]
            left = [left_of_top(*one, wanted, self.vocab_size) for one in zip(log_probs, tops, strict=True)]
            kept, log_probs = [tokens for tokens, _ in left[:end]], [log_prob for _, log_prob in left]
        if ended is not None:
            del self._readers[request]
            if part.ended is None:  # the server would go on
                reader.close()
        self.record(request, token_ids[:end], log_probs[:end], ended, kept)
        if token_ids:
            self._aborted.pop(request, None)
        if ended is None and part.ended == "abort":
            # Somebody else has told the server, or it is being ended.
            if len(request.token_ids) == reader.had:
                now = time.monotonic()
                late = now - self._aborted.setdefault(request, now) > self._server.timeout
                if late or not self._dialect.pauses:
                    raise RolloutError(f"the server at {self.url} ended a request before its next token; see its log")
            self._asked = -math.inf  # it may have other weights when it is asked again
            self._waiting.appendleft(self._close(reader))

    def _parts_of(self, request: Request) -> AsyncIterator[Part]:
        how, seed, done = request.sampling_params, request.seed, len(request.token_ids)
        if how.temperature == 0 and self._log_probs == "tempered":  # vLLM's LogProbs leaves temperature 0 alone
            how = replace(how, temperature=1.0, top_p=1.0, top_k=1, min_p=0.0)
        if done:
            seed = mixed_seed(seed, done)  # the seed itself would repeat the first random numbers
        prompt, top = request.prompt + request.token_ids, self._top(request.sampling_params)
        return self._dialect.parts(prompt, how, request.remaining, seed & (2**63 - 1), top, self._fields)

    def _top(self, sampling_params: SamplingParams) -> int:
        """How many of the most likely tokens the server is asked for with each token."""
        return top_wanted(sampling_params, self._most) if self.sampling_masks else 0

    def _close(self, reader: _Reader) -> Request:
        reader.close()
        self._readers.pop(reader.request, None)
        return reader.request

    # --- requests -------------------------------------------------------------------------------------------------

    def _version_is_known(self) -> bool:
        """Whether the server has said lately that it has the weights that this engine knows of. False: it turns the
        question away. It may be restarting, so requests wait until it answers, for at most ``timeout`` seconds.

        Raises:
            RolloutError: it has others, or is gone. This fails all requests.
        """
        began = time.monotonic()
        if self.weight_version is None or began - self._asked <= ASK_SECONDS:
            return self._unsure is None
        try:
            found = self._dialect.version()
        except ServerError as error:
            if error.status is None:
                # It will have again the weights that it begins with; and one that is only late still has all.
                self._lose(error, weights=error.gone and self._stamp not in UNKNOWN)
            self._unsure = began if self._unsure is None else self._unsure
            self._asked = time.monotonic()
            if self._asked - self._unsure > self._server.timeout:
                self._fail(self._waiting, error)
                self._waiting.clear()
                self._unsure, self._asked = None, -math.inf  # later ones ask anew
            return False
        self._unsure, self._asked = None, time.monotonic()
        if found != self._stamp:
            lost = RolloutError(
                f"the server at {self.url} has weights {found!r} instead of {self._stamp!r}: it was restarted, or "
                "somebody else has updated it. Update the weights again"
            )
            self._lose(lost)
        return True

    def _lose(self, why: RolloutError, *, weights: bool = True) -> NoReturn:
        """Fail all requests, and raise ``why``: the server lost its weights or, without ``weights``, is only gone."""
        self._unsure, self._asked = None, -math.inf
        # `abandon_update` acquires the lock again, which is reentrant.
        with self._changed:
            updating = "update" in self._holds  # begun meanwhile by the worker, it waits for this step
            if weights:
                logger.warning("%s", why)  # a stream does not raise it
                self.weight_version = None
                if not updating:
                    super().abandon_update()
                    self.lost_because = str(why)
        if not updating:
            self._fail(list(self._requests.values()), why)  # those that this thread was not given, too
        raise why

    def abort(self, request_ids: Iterable[str] | None = None) -> None:
        """See `RolloutEngine.abort`. The server is told by the end of the connection."""
        super().abort(request_ids)
        self._disconnect(ended=True)

    def _disconnect(self, ended: bool = False) -> None:
        """Close the streams of all requests, or of those that have ended. The engine's thread forgets them later."""
        # Iterate over a copy, which CPython makes atomically: the engine's thread may change the dict meanwhile.
        for reader in list(self._readers.values()):
            if reader.request.ended or not ended:
                reader.close()

    def pause(self, mode: PauseMode = "keep") -> None:
        """See `RolloutEngine.pause`. A server that can be paused is, for all its clients. With any other, requests are
        interrupted as by an update."""
        paused = self.is_held("pause")
        super().pause(mode)
        self._disconnect(ended=True)
        if not self._dialect.pauses:
            self._disconnect()
            # After `resume`, `serve` sends these requests again.
            with self._changed:
                self._recompute = True
            return
        try:
            self._dialect.pause()
        except BaseException:
            # An earlier pause stays in force.
            if not paused:
                with suppress(RolloutError):  # it may have paused nevertheless, and requests would wait for it
                    self.resume()
                super().resume()
            raise

    def resume(self) -> None:
        # A server that sleeps has no memory for a step, and goes on when it wakes up.
        if self._dialect.pauses and self.is_held("pause") and not self.is_held("sleep"):
            self._dialect.resume()
        # A paused server sends nothing, so measure its silence from now on.
        now = time.monotonic()
        for reader in list(self._readers.values()):
            reader.heard = now
        super().resume()

    def close(self) -> None:
        """See `RolloutEngine.close`. The server keeps running."""
        # Close the engine first, so that its thread opens no streams after `_disconnect`.
        super().close()
        self._disconnect()
        self._remove_files()
        try:
            self.resume()
        except ServerError:
            logger.warning("could not resume the server at %s", self.url, exc_info=True)

    # --- weights --------------------------------------------------------------------------------------------------

    @property
    def weights_id(self) -> str | None:
        """See `RolloutEngine.weights_id`. It is unique for each update."""
        return None if self._stamp in UNKNOWN else self._stamp

    def weight_shapes(self) -> dict[str, tuple[int, ...]]:
        """See `RolloutEngine.weight_shapes`. They are those of a checkpoint of the config's model.

        Raises:
            RolloutError: the server cannot take weights, or ``weights_dir`` or ``config`` is missing.
        """
        self._check_updates()
        if self._shapes is None:
            config = config_of("HTTPEngine: config", self._config, self._trust)
            self._shapes = checkpoint_shapes(
                config, shapes_of(meta_model(config, self._trust).state_dict(keep_vars=True))
            )
        return dict(self._shapes)

    def _check_updates(self) -> None:
        why = self._dialect.no_updates
        if not why and self._weights_dir is None:
            why = "pass weights_dir=, a folder that this worker and the server both see"
        if not why and self._config is None:
            why = "pass config=, the model's Hugging Face config, so that the names of its weights are known"
        if why:
            raise RolloutError(f"the server at {self.url} cannot take weights: {why}")

    def begin_update(self) -> None:
        """See `RolloutEngine.begin_update`. Requests are interrupted."""
        super().begin_update()
        # Disconnect after the hold has begun, so that no step opens streams afterwards.
        self._disconnect()
        self._remove_files()

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """See `RolloutEngine.load_weights`. The tensors are written to a file; the server reads it in `finish_update`.

        Raises:
            WeightsError: the model has no tensor of that name, or has another shape, or it came before. No tensor of
                the call was written.
            RolloutError: the server is asleep; also see `weight_shapes`.
            OSError: the folder cannot be written to.
        """
        shapes = self.weight_shapes()
        if self.is_held("sleep"):  # waking up would overwrite new weights with those in host memory
            raise RolloutError(f"the server at {self.url} cannot take weights: it is asleep; call wake_up() first")
        if self._folder is None:
            self._folder = Path(self._weights_dir or "", f"weights-{uuid.uuid4().hex}")
            self._folder.mkdir(parents=True)
        tensors: dict[str, torch.Tensor] = {}
        seen: set[int] = set()
        for name, tensor in weights:
            check_tensor(name, tensor, shapes, "the model")
            if name in self._file_of or name in tensors:
                raise WeightsError(f"the weight update has {name!r} twice")
            host = tensor.detach().cpu().contiguous()
            address = host.untyped_storage().data_ptr()
            tensors[name] = host.clone() if address in seen else host  # safetensors refuses tensors that share memory
            seen.add(address)
        if tensors:
            file = f"model-{len(set(self._file_of.values())) + 1:05d}.safetensors"
            require("safetensors.torch", "hf").save_file(tensors, str(self._folder / file), {"format": "pt"})
            self._file_of |= dict.fromkeys(tensors, file)

    def finish_update(self, version: int) -> None:
        """See `RolloutEngine.finish_update`. Without a call of `load_weights`, the server keeps its weights.

        Raises:
            WeightsError: some tensors have come, and others are missing.
            ServerError: the server did not load the weights. It may have some of them.
        """
        self._await_server()
        if self._folder is None:
            self._stamp = self._dialect.version()
        else:
            from workers.weight_files import INDEX  # imports torch, which a driver does without

            shapes = self.weight_shapes()
            if missing := [name for name in shapes if name not in self._file_of]:
                raise WeightsError(
                    f"{len(missing)} of {len(shapes)} tensors of the update are missing, such as {missing[0]!r}"
                )
            (self._folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": self._file_of}))
            stamp = f"{version}.{uuid.uuid4().hex[:8]}"  # not the version alone: another run may have sent it, too
            try:
                self._dialect.reload(str(self._folder), stamp)
            finally:
                if not self.is_held("pause"):
                    self._dialect.resume()
                self._remove_files()
            self._stamp = stamp
        # Set this before requests continue, because the next step compares the server's version with the stamp.
        self._asked, self._unsure = time.monotonic(), None
        super().finish_update(version)

    def _await_server(self) -> None:
        """Wait for a server that is being restarted; a `ServerError` if it is not back after ``timeout`` seconds."""
        deadline, told = time.monotonic() + self._server.timeout, False
        while True:
            try:
                self._dialect.version()
                return
            except ServerError as error:
                if not (error.gone or error.status in STARTING) or time.monotonic() > deadline:
                    raise
                if not told:
                    logger.warning("%s. The update waits for it, for at most %g s", error, self._server.timeout)
                told = True
            time.sleep(min(ASK_SECONDS, self._server.timeout / 10))

    def abandon_update(self) -> None:
        self._remove_files()
        super().abandon_update()

    def _remove_files(self) -> None:
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
        self._folder, self._file_of = None, {}

    def sleep(self) -> None:
        """Have the server free its device's memory. It keeps the weights in host memory; requests are interrupted.

        Raises:
            RolloutError: the server cannot.
        """
        asleep = self.is_held("sleep")
        self._hold("sleep")
        # Disconnect after the hold has begun; see `begin_update`.
        self._disconnect()
        try:
            self._dialect.sleep()
        except BaseException:
            # An earlier sleep stays in force.
            if not asleep:
                with suppress(RolloutError):  # vLLM pauses before it frees memory, and requests would wait for it
                    self.wake_up()
                self._release("sleep")
            raise

    def wake_up(self) -> None:
        """Have the server take the memory back."""
        self._dialect.wake_up()
        if self.is_held("pause"):  # waking up has ended it
            self._dialect.pause()
        # Release the hold last: the next step sends requests, which a sleeping server would refuse.
        self._release("sleep")


def _fields_of(config: Any, trust_remote_code: bool) -> dict[str, Any]:
    """The fields of a Hugging Face config; see `HTTPEngine`."""
    if config is None or isinstance(config, Mapping):
        return dict(config or {})
    if isinstance(config, (str, Path)) and (file := Path(config, "config.json")).is_file():
        fields: dict[str, Any] = json.loads(file.read_text())
        return fields
    made: dict[str, Any] = config_of("HTTPEngine: config", config, trust_remote_code).to_dict()
    return made
