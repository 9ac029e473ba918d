"""RolloutManager: turns prompts into rollout data. It drives a group of rollout workers and computes the rewards.

Threads: `RolloutManager.generate_async` starts one per call, which ends by itself after it has set the future's result.
A reward function must not wait for another rollout of the same manager, whose rewards would wait for this function.
"""

from __future__ import annotations

import logging
import operator
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from dispatch.checks import check_count, check_seconds, is_count, naming_keywords
from dispatch.errors import DispatchError
from single_controller import WorkerFuture
from single_controller.call.future import ComputedFuture
from workers.background import in_thread
from workers.data.collate import collate, with_versions
from workers.data.rollout_data import unique_groups
from workers.rollout.agents.environment import COUNTED, session_metrics
from workers.rollout.engines.rollout_engine import Completion, SamplingParams, as_integer
from workers.rollout.rewards.reward_calls import RewardFunction, Sample
from workers.rollout.rewards.reward_runner import REWARD_CONCURRENCY, RewardRunner
from workers.rollout.rollout_errors import PromptError, RolloutError, WeightVersionError
from workers.seeds import mixed_seed
from workers.tracking.samples import RowNotes

if TYPE_CHECKING:
    from tensordict import TensorDict

    from workers.rollout.rollout_worker import Generated

logger = logging.getLogger(__name__)

KEPT_SESSIONS = 100_000
"""Of how many sessions that have ended something is known at most, until `RolloutManager.reward_metrics`."""


class GroupData(NamedTuple):
    """All samples of one prompt.

    Attributes:
        prompt: token ids.
        completions: one per sample; each with the versions of its tokens.
        rewards: one per sample; None if there is no reward function, or if the group is not complete.
        greedy: whether the last sample is the greedy one, which is no row but gives the others' baseline.
    """

    prompt: list[int]
    completions: list[Completion]
    rewards: list[float] | None = None
    greedy: bool = False

    @property
    def rows(self) -> int:
        """The number of samples that are rows."""
        return len(self.completions) - self.greedy


@dataclass(frozen=True)
class _Sent:
    """A rollout that was sent to the workers. Its samples have no completion yet; with ``greedy``, the greedy ones are
    at the end. ``calls`` generate them."""

    samples: list[Sample]
    prompts: list[list[int]]
    greedy: bool
    extras: dict[str, Sequence[Any]]
    expected_version: int | None
    calls: list[WorkerFuture]


class RolloutManager:
    """Generates several completions for each prompt on all workers of a group, and computes their rewards.

    You can pass a manager to a worker: the copy drives the same workers through an attached group. It has the reward
    function if that can be pickled; otherwise `generate` of the copy raises an error.

    Args:
        group: a `RayWorkerGroup` or `LocalWorkerGroup` of `RolloutWorker`, or that role of a colocated group. If one
            engine raises, the other workers have the group's ``error_grace`` seconds to finish, or, with
            ``collectives=False``, as long as they need.
        sampling_params: how to sample.
        reward_function: ``reward(prompt_ids, completion_ids, **columns) -> float``. It gets two lists of token ids, and
            the extras of this prompt that its parameters name. An ``async def`` runs for several completions at once.
            With None, the data has no ``rewards``.
        samples_per_prompt: completions per prompt.
        seed: completions depend only on it, the ``rollout_id``, the prompt's index in the call, and the sample's index;
            they do not depend on the number of workers.
        batched_rewards: call the reward function once with lists over all completions (in a `RolloutStream`, once for
            those of each prompt), with extras repeated for each completion. It returns a list, array or tensor of
            as many numbers.
        reward_concurrency: how many calls of an ``async`` reward function run at once; None for all. See `RewardRunner`
            for this and the next three.
        reward_workers: how many processes run the reward function; None runs it in this process.
        reward_timeout: seconds that one call of the reward function may take, or None.
        on_reward_timeout: the reward of a completion whose call takes longer; None for a `RewardError`.
        greedy_baselines: also generate one greedy completion of each prompt, whose reward becomes the entry
            ``reward_baselines`` of the prompt's rows (ReMax). The greedy completion has no row of its own.
        engine_extras: names of the ``extras`` that the engine gets too, for an environment; see
            `RolloutEngine.generate`. They are sent to the workers.
        pad_token_id: the padding token.
        timeout: seconds that one call of the workers may take, or None. They count from when it is sent, so the time in
            which the workers still run earlier calls is included. The group is broken after a timeout.

    Attributes:
        rewards: the `RewardRunner`; None without a reward function.
        weight_version: version of the last weight update; a worker with another version is an error. None accepts any
            that all workers have.
        refresh: a function that brings the current weights to all workers, such as ``RayTrainGroup.update_weights``.
            `generate` calls it once if a worker was restarted or added, and generates again. With None, that is an
            error. It is not pickled with the manager.

    Raises:
        TypeError: the group has no ``generate``, or an argument has the wrong type.
        ValueError: a number is out of range, ``reward_timeout`` is given for a plain function without
            ``reward_workers``, or ``greedy_baselines`` without a reward function.
    """

    def __init__(
        self,
        group: Any,
        sampling_params: SamplingParams | None = None,
        reward_function: RewardFunction | None = None,
        *,
        samples_per_prompt: int = 1,
        seed: int = 0,
        batched_rewards: bool = False,
        reward_concurrency: int | None = REWARD_CONCURRENCY,
        reward_workers: int | None = None,
        reward_timeout: float | None = None,
        on_reward_timeout: float | None = None,
        greedy_baselines: bool = False,
        engine_extras: Sequence[str] = (),
        pad_token_id: int = 0,
        timeout: float | None = None,
    ) -> None:
        if "generate" not in getattr(group, "methods", ()):
            raise TypeError(
                f"RolloutManager: group must be a worker group of RolloutWorker (with `generate`), got {group!r}"
            )
        check_sampling_params(sampling_params)
        if as_integer(seed) is None:
            raise ValueError(f"RolloutManager: seed={seed!r}; expected an integer")
        if not is_count(pad_token_id, 0):
            raise ValueError(f"RolloutManager: pad_token_id={pad_token_id!r}; expected a token id")
        self.group = group
        self.sampling_params = sampling_params or SamplingParams()
        self.rewards: RewardRunner | None = None
        if reward_function is not None:
            self.rewards = RewardRunner(
                reward_function,
                batched=batched_rewards,
                concurrency=reward_concurrency,
                workers=reward_workers,
                timeout=reward_timeout,
                on_timeout=on_reward_timeout,
            )
        self.samples_per_prompt = check_count("samples_per_prompt", samples_per_prompt)
        self.seed = seed
        if greedy_baselines and reward_function is None:
            raise ValueError("RolloutManager: greedy_baselines=True needs a reward function")
        self.greedy_baselines = greedy_baselines
        if isinstance(engine_extras, str):
            raise TypeError(f"RolloutManager: engine_extras={engine_extras!r}; pass a list, [{engine_extras!r}]")
        self.engine_extras = tuple(engine_extras)
        self.pad_token_id = pad_token_id
        self.timeout = None if timeout is None else check_seconds("RolloutManager: timeout", timeout)
        self.weight_version: int | None = None
        self.refresh: Callable[[], Any] | None = None
        self.stream: Any = None  # the `RolloutStream`, while there is one
        self.sessions: deque[Mapping[str, Any]] = deque(maxlen=KEPT_SESSIONS)
        """What is known of sessions that have ended, until `reward_metrics`. Appended to by any thread."""
        self.row_notes = RowNotes()
        """What is known of the rows of the latest batches, for a `RunLog`."""

    @classmethod
    def from_args(cls, args: Any, group: Any, reward_function: RewardFunction | None = None, **options: Any) -> Self:
        """Create a manager from the configuration of a training run, which has the sampling parameters, the number of
        samples per prompt, the seed, the options of the reward function, and greedy baselines for ReMax.

        Args:
            args: the configuration; see `workers.train.args`.
            group: of rollout workers.
            reward_function: computes the rewards.
            **options: the other arguments; they replace what the configuration says.

        Raises:
            TrainArgsError: the configuration is invalid.
            TypeError, ValueError: see above.
        """
        from workers.train.args import read_args

        args = read_args(args)
        configured = {
            "sampling_params": SamplingParams.from_args(args),
            "samples_per_prompt": args.n_samples_per_prompt,
            "seed": args.seed if args.rollout_seed is None else args.rollout_seed,
            "reward_concurrency": args.reward_concurrency,
            "reward_workers": args.reward_workers,
            "reward_timeout": args.reward_timeout,
            "on_reward_timeout": args.on_reward_timeout,
            "greedy_baselines": args.advantage_estimator == "remax",
        }
        return cls(group, reward_function=reward_function, **{**configured, **options})

    @property
    def reward_function(self) -> RewardFunction | None:
        """The reward function."""
        return None if self.rewards is None else self.rewards.function

    @naming_keywords
    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        rollout_id: int = 0,
        extras: Mapping[str, Sequence[Any]] | None = None,
        sampling_params: SamplingParams | None = None,
        samples_per_prompt: int | None = None,
    ) -> TensorDict:
        """Generate completions for prompts, and compute their rewards.

        Args:
            prompts: token ids of each, as lists or 1-d tensors with at least one token.
            rollout_id: number of the rollout; other rollouts draw other completions.
            extras: name -> one value per prompt, for the reward function: ``{"label": labels}``.
            sampling_params: overrides the manager's for this call.
            samples_per_prompt: overrides the manager's for this call.

        Returns:
            One row per completion, as `collate` describes, in order of the prompts; the completions for one
            prompt are adjacent. ``group_ids`` differ from those of all other calls; `group_numbers` of them are the
            prompts' indices.

        Raises:
            PromptError: a prompt is empty, or the engine cannot generate from it.
            ValueError: an entry of ``extras`` does not have one value per prompt.
            WeightVersionError: workers do not have the expected weight version, and there is no `refresh`, or it did
                not help.
            RewardError: the reward function requires a column that ``extras`` lacks (before anything is sent), raised,
                returned something that is not a reward, or exceeded its timeout.
            RolloutError: all sessions of an `AgentEngine` failed before their first turn.
            SingleControllerError: as any call of the group: `WorkerError`, `WorkerDiedError`, ... After a death,
                restart the worker, or create the group with ``on_death="replace"``, and call this again.
        """
        try:
            return self._finish(self._send(prompts, rollout_id, extras, sampling_params, samples_per_prompt))
        except WeightVersionError as error:
            if self.refresh is None:
                raise
            logger.warning("%s. Calling refresh() and trying again", error)
        # Call refresh() outside the handler, so that its errors are not chained to the version error.
        self.refresh()
        return self._finish(self._send(prompts, rollout_id, extras, sampling_params, samples_per_prompt))

    @naming_keywords
    def generate_async(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        rollout_id: int = 0,
        extras: Mapping[str, Sequence[Any]] | None = None,
        sampling_params: SamplingParams | None = None,
        samples_per_prompt: int | None = None,
    ) -> ComputedFuture[TensorDict]:
        """Start `generate` and return at once. The call has been sent to the workers when this returns.

        A thread of this process waits for the completions and computes the rewards. `refresh` is not used: a worker
        with another weight version is an error. That includes a weight update that overtakes this call, because it is
        sent by other processes: send the update after the completions have arrived.

        Returns:
            A `WorkerFuture`: use ``.result()`` or ``await``, or pass it to `RayTrainGroup.async_train` or a method of a
            group, which waits for it. ``.refs`` has one Ray reference to the data, for ``ray.get``. It also is a
            `concurrent.futures.Future`.
        """
        # Send in this thread, so that the workers get the calls in the order in which they are made.
        sent = self._send(prompts, rollout_id, extras, sampling_params, samples_per_prompt)
        outcome: ComputedFuture[TensorDict] = ComputedFuture("generate", _put)
        # A daemon, so that a driver can exit while workers still generate.
        in_thread("rollout", lambda: self._finish(sent), outcome)
        return outcome

    def weight_receivers(self) -> Any:
        """Return the workers' group. For a manager that is a Ray actor."""
        return self.group

    def set_weight_version(self, version: int | None) -> None:
        """Set `weight_version`. For a manager that is a Ray actor."""
        self.weight_version = version

    def offload(self) -> None:
        """Free the device memory of the workers."""
        self.group.sleep()

    def onload(self) -> None:
        """Take the device memory back."""
        self.group.wake_up()

    def reward_metrics(self) -> dict[str, float]:
        """Return what happened to the rewards since the last call, see `RewardRunner.metrics`, and to the sessions of
        an `AgentEngine`, see `session_metrics`."""
        # Remove entries one by one: other threads append to the deque, and clear() would drop unread entries.
        ended = [self.sessions.popleft() for _ in range(len(self.sessions))]
        return ({} if self.rewards is None else self.rewards.metrics()) | session_metrics(ended)

    def note_sessions(self, completions: Sequence[Completion]) -> None:
        """Note what `reward_metrics` tells about sessions; other completions are ignored."""
        for info in (one.info or {} for one in completions):
            if {"turns", "end_reason"} <= info.keys():  # of a session, whose other entries may be large
                self.sessions.append({name: info[name] for name in COUNTED if name in info})

    def close(self) -> None:
        """End the threads and processes of the reward function. The group is not closed."""
        if self.rewards is not None:
            self.rewards.close()

    def __getstate__(self) -> dict[str, Any]:
        anew = {"row_notes": RowNotes(), "sessions": deque[Mapping[str, Any]](maxlen=KEPT_SESSIONS)}
        return vars(self) | {"refresh": None, "stream": None} | anew  # of this process

    # --- the inside -------------------------------------------------------------------------------------

    def for_engine(self, extras: Mapping[str, Sequence[Any]]) -> dict[str, Sequence[Any]]:
        """Return the columns of ``extras`` that the engine gets.

        Raises:
            ValueError: one of ``engine_extras`` is missing.
        """
        if missing := [name for name in self.engine_extras if name not in extras]:
            raise ValueError(
                f"engine_extras names {missing[0]!r}, but extras has {', '.join(map(repr, extras)) or 'no entries'}"
            )
        return {name: extras[name] for name in self.engine_extras}

    def _send(
        self,
        prompts: Sequence[Sequence[int]],
        rollout_id: int,
        extras: Mapping[str, Sequence[Any]] | None,
        sampling_params: SamplingParams | None,
        samples_per_prompt: int | None,
    ) -> _Sent:
        if self.rewards is not None:
            self.rewards.check()
        check_sampling_params(sampling_params)
        if isinstance(prompts, str) or not hasattr(prompts, "__len__"):
            raise TypeError(f"prompts is {prompts!r:.80}; pass a list with the token ids of each prompt: [[1, 2], [3]]")
        if as_integer(rollout_id) is None:
            raise TypeError(f"rollout_id={rollout_id!r:.80}; pass the number of the rollout, an integer")
        if extras is not None and not isinstance(extras, Mapping):
            raise TypeError(f"extras is {extras!r:.80}; pass a dict with one value per prompt: {{'label': labels}}")
        each = check_count(
            "samples_per_prompt", self.samples_per_prompt if samples_per_prompt is None else samples_per_prompt
        )
        given = {name: checked_values(name, values, len(prompts)) for name, values in (extras or {}).items()}
        ids = [token_ids(number, prompt) for number, prompt in enumerate(prompts)]
        samples = [Sample(number, sample, ids[number], []) for number in range(len(ids)) for sample in range(each)]
        columns = self.for_engine(given)
        if self.rewards is not None:
            self.rewards.check_columns(given)

        def send(some: list[Sample], how: SamplingParams, turn: int = 1) -> WorkerFuture:
            extras = {name: [of[one.prompt] for one in some] for name, of in columns.items()}
            generate = self.group.generate
            if self.timeout is not None:  # it counts from now on, and workers run one call after the other
                generate = generate.options(timeout=turn * self.timeout)
            future: WorkerFuture = generate.remote(
                [one.prompt_ids for one in some],
                how,
                [mixed_seed(self.seed, rollout_id, one.prompt, one.sample) for one in some],
                self.weight_version,
                **({"extras": extras} if extras else {}),
            )
            return future

        how = sampling_params or self.sampling_params
        calls = [send(samples, how)]
        if self.greedy_baselines:
            greedy = [Sample(number, each, prompt, []) for number, prompt in enumerate(ids)]
            calls.append(send(greedy, how.greedy(), 2))
            samples = [*samples, *greedy]
        # The version as of now: until the completions arrive, an update that is sent later may change it.
        return _Sent(samples, ids, self.greedy_baselines, given, self.weight_version, calls)

    def _finish(self, sent: _Sent) -> TensorDict:
        generated: list[Generated] = [*chain(*(call.result() for call in sent.calls))]
        _raise_refused(generated, sent.samples)
        completions = _checked(generated, sent.expected_version)
        self.note_sessions(completions)
        check_sessions(completions)
        samples = [
            Sample(one.prompt, one.sample, one.prompt_ids, completion.token_ids, completion.info)
            for one, completion in zip(sent.samples, completions, strict=True)
        ]
        rewards = None if self.rewards is None else self.rewards.compute(samples, sent.extras)
        of_prompt: list[list[int]] = [[] for _ in sent.prompts]
        for number, one in enumerate(samples):
            of_prompt[one.prompt].append(number)
        groups = [
            GroupData(prompt, [completions[k] for k in of], rewards and [rewards[k] for k in of], sent.greedy)
            for prompt, of in zip(sent.prompts, of_prompt, strict=True)
        ]
        columns = [{name: values[prompt] for name, values in sent.extras.items()} for prompt in range(len(groups))]
        return self.batch_of(range(len(groups)), groups, columns)

    def batch_of(
        self, numbers: Sequence[int], groups: Sequence[GroupData], columns: Sequence[Mapping[str, Any]]
    ) -> TensorDict:
        """Return the rows of groups.

        Args:
            numbers: of the groups, which `group_numbers` of the rows' ``group_ids`` are.
            groups: complete ones.
            columns: what the prompt of each had besides its tokens.
        """
        of_row = [place for place, group in enumerate(groups) for _ in range(group.rows)]
        completions = [one for group in groups for one in group.completions[: group.rows]]
        rewards = [reward for group in groups for reward in (group.rewards or ())[: group.rows]]
        baselines: list[float] | None = None
        if self.greedy_baselines:
            completions = _with_baselines(completions, [group.completions[-1] for group in groups], of_row)
            baselines = [group.rewards[-1] for group in groups if group.rewards for _ in range(group.rows)]
        first_group = unique_groups()
        batch = collate(
            [groups[place].prompt for place in of_row],
            completions,
            group_ids=[first_group + numbers[place] for place in of_row],
            rewards=None if self.rewards is None else rewards,
            reward_baselines=baselines,
            pad_token_id=self.pad_token_id,
        )
        self.row_notes.put(batch, completions, [columns[place] for place in of_row])
        return batch


def _put(value: Any) -> Any:
    import ray

    if not ray.is_initialized():  # with a local group; `ray.put` would start a cluster
        raise DispatchError("the future of generate() has no references without Ray; pass future.result()")
    return ray.put(value)


def _raise_refused(generated: Sequence[Generated], samples: Sequence[Sample]) -> None:
    """Raise an engine's error about a prompt, with the prompt's index in the call."""
    for begin, one in enumerate(generated):  # the first such result of a rank: the engine's index counts from there
        if one.refused is not None:
            number = one.refused.number
            raise PromptError(one.refused.what, None if number is None else samples[begin + number].prompt)


def check_sessions(completions: Sequence[Completion]) -> None:
    """Raise if no session of a rollout has had a turn: a mistake in the environment, and nothing would be trained.
    Nothing to say of no completions, of one alone, and of those that are no sessions.

    Raises:
        RolloutError: all of several sessions failed at the beginning.
    """
    infos = [one.info or {} for one in completions]
    failed = [info for info in infos if info.get("end_reason") in ("error", "silence") and info.get("turns") == 0]
    if 1 < len(failed) == len(infos):
        told, count = Counter(str(info.get("error")) for info in infos).most_common(1)[0]
        raise RolloutError(
            f"all {len(infos)} sessions of the rollout ended before their first turn, {count} of them with {told}; the "
            "workers' log has the traceback"
        )


def _with_baselines(
    completions: Sequence[Completion], greedy: Sequence[Completion], which: Sequence[int]
) -> list[Completion]:
    """Return completions as they are trained: not at all if the session of their greedy baseline has failed, as if they
    had failed themselves. The reward of such a session says nothing of the policy.

    Args:
        completions: the rows'.
        greedy: the baselines.
        which: index of each row's baseline.
    """
    failed = {number for number, one in enumerate(greedy) if one.finish_reason == "error"}
    if failed:
        logger.warning("the completions of %d prompts are not trained: their greedy baselines failed", len(failed))
    return [
        replace(one, finish_reason="error") if baseline in failed else one
        for one, baseline in zip(completions, which, strict=True)
    ]


def _checked(generated: Sequence[Generated], expected: int | None) -> list[Completion]:
    """Return the completions, with the weight versions of their tokens.

    Raises:
        WeightVersionError: a rank generated nothing, or with another version, or than other ranks if any is accepted.
    """
    completions = []
    wrong: dict[int, int | None] = {}
    for completion, version, rank, _ in generated:
        if completion is None or version is None or expected not in (None, version):
            wrong[rank] = version
        else:
            completions.append(with_versions(completion, version))
    wanted = "complete weights" if expected is None else f"weight version {expected}"
    if not wrong and len({one.weight_version for one in generated}) > 1:  # any is accepted, but only one
        wanted, wrong = "one weight version", {one.rank: one.weight_version for one in generated}
    if not wrong:
        return completions
    found = ", ".join(
        f"rank {rank} has {'none' if version is None else f'version {version}'}"
        for rank, version in sorted(wrong.items())
    )
    raise WeightVersionError(
        f"the rollout needs {wanted}, but {found}; update the workers' weights, then generate again",
        expected=expected,
        versions=wrong,
    )


def token_ids(number: int, prompt: Any) -> list[int]:
    """Return a prompt as a list of numbers.

    Raises:
        PromptError: it is no list of token ids, or is empty. It has the prompt's ``number``.
    """
    try:
        tokens = [operator.index(token) for token in (prompt.tolist() if hasattr(prompt, "tolist") else prompt)]
    except TypeError:
        raise PromptError(f"must be a list of token ids (integers), got {str(prompt)[:80]}", number) from None
    if not tokens:
        raise PromptError("is empty; it must have at least one token", number)
    return tokens


def checked_values(name: str, values: Any, prompts: int) -> Sequence[Any]:
    """Return an entry of ``extras``.

    Raises:
        ValueError: it does not have one value for each of ``prompts`` prompts.
    """
    if isinstance(values, (str, Mapping)) or not hasattr(values, "__getitem__") or len(values) != prompts:
        raise ValueError(f"extras[{name!r}] must have one value for each of {prompts} prompts, got {str(values)[:80]}")
    if hasattr(values, "iloc"):  # pandas would look numbers up in its index
        return [values.iloc[number] for number in range(prompts)]
    given: Sequence[Any] = values
    return given


def check_sampling_params(given: Any) -> None:
    if given is not None and not isinstance(given, SamplingParams):
        raise TypeError(f"sampling_params must be a SamplingParams or None, got {given!r:.80}")
