"""RolloutEngine: the interface to whatever generates. Implement it to put another engine behind a `RolloutWorker`."""

from __future__ import annotations

import operator
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Sampling:
    """How to sample.

    Attributes:
        max_new_tokens: tokens of an answer, at most.
        temperature: the logits are divided by it; 0 takes the likeliest token.
        top_p: only the likeliest tokens that together have this probability are drawn from; 1 for all.
        top_k: only this many of the likeliest tokens are drawn from; 0 for all.
        stop_token_ids: an answer ends with the first of them, which belongs to it.

    Raises:
        ValueError: a number that makes no sense.
    """

    max_new_tokens: int = 16
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    stop_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not _whole(self.max_new_tokens, 1):
            raise ValueError(f"sampling: max_new_tokens={self.max_new_tokens!r} is not an integer from 1")
        if not self.temperature >= 0:
            raise ValueError(f"sampling: temperature={self.temperature!r} is not a number from 0")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"sampling: top_p={self.top_p!r} is not above 0 and at most 1")
        if not _whole(self.top_k, 0):
            raise ValueError(f"sampling: top_k={self.top_k!r} is not an integer from 0")
        stops = tuple(self.stop_token_ids)
        if not all(_whole(token, 0) for token in stops):
            raise ValueError(f"sampling: stop_token_ids={stops!r} are not token ids, integers from 0")
        object.__setattr__(self, "stop_token_ids", stops)

    @classmethod
    def of(cls, args: Any) -> Sampling:
        """What a training run's configuration says of it; see `workers.train.args`.

        Raises:
            TrainArgsError: the configuration is not right.
        """
        from workers.train.hf_files import end_tokens
        from workers.train.read_args import read_args

        args = read_args(args)
        stops = args.rollout_stop_token_ids
        return cls(
            max_new_tokens=args.rollout_max_response_len,
            temperature=args.temperature,
            top_p=args.rollout_top_p,
            top_k=args.rollout_top_k,
            stop_token_ids=tuple(end_tokens(args) if stops is None else stops),
        )


def _whole(number: Any, least: int) -> bool:
    try:
        return not isinstance(number, bool) and operator.index(number) >= least
    except TypeError:
        return False


@dataclass(frozen=True)
class Answer:
    """What was generated for one prompt.

    Attributes:
        token_ids: the tokens, the stop token included.
        log_probs: of each, in nats, under the model at the sampling's temperature (at 1 where that is 0), before
            ``top_p`` and ``top_k`` cut the distribution: what a trainer computes for the same tokens.
        finish_reason: "stop" for a stop token, "length" for ``max_new_tokens``.
    """

    token_ids: list[int]
    log_probs: list[float]
    finish_reason: Literal["stop", "length"]


class RolloutEngine(ABC):
    """Generates answers to prompts, and takes new weights. One engine lives in each rollout worker's process.

    Attributes:
        keeps_weights: whether the weights after `wake_up` are those before `sleep`. If not, the worker has no version
            until the next update.
    """

    keeps_weights = False

    @abstractmethod
    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling, seeds: Sequence[int]) -> list[Answer]:
        """An answer to each prompt.

        Args:
            prompts: token ids of each prompt, one at least; of any lengths. There may be no prompt at all.
            sampling: how to sample.
            seeds: one for each prompt: the same prompt, seed and weights give the same answer, whatever else is in the
                batch.

        Raises:
            PromptError: the engine cannot answer a prompt; then it answers none.
        """

    @abstractmethod
    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Take some of the weights, in place. Several calls make up one update.

        Args:
            weights: (name as the Hugging Face model's ``state_dict()`` has it, whole tensor). The memory belongs to
                somebody else and must not be kept or written to.
        """

    @abstractmethod
    def weight_shapes(self) -> dict[str, tuple[int, ...]]:
        """Name and shape of every tensor that an update brings. Tied weights count once, under the first name."""

    def sleep(self) -> None:  # noqa: B027  (an engine need not)
        """Free the device's memory; weights and caches may be lost, an update follows `wake_up`."""

    def wake_up(self) -> None:  # noqa: B027
        """Take the device's memory back."""
