"""RewardRunner: computes rewards with the user's function, sync or async, in this process or in processes of its own.

One event loop runs ``async`` functions and the calls of processes (`reward_processes`), several at once. A plain
function without processes runs one call at a time: in the thread that calls `RewardRunner.compute`, where it may use
signals and Ctrl-C interrupts it, or, for `RewardRunner.submit`, in a thread that the event loop starts for each group,
one group after another.

Threads, all daemons, so that a reward function that hangs does not keep the process alive:

- "rewards" runs the event loop. It ends with `RewardRunner.close`, or when the runner is garbage-collected: it refers
  to the runner only while rewards are being computed.
- "rewards-plain" runs a plain function for one group, and ends with it.

Locks: ``_turn`` is held by the thread that is in a plain function, as long as it is, because the function need not be
thread-safe; whoever stops waiting for rewards does not release it. It comes before all other locks, because the
function may call groups. ``_lock`` protects the event loop and ``_closed``; it is a leaf.
"""

from __future__ import annotations

import asyncio
import inspect
import itertools
import math
import sys
import threading
import weakref
from collections.abc import Awaitable, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from dispatch.checks import check_count
from single_controller.call.state import Closing
from workers.background import in_thread
from workers.rollout.rewards.reward_calls import RewardCall, RewardFunction, Sample
from workers.rollout.rewards.reward_progress import RewardProgress
from workers.rollout.rollout_errors import RewardError, RolloutError

if TYPE_CHECKING:
    from workers.rollout.rewards.reward_processes import RewardProcesses

CLOSE_SECONDS = 5.0
"""How long `RewardRunner.close` waits for calls that it has cancelled."""

REWARD_CONCURRENCY = 128
"""Default of ``RewardRunner(concurrency=)``."""


class RewardRunner(Closing):
    """Computes the rewards of one group, or of several groups at once. Its limits apply to all groups together.

    You can pickle a runner: the copy has the same function and options, but threads and processes of its own.

    Args:
        function: see `RewardFunction`.
        batched: the function takes lists over all samples of a group and returns as many numbers.
        concurrency: maximum number of calls of an ``async`` function that run at once; None for all.
        workers: run the function in this many processes, each with one call at a time; None runs it in this process.
            The processes are Ray actors. They start when they are needed.
        timeout: seconds that one call of the function may take, or None. After the timeout, an ``async`` function is
            cancelled; with ``workers``, the process is killed and replaced. An ``async`` function that blocks its event
            loop cannot be cancelled: set ``workers``.
        on_timeout: reward of the samples of a call that takes longer; None raises a `RewardError`.

    Raises:
        TypeError: the function is not callable or, with ``workers``, cannot be pickled.
        ValueError: a number is out of range; or there is a timeout for a plain function without ``workers``, which
            nothing can interrupt.
    """

    def __init__(
        self,
        function: RewardFunction,
        *,
        batched: bool = False,
        concurrency: int | None = REWARD_CONCURRENCY,
        workers: int | None = None,
        timeout: float | None = None,
        on_timeout: float | None = None,
    ) -> None:
        if not callable(function):
            raise TypeError(f"reward_function must be a function or None, got {function!r}")
        for name, count in (("reward_concurrency", concurrency), ("reward_workers", workers)):
            if count is not None:
                check_count(name, count, hint=", or None")
        if timeout is not None and not (_is_number(timeout) and timeout > 0):
            raise ValueError(f"reward_timeout={timeout!r}: expected a number of seconds above 0, or None")
        if on_timeout is not None and not _is_number(on_timeout):
            raise ValueError(f"on_reward_timeout={on_timeout!r}: expected a finite number, or None for an error")
        self.function = function
        self.batched = batched
        self.concurrency = concurrency
        self.workers = workers
        self.timeout = timeout
        self.on_timeout = on_timeout
        self._prepare()
        if self._plain and timeout is not None:
            raise ValueError(
                f"reward_timeout={timeout!r}: a plain reward function cannot be interrupted in this process. Set "
                "reward_workers to run it in processes, or make it an `async def`"
            )
        if workers and isinstance(pickled := _pickled(function), str):
            raise TypeError(f"reward_workers={workers}: {pickled}")

    def _prepare(self) -> None:
        self._plain = not self.workers and not is_async(self.function)
        self._named, self._hidden, self._required = _columns_of(self.function)
        self._lock = threading.Lock()
        self._turn = threading.Lock()
        self._plain_groups = asyncio.Lock()
        self._slots = asyncio.Semaphore(self.workers or self.concurrency or sys.maxsize)
        self._progress = RewardProgress()
        self._processes: RewardProcesses | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._closed = False

    def __getstate__(self) -> dict[str, Any]:
        names = ("batched", "concurrency", "workers", "timeout", "on_timeout")
        return {"function": _pickled(self.function), **{name: getattr(self, name) for name in names}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        import ray.cloudpickle as cloudpickle

        function = state["function"]
        vars(self).update(state)
        self.function = _Lost(function) if isinstance(function, str) else cloudpickle.loads(function)
        self._prepare()

    def submit(
        self,
        samples: Sequence[Sample],
        extras: Mapping[str, Any] | None = None,
        *,
        first_row: int | None = None,
    ) -> Future[list[float]]:
        """Begin to compute the rewards of a group, and return at once.

        Args:
            samples: what to reward, usually all completions for one prompt.
            extras: name -> values by `Sample.prompt`, passed to the function by keyword if it has a parameter of that
                name: a list with one value per prompt, or a dictionary.
            first_row: row of the first sample, for error messages; None if it is not known.

        Returns:
            A future of one reward per sample, or of a `RewardError` as from `compute`. ``cancel()`` cancels the calls
            that have begun, unless they are in a plain function without processes. `close` cancels the future.

        Raises:
            RewardError, RolloutError: see `check`.
        """
        self.check()
        future = self._schedule(self._calls(samples, extras, first_row))
        # Begin the entry after `_schedule`, which may raise: only the future's callback ends the entry.
        key = self._progress.begin(len(samples))
        future.add_done_callback(lambda _: self._progress.end(key))
        return future

    def compute(self, samples: Sequence[Sample], extras: Mapping[str, Any] | None = None) -> list[float]:
        """Compute one reward per sample, of one group or of several; if `batched`, with one call.

        Args:
            samples: what to reward.
            extras: see `submit`.

        Raises:
            RewardError: the function raised, did not return a finite number, exceeded the timeout, or its process died;
                the message names the sample. Or the runner was closed.
            RolloutError: see `check`.
        """
        self.check()
        key = self._progress.begin(len(samples))
        future: Future[list[float]] | None = None
        try:
            calls = self._calls(samples, extras, 0)
            rewards, begun = self._call_plain(calls) if self._plain else ([], None)
            if left := calls[len(rewards) :]:
                future = self._schedule(left, begun)
                rewards += future.result()
            return rewards
        except CancelledError:
            raise RewardError("the reward runner was closed") from None
        finally:
            self._progress.end(key)
            if future is not None:
                future.cancel()  # after Ctrl-C

    def check(self) -> None:
        """Raise if no rewards can be computed. With ``workers``, also connect to Ray: in the caller's thread, because
        Ray sets signal handlers on the main thread.

        Raises:
            ConnectionError: with ``workers``, there is no connection to the Ray cluster.
            RewardError: the runner is closed.
            RolloutError: this is a copy from another process, and the function could not be pickled.
        """
        if self._closed:
            raise RewardError("the reward runner is closed")
        if isinstance(self.function, _Lost):
            self.function()
        if self.workers:
            from single_controller.ray.runtime import ensure_ray

            ensure_ray()

    def check_columns(self, extras: Mapping[str, Any]) -> None:
        """Raise if there is no column for a parameter that the function requires.

        Raises:
            RewardError: one is missing.
        """
        if missing := [name for name in self._required if name not in extras]:
            have = ", ".join(map(repr, extras)) or "no entries"
            raise RewardError(f"the reward function requires the column {missing[0]!r}, but extras has {have}")

    def metrics(self) -> dict[str, float]:
        """Return, and reset, what happened since the last call: ``rewards/timeouts``, the number of samples whose
        rewards are `on_timeout`; ``rewards/slowest_seconds``, the longest call of the function."""
        return self._progress.metrics()

    def close(self) -> None:
        """Cancel all groups, and end threads and processes. A plain function that is running in a thread, and an
        ``async`` one that blocks its event loop, go on until they return."""
        with self._lock:
            first, self._closed = not self._closed, True
            loop, thread = self._loop, self._thread
        if loop is not None and thread is not None and thread.is_alive():
            if first:  # in a later call, the loop may be closed although its thread has not ended yet
                asyncio.run_coroutine_threadsafe(self._end(), loop)
            # A future's callback may call this in the loop's thread.
            if threading.current_thread() is not thread:
                thread.join(CLOSE_SECONDS)

    def _calls(self, samples: Sequence[Sample], extras: Mapping[str, Any] | None, row: int | None) -> list[RewardCall]:
        self.check_columns(extras or {})
        given = {
            name: of
            for name, of in (extras or {}).items()
            if name in self._named or (self._hidden is not None and name not in self._hidden)
        }
        if self.batched:
            return [RewardCall(samples, given, row, True, "info" in self._named)] if samples else []
        return [
            RewardCall([one], given, None if row is None else row + k, False, "info" in self._named)
            for k, one in enumerate(samples)
        ]

    def _call_plain(self, calls: Sequence[RewardCall]) -> tuple[list[float], Awaitable[Any] | None]:
        """Call a plain function in this thread.

        Returns:
            The rewards. If the function turns out to be ``async``: those until then, and what it has returned for the
            next call, because it is called once for each.
        """
        rewards: list[float] = []
        # Hold the lock for the whole group, so that calls for another thread's group do not interleave.
        with self._turn:
            for call in calls:
                args, given = call.arguments()
                with self._progress.running(call):
                    try:
                        value = self.function(*args, **given)
                    except (Exception, asyncio.CancelledError) as error:  # the latter is not a subclass of the former
                        raise call.raised(error) from error
                if inspect.isawaitable(value):
                    return rewards, value
                rewards += call.rewards(value)
        return rewards, None

    # --- in the event loop ----------------------------------------------------------------------------------------

    def _schedule(self, calls: Sequence[RewardCall], begun: Awaitable[Any] | None = None) -> Future[list[float]]:
        """Begin calls in the event loop, from any thread. The first one may have ``begun`` already."""
        with self._lock:
            if self._closed:
                raise RewardError("the reward runner is closed")
            if self._loop is None:
                loop = asyncio.new_event_loop()
                thread = threading.Thread(target=_serve, args=(loop,), name="rewards", daemon=True)
                thread.start()
                self._loop, self._thread = loop, thread  # only now: without a thread, it would run nothing
                # The thread refers only to the loop, so an unused runner can be garbage collected, which ends the loop.
                weakref.finalize(self, _stop, loop)
            # Hold the lock: `close` sets `_closed` before it ends the loop, so nothing is scheduled after that.
            return asyncio.run_coroutine_threadsafe(self._group(calls, begun), self._loop)

    async def _group(self, calls: Sequence[RewardCall], begun: Awaitable[Any] | None) -> list[float]:
        rewards: list[float] = []
        if self._plain and begun is None:
            async with self._plain_groups:  # or each group would have a thread that waits for its turn
                rewards, begun = await asyncio.wrap_future(in_thread("rewards-plain", lambda: self._call_plain(calls)))
        left = calls[len(rewards) :]
        tasks = [asyncio.ensure_future(self._rewards(call, begun if call is left[0] else None)) for call in left]
        try:
            return [*rewards, *itertools.chain(*await asyncio.gather(*tasks))]
        finally:
            for task in tasks:
                task.cancel()  # the others, after one has failed

    async def _rewards(self, call: RewardCall, begun: Awaitable[Any] | None) -> list[float]:
        async with self._slots:
            try:
                return call.rewards(await self._value(call, begun))
            except RewardError:
                raise
            except _TimedOutError:
                if self.on_timeout is None:
                    raise call.error(f"exceeded reward_timeout={self.timeout:g} s for {call.where()}") from None
                self._progress.timed_out(call)
                return [float(self.on_timeout)] * len(call.samples)
            except (Exception, asyncio.CancelledError) as error:
                task = asyncio.current_task()
                if task is not None and task.cancelling():  # with its group; not raised by the function
                    raise
                raise call.raised(error) from error

    async def _value(self, call: RewardCall, begun: Awaitable[Any] | None) -> Any:
        args, given = call.arguments()
        if self.workers:
            from workers.rollout.rewards.reward_processes import RewardProcesses

            # Only the event loop's thread executes this, so no lock is needed.
            if self._processes is None:
                self._processes = RewardProcesses(_pickled(self.function))
            async with self._processes.reserve(call) as process:
                with self._progress.running(call):
                    return await self._in_time(process.call.remote(args, given))
        with self._progress.running(call):
            value = self.function(*args, **given) if begun is None else begun
            return await self._in_time(value) if inspect.isawaitable(value) else value

    async def _in_time(self, value: Awaitable[Any]) -> Any:
        task = asyncio.ensure_future(value)
        try:
            # Not `asyncio.timeout`, which waits for a function that ignores that it is cancelled.
            done, _ = await asyncio.wait({task}, timeout=self.timeout)
        finally:
            task.cancel()
        if not done:
            raise _TimedOutError
        return task.result()

    async def _end(self) -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=0.8 * CLOSE_SECONDS)
        if self._processes is not None:
            self._processes.close()
        asyncio.get_running_loop().stop()


class _TimedOutError(Exception):
    """A call has exceeded the timeout. A class of its own: the function may raise any `TimeoutError`."""


class _Lost:
    """Stands in for a reward function that does not pickle; raises when it is called."""

    def __init__(self, why: str) -> None:
        self.why = why

    def __call__(self, *args: Any, **kwargs: Any) -> float:
        raise RolloutError(
            f"generate(): this manager is a copy of one in another process, and its reward function {self.why}. Pass "
            "a function that can be pickled, or call generate() in that process"
        )


def _pickled(function: Any) -> Any:
    """Return the pickled function, or a text that says why it cannot be pickled."""
    import ray.cloudpickle as cloudpickle

    try:
        return cloudpickle.dumps(function)
    except Exception as error:
        return f"{function!r} cannot be pickled: {type(error).__name__}: {error}"


def _serve(loop: asyncio.AbstractEventLoop) -> None:
    while True:
        try:
            loop.run_forever()
            break
        except (SystemExit, KeyboardInterrupt):
            continue  # a task raised it, and asyncio lets it through; whoever waits for that task gets it too
    loop.close()


def _stop(loop: asyncio.AbstractEventLoop) -> None:
    with suppress(RuntimeError):  # `close` may have closed the loop
        loop.call_soon_threadsafe(loop.stop)


def is_async(function: Any) -> bool:
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004


def _columns_of(function: Any) -> tuple[frozenset[str], frozenset[str] | None, tuple[str, ...]]:
    """The columns that a reward function names, its parameters behind those for tokens; those that its ``**columns``
    cannot get, which have the names of parameters for tokens, or None without it; and those that it requires."""
    try:
        parameters = [*inspect.signature(function).parameters.values()]
    except (TypeError, ValueError):  # some functions of C have no signature
        return frozenset(), frozenset(), ()
    tokens = [one for one in parameters if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)][:2]
    named = [
        one for one in parameters if one not in tokens and one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)
    ]
    hidden = frozenset(one.name for one in tokens if one.kind is one.POSITIONAL_OR_KEYWORD)
    takes_all = any(one.kind is one.VAR_KEYWORD for one in parameters)
    required = tuple(one.name for one in named if one.default is one.empty and one.name != "info")
    return frozenset(one.name for one in named), hidden if takes_all else None, required


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
