"""RolloutWorker: one rank of a group that generates. The engine behind it is the caller's choice."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from single_controller import Dispatch, register
from workers.device import take_device
from workers.rollout.engine import Answer, RolloutEngine, Sampling
from workers.rollout.errors import PromptError, RolloutError
from workers.rollout.weight_receiver import WeightReceiver


class Generated(NamedTuple):
    """What a worker gives back for one prompt.

    Attributes:
        answer: the engine's; None where the worker's weights are not those that were expected, or a prompt is refused.
        weight_version: of the weights that generated it; None where an update began and has not ended.
        rank: of the worker.
        refused: the engine's error about one of this worker's prompts, whose number counts them alone; or None.
    """

    answer: Answer | None
    weight_version: int | None
    rank: int
    refused: PromptError | None = None


class RolloutWorker(WeightReceiver):
    """Generates with an engine, and takes new weights for it.

    The weights that the engine begins with are version 0, those of updates are counted from 1.

    Args:
        engine: what makes the engine: a class under `RolloutEngine`, or a function; by default `HFEngine`. It is called
            in the worker's process, after the worker has taken its device.
        args: its positional arguments.
        kwargs: its keyword arguments.

    Raises:
        TypeError: what was made is no engine.
    """

    def __init__(self, engine: Callable[..., RolloutEngine] | None = None, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        take_device(self.local_rank, self.device_ids)
        if engine is None:
            from workers.rollout.hf_engine import HFEngine

            engine = HFEngine
        if not callable(engine):
            raise TypeError(
                f"RolloutWorker: engine is a class under RolloutEngine, or a function that makes one, got {engine!r}; "
                "give the class, and its arguments after it: RayClassWithInitArgs(RolloutWorker, HFEngine, config)"
            )
        self.engine = engine(*args, **kwargs)
        if not isinstance(self.engine, RolloutEngine):
            raise TypeError(f"RolloutWorker: {engine!r} made a {type(self.engine).__name__}, which is no RolloutEngine")
        self.weight_version = 0

    @register(Dispatch.DP_COMPUTE_PROTO, uneven="ragged")
    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling,
        seeds: Sequence[int],
        expected_version: int | None = None,
    ) -> list[Generated]:
        """An answer to each prompt, in order. From a driver: ``group.generate(prompts, Broadcast(Sampling()), seeds)``.

        A worker that lost an update, or whose engine refuses a prompt, must not end the call for all others while they
        generate: it answers with its version or the error, without tokens, and generates nothing. Whoever called
        decides.

        Args:
            prompts: token ids of each; cut over the ranks, whose shares differ by one at most.
            sampling: how to sample.
            seeds: one for each prompt.
            expected_version: of the weights; None for any that are complete.

        Raises:
            RolloutError: the engine did not give one right answer for each prompt; or whatever else it raises.
        """
        version = self.weight_version
        if version is None or expected_version not in (None, version):
            return [Generated(None, version, self.rank)] * len(prompts)
        try:
            answers = self.engine.generate(prompts, sampling, seeds)
        except PromptError as error:
            return [Generated(None, version, self.rank, error)] * len(prompts)
        self._check(answers, prompts)
        return [Generated(answer, version, self.rank) for answer in answers]

    def _check(self, answers: Any, prompts: Sequence[Sequence[int]]) -> None:
        engine = type(self.engine).__name__
        if not isinstance(answers, (list, tuple)) or len(answers) != len(prompts):
            got = f"{len(answers)} answers" if isinstance(answers, (list, tuple)) else repr(answers)[:80]
            raise RolloutError(f"{engine} gave {got} to {len(prompts)} prompts; generate() returns a list of one each")
        for number, answer in enumerate(answers):
            if not isinstance(answer, Answer):
                raise RolloutError(f"{engine} gave {answer!r:.80} to prompt {number}; generate() returns Answers")
            if len(answer.token_ids) != len(answer.log_probs):
                raise RolloutError(
                    f"{engine} gave {len(answer.token_ids)} tokens and {len(answer.log_probs)} log_probs to prompt "
                    f"{number}; each token has one"
                )
            if answer.finish_reason not in ("stop", "length"):
                raise RolloutError(
                    f"{engine} gave finish_reason={answer.finish_reason!r} to prompt {number}: it is 'stop' or 'length'"
                )

    @register(Dispatch.ONE_TO_ALL)
    def sleep(self) -> None:
        """Free the device's memory, for a trainer on the same device."""
        if not self.engine.keeps_weights:
            self.weight_version = None
        self.engine.sleep()

    @register(Dispatch.ONE_TO_ALL)
    def wake_up(self) -> None:
        """Take the device's memory back."""
        self.engine.wake_up()

    @register(Dispatch.ONE_TO_ALL)
    def offload(self) -> None:
        """`sleep` under the name that train groups have for it."""
        self.sleep()

    @register(Dispatch.ONE_TO_ALL)
    def onload(self) -> None:
        """`wake_up` under the name that train groups have for it."""
        self.wake_up()
