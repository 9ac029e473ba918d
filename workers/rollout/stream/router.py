"""Router: gives the groups of a `SampleBuffer` to rollout workers, one at a time and by load, and collects them.

Threads: all methods are called by the thread of a `RolloutStream`, except `_rewarded`: the rewards of a finished group
are computed in the threads of the manager's reward runner, which then put the group into the buffer. No locks.
`workers.recovery.rollout_recovery` has a thread of its own.
"""

from __future__ import annotations

import itertools
import logging
import time
import uuid
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from typing import Any

from single_controller import (
    CallTimeoutError,
    DispatchError,
    GroupBrokenError,
    ResultLostError,
    WorkerDiedError,
)
from workers.data.collate import trained_versions, with_versions
from workers.recovery.rollout_recovery import GroupRecovery
from workers.rollout.engines.rollout_engine import Completion
from workers.rollout.rewards.reward_calls import Sample
from workers.rollout.rollout_errors import RolloutError
from workers.rollout.rollout_manager import GroupData, RolloutManager, checked_values, token_ids
from workers.rollout.stream.exchange import (
    FINISHED,
    Attempt,
    FinishedGroup,
    GroupRequest,
    Orders,
    Report,
    request_name,
)
from workers.rollout.stream.sample_buffer import SampleBuffer
from workers.seeds import mixed_seed
from workers.weight_sync.transports.peer_weights import WeightRequest

logger = logging.getLogger(__name__)

Prompts = Callable[[int], Any]
"""``prompts(rollout_id)``: the prompts of a rollout, as `RolloutManager.generate` takes them, or (prompts, extras)."""

WAIT_SECONDS = (0.02, 0.1)
"""How long workers wait in one exchange for a group to finish. At first the former; up to the latter while nothing
happens, and longer if exchanges take long by themselves, so that they take half of the time at most."""

REPORT_SECONDS = 1.0
"""How old the reports of idle workers may be, and how long workers wait in an exchange at most."""

COPY_SECONDS = 0.05
"""How old the reports may be while a worker waits for the weights of another one."""

MAX_COPIES = 3
"""How often others are asked to send a worker their weights, before it has to wait for the next update."""

MAX_LOSSES = 3
"""A group whose worker has died, or lost its weights, this many times without progress is an error: it may be the
reason."""

ROLLOUTS = 64
"""Of how many rollouts the prompts are kept. They can be asked for again."""


@dataclass(eq=False)
class _Running:
    """A group that a worker was given, and has not reported as finished.

    Attributes:
        request: what the worker is told.
        journal: sample -> what has arrived of it: its completion, or one with the state of the session
            (`Completion.session`). Another worker goes on from it if this one dies.
        sent: whether a successful exchange has carried the request.
    """

    request: GroupRequest
    journal: dict[int, Completion]
    sent: bool = False

    def so_far(self) -> tuple[GroupData, int]:
        """The group as the journal has it, and the number of its tokens."""
        request = self.request
        completions = [self.journal.get(sample, one) for sample, one in enumerate(request.partials)]
        return GroupData(list(request.prompt), completions, greedy=request.greedy), _tokens_of(completions)


@dataclass(eq=False)
class _Worker:
    """What the router knows of one rank.

    Attributes:
        member: what identifies its process.
        report: the last one; None after a restart.
        running: by attempt.
        finished: attempts to acknowledge.
        held: weight version and `RolloutEngine.weights_id`, as it last reported them, for a process that takes its
            place at its rank. Nothing since an update may have begun: it may have died in the middle of it.
    """

    member: Hashable
    report: Report | None = None
    running: dict[Attempt, _Running] = field(default_factory=dict)
    finished: list[Attempt] = field(default_factory=list)
    held: tuple[int | None, str | None] = (None, None)

    @property
    def requests(self) -> int:
        return sum(len(one.request.seeds) for one in self.running.values())

    @property
    def unsent(self) -> list[GroupRequest]:
        """In order of number."""
        requests = (one.request for one in self.running.values() if not one.sent)
        return sorted(requests, key=lambda request: request.attempt)


class Router:
    """See the module's docstring. `RolloutStream` has the arguments.

    Attributes:
        recovery: of the workers' group.
        completed: how many groups were generated to their end.
        sessions_lost: how many sessions began again because their worker died and their environment has no state.
    """

    def __init__(
        self,
        manager: RolloutManager,
        prompts: Prompts,
        buffer: SampleBuffer,
        *,
        dynamic_sampling: bool,
        requests_per_worker: int,
    ) -> None:
        self.recovery = GroupRecovery(manager.group)
        self._buffer = buffer
        self._manager = manager
        self._prompts = prompts
        self._dynamic_sampling = dynamic_sampling
        self._limit = requests_per_worker
        # The id is unique to this stream, because workers abort the groups of other ids.
        self._id = uuid.uuid4().hex[:12]
        self._attempts = itertools.count()
        self._workers: list[_Worker] = []
        """By rank."""
        self._follow_group()
        self._reported: tuple[float, int | None] = (-REPORT_SECONDS, None)
        self._wait = WAIT_SECONDS[0]
        self._overhead = 0.0
        self._rollouts: dict[int, tuple[list[list[int]], Mapping[str, Sequence[Any]]]] = {}
        self._losses: dict[int, set[Hashable]] = {}
        """Group -> what it was lost with since it last came further: each attempt whose worker died, and the version of
        weights that were lost. Somebody may have stopped all servers, so those of one version count once."""
        self.completed = self.sessions_lost = 0
        self._asked: Counter[str] = Counter()
        """Id of a `WeightRequest` -> how often a worker was told to serve it."""

    @property
    def running(self) -> bool:
        """Whether workers generate."""
        return any(worker.running for worker in self._workers)

    @property
    def due(self) -> bool:
        """Whether it is time for an exchange."""
        at, version = self._reported
        old = (
            time.monotonic() - at > (COPY_SECONDS if self._copying else REPORT_SECONDS)
            or version != self._buffer.version
        )
        return old or self.recovery.due or any(worker.running or worker.finished for worker in self._workers)

    @property
    def _copying(self) -> bool:
        """Whether a worker waits for the weights of another one."""
        return any(one.report is not None and one.report.needs_weights for one in self._workers)

    def begin_groups(self) -> None:
        """Assign groups to the workers that have the buffer's version and room, while the buffer admits any."""
        version = self._buffer.version
        # Those with room, by requests, and equal ones by rank: not by the engines' loads, which date from the last
        # reports. The version of a worker that was just started is unknown before its first report.
        free = [
            (worker.requests, rank)
            for rank, worker in enumerate(self._workers)
            if worker.report is not None and worker.report.weight_version == version and self._has_room(worker)
        ]
        heapify(free)
        # Begin a group only if a worker has room: a group that has begun counts as generated with this version.
        while free and (begun := self._buffer.begin()) is not None:
            _, rank = heappop(free)
            worker = self._workers[rank]
            request = self._request(begun.number, None if begun.partial is None else load(begun.partial))
            # Add complete samples to the journal immediately, so that no other worker generates them again.
            done = ((k, one) for k, one in enumerate(request.partials) if one.finish_reason != "abort")
            worker.running[request.attempt] = _Running(request, dict(done))
            if self._has_room(worker):
                heappush(free, (worker.requests, rank))

    def _has_room(self, worker: _Worker) -> bool:
        waiting = 0 if worker.report is None else worker.report.load.waiting
        more = worker.requests + self._manager.samples_per_prompt + self._manager.greedy_baselines
        return not waiting and (not worker.running or more <= self._limit)

    def _request(self, number: int, partial: GroupData | None) -> GroupRequest:
        manager, (rollout_id, index) = self._manager, divmod(number, self._buffer.groups_per_batch)
        if partial is None:
            prompt, greedy = self._rollout(rollout_id)[0][index], manager.greedy_baselines
            nothing = [Completion([], [], "abort", [])] * (manager.samples_per_prompt + greedy)
            partial = GroupData(prompt, nothing, greedy=greedy)
        samples = range(len(partial.completions))
        seeds = [mixed_seed(manager.seed, rollout_id, index, sample) for sample in samples]
        attempt = Attempt(number, next(self._attempts))
        extras = None
        if manager.engine_extras:
            extras = {name: of[index] for name, of in manager.for_engine(self._rollout(rollout_id)[1]).items()}
        how = manager.sampling_params
        return GroupRequest(attempt, partial.prompt, how, seeds, partial.completions, extras, partial.greedy)

    def columns(self, number: int) -> dict[str, Any]:
        """Return what the prompt of a group had besides its tokens; {} if that is not known any more. Called by any
        thread: it only reads one entry of a dict."""
        rollout_id, index = divmod(number, self._buffer.groups_per_batch)
        known = self._rollouts.get(rollout_id)
        return {} if known is None else {name: values[index] for name, values in known[1].items()}

    def _rollout(self, rollout_id: int) -> tuple[list[list[int]], Mapping[str, Sequence[Any]]]:
        """Return the prompts of a rollout, and their extras."""
        if rollout_id not in self._rollouts:
            given = self._prompts(rollout_id)
            has_columns = isinstance(given, tuple) and len(given) == 2 and isinstance(given[1], Mapping)
            prompts, extras = given if has_columns else (given, {})
            if len(prompts) != self._buffer.groups_per_batch:
                raise ValueError(
                    f"prompts({rollout_id}) returned {len(prompts)} prompts; expected {self._buffer.groups_per_batch}"
                )
            first = rollout_id * len(prompts)
            ids = [token_ids(first + index, prompt) for index, prompt in enumerate(prompts)]
            if self._manager.rewards is not None:
                self._manager.rewards.check_columns(extras)
            self._rollouts[rollout_id] = (
                ids,
                {name: checked_values(name, values, len(ids)) for name, values in extras.items()},
            )
            if len(self._rollouts) > ROLLOUTS:
                del self._rollouts[next(iter(self._rollouts))]
        return self._rollouts[rollout_id]

    def _copies(self) -> dict[int, list[WeightRequest]]:
        """Choose who sends its weights to the workers that need them: rank -> requests. Busy workers last."""
        version = self._buffer.version
        reports = {rank: worker.report for rank, worker in enumerate(self._workers) if worker.report is not None}
        # rank -> what makes it busy
        busy = {
            rank: (len(report.sending_weights), self._workers[rank].requests)
            for rank, report in reports.items()
            if report.weight_version == version
        }
        served = {id_ for report in reports.values() for id_ in report.sending_weights}
        chosen: dict[int, list[WeightRequest]] = {}
        for report in reports.values():
            needed = report.needs_weights
            if needed is None or needed.version != version or needed.id in served or not busy:
                continue
            if self._asked[needed.id] < MAX_COPIES:
                self._asked[needed.id] += 1
                sender = min(busy, key=lambda rank: busy[rank])
                busy[sender] = busy[sender][0] + 1, busy[sender][1]
                chosen.setdefault(sender, []).append(needed)
        return chosen

    def exchange(self, *, updating: bool = False, longer: float | None = 0.0) -> list[Report] | None:
        """Give the workers their orders, and handle what they report.

        Args:
            updating: an update follows or is under way, so no worker copies the weights of another one, and workers do
                not wait in the exchange: the update needs the thread.
            longer: seconds that workers may be busy with the update before they take their orders; None for no limit.

        Returns:
            The reports. None if a worker died: its groups were given back, and the other orders have to be repeated.
        """
        # Grow first, so that new workers get orders immediately.
        self.recovery.grow()
        self._follow_group()
        expired = set(self._buffer.expired())
        wait = 0.0 if updating else min(max(self._wait, self._overhead), REPORT_SECONDS)
        version = self._buffer.version
        copies = {} if updating else self._copies()
        orders = [
            Orders(
                self._id,
                version,
                worker.unsent,
                [attempt for attempt in worker.running if attempt.number in expired],
                list(worker.finished),
                wait,
                not updating,
                copies.get(rank, ()),
                worker.held[1] if worker.held[0] == version else None,
                self._known(worker),
            )
            for rank, worker in enumerate(self._workers)
        ]
        # The time limit starts here, so do nothing slow between this line and the call.
        exchange = self._call(longer)
        began = time.monotonic()
        try:
            reports: list[Report] = exchange(orders)
        except (WorkerDiedError, CallTimeoutError, GroupBrokenError) as error:
            # Ranks may move only if all engines allow it: some depend on the rank, for example to find their server.
            known = [worker.report for worker in self._workers if worker.report is not None]
            self.recovery.recover(error, elastic=bool(known) and all(report.any_rank for report in known))
            self._follow_group(error)
            return None
        except DispatchError:
            if self._manager.group.world_size == len(orders):
                raise
            return None  # ranks were added or dropped meanwhile
        except ResultLostError:
            return None  # the workers are alive, and orders may be repeated
        ended = time.monotonic()
        self._reported, self._overhead = (ended, version), max(0.0, ended - began - wait)
        # Clear `finished` before the reports are handled, which adds the groups that the next exchange acknowledges.
        for worker in self._workers:
            worker.finished.clear()
            for one in worker.running.values():
                one.sent = True
        busy = any(order.submit or order.abort for order in orders) or any(report.finished for report in reports)
        self._wait = WAIT_SECONDS[0] if busy else min(2 * self._wait, WAIT_SECONDS[1])
        for worker, report in zip(self._workers, reports, strict=False):  # the group may have got further ranks
            self._handle(worker, report)
            worker.held = (None, None) if updating else (report.weight_version, report.weights_id)
        return reports

    def _follow_group(self, error: Exception | None = None) -> None:
        """Take note of the processes that are the group's ranks now, and give back the groups of those that are not any
        more."""
        members, before = self.recovery.members(), self._workers
        known = {worker.member: worker for worker in before}
        if members == list(known):
            return
        self._workers = [known.pop(member) if member in known else _Worker(member) for member in members]
        # If their number has changed, ranks have moved, and a rank's new process may have another server.
        if len(before) == len(members):
            for old, new in zip(before, self._workers, strict=True):
                new.held = old.held
        for worker in known.values():
            for one in worker.running.values():
                self._give_back_lost(one, error)

    def _known(self, worker: _Worker) -> dict[str, tuple[int, int]]:
        """What the journals of a worker have; see `Orders.known`."""
        return {
            request_name(self._id, attempt, sample): FINISHED
            if one.session is None
            else (one.session.number, len(one.session.nodes))
            for attempt, running in worker.running.items()
            for sample, one in running.journal.items()
        }

    def _note_progress(self, worker: _Worker, report: Report) -> None:
        """Write what a worker has reported of running groups into its journals, and into the buffer, whose checkpoints
        have it too."""
        if not report.progress:
            return
        for attempt, running in worker.running.items():
            names = {request_name(self._id, attempt, sample): sample for sample in range(len(running.request.seeds))}
            told_of = {sample: report.progress[name] for name, sample in names.items() if name in report.progress}
            if not told_of:
                continue
            journal, (_, known_tokens) = running.journal, running.so_far()
            for sample, told in told_of.items():
                if isinstance(told, Completion):
                    journal[sample] = told
                    continue
                before = journal.get(sample, running.request.partials[sample])
                known = {version: one for version, one in report.fingerprints.items() if version >= 0}
                fingerprints = {**(before.fingerprints or {}), **known}
                state = told.onto(before.session)
                journal[sample] = Completion([], [], "abort", [], fingerprints or None, session=state)
            group, tokens = running.so_far()
            if tokens > known_tokens:  # it has come further than before; a session that begins again has not
                self._losses.pop(attempt.number, None)
            self._buffer.journal(attempt.number, group if tokens else None, tokens=tokens)

    def _count_loss(self, number: int, what: Hashable, error: Exception | None = None) -> None:
        losses = self._losses.setdefault(number, set())
        losses.add(what)
        if len(losses) >= MAX_LOSSES:
            raise RolloutError(
                f"group {number} was given to {len(losses)} workers that died or lost their weights; its prompt may be "
                "the reason"
            ) from error

    def _give_back_lost(self, running: _Running, error: Exception | None = None) -> None:
        attempt = running.request.attempt
        self._count_loss(attempt.number, attempt, error)
        group, tokens = running.so_far()
        sessions = [one.session for one in group.completions if one.session is not None]
        if lost := [one for one in sessions if one.environment is None]:
            self.sessions_lost += len(lost)
            logger.warning(
                "%d sessions of group %d begin again, because their environments have no state_dict",
                len(lost),
                attempt.number,
            )
        self._buffer.give_back(attempt.number, store(group) if tokens else None, tokens=tokens)

    def _handle(self, worker: _Worker, report: Report) -> None:
        worker.report = report
        self._note_progress(worker, report)
        # If the call that acknowledged a group was lost, the group is reported again, but is no longer in `running`.
        for finished in report.finished:
            running = worker.running.pop(finished.attempt, None)
            worker.finished.append(finished.attempt)
            if running is not None:
                self._finished(running, finished, report.weight_version)
        for attempt in worker.running.keys() - set(report.running):  # somebody else has restarted the worker
            self._give_back_lost(worker.running.pop(attempt))

    def _finished(self, running: _Running, finished: FinishedGroup, version: int | None) -> None:
        request = running.request
        number = request.attempt.number
        if finished.error is not None:
            raise finished.error
        completions = [with_versions(one, version) for one in finished.completions]
        group = GroupData(list(request.prompt), completions, greedy=request.greedy)
        tokens = _tokens_of(completions)
        if any(one.finish_reason == "abort" for one in completions):
            if tokens > running.so_far()[1]:
                self._losses.pop(number, None)
            elif finished.lost:
                self._count_loss(number, self._buffer.version)
            self._buffer.give_back(number, store(group) if tokens else None, tokens=tokens)
            return
        self._losses.pop(number, None)
        self._buffer.journal(number, group, tokens=tokens)  # for checkpoints: the rewards may take long
        self.completed += 1
        self._manager.note_sessions(completions)
        if self._manager.rewards is None:
            self._put(number, group)
            return
        # Compute rewards in other threads, because this one has to keep the workers busy.
        samples = [Sample(number, k, group.prompt, one.token_ids, one.info) for k, one in enumerate(completions)]
        rollout_id, index = divmod(number, self._buffer.groups_per_batch)
        extras = {name: {number: values[index]} for name, values in self._rollout(rollout_id)[1].items()}
        future = self._manager.rewards.submit(samples, extras)
        future.add_done_callback(lambda done: self._rewarded(number, group, done))

    def _rewarded(self, number: int, group: GroupData, done: Future[list[float]]) -> None:
        """A callback of the rewards, in one of their threads."""
        try:
            self._put(number, group._replace(rewards=done.result()))
        except CancelledError:
            self._buffer.fail(RolloutError("the rewards were cancelled"))
        # A future only logs exceptions of its callbacks, so pass the error to `take` instead.
        except BaseException as error:
            self._buffer.fail(error)

    def _put(self, number: int, group: GroupData) -> None:
        rewards, made = group.rewards, [trained_versions(one) for one in group.completions]
        trained = [row for row in range(group.rows) if group.completions[row].finish_reason != "error"]
        if group.greedy and group.completions[-1].finish_reason == "error":
            trained = []  # without its baseline, the group is not trained
        versions = [version for row in trained for version in made[row]]
        flat = self._dynamic_sampling and rewards is not None and is_flat([rewards[row] for row in trained])
        self._buffer.put(
            number,
            store(group),
            versions=(min(versions), max(versions)) if versions else None,
            flat=flat,
            tokens=sum(map(len, made)),
        )

    def leave(self, longer: float | None = 0.0) -> None:
        """Abort what is running; the workers keep nothing of this stream. For ``longer`` see `exchange`."""
        # If this is false, the workers have no groups of this stream, and may be busy with other calls.
        if self.due or self._copying:
            try:
                self._call(longer)([Orders(uuid.uuid4().hex)] * self._manager.group.world_size)
            except Exception as error:  # the group was closed, or what ended the stream is here again
                logger.debug("the stream could not take leave of its workers: %s", error)

    def _call(self, longer: float | None) -> Any:
        """The method `RolloutWorker.exchange` with its limit, which counts from now on, also while a worker loads
        weights."""
        timeout = self._manager.timeout
        limit = None if timeout is None or longer is None else timeout + longer
        return self._manager.group.exchange.options(timeout=limit)


def _tokens_of(completions: Sequence[Completion]) -> int:
    """How many tokens were generated, in all rows. The journal of a session has them in its state alone."""

    def of(one: Completion) -> int:
        if one.session is not None:
            return int(one.session.tokens)
        return sum(len(row.completion.token_ids) for row in one.rows) if one.rows else len(one.token_ids)

    return sum(map(of, completions))


def is_flat(rewards: Sequence[float]) -> bool:
    """Whether all rewards of a group are equal, or there are none; if they are several, each of them. A plain number
    among these, such as that of a timeout, counts for each."""
    names = {name for reward in rewards for name in getattr(reward, "parts", ())}
    return len({(one, *(getattr(one, "parts", {}).get(name, one) for name in names)) for one in rewards}) <= 1


def store(value: Any) -> Any:
    """Put a value into Ray's object store, if Ray runs: the driver then keeps a reference."""
    import ray

    return ray.put(value) if ray.is_initialized() else value


def load(value: Any) -> Any:
    import ray

    return ray.get(value) if isinstance(value, ray.ObjectRef) else value
