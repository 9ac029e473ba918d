"""The errors of rollouts. They pickle: the message is ``args[0]``, what else an error knows stands in attributes."""

from __future__ import annotations

from collections.abc import Mapping

from single_controller import SingleControllerError


class RolloutError(SingleControllerError):
    """An engine cannot generate: it sleeps, or its model's numbers are broken; or its answers make no sense."""


class PromptError(RolloutError, ValueError):
    """A prompt cannot be generated from: it is empty, too long, or has tokens that the model does not know.

    Args:
        what: what is wrong with it.
        number: of the prompt among those that were given; None where that is not known.

    Attributes:
        what, number: see there.
    """

    def __init__(self, what: str, number: int | None = None) -> None:
        super().__init__(what if number is None else f"prompt {number} {what}")
        self.what, self.number = what, number


class WeightsError(RolloutError, ValueError):
    """An update of weights brings a tensor that the model does not have, or one of another shape."""


class WeightVersionError(RolloutError):
    """Workers do not have the weights that the rollout is to be generated with. Nothing was handed back.

    Attributes:
        expected: the version that the last sync of weights brought; None where none is known.
        versions: rank -> version that the worker has; None where an update began and has not ended.
    """

    def __init__(
        self, message: str, *, expected: int | None = None, versions: Mapping[int, int | None] | None = None
    ) -> None:
        super().__init__(message)
        self.expected = expected
        self.versions = dict(versions or {})


class RewardError(RolloutError):
    """The reward function raised, or returned what is no reward. ``__cause__`` is what it raised.

    Attributes:
        row: of the rollout data; None where the function was called with all rows at once.
        prompt: number of the prompt in the call.
        sample: number of the answer among those to the same prompt.
    """

    def __init__(
        self, message: str, *, row: int | None = None, prompt: int | None = None, sample: int | None = None
    ) -> None:
        super().__init__(message)
        self.row = row
        self.prompt = prompt
        self.sample = sample
