"""RequestEngine: the base class of engines that generate step by step, for requests that begin and end at any time.

Threads: an engine's thread, named "engine", takes all steps. The first request starts it; it ends when it has had no
request for `IDLE_SECONDS`, and with `RequestEngine.close`. Until then it keeps the engine alive. It is a daemon, so
that a script can end while requests are running; `_close_at_exit` then ends it.
Lock: ``_changed`` protects the requests and all that decides whether the thread may take a step. It is a leaf, and no
step is taken while it is held. Futures get their results after it is released, because that runs their callbacks.
"""

from __future__ import annotations

import atexit
import copy
import logging
import os
import threading
import time
import uuid
import weakref
from abc import abstractmethod
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import NamedTuple, cast

from workers.rollout.engines.rollout_engine import (
    Completion,
    EngineLoad,
    FinishReason,
    PauseMode,
    RolloutEngine,
    RoutedExperts,
    SamplingMask,
    SamplingParams,
    as_integer,
)
from workers.rollout.rollout_errors import PromptError, RolloutError

logger = logging.getLogger(__name__)

IDLE_SECONDS = 10.0

STEP_SECONDS = 300.0
"""A step that takes longer is an error for those who wait for its end: the engine hangs."""

CLOSE_SECONDS = 5.0
"""How long `RequestEngine.close` waits for a step to end."""

READING = "reading"
"""The reason of a hold during which nothing changes. It is short, so requests wait for its end."""

_started: weakref.WeakSet[RequestEngine] = weakref.WeakSet()
"""Engines that `_close_at_exit` closes."""


@atexit.register
def _close_at_exit() -> None:
    """Close the engines before the interpreter ends. It ends daemon threads as soon as they want the GIL; one that
    comes back from torch's C++ code then aborts the process ("terminate called without an active exception")."""
    for engine in list(_started):
        try:
            engine.close()
        except Exception:
            logger.exception("could not close %s", type(engine).__name__)


os.register_at_fork(after_in_child=_started.clear)  # they are the parent's


@dataclass(eq=False)
class Request:
    """A completion in progress.

    Attributes:
        id, prompt, sampling_params, seed: see `RolloutEngine.submit`.
        token_ids, log_probs, weight_versions, sampling_mask: see `Completion`; the tokens so far.
        routed_experts: of the prompt and the tokens so far, as far as they are known; see `Completion`.
        future: of the completion.
        begun: whether tokens are being generated for it.
        ended: whether its completion was set, or it has failed.
        echoed: the prompt that tokens are generated from, if `RequestEngine.echo_prompts`. An engine that passes
            prompts on replaces it by what the other side says.
    """

    id: str
    prompt: list[int]
    sampling_params: SamplingParams
    seed: int
    token_ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    weight_versions: list[int | None] = field(default_factory=list)
    sampling_mask: SamplingMask | None = None
    routed_experts: RoutedExperts | None = None
    future: Future[Completion] = field(default_factory=Future)
    begun: bool = False
    ended: bool = False
    echoed: Sequence[int] | None = None

    @property
    def remaining(self) -> int:
        """How many tokens may follow."""
        return self.sampling_params.max_new_tokens - len(self.token_ids)

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why the completion is complete; None if it is not."""
        if self.token_ids and self.token_ids[-1] in self.sampling_params.stop_token_ids:
            return "stop"
        return "length" if self.remaining <= 0 else None

    def completion(self, finish_reason: FinishReason) -> Completion:
        """The completion so far."""
        experts = self.routed_experts
        if experts is not None:
            # Copy the experts, because the request may continue. Pad them for the last token, which has no experts yet.
            experts = experts.of_tokens(0)
            experts.extend(array("h"), len(self.prompt) + len(self.token_ids))
        return Completion(
            self.token_ids,
            self.log_probs,
            finish_reason,
            self.weight_versions,
            sampling_mask=self.sampling_mask,
            prompt_ids=self.echoed,
            routed_experts=experts,
        )


class Changes(NamedTuple):
    """What happened between two steps.

    Attributes:
        added: requests to begin.
        ended: requests that were handed out before and have ended otherwise; drop them.
        recompute: the keys and values of all tokens so far are of other weights, or were lost.
    """

    added: list[Request]
    ended: list[Request]
    recompute: bool


class RequestEngine(RolloutEngine):
    """A `RolloutEngine` with requests. A subclass implements `serve` and the methods for weights.

    While the engine's thread is in `serve`, nobody else touches the model, except between `begin_update` and
    `finish_update`, between `sleep` and `wake_up`, and inside `parked`: the thread then waits in `next_step`.

    Attributes:
        vocab_size: prompts and stop tokens must be below it; None if it is not known.
        max_positions: how many tokens a prompt and its completion have together at most; None for no limit.
        positions_are: whose limit that is, for the error.
        coldest: the lowest temperature besides 0; one that is lower still would overflow the logits.
        echo_prompts: whether completions have `Completion.prompt_ids`, to be compared with what was submitted.
        keep_prefixes: whether requests may continue those that have ended, as the turns of a session do, so that it is
            worth keeping their keys and values. Engines that always decide this themselves ignore it.
        lost_because: why the engine has lost its weights, for the error.
    """

    vocab_size: int | None = None
    max_positions: int | None = None
    positions_are = "the model's"
    coldest = 1e-6
    echo_prompts = False
    keep_prefixes = False
    lost_because = ""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._requests: dict[str, Request] = {}
        self._added: list[Request] = []
        self._dropped: list[Request] = []
        self._holds: set[str] = set()
        """Why no step may be taken, for the error messages."""
        self._parked = Counter[str]()
        """How many threads are inside `parked`, for each reason."""
        self._draining = False
        self._recompute = False
        self._stepping = False
        self._closed = False
        self._thread: threading.Thread | None = None
        """The last one; it may have ended."""
        self._serving = False
        """Whether the thread will take the requests that are added."""

    # --- for subclasses -------------------------------------------------------------------------------------------

    def check_request(self, number: int | None, prompt: Sequence[int], sampling_params: SamplingParams) -> None:
        """Raise if the engine cannot generate from a prompt. Subclasses add what else they cannot do: an error in
        `serve` fails all running requests, so whatever may be wrong with one of them is found here.

        Args:
            number: index of the prompt in the call, for the error.
            prompt: token ids, as integers.
            sampling_params: how to sample.

        Raises:
            PromptError: the prompt is empty, too long, or has a token outside the vocabulary.
            ValueError: a stop token is outside the vocabulary, or the temperature is too low.
        """
        if not len(prompt):
            raise PromptError("is empty; it must have at least one token", number)
        size, new_tokens = self.vocab_size, sampling_params.max_new_tokens
        if size is not None and (unknown := [token for token in sampling_params.stop_token_ids if token >= size]):
            raise ValueError(f"SamplingParams: stop_token_ids {unknown} are outside the model's vocabulary of {size}")
        if 0 < sampling_params.temperature < self.coldest:
            raise ValueError(
                f"SamplingParams: temperature={sampling_params.temperature!r}; {type(self).__name__} has 0, and from "
                f"{self.coldest:g} on"
            )
        if (what := self._outside(prompt)) is not None:
            raise PromptError(f"has {what}", number)
        if self.max_positions is not None and len(prompt) + new_tokens > self.max_positions:
            raise PromptError(
                f"has {len(prompt)} tokens, which with max_new_tokens={new_tokens} exceeds "
                f"{self.positions_are} {self.max_positions} positions; shorten it, or lower max_new_tokens",
                number,
            )

    @abstractmethod
    def serve(self) -> None:
        """Generate until `next_step` returns None. It runs in the engine's thread, and begins anew after it has raised,
        or returned earlier; all requests that were handed out have then failed with an error."""

    def next_step(self) -> Changes | None:
        """Return what has changed since the last step. `serve` calls it before each step. It waits while no step may be
        taken, and while there is nothing to do. None: `serve` must return."""
        with self._changed:
            # The previous step has ended; `_hold` waits for this.
            self._stepping = False
            self._changed.notify_all()
            idle_until = time.monotonic() + IDLE_SECONDS
            while not self._closed and (self._holds or not self._has_work()):
                # No time limit: a thread with requests is not idle.
                if self._requests:
                    self._changed.wait()
                elif not self._changed.wait(idle_until - time.monotonic()) and not self._requests:
                    self._dropped = []  # `serve` begins without requests
                    break
            if self._closed or not self._has_work():
                self._serving = False  # under the lock, so that the next request starts another thread
                return None
            self._stepping = True
            # While `_drain` waits for the running requests, begin no others. Otherwise, it might never end.
            added = [] if self._draining else self._added
            changes = Changes(added, self._dropped, self._recompute)
            self._added = self._added if self._draining else []
            self._dropped, self._recompute = [], False
            return changes

    def _has_work(self) -> bool:
        handed_out = len(self._requests) - len(self._added)
        # Count dropped requests too: `serve` computes them until `next_step` has returned them.
        return bool(self._dropped or handed_out or (self._added and not self._draining))

    def record(
        self,
        request: Request,
        token_ids: Sequence[int],
        log_probs: Sequence[float],
        ended: FinishReason | None = None,
        kept: Sequence[Sequence[int]] | None = None,
        routed_experts: RoutedExperts | None = None,
    ) -> None:
        """Append generated tokens to a request, with the version of the weights in force.

        Args:
            request: one that has not ended; otherwise the tokens are ignored.
            token_ids: the tokens.
            log_probs: of the tokens; see `Completion`.
            ended: why the request ends now, if it does.
            kept: for each token, those that were left to choose from; an empty one stands for the whole vocabulary, and
                None for this at each token. See `SamplingMask`.
            routed_experts: of tokens of prompt and completion, the last of which is the one before the last new one;
                None if they are not known.
        """
        with self._changed:
            # The request was aborted or failed by `close` after the step had begun. Its future has a result.
            if request.ended:
                return
            request.begun = True
            if request.sampling_mask is None and kept is not None and any(map(len, kept)):
                request.sampling_mask = SamplingMask.whole(len(request.token_ids))
            if request.sampling_mask is not None:
                for one in kept if kept is not None else [()] * len(token_ids):
                    request.sampling_mask.append(one)
            request.token_ids += token_ids
            request.log_probs += log_probs
            # No update begins during a step (`_hold`), so the tokens were computed with this version.
            request.weight_versions += [self.weight_version] * len(token_ids)
            if routed_experts is not None:
                if request.routed_experts is None:
                    request.routed_experts = replace(routed_experts, ids=array("h"))
                request.routed_experts.extend(routed_experts.ids, len(request.prompt) + len(request.token_ids) - 1)
            if ended is not None:
                self._end(request)
        if ended is not None:
            request.future.set_result(request.completion(ended))

    @contextmanager
    def parked(self, reason: str, *, recompute: bool = True) -> Iterator[None]:
        """Inside, the engine's thread takes no step. Afterwards it computes all keys and values anew.

        Args:
            reason: for the errors of those that cannot wait.
            recompute: whether keys and values are computed anew.
        """
        with self._changed:
            self._parked[reason] += 1
        try:
            self._hold(reason)
            yield
        finally:
            with self._changed:
                self._parked[reason] -= 1
                if self._parked[reason]:  # another thread is still inside
                    self._recompute |= recompute
                else:
                    self._release(reason, recompute=recompute)

    def prepare_thread(self) -> None:
        """Called first in the engine's thread, to select its device for example."""

    # --- the interface --------------------------------------------------------------------------------------------

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling_params: SamplingParams, seeds: Sequence[int]
    ) -> list[Completion]:
        """See `RolloutEngine.generate`.

        Raises:
            PromptError: a prompt is empty or too long, or has a token outside the vocabulary.
            RolloutError: the engine sleeps, is paused, was closed or has no complete weights; or this is a callback
                of a request.
            ValueError: there is not one seed per prompt, a seed is no integer, a stop token is outside the vocabulary,
                or the temperature is too low.
        """
        check_seeds(prompts, seeds)
        # `_submit` lets requests wait for the end of a hold; a batch fails instead.
        with self._changed:
            self._check_ready("generate", waits=False)
        requests = [
            # A name that no caller of `submit` can have chosen.
            self._request(number, prompt, sampling_params, f"generate-{uuid.uuid4().hex}", seed)
            for number, (prompt, seed) in enumerate(zip(prompts, seeds, strict=True))
        ]
        self._submit("generate", requests)
        try:
            return [request.future.result() for request in requests]
        finally:
            self.abort(request.id for request in requests)  # those that are left when one fails, or after Ctrl-C

    def submit(
        self,
        prompt: Sequence[int],
        sampling_params: SamplingParams,
        request_id: str,
        *,
        seed: int,
        partial: Completion | None = None,
    ) -> Future[Completion]:
        # Do not hold the lock here: the checks may take long, and need nothing that the lock protects.
        request = self._request(None, prompt, sampling_params, request_id, seed)
        if partial is not None:
            self._begin_with(request, partial)
        self._submit("submit", [request])
        return request.future

    def check_submit(
        self,
        prompt: Sequence[int],
        sampling_params: SamplingParams,
        seed: int,
        request_id: str = "",
        partial: Completion | None = None,
        *,
        number: int | None = None,
    ) -> None:
        """Raise what `submit` would raise now, for whoever submits later. With a ``number``, the index of the prompt in
        the call, what `generate` would raise."""
        with self._changed:
            self._check_ready("submit" if number is None else "generate", waits=number is None)
        request = self._request(number, prompt, sampling_params, request_id, seed)
        if partial is not None:
            self._begin_with(request, partial)

    def _request(
        self, number: int | None, prompt: Sequence[int], sampling_params: SamplingParams, request_id: str, seed: int
    ) -> Request:
        """A request that was checked. Its values are Python's own, whatever the caller's are."""
        if not isinstance(sampling_params, SamplingParams):
            raise TypeError(
                f"{type(self).__name__}: sampling_params is {sampling_params!r:.80}; pass SamplingParams(...)"
            )
        if not isinstance(request_id, str):
            raise TypeError(f"submit(): request_id is {request_id!r:.80}; expected a str")
        own_seed = as_integer(seed)
        if own_seed is None:
            raise ValueError(f"seed={seed!r:.80}; expected an integer")
        token_ids = _token_ids(prompt)
        if token_ids is None:
            raise PromptError(f"is {prompt!r:.80}; it must be a sequence of token ids, which are integers", number)
        self.check_request(number, token_ids, sampling_params)
        return Request(
            request_id, token_ids, sampling_params, own_seed, echoed=token_ids if self.echo_prompts else None
        )

    def _begin_with(self, request: Request, partial: Completion) -> None:
        if not isinstance(partial, Completion):
            raise TypeError(f"submit(): partial is {partial!r:.80}; pass the Completion of an earlier request")
        token_ids, log_probs = _token_ids(partial.token_ids), partial.log_probs
        versions = partial.weight_versions or [None] * len(partial.token_ids)
        if token_ids is None or not len(token_ids) == len(log_probs) == len(versions):
            raise ValueError(
                f"submit(): partial has {len(partial.token_ids)} token ids, {len(log_probs)} log_probs and "
                f"{len(versions)} weight_versions; expected as many of each, and integers as token ids"
            )
        if token_ids and (what := self._outside(token_ids)) is not None:
            raise ValueError(f"submit(): partial has {what}")
        if (mask := partial.sampling_mask) is not None:
            if len(mask.lengths) != len(token_ids) or sum(mask.lengths) != len(mask.token_ids):
                raise ValueError(
                    f"submit(): partial has {len(token_ids)} token ids, and a sampling_mask of {len(mask.lengths)} "
                    f"positions and {len(mask.token_ids)} tokens, of which its lengths count {sum(mask.lengths)}"
                )
            request.sampling_mask = mask.copy()  # the caller's does not grow
        if (experts := partial.routed_experts) is not None and self.routed_experts:
            if len(experts) != len(request.prompt) + len(token_ids):
                raise ValueError(
                    f"submit(): partial has routed_experts of {len(experts)} tokens, but the prompt and its token ids "
                    f"are {len(request.prompt) + len(token_ids)}"
                )
            request.routed_experts = experts.known()
        request.token_ids += token_ids
        request.log_probs += log_probs
        request.weight_versions += versions

    def _outside(self, token_ids: Sequence[int]) -> str | None:
        """What is wrong with token ids of which some are not in the vocabulary; None if all are."""
        size, least, most = self.vocab_size, min(token_ids), max(token_ids)
        if least >= 0 and (size is None or most < size):
            return None
        known = "they begin at 0" if size is None else f"the model's vocab_size is {size}; use its own tokenizer"
        return f"token ids from {least} to {most}, but {known}"

    def _submit(self, method: str, requests: list[Request]) -> None:
        # The results of these requests are set below without the lock, because this runs callbacks in this thread.
        done = [request for request in requests if request.finish_reason is not None]
        with self._changed:
            self._check_ready(method)
            for request in requests:
                if request.id in self._requests:
                    raise ValueError(f"submit(): request_id {request.id!r} is in use; choose another one")
            # Hold the lock, so that two callers do not start one thread each.
            if not self._serving:
                thread = threading.Thread(target=self._run, name="engine", daemon=True)
                thread.start()
                # Set these only after start(), which raises if the process can have no more threads.
                self._thread, self._serving = thread, True
                self.close_at_exit()
            for request in requests:
                request.future.set_running_or_notify_cancel()  # cancel() has no effect from here on; abort() has
                if request.finish_reason is None:
                    self._requests[request.id] = request
                    self._added.append(request)
                else:
                    request.ended = True
            self._changed.notify_all()
        for request in done:  # `partial` was complete
            request.future.set_result(request.completion(request.finish_reason or "length"))

    def _check_ready(self, method: str, *, waits: bool = True) -> None:
        """Raise if the engine cannot generate. ``waits``: requests may wait for the end of a hold. The caller holds the
        lock."""
        what = f"{type(self).__name__}.{method}(): the engine"
        if self._closed:
            raise RolloutError(f"{what} was closed")
        if not waits and self._in_thread():
            raise RolloutError(f"{what} takes no step before this callback of a request has returned; use submit()")
        if "sleep" in self._holds:
            raise RolloutError(f"{what} is asleep; call the worker's wake_up() or the manager's onload() first")
        if "abandoned" in self._holds:
            raise RolloutError(f"{what} has no complete weights: {self.lost_because}")
        # The version is None during an update too, but requests can wait for the update's end.
        no_weights = self.weight_version is None and "update" not in self._holds
        if no_weights if waits else self._holds - {READING}:
            why = "is paused; call resume() first" if "pause" in self._holds else "has no complete weights"
            raise RolloutError(f"{what} {why}")

    def abort(self, request_ids: Iterable[str] | None = None) -> None:
        if isinstance(request_ids, str):
            raise TypeError(f"abort(): request_ids={request_ids!r}; pass a list of ids, [{request_ids!r}]")
        with self._changed:
            chosen = list(self._requests) if request_ids is None else list(request_ids)
            ended = [self._requests[id_] for id_ in dict.fromkeys(chosen) if id_ in self._requests]
            for request in ended:
                # Only the thread that removes a request sets its future, so the future is set once.
                self._drop(request)
            self._changed.notify_all()
        for request in ended:
            request.future.set_result(request.completion("abort"))

    def pause(self, mode: PauseMode = "keep") -> None:
        """See `RolloutEngine.pause`.

        Raises:
            RolloutError: with "wait", requests are running that cannot end (see `check_ends`); with another mode, a
                step has not ended for `STEP_SECONDS`. "wait" has no time limit, also if a step hangs.
            ValueError: there is no such mode.
        """
        if mode not in ("keep", "abort", "wait"):
            raise ValueError(f"pause(): mode={mode!r}; expected 'keep', 'abort' or 'wait'")
        if mode == "wait":
            self._drain()
        # Hold after `_drain` too: it returns when the last request has ended, while the step may still be running.
        self._hold("pause")
        # Abort after the hold has begun, so that no other request begins afterwards.
        if mode == "abort":
            self.abort()

    def _drain(self) -> None:
        with self._changed:
            self._draining = True
            try:
                while len(self._requests) > len(self._added):
                    # Check after each wakeup: with another hold in force, the running requests would never end.
                    self.check_ends()
                    self._changed.wait()
                # Keep the lock until here, so that no request begins in between.
                self._holds.add("pause")
            finally:
                self._draining = False
                self._changed.notify_all()

    def resume(self) -> None:
        with self._changed:
            # Recompute nothing, because a pause does not change the weights.
            self._holds.discard("pause")
            self._changed.notify_all()

    def load(self) -> EngineLoad:
        with self._changed:
            running = sum(request.begun for request in self._requests.values())
            return EngineLoad(running, len(self._requests) - running, self.cache_usage())

    def is_held(self, reason: str) -> bool:
        """Whether no step may be taken for this reason: "sleep", "update" or "pause", for example."""
        return reason in self._holds

    def check_ends(self) -> None:
        """Raise if requests that are running cannot end now. Needs no lock.

        Raises:
            RolloutError: because of a weight update or `sleep`, for example, or in a callback of a request.
        """
        if holds := self._holds - {READING} | ({"callback"} if self._in_thread() else set()):
            raise RolloutError(
                f"pause(mode='wait'): requests are running and cannot end ({', '.join(sorted(holds))}); use "
                "mode='keep' or 'abort'"
            )

    def cache_usage(self) -> float | None:
        return None

    def begin_update(self) -> None:
        """See `RolloutEngine.begin_update`.

        Raises:
            RolloutError: a step has not ended for `STEP_SECONDS`.
        """
        self._hold("update")
        # Remove this only with the hold in force: no step may run with the weights of an abandoned update.
        with self._changed:
            self._holds.discard("abandoned")
            super().begin_update()

    def finish_update(self, version: int) -> None:
        super().finish_update(version)
        self._release("update")

    def abandon_update(self) -> None:
        with self._changed:
            self.lost_because = "an update was abandoned; update them again"
            # Change both under one lock: in between, requests would neither wait for the update nor be refused.
            self._holds.add("abandoned")
            self._holds.discard("update")
            self.weight_version = None

    def close(self) -> None:
        """See `RolloutEngine.close`. A step that is being taken has `CLOSE_SECONDS` to end."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        # Do not hold the lock here: the thread needs it to end. In a callback, close() runs in the thread itself.
        if self._thread is not None and not self._in_thread():
            self._thread.join(CLOSE_SECONDS)
        # If the thread did not end in time, it may still finish a step: `record` ignores requests that have ended.
        self._fail(list(self._requests.values()), RolloutError("the engine was closed before the request ended"))

    # --- the inside -----------------------------------------------------------------------------------------------

    def close_at_exit(self) -> None:
        """Have `close` called before the interpreter ends, if the engine still exists."""
        _started.add(self)

    def _in_thread(self) -> bool:
        return threading.current_thread() is self._thread

    def _hold(self, reason: str) -> None:
        with self._changed:
            # Do not wait for a thread that has not reached `next_step`: before that, `serve` does not use the model.
            self._holds.add(reason)
            # In a callback of a future, which runs in the engine's thread, the hold begins with the next step.
            if not self._changed.wait_for(lambda: not self._stepping or self._in_thread(), STEP_SECONDS):
                self._holds.discard(reason)
                self._changed.notify_all()
                raise RolloutError(f"{type(self).__name__} has not finished a step for {STEP_SECONDS:g} s")

    def _release(self, reason: str, *, recompute: bool = True) -> None:
        with self._changed:
            self._holds.discard(reason)
            self._recompute |= recompute
            self._changed.notify_all()

    def _end(self, request: Request) -> None:
        """Forget a request that ends. The caller holds the lock."""
        request.ended = True
        del self._requests[request.id]
        self._changed.notify_all()

    def _drop(self, request: Request) -> None:
        """Forget a request that `serve` may have been given. The caller holds the lock."""
        self._end(request)
        if request in self._added:
            self._added.remove(request)
        else:
            self._dropped.append(request)

    def _fail(self, requests: Iterable[Request], error: BaseException) -> None:
        with self._changed:
            failed = [request for request in requests if not request.ended]
            for request in failed:
                self._drop(request)
        for request in failed:
            request.future.set_exception(_error_of(error))

    def _run(self) -> None:
        while True:
            try:
                # Call this inside the `try`: an error must fail the requests, not leave them without a thread.
                self.prepare_thread()
                self.serve()
                with self._changed:
                    # After None, the requests that follow start another thread.
                    if not (self._serving and self._in_thread()):
                        return
                raise RolloutError(f"{type(self).__name__}.serve() returned before next_step() had returned None")
            except BaseException as error:
                logger.debug("%s failed", type(self).__name__, exc_info=True)
                with self._changed:
                    self._stepping = False
                    self._changed.notify_all()  # somebody may wait for the end of the step
                    waiting = set(map(id, self._added))
                    # Those that were handed out; all, if it failed before it asked for any.
                    failed = [one for one in self._requests.values() if id(one) not in waiting] or self._added[:]
                    # With no request to fail, another attempt would only raise the same error.
                    if not failed:
                        self._serving = False
                        return
                self._fail(failed, error)
                with self._changed:
                    self._dropped = []  # `serve` begins without requests


def check_seeds(prompts: Sequence[Sequence[int]], seeds: Sequence[int]) -> None:
    """Raise a `ValueError` if there is not one seed per prompt of `RolloutEngine.generate`."""
    if not hasattr(seeds, "__len__"):
        raise ValueError(f"generate(): seeds={seeds!r:.80}; expected a list of one seed per prompt")
    if len(seeds) != len(prompts):
        raise ValueError(f"generate(): {len(prompts)} prompts and {len(seeds)} seeds; expected one seed per prompt")


def _token_ids(values: Sequence[int]) -> list[int] | None:
    """Token ids as Python's integers; None if they are no sequence of integers."""
    if isinstance(values, list) and set(map(type, values)) <= {int}:
        return values[:]
    if isinstance(values, array) and values.typecode == "i":
        return values.tolist()
    try:
        found = [as_integer(value) for value in values]
    except TypeError:  # it cannot be iterated
        return None
    return None if None in found else cast("list[int]", found)


def _error_of(error: BaseException) -> BaseException:
    """A new exception for each request, so that no traceback grows."""
    if isinstance(error, RolloutError):
        made = copy.copy(error)
        made.__cause__ = error.__cause__
        return made
    made = RolloutError(f"the engine failed: {type(error).__name__}: {error}")
    made.__cause__ = error
    return made
