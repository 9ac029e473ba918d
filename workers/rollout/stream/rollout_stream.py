"""RolloutStream: generates in the background, while the trainer trains, into a `SampleBuffer`. docs/async-rl.md says
what that means for the samples.

Threads: "rollout-stream" runs the router: it gives groups to the workers, one at a time and by load, and collects them.
`RolloutStream.close` ends it; so does an error, which `RolloutStream.take` raises. The rewards of a finished group are
computed in the threads of the manager's reward runner, which then put the group into the buffer. A worker that died is
replaced in a thread of `workers.recovery.rollout_recovery`.
Lock: ``_changed`` protects what the router and other threads share: ``_pauses``, ``_limit``, ``_idle``, ``_reported``,
``_ended``, ``_closed`` and ``_stuck``. It is a leaf; the buffer has a lock of its own. ``_updated``, ``_resending`` and
``_refreshed`` belong to the thread that calls `take` and `updating`, and everything else to the router's.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal

from dispatch.checks import check_count
from single_controller.call.state import Closing
from workers.rollout.rollout_errors import RolloutError, WeightVersionError
from workers.rollout.rollout_manager import GroupData, RolloutManager, check_sessions
from workers.rollout.stream.exchange import Report
from workers.rollout.stream.router import Prompts, Router, load, store
from workers.rollout.stream.sample_buffer import SampleBuffer
from workers.weight_sync.sync_protocol import TimeUpError

if TYPE_CHECKING:
    from tensordict import TensorDict

logger = logging.getLogger(__name__)

UPDATING_SECONDS = 0.02
"""How often workers are asked for their reports while an update is announced or under way."""

UpdateMode = Literal["wait", "interrupt"]

IDLE_SECONDS = 0.02
"""How often the router looks for something to do, and `RolloutStream.take` for workers without weights."""

REQUESTS_PER_WORKER = 256

CLOSE_SECONDS = 10.0


class RolloutStream(Closing):
    """Generates groups (all samples of one prompt) in the background, as long as the buffer admits them.

    `take` returns the next batch, in the same form as `RolloutManager.generate`. `RayTrainGroup.update_weights` pauses
    the stream itself; put `updating` around updates of your own. When a worker dies, its groups are given to other
    workers, which continue; the worker that is started in its place gets the weights from one of them. A stream is a
    context manager.

    Args:
        manager: the manager, in this process. Its group's engines must have requests (`RequestEngine`). Create the
            group with ``collectives=False``: otherwise all workers are restarted when one dies. With it, the ranks of
            the other workers may change then, if `RolloutEngine.any_rank` allows it.
        prompts: see `Prompts`; called in the router's thread, for rollouts of ``buffer.groups_per_batch`` prompts.
            Group n is prompt ``n % groups_per_batch`` of rollout ``n // groups_per_batch``. With dynamic sampling,
            prompts of further rollouts replace filtered groups, even beyond the last rollout.
        buffer: the store, which determines how old samples may be. Do not use it elsewhere.
        update_mode: what an update does with running requests. "wait": the update waits until they have ended.
            "interrupt": they continue with the current weights while the new ones arrive, stop while their engine loads
            these, and continue with the new weights from the tokens that they have. A worker without a double buffer
            stops for the whole update.
        dynamic_sampling: filter groups whose rewards are all equal. Set the buffer's ``max_filtered``; otherwise `take`
            waits forever if all groups are filtered.
        requests_per_worker: maximum number of completions that a worker generates at a time; at least one group.

    Raises:
        TypeError: the manager is not a `RolloutManager` of this process, or ``prompts`` is not a function.
        ValueError: an option is out of range, or the manager has another stream.
    """

    def __init__(
        self,
        manager: RolloutManager,
        prompts: Prompts,
        buffer: SampleBuffer,
        *,
        update_mode: UpdateMode = "wait",
        dynamic_sampling: bool = False,
        requests_per_worker: int = REQUESTS_PER_WORKER,
    ) -> None:
        if not isinstance(manager, RolloutManager) or not callable(prompts) or not isinstance(buffer, SampleBuffer):
            raise TypeError(
                "RolloutStream: expected a RolloutManager of this process, a function (rollout id) -> prompts, and a "
                f"SampleBuffer; got {manager!r:.80}, {prompts!r:.80} and {buffer!r:.80}"
            )
        if update_mode not in ("wait", "interrupt"):
            raise ValueError(f"RolloutStream: update_mode={update_mode!r}; expected 'wait' or 'interrupt'")
        check_count("RolloutStream: requests_per_worker", requests_per_worker)
        if dynamic_sampling and (manager.samples_per_prompt < 2 or manager.rewards is None):
            raise ValueError("RolloutStream: dynamic_sampling needs a reward function and samples_per_prompt > 1")
        if manager.stream is not None:
            raise ValueError("RolloutStream: the manager has a stream; close it first")
        self.buffer = buffer
        self._manager = manager
        self._update_mode = update_mode
        self._router = Router(
            manager, prompts, buffer, dynamic_sampling=dynamic_sampling, requests_per_worker=requests_per_worker
        )
        self._changed = threading.Condition()
        self._pauses = 0
        self._limit: float | None = None
        """How long the last update that was announced may take."""
        self._idle = False
        self._reported = False
        """Whether all workers have reported since the update was announced."""
        self._ended = False
        self._closed = False
        self._stuck: dict[int, int | None] | None = None
        """Rank -> weight version, if no worker has that of the buffer."""
        self._updated: int | None = None
        """How many batches had been taken at the last update."""
        self._resending = False
        """Whether an update has the weights of the one before."""
        self._refreshed: tuple[int, int] | None = None
        """How many deaths and completed groups there were when `take` called ``refresh``, if nothing came of it yet."""
        self._thread = threading.Thread(target=self._run, name="rollout-stream", daemon=True)
        self._thread.start()
        # Set this last: if the thread cannot be started, the manager has no stream.
        manager.stream = self

    @classmethod
    def from_args(cls, args: Any, manager: RolloutManager, prompts: Prompts) -> RolloutStream:
        """Create a stream and its buffer as a training run's configuration says; see `workers.train.args`.

        Raises:
            TrainArgsError: the configuration is invalid.
        """
        from workers.train.args import read_args

        args = read_args(args)
        buffer = SampleBuffer(
            args.rollout_batch_size,
            max_staleness=args.max_staleness if args.async_rollout else 0,
            on_stale=args.on_stale,
            order=args.rollout_order,
            window=args.rollout_window,
            update_interval=args.update_weights_interval,
            num_batches=args.num_rollout,
            max_filtered=4 * args.rollout_batch_size
            if args.dynamic_sampling_max is None
            else args.dynamic_sampling_max,
            keep_batches=2 * args.peer_snapshot_interval,  # how far `RayTrainGroup.replace` goes back at most
        )
        return cls(
            manager,
            prompts,
            buffer,
            update_mode=args.update_weights_mode,
            dynamic_sampling=args.dynamic_sampling,
        )

    # --- for the driver's script ----------------------------------------------------------------------------------

    def take(self, timeout: float | None = None) -> TensorDict:
        """Wait for the next batch. It says that the batch before is trained; see `SampleBuffer.take`.

        If no worker has the version of the last update, because they were restarted or have lost their weights, the
        manager's ``refresh`` is called.

        Args:
            timeout: seconds to wait, or None. After a timeout, call it again.

        Returns:
            One row per completion, as `RolloutManager.generate` returns them. ``group_ids`` differ from those of all
            other calls, also when a batch is taken again; `group_numbers` of them are the groups' numbers.

        Raises:
            TimeoutError: the batch is not complete.
            PromptError, RewardError, RolloutError: as `RolloutManager.generate`. The stream has ended, as after any
                other error of it.
            WeightVersionError: no worker has the version of the last update, and there is no ``refresh``, or it did
                not help.
            ValueError: all batches were taken, or there was no update of the weights yet.
            SingleControllerError: a worker could not be restarted, or a call of the group failed.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        router = self._router
        while True:
            left = IDLE_SECONDS if deadline is None else max(0.0, min(IDLE_SECONDS, deadline - time.monotonic()))
            try:
                # Wait for short times, because nothing wakes the buffer when the workers have lost their weights.
                taken = self.buffer.take(left)
                break
            except TimeoutError:
                if deadline is not None and time.monotonic() >= deadline:
                    raise
            with self._changed:
                stuck = self._stuck
            if stuck is not None:
                # Again only if there was progress, or another reason; a prompt may end every server that gets it.
                again = self._refreshed == (router.recovery.deaths, router.completed)
                self._refreshed = None
                self._refresh(stuck, again=again)
                self._refreshed = router.recovery.deaths, router.completed
        self._refreshed = None
        with self._changed:
            self._changed.notify_all()  # the router may begin further groups
        try:
            groups: list[GroupData] = [load(one.payload) for one in taken]
            check_sessions([completion for group in groups for completion in group.completions])
            if self._manager.greedy_baselines and not all(group.greedy and group.rewards for group in groups):
                raise RolloutError(
                    "the stream continues from a state with groups that were generated without greedy_baselines=True; "
                    "go on without them, or from another checkpoint"
                )
            numbers = [one.number for one in taken]
            return self._manager.batch_of(numbers, groups, [router.columns(number) for number in numbers])
        except BaseException as error:  # after Ctrl-C too
            self.buffer.fail(error)  # these groups are out of the buffer: another call would return those after them
            raise

    def _refresh(self, stuck: dict[int, int | None], *, again: bool) -> None:
        refresh, version = self._manager.refresh, self.buffer.version
        error = WeightVersionError(
            f"the stream needs weight version {version}, but no worker has it: {stuck} (rank: version); update the "
            "workers' weights",
            expected=version,
            versions=stuck,
        )
        if refresh is None or again:
            raise error
        logger.warning("%s. Calling refresh()", error)
        # The weights are new only if the trainer has trained a batch since it sent them.
        self._resending = self._updated == self.buffer.batches
        try:
            refresh()  # and so `updating`, which waits for the router: no lock is held here
        finally:
            self._resending = False

    @contextmanager
    def updating(self, timeout: float | None = None, *, same_weights: bool = False) -> Iterator[None]:
        """Inside, the workers' weights can be updated. With ``update_mode="wait"``, no worker generates for the stream.
        With "interrupt", they continue until their engines load the weights. Afterwards, the stream continues with the
        workers that have ``manager.weight_version``; if that is None, with those whose weights were never updated.

        Args:
            timeout: seconds to wait until the update can begin, or None. `RayTrainGroup.update_weights` passes
                ``update_weights_timeout_minutes``. With "interrupt", a call that the stream makes during the
                update may take this much longer than the manager's timeout, because the workers may be busy with it.
            same_weights: whether these are the weights of the previous update, which do not increase any staleness.

        Raises:
            WeightSyncError: the timeout has passed. Nothing was updated, and the stream continues as before.
        """
        with self._changed:
            self._pauses += 1
            self._limit = timeout
            self._changed.notify_all()
        try:
            with self._changed:
                if not self._changed.wait_for(lambda: self._idle or self._ended, timeout):
                    raise self._late(timeout)
            # Do not hold the lock here: the router needs it, and an update may take minutes.
            yield
            # Set the version before the pause ends, because the router begins groups with the buffer's version.
            self.buffer.set_version(self._manager.weight_version or 0, same_weights=same_weights or self._resending)
            self._updated, self._refreshed = self.buffer.batches, None
        finally:
            with self._changed:
                self._pauses -= 1
                # The last reports are from before the update; the next update waits for new ones.
                self._idle = self._reported = False
                self._stuck = None  # until the workers have reported again
                self._changed.notify_all()

    def _late(self, timeout: float | None) -> TimeUpError:
        if self._reported:
            why = (
                "requests that are running have not ended. Use update_mode='interrupt' (update_weights_mode), which "
                "does not wait for them, or raise the limit"
            )
        else:
            why = (
                "a call of exchange() of the workers has not returned. Either a worker hangs, or the function of the "
                "prompts does, or workers are being restarted. With timeout= of RolloutManager, workers that hang are "
                "restarted"
            )
        return TimeUpError(
            f"the rollout stream was not ready for an update of the weights within {timeout:g} s, the time limit of an "
            f"update (update_weights_timeout_minutes, or timeout= of updating()): {why}. The workers keep their "
            "weights, and the update can be repeated"
        )

    def metrics(self) -> dict[str, float]:
        """Return what happened since the last call; see `SampleBuffer.metrics`. ``rollout/restarts``: how often workers
        have died since the beginning, and others were started in their place, or will be. ``rollout/sessions_lost``:
        how many sessions of theirs began again, because their environments have no state; only if there were any."""
        found = {**self.buffer.metrics(), "rollout/restarts": float(self._router.recovery.deaths)}
        lost = self._router.sessions_lost
        return found | ({"rollout/sessions_lost": float(lost)} if lost else {})

    def state_dict(self, *, trained: int | None = None) -> dict[str, Any]:
        """Return the state for a checkpoint, as `RayTrainGroup.save_model` takes it; see `SampleBuffer.state_dict`."""
        return self.buffer.state_dict(load, trained=trained)

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        """Continue from a state, before the first update. Each prompt that was not trained is generated, or was.

        The versions of the weights must continue, too: with `RayTrainGroup.load_driver_state` they do.

        Raises:
            ValueError: see `SampleBuffer.load_state_dict`; or the state is None.
        """
        if state is None:
            raise ValueError("the checkpoint has no state of a stream: save_model() got no driver_state")
        self.buffer.load_state_dict(state, restore=store)

    def close(self) -> None:
        """End the thread, and abort what is being generated. `take` raises from now on."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        # Fail the buffer before the join, so that `take` in another thread raises immediately.
        self.buffer.fail(RolloutError("the stream was closed"))
        if self._manager.stream is self:
            self._manager.stream = None
        # Do not hold the lock here: the thread needs it to end.
        self._thread.join(CLOSE_SECONDS)
        if self._thread.is_alive():
            logger.warning("the rollout stream has not ended within %.0f s; a call of its workers hangs", CLOSE_SECONDS)

    # --- the router's thread --------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._closed:  # read without the lock: `close` wakes a step that waits
                self._step()
        except BaseException as error:
            self.buffer.fail(error)  # `take` raises it in the trainer's thread
        finally:
            with self._changed:
                longer = self._longer
            # Leave before `_ended` is set: then an update may begin, and no worker may generate for this stream.
            self._router.leave(longer)
            with self._changed:
                self._ended = True  # an update must not wait for a router that has ended
                self._changed.notify_all()

    @property
    def _longer(self) -> float | None:
        """See `Router.exchange`. The caller holds ``_changed``."""
        return self._limit if self._pauses and self._idle else 0.0

    def _step(self) -> None:
        with self._changed:
            updating = self._pauses > 0
            waiting = updating and self._update_mode == "wait"
            longer = self._longer
            if waiting and self._idle:
                # For the end of the update, or of the stream, which may have been closed since `_run` looked.
                self._changed.wait_for(lambda: self._closed or not self._idle)
                return
        # Do not hold the lock here, because the user's prompt function may take long.
        if not waiting:
            self._router.begin_groups()
        if updating or self._router.due:
            reports = self._router.exchange(updating=updating, longer=longer)
            if reports is not None:
                self._look(reports, updating)
            if updating:
                with self._changed:
                    self._changed.wait_for(lambda: not self._pauses, UPDATING_SECONDS)
        else:
            with self._changed:
                # Check under the lock, so that no notification between the check and the wait is lost.
                if not self._closed and not self._pauses:
                    self._changed.wait(IDLE_SECONDS)

    def _look(self, reports: list[Report], updating: bool) -> None:
        """Tell the other threads what the last exchange says about the workers."""
        version = self.buffer.version
        versions = {report.rank: report.weight_version for report in reports}
        with self._changed:
            if updating and self._pauses:
                # All have reported since the update was announced: it will not be the first to meet a death.
                self._reported = True
                self._idle = self._update_mode == "interrupt" or not self._router.running
                self._changed.notify_all()
            elif not updating and not self._pauses and version is not None:  # no update came after these reports
                self._stuck = None if version in versions.values() else versions
