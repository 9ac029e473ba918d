"""The errors of rollouts. They pickle: the message is ``args[0]``, further details are attributes."""

from __future__ import annotations

from collections.abc import Mapping

from single_controller import SingleControllerError


class RolloutError(SingleControllerError):
    """An engine cannot generate (it sleeps, or its weights are not finite), or its completions are malformed."""


class PromptError(RolloutError, ValueError):
    """A prompt is empty, too long, or has tokens that are not in the model's vocabulary.

    Args:
        what: what is wrong with it.
        number: index of the prompt in the call; None if it is not known.

    Attributes:
        what, number: as above.
    """

    def __init__(self, what: str, number: int | None = None) -> None:
        super().__init__(what if number is None else f"prompt {number} {what}")
        self.what, self.number = what, number


class SamplingParamsError(RolloutError, ValueError):
    """With these SamplingParams, an engine cannot get the log-probabilities that a `Completion` needs."""


class WeightsError(RolloutError, ValueError):
    """A weight update has a tensor that the model does not have, or one of another shape."""


class WeightVersionError(RolloutError):
    """Workers do not have the weight version that the rollout needs. No completions were returned.

    Attributes:
        expected: the version of the last weight update; None if it is not known.
        versions: rank -> the worker's version; None for an update that has begun and not finished.
    """

    def __init__(
        self, message: str, *, expected: int | None = None, versions: Mapping[int, int | None] | None = None
    ) -> None:
        super().__init__(message)
        self.expected = expected
        self.versions = dict(versions or {})


class RewardError(RolloutError):
    """The reward function raised, returned something that is not a reward, exceeded its timeout, or lost its process.
    ``__cause__`` is what it raised.

    Attributes:
        row: row of the rollout data; None in a `RolloutStream`, and if the function was called with all rows at once.
        prompt: index of the prompt in the call; in a `RolloutStream`, the number of its group.
        sample: index of the completion among those for the same prompt.
    """

    def __init__(
        self, message: str, *, row: int | None = None, prompt: int | None = None, sample: int | None = None
    ) -> None:
        super().__init__(message)
        self.row = row
        self.prompt = prompt
        self.sample = sample
