"""RolloutManager: prompts in, rollout data out. It drives a group of rollout workers, and asks for the rewards."""

from __future__ import annotations

import logging
import operator
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from single_controller import Broadcast, WorkerFuture
from workers.rollout.engine import Answer, Sampling
from workers.rollout.errors import PromptError, RolloutError, WeightVersionError
from workers.rollout.pack import pack_answers
from workers.rollout.rewards import RewardFunction, Sample, compute_rewards
from workers.seeds import mixed_seed

if TYPE_CHECKING:
    from tensordict import TensorDict

    from workers.rollout.worker import Generated

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _UnderWay:
    """A rollout that the workers have been sent."""

    rows: list[Sample]
    """Without answers yet."""

    extras: dict[str, Sequence[Any]]
    expected_version: int | None
    answers: WorkerFuture


class RolloutManager:
    """Generates several answers to each prompt, on all workers of a group, and has them rewarded.

    A manager can be given to a worker: there it drives the same workers, attached to. Its reward function goes along if
    it pickles; without it, `generate` there says so.

    Args:
        group: a `RayWorkerGroup` or `LocalWorkerGroup` of `RolloutWorker`, or the role of one in a colocated group.
            When an engine raises, the other workers have the group's ``error_grace`` seconds to end their answers.
        sampling: how to sample.
        reward_function: ``reward(prompt_ids, answer_ids, **extras) -> float``, two lists of token ids and this prompt's
            extras by keyword; an ``async def`` runs for all answers at once. None: the data has no ``rewards``.
        samples_per_prompt: answers to each prompt.
        seed: answers depend on it, on the ``rollout_id``, the prompt's number in the call and the sample's number, and
            on nothing else: not on the number of workers.
        batched_rewards: the reward function is given all answers at once: lists, in which extras are repeated for each
            answer; and returns a list, array or tensor of as many numbers.
        pad_token_id: stands where nothing is.
        timeout: seconds that the workers may take for one call of `generate`, or None. The group is broken after it.

    Attributes:
        weight_version: the version that the last sync of weights brought; workers that have another one are an error.
            None accepts any.
        refresh: what brings all workers the current weights, such as ``RayTrainGroup.update_weights``; `generate` calls
            it once when a worker was restarted or came late, and generates again. None: that is an error. It stays in
            this process.

    Raises:
        TypeError: the group has no ``generate``; or an argument is of another kind.
        ValueError: a number that makes no sense.
    """

    def __init__(
        self,
        group: Any,
        sampling: Sampling | None = None,
        reward_function: RewardFunction | None = None,
        *,
        samples_per_prompt: int = 1,
        seed: int = 0,
        batched_rewards: bool = False,
        pad_token_id: int = 0,
        timeout: float | None = None,
    ) -> None:
        if "generate" not in getattr(group, "methods", ()):
            raise TypeError(
                f"RolloutManager: group is a worker group of RolloutWorker (it has `generate`), got {group!r}"
            )
        if reward_function is not None and not callable(reward_function):
            raise TypeError(f"RolloutManager: reward_function is a function or None, got {reward_function!r}")
        if sampling is not None and not isinstance(sampling, Sampling):
            raise TypeError(f"RolloutManager: sampling is a Sampling or None, got {sampling!r}")
        self.group = group
        self.sampling = sampling or Sampling()
        self.reward_function = reward_function
        self.samples_per_prompt = _positive(samples_per_prompt)
        self.seed = seed
        self.batched_rewards = batched_rewards
        self.pad_token_id = pad_token_id
        self.timeout = timeout
        self.weight_version: int | None = None
        self.refresh: Callable[[], Any] | None = None
        self._rewarding = threading.Lock()

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        rollout_id: int = 0,
        extras: Mapping[str, Sequence[Any]] | None = None,
        sampling: Sampling | None = None,
        samples_per_prompt: int | None = None,
    ) -> TensorDict:
        """Answers to prompts, with their rewards.

        Args:
            prompts: token ids of each; lists, or tensors of one dim. One token at least.
            rollout_id: number of the rollout; another one draws other answers.
            extras: name -> one value for each prompt, for the reward function: ``{"label": labels}``.
            sampling: how to sample this time.
            samples_per_prompt: answers to each prompt this time.

        Returns:
            A row for each answer, those to one prompt together and in order of the prompts, as `pack_answers` has it;
            ``group_ids`` are the prompts' numbers.

        Raises:
            PromptError: a prompt is empty, or the engine cannot answer it.
            ValueError: an entry of ``extras`` does not have one value for each prompt.
            WeightVersionError: workers have other weights than the last sync brought, or are amid an update; and there
                is no `refresh`, or they still have after it.
            RewardError: the reward function raised, or returned what is no reward.
            SingleControllerError: what else a call of the group raises: `WorkerError`, `WorkerDiedError`, ...
        """
        try:
            return self._finish(self._send(prompts, rollout_id, extras, sampling, samples_per_prompt))
        except WeightVersionError as error:
            if self.refresh is None:
                raise
            logger.warning("%s; trying that now", error)
        self.refresh()
        return self._finish(self._send(prompts, rollout_id, extras, sampling, samples_per_prompt))

    def generate_async(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        rollout_id: int = 0,
        extras: Mapping[str, Sequence[Any]] | None = None,
        sampling: Sampling | None = None,
        samples_per_prompt: int | None = None,
    ) -> Future[TensorDict]:
        """`generate` without waiting. The workers have been sent the call when this returns; rewards are computed in a
        thread of this process, one rollout after the other. Workers that have other weights than now are an error
        here, `refresh` or not: also where an update, which comes from other processes, has overtaken the call on its
        way. Send that when the answers are there.

        Returns:
            A future of `concurrent.futures`: ``.result()``; ``await asyncio.wrap_future(...)``.
        """
        under_way = self._send(prompts, rollout_id, extras, sampling, samples_per_prompt)
        outcome: Future[TensorDict] = Future()
        outcome.set_running_or_notify_cancel()

        def finish() -> None:
            try:
                outcome.set_result(self._finish(under_way))
            except BaseException as error:
                outcome.set_exception(error)

        threading.Thread(target=finish, name="rollout", daemon=True).start()
        return outcome

    def weight_receivers(self) -> Any:
        """The workers' group; for a manager that is a Ray actor."""
        return self.group

    def set_weight_version(self, version: int | None) -> None:
        """Set `weight_version`; for a manager that is a Ray actor."""
        self.weight_version = version

    def offload(self) -> None:
        """Free the memory of the workers' devices."""
        self.group.sleep()

    def onload(self) -> None:
        """Take it back."""
        self.group.wake_up()

    def __getstate__(self) -> dict[str, Any]:
        import ray.cloudpickle as cloudpickle

        function: bytes | str | None
        try:
            function = None if self.reward_function is None else cloudpickle.dumps(self.reward_function)
        except Exception as error:
            function = f"{self.reward_function!r} did not come along, since it does not pickle: {error}"
        state = {name: value for name, value in vars(self).items() if name != "_rewarding"}
        return state | {"reward_function": function, "refresh": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        import ray.cloudpickle as cloudpickle

        vars(self).update(state)
        self._rewarding = threading.Lock()
        function = state["reward_function"]
        if isinstance(function, bytes):
            self.reward_function = cloudpickle.loads(function)
        elif function is not None:
            self.reward_function = _Lost(function)

    # --- the inside -------------------------------------------------------------------------------------

    def _send(
        self,
        prompts: Sequence[Sequence[int]],
        rollout_id: int,
        extras: Mapping[str, Sequence[Any]] | None,
        sampling: Sampling | None,
        samples_per_prompt: int | None,
    ) -> _UnderWay:
        if isinstance(self.reward_function, _Lost):
            self.reward_function()
        each = self.samples_per_prompt if samples_per_prompt is None else _positive(samples_per_prompt)
        given = {name: _values(name, values, len(prompts)) for name, values in (extras or {}).items()}
        ids = [_token_ids(number, prompt) for number, prompt in enumerate(prompts)]
        rows = [Sample(number, sample, ids[number], []) for number in range(len(ids)) for sample in range(each)]
        generate = self.group.generate
        if self.timeout is not None:
            generate = generate.options(timeout=self.timeout)
        answers = generate.remote(
            [row.prompt_ids for row in rows],
            Broadcast(sampling or self.sampling),
            [mixed_seed(self.seed, rollout_id, row.prompt, row.sample) for row in rows],
            self.weight_version,
        )
        return _UnderWay(rows, given, self.weight_version, answers)

    def _finish(self, under_way: _UnderWay) -> TensorDict:
        generated: list[Generated] = under_way.answers.result()
        _raise_refused(generated, under_way.rows)
        answers, versions = _checked(generated, under_way.expected_version)
        rows = [
            Sample(row.prompt, row.sample, row.prompt_ids, answer.token_ids)
            for row, answer in zip(under_way.rows, answers, strict=True)
        ]
        rewards = None
        if self.reward_function is not None:
            with self._rewarding:
                rewards = compute_rewards(self.reward_function, rows, under_way.extras, batched=self.batched_rewards)
        return pack_answers(
            [row.prompt_ids for row in rows],
            answers,
            group_ids=[row.prompt for row in rows],
            weight_versions=versions,
            rewards=rewards,
            pad_token_id=self.pad_token_id,
        )


class _Lost:
    """Stands for a reward function that did not pickle."""

    def __init__(self, why: str) -> None:
        self.why = why

    def __call__(self, *args: Any, **kwargs: Any) -> float:
        raise RolloutError(f"this manager was sent to another process, and its reward function {self.why}")


def _raise_refused(generated: Sequence[Generated], rows: Sequence[Sample]) -> None:
    """Raise what an engine had against a prompt, with the prompt's number in the call."""
    for begin, one in enumerate(generated):  # the first answer of its rank: an engine counts from there
        if one.refused is not None:
            number = one.refused.number
            raise PromptError(one.refused.what, None if number is None else rows[begin + number].prompt)


def _checked(generated: Sequence[Generated], expected: int | None) -> tuple[list[Answer], list[int]]:
    answers, versions = [], []
    wrong: dict[int, int | None] = {}
    for answer, version, rank, _ in generated:
        if answer is None or version is None or expected not in (None, version):
            wrong[rank] = version
        else:
            answers.append(answer)
            versions.append(version)
    if not wrong:
        return answers, versions
    found = ", ".join(
        f"rank {rank} has {'an update that did not end' if version is None else f'version {version}'}"
        for rank, version in sorted(wrong.items())
    )
    wanted = "complete weights" if expected is None else f"weights of version {expected}"
    raise WeightVersionError(
        f"rollout workers were to generate with {wanted}, but {found}: update their weights, then generate again",
        expected=expected,
        versions=wrong,
    )


def _token_ids(number: int, prompt: Any) -> list[int]:
    try:
        tokens = [operator.index(token) for token in (prompt.tolist() if hasattr(prompt, "tolist") else prompt)]
    except TypeError:
        raise PromptError(f"is a list of token ids, integers; got {str(prompt)[:80]}", number) from None
    if not tokens:
        raise PromptError("is empty; it has one token at least", number)
    return tokens


def _values(name: str, values: Any, prompts: int) -> Sequence[Any]:
    if isinstance(values, str) or not hasattr(values, "__getitem__") or len(values) != prompts:
        raise ValueError(f"extras[{name!r}] has one value for each of {prompts} prompts, got {str(values)[:80]}")
    given: Sequence[Any] = values
    return given


def _positive(samples: int) -> int:
    if not isinstance(samples, int) or samples < 1:
        raise ValueError(f"samples_per_prompt={samples!r} is not an integer from 1")
    return samples
