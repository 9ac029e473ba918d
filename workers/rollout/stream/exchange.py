"""Exchange: how a rollout worker generates groups that begin and end at different times, in short calls of its driver.

A *group* is all samples of one prompt. The driver's side is `workers.rollout.stream.rollout_stream`: it calls
`RolloutWorker.exchange` again and again, with `Orders` for each rank, and gets a `Report` of each.

Delivery is exactly once, also when a call is lost because another rank died in it: every order may be repeated. A group
is identified by its number and its attempt. A group that is known is not begun again; a finished one is reported until
it is acknowledged.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, get_args

from single_controller.call.codec import encode
from workers.data.collate import not_per_token, with_fingerprints
from workers.rollout.engines.rollout_engine import Completion, EngineLoad, FinishReason, RolloutEngine, SamplingParams
from workers.rollout.rollout_errors import PromptError, RolloutError
from workers.weight_sync.transports.peer_weights import WeightRequest


class Attempt(NamedTuple):
    """A group, and which attempt to generate it.

    Attributes:
        number: of the group.
        attempt: differs between all attempts of one stream.
    """

    number: int
    attempt: int


@dataclass(frozen=True)
class GroupRequest:
    """A group to generate.

    Attributes:
        attempt: which one.
        prompt: token ids.
        sampling_params: how to sample.
        seeds: one per sample.
        partials: completions to continue, one per sample; those whose finish reason is not "abort" are complete. One
            without tokens begins with the prompt alone.
        extras: of the prompt, for the engine.
        greedy: whether the last sample takes the most likely tokens.
    """

    attempt: Attempt
    prompt: Sequence[int]
    sampling_params: SamplingParams
    seeds: Sequence[int]
    partials: Sequence[Completion]
    extras: Mapping[str, Any] | None = None
    greedy: bool = False


@dataclass(frozen=True)
class Orders:
    """What one rank is told in an exchange.

    Attributes:
        stream: id of the stream. Groups of another one are aborted and forgotten.
        version: the weight version to begin groups with. A worker with another one returns them as aborted.
        submit: groups to generate.
        abort: groups to end now.
        acknowledged: finished groups that have arrived; the worker forgets them.
        wait: seconds to wait for a group to finish, if there is something to wait for.
        copies: whether a worker with another version may take the weights of one that has it. If not, as during an
            update, copies end now.
        send_weights: requests of other workers to serve.
        held_weights: `RolloutEngine.weights_id` of the rank's engine when it had the version, before its process was
            replaced.
        known: `request_name` -> what the driver has of a sample, see `RolloutEngine.progress`, or `FINISHED`.
    """

    stream: str
    version: int | None = None
    submit: Sequence[GroupRequest] = ()
    abort: Sequence[Attempt] = ()
    acknowledged: Sequence[Attempt] = ()
    wait: float = 0.0
    copies: bool = False
    send_weights: Sequence[WeightRequest] = ()
    held_weights: str | None = None
    known: Mapping[str, tuple[int, int]] = field(default_factory=dict)


@dataclass(frozen=True)
class FinishedGroup:
    """A group that is finished.

    Attributes:
        attempt: which one.
        completions: one per sample; the finish reason of those that were aborted is "abort". Empty after an error.
        error: why the engine could not generate it.
        lost: whether the engine has lost its weights meanwhile, as when its server dies.
    """

    attempt: Attempt
    completions: list[Completion]
    error: RolloutError | None = None
    lost: bool = False


@dataclass(frozen=True)
class Report:
    """What one rank returns from an exchange.

    Attributes:
        rank: of the worker.
        weight_version: of its weights; None during an update, and if its engine has lost them.
        load: of its engine.
        finished: groups that are finished and not acknowledged.
        running: groups that are being generated.
        needs_weights: what the worker asks of those that have the orders' version, if it has another one.
        sending_weights: ids of the requests that it is serving.
        weights_id, any_rank: see `RolloutEngine`.
        progress: `request_name` -> a finished sample of a group that is running, or the state of a session, of those
            that the driver does not have; see `RolloutEngine.progress`.
        fingerprints: weight version -> fingerprint, if there is progress.
    """

    rank: int
    weight_version: int | None
    load: EngineLoad
    finished: list[FinishedGroup]
    running: list[Attempt]
    needs_weights: WeightRequest | None = None
    sending_weights: Sequence[str] = ()
    weights_id: str | None = None
    any_rank: bool = False
    progress: Mapping[str, Any] = field(default_factory=dict)
    fingerprints: Mapping[int, int] = field(default_factory=dict)


FINISHED = (1 << 62, 0)
"""In `Orders.known`: the driver has the completion."""


def request_name(stream: str, attempt: Attempt, sample: int) -> str:
    """The id of a sample's request at the engine."""
    return f"{stream}-{attempt.number}-{attempt.attempt}-{sample}"


@dataclass(eq=False)
class _Group:
    """A group on the worker. It is finished when no sample is left.

    Attributes:
        ids: of the requests at the engine, one per sample.
        completions: one per sample; at first those to continue.
        left: samples that are being generated.
        error, lost: see `FinishedGroup`.
    """

    attempt: Attempt
    ids: list[str]
    completions: list[Completion]
    error: RolloutError | None = None
    lost: bool = False
    left: set[int] = field(default_factory=set)

    def finished(self) -> FinishedGroup:
        completions = [] if self.error else list(self.completions)
        return FinishedGroup(self.attempt, completions, self.error, self.lost)


class Exchange:
    """The groups that a worker's engine generates for a stream.

    Lock: ``_changed`` protects ``_groups`` and what is in them. It is a leaf: the engine, whose threads run the
    callbacks that take it, is never called while it is held.

    Args:
        fingerprints: weight version -> fingerprint, as the worker knows them.
    """

    def __init__(self, fingerprints: Mapping[int, int]) -> None:
        self._fingerprints = fingerprints
        self._stream = ""
        self._groups: dict[Attempt, _Group] = {}
        self._changed = threading.Condition()

    def __call__(
        self, orders: Orders, rank: int, engine: RolloutEngine, weight_version: int | None, updating: bool
    ) -> Report:
        """Follow orders, and wait for a group to finish. An engine that has lost its weights, because its server was
        restarted or an update has failed, gets new ones only from an update, which may not begin while groups are
        running, or not before they are trained. So its groups are returned as aborted, for others to continue.

        Args:
            orders: of this rank.
            rank: the worker's.
            engine: the worker's.
            weight_version: the worker's.
            updating: whether an update of its weights is in progress or has failed.

        Raises:
            RolloutError: the engine has no requests.
        """
        if orders.stream != self._stream:
            with self._changed:
                before, self._groups = self._groups, {}
            # Not under the lock: the engine may end requests in this very thread, and then calls `_ended`.
            engine.abort([name for group in before.values() for name in group.ids])
            self._stream = orders.stream
        # During an update, both are None: the groups wait for its end. `Orders.copies` is False then.
        lost = engine.weight_version is None and (weight_version is not None or not updating or orders.copies)
        if lost:
            weight_version = None
        with self._changed:
            for attempt in orders.acknowledged:
                self._groups.pop(attempt, None)
        for request in orders.submit:
            if request.attempt not in self._groups:  # without the lock: only this thread adds and removes groups
                self._begin(engine, request, refused=weight_version is None or weight_version != orders.version)
        with self._changed:
            to_end = list(self._groups) if lost else orders.abort
            ended = [self._groups[attempt] for attempt in to_end if attempt in self._groups]
            for group in ended:
                group.lost |= lost and bool(group.left)
            names = [group.ids[sample] for group in ended for sample in group.left]
        engine.abort(names)  # not under the lock, as above
        with self._changed:
            # An aborted sample still arrives through `_ended`, with the tokens that it has.
            self._changed.wait_for(self._anything_finished, orders.wait)
            finished = [group.finished() for group in self._groups.values() if not group.left]
            running = [group.attempt for group in self._groups.values() if group.left]
        report = Report(rank, weight_version, engine.load(), finished, running)
        return self._with_progress(report, orders, engine) if engine.journals else report

    def _with_progress(self, report: Report, orders: Orders, engine: RolloutEngine) -> Report:
        """Add what another worker needs to go on with the running groups, should this one die."""
        states = engine.progress(orders.known)
        with self._changed:
            groups = [group for group in self._groups.values() if group.left]
            told = {name: states[name] for group in groups for name in group.ids if name in states}
            told |= {  # after the states: one may have ended since
                group.ids[sample]: one
                for group in groups
                for sample, one in enumerate(group.completions)
                if sample not in group.left and orders.known.get(group.ids[sample]) != FINISHED
            }
        return replace(report, progress=told, fingerprints=dict(self._fingerprints)) if told else report

    def _anything_finished(self) -> bool:
        return not all(group.left for group in self._groups.values()) or not self._groups

    def _begin(self, engine: RolloutEngine, request: GroupRequest, *, refused: bool) -> None:
        attempt, partials = request.attempt, request.partials
        group = _Group(
            attempt,
            [request_name(self._stream, attempt, sample) for sample in range(len(request.seeds))],
            list(partials),
        )
        # Register the group before anything can fail, so that the report also includes a refused group.
        self._groups[attempt] = group
        if refused:
            return
        group.left = {sample for sample, partial in enumerate(partials) if partial.finish_reason == "abort"}
        futures: list[tuple[int, Future[Completion]]] = []
        try:
            for sample in sorted(group.left):
                partial = partials[sample]
                greedy = request.greedy and sample == len(partials) - 1
                future = engine.submit(
                    request.prompt,
                    request.sampling_params.greedy() if greedy else request.sampling_params,
                    group.ids[sample],
                    seed=request.seeds[sample],
                    partial=partial if partial.token_ids or partial.session is not None else None,
                    **({"extras": request.extras} if request.extras else {}),
                )
                futures.append((sample, future))
        except Exception as error:
            # Nobody waits for those that were submitted: their futures have no callbacks.
            engine.abort(group.ids)
            group.error, group.left = _error_of(error, engine, attempt), set()
            return
        # Only now: if a later sample is refused by the engine, the group must not have been reported already.
        for sample, future in futures:
            future.add_done_callback(functools.partial(self._ended, engine, group, sample))

    def _ended(self, engine: RolloutEngine, group: _Group, sample: int, done: Future[Completion]) -> None:
        """A callback of a request's future, in whichever thread ends it."""
        raised = done.exception()
        error = None if raised is None else _error_of(raised, engine, group.attempt)
        if raised is None and getattr(done.result(), "finish_reason", None) != "abort":  # those are not data yet
            returned, where = f"{type(engine).__name__}.submit() returned", f"for group {group.attempt.number}"
            try:
                check_completion(done.result(), returned, where)
            except RolloutError as wrong:
                error = wrong
        with self._changed:
            if error is not None:
                group.error = group.error or error
                group.left.clear()  # reported at once: nobody needs the other samples
            elif raised is not None:
                group.lost = True
                group.left.discard(sample)
            else:
                made, before = done.result(), group.completions[sample].fingerprints
                group.completions[sample] = with_fingerprints(made, self._fingerprints, None, before)
                group.left.discard(sample)
            if not group.left:
                self._changed.notify_all()


def check_completion(completion: Any, returned: str, where: str) -> None:
    """Raise a `RolloutError` if an engine has returned no valid completion.

    Args:
        completion: what it has returned.
        returned, where: what the error says before and after it.
    """
    if not isinstance(completion, Completion):
        raise RolloutError(f"{returned} {completion!r:.80} {where}; expected a Completion")
    if wrong := not_per_token(completion):
        raise RolloutError(f"{returned} {wrong} {where}; expected one number per token")
    if completion.finish_reason not in get_args(FinishReason):
        raise RolloutError(
            f"{returned} finish_reason={completion.finish_reason!r} {where}; expected 'stop', 'length', 'abort' or "
            "'error'"
        )


def _error_of(error: BaseException, engine: RolloutEngine, attempt: Attempt) -> RolloutError | None:
    """The error of a group, which can be pickled. None while its engine has no weights: the group is returned as it was
    given."""
    if engine.weight_version is None:
        return None
    if isinstance(error, PromptError):
        return PromptError(error.what, attempt.number)
    if isinstance(error, RolloutError):
        with suppress(Exception):  # if its constructor takes other arguments, or an attribute cannot be pickled
            encode(error).decode()
            return error
    return RolloutError(f"group {attempt.number}: {type(error).__name__}: {error}")
